"""A client of AMQP 0-9-1 that shows all frames and can send any bytes.

The engine of dtx opens and closes the connection. Tests send and read frames directly: in any order, malformed, or as
single steps of a handshake.
"""

import contextlib
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self, TypeVar
from urllib.parse import unquote, urlsplit

from dtx.wire.amqp09 import content, handshake, methods
from dtx.wire.amqp09.codec import Method
from dtx.wire.amqp09.connection import ConnectionEngine
from dtx.wire.amqp09.events import (
    ConnectionClosed,
    ConnectionClosing,
    ConnectionOpened,
    EngineEvent,
    ServerStarted,
    TuneReceived,
)
from dtx.wire.amqp09.frames import BODY, FRAME_END, HEADER, HEARTBEAT, METHOD, OVERHEAD, method_frame
from dtx.wire.amqp09.methods import (
    DtxCall,
    DtxEnd,
    DtxForgetOk,
    DtxGetTimeoutOk,
    DtxPrepare,
    DtxRecover,
    DtxRecoverOk,
    DtxSelect,
    DtxSelectOk,
    DtxSetTimeoutOk,
    DtxStart,
)
from dtx.wire.amqp09.settings import EngineSettings, PeerEnd
from dtx.xa.codes import XaFlag
from dtx.xa.xid import Xid

NO_PROPERTIES: Final = b"\x00\x00"
FRAME_MAX: Final = 131_072
_READ_SIZE: Final = 65_536
PATIENCE: Final = 30.0
"""Seconds to wait for an answer before the test fails."""
E = TypeVar("E", bound=EngineEvent)


class Frame(NamedTuple):
    """One frame. ``key``: class << 16 | method, or the frame's type."""

    key: int
    channel: int
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Server, user and virtual host of a connection; picklable."""

    host: str
    port: int
    user: str
    password: str
    vhost: str

    @classmethod
    def of(cls, url: str) -> Self:
        """Read ``amqp://user:password@host:port/vhost``."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        user, password = (unquote("guest" if word is None else word) for word in (parts.username, parts.password))
        vhost = unquote(parts.path[1:]) or "/"
        return cls(host=parts.hostname, port=parts.port or 5672, user=user, password=password, vhost=vhost)

    def start_ok(
        self, mechanism: bytes = handshake.PLAIN, response: bytes | None = None, properties: bytes = b""
    ) -> methods.ConnectionStartOk:
        """The method connection.start-ok."""
        if response is None:
            response = handshake.plain(self.user.encode(), self.password.encode())
        return methods.ConnectionStartOk(properties, mechanism, response, b"en_US")

    @property
    def open(self) -> methods.ConnectionOpen:
        """The method connection.open."""
        return methods.ConnectionOpen(self.vhost.encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The fields of a channel.close."""

    code: int
    text: str
    class_id: int
    method_id: int


class Refused(AssertionError):
    """The answer of the server was not the expected one."""


class ConnectionEnded(Refused):
    """The server closed the connection; the message has its reply code and text, if any."""


class RawClient:
    """A connection. Every wait fails after *patience* seconds. Use as a context manager, or call ``abort``.

    Args:
        address: the address or URL of the server; :meth:`log_in` uses its user and vhost.
        tls: the TLS context, for amqps.
    """

    def __init__(
        self, address: Address | str, *, patience: float = PATIENCE, tls: ssl.SSLContext | None = None
    ) -> None:
        self.address = address = Address.of(address) if isinstance(address, str) else address
        self.socket: socket.socket = socket.create_connection((address.host, address.port), patience)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname=address.host)
        self.start = methods.ConnectionStart(0, 9, b"", b"", b"")
        self.offered = methods.ConnectionTune(0, 0, 0)
        self.largest = 0
        """The size of the largest received frame, in bytes."""
        self._engine = ConnectionEngine(EngineSettings(), PeerEnd.CLIENT)
        self._selected: set[int] = set()
        self._input = bytearray()
        """The bytes received after the last frame."""
        self._kept: deque[Frame] = deque()
        """Frames that were received before an awaited frame."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def abort(self) -> None:
        """Close the socket."""
        self.socket.close()

    # -- opening and closing

    def begin(self) -> None:
        """Send the header and read up to connection.start."""
        self._engine.start()
        self.start = self._event(ServerStarted).start

    def authenticate(
        self, mechanism: bytes = handshake.PLAIN, response: bytes | None = None, properties: bytes = b""
    ) -> None:
        """Do the handshake up to connection.tune.

        Raises:
            ConnectionEnded: the server refuses the login.
        """
        self.begin()
        self._engine.log_in(self.start_ok(mechanism, response, properties))
        self.offered = self._event(TuneReceived).tune

    def log_in(
        self,
        *,
        channel_max: int | None = None,
        frame_max: int | None = None,
        heartbeat: int = 0,
        properties: bytes = b"",
    ) -> Self:
        """Do the whole handshake; values that are not given are those offered by the server.

        Raises:
            ConnectionEnded: the server refuses; the socket is closed.
        """
        try:
            self.authenticate(properties=properties)
            tune_ok = self.tune_ok(channel_max, frame_max, heartbeat)
            self._engine.tune_ok(tune_ok, self.address.vhost.encode())
            self._event(ConnectionOpened)
        except BaseException:
            self.abort()
            raise
        return self

    def start_ok(
        self, mechanism: bytes = handshake.PLAIN, response: bytes | None = None, properties: bytes = b""
    ) -> methods.ConnectionStartOk:
        """connection.start-ok."""
        return self.address.start_ok(mechanism, response, properties)

    def tune_ok(
        self, channel_max: int | None = None, frame_max: int | None = None, heartbeat: int = 0
    ) -> methods.ConnectionTuneOk:
        """The method connection.tune-ok; values that are not given are those offered."""
        return methods.ConnectionTuneOk(
            self.offered.channel_max if channel_max is None else channel_max,
            self.offered.frame_max if frame_max is None else frame_max,
            heartbeat,
        )

    @property
    def frame_max(self) -> int:
        """The frame-max that :meth:`log_in` has agreed on, in bytes."""
        return self._engine.agreed.frame_max

    def close(self) -> None:
        """Send connection.close, wait for its answer and close the socket.

        Raises:
            ConnectionEnded, OSError: there is no answer.
        """
        self._engine.close(methods.ConnectionClose(200, b"done").frame(0))
        with contextlib.closing(self.socket):
            self._event(ConnectionClosed)

    def _event(self, wanted: type[E]) -> E:
        """Exchange data until the engine has an event, which must be a *wanted*."""
        while True:
            self.send_raw(*self._engine.data_to_send())
            for event in self._engine.receive(self._octets()):
                if isinstance(event, ConnectionClosing):
                    raise _ended(event.close)
                assert isinstance(event, wanted), event
                return event

    # -- frames

    def send_raw(self, *data: bytes | memoryview) -> None:
        """Send bytes, for example frames."""
        self.socket.sendall(b"".join(data))

    def say(self, channel: int, *said: bytes | Method) -> None:
        """Send methods, or encoded methods, in one write."""
        payloads = (one if isinstance(one, bytes) else one.encode() for one in said)
        self.send_raw(*(method_frame(channel, payload) for payload in payloads))

    def _octets(self) -> bytes:
        """The next frame as bytes.

        Raises:
            ConnectionEnded: there is no further frame.
        """
        self._fetch(7)
        if len(self._input) < 7:
            raise ConnectionEnded("the server closed the socket")
        size = int.from_bytes(self._input[3:7], "big") + OVERHEAD
        self._fetch(size)
        data = bytes(self._input[:size])
        assert len(data) == size, data
        assert data[-1] == FRAME_END, data
        del self._input[:size]
        self.largest = max(self.largest, size)
        return data

    def _fetch(self, size: int) -> None:
        """Read until the input has *size* bytes, or fewer if the server has closed."""
        while len(self._input) < size:
            try:
                data = self.socket.recv(_READ_SIZE)
            except ConnectionResetError:
                return  # closing a socket with unread bytes resets it, also after a regular close
            if not data:
                return
            self._input += data

    def frame(self) -> Frame | None:
        """The next frame; ``None`` if the server has closed."""
        if self._kept:
            return self._kept.popleft()
        try:
            data = self._octets()
        except ConnectionEnded:
            return None
        kind, channel = struct.unpack_from(">BH", data)
        key = int.from_bytes(data[7:11], "big") if kind == METHOD else kind
        return Frame(key, channel, data[7:-1])

    def read(self) -> Frame:
        """The next frame except heartbeats.

        Raises:
            ConnectionEnded: there is no further frame, or it is connection.close.
        """
        while (frame := self.frame()) is not None:
            if frame.key == methods.ConnectionClose.KEY:
                raise _ended(methods.ConnectionClose.decode(frame.payload))
            if frame.key != HEARTBEAT:
                return frame
        raise ConnectionEnded("the server closed the socket")

    def wait(self, *wanted: int, channel: int | None = None) -> Frame:
        """The next frame that is one of *wanted*; others are skipped, and a close by the server raises."""
        while (frame := self.frame()) is not None:
            if frame.key in wanted and channel in (None, frame.channel):
                return frame
            if frame.key in (methods.ConnectionClose.KEY, methods.ChannelClose.KEY):
                raise Refused(methods.ChannelClose.decode(frame.payload))
        raise ConnectionEnded(f"the server closed, instead of {[hex(key) for key in wanted]}")

    def end(self) -> methods.ConnectionClose | None:
        """The server's connection.close; ``None`` if it closes only the socket."""
        while (frame := self.frame()) is not None:
            if frame.key == methods.ConnectionClose.KEY:
                with contextlib.suppress(OSError):
                    self.say(0, methods.ConnectionCloseOk())
                    self.drain()
                return methods.ConnectionClose.decode(frame.payload)
        return None

    def channel_end(self, channel: int) -> methods.ChannelClose:
        """The server's channel.close of *channel*; other frames are skipped."""
        while (frame := self.read()).key != methods.ChannelClose.KEY or frame.channel != channel:
            pass
        return methods.ChannelClose.decode(frame.payload)

    def drain(self) -> bytes:
        """All bytes up to the end of the stream."""
        with contextlib.suppress(ConnectionResetError):
            while data := self.socket.recv(_READ_SIZE):
                self._input += data
        return bytes(self._input)

    def read_method(self, channel: int, *wanted: int) -> bytes:
        """The next method on *channel*, which must be one of *wanted*; frames of other channels are kept for later."""
        payload = self.next_method(channel)
        key = int.from_bytes(payload[:4], "big")
        if wanted and key not in wanted:
            raise Refused(f"{payload!r} where {[hex(key) for key in wanted]} was to come")
        return payload

    def next_method(self, channel: int) -> bytes:
        """The next method on *channel*."""
        return self._next(lambda frame: frame.channel == channel and frame.key > HEARTBEAT).payload

    def read_content(self, channel: int) -> bytes:
        """The body of the next content on *channel*."""
        header = self._next(lambda frame: frame.channel == channel)
        assert header.key == HEADER
        left, body = content.header(header.payload).body_size, b""
        while len(body) < left:
            part = self._next(lambda frame: frame.channel == channel)
            assert part.key == BODY
            body += part.payload
        assert len(body) == left
        return body

    def _next(self, wanted: Callable[[Frame], bool]) -> Frame:
        """The next frame that is *wanted*; those before it are kept."""
        before = []
        try:
            while not wanted(frame := self.read()):
                before.append(frame)
        finally:
            self._kept.extendleft(reversed(before))
        return frame

    def unheard(self, channel: int) -> int:
        """The number of kept frames of *channel*."""
        return sum(frame.channel == channel for frame in self._kept)

    def unread(self, channel: int, payload: bytes) -> None:
        """Put a method back, so that it is read again."""
        self._kept.appendleft(Frame(int.from_bytes(payload[:4], "big"), channel, payload))

    # -- channels

    def open(self, *channels: int, select: bool = False) -> int:
        """Open channels, with *select* for distributed transactions; return the last one."""
        self.send_raw(*(methods.ChannelOpen().frame(channel) for channel in channels))
        for channel in channels:
            self.read_method(channel, methods.ChannelOpenOk.KEY)
            self._selected.discard(channel)
            if select:
                self.ask(channel, DtxSelect())
                self._selected.add(channel)
        return channels[-1]

    def close_channel(self, channel: int) -> None:
        """Send channel.close and wait for its answer."""
        self.say(channel, methods.ChannelClose(200, b"done"))
        self.read_method(channel, methods.ChannelCloseOk.KEY)

    def ask(self, channel: int, call: DtxCall) -> XaFlag | int | Sequence[Xid] | None:
        """Send a dtx method; return the flag, timeout or xids of the answer, if any. A refusal fails the test."""
        self.say(channel, call)
        return self.answer(channel, call)

    def answer(self, channel: int, call: DtxCall) -> XaFlag | int | Sequence[Xid] | None:
        """The answer to a dtx method that was sent before."""
        payload = self.next_method(channel)
        if payload[:4] == methods.ChannelClose.HEAD:
            raise Refused(f"{call} was refused: {_refusal(payload)}")
        return read_answer(payload)

    def refusal(self, channel: int, call: DtxCall) -> Refusal:
        """Send a dtx method that must be refused by a channel exception.

        The channel number is then opened again, and selected if it was; this shows that the connection is still open.
        """
        return self.refusal_of(channel, call.encode())

    def refusal_of(self, channel: int, *payloads: bytes) -> Refusal:
        """As :meth:`refusal`, for encoded methods, one of which must be refused."""
        self.say(channel, *payloads)
        return self.refused(channel)

    def refused(self, channel: int) -> Refusal:
        """The refusal of a method that was sent before; the channel is opened again."""
        refusal = _refusal(self.read_method(channel, methods.ChannelClose.KEY))
        self.say(channel, methods.ChannelCloseOk())
        self.open(channel, select=channel in self._selected)
        return refusal

    # -- work

    def publish(
        self, channel: int, routing_key: str, body: bytes = b"one", *, exchange: str = "", **options: Any
    ) -> None:
        """Send a basic.publish and its content; see :func:`message`."""
        key, place = routing_key.encode(), exchange.encode()
        self.send_raw(message(channel, key, body, exchange=place, frame_max=self.frame_max, **options))

    def get(self, channel: int, queue: str) -> int | None:
        """basic.get: the delivery tag; ``None`` if the queue is empty."""
        got = self._get(channel, queue)
        return None if got is None else got[0]

    def take(self, channel: int, queue: str) -> bytes | None:
        """basic.get and basic.ack: the body; ``None`` if the queue is empty."""
        got = self._get(channel, queue)
        if got is None:
            return None
        self.say(channel, methods.BasicAck(got[0]))
        return got[1]

    def _get(self, channel: int, queue: str) -> tuple[int, bytes] | None:
        self.say(channel, methods.BasicGet(queue.encode()))
        payload = self.read_method(channel, methods.BasicGetOk.KEY, methods.BasicGetEmpty.KEY)
        if payload[:4] == methods.BasicGetEmpty.HEAD:
            return None
        return methods.BasicGetOk.decode(payload).delivery_tag, self.read_content(channel)

    def consume_one(self, channel: int, queue: str) -> None:
        """basic.get and basic.ack of one message, which may be late."""
        deadline = time.monotonic() + PATIENCE
        while (tag := self.get(channel, queue)) is None:
            assert time.monotonic() < deadline, f"no message came into {queue}"
        self.say(channel, methods.BasicAck(tag))

    def idle(self, channel: int, xid: Xid, *, queue: str | None = None, body: bytes = b"one") -> Xid:
        """Start and end a branch on a selected channel, with a publish to *queue* if it is given."""
        self.ask(channel, DtxStart(xid=xid))
        if queue is not None:
            self.publish(channel, queue, body)
        assert self.ask(channel, DtxEnd(xid=xid)) is XaFlag.OK
        return xid

    def prepared(self, channel: int, xid: Xid, *, queue: str, body: bytes = b"one") -> Xid:
        """A prepared branch that has published *body* to *queue*."""
        self.idle(channel, xid, queue=queue, body=body)
        assert self.ask(channel, DtxPrepare(xid=xid)) is XaFlag.OK
        return xid

    def recover(self, channel: int) -> Iterator[Sequence[Xid]]:
        """A scan, batch by batch, up to the empty one; it is not ended."""
        batch = self.ask(channel, DtxRecover(startscan=True, endscan=False))
        while batch:
            assert isinstance(batch, list)
            yield batch
            batch = self.ask(channel, DtxRecover(startscan=False, endscan=False))


@contextlib.contextmanager
def session(address: Address | str, frame_max: int | None = None) -> Iterator[RawClient]:
    """A client that is logged in, and closed at the end unless the server has closed."""
    client = RawClient(address).log_in(frame_max=frame_max)
    try:
        yield client
    finally:
        with contextlib.suppress(OSError, ConnectionEnded):
            client.close()


@contextlib.contextmanager
def logged_in(url: str) -> Iterator[RawClient]:
    """A client that is logged in, with channel 1 open; at the end the socket is closed without connection.close."""
    with RawClient(url) as client:
        client.log_in()
        client.open(1)
        yield client


def message(
    channel: int,
    routing_key: bytes,
    body: bytes = b"one",
    *,
    exchange: bytes = b"",
    properties: bytes = NO_PROPERTIES,
    flags: int = 0,
    frame_max: int = FRAME_MAX,
) -> bytes:
    """basic.publish and its content as frames; *properties* begin with the property flags."""
    publish = methods.BasicPublish(exchange, routing_key, flags).frame(channel)
    return content.message(publish, channel, properties, body, frame_max)


def _ended(close: methods.ConnectionClose) -> ConnectionEnded:
    return ConnectionEnded(f"{close.reply_code} {close.reply_text.decode()}")


def _refusal(payload: bytes) -> Refusal:
    close = methods.ChannelClose.decode(payload)
    class_id, method_id = divmod(close.failed, 1 << 16)
    return Refusal(code=close.reply_code, text=close.reply_text.decode(), class_id=class_id, method_id=method_id)


def read_answer(payload: bytes) -> XaFlag | int | Sequence[Xid] | None:
    """The result in an answer to a dtx method."""
    (key,) = struct.unpack_from(">I", payload)
    rest = payload[4:]
    if key == DtxRecoverOk.KEY:
        return read_xids(rest)
    if key == DtxGetTimeoutOk.KEY:
        return int(struct.unpack(">I", rest)[0])
    if key in (DtxSelectOk.KEY, DtxForgetOk.KEY, DtxSetTimeoutOk.KEY):
        assert not rest
        return None
    return XaFlag(struct.unpack(">H", rest)[0])


def read_xids(table: bytes) -> list[Xid]:
    """The xids of a recover-ok: one entry ``xids`` of type S, each wire form after its length octet."""
    size, length = struct.unpack_from(">IB", table)
    assert size == len(table) - 4
    assert table[5 : 5 + length] == b"xids"
    assert table[5 + length : 6 + length] == b"S"
    (octets,) = struct.unpack_from(">I", table, 6 + length)
    data = table[10 + length :]
    assert octets == len(data)
    xids = []
    while data:
        xids.append(Xid.from_wire(data[1 : 1 + data[0]]))
        data = data[1 + data[0] :]
    return xids


def body_frames(channel: int, body: bytes, frame_max: int) -> list[bytes]:
    """*body* as frames of at most *frame_max* bytes each (0: one frame); none if it is empty."""
    room = frame_max - OVERHEAD if frame_max else len(body) or 1
    parts = (body[start : start + room] for start in range(0, len(body), room))
    return [struct.pack(">BHI", BODY, channel, len(part)) + part + bytes((FRAME_END,)) for part in parts]
