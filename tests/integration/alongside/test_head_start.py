"""Messages are with the broker while the log is being told of the decision, and nobody sees one without it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from uuid import uuid4

import pytest

from dtx.log.memory import Fault, MemoryLog
from dtx.manager import Limits, TransactionManager
from dtx.manager.manager import Who
from dtx.store.rabbitmq.ahead import MOST_AHEAD
from dtx.store.rabbitmq.lane import LaneSettings
from dtx.store.rabbitmq.service import Broker
from dtx.store.rabbitmq.store import RabbitStore
from dtx.store.work import HeldPublish
from dtx.telemetry import Metrics
from dtx.xa.codes import ReplyCode, XaError, XaFlag
from dtx.xa.model import Operation
from dtx.xa.xid import Xid
from tests.support.client import bodies, fresh_queue
from tests.support.proxy import Proxy
from tests.support.rabbitmq import RabbitNode

WHO = Who("guest", "/")
CHANNELS = 6
PATIENCE = 60.0


class Stand:
    """A manager between a log in memory, which can fail or wait, and a real broker, behind a network that can be cut.

    Args:
        node: the broker.
        proxy: the network.
    """

    def __init__(self, node: RabbitNode, proxy: Proxy) -> None:
        self.node = node
        self.proxy = proxy
        self.queue = ""
        self.log = MemoryLog("rm")
        broker = Broker.from_url(f"amqp://guest:guest@127.0.0.1:{proxy.port}")
        self._store = RabbitStore(broker, LaneSettings(rm="ahead", replay="receipts", channels=CHANNELS))
        self.manager = TransactionManager(self.log, self._store, Limits(), Metrics())
        self.lane = self._store.lane("/")

    async def open(self, stack: AsyncExitStack) -> None:
        self.queue = stack.enter_context(fresh_queue(self.node))
        stack.push_async_callback(self._store.close)
        await self.log.open()
        await self.manager.start()
        stack.push_async_callback(self.manager.close)
        await self.lane.ready(PATIENCE)

    async def prepared(self, body: bytes, *, exchange: bytes = b"") -> Xid:
        """A branch that has published one message and voted."""
        xid = Xid(1, uuid4().bytes, b"ahead")
        started = self.manager.demarcate(WHO, xid, Operation.START, self)
        assert started is not None
        work = started[1].work
        assert work is not None
        work.add_publish(HeldPublish(exchange, self.queue.encode(), False, b"\x00\x00", body))
        self.manager.demarcate(WHO, xid, Operation.END, self)
        assert await self.ask(xid, Operation.PREPARE) is XaFlag.OK
        return xid

    async def ask(self, xid: Xid, operation: Operation = Operation.COMMIT) -> XaFlag | ReplyCode:
        """The answer to a request."""
        answered: asyncio.Future[XaFlag | XaError] = asyncio.get_running_loop().create_future()

        def reply(answer: XaFlag | XaError) -> None:
            if not answered.done():
                answered.set_result(answer)

        async with asyncio.timeout(PATIENCE):
            try:
                if not self.manager.request_at_once(WHO, xid, operation, reply):
                    await self.manager.request(WHO, xid, operation, reply)
            except XaError as error:
                return error.code
            answer = await answered
        return answer.code if isinstance(answer, XaError) else answer

    def asking(self, *xids: Xid) -> list[asyncio.Task[XaFlag | ReplyCode]]:
        """The commits of branches; none of the decisions is written before :meth:`write`."""
        self.log.running.clear()
        return [asyncio.create_task(self.ask(xid)) for xid in xids]

    def write(self) -> None:
        """The log writes on."""
        self.log.running.set()

    async def until_free(self, channels: int) -> None:
        """Wait until so many channels of the lane are free, neither more nor less."""
        async with asyncio.timeout(PATIENCE):
            while len(self.lane._free) != channels:
                await asyncio.sleep(0.01)

    def came_in(self) -> list[bytes]:
        """What the queue has; it is empty afterwards."""
        return sorted(bodies(self.node, self.queue))


@pytest.fixture
async def stand(
    rabbitmq: RabbitNode, proxy: Callable[[str, int], Proxy], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Stand]:
    monkeypatch.setattr("dtx.manager.manager._REVIVE", 3600.0)  # nothing happens but what the test asks for
    async with AsyncExitStack() as stack:
        stand = Stand(rabbitmq, proxy("127.0.0.1", rabbitmq.port))
        await stand.open(stack)
        yield stand


async def test_a_message_that_went_ahead_is_seen_when_the_decision_is_durable(stand: Stand) -> None:
    (commit,) = stand.asking(await stand.prepared(b"body"))
    await stand.until_free(CHANNELS - 1)
    assert stand.came_in() == []
    stand.write()
    assert await commit is XaFlag.OK
    assert stand.came_in() == [b"body"]
    await stand.until_free(CHANNELS)


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.ANSWER_LOST])
async def test_a_message_that_went_ahead_of_a_decision_that_failed_comes_in_with_the_next_one(
    stand: Stand, fault: Fault
) -> None:
    """Whether the log has the decision or not: what went ahead of it is rolled back, and nothing comes in twice."""
    xid = await stand.prepared(b"body")
    stand.log.faults.append(fault)
    (commit,) = stand.asking(xid)
    await stand.until_free(CHANNELS - 1)
    stand.write()
    assert await commit is ReplyCode.INTERNAL_ERROR
    await stand.until_free(CHANNELS)
    assert stand.came_in() == []
    # each channel has to serve: one that still had the message would bring it in with another branch
    others = [b"%d" % number for number in range(CHANNELS)]
    commits = stand.asking(*[await stand.prepared(body) for body in others])
    stand.write()
    assert await asyncio.gather(*commits) == [XaFlag.OK] * CHANNELS
    assert stand.came_in() == others
    assert await stand.ask(xid) is XaFlag.OK
    assert stand.came_in() == [b"body"]


async def test_without_the_lease_nothing_that_went_ahead_comes_in(stand: Stand) -> None:
    xid = await stand.prepared(b"body")
    stand.log.faults.append(Fault.LEASE_LOST)
    (commit,) = stand.asking(xid)
    await stand.until_free(CHANNELS - 1)
    stand.write()
    assert await commit is ReplyCode.INTERNAL_ERROR
    await stand.until_free(CHANNELS)
    assert stand.came_in() == []


async def test_a_message_that_is_refused_before_the_decision_is_durable_harms_no_other(stand: Stand) -> None:
    """The broker closes the channel of the head start (404); the unit is judged again when its time has come."""
    refused = await stand.prepared(b"refused", exchange=b"no such exchange")
    channels = {*stand.lane._free}
    (commit,) = stand.asking(refused)
    await stand.until_free(CHANNELS - 1)
    (channel,) = channels - {*stand.lane._free}
    async with asyncio.timeout(PATIENCE):
        while channel.closed is None:
            await asyncio.sleep(0.01)
    stand.write()
    assert await commit is ReplyCode.INTERNAL_ERROR
    await stand.until_free(CHANNELS)
    record = stand.manager._branches["/", refused].record
    assert record is not None
    assert "404" in (record.stuck or "")
    xids = [await stand.prepared(b"good") for _ in range(2 * CHANNELS)]
    commits = stand.asking(*xids)
    stand.write()
    assert await asyncio.gather(*commits) == [XaFlag.OK] * 2 * CHANNELS
    assert stand.came_in() == [b"good"] * 2 * CHANNELS


async def test_half_of_the_channels_wait_for_no_decision(stand: Stand) -> None:
    xids = [await stand.prepared(b"%d" % number) for number in range(2 * CHANNELS)]
    commits = stand.asking(*xids)
    await stand.until_free(CHANNELS // 2)
    assert stand.came_in() == []
    stand.write()
    assert await asyncio.gather(*commits) == [XaFlag.OK] * 2 * CHANNELS
    assert stand.came_in() == sorted(b"%d" % number for number in range(2 * CHANNELS))
    await stand.until_free(CHANNELS)


async def test_a_large_message_does_not_go_ahead(stand: Stand) -> None:
    large = bytes(MOST_AHEAD + 1)
    commits = stand.asking(await stand.prepared(large), await stand.prepared(b"small"))
    await stand.until_free(CHANNELS - 1)
    stand.write()
    assert await asyncio.gather(*commits) == [XaFlag.OK] * 2
    assert stand.came_in() == [large, b"small"]


async def test_a_connection_that_is_lost_before_the_decision_is_durable_takes_the_head_start_along(
    stand: Stand,
) -> None:
    (commit,) = stand.asking(await stand.prepared(b"body"))
    await stand.until_free(CHANNELS - 1)
    stand.proxy.cut()
    await stand.until_free(0)
    await stand.until_free(CHANNELS)
    stand.write()
    assert await commit is XaFlag.OK
    assert stand.came_in() == [b"body"]
