"""Base classes of client connections: flow control and timers; for protocols that dtx itself serves, also the end.

This module pauses and resumes reading from the socket. It makes sure that a connection ends once and leaves no timer.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import count
from typing import Final

from dtx.config.rules import QuotaResource
from dtx.manager import BranchManager, Requester
from dtx.manager.limits import Holdings
from dtx.server.client_session import ClientTransport
from dtx.server.limits import MAX_UNSENT
from dtx.store.slices import Slices
from dtx.telemetry import get_logger
from dtx.wire.amqp09.methods import ConnectionStartOk, ConnectionTuneOk
from dtx.xa.codes import ReplyCode, XaError

_log = get_logger(part="connection")
connection_numbers: Final = count(1)
"""Numbers of connections of all protocols; operators use them."""


class Outbox:
    """Frames for the client, in order; all frames of one turn of the event loop are one write to the socket.

    Args:
        transport: the client's socket.
        relieved: called when there is room again after :attr:`has_room` was false.

    Attributes:
        source: returns the announced frames: frames from :meth:`send`, or frames of an engine.
    """

    __slots__ = (
        "_frames",
        "_loop",
        "_octets",
        "_relieved",
        "_room_refused",
        "_transport",
        "is_announced",
        "is_slow",
        "source",
    )

    def __init__(self, transport: ClientTransport, relieved: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: ClientTransport | None = transport
        self._relieved = relieved
        self._frames: list[bytes | memoryview] = []
        self._octets = 0
        self.is_announced = False
        """A flush at the end of this turn of the event loop is scheduled."""
        self._room_refused = False
        self.source: Callable[[], Sequence[bytes | memoryview]] = self._taken
        self.is_slow = False
        """The send buffer of the socket is full."""

    @property
    def has_room(self) -> bool:
        """Whether messages may be delivered: neither the socket nor this turn's write has too many bytes."""
        if self.is_slow:
            return False
        if self._octets < MAX_UNSENT:
            return True
        self._room_refused = True
        return False

    def send(self, data: bytes | memoryview) -> None:
        """Send whole frames at the end of this turn of the event loop."""
        self._frames.append(data)
        self.announce(len(data))

    def announce(self, octets: int = 0) -> None:
        """Schedule a flush of the source, which may have *octets* more bytes to send."""
        if not self.is_announced:
            self.is_announced = True
            self._loop.call_soon(self.flush)
        self._octets += octets

    def flush(self) -> None:
        """Write all frames of the source now."""
        self.is_announced = False
        frames = self.source()
        if frames and self._transport is not None:
            self._transport.write(frames[0] if len(frames) == 1 else b"".join(frames))
        self._octets = 0
        if self._room_refused:
            self._room_refused = False
            if not self.is_slow:
                self._relieved()

    def _taken(self) -> Sequence[bytes | memoryview]:
        frames, self._frames = self._frames, []
        return frames

    @property
    def unsent(self) -> int:
        """Bytes in the send buffer of the socket."""
        return 0 if self._transport is None else self._transport.unsent

    def close(self) -> None:
        """Close the socket after all data is sent. Idempotent."""
        self.flush()
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    def abort(self) -> None:
        """Close the socket at once. Idempotent."""
        self._frames.clear()
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()


class Stage(Enum):
    """The state of a connection."""

    OPENING = "opening"
    RUNNING = "running"
    LEAVING = "leaving"
    """The client sent close; dtx answers when everything that the client sent before is durable."""
    CLOSING = "closing"
    """dtx sent close."""
    ENDED = "ended"


class BaseClient(ABC):
    """Base of all client connections: identity, timer, and flow control of the socket.

    Args:
        manager: the transaction manager.
        transport: the client's socket.
    """

    def __init__(self, manager: BranchManager, transport: ClientTransport) -> None:
        self.id = next(connection_numbers)
        self.manager = manager
        self.who = Requester("", "")
        self.budget = manager.budget
        """Memory budget for the client's messages; after the login, the budget of its user and virtual host."""
        self.start_ok: ConnectionStartOk | None = None
        """The client's properties and mechanism in AMQP 0-9, without its password."""
        self.agreed: ConnectionTuneOk | None = None
        """The limits that are agreed on in AMQP 0-9."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when all resources of the connection are released."""
        self._transport: ClientTransport | None = transport
        self._holding: set[object] = set()
        self._admitted: Holdings | None = None
        self._timer: asyncio.TimerHandle | None = None

    def _admit(self, who: Requester) -> None:
        """Count the connection for the quotas of *who*.

        Raises:
            XaError: 530, the user or virtual host has too many connections.
        """
        holdings = self.manager.quotas.of(who.user, who.vhost)
        reason = holdings.excess(QuotaResource.CONNECTIONS)
        if reason is not None:
            raise XaError(ReplyCode.NOT_ALLOWED, f"connection refused: {reason}")
        holdings.add(QuotaResource.CONNECTIONS)
        self._admitted = holdings
        self.budget = holdings.budget

    def _discount_connection(self) -> None:
        """Remove the connection from the quotas. Idempotent."""
        holdings, self._admitted = self._admitted, None
        if holdings is not None:
            holdings.remove(QuotaResource.CONNECTIONS)

    def _over(self) -> None:
        self._discount_connection()
        if not self.ended.done():
            self.ended.set_result(None)

    # -- timer

    def _set_timer(self, seconds: float, act: Callable[[], None]) -> None:
        """Call *act* after *seconds*; replaces the timer that was set before."""
        self._cancel_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, act)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _too_slow(self) -> None:
        _log.info("handshake took too long", connection=self.id)
        self.abort()

    # -- flow control

    def hold_client(self, reason: object) -> None:
        """Stop reading from the client until *reason* is released; several reasons may hold it."""
        if not self._holding and self._transport is not None:
            self._reset_heartbeat()
            self._transport.pause_reading()
        self._holding.add(reason)

    def release_client(self, reason: object) -> None:
        """Drop *reason*; reading resumes when no reason is left."""
        if reason in self._holding:
            self._holding.discard(reason)
            if not self._holding and self._transport is not None:
                self._reset_heartbeat()
                self._transport.resume_reading()

    def _reset_heartbeat(self) -> None:  # noqa: B027 - not every protocol has heartbeats
        """Restart the heartbeat timeout: while dtx does not read, missing heartbeats say nothing about the client."""

    @abstractmethod
    def abort(self) -> None:
        """End the client's connection at once."""


class ClientConnection(BaseClient):
    """One client connection whose protocol dtx itself serves.

    Args:
        manager: the transaction manager.
        transport: the client's socket.
    """

    def __init__(self, manager: BranchManager, transport: ClientTransport) -> None:
        super().__init__(manager, transport)
        self.stage = Stage.OPENING
        self.outbox = Outbox(transport, self._resume)
        self.slices = Slices(self._work_failed)
        """Requests of the client that take long."""
        self._login: asyncio.Task[None] | None = None

    def after_work(self, act: Callable[[], object]) -> None:
        """Call *act* after all running work, and after the work that it appends: ending parts append their clean-up."""
        self.slices.then(lambda: self.slices.then(act))

    # -- flow control

    def _hold_if_it_reads_nothing(self) -> None:
        """Stop reading from a client that does not read its answers."""
        if self.outbox.is_slow and self.outbox.unsent > MAX_UNSENT:
            self.hold_client(self)

    def client_is_slow(self) -> None:
        """See :class:`ClientSession`: the client gets no messages until its send buffer has room."""
        self.outbox.is_slow = True

    def client_has_caught_up(self) -> None:
        """See :class:`ClientSession`."""
        self.outbox.is_slow = False
        self.release_client(self)
        self._resume()

    @abstractmethod
    def _resume(self) -> None:
        """Deliver messages again: the outbox has room."""

    # -- the end

    @abstractmethod
    def _work_failed(self, error: Exception) -> None:
        """End the connection after an unexpected exception in long work."""

    def _end(self) -> None:
        """Close the socket after all data is sent."""
        self.outbox.close()
        self.client_disconnected()

    def abort(self) -> None:
        """End the client's connection at once."""
        self.outbox.abort()
        self.client_disconnected()

    def client_disconnected(self) -> None:
        """See :class:`ClientSession`. Idempotent."""
        if self.stage is Stage.ENDED:
            return
        self._transport = None
        try:
            self._leave(Stage.ENDED)
        finally:
            if self._login is not None:
                self._login.cancel()  # a password check without a client would delay other logins
            self._cancel_timer()
            self.outbox.abort()
            self._release_all()

    @abstractmethod
    def _leave(self, stage: Stage) -> None:
        """Stop serving the client and enter *stage*; work that the client sent before goes on."""

    def _release_all(self) -> None:
        """Release all resources, then call :meth:`_over`."""
        self._over()
