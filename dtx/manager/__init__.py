"""The TransactionManager: runs the effects of the XA core against the log and the message store."""

from dtx.manager.manager import Limits, TransactionManager

__all__ = ["Limits", "TransactionManager"]
