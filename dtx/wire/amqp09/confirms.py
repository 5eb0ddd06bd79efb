"""Publisher confirms of a channel, in the order of the publishes.

A confirm waits for the confirms before it, so that one basic.ack with ``multiple`` covers all of them. Messages become
durable in the order of publishing anyway. Only a message that no queue takes waits for nothing but this order.
"""

from dtx.wire.amqp09.codec import packer
from dtx.wire.amqp09.methods import BasicAck, BasicNack

_ack = packer(BasicAck)
_nack = packer(BasicNack)


class Confirms:
    """The confirms of one channel.

    Args:
        channel: the number of the channel.
    """

    __slots__ = ("_channel", "_confirmed", "_fates", "published")

    def __init__(self, channel: int) -> None:
        self._channel = channel
        self.published = 0
        """The number of publishes since confirm.select, and so the number of the last publish."""
        self._confirmed = 0
        self._fates: dict[int, bool] = {}

    def settle(self, number: int, safe: bool) -> None:
        """Record the outcome of a publish.

        Args:
            number: the number of the publish.
            safe: whether it is durable in all queues that take it. If not, a queue refused it, or the outcome is
                unknown.
        """
        self._fates[number] = safe

    def take(self) -> list[bytes]:
        """Return the basic.ack and basic.nack frames that can be sent now, and remove their confirms."""
        fates = self._fates
        frames = []
        while (safe := fates.pop(self._confirmed + 1, None)) is not None:
            last = self._confirmed + 1
            while fates.get(last + 1) is safe:
                last += 1
                del fates[last]
            multiple = last - self._confirmed > 1
            frames.append(_ack(self._channel, last, multiple) if safe else _nack(self._channel, last, multiple, False))
            self._confirmed = last
        return frames
