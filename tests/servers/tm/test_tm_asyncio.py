"""XA on aio-pika and aiormq, and the transaction manager for asyncio, against real services."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import aio_pika
import aiormq
import psycopg
import pytest
from aio_pika.exceptions import ChannelInvalidStateError, ChannelNotFoundEntity

from dtx.client import (
    XA_RBROLLBACK,
    XAER_DUPID,
    XAER_INVAL,
    XAER_NOTA,
    XAER_OUTSIDE,
    XAER_PROTO,
    XAER_RMFAIL,
    PeerIsNotDtx,
    XaFlag,
)
from dtx.client.aio import AioCoordinator, AioXAResource
from dtx.client.tm import HeuristicMixed, Misuse, RolledBack, TimedOut, steps
from dtx.client.tm.asynchronous import AsyncDtxResource, AsyncPep249Resource, AsyncTransactionManager
from dtx.client.tm.steps import CommitPoint
from tests.support.client import new_xid
from tests.support.tm import ALL, World, new_id


@pytest.fixture
async def connection(world: World) -> AsyncIterator[Any]:
    """A connection of aio-pika to the first service."""
    opened = await aio_pika.connect(world.services["q1"].url())
    yield opened
    await opened.close()


@pytest.fixture
async def channel(connection: Any) -> Any:
    """A channel of ``connection``."""
    return await connection.channel(publisher_confirms=False)


async def publish(channel: Any, body: str) -> None:
    await channel.default_exchange.publish(aio_pika.Message(body.encode()), "q")


# -- aio-pika ---------------------------------------------------------------------------------------------------------


async def test_a_branch_commits_in_two_phases(world: World, channel: Any) -> None:
    xa, xid = AioXAResource(channel), new_xid()
    assert await xa.start(xid) is XaFlag.OK
    await publish(channel, "one")
    assert await xa.end(xid) is XaFlag.OK
    assert await xa.prepare(xid) is XaFlag.OK
    assert [found async for found in xa.recover()] == [xid]
    assert world.messages("q1") == []
    assert await xa.commit(xid) is XaFlag.OK
    assert world.messages("q1") == ["one"]


async def test_a_branch_commits_in_one_phase_or_rolls_back(world: World, channel: Any) -> None:
    xa = AioXAResource(channel, timeout=30)
    for body, way in (("one", "one-phase"), ("", "read-only"), ("two", "rollback")):
        xid = new_xid()
        await xa.start(xid)
        if body:
            await publish(channel, body)
        await xa.end(xid)
        if way == "one-phase":
            assert await xa.commit(xid, one_phase=True) is XaFlag.OK
        elif way == "read-only":
            assert await xa.prepare(xid) is XaFlag.RDONLY
        else:
            await xa.set_timeout(xid, 99)
            assert await xa.get_timeout(xid) == 99
            assert await xa.rollback(xid) is XaFlag.OK
    assert world.messages("q1") == ["one"]


async def test_a_consumed_message_is_back_after_a_failed_end(world: World, channel: Any) -> None:
    await publish(channel, "one")
    xa, xid = AioXAResource(channel), new_xid()
    await xa.start(xid)
    queue = await channel.get_queue("q")
    message = await queue.get()
    await message.ack()
    assert await xa.end(xid, fail=True) is XaFlag.RBROLLBACK
    with pytest.raises(XA_RBROLLBACK) as raised:
        await xa.prepare(xid)
    assert "prepare of" in str(raised.value)
    assert world.messages("q1") == ["one"]


async def test_a_refused_call_closes_its_channel_and_is_replaced(connection: Any) -> None:
    xid = new_xid()
    for method, error, code in (("commit", XAER_NOTA, 404), ("end", XAER_NOTA, 404)):
        channel = await connection.channel(publisher_confirms=False)
        xa = AioXAResource(channel)
        await xa.select()
        with pytest.raises(error) as raised:
            await getattr(xa, method)(xid)
        assert raised.value.reply_code == code
        assert "unknown xid" in raised.value.reason
        with pytest.raises(XAER_RMFAIL):
            await xa.commit(xid)
    coordinator = AioCoordinator(connection, timeout=30)
    for _ in range(3):
        with pytest.raises(XAER_NOTA):
            await coordinator.rollback(xid)
    await coordinator.close()
    await coordinator.close()


async def test_an_existing_xid_cannot_start_a_prepared_one_not_join(connection: Any) -> None:
    first, second, third = [AioXAResource(await connection.channel(publisher_confirms=False)) for _ in range(3)]
    xid = new_xid()
    await first.start(xid)
    await publish(first.channel, "one")
    with pytest.raises(XAER_DUPID):
        await second.start(xid)
    await first.end(xid)
    await first.prepare(xid)
    with pytest.raises(XAER_PROTO):
        await third.start(xid, join=True)
    await first.rollback(xid)


async def test_a_channel_with_confirms_is_refused_before_it_closes(connection: Any) -> None:
    with pytest.raises(XAER_OUTSIDE, match="publisher_confirms=False"):
        AioXAResource(await connection.channel())


async def closed_by_the_server(channel: Any) -> None:
    with pytest.raises(ChannelNotFoundEntity):
        await channel.declare_queue("no-such-queue", passive=True)


async def test_a_channel_closed_within_its_branch_takes_no_further_work(
    world: World, connection: Any, channel: Any
) -> None:
    xa, xid = AioXAResource(channel), new_xid()
    await xa.start(xid)
    await publish(channel, "one")
    await closed_by_the_server(channel)
    with pytest.raises(ChannelInvalidStateError):
        await publish(channel, "escaped")
    with pytest.raises(XAER_RMFAIL):
        await xa.end(xid)
    await AioCoordinator(connection).rollback(xid)
    assert world.messages("q1") == []


async def test_a_robust_channel_is_refused(world: World) -> None:
    """If closed within a branch, it would reopen outside the branch, and publishes would take effect at once."""
    async with await aio_pika.connect_robust(world.services["q1"].url()) as connection:
        channel = await connection.channel(publisher_confirms=False)
        with pytest.raises(XAER_INVAL, match="is robust"):
            AioXAResource(channel)


async def test_a_plain_channel_of_a_robust_connection_stays_closed(world: World) -> None:
    async with await aio_pika.connect_robust(world.services["q1"].url()) as connection:
        channel = aio_pika.Channel(connection, publisher_confirms=False)
        await channel.initialize()
        xa, xid = AioXAResource(channel), new_xid()
        await xa.start(xid)
        await publish(channel, "one")
        transport: Any = connection.transport
        await transport.connection.close()  # it reconnects
        with pytest.raises(ChannelInvalidStateError):
            await publish(channel, "escaped")
        await connection.ready()
        with pytest.raises(ChannelInvalidStateError):
            await publish(channel, "escaped")
        with pytest.raises(XAER_RMFAIL):
            await xa.end(xid)
    assert world.messages("q1") == []


async def test_a_channel_of_aiormq_does_as_well(world: World) -> None:
    connection = await aiormq.connect(world.services["q1"].url())
    channel = await connection.channel(publisher_confirms=False)
    xa, xid = AioXAResource(channel), new_xid()
    await xa.start(xid)
    await channel.basic_publish(b"one", routing_key="q")
    await xa.end(xid)
    assert await xa.commit(xid, one_phase=True) is XaFlag.OK
    coordinator = AioCoordinator(connection)
    assert [found async for found in coordinator.recover()] == []
    await connection.close()
    assert world.messages("q1") == ["one"]


async def test_a_service_that_dies_ends_the_call(world: World, channel: Any) -> None:
    xa, xid = AioXAResource(channel), new_xid()
    await xa.start(xid)
    await publish(channel, "one")
    await xa.end(xid)
    world.services["q1"].pause()
    call = asyncio.ensure_future(xa.prepare(xid))
    await asyncio.sleep(0)
    world.services["q1"].kill9()
    with pytest.raises(XAER_RMFAIL):
        await call
    with pytest.raises(XAER_RMFAIL):
        await xa.prepare(xid)


async def test_a_silent_service_ends_the_call_at_the_timeout(world: World, channel: Any) -> None:
    xid = new_xid()
    await AioXAResource(channel).start(xid)
    world.services["q1"].pause()
    try:
        with pytest.raises(XAER_RMFAIL, match=r"no answer within 0\.2 s"):
            await AioXAResource(channel, timeout=0.2).end(xid)
    finally:
        world.services["q1"].resume()


async def test_a_cancelled_call_leaves_the_channel_usable(world: World, channel: Any) -> None:
    xa, xid = AioXAResource(channel), new_xid()
    await xa.start(xid)
    await publish(channel, "one")
    await xa.end(xid)
    world.services["q1"].pause()
    call = asyncio.create_task(xa.prepare(xid))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    world.services["q1"].resume()
    assert await xa.commit(xid) is XaFlag.OK
    assert world.messages("q1") == ["one"]


async def test_a_peer_without_dtx_is_refused_before_any_frame(connection: Any, channel: Any) -> None:
    underlying = await channel.get_underlay_channel()
    underlying.connection.server_properties["capabilities"].pop("dtx")
    with pytest.raises(PeerIsNotDtx):
        await AioXAResource(channel).select()
    with pytest.raises(PeerIsNotDtx):
        await AioCoordinator(connection).commit(new_xid())


async def test_a_scan_lists_more_branches_than_a_batch_has(connection: Any, channel: Any) -> None:
    xa = AioXAResource(channel)
    xids = [new_xid(bytes(64)) for _ in range(60)]
    for xid in xids:
        await xa.start(xid)
        await publish(channel, "many")
        await xa.end(xid)
        await xa.prepare(xid)
    coordinator = AioCoordinator(connection)
    assert sorted(map(str, [found async for found in coordinator.recover()])) == sorted(map(str, xids))
    for xid in xids:
        await coordinator.rollback(xid)


# -- the transaction manager ------------------------------------------------------------------------------------------


@pytest.fixture
async def manager(world: World) -> AsyncIterator[AsyncTransactionManager]:
    resources: list[Any] = [
        AsyncPep249Resource(name, partial(psycopg.AsyncConnection.connect, url))
        for name, url in world.databases.items()
    ]
    resources += [AsyncDtxResource(name, service.url()) for name, service in world.services.items()]
    options: dict[str, Any] = {"node": "n", "log": world.log, "interval": 0.0, "recover_every": None}
    async with AsyncTransactionManager(resources=resources, **options) as tm:
        yield tm


async def write(tx: Any, id_: str, *names: str) -> None:
    for name in names:
        handle = await tx.enlist(name)
        if name.startswith("db"):
            await handle.execute("INSERT INTO entry VALUES (%s, 1)", (id_,))
        else:
            await publish(handle, id_)


def everywhere(world: World) -> list[set[str]]:
    return [world.rows("db1"), world.rows("db2"), set(world.messages("q1")), set(world.messages("q2"))]


async def test_all_resources_commit_or_none_does(world: World, manager: AsyncTransactionManager) -> None:
    async with manager.transaction() as tx:
        await write(tx, "one", *ALL)
    failed = manager.transaction()
    await write(failed, "two", *ALL)
    with pytest.raises(psycopg.errors.SyntaxError):
        await (await failed.enlist("db1")).execute("SELEKT")
    with pytest.raises(RolledBack):
        await failed.commit()
    async with manager.transaction() as tx:
        await write(tx, "alone", "q1")
    assert tx.outcome is not None
    assert tx.outcome.one_phase
    assert everywhere(world) == [{"one"}, {"one"}, {"one", "alone"}, {"one"}]
    assert world.in_doubt() == []


async def test_a_channel_closed_within_its_transaction_takes_no_further_work(
    world: World, manager: AsyncTransactionManager
) -> None:
    tx = manager.begin()
    await write(tx, "one", "q1", "db1")
    await closed_by_the_server(await tx.enlist("q1"))
    with pytest.raises(ChannelInvalidStateError):
        await write(tx, "escaped", "q1")
    with pytest.raises(RolledBack):
        await tx.commit()
    assert everywhere(world) == [set()] * 4


async def test_many_tasks_commit_at_the_same_time(world: World, manager: AsyncTransactionManager) -> None:
    @manager.transactional
    async def work(id_: str) -> None:
        await write(manager.current, id_, *ALL)

    ids = {new_id() for _ in range(12)}
    await asyncio.gather(*map(work, ids))
    await asyncio.to_thread(manager.log.flush)
    assert manager.log.unfinished("n") == []
    assert everywhere(world) == [ids] * 4
    with pytest.raises(Misuse):
        _ = manager.current


@pytest.mark.parametrize("times", [1, 3], ids=["once", "again and again"])
async def test_a_cancelled_commit_comes_to_its_end_first(
    world: World, manager: AsyncTransactionManager, times: int
) -> None:
    reached = asyncio.Event()
    steps.arm(lambda point: reached.set() if point is CommitPoint.PREPARED else None)

    async def work() -> None:
        async with manager.transaction() as tx:
            await write(tx, "one", *ALL)

    task = asyncio.create_task(work())
    try:
        await reached.wait()
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
    finally:
        steps.arm(None)
    assert everywhere(world) == [{"one"}] * 4
    assert world.in_doubt() == []


async def test_recovery_completes_a_resource_down_in_the_second_phase(
    world: World, manager: AsyncTransactionManager
) -> None:
    steps.arm(lambda point: world.services["q2"].kill9() if point is CommitPoint.DECIDED else None)
    try:
        async with manager.transaction() as tx:
            await write(tx, "one", *ALL)
    finally:
        steps.arm(None)
    assert tx.outcome is not None
    assert tx.outcome.unfinished == ("q2",)
    world.services["q2"].start()
    report = await manager.recover()
    assert report.clean
    assert everywhere(world) == [{"one"}] * 4
    assert manager.log.unfinished("n") == []


async def test_a_heuristic_outcome_is_raised(world: World, manager: AsyncTransactionManager) -> None:
    def decided(point: CommitPoint) -> None:
        if point is CommitPoint.DECIDED:
            world.decide("q1", "rollback")

    steps.arm(decided)
    try:
        tx = manager.transaction()
        await write(tx, "one", *ALL)
        with pytest.raises(HeuristicMixed):
            await tx.commit()
    finally:
        steps.arm(None)
    assert world.in_doubt() == []


async def test_connections_of_the_application_take_part_and_stay_open(
    world: World, manager: AsyncTransactionManager, channel: Any
) -> None:
    async with await psycopg.AsyncConnection.connect(world.databases["db1"]) as database:
        for id_ in ("a", "b"):
            async with manager.transaction():
                await (await manager.enlist("db1", database)).execute("INSERT INTO entry VALUES (%s, 1)", (id_,))
                assert await manager.enlist("q1", channel) is channel
                await publish(channel, id_)
                with pytest.raises(Misuse, match="another handle"):
                    await manager.enlist("q1", object())
        assert not channel.is_closed
        async with manager.transaction() as tx:  # they are not used for other transactions
            assert await tx.enlist("q1") is not channel
            assert await tx.enlist("db1") is not database
    assert everywhere(world) == [{"a", "b"}, set(), {"a", "b"}, set()]


async def test_an_exception_rolls_everything_back(world: World, manager: AsyncTransactionManager) -> None:
    async def fail() -> None:
        async with manager.transaction() as tx:
            await write(tx, "one", *ALL)
            with pytest.raises(Misuse, match="in this task already"):
                await manager.transaction().__aenter__()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    late = manager.begin(timeout=0.0)
    await write(late, "two", *ALL)
    with pytest.raises(TimedOut):
        await late.commit()
    with pytest.raises(Misuse, match="the transaction is over"):
        await late.rollback()
    assert everywhere(world) == [set()] * 4
    assert world.in_doubt() == []


async def test_an_unreachable_resource_cannot_be_enlisted(world: World, manager: AsyncTransactionManager) -> None:
    world.services["q1"].kill9()
    nobody = AsyncPep249Resource("db3", partial(psycopg.AsyncConnection.connect, "postgresql://127.0.0.1:1/nowhere"))
    manager.register(nobody)
    tx = manager.begin()
    await write(tx, "one", "db1", "db2")
    for name in ("q1", "db3"):
        with pytest.raises(XAER_RMFAIL, match=f"{name} is out of reach"):
            await tx.enlist(name)
    await tx.commit()  # commits the enlisted resources
    assert world.rows("db1") == world.rows("db2") == {"one"}


async def test_channels_that_are_gone_are_not_kept(connection: Any) -> None:
    """A program may open a channel for each branch and run for years."""
    seen = []
    for _ in range(4):
        channel = await connection.channel(publisher_confirms=False)
        xa, xid = AioXAResource(channel), new_xid()
        await xa.start(xid)
        await xa.end(xid)
        await xa.rollback(xid)
        seen.append(weakref.ref(await channel.get_underlay_channel()))
        await channel.close()
        del channel, xa
    await asyncio.sleep(0)
    gc.collect()
    # the event loop may still refer to the last one
    assert [channel() for channel in seen[:-1]] == [None] * 3
