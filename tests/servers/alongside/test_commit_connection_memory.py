"""Phase two of many large branches at the same time: only a limited part of their messages is in memory."""

import asyncio
from collections.abc import Callable, Sequence
from uuid import uuid4

from dtx.log.records import Replay, Unit, WorkKind, WorkRow
from dtx.store.api import Applied, PhaseTwo, Refused, UnitProgress
from dtx.store.rabbitmq.commit_connection import CommitSettings
from dtx.store.rabbitmq.memory_quota import MemoryQuota
from dtx.store.rabbitmq.service import Broker
from dtx.store.rabbitmq.store import RabbitStore
from tests.support.branches import new_identity
from tests.support.client import bodies, fresh_queue
from tests.support.proxy import Proxy
from tests.support.rabbitmq import RabbitNode

LIMIT = 100_000
COUNT = 20


class InMemory:
    """Counts the bytes of messages that phase two has read and not finished."""

    def __init__(self, queue: str) -> None:
        self._queue = queue.encode()
        self.now = 0
        """Bytes in memory."""
        self.most = 0

    async def reaches(self, size: int) -> None:
        """Wait until at least *size* bytes are in memory."""
        async with asyncio.timeout(30):
            while self.now < size:
                await asyncio.sleep(0.01)

    async def commit(self, store: RabbitStore, size: int) -> Applied:
        result = await self.apply(store, size)
        assert isinstance(result, Applied)
        return result

    async def apply(self, store: RabbitStore, size: int, exchange: bytes = b"") -> Applied | Refused:
        body = bytes(size)
        read = 0

        async def work() -> Sequence[WorkRow]:
            nonlocal read
            read = size
            self.now += size
            self.most = max(self.most, self.now)
            await asyncio.sleep(0)
            return [
                WorkRow(
                    position=0,
                    kind=WorkKind.PUBLISH,
                    exchange=exchange,
                    routing_key=self._queue,
                    properties=b"\x00\x00",
                    body=body,
                )
            ]

        async def assign(_unit: Unit, _replays: Sequence[Replay]) -> None:
            """The log of this test stores nothing."""

        phase = PhaseTwo(
            branch_id=uuid4(),
            vhost="/",
            unit=store.next_unit("/"),
            progress=UnitProgress.UNSENT,
            size=size,
            work=work,
            assign=assign,
        )
        result = await store.apply(phase)
        self.now -= read
        return result


async def test_pending_units_keep_the_memory_limit_except_one_large_unit(
    rabbitmq: RabbitNode,
) -> None:
    settings = CommitSettings(identity=new_identity("room"), replay="always", room=MemoryQuota(LIMIT))
    store = RabbitStore(Broker.from_url(rabbitmq.url()), settings)
    try:
        with fresh_queue(rabbitmq) as queue:
            await store.commit_connection("/").ready(30)
            several, large = InMemory(queue), InMemory(queue)
            await asyncio.gather(*(several.commit(store, 30_000) for _ in range(COUNT)))
            await asyncio.gather(*(large.commit(store, 3 * LIMIT) for _ in range(2)))
            assert sorted(map(len, bodies(rabbitmq, queue))) == [30_000] * COUNT + [3 * LIMIT] * 2
    finally:
        await store.close()
    assert 30_000 < several.most <= LIMIT
    assert large.most == 3 * LIMIT


async def test_all_room_is_free_again_however_units_end(
    rabbitmq: RabbitNode, proxy: Callable[[str, int], Proxy]
) -> None:
    """Units are applied, refused, late, lost with their connection or cancelled: the quota stays exact."""
    between = proxy("127.0.0.1", rabbitmq.port)
    room = MemoryQuota(LIMIT)
    settings = CommitSettings(identity=new_identity("room"), replay="always", room=room, deadline=0.2)
    store = RabbitStore(Broker.from_url(f"amqp://guest:guest@127.0.0.1:{between.port}"), settings)
    try:
        with fresh_queue(rabbitmq) as queue:
            await store.commit_connection("/").ready(30)
            load = InMemory(queue)
            good = [asyncio.create_task(load.apply(store, 30_000)) for _ in range(COUNT)]
            bad = [asyncio.create_task(load.apply(store, 30_000, b"no such exchange")) for _ in range(COUNT)]
            await asyncio.wait(good, return_when=asyncio.FIRST_COMPLETED)
            between.stall()
            late = [asyncio.create_task(load.apply(store, LIMIT)) for _ in range(3)]
            await load.reaches(3 * LIMIT)  # each got its room when the one before was late
            between.resume()
            await asyncio.wait(late, return_when=asyncio.FIRST_COMPLETED)
            between.cut()
            results = await asyncio.wait_for(asyncio.gather(*good, *bad, *late), 60)
            assert [type(result) for result in results] == [Applied] * COUNT + [Refused] * COUNT + [Applied] * 3
            between.stall()
            given_up = [asyncio.create_task(load.apply(store, 60_000)) for _ in range(4)]
            await load.reaches(load.now + 60_000)
            for task in given_up:
                task.cancel()
            await asyncio.wait(given_up)
            await asyncio.wait_for(room.take(LIMIT), 30)
            more = asyncio.create_task(room.take(1))
            assert (await asyncio.wait([more], timeout=0.1))[1] == {more}
            more.cancel()
            between.resume()
    finally:
        await store.close()
