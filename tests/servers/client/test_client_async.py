"""AsyncXAResource and AsyncCoordinator against the real service."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pika
import pytest
from pika.adapters.asyncio_connection import AsyncioConnection
from pika.adapters.select_connection import SelectConnection
from pika.channel import Channel
from pika.exceptions import ChannelWrongStateError

from dtx.client import (
    XA_RBROLLBACK,
    XAER_NOTA,
    XAER_PROTO,
    XAER_RMFAIL,
    AsyncCoordinator,
    AsyncXAResource,
    PeerIsNotDtx,
    XAException,
    XaFlag,
    Xid,
    calls,
    require_dtx,
    submit,
)
from dtx.client.calls import Call
from tests.conftest import ServiceFactory
from tests.support.client import async_channel, async_connected, bodies, new_xid
from tests.support.rabbitmq import RabbitNode
from tests.support.service import DtxService


@pytest.fixture
async def connection(service: DtxService, rabbitmq: RabbitNode) -> AsyncIterator[AsyncioConnection]:
    async with async_connected(service.url()) as open_connection:
        yield open_connection


async def prepared(connection: AsyncioConnection, queue: str) -> Xid:
    channel = await async_channel(connection)
    xa, xid = AsyncXAResource(channel), new_xid()
    await xa.start(xid)
    channel.basic_publish("", queue, b"one")
    await xa.end(xid)
    assert await xa.prepare(xid) is XaFlag.OK
    return xid


async def exhaust(scan: AsyncIterator[Xid]) -> None:
    async for _ in scan:
        """The branches that were fetched before are still returned."""


async def test_a_message_is_there_when_its_branch_is_committed(
    connection: AsyncioConnection, queue: str, rabbitmq: RabbitNode
) -> None:
    xid = await prepared(connection, queue)
    assert await asyncio.to_thread(rabbitmq.count, queue) == 0
    coordinator = AsyncCoordinator(connection)
    assert xid in {found async for found in coordinator.recover()}
    assert await coordinator.commit(xid) is XaFlag.OK
    await coordinator.close()
    assert await asyncio.to_thread(bodies, rabbitmq, queue) == [b"one"]


async def test_a_channel_closed_within_its_branch_takes_no_further_work(
    connection: AsyncioConnection, queue: str, rabbitmq: RabbitNode
) -> None:
    channel = await async_channel(connection)
    closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    channel.add_on_close_callback(lambda *_: closed.set_result(None))
    xa, xid = AsyncXAResource(channel), new_xid()
    await xa.start(xid)
    channel.basic_publish("", queue, b"one")
    channel.queue_declare("no-such-queue", passive=True)
    await closed
    with pytest.raises(ChannelWrongStateError):
        channel.basic_publish("", queue, b"escaped")
    with pytest.raises(XAER_RMFAIL):
        await xa.end(xid)
    await AsyncCoordinator(connection).rollback(xid)
    assert await asyncio.to_thread(bodies, rabbitmq, queue) == []


async def test_calls_of_several_tasks_go_out_in_order(connection: AsyncioConnection) -> None:
    xa, xid = AsyncXAResource(await async_channel(connection)), new_xid()
    await xa.select()
    started, _, seconds, ended, vote = await asyncio.gather(
        xa.start(xid), xa.set_timeout(xid, 9), xa.get_timeout(xid), xa.end(xid), xa.prepare(xid)
    )
    assert (started, seconds, ended, vote) == (XaFlag.OK, 9, XaFlag.OK, XaFlag.RDONLY)


async def test_one_refusal_ends_all_calls_on_the_channel(
    connection: AsyncioConnection,
) -> None:
    xa = AsyncXAResource(await async_channel(connection))
    first, second = await asyncio.gather(xa.commit(new_xid()), xa.rollback(new_xid()), return_exceptions=True)
    assert isinstance(first, XAER_NOTA)
    assert isinstance(second, XAER_RMFAIL)
    assert connection.is_open


async def test_results_and_errors_are_those_of_the_blocking_resource(connection: AsyncioConnection) -> None:
    xa, xid = AsyncXAResource(await async_channel(connection)), new_xid()
    await xa.start(xid)
    assert await xa.end(xid, suspend=True) is XaFlag.OK
    assert await xa.start(xid, resume=True) is XaFlag.OK
    assert await xa.end(xid, fail=True) is XaFlag.RBROLLBACK
    with pytest.raises(XA_RBROLLBACK):
        await xa.prepare(xid)
    with pytest.raises(XAER_NOTA):
        await xa.forget(new_xid())


async def test_a_new_scan_ends_the_old_and_calls_continue(connection: AsyncioConnection, queue: str) -> None:
    xids = {await prepared(connection, queue) for _ in range(2)}
    coordinator = AsyncCoordinator(connection)
    with pytest.raises(XAER_NOTA):
        await coordinator.commit(new_xid())
    first = coordinator.recover()
    await anext(first)
    assert xids <= {xid async for xid in coordinator.recover()}
    with pytest.raises(XAER_PROTO):
        await exhaust(first)
    for xid in xids:
        assert await coordinator.rollback(xid) is XaFlag.OK


async def test_a_cancelled_call_leaves_the_channel_usable(connection: AsyncioConnection, queue: str) -> None:
    xid = await prepared(connection, queue)
    coordinator = AsyncCoordinator(connection)
    await coordinator.get_timeout(xid)
    call = asyncio.create_task(coordinator.rollback(xid))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert xid not in {found async for found in coordinator.recover()}


async def test_another_broker_gets_no_dtx_method(rabbitmq: RabbitNode) -> None:
    async with async_connected(rabbitmq.url()) as connection:
        channel = await async_channel(connection)
        with pytest.raises(PeerIsNotDtx):
            AsyncXAResource(channel)
        with pytest.raises(PeerIsNotDtx):
            AsyncCoordinator(connection)
        assert await async_channel(connection)


async def test_a_silent_service_ends_one_call_a_killed_one_all(dtx_service: ServiceFactory) -> None:
    service = dtx_service()
    async with async_connected(service.url()) as connection:
        impatient = AsyncXAResource(await async_channel(connection), timeout=0.3)
        patient = AsyncXAResource(await async_channel(connection))
        coordinator = AsyncCoordinator(connection, timeout=0.3)
        service.pause()
        waiting = asyncio.create_task(patient.commit(new_xid()))
        with pytest.raises(XAER_RMFAIL, match="no answer within"):
            await impatient.commit(new_xid())
        with pytest.raises(XAER_RMFAIL, match="no channel within"):
            await coordinator.commit(new_xid())
        await asyncio.to_thread(service.kill9)
        with pytest.raises(XAER_RMFAIL):
            await waiting
        with pytest.raises(XAER_RMFAIL):
            await coordinator.commit(new_xid())


def test_every_callback_connection_of_pika_will_do(service: DtxService, queue: str, rabbitmq: RabbitNode) -> None:
    """A SelectConnection with callbacks, as its users write it."""
    xid = new_xid()
    outcomes: list[object] = []

    def opened(connection: SelectConnection) -> None:
        require_dtx(connection)
        connection.channel(on_open_callback=run)

    def run(channel: Channel) -> None:
        steps: Iterator[Call[Any]] = iter(
            [
                calls.select(),
                calls.start(xid, join=False, resume=False),
                calls.end(xid, fail=False, suspend=False),
                calls.prepare(xid),
                calls.commit(xid, one_phase=False),
            ]
        )

        def step(outcome: object = None) -> None:
            if outcome is not None:
                outcomes.append(outcome)
            if len(outcomes) == 1 and outcome is XaFlag.OK:
                channel.basic_publish("", queue, b"one")
            following = next(steps, None)
            if following is None or isinstance(outcome, XAException):
                channel.connection.close()
            else:
                submit(channel, following, step)

        step()

    connection = SelectConnection(
        pika.URLParameters(service.url()),
        on_open_callback=opened,
        on_close_callback=lambda closing, _reason: closing.ioloop.stop(),
    )
    connection.ioloop.start()
    connection.ioloop.close()
    assert outcomes == [XaFlag.OK] * 4
    assert bodies(rabbitmq, queue) == [b"one"]
