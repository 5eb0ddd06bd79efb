"""A raw client with one open channel, for the clients of benchmarks."""

import contextlib
from collections.abc import Iterator
from typing import Final

from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.codec import Method
from dtx.wire.amqp09.frames import BODY, FrameSplitter
from dtx.wire.amqp09.methods import DtxSelect, DtxSelectOk
from tests.support.raw import FRAME_MAX, Address, ConnectionEnded, RawClient, Refused, message

CHANNEL: Final = 1
BASIC: Final = 60
PERSISTENT: Final = b"\x10\x00\x02"
"""Properties with only delivery mode 2."""
TRANSIENT: Final = b"\x10\x00\x01"
READ_SIZE: Final = 1 << 20
_CLOSES: Final = frozenset((methods.ChannelClose.KEY, methods.ConnectionClose.KEY))


def message_frames(exchange: bytes, routing_key: bytes, body: bytes, properties: bytes = PERSISTENT) -> bytes:
    """Return all frames of one publish."""
    return message(CHANNEL, routing_key, body, exchange=exchange, properties=properties)


class RawConnection(RawClient):
    """A connection with one open channel, closed in order. Use as a context manager, or call ``close``.

    Args:
        address: of the broker or of dtx.

    Raises:
        Refused: the server closed the connection; the message has its reply text.
    """

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self.log_in(frame_max=FRAME_MAX)
        self.open(CHANNEL)
        self.socket.settimeout(None)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close in order, unless the server has closed the connection."""
        with contextlib.suppress(OSError, ConnectionEnded):
            super().close()

    def call(self, request: Method, answer: type[Method]) -> bytes:
        """Send a method, wait for its answer, and return the answer's payload.

        Raises:
            Refused: the server sent another method.
        """
        self.say(CHANNEL, request)
        return self.read_method(CHANNEL, answer.KEY)

    def bodies(self, count: int) -> Iterator[bytes]:
        """Yield the payloads of the next body frames, read in bulk: no other frames may follow them.

        Raises:
            Refused: the server has closed the connection or channel.
        """
        splitter = FrameSplitter(FRAME_MAX)
        read = bytes(self._input)
        self._input.clear()
        while count:
            data, read = read or self.socket.recv(READ_SIZE), b""
            if not data:
                raise Refused("the connection was closed without a word")
            buffer, frames = splitter.feed(data)
            for key, _, start, end in frames:
                if key == BODY:
                    count -= 1
                    yield buffer[start + 7 : end - 1]
                elif key in _CLOSES:
                    raise Refused(str(methods.ChannelClose.decode(buffer[start + 7 : end - 1])))

    def select_dtx(self) -> None:
        """Send dtx.select."""
        self.call(DtxSelect(), DtxSelectOk)

    def select_confirms(self) -> None:
        """Send confirm.select."""
        self.call(methods.ConfirmSelect(), methods.ConfirmSelectOk)

    def declare(self, queue: bytes) -> None:
        """Declare a durable classic queue."""
        self.call(methods.QueueDeclare(queue, durable=True), methods.QueueDeclareOk)

    def depth(self, queue: bytes) -> int:
        """Return the number of ready messages."""
        answer = self.call(methods.QueueDeclare(queue, passive=True), methods.QueueDeclareOk)
        return methods.QueueDeclareOk.decode(answer).message_count

    def delete(self, queue: bytes) -> None:
        """Delete a queue with its messages."""
        self.call(methods.QueueDelete(queue), methods.QueueDeleteOk)
