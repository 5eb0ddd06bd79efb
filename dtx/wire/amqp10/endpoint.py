"""What the connection, its sessions and its links share: frames, limits, settings, states, events, serial numbers.

A frame is size (four octets, itself included), data offset (in words of four octets), type, channel, extended header
and body (2.3). The splitter works on the buffer that the socket returned. It returns the position of each body in that
buffer, so that a payload is never copied. A frame that spans several reads is kept as pieces, which are joined once.

Connection, session and link are opened and closed by pairs of performatives: open and close, begin and end, attach and
detach. Each peer sends its own, in any order. A peer may send its close before the other peer has answered its open. An
endpoint that has sent its close ignores all but the peer's open and close (AMQP 1.0, 2.4.6, 2.5.5, 2.6.3 to 2.6.6).
"""

from dataclasses import dataclass, field
from enum import Enum, auto
from struct import Struct
from typing import Any, Final

from dtx.wire.amqp10.errors import Amqp10FrameError, AmqpError, Condition
from dtx.wire.amqp10.performatives import Attach, Begin, DeliveryState, Error, Flow, Open, Role
from dtx.xa.value import value

AMQP: Final = 0
SASL: Final = 1
MIN_MAX_FRAME: Final = 512
"""MIN-MAX-FRAME-SIZE: the frame size in bytes that each peer must accept, and the limit until the peer's open."""
HEAD: Final = 8
"""The size of a frame header in bytes."""
EMPTY_FRAME: Final = b"\x00\x00\x00\x08\x02\x00\x00\x00"
"""A frame without a body: it only resets the idle time-out of the peer (2.4.5)."""

_HEAD: Final = Struct(">IBBH")
_SMALL: Final = 4096

Frame = tuple[int, int, int, int]
"""Type, channel, start, end: the body of a frame in a buffer."""

SERIAL_MASK: Final = 0xFFFF_FFFF
_SERIAL_HALF: Final = 0x8000_0000


def serial_add(number: int, increment: int) -> int:
    """Return *number* + *increment* modulo 2^32, for delivery counts, delivery ids and transfer ids (RFC 1982)."""
    return (number + increment) & SERIAL_MASK


def serial_distance(start: int, end: int) -> int:
    """Return the distance from *start* to *end*, negative if *end* comes before *start* (RFC 1982)."""
    return ((end - start + _SERIAL_HALF) & SERIAL_MASK) - _SERIAL_HALF


MIN_IDLE_SECONDS: Final = 0.1
"""The shortest idle time-out of a peer that dtx accepts. With a shorter one, dtx would send mostly empty frames."""
MAX_NAME: Final = 1024
"""The maximum length of the name of a link in characters. A name is kept as long as its link."""
MAX_TAG: Final = 32
"""The maximum size of a delivery tag: "a delivery-tag can be up to 32 octets of binary data" (2.8.7)."""
MAX_SASL: Final = 8192
"""The maximum size of a SASL frame in bytes. The text promises 512 only, but a response may be a token."""

MAX_EARLY: Final = 1 << 20
"""The maximum number of bytes from a client while its login is being decided. Only its opening can come so early."""
MAX_EFFORT: Final = 50_000
"""The number of deliveries and links that one turn handles, about 10 ms. A frame of 30 bytes may name 100,000
deliveries, and one read may contain thousands of such frames."""
DISPOSED_AT_ONCE: Final = 2_500
"""The maximum number of deliveries in one :class:`Disposed`. The shell settles them at a few microseconds each."""
FRAME_EFFORT: Final = 50
"""The effort of a frame itself, in the unit of :data:`MAX_EFFORT`: one turn handles 1,000 small frames."""


class Amqp10FrameSplitter:
    """Cuts a stream of bytes into frames.

    Args:
        max_frame: the max-frame-size in bytes that this end has announced.
    """

    __slots__ = ("_have", "_need", "_parts", "max_frame")

    def __init__(self, max_frame: int) -> None:
        self._parts: list[bytes | bytearray] = []
        self._have = 0
        self._need = 0
        self.max_frame = max_frame

    @property
    def pending(self) -> int:
        """The number of bytes held of an incomplete frame, at most one frame."""
        return self._have

    def feed(self, chunk: bytes) -> tuple[bytes, list[Frame]]:
        """Process data from the peer.

        Args:
            chunk: any number of bytes.

        Returns:
            A buffer and the complete frames in it; *chunk* itself if it starts with a frame.

        Raises:
            Amqp10FrameError: a bad size, data offset or type. The error contains the frames before the bad one.
        """
        if self._parts:
            self._keep(chunk)
            if self._have < self._need:
                return b"", []
            chunk = b"".join(self._parts)
            self._parts.clear()
        return chunk, self._split(chunk)

    def _keep(self, chunk: bytes) -> None:
        """Add to the pieces of the incomplete frame. Small pieces share one object: each object costs 50 bytes."""
        self._have += len(chunk)
        last = self._parts[-1]
        if type(last) is bytearray and len(chunk) < _SMALL:
            last += chunk
        else:
            self._parts.append(bytearray(chunk) if len(chunk) < _SMALL else chunk)

    def _split(self, buffer: bytes) -> list[Frame]:
        frames: list[Frame] = []
        length = len(buffer)
        last = length - HEAD
        position = 0
        need = HEAD
        while position <= last:
            size, offset, kind, channel = _HEAD.unpack_from(buffer, position)
            body = position + 4 * offset
            end = position + size
            if offset < 2 or body > end or size > self.max_frame or kind > SASL:
                raise Amqp10FrameError(self._problem(size, offset, kind), buffer, frames)
            if end > length:
                need = size
                break
            frames.append((kind, channel, body, end))
            position = end
        self._have = length - position
        self._need = need
        if self._have:
            rest = buffer[position:]
            self._parts.append(bytearray(rest) if self._have < _SMALL else rest)
        return frames

    def _problem(self, size: int, offset: int, kind: int) -> str:
        if kind > SASL:
            return f"frame of unknown type {kind}"
        if size > self.max_frame:
            return f"frame of {size} bytes, max-frame-size is {self.max_frame}"
        return f"frame of {size} bytes with a data offset of {offset}"


def frame(kind: int, channel: int, body: bytes | bytearray) -> bytes:
    """Make a whole frame."""
    return _HEAD.pack(HEAD + len(body), 2, kind, channel) + body


def head(channel: int, size: int) -> bytes:
    """Make the header of an AMQP frame whose body has *size* bytes."""
    return _HEAD.pack(HEAD + size, 2, AMQP, channel)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSettings:
    """The settings of one connection.

    Args:
        container_id: the container id of this end.
        mechanisms: the SASL mechanisms, best first; none for no SASL layer.
        max_frame_size: the largest frame in bytes that the peer may send, at least 512.
        channel_max: the highest channel of the peer: the number of its sessions minus 1.
        handle_max: the highest handle of the peer on a session: the number of its links minus 1.
        max_links: the maximum number of links of all sessions. Each link costs a few KiB.
        idle_seconds: the seconds without data after which dtx closes the connection; half of them are announced.
            ``None`` for no limit.
        window: the transfers of a session that the peer may send before its window is extended.
        max_message_size: the largest message in bytes that the peer may send.
        max_partial: the size in bytes of all incomplete messages: a peer may begin one on each link.
        offered_capabilities: of the connection.
        properties: of the connection.
    """

    container_id: str
    mechanisms: tuple[str, ...] = ()
    max_frame_size: int = 131_072
    channel_max: int = 255
    handle_max: int = 255
    max_links: int = 4096
    idle_seconds: float | None = 120.0
    window: int = 2048
    max_message_size: int = 16 << 20
    max_partial: int = 64 << 20
    offered_capabilities: tuple[str, ...] = ()
    properties: dict[str, Any] | None = None


class Amqp10State(Enum):
    """The state of a connection, session or link."""

    UNUSED = auto()
    OPEN_SENT = auto()
    OPEN_RECEIVED = auto()
    OPEN = auto()
    PIPELINED = auto()
    """This end has opened and closed it; the peer has answered neither."""
    UNANSWERED = auto()
    """The peer has opened and closed it; this end has answered neither."""
    CLOSE_SENT = auto()
    CLOSE_RECEIVED = auto()
    CLOSED = auto()


class Amqp10Step(Enum):
    """A performative that is sent or received."""

    SEND_OPEN = auto()
    RECEIVE_OPEN = auto()
    SEND_CLOSE = auto()
    RECEIVE_CLOSE = auto()


TRANSITIONS: Final[dict[tuple[Amqp10State, Amqp10Step], Amqp10State]] = {
    (Amqp10State.UNUSED, Amqp10Step.SEND_OPEN): Amqp10State.OPEN_SENT,
    (Amqp10State.UNUSED, Amqp10Step.RECEIVE_OPEN): Amqp10State.OPEN_RECEIVED,
    (Amqp10State.OPEN_SENT, Amqp10Step.RECEIVE_OPEN): Amqp10State.OPEN,
    (Amqp10State.OPEN_SENT, Amqp10Step.SEND_CLOSE): Amqp10State.PIPELINED,
    (Amqp10State.OPEN_RECEIVED, Amqp10Step.SEND_OPEN): Amqp10State.OPEN,
    (Amqp10State.OPEN_RECEIVED, Amqp10Step.RECEIVE_CLOSE): Amqp10State.UNANSWERED,
    (Amqp10State.PIPELINED, Amqp10Step.RECEIVE_OPEN): Amqp10State.CLOSE_SENT,
    (Amqp10State.UNANSWERED, Amqp10Step.SEND_OPEN): Amqp10State.CLOSE_RECEIVED,
    (Amqp10State.OPEN, Amqp10Step.SEND_CLOSE): Amqp10State.CLOSE_SENT,
    (Amqp10State.OPEN, Amqp10Step.RECEIVE_CLOSE): Amqp10State.CLOSE_RECEIVED,
    (Amqp10State.CLOSE_SENT, Amqp10Step.RECEIVE_CLOSE): Amqp10State.CLOSED,
    (Amqp10State.CLOSE_RECEIVED, Amqp10Step.SEND_CLOSE): Amqp10State.CLOSED,
}
"""A missing step is illegal."""

SENDING: Final = frozenset((Amqp10State.OPEN_SENT, Amqp10State.OPEN))
"""The states in which this end may send more than a close."""
CLOSING_STATES: Final = frozenset((Amqp10State.PIPELINED, Amqp10State.CLOSE_SENT, Amqp10State.CLOSED))
"""The states in which this end ignores all but the peer's open and close."""


def step(state: Amqp10State, made: Amqp10Step, what: str) -> Amqp10State:
    """Return the state after a step.

    Args:
        state: the state before it.
        made: the step.
        what: the endpoint, for the error.

    Raises:
        AmqpError: illegal-state.
    """
    following = TRANSITIONS.get((state, made))
    if following is None:
        words = made.name.lower().replace("_", " ")
        raise AmqpError(Condition.ILLEGAL_STATE, f"{words} is illegal for {what} in state {state.name.lower()}")
    return following


@value
class LoginAsked:
    """The client has chosen an offered mechanism. The shell answers with ``login`` or ``refuse_login``. Until then, the
    engine handles nothing more.

    Args:
        mechanism: the name of the mechanism.
        response: the SASL response, with the password; see :func:`dtx.wire.amqp10.performatives.read_login`.
        hostname: the virtual host, if sasl-init names one.
    """

    mechanism: str
    response: bytes = field(repr=False)
    hostname: str | None


@value
class Opened:
    """The peer has sent open. A server answers with ``open``, or refuses with ``close``."""

    open: Open


@value
class Begun:
    """The peer has sent begin. If this is no answer, the shell answers with ``begin`` of the session."""

    session: int
    begin: Begin
    answer: bool


@value
class Attached:
    """The peer has sent attach. If this is no answer, the shell answers with ``attach`` or ``refuse`` of the link."""

    session: int
    link: int
    attach: Attach
    answer: bool


@value
class Flowed:
    """The peer has sent flow for a link. The link has its new credit.

    The engine has answered an echo, with one exception: a sender does not answer a flow with properties. The shell
    sends that answer, because it depends on the properties.

    Args:
        session, link: the channel of the session and the handle of the link.
        flow: the performative.
    """

    session: int
    link: int
    flow: Flow


@value
class Writable:
    """All messages that waited for the peer's window have been sent."""

    session: int


@value
class Delivered:
    """A whole message has arrived.

    Args:
        session, link: the channel of the session and the handle of the link.
        delivery_id: the delivery id in the session.
        tag: the delivery tag.
        message_format: 0 for the sections of AMQP.
        payload: the whole message. It may be a slice of the receive buffer: copy it to keep it.
        settled: whether the sender has settled it.
        states: the different states in its frames, in their order, at most two. More than one is an error of the peer.
    """

    session: int
    link: int
    delivery_id: int
    tag: bytes
    message_format: int
    payload: memoryview
    settled: bool
    states: tuple[DeliveryState, ...]


@value
class Dropped:
    """A delivery took credit without a message: the sender has aborted it, or resumed a delivery unknown here."""

    session: int
    link: int
    delivery_id: int


@value
class DeliveryLost:
    """A complete or partial delivery of a transaction is lost, because this end has ended its link or its session. The
    peer does not learn its outcome.

    Args:
        session: the channel of the session.
        txn_id: the id of the transaction.
    """

    session: int
    txn_id: bytes


@value
class Disposed:
    """The peer has sent a disposition.

    Args:
        session: the channel of the session.
        role: the role of this end: SENDER for messages that this end has sent.
        deliveries: link handle and delivery id (SENDER: the result of ``Link.send``) of each known unsettled delivery.
        state: the new state, if any.
        settled: whether the peer has settled them. The engine has then forgotten them.
    """

    session: int
    role: Role
    deliveries: tuple[tuple[int, int], ...]
    state: DeliveryState | None
    settled: bool


@value
class Detached:
    """A link has ended. If the peer has detached it, the shell answers with the link's ``detach``.

    Args:
        session, link: the channel of the session and the handle of the link.
        error: the reason, if any.
        closed: ``False`` if the peer may resume the link.
        by_peer: whether the peer has detached it; otherwise this end has, because of an error.
    """

    session: int
    link: int
    error: Error | None
    closed: bool
    by_peer: bool


@value
class Ended:
    """A session has ended with all its links. If the peer has ended it, the shell answers with ``end``."""

    session: int
    error: Error | None
    by_peer: bool


@value
class Closed:
    """The connection has ended with all its sessions. If the peer has closed it, the shell answers with ``close``."""

    error: Error | None
    by_peer: bool


Event = (
    LoginAsked
    | Opened
    | Begun
    | Attached
    | Flowed
    | Writable
    | Delivered
    | Dropped
    | DeliveryLost
    | Disposed
    | Detached
    | Ended
    | Closed
)
