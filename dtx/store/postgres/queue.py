"""The index of one queue: ready messages, consumers, and messages that leave without a consumer.

The index does no I/O.

Theory of operation. A message is *ready*, then *handed out* (unacknowledged, or held for a branch), then settled. A
message that is given back is ready again in its old place. The index knows each ready message by position alone.
Bodies are in memory for as many messages as the cache has room for. The index asks for other bodies when their turn
comes (:meth:`Host.fetch`).

While the head has no body, nothing is handed out: so messages leave in order. A message that is being read is not yet
assigned to a client. A client that fails meanwhile has nothing to give back.

Time is an argument (seconds since the epoch). The host, not the index, knows the event loop and the database. The index
informs it through :class:`Host`, whose methods must not call back into the index. The host calls
:meth:`QueueIndex.dispatch` when the index has asked for it, and at the time that this method returned.

A message is put here when its row is committed. Its row is dropped after the message was settled here. After a failure
in between, the message is handed out again. It is never lost.
"""

from array import array
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final, Protocol

from dtx.log.changes import StoredMessage
from dtx.store.postgres.arguments import QueueArguments
from dtx.store.postgres.cache import FETCH_MESSAGES, Bodies, MessageCache
from dtx.store.postgres.consumers import (
    Consumer,
    DeliveryState,
    DispatchRound,
    Getter,
    QueueDelivery,
    all_in,
    wrong_state,
)
from dtx.store.postgres.message_counts import BrokerCounts, MessageCounts
from dtx.store.postgres.property_scan import counted, visible
from dtx.store.postgres.ready_messages import NEVER, PriorityReady, QueueLimits, Ready

DISPATCH_MESSAGES: Final = 100
"""Messages that one call hands out at most, so that other work gets its turn.

They take a millisecond, or ten milliseconds where AMQP 1.0 clients take them.
"""
PROPERTY_OCTETS: Final = 256
"""Bytes of properties that count as one message more: AMQP 1.0 reads all properties."""
LEAVE_MESSAGES: Final = 1000
"""Messages that expire or exceed the length in one step at most. The host then drops them in one statement."""


class Reason(StrEnum):
    """Why a message left its queue without being acknowledged."""

    REJECTED = "rejected"
    EXPIRED = "expired"
    MAXLEN = "maxlen"
    DELIVERY_LIMIT = "delivery_limit"


Letter = tuple[int, StoredMessage | None]
"""A position, and its message if it was in memory."""


class Host(Protocol):
    """The store around the indexes. Its methods only record the request: none calls the index, and none raises."""

    def schedule(self, queue: "QueueIndex") -> None:
        """Call ``queue.dispatch(now)`` soon. One call is enough for several requests."""

    def handed_out(self, queue: "QueueIndex") -> None:
        """Messages may have left *queue* without a dispatch that was scheduled."""

    def fetch(self, queue: "QueueIndex", positions: list[int]) -> None:
        """Read these messages from the first on: as many as are reasonable to have in memory at once, at least one.

        Then call :meth:`QueueIndex.arrived` with *positions* and the messages that were read. Call it after a failure
        as well, in good time.
        """

    def drop(self, queue: "QueueIndex", positions: list[int]) -> None:
        """Remove the rows of these messages.

        They are settled: sent without acknowledgement, expired, or beyond the length.
        """

    def dead_letter(self, queue: "QueueIndex", letters: list[Letter], reason: Reason) -> None:
        """As :meth:`drop`, but publish them to the dead letter exchange in the same transaction."""


class QueueIndex:
    """The messages and consumers of one queue.

    Args:
        id: in :class:`~dtx.log.changes.Slot`.
        name: for people, ``queue 'q' in vhost '/'``.
        host: see :class:`Host`.
        cache: the memory for bodies of all queues together.
        arguments: of its declaration.
        now: the time from which the queue counts as unused.
        total: counts the events of all queues.
    """

    __slots__ = (
        "_again",
        "_automatic",
        "_bodies",
        "_detailed",
        "_getters",
        "_held",
        "_host",
        "_limits",
        "_mark",
        "_preferred",
        "_ready",
        "_round",
        "_scheduled",
        "_suspended",
        "_total",
        "_used_at",
        "arguments",
        "closed",
        "counts",
        "delivered",
        "id",
        "name",
        "ready",
        "unacked",
    )

    def __init__(
        self,
        id: int,  # noqa: A002 - the row's name for it
        name: str,
        host: Host,
        cache: MessageCache,
        arguments: QueueArguments,
        now: float,
        total: BrokerCounts | None = None,
    ) -> None:
        self.id = id
        self.name = name
        self.arguments = arguments
        self.closed = False
        self.ready = 0
        """Messages that wait: the message-count of declare-ok."""
        self.unacked = 0
        """Messages that are handed out and not settled, those held for branches included."""
        self.delivered = 0
        """The greatest position that was ever handed out."""
        self.counts = MessageCounts()
        self._total = total or BrokerCounts()
        self._host = host
        self._used_at = now
        self._ready = PriorityReady(arguments.max_priority) if arguments.max_priority else Ready()
        self._round = DispatchRound(single=arguments.single_active)
        self._getters: list[Getter] = []  # hardly ever more than one
        self._scheduled = False
        self._suspended = 0
        """Callers that give messages back in several steps. To keep the order, nothing is handed out meanwhile."""
        self._bodies = Bodies(cache, self._round, self._getters)
        self._held: dict[int, QueueDelivery] = {}
        # Redelivered: messages that were given back, and messages that may have been handed out before a restart.
        # With the number of returns.
        self._again: dict[int, int] = {}
        self._mark = 0
        self._limits = QueueLimits(arguments)
        # Whether the index keeps details of messages, which it must forget when they are settled.
        self._detailed = arguments.max_priority > 0 or self._limits.limits_bytes
        # Messages that this dispatch has sent without acknowledgement.
        self._automatic: list[int] = []
        self._preferred = 0
        """Messages that consumers got while a basic.get waited."""

    # -- messages come ------------------------------------------------------------------------------------------------

    def restore(
        self,
        positions: "array[int]",
        *,
        delivered: int = 0,
        expiries: Mapping[int, float] | None = None,
        octets: Mapping[int, int] | None = None,
        priorities: Mapping[int, int] | None = None,
    ) -> None:
        """Take the messages that the database has at start, before anything else happens to the queue.

        Args:
            positions: ready messages, in order.
            delivered: messages up to this position may have been handed out before.
            expiries: the expiry times of the messages that expire.
            octets: sizes of the bodies in bytes, where :attr:`QueueArguments.max_length_bytes` is set.
            priorities: of the messages that have one, where the queue has priorities.
        """
        self._ready.restore(positions, priorities or {})
        self.ready += len(positions)
        self._mark = delivered
        self.delivered = max(self.delivered, delivered)
        self._limits.restore(expiries or {}, octets or {})
        self._detailed |= bool(expiries)
        if self._limits.drops and self._limits.over(self.ready):  # their removal was not written before the restart
            self._overflow(self._used_at)
        if self.ready:
            self._schedule()

    def put(self, message: StoredMessage, now: float) -> None:
        """Add a message whose row is committed, and that all clients may see."""
        if self.closed:
            return
        position = message.position
        expires_at = message.expires_at
        if self._detailed or expires_at is not None:
            self._note(position, len(message.body), expires_at)
            if expires_at is not None and expires_at <= now and self._hand_over(message):
                return
            self._limits.ready_added(position)
        self._ready.append(position, message.priority)
        self.ready += 1
        # In a long queue that is not in memory anyway, the messages at the end would be evicted first.
        if self.ready - len(self._bodies) <= FETCH_MESSAGES:
            self._bodies.keep(message)
        if self._limits.drops and self._limits.over(self.ready):
            self._overflow(now)
        if not self._scheduled and (self._round.active or expires_at is not None):
            self._schedule()

    def reveal(
        self, position: int, now: float, *, priority: int = 0, octets: int = 0, expires_at: float | None = None
    ) -> None:
        """Add a message as :meth:`put` does, but one whose body is not in memory.

        Args:
            position: where it is.
            now: seconds since the epoch.
            priority: as in :meth:`restore_held`.
            octets: as in :meth:`restore_held`.
            expires_at: when it expires, if it does.
        """
        if self.closed:
            return
        self._note(position, octets, expires_at)
        self._limits.ready_added(position)
        self._ready.append(position, priority)
        self.ready += 1
        if self._limits.drops and self._limits.over(self.ready):
            self._overflow(now)
        self._schedule()

    def restore_settled(self, messages: Iterable[StoredMessage], now: float) -> None:
        """Put messages back that were settled here, but whose rows still exist: the write of the settlement failed."""
        for message in messages:
            if not self.closed:
                self._again[message.position] = 0
                self.put(message, now)

    def count_publish(self) -> None:
        """Count a message of a client that was put into the queue."""
        self.counts.publish += 1
        self._total.publish += 1
        self._total.changed[self.id] = self.counts

    def admit(self, octets: int) -> bool:
        """Whether the queue takes one more message in addition to those on their way to it (reject-publish).

        A message that was admitted counts until :meth:`withdraw`. The caller calls that method when the message is put,
        or will not be put.

        Args:
            octets: size of its body in bytes.
        """
        return self._limits.admit(self.ready, octets)

    def fits(self, count: int, octets: int) -> bool:
        """Whether the queue would take *count* more messages with *octets* bytes of bodies (reject-publish)."""
        return self._limits.fits(self.ready, count, octets)

    def withdraw(self, octets: int) -> None:
        """Undo :meth:`admit`: the message no longer counts as on its way."""
        self._limits.withdraw(octets)

    def _note(self, position: int, octets: int, expires_at: float | None) -> None:
        self._limits.note(position, octets, expires_at)
        self._detailed |= expires_at is not None

    # -- bodies -------------------------------------------------------------------------------------------------------

    def arrived(self, positions: Iterable[int], messages: Iterable[StoredMessage]) -> None:
        """The answer to :meth:`Host.fetch`.

        Args:
            positions: of the request.
            messages: the messages that were read, perhaps not all, perhaps none. The rest is asked for again. The
                caller must pass a message that is known to have no row to :meth:`remove_missing` as well.
        """
        self._bodies.arrived(positions, messages)
        if not self.closed:
            self._schedule()

    def remove_missing(self, positions: Iterable[int]) -> int:
        """Remove messages that have no rows: they have left meanwhile, or another program deleted their rows.

        Returns:
            The number of these messages that were still ready in the index.
        """
        missed = [position for position in positions if self._ready.discard(position)]
        for position in missed:
            self._removed(position)
        if self.ready:
            self._schedule()
        return len(missed)

    # -- messages that leave without a consumer -----------------------------------------------------------------------

    def _overflow(self, now: float) -> None:
        """Drop excess messages from the head. Before that, let consumers have the messages that they can take."""
        if self._suspended:
            return
        if self._round.active:
            self._run(now)
        self._drop_excess()

    def _drop_excess(self) -> None:
        """Drop excess messages from the head, up to a limit. More remain when many messages come back at once."""
        letters: list[Letter] = []
        while self.ready and len(letters) < LEAVE_MESSAGES and self._limits.over(self.ready):
            position = self._ready.pop()
            letters.append((position, self._removed(position)))
        if letters:
            self._leave(letters, Reason.MAXLEN)
            if self._limits.expiries or len(letters) == LEAVE_MESSAGES:
                # The message that is at the head now may have expired long ago.
                self._schedule()

    def _expire(self, now: float) -> None:
        """Remove expired messages at the head, up to a limit.

        RabbitMQ: "messages which should expire will still only expire from the head of the queue". So in a queue with
        priorities, messages of lower priority wait behind messages of higher priority that do not expire.
        """
        letters: list[Letter] = []
        ready, expiries = self._ready, self._limits.expiries
        while len(letters) < LEAVE_MESSAGES:
            head = ready.head()
            if head is None or expiries.get(head, NEVER) > now:
                break
            letters.append((ready.pop(), self._removed(head)))
        if letters:
            self._leave(letters, Reason.EXPIRED)

    def _removed(self, position: int) -> StoredMessage | None:
        """Forget a message that was just removed from the ready messages. Returns the message if it was in memory."""
        self.ready -= 1
        self._again.pop(position, None)
        if self._detailed:
            self._limits.ready_removed(position)
        self._forget(position)
        return self._bodies.take(position)

    def _forget(self, position: int) -> None:
        self._limits.forget(position)
        self._ready.forget(position)

    def purge(self) -> "array[int]":
        """Remove all ready messages (AMQP 0-9-1, queue.purge: "not awaiting acknowledgment").

        Returns:
            Their positions; the caller drops the slots, and calls :meth:`purged`.
        """
        positions = self._ready.drain()
        self.ready = 0
        self._limits.emptied()
        self._again.clear()  # it concerns ready messages only
        self._bodies.clear()
        return positions

    def purged(self, positions: Iterable[int]) -> None:
        """Forget the details of messages of :meth:`purge`. With very many messages, call it once per piece."""
        if self._detailed:
            for position in positions:
                self._forget(position)

    # -- messages go to consumers --------------------------------------------------------------------------------------

    def restore_held(
        self, position: int, *, priority: int = 0, octets: int = 0, expires_at: float | None = None
    ) -> None:
        """Take a message that a branch has held since before the restart. It is not among those of :meth:`restore`.

        Args:
            position: where it is.
            priority: of the message; needed where :attr:`QueueArguments.max_priority` is set.
            octets: size of its body in bytes; needed where :attr:`QueueArguments.max_length_bytes` is set.
            expires_at: when it expires, if it does.
        """
        delivery = QueueDelivery(self, position, redelivered=True, consumer=None)
        delivery.state = DeliveryState.HELD
        self._held[position] = delivery
        self.unacked += 1
        self.delivered = max(self.delivered, position)
        self._note(position, octets, expires_at)
        self._ready.remember(position, priority)

    def _hand_over(self, message: StoredMessage) -> bool:
        """Give a message that has expired on arrival to a consumer that waits.

        RabbitMQ: a TTL of 0 expires messages "upon reaching a queue unless they can be delivered to a consumer
        immediately".
        """
        consumer = None if self.ready or self._suspended else self._round.next()
        if consumer is None:
            return False
        self._ready.remember(message.position, message.priority)
        self._deliver(message, consumer)
        self._flush()
        return True

    def dispatch(self, now: float) -> float | None:
        """Expire messages at the head, then hand out messages as long as a consumer or getter can take one.

        Returns:
            When to call again at the latest: the next message at the head expires then.
        """
        self._scheduled = False
        if self.closed or self._suspended:
            return None
        bodies, ready, dispatch_round = self._bodies, self._ready, self._round
        left = DISPATCH_MESSAGES
        expiries = self._limits.expiries
        if expiries:
            self._expire(now)
        while self.ready:
            position = ready.head()
            assert position is not None
            if left <= 0 or (expiries and expiries.get(position, NEVER) <= now):
                self._schedule()
                break
            message = bodies.find(position)
            if message is None:
                if self._getters or dispatch_round.active:
                    wanted = bodies.ask(ready.first)
                    if wanted:
                        self._host.fetch(self, wanted)
                break
            left -= 1 + len(message.properties) // PROPERTY_OCTETS
            # As in RabbitMQ, where a message waits only while no consumer can take it.
            getter_first = self._getters and self._preferred >= DISPATCH_MESSAGES
            consumer = None if getter_first else dispatch_round.next()
            if consumer is not None:
                self._take()
                self._deliver(message, consumer)
                if self._getters:
                    self._preferred += 1
            elif dispatch_round.active and not getter_first:
                self._schedule()
                break
            elif self._getters:
                self._preferred = 0
                self._take()
                self._answer(message, self._getters.pop(0))
            else:
                break
        while self._getters and not self.ready:
            self.counts.get_empty += 1
            self._total.get_empty += 1
            self._total.changed[self.id] = self.counts
            self._getters.pop(0).got(None, 0)
        if self._automatic:
            self._flush()
        if self._limits.drops:
            self._drop_excess()
        head = ready.head() if expiries else None
        return None if head is None else expiries.get(head)

    def _take(self) -> None:
        """Remove the message at the head from the ready messages."""
        position = self._ready.pop()
        self.ready -= 1
        self._bodies.take(position)
        if self._detailed:
            self._limits.ready_removed(position)

    def _hand_out(self, position: int, consumer: Consumer | None, *, no_ack: bool) -> QueueDelivery:
        returns = self._again.pop(position, None) if self._again else None
        redelivered = returns is not None or position <= self._mark
        if redelivered:
            self.counts.redeliver += 1
            self._total.redeliver += 1
        self._total.changed[self.id] = self.counts
        self.delivered = max(self.delivered, position)
        delivery = QueueDelivery(self, position, redelivered, consumer, returns or 0)
        if no_ack:
            delivery.state = DeliveryState.SETTLED
            self._forget(position)
            self._automatic.append(position)
        else:
            self.unacked += 1
        return delivery

    def _flush(self) -> None:
        automatic, self._automatic = self._automatic, []
        if automatic:
            self._host.drop(self, automatic)

    def _deliver(self, message: StoredMessage, consumer: Consumer) -> None:
        if consumer.no_ack:
            self.counts.deliver_no_ack += 1
            self._total.deliver_no_ack += 1
        else:
            self.counts.deliver += 1
            self._total.deliver += 1
        delivery = self._hand_out(message.position, consumer, no_ack=consumer.no_ack)
        consumer.sink.deliver(consumer, delivery, self._visible(message, delivery))

    def _answer(self, message: StoredMessage, getter: Getter) -> None:
        if getter.no_ack:
            self.counts.get_no_ack += 1
            self._total.get_no_ack += 1
        else:
            self.counts.get += 1
            self._total.get += 1
        delivery = self._hand_out(message.position, None, no_ack=getter.no_ack)
        getter.got((delivery, self._visible(message, delivery)), self.ready)

    def _visible(self, message: StoredMessage, delivery: QueueDelivery) -> StoredMessage:
        """The message as the client gets it. A quorum queue says how often it has returned."""
        counts = delivery.returns and self.arguments.counts
        return visible(counted(message, delivery.returns) if counts else message)

    def serve(self, now: float) -> None:
        """Dispatch now, before a request that may change the order of turns."""
        if self.ready and self._round.active:
            self._run(now)

    def get(self, getter: Getter, now: float) -> None:
        """Give *getter* the first message that no consumer can take: at once, or when its body was read.

        Consumers take at most :data:`DISPATCH_MESSAGES` messages before it.
        """
        self._used_at = now
        if not self._getters:
            self._preferred = 0
        self._getters.append(getter)
        self._run(now)

    def cancel_get(self, getter: Getter) -> None:
        """Remove *getter*, which no longer needs an answer."""
        if getter in self._getters:
            self._getters.remove(getter)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._host.schedule(self)

    def _leave(self, letters: list[Letter], reason: Reason) -> None:
        dead_letters = self.arguments.dead_letter_exchange is not None
        self._total.leave(reason, len(letters), dead_letters=dead_letters)
        if dead_letters:
            self._host.dead_letter(self, letters, reason)
        else:
            self._host.drop(self, [position for position, _ in letters])

    def _run(self, now: float) -> None:
        """Dispatch now. If the queue must be called again at some time, schedule a call, which returns that time."""
        at = self.dispatch(now)
        self._host.handed_out(self)
        if at is not None:
            self._schedule()

    # -- messages that were handed out ---------------------------------------------------------------------------------

    def ack(self, delivery: QueueDelivery) -> None:
        """Settle a delivery. The caller drops its slot, in its own record and with all that belongs to that record.

        Raises:
            ValueError: it is not unacknowledged.
        """
        self._settle(delivery, DeliveryState.UNACKED)
        self._count_ack()
        if self._detailed:
            self._forget(delivery.position)

    def _count_ack(self) -> None:
        self.counts.ack += 1
        self._total.ack += 1
        if not self.closed:
            self._total.changed[self.id] = self.counts

    def hold(self, delivery: QueueDelivery) -> None:
        """Hold a delivery that was acknowledged within a branch.

        Until the branch ends, no client sees the message, and it uses up credit.

        Raises:
            ValueError: it is not unacknowledged.
        """
        if delivery.state is not DeliveryState.UNACKED:
            raise wrong_state(delivery)
        delivery.state = DeliveryState.HELD
        self._held[delivery.position] = delivery

    def end_hold(self, delivery: QueueDelivery) -> None:
        """Undo :meth:`hold`: the delivery is unacknowledged again, at the client that got it.

        Raises:
            KeyError: it is not held.
        """
        for held in self._take_held((delivery.position,)):
            held.state = DeliveryState.UNACKED

    def commit(self, positions: Iterable[int]) -> None:
        """Settle messages of a branch that has committed. Their rows are dropped.

        Raises:
            KeyError: one of them is not held.
        """
        for delivery in self._take_held(positions):
            self._settle(delivery, DeliveryState.HELD)
            self._count_ack()
            self._forget(delivery.position)

    def requeue(self, deliveries: Iterable[QueueDelivery], now: float, *, limited: bool = False) -> None:
        """Make deliveries ready again, each in its old place.

        Args:
            deliveries: unacknowledged.
            now: seconds since the epoch.
            limited: a client has returned them, by nack, reject, recover or the end of its channel. Those that have
                returned more often than the delivery limit become dead letters, or are dropped.

        Raises:
            ValueError: one of them is not unacknowledged.
        """
        limit = self.arguments.delivery_limit if limited else None
        self._give_back(deliveries, DeliveryState.UNACKED, now, limit)

    def suspend(self) -> None:
        """Hand out nothing until :meth:`proceed` was called as often as this method."""
        self._suspended += 1

    def proceed(self, now: float) -> None:
        """Undo one call of :meth:`suspend`."""
        self._suspended -= 1
        if self._suspended or self.closed:
            return
        if self._limits.drops and self._limits.over(self.ready):
            self._overflow(now)
        if self.ready or self._getters:
            self._schedule()

    def rollback(self, positions: Iterable[int], now: float) -> None:
        """Give messages back, as :meth:`requeue` does: the branch that held them is rolled back.

        A rollback counts for the delivery limit, but drops no message.

        Raises:
            KeyError: one of them is not held.
        """
        self._give_back(self._take_held(positions), DeliveryState.HELD, now, None)
        self._used_at = now

    def _take_held(self, positions: Iterable[int]) -> list[QueueDelivery]:
        """Stop holding these messages: all of them, or (KeyError) none."""
        deliveries = [self._held[position] for position in positions]
        for delivery in deliveries:
            del self._held[delivery.position]
        return deliveries

    def reject(self, deliveries: Iterable[QueueDelivery]) -> None:
        """Dead-letter deliveries, or drop them if the queue has no dead letter exchange (nack, reject without requeue).

        Raises:
            ValueError: one of them is not unacknowledged.
        """
        letters: list[Letter] = []
        for delivery in all_in(DeliveryState.UNACKED, deliveries):
            self._settle(delivery, DeliveryState.UNACKED)
            self._forget(delivery.position)
            letters.append((delivery.position, None))
        if letters and not self.closed:
            self._leave(letters, Reason.REJECTED)

    def _settle(self, delivery: QueueDelivery, expected: DeliveryState) -> None:
        if delivery.state is not expected:
            raise wrong_state(delivery)
        delivery.state = DeliveryState.SETTLED
        self.unacked -= 1
        if delivery.consumer is not None:
            delivery.consumer.released()

    def _give_back(
        self, deliveries: Iterable[QueueDelivery], expected: DeliveryState, now: float, limit: int | None
    ) -> None:
        letters: list[Letter] = []
        # From the last on, so that each position is the least of all ready ones: the cheap case.
        for delivery in sorted(all_in(expected, deliveries), key=lambda delivery: -delivery.position):
            position = delivery.position
            self._settle(delivery, expected)
            if self.closed:
                continue
            if limit is not None and delivery.returns >= limit:
                self._forget(position)
                letters.append((position, None))
                continue
            self._again[position] = delivery.returns + 1
            self._ready.put_back(position)
            self.ready += 1
            if self._detailed:
                self._limits.ready_added(position)
        if letters:
            self._leave(letters[::-1], Reason.DELIVERY_LIMIT)
        if self._limits.drops and self._limits.over(self.ready):
            self._overflow(now)
        if self.ready:
            self._schedule()

    # -- consumers, and the end of the queue ---------------------------------------------------------------------------

    @property
    def oldest(self) -> float | None:
        """When the oldest ready message came, seconds since the epoch: its position tells it."""
        position = self._ready.oldest()
        return None if position is None else position / 1_000_000

    @property
    def consumers(self) -> int:
        """How many there are: the consumer-count of declare-ok."""
        return len(self._round)

    def all_consumers(self) -> list[Consumer]:
        """All consumers, in order of arrival."""
        return self._round.all()

    def is_active(self, consumer: Consumer) -> bool:
        """Whether *consumer* does not wait for the end of the single active consumer."""
        return self._round.is_sole(consumer)

    def consume(self, consumer: Consumer) -> None:
        """Add *consumer*.

        Raises:
            XaError: 403, see :meth:`DispatchRound.add`.
        """
        self._round.add(consumer, self.name)
        consumer.queue = self
        if self.ready:
            self._schedule()

    def resume(self, consumer: Consumer) -> None:
        """See :meth:`Consumer.resume`."""
        self._round.resume(consumer)
        if self.ready:
            self._schedule()

    def cancel(self, consumer: Consumer, now: float) -> bool:
        """Remove *consumer*. Messages that it has not acknowledged stay with its channel. Idempotent.

        Returns:
            Whether it was the last one: a queue with auto-delete is then deleted.
        """
        if consumer not in self._round:
            return False
        self._round.remove(consumer)
        self._used_at = now
        if self.ready and self._round.active:  # another consumer may have the turn now
            self._schedule()
        return not self._round

    def touch(self, now: float) -> None:
        """Note a use: the queue was declared, perhaps passively, or a branch ended that had messages for it."""
        self._used_at = now

    def set_forward(self, before: float, seconds: float) -> None:
        """Add *seconds* to the time of the last use if it is not after *before*: the clock was set forward."""
        if self._used_at <= before:
            self._used_at += seconds

    def unused_until(self) -> float | None:
        """When the queue is deleted unless a client uses it (x-expires); ``None`` while it is in use, or never.

        Consumers use it, as well as branches that hold its messages: these messages may have to come back.
        """
        expires = self.arguments.expires
        return None if expires is None or self._round or self._held else self._used_at + expires / 1000

    def close(self) -> list[Consumer]:
        """Close the index of a deleted queue. The caller removes its rows.

        Messages that were handed out may still be settled, without effect.

        Returns:
            The consumers, which the caller must inform.
        """
        self.closed = True
        self._total.changed.pop(self.id, None)
        consumers = self._round.all()
        self._round = DispatchRound()
        for consumer in consumers:
            consumer.leave()
        while self._getters:
            self._getters.pop(0).got(None, 0)
        self.purge()
        self._bodies.close()
        return consumers
