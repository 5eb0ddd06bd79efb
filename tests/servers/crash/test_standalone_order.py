"""Standalone mode: which answers dtx gives, and in which order, while the log is slow or refuses writes."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dtx.log.api import LogError, LogUnavailable
from dtx.log.changes import DestinationKind, Slot
from dtx.log.postgres import PostgresTransactionLog
from dtx.store.postgres.consumers import QueueDelivery
from dtx.wire.amqp09.properties import Property, build
from dtx.xa.codes import XaError
from tests.support.database_faults import Lock, refusing
from tests.support.standalone import OWNER, PERSISTENT, Client

VOTED = 1_800_000_001.0
"""The time of the votes, by the store's clock."""
URGENT = build({Property.DELIVERY_MODE: b"\x02", Property.PRIORITY: b"\x05"})
BRIEF = build({Property.DELIVERY_MODE: b"\x02", Property.EXPIRATION: b"60000"})


class Stand:
    """A store on a log in PostgreSQL, which can be opened repeatedly.

    Args:
        url: of the database, with the log's tables.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._opened: list[Client] = []

    async def open(self, *, retry_window: float = 5.0, answer_timeout: float = 30.0, **options: Any) -> Client:
        """Open the store, or close it and open it again."""
        await self.close()
        log = PostgresTransactionLog(self.url, "rm", retry_window=retry_window, answer_timeout=answer_timeout)
        await log.open()
        client = await Client(log, **options).open()
        self._opened.append(client)
        return client

    async def close(self) -> None:
        while self._opened:
            client = self._opened.pop()
            await client.close()
            await client.log.close()


@pytest.fixture
async def stand(migrated_postgres_url: str) -> AsyncIterator[Stand]:
    stand = Stand(migrated_postgres_url)
    yield stand
    await stand.close()


class Heard:
    """The result that a publisher gets."""

    def __init__(self) -> None:
        self.told: asyncio.Future[LogError | None] = asyncio.get_running_loop().create_future()

    def __call__(self, error: LogError | None) -> None:
        self.told.set_result(error)


async def felt(lock: Lock) -> None:
    """Wait until a writer waits for *lock* and the results of earlier writes have been delivered."""
    await asyncio.to_thread(lock.wait_felt)
    for _ in range(5):
        await asyncio.sleep(0)


# -- queues that the log does not have yet ----------------------------------------------------------------------------


@pytest.fixture
async def busy(stand: Stand) -> AsyncIterator[tuple[Client, Lock, Lock]]:
    """A binding is being written, and the queue ``new`` is written after it."""
    client = await stand.open()
    await client.declare("old")
    await client.declare("dying", message_ttl=3_000_000, dead_letter_exchange="", dead_letter_routing_key="new")
    await client.publish(b"letter", key="dying")
    await client.exchange("x", "direct")
    with Lock(stand.url, "binding") as bindings, Lock(stand.url, "queue") as queues:
        binding = client.store.define(client.host.bind(b"x", DestinationKind.QUEUE, b"old", b"k"))
        await felt(bindings)
        declared = client.host.declare_queue(b"new", OWNER, durable=True)
        asked = asyncio.ensure_future(client.store.define(declared.define))
        yield client, bindings, queues
        queues.release()
        await binding
        await asked


async def test_a_message_is_not_safe_before_its_queue_is(busy: tuple[Client, Lock, Lock]) -> None:
    """A restart loses messages of a queue that is not in the log."""
    client, bindings, queues = busy
    new, old = Heard(), Heard()
    client.store.submit("/", [client.message(b"in new", key="new")], (), new)
    client.store.submit("/", [client.message(b"in old", key="old")], (), old)
    bindings.release()
    await felt(queues)
    assert await old.told is None
    assert not new.told.done()
    queues.release()
    assert await new.told is None
    assert client.host.queues[b"new"].index.ready == 1


async def test_a_branch_does_not_vote_before_its_queues_are_durable(busy: tuple[Client, Lock, Lock]) -> None:
    client, bindings, queues = busy
    work = client.work([client.message(b"in new", key="new")])
    waiting = client.store.defined_for(work)
    assert waiting is not None
    assert client.store.defined_for(client.work([client.message(b"in old", key="old")])) is None
    vote = asyncio.ensure_future(waiting)
    bindings.release()
    await felt(queues)
    assert not vote.done()
    queues.release()
    await vote
    assert client.store.defined_for(work) is None


async def test_a_dead_letter_stays_until_its_new_queue_is_durable(busy: tuple[Client, Lock, Lock]) -> None:
    client, bindings, queues = busy
    dying = client.host.queues[b"dying"]
    (contents,) = [found async for found in client.log.load_queues([dying.spec.id])]
    slot = Slot(dying.spec.id, contents.positions[0])
    dying.index.dispatch(time.time() + 3600)
    for _ in range(5):
        await asyncio.sleep(0)  # let the mover run
    bindings.release()
    await felt(queues)
    assert await client.log.which_exist([slot]) == {slot}
    queues.release()
    assert await client.consume(client.host.queues[b"new"]).wait(1) == [b"letter"]
    assert await client.log.which_exist([slot]) == set()


async def test_concurrent_declarations_of_one_queue_wait_too(busy: tuple[Client, Lock, Lock]) -> None:
    client, bindings, queues = busy
    queue = client.host.queues[b"new"].spec
    waiting = client.store.defined(queue.id)
    assert waiting is not None
    everything = client.store.defined()
    assert everything is not None
    assert client.store.defined(client.host.queues[b"old"].spec.id) is None
    assert client.store.defined(client.host.exchanges[b"x"].key) is None
    bindings.release()
    queues.release()
    await waiting
    await everything
    assert client.store.defined(queue.id) is None
    assert client.store.defined() is None


async def test_a_queue_refused_by_the_log_takes_no_messages(stand: Stand) -> None:
    """Every declaration gets 541; a publish is not confirmed, and acknowledgements written with it are undone."""
    client = await stand.open()
    sink = client.consume(await client.declare("old"))
    await client.publish(b"consumed", key="old")
    await sink.wait(1)
    with refusing(stand.url, "queue"):
        declared = client.host.declare_queue(b"new", OWNER, durable=True)
        early = Heard()
        asked = client.store.define(declared.define)
        client.store.submit("/", [client.message(b"early", key="new")], (), early)
        with pytest.raises(LogUnavailable):
            await asked
        assert isinstance(await early.told, LogUnavailable)
        again = client.store.defined(declared.queue.spec.id)
        assert again is not None
        with pytest.raises(LogUnavailable):
            await again
        late = Heard()
        client.store.submit("/", [client.message(b"late", key="new")], sink.deliveries, late)
        assert isinstance(await late.told, LogUnavailable)
        with pytest.raises(XaError, match="does not have"):
            client.store.plan("/", client.work([client.message(b"in a branch", key="new")]))
    assert await sink.wait(2) == [b"consumed", b"consumed"]
    async with asyncio.timeout(30):
        while client.store.defined() is not None:
            await asyncio.sleep(0.01)
    await client.publish(b"on time", key="new")
    new = client.consume(declared.queue)
    assert b"on time" in await new.wait(1) + await new.wait(declared.queue.index.ready)


async def test_a_queue_keeps_its_messages_until_its_removal_is_durable(stand: Stand) -> None:
    """If the log refuses the removal, a restart finds the queue unchanged, and so do branches in doubt."""
    client = await stand.open()
    await client.declare("other")
    queue = await client.declare()
    await client.publish(b"waits")
    branch = await client.prepare(client.work([client.message(b"in doubt")]))
    with refusing(stand.url, "queue", "DELETE"):
        before = asyncio.all_tasks()
        removed = client.host.remove_queue(queue)
        client.store.close_queues(removed.queues)
        with pytest.raises(LogUnavailable):
            await client.store.define(removed.define)
        await client.publish(b"behind whatever was removed", key="other")
        await asyncio.wait(asyncio.all_tasks() - before - {asyncio.current_task()}, timeout=0.5)
        again = await stand.open()
        queue = again.host.queues[b"q"]
        await again.commit(branch)
        assert await again.consume(queue).wait(2) == [b"waits", b"in doubt"]
    removed = again.host.remove_queue(queue)
    again.store.close_queues(removed.queues)
    await again.store.define(removed.define)
    async with asyncio.timeout(30):
        while await again.log.stray_queues([again.host.queues[b"other"].spec.id]):
            await asyncio.sleep(0.01)


# -- records that are refused -----------------------------------------------------------------------------------------


async def test_a_refused_transaction_returns_its_acknowledged_messages(stand: Stand) -> None:
    client = await stand.open()
    sink = client.consume(await client.declare())
    await client.publish(b"1", b"2")
    await sink.wait(2)
    with refusing(stand.url, "message", when="NEW.body = 'refused'"):
        with pytest.raises(LogUnavailable):
            await client.submit([client.message(b"refused")], sink.deliveries[:1], whole=True)
        assert await sink.wait(3) == [b"1", b"2", b"1"]
    assert sink.deliveries[2].redelivered
    await client.submit(acked=sink.deliveries[2:])
    again = await stand.open()
    assert await again.consume(again.host.queues[b"q"]).wait(1) == [b"2"]


async def test_a_write_that_timed_out_fails_and_later_ones_succeed(stand: Stand) -> None:
    """PostgreSQL cancels the write first (statement_timeout), so dtx knows that nothing was written."""
    client = await stand.open(retry_window=0.5, answer_timeout=1.0)
    queue = await client.declare()
    with Lock(stand.url, "message"), pytest.raises(LogUnavailable):
        await client.publish(b"too slow")
    await client.publish(b"in time")
    assert await client.consume(queue).wait(queue.index.ready) == [b"in time"]
    again = await stand.open()
    assert again.host.queues[b"q"].index.ready == 1


async def test_acknowledgements_that_the_log_refuses_are_written_later(stand: Stand) -> None:
    client = await stand.open()
    sink = client.consume(await client.declare())
    await client.publish(b"1", b"2")
    await sink.wait(2)
    with refusing(stand.url, "message", "DELETE"):
        heard = Heard()
        client.store.submit("/", (), sink.deliveries[:1], heard)
        assert isinstance(await heard.told, LogUnavailable)
    slots = [delivery.slot for delivery in sink.deliveries]
    async with asyncio.timeout(30):
        while await client.log.which_exist(slots) != {slots[1]}:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("in_branch", [False, True], ids=["publish", "one-phase"])
async def test_messages_for_a_queue_deleted_meanwhile_leave_no_row(stand: Stand, in_branch: bool) -> None:
    """For example the exclusive queue of a client that dies while its messages are being written."""
    client = await stand.open()
    await client.declare("other")
    queue = await client.declare("q", durable=False)
    message = client.message(b"late", key="q")
    with Lock(stand.url, "message") as lock:
        write = client.one_phase(client.work([message])) if in_branch else client.submit([message])
        writing = asyncio.ensure_future(write)
        await felt(lock)
        before = asyncio.all_tasks()
        client.store.close_queues(client.host.remove_queue(queue).queues)
        await asyncio.gather(*(asyncio.all_tasks() - before))  # removes the queue's rows: none yet
    await writing
    async with asyncio.timeout(30):
        while await client.log.stray_queues([]):
            await asyncio.sleep(0.01)


# -- branches over a restart ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("properties", "arguments"),
    [
        (PERSISTENT, {}),
        (URGENT, {"max_priority": 9}),
        (PERSISTENT, {"max_length_bytes": 1000}),
        (BRIEF, {"message_ttl": 90_000}),
    ],
    ids=["plain", "priority", "octets", "expiring"],
)
async def test_messages_committed_after_a_restart_are_available_immediately(
    stand: Stand, properties: bytes, arguments: dict[str, Any]
) -> None:
    """Commit "makes them visible": after commit-ok the queue has all messages, in the right order."""
    client = await stand.open(clock=lambda: VOTED)
    await client.declare("q", **arguments)
    await client.publish(b"first")
    messages = [client.message(b"%d" % number, properties=properties) for number in range(3)]
    branch = await client.prepare(client.work(messages))
    again = await stand.open(clock=lambda: VOTED + 30)
    queue = again.host.queues[b"q"]
    assert queue.index.ready == 1
    await again.commit(branch)
    assert queue.index.ready == 4
    await again.publish(b"last", properties=properties)
    bodies = [b"0", b"1", b"2", b"last"]
    expected = [*bodies, b"first"] if "max_priority" in arguments else [b"first", *bodies]
    assert await again.consume(queue).wait(5) == expected


async def test_limits_count_messages_committed_after_a_restart(stand: Stand) -> None:
    client = await stand.open()
    await client.declare("q", max_length_bytes=10)
    branch = await client.prepare(client.work([client.message(b"123456"), client.message(b"789012")]))
    again = await stand.open()
    await again.commit(branch)
    queue = again.host.queues[b"q"]
    assert queue.index.ready == 1
    assert await again.consume(queue).wait(1) == [b"789012"]


async def test_a_message_without_room_in_memory_expires_after_the_commit(stand: Stand) -> None:
    now = [VOTED]
    client = await stand.open(cache_bytes=4_000, clock=lambda: now[0])
    queue = await client.declare("q", message_ttl=60_000)
    branch = await client.prepare(client.work([client.message(b"%d" % number * 900) for number in range(5)]))
    now[0] += 500
    await client.commit(branch)
    stored = await client.log.read_messages(branch.published or ())
    assert [message.expires_at for message in stored.values()] == [now[0] + 60] * 5
    sink = client.consume(queue)
    assert await sink.wait(5) == [b"%d" % number * 900 for number in range(5)]


async def test_a_message_evicted_during_the_commit_expires_too(stand: Stand) -> None:
    now = [VOTED]
    client = await stand.open(cache_bytes=4_000, clock=lambda: now[0])
    queue = await client.declare("q", message_ttl=60_000)
    branch = await client.prepare(client.work([client.message(b"brief")]))
    client.store.committing(branch.published or (), ())
    await client.prepare(client.work([client.message(bytes(900)) for _ in range(5)]))
    client.store.committed(branch.published or (), ())
    assert queue.index.ready == 1
    now[0] += 61
    queue.index.dispatch(now[0])
    assert queue.index.ready == 0


async def test_after_a_rollback_among_two_branches_the_order_is_kept(stand: Stand) -> None:
    client = await stand.open()
    queue = await client.declare()
    sink = client.consume(queue, prefetch=4)
    await client.publish(*[b"%d" % number for number in range(6)])
    await sink.wait(4)

    async def branch(*numbers: int) -> Any:
        deliveries: list[QueueDelivery] = [sink.deliveries[number] for number in numbers]
        return await client.prepare(client.work([], deliveries))

    first, second = await branch(0, 2), await branch(1, 3)
    again = await stand.open()
    queue = again.host.queues[b"q"]
    await again.roll_back(second)
    await again.commit(first)
    sink = again.consume(queue)
    assert await sink.wait(4) == [b"1", b"3", b"4", b"5"]
    assert [delivery.redelivered for delivery in sink.deliveries] == [True, True, False, False]
    assert (queue.index.ready, queue.index.unacked) == (0, 4)


async def test_messages_of_a_branch_survive_a_purge_not_a_deletion(stand: Stand) -> None:
    client = await stand.open()
    held, gone = await client.declare("held"), await client.declare("gone")
    deliveries = []
    for queue in (held, gone):
        sink = client.consume(queue, prefetch=1)
        await client.publish(b"1", b"2", key=queue.name.decode())
        await sink.wait(1)
        deliveries += sink.deliveries
    messages = [client.message(b"in", key=name) for name in ("held", "gone")]
    branch = await client.prepare(client.work(messages, deliveries))
    assert await client.store.purge(held) == 1
    removed = client.host.remove_queue(gone)
    client.store.close_queues(removed.queues)
    await client.store.define(removed.define)
    again = await stand.open()
    await again.roll_back(branch)
    queue = again.host.queues[b"held"]
    assert list(again.host.queues) == [b"held"]
    assert await again.consume(queue).wait(1) == [b"1"]
    assert queue.index.ready == 0
