"""The transactional contexts of a channel, which handle its publishes and settlements.

A channel has one of three: non-transactional, local (class tx) or distributed (class dtx-demarcation,
:mod:`~dtx.server.standalone.distributed_context`). A context gets only publishes that were authorised and routed, and
settlements of deliveries of its channel.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Final, Protocol

from dtx.log.api import LogError
from dtx.log.records import WorkRow
from dtx.server.standalone.answer_order import ChannelOrder
from dtx.server.standalone.client import Client
from dtx.store.postgres.consumers import QueueDelivery, SourceQueue, return_slowly
from dtx.store.work import HeldPublish
from dtx.telemetry import get_logger
from dtx.wire.amqp09.codec import packer
from dtx.wire.amqp09.methods import BasicPublish, BasicReturn
from dtx.xa.codes import ReplyCode, XaError

_log = get_logger(part="channel")

_NO_ROUTE: Final = 312
_return_frame: Final = packer(BasicReturn)

SETTLED_AT_ONCE: Final = 500
"""Deliveries that are settled in one step, which takes 1 to 2 ms. More take several steps."""

Settled = dict[int, QueueDelivery]
"""Deliveries by tag, in order. Not a list of pairs: the garbage collector examines each pair."""


class Settlement(Enum):
    """How a client settles a delivery."""

    ACK = "ack"
    REQUEUE = "requeue"
    REJECT = "reject"


class Context(Protocol):
    """One of the three contexts."""

    @property
    def outlives_the_connection(self) -> bool:
        """Whether messages published now may become visible after the client has disconnected."""

    def publish(self, message: HeldPublish, number: int) -> None:
        """Publish a message.

        Args:
            message: routed; ``message.queues`` are the ids of the queues that take it.
            number: the number of the publish in confirm mode, else 0.

        Raises:
            XaError: the transaction exceeds its limits.
        """

    def settle(self, deliveries: Settled, how: Settlement) -> None:
        """Settle deliveries, which the channel does not keep any more.

        Raises:
            XaError: the transaction exceeds its limits.
        """

    def shut_down(self) -> None:
        """End the context with its channel. Undecided messages return to their queues."""


def by_queue(deliveries: Iterable[QueueDelivery]) -> dict[SourceQueue, list[QueueDelivery]]:
    """Group deliveries by queue."""
    found: dict[SourceQueue, list[QueueDelivery]] = {}
    for delivery in deliveries:
        found.setdefault(delivery.queue, []).append(delivery)
    return found


def give_back(deliveries: Iterable[QueueDelivery], how: Settlement, now: float) -> None:
    """Requeue or reject deliveries in one step.

    Args:
        deliveries: unacknowledged.
        how: requeue or reject.
        now: seconds since the epoch.
    """
    for queue, group in by_queue(deliveries).items():
        if how is Settlement.REJECT:
            queue.reject(group)
        else:
            queue.requeue(group, now, limited=True)


def give_back_slowly(
    deliveries: Sequence[QueueDelivery], how: Settlement, clock: Callable[[], float]
) -> Iterator[None]:
    """As :func:`give_back`, in steps."""
    if how is Settlement.REQUEUE:
        yield from return_slowly(deliveries, clock, limited=True)
        return
    for start in range(0, len(deliveries), SETTLED_AT_ONCE):
        give_back(deliveries[start : start + SETTLED_AT_ONCE], how, clock())
        yield


class PublisherChannel:
    """The answers to a channel's publishes: confirms and returned messages.

    Args:
        client: the owner of the channel.
        order: the order of the channel.
    """

    __slots__ = ("_client", "_order")

    def __init__(self, client: Client, order: ChannelOrder) -> None:
        self._client = client
        self._order = order

    def unrouted(self, message: HeldPublish) -> None:
        """Handle a message for no queue: deliver a direct reply; return a mandatory one even so, as RabbitMQ does."""
        client = self._client
        is_reply = client.parts.direct.deliver(client.who.vhost, message)
        if message.mandatory:
            self._return(
                message.exchange, message.routing_key, message.properties, message.body, _NO_ROUTE, b"NO_ROUTE"
            )
        elif not is_reply:
            client.broker.counts.drop_unroutable += 1

    def returned(self, work: WorkRow, code: int, text: bytes) -> None:
        """Return a mandatory message that could not be routed when its branch was committed."""
        self._return(work.exchange, work.routing_key, work.properties, work.body, code, text)

    def _return(
        self, exchange: bytes, routing_key: bytes, properties: bytes, body: bytes, code: int, text: bytes
    ) -> None:
        self._client.broker.counts.return_unroutable += 1
        if self._order.is_open():
            frame = _return_frame(self._order.number, code, text, exchange, routing_key)
            self._order.send_content(frame, properties, body)

    def confirm(self, number: int, *, safe: bool) -> None:
        """Confirm the publish *number*, or refuse it unless *safe*. Does nothing for 0."""
        if number:
            self._order.engine.confirm(number, safe=safe)

    def written(self, number: int, error: LogError | None) -> None:
        """Answer the publish *number*, which is durable or has failed; 0 without confirms."""
        if number:
            self._order.engine.confirm(number, safe=error is None)
        elif error is not None:  # without confirms, only a close can inform the client
            self._order.refuse(
                XaError(ReplyCode.INTERNAL_ERROR, "the database failed, messages may be lost"), BasicPublish.KEY
            )

    def refused(self, number: int) -> None:
        """Answer the publish *number*, which a full queue refuses. Only confirms can report it."""
        self.confirm(number, safe=False)

    def send_confirms(self) -> None:
        """Send the confirms that are recorded so far."""
        self._client.outbox.announce()


class ImmediateContext:
    """The non-transactional context: publishes and settlements take effect at once and in order.

    Args:
        client: the owner of the channel.
        order: the order of the channel.
        publisher: answers publishes.
    """

    __slots__ = ("_client", "_order", "_publisher")

    outlives_the_connection = False

    def __init__(self, client: Client, order: ChannelOrder, publisher: PublisherChannel) -> None:
        self._client = client
        self._order = order
        self._publisher = publisher

    def publish(self, message: HeldPublish, number: int) -> None:
        """Write the message, or handle it as unrouted."""
        publisher = self._publisher
        if message.queues:
            self._client.writes.publish(publisher, number, message)
            return
        publisher.unrouted(message)
        if number:  # "once the exchange verifies a message won't route to any queue"
            publisher.confirm(number, safe=True)
            publisher.send_confirms()

    def settle(self, deliveries: Settled, how: Settlement) -> None:
        """Settle the deliveries."""
        if len(deliveries) > SETTLED_AT_ONCE:
            self._order.occupy()
            self._client.slices.run(self._settle_slowly(list(deliveries.values()), how))
        elif how is Settlement.ACK:
            self._client.writes.ack(list(deliveries.values()))
        else:
            give_back(deliveries.values(), how, self._client.now())

    def _settle_slowly(self, deliveries: Sequence[QueueDelivery], how: Settlement) -> Iterator[None]:
        """Settle in steps, even if the channel or the client is gone: the settlement was received before."""
        writes = self._client.writes
        if how is Settlement.ACK:
            for start in range(0, len(deliveries), SETTLED_AT_ONCE):
                writes.ack(deliveries[start : start + SETTLED_AT_ONCE])
                writes.flush()
                yield
        else:
            yield from give_back_slowly(deliveries, how, self._client.now)
        self._order.finish()

    def shut_down(self) -> None:
        """Nothing is held in this context."""


class LocalContext:
    """The context of class tx: publishes and acknowledgements wait for tx.commit, which writes them as one record.

    So all of a transaction happens or nothing. AMQP promises this "only where transactions involve a single queue".

    Args:
        client: the owner of the channel.
        order: the order of the channel.
        publisher: answers publishes.
        restore: makes settled deliveries unsettled again, by tags; see :meth:`rollback`.
    """

    outlives_the_connection = False

    def __init__(
        self,
        client: Client,
        order: ChannelOrder,
        publisher: PublisherChannel,
        restore: Callable[[Iterable[tuple[int, QueueDelivery]]], None],
    ) -> None:
        self._client = client
        self._order = order
        self._publisher = publisher
        self._restore = restore
        self._publishes: list[HeldPublish] = []
        self._settled: list[tuple[int, QueueDelivery, Settlement]] = []
        self._size = 0

    def publish(self, message: HeldPublish, number: int) -> None:  # noqa: ARG002 - there are no confirms
        """Hold the message."""
        size = message.size
        self._admit(1, size)
        self._publishes.append(message)

    def settle(self, deliveries: Settled, how: Settlement) -> None:
        """Hold the settlement: "acknowledgements … are not acted upon until the commit"."""
        self._settled += ((tag, delivery, how) for tag, delivery in deliveries.items())
        self._admit(0, 0)

    def _admit(self, count: int, size: int) -> None:
        """Count *count* more messages, of *size* bytes. The limits are those of a branch."""
        budget, limits = self._client.budget, self._client.manager.limits
        messages = len(self._publishes) + len(self._settled) + count
        total = self._size + size
        if messages > limits.branch_messages or total > limits.branch_bytes or (size and not budget.has_room(size)):
            raise XaError(
                ReplyCode.RESOURCE_ERROR, f"limits of a transaction exceeded: {messages} messages, {total} bytes"
            )
        budget.charge(size)
        self._size += size

    def commit(self, done: Callable[[XaError | None], None]) -> None:
        """tx.commit.

        Args:
            done: called once, when the transaction is durable, or with the error that closes the channel.
        """
        publishes, self._publishes = self._publishes, []
        settled, self._settled = self._settled, []
        acked = [delivery for _, delivery, how in settled if how is Settlement.ACK]
        routed = [message for message in publishes if message.queues]
        self._free()

        def written(error: LogError | None) -> None:
            if error is not None:
                _log.error("a transaction's outcome is not known", channel=self._order.number, reason=str(error))
                others = [delivery for _, delivery, how in settled if how is not Settlement.ACK]
                give_back(others, Settlement.REQUEUE, self._client.now())
                reason = "the outcome of tx.commit is not known: the database failed"
                done(XaError(ReplyCode.INTERNAL_ERROR, reason))
                return
            self._client.slices.run(self._committed(settled, publishes, done))

        if not routed and not acked:
            written(None)
        elif not self._client.writes.write_separately(routed, acked, written):
            self._settled = settled  # given back when the channel ends, which is now
            done(XaError(ReplyCode.PRECONDITION_FAILED, "a queue is full (reject-publish): nothing was committed"))

    def _committed(
        self,
        settled: Sequence[tuple[int, QueueDelivery, Settlement]],
        publishes: Sequence[HeldPublish],
        done: Callable[[XaError | None], None],
    ) -> Iterator[None]:
        """Complete a durable commit in steps, even if the channel or the client is gone."""
        for wanted in (Settlement.REQUEUE, Settlement.REJECT):
            deliveries = [delivery for _, delivery, how in settled if how is wanted]
            yield from give_back_slowly(deliveries, wanted, self._client.now)
        for message in publishes:
            if not message.queues:
                self._publisher.unrouted(message)
                yield
        done(None)

    def rollback(self) -> None:
        """tx.rollback: "acknowledged messages will not be redelivered by rollback"; they can be settled again."""
        self._restore((tag, delivery) for tag, delivery, _ in self._settled)
        self._publishes.clear()
        self._settled.clear()
        self._free()

    def _free(self) -> None:
        self._client.budget.charge(-self._size)
        self._size = 0

    def shut_down(self) -> None:
        """Roll back the transaction. Acknowledged messages return to their queues."""
        returning = return_slowly([delivery for _, delivery, _ in self._settled], self._client.now)
        next(returning)  # suspends the queues until all messages have returned
        self._client.slices.run(returning)
        self._publishes.clear()
        self._settled.clear()
        self._free()
