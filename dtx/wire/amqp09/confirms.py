"""Publisher confirms: which messages of a channel are safe, in the order in which they came.

A confirm waits for those before it, so that one basic.ack with ``multiple`` says it for all of them. Messages become
durable in the order of publishing anyway, except those that no queue takes: they wait for nothing else.
"""

from dtx.wire.amqp09.codec import packer
from dtx.wire.amqp09.methods import BasicAck, BasicNack

_ack = packer(BasicAck)
_nack = packer(BasicNack)


class Confirms:
    """The confirms of one channel.

    Args:
        channel: number.
    """

    __slots__ = ("_channel", "_confirmed", "_fates", "published")

    def __init__(self, channel: int) -> None:
        self._channel = channel
        self.published = 0
        """Publishes since confirm.select; a publish's number is what this is then."""
        self._confirmed = 0
        self._fates: dict[int, bool] = {}

    def settle(self, number: int, safe: bool) -> None:
        """Note the fate of a publish.

        Args:
            number: of the publish.
            safe: it is durable in all queues that take it; otherwise one refused it, or the outcome is not known.
        """
        self._fates[number] = safe

    def take(self) -> list[bytes]:
        """The basic.ack and basic.nack frames that can be sent now."""
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
