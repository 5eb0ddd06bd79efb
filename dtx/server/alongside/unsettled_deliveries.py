"""What a channel that passes unseen has consumed and not settled: select needs to know that it is nothing.

Nothing is watched before a channel consumes with acknowledgements. Then two numbers are enough as long as deliveries
are settled in their order: a channel counts its delivery tags from 1, so what is not settled lies between the last tag
that was settled with all before it, and the last one that was delivered. Where dtx cannot tell, it says that something
may be open; it never says the opposite.
"""

from collections import deque
from collections.abc import Sequence
from struct import Struct
from typing import Final

from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.errors import WireError
from dtx.wire.amqp09.frames import Frame

ANSWERS: Final = frozenset(
    {
        methods.BasicConsumeOk.KEY,
        methods.BasicCancel.KEY,
        methods.BasicCancelOk.KEY,
        methods.BasicGetOk.KEY,
        methods.BasicGetEmpty.KEY,
        methods.BasicRecoverOk.KEY,
    }
)
"""Methods of the broker that a tally is told of one by one; deliveries are looked for in what was read at once."""
_MULTIPLE: Final = {methods.BasicAck.KEY: 1, methods.BasicNack.KEY: 1, methods.BasicReject.KEY: 0}
"""The bit that means all up to the tag; that of basic.reject is another one."""
_SETTLE: Final = Struct(">QB")
_MOST_BEYOND: Final = 10_000
"""Tags that are remembered because they were settled out of order; a channel with more is not watched any longer."""


class Tally:
    """What one channel has consumed, from its first basic.consume or basic.get on."""

    __slots__ = (
        "_acknowledges",
        "_automatic",
        "_beyond",
        "_blind",
        "_consumers",
        "_consuming",
        "_getting",
        "_last",
        "_through",
    )

    def __init__(self) -> None:
        self._acknowledges = False
        """Whether it ever consumed or got with acknowledgements."""
        self._automatic = False
        """Whether it ever had a consumer without: its deliveries are not looked for, so tags are missing."""
        self._blind = False
        self._consumers: set[bytes] = set()
        self._consuming = 0
        self._getting: deque[bool] = deque()
        """For each basic.get that is not answered, whether it is without acknowledgement."""
        self._last = 0
        self._through = 0
        self._beyond: set[int] = set()

    @property
    def watched(self) -> bool:
        """Whether its deliveries and settlements have to be told."""
        return self._acknowledges and not self._automatic and not self._blind

    @property
    def open(self) -> str | None:
        """What keeps the channel from being selected, and what to do about it; ``None`` when nothing does."""
        if self._consumers or self._consuming:
            return "that has consumers: cancel them first, and wait for cancel-ok"
        if self._getting:
            return "with a basic.get that is not answered yet"
        if not self._acknowledges:
            return None
        if self._automatic or self._blind:
            return "that has consumed in ways of which dtx keeps no account: select one before it consumes"
        count = self._last - self._through - len(self._beyond)
        return f"with {count} unacknowledged deliveries: settle them first" if count else None

    # -- from the client

    def asked(self, key: int, payload: bytes) -> None:
        """The client sent basic.consume or basic.get."""
        try:
            if key == methods.BasicGet.KEY:
                no_ack = methods.BasicGet.decode(payload).no_ack
                self._getting.append(no_ack)
            else:
                consume = methods.BasicConsume.decode(payload)
                no_ack = consume.no_ack
                self._automatic |= no_ack
                if consume.no_wait:
                    self._consumers.add(consume.consumer_tag)
                else:
                    self._consuming += 1
        except WireError:  # that is for the broker to refuse
            self._blind = self._acknowledges = True
        else:
            self._acknowledges |= not no_ack

    def settled(self, tag: int, multiple: int) -> None:
        """The client settled a delivery, or with *multiple* all up to it (0: all)."""
        if tag > self._last or self._blind:
            return  # an unknown one: the broker closes the channel
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
        if len(settled) < len(self._beyond):  # a tag is looked for once, however many settlements come
            self._beyond.difference_update(settled)
        else:
            self._beyond = {tag for tag in self._beyond if tag > self._through}

    # -- from the broker

    def answered(self, key: int, payload: bytes) -> None:
        """The broker sent one of :data:`ANSWERS`.

        Raises:
            WireError: it is malformed.
        """
        match key:
            case methods.BasicConsumeOk.KEY:
                self._consuming -= 1
                self._consumers.add(methods.BasicConsumeOk.decode(payload).consumer_tag)
            case methods.BasicCancelOk.KEY:
                self._consumers.discard(methods.BasicCancelOk.decode(payload).consumer_tag)
            case methods.BasicCancel.KEY:
                self._consumers.discard(methods.BasicCancel.decode(payload).consumer_tag)
            case methods.BasicGetOk.KEY:
                tag = methods.BasicGetOk.decode(payload).delivery_tag
                self.delivered(tag)
                if self._getting and self._getting.popleft() and not self._automatic:
                    self.settled(tag, 0)
            case methods.BasicGetEmpty.KEY:
                if self._getting:
                    self._getting.popleft()
            case _:  # basic.recover-ok: all that was delivered before it has gone back
                self.settled(0, 1)

    def delivered(self, tag: int) -> None:
        """A delivery went to the client."""
        self._last = max(self._last, tag)


class UnsettledDeliveries:
    """The tallies of one connection that are watched."""

    def __init__(self) -> None:
        self.by_number: dict[int, Tally] = {}
        """By the channel's number at the client."""
        self.by_upstream: dict[int, Tally] = {}
        """By its number at the broker."""

    def sort(self, number: int, upstream_number: int, tally: Tally) -> None:
        """Watch a tally that needs it, and no other."""
        if tally.watched:
            self.by_number[number] = self.by_upstream[upstream_number] = tally
        else:
            self.drop(number, upstream_number, tally)

    def drop(self, number: int, upstream_number: int, tally: Tally) -> None:
        """Watch a tally no longer."""
        if self.by_number.get(number) is tally:
            del self.by_number[number]
        if self.by_upstream.get(upstream_number) is tally:
            del self.by_upstream[upstream_number]

    def from_client(self, buffer: bytes, frames: Sequence[Frame]) -> None:
        """What the client sent: settlements are noted."""
        tallies = self.by_number
        for key, number, start, end in frames:
            if key in _MULTIPLE and number in tallies and end - start == methods.SETTLE_FRAME:
                tag, bits = _SETTLE.unpack_from(buffer, start + 11)
                tallies[number].settled(tag, bits & _MULTIPLE[key])

    def from_broker(self, buffer: bytes, frames: Sequence[Frame]) -> None:
        """What was passed on of the broker's: the last delivery of each channel is noted.

        Raises:
            WireError: it is malformed.
        """
        missing = dict(self.by_upstream)
        for key, number, start, end in reversed(frames):
            if key == methods.BasicDeliver.KEY and (tally := missing.pop(number, None)) is not None:
                tally.delivered(methods.BasicDeliver.decode(buffer[start + 7 : end - 1]).delivery_tag)
                if not missing:
                    break
