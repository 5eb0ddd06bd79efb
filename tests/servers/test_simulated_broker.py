"""The simulated broker and the real RabbitMQ: the same tests check the behaviour that dtx relies on."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from random import Random
from typing import Any, Final
from uuid import uuid4

import pytest

from dtx.config.values import Address
from dtx.server.alongside.channel_barrier import FLOW
from dtx.store.rabbitmq import messages
from dtx.store.rabbitmq.identity import BrokerIdentity, NameTaken, consumers_of, declare_lock, hold_lock
from dtx.store.rabbitmq.service import Broker, ServiceConnection
from dtx.store.rabbitmq.upstream import OwnChannel, UpstreamChannelClosed
from dtx.wire.amqp09 import methods, properties, tables
from dtx.wire.amqp09.events import ContentReceived
from dtx.wire.amqp09.frames import header_frame, method_frame
from dtx.wire.amqp09.methods import MANDATORY
from tests.evidence.sim.broker import HOST, PORT, SimBroker
from tests.evidence.sim.network import Network
from tests.evidence.sim.scheduler import Process, scheduler
from tests.support.rabbitmq import RabbitNode
from tests.support.raw import body_frames

PERSISTENT: Final = properties.build({properties.Property.DELIVERY_MODE: b"\x02"})
TRANSIENT: Final = properties.build({properties.Property.DELIVERY_MODE: b"\x01"})
REFUSING: Final = tables.entry(b"x-max-length", b"I", (1).to_bytes(4, "big")) + tables.entry(
    b"x-overflow", b"S", b"reject-publish"
)


class Rig:
    """A broker, and connections to it.

    Args:
        broker: the address of the broker.
        restart: kills the node after its definitions are on the disk, and starts it again.
    """

    def __init__(self, broker: Broker, restart: Callable[[], Awaitable[None]]) -> None:
        self._broker = broker
        self.restart = restart
        self.queue = f"sim-{uuid4()}".encode()
        self._connections: list[ServiceConnection] = []

    async def connect(self) -> ServiceConnection:
        connection = ServiceConnection(self._broker, "contract")
        async with asyncio.timeout(60):
            while True:
                try:
                    await connection.login("/")
                except OSError:
                    await asyncio.sleep(0.2)
                    connection = ServiceConnection(self._broker, "contract")
                else:
                    self._connections.append(connection)
                    return connection

    async def close(self) -> None:
        """Close all sockets."""
        for connection in self._connections:
            connection.end("the test is over")
        for _ in range(2):  # a transport is closed in the next iteration of the loop
            await asyncio.sleep(0)

    async def remove(self) -> None:
        """Delete the queue at the shared broker: dtx trusts no receipts if a queue can refuse messages."""
        channel = await self.channel()
        await channel.call(methods.QueueDelete(self.queue))
        await self.close()

    async def channel(self, *, tx: bool = False) -> OwnChannel:
        channel = await OwnChannel(await self.connect()).open()
        if tx:
            await channel.call(methods.TxSelect())
        return channel

    async def declare(self, channel: OwnChannel, **options: Any) -> None:
        await channel.call(methods.QueueDeclare(self.queue, durable=True, **options))


Scenario = Callable[[Rig], Awaitable[None]]
Play = Callable[[Scenario], Awaitable[None]]


def simulate(scenario: Scenario) -> None:
    """Run *scenario* on the simulated broker with several seeds."""
    for seed in range(5):
        with scheduler(Random(seed)) as loop:
            broker = SimBroker(loop, Network(loop))
            broker.start()

            async def restart(broker: SimBroker = broker) -> None:
                broker.crash()
                broker.start()

            rig = Rig(Broker(hosts=(Address(HOST, PORT),), user="guest", password="guest"), restart)

            async def run(rig: Rig = rig) -> None:
                await scenario(rig)

            task = Process(loop, "client").spawn(run())
            loop.run(task.done)
            task.result()


@pytest.fixture(params=["simulated", "real"])
def play(request: pytest.FixtureRequest) -> Play:
    async def on_real(scenario: Scenario) -> None:
        node: RabbitNode = request.getfixturevalue("rabbitmq")

        async def restart() -> None:
            await asyncio.to_thread(node.keep_definitions)
            await asyncio.to_thread(node.kill9)
            await asyncio.to_thread(node.start)

        rig = Rig(Broker.from_url(node.url()), restart)
        try:
            await scenario(rig)
        finally:
            await rig.close()
            await rig.remove()

    async def on_simulated(scenario: Scenario) -> None:
        await asyncio.to_thread(simulate, scenario)  # the simulation has its own loop

    if request.param == "real":
        request.getfixturevalue("rabbitmq")
        return on_real
    return on_simulated


def publish(channel: OwnChannel, queue: bytes, body: bytes, raw: bytes = PERSISTENT, flags: int = 0) -> bytes:
    number = channel.number
    return b"".join(
        (
            methods.BasicPublish(b"", queue, flags).frame(number),
            header_frame(number, 60, len(body), raw),
            *body_frames(number, body, 4096),
        )
    )


async def commit(channel: OwnChannel, frames: bytes = b"") -> None:
    await channel.send_raw(frames + methods.TxCommit().frame(channel.number), methods.TxCommitOk)


async def count(channel: OwnChannel, queue: bytes) -> int:
    return (await channel.declare(methods.QueueDeclare(queue, passive=True))).message_count


async def get(channel: OwnChannel, queue: bytes) -> tuple[int, ContentReceived] | None:
    get = methods.BasicGet(queue).frame(channel.number)
    match await channel.send_raw(get, methods.BasicGetOk, methods.BasicGetEmpty):
        case ContentReceived(method=methods.BasicGetOk(delivery_tag=tag)) as message:
            return tag, message
        case _:
            return None


async def bodies(channel: OwnChannel, queue: bytes) -> list[bytes]:
    """Get all ready messages without acknowledging them; return the bodies."""
    found = []
    while (got := await get(channel, queue)) is not None:
        found.append(got[1].body)
    return found


async def closed(work: Awaitable[object]) -> UpstreamChannelClosed:
    """The exception with which the broker closes the channel."""
    with pytest.raises(UpstreamChannelClosed) as caught:
        await work
    return caught.value


async def test_a_unit_is_atomic_at_its_commit(play: Play) -> None:
    async def scenario(rig: Rig) -> None:
        unit, other = await rig.channel(tx=True), await rig.channel()
        await rig.declare(other)
        await commit(unit, publish(unit, rig.queue, b"first"))
        got = await get(unit, rig.queue)
        assert got is not None
        ack = methods.BasicAck(got[0]).frame(unit.number)
        unit.upstream.write(ack + publish(unit, rig.queue, b"second"))
        assert await count(other, rig.queue) == 0
        await commit(unit)
        assert await bodies(other, rig.queue) == [b"second"]

    await play(scenario)


async def test_a_unit_whose_connection_ends_before_commit_never_happened(play: Play) -> None:
    async def scenario(rig: Rig) -> None:
        unit, other = await rig.channel(tx=True), await rig.channel()
        await rig.declare(other)
        await commit(unit, publish(unit, rig.queue, b"kept"))
        got = await get(unit, rig.queue)
        assert got is not None
        unit.upstream.write(methods.BasicAck(got[0]).frame(unit.number) + publish(unit, rig.queue, b"never"))
        await unit.call(methods.QueueDeclare(rig.queue, passive=True))
        unit.upstream.abort("the end")
        async with asyncio.timeout(30):
            while not await count(other, rig.queue):
                await asyncio.sleep(0.05)
        assert await bodies(other, rig.queue) == [b"kept"]

    await play(scenario)


async def test_channel_flow_is_answered_after_earlier_publishes(play: Play) -> None:
    """With this, dtx keeps one order across two channels."""

    async def scenario(rig: Rig) -> None:
        channel, other = await rig.channel(), await rig.channel()
        await rig.declare(other)
        for number in range(20):
            flow = method_frame(channel.number, FLOW)
            await channel.send_raw(publish(channel, rig.queue, b"%d" % number) + flow, methods.ChannelFlowOk)
            assert await bodies(other, rig.queue) == [b"%d" % number]

    await play(scenario)


async def test_a_rolled_back_unit_leaves_deliveries_with_its_channel(play: Play) -> None:
    async def scenario(rig: Rig) -> None:
        unit, other = await rig.channel(tx=True), await rig.channel()
        await rig.declare(other)
        await commit(unit, publish(unit, rig.queue, b"one"))
        got = await get(unit, rig.queue)
        assert got is not None
        unit.upstream.write(methods.BasicAck(got[0]).frame(unit.number) + publish(unit, rig.queue, b"never"))
        await unit.call(methods.TxRollback())
        assert await count(other, rig.queue) == 0
        await commit(unit, methods.BasicAck(got[0]).frame(unit.number))
        assert await count(other, rig.queue) == 0

    await play(scenario)


async def test_an_exclusive_queue_is_there_as_long_as_its_connection(play: Play) -> None:
    """Older versions used such queues as locks; dtx still understands them."""

    async def scenario(rig: Rig) -> None:
        owner, other = await rig.channel(), await rig.connect()
        lock = rig.queue
        await owner.call(methods.QueueDeclare(lock, exclusive=True))
        assert await consumers_of(lock, other) == 1
        owner.upstream.abort("the end")
        async with asyncio.timeout(30):
            while await consumers_of(lock, other) is not None:
                await asyncio.sleep(0.05)

    await play(scenario)


async def test_a_lock_is_held_until_the_last_channel_has_ended(play: Play) -> None:
    async def scenario(rig: Rig) -> None:
        first, other = await rig.channel(), await rig.connect()
        second = await OwnChannel(first.upstream).open()
        lock = rig.queue.decode()
        await first.call(declare_lock(lock))
        assert await consumers_of(rig.queue, other) == 0
        for channel in (first, second):
            await channel.send_raw(hold_lock(channel.number, lock), methods.BasicConsumeOk)
        assert await consumers_of(rig.queue, other) == 2
        await first.close()
        assert await consumers_of(rig.queue, other) == 1
        first.upstream.abort("the end")
        async with asyncio.timeout(30):
            while await consumers_of(rig.queue, other) is not None:
                await asyncio.sleep(0.05)

    await play(scenario)


async def test_a_second_log_cannot_claim_the_same_name(play: Play) -> None:
    async def scenario(rig: Rig) -> None:
        mine, theirs = (BrokerIdentity(rm=rig.queue.decode(), log=uuid4(), instance=uuid4()) for _ in range(2))
        for identity in (mine, replace(mine, instance=uuid4())):
            await identity.claim("/", await rig.channel())
        with pytest.raises(NameTaken, match="belongs to another log"):
            await theirs.claim("/", await rig.channel())

    await play(scenario)


async def test_a_queue_that_refuses_part_of_a_unit_closes_channels(play: Play) -> None:
    """406, partial tx completion: the receipt is in its queue but proves nothing."""

    async def scenario(rig: Rig) -> None:
        unit, other = await rig.channel(tx=True), await rig.channel()
        await rig.declare(other, arguments=REFUSING)
        receipts = rig.queue + b".receipts"
        await other.call(methods.QueueDeclare(receipts, durable=True))
        await commit(unit, publish(unit, rig.queue, b"fits"))
        frames = publish(unit, rig.queue, b"too much") + publish(unit, receipts, b"receipt", TRANSIENT)
        error = await closed(commit(unit, frames))
        assert error.close.reply_code == 406
        assert error.close.failed == methods.TxCommit.KEY
        assert await bodies(other, rig.queue) == [b"fits"]
        assert await bodies(other, receipts) == [b"receipt"]

    await play(scenario)


async def test_an_unknown_exchange_ends_the_channel_at_the_publish(play: Play) -> None:
    async def scenario(rig: Rig) -> None:
        unit, other = await rig.channel(tx=True), await rig.channel()
        await rig.declare(other)
        head = methods.BasicPublish(rig.queue + b".nowhere", b"").frame(unit.number)
        frames = publish(unit, rig.queue, b"never") + head + header_frame(unit.number, 60, 0, PERSISTENT)
        error = await closed(commit(unit, frames))
        assert error.close.reply_code == 404
        assert error.close.failed == methods.BasicPublish.KEY
        assert await count(other, rig.queue) == 0

    await play(scenario)


async def test_unroutable_messages_return_before_the_unit_is_answered(play: Play) -> None:
    async def scenario(rig: Rig) -> None:
        unit = await rig.channel(tx=True)
        await commit(unit, publish(unit, rig.queue, b"back", flags=MANDATORY))
        (back,) = unit.returned
        assert back.body == b"back"
        assert isinstance(back.method, methods.BasicReturn)
        assert back.method.reply_code == 312

    await play(scenario)


async def test_an_exclusive_consumer_excludes_others(play: Play) -> None:
    async def scenario(rig: Rig) -> None:
        first, second = await rig.channel(), await rig.channel()
        await rig.declare(first)
        await first.call(methods.BasicConsume(rig.queue, b"", exclusive=True))
        error = await closed(second.call(methods.BasicConsume(rig.queue, b"", exclusive=True)))
        assert error.close.reply_code == 403

    await play(scenario)


async def test_a_purge_spares_unacknowledged_messages_which_return_to_the_head(play: Play) -> None:
    """Therefore the marker of a receipt queue survives every purge."""

    async def scenario(rig: Rig) -> None:
        unit, control = await rig.channel(tx=True), await rig.channel()
        await rig.declare(control)
        frames = [publish(unit, rig.queue, body, TRANSIENT) for body in (b"marker", b"one", b"two")]
        await commit(unit, b"".join(frames))
        got = await get(control, rig.queue)
        assert got is not None
        assert bytes(got[1].body) == b"marker"
        await control.call(methods.QueuePurge(rig.queue))
        await commit(unit, publish(unit, rig.queue, b"three", TRANSIENT))
        control.upstream.write(methods.BasicNack(got[0], requeue=True).frame(control.number))
        await control.call(methods.QueueDeclare(rig.queue, passive=True))
        async with asyncio.timeout(30):
            while await count(control, rig.queue) < 2:
                await asyncio.sleep(0.05)
        assert await bodies(control, rig.queue) == [b"marker", b"three"]

    await play(scenario)


async def test_a_restart_drops_transient_state_and_keeps_confirmed_messages(play: Play) -> None:
    async def scenario(rig: Rig) -> None:
        unit = await rig.channel(tx=True)
        await rig.declare(unit)
        kept = [b"%d" % number for number in range(5)]
        await commit(unit, b"".join([publish(unit, rig.queue, body) for body in kept]))
        await commit(unit, publish(unit, rig.queue, b"receipt", TRANSIENT))
        lock = f"{rig.queue.decode()}.lock"
        await unit.call(declare_lock(lock))
        await unit.send_raw(hold_lock(unit.number, lock), methods.BasicConsumeOk)
        await rig.restart()
        again = await rig.channel()
        assert not await consumers_of(lock.encode(), again.upstream)
        assert await bodies(again, rig.queue) == kept

    await play(scenario)


async def test_a_probe_is_judged_and_leaves_nothing(play: Play) -> None:
    async def scenario(rig: Rig) -> None:
        side, other = await rig.channel(tx=True), await rig.channel()
        await rig.declare(other)
        for _ in range(3):
            await side.send_raw(messages.probe(side.number, b"", rig.queue, 0, PERSISTENT), methods.TxRollbackOk)
        await commit(side)
        assert await count(other, rig.queue) == 0
        error = await closed(side.send_raw(methods.BasicAck(7).frame(side.number)))
        assert error.close.reply_code == 406

    await play(scenario)
