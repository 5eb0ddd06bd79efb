"""The client's side of a proxied connection: socket, heartbeats, and frames for the client.

Frames of dtx must not come between the frames of a message: "The content body frames of one channel are not intermixed
with its methods" (AMQP 0-9-1, 2.3.5.2). Strict clients end their connection in that case. A broker writes each message
in one piece. So dtx only needs to know whether the last passed frame was inside a message.
"""

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from typing import Final

from dtx.manager import BranchManager
from dtx.server.alongside.plain_deliveries import ConsumingChannels
from dtx.server.alongside.unsettled_deliveries import UnsettledDeliveries
from dtx.server.client_session import ClientTransport
from dtx.server.connection import BaseClient
from dtx.server.limits import MAX_UNSENT, SessionLimits
from dtx.store.rabbitmq.store import RabbitStore
from dtx.store.rabbitmq.upstream import Upstream
from dtx.telemetry import Metrics, get_logger
from dtx.wire.amqp09 import content, methods
from dtx.wire.amqp09.connection import ConnectionEngine
from dtx.wire.amqp09.frames import BODY, HEADER, OPENING_FRAME, OVERHEAD, Frame, Protocol
from dtx.wire.amqp09.settings import EngineSettings, PeerEnd

_log = get_logger(part="session")
_CONNECTION: Final = b"\x00\x00"
_LATE: Final = "frames wait for the end of a message"
"""A reason to stop reading from the client."""


class ProxiedClient(BaseClient):
    """State that all parts of one proxied connection share, and the client's socket.

    Args:
        manager, store, metrics: of the service.
        limits: of one connection.
        transport: the client's socket.
        header: the client's protocol header.
    """

    upstream: Upstream
    """The client's connection to the broker."""

    def __init__(
        self,
        manager: BranchManager,
        store: RabbitStore,
        metrics: Metrics,
        limits: SessionLimits,
        transport: ClientTransport,
        header: bytes,
    ) -> None:
        super().__init__(manager, transport)
        opening_frame = min(limits.frame_max or OPENING_FRAME, OPENING_FRAME)
        self.engine = ConnectionEngine(EngineSettings(opening_frame=opening_frame), PeerEnd.SERVER)
        for _ in self.engine.receive(header):
            raise AssertionError("a protocol header makes no event")
        self.store = store
        self.metrics = metrics
        self.limits = limits
        self.user: str | None = None
        """User name of the login; ``None`` if the login has none."""
        self.unsettled = UnsettledDeliveries()
        self.consuming = ConsumingChannels(store.copies, manager.spawn, self.hold_client, self.recorded)
        self.passing = False
        """dtx is passing frames of the broker on: what is sent now comes between whole messages."""
        self._beat: asyncio.TimerHandle | None = None
        self._missing = 0
        """Bytes that are missing of the last passed message; 1 while its header is missing."""
        self._late: list[bytes | memoryview] = []
        """Frames that wait for the end of that message."""
        self._late_octets = 0

    @property
    def speaks_0_9(self) -> bool:
        """Whether the client's header is AMQP 0-9, whose preview has the class execution, and not 0-9-1."""
        return self.engine.protocol is Protocol.AMQP_0_9

    @property
    def frame_max(self) -> int:
        """The agreed frame-max of the client's connection, bytes."""
        return self.engine.agreed.frame_max

    # -- to the client

    def to_client(self, data: bytes | memoryview) -> None:
        """Send whole frames of one channel, at once or after the unfinished message."""
        self.engine.send_raw(data)
        self.flush()

    def forward_to_client(self, frame: bytes) -> None:
        """Send a frame of the broker, also one that was held: later frames of its channel must not overtake it."""
        passing, self.passing = self.passing, True
        try:
            self.to_client(frame)
        finally:
            self.passing = passing

    def flush(self) -> None:
        """Send the frames of the engine."""
        for data in self.engine.data_to_send():
            if self._missing and not self.passing and data[1:3] != _CONNECTION:
                self._late.append(data)
                self._late_octets += len(data)
                if self._late_octets > MAX_UNSENT:
                    self.hold_client(_LATE)
            elif self._transport is not None:
                self._transport.write(data)

    def pass_to_client(self, buffer: bytes, start: int, end: int) -> None:
        """Send a slice of the broker's frames."""
        if self._transport is not None:
            self.metrics.traffic.to_client += end - start
            self.to_client(memoryview(buffer)[start:end])  # a view even of the whole: it may be a scratch buffer

    def passed(self, buffer: bytes, frames: Sequence[Frame]) -> None:
        """Note whether *frames* of the broker, which were passed on, end inside a message."""
        octets = 0
        for key, channel, start, end in reversed(frames):
            if not channel:
                continue  # a heartbeat, for example
            if key == BODY:
                octets += end - start - OVERHEAD
                continue
            if key == HEADER:
                self._missing = content.header(buffer[start + 7 : end - 1]).body_size - octets
            else:
                self._missing = int(key in methods.CONTENT)
            break
        else:
            self._missing = max(0, self._missing - octets)
        if not self._missing:
            self.send_late()

    def send_late(self) -> None:
        """Send the waiting frames: the message is complete, or the rest of it will not come."""
        late, self._late = self._late, []
        self._missing = self._late_octets = 0
        self.release_client(_LATE)
        if self._transport is not None:
            for data in late:
                self._transport.write(data)

    @abstractmethod
    def recorded(self, deliveries: object) -> None:
        """Continue: all settlements of a channel that the log must have are recorded and sent."""

    @property
    def client_is_behind(self) -> bool:
        """Whether bytes wait in the send buffer of the client's socket."""
        return self._transport is not None and self._transport.unsent > 0

    def _reset_heartbeat(self) -> None:
        self.engine.note_received()

    def _tick(self) -> None:
        """Send and check heartbeats."""
        loop = asyncio.get_running_loop()
        if self._holding:
            self.engine.note_received()
        at, silent = self.engine.tick(loop.time())
        self.flush()
        if silent:
            _log.info("client missed its heartbeats", connection=self.id)
            self.abort()
        elif at is not None:
            self._beat = loop.call_at(at, self._tick)

    # -- the end

    def abort(self) -> None:
        """See :class:`BaseClient`."""
        client, self._transport = self._transport, None
        if client is not None:
            client.abort()
            self.client_disconnected()

    def _end_client(self) -> None:
        client, self._transport = self._transport, None
        if client is not None:
            client.close()
            self.client_disconnected()

    @abstractmethod
    def client_disconnected(self) -> None:
        """See :class:`ClientSession`."""
