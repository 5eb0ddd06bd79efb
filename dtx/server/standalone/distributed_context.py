"""The distributed context: between start and end, the publishes and settlements of a channel belong to a branch.

Outside a branch, a selected channel is not transactional. Rollback returns all deliveries of the branch to their places
in their queues, rejected ones too. Commit removes rejected messages; their dead letters are publishes of the branch.
Requeued messages (basic.nack, basic.reject) return when the branch has ended, by commit or rollback.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from dtx.log.api import LogError
from dtx.log.changes import Slot
from dtx.manager.branch_runtime import BranchRuntime
from dtx.server.demarcation import DemarcationHandler
from dtx.server.standalone.answer_order import ChannelOrder
from dtx.server.standalone.client import Client
from dtx.server.standalone.contexts import ImmediateContext, PublisherChannel, Settled, Settlement
from dtx.store.postgres.consumers import QueueDelivery as HandedOut
from dtx.store.postgres.consumers import SourceQueue, return_slowly
from dtx.store.work import Delivery, HeldPublish
from dtx.wire.amqp09 import methods
from dtx.xa.codes import ReplyCode, XaError
from dtx.xa.model import Association, State


@dataclass(slots=True, eq=False)
class HeldDelivery(Delivery):
    """A delivery that was acknowledged or rejected in a branch.

    Args:
        index: the index of the queue that holds it.
    """

    index: SourceQueue | None = None


class DistributedContext:
    """The context of class dtx-demarcation.

    Args:
        client: the owner of the channel.
        order: the order of the channel.
        publisher: answers publishes outside a branch.
    """

    lock = ""

    def __init__(self, client: Client, order: ChannelOrder, publisher: PublisherChannel) -> None:
        self._client = client
        self._order = order
        self._outside = ImmediateContext(client, order, publisher)
        self._demarcation = DemarcationHandler(client.manager, client.parts.metrics, order.number, order)

    @property
    def outlives_the_connection(self) -> bool:
        """See :class:`Context`."""
        return self._demarcation.branch is not None

    @property
    def associations(self) -> Iterable[tuple[BranchRuntime, Association]]:
        """The branches with which the channel has an association, active or suspended."""
        return self._demarcation.associations

    # -- start and end

    def demarcate(self, call: methods.DtxStart | methods.DtxEnd, key: int) -> None:
        """Run start or end.

        Raises:
            XaError: as :meth:`~dtx.server.demarcation.DemarcationHandler.run`.
        """
        order, who = self._order, self._client.who
        if isinstance(call, methods.DtxEnd) and not call.suspend:
            self._doom_if_refused(call)
        frame = self._demarcation.run(call, who)
        if frame is not None:
            order.send(frame)
        else:
            order.run(self._demarcation.run_later(call, who, order.is_open), key)

    def _doom_if_refused(self, call: methods.DtxEnd) -> None:
        """Roll back a branch that publishes to a full queue. As with tx.commit, all of it happens or nothing."""
        entry = self._demarcation.associated_branch(call.xid)  # a suspended branch may be ended, too
        if entry is not None and entry.work is not None:
            reason = self._client.broker.refusal(entry.work)
            if reason is not None:
                self._client.manager.doom(entry, reason)

    # -- work of the branch

    def publish(self, message: HeldPublish, number: int) -> None:
        """Hold the message for the branch.

        Raises:
            XaError: 506, the branch exceeds its limits and is rolled back.
        """
        entry = self._demarcation.branch
        if entry is None:
            self._outside.publish(message, number)
        else:
            self._hold(entry, message)

    def _hold(self, entry: BranchRuntime, message: HeldPublish) -> None:
        work = entry.work
        if work is None or entry.branch.state is not State.ACTIVE:
            return  # the branch can only be rolled back, and its publishes are dropped already
        size = message.size
        if not work.fits(size):
            self._overflow(entry, work.excess(size))
        work.add_publish(message)

    def settle(self, deliveries: Settled, how: Settlement) -> None:
        """Hold the settlements for the branch.

        Raises:
            XaError: 506, the branch exceeds its limits and is rolled back.
        """
        entry = self._demarcation.branch
        if entry is None:
            self._outside.settle(deliveries, how)
            return
        work = entry.work
        if work is None or entry.branch.state is not State.ACTIVE:
            self._return(deliveries)  # rolled back already
            return
        if not work.fits(0, len(deliveries)):
            reason = work.excess(0, len(deliveries))
            self._return(deliveries)
            self._overflow(entry, reason)
        for tag, delivery in deliveries.items():
            queue = delivery.queue
            queue.hold(delivery)
            if how is Settlement.REQUEUE:
                work.add_outcome(partial(self._requeue, delivery))
                continue
            slot = Slot(queue.id, delivery.position)
            work.add_consume(
                HeldDelivery(self, tag, b"", b"", b"", delivery.redelivered, b"", None, 0, slot, queue),
            )
        if how is Settlement.REJECT:
            letters = [each for each in deliveries.values() if each.queue.arguments.dead_letter_exchange is not None]
            if letters:
                self._order.run(self._publish_letters(entry, letters), methods.BasicReject.KEY)

    def _return(self, deliveries: Settled) -> None:
        """Return what the client has settled in a branch that is rolled back."""
        returning = return_slowly(list(deliveries.values()), self._client.now)
        next(returning)  # suspends the queues until all messages have returned
        self._client.slices.run(returning)

    def _requeue(self, delivery: HandedOut, committed: bool) -> None:  # noqa: ARG002 - it returns in both cases
        delivery.queue.rollback((delivery.position,), self._client.now())

    async def _publish_letters(self, entry: BranchRuntime, rejected: Sequence[HandedOut]) -> bytes:
        """Publish dead letters of rejected messages in the branch. They are routed now, as its other publishes.

        The channel is occupied meanwhile, so the branch is not ended on it before.
        """
        client = self._client
        try:
            while rejected:
                letters = await client.broker.dead_letters(rejected, lambda message: message.properties)
                rejected = rejected[len(letters) :]
                for letter in letters:
                    if letter is not None:
                        self._hold(entry, letter)
        except LogError as error:
            client.manager.doom(entry, f"the rejected messages could not be read: {error}")
        return b""

    def release(self, deliveries: Sequence[Delivery]) -> None:
        """Return deliveries to their places, because the branch is rolled back before it voted."""
        now = self._client.now()
        queues: dict[SourceQueue, list[int]] = {}
        for delivery in cast("Sequence[HeldDelivery]", deliveries):
            assert delivery.index is not None
            assert delivery.slot is not None
            queues.setdefault(delivery.index, []).append(delivery.slot.position)
        for queue, positions in queues.items():
            queue.rollback(positions, now)

    def _overflow(self, entry: BranchRuntime, reason: str) -> None:
        self._client.manager.doom(entry, reason)
        raise XaError(ReplyCode.RESOURCE_ERROR, f"{reason}; the branch is rolled back (xid {entry.xid})")

    def shut_down(self) -> None:
        """End the channel's associations. Idle branches stay."""
        self._demarcation.lose()
