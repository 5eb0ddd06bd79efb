"""The message store of standalone mode on both kinds of log: clients see only messages that are durable."""

import time
from typing import Any

import pytest

from dtx.log.changes import SHARED_BYTES, Slot, StoredMessage
from dtx.store.postgres import store
from dtx.store.postgres.consumers import QueueDelivery
from dtx.store.postgres.exchanges import Queue
from dtx.wire.amqp09 import properties
from dtx.wire.amqp09.properties import Property, build
from tests.support.standalone import PERSISTENT, TRANSIENT, Client, OpenClient, gone, rows, until


async def test_a_durable_message_is_delivered_until_it_is_acknowledged(client: Client) -> None:
    queue = await client.declare()
    sink = client.consume(queue)
    await client.publish(b"one", b"two")
    assert await rows(client, queue.spec.id) == 2
    assert await sink.wait(2) == [b"one", b"two"]
    await client.submit(acked=sink.deliveries)
    assert await rows(client, queue.spec.id) == 0
    assert (queue.index.ready, queue.index.unacked) == (0, 0)


async def test_a_delivery_released_by_a_transaction_returns_to_its_consumer(client: Client) -> None:
    queue = await client.declare()
    sink = client.consume(queue)
    await client.publish(b"one")
    await sink.wait(1)
    (delivery,) = sink.deliveries
    queue.index.hold(delivery)
    queue.index.end_hold(delivery)
    assert (queue.index.ready, queue.index.unacked) == (0, 1)
    await client.submit(acked=[delivery])
    assert await rows(client, queue.spec.id) == 0
    assert queue.index.unacked == 0


async def test_a_message_goes_to_each_queue_once(client: Client) -> None:
    first, second = await client.declare("a"), await client.declare("b")
    await client.exchange("x", "fanout", "a", "b")
    await client.publish(b"body", exchange="x", key="k")
    assert (first.index.ready, second.index.ready) == (1, 1)
    message = client.message(b"late", exchange="x", key="k")
    client.store.close_queues(client.host.remove_queue(first).queues)
    await client.submit([message])
    assert second.index.ready == 2
    await gone(client, first.spec.id)


async def fan_out(client: Client, *queues: str) -> list[Queue]:
    declared = [await client.declare(name) for name in queues]
    await client.exchange("x", "fanout", *queues)
    return declared


async def test_queues_share_the_body_of_a_message(client: Client) -> None:
    """A body is stored once however many queues a message is routed to."""
    queues = await fan_out(client, "a", "b", "c")
    body = bytes(SHARED_BYTES)
    await client.publish(body, b"short", exchange="x", key="k")
    sinks = [client.consume(queue) for queue in queues]
    got = [(await sink.wait(2), sink.got[0][1].shared, sink.got[1][1].shared)[1:] for sink in sinks]
    assert len(set(got)) == 1
    assert got[0][0] is not None
    assert got[0][1] is None
    assert all(sink.got[0][1].body is body for sink in sinks)
    await client.submit(acked=[delivery for sink in sinks for delivery in sink.deliveries])
    assert [await rows(client, queue.spec.id) for queue in queues] == [0, 0, 0]


async def test_a_shared_body_survives_a_restart_and_other_queues(open_client: OpenClient) -> None:
    client = await open_client()
    (first, *_) = await fan_out(client, "a", "b", "c")
    body = bytes(SHARED_BYTES)
    await client.prepare(client.work([client.message(body, exchange="x", key="k")]))
    await client.publish(body, exchange="x", key="k")
    client.store.close_queues(client.host.remove_queue(first).queues)
    await gone(client, first.spec.id)
    client = await open_client()
    second, third = client.host.queues[b"b"], client.host.queues[b"c"]
    sinks = [client.consume(second), client.consume(third)]
    assert [await sink.wait(1) for sink in sinks] == [[body], [body]]
    assert await client.store.purge(third) == 0
    (branch,) = [record async for record in client.log.load()]
    await client.commit(branch)
    assert [(await sink.wait(2))[1] for sink in sinks] == [body, body]


async def test_messages_and_topology_survive_a_restart(open_client: OpenClient) -> None:
    client = await open_client()
    queue = await client.declare()
    await client.exchange("x", "direct", "q")
    await client.publish(b"1", b"2", b"3", b"4", exchange="x", key="k")
    sink = client.consume(queue, prefetch=2)
    await sink.wait(2)
    await client.submit(acked=sink.deliveries[:1])
    await sink.wait(3)
    again = await open_client()
    queue = again.host.queues[b"q"]
    assert queue.index.ready == 3
    sink = again.consume(queue)
    assert await sink.wait(3) == [b"2", b"3", b"4"]
    assert [delivery.redelivered for delivery in sink.deliveries] == [True, True, False]
    await again.publish(b"5", exchange="x", key="k")
    assert await sink.wait(4) == [b"2", b"3", b"4", b"5"]


class _Got:
    """A basic.get that waits for an acknowledgement."""

    no_ack = False

    def __init__(self) -> None:
        self.found: tuple[QueueDelivery, StoredMessage] | None = None

    def got(self, found: tuple[QueueDelivery, StoredMessage] | None, remaining: int) -> None:
        self.found = found


async def test_messages_from_basic_get_are_redelivered_after_a_restart(
    open_client: OpenClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AMQP 0-9-1: "the server SHOULD try to signal redelivered messages when it can"."""
    monkeypatch.setattr(store, "UPKEEP_SECONDS", 0.01)
    client = await open_client()
    queue = await client.declare()
    await client.publish(b"1", b"2")
    for _ in range(2):  # one after the other, so that no other event makes the store check the queue
        getter = _Got()
        queue.index.get(getter, time.time())
        await until(lambda getter=getter: _is_kept(client, getter))  # type: ignore[misc]
    again = await open_client()
    sink = again.consume(again.host.queues[b"q"])
    assert await sink.wait(2) == [b"1", b"2"]
    assert [delivery.redelivered for delivery in sink.deliveries] == [True, True]


async def _is_kept(client: Client, getter: _Got) -> bool:
    """Whether the log contains the position of the delivery."""
    (row,) = (await client.log.load_definitions()).queues
    return getter.found is not None and row.delivered == getter.found[0].position


async def test_a_restart_drops_transient_messages(open_client: OpenClient) -> None:
    """A restart drops messages that are not persistent and queues that are not durable."""
    client = await open_client()
    queue, other = await client.declare(), await client.declare("other", durable=False)
    await client.publish(b"kept")
    await client.publish(b"lost", properties=TRANSIENT)
    await client.publish(b"lost", b"too", key="other")
    again = await open_client()
    assert list(again.host.queues) == [b"q"]
    assert again.host.queues[b"q"].index.ready == 1
    await gone(again, queue.spec.id, 1)
    await gone(again, other.spec.id)


async def test_bodies_beyond_the_cache_are_read_in_order(open_client: OpenClient) -> None:
    client = await open_client(cache_bytes=20_000)
    queue = await client.declare()
    bodies = [b"%06d" % number * 100 for number in range(1000)]
    for start in range(0, 1000, 100):
        await client.publish(*bodies[start : start + 100])
    sink = client.consume(queue, prefetch=50)
    done = 0
    while done < 1000:
        await sink.wait(min(done + 50, 1000))
        new = sink.deliveries[done:]
        done += len(new)
        await client.submit(acked=new)
    assert [message.body for _, message in sink.got] == bodies
    assert await rows(client, queue.spec.id) == 0


async def test_messages_delivered_without_acknowledgement_leave_the_queue(client: Client) -> None:
    queue = await client.declare()
    sink = client.consume(queue, no_ack=True)
    await client.publish(*[b"x"] * 300)
    await sink.wait(300)
    await gone(client, queue.spec.id)


async def test_a_queue_with_reject_publish_keeps_within_its_limit(client: Client) -> None:
    await client.declare("q", max_length=2, overflow="reject-publish")
    open_queue = await client.declare("open")
    messages = [client.message(b"%d" % number) for number in range(4)]
    assert await client.submit(messages) == [2, 3]
    assert await client.submit([client.message(b"x", key="open"), messages[0]], whole=True) == [1]
    assert open_queue.index.ready == 0
    sink = client.consume(client.host.queues[b"q"])
    await sink.wait(2)
    assert await client.submit([messages[2]]) == []


async def test_a_purge_removes_ready_messages(client: Client) -> None:
    queue = await client.declare()
    await client.publish(b"held", b"1", b"2")
    sink = client.consume(queue, prefetch=1)
    await sink.wait(1)
    assert await client.store.purge(queue) == 2
    assert await rows(client, queue.spec.id) == 1


async def test_dead_letters_change_queues_in_one_transaction(client: Client) -> None:
    queue = await client.declare("q", dead_letter_exchange="", dead_letter_routing_key="dead")
    dead = await client.declare("dead")
    await client.publish(b"1", b"2")
    sink = client.consume(queue)
    await sink.wait(2)
    queue.index.reject(sink.deliveries)
    letters = client.consume(dead)
    assert await letters.wait(2) == [b"1", b"2"]
    header = properties.read(letters.got[0][1].properties).header(b"x-first-death-queue")
    assert header is not None
    assert header.value == b"q"
    await gone(client, queue.spec.id)
    assert await rows(client, dead.spec.id) == 2


async def test_messages_expire_into_the_dead_letter_queue(client: Client) -> None:
    await client.declare("q", dead_letter_exchange="", dead_letter_routing_key="dead", message_ttl=50)
    dead = await client.declare("dead")
    sink = client.consume(dead)
    await client.publish(*[b"%d" % number for number in range(300)])
    assert await sink.wait(300) == [b"%d" % number for number in range(300)]


async def test_an_unused_queue_goes(client: Client) -> None:
    queue = await client.declare("q", expires=1)
    await client.publish(b"x")

    async def none() -> bool:
        return not client.host.queues and not (await client.log.load_definitions()).queues

    await until(none)
    await gone(client, queue.spec.id)


# -- branches ---------------------------------------------------------------------------------------------------------


async def test_a_branch_shows_its_messages_when_it_commits(client: Client) -> None:
    queue = await client.declare()
    sink = client.consume(queue)
    await client.publish(b"in")
    await sink.wait(1)
    branch = await client.prepare(client.work([client.message(b"out")], sink.deliveries))
    await client.publish(b"later")
    assert await sink.wait(2) == [b"in", b"later"]
    await client.commit(branch)
    assert await sink.wait(3) == [b"in", b"later", b"out"]
    assert await rows(client, queue.spec.id) == 2
    assert queue.index.unacked == 2


async def test_a_branch_that_rolls_back_leaves_no_trace(client: Client) -> None:
    """A consumed message returns to its place; published messages are never visible."""
    queue = await client.declare()
    sink = client.consume(queue, prefetch=1)
    await client.publish(b"1", b"2")
    await sink.wait(1)
    branch = await client.prepare(client.work([client.message(b"out")], sink.deliveries))
    await client.roll_back(branch)
    assert await sink.wait(2) == [b"1", b"1"]
    assert sink.deliveries[1].redelivered
    assert await rows(client, queue.spec.id) == 2


async def test_one_phase_is_the_same_in_one_record(client: Client) -> None:
    queue = await client.declare()
    sink = client.consume(queue)
    await client.publish(b"in")
    await sink.wait(1)
    await client.one_phase(client.work([client.message(b"out")], sink.deliveries))
    assert await sink.wait(2) == [b"in", b"out"]
    assert await rows(client, queue.spec.id) == 1


@pytest.mark.parametrize("commits", [True, False], ids=["commit", "rollback"])
async def test_a_prepared_branch_survives_a_restart(open_client: OpenClient, commits: bool) -> None:
    """Prepared means durable, also for transient messages."""
    client = await open_client()
    queue = await client.declare("q", max_priority=5, max_length_bytes=10_000)
    sink = client.consume(queue, prefetch=1)
    await client.publish(b"in", properties=TRANSIENT)
    await client.publish(b"next")
    await sink.wait(1)
    branch = await client.prepare(client.work([client.message(b"out", properties=TRANSIENT)], sink.deliveries))
    again = await open_client()
    queue = again.host.queues[b"q"]
    assert (queue.index.ready, queue.index.unacked) == (1, 1)
    await again.commit(branch) if commits else await again.roll_back(branch)
    sink = again.consume(queue)
    assert await sink.wait(2) == ([b"next", b"out"] if commits else [b"in", b"next"])
    assert await rows(again, queue.spec.id) == 2


async def test_a_message_begins_to_expire_when_its_branch_commits(open_client: OpenClient) -> None:
    now = [1_000_000.0]
    options: dict[str, Any] = {"clock": lambda: now[0]}
    client = await open_client(**options)
    queue = await client.declare("q", message_ttl=60_000)
    long = build({Property.DELIVERY_MODE: b"\x02", Property.EXPIRATION: b"1000"})
    first = await client.prepare(client.work([client.message(b"1"), client.message(b"2", properties=long)]))
    slots = first.published or ()
    now[0] += 500
    await client.commit(first)
    assert queue.index.ready == 2
    stored = await client.log.read_messages(slots)
    assert [message.expires_at for message in stored.values()] == [now[0] + 60, now[0] + 1]


async def test_after_a_restart_a_lifetime_begins_at_the_commit(open_client: OpenClient) -> None:
    now = [1_800_000_001.0]
    options: dict[str, Any] = {"clock": lambda: now[0]}
    client = await open_client(**options)
    await client.declare("q", message_ttl=60_000)
    branch = await client.prepare(client.work([client.message(b"1")]))
    now[0] += 500
    again = await open_client(**options)
    await again.commit(branch)
    (message,) = (await again.log.read_messages(branch.published or ())).values()
    assert message.expires_at == pytest.approx(now[0] + 60, abs=1)
    sink = again.consume(again.host.queues[b"q"])
    assert await sink.wait(1) == [b"1"]


async def test_a_branch_survives_the_deletion_of_its_queues(client: Client) -> None:
    queue = await client.declare()
    sink = client.consume(queue)
    await client.publish(b"in")
    await sink.wait(1)
    work = client.work([client.message(b"out")], sink.deliveries)
    branch = await client.prepare(work)
    removed = client.host.remove_queue(queue)
    assert len(client.store.close_queues(removed.queues)) == 1
    await client.store.define(removed.define)
    await client.commit(branch)
    await gone(client, queue.spec.id)
    plan = client.store.plan("/", client.work([client.message(b"nowhere")]))
    assert (plan.published, len(plan.unroutable)) == ((), 1)


async def test_more_branches_than_fit_into_memory_commit_from_the_log(open_client: OpenClient) -> None:
    client = await open_client(cache_bytes=10_000)
    queue = await client.declare()
    branches = [await client.prepare(client.work([client.message(b"%d" % number * 900)])) for number in range(10)]
    for branch in branches:
        await client.commit(branch)
    sink = client.consume(queue)
    assert sorted(await sink.wait(10)) == [b"%d" % number * 900 for number in range(10)]


async def test_no_slot_is_used_twice(open_client: OpenClient) -> None:
    """Slots are not reused after a restart with empty queues either."""
    client = await open_client()
    seen: set[Slot] = set()
    for _ in range(3):
        queue = await client.declare()
        sink = client.consume(queue)
        await client.publish(b"1", b"2")
        await sink.wait(2)
        slots = {delivery.slot for delivery in sink.deliveries}
        assert not slots & seen
        seen |= slots
        await client.submit(acked=sink.deliveries)
        client = await open_client()


async def test_priorities_and_sizes_survive_a_restart(open_client: OpenClient) -> None:
    client = await open_client()
    await client.declare("p", max_priority=9)
    await client.declare("b", max_length_bytes=10)
    for priority in (1, 9, 0, 5):
        raw = build({Property.DELIVERY_MODE: b"\x02", Property.PRIORITY: bytes((priority,))})
        await client.publish(b"%d" % priority, key="p", properties=raw)
    await client.publish(b"123456", b"789", key="b", properties=PERSISTENT)
    again = await open_client()
    sink = again.consume(again.host.queues[b"p"])
    assert await sink.wait(4) == [b"9", b"5", b"1", b"0"]
    await again.publish(b"xx", key="b")
    sink = again.consume(again.host.queues[b"b"])
    assert await sink.wait(2) == [b"789", b"xx"]
