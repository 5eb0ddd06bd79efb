"""A connection: headers, login, open, and the sessions that frames belong to (AMQP 1.0, 2.2 to 2.4, 5.3).

:meth:`Connection.receive` takes bytes and returns events. The calls of connection, sessions and links make bytes, which
:meth:`Connection.data_to_send` returns. The engine is the server's end, or, in tests, a client's end without SASL. The
shell handles events in their order. The engine answers errors of the peer with the condition that the text demands. It
returns the event for the end of the link, session or connection.
"""

from collections.abc import Sequence
from enum import Enum, auto
from typing import Final, NamedTuple

from dtx.wire.amqp09.frames import Protocol
from dtx.wire.amqp10.composite import Composite, encode
from dtx.wire.amqp10.endpoint import (
    AMQP,
    CLOSING_STATES,
    EMPTY_FRAME,
    FRAME_EFFORT,
    MAX_EARLY,
    MAX_EFFORT,
    MAX_SASL,
    MIN_IDLE_SECONDS,
    MIN_MAX_FRAME,
    SASL,
    Amqp10FrameSplitter,
    Amqp10State,
    Amqp10Step,
    Closed,
    EndpointSettings,
    Event,
    Frame,
    LoginAsked,
    Opened,
    frame,
    step,
)
from dtx.wire.amqp10.errors import Amqp10FrameError, AmqpError, Condition, malformed
from dtx.wire.amqp10.link import Carrier
from dtx.wire.amqp10.performatives import (
    ANONYMOUS,
    Begin,
    Close,
    End,
    Error,
    Open,
    SaslChallenge,
    SaslCode,
    SaslFrame,
    SaslInit,
    SaslMechanisms,
    SaslOutcome,
    SaslResponse,
    Transfer,
    peer_error,
    read_performative,
    read_sasl,
)
from dtx.wire.amqp10.session import Session

AMQP_HEADER: Final = Protocol.AMQP_1_0.value
SASL_HEADER: Final = Protocol.AMQP_1_0_SASL.value
"""The headers of the protocol and of its SASL layer (AMQP 1.0, 2.2, 5.3)."""
_CONNECTION: Final = "the connection"
_NOTHING: Final = memoryview(b"")


def matches(data: bytes, wanted: bytes) -> bool | None:
    """Return whether *data* begins with the header *wanted*; ``None`` if *data* is too short."""
    start = data[: len(wanted)]
    if not wanted.startswith(start):
        return False
    return True if len(start) == len(wanted) else None


class _Phase(Enum):
    """What the next bytes of the peer must be."""

    FIRST_HEADER = auto()
    SASL_INIT = auto()
    SASL_RESPONSE = auto()
    LOGIN = auto()
    """The login must be answered first."""
    AMQP_HEADER = auto()
    FRAMES = auto()
    OVER = auto()


class _Rest(NamedTuple):
    """Received frames that are not handled yet, and the error of the data after them."""

    buffer: bytes
    frames: Sequence[Frame]
    failure: Amqp10FrameError | None


class Connection(Carrier):
    """One end of a connection.

    Args:
        settings: the settings and limits of this end.
        now: the time in seconds on a monotonic clock.
        client: whether this end is a client; it then has no SASL layer.
    """

    def __init__(self, settings: EndpointSettings, now: float, *, client: bool = False) -> None:
        super().__init__(settings)
        self._phase = _Phase.AMQP_HEADER if client else _Phase.FIRST_HEADER
        if client:
            self._out.append(AMQP_HEADER)
        self._header_sent = client
        self._held = b""
        self._init: SaslInit | None = None
        self._splitter = Amqp10FrameSplitter(settings.max_frame_size)
        self._sessions: dict[int, Session] = {}
        self._by_remote: dict[int, Session] = {}
        self._rest: _Rest | None = None
        self._unread = b""
        self._received_at = self._sent_at = now
        self._remote_channel_max = 0xFFFF
        self._beat: float | None = None

    @property
    def over(self) -> bool:
        """Whether the connection has ended, except for the data that ``data_to_send`` still has."""
        return self._phase is _Phase.OVER or self.state is Amqp10State.CLOSED

    def session(self, channel: int) -> Session | None:
        """Return the session with this channel at this end; ``None`` if there is none."""
        return self._sessions.get(channel)

    def data_to_send(self, now: float) -> list[bytes | memoryview]:
        """Return the data for the peer in pieces, and forget it. Payloads are slices of the shell's buffers."""
        out, self._out = self._out, []
        if out:
            self._sent_at = now
        return out

    def tick(self, now: float) -> tuple[float | None, list[Event]]:
        """Close the connection to a silent peer, and send empty frames as often as the peer demands (2.4.5).

        Returns:
            The latest time for the next call, ``None`` for no further call; and the events.
        """
        deadlines = []
        if not self.over and self.settings.idle_seconds is not None and self.state not in CLOSING_STATES:
            if now - self._received_at >= self.settings.idle_seconds:
                self._fail(AmqpError(Condition.RESOURCE_LIMIT_EXCEEDED, "nothing came before the idle time-out"))
            else:
                deadlines.append(self._received_at + self.settings.idle_seconds)
        if self._beat is not None and self.sending:
            if now - self._sent_at >= self._beat:
                self._out.append(EMPTY_FRAME)
                self._sent_at = now
            deadlines.append(self._sent_at + self._beat)
        return min(deadlines, default=None), self._take_events()

    def receive(self, data: bytes, now: float) -> list[Event]:
        """Process data from the peer.

        Args:
            data: any number of bytes. The shell must not read while a login is being decided, or while this end is
                ``behind``. In the second case it must call this again soon, without bytes.
            now: the time in seconds.

        Returns:
            The events of calls since the last time, then the events of *data*, in order.
        """
        self._received_at = now
        self.effort = 0
        if self._rest is None:
            self._take(data)
        else:
            self._unread += data
            self._run_step()
            rest, self._rest = self._rest, None
            self._each(*rest)
            if self._rest is None:
                unread, self._unread = self._unread, b""
                self._take(unread)
        return self._take_events()

    def note_received(self, now: float) -> None:
        """Count the peer as alive at *now*, although no data arrives: the shell does not read."""
        self._received_at = now

    @property
    def behind(self) -> bool:
        """Whether received frames are not handled yet, because the turn was over."""
        return self._rest is not None

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _take(self, data: bytes) -> None:
        while data and self._phase not in (_Phase.LOGIN, _Phase.FRAMES, _Phase.OVER):
            data = self._held + data
            self._held = b""
            sasl = self._phase in (_Phase.SASL_INIT, _Phase.SASL_RESPONSE)
            used = self._sasl_frame(data) if sasl else self._header(data)
            if used == 0:
                self._held = data
                return
            data = data[used:]
        if self._phase is _Phase.LOGIN:
            self._held += data
            if len(self._held) > MAX_EARLY:
                self._end_of_stream(AmqpError(Condition.RESOURCE_LIMIT_EXCEEDED, "too much before the login"))
        elif self._phase is _Phase.FRAMES:
            self._frames(data)

    # Headers and login.

    def _header(self, data: bytes) -> int:
        """Read a protocol header. Return its size in bytes, or 0 if it is incomplete."""
        sasl = self._phase is _Phase.FIRST_HEADER and bool(self.settings.mechanisms)
        wanted = SASL_HEADER if sasl else AMQP_HEADER
        found = matches(data, wanted)
        if found is None:
            return 0
        if not self._header_sent or sasl:
            self._out.append(wanted)  # the answer to an unsupported header is a supported one (2.2)
        if not found:
            self._end_of_stream(AmqpError(Condition.FRAMING_ERROR, "a protocol header that is not expected here"))
        elif sasl:
            self._send_sasl(SaslMechanisms(sasl_server_mechanisms=self.settings.mechanisms))
            self._phase = _Phase.SASL_INIT
        else:
            self._header_sent = True
            self._phase = _Phase.FRAMES
        return len(wanted)

    def _send_sasl(self, performative: Composite) -> None:
        self._out.append(frame(SASL, 0, encode(performative)))

    def _sasl_frame(self, data: bytes) -> int:
        """Read sasl-init or sasl-response. Return its size in bytes, or 0 if it is incomplete."""
        try:
            buffer, frames = Amqp10FrameSplitter(MAX_SASL).feed(data)
        except Amqp10FrameError as error:
            buffer, frames = error.buffer, error.frames
            if not frames:
                self._end_of_stream(error)
                return len(data)
        if not frames:
            return 0
        kind, _, start, end = frames[0]
        try:
            self._on_sasl(read_sasl(buffer, start, end) if kind == SASL else None)
        except AmqpError as error:
            self._end_of_stream(error)
        return end

    def _on_sasl(self, performative: SaslFrame | None) -> None:
        match performative:
            case SaslInit() if self._phase is _Phase.SASL_INIT:
                self._init = performative
                if performative.mechanism not in self.settings.mechanisms:
                    self._phase = _Phase.LOGIN
                    self.refuse_login(SaslCode.AUTH)
                elif performative.initial_response is None and performative.mechanism != ANONYMOUS:
                    self._send_sasl(SaslChallenge(challenge=b""))  # client sends first: "MUST be empty" (RFC 4422, 5)
                    self._phase = _Phase.SASL_RESPONSE
                else:
                    self._ask_login(performative, performative.initial_response or b"")
            case SaslResponse() if self._phase is _Phase.SASL_RESPONSE and self._init is not None:
                self._ask_login(self._init, performative.response)
            case _:
                raise malformed("a frame that is not the next step of sasl")

    def _ask_login(self, init: SaslInit, response: bytes) -> None:
        self._phase = _Phase.LOGIN
        self.emit(LoginAsked(mechanism=init.mechanism, response=response, hostname=init.hostname))

    def login(self) -> list[Event]:
        """Accept the login, and process the data that arrived since then. Return the events for it."""
        if self._phase is _Phase.LOGIN:
            self._send_sasl(SaslOutcome(code=SaslCode.OK))
            self._phase = _Phase.AMQP_HEADER
            held, self._held = self._held, b""
            self._take(held)
        return self._take_events()

    def refuse_login(self, code: SaslCode) -> None:
        """Refuse the login with *code*, and end the connection."""
        if self._phase is _Phase.LOGIN:
            self._send_sasl(SaslOutcome(code=code))
            self._phase = _Phase.OVER

    def _end_of_stream(self, error: AmqpError) -> None:
        """End the connection without a close, which a peer without AMQP 1.0 cannot read."""
        self._phase = _Phase.OVER
        self.emit(Closed(error=peer_error(error), by_peer=False))

    # Calls of the shell.

    def open(self, *, hostname: str | None = None) -> None:
        """Send open. For a client, *hostname* is the virtual host.

        Raises:
            AmqpError: frame-size-too-small if open does not fit the peer's frames.
        """
        if self.state in CLOSING_STATES:
            return
        following = step(self.state, Amqp10Step.SEND_OPEN, _CONNECTION)
        idle = self.settings.idle_seconds
        self.send(
            0,
            Open(
                container_id=self.settings.container_id,
                hostname=hostname,
                max_frame_size=self.settings.max_frame_size,
                channel_max=self.settings.channel_max,
                idle_time_out=None if idle is None else int(idle * 500),
                offered_capabilities=self.settings.offered_capabilities,
                properties=self.settings.properties,
            ),
        )
        self.state = following

    def new_session(self) -> Session:
        """Return a new session. The shell then calls ``begin``.

        Raises:
            AmqpError: resource-limit-exceeded if all channels are in use.
        """
        return self._add()

    def close(self, error: Error | None = None) -> None:
        """Close the connection, or answer the peer's close.

        Raises:
            AmqpError: frame-size-too-small if open, which must go first, does not fit the peer's frames.
        """
        if self._phase is not _Phase.FRAMES:
            self._phase = _Phase.OVER
        if self._phase is _Phase.OVER or self.state in CLOSING_STATES:
            return
        if self.state in (Amqp10State.UNUSED, Amqp10State.OPEN_RECEIVED, Amqp10State.UNANSWERED):
            self.open()
        following = step(self.state, Amqp10Step.SEND_CLOSE, _CONNECTION)
        self.send(0, Close(error=error))
        self.state = following
        self._release()

    # Calls of sessions.

    def forget(self, channel: int) -> None:
        """Forget the session of that channel. Both ends have ended it."""
        del self._sessions[channel]

    # Frames of the peer.

    def _frames(self, data: bytes) -> None:
        failure = None
        try:
            buffer, frames = self._splitter.feed(data)
        except Amqp10FrameError as error:
            buffer, frames, failure = error.buffer, error.frames, error
        self._each(buffer, frames, failure)

    def _each(self, buffer: bytes, frames: Sequence[Frame], failure: Amqp10FrameError | None) -> None:
        """Handle frames until the turn is over. *failure* is the error of the data after them."""
        view = memoryview(buffer)
        for number, (kind, channel, start, end) in enumerate(frames):
            if self._work is not None or self.effort > MAX_EFFORT:
                self._rest = _Rest(buffer, frames[number:], failure)
                return
            self.effort += FRAME_EFFORT
            try:
                if kind != AMQP:
                    raise Amqp10FrameError("a frame of SASL after its outcome")
                if start != end:
                    self._on_frame(buffer, view, channel, start, end)
            except AmqpError as error:
                self._fail(error)
        if self._work is not None:
            self._rest = _Rest(buffer, (), failure)
            return
        if failure is not None:
            self._fail(failure)
        # Not sooner: the peer sent the data of this read before it could know of an extended window.
        while self.due:
            self.due.pop()()

    def _on_frame(self, buffer: bytes, view: memoryview, channel: int, start: int, end: int) -> None:
        if self.state is Amqp10State.CLOSED:
            return
        performative, position = read_performative(buffer, start, end)
        match performative:
            case Open():
                self._on_open(performative)
            case Close():
                self._on_close(performative)
            case _ if self.state in CLOSING_STATES:
                return
            case _ if self.state not in (Amqp10State.OPEN, Amqp10State.OPEN_RECEIVED):
                raise AmqpError(Condition.ILLEGAL_STATE, f"{performative.layout.name} before open, or after close")
            case Begin():
                self._on_begin(performative, channel)
            case _:
                session = self._by_remote.get(channel)
                if session is None:
                    raise Amqp10FrameError(f"no session on channel {channel}")
                if isinstance(performative, End):
                    del self._by_remote[channel]
                    session.on_end(performative)
                    if session.state is Amqp10State.CLOSED:
                        self.forget(session.channel)
                elif session.state not in CLOSING_STATES:
                    session.on_frame(performative, view[position:end] if position < end else _NOTHING)
                elif isinstance(performative, Transfer):
                    session.report_missed(performative.state)

    def _on_open(self, opened: Open) -> None:
        self.state = step(self.state, Amqp10Step.RECEIVE_OPEN, _CONNECTION)
        if opened.max_frame_size < MIN_MAX_FRAME:
            raise AmqpError(Condition.INVALID_FIELD, f"a max-frame-size of {opened.max_frame_size}, less than 512")
        self._remote_frame = opened.max_frame_size
        self._remote_channel_max = opened.channel_max
        if opened.idle_time_out:
            idle = opened.idle_time_out / 1000
            if idle < MIN_IDLE_SECONDS:
                raise AmqpError(Condition.NOT_ALLOWED, f"an idle time-out of {opened.idle_time_out} ms is too short")
            self._beat = idle / 2
        if self.state not in CLOSING_STATES:
            self.emit(Opened(open=opened))

    def _on_close(self, close: Close) -> None:
        reported = self.state in CLOSING_STATES
        self.state = step(self.state, Amqp10Step.RECEIVE_CLOSE, _CONNECTION)
        self._release()
        if not reported:
            self.emit(Closed(error=close.error, by_peer=True))

    def _on_begin(self, begin: Begin, channel: int) -> None:
        if channel > self.settings.channel_max:
            raise Amqp10FrameError(f"channel {channel} is above channel-max")
        if channel in self._by_remote:
            raise Amqp10FrameError(f"there is a session on channel {channel}")
        if begin.remote_channel is None:
            session = self._add()
        else:
            found = self._sessions.get(begin.remote_channel)
            if found is None or found.remote_channel is not None:
                raise AmqpError(
                    Condition.NOT_ALLOWED, f"begin answers channel {begin.remote_channel}, which awaits no begin"
                )
            session = found
        self._by_remote[channel] = session
        session.on_begin(begin, channel, answer=begin.remote_channel is not None)

    def _add(self) -> Session:
        self.effort += len(self._sessions)
        channel = next(number for number in range(len(self._sessions) + 1) if number not in self._sessions)
        if channel > self._remote_channel_max:
            raise AmqpError(Condition.RESOURCE_LIMIT_EXCEEDED, "no channel is left for another session")
        session = self._sessions[channel] = Session(self, channel)
        return session

    def _release(self) -> None:
        for session in self._sessions.values():
            session.release()
        self._sessions.clear()
        self._by_remote.clear()

    def _fail(self, error: AmqpError) -> None:
        """Close the connection because of an error of the peer. After a close, errors are ignored."""
        if self.state in CLOSING_STATES:
            return
        if self._phase is not _Phase.FRAMES:
            self._end_of_stream(error)
            return
        if self.state in (Amqp10State.CLOSE_RECEIVED, Amqp10State.UNANSWERED):
            return
        cause = peer_error(error)
        try:
            self.close(cause)
        except AmqpError:  # this end's open, which must go first, does not fit the peer's frames
            self._phase = _Phase.OVER
        self.emit(Closed(error=cause, by_peer=False))
