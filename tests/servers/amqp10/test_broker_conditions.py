"""Memory alarms and streams of a broker, for clients of AMQP 1.0."""

import contextlib
import secrets
from collections.abc import Iterator
from typing import Final, cast

import pytest
from pika import BasicProperties
from pika.adapters.blocking_connection import BlockingChannel

from dtx.wire.amqp10 import message
from dtx.wire.amqp10.endpoint import Attached, Disposed
from dtx.wire.amqp10.performatives import (
    ACCEPTED,
    RELEASED,
    Discharge,
    Error,
    Modified,
    Outcome,
    Rejected,
    Role,
    Source,
    Target,
    TransactionalState,
)
from dtx.wire.amqp10.values import Described, Symbol, ULong
from tests.conftest import ServiceFactory
from tests.servers.amqp10.raw import Raw, body
from tests.support.broker import only_alongside
from tests.support.client import take_all
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.proton import Client, Message, proton
from tests.support.rabbitmq import RabbitNode
from tests.support.service import DtxService

FIRST: Final = {"offset": Described(Symbol("rabbitmq:stream-offset-spec"), "first")}
"""Reads from the start, for tests that do not wait until the broker has begun to read."""


@contextlib.contextmanager
def alarm(service: DtxService, node: RabbitNode) -> Iterator[None]:
    """A memory alarm of the broker that dtx has noticed."""

    def told() -> int:
        return service.log_path.read_bytes().count(b"the broker takes no publishes")

    before = told()
    node.memory_alarm(on=True)
    try:
        wait_until(lambda: told() > before, what="the alarm in the log of dtx")
        yield
    finally:
        node.memory_alarm(on=False)


@only_alongside
def test_a_posting_waits_for_the_end_of_a_memory_alarm(
    service: DtxService, rabbitmq: RabbitNode, channel: BlockingChannel, queue: str
) -> None:
    with Raw(service) as raw, Raw(service) as other:
        session = raw.opened().begin()
        raw.control(session)  # dtx learns of alarms on connections that publish
        link = raw.sender(session, queue)
        assert raw.outcome(session, raw.post(link, b"before")) == ACCEPTED
        consuming = other.opened().begin()
        with alarm(service, rabbitmq):
            waiting = raw.post(link, b"meanwhile")
            raw.flush()
            other.receiver(consuming, queue, credit=10)
            taken = other.take()  # a client that does not publish is not blocked
            consuming.dispose(Role.RECEIVER, [taken.delivery_id], ACCEPTED, settled=False)
            other.until(lambda: taken.delivery_id not in consuming.incoming)
            assert body(taken) == b"before"
            assert not any(isinstance(event, Disposed) for event in raw.events)
        assert raw.outcome(session, waiting) == ACCEPTED
        assert body(other.take()) == b"meanwhile"


@only_alongside
def test_a_publishing_transaction_waits_for_the_end_of_an_alarm(
    service: DtxService, rabbitmq: RabbitNode, channel: BlockingChannel, queue: str
) -> None:
    with Raw(service) as raw:
        session = raw.opened().begin()
        control = raw.control(session)
        link = raw.sender(session, queue)
        txn_id = raw.declare(session, control)
        raw.outcome(session, raw.post(link, b"once", txn_id))
        with alarm(service, rabbitmq):
            number = control.send(b"request", message.value(Discharge(txn_id=txn_id)))
            raw.flush()
            wait_until(lambda: "committing" in service.run("in-doubt", "--json").stdout, what="the decision")
            assert channel.queue_declare(queue, passive=True).method.message_count == 0
        assert raw.outcome(session, number) == ACCEPTED
    assert take_all(channel, queue) == [b"once"]


@only_alongside
def test_a_transaction_that_consumes_needs_no_publish(
    service: DtxService, rabbitmq: RabbitNode, channel: BlockingChannel, queue: str
) -> None:
    channel.basic_publish("", queue, b"one", BasicProperties(delivery_mode=2))
    with Raw(service) as raw:
        session = raw.opened().begin()
        control = raw.control(session)
        raw.receiver(session, queue)
        taken = raw.take()
        txn_id = raw.declare(session, control)
        with alarm(service, rabbitmq):
            state = TransactionalState(txn_id=txn_id, outcome=ACCEPTED)
            session.dispose(Role.RECEIVER, [taken.delivery_id], state, settled=True)
            assert raw.discharge(session, control, txn_id) == ACCEPTED
    assert take_all(channel, queue, at_least=0) == []


@only_alongside
def test_a_session_ended_during_an_alarm_returns_its_messages(
    service: DtxService, rabbitmq: RabbitNode, channel: BlockingChannel, queue: str
) -> None:
    """The end is answered at once. The broker reads the rest after the alarm: each message is back once, and nothing
    of what was posted is published.
    """
    for name in (b"one", b"two", b"three"):
        channel.basic_publish("", queue, name, BasicProperties(delivery_mode=2))
    with Raw(service) as raw, Raw(service) as other:
        session, mine = raw.opened().begin(), other.opened().begin()
        control, link = raw.control(session), raw.sender(session, queue)
        raw.receiver(session, queue, credit=2)
        taken = [raw.take(), raw.take()]
        local, other_one = raw.declare(session, control), raw.declare(session, control)
        raw.outcome(session, raw.post(link, b"lost", local))
        with alarm(service, rabbitmq):
            raw.post(link, b"lost, too", other_one)
            for one, txn_id in zip(taken, (local, other_one), strict=True):
                state = TransactionalState(txn_id=txn_id, outcome=ACCEPTED)
                session.dispose(Role.RECEIVER, [one.delivery_id], state, settled=one is taken[0])
            session.end()
            raw.until(lambda: raw.engine.session(session.channel) is None)
            again = raw.begin()
            assert raw.declare(again, raw.control(again, "again"))
            other.receiver(mine, queue, credit=3)
            got = [body(other.take())]
        got += [body(other.take()), body(other.take())]
        assert sorted(got) == [b"one", b"three", b"two"]
        late = raw.outcome(again, raw.post(raw.sender(again, queue, "late"), b"late", local))
        assert isinstance(late, Rejected)
    assert sorted(take_all(channel, queue, at_least=3)) == [b"one", b"three", b"two"]


@only_alongside
def test_an_ended_session_gets_no_returned_message_again(service: DtxService, channel: BlockingChannel) -> None:
    """Its links get no message that its transaction gives back: each delivery would raise x-delivery-count."""
    queue = f"amqp10-{secrets.token_hex(6)}"
    channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum"})
    channel.basic_publish("", queue, b"one", BasicProperties(delivery_mode=2))
    with Raw(service) as raw:
        session = raw.opened().begin()
        control = raw.control(session)
        raw.receiver(session, queue, credit=5)
        taken = raw.take()
        txn_id = raw.declare(session, control)
        state = TransactionalState(txn_id=txn_id, outcome=ACCEPTED)
        session.dispose(Role.RECEIVER, [taken.delivery_id], state, settled=True)
        session.end()
        raw.until(lambda: raw.engine.session(session.channel) is None)
        wait_until(lambda: channel.queue_declare(queue, passive=True).method.message_count == 1, what="the message")
        _, properties, _ = channel.basic_get(queue)
        assert properties is not None
        assert properties.headers["x-delivery-count"] == 1
    channel.connection.channel().queue_delete(queue)


@pytest.fixture
def stream(channel: BlockingChannel) -> Iterator[str]:
    name = f"amqp10-{secrets.token_hex(6)}"
    channel.queue_declare(name, durable=True, arguments={"x-queue-type": "stream"})
    yield name
    channel.connection.channel().queue_delete(name)


@pytest.fixture(scope="module")
def bare(postgres: PostgresServer, shared_rabbitmq: RabbitNode) -> Iterator[DtxService]:
    """A service without a management API: it finds out the type of a queue by itself."""
    database = postgres.create_database()
    with DtxService(broker=shared_rabbitmq.url(), database=database) as running:
        yield running
    postgres.drop_database(database)


@pytest.fixture(params=["management", "bare"])
def reader(request: pytest.FixtureRequest) -> DtxService:
    """A service alongside a broker, with and without its management API."""
    return cast("DtxService", request.getfixturevalue("service" if request.param == "management" else "bare"))


@only_alongside
def test_a_stream_reader_with_small_credit_misses_nothing(reader: DtxService, stream: str) -> None:
    with Client(reader) as client:
        receiver = client.receiver(stream)
        sender = client.sender(stream)
        for number in range(8):
            sender.send(Message(body=f"{number}", durable=True))
        for number in range(8):
            message, delivery = client.take(receiver)
            assert message.body == f"{number}"
            delivery.update(proton.Delivery.ACCEPTED)
            delivery.settle()
            receiver.link.flow(1)


@only_alongside
def test_no_outcome_means_anything_to_a_stream(service: DtxService, stream: str) -> None:
    """The broker closes the whole connection (540) on a nack of a delivery of a stream."""
    outcomes: tuple[Outcome, ...] = (RELEASED, Rejected(), Modified(delivery_failed=True), ACCEPTED)
    with Raw(service) as raw:
        session = raw.opened().begin()
        raw.receiver(session, stream, credit=10, filter=FIRST)
        to = raw.sender(session, stream)
        for number, outcome in enumerate(outcomes):
            assert raw.outcome(session, raw.post(to, b"%d" % number)) == ACCEPTED
            taken = raw.take()
            assert body(taken) == b"%d" % number
            session.dispose(Role.RECEIVER, [taken.delivery_id], outcome, settled=False)
            raw.until(lambda taken=taken: taken.delivery_id not in session.incoming)  # type: ignore[misc]


@only_alongside
def test_stream_deliveries_cannot_be_retired_in_a_transaction(service: DtxService, stream: str) -> None:
    with Raw(service) as raw:
        session = raw.opened().begin()
        control = raw.control(session)
        raw.receiver(session, stream, credit=5, filter=FIRST)
        to = raw.sender(session, stream)
        for outcome in (ACCEPTED, RELEASED):
            raw.outcome(session, raw.post(to, b"one"))
            taken = raw.take()
            txn_id = raw.declare(session, control)
            state = TransactionalState(txn_id=txn_id, outcome=outcome)
            session.dispose(Role.RECEIVER, [taken.delivery_id], state, settled=False)
            rejected = raw.discharge(session, control, txn_id)
            assert isinstance(rejected, Rejected)
            assert isinstance(rejected.error, Error)
            assert rejected.error.condition == "amqp:transaction:rollback"
        raw.outcome(session, raw.post(to, b"and so on"))
        assert body(raw.take()) == b"and so on"


@only_alongside
def test_nothing_of_a_stream_is_acquired_in_a_transaction(service: DtxService, stream: str) -> None:
    """4.4.3: "If the link endpoint does not support transactional acquisition, the link MUST be terminated with a
    not-implemented error."
    """
    with Raw(service) as raw:
        session = raw.opened().begin()
        control = raw.control(session)
        link, _ = raw.receiver(session, stream, credit=0, filter=FIRST)
        to = raw.sender(session, stream)
        raw.outcome(session, raw.post(to, b"one"))
        txn_id = raw.declare(session, control)
        link.grant(1, properties={"txn-id": txn_id})
        error = raw.detached(link)
        assert error is not None
        assert error.condition == "amqp:not-implemented"
        raw.outcome(session, raw.post(to, b"two", txn_id))
        assert raw.discharge(session, control, txn_id) == ACCEPTED
        raw.receiver(session, stream, credit=2, filter=FIRST, name="again")
        assert [body(raw.take()) for _ in range(2)] == [b"one", b"two"]


@only_alongside
def test_a_stream_is_drained_and_read_on(reader: DtxService, stream: str) -> None:
    """A drain must not use basic.get, on which the broker closes the whole connection (540)."""
    with Raw(reader) as raw:
        session = raw.opened().begin()
        link, _ = raw.receiver(session, stream, credit=0, filter=FIRST)
        to = raw.sender(session, stream)
        link.grant(5, drain=True)
        raw.until(lambda: link.credit == 0)
        for number in range(3):
            raw.outcome(session, raw.post(to, b"%d" % number))
        link.grant(5, drain=True)
        assert [body(raw.take()) for _ in range(3)] == [b"0", b"1", b"2"]
        raw.until(lambda: link.credit == 0)
        raw.outcome(session, raw.post(to, b"3"))
        link.grant(1)
        assert body(raw.take()) == b"3"


@only_alongside
def test_a_filter_sets_the_start_of_a_stream_reader(service: DtxService, stream: str) -> None:
    with Raw(service) as raw:
        session = raw.opened().begin()
        to = raw.sender(session, stream)
        for number in range(4):
            raw.outcome(session, raw.post(to, b"%d" % number))
        for value, expected in (("first", [b"0", b"1"]), (ULong(2), [b"2", b"3"])):
            asked = {"offset": Described(Symbol("rabbitmq:stream-offset-spec"), value)}
            link, source = raw.receiver(session, stream, credit=2, name=f"from {value}", filter=asked)
            assert source.filter == asked
            assert [body(raw.take()) for _ in expected] == expected
            raw.detach(session, link)
        nonsense = {"offset": Described(Symbol("rabbitmq:stream-offset-spec"), "bogus")}
        assert raw.receiver(session, stream, name="nonsense", filter=nonsense)[1].filter is None


@only_alongside
def test_messages_without_memory_are_read_later(dtx_service: ServiceFactory, rabbitmq: RabbitNode, stream: str) -> None:
    service = dtx_service("--max-kept-bytes", str(1 << 20), broker=rabbitmq.url())
    with Raw(service) as raw:
        session = raw.opened().begin()
        link, _ = raw.receiver(session, stream, credit=0, filter=FIRST)
        to = raw.sender(session, stream)
        for number in range(40):
            raw.outcome(session, raw.post(to, b"%03d" % number + bytes((128 << 10) - 3)))
        for number in range(40):
            link.grant(1)
            assert body(raw.take())[:3] == b"%03d" % number


@only_alongside
def test_a_link_is_notified_of_the_deletion_of_its_stream(
    service: DtxService, channel: BlockingChannel, stream: str
) -> None:
    with Raw(service) as raw:
        session = raw.opened().begin()
        link, _ = raw.receiver(session, stream, filter=FIRST)
        channel.basic_publish("", stream, b"read")
        raw.take()
        channel.queue_delete(stream)
        error = raw.detached(link)
        assert error is not None
        assert error.condition == "amqp:resource-deleted"


@only_alongside
def test_a_stream_without_read_permission_is_refused_at_attach(
    reader: DtxService, stream: str, shared_rabbitmq: RabbitNode
) -> None:
    """2.6.3: the answer to such an attach has no source, and a detach with the reason follows."""
    user = f"reader-{secrets.token_hex(4)}"
    shared_rabbitmq.add_user(user, read="nothing")
    with Raw(reader, user=user, password=user) as raw:
        session = raw.opened().begin()
        link = session.new_link("refused", Role.RECEIVER)
        link.attach(source=Source(address=stream, filter=FIRST), target=Target())
        link.grant(1)
        assert raw.expect(Attached).attach.source is None
        error = raw.detached(link)
        assert error is not None
        assert error.condition == "amqp:unauthorized-access"
        assert raw.sender(session, stream).credit
    shared_rabbitmq.delete_user(user)


@only_alongside
def test_stream_messages_before_the_credit_of_the_link_wait(reader: DtxService, stream: str) -> None:
    """Deliveries of the broker may arrive before dtx has answered the attach of the client."""
    with Raw(reader) as raw:
        session = raw.opened().begin()
        to = raw.sender(session, stream)
        for number in range(20):
            raw.outcome(session, raw.post(to, b"%d" % number))
        link = session.new_link("early", Role.RECEIVER)
        link.attach(source=Source(address=stream, filter=FIRST), target=Target())
        link.grant(3)
        assert [body(raw.take()) for _ in range(3)] == [b"0", b"1", b"2"]
        link.grant(17)
        assert [body(raw.take()) for _ in range(17)] == [b"%d" % number for number in range(3, 20)]


@only_alongside
def test_a_queue_that_replaces_a_stream_loses_nothing(
    reader: DtxService, channel: BlockingChannel, stream: str
) -> None:
    """The name counts as a stream for a moment. dtx acknowledges messages of a stream; a queue would lose them."""
    with Raw(reader) as raw:
        session = raw.opened().begin()
        link, _ = raw.receiver(session, stream)
        raw.detach(session, link)
        channel.queue_delete(stream)
        channel.queue_declare(stream, durable=True)
        channel.basic_publish("", stream, b"one", BasicProperties(delivery_mode=2))
        refused = session.new_link("refused", Role.RECEIVER)
        refused.attach(source=Source(address=stream), target=Target())
        refused.grant(1)
        error = raw.detached(refused)
        assert error is not None
        assert error.condition == "amqp:precondition-failed"
        raw.receiver(session, stream, name="again")
        taken = raw.take()
        assert body(taken) == b"one"
        session.dispose(Role.RECEIVER, [taken.delivery_id], RELEASED, settled=True)
        raw.close()
    assert take_all(channel, stream, at_least=1) == [b"one"]
