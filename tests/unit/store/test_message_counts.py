"""What happens to messages is counted once, in the words of RabbitMQ's ``message_stats``."""

from collections import deque
from collections.abc import AsyncIterator

import pytest

from dtx.store.postgres.arguments import QueueArguments
from dtx.store.postgres.message_counts import BrokerCounts, MessageCounts
from dtx.telemetry import RateSample
from tests.support.memory_log import MemoryDatabase, MemoryLog
from tests.support.standalone import Client
from tests.unit.store.queue_rig import Channel, Rig


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    log = MemoryLog("rm", MemoryDatabase())
    await log.open()
    client = await Client(log).open()
    yield client
    await client.close()
    await log.close()


def test_each_delivery_is_counted_by_its_kind() -> None:
    rig, channel = Rig(), Channel()
    rig.put(1, 2, 3, 4)
    rig.get()
    rig.run()
    rig.get(no_ack=True)
    rig.run()
    rig.consumer(channel, prefetch=1)
    assert (rig.queue.counts.get, rig.queue.counts.get_no_ack, rig.queue.counts.deliver) == (1, 1, 1)
    rig.consumer(channel, no_ack=True)
    rig.get()
    rig.run()
    counts = rig.queue.counts
    assert (counts.deliver, counts.deliver_no_ack, counts.get_empty) == (1, 1, 1)
    assert (counts.deliver_get, counts.redeliver, counts.ack) == (4, 0, 0)


def test_a_second_delivery_counts_as_redelivered() -> None:
    rig, channel = Rig(), Channel()
    rig.put(1)
    rig.consumer(channel)
    rig.queue.requeue(channel.taken(), rig.now)
    rig.run()
    rig.ack(*channel.taken())
    assert rig.queue.counts == MessageCounts(deliver=2, redeliver=1, ack=1)


@pytest.mark.parametrize("exchange", [None, b"x"])
def test_messages_that_leave_are_counted_by_reason(exchange: bytes | None) -> None:
    """Without a dead letter exchange they are lost."""
    total = BrokerCounts()
    rig = Rig(QueueArguments(dead_letter_exchange=exchange, max_length=2), total=total)
    rig.put(1, 2, 3)
    rig.put(4, expires_at=rig.now + 1)
    channel = Channel()
    rig.consumer(channel, prefetch=1)
    rig.queue.reject(channel.taken())
    rig.at(rig.now + 2)
    expected = {"maxlen": 2, "rejected": 1, "expired": 1}
    assert total.left == {(reason, exchange is not None): count for reason, count in expected.items()}


async def test_only_publishes_of_clients_count_as_published(client: Client) -> None:
    """A dead letter is no publish, as in RabbitMQ."""
    grave = await client.declare("grave")
    queue = await client.declare(dead_letter_exchange="", dead_letter_routing_key="grave")
    await client.publish(b"1", b"2")
    sink = client.consume(queue)
    await sink.wait(2)
    queue.index.reject(sink.deliveries[:1])
    await client.consume(grave).wait(1)
    assert (queue.index.counts.publish, grave.index.counts.publish) == (2, 0)
    assert client.store.counts.left == {("rejected", True): 1}


async def test_a_dead_letter_of_a_refused_publish_is_no_publish(client: Client) -> None:
    grave = await client.declare("grave")
    queue = await client.declare(
        overflow="reject-publish-dlx", max_length=1, dead_letter_exchange="", dead_letter_routing_key="grave"
    )
    await client.publish(b"1", b"2")
    await client.consume(grave).wait(1)
    assert (queue.index.counts.publish, grave.index.counts.publish) == (1, 0)


async def test_messages_of_a_branch_count_when_it_commits(client: Client) -> None:
    queue = await client.declare()
    await client.publish(b"taken")
    sink = client.consume(queue)
    await sink.wait(1)
    branch = await client.prepare(client.work([client.message(b"1"), client.message(b"2")], sink.deliveries))
    assert (queue.index.counts.publish, queue.index.counts.ack) == (1, 0)
    await client.commit(branch)
    assert (queue.index.counts.publish, queue.index.counts.ack) == (3, 1)


async def test_messages_of_a_rolled_back_branch_do_not_count(client: Client) -> None:
    queue = await client.declare()
    await client.roll_back(await client.prepare(client.work([client.message(b"1")])))
    assert queue.index.counts == MessageCounts()


async def test_sums_do_not_decrease_when_a_queue_is_deleted(client: Client) -> None:
    """A counter that decreases is a restart for Prometheus, and all of it counts again."""
    queue, other = await client.declare("q"), await client.declare("other")
    await client.publish(b"1", b"2")
    await client.publish(b"3", key="other")
    sink = client.consume(queue)
    await sink.wait(2)
    client.store.close_queues(client.host.remove_queue(queue).queues)
    await client.submit(acked=sink.deliveries)
    assert other.index.counts.publish == 1
    assert (client.store.counts.publish, client.store.counts.deliver) == (3, 2)


async def test_all_counts_of_queue_and_broker_have_rates(client: Client) -> None:
    queue = await client.declare()
    sink = client.consume(queue)
    await client.publish(b"1", b"2")
    await sink.wait(2)
    deque(client.store.counts.take_sample(4.0))
    for counts in (queue.index.counts, client.store.counts):
        expected = {word: number / 4.0 for word, number in counts.numbers().items()}
        assert {word: rate(counts, word) for word in expected} == expected
        assert rate(counts, "deliver_get") == 0.5
    deque(client.store.counts.take_sample(4.0))
    assert rate(queue.index.counts, "publish") == 0
    assert not any(client.store.counts.changed), "an idle queue costs nothing"


def rate(counts: MessageCounts, word: str) -> float:
    return counts.sample.details(counts.numbers())[f"{word}_details"]["rate"]


def test_a_rate_is_that_between_the_last_two_samples() -> None:
    sample = RateSample()

    def rates() -> list[float]:
        return [found["rate"] for found in sample.details(("publish", "ack")).values()]

    assert rates() == [0, 0]
    for numbers, passed, expected in [((20, 5), 5.0, [4, 1]), ((50, 5), 10.0, [3, 0]), ((50, 5), 5.0, [0, 0])]:
        sample.take(numbers, passed)
        assert rates() == expected
        assert rates() == expected, "no reader changes it"
