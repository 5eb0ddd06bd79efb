"""A client that may say anything: raw frames in any order, the handshake step by step or not at all."""

import contextlib
import socket
import ssl
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple, Self
from urllib.parse import unquote, urlsplit

from dtx.wire.amqp09 import handshake, methods
from dtx.wire.amqp09.frames import METHOD, body_frames, header_frame, method_frame

HEADER_0_9_1: Final = b"AMQP\x00\x00\x09\x01"
NO_PROPERTIES: Final = b"\x00\x00"
PATIENCE: Final = 20.0


class Frame(NamedTuple):
    """One frame. ``key``: class << 16 | method, or the frame's type."""

    key: int
    channel: int
    payload: bytes


class Peer:
    """One socket. Everything that waits gives up after *patience* seconds.

    Args:
        url: where to; user, password and vhost are used by :meth:`log_in`.
        tls: for amqps.
    """

    def __init__(self, url: str, *, patience: float = PATIENCE, tls: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(url)
        self.user, self.password = (unquote(word or "").encode() for word in (parts.username, parts.password))
        self.vhost = unquote(parts.path[1:]).encode()
        assert parts.hostname is not None
        assert parts.port is not None
        self.socket: socket.socket = socket.create_connection((parts.hostname, parts.port), patience)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname=parts.hostname)
        self.offered = methods.ConnectionTune(channel_max=0, frame_max=0, heartbeat=0)
        self.server_properties = b""
        self.mechanisms = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    # -- octets and frames

    def send(self, *data: bytes) -> None:
        """Send octets."""
        self.socket.sendall(b"".join(data))

    def say(self, channel: int, *payloads: bytes) -> None:
        """Send methods."""
        self.send(*(method_frame(channel, payload) for payload in payloads))

    def exactly(self, size: int) -> bytes:
        """That many octets; fewer when the peer has closed."""
        data = b""
        while len(data) < size:
            try:
                piece = self.socket.recv(size - len(data))
            except ConnectionResetError:
                break
            if not piece:
                break
            data += piece
        return data

    def frame(self) -> Frame | None:
        """The next frame; ``None`` when the server has closed."""
        head = self.exactly(7)
        if len(head) < 7:
            return None
        kind, channel, size = struct.unpack(">BHI", head)
        payload = self.exactly(size + 1)
        assert payload[-1:] == b"\xce", (head, payload)
        key = int.from_bytes(payload[:4], "big") if kind == METHOD else kind
        return Frame(key, channel, payload[:-1])

    def wait(self, *wanted: int, channel: int | None = None) -> Frame:
        """The next frame that is one of *wanted*; what comes before is skipped, the end is a failure."""
        while (frame := self.frame()) is not None:
            if frame.key in wanted and channel in (None, frame.channel):
                return frame
            assert frame.key not in (methods.ConnectionClose.KEY, methods.ChannelClose.KEY), (
                methods.ChannelClose.decode(frame.payload)
            )
        raise AssertionError(f"the server closed, instead of {[hex(key) for key in wanted]}")

    def end(self) -> methods.ConnectionClose | None:
        """How the server ends the connection: its connection.close, or ``None`` when it just closes the socket."""
        while (frame := self.frame()) is not None:
            if frame.key == methods.ConnectionClose.KEY:
                with contextlib.suppress(OSError):
                    self.say(0, methods.ConnectionCloseOk().encode())
                    self.drain()
                return methods.ConnectionClose.decode(frame.payload)
        return None

    def refusal(self, channel: int) -> methods.ChannelClose:
        """How the server ends the channel."""
        while (frame := self.frame()) is not None:
            assert frame.key != methods.ConnectionClose.KEY, methods.ConnectionClose.decode(frame.payload)
            if frame.key == methods.ChannelClose.KEY and frame.channel == channel:
                return methods.ChannelClose.decode(frame.payload)
        raise AssertionError("the server closed the socket")

    def drain(self) -> bytes:
        """Everything up to the end of the stream."""
        data = bytearray()
        with contextlib.suppress(ConnectionResetError):
            while piece := self.socket.recv(65536):
                data += piece
        return bytes(data)

    # -- conversations

    def begin(self) -> None:
        """Header, up to connection.start."""
        self.send(HEADER_0_9_1)
        start = methods.ConnectionStart.decode(self.wait(methods.ConnectionStart.KEY).payload)
        self.server_properties, self.mechanisms = start.server_properties, start.mechanisms

    def start_ok(self, mechanism: bytes = b"PLAIN", response: bytes | None = None, properties: bytes = b"") -> bytes:
        """The payload of connection.start-ok."""
        if response is None:
            response = handshake.plain(self.user, self.password)
        return methods.ConnectionStartOk(
            client_properties=properties, mechanism=mechanism, response=response, locale=b"en_US"
        ).encode()

    def tune_ok(self, channel_max: int | None = None, frame_max: int | None = None, heartbeat: int = 0) -> bytes:
        """The payload of connection.tune-ok; what is not given is as offered."""
        offered = self.offered
        return methods.ConnectionTuneOk(
            channel_max=offered.channel_max if channel_max is None else channel_max,
            frame_max=offered.frame_max if frame_max is None else frame_max,
            heartbeat=heartbeat,
        ).encode()

    def log_in(
        self,
        *,
        channel_max: int | None = None,
        frame_max: int | None = None,
        heartbeat: int = 0,
        properties: bytes = b"",
    ) -> Self:
        """The whole handshake."""
        self.begin()
        self.say(0, self.start_ok(properties=properties))
        self.offered = methods.ConnectionTune.decode(self.wait(methods.ConnectionTune.KEY).payload)
        self.say(0, self.tune_ok(channel_max, frame_max, heartbeat), methods.ConnectionOpen(self.vhost).encode())
        self.wait(methods.ConnectionOpenOk.KEY)
        return self

    def open(self, *channels: int) -> None:
        """Open channels."""
        self.send(*(methods.ChannelOpen().frame(channel) for channel in channels))
        for _ in channels:
            self.wait(methods.ChannelOpenOk.KEY)

    def close(self) -> None:
        """connection.close and its answer."""
        self.say(0, methods.ConnectionClose(200, b"bye").encode())
        self.wait(methods.ConnectionCloseOk.KEY)


def message(channel: int, routing_key: bytes, body: bytes, *, exchange: bytes = b"", size: int = 131072) -> bytes:
    """basic.publish and its content as frames."""
    parts = (
        methods.BasicPublish(exchange, routing_key).frame(channel),
        header_frame(channel, 60, len(body), NO_PROPERTIES),
        *body_frames(channel, body, size),
    )
    return b"".join(parts)


@contextlib.contextmanager
def logged_in(url: str) -> Iterator[Peer]:
    """A peer after the handshake, with channel 1 open."""
    with Peer(url) as peer:
        peer.log_in()
        peer.open(1)
        yield peer
