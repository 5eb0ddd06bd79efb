"""Links to receivers: messages of a node, as far as the client's credit goes.

A link may be told to acquire in a transaction: then each delivery names it, and what becomes of the transaction becomes
of the delivery and of its outcome together (4.4.3, 4.4.4.3). Nothing is sent in one that can only be rolled back.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from dtx.server.amqp10.mapping import from_basic
from dtx.server.amqp10.nodes import Handed, Origin, kills
from dtx.server.limits import MAX_UNACKED
from dtx.wire.amqp09.errors import WireError
from dtx.wire.amqp10.coordination import TXN_ID, Transaction, WorkRefused, provisional
from dtx.wire.amqp10.coordination import Work as Kind
from dtx.wire.amqp10.endpoint import Flowed
from dtx.wire.amqp10.errors import AmqpError, Condition
from dtx.wire.amqp10.link import Link
from dtx.wire.amqp10.performatives import (
    ACCEPTED,
    RELEASED,
    Accepted,
    DeliveryState,
    Modified,
    Outcome,
    Rejected,
    Released,
    told,
)
from dtx.wire.amqp10.session import Session

if TYPE_CHECKING:
    from dtx.server.amqp10.connection import Connection
    from dtx.server.amqp10.work import Retired, Work

_MAX_BACKLOG: Final = 1 << 20
"""Octets that wait for the session windows of a client; its links get nothing more meanwhile."""


_SETTLED_AT_ONCE: Final = 500
"""Deliveries that are settled in one step, a millisecond or less."""


class _InWork(NamedTuple):
    """A transaction, and what it does."""

    transaction: Transaction
    work: "Work"


class Outgoing:
    """One link from a node to a client.

    Args:
        connection: of the client.
        session, link: the engine's ends.
        node: where messages come from.
        settled: they are settled when they are sent.
        default: what becomes of a delivery that is settled without an outcome.

    Raises:
        XaError: the node gives nothing.
    """

    def __init__(
        self, connection: "Connection", session: Session, link: Link, node: Origin, *, settled: bool, default: Outcome
    ) -> None:
        self._connection = connection
        self.session = session
        self.place = session.channel, link.handle
        self._link = link
        self.node = node
        self._settled = settled
        self._default = default
        self._sent = 0
        self._open = True
        self.unsettled: dict[int, object] = {}
        """What was taken from the node and is the client's, by the engine's numbers."""
        self.retired: dict[int, Retired] = {}
        """Deliveries whose outcome belongs to a transaction, and that the client has not settled."""
        self._acquires: _InWork | None = None
        """What is sent belongs to it."""
        self._acquired: dict[int, _InWork] = {}
        """Those of the unsettled deliveries that were sent in a transaction."""
        self._returning: list[tuple[int, object, bool]] = []
        """What returns to the queue: number, message, and whether the client has settled it."""
        node.begin(self)

    # -- messages

    @property
    def full(self) -> bool:
        """See :class:`~dtx.server.amqp10.nodes.Receiver`."""
        return (
            not self._connection.outbox.has_room
            or self.session.connection.backlog > _MAX_BACKLOG
            or len(self.unsettled) + len(self.retired) >= MAX_UNACKED
            or self._is_vain
        )

    @property
    def _is_vain(self) -> bool:
        """Whether what is sent would only return: the transaction that it belongs to can only be rolled back."""
        return self._acquires is not None and not self._acquires.work.is_active

    @property
    def credit(self) -> int:
        """See :class:`~dtx.server.amqp10.nodes.Receiver`."""
        return self._link.credit

    @property
    def draining(self) -> bool:
        """See :class:`~dtx.server.amqp10.nodes.Receiver`."""
        return self._link.drain

    def deliver(self, taken: object, message: Handed) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Receiver`. The node may be amid its own work, so it is asked later."""
        try:
            payload = from_basic(
                message.content, message.exchange, message.routing_key, redelivered=message.redelivered
            )
        except WireError as malformed:
            reason = f"a message of the node cannot be read: {malformed}"
            self._connection.soon(partial(self._give_up, taken, AmqpError(Condition.DECODE_ERROR, reason)))
            return
        self._sent += 1
        acquires = self._acquires
        state = None if acquires is None else provisional(acquires.transaction, ACCEPTED if self._settled else None)
        try:
            number = self._link.send(self._sent.to_bytes(8, "big"), payload, settled=self._settled, state=state)
        except AmqpError as error:  # larger than what the client takes
            self._connection.soon(partial(self._give_up, taken, error))
            return
        if number is None:
            self._connection.soon(lambda: self.node.requeue((taken,)))
        elif not self._settled:
            self.unsettled[number] = taken
            if acquires is not None:
                self._acquired[number] = acquires
        elif acquires is not None:
            acquires.work.retire(self, number, taken, ACCEPTED, settled=True, kind=Kind.ACQUISITION)
            if self._is_vain:
                self._connection.soon(self._end_drain)
        else:
            self.node.accept((taken,))
        self._connection.pump()

    def _give_up(self, taken: object, error: AmqpError) -> None:
        self.node.requeue((taken,))
        self._connection.detach(self, error)

    def drained(self) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Receiver`."""
        self._link.drained()
        self._connection.pump()

    def resume(self) -> None:
        """There may be room again."""
        if self._open and not self.full:
            self.node.resume()

    def flowed(self, event: Flowed) -> None:
        """The client has said how much it takes.

        Raises:
            AmqpError: unknown-id, it wants to acquire in a transaction that is not live; not-implemented, the node
                gives nothing that could return to it.
        """
        try:
            named = self._connection.coordination.acquiring(self.session.channel, event.flow.properties)
        except WorkRefused as refusal:
            raise refusal.error from None
        if named is not None and not self.node.transactional:
            raise AmqpError(Condition.NOT_IMPLEMENTED, "nothing can be acquired in a transaction from a stream")
        if named is not None:
            self._acquires = _InWork(named, self._connection.transactions.work(named))
            self._acquires.work.acquires(self)
            # Our flows say it, too: 4.4, "with which transaction future transfers from that link will be performed".
            self._link.properties = {TXN_ID: named.txn_id}
        if event.flow.echo and event.flow.properties:
            self._link.flow()
        self.node.follow()
        self._end_drain()

    # -- what is sent in a transaction

    def _end_drain(self) -> None:
        """Nothing comes any more before the discharge, for which the client may wait with it."""
        if self._open and self._is_vain and self._link.drain:
            self.drained()

    def acquire_no_more(self, work: "Work") -> None:
        """The transaction is being discharged: what is sent from now on does not belong to it (4.4.3)."""
        if self._acquires is not None and self._acquires.work is work:
            self._acquires = self._link.properties = None
            self._connection.soon(self.resume)

    def discharged(self, work: "Work", *, committed: bool) -> None:
        """A transaction has ended: what was sent in it and has no outcome is the client's, or returns to the queue."""
        acquired = self._acquired
        # At once, whatever takes longer: an outcome that comes now must not be held for a transaction that is over.
        numbers = [number for number, one in acquired.items() if one.work is work]
        if len(numbers) == len(acquired):
            acquired.clear()
        else:
            for number in numbers:
                del acquired[number]
        if committed or not numbers:
            return
        if self._open:
            self._returning += [(number, self.unsettled.pop(number), False) for number in numbers]
            self._return()
        else:
            self.node.requeue([self.unsettled.pop(number) for number in numbers])

    def give_back(self, number: int, taken: object, *, settled: bool = False) -> None:
        """A delivery was sent in a transaction that is rolled back: it has not been.

        Those of one transaction return together: at its discharge, or at the end of this turn of the loop.
        """
        if not self._open:
            self.node.requeue((taken,))
            return
        if not self._returning:
            self._connection.soon(self._return)
        self._returning.append((number, taken, settled))

    def _return(self) -> None:
        self._connection.slices.run(self._return_slowly())

    def _return_slowly(self) -> Iterator[None]:
        returning, self._returning = self._returning, []
        if not returning:
            return
        has_part = False
        for number, _, _ in returning:
            has_part = self.session.abort(number) or has_part
            yield
        self.node.requeue([taken for _, taken, _ in returning])
        for start in range(0, len(returning), _SETTLED_AT_ONCE):
            some = returning[start : start + _SETTLED_AT_ONCE]
            self.settle([number for number, _, settled in some if not settled], RELEASED)
            yield
        if has_part:
            # "MUST abort … before completing the discharge" (4.4.3), and there is no window to say so on the link
            reason = "the rest of a delivery was rolled back"
            self._connection.detach(self, AmqpError(Condition.ROLLBACK, reason))
        self._connection.soon()

    # -- outcomes

    def disposed(self, deliveries: Sequence[int], state: DeliveryState | None, *, settled: bool) -> None:
        """The client has a state for deliveries of this link.

        Raises:
            WorkRefused: it names a transaction that is not live, or a second one.
        """
        coordination, channel = self._connection.coordination, self.session.channel
        transaction, outcome = coordination.retiring(channel, state, None)
        if self._acquired:
            for number in deliveries:
                acquired = self._acquired.get(number)
                coordination.retiring(channel, state, None if acquired is None else acquired.transaction)
        was_full = self.full
        if transaction is not None:
            self._retire(transaction, deliveries, outcome, settled=settled)
        else:
            self._finish(deliveries, outcome, settled=settled)
        if was_full:
            self.resume()

    def _finish(self, deliveries: Sequence[int], outcome: DeliveryState | None, *, settled: bool) -> None:
        final = self._final(outcome)
        for retired in [self.retired[number] for number in deliveries if number in self.retired]:
            if retired.work.has_failed:
                retired.later = retired.later or final
            if settled:
                del self.retired[retired.number]
                retired.settled = True
        if final is None and not settled:
            return
        for number in [number for number in deliveries if number in self._acquired]:
            # settled without an outcome, or it would have to name the transaction
            self._hold(self._acquired[number].work, number, self._default, settled=True)
        known = [number for number in deliveries if number in self.unsettled]
        self.apply([self.unsettled.pop(number) for number in known], final or self._default)
        if not settled and known:
            answer = final or self._default
            self.node.then(lambda: self.settle(known, answer))

    def _retire(
        self, transaction: Transaction, deliveries: Sequence[int], outcome: DeliveryState | None, *, settled: bool
    ) -> None:
        final = self._final(outcome)
        if final is None and not settled:
            return
        work = self._connection.transactions.work(transaction)
        for number in deliveries:
            other = self.retired.get(number)
            if other is not None and other.work is not work:  # not "a different non discharged transaction" (4.4.2)
                reason = "a delivery has outcomes in two transactions"
                raise WorkRefused(AmqpError(Condition.ROLLBACK, reason), transaction.control)
        for number in deliveries:
            if number in self.unsettled:
                self._hold(work, number, final or self._default, settled=settled)
            elif settled and number in self.retired:
                self.retired.pop(number).settled = True

    def _hold(self, work: "Work", number: int, outcome: Outcome, *, settled: bool) -> None:
        acquired = self._acquired.pop(number, None) is not None
        kind = Kind.ACQUISITION if acquired else Kind.RETIREMENT
        work.retire(self, number, self.unsettled.pop(number), outcome, settled=settled, kind=kind)

    @staticmethod
    def _final(outcome: DeliveryState | None) -> Outcome | None:
        """*outcome*, if it is a terminal one that dtx knows."""
        return outcome if isinstance(outcome, Accepted | Rejected | Released | Modified) else None

    def apply(self, taken: Sequence[object], outcome: Outcome) -> None:
        """Do with what was *taken* as *outcome* says."""
        if not taken:
            return
        if isinstance(outcome, Modified) and (outcome.delivery_failed or outcome.message_annotations):
            self.node.modify(taken, outcome)
            return
        if isinstance(outcome, Accepted):
            self.node.accept(taken)
        elif kills(outcome):
            self.node.reject(taken)
        else:
            self.node.requeue(taken)

    def settle(self, deliveries: Sequence[int], outcome: Outcome = ACCEPTED) -> None:
        """Tell the client what became of *deliveries* that it has not settled."""
        if self._open:
            self._link.dispose(deliveries, outcome)
            self._connection.pump()

    def apply_default(self, taken: object) -> None:
        """The client can say nothing more of a message."""
        self.apply((taken,), self._default)

    @property
    def is_open(self) -> bool:
        """Whether the link is attached."""
        return self._open

    # -- the end

    def let_go(self) -> None:
        """The link is gone: what is not settled returns to the queue. Idempotent."""
        if not self._open:
            return
        self._open = False
        for retired in self.retired.values():
            retired.settled = True
        self.retired.clear()
        taken = list(self.unsettled.values())
        self.unsettled.clear()
        self._acquired.clear()
        self._acquires = None
        returning, self._returning = self._returning, []
        self.node.close([*taken, *(one for _, one, _ in returning)])

    def fail(self, error: AmqpError) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Receiver`."""
        self._connection.detach(self, error)

    def refuse(self, error: AmqpError) -> None:
        """End the link with *error*."""
        self._link.detach(told(error))
