"""A message goes to the consumer that was waiting when it arrived, even if a get follows in the same turn."""

import pytest

from dtx.store.postgres import queue
from tests.unit.store.queue_rig import NOW, Channel, Get, Rig


def test_a_waiting_consumer_goes_before_a_later_get() -> None:
    rig, channel, getter = Rig(), Channel(), Get()
    rig.consumer(channel, prefetch=2)
    rig.put(1, 2, 3)
    rig.queue.get(getter, rig.now)
    assert channel.positions == [1, 2]
    assert getter.delivery.position == 3


def test_a_get_behind_a_waiting_consumer_finds_nothing() -> None:
    rig, channel, getter = Rig(), Channel(), Get()
    rig.consumer(channel)
    rig.put(1)
    rig.queue.get(getter, rig.now)
    assert (channel.positions, getter.answers) == ([1], [(None, 0)])


def test_a_consumer_that_leaves_is_served_first() -> None:
    """By priority. Later messages go to the next consumer."""
    rig, high, low = Rig(), Channel(), Channel()
    leaving = rig.consumer(high, prefetch=2, priority=10)
    rig.consumer(low)
    rig.put(1, 2, 3)
    rig.queue.serve(rig.now)
    rig.queue.cancel(leaving, rig.now)
    rig.put(4)
    rig.run()
    assert (high.positions, low.positions) == ([1, 2], [3, 4])


@pytest.mark.parametrize("cache", [0, 1 << 20])
def test_a_get_waits_for_a_limited_number_of_deliveries(monkeypatch: pytest.MonkeyPatch, cache: int) -> None:
    """Consumers without a credit limit must not delay it for ever. Bodies may have to be read more than once."""
    monkeypatch.setattr(queue, "DISPATCH_MESSAGES", 5)
    rig, channel = Rig(cache=cache, batch=2), Channel()
    rig.put(*range(1, 21))
    rig.consumer(channel)
    rig.put(*range(21, 41))
    first, second = Get(), Get()
    rig.queue.get(first, rig.now)
    rig.queue.get(second, rig.now)
    rig.run()
    assert (first.delivery.position, second.delivery.position) == (26, 32)


def test_a_get_that_gave_up_hinders_no_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "DISPATCH_MESSAGES", 2)
    rig, channel, getter = Rig(cache=0), Channel(), Get()
    rig.consumer(channel)
    rig.put(1, 2, 3, 4)
    rig.queue.get(getter, rig.now)
    rig.queue.cancel_get(getter)
    rig.run()
    assert (channel.positions, getter.answers) == ([1, 2, 3, 4], [])


def test_a_message_behind_a_get_expires_in_time() -> None:
    rig = Rig()
    rig.put(1)
    rig.put(2, expires_at=NOW + 10)
    rig.run()
    assert rig.get().delivery.position == 1
    rig.at(NOW + 10)
    assert rig.dropped == [2]


def test_messages_with_long_properties_are_handed_out_in_parts() -> None:
    """A link of AMQP 1.0 parses the properties of each message: tens of milliseconds for the largest."""
    rig, channel = Rig(), Channel()
    rig.consumer(channel)
    most = queue.DISPATCH_MESSAGES * queue.PROPERTY_OCTETS
    rig.put(1, 2, 3, properties=bytes(most))
    rig.put(4, 5, 6, properties=bytes(most // 2))
    taken: list[list[int]] = []
    while rig.scheduled:
        rig.dispatch()
        taken.append(channel.positions[sum(map(len, taken)) :])
    assert taken == [[1], [2], [3], [4, 5], [6]]


def test_a_get_waits_behind_a_message_with_long_properties() -> None:
    """At most one of the two is handed out in one step."""
    rig, channel, getter = Rig(), Channel(), Get()
    rig.consumer(channel, prefetch=1)
    rig.put(1, 2, properties=bytes(queue.DISPATCH_MESSAGES * queue.PROPERTY_OCTETS))
    rig.queue.get(getter, rig.now)
    assert (channel.positions, getter.answers) == ([1], [])
    rig.run()
    assert getter.delivery.position == 2


def test_a_consumer_lost_amid_long_properties_keeps_the_order() -> None:
    rig, first, second = Rig(), Channel(), Channel()
    leaving = rig.consumer(first)
    rig.put(1, 2, 3, properties=bytes(queue.DISPATCH_MESSAGES * queue.PROPERTY_OCTETS))
    rig.dispatch()
    assert first.positions == [1]
    rig.queue.cancel(leaving, rig.now)
    rig.queue.requeue(first.taken(), rig.now)
    rig.consumer(second)
    assert second.positions == [1, 2, 3]
