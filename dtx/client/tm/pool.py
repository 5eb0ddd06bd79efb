"""Where sessions come from: a resource keeps those that are free, so that a transaction need not connect."""

import threading
from abc import ABC, abstractmethod
from functools import partial
from typing import Any, Final

from dtx.client.errors import XAER_RMFAIL
from dtx.client.tm.names import check_resource_name
from dtx.client.tm.steps import Work
from dtx.xa.xid import Xid

IDLE_SESSIONS: Final = 16
"""Free sessions that a resource keeps; further ones are closed when their transaction ends."""
ANSWER_SECONDS: Final = 60.0
"""How long a call of dtx is waited for, unless the resource is told otherwise."""


class Pool(ABC):
    """What resources with threads and with asyncio have in common.

    Args:
        name: 1 to 56 letters, digits, ``.``, ``-`` or ``_``. It is the bqual of the branches, and stands in the log.
    """

    def __init__(self, name: str) -> None:
        self.name = check_resource_name(name)
        self._lock = threading.Lock()
        self._free: list[Any] = []

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @abstractmethod
    def open(self) -> Any:
        """A new session."""

    @abstractmethod
    def around(self, handle: Any) -> Any:
        """A session on a connection or channel of the application's own, which stays open when it is done."""

    def acquiring(self) -> Work[Any]:
        """A free session that is usable, or a new one."""
        while True:
            with self._lock:
                free = self._free.pop() if self._free else None
            if free is None:
                return (yield self.open)
            if (yield free.usable):
                return free
            yield free.close

    def starting(self, xid: Xid) -> Work[Any]:
        """A session that works for the branch *xid*.

        A free session may have been lost since it was last used. Nothing was done in it, so a new one will do as well.

        Raises:
            XAException: the resource manager refuses, or is out of reach.
        """
        session = yield from self.acquiring()
        try:
            yield from _started(session, xid)
        except XAER_RMFAIL:
            session = yield self.open
            yield from _started(session, xid)
        return session

    def releasing(self, session: Any) -> Work[None]:
        """The transaction is over."""
        if session.own and (yield session.usable):
            with self._lock:
                kept = len(self._free) < IDLE_SESSIONS
                if kept:
                    self._free.append(session)
            if kept:
                return
        yield session.close

    def closing(self) -> Work[None]:
        """Close the free sessions."""
        with self._lock:
            free, self._free = self._free, []
        for session in free:
            yield session.close


def _started(session: Any, xid: Xid) -> Work[None]:
    """Start the branch; a session in which that fails is closed."""
    try:
        yield partial(session.start, xid)
    except BaseException:
        yield session.close
        raise
