"""Publisher confirms: which messages of a channel are safe, said in the order in which they came.

A confirm waits for those before it, so that one basic.ack with ``multiple`` says it for all of them. Messages become
durable in the order of publishing anyway, but for those that no queue takes: they wait for nothing else.
"""

from typing import Final

from dtx.wire.amqp09.codec import packer
from dtx.wire.amqp09.methods import BasicAck, BasicNack

_ack: Final = packer(BasicAck)
_nack: Final = packer(BasicNack)


class Confirms:
    """The confirms of one channel.

    Args:
        channel: number.
    """

    __slots__ = ("_channel", "_confirmed", "_fates", "_published")

    def __init__(self, channel: int) -> None:
        self._channel = channel
        self._published = 0
        self._confirmed = 0
        self._fates: dict[int, bool] = {}

    def publish(self) -> int:
        """Count a publish; its number. They are counted from 1, beginning behind confirm.select."""
        self._published += 1
        return self._published

    def settle(self, number: int, safe: bool) -> None:
        """What became of a publish.

        Args:
            number: of :meth:`publish`.
            safe: it is durable in all queues that take it; otherwise one refused it, or nobody knows whether it is.
        """
        self._fates[number] = safe

    def take(self) -> bytes:
        """The basic.ack and basic.nack frames that can be sent now; none when there is nothing new to say."""
        fates = self._fates
        frames = []
        while (safe := fates.pop(self._confirmed + 1, None)) is not None:
            last = self._confirmed + 1
            while fates.get(last + 1) is safe:
                last += 1
                del fates[last]
            multiple = last - self._confirmed > 1
            channel = self._channel
            frames.append(_ack(channel, last, multiple) if safe else _nack(channel, last, multiple, requeue=False))
            self._confirmed = last
        return b"".join(frames)
