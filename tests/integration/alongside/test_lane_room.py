"""Phase two of many large branches at once: their messages are in memory a few at a time."""

import asyncio
from collections.abc import Sequence
from uuid import uuid4

from dtx.log.records import Unit, Work, WorkKind
from dtx.store.api import Applied, PhaseTwo
from dtx.store.rabbitmq.lane import LaneSettings
from dtx.store.rabbitmq.room import Room
from dtx.store.rabbitmq.service import Broker
from dtx.store.rabbitmq.store import RabbitStore
from tests.support.client import bodies, fresh_queue
from tests.support.rabbitmq import RabbitNode

LIMIT = 100_000
COUNT = 20


class InMemory:
    """Counts the messages that have been read for phase two and are not through."""

    def __init__(self, queue: str) -> None:
        self._queue = queue.encode()
        self._now = 0
        self.most = 0

    async def commit(self, store: RabbitStore, size: int) -> Applied:
        body = bytes(size)
        read = 0

        async def work() -> Sequence[Work]:
            nonlocal read
            read = size
            self._now += size
            self.most = max(self.most, self._now)
            await asyncio.sleep(0)
            return [
                Work(
                    position=0,
                    kind=WorkKind.PUBLISH,
                    exchange=b"",
                    routing_key=self._queue,
                    properties=b"\x00\x00",
                    body=body,
                )
            ]

        async def assign(_unit: Unit) -> None:
            """The log of this test forgets."""

        phase = PhaseTwo(
            branch_id=uuid4(),
            vhost="/",
            unit=store.next_unit("/"),
            retry=False,
            size=size,
            work=work,
            assign=assign,
        )
        result = await store.apply(phase)
        self._now -= read
        assert isinstance(result, Applied)
        return result


async def test_units_that_are_under_way_hold_no_more_than_the_limit_and_a_larger_one_goes_alone(
    rabbitmq: RabbitNode,
) -> None:
    settings = LaneSettings(rm="room", replay="always", room=Room(LIMIT))
    store = RabbitStore(Broker.from_url(rabbitmq.url()), settings)
    try:
        with fresh_queue(rabbitmq) as queue:
            await store.lane("/").ready(30)
            several, large = InMemory(queue), InMemory(queue)
            await asyncio.gather(*(several.commit(store, 30_000) for _ in range(COUNT)))
            await asyncio.gather(*(large.commit(store, 3 * LIMIT) for _ in range(2)))
            assert sorted(map(len, bodies(rabbitmq, queue))) == [30_000] * COUNT + [3 * LIMIT] * 2
    finally:
        await store.close()
    assert 30_000 < several.most <= LIMIT
    assert large.most == 3 * LIMIT
