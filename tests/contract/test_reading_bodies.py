"""Bodies read from the log while their messages are removed, and reads that fail."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from structlog.testing import capture_logs

from dtx.log.api import LogUnavailable
from dtx.log.changes import Change, Slot, Store, StoredMessage
from tests.support.memory_log import Fault, MemoryLog
from tests.support.standalone import Client, gone

COUNT = 5
BODIES = [b"%d" % number for number in range(COUNT)]
MISSED = "messages are not in the database any more"


class SlowLog(MemoryLog):
    """A log whose reads wait for ``go_on`` and fail ``failures`` times."""

    def __init__(self) -> None:
        super().__init__("rm")
        self.asked = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.failures = 0

    async def read_messages(self, slots: Sequence[Slot], octets: int | None = None) -> dict[Slot, StoredMessage]:
        self.asked.set()
        await self.go_on.wait()
        if self.failures:
            self.failures -= 1
            raise LogUnavailable("the test's reads fail")
        return await super().read_messages(slots, octets)

    async def which_exist(self, slots: Sequence[Slot]) -> set[Slot]:
        return set(await super().read_messages(slots))  # only reads of bodies fail


@pytest.fixture
async def slow() -> AsyncIterator[SlowLog]:
    log = SlowLog()
    await log.open()
    yield log
    await log.close()


@pytest.fixture
async def client(slow: SlowLog) -> AsyncIterator[Client]:
    """A client without a cache: each body is read from the log before its delivery."""
    client = await Client(slow, cache_bytes=0).open()
    yield client
    await client.close()


async def test_a_message_purged_while_it_is_read_is_not_missed(client: Client, slow: SlowLog) -> None:
    queue = await client.declare()
    await client.publish(*BODIES)
    slow.go_on.clear()
    slow.asked.clear()
    sink = client.consume(queue)
    await slow.asked.wait()
    with capture_logs() as said:
        assert await client.store.purge(queue) == COUNT
        slow.go_on.set()
        await client.publish(b"new")
        assert await sink.wait(1) == [b"new"]
    assert [event for event in said if event["event"] == MISSED] == []


async def test_a_message_removed_from_the_database_does_not_block_others(client: Client, slow: SlowLog) -> None:
    queue = await client.declare()
    await client.publish(*BODIES)
    first = Slot(queue.spec.id, queue.index._ready.first(1)[0])
    await slow.write(Store(change=Change(drops=[first])))
    with capture_logs() as said:
        sink = client.consume(queue)
        assert await sink.wait(COUNT - 1) == BODIES[1:]
    assert [(event["event"], event["count"]) for event in said if event["event"] == MISSED] == [(MISSED, 1)]


async def test_bodies_that_could_not_be_read_are_asked_for_again(client: Client, slow: SlowLog) -> None:
    queue = await client.declare()
    await client.publish(*BODIES)
    slow.failures = 2
    sink = client.consume(queue)
    assert await sink.wait(COUNT) == BODIES
    assert slow.failures == 0


async def test_deliveries_of_a_failed_change_are_repeated_despite_read_errors(client: Client, slow: SlowLog) -> None:
    """docs/explanation/limits: "If the database refuses the record, the acknowledged messages are delivered again"."""
    queue = await client.declare()
    await client.publish(*BODIES)
    sink = client.consume(queue)
    await sink.wait(COUNT)
    slow.faults.append(Fault.REFUSED)
    slow.failures = 2
    with pytest.raises(LogUnavailable):
        await client.submit([client.message(b"new")], sink.deliveries)
    again = (await sink.wait(2 * COUNT))[COUNT:]
    assert again == BODIES
    assert all(delivery.redelivered for delivery in sink.deliveries[COUNT:])
    await client.submit(acked=sink.deliveries[COUNT:])
    await gone(client, queue.spec.id)
