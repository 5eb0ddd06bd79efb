"""The marker of a receipt queue shows that the broker has lost no receipts, so dtx must never lose the marker."""

import asyncio
import contextlib
from dataclasses import replace
from typing import cast
from uuid import uuid4

import pytest

from dtx.log.records import Unit
from dtx.store.rabbitmq import messages
from dtx.store.rabbitmq.identity import CLASSIC, GENERATIONS, BrokerIdentity, consumers_of, receipt_queues, stem_of
from dtx.store.rabbitmq.receipts import Receipts
from dtx.store.rabbitmq.service import Broker, ServiceConnection
from dtx.store.rabbitmq.upstream import Answer, OwnChannel, UpstreamLost
from dtx.wire.amqp09 import methods, tables
from dtx.wire.amqp09.codec import Method
from tests.support.branches import new_identity
from tests.support.rabbitmq import RabbitNode


class Purging(OwnChannel):
    """A channel whose calls stop after the first purge of a queue, until the connection is lost."""

    purged: asyncio.Event

    def send_raw(self, frames: bytes, *answers: type[Method]) -> "asyncio.Future[Answer]":
        future = super().send_raw(frames, *answers)
        return asyncio.ensure_future(self._stop(future)) if methods.QueuePurgeOk in answers else future

    async def _stop(self, future: "asyncio.Future[Answer]") -> Answer:
        answer = await future
        self.purged.set()
        await asyncio.shield(cast("ServiceConnection", self.upstream).lost)
        return answer


async def connected(rabbitmq: RabbitNode) -> ServiceConnection:
    connection = ServiceConnection(Broker.from_url(rabbitmq.url()), "markers")
    await connection.login("/")
    return connection


async def made(connection: ServiceConnection, identity: BrokerIdentity) -> Receipts:
    receipts = Receipts(identity)
    await receipts.declare(await OwnChannel(connection).open())
    await receipts.find_or_set_marker(connection)
    return receipts


def commit(channel: OwnChannel) -> bytes:
    return methods.TxCommit().frame(channel.number)


async def leave(receipts: Receipts, channel: OwnChannel) -> Unit:
    """A unit that was committed and left its receipt. The log knows the outcome."""
    unit = Unit(number=0, lock="", nonce=uuid4(), incarnation=receipts.incarnation)
    frames = messages.receipt(channel.number, receipts.use(unit), messages.receipt_body(uuid4(), unit))
    await channel.send_raw(frames + commit(channel), methods.TxCommitOk)
    receipts.logged(unit)
    return unit


async def tx(connection: ServiceConnection) -> OwnChannel:
    channel = await OwnChannel(connection).open()
    await channel.call(methods.TxSelect())
    return channel


async def test_an_interrupted_purge_hides_no_marker_from_a_successor(
    rabbitmq: RabbitNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker has not restarted, so it must not seem to have lost receipts. It may notice the end of a connection
    later than dtx does.
    """
    identity = new_identity("markers")
    first = await connected(rabbitmq)
    receipts = await made(first, identity)
    control = await OwnChannel(first).open()
    await receipts.switch_generation(control)  # what a predecessor may have left is gone
    await leave(receipts, await tx(first))
    with monkeypatch.context() as patched:
        patched.setattr(Purging, "purged", asyncio.Event(), raising=False)
        patched.setattr("dtx.store.rabbitmq.receipts.OwnChannel", Purging)
        turns = asyncio.create_task(turn_on(receipts, await Purging(first).open()))
        async with asyncio.timeout(30):
            await Purging.purged.wait()
    second = await connected(rabbitmq)
    successor = asyncio.create_task(made(second, identity))
    assert not (await asyncio.wait([successor], timeout=1))[0], "it looked while the marker was missing"
    first.abort("cut off by the test")
    async with asyncio.timeout(30):
        assert (await successor).incarnation == receipts.incarnation
        with contextlib.suppress(UpstreamLost):
            await turns
    second.end("the test is over")


async def turn_on(receipts: Receipts, control: OwnChannel) -> None:
    for _ in range(GENERATIONS):
        await receipts.switch_generation(control)


async def test_receipts_read_by_another_connection_are_purged_later(rabbitmq: RabbitNode) -> None:
    """A scan holds the messages that it reads. A purge would leave these receipts, and move the marker."""
    identity = new_identity("markers")
    connection = await connected(rabbitmq)
    receipts = await made(connection, identity)
    control = await OwnChannel(connection).open()
    await receipts.switch_generation(control)
    unit = await leave(receipts, await tx(connection))
    other = await connected(rabbitmq)
    for queue in receipts.queues:
        channel = await OwnChannel(other).open()
        await channel.call(methods.BasicConsume(queue, b"", exclusive=True))
    await turn_on(receipts, control)
    other.end("it has seen all")
    async with asyncio.timeout(30):
        found = await receipts.left_by(identity.new_lock(), connection)
        assert found.nonces == {unit.nonce}
        await turn_on(receipts, control)
        found = await receipts.left_by(identity.new_lock(), connection)
    assert found.nonces == frozenset()
    assert found.markers == {receipts.incarnation}
    connection.end("the test is over")


async def test_obsolete_receipts_are_purged_and_the_marker_stays(rabbitmq: RabbitNode) -> None:
    identity = new_identity("markers")
    connection = await connected(rabbitmq)
    receipts = await made(connection, identity)
    control, units = await OwnChannel(connection).open(), await tx(connection)
    left = []
    for _ in range(3 * GENERATIONS):
        left.append(await leave(receipts, units))
        await receipts.switch_generation(control)
    found = await receipts.left_by(identity.new_lock(), connection)
    assert found.markers == {receipts.incarnation}
    assert found.nonces <= {unit.nonce for unit in left[-2:]}
    connection.end("the test is over")


async def test_receipts_before_the_marker_are_purged_too(rabbitmq: RabbitNode) -> None:
    """The marker is not the first message, so it is replaced."""
    identity = new_identity("markers")
    connection = await connected(rabbitmq)
    receipts = Receipts(identity)
    control, units = await OwnChannel(connection).open(), await tx(connection)
    await receipts.declare(control)
    stray = await leave(receipts, units)
    await receipts.find_or_set_marker(connection)
    for _ in range(2):
        await leave(receipts, units)
        await receipts.switch_generation(control)
    found = await receipts.left_by(identity.new_lock(), connection)
    assert stray.nonce not in found.nonces
    assert found.markers == {receipts.incarnation}
    connection.end("the test is over")


@pytest.mark.parametrize("lock", ["dtx.lock.{rm}.8e6ee9d7", "dtx.lock.{stem}.8e6ee9d7"], ids=["older", "this"])
async def test_a_predecessors_receipts_are_deleted_when_they_are_logged(rabbitmq: RabbitNode, lock: str) -> None:
    """An older version named its queues after the resource manager only. Their receipts count once."""
    identity = new_identity("markers")
    predecessor = replace(identity, instance=uuid4())
    lock = lock.format(rm=identity.rm, stem=predecessor.stem)
    connection = await connected(rabbitmq)
    control, units = await OwnChannel(connection).open(), await tx(connection)
    unit = Unit(number=0, lock=lock, nonce=uuid4(), incarnation="theirs")
    for queue in receipt_queues(stem_of(lock)):
        await control.call(methods.QueueDeclare(queue, durable=True, arguments=CLASSIC))
        left = messages.receipt(units.number, queue, b"marker:theirs")
        await units.send_raw(left + commit(units), methods.TxCommitOk)
    left = messages.receipt(units.number, queue, messages.receipt_body(uuid4(), unit))
    await units.send_raw(left + commit(units), methods.TxCommitOk)

    receipts = await made(connection, identity)
    receipts.expect(unit)
    await receipts.switch_generation(control)
    found = await receipts.left_by(lock, connection)
    assert found.nonces == {unit.nonce}
    assert found.markers == {"theirs"}
    receipts.logged(unit)
    await receipts.switch_generation(control)
    assert [await consumers_of(queue, connection) for queue in receipt_queues(stem_of(lock))] == [None] * GENERATIONS
    assert (await receipts.left_by(identity.new_lock(), connection)).markers == {receipts.incarnation}
    connection.end("the test is over")


async def test_receipt_queues_that_are_gone_prove_nothing(rabbitmq: RabbitNode) -> None:
    identity = new_identity("markers")
    connection = await connected(rabbitmq)
    receipts = await made(connection, identity)
    found = await receipts.left_by(replace(identity, instance=uuid4()).new_lock(), connection)
    assert not found.nonces
    assert not found.markers
    connection.end("the test is over")


async def test_a_predecessors_queues_are_renewed_while_a_unit_is_open(
    rabbitmq: RabbitNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = await connected(rabbitmq)
    short = CLASSIC + tables.entry(b"x-expires", b"I", (1500).to_bytes(4, "big"))
    monkeypatch.setattr("dtx.store.rabbitmq.receipts._ARGUMENTS", short)
    open_one, closed_one = new_identity("markers"), new_identity("markers")
    for identity in (open_one, closed_one):
        await made(connection, identity)
    successor = Receipts(new_identity("markers"))
    unit = Unit(number=0, lock=open_one.new_lock(), nonce=uuid4(), incarnation="")
    successor.expect(unit)
    async with asyncio.timeout(30):
        while await consumers_of(receipt_queues(closed_one.stem)[0], connection) is not None:
            for _ in range(4):  # a check renews the checked queue too, so it must be rare
                await asyncio.sleep(0.6)
                await successor.renew_inherited(connection)
    assert [await consumers_of(queue, connection) for queue in receipt_queues(open_one.stem)] == [0] * GENERATIONS
    connection.end("the test is over")
