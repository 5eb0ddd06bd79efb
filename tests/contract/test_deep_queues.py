"""Queues with more messages than fit into one record, one answer or the cache."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from dtx.log.api import LogUnavailable
from dtx.store.postgres import recorder, store
from tests.contract.conftest import OpenLog
from tests.support.memory_log import Fault, MemoryLog
from tests.support.standalone import TRANSIENT, Client

COUNT = 23
AT_ONCE = 5
OpenClient = Callable[[], Coroutine[Any, Any, Client]]


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limits so that all operations take several pieces."""
    monkeypatch.setattr(store, "DROPS_AT_ONCE", AT_ONCE)
    monkeypatch.setattr(recorder, "DROPS_AT_ONCE", AT_ONCE)


@pytest.fixture
async def open_client(open_log: OpenLog) -> AsyncIterator[OpenClient]:
    """Opens stores one after the other on one database: each call is a restart."""
    opened: list[Client] = []

    async def make() -> Client:
        if opened:
            await opened[-1].close()
            await opened[-1].log.close()
        client = await Client(await open_log(), cache_bytes=8_000).open()
        opened.append(client)
        return client

    yield make
    await opened[-1].close()


def bodies(first: int = 0, count: int = COUNT) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


async def rows(client: Client, queue: int) -> int:
    (contents,) = [found async for found in client.log.load_queues([queue])]
    return len(contents.positions)


async def no_rows(client: Client, queue: int) -> None:
    async with asyncio.timeout(30):
        while await rows(client, queue):
            await asyncio.sleep(0.01)


async def test_publishes_during_a_purge_in_slices_are_kept(open_client: OpenClient) -> None:
    client = await open_client()
    queue = await client.declare(message_ttl=600_000)
    await client.publish(*bodies())
    purging = asyncio.ensure_future(client.store.purge(queue))
    await asyncio.sleep(0)
    assert queue.index.ready == 0, "the purge is visible at once"
    await client.publish(b"new")
    assert await purging == COUNT
    assert await rows(client, queue.spec.id) == queue.index.ready == 1
    # purged messages leave no expiry behind
    assert len(queue.index._limits.expiries) == 1
    sink = client.consume(queue)
    assert await sink.wait(1) == [b"new"]


async def test_a_failed_purge_is_finished_when_the_log_works_again() -> None:
    log = MemoryLog("rm")
    await log.open()
    client = await Client(log).open()
    queue = await client.declare(message_ttl=600_000)
    await client.publish(*bodies())
    log.faults.append(Fault.REFUSED)
    with pytest.raises(LogUnavailable):
        await client.store.purge(queue)
    await no_rows(client, queue.spec.id)
    async with asyncio.timeout(30):
        while queue.index._limits.expiries:
            await asyncio.sleep(0.01)
    assert queue.index.ready == 0
    await client.close()
    await log.close()


async def test_a_deleted_queue_is_removed_in_pieces(open_client: OpenClient) -> None:
    client = await open_client()
    queue = await client.declare()
    await client.publish(*bodies())
    gone = client.host.delete_queue(b"q", object())
    client.store.close_queues(gone.queues)
    await client.store.define(gone.define)
    await no_rows(client, queue.spec.id)


async def test_a_restart_drops_in_slices_and_keeps_messages_of_branches(open_client: OpenClient) -> None:
    client = await open_client()
    queue = await client.declare()
    await client.publish(*bodies(), properties=TRANSIENT)
    await client.publish(b"persistent")
    sink = client.consume(queue, prefetch=3)
    await sink.wait(3)
    branch = await client.prepare(client.work([client.message(b"hidden")], sink.deliveries))
    again = await open_client()
    queue = again.host.queues[b"q"]
    assert (queue.index.ready, queue.index.unacked) == (1, 3)
    async with asyncio.timeout(30):
        while await rows(again, queue.spec.id) > 5:  # one ready, three held, one hidden
            await asyncio.sleep(0.01)
    await again.roll_back(branch)
    assert queue.index.ready == 4
    sink = again.consume(queue)
    assert await sink.wait(4) == [b"0", b"1", b"2", b"persistent"]


async def test_a_backlog_beyond_the_cache_keeps_its_order_after_restart(open_client: OpenClient) -> None:
    client = await open_client()
    queue = await client.declare()
    await client.publish(*bodies(0, 600))
    assert queue.index._bodies.cached <= 8_000
    sink = client.consume(queue)
    assert await sink.wait(600) == bodies(0, 600)
    await client.store.purge(queue)
    again = await open_client()
    queue = again.host.queues[b"q"]
    assert queue.index.ready == 600, "nothing was acknowledged"
    await again.publish(*bodies(600, 50))
    sink = again.consume(queue)
    assert await sink.wait(650) == bodies(0, 650)
    assert [delivery.redelivered for delivery in sink.deliveries] == [True] * 600 + [False] * 50


async def test_many_queues_are_loaded_with_their_messages(open_client: OpenClient) -> None:
    client = await open_client()
    names = [f"many-{number}" for number in range(130)]
    for name in names:
        if name.endswith("7"):
            await client.declare(name, max_priority=3)
        else:
            await client.declare(name)
    await client.submit([client.message(name.encode(), key=name) for name in names[::2] for _ in range(3)])
    again = await open_client()
    for number, name in enumerate(names):
        queue = again.host.queues[name.encode()]
        assert queue.index.ready == (0 if number % 2 else 3)
    sink = again.consume(again.host.queues[b"many-128"])
    assert await sink.wait(3) == [b"many-128"] * 3
