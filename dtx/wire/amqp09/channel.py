"""One channel of a connection: its state and mode, the assembly of contents, the order of its frames, its confirms.

Theory of operation. A frame of the peer becomes one event, or none. A shell that waits for a result holds the channel.
The engine then keeps copies of the later frames, in order, and handles them after the release. Other channels are not
held. Frames that the shell sends on a channel that is no longer open are dropped, because the peer must ignore frames
after a close.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, Flag, auto
from typing import Final

from dtx.wire.amqp09 import closes, content, methods
from dtx.wire.amqp09.codec import ANY_MODE, ChannelMode, Fact, Method, Sender
from dtx.wire.amqp09.confirms import Confirms
from dtx.wire.amqp09.endpoint import TRANSITIONS, EndpointState, EndpointStep
from dtx.wire.amqp09.errors import HardCode, WireError
from dtx.wire.amqp09.events import (
    ChannelClosed,
    ChannelClosing,
    ChannelOpened,
    ContentReceived,
    ContentStarted,
    EngineEvent,
    FramePassed,
    MethodReceived,
)
from dtx.wire.amqp09.frames import BODY, HEADER, OVERHEAD
from dtx.wire.amqp09.methods import METHODS, ChannelClose, ChannelCloseOk, ChannelOpen, ChannelOpenOk
from dtx.wire.amqp09.settings import MAX_BACKLOG, EngineSettings, Memory, PeerEnd
from dtx.xa.codes import ReplyCode, XaError

_DTX_CLASSES: Final = frozenset((methods.DtxSelect.KEY >> 16, methods.DtxPrepare.KEY >> 16))

_OPEN: Final = ChannelOpen.KEY
_OPEN_OK: Final = ChannelOpenOk.KEY
_CLOSE: Final = ChannelClose.KEY
_CLOSE_OK: Final = ChannelCloseOk.KEY
_LATE: Final = (_OPEN_OK, _CLOSE, _CLOSE_OK)
"""The methods that an end handles after its own close. A client also handles what the server sent before it read the
close, for example confirms."""
_BIND: Final = methods.ExchangeBind.KEY

_SPECIAL: Final = (ChannelOpen, ChannelClose, ChannelCloseOk, methods.ExchangeBind, methods.ExchangeBindOk)


@dataclass(frozen=True, slots=True)
class _Rule:
    """How a channel handles a received method.

    Args:
        decode: reads its payload.
        content: a content follows.
        counted: it counts as a command.
        ticketed: its first argument is a ticket that the shell needs.
        special: it opens or closes the channel, or shares its number with another method.
        modes: the modes in which it is allowed; ``None`` for all.
        simple: it is counted, not special, and has no content.
    """

    decode: Callable[[bytes], Method]
    content: bool
    counted: bool
    ticketed: bool
    special: bool
    modes: frozenset[ChannelMode] | None
    simple: bool


def _has(facts: Flag, fact: Flag) -> bool:
    return bool(facts & fact)


def _rule(row: type[Method]) -> _Rule:
    content, counted = _has(row.FACTS, Fact.CONTENT), not _has(row.FACTS, Fact.UNCOUNTED)
    ticketed = _has(row.FACTS, Fact.TICKET) and _has(row.FACTS, Fact.LOCAL)
    special, modes = row in _SPECIAL, None if row.MODES == ANY_MODE else row.MODES
    return _Rule(row.decode, content, counted, ticketed, special, modes, counted and not content and not special)


def _rules(sender: Sender) -> dict[int, _Rule]:
    return {key: _rule(row) for key, row in METHODS.items() if _has(row.SENT_BY, sender) and key >> 16 != 10}


_FROM: Final = {PeerEnd.SERVER: _rules(Sender.CLIENT), PeerEnd.CLIENT: _rules(Sender.SERVER)}
"""The methods that the peer of each end may send on a channel, by class << 16 | method."""
_QUERY: Final = _rule(methods.ExchangeQuery)
_QUERY_OK: Final = _rule(methods.ExchangeQueryOk)


class Passing(Enum):
    """Whether frames of a channel are passed to the shell unread."""

    NOT = auto()
    """The engine interprets the frames."""
    SINGLY = auto()
    """Each frame is one :class:`FramePassed`. The shell handles all of them, closes included."""
    JOINED = auto()
    """Consecutive frames are one :class:`FramesPassed`. Watched and dtx methods are still passed singly."""


class _Fate(Enum):
    ASSEMBLED = auto()
    """The engine joins its frames into one event."""
    PASSED = auto()
    """Each of its frames is one event."""
    DROPPED = auto()


# Reading a member of an enum costs as much as a call in Python 3.11, and these are read for every frame.
_IS_OPEN: Final = EndpointState.OPEN
_NOT: Final = Passing.NOT
_ASSEMBLED: Final = _Fate.ASSEMBLED


class Shared:
    """The state that the channels of a connection share.

    Args:
        settings: the settings of the connection.
        end: the end that the engine serves.
        memory: see :attr:`ConnectionEngine.memory`.
    """

    __slots__ = ("channels", "confirming", "end", "frame_max", "heavy", "joined", "memory", "out", "ready", "settings")

    def __init__(self, settings: EngineSettings, end: PeerEnd, memory: Memory) -> None:
        self.settings = settings
        self.end = end
        self.memory = memory
        self.frame_max = 0
        """The negotiated frame-max in bytes; 0 for none."""
        self.out: list[bytes | memoryview] = []
        self.channels: dict[int, ChannelEngine] = {}
        self.ready: dict[ChannelEngine, None] = {}
        """Released channels whose frames have waited."""
        self.heavy: set[ChannelEngine] = set()
        """Channels with more than :data:`MAX_BACKLOG` bytes of waiting frames."""
        self.confirming: dict[ChannelEngine, None] = {}
        """Channels with confirms to send."""
        self.joined: set[int] = set()
        """Numbers of channels whose frames pass joined and need not wait."""


class ChannelEngine:
    """One end of a channel.

    Args:
        shared: the state that it shares with the other channels of the connection.
        number: the number of the channel.

    Attributes:
        state: its state.
        mode: its mode; see :meth:`become`.
        held: whether later frames wait.
        announces: whether a :class:`ContentStarted` comes before the body of each content.
    """

    __slots__ = (
        "_backlog",
        "_charged",
        "_commands",
        "_confirms",
        "_crossed",
        "_fate",
        "_last",
        "_last_payload",
        "_left",
        "_method",
        "_parts",
        "_passes",
        "_properties",
        "_rules",
        "_shared",
        "announces",
        "backlog_size",
        "held",
        "mode",
        "number",
        "state",
    )

    def __init__(self, shared: Shared, number: int) -> None:
        self._shared = shared
        self._rules = _FROM[shared.end]
        self.number = number
        self.state = EndpointState.OPENING if shared.end is PeerEnd.CLIENT else EndpointState.OPEN
        self.mode = ChannelMode.PLAIN
        self.held = False
        self.announces = False
        self._passes = Passing.NOT
        self.backlog_size = 0
        """The size of the waiting frames in bytes."""
        self._backlog: deque[tuple[int, bytes]] = deque()
        self._commands = 0
        self._confirms: Confirms | None = None
        self._crossed = False
        """Both ends have closed the channel at once. A client then sends its close-ok after the server's close-ok: a
        RabbitMQ that has read the client's close-ok may not send its own."""
        self._last: Method | None = None
        """The last method with content. It is reused for an equal payload: most publishers use one target."""
        self._last_payload = b""
        self._method: Method | None = None
        """The method whose content is incomplete."""
        self._left = -1
        """The number of bytes of the body that are missing; -1 while the header is missing."""
        self._properties = b""
        self._fate = _Fate.ASSEMBLED
        self._parts: list[bytes] = []
        self._charged = 0

    @property
    def waits(self) -> bool:
        """Whether frames of the peer wait on this channel."""
        return bool(self._backlog)

    @property
    def passes_content(self) -> bool:
        """Whether the frames of an incomplete content are passed one by one. A close does not end such a content."""
        return self._fate is _Fate.PASSED

    # -- frames of the peer

    def receive(self, key: int, buffer: bytes, start: int, end: int) -> EngineEvent | None:
        """Handle a frame of the peer; the arguments as in ``frames.Frame``.

        Raises:
            XaError: the connection engine must close the channel.
            WireError: the connection engine must close the connection.
        """
        if self._passes is not _NOT:
            if self.held and not self._overtakes(key):
                self._wait(key, buffer[start:end])
                return None
            return FramePassed(self.number, key, buffer, start, end)
        state = self.state
        if state is not _IS_OPEN and (
            key in _LATE or state is EndpointState.OPENING or self._shared.end is PeerEnd.SERVER
        ):
            if self.passes_content:
                return self._late_content(key, buffer, start, end)
            return self._late(key, buffer[start + 7 : end - 1])
        if self.held and not self._overtakes(key):
            self._wait(key, buffer[start:end])
            return None
        if key == BODY:
            return self._on_body(buffer, start, end)
        payload = buffer[start + 7 : end - 1]
        if key == HEADER:
            return self._on_header(payload)
        return self._on_method(key, payload)

    def receive_next(self) -> EngineEvent | None:
        """Handle the first waiting frame.

        Raises:
            XaError: as for :meth:`receive`.
            WireError: as for :meth:`receive`.
        """
        key, frame = self._backlog.popleft()
        self.backlog_size -= len(frame)
        if self.backlog_size <= MAX_BACKLOG // 2:
            self._shared.heavy.discard(self)
        return self.receive(key, frame, 0, len(frame))

    def next_key(self) -> int:
        """Return the key of the first waiting frame: class << 16 | method, or the frame type."""
        return self._backlog[0][0]

    def _overtakes(self, key: int) -> bool:
        """Return whether a frame need not wait: a close, if no earlier frame waits."""
        return key == _CLOSE and not self._backlog and self._shared.settings.close_overtakes

    def _wait(self, key: int, frame: bytes) -> None:
        self._backlog.append((key, frame))
        self.backlog_size += len(frame)
        if self.backlog_size > MAX_BACKLOG:
            self._shared.heavy.add(self)

    def _late(self, key: int, payload: bytes) -> EngineEvent | None:
        """Handle a frame that arrives before the channel is open, or after its close."""
        if self.state is EndpointState.OPENING and key == _OPEN_OK:
            self._transition(EndpointStep.OPEN)
            return ChannelOpened(self.number)
        if key == _CLOSE and self.state is EndpointState.CLOSE_SENT:
            if self._shared.end is PeerEnd.CLIENT:
                self._crossed = True
            else:
                self._confirm_close()
        elif key == _CLOSE and self.state is EndpointState.OPENING:
            return self._on_close(payload)
        elif key == _CLOSE_OK and self._transition(EndpointStep.RECEIVE_CLOSE_OK):
            if self._crossed:
                self._confirm_close()
            return ChannelClosed(self.number)
        return None

    def _late_content(self, key: int, buffer: bytes, start: int, end: int) -> EngineEvent | None:
        """Handle a frame after the close of a channel that passes a content: its receiver needs all frames of it."""
        if key == BODY:
            return self._on_body(buffer, start, end)
        raise self._unexpected("frame inside a content")

    def _confirm_close(self) -> None:
        self._shared.out.append(ChannelCloseOk().frame(self.number))

    def _on_method(self, key: int, payload: bytes) -> EngineEvent | None:
        if self._method is not None:
            raise self._unexpected("method frame inside a content")
        rule = self._rules.get(key)
        if rule is None:
            raise _no_place(key)
        if rule.counted:
            self._commands += 1
        if not rule.simple:
            if rule.content:
                if payload != self._last_payload:
                    self._last, self._last_payload = rule.decode(payload), payload
                self._method = self._last
                return None
            if rule.special:
                if key == _CLOSE:
                    return self._on_close(payload)
                if key == _OPEN:
                    raise WireError(HardCode.CHANNEL_ERROR, "second 'channel.open' seen")
                if key == _CLOSE_OK:
                    return None  # this end has sent no close
                rule = _query_or(rule, key, payload)
        method = rule.decode(payload)
        if rule.modes is not None and self.mode not in rule.modes and self._shared.end is PeerEnd.SERVER:
            raise _wrong_mode(method, self.mode)
        ticket = methods.ticket(payload) if rule.ticketed else 0
        return MethodReceived(self.number, method, self._commands, ticket)

    def _on_close(self, payload: bytes) -> EngineEvent:
        if self._shared.end is PeerEnd.CLIENT:
            close = ChannelClose.decode(payload)
            self._confirm_close()
            self.end()
            return ChannelClosing(self.number, close)
        self._transition(EndpointStep.RECEIVE_CLOSE)
        self._drop_content()
        return ChannelClosing(self.number, _lenient(payload))

    # -- contents

    def _on_header(self, payload: bytes) -> EngineEvent | None:
        method = self._method
        if method is None or self._left >= 0:
            raise self._unexpected("content header without a publish")
        class_id, size, properties = content.header(payload)
        if class_id != content.BASIC:
            raise self._unexpected(f"content of class {class_id}")
        content.check_size(size, self._shared.settings.max_message)
        if self.announces:
            return self._announce(method, properties, size)
        if not size:
            return self._complete(method, properties, b"")
        self._properties = properties
        self._left = size
        return None

    def _announce(self, method: Method, properties: bytes, size: int) -> EngineEvent:
        if size:
            self._properties, self._left, self._fate = properties, size, _Fate.DROPPED
        else:
            self._drop_content()
        return ContentStarted(self.number, method, size, properties)

    def _on_body(self, buffer: bytes, start: int, end: int) -> EngineEvent | None:
        method = self._method
        if method is None or self._left < 0:
            raise self._unexpected("content body without a header")
        self._left -= end - start - OVERHEAD
        if self._left < 0:
            raise WireError(HardCode.FRAME_ERROR, f"more content than announced on channel {self.number}")
        if self._fate is not _ASSEMBLED:
            passed = self._fate is _Fate.PASSED
            if not self._left:
                self._drop_content()
            return FramePassed(self.number, BODY, buffer, start, end) if passed else None
        payload = buffer[start + 7 : end - 1]
        if not self._left:
            if self._parts:
                self._parts.append(payload)
                payload = b"".join(self._parts)
            return self._complete(method, self._properties, payload)
        if payload:
            self._keep(payload)
        return None

    def _keep(self, part: bytes) -> None:
        if not self.announces:  # take_content has charged it otherwise
            memory = self._shared.memory
            if not memory.has_room(len(part)):
                raise XaError(ReplyCode.RESOURCE_ERROR, f"no memory for the message: {memory.excess(len(part))}")
            self._charge(len(part))
        self._parts.append(part)

    def _charge(self, size: int) -> None:
        self._shared.memory.charge(size)
        self._charged += size

    def _complete(self, method: Method, properties: bytes, body: bytes) -> EngineEvent:
        self._drop_content()
        number = 0
        confirms = self._confirms
        if confirms is not None and self._shared.end is PeerEnd.SERVER:
            number = confirms.published = confirms.published + 1
        return ContentReceived(self.number, method, properties, body, number)

    def _drop_content(self) -> None:
        self._method = None
        self._properties = b""
        self._left = -1
        self._fate = _ASSEMBLED
        if self._charged:
            self._charge(-self._charged)
            self._parts.clear()

    def _unexpected(self, what: str) -> WireError:
        return WireError(HardCode.UNEXPECTED_FRAME, f"{what} on channel {self.number}")

    # -- calls of the shell

    def pass_frames(self, passes: Passing) -> None:
        """Set how later frames are passed to the shell."""
        self._passes = passes
        self._sort()

    def _sort(self) -> None:
        if self.state is EndpointState.CLOSED:
            return  # another channel may have the number now
        if self._passes is Passing.JOINED and not self.held:
            self._shared.joined.add(self.number)
        else:
            self._shared.joined.discard(self.number)

    def hold(self) -> None:
        """Let the frames that arrive from now on wait until :meth:`release`."""
        self.held = True
        if self._passes is not _NOT:
            self._sort()

    def take_content(self) -> None:
        """Assemble the content that begins. Its whole size is charged at once; the shell must check for room before."""
        self._fate = _Fate.ASSEMBLED
        self._charge(self._left)

    def pass_content(self) -> None:
        """Pass the frames of the body that begins one by one. An empty body has none."""
        if self._left > 0:
            self._fate = _Fate.PASSED

    def put_back(self, key: int, frame: bytes) -> None:
        """Put a frame back before all waiting frames. The channel must be held; it handles the frame after the release.

        An incomplete content is dropped. To put it back, put back its header frame, then the frame of its method.
        """
        self._drop_content()
        self._backlog.appendleft((key, frame))
        self.backlog_size += len(frame)

    def release(self) -> None:
        """End :meth:`hold`. A running iteration handles the waiting frames, or else ``ConnectionEngine.events``."""
        self.held = False
        if self._passes is not _NOT:
            self._sort()
        if self._backlog:
            self._shared.ready[self] = None

    def become(self, mode: ChannelMode) -> None:
        """Set the mode. In CONFIRM, publishes are counted from now on."""
        self.mode = mode
        if mode is ChannelMode.CONFIRM and self._confirms is None:
            self._confirms = Confirms(self.number)

    def send(self, frame: bytes) -> None:
        """Send whole frames, after the confirms that are due. After a close, nothing is sent."""
        if self.state is _IS_OPEN or self.state is EndpointState.OPENING:
            if self in self._shared.confirming:
                self.send_confirms()
            self._shared.out.append(frame)

    def send_content(self, frame: bytes, properties: bytes, body: bytes) -> int:
        """Send a method frame with its content, as :meth:`send` does.

        Args:
            frame: the frame of the method.
            properties: the bytes from the property flags on.
            body: the body.

        Returns:
            At a client's end in confirm mode, the number of the publish; otherwise 0.
        """
        if self.state is not EndpointState.OPEN and self.state is not EndpointState.OPENING:
            return 0
        shared, confirms = self._shared, self._confirms
        if self in shared.confirming:
            self.send_confirms()
        shared.out.append(content.message(frame, self.number, properties, body, shared.frame_max))
        if confirms is None or shared.end is PeerEnd.SERVER:
            return 0
        confirms.published += 1
        return confirms.published

    def confirm(self, number: int, *, safe: bool) -> None:
        """Record the outcome of a publish. ``data_to_send`` sends the confirms joined, in order.

        Args:
            number: the number in :class:`ContentReceived`.
            safe: whether it is durable in all queues that take it.
        """
        if self._confirms is not None:
            self._confirms.settle(number, safe)
            self._shared.confirming[self] = None

    def send_confirms(self) -> None:
        """Send the confirms that are due."""
        del self._shared.confirming[self]
        if self._confirms is not None and self.state is EndpointState.OPEN:
            self._shared.out += self._confirms.take()

    def open_ok(self) -> None:
        """Send channel.open-ok."""
        self.send(ChannelOpenOk().frame(self.number))

    def refuse(self, error: XaError, key: int = 0) -> bool:
        """Close the channel with an exception.

        Args:
            error: the reason.
            key: class << 16 | method of the method that failed; 0 where none did.

        Returns:
            Whether the channel was open until now.
        """
        return self.close(closes.close_frame(error, self.number, key))

    def close(self, frame: bytes) -> bool:
        """Close the channel with *frame*, a channel.close. Return whether the channel was open until now."""
        if self.state is not EndpointState.OPEN and self.state is not EndpointState.OPENING:
            return False
        self.send(frame)
        self._transition(EndpointStep.SEND_CLOSE)
        if self._shared.end is PeerEnd.SERVER and not self.passes_content:
            self._drop_content()
        self._shared.heavy.discard(self)
        return True

    def close_ok(self) -> None:
        """Confirm the client's close. All that the client sent before it must be done. The number becomes free."""
        if self._transition(EndpointStep.SEND_CLOSE_OK) and self.state is EndpointState.CLOSED:
            self._confirm_close()

    def end(self) -> None:
        """End the channel without sending, because the connection ends or the peer's close is done. Idempotent."""
        if self.state is not EndpointState.CLOSED:
            self.state = EndpointState.CLOSED
            self._drop_content()
            self._forget()

    def _transition(self, step: EndpointStep) -> bool:
        following = TRANSITIONS.get((self.state, step))
        if following is None:
            return False
        self.state = following
        if following is EndpointState.CLOSED:
            self._drop_content()
            self._forget()
        return True

    def _forget(self) -> None:
        shared = self._shared
        self._backlog.clear()
        self.backlog_size = 0
        shared.heavy.discard(self)
        shared.ready.pop(self, None)
        shared.confirming.pop(self, None)
        shared.joined.discard(self.number)
        del shared.channels[self.number]


def _query_or(rule: _Rule, key: int, payload: bytes) -> _Rule:
    """Choose the rule for a number that exchange.bind or its answer shares with exchange.query."""
    if key == _BIND:
        return _QUERY if methods.is_query(payload) else rule
    return _QUERY_OK if len(payload) > 4 else rule


def _lenient(payload: bytes) -> ChannelClose:
    """Decode a client's close. A malformed close closes the channel too."""
    try:
        return ChannelClose.decode(payload)
    except WireError:
        return ChannelClose(0, b"")


def _no_place(key: int) -> WireError | XaError:
    """The peer may not send the method. In the dtx classes the error closes the channel only."""
    row = METHODS.get(key)
    if key >> 16 not in _DTX_CLASSES:
        return WireError(HardCode.COMMAND_INVALID, f"class {key >> 16} method {key & 0xFFFF} is illegal on a channel")
    if row is None:
        return XaError(ReplyCode.NOT_IMPLEMENTED, f"class {key >> 16} has no method {key & 0xFFFF}")
    return XaError(ReplyCode.COMMAND_INVALID, f"{row.NAME} is sent by servers only")


def _wrong_mode(method: Method, mode: ChannelMode) -> XaError:
    """The method needs another mode of the channel, or would change it."""
    match method:
        case methods.DtxStart() | methods.DtxEnd():
            # "The client must use this method at least once on a channel before …"
            reason = f"{method.NAME} on a channel without dtx-demarcation.select (xid {method.xid})"
            return XaError(ReplyCode.COMMAND_INVALID, reason)
        case methods.DtxSelect():
            reason = f"select on a channel in {mode.value} mode"
        case _ if mode is ChannelMode.DTX:
            reason = "this channel is selected for distributed transactions; open another one for tx or confirm"
        case _ if mode is ChannelMode.PLAIN:
            reason = "channel is not transactional"
        case methods.ConfirmSelect():
            reason = f"cannot switch from {mode.value} to confirm mode"
        case _:
            reason = f"cannot switch from {mode.value} to tx mode"
    return XaError(ReplyCode.PRECONDITION_FAILED, reason)
