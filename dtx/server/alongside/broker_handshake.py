"""The opening of a connection: the broker decides who comes in, dtx looks on and sets the limits."""

from dtx.server.limits import SessionLimits
from dtx.store.rabbitmq.service import Broker
from dtx.wire.amqp09 import handshake, methods
from dtx.wire.amqp09.codec import Method
from dtx.wire.amqp09.connection import ConnectionEngine
from dtx.wire.amqp09.errors import HardCode, WireError
from dtx.wire.amqp09.events import EngineEvent, LoginReceived, SecureReceived, TuneAgreed, VhostRequested

MAX_FRAME = 16 * 1024 * 1024
"""Octets: the frame-max agreed with a broker that sets no limit, since a frame is put together in memory."""


def _servable(upstream: int) -> int:
    """How many channels a client can have of a connection to the broker with *upstream* channels.

    A selected channel needs two there, and the first one of a connection two more.
    """
    return max(1, (upstream - 2) // 2)


class BrokerHandshake:
    """What was learnt in the handshake.

    Args:
        engine: of the client's connection.
        broker: its heartbeat is the one that dtx agrees upstream, whatever the client wants.
        limits: the most that clients are offered; a frame_max of 0 is what the broker offers.
    """

    def __init__(self, engine: ConnectionEngine, broker: Broker, limits: SessionLimits) -> None:
        self._engine = engine
        self._broker = broker
        self._limits = limits
        self._mechanisms: list[bytes] = []
        """Offered to the client."""
        self._channel_max = 0xFFFF
        """What the broker offers, and is told: dtx needs channels there as well as the client."""
        self.user: str | None = None
        """The login's name; ``None`` when it does not tell one."""
        self.vhost = ""

    def from_broker(self, key: int, payload: bytes) -> None:
        """Pass on what the broker says.

        Raises:
            WireError: it is malformed.
        """
        match key:
            case methods.ConnectionStart.KEY:
                start = handshake.advertise(payload)
                self._mechanisms = start.mechanisms.split()
                self._engine.greet(start)
            case methods.ConnectionSecure.KEY:
                self._engine.secure(methods.ConnectionSecure.decode(payload).challenge)
            case _:
                tune = methods.ConnectionTune.decode(payload)
                self._channel_max = tune.channel_max or 0xFFFF
                channel_max = min(_servable(self._channel_max), self._limits.max_channels)
                frame_max = min(tune.frame_max or MAX_FRAME, self._limits.frame_max or MAX_FRAME)
                self._engine.tune(methods.ConnectionTune(channel_max, frame_max, tune.heartbeat))

    def from_client(self, event: EngineEvent) -> Method:
        """What the client says, as the broker gets it.

        Raises:
            WireError: the virtual host is no UTF-8.
            NotOffered: it names a mechanism that was not offered.
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
                    raise WireError(HardCode.INVALID_PATH, "vhost is no UTF-8") from None
                return methods.ConnectionOpen(vhost)
            case _:
                raise AssertionError(f"{event} is told at another place, or to clients")
