"""A client in front of a broker, as its channels and its connection to the broker see it.

Contents stay whole: what dtx itself says to a client never comes between the frames of a message. "The content body
frames of one channel are not intermixed with its methods" (AMQP 0-9-1, 2.3.5.2): strict clients end their connection
over it. A broker writes each message in one piece, so it is enough to know whether what was passed on last ended within
one.
"""

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from typing import Final

from dtx.manager import TransactionManager
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
"""Why nothing is read from the client."""


class ProxiedClient(BaseClient):
    """What the parts of one connection share, and the client's socket.

    Args:
        manager, store, metrics: shared by all.
        limits: of one connection.
        transport: the client's socket.
        header: the protocol header that the client sent.
    """

    upstream: Upstream
    """The client's connection to the broker."""

    def __init__(
        self,
        manager: TransactionManager,
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
            raise AssertionError("a header means nothing else")
        self.store = store
        self.metrics = metrics
        self.limits = limits
        self.user: str | None = None
        """The login's name; ``None`` when it does not tell one."""
        self.unsettled = UnsettledDeliveries()
        self.passing = False
        """Frames of the broker are being passed on at the moment: what is sent now is between whole ones."""
        self._beat: asyncio.TimerHandle | None = None
        self._missing = 0
        """Octets of the message that was passed on last that are still to come; 1 while its header is."""
        self._late: list[bytes | memoryview] = []
        """What waits for the end of that message."""
        self._late_octets = 0

    @property
    def speaks_0_9(self) -> bool:
        """Whether the client has announced AMQP 0-9, whose preview has class execution, and not 0-9-1."""
        return self.engine.protocol is Protocol.AMQP_0_9

    @property
    def frame_max(self) -> int:
        """Agreed with the client, octets."""
        return self.engine.agreed.frame_max

    # -- to the client

    def to_client(self, data: bytes | memoryview) -> None:
        """Send whole frames of one channel, now or behind the message that is on its way."""
        self.engine.send_raw(data)
        self.flush()

    def flush(self) -> None:
        """Send what the engine has to send."""
        for data in self.engine.data_to_send():
            if self._missing and not self.passing and data[1:3] != _CONNECTION:
                self._late.append(data)
                self._late_octets += len(data)
                if self._late_octets > MAX_UNSENT:
                    self.hold_client(_LATE)
            elif self._transport is not None:
                self._transport.write(data)

    def pass_to_client(self, buffer: bytes, start: int, end: int) -> None:
        """Send a slice of what the broker sent."""
        if self._transport is not None:
            self.metrics.traffic.to_client += end - start
            self.to_client(memoryview(buffer)[start:end])  # a view also of the whole: it may be a scratch buffer

    def passed(self, buffer: bytes, frames: Sequence[Frame]) -> None:
        """These frames of the broker were passed on."""
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
        """Nothing more comes of the message that is on its way, or it is whole: send what waits."""
        late, self._late = self._late, []
        self._missing = self._late_octets = 0
        self.release_client(_LATE)
        if self._transport is not None:
            for data in late:
                self._transport.write(data)

    @property
    def client_is_behind(self) -> bool:
        """Whether something waits to be sent to the client."""
        return self._transport is not None and self._transport.unsent > 0

    def _excuse(self) -> None:
        self.engine.excuse()

    def _tick(self) -> None:
        """Heartbeats, both ways."""
        loop = asyncio.get_running_loop()
        if self._holding:
            self.engine.excuse()
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
            self.client_gone()

    def _end_client(self) -> None:
        client, self._transport = self._transport, None
        if client is not None:
            client.close()
            self.client_gone()

    @abstractmethod
    def client_gone(self) -> None:
        """The client's socket is closed."""
