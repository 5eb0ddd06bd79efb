"""What clients of benchmarks have in common: a raw client with one open channel, and what is asked on it."""

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
"""Properties: delivery mode 2 and nothing else."""
TRANSIENT: Final = b"\x10\x00\x01"
READ_SIZE: Final = 1 << 20
_CLOSES: Final = frozenset((methods.ChannelClose.KEY, methods.ConnectionClose.KEY))


def message_frames(exchange: bytes, routing_key: bytes, body: bytes, properties: bytes = PERSISTENT) -> bytes:
    """All frames of one publish."""
    return message(CHANNEL, routing_key, body, exchange=exchange, properties=properties)


class RawConnection(RawClient):
    """One connection with one open channel, closed in order. Use as a context manager, or call ``close``.

    Args:
        address: of the broker or of dtx.

    Raises:
        Refused: the server closed the connection, with its words.
    """

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self.log_in(frame_max=FRAME_MAX)
        self.open(CHANNEL)
        self.socket.settimeout(None)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close in order, unless the server has gone before."""
        with contextlib.suppress(OSError, ConnectionEnded):
            super().close()

    def call(self, request: Method, answer: type[Method]) -> bytes:
        """Send a method and wait for its answer; the answer's payload.

        Raises:
            Refused: it is another one.
        """
        self.say(CHANNEL, request)
        return self.read_method(CHANNEL, answer.KEY)

    def bodies(self, count: int) -> Iterator[bytes]:
        """The next body frames, read in bulk: nothing else may be under way behind them.

        Raises:
            Refused: the server has closed.
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
        """Use distributed transactions on the channel."""
        self.call(DtxSelect(), DtxSelectOk)

    def select_confirms(self) -> None:
        """Have publishes confirmed."""
        self.call(methods.ConfirmSelect(), methods.ConfirmSelectOk)

    def declare(self, queue: bytes) -> None:
        """Make a durable classic queue."""
        self.call(methods.QueueDeclare(queue, durable=True), methods.QueueDeclareOk)

    def depth(self, queue: bytes) -> int:
        """How many messages are ready."""
        answer = self.call(methods.QueueDeclare(queue, passive=True), methods.QueueDeclareOk)
        return methods.QueueDeclareOk.decode(answer).message_count

    def delete(self, queue: bytes) -> None:
        """Remove a queue with what is in it."""
        self.call(methods.QueueDelete(queue), methods.QueueDeleteOk)
