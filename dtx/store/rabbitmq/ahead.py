"""The head start of a unit: its messages are with the broker while the log is still being told of the decision.

Theory of operation. What is published on a channel in tx mode happens at tx.commit and not before, and tx.commit is
sent when the decision is durable and not before. So the messages may go ahead: if the decision cannot be written, or
nobody knows whether it was, they are rolled back, and if dtx dies or the connection ends the broker forgets them.
Nothing depends on them either: whatever is wrong with the channel when the decision is there (an exchange is gone, the
connection was lost), the unit is sent whole, on another one, as if there had been no head start.

Only small units start ahead, and only while most channels of the lane are free: a channel that waits for the log does
nothing for others.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Final
from uuid import UUID

from dtx import failpoint
from dtx.failpoint import Point
from dtx.log.records import Unit, Work
from dtx.store.rabbitmq import messages
from dtx.store.rabbitmq.upstream import Answer, OwnChannel
from dtx.wire.amqp09 import keys, requests
from dtx.wire.amqp09.frames import method_frame

if TYPE_CHECKING:
    import asyncio

MOST_AHEAD: Final = 1 << 16
"""Octets of messages that may go ahead: what a socket takes at once, so that nothing waits in dtx's memory for them."""


class Stage(Enum):
    """Where a head start is."""

    PLANNED = "planned"
    SENT = "sent"
    OVER = "over"


class Ahead:
    """The messages of one unit, ahead of its tx.commit.

    Args:
        unit: as it is being written to the log.
        branch_id: of its branch.
        work: of the branch.
        borrow: gives a channel of the lane that is free, on the connection with the unit's lock; ``None`` for none.
        give_back: takes it back when nothing is published on it any more, or it is closed.
    """

    __slots__ = ("_borrow", "_branch_id", "_channel", "_give_back", "_stage", "_unit", "_work")

    def __init__(
        self,
        unit: Unit,
        branch_id: UUID,
        work: Sequence[Work],
        borrow: Callable[[str], OwnChannel | None],
        give_back: Callable[[OwnChannel], None],
    ) -> None:
        self._unit = unit
        self._branch_id = branch_id
        self._work = work
        self._borrow = borrow
        self._give_back = give_back
        self._channel: OwnChannel | None = None
        self._stage = Stage.PLANNED

    def begin(self) -> None:
        """Publish, if the lane has a channel for that, and if it is not over yet."""
        if self._stage is not Stage.PLANNED:
            return
        work, self._work = self._work, ()
        channel = self._channel = self._borrow(self._unit.lock)
        if channel is None:
            self._stage = Stage.OVER
            return
        self._stage = Stage.SENT
        frames = messages.commit_frames(channel.number, channel.upstream.frame_max, self._branch_id, work)
        channel.upstream.write(b"".join(frames))
        failpoint.at(Point.AHEAD_PUBLISHED)

    def take(self, unit: Unit, *, wanted: bool) -> OwnChannel | None:
        """The decision is durable: whoever calls goes on with the channel, on which all but tx.commit is sent.

        Args:
            unit: as the log has it.
            wanted: whether the unit is to be sent now, for the first time.

        Returns:
            ``None`` when the unit has to be sent whole: there is no channel, or it was lost or closed meanwhile.
        """
        channel = self._channel
        lost = channel is None or channel.closed is not None or channel.upstream.is_lost
        if lost or not wanted or unit is not self._unit:
            self.drop()
            return None
        self._stage, self._channel = Stage.OVER, None
        return channel

    def drop(self) -> None:
        """There is no decision, or nobody knows: what was published is rolled back. Idempotent."""
        channel, self._channel = self._channel, None
        self._stage = Stage.OVER
        self._work = ()
        if channel is None:
            return
        if channel.closed is not None or channel.upstream.is_lost:
            self._give_back(channel)
            return
        rolled_back = channel.send_raw(method_frame(channel.number, requests.TX_ROLLBACK), keys.TX_ROLLBACK_OK)

        def free(answer: "asyncio.Future[Answer]") -> None:
            if not answer.cancelled():
                answer.exception()  # it is closed then, which whoever takes it back sees
            channel.returned.clear()
            self._give_back(channel)

        rolled_back.add_done_callback(free)
