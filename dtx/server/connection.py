"""What connections of clients have in common: pace and patience; where dtx itself speaks the protocol, also the end.

Each protocol says what it does at these turns; that the socket is read from as long as nobody holds it, and that the
end comes once and leaves no timer behind, stands here.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import count
from typing import Final

from dtx.config.rules import QuotaResource
from dtx.manager import TransactionManager, Who
from dtx.manager.limits import Holdings
from dtx.server.client_session import ClientTransport
from dtx.server.limits import MAX_UNSENT
from dtx.store.slices import Slices
from dtx.telemetry import get_logger
from dtx.xa.codes import ReplyCode, XaError

_log = get_logger(part="connection")
connection_numbers: Final = count(1)
"""Of connections, whatever they speak: operators name a connection by its number."""


class Outbox:
    """Frames on their way to the client, in order; those of one turn of the event loop are one write to its socket.

    Args:
        transport: its socket.
        relieved: called when there is room again after somebody was told that there is none.

    Attributes:
        source: gives the frames that were announced: those that were sent here, or an engine's.
    """

    __slots__ = (
        "_frames",
        "_loop",
        "_octets",
        "_relieved",
        "_transport",
        "_turned_away",
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
        """What waits is written at the end of this turn of the loop."""
        self._turned_away = False
        self.source: Callable[[], Sequence[bytes | memoryview]] = self._taken
        self.is_slow = False
        """The socket takes no more for now."""

    @property
    def has_room(self) -> bool:
        """Whether messages may be delivered: neither the socket nor what is joined in this turn has too much."""
        if self.is_slow:
            return False
        if self._octets < MAX_UNSENT:
            return True
        self._turned_away = True
        return False

    def send(self, data: bytes | memoryview) -> None:
        """Send whole frames, at the end of this turn of the loop."""
        self._frames.append(data)
        self.announce(len(data))

    def announce(self, octets: int = 0) -> None:
        """The source may have so much more to send: it is asked at the end of this turn of the loop."""
        if not self.is_announced:
            self.is_announced = True
            self._loop.call_soon(self.flush)
        self._octets += octets

    def flush(self) -> None:
        """Write what waits."""
        self.is_announced = False
        frames = self.source()
        if frames and self._transport is not None:
            self._transport.write(frames[0] if len(frames) == 1 else b"".join(frames))
        self._octets = 0
        if self._turned_away:
            self._turned_away = False
            if not self.is_slow:
                self._relieved()

    def _taken(self) -> Sequence[bytes | memoryview]:
        frames, self._frames = self._frames, []
        return frames

    @property
    def unsent(self) -> int:
        """Octets in the socket's buffer."""
        return 0 if self._transport is None else self._transport.unsent

    def close(self) -> None:
        """Close the socket when all is sent. Idempotent."""
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
    """Where a connection is in its life."""

    OPENING = "opening"
    RUNNING = "running"
    LEAVING = "leaving"
    """The client has said close; it hears the answer when all that it sent before is durable."""
    CLOSING = "closing"
    """dtx has said close."""
    ENDED = "ended"


class BaseClient(ABC):
    """What all connections of clients have in common: who is there, patience, and whether the socket is read from.

    Args:
        manager: of the branches.
        transport: the client's socket.
    """

    def __init__(self, manager: TransactionManager, transport: ClientTransport) -> None:
        self.id = next(connection_numbers)
        self.manager = manager
        self.who = Who("", "")
        self.budget = manager.budget
        """Memory that the client's messages take; that of its user and virtual host once they are known."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when nothing is left of it."""
        self._transport: ClientTransport | None = transport
        self._holding: set[object] = set()
        self._admitted: Holdings | None = None
        self._timer: asyncio.TimerHandle | None = None

    def _admit(self, who: Who) -> None:
        """The client is *who*.

        Raises:
            XaError: 530, its user or virtual host has too many connections.
        """
        holdings = self.manager.quotas.of(who.user, who.vhost)
        reason = holdings.excess(QuotaResource.CONNECTIONS)
        if reason is not None:
            raise XaError(ReplyCode.NOT_ALLOWED, f"connection refused: {reason}")
        holdings.add(QuotaResource.CONNECTIONS)
        self._admitted = holdings
        self.budget = holdings.budget

    def _discount_connection(self) -> None:
        """The client counts no longer. Idempotent."""
        holdings, self._admitted = self._admitted, None
        if holdings is not None:
            holdings.remove(QuotaResource.CONNECTIONS)

    def _over(self) -> None:
        self._discount_connection()
        if not self.ended.done():
            self.ended.set_result(None)

    # -- patience

    def _set_timer(self, seconds: float, act: Callable[[], None]) -> None:
        """Call *act* in so many *seconds*, and nothing else that was to be called."""
        self._cancel_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, act)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _too_slow(self) -> None:
        _log.info("handshake took too long", connection=self.id)
        self.abort()

    # -- pace

    def hold_client(self, reason: object) -> None:
        """Read no more from the client until *reason* is released."""
        if not self._holding and self._transport is not None:
            self._excuse()
            self._transport.pause_reading()
        self._holding.add(reason)

    def release_client(self, reason: object) -> None:
        """*reason* does not hold any more."""
        if reason in self._holding:
            self._holding.discard(reason)
            if not self._holding and self._transport is not None:
                self._excuse()
                self._transport.resume_reading()

    def _excuse(self) -> None:  # noqa: B027 - not every protocol listens for silence
        """The client is read from, or not any more: until now its silence says nothing."""

    @abstractmethod
    def abort(self) -> None:
        """End the client's connection at once."""


class ClientConnection(BaseClient):
    """One client to which dtx itself speaks the protocol, from its header to its end.

    Args:
        manager: of the branches.
        transport: the client's socket.
    """

    def __init__(self, manager: TransactionManager, transport: ClientTransport) -> None:
        super().__init__(manager, transport)
        self.stage = Stage.OPENING
        self.outbox = Outbox(transport, self._resume)
        self.slices = Slices(self._work_failed)
        """What takes long of what the client asks for."""
        self._login: asyncio.Task[None] | None = None

    def behind_all(self, act: Callable[[], object]) -> None:
        """Do *act* when all that ends has returned what it has: some begin that behind what runs already."""
        self.slices.then(lambda: self.slices.then(act))

    # -- pace

    def _hold_if_it_reads_nothing(self) -> None:
        """A client that takes no answers may ask for no more."""
        if self.outbox.is_slow and self.outbox.unsent > MAX_UNSENT:
            self.hold_client(self)

    def client_is_slow(self) -> None:
        """The client takes no more for now: it is sent no messages meanwhile."""
        self.outbox.is_slow = True

    def client_has_caught_up(self) -> None:
        """The client takes data again."""
        self.outbox.is_slow = False
        self.release_client(self)
        self._resume()

    @abstractmethod
    def _resume(self) -> None:
        """There is room for messages again."""

    # -- the end

    @abstractmethod
    def _work_failed(self, error: Exception) -> None:
        """A mistake of ours in long work for the client: the connection cannot go on."""

    def _end(self) -> None:
        """Close the socket when all is sent."""
        self.outbox.close()
        self.client_gone()

    def abort(self) -> None:
        """End the client's connection at once."""
        self.outbox.abort()
        self.client_gone()

    def client_gone(self) -> None:
        """The client's socket is closed. Idempotent."""
        if self.stage is Stage.ENDED:
            return
        self._transport = None
        try:
            self._leave(Stage.ENDED)
        finally:
            if self._login is not None:
                self._login.cancel()  # verifying passwords for nobody would keep others waiting
            self._cancel_timer()
            self.outbox.abort()
            self._gone()

    @abstractmethod
    def _leave(self, stage: Stage) -> None:
        """Nothing more is done for the client; what it sent so far is on its way."""

    def _gone(self) -> None:
        """Give back what is left, then say that nothing is (:meth:`_over`)."""
        self._over()
