"""dtx dies at the instants that matter to a discharge: what was done is done as a whole, and never half."""

import contextlib
from collections.abc import Iterator
from typing import Final

import pytest
from pika import BasicProperties
from pika.exceptions import AMQPError

from dtx.client import Coordinator, XAException, Xid
from dtx.failpoint import DIED, Point
from dtx.wire.amqp10 import message
from dtx.wire.amqp10.performatives import Role
from dtx.wire.amqp10.states import ACCEPTED, TransactionalState
from dtx.wire.amqp10.terminus import Discharge
from tests.integration.amqp10.raw import Raw
from tests.support.client import connected, new_xid, take_all
from tests.support.failpoints import ArmedService
from tests.support.postgres import PostgresServer

OLD, NEW = [b"old"], [b"new"]
LOCAL: Final = {
    Point.HELD_CONSUME: OLD,
    Point.LOG_ONE_PHASE_BEFORE: OLD,
    Point.LOG_ONE_PHASE_AFTER: NEW,
    Point.SHOWN_AFTER: NEW,
    Point.REPLY_COMMIT_BEFORE: NEW,
    Point.REPLY_COMMIT_SENT: NEW,
}
"""What is in the queue after the next start."""
DISTRIBUTED: Final = {
    Point.REPLY_END_SENT: OLD,
    Point.LOG_PREPARED_BEFORE: OLD,
    Point.LOG_PREPARED_AFTER: NEW,
    Point.REPLY_PREPARE_SENT: NEW,
}
"""The same where the transaction manager commits what has voted."""


@pytest.fixture(scope="module")
def armed(postgres: PostgresServer) -> Iterator[ArmedService]:
    """A service for one crash after the other."""
    database = postgres.create_database()
    with ArmedService(database=database, start=False) as service:
        yield service
    postgres.drop_database(database)


def die_at(service: ArmedService, point: Point, xid: Xid | None) -> None:
    """Consume *old* and publish *new* in a transaction, with a dtx that dies at *point*."""
    service.arming = ("--at", point.label, "--do", "die")
    service.start()
    with connected(service.url()) as connection:
        channel = connection.channel()
        channel.queue_delete("q")
        channel.queue_declare("q", durable=True)
        channel.confirm_delivery()
        channel.basic_publish("", "q", b"old", BasicProperties(delivery_mode=2))
    with Raw(service) as raw, contextlib.suppress(OSError, AssertionError):
        session = raw.opened().begin()
        control, sender = raw.control(session), raw.sender(session, "q")
        raw.receiver(session, "q")
        got = raw.take()
        txn_id = raw.declare(session, control, None if xid is None else xid.to_wire())
        durable = message.head(message.Header(durable=True)) + message.data(b"new")
        sender.send(b"t", durable, state=TransactionalState(txn_id=txn_id), settled=True)
        state = TransactionalState(txn_id=txn_id, outcome=ACCEPTED)
        session.dispose(Role.RECEIVER, [got.delivery_id], state, settled=True)
        assert raw.ask(session, control, Discharge(txn_id=txn_id)) == ACCEPTED
        if xid is not None:
            with contextlib.suppress(AMQPError, XAException), connected(service.url()) as connection:
                Coordinator(connection).prepare(xid)
    assert service.wait() == DIED
    service.arming = ()
    service.start()


@pytest.mark.parametrize("point", LOCAL, ids=lambda point: point.label)
def test_a_local_transaction_is_done_as_a_whole_or_not_at_all(armed: ArmedService, point: Point) -> None:
    die_at(armed, point, None)
    with connected(armed.url()) as connection:
        assert take_all(connection.channel(), "q") == LOCAL[point]
        assert list(Coordinator(connection).recover()) == []
    armed.kill9()


@pytest.mark.parametrize("point", DISTRIBUTED, ids=lambda point: point.label)
def test_a_branch_that_has_voted_is_there_and_no_other(armed: ArmedService, point: Point) -> None:
    xid = new_xid()
    die_at(armed, point, xid)
    with connected(armed.url()) as connection:
        manager = Coordinator(connection)
        voted = list(manager.recover())
        assert voted == ([xid] if DISTRIBUTED[point] == NEW else [])
        for each in voted:
            manager.commit(each)
        assert take_all(connection.channel(), "q") == DISTRIBUTED[point]
    armed.kill9()
