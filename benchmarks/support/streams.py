"""Messages in bulk on one connection: published with confirms, consumed with acks, one at a time, drained."""

import time
from array import array
from struct import Struct
from typing import Final

from benchmarks.support.amqp import BASIC, CHANNEL, READ_SIZE, RawConnection, message_frames
from benchmarks.support.dialogue import STAMP
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.frames import FRAME_END, METHOD, OVERHEAD, header_frame
from tests.support.raw import FRAME_MAX, Refused, body_frames

WINDOW: Final = 500
"""Publishes that are not confirmed yet, or deliveries that are not acked yet, at most."""
_WRITE_SIZE: Final = 262_144
_ACK: Final = Struct(">BHIIQBB")
_TAG: Final = Struct(">Q")
_CONSUMER: Final = b"benchmark"


class _Confirms:
    """Counts acks of the server, which come one by one or for all up to a tag."""

    __slots__ = ("_ahead", "_low", "_rest")

    def __init__(self, low: int = 0) -> None:
        self._low = low
        self._ahead: set[int] = set()
        self._rest = b""

    @property
    def count(self) -> int:
        """How many publishes are confirmed."""
        return self._low + len(self._ahead)

    def feed(self, data: bytes) -> None:
        """Take what was read.

        Raises:
            Refused: it is something else than acks.
        """
        if not data:
            raise Refused("the connection was closed without a word")
        data = self._rest + data
        whole = len(data) - len(data) % _ACK.size
        self._rest = data[whole:]
        for kind, _, _, key, tag, multiple, end in _ACK.iter_unpack(data[:whole]):
            if key != methods.BasicAck.KEY or kind != METHOD or end != FRAME_END:
                raise Refused(f"expected confirms and got {data[:80].hex(' ')}")
            if multiple:
                self._low = max(self._low, tag)
                self._ahead = {other for other in self._ahead if other > self._low}
            else:
                self._ahead.add(tag)
            while self._low + 1 in self._ahead:
                self._low += 1
                self._ahead.remove(self._low)


def publish(connection: RawConnection, message: bytes, count: int, window: int = WINDOW) -> None:
    """Publish and return when all is confirmed.

    Args:
        connection: in confirm mode, on which nothing was published before.
        message: all frames of one publish.
        count: how many.
        window: how many of them may be unconfirmed.
    """
    batch = max(1, min(window // 4, _WRITE_SIZE // len(message)))
    block = memoryview(message * batch)
    confirms = _Confirms()
    sent = 0
    while confirms.count < count:
        while sent < count and sent - confirms.count <= window - batch:
            number = min(batch, count - sent)
            connection.socket.sendall(block[: number * len(message)])
            sent += number
        confirms.feed(connection.socket.recv(READ_SIZE))


def ping_pong(connection: RawConnection, message: bytes, count: int, published: int = 0) -> list[float]:
    """Publish one by one, each when the one before is confirmed; the seconds of each.

    Args:
        connection: in confirm mode.
        message: all frames of one publish.
        count: how many.
        published: how many were published on the connection before.
    """
    latencies = []
    confirms = _Confirms(published)
    for number in range(published + 1, published + count + 1):
        began = time.perf_counter()
        connection.socket.sendall(message)
        while confirms.count < number:
            confirms.feed(connection.socket.recv(READ_SIZE))
        latencies.append(time.perf_counter() - began)
    return latencies


def consume(connection: RawConnection, queue: bytes, size: int, properties: bytes, count: int, window: int) -> None:
    """Consume, ack each message, and return when the server has taken the last ack.

    Args:
        connection: on which nothing was consumed before.
        queue: published to by the default exchange.
        size: of each body, octets.
        properties: of each message.
        count: how many there are.
        window: prefetch.
    """
    connection.call(methods.BasicQos(0, window), methods.BasicQosOk)
    # no_wait: from here on the stream holds nothing but deliveries, and all of them are of one size
    connection.say(CHANNEL, methods.BasicConsume(queue, _CONSUMER, no_wait=True))
    method = OVERHEAD + 4 + 1 + len(_CONSUMER) + 8 + 1 + 1 + 1 + len(queue)
    header = len(header_frame(CHANNEL, BASIC, size, properties))
    unit = method + header + sum(map(len, body_frames(CHANNEL, bytes(size), FRAME_MAX)))
    tag_at = 7 + 4 + 1 + len(_CONSUMER)
    buffer = bytearray(READ_SIZE)
    total = acked = 0
    while acked < count:
        got = connection.socket.recv_into(buffer)
        if not got:
            raise Refused("the connection was closed without a word")
        boundary = -total % unit
        if boundary + tag_at + 8 <= got:
            (tag,) = _TAG.unpack_from(buffer, boundary + tag_at)
            if tag != (total + boundary) // unit + 1:
                raise Refused(f"expected a delivery and got {buffer[boundary : boundary + 80].hex(' ')}")
        total += got
        complete = total // unit
        acks = [
            _ACK.pack(METHOD, CHANNEL, 13, methods.BasicAck.KEY, tag, 0, FRAME_END)
            for tag in range(acked + 1, complete + 1)
        ]
        connection.socket.sendall(b"".join(acks))
        acked = complete
    connection.call(methods.BasicQos(0, window), methods.BasicQosOk)


def fill(connection: RawConnection, queue: bytes, count: int, size: int) -> None:
    """Make a queue that holds *count* persistent messages of *size* octets."""
    connection.declare(queue)
    connection.select_confirms()
    publish(connection, message_frames(b"", queue, bytes(size)), count)


def drain(connection: RawConnection, queue: bytes) -> "array[int]":
    """Take everything that is ready out of a queue; the stamps at the start of the bodies, in order."""
    count = connection.depth(queue)
    stamps = array("Q")
    if not count:
        return stamps
    connection.call(methods.BasicConsume(queue, _CONSUMER, no_ack=True), methods.BasicConsumeOk)
    stamps.extend(STAMP.unpack_from(body)[0] for body in connection.bodies(count))
    connection.call(methods.BasicCancel(_CONSUMER), methods.BasicCancelOk)
    return stamps
