"""Messages that an operator takes from a queue, and that stay there."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

import pytest

from dtx.server.standalone.operator_requests import Got, OperatorBroker, OperatorRequests
from dtx.store.postgres.exchanges import Queue
from dtx.wire.amqp09 import properties
from dtx.wire.amqp09.methods import BasicPublish, QueueDeclare
from dtx.wire.amqp09.tables import entry
from dtx.xa.codes import XaError
from tests.evidence.fuzz.server import whole

LIMITED = entry(b"x-queue-type", b"S", b"quorum") + entry(b"x-delivery-limit", b"l", (1).to_bytes(8, "big"))


class Rig:
    """An operator, and a queue with one message of four bytes that may return once."""

    def __init__(self, operator: OperatorRequests, queue: Queue) -> None:
        self.operator = operator
        self.index = queue.index

    async def get(self, *, most: int = 1000, how: str = "ack") -> list[Got]:
        """Take the message."""

        async def show(found: list[Got]) -> list[Got]:
            return found

        return await self.operator.get(b"q", 10, how, most, 1000, show)

    @property
    def messages(self) -> tuple[int, int]:
        """Those that are ready, and those that are not settled."""
        return self.index.ready, self.index.unacked


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with whole() as (parts, store):
        operator = OperatorBroker(parts).user("ann", "/", by_role=True)
        await operator.request(QueueDeclare(b"q", durable=True, arguments=LIMITED))
        await operator.publish(BasicPublish(b"", b"q"), properties.EMPTY, b"body")
        yield Rig(operator, store.virtual_host("/").queues[b"q"])


async def test_a_message_of_a_request_that_ends_now_returns(rig: Rig) -> None:
    rig.index.suspend()
    request = asyncio.create_task(rig.get())
    await asyncio.sleep(0)
    rig.index.proceed(0.0)
    rig.index.dispatch(0.0)
    assert rig.messages == (0, 1)
    request.cancel()
    with suppress(asyncio.CancelledError):
        await request
    assert rig.messages == (1, 0)


async def test_looks_do_not_use_up_the_delivery_limit(rig: Rig) -> None:
    """A queue drops a message that clients have returned too often."""
    for _ in range(3):
        with pytest.raises(XaError, match="use truncate"):
            await rig.get(most=1)
        await rig.get(how="requeue")
    assert rig.messages == (1, 0)


async def test_messages_stay_if_no_answer_can_be_made(rig: Rig) -> None:
    async def show(_: Sequence[Got]) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        await rig.operator.get(b"q", 10, "ack", 1000, 1000, show)
    assert rig.messages == (1, 0)
    (got,) = await rig.get()
    assert (got.message.body, got.redelivered) == (b"body", True)
    assert rig.messages == (0, 0)
