"""The transactional contexts of a channel: what becomes of the messages that it publishes and settles.

A channel has one of three: non-transactional, local (class tx) or distributed (class dtx-demarcation,
:mod:`~dtx.server.standalone.distributed_context`). In each of them a publish has been authorised and routed before it
gets here, and a settlement names deliveries of this channel.
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
"""Deliveries that are settled in one step, a millisecond or two; of more a client may name, many steps are made."""

Settled = dict[int, QueueDelivery]
"""Deliveries by their tags on the channel, in order. No list of pairs: very many of those are looked at as garbage."""


class Settlement(Enum):
    """What a client makes of a delivery."""

    ACK = "ack"
    REQUEUE = "requeue"
    REJECT = "reject"


class Context(Protocol):
    """One of the three."""

    @property
    def outlives_the_connection(self) -> bool:
        """Whether what is published now may become visible when the client is gone."""

    def publish(self, message: HeldPublish, number: int) -> None:
        """A message was published; ``message.queues`` are the ids of those that take it.

        Args:
            message: routed.
            number: of the publish in confirm mode, else 0.

        Raises:
            XaError: it is too much for the transaction.
        """

    def settle(self, deliveries: Settled, how: Settlement) -> None:
        """Deliveries were acknowledged or rejected; the channel keeps them no more.

        Raises:
            XaError: it is too much for the transaction.
        """

    def let_go(self) -> None:
        """The channel is gone: nothing more comes, and what is not decided is given back."""


def by_queue(deliveries: Iterable[QueueDelivery]) -> dict[SourceQueue, list[QueueDelivery]]:
    """The deliveries of each queue."""
    found: dict[SourceQueue, list[QueueDelivery]] = {}
    for delivery in deliveries:
        found.setdefault(delivery.queue, []).append(delivery)
    return found


def give_back(deliveries: Iterable[QueueDelivery], how: Settlement, now: float) -> None:
    """Requeue or reject now.

    Args:
        deliveries: unacknowledged.
        how: one of these two.
        now: seconds since the epoch.
    """
    for queue, group in by_queue(deliveries).items():
        if how is Settlement.REJECT:
            queue.reject(group)
        else:
            queue.requeue(group, now)


def give_back_slowly(
    deliveries: Sequence[QueueDelivery], how: Settlement, clock: Callable[[], float]
) -> Iterator[None]:
    """As :func:`give_back`, in steps."""
    if how is Settlement.REQUEUE:
        yield from return_slowly(deliveries, clock)
        return
    for start in range(0, len(deliveries), SETTLED_AT_ONCE):
        give_back(deliveries[start : start + SETTLED_AT_ONCE], how, clock())
        yield


class PublisherChannel:
    """What a channel's client hears of its publishes: it is the publisher to the writes, and gets what comes back.

    Args:
        client: that publishes.
        order: of the channel.
    """

    __slots__ = ("_client", "_order")

    def __init__(self, client: Client, order: ChannelOrder) -> None:
        self._client = client
        self._order = order

    def unrouted(self, message: HeldPublish) -> None:
        """No queue takes the message: it may be a direct reply; a mandatory one comes back even so, as RabbitMQ's."""
        self._client.parts.direct.deliver(self._client.who.vhost, message)
        if message.mandatory:
            self._return(
                message.exchange, message.routing_key, message.properties, message.body, _NO_ROUTE, b"NO_ROUTE"
            )

    def returned(self, work: WorkRow, code: int, text: bytes) -> None:
        """A mandatory message could not be routed when its branch was committed."""
        self._return(work.exchange, work.routing_key, work.properties, work.body, code, text)

    def _return(
        self, exchange: bytes, routing_key: bytes, properties: bytes, body: bytes, code: int, text: bytes
    ) -> None:
        if self._order.is_open():
            frame = _return_frame(self._order.number, code, text, exchange, routing_key)
            self._order.send_content(frame, properties, body)

    def confirm(self, number: int, *, safe: bool) -> None:
        """Tell the client in confirm mode what has become of a publish."""
        if number:
            self._order.engine.confirm(number, safe=safe)

    def written(self, number: int, error: LogError | None) -> None:
        """The publish *number* is durable, or may not be; 0 where nobody confirms."""
        if number:
            self._order.engine.confirm(number, safe=error is None)
        elif error is not None:  # nothing else can tell the client
            self._order.refuse(
                XaError(ReplyCode.INTERNAL_ERROR, "the database failed, messages may be lost"), BasicPublish.KEY
            )

    def refused(self, number: int) -> None:
        """A full queue does not take the publish *number*: only confirms can tell."""
        self.confirm(number, safe=False)

    def say_confirms(self) -> None:
        """All that is known at present was told: the confirms are due."""
        self._client.outbox.announce()


class ImmediateContext:
    """The non-transactional context: everything happens at once, and in the order in which it came.

    Args:
        client: whose messages they are.
        order: of the channel.
        publisher: hears of publishes.
    """

    __slots__ = ("_client", "_order", "_publisher")

    outlives_the_connection = False

    def __init__(self, client: Client, order: ChannelOrder, publisher: PublisherChannel) -> None:
        self._client = client
        self._order = order
        self._publisher = publisher

    def publish(self, message: HeldPublish, number: int) -> None:
        """Send the message on its way."""
        publisher = self._publisher
        if message.queues:
            self._client.writes.publish(publisher, number, message)
            return
        publisher.unrouted(message)
        if number:  # "once the exchange verifies a message won't route to any queue"
            publisher.confirm(number, safe=True)
            publisher.say_confirms()

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
        """It goes on when the channel or the client is gone: they are settled from the moment in which it was read."""
        writes = self._client.writes
        if how is Settlement.ACK:
            for start in range(0, len(deliveries), SETTLED_AT_ONCE):
                writes.ack(deliveries[start : start + SETTLED_AT_ONCE])
                writes.flush()
                yield
        else:
            yield from give_back_slowly(deliveries, how, self._client.now)
        self._order.finish()

    def let_go(self) -> None:
        """Nothing is held here."""


class LocalContext:
    """The context of class tx: publishes and acknowledgements wait for tx.commit, which makes them one record.

    So all of a transaction happens, or nothing of it: more than AMQP promises, which has atomicity "only where
    transactions involve a single queue".

    Args:
        client: whose messages they are.
        order: of the channel.
        publisher: hears of publishes.
        restore: takes back what was settled, by tags; see :meth:`rollback`.
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
        self._octets = 0

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
        """Whether so much more may be held: the limits of a branch are those of any transaction."""
        budget, limits = self._client.budget, self._client.manager.limits
        messages = len(self._publishes) + len(self._settled) + count
        octets = self._octets + size
        if messages > limits.branch_messages or octets > limits.branch_bytes or (size and not budget.has_room(size)):
            raise XaError(
                ReplyCode.RESOURCE_ERROR, f"limits of a transaction exceeded: {messages} messages, {octets} octets"
            )
        budget.charge(size)
        self._octets += size

    def commit(self, done: Callable[[XaError | None], None]) -> None:
        """tx.commit.

        Args:
            done: called once, when it is durable, or with the reason of the channel's end.
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
        elif not self._client.writes.apart(routed, acked, written):
            self._settled = settled  # given back when the channel ends, which is now
            done(XaError(ReplyCode.PRECONDITION_FAILED, "a queue is full (reject-publish): nothing was committed"))

    def _committed(
        self,
        settled: Sequence[tuple[int, QueueDelivery, Settlement]],
        publishes: Sequence[HeldPublish],
        done: Callable[[XaError | None], None],
    ) -> Iterator[None]:
        """It goes on when the channel or the client is gone."""
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
        self._client.budget.charge(-self._octets)
        self._octets = 0

    def let_go(self) -> None:
        """What is not committed is rolled back: acknowledged messages return to their queues."""
        returning = return_slowly([delivery for _, delivery, _ in self._settled], self._client.now)
        next(returning)  # nothing is handed out before all have returned
        self._client.slices.run(returning)
        self._publishes.clear()
        self._settled.clear()
        self._free()
