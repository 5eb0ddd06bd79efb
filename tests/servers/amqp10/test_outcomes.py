"""Outcomes other than accepted, in a transaction for a branch: the commit of the branch applies them."""

import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from pika import BasicProperties
from pika.adapters.blocking_connection import BlockingChannel

from dtx.client import Coordinator, XARollback, Xid
from dtx.wire.amqp10 import message
from dtx.wire.amqp10.endpoint import Disposed
from dtx.wire.amqp10.link import Link
from dtx.wire.amqp10.performatives import (
    ACCEPTED,
    RELEASED,
    Accepted,
    Discharge,
    Error,
    Modified,
    Outcome,
    Rejected,
    Released,
    Role,
    TransactionalState,
)
from dtx.wire.amqp10.session import Session
from tests.servers.amqp10.raw import Raw
from tests.support.broker import Mode
from tests.support.client import connected, new_xid, take_all
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.rabbitmq import RabbitNode
from tests.support.service import DtxService

NOTED = {"x-why": "broken"}
DEAD = [Rejected(), Modified(delivery_failed=True, undeliverable_here=True, message_annotations=NOTED)]
BACK = [Released(), Modified(delivery_failed=True, message_annotations=NOTED)]


@pytest.fixture
def raw(service: DtxService) -> Iterator[Raw]:
    """A connection that sends exactly what a test wants."""
    with Raw(service) as open_connection:
        yield open_connection.opened()


@pytest.fixture
def manager(service: DtxService) -> Iterator[Coordinator]:
    """The transaction manager."""
    with connected(service.url()) as connection:
        yield Coordinator(connection)


@pytest.fixture
def dead(channel: BlockingChannel) -> Iterator[str]:
    """A queue for dead letters."""
    name = f"dead-{secrets.token_hex(6)}"
    channel.queue_declare(name, durable=True)
    yield name
    channel.connection.channel().queue_delete(name)


@pytest.fixture
def source(channel: BlockingChannel, dead: str) -> Iterator[str]:
    """A queue with one message, whose dead letters go to ``dead``."""
    yield from dying(channel, dead)


def dying(channel: BlockingChannel, dead: str) -> Iterator[str]:
    """A queue whose dead letters go to *dead*; it has one message."""
    name = f"dying-{secrets.token_hex(6)}"
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead}
    channel.queue_declare(name, durable=True, arguments=arguments)
    put(channel, name)
    yield name
    channel.connection.channel().queue_delete(name)


def put(channel: BlockingChannel, queue: str) -> None:
    """Publish a persistent message."""
    confirming = channel.connection.channel()
    confirming.confirm_delivery()
    confirming.basic_publish("", queue, b"one", BasicProperties(delivery_mode=2, headers={"a": 1}))


def retire(
    raw: Raw, queue: str, outcome: Outcome, xid: Xid | None, *, settled: bool = False, **options: Any
) -> tuple[Session, Link, Link, bytes]:
    """Give a message from *queue* the *outcome*, in a new transaction, which is for the branch *xid* or local."""
    session = raw.begin()
    control = raw.control(session)
    link, _ = raw.receiver(session, queue, **options)
    got = raw.take()
    txn_id = raw.declare(session, control, None if xid is None else xid.to_wire())
    state = TransactionalState(txn_id=txn_id, outcome=outcome)
    session.dispose(Role.RECEIVER, [got.delivery_id], state, settled=settled)
    return session, control, link, txn_id


def discharge(raw: Raw, session: Session, control: Link, txn_id: bytes) -> None:
    """Discharge with success."""
    assert raw.discharge(session, control, txn_id) == ACCEPTED


@pytest.mark.parametrize(
    ("outcome", "settled"), [(DEAD[0], False), (DEAD[1], True)], ids=["rejected", "undeliverable-settled"]
)
@pytest.mark.parametrize("end", ["commit", "one-phase", "rollback", "rollback-prepared"])
def test_a_rejected_message_is_dead_lettered_only_at_commit(
    raw: Raw,
    mode: Mode,
    channel: BlockingChannel,
    source: str,
    dead: str,
    manager: Coordinator,
    outcome: Outcome,
    settled: bool,
    end: str,
) -> None:
    xid = new_xid()
    retired = retire(raw, source, outcome, xid, settled=settled)
    discharge(raw, retired[0], retired[1], retired[3])
    if not settled:  # "on a successful discharge, the resource … may immediately settle" (4.4.2)
        told = raw.expect(Disposed, lambda event: event.role is Role.RECEIVER)
        assert (told.state, told.settled) == (outcome, True)
    assert take_all(channel, source) == take_all(channel, dead) == []
    if end in ("commit", "rollback-prepared"):
        manager.prepare(xid)
        assert take_all(channel, source) == take_all(channel, dead) == []
        assert xid in manager.recover()
    raw.detach(retired[0], retired[2])
    if end.startswith("rollback"):
        manager.rollback(xid)
    else:
        manager.commit(xid, one_phase=end == "one-phase")
    there, nowhere = (source, dead) if end.startswith("rollback") else (dead, source)
    wait_until(lambda: channel.queue_declare(there, passive=True).method.message_count == 1)
    method, properties, body = channel.basic_get(there, auto_ack=True)
    assert method is not None
    assert properties is not None
    assert body == b"one"
    assert properties.headers["a"] == 1
    noted = isinstance(outcome, Modified) and there == dead and mode == "standalone"
    assert properties.headers.get("x-why") == ("broken" if noted else None)
    if there == dead:
        death = properties.headers["x-death"][0]
        assert (death["queue"], death["reason"], death["count"]) == (source, "rejected", 1)
    assert take_all(channel, nowhere) == []


@pytest.mark.parametrize("outcome", DEAD + BACK, ids=["rejected", "undeliverable", "released", "modified"])
def test_a_local_transaction_commits_them_too(
    raw: Raw, channel: BlockingChannel, source: str, dead: str, outcome: Outcome
) -> None:
    session, control, link, txn_id = retire(raw, source, outcome, None)
    assert take_all(channel, source) == take_all(channel, dead) == []
    discharge(raw, session, control, txn_id)
    raw.detach(session, link)
    there, nowhere = (dead, source) if outcome in DEAD else (source, dead)
    assert take_all(channel, there, at_least=1) == [b"one"]
    assert take_all(channel, nowhere) == []


@pytest.mark.parametrize(
    ("outcome", "end"),
    [(BACK[0], "commit"), (BACK[1], "one-phase"), (BACK[1], "rollback"), (BACK[0], "rollback-prepared")],
)
def test_a_released_message_returns_when_the_branch_ends(
    raw: Raw, channel: BlockingChannel, source: str, manager: Coordinator, outcome: Outcome, end: str
) -> None:
    xid = new_xid()
    session, control, link, txn_id = retire(raw, source, outcome, xid)
    discharge(raw, session, control, txn_id)
    raw.detach(session, link)
    assert take_all(channel, source) == []
    if end in ("commit", "rollback-prepared"):
        manager.prepare(xid)
        assert take_all(channel, source) == []
        assert xid in manager.recover()
    if end.startswith("rollback"):
        manager.rollback(xid)
    else:
        manager.commit(xid, one_phase=end == "one-phase")
    assert take_all(channel, source, at_least=1) == [b"one"]


def test_a_rejected_message_without_dead_letter_exchange_is_dropped(
    raw: Raw, channel: BlockingChannel, queue: str, manager: Coordinator
) -> None:
    for commit in (False, True):
        put(channel, queue)
        xid = new_xid()
        session, control, link, txn_id = retire(raw, queue, Rejected(), xid, name=f"receiver-{commit}")
        discharge(raw, session, control, txn_id)
        raw.detach(session, link)
        manager.prepare(xid)
        (manager.commit if commit else manager.rollback)(xid)
        assert take_all(channel, queue, at_least=int(not commit)) == ([] if commit else [b"one"])


@pytest.mark.parametrize(("default", "prepared"), [(Accepted(), False), (Rejected(), False), (Accepted(), True)])
def test_a_roll_back_behind_the_discharge_applies_no_default_outcome(
    raw: Raw, channel: BlockingChannel, queue: str, manager: Coordinator, default: Outcome, prepared: bool
) -> None:
    """4.4.4.2 is about a discharge that fails. After a successful one, a consumed message returns to its queue."""
    for settled in (False, True):
        put(channel, queue)
        xid = new_xid()
        session, control, link, txn_id = retire(
            raw, queue, ACCEPTED, xid, settled=settled, default_outcome=default, name=f"receiver-{settled}"
        )
        discharge(raw, session, control, txn_id)
        if prepared:
            manager.prepare(xid)
        manager.rollback(xid)
        raw.detach(session, link)
        assert take_all(channel, queue, at_least=1) == [b"one"]


def test_outcomes_go_with_a_promoted_transaction(
    raw: Raw, channel: BlockingChannel, source: str, dead: str, manager: Coordinator
) -> None:
    xid = new_xid()
    session, control, link, txn_id = retire(raw, source, Rejected(), None)
    raw.promote(session, control, txn_id, xid.to_wire())
    discharge(raw, session, control, txn_id)
    raw.detach(session, link)
    manager.prepare(xid)
    assert take_all(channel, source) == take_all(channel, dead) == []
    manager.commit(xid)
    assert take_all(channel, dead, at_least=1) == [b"one"]
    assert take_all(channel, source) == []


def test_outcomes_of_a_client_that_left_belong_to_the_branch(
    service: DtxService, channel: BlockingChannel, source: str, dead: str, manager: Coordinator
) -> None:
    for commit in (False, True):
        xid = new_xid()
        with Raw(service) as raw:
            session, control, _, txn_id = retire(raw.opened(), source, Rejected(), xid)
            discharge(raw, session, control, txn_id)
            raw.close()
        manager.prepare(xid)
        assert take_all(channel, source) == take_all(channel, dead) == []
        if commit:
            manager.commit(xid)
            assert take_all(channel, dead, at_least=1) == [b"one"]
            assert take_all(channel, source) == []
        else:
            manager.rollback(xid)
            wait_until(lambda: channel.queue_declare(source, passive=True).method.message_count == 1)
            assert take_all(channel, dead) == []


def test_a_client_lost_before_the_discharge_has_rejected_nothing(
    service: DtxService, channel: BlockingChannel, source: str, dead: str, manager: Coordinator
) -> None:
    xid = new_xid()
    with Raw(service) as raw:
        retire(raw.opened(), source, Rejected(), xid)
        raw.flush()
        wait_until(lambda: channel.queue_declare(source, passive=True).method.message_count == 0)
    with pytest.raises(XARollback):
        manager.prepare(xid)
    assert take_all(channel, source, at_least=1) == [b"one"]
    assert take_all(channel, dead) == []


def test_a_branch_commits_outcomes_and_work_together(
    raw: Raw, channel: BlockingChannel, source: str, dead: str, queue: str, manager: Coordinator
) -> None:
    xid = new_xid()
    put(channel, queue)
    session, control, link, txn_id = retire(raw, source, Rejected(), xid)
    other, _ = raw.receiver(session, queue, name="other")
    state = TransactionalState(txn_id=txn_id, outcome=ACCEPTED)
    session.dispose(Role.RECEIVER, [raw.take().delivery_id], state, settled=True)
    raw.outcome(session, raw.post(raw.sender(session, queue), b"new", txn_id))
    discharge(raw, session, control, txn_id)
    raw.detach(session, link)
    raw.detach(session, other)
    manager.prepare(xid)
    assert take_all(channel, source) == take_all(channel, dead) == take_all(channel, queue) == []
    manager.commit(xid)
    assert take_all(channel, dead, at_least=1) == [b"one"]
    assert take_all(channel, queue, at_least=1) == [b"new"]
    assert take_all(channel, source) == []


def test_too_many_outcomes_doom_the_transaction(small: DtxService) -> None:
    """Outcomes count as messages, of which a branch may hold two here."""
    with Raw(small) as raw, connected(small.url()) as connection:
        channel = connection.channel()
        channel.queue_declare("many", durable=True)
        for _ in range(3):
            put(channel, "many")
        session = raw.opened().begin()
        control = raw.control(session)
        txn_id = raw.declare(session, control)
        raw.receiver(session, "many", credit=3)
        for _ in range(3):
            state = TransactionalState(txn_id=txn_id, outcome=RELEASED)
            session.dispose(Role.RECEIVER, [raw.take().delivery_id], state, settled=True)
        answer = raw.discharge(session, control, txn_id)
        assert isinstance(answer, Rejected)
        assert answer.error is not None
        assert answer.error.condition == "amqp:transaction:rollback"
        assert take_all(channel, "many", at_least=3) == [b"one"] * 3
        channel.queue_delete("many")


@pytest.mark.parametrize("commit", [True, False])
def test_a_rejection_is_durable_with_the_vote_or_undone(
    postgres: PostgresServer, mode: Mode, request: pytest.FixtureRequest, commit: bool
) -> None:
    """Without a broker, the dead letter is part of the branch. A broker does not know of the dead letter before the
    commit, and gets the message back when dtx dies.
    """
    node: RabbitNode | None = request.getfixturevalue("shared_rabbitmq") if mode == "alongside" else None
    database, xid = postgres.create_database(), new_xid()
    with DtxService(broker=None if node is None else node.url(), database=database) as service:
        with connected(service.url()) as connection:
            connection.channel().queue_declare("dead", durable=True)
            arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
            connection.channel().queue_declare("dying", durable=True, arguments=arguments)
            connection.channel().queue_declare("freed", durable=True)
            put(connection.channel(), "dying")
            put(connection.channel(), "freed")
        with Raw(service) as raw:
            session, control, _, txn_id = retire(raw.opened(), "dying", Rejected(), xid)
            raw.receiver(session, "freed", name="freed")
            state = TransactionalState(txn_id=txn_id, outcome=RELEASED)
            session.dispose(Role.RECEIVER, [raw.take().delivery_id], state, settled=True)
            discharge(raw, session, control, txn_id)
            with connected(service.url()) as connection:
                Coordinator(connection).prepare(xid)
            service.kill9()
        service.start()
        with connected(service.url()) as connection:
            channel, decider = connection.channel(), Coordinator(connection)
            assert list(decider.recover()) == [xid]
            if mode == "alongside":
                wait_until(lambda: channel.queue_declare("dying", passive=True).method.message_count == 1)
            else:
                assert take_all(channel, "dying") == take_all(channel, "dead") == []
            (decider.commit if commit else decider.rollback)(xid)
            there = "dead" if commit and mode == "standalone" else "dying"
            assert take_all(channel, there, at_least=1) == [b"one"]
            assert take_all(channel, "dying" if there == "dead" else "dead") == []
            assert take_all(channel, "freed", at_least=1) == [b"one"]
            assert list(decider.recover()) == []
            for name in ("dead", "dying", "freed"):
                channel.queue_delete(name)
    postgres.drop_database(database)


def test_only_outcomes_survive_as_a_vote(postgres: PostgresServer) -> None:
    """A branch with only a released message can be prepared as well, so dtx must know it after a crash."""
    database, xid = postgres.create_database(), new_xid()
    with DtxService(database=database) as service:
        with connected(service.url()) as connection:
            connection.channel().queue_declare("q", durable=True)
            put(connection.channel(), "q")
        with Raw(service) as raw:
            session, control, _, txn_id = retire(raw.opened(), "q", RELEASED, xid)
            discharge(raw, session, control, txn_id)
            with connected(service.url()) as connection:
                Coordinator(connection).prepare(xid)
            service.kill9()
        service.start()
        with connected(service.url()) as connection:
            decider = Coordinator(connection)
            assert list(decider.recover()) == [xid]
            decider.commit(xid)
            assert take_all(connection.channel(), "q", at_least=1) == [b"one"]
    postgres.drop_database(database)


def test_many_are_rejected_at_once_and_in_their_order(
    raw: Raw, channel: BlockingChannel, source: str, dead: str
) -> None:
    """More messages than dtx reads at a time, and some that are larger than that limit."""
    sizes = [1] * 220 + [3 << 20] * 4 + [1]
    take_all(channel, source, at_least=1)
    confirming = channel.connection.channel()
    confirming.confirm_delivery()
    for number, size in enumerate(sizes):
        confirming.basic_publish("", source, b"%d " % number + bytes(size))
    session = raw.begin()
    control = raw.control(session)
    txn_id = raw.declare(session, control)
    link, _ = raw.receiver(session, source, credit=len(sizes))
    numbers = [raw.take().delivery_id for _ in sizes]
    session.dispose(Role.RECEIVER, numbers, TransactionalState(txn_id=txn_id, outcome=Rejected()), settled=True)
    discharge(raw, session, control, txn_id)
    raw.detach(session, link)
    found = take_all(channel, dead, at_least=len(sizes))
    assert [int(body.split(b" ")[0]) for body in found] == list(range(len(sizes)))
    assert take_all(channel, source) == []


@pytest.mark.parametrize("in_transaction", [False, True])
@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        (Modified(delivery_failed=True, message_annotations={"x-opt-why": "z" * 600}), Modified(delivery_failed=True)),
        (Rejected(error=Error(condition="z" * 600)), Rejected()),
    ],
    ids=["modified", "rejected"],
)
def test_a_client_with_small_frames_gets_a_shortened_outcome(
    service: DtxService, channel: BlockingChannel, queue: str, outcome: Outcome, told: Outcome, in_transaction: bool
) -> None:
    """The answer has a shorter outcome. The discharge is answered, and the connection stays open."""
    channel.basic_publish("", queue, b"one")
    with Raw(service, max_frame_size=512) as raw:
        session = raw.opened().begin()
        control = raw.control(session)
        raw.receiver(session, queue)
        number = raw.take().delivery_id
        if in_transaction:
            txn_id = raw.declare(session, control)
            state = TransactionalState(txn_id=txn_id, outcome=outcome)
            session.dispose(Role.RECEIVER, [number], state, settled=False)
            assert raw.discharge(session, control, txn_id) == ACCEPTED
        else:
            session.dispose(Role.RECEIVER, [number], outcome, settled=False)
        done = raw.expect(Disposed, lambda event: event.role is Role.RECEIVER)
        assert (done.state, done.settled) == (told, True)
        raw.close()
    if isinstance(outcome, Modified):
        assert take_all(channel, queue, at_least=1) == [b"one"]
    assert take_all(channel, queue) == []


@pytest.mark.parametrize("settled", [False, True])
def test_a_transactional_state_without_outcome_decides_nothing_until_settled(
    raw: Raw, channel: BlockingChannel, queue: str, settled: bool
) -> None:
    """4.4.2: the outcome "is applied at the source". Without one, settling applies the default outcome."""
    channel.basic_publish("", queue, b"one")
    session = raw.begin()
    control = raw.control(session)
    link, _ = raw.receiver(session, queue)
    number = raw.take().delivery_id
    txn_id = raw.declare(session, control)
    session.dispose(Role.RECEIVER, [number], TransactionalState(txn_id=txn_id), settled=settled)
    assert raw.discharge(session, control, txn_id) == ACCEPTED
    if not settled:
        assert take_all(channel, queue) == []
        session.dispose(Role.RECEIVER, [number], ACCEPTED, settled=True)
    raw.detach(session, link)
    assert take_all(channel, queue, at_least=settled) == [b"one"] * settled


def test_a_message_that_two_transactions_reject_in_turn_dies_once(
    raw: Raw, channel: BlockingChannel, source: str, dead: str
) -> None:
    """The first is rolled back in the same read, before dtx has looked for its dead letter."""
    session = raw.begin()
    control = raw.control(session)
    raw.receiver(session, source)
    got = raw.take()
    first, second = raw.declare(session, control), raw.declare(session, control)

    def reject(txn_id: bytes) -> None:
        state = TransactionalState(txn_id=txn_id, outcome=Rejected())
        session.dispose(Role.RECEIVER, [got.delivery_id], state, settled=False)

    reject(first)
    asked = control.send(b"request", message.value(Discharge(txn_id=first, fail=True)))
    reject(second)
    assert raw.outcome(session, asked) == ACCEPTED
    discharge(raw, session, control, second)
    assert take_all(channel, dead, at_least=1) == [b"one"]
    assert take_all(channel, source) == []
