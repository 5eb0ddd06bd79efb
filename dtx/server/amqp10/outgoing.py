"""Links to receivers: messages of a queue, as far as the client's credit goes."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from dtx.log.changes import StoredMessage
from dtx.server.amqp10.mapping import Content, from_basic
from dtx.server.standalone.limits import MAX_UNACKED
from dtx.store.postgres.consumers import Consumer, Credit, Delivery
from dtx.store.postgres.exchanges import Queue
from dtx.wire.amqp10.coordination import TXN_ID, Transaction
from dtx.wire.amqp10.errors import AmqpError, Condition
from dtx.wire.amqp10.events import Flowed
from dtx.wire.amqp10.link import Link
from dtx.wire.amqp10.performatives import Role
from dtx.wire.amqp10.session import Session
from dtx.wire.amqp10.states import ACCEPTED, Accepted, DeliveryState, Modified, Outcome, Rejected, Released, told

if TYPE_CHECKING:
    from dtx.server.amqp10.connection import Connection
    from dtx.server.amqp10.transactions import Retired

_MAX_BACKLOG: Final = 1 << 20
"""Octets that wait for the session window of a client; its links get nothing more meanwhile."""


class LinkCredit(Credit):
    """The credit of a link: so many deliveries, whatever becomes of them."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(1)
        self.used = 1  # a limit of 0 would be none

    def release(self) -> None:
        """A delivery is settled: that is no credit (2.6.7)."""

    def grant(self, credit: int) -> None:
        """So many deliveries from now on."""
        self.change(self.used + credit)


class Outgoing:
    """One link from a queue to a client.

    Args:
        connection: of the client.
        session, link: the engine's ends.
        queue: where messages come from.
        settled: they are settled when they are sent.
        default: what becomes of a delivery that is settled without an outcome.
        dynamic: the queue goes with the link.
    """

    no_ack = False

    def __init__(
        self,
        connection: "Connection",
        session: Session,
        link: Link,
        queue: Queue,
        *,
        settled: bool,
        default: Outcome,
        dynamic: bool,
    ) -> None:
        self._connection = connection
        self.session = session
        self._link = link
        self._queue = queue
        self._settled = settled
        self._default = default
        self._dynamic = dynamic
        self._credit = LinkCredit()
        self._consumer = Consumer(link.name.encode(), self, credit=self._credit)
        self._getting = False
        self._sent = 0
        self._open = True
        self.unsettled: dict[int, Delivery] = {}
        self.retired: dict[int, Retired] = {}
        """Deliveries whose outcome belongs to a transaction, and that the client has not settled."""
        queue.index.consume(self._consumer)

    # -- the sink

    @property
    def full(self) -> bool:
        """Nothing can be delivered at present."""
        return (
            not self._connection.outbox.has_room
            or self.session.backlog > _MAX_BACKLOG
            or len(self.unsettled) + len(self.retired) >= MAX_UNACKED
        )

    def deliver(self, consumer: Consumer, delivery: Delivery, message: StoredMessage) -> None:  # noqa: ARG002
        """Send a message."""
        self._send(delivery, message)

    def _send(self, delivery: Delivery, message: StoredMessage) -> None:
        payload = from_basic(
            Content(message.properties, message.body),
            message.exchange,
            message.routing_key,
            redelivered=delivery.redelivered,
        )
        self._sent += 1
        try:
            number = self._link.send(self._sent.to_bytes(8, "big"), payload, settled=self._settled)
        except AmqpError as error:  # larger than what the client takes
            self._connection.soon(partial(self._give_up, delivery, error))
            return
        if number is None:
            self._connection.soon(lambda: self._requeue((delivery,)))
        elif self._settled:
            self._connection.writes.ack((delivery,))
            self._connection.soon()
        else:
            self.unsettled[number] = delivery
        self._connection.pump()

    def _give_up(self, delivery: Delivery, error: AmqpError) -> None:
        self._requeue((delivery,))
        self._connection.detach(self, error)

    def resume(self) -> None:
        """There may be room again."""
        if self._open and not self.full:
            if self._link.drain:
                self._drain()
            else:
                self._consumer.resume()

    def cancelled(self, consumer: Consumer) -> None:  # noqa: ARG002 - there is one
        """The queue is gone."""
        self._connection.detach(self, AmqpError(Condition.RESOURCE_DELETED, f"{self._queue.spec.where} was deleted"))

    # -- credit

    def flowed(self, event: Flowed) -> None:
        """The client has said how much it takes.

        Raises:
            AmqpError: not-implemented, it wants to acquire in a transaction ("If the link endpoint does not support
                transactional acquisition, the link MUST be terminated with a not-implemented error").
        """
        if event.flow.properties and event.flow.properties.get(TXN_ID) is not None:
            raise AmqpError(Condition.NOT_IMPLEMENTED, "messages are not acquired in transactions, only retired")
        self._follow()
        self._drain()

    def _follow(self) -> None:
        """The consumer may take what the link has credit for; nothing while that is drained, which goes by get."""
        self._credit.grant(0 if self._link.drain else self._link.credit)

    def _drain(self) -> None:
        """Send what there is, one after the other, then give back the rest of the credit (2.6.7)."""
        if not self._open or self._getting or not self._link.drain:
            return
        if self._link.credit <= 0 or self._queue.index.closed:
            self._link.drained()
            self._connection.pump()
        elif not self.full:
            self._getting = True
            self._queue.index.get(self, self._connection.now())

    def got(self, found: tuple[Delivery, StoredMessage] | None, remaining: int) -> None:  # noqa: ARG002
        """A message while the link is drained, or none. The next step goes to the index again, so it comes later."""
        self._getting = False
        if found is not None:
            self._send(*found)
            self._follow()  # the client may have gone on in the meantime, and its credit is less by one now
            asyncio.get_running_loop().call_soon(self._drain)
        elif self._link.drain:
            self._link.drained()
            self._connection.pump()

    # -- outcomes

    def disposed(self, deliveries: Sequence[int], state: DeliveryState | None, *, settled: bool) -> None:
        """The client has a state for deliveries of this link.

        Raises:
            WorkRefused: it names a transaction that is not live.
        """
        transaction, outcome = self._connection.coordination.retiring(self.session.channel, state, None)
        was_full = self.full
        if transaction is not None:
            self._retire(transaction, deliveries, outcome, settled=settled)
        else:
            self._finish(deliveries, outcome, settled=settled)
        if was_full:
            self.resume()

    def _finish(self, deliveries: Sequence[int], outcome: DeliveryState | None, *, settled: bool) -> None:
        if settled:
            for number in deliveries:
                if number in self.retired:
                    self.retired.pop(number).settled = True
        final = self._final(outcome)
        if final is None and not settled:
            return
        known = [number for number in deliveries if number in self.unsettled]
        self.apply([self.unsettled.pop(number) for number in known], final or self._default)
        if not settled and known:
            answer = final or self._default
            self._connection.writes.then(lambda: self.settle(known, answer))

    def _retire(
        self, transaction: Transaction, deliveries: Sequence[int], outcome: DeliveryState | None, *, settled: bool
    ) -> None:
        final = self._final(outcome) or self._default
        work = self._connection.transactions.work(transaction)
        for number in deliveries:
            delivery = self.unsettled.pop(number, None)
            if delivery is not None:
                work.retire(self, number, delivery, final, settled=settled)
            elif settled and number in self.retired:
                self.retired.pop(number).settled = True

    @staticmethod
    def _final(outcome: DeliveryState | None) -> Outcome | None:
        """*outcome*, if it is a terminal one that dtx knows."""
        return outcome if isinstance(outcome, Accepted | Rejected | Released | Modified) else None

    def apply(self, deliveries: Sequence[Delivery], outcome: Outcome) -> None:
        """Do with *deliveries* what *outcome* says."""
        if not deliveries:
            return
        if isinstance(outcome, Accepted):
            self._connection.writes.ack(deliveries)
            self._connection.soon()
        elif isinstance(outcome, Rejected) or (isinstance(outcome, Modified) and outcome.undeliverable_here):
            self._queue.index.reject(deliveries)
        else:
            self._requeue(deliveries)

    def settle(self, deliveries: Sequence[int], outcome: Outcome = ACCEPTED) -> None:
        """Tell the client what became of *deliveries* that it has not settled."""
        if self._open:
            self.session.dispose(Role.SENDER, deliveries, outcome, settled=True)
            self._connection.pump()

    def apply_default(self, delivery: Delivery) -> None:
        """The client can say nothing more of *delivery*."""
        self.apply((delivery,), self._default)

    @property
    def is_open(self) -> bool:
        """Whether the link is attached."""
        return self._open

    def _requeue(self, deliveries: Sequence[Delivery]) -> None:
        self._queue.index.requeue(deliveries, self._connection.now())

    # -- the end

    def let_go(self) -> None:
        """The link is gone: what is not settled returns to the queue. Idempotent."""
        if not self._open:
            return
        self._open = False
        connection = self._connection
        if self._getting:
            self._queue.index.cancel_get(self)
        for retired in self.retired.values():
            retired.settled = True
        self.retired.clear()
        was_last = self._queue.index.cancel(self._consumer, connection.now())
        deliveries = list(self.unsettled.values())
        self.unsettled.clear()
        self._requeue(deliveries)
        if self._dynamic or (was_last and self._queue.spec.auto_delete):
            connection.remove(connection.vhost.remove_queue(self._queue))

    def refuse(self, error: AmqpError) -> None:
        """End the link with *error*."""
        self._link.detach(told(error))
