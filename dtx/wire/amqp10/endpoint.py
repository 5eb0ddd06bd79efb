"""What the connection, its sessions and its links share: frames, limits, settings, states, events, serial numbers.

A frame is size (four octets, itself included), data offset (in words of four octets), type, channel, what an extended
header holds, and the body (2.3). The splitter works on what the socket returned and tells where in that buffer each
body lies, so that a payload is never copied here; a frame that spans several reads is kept as pieces and joined once.

Connection, session and link are opened and closed by a pair of performatives (open and close, begin and end, attach
and detach), of which each peer sends its own, in any order; the second pair of a closing may come before the first is
answered. An endpoint that has sent its close looks at nothing more than the peer's (AMQP 1.0, 2.4.6, 2.5.5, 2.6.3 to
2.6.6).
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
"""MIN-MAX-FRAME-SIZE: what either peer must be able to take, and all that may be sent before open says more."""
HEAD: Final = 8
"""Octets of a frame header."""
EMPTY_FRAME: Final = b"\x00\x00\x00\x08\x02\x00\x00\x00"
"""A frame without a body: it only keeps the connection from being idle (2.4.5)."""

_HEAD: Final = Struct(">IBBH")
_SMALL: Final = 4096

Frame = tuple[int, int, int, int]
"""Type, channel, start, end: a body in a buffer."""

SERIAL_MASK: Final = 0xFFFF_FFFF
_SERIAL_HALF: Final = 0x8000_0000


def serial_add(number: int, increment: int) -> int:
    """*number* + *increment*, modulo 2^32: delivery counts, delivery ids, transfer ids (RFC 1982)."""
    return (number + increment) & SERIAL_MASK


def serial_distance(start: int, end: int) -> int:
    """How far *end* is ahead of *start*; negative where it is behind."""
    return ((end - start + _SERIAL_HALF) & SERIAL_MASK) - _SERIAL_HALF


MIN_IDLE_SECONDS: Final = 0.1
"""Shortest idle time-out of a peer that is kept: shorter ones would make dtx send little else than empty frames."""
MAX_NAME: Final = 1024
"""Longest name of a link, characters: names are kept as long as their link is."""
MAX_TAG: Final = 32
"""Longest delivery tag, octets: "a delivery-tag can be up to 32 octets of binary data" (2.8.7)."""
MAX_SASL: Final = 8192
"""Largest frame of SASL, octets: 512 are promised, but a response may be a token."""

MAX_EARLY: Final = 1 << 20
"""Octets that a client may say before its login is decided: all that it says without an answer is the opening."""
MAX_EFFORT: Final = 50_000
"""Deliveries and links that are looked at before others get their turn, some ten milliseconds: a frame of thirty octets
may name a hundred thousand deliveries, and what is read at once may be thousands of such frames."""
DISPOSED_AT_ONCE: Final = 2_500
"""Deliveries of one disposition that the shell hears of at once; it then settles them, some microseconds each."""
FRAME_EFFORT: Final = 50
"""What a frame costs by itself, in the same measure: a thousand small ones are a turn."""


class Amqp10FrameSplitter:
    """Cuts a stream of octets into frames.

    Args:
        max_frame: the max-frame-size that the peer was told, octets.
    """

    __slots__ = ("_have", "_need", "_parts", "max_frame")

    def __init__(self, max_frame: int) -> None:
        self._parts: list[bytes | bytearray] = []
        self._have = 0
        self._need = 0
        self.max_frame = max_frame

    @property
    def pending(self) -> int:
        """Octets of an incomplete frame that are held, at most one frame."""
        return self._have

    def feed(self, chunk: bytes) -> tuple[bytes, list[Frame]]:
        """Take what was read from the peer.

        Args:
            chunk: any number of octets.

        Returns:
            A buffer and the whole frames in it; *chunk* itself when it starts with a frame.

        Raises:
            FrameError: a bad size, data offset or type; it carries the frames before the bad one.
        """
        if self._parts:
            self._keep(chunk)
            if self._have < self._need:
                return b"", []
            chunk = b"".join(self._parts)
            self._parts.clear()
        return chunk, self._split(chunk)

    def _keep(self, chunk: bytes) -> None:
        """Add to the pieces of the incomplete frame; small pieces share one, else each octet could cost fifty."""
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
        """What is wrong with a frame header."""
        if kind > SASL:
            return f"frame of unknown type {kind}"
        if size > self.max_frame:
            return f"frame of {size} octets, max-frame-size is {self.max_frame}"
        return f"frame of {size} octets with a data offset of {offset}"


def frame(kind: int, channel: int, body: bytes | bytearray) -> bytes:
    """A whole frame."""
    return _HEAD.pack(HEAD + len(body), 2, kind, channel) + body


def head(channel: int, size: int) -> bytes:
    """The header of an AMQP frame whose body has *size* octets."""
    return _HEAD.pack(HEAD + size, 2, AMQP, channel)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSettings:
    """Of one connection.

    Args:
        container_id: ours.
        mechanisms: of SASL, best first; none: no SASL layer.
        max_frame_size: largest frame the peer may send, octets, at least 512.
        channel_max: highest channel the peer may use: one fewer than its sessions.
        handle_max: highest handle the peer may use on a session: one fewer than its links.
        max_links: links of all sessions together: each costs some KiB, and 256 sessions of 256 would be 65,536.
        idle_seconds: the peer is gone when it has sent nothing for so long; it is told half of that. None: it need not
            send.
        window: transfers of a session that the peer may send before it hears of more: bounds what is read ahead.
        max_message_size: octets.
        max_partial: octets of messages of which the end has not come, all links together: a peer may begin one on each.
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
    """Of one endpoint."""

    UNUSED = auto()
    OPEN_SENT = auto()
    OPEN_RECEIVED = auto()
    OPEN = auto()
    PIPELINED = auto()
    """Opened and closed from here, neither answered."""
    UNANSWERED = auto()
    """Opened and closed by the peer, neither answered."""
    CLOSE_SENT = auto()
    CLOSE_RECEIVED = auto()
    CLOSED = auto()


class Amqp10Step(Enum):
    """What is sent or received."""

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
"""What is absent is illegal."""

SENDING: Final = frozenset((Amqp10State.OPEN_SENT, Amqp10State.OPEN))
"""Where more than a close may be sent."""
DEAF: Final = frozenset((Amqp10State.PIPELINED, Amqp10State.CLOSE_SENT, Amqp10State.CLOSED))
"""Where nothing but the peer's open and close is looked at."""


def step(state: Amqp10State, made: Amqp10Step, what: str) -> Amqp10State:
    """The state behind a step.

    Args:
        state: the one before.
        made: the step.
        what: whose it is, for the error.

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
    """The client has chosen a mechanism of those offered. Nothing more is looked at before it is answered, with
    ``login`` or ``refuse_login``.

    Args:
        mechanism: name.
        response: holds the password; see :mod:`dtx.wire.amqp10.performatives`.
        hostname: the virtual host, where the client says it already.
    """

    mechanism: str
    response: bytes = field(repr=False)
    hostname: str | None


@value
class Opened:
    """The peer's open has come; a server answers with ``open``, or refuses with ``close``."""

    open: Open


@value
class Begun:
    """The peer's begin has come; unless it is an answer, it is answered with the session's ``begin``."""

    session: int
    begin: Begin
    answer: bool


@value
class Attached:
    """The peer's attach has come; unless it is an answer, it is answered with the link's ``attach`` or ``refuse``."""

    session: int
    link: int
    attach: Attach
    answer: bool


@value
class Flowed:
    """The peer has said something about a link; the link has its new credit. What echo asks for has been sent, but by a
    sender whose flow has properties: what they mean belongs into the answer, so the shell sends that.

    Args:
        session, link: which.
        flow: as it came, with its properties.
    """

    session: int
    link: int
    flow: Flow


@value
class Writable:
    """All that waited for the peer's window has been sent."""

    session: int


@value
class Delivered:
    """A whole message has come.

    Args:
        session, link: where.
        delivery_id: of the session.
        tag: the sender's name of the delivery.
        message_format: 0 for the sections of AMQP.
        payload: all of it; a slice of what was read where it came in one frame: who keeps it, copies it.
        settled: whether the sender has settled it.
        states: what its frames said of its state, each once, in their order; more than one is a peer's mistake.
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
    """A delivery took credit and came to nothing: the sender has aborted it, or resumed one that nobody has here."""

    session: int
    link: int
    delivery_id: int


@value
class Missed:
    """A transfer, or the part of one that had come, names a transaction and came to nothing: this end has ended its
    link or its session, so that nobody hears what becomes of it.

    Args:
        session: where.
        txn_id: the transaction.
    """

    session: int
    txn_id: bytes


@value
class Disposed:
    """The peer has a state for deliveries.

    Args:
        session: where.
        role: ours: SENDER for messages that were sent from here.
        deliveries: link, and delivery id (SENDER: number, see ``Link.send``), of each that is known and unsettled.
        state: the new one, if any.
        settled: whether the peer has settled them; then they are forgotten here.
    """

    session: int
    role: Role
    deliveries: tuple[tuple[int, int], ...]
    state: DeliveryState | None
    settled: bool


@value
class Detached:
    """A link is over; where the peer has begun it, it is answered with the link's ``detach``.

    Args:
        session, link: which.
        error: what for.
        closed: false: the peer would like to come back to it.
        by_peer: whether the peer has detached, or this end because of an error.
    """

    session: int
    link: int
    error: Error | None
    closed: bool
    by_peer: bool


@value
class Ended:
    """A session is over, with all its links; where the peer has begun it, it is answered with the session's ``end``."""

    session: int
    error: Error | None
    by_peer: bool


@value
class Closed:
    """The connection is over, with all its sessions; where the peer has begun it, it is answered with ``close``."""

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
    | Missed
    | Disposed
    | Detached
    | Ended
    | Closed
)
