"""The index of one queue: which messages wait, who gets them, and what leaves otherwise. Pure of I/O.

Theory of operation. A message is *ready*, then *handed out* (unacknowledged, or held for a branch), then settled; given
back, it is ready again in its old place. All that is ready is known by position alone; bodies are in memory for as many
as the cache has room for, and are otherwise asked for when their turn comes (:meth:`Host.fetch`). The order is safe
because nobody is served out of turn: while the head has no body, nothing is handed out, so nothing that is on its way
has been promised to anyone, and whoever dies meanwhile has nothing to give back.

Time is an argument (seconds since the epoch). The host, not the index, knows the event loop and the database: it is
told through :class:`Host`, whose methods must not call back into the index, and it calls :meth:`QueueIndex.dispatch`
when it was asked to, and at the time that this returned. A message is put here when its row is committed, and its row
is dropped after it was settled here: what dies in between is handed out again, never lost.
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
from dtx.store.postgres.property_scan import visible
from dtx.store.postgres.ready_messages import NEVER, PriorityReady, QueueLimits, Ready

DISPATCH_MESSAGES: Final = 100
"""Messages that one call hands out at most, a millisecond, or ten where AMQP 1.0 takes them: others want their turn."""
PROPERTY_OCTETS: Final = 256
"""Octets of properties that count as one message more: AMQP 1.0 reads all of them."""
LEAVE_MESSAGES: Final = 1000
"""Messages that expire, or are too many, in one step at most: what the host then has to drop in one statement."""


class Reason(StrEnum):
    """Why a message left its queue without being acknowledged."""

    REJECTED = "rejected"
    EXPIRED = "expired"
    MAXLEN = "maxlen"


Letter = tuple[int, StoredMessage | None]
"""A position, and its message where that was in memory."""


class Host(Protocol):
    """The store around the indexes. Its methods only take note: none calls the index, and none raises."""

    def schedule(self, queue: "QueueIndex") -> None:
        """Call ``queue.dispatch(now)`` soon; once for any number of reasons."""

    def handed_out(self, queue: "QueueIndex") -> None:
        """Messages may have left *queue* without a dispatch that was scheduled."""

    def fetch(self, queue: "QueueIndex", positions: list[int]) -> None:
        """Read these messages, as many from the first on as are reasonable to have in memory at once, at least one.

        Then call :meth:`QueueIndex.arrived` with *positions* and what was read; also after a failure, in good time.
        """

    def drop(self, queue: "QueueIndex", positions: list[int]) -> None:
        """These messages are settled (sent without acknowledgement, expired, beyond the length): remove their rows."""

    def dead_letter(self, queue: "QueueIndex", letters: list[Letter], reason: Reason) -> None:
        """As :meth:`drop`, but they go to the dead letter exchange, in the same transaction."""


class QueueIndex:
    """The messages and consumers of one queue.

    Args:
        id: in :class:`~dtx.log.changes.Slot`.
        name: for people, ``queue 'q' in vhost '/'``.
        host: see there.
        cache: what bodies may take, of all queues together.
        arguments: of its declaration.
        now: it begins to be unused.
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
        "_used_at",
        "arguments",
        "closed",
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
        self._host = host
        self._used_at = now
        self._ready = PriorityReady(arguments.max_priority) if arguments.max_priority else Ready()
        self._round = DispatchRound(single=arguments.single_active)
        self._getters: list[Getter] = []  # hardly ever more than one
        self._scheduled = False
        self._suspended = 0
        """Those who give messages back in several steps: nothing is handed out before the last, for the order."""
        self._bodies = Bodies(cache, self._round, self._getters)
        self._held: dict[int, QueueDelivery] = {}
        # Redelivered: what was given back, and what may have been handed out before a restart.
        self._again: set[int] = set()
        self._mark = 0
        self._limits = QueueLimits(arguments)
        # Something has to be forgotten of each message that is settled.
        self._detailed = arguments.max_priority > 0 or self._limits.weighs
        # Sent without acknowledgement in this dispatch.
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
        """What the database has at start, before anything else happens to the queue.

        Args:
            positions: ready messages, in order.
            delivered: up to here they may have been handed out before.
            expiries: when those expire that do.
            octets: of the bodies, where :attr:`QueueArguments.max_length_bytes` is set.
            priorities: of those that have one, where the queue has priorities.
        """
        self._ready.restore(positions, priorities or {})
        self.ready += len(positions)
        self._mark = delivered
        self.delivered = max(self.delivered, delivered)
        self._limits.restore(expiries or {}, octets or {})
        self._detailed |= bool(expiries)
        if self._limits.drops and self._limits.over(self.ready):  # that they left was not written any more
            self._overflow(self._used_at)
        if self.ready:
            self._schedule()

    def put(self, message: StoredMessage, now: float) -> None:
        """A message whose row is committed, and that everybody may see."""
        if self.closed:
            return
        position = message.position
        expires_at = message.expires_at
        if self._detailed or expires_at is not None:
            self._note(position, len(message.body), expires_at)
            if expires_at is not None and expires_at <= now and self._hand_over(message):
                return
            self._limits.came(position)
        self._ready.append(position, message.priority)
        self.ready += 1
        # In a long queue that is not in memory anyway, those at the end would be the first to be let go.
        if self.ready - len(self._bodies) <= FETCH_MESSAGES:
            self._bodies.keep(message)
        if self._limits.drops and self._limits.over(self.ready):
            self._overflow(now)
        if not self._scheduled and (self._round.active or expires_at is not None):
            self._schedule()

    def reveal(
        self, position: int, now: float, *, priority: int = 0, octets: int = 0, expires_at: float | None = None
    ) -> None:
        """As :meth:`put`, of a message whose body is not in memory.

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
        self._limits.came(position)
        self._ready.append(position, priority)
        self.ready += 1
        if self._limits.drops and self._limits.over(self.ready):
            self._overflow(now)
        self._schedule()

    def reappear(self, messages: Iterable[StoredMessage], now: float) -> None:
        """Messages that were settled here, and whose rows are still there: the write of that failed."""
        for message in messages:
            if not self.closed:
                self._again.add(message.position)
                self.put(message, now)

    def admit(self, octets: int) -> bool:
        """Whether the queue takes one more message, with what is on its way to it (reject-publish).

        A message that was admitted counts until :meth:`withdraw`, which is called when it is put, or will not be.

        Args:
            octets: of its body.
        """
        return self._limits.admit(self.ready, octets)

    def fits(self, count: int, octets: int) -> bool:
        """Whether the queue would take *count* more messages with bodies of *octets* together (reject-publish)."""
        return self._limits.fits(self.ready, count, octets)

    def withdraw(self, octets: int) -> None:
        """The other end of :meth:`admit`."""
        self._limits.withdraw(octets)

    def _note(self, position: int, octets: int, expires_at: float | None) -> None:
        self._limits.note(position, octets, expires_at)
        self._detailed |= expires_at is not None

    # -- bodies -------------------------------------------------------------------------------------------------------

    def arrived(self, positions: Iterable[int], messages: Iterable[StoredMessage]) -> None:
        """The answer to :meth:`Host.fetch`.

        Args:
            positions: as they were asked for.
            messages: what was read of them, perhaps not all, perhaps none; the rest is asked for again. A message that
                is known to have no row must be named to :meth:`vanished` as well.
        """
        self._bodies.arrived(positions, messages)
        if not self.closed:
            self._schedule()

    def vanished(self, positions: Iterable[int]) -> int:
        """These messages have no rows: they have left meanwhile, or somebody removed them behind our back.

        Returns:
            How many of them were still waited for.
        """
        missed = [position for position in positions if self._ready.discard(position)]
        for position in missed:
            self._gone(position)
        if self.ready:
            self._schedule()
        return len(missed)

    # -- messages that leave without a consumer -----------------------------------------------------------------------

    def _overflow(self, now: float) -> None:
        """Drop from the head what is too much; but first let consumers have what they can take."""
        if self._suspended:
            return
        if self._round.active:
            self._run(now)
        self._drop_excess()

    def _drop_excess(self) -> None:
        """Drop from the head what is too much, up to a limit: there is more of it when much comes back at once."""
        letters: list[Letter] = []
        while self.ready and len(letters) < LEAVE_MESSAGES and self._limits.over(self.ready):
            position = self._ready.pop()
            letters.append((position, self._gone(position)))
        if letters:
            self._leave(letters, Reason.MAXLEN)
            if self._limits.expiries or len(letters) == LEAVE_MESSAGES:
                # What is at the head now may have expired long ago.
                self._schedule()

    def _expire(self, now: float) -> None:
        """Remove what has expired at the head, up to a limit.

        RabbitMQ: "messages which should expire will still only expire from the head of the queue"; so in one with
        priorities those of lower ones wait behind those of higher ones that do not expire.
        """
        letters: list[Letter] = []
        ready, expiries = self._ready, self._limits.expiries
        while len(letters) < LEAVE_MESSAGES:
            head = ready.head()
            if head is None or expiries.get(head, NEVER) > now:
                break
            letters.append((ready.pop(), self._gone(head)))
        if letters:
            self._leave(letters, Reason.EXPIRED)

    def _gone(self, position: int) -> StoredMessage | None:
        """What was just taken out of what is ready leaves for good; its message where that was in memory."""
        self.ready -= 1
        self._again.discard(position)
        if self._detailed:
            self._limits.went(position)
        self._forget(position)
        return self._bodies.take(position)

    def _forget(self, position: int) -> None:
        self._limits.forget(position)
        self._ready.forget(position)

    def purge(self) -> "array[int]":
        """Remove all that is ready (AMQP 0-9-1, queue.purge: "not awaiting acknowledgment").

        Returns:
            Their positions; the caller drops the slots, and calls :meth:`purged`.
        """
        positions = self._ready.drain()
        self.ready = 0
        self._limits.emptied()
        self._again.clear()  # of what is ready, all of it
        self._bodies.clear()
        return positions

    def purged(self, positions: Iterable[int]) -> None:
        """Forget what is particular about messages of :meth:`purge`: with very many, a piece at a time."""
        if self._detailed:
            for position in positions:
                self._forget(position)

    # -- messages go to consumers --------------------------------------------------------------------------------------

    def restore_held(
        self, position: int, *, priority: int = 0, octets: int = 0, expires_at: float | None = None
    ) -> None:
        """A message that a branch holds since before the restart; it is not among those of :meth:`restore`.

        Args:
            position: where it is.
            priority: of the message; needed where :attr:`QueueArguments.max_priority` is set.
            octets: of its body; needed where :attr:`QueueArguments.max_length_bytes` is set.
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
        """Expire what has expired at the head, then hand out as long as there is somebody to take it.

        Returns:
            When to call again at the latest: the next message at the head expires then.
        """
        self._scheduled = False
        if self.closed or self._suspended:
            return None
        bodies, ready, turns = self._bodies, self._ready, self._round
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
                if self._getters or turns.active:
                    wanted = bodies.ask(ready.first)
                    if wanted:
                        self._host.fetch(self, wanted)
                break
            left -= 1 + len(message.properties) // PROPERTY_OCTETS
            # As in RabbitMQ, where a message waits only while no consumer can take it.
            getters_turn = self._getters and self._preferred >= DISPATCH_MESSAGES
            consumer = None if getters_turn else turns.next()
            if consumer is not None:
                self._take()
                self._deliver(message, consumer)
                if self._getters:
                    self._preferred += 1
            elif turns.active and not getters_turn:
                self._schedule()
                break
            elif self._getters:
                self._preferred = 0
                self._take()
                self._answer(message, self._getters.pop(0))
            else:
                break
        while self._getters and not self.ready:
            self._getters.pop(0).got(None, 0)
        if self._automatic:
            self._flush()
        if self._limits.drops:
            self._drop_excess()
        head = ready.head() if expiries else None
        return None if head is None else expiries.get(head)

    def _take(self) -> None:
        """The message at the head leaves what is ready."""
        position = self._ready.pop()
        self.ready -= 1
        self._bodies.take(position)
        if self._detailed:
            self._limits.went(position)

    def _hand_out(self, position: int, consumer: Consumer | None, *, no_ack: bool) -> QueueDelivery:
        redelivered = position <= self._mark
        if self._again and position in self._again:
            self._again.remove(position)
            redelivered = True
        self.delivered = max(self.delivered, position)
        delivery = QueueDelivery(self, position, redelivered, consumer)
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
        delivery = self._hand_out(message.position, consumer, no_ack=consumer.no_ack)
        consumer.sink.deliver(consumer, delivery, visible(message))

    def _answer(self, message: StoredMessage, getter: Getter) -> None:
        delivery = self._hand_out(message.position, None, no_ack=getter.no_ack)
        getter.got((delivery, visible(message)), self.ready)

    def serve(self, now: float) -> None:
        """Let consumers have what came before the next request, which may change whose turn it is."""
        if self.ready and self._round.active:
            self._run(now)

    def get(self, getter: Getter, now: float) -> None:
        """Give *getter* the first message that no consumer can take: at once, or when its body was read.

        It waits for :data:`DISPATCH_MESSAGES` at most that consumers take before it.
        """
        self._used_at = now
        if not self._getters:
            self._preferred = 0
        self._getters.append(getter)
        self._run(now)

    def cancel_get(self, getter: Getter) -> None:
        """It does not want an answer any more."""
        if getter in self._getters:
            self._getters.remove(getter)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._host.schedule(self)

    def _leave(self, letters: list[Letter], reason: Reason) -> None:
        if self.arguments.dead_letter_exchange is not None:
            self._host.dead_letter(self, letters, reason)
        else:
            self._host.drop(self, [position for position, _ in letters])

    def _run(self, now: float) -> None:
        """Dispatch now; the host hears of the new time to call at its next call."""
        at = self.dispatch(now)
        self._host.handed_out(self)
        if at is not None:
            self._schedule()

    # -- what was handed out -------------------------------------------------------------------------------------------

    def ack(self, delivery: QueueDelivery) -> None:
        """It is settled; the caller drops its slot (in its own record, with whatever else belongs to that).

        Raises:
            ValueError: it is not unacknowledged.
        """
        self._settle(delivery, DeliveryState.UNACKED)
        if self._detailed:
            self._forget(delivery.position)

    def hold(self, delivery: QueueDelivery) -> None:
        """It was acknowledged within a branch: nobody sees it until the branch ends. It uses up credit until then.

        Raises:
            ValueError: it is not unacknowledged.
        """
        if delivery.state is not DeliveryState.UNACKED:
            raise wrong_state(delivery)
        delivery.state = DeliveryState.HELD
        self._held[delivery.position] = delivery

    def unhold(self, delivery: QueueDelivery) -> None:
        """The other end of :meth:`hold`: it is unacknowledged again, with whoever got it.

        Raises:
            KeyError: it is not held.
        """
        for held in self._let_go((delivery.position,)):
            held.state = DeliveryState.UNACKED

    def commit(self, positions: Iterable[int]) -> None:
        """The branch that held these has committed, and their rows are dropped.

        Raises:
            KeyError: one of them is not held.
        """
        for delivery in self._let_go(positions):
            self._settle(delivery, DeliveryState.HELD)
            self._forget(delivery.position)

    def requeue(self, deliveries: Iterable[QueueDelivery], now: float) -> None:
        """They are ready again, each in its old place (nack, reject and recover with requeue; a channel that closed).

        Raises:
            ValueError: one of them is not unacknowledged.
        """
        self._give_back(deliveries, DeliveryState.UNACKED, now)

    def suspend(self) -> None:
        """Hand out nothing before as many calls of :meth:`proceed`."""
        self._suspended += 1

    def proceed(self, now: float) -> None:
        """The other end of :meth:`suspend`."""
        self._suspended -= 1
        if self._suspended or self.closed:
            return
        if self._limits.drops and self._limits.over(self.ready):
            self._overflow(now)
        if self.ready or self._getters:
            self._schedule()

    def rollback(self, positions: Iterable[int], now: float) -> None:
        """The branch that held these is rolled back: as :meth:`requeue`.

        Raises:
            KeyError: one of them is not held.
        """
        self._give_back(self._let_go(positions), DeliveryState.HELD, now)
        self._used_at = now

    def _let_go(self, positions: Iterable[int]) -> list[QueueDelivery]:
        """These are held no more: all of them, or (KeyError) none."""
        deliveries = [self._held[position] for position in positions]
        for delivery in deliveries:
            del self._held[delivery.position]
        return deliveries

    def reject(self, deliveries: Iterable[QueueDelivery]) -> None:
        """They are not wanted (nack and reject without requeue): to the dead letter exchange, or away.

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

    def _give_back(self, deliveries: Iterable[QueueDelivery], expected: DeliveryState, now: float) -> None:
        # From the last on, so that each is the least of all that is ready: the cheap case.
        for delivery in sorted(all_in(expected, deliveries), key=lambda delivery: -delivery.position):
            position = delivery.position
            self._settle(delivery, expected)
            if self.closed:
                continue
            self._again.add(position)
            self._ready.put_back(position)
            self.ready += 1
            if self._detailed:
                self._limits.came(position)
        if self._limits.drops and self._limits.over(self.ready):
            self._overflow(now)
        if self.ready:
            self._schedule()

    # -- consumers and the queue's own life ----------------------------------------------------------------------------

    @property
    def consumers(self) -> int:
        """How many there are: the consumer-count of declare-ok."""
        return len(self._round)

    def consume(self, consumer: Consumer) -> None:
        """*consumer* takes part from now on.

        Raises:
            XaError: 403 where it, or who is there, is exclusive.
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
        """*consumer* takes part no more; what it has not acknowledged stays with its channel. Idempotent.

        Returns:
            Whether it was the last one: a queue with auto-delete then goes.
        """
        if consumer not in self._round:
            return False
        self._round.remove(consumer)
        self._used_at = now
        if self.ready and self._round.active:  # it may be another's turn now
            self._schedule()
        return not self._round

    def touch(self, now: float) -> None:
        """The queue was declared, perhaps passively, or a branch has ended that had messages for it."""
        self._used_at = now

    def set_forward(self, before: float, seconds: float) -> None:
        """The clock was set forward: what was used *before* that is not unused for *seconds* longer."""
        if self._used_at <= before:
            self._used_at += seconds

    def unused_until(self) -> float | None:
        """When the queue goes unless somebody uses it (x-expires); ``None`` while somebody does, or never.

        It is used by consumers, and by branches that hold messages of it: those may have to come back.
        """
        expires = self.arguments.expires
        return None if expires is None or self._round or self._held else self._used_at + expires / 1000

    def close(self) -> list[Consumer]:
        """The queue is deleted. Its rows are the caller's; what was handed out may still be settled, to no effect.

        Returns:
            The consumers, to be told.
        """
        self.closed = True
        consumers = self._round.all()
        self._round = DispatchRound()
        for consumer in consumers:
            consumer.leave()
        while self._getters:
            self._getters.pop(0).got(None, 0)
        self.purge()
        self._bodies.close()
        return consumers
