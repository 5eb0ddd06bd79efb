"""The opening of a connection: the broker decides who comes in, dtx looks on and sets the limits."""

from dtx.store.rabbitmq.service import Broker
from dtx.wire.amqp09 import handshake, methods
from dtx.wire.amqp09.errors import HardCode, WireError
from dtx.wire.amqp09.frames import method_frame

MAX_FRAME = 16 * 1024 * 1024
"""Octets: the frame-max agreed with a broker that sets no limit, since a frame is put together in memory."""
_ANSWERS = {
    methods.ConnectionStart.KEY: methods.ConnectionStartOk.KEY,
    methods.ConnectionSecure.KEY: methods.ConnectionSecureOk.KEY,
    methods.ConnectionTune.KEY: methods.ConnectionTuneOk.KEY,
}
"""What a client says to what."""


def _servable(upstream: int) -> int:
    """How many channels a client can have of a connection to the broker with *upstream* channels.

    A selected channel needs two there, and the first one of a connection two more.
    """
    return max(1, (upstream - 2) // 2)


def _too_much(what: str, wanted: int, offered: int) -> WireError:
    return WireError(HardCode.NOT_ALLOWED, f"{what} {wanted} is not within the {offered} that was offered")


class Opening:
    """What was learnt and agreed in the handshake.

    Args:
        broker: its heartbeat is the one that dtx agrees upstream, whatever the client wants.
        max_channels, frame_max: the most that clients are offered; a frame_max of 0 is what the broker offers.
    """

    def __init__(self, broker: Broker, max_channels: int, frame_max: int) -> None:
        self._broker = broker
        self._max_channels = max_channels
        self._limit = frame_max or MAX_FRAME
        self._offered = methods.ConnectionTune(channel_max=0, frame_max=0, heartbeat=0)
        self._next: int | None = None
        """The client's next method; ``None`` while it is the broker's turn. Who a client is, is decided once: a second
        start-ok behind the first would give it another's name before the broker notices."""
        self._mechanisms: list[bytes] = []
        """Offered to the client."""
        self.user: str | None = None
        """The login's name; ``None`` when it does not tell one."""
        self.vhost = ""
        self.upstream = methods.ConnectionTuneOk(channel_max=0xFFFF, frame_max=0, heartbeat=0)
        """What was agreed with the broker."""
        self.client = methods.ConnectionTuneOk(channel_max=0, frame_max=0, heartbeat=0)
        """What was agreed with the client."""

    def from_broker(self, key: int, frame: bytes) -> bytes:
        """A frame of the broker on channel 0, as the client gets it.

        Raises:
            WireError: it is malformed.
        """
        self._next = _ANSWERS[key]
        if key == methods.ConnectionStart.KEY:
            payload = handshake.advertise(frame[7:-1])
            self._mechanisms = methods.ConnectionStart.decode(payload).mechanisms.split()
            return method_frame(0, payload)
        if key == methods.ConnectionTune.KEY:
            tune = methods.ConnectionTune.decode(frame[7:-1])
            self.upstream = methods.ConnectionTuneOk(
                channel_max=tune.channel_max or 0xFFFF, frame_max=0, heartbeat=self._broker.heartbeat
            )
            self._offered = methods.ConnectionTune(
                channel_max=min(_servable(tune.channel_max or 0xFFFF), self._max_channels),
                frame_max=min(tune.frame_max or MAX_FRAME, self._limit),
                heartbeat=tune.heartbeat,
            )
            return self._offered.frame(0)
        return frame

    def from_client(self, key: int, frame: bytes) -> bytes:
        """A frame of the client on channel 0, as the broker gets it.

        Raises:
            WireError: it is malformed, asks for more than was offered, or is not the next step of the handshake.
            NotOffered: it names a mechanism that was not offered.
        """
        if key != self._next:
            raise WireError(HardCode.COMMAND_INVALID, "method is not the next step of the handshake")
        self._next = None
        payload = frame[7:-1]
        match key:
            case methods.ConnectionStartOk.KEY:
                start_ok = methods.ConnectionStartOk.decode(payload)
                if start_ok.mechanism not in self._mechanisms:
                    raise handshake.NotOffered(start_ok.mechanism)
                self.user = handshake.user_name(start_ok.mechanism, start_ok.response)
                return frame
            case methods.ConnectionTuneOk.KEY:
                self._next = methods.ConnectionOpen.KEY
                return self._tune_ok(methods.ConnectionTuneOk.decode(payload))
            case methods.ConnectionOpen.KEY:
                try:
                    self.vhost = methods.ConnectionOpen.decode(payload).virtual_host.decode()
                except UnicodeDecodeError:
                    raise WireError(HardCode.INVALID_PATH, "vhost is no UTF-8") from None
                return frame
            case _:
                return frame

    def _tune_ok(self, wanted: methods.ConnectionTuneOk) -> bytes:
        offered = self._offered
        # "If the client specifies a channel max that is higher than the value provided by the server, the server MUST
        # close the connection"; 0 asks for no limit at all. The same for frame-max.
        if not 0 < wanted.channel_max <= offered.channel_max:
            raise _too_much("channel-max", wanted.channel_max, offered.channel_max)
        if not 0 < wanted.frame_max <= offered.frame_max:
            raise _too_much("frame-max", wanted.frame_max, offered.frame_max)
        self.client = wanted
        frame_max = wanted.frame_max
        # The broker is told its own channel-max: dtx needs channels of its own besides the client's.
        self.upstream = methods.ConnectionTuneOk(
            channel_max=self.upstream.channel_max, frame_max=frame_max, heartbeat=self.upstream.heartbeat
        )
        return self.upstream.frame(0)
