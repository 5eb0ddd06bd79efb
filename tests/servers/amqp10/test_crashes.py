"""dtx dies at the critical points of a discharge: the transaction is done completely or not at all."""

import contextlib
from collections.abc import Iterator
from typing import Final

import pytest
from pika import BasicProperties
from pika.adapters.blocking_connection import BlockingConnection
from pika.exceptions import AMQPError

from dtx.client import Coordinator, XAException, Xid
from dtx.failpoint import DIED, Point
from dtx.wire.amqp10 import message
from dtx.wire.amqp10.performatives import ACCEPTED, Declared, Discharge, Outcome, Rejected, Role, TransactionalState
from tests.servers.amqp10.raw import Raw
from tests.support.client import connected, new_xid, take_all
from tests.support.failpoints import ArmedService
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.rabbitmq import RabbitNode

OLD, NEW, BOTH = [b"old"], [b"new"], [b"new", b"old"]
QUEUE: Final = "amqp10-crashes"
DEAD: Final = f"{QUEUE}-dead"
"""The queue for its dead letters."""
ARGUMENTS: Final = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": DEAD}
STANDALONE_LOCAL: Final = {
    Point.HELD_CONSUME: OLD,
    Point.LOG_ONE_PHASE_BEFORE: OLD,
    Point.LOG_ONE_PHASE_AFTER: NEW,
    Point.SHOWN_AFTER: NEW,
    Point.REPLY_COMMIT_BEFORE: NEW,
    Point.REPLY_COMMIT_SENT: NEW,
}
"""The messages in the queue after the next start."""
ALONGSIDE_LOCAL: Final = {
    Point.HELD_CONSUME: OLD,
    Point.TAKING_ACKED: OLD,
    Point.TAKING_COMMITTED: NEW,
    Point.UNIT_SENT: NEW,
    Point.REPLY_COMMIT_BEFORE: NEW,
}
"""The same with a broker. If the receipt shows that the messages were taken, the commit continues."""
STANDALONE_DISTRIBUTED: Final = {
    Point.REPLY_END_SENT: OLD,
    Point.LOG_PREPARED_BEFORE: OLD,
    Point.LOG_PREPARED_AFTER: NEW,
    Point.REPLY_PREPARE_SENT: NEW,
}
"""The messages in the queue after the transaction manager has committed the branch, if it is prepared."""
ALONGSIDE_DISTRIBUTED: Final = {Point.REPLY_END_SENT: OLD, Point.TAKING_COMMITTED: NEW, Point.REPLY_PREPARE_SENT: NEW}


def cells(standalone: dict[Point, list[bytes]], alongside: dict[Point, list[bytes]]) -> pytest.MarkDecorator:
    """One test for each point, with the service of its mode."""
    found = [("standalone", *cell) for cell in standalone.items()] + [
        ("alongside", *cell) for cell in alongside.items()
    ]
    ids = [f"{mode}-{point.label}" for mode, point, _ in found]
    return pytest.mark.parametrize(("armed", "point", "left"), found, indirect=["armed"], ids=ids)


@pytest.fixture(scope="module")
def armed(request: pytest.FixtureRequest, postgres: PostgresServer) -> Iterator[ArmedService]:
    """A service of one mode. Each test starts it and lets it crash."""
    node: RabbitNode | None = request.getfixturevalue("shared_rabbitmq") if request.param == "alongside" else None
    database = postgres.create_database()
    options = () if node is None else ("--management", node.management_url)
    broker = None if node is None else node.url()
    with ArmedService(broker=broker, database=database, options=options, start=False) as service:
        yield service
    postgres.drop_database(database)
    if node is not None:
        with node.channel() as direct:
            direct.queue_delete(QUEUE)
            direct.queue_delete(DEAD)


def die_at(
    service: ArmedService, point: Point, xid: Xid | None, *, promoted: bool = False, outcome: Outcome = ACCEPTED
) -> None:
    """Consume *old* and publish *new* in a transaction, with a dtx that dies at *point*.

    Args:
        service: the dtx.
        point: where it dies.
        xid: the branch of the transaction; ``None``: the transaction is local.
        promoted: whether it is local at first, and then promoted.
        outcome: of *old*.
    """
    service.arming = ("--at", point.label, "--do", "die")
    service.start()
    with connected(service.url()) as connection:
        channel = connection.channel()
        channel.queue_delete(QUEUE)
        channel.queue_declare(QUEUE, durable=True, arguments=ARGUMENTS)
        channel.queue_declare(DEAD, durable=True)
        channel.queue_purge(DEAD)
        channel.confirm_delivery()
        channel.basic_publish("", QUEUE, b"old", BasicProperties(delivery_mode=2))
    with Raw(service) as raw, contextlib.suppress(OSError, AssertionError):
        session = raw.opened().begin()
        control, sender = raw.control(session), raw.sender(session, QUEUE)
        raw.receiver(session, QUEUE)
        got = raw.take()
        txn_id = raw.declare(session, control, None if xid is None or promoted else xid.to_wire())
        durable = message.head(message.Header(durable=True)) + message.data(b"new")
        sender.send(b"t", durable, state=TransactionalState(txn_id=txn_id), settled=True)
        state = TransactionalState(txn_id=txn_id, outcome=outcome)
        session.dispose(Role.RECEIVER, [got.delivery_id], state, settled=True)
        if promoted and xid is not None:
            assert raw.promote(session, control, txn_id, xid.to_wire()) == Declared(txn_id=txn_id)
        assert raw.ask(session, control, Discharge(txn_id=txn_id)) == ACCEPTED
        if xid is not None:
            with contextlib.suppress(AMQPError, XAException), connected(service.url()) as connection:
                Coordinator(connection).prepare(xid)
    assert service.wait() == DIED
    service.arming = ()
    service.start()


def whole(connection: BlockingConnection) -> list[bytes]:
    """The messages in the queue, when there is one: each outcome leaves one message."""
    channel = connection.channel()
    wait_until(lambda: channel.queue_declare(QUEUE, passive=True).method.message_count == 1)
    return take_all(channel, QUEUE)


@cells(STANDALONE_LOCAL, ALONGSIDE_LOCAL)
def test_a_local_transaction_is_atomic_in_a_crash(armed: ArmedService, point: Point, left: list[bytes]) -> None:
    die_at(armed, point, None)
    with connected(armed.url()) as connection:
        assert whole(connection) == left
        wait_until(lambda: not list(Coordinator(connection).recover()))
    armed.kill9()


@cells(STANDALONE_DISTRIBUTED, ALONGSIDE_DISTRIBUTED)
def test_a_branch_that_has_voted_is_there_and_no_other(armed: ArmedService, point: Point, left: list[bytes]) -> None:
    it_is_there_if_it_has_voted(armed, point, left)


@cells(
    {Point.REPLY_END_SENT: OLD, Point.LOG_PREPARED_AFTER: NEW}, {Point.REPLY_END_SENT: OLD, Point.TAKING_COMMITTED: NEW}
)
def test_a_promoted_transaction_survives_if_its_branch_has_voted(
    armed: ArmedService, point: Point, left: list[bytes]
) -> None:
    it_is_there_if_it_has_voted(armed, point, left, promoted=True)


def it_is_there_if_it_has_voted(
    armed: ArmedService, point: Point, left: list[bytes], *, promoted: bool = False
) -> None:
    """Let dtx die at *point*. The transaction manager commits the branch if it is prepared."""
    xid = new_xid()
    die_at(armed, point, xid, promoted=promoted)
    with connected(armed.url()) as connection:
        manager = Coordinator(connection)
        if left == NEW:
            wait_until(lambda: list(manager.recover()) == [xid])
            manager.commit(xid)
        assert whole(connection) == left
        wait_until(lambda: not list(manager.recover()))
    armed.kill9()


@cells(
    {Point.HELD_CONSUME: OLD, Point.LOG_PREPARED_BEFORE: OLD, Point.LOG_PREPARED_AFTER: NEW},
    {Point.REPLY_END_SENT: OLD, Point.LOG_PREPARED_AFTER: BOTH},
)
def test_a_rejected_message_is_dead_lettered_or_requeued_after_crash(
    armed: ArmedService, point: Point, left: list[bytes]
) -> None:
    """Without a broker, the dead letter is part of the branch. A broker gets the message back when dtx dies."""
    xid = new_xid()
    die_at(armed, point, xid, outcome=Rejected())
    with connected(armed.url()) as connection:
        channel, manager = connection.channel(), Coordinator(connection)
        if left != OLD:
            wait_until(lambda: list(manager.recover()) == [xid])
            manager.commit(xid)
        assert sorted(take_all(channel, QUEUE, at_least=len(left))) == left
        assert take_all(channel, DEAD) == ([] if b"old" in left else OLD)
        wait_until(lambda: not list(manager.recover()))
    armed.kill9()
