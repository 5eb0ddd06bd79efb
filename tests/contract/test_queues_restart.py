"""The arguments of queues apply after a restart and while branches hold messages.

The tests set the clock, so time can pass while no store runs.
"""

import asyncio
from typing import Any, Final

import pytest

from dtx.log.changes import Change, Slot, Store
from dtx.log.records import LogWrite
from dtx.store.postgres.exchanges import Queue
from dtx.wire.amqp09 import properties, tables
from dtx.wire.amqp09.properties import Property, build
from tests.support.memory_log import Fault, MemoryDatabase, MemoryLog
from tests.support.standalone import PERSISTENT, Client, OpenClient, gone, rows, until

DEAD: Final[dict[str, Any]] = {"dead_letter_exchange": "", "dead_letter_routing_key": "dead"}


class Clock:
    """A clock in seconds since the epoch that the test sets."""

    def __init__(self) -> None:
        self.now = 1_900_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def brief(milliseconds: int) -> bytes:
    return build({Property.DELIVERY_MODE: b"\x02", Property.EXPIRATION: b"%d" % milliseconds})


def queues(client: Client, *names: bytes) -> tuple[Queue, ...]:
    return tuple(client.host.queues[name] for name in names)


def deaths(raw: bytes) -> list[dict[bytes, bytes]]:
    """The tables of x-death."""
    found = properties.read(raw).header(b"x-death")
    assert found is not None
    return [{entry.key: entry.value for entry in tables.entries(item.value)} for item in tables.items(found.value)]


async def letters(client: Client, count: int, reason: bytes) -> list[bytes]:
    """Consume *count* dead letters, which died once, for *reason*; they stay unacknowledged."""
    (dead,) = queues(client, b"dead")
    sink = client.consume(dead)
    await sink.wait(count)
    for _, message in sink.got:
        (death,) = deaths(message.properties)
        assert (death[b"reason"], int.from_bytes(death[b"count"])) == (reason, 1)
    assert dead.index.ready == 0
    return [message.body for _, message in sink.got]


# -- time to live ------------------------------------------------------------------------------------------------------


async def test_time_goes_on_from_the_publish_and_while_nothing_runs(open_client: OpenClient, clock: Clock) -> None:
    client = await open_client(clock=clock)
    await client.declare("q", message_ttl=60_000, **DEAD)
    await client.declare("dead")
    await client.publish(b"1", b"2")
    clock.now += 30
    client = await open_client(clock=clock)
    await client.publish(b"3")
    clock.now += 31
    client = await open_client(clock=clock)
    assert await letters(client, 2, b"expired") == [b"1", b"2"]
    (queue, dead) = queues(client, b"q", b"dead")
    await gone(client, queue.spec.id, 1)
    assert queue.index.ready == 1
    client = await open_client(clock=clock)
    (queue, dead) = queues(client, b"q", b"dead")
    assert (queue.index.ready, dead.index.ready, await rows(client, dead.spec.id)) == (1, 2, 2)


async def test_after_a_restart_messages_expire_at_the_head_alone(open_client: OpenClient, clock: Clock) -> None:
    client = await open_client(clock=clock)
    await client.declare("q", **DEAD)
    await client.declare("dead")
    await client.publish(b"stays")
    await client.publish(b"waits", properties=brief(1000))
    clock.now += 5
    client = await open_client(clock=clock)
    queue, dead = queues(client, b"q", b"dead")
    assert await client.consume(queue, prefetch=1).wait(1) == [b"stays"]
    assert await letters(client, 1, b"expired") == [b"waits"]
    assert (queue.index.ready, dead.index.unacked) == (0, 1)


async def test_blind_copies_of_dead_letters_survive_a_restart(open_client: OpenClient, clock: Clock) -> None:
    client = await open_client(clock=clock)
    await client.declare("q", message_ttl=1000, dead_letter_exchange="")
    await client.declare("blind")
    key = tables.put_long(b"blind")
    headers = tables.entry(b"BCC", b"A", b"S" + key)
    message = client.message(b"1", properties=properties.put(PERSISTENT, Property.HEADERS, headers))
    message.blind = True
    await client.submit([message])
    clock.now += 2
    client = await open_client(clock=clock)
    sink = client.consume(queues(client, b"blind")[0])
    assert await sink.wait(1) == [b"1"]
    assert not properties.has_header(sink.got[0][1].properties, b"BCC")


# -- bounds ------------------------------------------------------------------------------------------------------------


async def test_a_bounded_queue_stays_bounded(open_client: OpenClient) -> None:
    client = await open_client()
    await client.declare("q", max_length=2, **DEAD)
    await client.declare("dead")
    await client.publish(b"1", b"2")
    client = await open_client()
    await client.publish(b"3")
    assert await letters(client, 1, b"maxlen") == [b"1"]
    assert await client.consume(queues(client, b"q")[0]).wait(2) == [b"2", b"3"]


async def test_overdue_messages_of_a_full_queue_are_dropped_at_start(open_client: OpenClient) -> None:
    """The last messages were stored, and dtx ended before it had dead-lettered the oldest ones."""
    client = await open_client()
    queue = await client.declare("q", max_length=2, **DEAD)
    await client.declare("dead")
    await client.publish(b"1", b"2")
    (contents,) = [found async for found in client.log.load_queues([queue.spec.id])]
    last = Slot(queue.spec.id, contents.positions[-1])
    stored = (await client.log.read_messages([last]))[last]
    more = [stored._replace(position=last.position + number, body=b"%d" % (2 + number)) for number in (1, 2)]
    await client.log.write(Store(change=Change(puts=more)))
    client = await open_client()
    assert await letters(client, 2, b"maxlen") == [b"1", b"2"]
    queue = queues(client, b"q")[0]
    await gone(client, queue.spec.id, 2)
    assert await client.consume(queue).wait(2) == [b"3", b"4"]


async def test_a_queue_that_refuses_goes_on_refusing(open_client: OpenClient) -> None:
    client = await open_client()
    await client.declare("q", max_length=2, overflow="reject-publish")
    await client.publish(b"1")
    client = await open_client()
    assert await client.submit([client.message(b"2"), client.message(b"3")]) == [1]


async def test_the_oldest_message_keeps_its_age_after_a_restart(open_client: OpenClient, clock: Clock) -> None:
    """The position of a message is the time at which it came, in microseconds."""
    client = await open_client(clock=clock)
    queue = await client.declare("q", max_priority=2)
    assert queue.index.oldest is None
    clock.now += 1000
    came = clock.now
    await client.publish(b"old")
    clock.now += 90
    await client.submit([client.message(b"new", properties=build({Property.PRIORITY: b"\x02"}))])
    client = await open_client(clock=clock)
    (queue,) = queues(client, b"q")
    assert queue.index.oldest == pytest.approx(came, abs=0.001)


# -- queues that expire ------------------------------------------------------------------------------------------------


async def test_an_unused_queue_has_its_whole_lifetime_after_a_restart(open_client: OpenClient, clock: Clock) -> None:
    """RabbitMQ: "leases of durable queues restart when the server restarts"."""
    client = await open_client(clock=clock)
    await client.declare("q", expires=60_000)
    clock.now += 1000
    client = await open_client(clock=clock)
    (queue,) = queues(client, b"q")
    assert queue.index.unused_until() == clock.now + 60
    clock.now += 61

    async def none() -> bool:
        return not client.host.queues and not (await client.log.load_definitions()).queues

    await until(none)


async def test_a_clock_that_is_set_forward_makes_no_queue_unused(open_client: OpenClient, clock: Clock) -> None:
    """The messages of the queue would be lost."""
    steady = Clock()
    client = await open_client(clock=clock, steady=steady)
    queue = await client.declare("q", expires=60_000)
    await client.publish(b"kept")
    clock.now += 86_400
    await client.declare("later", expires=1_000)

    async def noticed() -> bool:
        return queue.index.unused_until() == clock.now + 60

    await until(noticed)
    clock.now += 2
    steady.now += 2

    async def later_is_gone() -> bool:
        return b"later" not in client.host.queues

    await until(later_is_gone)
    assert b"q" in client.host.queues
    clock.now += 60
    steady.now += 60

    async def none() -> bool:
        return not client.host.queues

    await until(none)


async def test_a_queue_is_used_while_a_branch_has_its_messages(open_client: OpenClient, clock: Clock) -> None:
    client = await open_client(clock=clock)
    queue = await client.declare("q", expires=60_000)
    await client.publish(b"held")
    sink = client.consume(queue)
    await sink.wait(1)
    branch = await client.prepare(client.work(acked=sink.deliveries))
    client = await open_client(clock=clock)
    (queue,) = queues(client, b"q")
    clock.now += 1000
    assert queue.index.unused_until() is None
    await client.roll_back(branch)
    assert queue.index.unused_until() == clock.now + 60
    assert await client.consume(queue).wait(1) == [b"held"]


@pytest.mark.parametrize("commits", [True, False])
async def test_a_queue_stays_while_a_branch_has_messages_for_it(
    open_client: OpenClient, clock: Clock, commits: bool
) -> None:
    """A prepared branch can be committed at any later time, so its queues do not expire."""
    client = await open_client(clock=clock)
    for name in ("first", "q"):
        await client.declare(name, expires=60_000)
    before = await client.prepare(client.work([client.message(b"before")]))
    client = await open_client(clock=clock)
    late = await client.prepare(client.work([client.message(b"late")]))

    async def gone_too(name: bytes) -> None:
        async def is_gone() -> bool:
            return name not in client.host.queues

        clock.now += 61
        await until(is_gone)

    await gone_too(b"first")
    assert b"q" in client.host.queues
    await client.commit(before)
    await client.declare("second", expires=60_000)
    await gone_too(b"second")
    (queue,) = queues(client, b"q")
    assert queue.index.ready == 1
    await (client.commit(late) if commits else client.roll_back(late))
    assert queue.index.unused_until() == clock.now + 60


# -- branches that hold messages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("restart", [False, True])
async def test_messages_of_a_branch_do_not_expire_before_they_return(
    open_client: OpenClient, clock: Clock, restart: bool
) -> None:
    client = await open_client(clock=clock)
    queue = await client.declare("q", message_ttl=60_000, **DEAD)
    await client.declare("dead")
    await client.publish(b"1", b"2", b"3")
    sink = client.consume(queue, prefetch=2)
    await sink.wait(2)
    branch = await client.prepare(client.work(acked=sink.deliveries))
    clock.now += 100
    if restart:
        client = await open_client(clock=clock)
        (queue,) = queues(client, b"q")
    else:
        sink.full = True
        await client.publish(b"4")
    dead = client.consume(queues(client, b"dead")[0])
    assert await dead.wait(1) == [b"3"]
    await client.roll_back(branch)
    assert await dead.wait(3) == [b"3", b"1", b"2"]
    assert (queue.index.ready, queue.index.unacked) == (0 if restart else 1, 0)
    await gone(client, queue.spec.id, queue.index.ready)


@pytest.mark.parametrize("restart", [False, True])
async def test_a_branch_gives_back_in_order_and_then_time_counts(
    open_client: OpenClient, clock: Clock, restart: bool
) -> None:
    client = await open_client(clock=clock)
    queue = await client.declare("q", message_ttl=60_000, **DEAD)
    await client.declare("dead")
    await client.publish(b"1", b"2", b"3", b"4")
    sink = client.consume(queue, prefetch=3)
    await sink.wait(3)
    # the middle one is not part of the branch; its channel ends
    branch = await client.prepare(client.work(acked=[sink.deliveries[2], sink.deliveries[0]]))
    if restart:
        client = await open_client(clock=clock)
        (queue,) = queues(client, b"q")
    else:
        sink.full = True
        queue.index.requeue([sink.deliveries[1]], clock.now)
    await client.roll_back(branch)
    again = client.consume(queue)
    assert await again.wait(4) == [b"1", b"2", b"3", b"4"]
    assert [delivery.redelivered for delivery in again.deliveries] == [True, True, True, False]
    clock.now += 100
    queue.index.requeue(again.deliveries, clock.now)
    assert await letters(client, 4, b"expired") == [b"1", b"2", b"3", b"4"]


async def test_a_branch_returns_messages_into_a_full_queue(open_client: OpenClient) -> None:
    """As after any requeue in RabbitMQ the head is dropped: the returned message, which is the oldest."""
    client = await open_client()
    queue = await client.declare("q", max_length=1, **DEAD)
    await client.declare("dead")
    await client.publish(b"held")
    sink = client.consume(queue, prefetch=1)
    await sink.wait(1)
    branch = await client.prepare(client.work(acked=sink.deliveries))
    await client.publish(b"new")
    client = await open_client()
    await client.roll_back(branch)
    assert await letters(client, 1, b"maxlen") == [b"held"]


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.ANSWER_LOST])
async def test_a_dead_letter_is_moved_once_despite_log_failures(fault: Fault) -> None:
    log = MemoryLog("rm", MemoryDatabase())
    await log.open()
    client = await Client(log).open()
    queue = await client.declare("q", **DEAD)
    dead = await client.declare("dead")
    await client.publish(b"1")
    sink = client.consume(queue)
    await sink.wait(1)
    log.faults.append(fault)
    queue.index.reject(sink.deliveries)
    assert await letters(client, 1, b"rejected") == [b"1"]
    assert (await rows(client, queue.spec.id), await rows(client, dead.spec.id)) == (0, 1)
    await client.close()


class Watched(MemoryLog):
    """A log with an event that is set by each write."""

    def __init__(self, rm: str, database: MemoryDatabase) -> None:
        super().__init__(rm, database)
        self.asked: Final = asyncio.Event()

    async def write(self, record: LogWrite, *, urgent: bool = True) -> None:
        self.asked.set()
        await super().write(record, urgent=urgent)


async def test_a_dead_letter_of_a_deleted_queue_is_dropped() -> None:
    """The log has neither the old message nor the new one, so no client may see the dead letter."""
    log = Watched("rm", MemoryDatabase())
    await log.open()
    client = await Client(log).open()
    deleted, other = await client.declare("q", **DEAD), await client.declare("other", **DEAD)
    await client.declare("dead")
    await client.publish(b"1")
    await client.publish(b"2", key="other")
    sinks = [client.consume(queue) for queue in (deleted, other)]
    for sink in sinks:
        await sink.wait(1)
    log.running.clear()
    log.asked.clear()
    deleted.index.reject(sinks[0].deliveries)
    await log.asked.wait()
    log.database.messages.apply("rm", Change(drops=[sinks[0].deliveries[0].slot]))
    log.faults.append(Fault.REFUSED)
    log.running.set()
    other.index.reject(sinks[1].deliveries)
    assert await letters(client, 1, b"rejected") == [b"2"]
    await client.close()
