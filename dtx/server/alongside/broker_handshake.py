"""The handshake of a client: the broker checks the login, dtx reads the handshake and sets its limits."""

from typing import Final
from uuid import UUID

from dtx.server.limits import SessionLimits
from dtx.store.rabbitmq.service import Broker
from dtx.wire.amqp09 import handshake, methods
from dtx.wire.amqp09.codec import Method
from dtx.wire.amqp09.connection import ConnectionEngine
from dtx.wire.amqp09.errors import HardCode, WireError
from dtx.wire.amqp09.events import EngineEvent, LoginReceived, SecureReceived, TuneAgreed, VhostRequested

MAX_FRAME = 16 * 1024 * 1024
"""Bytes: the frame-max if broker or settings have none, because a frame is assembled in memory."""


def _servable(upstream: int) -> int:
    """The number of channels for a client whose connection to the broker has *upstream* channels.

    A selected channel needs two channels there, and the first select of a connection needs two more.
    """
    return max(1, (upstream - 2) // 2)


_LEAST_FRAME: Final = 8192
"""RabbitMQ refuses a frame-max below it since 4.1."""


class BrokerHandshake:
    """Translates the handshake between client and broker, and keeps its facts.

    Args:
        engine: of the client's connection.
        broker: its heartbeat is used upstream, whatever the client wants.
        limits: offered to the client; a frame_max of 0 offers the broker's value.
        member: the id of this dtx, if there may be other members.
    """

    def __init__(
        self, engine: ConnectionEngine, broker: Broker, limits: SessionLimits, member: UUID | None = None
    ) -> None:
        self._engine = engine
        self._member = b"" if member is None else str(member).encode()
        self._broker = broker
        self._limits = limits
        self._mechanisms: list[bytes] = []
        """SASL mechanisms that were offered to the client."""
        self._channel_max = 0xFFFF
        """The broker's offer. dtx accepts all of it, because dtx itself needs channels, too."""
        self._least_frame = 0
        self.user: str | None = None
        """User name of the login; ``None`` if the login has none."""
        self.vhost = ""

    @property
    def begun(self) -> bool:
        """Whether the broker has sent connection.start."""
        return bool(self._mechanisms)

    def from_broker(self, key: int, payload: bytes) -> None:
        """Pass a handshake method of the broker on to the client.

        Raises:
            WireError: the method is malformed.
        """
        match key:
            case methods.ConnectionStart.KEY:
                start = handshake.advertise(payload, self._member)
                if handshake.version(start) >= (4, 1):
                    self._least_frame = _LEAST_FRAME
                self._mechanisms = start.mechanisms.split()
                self._engine.greet(start)
            case methods.ConnectionSecure.KEY:
                self._engine.secure(methods.ConnectionSecure.decode(payload).challenge)
            case _:
                tune = methods.ConnectionTune.decode(payload)
                self._channel_max = tune.channel_max or 0xFFFF
                channel_max = min(_servable(self._channel_max), self._limits.max_channels)
                frame_max = min(
                    tune.frame_max or MAX_FRAME, max(self._limits.frame_max or MAX_FRAME, self._least_frame)
                )
                self._engine.tune(methods.ConnectionTune(channel_max, frame_max, tune.heartbeat))

    def from_client(self, event: EngineEvent) -> Method:
        """The method for the broker that corresponds to the client's *event*.

        Raises:
            WireError: 402, the virtual host is not UTF-8.
            NotOffered: the client uses a mechanism that was not offered.
        """
        match event:
            case LoginReceived(login):
                if login.mechanism not in self._mechanisms:
                    raise handshake.NotOffered(login.mechanism)
                self.user = handshake.user_name(login.mechanism, login.response)
                return login
            case SecureReceived(response):
                return methods.ConnectionSecureOk(response)
            case TuneAgreed(agreed):
                return methods.ConnectionTuneOk(self._channel_max, agreed.frame_max, self._broker.heartbeat)
            case VhostRequested(vhost):
                try:
                    self.vhost = vhost.decode()
                except UnicodeDecodeError:
                    raise WireError(HardCode.INVALID_PATH, "vhost is not UTF-8") from None
                return methods.ConnectionOpen(vhost)
            case _:
                raise AssertionError(f"{event} is no event of the handshake")
