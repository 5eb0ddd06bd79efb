"""Publishes and consumes many messages on one connection: in bulk, one at a time, or to drain a queue."""

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
"""Limit of unconfirmed publishes, or of unacknowledged deliveries."""
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
        """Number of confirmed publishes."""
        return self._low + len(self._ahead)

    def feed(self, data: bytes) -> None:
        """Take received bytes.

        Raises:
            Refused: they are not acks.
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
    """Publish, and return when all messages are confirmed.

    Args:
        connection: in confirm mode, without earlier publishes.
        message: all frames of one publish.
        count: number of publishes.
        window: limit of unconfirmed publishes.
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
    """Publish one message after the confirm of the one before, and return the seconds of each.

    Args:
        connection: in confirm mode.
        message: all frames of one publish.
        count: number of publishes.
        published: number of earlier publishes on the connection.
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
    """Consume, ack each message, and return when the server has processed the last ack.

    Args:
        connection: without earlier consumers.
        queue: its messages came from the default exchange.
        size: of each body, in bytes.
        properties: of each message.
        count: number of messages.
        window: prefetch.
    """
    connection.call(methods.BasicQos(0, window), methods.BasicQosOk)
    # no_wait: from here on there are only deliveries, all of the same size
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
    """Make a queue that holds *count* persistent messages of *size* bytes."""
    connection.declare(queue)
    connection.select_confirms()
    publish(connection, message_frames(b"", queue, bytes(size)), count)


def drain(connection: RawConnection, queue: bytes) -> "array[int]":
    """Consume all ready messages of a queue, and return the numbers in their bodies in order."""
    count = connection.depth(queue)
    stamps = array("Q")
    if not count:
        return stamps
    connection.call(methods.BasicConsume(queue, _CONSUMER, no_ack=True), methods.BasicConsumeOk)
    stamps.extend(STAMP.unpack_from(body)[0] for body in connection.bodies(count))
    connection.call(methods.BasicCancel(_CONSUMER), methods.BasicCancelOk)
    return stamps
