"""The branch manager: runs the effects of the XA core against the log and the message store."""

from dtx.manager.branches import Requester
from dtx.manager.limits import Limits
from dtx.manager.manager import BranchManager

__all__ = ["BranchManager", "Limits", "Requester"]
