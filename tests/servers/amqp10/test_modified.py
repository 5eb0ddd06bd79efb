"""The outcome *modified*, and what a message says about its earlier deliveries."""

import secrets

import psycopg
import pytest
from pika import BasicProperties
from pika.adapters.blocking_connection import BlockingChannel

from dtx.wire.amqp09 import tables
from dtx.wire.amqp10 import message
from dtx.wire.amqp10.message import Message
from dtx.wire.amqp10.performatives import ACCEPTED, RELEASED, Modified, Outcome, Role, TransactionalState
from dtx.wire.amqp10.session import Session
from tests.servers.amqp10.raw import Raw
from tests.support.broker import only_alongside, only_standalone
from tests.support.client import connected
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.rabbitmq import RabbitNode
from tests.support.service import DtxService

_READ = "SELECT m.properties FROM dtx.message m JOIN dtx.queue q ON q.id = m.queue WHERE q.name = %s"
_SPOILED = "UPDATE dtx.message m SET properties = %s FROM dtx.queue q WHERE q.id = m.queue AND q.name = %s"
CHANGE = Modified(delivery_failed=True, message_annotations={"x-opt-why": "late", "x-opt-steps": ["a", {"b": "c"}]})


def taken(raw: Raw, session: Session, outcome: Outcome | TransactionalState) -> Message:
    """Receive the next message, and settle it with *outcome*."""
    found = raw.take()
    session.dispose(Role.RECEIVER, [found.delivery_id], outcome, settled=True)
    raw.flush()
    return message.read(found.payload)


def told(found: Message) -> tuple[bool, int]:
    """The fields first-acquirer and delivery-count of a message."""
    return found.header.first_acquirer, found.header.delivery_count


@only_standalone
def test_a_failed_delivery_counts_and_a_released_one_does_not(
    service: DtxService, channel: BlockingChannel, queue: str
) -> None:
    """3.4.4, 3.4.5, and 3.2.1: "on first delivery, the value is zero"."""
    channel.basic_publish("", queue, b"one")
    with Raw(service) as raw:
        session = raw.opened().begin()
        raw.receiver(session, queue, credit=10)
        assert told(taken(raw, session, RELEASED)) == (True, 0)
        assert told(taken(raw, session, CHANGE)) == (False, 0)
        assert told(taken(raw, session, Modified())) == (False, 1)
        assert told(taken(raw, session, Modified(delivery_failed=True))) == (False, 1)
        last = taken(raw, session, ACCEPTED)
        assert told(last) == (False, 2)
        assert last.message_annotations["x-opt-why"] == "late"
        assert last.message_annotations["x-opt-steps"] == ["a", {"b": "c"}]
        assert [bytes(octets) for octets in last.data or ()] == [b"one"]


@only_standalone
def test_modified_messages_have_their_old_places(service: DtxService, channel: BlockingChannel, queue: str) -> None:
    for number in range(200):
        channel.basic_publish("", queue, b"%03d" % number)
    with Raw(service) as raw:
        session = raw.opened().begin()
        link, _ = raw.receiver(session, queue, credit=100)
        found = [raw.take() for _ in range(100)]
        session.dispose(Role.RECEIVER, [one.delivery_id for one in found], CHANGE, settled=False)
        raw.until(lambda: not session.incoming)
        raw.detach(session, link)
        raw.receiver(session, queue, credit=200, name="again")
        again = [taken(raw, session, ACCEPTED) for _ in range(200)]
        assert [b"".join(one.data or ()) for one in again] == [b"%03d" % number for number in range(200)]
        assert [told(one) for one in again] == [(False, 1)] * 100 + [(True, 0)] * 100


@only_standalone
def test_an_undeliverable_message_is_dead_lettered_with_its_annotations(
    service: DtxService, channel: BlockingChannel, queue: str
) -> None:
    grave = f"{queue}-grave"
    channel.queue_declare(grave, durable=True)
    dying = f"{queue}-dying"
    letters = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": grave}
    channel.queue_declare(dying, durable=True, arguments=letters)
    channel.basic_publish("", dying, b"bad")
    with Raw(service) as raw:
        session = raw.opened().begin()
        raw.receiver(session, dying, name="dying")
        change = Modified(delivery_failed=True, undeliverable_here=True, message_annotations={"x-opt-why": "no such"})
        taken(raw, session, change)
        raw.receiver(session, grave, name="grave")
        letter = taken(raw, session, ACCEPTED)
        assert (letter.message_annotations["x-opt-why"], told(letter)) == ("no such", (True, 0))
        assert letter.message_annotations["x-death"][0]["reason"] == "rejected"
    for name in (grave, dying):
        channel.queue_delete(name)


@only_standalone
def test_a_change_is_made_when_its_transaction_is_committed(
    service: DtxService, channel: BlockingChannel, queue: str
) -> None:
    channel.basic_publish("", queue, b"one")
    with Raw(service) as raw:
        session = raw.opened().begin()
        control = raw.control(session)
        raw.receiver(session, queue, credit=10)
        for fail, expected in ((True, 0), (False, 0), (False, 1)):
            txn_id = raw.declare(session, control)
            found = taken(raw, session, TransactionalState(txn_id=txn_id, outcome=CHANGE))
            assert found.header.delivery_count == expected
            assert raw.discharge(session, control, txn_id, fail=fail) == ACCEPTED
        assert told(taken(raw, session, ACCEPTED)) == (False, 2)


@only_standalone
def test_a_modified_outcome_is_settled_when_it_is_durable(
    service: DtxService, channel: BlockingChannel, queue: str
) -> None:
    """An unsettled *modified* is settled when the change is written. Only then can the message be delivered again."""
    channel.basic_publish("", queue, b"one")
    with Raw(service) as raw, connected(service.url()) as other:
        session = raw.opened().begin()
        raw.receiver(session, queue, credit=1)
        found = raw.take()
        session.dispose(Role.RECEIVER, [found.delivery_id], CHANGE, settled=False)
        raw.until(lambda: found.delivery_id not in session.incoming)
        _, properties, body = other.channel().basic_get(queue, auto_ack=True)
        assert (body, properties.headers["x-delivery-count"], properties.headers["x-opt-why"]) == (b"one", 1, "late")


def test_a_change_survives_the_death_of_dtx(postgres: PostgresServer) -> None:
    database = postgres.create_database()
    with DtxService(database=database) as service:
        with connected(service.url()) as connection, Raw(service) as raw:
            channel = connection.channel()
            channel.queue_declare("q", durable=True)
            channel.basic_publish("", "q", b"one", BasicProperties(delivery_mode=2))
            session = raw.opened().begin()
            raw.receiver(session, "q", credit=1)
            found = raw.take()
            session.dispose(Role.RECEIVER, [found.delivery_id], CHANGE, settled=False)
            raw.until(lambda: found.delivery_id not in session.incoming)
            service.kill9()
        service.start()
        with Raw(service) as raw:
            session = raw.opened().begin()
            raw.receiver(session, "q", credit=1)
            again = taken(raw, session, ACCEPTED)
            assert (told(again), again.message_annotations["x-opt-why"]) == ((False, 1), "late")
    postgres.drop_database(database)


@only_alongside
@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_a_broker_gets_no_modification_but_counts_deliveries_itself(
    service: DtxService, channel: BlockingChannel, kind: str
) -> None:
    """AMQP 0-9-1 has only basic.nack, which carries no change. A quorum queue counts returned messages itself."""
    name = f"amqp10-{secrets.token_hex(6)}"
    channel.queue_declare(name, durable=True, arguments={"x-queue-type": kind})
    channel.basic_publish("", name, b"one")
    with Raw(service) as raw:
        session = raw.opened().begin()
        raw.receiver(session, name, credit=1)
        assert told(taken(raw, session, CHANGE)) == (True, 0)
        raw.receiver(session, name, credit=1, name="again")
        again = taken(raw, session, ACCEPTED)
        assert told(again) == (False, 1 if kind == "quorum" else 0)
        assert "x-opt-why" not in again.message_annotations
    wait_until(lambda: channel.queue_declare(name, passive=True).method.message_count == 0)
    channel.queue_delete(name)


def test_an_unreadable_modified_message_returns_unchanged(small: DtxService, postgres: PostgresServer) -> None:
    """After damage to the database, the delivery is not stuck, and dtx settles it for the client that waits."""
    name = f"amqp10-{secrets.token_hex(6)}"
    with connected(small.url()) as connection, Raw(small) as raw:
        channel = connection.channel()
        channel.queue_declare(name, durable=True)
        channel.basic_publish("", name, b"one", BasicProperties(delivery_mode=2, headers={"a": "b"}))
        session = raw.opened().begin()
        raw.receiver(session, name, credit=1)
        found = raw.take()
        assert small.database is not None
        with psycopg.connect(small.database) as database:
            (kept,) = database.execute(_READ, (name.encode(),)).fetchone() or (b"",)
            database.execute(_SPOILED, (kept[:-1], name.encode()))
        session.dispose(Role.RECEIVER, [found.delivery_id], CHANGE, settled=False)
        raw.until(lambda: found.delivery_id not in session.incoming)
        assert channel.queue_declare(name, passive=True).method.message_count == 1
        again, _ = raw.receiver(session, name, credit=1, name="again")
        error = raw.detached(again)
        assert error is not None
        assert error.condition == "amqp:decode-error"
        assert channel.queue_declare(name, passive=True).method.message_count == 1
        channel.queue_delete(name)


@only_alongside
def test_an_unreadable_message_of_the_broker_ends_only_its_link(
    service: DtxService, queue: str, channel: BlockingChannel, shared_rabbitmq: RabbitNode
) -> None:
    """RabbitMQ accepts tables that are nested deeper than dtx reads. The message stays in its queue."""
    nested: dict[str, object] = {}
    for _ in range(2 * tables.MAX_DEPTH):
        nested = {"d": nested}
    with connected(shared_rabbitmq.url()) as direct, Raw(service) as raw:
        direct.channel().basic_publish("", queue, b"deep", BasicProperties(headers=nested))
        session = raw.opened().begin()
        link, _ = raw.receiver(session, queue, credit=1)
        error = raw.detached(link)
        assert error is not None
        assert error.condition == "amqp:decode-error"
        assert raw.sender(session, queue, name="others go on").credit
    wait_until(lambda: channel.queue_declare(queue, passive=True).method.message_count == 1)
