"""Standalone mode: what clients get if the database refuses writes (a full disk), waits, or is slow."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.exceptions import ChannelClosedByBroker, NackError

from dtx.client import XAER_RMERR, XAER_RMFAIL, Coordinator, XaFlag
from dtx.wire.amqp09 import methods
from tests.support.client import connected, take_all
from tests.support.crash import PERSISTENT, work
from tests.support.database_faults import Lock, refusing
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.raw import session
from tests.support.service import DtxService

REFUSED = "NEW.body = 'refused'"


@pytest.fixture(scope="module")
def service(postgres: PostgresServer) -> Iterator[DtxService]:
    database = postgres.create_migrated_database()
    with DtxService(database=database) as service:
        yield service
    postgres.drop_database(database)


@pytest.fixture
def database(service: DtxService) -> str:
    assert service.database is not None
    return service.database


@pytest.fixture
def connection(service: DtxService) -> Iterator[BlockingConnection]:
    with connected(service.url()) as connection:
        yield connection


@pytest.fixture
def queue(connection: BlockingConnection) -> Iterator[str]:
    """A durable queue."""
    channel = connection.channel()
    channel.queue_declare("q", durable=True)
    yield "q"
    connection.channel().queue_delete("q")


def fill(connection: BlockingConnection, queue: str, *bodies: bytes) -> BlockingChannel:
    """Publish with confirms; returns the channel."""
    channel = connection.channel()
    channel.confirm_delivery()
    for body in bodies:
        channel.basic_publish("", queue, body, PERSISTENT)
    return channel


# -- outside of branches ----------------------------------------------------------------------------------------------


def test_a_refused_publish_is_not_confirmed(connection: BlockingConnection, database: str, queue: str) -> None:
    channel = connection.channel()
    channel.confirm_delivery()
    with refusing(database, "message", when=REFUSED):
        with pytest.raises(NackError):
            channel.basic_publish("", queue, b"refused", PERSISTENT)
        channel.basic_publish("", queue, b"taken", PERSISTENT)
    assert take_all(connection.channel(), queue) == [b"taken"]


def test_a_channel_without_confirms_is_closed(connection: BlockingConnection, database: str, queue: str) -> None:
    channel = connection.channel()
    with refusing(database, "message", when=REFUSED):
        channel.basic_publish("", queue, b"refused", PERSISTENT)
        with pytest.raises(ChannelClosedByBroker) as closed:
            channel.queue_declare(queue, passive=True)
    assert closed.value.reply_code == 541
    assert take_all(connection.channel(), queue) == []


def test_a_transaction_that_is_refused_gives_everything_back(
    connection: BlockingConnection, database: str, queue: str
) -> None:
    """Messages acknowledged, rejected and requeued within class tx are in their places again; none is added."""
    fill(connection, queue, b"acked", b"rejected", b"requeued", b"untouched")
    channel = connection.channel()
    channel.tx_select()
    tags = []
    for _ in range(3):
        method, _, _ = channel.basic_get(queue)
        assert method is not None
        tags.append(method.delivery_tag)
    channel.basic_ack(tags[0])
    channel.basic_reject(tags[1], requeue=False)
    channel.basic_reject(tags[2], requeue=True)
    channel.basic_publish("", queue, b"refused", PERSISTENT)
    with refusing(database, "message", when=REFUSED), pytest.raises(ChannelClosedByBroker) as closed:
        channel.tx_commit()
    assert closed.value.reply_code == 541
    look = connection.channel()
    wait_until(lambda: look.queue_declare(queue, passive=True).method.message_count == 4, what="all four messages")
    assert take_all(connection.channel(), queue) == [b"acked", b"rejected", b"requeued", b"untouched"]


def test_dead_letters_wait_for_a_database_that_refuses_them(connection: BlockingConnection, database: str) -> None:
    """Each message is always in exactly one of the two queues."""
    channel = connection.channel()
    channel.queue_declare("dead", durable=True)
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
    channel.queue_declare("dying", durable=True, arguments=arguments)
    fill(connection, "dying", b"1", b"2")
    with refusing(database, "message"):
        for _ in range(2):
            method, _, _ = channel.basic_get("dying")
            assert method is not None
            channel.basic_reject(method.delivery_tag, requeue=False)
        assert take_all(connection.channel(), "dead") == []
    wait_until(lambda: channel.queue_declare("dead", passive=True).method.message_count == 2, what="both letters")
    assert take_all(connection.channel(), "dead") == [b"1", b"2"]
    assert take_all(connection.channel(), "dying") == []


# -- branches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one_phase", [False, True], ids=["prepare", "one-phase"])
def test_a_branch_that_is_refused_may_be_tried_again(
    connection: BlockingConnection, database: str, queue: str, one_phase: bool
) -> None:
    fill(connection, queue, b"in")
    xa, xid = work(connection.channel(), publish={queue: [b"refused", b"out"]}, consume={queue: 1})
    with Coordinator(connection) as coordinator:

        def act() -> XaFlag:
            return coordinator.commit(xid, one_phase=True) if one_phase else coordinator.prepare(xid)

        with refusing(database, "message", when=REFUSED), pytest.raises((XAER_RMERR, XAER_RMFAIL)) as refusal:
            act()
        assert refusal.value.reply_code == 541
        assert xa.channel.queue_declare(queue, passive=True).method.message_count == 0
        assert act() is XaFlag.OK
        if not one_phase:
            assert coordinator.commit(xid) is XaFlag.OK
    assert take_all(connection.channel(), queue) == [b"refused", b"out"]


@pytest.mark.parametrize("commits", [True, False], ids=["commit", "rollback"])
def test_a_decision_that_is_refused_may_be_repeated(
    connection: BlockingConnection, database: str, queue: str, commits: bool
) -> None:
    """541: "the outcome is not known, try again"; no message has moved meanwhile."""
    fill(connection, queue, b"in")
    xa, xid = work(connection.channel(), publish={queue: [b"out"]}, consume={queue: 1})
    assert xa.prepare(xid) is XaFlag.OK
    with Coordinator(connection) as coordinator:
        complete: Callable[..., XaFlag] = coordinator.commit if commits else coordinator.rollback
        with refusing(database, "branch", "DELETE"):
            with pytest.raises(XAER_RMFAIL):
                complete(xid)
            assert list(coordinator.recover()) == [xid]
            assert xa.channel.queue_declare(queue, passive=True).method.message_count == 0
        assert complete(xid) is XaFlag.OK
    assert take_all(connection.channel(), queue) == [b"out" if commits else b"in"]


# -- topology ---------------------------------------------------------------------------------------------------------


def test_a_refused_queue_is_refused_to_every_client(
    connection: BlockingConnection, service: DtxService, database: str
) -> None:
    """After a 541 the next declarations get 541 too, and the queue takes no messages."""
    with refusing(database, "queue"):
        for passive in (False, False, True):
            with pytest.raises(ChannelClosedByBroker) as closed:
                connection.channel().queue_declare("late", durable=not passive, passive=passive)
            assert closed.value.reply_code == 541
        publisher = connection.channel()
        publisher.confirm_delivery()
        with pytest.raises(NackError):
            publisher.basic_publish("", "late", b"early", PERSISTENT)

    def declared() -> bool:
        with contextlib.suppress(ChannelClosedByBroker):
            connection.channel().queue_declare("late", durable=True)
            return True
        return False

    wait_until(declared, what="the queue")
    fill(connection, "late", b"on time")
    service.restart()
    with connected(service.url()) as anew:
        assert take_all(anew.channel(), "late") == [b"on time"]


NEW_QUEUE = methods.QueueDeclare(b"new", durable=True).encode()
NEW_EXCHANGE = methods.ExchangeDeclare(b"x", b"direct", durable=True).encode()
BIND = methods.QueueBind(b"new", b"amq.direct", b"k").encode()
UNBIND = methods.QueueUnbind.HEAD + bytes(2) + b"\x03new\x0aamq.direct\x01k" + bytes(4)
DELETE_EXCHANGE = methods.ExchangeDelete.HEAD + bytes(2) + b"\x01x\x00"
DELETE = methods.QueueDelete(b"new").encode()


@pytest.mark.parametrize(
    ("before", "first", "second", "table"),
    [
        ((), NEW_QUEUE, NEW_QUEUE, "queue"),
        ((), NEW_QUEUE, methods.QueueDeclare(b"new", passive=True).encode(), "queue"),
        ((DELETE_EXCHANGE,), NEW_EXCHANGE, NEW_EXCHANGE, "exchange"),
        ((DELETE_EXCHANGE,), NEW_EXCHANGE, methods.ExchangeDeclare(b"x", b"", passive=True).encode(), "exchange"),
        ((NEW_QUEUE,), BIND, BIND, "binding"),
        ((NEW_QUEUE, BIND), UNBIND, UNBIND, "binding"),
        ((NEW_QUEUE,), DELETE, DELETE, "queue"),
    ],
    ids=["queue", "passive queue", "exchange", "passive exchange", "bind", "unbind", "delete"],
)
def test_a_repeated_declaration_is_answered_only_when_durable(
    service: DtxService, database: str, before: tuple[bytes, ...], first: bytes, second: bytes, table: str
) -> None:
    with session(service.url()) as one, session(service.url()) as other:
        one.open(1)
        other.open(1)
        other.open(2)
        for payload in before:
            one.say(1, payload)
            one.next_method(1)
        with Lock(database, table) as lock:
            one.say(1, first)
            lock.wait_felt()
            other.say(1, second)
            other.say(2, methods.BasicGet(b"none").encode())
            assert other.refused(2).code == 404  # everything before it has been handled
            assert other.unheard(1) == 0
        answers = [one.next_method(1), other.next_method(1)]
        assert [answer[:4] for answer in answers] == [(int.from_bytes(first[:4], "big") + 1).to_bytes(4, "big")] * 2
        one.say(1, DELETE)
        one.read_method(1, methods.QueueDeleteOk.KEY)
