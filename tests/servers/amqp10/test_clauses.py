"""Clauses about transactions that no other test here shows. ``CLAUSES.md`` names the tests of each clause."""

from collections.abc import Iterator

import psycopg
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from dtx.wire.amqp10 import message
from dtx.wire.amqp10.endpoint import Attached, Disposed
from dtx.wire.amqp10.performatives import (
    ACCEPTED,
    RELEASED,
    Attach,
    Coordinator,
    Declare,
    Discharge,
    Durability,
    ExpiryPolicy,
    ReceiverSettles,
    Rejected,
    Role,
    Source,
    Target,
    TransactionalState,
)
from dtx.wire.amqp10.values import Described, ULong
from tests.servers.amqp10.raw import Raw
from tests.support.broker import only_standalone
from tests.support.client import connected, take_all
from tests.support.processes import wait_until
from tests.support.service import DtxService
from tests.support.users import StandaloneUsers


@pytest.fixture
def raw(service: DtxService) -> Iterator[Raw]:
    """A connection that sends exactly what a test wants."""
    with Raw(service) as open_connection:
        yield open_connection.opened()


@pytest.fixture
def own(small: DtxService) -> Iterator[DtxService]:
    """A service with low limits and an empty queue. Tests may damage its database."""
    with connected(small.url()) as connection:
        connection.channel().queue_declare("q", durable=True)
    yield small
    with connected(small.url()) as connection:
        connection.channel().queue_delete("q")


def condition(state: object) -> str:
    """The error condition of a rejected outcome, in a transaction or not."""
    outcome = state.outcome if isinstance(state, TransactionalState) else state
    assert isinstance(outcome, Rejected), state
    assert outcome.error is not None
    return outcome.error.condition


def test_links_to_the_coordinator_are_not_resumed(raw: Raw) -> None:
    """4.2: "links to the coordinator cannot be resumed"."""
    session = raw.begin()
    session.send(
        Attach(
            name="control",
            handle=7,
            role=Role.SENDER,
            source=Source(),
            target=Coordinator(),
            unsettled={b"declare": None},
            initial_delivery_count=0,
        )
    )
    answer = raw.expect(Attached)
    assert (answer.attach.source, answer.attach.target) == (None, None)
    link = session.link(answer.link)
    assert link is not None
    error = raw.detached(link)
    assert error is not None
    assert error.condition == "amqp:not-allowed"


def test_a_link_that_asks_to_resume_starts_anew(raw: Raw, channel: BlockingChannel, queue: str) -> None:
    """Transport, 2.6.13: an attach without an unsettled map means that no delivery is known."""
    channel.basic_publish("", queue, b"one")
    session = raw.begin()
    source = Source(address=queue, durable=Durability.UNSETTLED_STATE, expiry_policy=ExpiryPolicy.NEVER)
    for number, role in enumerate((Role.RECEIVER, Role.SENDER)):
        session.send(
            Attach(
                name=f"resumed-{number}",
                handle=7 + number,
                role=role,
                source=source if role is Role.RECEIVER else Source(),
                target=Target(address=None if role is Role.RECEIVER else queue),
                unsettled={b"t": Described(ULong(0x24), [])},
                initial_delivery_count=0 if role is Role.SENDER else None,
            )
        )
        attach = raw.expect(Attached).attach
        assert attach.unsettled is None
        assert isinstance(attach.source, Source)
        assert (attach.source.durable, attach.source.expiry_policy) == (Durability.NONE, ExpiryPolicy.SESSION_END)


def test_other_sections_of_a_request_are_ignored(raw: Raw) -> None:
    """4.2: "other standard message sections such as the header section SHOULD be ignored"."""
    session = raw.begin()
    control = raw.control(session)
    sections = message.head(message.Header(durable=True, ttl=0), None, {"x-opt-a": 1})
    sections += message.bare(message.Properties(to="/queues/nowhere"), {"a": 1}, message.value(Declare()))
    outcome = raw.outcome(session, control.send(b"request", sections))
    assert type(outcome).__name__ == "Declared"


def test_no_transactional_work_is_allowed_on_the_control_link(raw: Raw) -> None:
    """4.1."""
    session = raw.begin()
    control = raw.control(session)
    txn_id = raw.declare(session, control)
    control.send(b"request", message.value(Declare()), state=TransactionalState(txn_id=txn_id))
    error = raw.detached(control)
    assert error is not None
    assert error.condition == "amqp:not-allowed"


def test_all_frames_of_a_delivery_name_the_same_transaction(raw: Raw, channel: BlockingChannel, queue: str) -> None:
    """4.4.1: "all frames MUST be explicitly associated with the same transaction"."""
    session = raw.begin()
    control, sender = raw.control(session), raw.sender(session, queue)
    first, second = raw.declare(session, control), raw.declare(session, control)
    fields = {"handle": sender.handle, "delivery_id": 77, "delivery_tag": b"77"}
    payload = memoryview(message.data(bytes(200_000)))
    state = TransactionalState(txn_id=first)
    rest = raw.engine.send_transfer(session.channel, fields | {"state": state}, payload)
    state = TransactionalState(txn_id=second)
    assert not raw.engine.send_transfer(session.channel, {"handle": sender.handle, "state": state}, rest)
    error = raw.detached(control)
    assert error is not None
    assert error.condition == "amqp:transaction:rollback"
    assert take_all(channel, queue) == []


def test_only_transactional_transfers_name_the_transaction(raw: Raw, channel: BlockingChannel, queue: str) -> None:
    """4.4: "the txn-ids included MUST correctly indicate with which (if any) transaction this work is associated"."""
    session = raw.begin()
    control, sender = raw.control(session), raw.sender(session, queue)
    first, second = raw.declare(session, control), raw.declare(session, control)
    numbers = {txn_id: raw.post(sender, b"in it", txn_id) for txn_id in (first, second)}
    outside = raw.post(sender, b"outside")
    for txn_id, number in numbers.items():
        assert raw.outcome(session, number) == TransactionalState(txn_id=txn_id, outcome=ACCEPTED)
    assert raw.outcome(session, outside) == ACCEPTED
    raw.receiver(session, queue)
    got = raw.take()
    assert got.states == ()
    session.dispose(Role.RECEIVER, [got.delivery_id], ACCEPTED, settled=False)
    done = raw.expect(Disposed, lambda event: event.role is Role.RECEIVER)
    assert (done.state, done.settled) == (ACCEPTED, True)


def test_outcomes_of_postings_precede_the_accepted_discharge(raw: Raw, queue: str) -> None:
    """4.4.1, 4.4.4.1: "this MUST be communicated to the controller before the acceptance of a successful discharge"."""
    session = raw.begin()
    control, sender = raw.control(session), raw.sender(session, queue)
    txn_id = raw.declare(session, control)
    posted = [raw.post(sender, b"one", txn_id) for _ in range(20)]
    discharge = control.send(b"request", message.value(Discharge(txn_id=txn_id)))
    raw.flush()
    heard: list[int] = []
    while discharge not in heard:
        event = raw.expect(Disposed)
        heard += [number for _, number in event.deliveries]
        wanted = ACCEPTED if discharge in heard else TransactionalState(txn_id=txn_id, outcome=ACCEPTED)
        assert event.state == wanted
    assert heard == [*posted, discharge]


@only_standalone
def test_an_outcome_that_cannot_apply_any_more_forbids_the_discharge(raw: Raw, channel: BlockingChannel) -> None:
    """4.4.4.1: "If the resource can no longer apply the outcome … it MUST NOT allow the successful discharge"."""
    queue = channel.queue_declare(
        "", exclusive=True, arguments={"x-max-length": 1, "x-overflow": "reject-publish"}
    ).method.queue
    session = raw.begin()
    control = raw.control(session)
    channel.queue_bind(queue, "amq.fanout")
    sender = raw.sender(session, "/exchanges/amq.fanout")
    txn_id = raw.declare(session, control)
    state = raw.outcome(session, raw.post(sender, b"two", txn_id))
    assert state == TransactionalState(txn_id=txn_id, outcome=ACCEPTED)
    channel.basic_publish("", queue, b"one")  # now it is full
    wait_until(lambda: channel.queue_declare(queue, passive=True).method.message_count == 1)
    assert condition(raw.discharge(session, control, txn_id)) == "amqp:transaction:rollback"
    assert take_all(channel, queue, at_least=1) == [b"one"]


@only_standalone
def test_an_unroutable_posting_is_released_in_the_transaction(raw: Raw) -> None:
    session = raw.begin()
    control, sender = raw.control(session), raw.sender(session, "/exchanges/amq.direct/nowhere")
    txn_id = raw.declare(session, control)
    state = raw.outcome(session, raw.post(sender, b"one", txn_id))
    assert state == TransactionalState(txn_id=txn_id, outcome=RELEASED)
    assert raw.discharge(session, control, txn_id) == ACCEPTED


def test_a_settled_posting_gets_no_disposition(raw: Raw, channel: BlockingChannel, queue: str) -> None:
    session = raw.begin()
    control, sender = raw.control(session), raw.sender(session, queue)
    txn_id = raw.declare(session, control)
    raw.post(sender, b"one", txn_id, settled=True)
    assert raw.discharge(session, control, txn_id) == ACCEPTED
    assert not [event for event in raw.events if isinstance(event, Disposed)]
    assert take_all(channel, queue, at_least=1) == [b"one"]


def test_outcomes_of_one_delivery_belong_to_one_transaction(raw: Raw, channel: BlockingChannel, queue: str) -> None:
    """4.4.2: not "a different non discharged transaction … the control link MUST be terminated"."""
    channel.basic_publish("", queue, b"one")
    session = raw.begin()
    control, other = raw.control(session), raw.control(session, "other")
    first, second = raw.declare(session, control), raw.declare(session, other)
    raw.receiver(session, queue)
    got = raw.take()
    for txn_id in (first, second):
        state = TransactionalState(txn_id=txn_id, outcome=ACCEPTED)
        session.dispose(Role.RECEIVER, [got.delivery_id], state, settled=False)
    error = raw.detached(other)
    assert error is not None
    assert error.condition == "amqp:transaction:rollback"
    raw.discharge(session, control, first)
    raw.close()
    assert take_all(channel, queue) == []


def test_a_discharge_that_fails_always_succeeds(own: DtxService) -> None:
    """4.3: "the coordinator MUST always be able to complete a discharge where the fail flag is set to true"."""
    with Raw(own) as raw:
        session = raw.opened().begin()
        control, sender = raw.control(session), raw.sender(session, "q")
        crowded, settled, plain = (raw.declare(session, control) for _ in range(3))
        for _ in range(3):
            raw.outcome(session, raw.post(sender, b"one", crowded))
        anywhere = raw.sender(session, None, "anywhere")
        lost = message.bare(message.Properties(to="/queues/no-such-queue"), {}, message.data(b"lost"))
        anywhere.send(b"lost", lost, state=TransactionalState(txn_id=settled), settled=True)
        raw.outcome(session, raw.post(sender, b"one", plain))
        assert own.database is not None
        with psycopg.connect(own.database, autocommit=True) as database:
            database.execute("ALTER TABLE message RENAME TO lost")
            for txn_id in (crowded, settled, plain):
                assert raw.discharge(session, control, txn_id, fail=True) == ACCEPTED
            database.execute("ALTER TABLE lost RENAME TO message")


def test_a_posting_beyond_the_limit_is_rejected_without_a_detach(own: DtxService) -> None:
    """Transactional publish: amqp:resource-limit-exceeded is "a transient error so the link is advanced"."""
    with Raw(own) as raw:
        session = raw.opened().begin()
        control, sender = raw.control(session), raw.sender(session, "q")
        txn_id = raw.declare(session, control)
        states = [raw.outcome(session, raw.post(sender, b"one", txn_id)) for _ in range(3)]
        assert states[:2] == [TransactionalState(txn_id=txn_id, outcome=ACCEPTED)] * 2
        assert condition(states[2]) == "amqp:resource-limit-exceeded"
        assert condition(raw.discharge(session, control, txn_id)) == "amqp:transaction:rollback"
        assert raw.outcome(session, raw.post(sender, b"later")) == ACCEPTED


def test_a_deleted_target_is_reported_and_the_link_is_closed(own: DtxService) -> None:
    """Transactional publish: amqp:not-found "is fatal error so the link is closed"."""
    with Raw(own) as raw, connected(own.url()) as connection:
        session = raw.opened().begin()
        control, sender = raw.control(session), raw.sender(session, "q")
        txn_id = raw.declare(session, control)
        connection.channel().queue_delete("q")
        assert condition(raw.outcome(session, raw.post(sender, b"one", txn_id))) == "amqp:not-found"
        error = raw.detached(sender)
        assert error is not None
        assert error.condition == "amqp:not-found"
        assert raw.discharge(session, control, txn_id) == ACCEPTED


def test_a_forbidden_target_is_reported_and_the_link_is_closed(own: DtxService) -> None:
    """Transactional publish: amqp:unauthorized-access "is a fatal error so the link is closed"."""
    users = StandaloneUsers(own)
    users.add("writer")
    users.permit("writer")
    with Raw(own, user="writer", password="writer") as raw:
        session = raw.opened().begin()
        control, sender = raw.control(session), raw.sender(session, "q")
        txn_id = raw.declare(session, control)
        users.permit("writer", write="^$")
        with Raw(own):
            pass  # at a login dtx reads the changes
        assert condition(raw.outcome(session, raw.post(sender, b"one", txn_id))) == "amqp:unauthorized-access"
        error = raw.detached(sender)
        assert error is not None
        assert error.condition == "amqp:unauthorized-access"
        assert raw.discharge(session, control, txn_id) == ACCEPTED


def test_an_unroutable_message_does_not_close_an_anonymous_link(own: DtxService) -> None:
    with Raw(own) as raw:
        session = raw.opened().begin()
        sender = raw.sender(session, None)
        lost = message.bare(message.Properties(to="/queues/no-such-queue"), {}, message.data(b"lost"))
        good = message.bare(message.Properties(to="/queues/q"), {}, message.data(b"good"))
        assert condition(raw.outcome(session, sender.send(b"lost", lost))) == "amqp:not-found"
        assert raw.outcome(session, sender.send(b"good", good)) == ACCEPTED


@pytest.mark.parametrize("consumes", [False, True])
def test_a_database_that_fails_is_an_internal_error(own: DtxService, consumes: bool) -> None:
    """Transactional publish and subscribe: amqp:internal-error, which the discharge gets here."""
    assert own.database is not None
    with Raw(own) as raw, psycopg.connect(own.database, autocommit=True) as database:
        session = raw.opened().begin()
        control, sender = raw.control(session), raw.sender(session, "q")
        durable = message.head(message.Header(durable=True)) + message.data(b"old")
        assert raw.outcome(session, sender.send(b"t", durable)) == ACCEPTED
        txn_id = raw.declare(session, control)
        if consumes:
            raw.receiver(session, "q")
            got = raw.take()
            state = TransactionalState(txn_id=txn_id, outcome=ACCEPTED)
            session.dispose(Role.RECEIVER, [got.delivery_id], state, settled=True)
        else:
            raw.outcome(session, sender.send(b"t", durable, state=TransactionalState(txn_id=txn_id)))
        database.execute("ALTER TABLE message RENAME TO lost")
        assert condition(raw.discharge(session, control, txn_id)) == "amqp:internal-error"
        sender.send(b"t", durable)
        error = raw.detached(sender)
        assert error is not None
        assert error.condition == "amqp:internal-error"
        database.execute("ALTER TABLE lost RENAME TO message")


@pytest.mark.parametrize("in_transaction", [False, True])
def test_a_second_settling_receiver_is_notified_of_the_settlement(
    raw: Raw, channel: BlockingChannel, queue: str, in_transaction: bool
) -> None:
    """Transport, 2.8.3, second: "The receiver will only settle after sending the disposition to the sender and
    receiving a disposition indicating settlement of the delivery from the sender."
    """
    channel.basic_publish("", queue, b"one")
    session = raw.begin()
    control = raw.control(session)
    link = session.new_link("second", Role.RECEIVER)
    link.attach(source=Source(address=queue), target=Target(), receiver_settles=ReceiverSettles.SECOND)
    answer = raw.expect(Attached, lambda event: event.link == link.handle).attach
    assert answer.rcv_settle_mode is ReceiverSettles.SECOND
    link.grant(1)
    got = raw.take()
    if in_transaction:
        txn_id = raw.declare(session, control)
        state = TransactionalState(txn_id=txn_id, outcome=ACCEPTED)
        session.dispose(Role.RECEIVER, [got.delivery_id], state, settled=False)
        assert raw.discharge(session, control, txn_id) == ACCEPTED
    else:
        session.dispose(Role.RECEIVER, [got.delivery_id], ACCEPTED, settled=False)
    done = raw.expect(Disposed, lambda event: event.role is Role.RECEIVER)
    assert (done.state, done.settled) == (ACCEPTED, True)
    assert [number for _, number in done.deliveries] == [got.delivery_id]
    session.dispose(Role.RECEIVER, [got.delivery_id], ACCEPTED, settled=True)  # the second one: it changes nothing
    raw.detach(session, link)
    assert take_all(channel, queue) == []


def test_dtx_settles_first_whichever_mode_the_sender_requests(raw: Raw, channel: BlockingChannel, queue: str) -> None:
    """Transport, 2.7.3: the receiver sets the mode in use. dtx settles a safe message with its first disposition."""
    session = raw.begin()
    link = session.new_link("second", Role.SENDER)
    link.attach(source=Source(), target=Target(address=queue), receiver_settles=ReceiverSettles.SECOND)
    answer = raw.expect(Attached, lambda event: event.link == link.handle).attach
    assert answer.rcv_settle_mode is ReceiverSettles.FIRST
    raw.until(lambda: link.credit > 0)
    number = raw.post(link, b"one")
    done = raw.expect(Disposed)
    assert ([found for _, found in done.deliveries], done.state, done.settled) == ([number], ACCEPTED, True)
    assert take_all(channel, queue, at_least=1) == [b"one"]
