"""The round of a queue's consumers: which one is next, and the cost of many consumers."""

import pytest

from dtx.store.postgres.arguments import QueueArguments
from dtx.store.postgres.consumers import PASSED_AT_ONCE, RETURN_MESSAGES, Consumer, Credit, DispatchRound, return_slowly
from dtx.store.postgres.queue import LEAVE_MESSAGES
from tests.unit.store.queue_rig import Channel, Rig

MANY = 2000


class Counted(Consumer):
    """Counts how often its priority is read."""

    __slots__ = ("_priority",)
    looks = 0

    @property
    def priority(self) -> int:
        Counted.looks += 1
        return self._priority

    @priority.setter
    def priority(self, value: int) -> None:
        self._priority = value


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("levels", [1, MANY])
@pytest.mark.parametrize("backwards", [True, False])
def test_consumers_that_leave_do_not_look_at_all_others(single: bool, levels: int, backwards: bool) -> None:
    """Ten thousand consumers end with one channel.close, which may hold the event loop for 50 ms."""
    turns = DispatchRound(single=single)
    consumers = [Counted(b"", Channel(), priority=number % levels) for number in range(MANY)]
    Counted.looks = 0
    for consumer in consumers:
        turns.add(consumer, "q")
    for consumer in reversed(consumers) if backwards else consumers:
        turns.remove(consumer)
    assert (len(turns), turns.active, turns.next()) == (0, 0, None)
    assert Counted.looks < 20 * MANY


def test_the_next_active_consumer_is_the_first_by_priority() -> None:
    turns = DispatchRound(single=True)
    consumers = [Consumer(b"%d" % number, Channel(), priority=p) for number, p in enumerate((1, 2, 9, 9, 3))]
    for consumer in consumers:
        turns.add(consumer, "q")
    order = []
    turns.remove(consumers[4])
    while (active := turns.next()) is not None:
        order.append(active.tag)
        turns.remove(active)
    assert order == [b"0", b"2", b"3", b"1"]


def test_consumers_that_can_take_nothing_are_passed_over_in_steps() -> None:
    rig = Rig(QueueArguments())
    channel, open_one = Channel(), Channel()
    channel.full = True
    for _ in range(2 * PASSED_AT_ONCE + 1):
        rig.queue.consume(Consumer(b"", channel))
    rig.queue.consume(Consumer(b"open", open_one))
    rig.put(1)
    turns = 0
    while not open_one.messages:
        assert rig.scheduled
        rig.dispatch()
        turns += 1
    assert turns == 3


def test_nothing_is_handed_out_before_all_has_returned() -> None:
    """Requeued messages keep their places, even if they return in many steps."""
    rig = Rig(QueueArguments())
    first, second = Channel(), Channel()
    count = 3 * RETURN_MESSAGES + 1
    leaving = rig.consumer(first)
    rig.put(*range(1, count + 1))
    rig.run()
    rig.queue.cancel(leaving, rig.now)
    rig.consumer(second)
    rig.put(count + 1)
    for _ in return_slowly(first.taken(), lambda: rig.now):
        rig.run()
        assert second.positions == []
    rig.run()
    assert second.positions == list(range(1, count + 2))


def test_a_limited_queue_drops_the_excess_at_the_end() -> None:
    """It does so in steps: deliveries of very many consumers can return at once."""
    rig = Rig(QueueArguments(max_length=5))
    channel = Channel()
    leaving = rig.consumer(channel)
    count = 2 * LEAVE_MESSAGES + 10
    rig.put(*range(1, count + 1))
    rig.queue.cancel(leaving, rig.now)
    for _ in return_slowly(channel.taken(), lambda: rig.now):
        assert not rig.dropped
    assert len(rig.dropped) == LEAVE_MESSAGES
    rig.run()
    assert rig.dropped == list(range(1, count - 4))


def test_consumers_of_a_deleted_queue_wait_for_nothing() -> None:
    rig = Rig(QueueArguments())
    shared = Credit(1)
    consumers = [rig.consumer(Channel(), shared=shared) for _ in range(3)]
    rig.put(1, 2)
    rig.run()
    assert rig.queue.close() == consumers
    shared.change(5)
    assert all(consumer.queue is None for consumer in consumers)
    rig.queue.suspend()
    rig.queue.proceed(rig.now)
    assert not rig.queue.cancel(consumers[0], rig.now)
