"""Unsettled deliveries of channels whose frames pass without inspection: select needs a channel without any.

dtx tracks a channel only after it consumes with acknowledgements. A channel counts its delivery tags from 1. While
deliveries are settled in order, two numbers are enough: the last tag up to which all are settled, and the last
delivered tag. If dtx is not sure, it reports that deliveries may be unsettled, and never the opposite.
"""

from collections.abc import Sequence
from struct import Struct
from typing import Final

from dtx.store.rabbitmq.consumed_queues import ConsumedQueue, ConsumedQueues
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.codec import Method
from dtx.wire.amqp09.frames import Frame

ANSWERS: Final = frozenset(
    {
        methods.BasicConsumeOk.KEY,
        methods.BasicCancel.KEY,
        methods.BasicCancelOk.KEY,
        methods.BasicGetOk.KEY,
        methods.BasicGetEmpty.KEY,
        methods.BasicRecoverOk.KEY,
        methods.QueueDeclareOk.KEY,
    }
)
"""Methods of the broker that are noted one by one; deliveries are found per read."""
_MULTIPLE: Final = {methods.BasicAck.KEY: 1, methods.BasicNack.KEY: 1, methods.BasicReject.KEY: 0}
"""The bit *multiple* of each method; basic.reject has another bit there."""
_SETTLE: Final = Struct(">QB")
_MOST_BEYOND: Final = 10_000
"""Tags kept because they were settled out of order; a channel with more is no longer tracked."""


class Tally:
    """Unsettled deliveries of one channel, from its first basic.consume or basic.get.

    Args:
        queues: that the channel consumes from.
    """

    __slots__ = ("_acknowledges", "_automatic", "_beyond", "_blind", "_last", "_queues", "_through")

    def __init__(self, queues: ConsumedQueues) -> None:
        self._queues = queues
        self._acknowledges = False
        """Whether the channel ever consumed or got with acknowledgements."""
        self._automatic = False
        """Whether the channel ever had a consumer without acknowledgements: its deliveries leave gaps in the tags."""
        self._blind = False
        self._last = 0
        self._through = 0
        self._beyond: set[int] = set()

    @property
    def watched(self) -> bool:
        """Whether deliveries and settlements of the channel must be reported."""
        return self._acknowledges and not self._automatic and not self._blind

    @property
    def open(self) -> str | None:
        """Why the channel cannot be selected, with the remedy; ``None`` if it can."""
        if self._queues.consumers or self._queues.consuming:
            return "that has consumers: cancel them first, and wait for cancel-ok"
        if self._queues.getting:
            return "with a basic.get that is not answered yet"
        if not self._acknowledges:
            return None
        if self._automatic or self._blind:
            return "whose deliveries dtx could not track: select the channel before it consumes"
        count = self._last - self._through - len(self._beyond)
        return f"with {count} unacknowledged deliveries: settle them first" if count else None

    # -- from the client

    def asked(self, consumed: ConsumedQueue | None, *, is_get: bool) -> None:
        """Note basic.consume or basic.get of the client; ``None``: the broker refuses it."""
        if consumed is None:
            self._blind = self._acknowledges = True
        else:
            self._automatic |= consumed.no_ack and not is_get
            self._acknowledges |= not consumed.no_ack

    def settled(self, tag: int, multiple: int) -> None:
        """Note that the client settled a delivery, or with *multiple* all up to its tag (0: all)."""
        if tag > self._last or self._blind:
            return  # unknown tag: the broker closes the channel
        if multiple:
            self._settle_through(tag or self._last)
        elif tag == self._through + 1:
            self._through = tag
        elif tag > self._through:
            self._beyond.add(tag)
            if len(self._beyond) > _MOST_BEYOND:
                self._beyond.clear()
                self._blind = True
        while self._through + 1 in self._beyond:
            self._through += 1
            self._beyond.discard(self._through)

    def _settle_through(self, tag: int) -> None:
        settled = range(self._through + 1, tag + 1)
        self._through = max(self._through, tag)
        if len(settled) < len(self._beyond):  # so that the total work is linear in the number of tags
            self._beyond.difference_update(settled)
        else:
            self._beyond = {tag for tag in self._beyond if tag > self._through}

    # -- from the broker

    def answered(self, method: Method) -> None:
        """Note a method of the broker, before its channel's :class:`ConsumedQueues` do."""
        match method:
            case methods.BasicGetOk(delivery_tag=tag):
                self.delivered(tag)
                if self._queues.getting and self._queues.getting[0].no_ack and not self._automatic:
                    self.settled(tag, 0)
            case methods.BasicRecoverOk():  # all earlier deliveries are back in their queues
                self.settled(0, 1)
            case _:
                pass

    def delivered(self, tag: int) -> None:
        """Note a delivery to the client."""
        self._last = max(self._last, tag)


class UnsettledDeliveries:
    """The tracked tallies of one connection."""

    def __init__(self) -> None:
        self.by_number: dict[int, Tally] = {}
        """By channel number on the client's side."""
        self.by_upstream: dict[int, Tally] = {}
        """By channel number at the broker."""

    def sort(self, number: int, upstream_number: int, tally: Tally) -> None:
        """Track the tally if it needs that, otherwise stop."""
        if tally.watched:
            self.by_number[number] = self.by_upstream[upstream_number] = tally
        else:
            self.drop(number, upstream_number, tally)

    def drop(self, number: int, upstream_number: int, tally: Tally) -> None:
        """Stop tracking a tally."""
        if self.by_number.get(number) is tally:
            del self.by_number[number]
        if self.by_upstream.get(upstream_number) is tally:
            del self.by_upstream[upstream_number]

    def from_client(self, buffer: bytes, frames: Sequence[Frame]) -> None:
        """Note the settlements in frames of the client."""
        tallies = self.by_number
        for key, number, start, end in frames:
            if key in _MULTIPLE and number in tallies and end - start == methods.SETTLE_FRAME:
                tag, bits = _SETTLE.unpack_from(buffer, start + 11)
                tallies[number].settled(tag, bits & _MULTIPLE[key])

    def from_broker(self, buffer: bytes, frames: Sequence[Frame]) -> None:
        """Note the last delivery of each channel in frames of the broker that were passed on.

        Raises:
            WireError: a basic.deliver is malformed.
        """
        missing = dict(self.by_upstream)
        for key, number, start, end in reversed(frames):
            if key == methods.BasicDeliver.KEY and (tally := missing.pop(number, None)) is not None:
                tally.delivered(methods.BasicDeliver.decode(buffer[start + 7 : end - 1]).delivery_tag)
                if not missing:
                    break
