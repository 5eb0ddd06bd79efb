"""Resources: where sessions come from, and what the transaction manager asks of one. The one for dtx is here.

A session is one connection that one transaction at a time works with. A resource keeps those that are free, so that
a transaction need not connect; recovery gets its own in the same way. Whatever the kind, a session raises
:class:`~dtx.client.errors.XAException`, and means by each what X/Open means.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, Final, Generic, TypeVar

import pika
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.exceptions import AMQPError

from dtx.client.blocking import Coordinator, XAResource
from dtx.client.errors import XAER_RMFAIL, XAException, XARollback
from dtx.client.tm.names import check_resource_name
from dtx.xa.codes import XaFlag
from dtx.xa.xid import Xid

Handle = TypeVar("Handle")

IDLE_SESSIONS: Final = 16
"""Free sessions that a resource keeps; further ones are closed when their transaction ends."""
ANSWER_SECONDS: Final = 60.0
"""How long a call of dtx is waited for, unless the resource is told otherwise."""


class Session(ABC, Generic[Handle]):
    """One connection to a resource manager, used by one thread at a time."""

    one_phase_repeatable: ClassVar[bool] = False
    """Whether a one-phase commit whose answer was lost can be asked for again, on another session."""

    def __init__(self, *, own: bool) -> None:
        self.own = own
        """Whether the connection is the resource's: one of the application's serves nobody else, and stays open."""

    @property
    @abstractmethod
    def handle(self) -> Handle:
        """What the application works with."""

    @abstractmethod
    def start(self, xid: Xid) -> None:
        """Work that follows belongs to the branch."""

    @abstractmethod
    def end(self, xid: Xid) -> None:
        """Work that follows does not belong to the branch any more."""

    @abstractmethod
    def prepare(self, xid: Xid) -> XaFlag:
        """OK, or RDONLY: there is nothing to commit and the branch is gone."""

    @abstractmethod
    def commit(self, xid: Xid) -> None:
        """Second phase."""

    @abstractmethod
    def commit_one_phase(self, xid: Xid) -> None:
        """The only phase. XARollback: it is rolled back. Everything else: its outcome is not known."""

    @abstractmethod
    def rollback(self, xid: Xid) -> None:
        """Roll back, whether it is prepared or not, ended or not."""

    @abstractmethod
    def forget(self, xid: Xid) -> None:
        """Discard the record of a heuristic outcome."""

    @abstractmethod
    def recover(self) -> list[Xid]:
        """All branches that this resource has in doubt or heuristically completed, whoever's they are."""

    @abstractmethod
    def usable(self) -> bool:
        """Whether it is good for another transaction."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection; raises nothing."""


class Resource(ABC, Generic[Handle]):
    """Where sessions come from; any thread may use it.

    Args:
        name: 1 to 56 letters, digits, ``.``, ``-`` or ``_``. It is the bqual of the branches, and stands in the log.
    """

    def __init__(self, name: str) -> None:
        self.name = check_resource_name(name)
        self._lock = threading.Lock()
        self._free: list[Session[Handle]] = []

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @abstractmethod
    def open(self) -> Session[Handle]:
        """A new session.

        Raises:
            XAER_RMFAIL: the resource manager is out of reach.
        """

    @abstractmethod
    def around(self, handle: Handle) -> Session[Handle]:
        """A session on a connection or channel of the application's own, which stays open when it is done."""

    def acquire(self) -> Session[Handle]:
        """A free session that is usable, or a new one."""
        while True:
            with self._lock:
                session = self._free.pop() if self._free else None
            if session is None:
                return self.open()
            if session.usable():
                return session
            session.close()

    def started(self, xid: Xid) -> Session[Handle]:
        """A session that works for the branch *xid*.

        A free session may have been lost since it was last used. Nothing was done in it, so a new one will do as well.

        Raises:
            XAException: the resource manager refuses, or is out of reach.
        """
        session = self.acquire()
        try:
            session.start(xid)
        except XAER_RMFAIL:
            session.close()
        except BaseException:
            session.close()
            raise
        else:
            return session
        session = self.open()
        try:
            session.start(xid)
        except BaseException:
            session.close()
            raise
        return session

    def release(self, session: Session[Handle]) -> None:
        """The transaction is over."""
        if session.own and session.usable():
            with self._lock:
                if len(self._free) < IDLE_SESSIONS:
                    self._free.append(session)
                    return
        session.close()

    def close(self) -> None:
        """Close the free sessions."""
        with self._lock:
            free, self._free = self._free, []
        for session in free:
            session.close()


class DtxResource(Resource[BlockingChannel]):
    """A virtual host of a dtx, with pika's BlockingConnection. What applications work with is a channel.

    Args:
        name: see :class:`Resource`.
        connect: a URL, or what makes a connection; several addresses of a service and its standby go there.
        timeout: seconds to wait for each answer, ``None``: as long as the connection lives.
    """

    def __init__(
        self,
        name: str,
        connect: str | pika.connection.Parameters | Callable[[], BlockingConnection],
        *,
        timeout: float | None = ANSWER_SECONDS,
    ) -> None:
        super().__init__(name)
        self._connect = connect
        self._timeout = timeout

    def open(self) -> "DtxSession":
        """A new connection and a channel."""
        connect: Any = pika.URLParameters(self._connect) if isinstance(self._connect, str) else self._connect
        try:
            connection = connect() if callable(connect) else BlockingConnection(connect)
        except (AMQPError, OSError) as error:
            raise XAER_RMFAIL(f"{self.name} is out of reach: {error or type(error).__name__}") from error
        try:
            return DtxSession(connection.channel(), self._timeout, own=True)
        except BaseException as error:
            _close(connection)
            if isinstance(error, AMQPError):
                raise XAER_RMFAIL(f"{self.name}: {error or type(error).__name__}") from error
            raise

    def around(self, handle: BlockingChannel) -> "DtxSession":
        """A session on a channel of the application's."""
        return DtxSession(handle, self._timeout, own=False)


class DtxSession(Session[BlockingChannel]):
    """A channel for work, and one beside it for outcomes.

    Args:
        channel: open.
        timeout: seconds.
        own: whether the connection is to be closed with the session.
    """

    one_phase_repeatable = True

    def __init__(self, channel: BlockingChannel, timeout: float | None, *, own: bool) -> None:
        super().__init__(own=own)
        self._connection: BlockingConnection = channel.connection
        self._work = XAResource(channel, timeout=timeout)
        # Outcomes go by a channel of their own: a refused one must not cost the application its channel.
        self._outcomes = Coordinator(self._connection, timeout=timeout)
        self._ended = True

    @property
    def handle(self) -> BlockingChannel:
        """The channel."""
        return self._work.channel

    def start(self, xid: Xid) -> None:
        """Associate the channel."""
        self._work.start(xid)
        self._ended = False

    def end(self, xid: Xid) -> None:
        """Dissociate the channel. What was published is on its way before: the channel keeps the order."""
        self._ended = True
        self._work.end(xid)

    def prepare(self, xid: Xid) -> XaFlag:
        """First phase."""
        return self._outcomes.prepare(xid)

    def commit(self, xid: Xid) -> None:
        """Second phase."""
        self._outcomes.commit(xid)

    def commit_one_phase(self, xid: Xid) -> None:
        """The only phase."""
        self._outcomes.commit(xid, one_phase=True)

    def rollback(self, xid: Xid) -> None:
        """Roll back. A branch that was not ended is ended as failed; where that cannot be, its channel is gone."""
        if not self._ended:
            self._ended = True
            with suppress(XAException):
                self._work.end(xid, fail=True)
        with suppress(XARollback):
            self._outcomes.rollback(xid)

    def forget(self, xid: Xid) -> None:
        """Discard a heuristic outcome."""
        self._outcomes.forget(xid)

    def recover(self) -> list[Xid]:
        """One whole scan."""
        return list(self._outcomes.recover())

    def usable(self) -> bool:
        """Whether channel and connection are open; looks for what the server said meanwhile."""
        if not (self._ended and self.handle.is_open and self._connection.is_open):
            return False
        try:
            self._connection.process_data_events(0)
        except AMQPError:
            return False
        return bool(self.handle.is_open and self._connection.is_open)

    def close(self) -> None:
        """Close the connection, if it is the session's."""
        if self.own:
            _close(self._connection)
        else:
            self._outcomes.close()


def _close(connection: BlockingConnection) -> None:
    # AttributeError: pika's own, where the server's close comes in while pika closes the channels one by one
    with suppress(AMQPError, OSError, AttributeError):
        connection.close()
