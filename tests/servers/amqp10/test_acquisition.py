"""Messages that are acquired in a transaction: its discharge decides the acquisition and the outcome."""

from collections.abc import Iterator

import pytest
from pika import BasicProperties
from pika.adapters.blocking_connection import BlockingChannel

from dtx.client import Coordinator
from dtx.wire.amqp10 import message
from dtx.wire.amqp10.endpoint import Attached, Detached, Disposed, Flowed
from dtx.wire.amqp10.link import Link
from dtx.wire.amqp10.performatives import (
    ACCEPTED,
    RELEASED,
    Accepted,
    Discharge,
    Rejected,
    Role,
    SenderSettles,
    Source,
    Target,
    TransactionalState,
)
from dtx.wire.amqp10.session import Session
from tests.servers.amqp10.raw import Raw, body
from tests.support.client import connected, new_xid, take_all
from tests.support.postgres import PostgresServer
from tests.support.service import DtxService


@pytest.fixture
def raw(service: DtxService) -> Iterator[Raw]:
    """A connection that sends exactly what a test wants."""
    with Raw(service) as open_connection:
        yield open_connection.opened()


def put(channel: BlockingChannel, queue: str, *bodies: bytes) -> None:
    """Publish persistent messages."""
    confirming = channel.connection.channel()
    confirming.confirm_delivery()
    for each in bodies:
        confirming.basic_publish("", queue, each, BasicProperties(delivery_mode=2))


def settled_link(raw: Raw, session: Session, queue: str) -> Link:
    """A link whose deliveries are settled when they are sent."""
    link = session.new_link("settled", Role.RECEIVER)
    link.attach(source=Source(address=queue), target=Target(), sender_settles=SenderSettles.SETTLED)
    raw.expect(Attached, lambda event: event.link == link.handle)
    return link


def condition(state: object) -> str:
    """The error condition of a rejected outcome."""
    assert isinstance(state, Rejected), state
    assert state.error is not None
    return state.error.condition


@pytest.mark.parametrize(("fail", "left"), [(False, []), (True, [b"0", b"1", b"2"])])
def test_an_acquired_and_retired_message_follows_the_discharge(
    raw: Raw, channel: BlockingChannel, queue: str, fail: bool, left: list[bytes]
) -> None:
    """4.4.3, the picture; 4.4.4.3: otherwise "both the acquisition and outcome are rolled back"."""
    put(channel, queue, b"0", b"1", b"2")
    session = raw.begin()
    control = raw.control(session)
    txn_id = raw.declare(session, control)
    link, _ = raw.receiver(session, queue, credit=0)
    link.grant(10, drain=True, properties={"txn-id": txn_id})
    taken = [raw.take() for _ in range(3)]
    assert [body(one) for one in taken] == [b"0", b"1", b"2"]
    assert {one.states for one in taken} == {(TransactionalState(txn_id=txn_id),)}
    raw.expect(Flowed, lambda event: event.flow.drain and event.flow.link_credit == 0)
    state = TransactionalState(txn_id=txn_id, outcome=ACCEPTED)
    session.dispose(Role.RECEIVER, [one.delivery_id for one in taken], state, settled=False)
    control.send(b"request", message.value(Discharge(txn_id=txn_id, fail=fail)))
    numbers: list[int] = []
    while len(numbers) < 3:
        event = raw.expect(Disposed, lambda event: event.role is Role.RECEIVER)
        assert (event.settled, event.state) == (True, RELEASED if fail else ACCEPTED)
        numbers += [number for _, number in event.deliveries]
    assert sorted(numbers) == [one.delivery_id for one in taken]
    assert raw.expect(Disposed).state == ACCEPTED
    assert take_all(channel, queue, at_least=len(left)) == left


@pytest.mark.parametrize(("fail", "left"), [(False, []), (True, [b"0", b"1"])])
def test_a_settled_acquisition_follows_the_discharge(
    raw: Raw, channel: BlockingChannel, queue: str, fail: bool, left: list[bytes]
) -> None:
    """4.4.4.3: "otherwise the acquisition and outcome are rolled back"."""
    put(channel, queue, b"0", b"1")
    session = raw.begin()
    control = raw.control(session)
    txn_id = raw.declare(session, control)
    link = settled_link(raw, session, queue)
    link.grant(2, properties={"txn-id": txn_id})
    for _ in range(2):
        got = raw.take()
        assert (got.settled, got.states) == (True, (TransactionalState(txn_id=txn_id, outcome=ACCEPTED),))
    assert raw.discharge(session, control, txn_id, fail=fail) == ACCEPTED
    assert take_all(channel, queue, at_least=len(left)) == left


@pytest.mark.parametrize(("fail", "left"), [(False, []), (True, [b"one"])])
def test_an_acquisition_without_an_outcome_is_decided_by_the_discharge(
    raw: Raw, channel: BlockingChannel, queue: str, fail: bool, left: list[bytes]
) -> None:
    put(channel, queue, b"one")
    session = raw.begin()
    control = raw.control(session)
    txn_id = raw.declare(session, control)
    link, _ = raw.receiver(session, queue, credit=0)
    link.grant(1, properties={"txn-id": txn_id})
    got = raw.take()
    assert raw.discharge(session, control, txn_id, fail=fail) == ACCEPTED
    if not fail:  # the client has it, as if acquired outside a transaction
        assert take_all(channel, queue) == []
        session.dispose(Role.RECEIVER, [got.delivery_id], ACCEPTED, settled=True)
        raw.close()
    assert take_all(channel, queue, at_least=len(left)) == left


def test_flows_name_the_transaction_of_later_messages(raw: Raw, queue: str) -> None:
    """4.4: "… but indicates with which transaction future transfers from that link will be performed"."""
    session = raw.begin()
    control = raw.control(session)
    txn_id = raw.declare(session, control)
    link, _ = raw.receiver(session, queue, credit=0)
    for properties in ({"txn-id": txn_id}, None):
        link.credit = 5
        link.flow(echo=True, properties=properties)
        assert raw.expect(Flowed, lambda event: event.link == link.handle).flow.properties == {"txn-id": txn_id}
    assert raw.discharge(session, control, txn_id) == ACCEPTED
    link.flow(echo=True)
    assert raw.expect(Flowed, lambda event: event.link == link.handle).flow.properties is None


@pytest.mark.parametrize(("default", "left"), [(None, [b"one"]), (Accepted(), [])])
def test_settling_without_outcome_applies_the_default_at_the_discharge(
    raw: Raw, channel: BlockingChannel, queue: str, default: Accepted | None, left: list[bytes]
) -> None:
    put(channel, queue, b"one")
    session = raw.begin()
    control = raw.control(session)
    txn_id = raw.declare(session, control)
    link, _ = raw.receiver(session, queue, credit=0, default_outcome=default)
    link.grant(1, properties={"txn-id": txn_id})
    session.dispose(Role.RECEIVER, [raw.take().delivery_id], None, settled=True)
    raw.flush()
    assert take_all(channel, queue) == []
    assert raw.discharge(session, control, txn_id) == ACCEPTED
    assert take_all(channel, queue, at_least=len(left)) == left


@pytest.mark.parametrize("named", [False, True])
def test_the_outcome_belongs_to_the_transaction_of_the_acquisition(
    raw: Raw, channel: BlockingChannel, queue: str, named: bool
) -> None:
    """4.4.4.3: "MUST be associated with the same transaction"; 4.4.2: "the control link MUST be terminated"."""
    put(channel, queue, b"one")
    session = raw.begin()
    control, other = raw.control(session), raw.control(session, "other")
    first, second = raw.declare(session, control), raw.declare(session, other)
    link, _ = raw.receiver(session, queue, credit=0)
    link.grant(1, properties={"txn-id": first})
    got = raw.take()
    state = TransactionalState(txn_id=second, outcome=ACCEPTED) if named else ACCEPTED
    session.dispose(Role.RECEIVER, [got.delivery_id], state, settled=True)
    error = raw.detached(other if named else control)
    assert error is not None
    assert error.condition == "amqp:transaction:rollback"
    assert take_all(channel, queue, at_least=1) == [b"one"]


def test_a_link_does_not_acquire_in_a_missing_transaction(raw: Raw, queue: str) -> None:
    session = raw.begin()
    control = raw.control(session)
    txn_id = raw.declare(session, control)
    assert raw.discharge(session, control, txn_id) == ACCEPTED
    for number, unknown in enumerate((txn_id, b"nobody", "text", 7)):
        link, _ = raw.receiver(session, queue, credit=0, name=f"receiver-{number}")
        link.grant(1, properties={"txn-id": unknown})
        error = raw.detached(link)
        assert error is not None
        assert error.condition == "amqp:transaction:unknown-id"


def test_messages_after_the_discharge_belong_to_no_transaction(raw: Raw, channel: BlockingChannel, queue: str) -> None:
    """4.4.3: "the txn-id of any link endpoints will be cleared", and credit is not affected."""
    session = raw.begin()
    control = raw.control(session)
    txn_id = raw.declare(session, control)
    link, _ = raw.receiver(session, queue, credit=0)
    link.grant(2, properties={"txn-id": txn_id})
    put(channel, queue, b"in it")
    first = raw.take()
    assert first.states == (TransactionalState(txn_id=txn_id),)
    state = TransactionalState(txn_id=txn_id, outcome=ACCEPTED)
    session.dispose(Role.RECEIVER, [first.delivery_id], state, settled=True)
    assert raw.discharge(session, control, txn_id) == ACCEPTED
    put(channel, queue, b"outside")
    second = raw.take()
    assert (body(second), second.states) == (b"outside", ())
    session.dispose(Role.RECEIVER, [second.delivery_id], ACCEPTED, settled=True)
    raw.close()
    assert take_all(channel, queue) == []


@pytest.mark.parametrize("closes", ["control", "link", "connection"])
@pytest.mark.parametrize("settled", [False, True])
def test_an_ended_link_leaves_nothing_acquired(
    raw: Raw, channel: BlockingChannel, queue: str, closes: str, settled: bool
) -> None:
    put(channel, queue, b"0", b"1")
    session = raw.begin()
    control = raw.control(session)
    txn_id = raw.declare(session, control)
    link = settled_link(raw, session, queue) if settled else raw.receiver(session, queue, credit=0)[0]
    link.grant(2, properties={"txn-id": txn_id})
    first, _ = raw.take(), raw.take()
    if not settled:
        state = TransactionalState(txn_id=txn_id, outcome=ACCEPTED)
        session.dispose(Role.RECEIVER, [first.delivery_id], state, settled=False)
    if closes == "control":
        raw.detach(session, control)
    elif closes == "link":
        raw.detach(session, link)
        assert raw.discharge(session, control, txn_id, fail=True) == ACCEPTED
    else:
        raw.close()
    assert sorted(take_all(channel, queue, at_least=2)) == [b"0", b"1"]


@pytest.mark.parametrize("drain", [False, True])
def test_a_rollback_only_transaction_gets_no_messages(small: DtxService, drain: bool) -> None:
    """Otherwise a message would be sent, return to its queue and be sent again, without end."""
    with Raw(small) as raw, connected(small.url()) as connection:
        channel = connection.channel()
        channel.queue_declare("shared", durable=True)
        put(channel, "shared", *(b"%d" % number for number in range(6)))
        session = raw.opened().begin()
        control = raw.control(session)
        txn_id = raw.declare(session, control)
        link = settled_link(raw, session, "shared")
        link.grant(100, drain=drain, properties={"txn-id": txn_id})
        assert [body(raw.take()) for _ in range(3)] == [b"0", b"1", b"2"]
        if drain:
            raw.expect(Flowed, lambda event: event.flow.drain and event.flow.link_credit == 0)
        assert condition(raw.discharge(session, control, txn_id)) == "amqp:transaction:rollback"
        if drain:
            link.grant(6)
        # then they are sent outside any transaction, as there is credit
        assert sorted(body(raw.take()) for _ in range(6)) == [b"%d" % number for number in range(6)]
        raw.close()
        assert take_all(channel, "shared") == []


@pytest.mark.parametrize("commit", [False, True])
def test_a_branch_has_the_messages_acquired_for_it(
    raw: Raw, service: DtxService, channel: BlockingChannel, queue: str, commit: bool
) -> None:
    put(channel, queue, b"0", b"1")
    xid, session = new_xid(), raw.begin()
    control = raw.control(session)
    txn_id = raw.declare(session, control, xid.to_wire())
    link = settled_link(raw, session, queue)
    link.grant(2, properties={"txn-id": txn_id})
    raw.take(), raw.take()
    assert raw.discharge(session, control, txn_id) == ACCEPTED
    with connected(service.url()) as connection:
        manager = Coordinator(connection)
        manager.prepare(xid)
        assert take_all(channel, queue) == []
        if commit:
            manager.commit(xid)
        else:
            manager.rollback(xid)
    left: list[bytes] = [] if commit else [b"0", b"1"]
    assert sorted(take_all(channel, queue, at_least=len(left))) == left


def test_a_partly_sent_delivery_ends_with_the_transaction(
    service: DtxService, channel: BlockingChannel, queue: str
) -> None:
    """4.4.3: "the resource MUST abort or complete the sending the remainder … before completing the discharge"."""
    put(channel, queue, bytes(200_000))
    with Raw(service, window=1, max_frame_size=512) as raw:
        session = raw.opened().begin()
        control = raw.control(session)
        txn_id = raw.declare(session, control)
        link, _ = raw.receiver(session, queue, credit=0)
        link.grant(1, properties={"txn-id": txn_id})
        raw.flush()
        while link.partial is None:
            raw.events += raw.engine.receive(raw.socket.recv(1 << 16), 0.0)
        control.send(b"request", message.value(Discharge(txn_id=txn_id, fail=True)))
        raw.until(lambda: any(isinstance(event, Disposed) for event in raw.events))
        detached, disposed = (event for event in raw.events if isinstance(event, Detached | Disposed))
        assert isinstance(detached, Detached)
        assert detached.link == link.handle
        assert detached.error is not None
        assert detached.error.condition == "amqp:transaction:rollback"
        assert isinstance(disposed, Disposed)
        assert disposed.state == ACCEPTED
    assert take_all(channel, queue, at_least=1) == [bytes(200_000)]


def test_a_crash_leaves_nothing_acquired(postgres: PostgresServer) -> None:
    database = postgres.create_database()
    with DtxService(database=database) as service:
        with connected(service.url()) as connection:
            connection.channel().queue_declare("q", durable=True)
            put(connection.channel(), "q", b"0", b"1", b"2")
        with Raw(service) as raw:
            session = raw.opened().begin()
            control = raw.control(session)
            done, lost = raw.declare(session, control), raw.declare(session, control)
            link = settled_link(raw, session, "q")
            for txn_id in (done, lost):
                link.grant(1, properties={"txn-id": txn_id})
                raw.take()
            assert raw.discharge(session, control, done) == ACCEPTED
            service.kill9()
        service.start()
        with connected(service.url()) as connection:
            assert take_all(connection.channel(), "q") == [b"1", b"2"]
    postgres.drop_database(database)


@pytest.mark.parametrize("in_transaction", [False, True])
def test_a_drain_is_answered_once(raw: Raw, channel: BlockingChannel, queue: str, in_transaction: bool) -> None:
    """2.6.7: the client would take a second answer for that to the next drain, whose messages it has not received."""
    put(channel, queue, b"0", b"1", b"2")
    session = raw.begin()
    control = raw.control(session)
    link = settled_link(raw, session, queue)
    for number in range(3):
        txn_id = raw.declare(session, control)
        assert not [event for event in raw.events if isinstance(event, Flowed)]
        credit = 5 if number == 2 else 1
        link.grant(credit, drain=True, properties={"txn-id": txn_id} if in_transaction else None)
        raw.expect(Flowed, lambda event: event.link == link.handle and event.flow.link_credit == 0)
        assert body(raw.take()) == b"%d" % number
        assert raw.discharge(session, control, txn_id) == ACCEPTED
    raw.declare(session, control)
    assert not [event for event in raw.events if isinstance(event, Flowed)]
