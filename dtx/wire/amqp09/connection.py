"""The engine of a connection: bytes in, events out; calls in, bytes out. It serves both ends, and opens no socket.

Theory of operation. :meth:`ConnectionEngine.receive` takes data of the peer and returns the events for it one by one.
The shell handles each event before the engine handles the next frame, so that a select affects the frame after it. If
the shell stops iterating, or after :data:`MAX_EFFORT` frames, the engine is ``behind``. The shell then calls
``receive(b"")`` in a later turn. The waiting frames of released channels are handled before new frames. The engine
answers errors of the peer, and returns an event for them.

The engine answers by itself only where an answer promises nothing: heartbeats, crossing closes, errors of the peer, and
each close at a client's end. At a server's end, a close-ok promises that all that the client sent before is durable. So
only the shell sends it.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Final

from dtx.wire.amqp09 import closes, methods
from dtx.wire.amqp09.channel import ChannelEngine, Shared
from dtx.wire.amqp09.codec import Method, Sender
from dtx.wire.amqp09.endpoint import TRANSITIONS, EndpointState, EndpointStep
from dtx.wire.amqp09.errors import FrameError, HardCode, WireError
from dtx.wire.amqp09.events import (
    ChannelFailed,
    ChannelOpened,
    ConnectionClosed,
    ConnectionClosing,
    ConnectionFailed,
    ConnectionMethodReceived,
    ConnectionOpened,
    EngineEvent,
    FramesPassed,
    LoginReceived,
    PeerSilent,
    SecureReceived,
    ServerStarted,
    TuneAgreed,
    TuneReceived,
    VhostRequested,
)
from dtx.wire.amqp09.frames import BODY, HEADER, HEARTBEAT, HEARTBEAT_FRAME, MIN_FRAME, Frame, FrameSplitter, Protocol
from dtx.wire.amqp09.handshake import capabilities
from dtx.wire.amqp09.methods import (
    BasicPublish,
    ChannelOpen,
    ConnectionClose,
    ConnectionCloseOk,
    ConnectionOpen,
    ConnectionOpenOk,
    ConnectionSecure,
    ConnectionSecureOk,
    ConnectionStart,
    ConnectionStartOk,
    ConnectionTune,
    ConnectionTuneOk,
)
from dtx.wire.amqp09.settings import MAX_EFFORT, MOST_AT_ONCE, EngineSettings, Memory, PeerEnd, Unbounded
from dtx.xa.codes import ReplyCode, XaError

_HEADER_SIZE: Final = 8
_HEADERS: Final = {protocol.value: protocol for protocol in (Protocol.AMQP_0_9_1, Protocol.AMQP_0_9)}
_MISSED: Final = 4
"""The number of half heartbeat intervals without data after which the peer counts as silent: two whole intervals."""
_CLOSE: Final = ConnectionClose.KEY
_CLOSE_OK: Final = ConnectionCloseOk.KEY
_NOTHING: Final[frozenset[int]] = frozenset()
_WORDS: Final = (methods.ConnectionUpdateSecret, methods.ConnectionBlocked, methods.ConnectionUnblocked)
_ON_ZERO: Final[dict[PeerEnd, dict[int, type[Method]]]] = {
    PeerEnd.SERVER: {row.KEY: row for row in _WORDS if row.SENT_BY & Sender.CLIENT},
    PeerEnd.CLIENT: {
        row.KEY: row for row in (*_WORDS, methods.ConnectionUpdateSecretOk) if row.SENT_BY & Sender.SERVER
    },
}
"""The methods, except close, that the peer of each end may send on channel 0 of an open connection."""
_JOINED: Final = methods.unwatched(Sender.CLIENT) | {HEADER, BODY}
"""The keys of the frames that ``Passing.JOINED`` joins."""


class ConnectionEngine:
    """One end of a connection.

    Args:
        settings: the settings and limits of this end.
        end: SERVER waits for the protocol header, CLIENT sends it.

    Attributes:
        state: the state of the connection.
        protocol: the protocol that the client's header requests.
        agreed: channel_max, frame_max in bytes and heartbeat in seconds; fixed values before tune-ok.
        capabilities: the names of the client's capabilities.
    """

    def __init__(self, settings: EngineSettings, end: PeerEnd) -> None:
        self.settings = settings
        self.state = EndpointState.OPENING
        self.protocol = Protocol.AMQP_0_9_1
        self.agreed = ConnectionTuneOk(0, MIN_FRAME, 0)
        self.capabilities: frozenset[bytes] = frozenset()
        self._end = end
        self._shared = Shared(settings, end, Unbounded())
        self._splitter = FrameSplitter(settings.opening_frame, MOST_AT_ONCE)
        self._header: bytes | None = b""
        """The received part of the client's protocol header; ``None`` once it is complete."""
        self._awaited = _NOTHING
        """The methods that the peer may send next in the handshake, as class << 16 | method."""
        self._offer = ConnectionTune(0, 0, 0)
        self._buffer = b""
        self._read: list[Frame] = []
        """The frames in the buffer."""
        self._rest: Iterator[Frame] = iter(())
        """The frames of the buffer that are not handled yet."""
        self._frames = self._rest
        """The same, or a frame that :meth:`_join` put back, then the same."""
        self._more = False
        """Some frames of the buffer may not be handled yet."""
        self._left = False
        """Data comes after the frames of the buffer: it is not cut yet, or is no frame."""
        self._failure: FrameError | None = None
        """The error of the data after the frames of the buffer."""
        self._unread = b""
        """Data that arrived before the frames of the buffer were handled."""
        self._closing: ConnectionClosing | None = None
        """The peer's close, until all earlier frames are handled."""
        self._received = self._sent = True
        """Whether data was received, and sent, since the last half heartbeat interval."""
        self._check_at: float | None = None
        self._silent = 0
        if end is PeerEnd.CLIENT:
            self._header = None
            self._awaited = frozenset((ConnectionStart.KEY,))

    @property
    def memory(self) -> Memory:
        """The account of the memory of incomplete bodies. Set it only while there are no channels."""
        return self._shared.memory

    @memory.setter
    def memory(self, memory: Memory) -> None:
        self._shared.memory = memory

    def channel(self, number: int) -> ChannelEngine:
        """Return the channel of that number.

        Raises:
            KeyError: there is no such channel.
        """
        return self._shared.channels[number]

    # -- data of the peer

    def receive(self, data: bytes) -> Iterator[EngineEvent]:
        """Process data of the peer; no bytes to continue with frames that were left. Return the events."""
        if data:
            self._received = True
            if self._more:
                self._unread += data
                self._left = True
            else:
                self._cut(data)
        return self.events()

    def events(self) -> Iterator[EngineEvent]:
        """Handle the waiting frames of released channels, then the frames that were left. Yield the events for them."""
        shared = self._shared
        channels, ready, joined = shared.channels, shared.ready, shared.joined
        effort = MAX_EFFORT
        asked = False
        while effort > 0:
            effort -= 1
            event = None
            if ready:
                asked = False
                event = self._next_of(next(iter(ready)))
            elif self._closing is not None:
                self._frames = iter(())  # frames after the peer's close are ignored
                if not asked:
                    asked = True
                    event = self._close_if_nothing_waits()
                elif self._left:
                    event = self._at_end_of_frames()
                else:
                    break
            else:
                frames = self._frames
                for key, number, start, end in frames:
                    channel = channels.get(number)
                    try:
                        if channel is None:
                            event = self._off_channel(key, number, start, end)
                        elif number in joined and key in _JOINED:
                            event = self._join(start, end)
                        else:
                            event = channel.receive(key, self._buffer, start, end)
                    except (XaError, WireError) as error:
                        event = self._failed(channel, error, key)
                    if event is not None:
                        yield event
                    if ready or self._frames is not frames:  # a release, a close, or a frame that _join put back
                        event = None
                        break
                else:
                    if not self._left:
                        break
                    effort -= len(self._read)
                    event = self._at_end_of_frames()
            if event is not None:
                yield event
        else:
            return
        self._more, self._buffer, self._read = False, b"", []

    def _join(self, start: int, end: int) -> FramesPassed:
        """Join the consecutive frames of channels whose frames pass joined."""
        joined, unseen, rest = self._shared.joined, _JOINED, self._rest
        for frame in self._frames:
            key, number, _, end_of_frame = frame
            if number not in joined or key not in unseen:
                self._frames = chain((frame,), rest)
                break
            end = end_of_frame
        return FramesPassed(self._buffer, start, end, self._read)

    @property
    def behind(self) -> bool:
        """Whether received frames are not handled yet: ``receive(b"")`` continues with them."""
        return self._more or bool(self._shared.ready) or (self._closing is not None and not self._something_waits())

    @property
    def is_pressed(self) -> bool:
        """Whether ``behind`` or ``wants_pause`` may be true. This is mostly false, and saves reading both."""
        shared = self._shared
        return self._more or bool(shared.ready or shared.heavy) or self._closing is not None

    @property
    def wants_to_send(self) -> bool:
        """Whether ``data_to_send`` has data. The engine may answer the peer without an event."""
        return bool(self._shared.out or self._shared.confirming)

    @property
    def wants_pause(self) -> bool:
        """Whether the shell must stop reading, because a held channel has too many waiting frames."""
        return bool(self._shared.heavy)

    def _cut(self, data: bytes | None) -> None:
        """Cut *data* into frames; ``None`` for the rest of the last data."""
        splitter = self._splitter
        try:
            if self._header is not None and data is not None:
                data = self._take_header(data)
            self._buffer, self._read = splitter.more() if data is None else splitter.feed(data)
            self._left = splitter.has_more
        except FrameError as error:
            self._buffer, self._read, self._failure = error.buffer, error.frames, error
            self._left = True
        self._frames = self._rest = iter(self._read)
        self._more = True

    def _take_header(self, data: bytes) -> bytes:
        assert self._header is not None, "the header is complete already"
        header = self._header + data
        if len(header) < _HEADER_SIZE:
            self._header = header
            return b""
        protocol = _HEADERS.get(header[:_HEADER_SIZE])
        if protocol is None:
            raise FrameError(HardCode.FRAME_ERROR, "not a protocol header of AMQP 0-9")
        self._header = None
        self.protocol = protocol
        return header[_HEADER_SIZE:]

    def _at_end_of_frames(self) -> EngineEvent | None:
        failure, self._failure = self._failure, None
        if failure is not None:
            self._more = self._left = bool(self._unread)  # a later turn handles it if this turn is over
            return None if self._closing is not None else self._fail(failure, 0)
        unread = None
        if not self._splitter.has_more:
            unread, self._unread = self._unread, b""
        self._cut(unread)
        self._left |= bool(self._unread)
        return None

    def _next_of(self, channel: ChannelEngine) -> EngineEvent | None:
        if channel.held or not channel.waits:
            del self._shared.ready[channel]
            return None
        key = channel.next_key()
        try:
            return channel.receive_next()
        except (XaError, WireError) as error:
            return self._failed(channel, error, key)

    def _failed(self, channel: ChannelEngine | None, error: XaError | WireError, key: int) -> EngineEvent | None:
        """Close the channel or the connection for a bad frame. For a content, the failed method is basic.publish."""
        if channel is None:
            key = 0
        elif key <= BODY:
            key = BasicPublish.KEY
        if isinstance(error, WireError):
            return self._fail(error, key)
        assert channel is not None, "only a frame on a channel may close the channel alone"
        channel.refuse(error, key)
        return ChannelFailed(channel.number, error)

    def _fail(self, error: WireError, key: int) -> EngineEvent | None:
        if self.state is EndpointState.CLOSE_RECEIVED:
            return None  # frames after the peer's close are ignored
        # "the server MUST send a valid protocol header … then close the socket" (AMQP 0-9-1, 4.2.2)
        known = self._header is None
        closed = self.close(closes.close_frame(error, 0, key) if known else Protocol.AMQP_0_9_1.value)
        return ConnectionFailed(error) if closed else None

    def _off_channel(self, key: int, number: int, start: int, end: int) -> EngineEvent | None:
        """Handle a frame on channel 0, or on a channel that is not open."""
        if number:
            return self._on_no_channel(key, number)
        if key == HEARTBEAT:
            return None
        return self._on_zero(key, self._buffer[start + 7 : end - 1])

    def _on_no_channel(self, key: int, number: int) -> EngineEvent | None:
        if self.state is EndpointState.OPENING:
            raise WireError(HardCode.CHANNEL_ERROR, f"channel {number} before connection.open")
        if self.state is not EndpointState.OPEN:
            return None
        if key != ChannelOpen.KEY or self._end is PeerEnd.CLIENT:
            raise WireError(HardCode.CHANNEL_ERROR, f"channel {number} is not open")
        granted = self.agreed.channel_max
        if number > granted:
            raise WireError(HardCode.NOT_ALLOWED, f"channel {number} is above the negotiated channel_max ({granted})")
        self._shared.channels[number] = ChannelEngine(self._shared, number)
        return ChannelOpened(number)

    def _on_zero(self, key: int, payload: bytes) -> EngineEvent | None:
        state = self.state
        if key == _CLOSE:
            return self._on_close(payload)
        if state is EndpointState.CLOSE_SENT:
            if key != _CLOSE_OK:
                return None
            self._transition(EndpointStep.RECEIVE_CLOSE_OK)
            return ConnectionClosed()
        if state is EndpointState.OPENING:
            if key not in self._awaited:
                raise WireError(HardCode.COMMAND_INVALID, "method is not the next step of the handshake")
            self._awaited = _NOTHING
            return self._on_step(key, payload)
        if state is not EndpointState.OPEN:
            return None
        row = _ON_ZERO[self._end].get(key)
        if row is None:
            raise WireError(HardCode.COMMAND_INVALID, "method is illegal on channel 0")
        return ConnectionMethodReceived(row.decode(payload))

    def _on_close(self, payload: bytes) -> EngineEvent | None:
        if self.state is EndpointState.CLOSE_SENT:
            self._shared.out.append(ConnectionCloseOk().frame(0))
            return None
        if self.state not in (EndpointState.OPENING, EndpointState.OPEN):
            return None
        try:
            close = ConnectionClose.decode(payload)
        except WireError:
            if self._end is PeerEnd.CLIENT:
                raise
            close = ConnectionClose(0, b"")  # a malformed close of a client closes the connection too
        self._closing, self._frames = ConnectionClosing(close), iter(())
        return None

    def _close_if_nothing_waits(self) -> EngineEvent | None:
        closing = self._closing
        if self._something_waits():
            return None
        self._closing = None
        self._transition(EndpointStep.RECEIVE_CLOSE)
        if self._end is PeerEnd.CLIENT:
            self.close_ok()
        return closing

    def _something_waits(self) -> bool:
        return any(channel.waits for channel in self._shared.channels.values())

    # -- the handshake

    def _on_step(self, key: int, payload: bytes) -> EngineEvent:
        match key:
            case methods.ConnectionStartOk.KEY:
                login = ConnectionStartOk.decode(payload)
                self.capabilities = capabilities(login.client_properties)
                return LoginReceived(login)
            case methods.ConnectionSecureOk.KEY:
                return SecureReceived(ConnectionSecureOk.decode(payload).response)
            case methods.ConnectionTuneOk.KEY:
                self._agree(ConnectionTuneOk.decode(payload))
                self._awaited = frozenset((ConnectionOpen.KEY,))
                return TuneAgreed(self.agreed)
            case methods.ConnectionOpen.KEY:
                return VhostRequested(ConnectionOpen.decode(payload).virtual_host)
            case methods.ConnectionStart.KEY:
                return ServerStarted(ConnectionStart.decode(payload))
            case methods.ConnectionSecure.KEY:
                return SecureReceived(ConnectionSecure.decode(payload).challenge)
            case methods.ConnectionTune.KEY:
                return TuneReceived(ConnectionTune.decode(payload))
            case _:
                ConnectionOpenOk.decode(payload)
                self._transition(EndpointStep.OPEN)
                return ConnectionOpened()

    def _agree(self, wanted: ConnectionTuneOk) -> None:
        """Check the limits that the client has chosen.

        Raises:
            WireError: 530 if a limit is 0 (no limit) or above the offer ("the server MUST close the connection"), or
                frame_max is below frame-min-size.
        """
        offer = self._offer
        if not 0 < wanted.channel_max <= offer.channel_max:
            raise _not_within("channel_max", wanted.channel_max, "higher than the maximum allowed", offer.channel_max)
        if not 0 < wanted.frame_max <= offer.frame_max:
            raise _not_within("frame_max", wanted.frame_max, "higher than the maximum allowed", offer.frame_max)
        if wanted.frame_max < MIN_FRAME:
            raise _not_within("frame_max", wanted.frame_max, "lower than the minimum allowed", MIN_FRAME)
        self._have_agreed(wanted)

    def _have_agreed(self, agreed: ConnectionTuneOk) -> None:
        self.agreed = agreed
        self._shared.frame_max = self._splitter.max_frame = agreed.frame_max

    def _send_handshake(self, method: Method, *awaited: type[Method]) -> None:
        """Send a method of the handshake, and expect one of *awaited*. Outside the handshake, do nothing."""
        if self.state is EndpointState.OPENING:
            self._awaited = frozenset(row.KEY for row in awaited)
            self._shared.out.append(method.frame(0))

    def greet(self, start: ConnectionStart) -> None:
        """Send connection.start, the offer of the server."""
        self._send_handshake(start, ConnectionStartOk)

    def secure(self, challenge: bytes) -> None:
        """Send connection.secure, a SASL challenge."""
        self._send_handshake(ConnectionSecure(challenge), ConnectionSecureOk)

    def tune(self, offer: ConnectionTune) -> None:
        """Send connection.tune after a login has succeeded. channel_max and frame_max in *offer* must not be 0."""
        self._offer = offer
        self._send_handshake(offer, ConnectionTuneOk)

    def refuse_login(self, reason: str) -> bool:
        """Close the connection after a login has failed.

        Returns:
            Whether a connection.close is sent: only to a client with the capability ``authentication_failure_close``.
            Otherwise "the server MUST … close the socket" without an answer (AMQP 0-9-1, 2.2.4).
        """
        sends_close = b"authentication_failure_close" in self.capabilities
        text = closes.describe(ReplyCode.ACCESS_REFUSED, reason)
        self.close(
            closes.connection_close(ReplyCode.ACCESS_REFUSED, text, ConnectionStartOk.KEY) if sends_close else b""
        )
        return sends_close

    def open_ok(self) -> None:
        """Send connection.open-ok. The client may open channels then."""
        if self._transition(EndpointStep.OPEN):
            self._shared.out.append(ConnectionOpenOk().frame(0))

    def start(self) -> None:
        """Send the protocol header, with which a client begins."""
        self._shared.out.append(Protocol.AMQP_0_9_1.value)

    def log_in(self, start_ok: ConnectionStartOk) -> None:
        """Send connection.start-ok, the login."""
        self._send_handshake(start_ok, ConnectionSecure, ConnectionTune)

    def secure_ok(self, response: bytes) -> None:
        """Send connection.secure-ok, the answer to a SASL challenge."""
        self._send_handshake(ConnectionSecureOk(response), ConnectionSecure, ConnectionTune)

    def tune_ok(self, agreed: ConnectionTuneOk, vhost: bytes) -> None:
        """Send connection.tune-ok with limits within the server's, and connection.open with the virtual host."""
        self._send_handshake(agreed)
        self._have_agreed(agreed)
        self._send_handshake(ConnectionOpen(vhost), ConnectionOpenOk)

    def adopt(self, agreed: ConnectionTuneOk) -> None:
        """Open the connection without a handshake: the peers of a proxy have agreed on these limits themselves."""
        self._have_agreed(agreed)
        self._transition(EndpointStep.OPEN)

    # -- other calls of the shell

    def open_channel(self, number: int) -> ChannelEngine:
        """Open a channel. *number* must be free, and at most ``agreed.channel_max``. Client end only."""
        channel = self._shared.channels[number] = ChannelEngine(self._shared, number)
        self._shared.out.append(ChannelOpen().frame(number))
        return channel

    def send(self, frame: bytes) -> None:
        """Send a whole frame on channel 0 if the connection is open."""
        if self.state is EndpointState.OPEN:
            self._shared.out.append(frame)

    def send_raw(self, data: bytes | memoryview) -> None:
        """Send whole frames in any state."""
        self._shared.out.append(data)

    def close(self, frame: bytes) -> bool:
        """Close the connection from this end.

        Args:
            frame: a connection.close; empty to send nothing.

        Returns:
            ``False`` if this end had closed already, or the connection had ended.
        """
        self._send_confirms()
        if not self._transition(EndpointStep.SEND_CLOSE):
            return False
        self._closing = None
        if frame:
            self._shared.out.append(frame)
        return True

    def close_ok(self) -> None:
        """Confirm the peer's close. All that the peer sent before it must be done."""
        if self._transition(EndpointStep.SEND_CLOSE_OK):
            self._shared.out.append(ConnectionCloseOk().frame(0))

    def end(self) -> None:
        """End the connection without sending, because the socket is closed. Drop all received data."""
        self.state = EndpointState.CLOSED
        self._end_channels()
        self._closing = self._failure = None
        self._read, self._frames, self._more, self._left = [], iter(()), False, False
        self._buffer = self._unread = b""
        self._splitter = FrameSplitter()

    def _end_channels(self) -> None:
        for channel in list(self._shared.channels.values()):
            channel.end()

    def _transition(self, step: EndpointStep) -> bool:
        following = TRANSITIONS.get((self.state, step))
        if following is None:
            return False
        self.state = following
        if following is not EndpointState.OPEN:
            self._end_channels()
        return True

    # -- data for the peer

    def data_to_send(self) -> list[bytes | memoryview]:
        """Return the data for the peer in pieces, and forget it. Due confirms are joined."""
        shared = self._shared
        if shared.confirming:
            self._send_confirms()
        out, shared.out = shared.out, []
        if out:
            self._sent = True
        return out

    def _send_confirms(self) -> None:
        for channel in list(self._shared.confirming):
            channel.send_confirms()

    def tick(self, now: float) -> tuple[float | None, list[EngineEvent]]:
        """Send and check heartbeats (AMQP 0-9-1, 4.2.7). A late call counts as one half interval.

        Args:
            now: the time in seconds on a monotonic clock.

        Returns:
            The time for the next call, ``None`` for no further call; and the events.
        """
        if not self.agreed.heartbeat or self.state is EndpointState.CLOSED:
            return None, []
        pause = self.agreed.heartbeat / 2
        if self._check_at is None:
            self._check_at = now + pause
        elif now >= self._check_at:
            self._check_at = now + pause
            if not self._sent:
                self._shared.out.append(HEARTBEAT_FRAME)
            self._sent = False
            self._silent = 0 if self._received else self._silent + 1
            self._received = False
            if self._silent >= _MISSED:
                return None, [PeerSilent()]
        return self._check_at, []

    def note_received(self) -> None:
        """Count the peer as alive, although no data arrives: the shell does not read, or other code does."""
        self._received = True


def _not_within(what: str, wanted: int, bound: str, limit: int) -> WireError:
    return WireError(HardCode.NOT_ALLOWED, f"negotiated {what} = {wanted} is {bound} ({limit})")
