"""A client of AMQP 0-9-1 that hides nothing: every frame as it comes, every channel exception as a value."""

import contextlib
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self
from urllib.parse import unquote, urlsplit

from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.frames import METHOD, body_frames, header_frame, method_frame
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
from dtx.xa.codes import XaFlag
from dtx.xa.xid import Xid

HEADER: Final = 2
HEARTBEAT: Final = 8
FRAME_END: Final = 0xCE
PATIENCE: Final = 30.0
"""Seconds for an answer: a test that waits longer has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """channel.close, field by field."""

    code: int
    text: str
    class_id: int
    method_id: int


class ConnectionEnded(Exception):
    """The server closed the connection, with its words if it had any."""


class RawClient:
    """A connection with a login by PLAIN.

    Args:
        url: where to, with user, password and vhost.
        frame_max: to agree on, octets.
    """

    def __init__(self, url: str, frame_max: int = 131072) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._socket = socket.create_connection((parts.hostname, parts.port or 5672), PATIENCE)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._input = self._socket.makefile("rb")
        self.largest = 0
        """Octets of the largest frame that came."""
        self._selected: set[int] = set()
        self._buffered: list[tuple[int, int, bytes]] = []
        try:
            user, password = (unquote(word or "").encode() for word in (parts.username, parts.password))
            self._log_in(user, password, unquote(parts.path[1:]).encode(), frame_max)
        except BaseException:
            self.abort()
            raise

    def _log_in(self, user: bytes, password: bytes, vhost: bytes, frame_max: int) -> None:
        self._socket.sendall(b"AMQP\x00\x00\x09\x01")
        self.read_method(0, methods.ConnectionStart.KEY)
        response = b"\x00" + user + b"\x00" + password
        start_ok = struct.pack(">II", methods.ConnectionStartOk.KEY, 0) + b"\x05PLAIN"
        self.send(0, start_ok + struct.pack(">I", len(response)) + response + b"\x05en_US")
        tune = self.read_method(0, methods.ConnectionTune.KEY)
        channels, offered, _ = struct.unpack(">HIH", tune[4:])
        self.frame_max = min(frame_max, offered)
        self.send(0, struct.pack(">IHIH", methods.ConnectionTuneOk.KEY, channels, self.frame_max, 0))
        self.send(0, struct.pack(">IB", methods.ConnectionOpen.KEY, len(vhost)) + vhost + b"\x00\x00")
        self.read_method(0, methods.ConnectionOpenOk.KEY)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """connection.close, and the answer to it."""
        with contextlib.suppress(OSError, ConnectionEnded):
            self.send(0, methods.ConnectionClose(200, b"done").encode())
            self.read_method(0, methods.ConnectionCloseOk.KEY)
        self.abort()

    def abort(self) -> None:
        """Close the socket."""
        self._input.close()
        self._socket.close()

    # -- frames

    def send(self, channel: int, *payloads: bytes) -> None:
        """Send methods in one write."""
        self.send_frames(b"".join(method_frame(channel, payload) for payload in payloads))

    def send_frames(self, data: bytes) -> None:
        """Send octets."""
        self._socket.sendall(data)

    def read(self) -> tuple[int, int, bytes]:
        """The next frame that is no heartbeat: type, channel, payload.

        Raises:
            ConnectionEnded: there is none.
        """
        while True:
            kind, channel, size = struct.unpack(">BHI", self._exactly(7))
            payload = self._exactly(size)
            self.largest = max(self.largest, size + 8)
            assert self._exactly(1) == bytes((FRAME_END,))
            if kind == METHOD and payload[:4] == methods.ConnectionClose.HEAD:
                code, length = struct.unpack_from(">HB", payload, 4)
                raise ConnectionEnded(f"{code} {payload[7 : 7 + length].decode()}")
            if kind != HEARTBEAT:
                return kind, channel, payload

    def _exactly(self, size: int) -> bytes:
        try:
            data = self._input.read(size)
        except ConnectionResetError:
            # a server that closes with octets unread in its socket resets it, whatever it meant
            raise ConnectionEnded("the server reset the socket") from None
        if len(data) != size:
            raise ConnectionEnded("the server closed the socket")
        return data

    def read_method(self, channel: int, *wanted: int) -> bytes:
        """The next method on *channel*, which must be one of *wanted*; frames of other channels are kept for later."""
        payload = self.next_method(channel)
        (key,) = struct.unpack_from(">I", payload)
        assert not wanted or key in wanted, f"{payload!r} where {[hex(key) for key in wanted]} was to come"
        return payload

    def next_method(self, channel: int) -> bytes:
        """The next method on *channel*."""
        for position, (kind, number, payload) in enumerate(self._buffered):
            if kind == METHOD and number == channel:
                del self._buffered[position]
                return payload
        while True:
            kind, number, payload = self.read()
            if kind == METHOD and number == channel:
                return payload
            self._buffered.append((kind, number, payload))

    def unheard(self, channel: int) -> int:
        """How many frames have come on *channel* that nobody has asked for."""
        return sum(number == channel for _, number, _ in self._buffered)

    def unread(self, channel: int, payload: bytes) -> None:
        """Have a method come again."""
        self._buffered.insert(0, (METHOD, channel, payload))

    # -- channels

    def open(self, channel: int, *, select: bool = False) -> int:
        """Open *channel*; with *select* for distributed transactions."""
        self.send(channel, methods.ChannelOpen().encode())
        self.read_method(channel, methods.ChannelOpenOk.KEY)
        self._selected.discard(channel)
        if select:
            self.ask(channel, DtxSelect())
            self._selected.add(channel)
        return channel

    def close_channel(self, channel: int) -> None:
        """channel.close, and the answer to it."""
        self.send(channel, methods.ChannelClose(200, b"done").encode())
        self.read_method(channel, methods.ChannelCloseOk.KEY)

    def ask(self, channel: int, call: DtxCall) -> XaFlag | int | Sequence[Xid] | None:
        """Send a dtx method: its flags, its timeout, its xids, or nothing. A refusal fails the test."""
        self.send(channel, call.encode())
        return self.answer(channel, call)

    def answer(self, channel: int, call: DtxCall) -> XaFlag | int | Sequence[Xid] | None:
        """The answer to a dtx method that was sent before."""
        payload = self.next_method(channel)
        (key,) = struct.unpack_from(">I", payload)
        if key == methods.ChannelClose.KEY:
            raise AssertionError(f"{call} was refused: {self._refused(payload)}")
        return read_answer(payload)

    def refusal(self, channel: int, call: DtxCall) -> Refusal:
        """Send a dtx method that must be refused by a channel exception.

        The channel is then opened again under its number, and selected if it was, by which the connection shows that
        it lives on.
        """
        return self.refusal_of(channel, call.encode())

    def refusal_of(self, channel: int, *payloads: bytes) -> Refusal:
        """The same for methods in their wire form; the last of them is answered."""
        self.send(channel, *payloads)
        return self.refused(channel)

    def refused(self, channel: int) -> Refusal:
        """The refusal of something that was sent before."""
        payload = self.next_method(channel)
        (key,) = struct.unpack_from(">I", payload)
        assert key == methods.ChannelClose.KEY, f"answered with {key:#x} instead of being refused"
        refusal = self._refused(payload)
        self.send(channel, methods.ChannelCloseOk().encode())
        self.open(channel, select=channel in self._selected)
        return refusal

    def _refused(self, payload: bytes) -> Refusal:
        code, length = struct.unpack_from(">HB", payload, 4)
        class_id, method_id = struct.unpack_from(">HH", payload, 7 + length)
        return Refusal(code=code, text=payload[7 : 7 + length].decode(), class_id=class_id, method_id=method_id)

    # -- work

    def publish(self, channel: int, routing_key: str, body: bytes = b"one", **options: Any) -> None:
        """basic.publish and its content; see :func:`publish_frames`."""
        self.send_frames(publish_frames(channel, routing_key, body, frame_max=self.frame_max, **options))

    def get(self, channel: int, queue: str) -> int | None:
        """basic.get: the delivery tag, ``None`` where the queue is empty."""
        got = self._get(channel, queue)
        return None if got is None else got[0]

    def take(self, channel: int, queue: str) -> bytes | None:
        """basic.get and basic.ack: the body, ``None`` where the queue is empty."""
        got = self._get(channel, queue)
        if got is None:
            return None
        self.send(channel, methods.BasicAck(got[0]).encode())
        return got[1]

    def _get(self, channel: int, queue: str) -> tuple[int, bytes] | None:
        self.send(channel, methods.BasicGet(queue.encode()).encode())
        payload = self.read_method(channel, methods.BasicGetOk.KEY, methods.BasicGetEmpty.KEY)
        if payload[:4] == methods.BasicGetEmpty.HEAD:
            return None
        left, body = -1, b""
        while left:
            kind, number, content = self.read()
            assert number == channel
            if kind == HEADER:
                left = struct.unpack_from(">Q", content, 4)[0]
            else:
                left, body = left - len(content), body + content
        return int(struct.unpack_from(">Q", payload, 4)[0]), body

    def consume_one(self, channel: int, queue: str) -> None:
        """basic.get and basic.ack of one message that is there, or under way on the channel for publishes."""
        deadline = time.monotonic() + PATIENCE
        while (tag := self.get(channel, queue)) is None:
            assert time.monotonic() < deadline, f"no message came into {queue}"
        self.send(channel, methods.BasicAck(tag).encode())

    def idle(self, channel: int, xid: Xid, *, queue: str | None = None, body: bytes = b"one") -> Xid:
        """Start and end a branch on a selected channel, with a publish to *queue* in it if there is one."""
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


def publish_frames(
    channel: int,
    routing_key: str,
    body: bytes = b"one",
    *,
    exchange: str = "",
    properties: bytes = b"\x00\x00",
    flags: int = 0,
    frame_max: int = 4096,
) -> bytes:
    """The frames of one publish; *properties* from the property flags on."""
    method = methods.BasicPublish(exchange.encode(), routing_key.encode(), flags).encode()
    header = header_frame(channel, methods.BasicPublish.KEY >> 16, len(body), properties)
    return b"".join((method_frame(channel, method), header, *body_frames(channel, body, frame_max)))


def read_answer(payload: bytes) -> XaFlag | int | Sequence[Xid] | None:
    """What an answer to a dtx method says."""
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
    """The xids of a recover-ok: one entry ``xids`` of type S, each wire form behind its length octet."""
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
