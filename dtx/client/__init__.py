"""XA for programs that use pika. The import of this package registers the dtx classes with pika.

- :class:`XAResource` and :class:`Coordinator`: for BlockingConnection.
- :class:`AsyncXAResource` and :class:`AsyncCoordinator`: for AsyncioConnection.
- :func:`submit` with :mod:`dtx.client.calls`: for every other callback channel of pika.
- :mod:`dtx.client.tpc`: the two-phase methods of PEP 249, as in psycopg.
"""

from dtx.client import errors
from dtx.client.calls import require_dtx, submit
from dtx.client.coordination import AsyncCoordinator, AsyncXAResource, Coordinator, XAResource
from dtx.client.errors import *  # noqa: F403 - all that an XA call raises
from dtx.xa.codes import XaFlag
from dtx.xa.xid import Xid

__all__ = ["AsyncCoordinator", "AsyncXAResource", "Coordinator", "XAResource", "XaFlag", "Xid", "require_dtx", "submit"]
__all__ += errors.__all__
