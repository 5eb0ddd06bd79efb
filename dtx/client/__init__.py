"""XA for programs that use pika: importing this package teaches pika the dtx classes.

- :class:`XAResource` and :class:`Coordinator`: for BlockingConnection.
- :class:`AsyncXAResource` and :class:`AsyncCoordinator`: for AsyncioConnection.
- :func:`submit` with :mod:`dtx.client.calls`: for every other callback channel of pika.
- :mod:`dtx.client.tpc`: the two-phase methods of PEP 249, as psycopg has them.
"""

from dtx.client.calls import require_dtx, submit
from dtx.client.coordination import AsyncCoordinator, AsyncXAResource, Coordinator, XAResource
from dtx.client.errors import (
    XA_HEURCOM,
    XA_HEURHAZ,
    XA_HEURMIX,
    XA_HEURRB,
    XA_RBROLLBACK,
    XA_RBTIMEOUT,
    XAER_DUPID,
    XAER_INVAL,
    XAER_NOTA,
    XAER_OUTSIDE,
    XAER_PROTO,
    XAER_RMERR,
    XAER_RMFAIL,
    PeerIsNotDtx,
    XAError,
    XAException,
    XAHeuristic,
    XARollback,
)
from dtx.xa.codes import XaFlag
from dtx.xa.xid import Xid

__all__ = [
    "XAER_DUPID",
    "XAER_INVAL",
    "XAER_NOTA",
    "XAER_OUTSIDE",
    "XAER_PROTO",
    "XAER_RMERR",
    "XAER_RMFAIL",
    "XA_HEURCOM",
    "XA_HEURHAZ",
    "XA_HEURMIX",
    "XA_HEURRB",
    "XA_RBROLLBACK",
    "XA_RBTIMEOUT",
    "AsyncCoordinator",
    "AsyncXAResource",
    "Coordinator",
    "PeerIsNotDtx",
    "XAError",
    "XAException",
    "XAHeuristic",
    "XAResource",
    "XARollback",
    "XaFlag",
    "Xid",
    "require_dtx",
    "submit",
]
