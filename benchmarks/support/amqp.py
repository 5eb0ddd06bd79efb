"""AMQP on a plain blocking socket: as little Python as can be between the clock and the wire."""

import socket
from dataclasses import dataclass
from struct import Struct
from typing import Final, Self
from urllib.parse import unquote, urlsplit

from dtx.wire.amqp09 import handshake, methods
from dtx.wire.amqp09.frames import Frame, FrameSplitter, Protocol, body_frames, header_frame, method_frame
from dtx.wire.amqp09.methods import DtxSelect, DtxSelectOk

CHANNEL: Final = 1
FRAME_MAX: Final = 131_072
BASIC: Final = 60
PERSISTENT: Final = b"\x10\x00\x02"
"""Properties: delivery mode 2 and nothing else."""
TRANSIENT: Final = b"\x10\x00\x01"
READ_SIZE: Final = 1 << 20
_CLOSES: Final = frozenset((methods.ChannelClose.KEY, methods.ConnectionClose.KEY))
_COUNTS: Final = Struct(">II")


class Refused(Exception):
    """The server answered with something else than what was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where to connect, as whom; picklable."""

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
        assert parts.port is not None
        return cls(
            host=parts.hostname,
            port=parts.port,
            user=unquote(parts.username or "guest"),
            password=unquote(parts.password or "guest"),
            vhost=unquote(parts.path[1:]) or "/",
        )


def message_frames(exchange: bytes, routing_key: bytes, body: bytes, properties: bytes = PERSISTENT) -> bytes:
    """All frames of one publish."""
    publish = methods.BasicPublish(exchange, routing_key).frame(CHANNEL)
    header = header_frame(CHANNEL, BASIC, len(body), properties)
    return b"".join((publish, header, *body_frames(CHANNEL, body, FRAME_MAX)))


class RawConnection:
    """One connection with one open channel. Use as a context manager, or call ``close``.

    Args:
        address: of the broker or of dtx.

    Raises:
        Refused: the server closed the connection, with its words.
    """

    def __init__(self, address: Address) -> None:
        self.socket = socket.create_connection((address.host, address.port), timeout=30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._splitter = FrameSplitter(FRAME_MAX)
        self._frames: list[tuple[bytes, Frame]] = []
        try:
            self._open(address)
        except BaseException:
            self.socket.close()
            raise
        self.socket.settimeout(None)

    def _open(self, address: Address) -> None:
        self.socket.sendall(Protocol.AMQP_0_9_1.value)
        self.expect(methods.ConnectionStart.KEY)
        response = handshake.plain(address.user.encode(), address.password.encode())
        start_ok = methods.ConnectionStartOk(
            client_properties=b"", mechanism=handshake.PLAIN, response=response, locale=b"en_US"
        )
        offer = methods.ConnectionTune.decode(self.call(start_ok.encode(), methods.ConnectionTune.KEY, channel=0))
        tune = methods.ConnectionTuneOk(channel_max=offer.channel_max, frame_max=FRAME_MAX, heartbeat=0)
        self.send(tune.encode(), channel=0)
        self.call(methods.ConnectionOpen(address.vhost.encode()).encode(), methods.ConnectionOpenOk.KEY, channel=0)
        self.call(methods.ChannelOpen().encode(), methods.ChannelOpenOk.KEY)

    def send(self, payload: bytes, *, channel: int = CHANNEL) -> None:
        """Send one method."""
        self.socket.sendall(method_frame(channel, payload))

    def call(self, payload: bytes, answer: int, *, channel: int = CHANNEL) -> bytes:
        """Send one method and wait for its answer; the answer's payload."""
        self.send(payload, channel=channel)
        return self.expect(answer)

    def expect(self, key: int) -> bytes:
        """The payload of the next frame, which must be of the method *key*.

        Raises:
            Refused: it is another one.
        """
        found, payload = self.next_frame()
        if found in _CLOSES:
            closed = methods.ChannelClose.decode(payload)
            raise Refused(f"{closed.reply_code} {closed.reply_text.decode(errors='replace')}")
        if found != key:
            raise Refused(f"expected method {key:#010x} and got {found:#010x}")
        return payload

    def next_frame(self) -> tuple[int, bytes]:
        """Key and payload of the next frame.

        Raises:
            Refused: the connection was closed without a word.
        """
        while not self._frames:
            data = self.socket.recv(READ_SIZE)
            if not data:
                raise Refused("the connection was closed without a word")
            buffer, frames = self._splitter.feed(data)
            self._frames = [(buffer, frame) for frame in reversed(frames)]
        buffer, (key, _, start, end) = self._frames.pop()
        return key, buffer[start + 7 : end - 1]

    # -- what benchmarks need ------------------------------------------------------------------------------------------

    def select_dtx(self) -> None:
        """Use distributed transactions on the channel."""
        self.call(DtxSelect().encode(), DtxSelectOk.KEY)

    def select_confirms(self) -> None:
        """Have publishes confirmed."""
        self.call(methods.ConfirmSelect().encode(), methods.ConfirmSelectOk.KEY)

    def declare(self, queue: bytes) -> None:
        """Make a durable classic queue."""
        self.call(methods.QueueDeclare(queue, durable=True).encode(), methods.QueueDeclareOk.KEY)

    def depth(self, queue: bytes) -> int:
        """How many messages are ready."""
        answer = self.call(methods.QueueDeclare(queue, passive=True).encode(), methods.QueueDeclareOk.KEY)
        messages, _ = _COUNTS.unpack(answer[-8:])
        return int(messages)

    def delete(self, queue: bytes) -> None:
        """Remove a queue with what is in it."""
        self.call(methods.QueueDelete(queue).encode(), methods.QueueDeleteOk.KEY)

    def close(self) -> None:
        """Close in order; the server's goodbye is waited for, so that its side is gone too."""
        try:
            self.send(methods.ConnectionClose(200, b"done").encode(), channel=0)
            while self.next_frame()[0] != methods.ConnectionCloseOk.KEY:
                pass
        except (OSError, Refused):
            pass
        finally:
            self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
