"""A queue behaves like the simplest queue: a set of messages, of which the first is delivered next.

In the model a message is ready, handed out, held or gone. The model checks each delivery and each drop when the index
makes it: right message, right flag, right consumer, once.
"""

from array import array
from collections.abc import Iterable

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dtx.log.changes import StoredMessage
from dtx.store.postgres.arguments import Overflow, QueueArguments
from dtx.store.postgres.cache import cost
from dtx.store.postgres.consumers import Consumer, Credit, DeliveryState, QueueDelivery
from dtx.store.postgres.property_scan import counted
from dtx.store.postgres.queue import Letter, QueueIndex, Reason
from tests.unit.store.queue_rig import Channel, Get, Rig, message

ARGUMENTS = (
    QueueArguments(),
    QueueArguments(max_priority=2),
    QueueArguments(max_length=4),
    QueueArguments(max_length_bytes=40, dead_letter_exchange=b""),
    QueueArguments(max_length=4, max_length_bytes=30, max_priority=1),
    QueueArguments(single_active=True, max_priority=1),
    QueueArguments(max_length=3, overflow=Overflow.REJECT_PUBLISH, dead_letter_exchange=b"dlx"),
    QueueArguments(counts=True, delivery_limit=1),
    QueueArguments(counts=True, delivery_limit=2, dead_letter_exchange=b"dlx", max_length=6),
)
picks = st.lists(st.integers(0, 30), min_size=1, max_size=4)
mostly = st.sampled_from((True, True, True, False))


class Watched(Rig):
    """A store that reports each action to the model before it acts."""

    def __init__(self, model: "QueueMachine", arguments: QueueArguments, cache: int, batch: int) -> None:
        self.model = model
        super().__init__(arguments, cache=cache, batch=batch)

    def drop(self, queue: QueueIndex, positions: list[int]) -> None:
        for position in positions:
            self.model.leaves(position)
        super().drop(queue, positions)

    def dead_letter(self, queue: QueueIndex, letters: list[Letter], reason: Reason) -> None:
        assert self.queue.arguments.dead_letter_exchange is not None
        for position, _ in letters:
            self.model.leaves(position, reason)
        super().dead_letter(queue, letters, reason)


class WatchedChannel(Channel):
    def __init__(self, model: "QueueMachine") -> None:
        super().__init__()
        self.model = model

    def deliver(self, consumer: Consumer, delivery: QueueDelivery, message: StoredMessage) -> None:
        self.model.delivered(consumer, delivery, message)


class WatchedGet(Get):
    def __init__(self, model: "QueueMachine", *, no_ack: bool) -> None:
        super().__init__(no_ack=no_ack)
        self.model = model

    def got(self, found: tuple[QueueDelivery, StoredMessage] | None, remaining: int) -> None:
        super().got(found, remaining)
        if found is None:
            assert not self.model.ready
        else:
            self.model.delivered(None, *found, no_ack=self.no_ack)
            assert remaining == len(self.model.ready)


class QueueMachine(RuleBasedStateMachine):
    @initialize(
        arguments=st.sampled_from(ARGUMENTS),
        cache=st.sampled_from((0, 1500, 1 << 30)),
        batch=st.sampled_from((1, 3, 1000)),
    )
    def declare(self, arguments: QueueArguments, cache: int, batch: int) -> None:
        self.arguments = arguments
        self.rig = Watched(self, arguments, cache, batch)
        self.channel = WatchedChannel(self)
        self.shared = Credit()
        self.messages: dict[int, StoredMessage] = {}
        self.ready: set[int] = set()
        self.out: dict[int, QueueDelivery] = {}
        self.held: dict[int, QueueDelivery] = {}
        self.automatic: set[int] = set()
        self.rejecting: set[int] = set()
        self.again: dict[int, int] = {}
        self.returns: dict[int, int] = {}
        self.beyond: set[int] = set()
        self.mark = 0
        self.next = 10
        self.late: set[int] = set()
        self.consumers: list[Consumer] = []
        self.sole: Consumer | None = None

    # -- state of the model

    def order(self, position: int) -> tuple[int, int]:
        priority = min(self.messages[position].flags >> 8, self.arguments.max_priority)
        return -priority, position

    def head(self) -> int:
        return min(self.ready, key=self.order)

    def expired(self, position: int) -> bool:
        at = self.messages[position].expires_at
        return at is not None and at <= self.rig.now

    def octets(self) -> int:
        return sum(len(self.messages[position].body) for position in self.ready)

    def over(self) -> bool:
        length, octets = self.arguments.max_length, self.arguments.max_length_bytes
        return (length is not None and len(self.ready) > length) or (octets is not None and self.octets() > octets)

    def delivered(
        self, consumer: Consumer | None, delivery: QueueDelivery, found: StoredMessage, *, no_ack: bool = False
    ) -> None:
        position = delivery.position
        returns = self.again.get(position, 0)
        sent = self.messages[position]
        assert found == (counted(sent, returns) if self.arguments.counts and returns else sent)
        assert delivery.returns == returns
        self.returns[position] = returns
        if position in self.ready:
            assert position == self.head(), "not the first one"
            assert not self.expired(position)
            self.ready.remove(position)
        else:
            assert self.arriving == position, "handed out twice"
        assert delivery.redelivered == (position in self.again or position <= self.mark)
        self.again.pop(position, None)
        if consumer is not None:
            assert consumer in self.consumers
            assert consumer is self.sole or not self.arguments.single_active
            no_ack = consumer.no_ack
        if no_ack:
            self.automatic.add(position)
            return
        self.out[position] = delivery
        if consumer is not None:
            assert not consumer.credit.limit or self.used(consumer) <= consumer.credit.limit
            assert not self.shared.limit or self.used() <= self.shared.limit

    def used(self, consumer: Consumer | None = None) -> int:
        """The number of messages handed out to *consumer*, or on the channel."""
        takers = [each.consumer for each in (*self.out.values(), *self.held.values()) if each.consumer is not None]
        return len(takers) if consumer is None else takers.count(consumer)

    def leaves(self, position: int, reason: Reason | None = None) -> None:
        if position in self.automatic:
            assert reason is None
            self.automatic.remove(position)
            return
        if position in self.rejecting:
            assert reason in {None, Reason.REJECTED}
            self.rejecting.remove(position)
            return
        if position in self.beyond:
            assert reason in {None, Reason.DELIVERY_LIMIT}
            self.beyond.remove(position)
            return
        if self.expired(position) and reason is not Reason.MAXLEN:
            assert position == self.head()
        else:
            assert reason in {None, Reason.MAXLEN}
            assert self.over()
            assert position == self.head()
            assert self.arguments.overflow is Overflow.DROP_HEAD
        self.ready.remove(position)
        self.again.pop(position, None)

    def chosen(self, picks: Iterable[int]) -> list[QueueDelivery]:
        """Some of the handed-out messages, each once, in any order."""
        there = list(self.out.values())
        found = [there[pick % len(there)] for pick in picks if there]
        return list(dict.fromkeys(found))

    arriving = 0

    # -- actions

    def come(self, position: int, priority: int, ttl: int | None, size: int) -> None:
        at = None if ttl is None else self.rig.now + ttl
        new = message(position, priority=priority, expires_at=at, body=b"x" * size)
        if not self.rig.queue.admit(size):
            assert self.arguments.max_length is not None
            assert len(self.ready) >= self.arguments.max_length
            return
        self.messages[position] = new
        waits = any(not consumer.waiting for consumer in self.consumers)
        if not (ttl == 0 and not self.ready and waits):
            self.ready.add(position)
        self.arriving = position
        self.rig.queue.withdraw(size)
        self.rig.put_message(new)
        if position not in self.out and position in self.rig.rows and position not in self.rig.dropped:
            self.ready.add(position)
        self.arriving = 0

    @rule(
        priority=st.integers(0, 3),
        ttl=st.sampled_from((None, None, None, 0, 5, 10)),
        size=st.integers(0, 20),
        run=mostly,
    )
    def publish(self, priority: int, ttl: int | None, size: int, run: bool) -> None:
        self.next += 2
        self.late.add(self.next - 1)
        self.come(self.next, priority, ttl, size)
        if run:
            self.rig.run()

    @precondition(lambda self: self.late)
    @rule(pick=st.integers(0, 30), priority=st.integers(0, 3), size=st.integers(0, 20))
    def a_branch_commits_late(self, pick: int, priority: int, size: int) -> None:
        position = sorted(self.late)[pick % len(self.late)]
        self.late.remove(position)
        if position % 3:
            self.come(position, priority, None, size)
        elif self.rig.queue.admit(size):
            self.messages[position] = new = message(position, priority=priority, body=b"x" * size)
            self.rig.rows[position] = new
            self.ready.add(position)
            self.rig.queue.withdraw(size)
            self.rig.queue.reveal(position, self.rig.now, priority=priority, octets=size)

    @rule(prefetch=st.integers(0, 3), no_ack=mostly.map(lambda usual: not usual), priority=st.integers(-1, 1))
    def consume(self, prefetch: int, no_ack: bool, priority: int) -> None:
        if len(self.consumers) < 4:
            new = Consumer(
                b"%d" % len(self.consumers),
                self.channel,
                no_ack=no_ack,
                priority=priority,
                credit=Credit(prefetch),
                shared=self.shared,
            )
            self.consumers.append(new)
            self.sole = self.sole or new
            self.rig.queue.consume(new)

    @precondition(lambda self: self.consumers)
    @rule(pick=st.integers(0, 3))
    def cancel(self, pick: int) -> None:
        consumer = self.consumers.pop(pick % len(self.consumers))
        if consumer is self.sole:
            self.sole = max(self.consumers, key=lambda each: each.priority, default=None)
        assert self.rig.queue.cancel(consumer, self.rig.now) == (not self.consumers)
        assert not self.rig.queue.cancel(consumer, self.rig.now)

    @rule(limit=st.integers(0, 4))
    def qos(self, limit: int) -> None:
        self.shared.change(limit)

    @rule()
    def socket_is_slow(self) -> None:
        self.channel.full = True

    @rule()
    def socket_has_caught_up(self) -> None:
        self.channel.full = False
        for consumer in self.consumers:
            consumer.resume()

    @rule(picks=picks)
    def ack(self, picks: list[int]) -> None:
        for delivery in self.chosen(picks):
            del self.out[delivery.position]
            self.rig.queue.ack(delivery)
            self.rig.remove([delivery.position])

    @rule(picks=picks, limited=mostly)
    def requeue(self, picks: list[int], limited: bool = False) -> None:
        deliveries = self.chosen(picks)
        self.come_back(
            (delivery.position for delivery in deliveries), self.arguments.delivery_limit if limited else None
        )
        self.rig.queue.requeue(deliveries, self.rig.now, limited=limited)
        assert not self.beyond

    def come_back(self, positions: Iterable[int], limit: int | None) -> None:
        for position in positions:
            self.out.pop(position, None)
            self.held.pop(position, None)
            returns = self.returns.pop(position, 0)
            if limit is not None and returns >= limit:
                self.beyond.add(position)
            else:
                self.ready.add(position)
                self.again[position] = returns + 1

    @rule(picks=picks)
    def reject(self, picks: list[int]) -> None:
        deliveries = self.chosen(picks)
        for delivery in deliveries:
            del self.out[delivery.position]
            self.rejecting.add(delivery.position)
        self.rig.queue.reject(deliveries)
        assert not self.rejecting

    @rule(picks=picks)
    def hold(self, picks: list[int]) -> None:
        for delivery in self.chosen(picks):
            self.held[delivery.position] = self.out.pop(delivery.position)
            self.rig.queue.hold(delivery)

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 30))
    def end_hold(self, pick: int) -> None:
        position = sorted(self.held)[pick % len(self.held)]
        self.out[position] = self.held.pop(position)
        self.rig.queue.end_hold(self.out[position])

    @rule()
    def commit(self) -> None:
        self.rig.queue.commit(self.held)
        self.rig.remove(self.held)
        self.held.clear()

    @rule()
    def rollback(self) -> None:
        held = set(self.held)
        self.come_back(held, None)
        self.rig.queue.rollback(held, self.rig.now)

    @precondition(lambda self: self.messages)
    @rule(pick=st.integers(0, 30))
    def a_drop_was_not_written(self, pick: int) -> None:
        position = sorted(self.messages)[pick % len(self.messages)]
        if position in self.rig.rows or self.over() or self.expired(position):
            return
        self.ready.add(position)
        self.again[position] = 0
        self.rig.rows[position] = self.messages[position]
        self.rig.queue.restore_settled([self.messages[position]], self.rig.now)

    @rule(no_ack=st.booleans())
    def get(self, no_ack: bool) -> None:
        getter = WatchedGet(self, no_ack=no_ack)
        self.rig.queue.get(getter, self.rig.now)
        self.rig.run()
        assert len(getter.answers) == 1

    @rule()
    def purge(self) -> None:
        positions = self.rig.queue.purge()
        assert list(positions) == sorted(self.ready, key=self.order)
        self.rig.queue.purged(positions)
        self.rig.remove(positions)
        self.again = {position: returns for position, returns in self.again.items() if position not in self.ready}
        self.ready.clear()

    @rule(seconds=st.integers(1, 6))
    def time_goes_on(self, seconds: int) -> None:
        self.rig.now += seconds
        if self.rig.wake is not None and self.rig.wake <= self.rig.now:
            self.rig.dispatch()

    @rule()
    def dispatch(self) -> None:
        self.rig.dispatch()

    @precondition(lambda self: self.rig.fetches)
    @rule()
    def bodies_arrive(self) -> None:
        self.rig.answer()

    @rule()
    def run_until_quiet(self) -> None:
        self.rig.run()
        assert self.rig.queue.ready == len(self.ready)
        if self.ready:
            assert not self.expired(self.head())
            assert all(self.can_take_nothing(consumer) for consumer in self.consumers), "a consumer waits"

    def can_take_nothing(self, consumer: Consumer) -> bool:
        if self.channel.full or (self.arguments.single_active and consumer is not self.sole):
            return True
        spent = 0 < consumer.credit.limit <= consumer.credit.used
        return (spent and not consumer.no_ack) or 0 < self.shared.limit <= self.shared.used

    @rule()
    def restart(self) -> None:
        """Only the rows survive, and what the log has of branches."""
        delivered = self.rig.queue.delivered
        rows, now = self.rig.rows, self.rig.now
        self.ready = set(rows) - set(self.held)
        self.out.clear()
        self.again.clear()
        self.returns.clear()
        self.mark = delivered
        self.consumers.clear()
        self.sole = None
        self.shared = Credit()
        self.channel = WatchedChannel(self)
        self.rig = Watched(self, self.arguments, self.rig.cache.limit, self.rig.batch)
        self.rig.rows, self.rig.now = rows, now
        for position in self.held:
            was = self.messages[position]
            self.rig.queue.restore_held(
                position, priority=was.flags >> 8, octets=len(was.body), expires_at=was.expires_at
            )
            self.held[position] = self.rig.queue._held[position]
        there = {position: self.messages[position] for position in sorted(self.ready)}
        self.rig.queue.restore(
            array("q", there),
            delivered=delivered,
            expiries={position: was.expires_at for position, was in there.items() if was.expires_at is not None},
            octets={position: len(was.body) for position, was in there.items()},
            priorities={position: was.flags >> 8 for position, was in there.items() if was.flags >> 8},
        )

    # -- invariants

    @invariant()
    def counts_are_right(self) -> None:
        queue = self.rig.queue
        assert queue.ready == len(self.ready) == len(queue._ready)
        assert queue.unacked == len(self.out) + len(self.held)
        assert queue.consumers == len(self.consumers)
        assert self.shared.used == self.used()
        assert all(consumer.credit.used == self.used(consumer) for consumer in self.consumers)
        assert set(self.rig.rows) == self.ready | set(self.out) | set(self.held)

    @invariant()
    def nothing_leaks(self) -> None:
        queue = self.rig.queue
        bodies = queue._bodies
        there = [*bodies._kept.values(), *bodies._fetched.values()]
        assert {each.position for each in there} <= self.ready
        assert self.rig.cache.used == bodies.cached == sum(map(cost, there))
        assert queue._again == self.again
        known = self.ready | set(self.out) | set(self.held)
        assert set(queue._limits.expiries) <= known
        assert set(queue._limits._sizes) <= known
        assert all(delivery.state is DeliveryState.UNACKED for delivery in self.out.values())

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.requeue(list(range(len(self.out))))
            self.requeue(list(range(len(self.out))))


QueueMachine.TestCase.settings = settings(
    max_examples=300, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestQueueAgainstTheModel = QueueMachine.TestCase
