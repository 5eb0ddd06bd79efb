"""Clauses about transactions, shown with frames that ordinary clients do not send."""

import pytest
from pika.adapters.blocking_connection import BlockingChannel

from dtx.wire.amqp10 import message
from dtx.wire.amqp10.endpoint import Attached, Disposed
from dtx.wire.amqp10.performatives import (
    ACCEPTED,
    Accepted,
    Coordinator,
    Declare,
    Declared,
    Discharge,
    Modified,
    Rejected,
    Released,
    Role,
    TransactionalState,
)
from tests.servers.amqp10.raw import Raw, body
from tests.support.client import take_all
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.service import DtxService


@pytest.fixture
def raw(service: DtxService):  # type: ignore[no-untyped-def]
    """A connection that sends exactly what a test wants."""
    with Raw(service) as open_connection:
        yield open_connection.opened()


def condition(state: object) -> str:
    """The error condition of a rejected outcome."""
    assert isinstance(state, Rejected), state
    assert state.error is not None
    return state.error.condition


def test_the_coordinator_advertises_its_capabilities(raw: Raw) -> None:
    session = raw.begin()
    link = session.new_link("control", Role.SENDER)
    link.attach(source=None, target=Coordinator())
    target = raw.expect(Attached).attach.target
    assert isinstance(target, Coordinator)
    assert set(target.capabilities) == {
        "amqp:local-transactions",
        "amqp:distributed-transactions",
        "amqp:promotable-transactions",
        "amqp:multi-txns-per-ssn",
        "amqp:multi-ssns-per-txn",
    }


def test_txn_ids_cannot_be_guessed(raw: Raw) -> None:
    session = raw.begin()
    control = raw.control(session)
    ids = {raw.declare(session, control) for _ in range(4)}
    assert len(ids) == 4
    assert all(16 <= len(txn_id) <= 32 for txn_id in ids)


def test_a_posting_gets_its_provisional_outcome(raw: Raw, queue: str) -> None:
    """4.4.1: "the state of the delivery being a transactional-state … and a terminal outcome"."""
    session = raw.begin()
    control, sender = raw.control(session), raw.sender(session, queue)
    txn_id = raw.declare(session, control)
    state = raw.outcome(session, raw.post(sender, b"one", txn_id))
    assert state == TransactionalState(txn_id=txn_id, outcome=Accepted())


def test_a_transaction_that_is_not_known_takes_no_work(raw: Raw, queue: str) -> None:
    session = raw.begin()
    control, sender = raw.control(session), raw.sender(session, queue)
    assert condition(raw.outcome(session, raw.post(sender, b"one", b"nobody"))) == "amqp:transaction:unknown-id"
    assert condition(raw.discharge(session, control, b"nobody")) == "amqp:transaction:unknown-id"
    txn_id = raw.declare(session, control)
    assert raw.discharge(session, control, txn_id) == ACCEPTED
    assert condition(raw.discharge(session, control, txn_id)) == "amqp:transaction:unknown-id"


def test_an_error_detaches_a_control_link_without_rejected(raw: Raw) -> None:
    """4.2: "If the source does not support the rejected outcome … MUST detach the link to the coordinator"."""
    session = raw.begin()
    control = raw.control(session, rejects=False)
    control.send(b"request", message.value(Discharge(txn_id=b"nobody")))
    error = raw.detached(control)
    assert error is not None
    assert error.condition == "amqp:transaction:unknown-id"


def test_a_settled_declare_is_an_error(raw: Raw) -> None:
    """4.2: "This message MUST NOT be sent settled"."""
    session = raw.begin()
    control = raw.control(session)
    control.send(b"request", message.value(Declare()), settled=True)
    error = raw.detached(control)
    assert error is not None
    assert error.condition == "amqp:not-allowed"


def test_the_end_of_the_control_link_rolls_back(raw: Raw, channel: BlockingChannel, queue: str) -> None:
    """4.1: "all such transactions are immediately rolled back, and attempts to perform further … work … fail"."""
    channel.basic_publish("", queue, b"old")
    session = raw.begin()
    control, sender = raw.control(session), raw.sender(session, queue)
    txn_id = raw.declare(session, control)
    raw.receiver(session, queue)
    got = raw.take()
    state = TransactionalState(txn_id=txn_id, outcome=ACCEPTED)
    session.dispose(Role.RECEIVER, [got.delivery_id], state, settled=True)
    raw.outcome(session, raw.post(sender, b"new", txn_id))
    raw.detach(session, control)
    assert condition(raw.outcome(session, raw.post(sender, b"later", txn_id))) == "amqp:transaction:unknown-id"
    wait_until(lambda: channel.queue_declare(queue, passive=True).method.message_count == 1)
    assert take_all(channel, queue, at_least=1) == [b"old"]


def test_a_transaction_spans_the_sessions_of_a_connection(raw: Raw, channel: BlockingChannel, queue: str) -> None:
    first, second = raw.begin(), raw.begin()
    control = raw.control(first)
    txn_id = raw.declare(first, control)
    here, there = raw.sender(first, queue, "here"), raw.sender(second, queue, "there")
    raw.outcome(first, raw.post(here, b"one", txn_id))
    raw.outcome(second, raw.post(there, b"two", txn_id))
    assert raw.discharge(first, control, txn_id) == ACCEPTED
    assert take_all(channel, queue) == [b"one", b"two"]


def test_transactions_of_another_connection_are_not_known(raw: Raw, service: DtxService, queue: str) -> None:
    session = raw.begin()
    txn_id = raw.declare(session, raw.control(session))
    with Raw(service) as other:
        far = other.opened().begin()
        outcome = other.outcome(far, other.post(other.sender(far, queue), b"one", txn_id))
        assert condition(outcome) == "amqp:transaction:unknown-id"


def test_a_settled_posting_that_fails_dooms_the_transaction(raw: Raw, queue: str) -> None:
    """4.4.4.1: "Should the resource be unable to process the delivery it MUST NOT allow the successful discharge"."""
    session = raw.begin()
    control, sender = raw.control(session), raw.sender(session, None)
    txn_id = raw.declare(session, control)
    state = TransactionalState(txn_id=txn_id)
    lost = message.bare(message.Properties(to="/queues/no-such-queue"), {}, message.data(b"lost"))
    sender.send(b"lost", lost, state=state, settled=True)
    good = message.bare(message.Properties(to=f"/queues/{queue}"), {}, message.data(b"good"))
    sender.send(b"good", good, state=state, settled=True)
    outcome = raw.discharge(session, control, txn_id)
    assert condition(outcome) == "amqp:transaction:rollback"
    assert "no queue 'no-such-queue'" in str(outcome)


def test_an_unsettled_posting_that_fails_is_rejected(raw: Raw, channel: BlockingChannel, queue: str) -> None:
    session = raw.begin()
    control, sender = raw.control(session), raw.sender(session, None)
    txn_id = raw.declare(session, control)
    lost = message.bare(message.Properties(to="/queues/no-such-queue"), {}, message.data(b"lost"))
    state = raw.outcome(session, sender.send(b"lost", lost, state=TransactionalState(txn_id=txn_id)))
    assert isinstance(state, TransactionalState)
    assert condition(state.outcome) == "amqp:not-found"
    good = message.bare(message.Properties(to=f"/queues/{queue}"), {}, message.data(b"good"))
    raw.outcome(session, sender.send(b"good", good, state=TransactionalState(txn_id=txn_id)))
    assert raw.discharge(session, control, txn_id) == ACCEPTED
    assert take_all(channel, queue, at_least=1) == [b"good"]


def test_a_partial_delivery_forbids_the_discharge(raw: Raw, channel: BlockingChannel, queue: str) -> None:
    """4.4.1: "the control link MUST be terminated with the transaction-rollback error"."""
    session = raw.begin()
    control, sender = raw.control(session), raw.sender(session, queue)
    txn_id = raw.declare(session, control)
    fields = {
        "handle": sender.handle,
        "delivery_id": 77,
        "delivery_tag": b"77",
        "state": TransactionalState(txn_id=txn_id),
    }
    rest = raw.engine.send_transfer(session.channel, fields, memoryview(message.data(b"x" * 300_000)))
    assert rest  # which is never sent
    control.send(b"request", message.value(Discharge(txn_id=txn_id)))
    error = raw.detached(control)
    assert error is not None
    assert error.condition == "amqp:transaction:rollback"
    assert take_all(channel, queue) == []


@pytest.mark.parametrize("outcome", [Released(), Rejected(), Modified(delivery_failed=True, undeliverable_here=True)])
@pytest.mark.parametrize("settled", [False, True])
def test_no_outcome_is_applied_when_the_transaction_fails(
    raw: Raw, channel: BlockingChannel, queue: str, outcome: Released | Rejected | Modified, settled: bool
) -> None:
    channel.basic_publish("", queue, b"one")
    session = raw.begin()
    control = raw.control(session)
    txn_id = raw.declare(session, control)
    raw.receiver(session, queue)
    got = raw.take()
    state = TransactionalState(txn_id=txn_id, outcome=outcome)
    session.dispose(Role.RECEIVER, [got.delivery_id], state, settled=settled)
    assert raw.discharge(session, control, txn_id, fail=True) == ACCEPTED
    assert take_all(channel, queue, at_least=int(settled)) == ([b"one"] if settled else [])
    if not settled:
        session.dispose(Role.RECEIVER, [got.delivery_id], Released(), settled=True)
        raw.flush()
        assert take_all(channel, queue, at_least=1) == [b"one"]


def test_a_delivery_can_be_retired_again_in_another_transaction(raw: Raw, channel: BlockingChannel, queue: str) -> None:
    """4.4.2: "the resource should expect the controller to request a disposition … transactionally on a new one"."""
    channel.basic_publish("", queue, b"one")
    session = raw.begin()
    control = raw.control(session)
    raw.receiver(session, queue)
    got = raw.take()
    first, txn_id = raw.declare(session, control), raw.declare(session, control)
    state = TransactionalState(txn_id=first, outcome=ACCEPTED)
    session.dispose(Role.RECEIVER, [got.delivery_id], state, settled=False)
    assert raw.discharge(session, control, first, fail=True) == ACCEPTED
    state = TransactionalState(txn_id=txn_id, outcome=ACCEPTED)
    session.dispose(Role.RECEIVER, [got.delivery_id], state, settled=False)
    control.send(b"request", message.value(Discharge(txn_id=txn_id)))
    settled = raw.expect(Disposed, lambda event: event.role is Role.RECEIVER)
    assert (settled.state, settled.settled) == (ACCEPTED, True)
    assert take_all(channel, queue) == []


def test_a_closed_link_leaves_retired_deliveries_to_its_transaction(
    raw: Raw, channel: BlockingChannel, queue: str
) -> None:
    for fail, left in ((False, 0), (True, 1)):
        channel.basic_publish("", queue, b"one")
        session = raw.begin()
        control = raw.control(session, f"control-{fail}")
        txn_id = raw.declare(session, control)
        link, _ = raw.receiver(session, queue, name=f"receiver-{fail}")
        got = raw.take()
        state = TransactionalState(txn_id=txn_id, outcome=ACCEPTED)
        session.dispose(Role.RECEIVER, [got.delivery_id], state, settled=False)
        raw.detach(session, link)
        assert raw.discharge(session, control, txn_id, fail=fail) == ACCEPTED
        assert len(take_all(channel, queue, at_least=left)) == left


def test_a_transaction_that_takes_too_long_is_rolled_back(postgres: PostgresServer) -> None:
    database = postgres.create_database()
    with DtxService(database=database, options=("--default-timeout", "1")) as service, Raw(service) as raw:
        session = raw.opened().begin()
        control = raw.control(session)
        txn_id = raw.declare(session, control)
        wait_until(lambda: "branch timed out" in service.log_path.read_text())
        assert condition(raw.discharge(session, control, txn_id)) == "amqp:transaction:timeout"
    postgres.drop_database(database)


def test_the_default_outcome_is_the_sources(raw: Raw, channel: BlockingChannel, queue: str) -> None:
    channel.basic_publish("", queue, b"one")
    session = raw.begin()
    _, source = raw.receiver(session, queue, default_outcome=Accepted())
    assert source.default_outcome == Accepted()
    got = raw.take()
    assert body(got) == b"one"
    session.dispose(Role.RECEIVER, [got.delivery_id], None, settled=True)
    raw.close()
    assert take_all(channel, queue) == []


def test_a_control_link_takes_any_number_of_requests(raw: Raw) -> None:
    """It has credit for 1,000 requests, which is granted again."""
    session = raw.begin()
    control = raw.control(session)
    count = 600
    declares = [control.send(b"request", message.value(Declare())) for _ in range(count)]
    outcomes = [raw.outcome(session, number) for number in declares]
    ids = [outcome.txn_id for outcome in outcomes if isinstance(outcome, Declared)]
    assert len(set(ids)) == count
    raw.until(lambda: control.credit >= count)
    ends = [control.send(b"request", message.value(Discharge(txn_id=txn_id, fail=True))) for txn_id in ids]
    assert None not in ends
    assert [raw.outcome(session, number) for number in ends] == [ACCEPTED] * count
