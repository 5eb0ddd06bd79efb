"""Promoted local transactions: after the promotion, their work belongs to a branch of a transaction manager."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psycopg
import pytest
from pika import BasicProperties
from pika.adapters.blocking_connection import BlockingChannel

from dtx.client import Coordinator, XAException, XAResource, XARollback, Xid
from dtx.wire.amqp10 import message
from dtx.wire.amqp10.coordination import PROMOTE
from dtx.wire.amqp10.link import Link
from dtx.wire.amqp10.performatives import ACCEPTED, Declare, Declared, Discharge, Rejected, Role, TransactionalState
from dtx.wire.amqp10.session import Session
from dtx.wire.amqp10.values import Described, Value
from tests.servers.amqp10.raw import Raw
from tests.support.client import connected, new_xid, take_all
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.service import DtxService
from tests.support.users import StandaloneUsers


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


def work(raw: Raw, session: Session, control: Link, queue: str, name: str = "") -> bytes:
    """A local transaction that has consumed a message and published one."""
    txn_id = raw.declare(session, control)
    link, _ = raw.receiver(session, queue, name=f"receiver{name}")
    got = raw.take()
    state = TransactionalState(txn_id=txn_id, outcome=ACCEPTED)
    session.dispose(Role.RECEIVER, [got.delivery_id], state, settled=True)
    sender = raw.sender(session, queue, f"sender{name}")
    raw.outcome(session, raw.post(sender, b"new", txn_id))
    raw.detach(session, link)
    return txn_id


def condition(state: object) -> str:
    """The error condition of a rejected outcome."""
    assert isinstance(state, Rejected), state
    assert state.error is not None
    return state.error.condition


def unknown(manager: Coordinator, xid: Xid) -> bool:
    """Whether dtx does not know the branch."""
    try:
        manager.commit(xid)
    except XAException as error:
        return "unknown xid" in str(error)
    return False


@pytest.mark.parametrize(("commit", "left"), [(True, [b"new", b"later"]), (False, [b"old"])])
def test_work_before_and_after_the_promotion_follows_the_managers_decision(
    raw: Raw, channel: BlockingChannel, queue: str, manager: Coordinator, commit: bool, left: list[bytes]
) -> None:
    channel.basic_publish("", queue, b"old")
    xid, session = new_xid(), raw.begin()
    control = raw.control(session)
    txn_id = work(raw, session, control, queue)
    assert raw.promote(session, control, txn_id, xid.to_wire()) == Declared(txn_id=txn_id)
    later = raw.outcome(session, raw.post(raw.sender(session, queue), b"later", txn_id))
    assert later == TransactionalState(txn_id=txn_id, outcome=ACCEPTED)
    with pytest.raises(XAException, match="associated"):
        manager.prepare(xid)
    assert raw.discharge(session, control, txn_id) == ACCEPTED
    assert take_all(channel, queue) == []  # the discharge decides nothing
    manager.prepare(xid)
    assert list(manager.recover()) == [xid]
    if commit:
        manager.commit(xid)
    else:
        manager.rollback(xid)
    assert take_all(channel, queue, at_least=len(left)) == left
    assert condition(raw.discharge(session, control, txn_id)) == "amqp:transaction:unknown-id"


def test_a_promotion_joins_a_branch_that_is_known(
    raw: Raw, channel: BlockingChannel, queue: str, manager: Coordinator
) -> None:
    channel.basic_publish("", queue, b"old")
    xid, session = new_xid(), raw.begin()
    other = XAResource(channel)
    other.start(xid)
    channel.basic_publish("", queue, b"with 0-9")
    control = raw.control(session)
    txn_id = work(raw, session, control, queue)
    assert raw.promote(session, control, txn_id, xid.to_wire()) == Declared(txn_id=txn_id)
    assert raw.discharge(session, control, txn_id) == ACCEPTED
    with pytest.raises(XAException, match="associated"):
        manager.prepare(xid)
    other.end(xid)
    manager.prepare(xid)
    manager.commit(xid)
    assert take_all(channel.connection.channel(), queue) == [b"with 0-9", b"new"]


def test_two_transactions_are_promoted_to_one_branch(
    raw: Raw, channel: BlockingChannel, queue: str, manager: Coordinator
) -> None:
    for body in (b"first", b"second"):
        channel.basic_publish("", queue, body)
    xid, session = new_xid(), raw.begin()
    control = raw.control(session)
    ids = [work(raw, session, control, queue, name) for name in ("a", "b")]
    for txn_id in ids:
        assert raw.promote(session, control, txn_id, xid.to_wire()) == Declared(txn_id=txn_id)
    for txn_id in ids:
        assert raw.discharge(session, control, txn_id) == ACCEPTED
    manager.commit(xid, one_phase=True)
    assert take_all(channel, queue) == [b"new", b"new"]


def test_a_transaction_is_promoted_once(raw: Raw, channel: BlockingChannel, queue: str, manager: Coordinator) -> None:
    channel.basic_publish("", queue, b"old")
    xid, other, session = new_xid(), new_xid(), raw.begin()
    control = raw.control(session)
    txn_id = work(raw, session, control, queue)
    raw.promote(session, control, txn_id, xid.to_wire())
    for again in (xid, other):
        assert condition(raw.promote(session, control, txn_id, again.to_wire())) == "amqp:illegal-state"
    assert raw.discharge(session, control, txn_id) == ACCEPTED
    assert unknown(manager, other)
    manager.commit(xid, one_phase=True)
    assert take_all(channel, queue, at_least=1) == [b"new"]


def test_a_transaction_declared_for_a_branch_is_not_promoted(raw: Raw, manager: Coordinator) -> None:
    xid, other, session = new_xid(), new_xid(), raw.begin()
    control = raw.control(session)
    txn_id = raw.declare(session, control, xid.to_wire())
    assert condition(raw.promote(session, control, txn_id, other.to_wire())) == "amqp:illegal-state"
    assert raw.discharge(session, control, txn_id) == ACCEPTED
    manager.rollback(xid)


def test_a_discharged_transaction_cannot_be_promoted(raw: Raw, manager: Coordinator) -> None:
    xid, session = new_xid(), raw.begin()
    control = raw.control(session)
    txn_id = raw.declare(session, control)
    assert raw.discharge(session, control, txn_id) == ACCEPTED
    assert condition(raw.promote(session, control, txn_id, xid.to_wire())) == "amqp:transaction:unknown-id"
    assert unknown(manager, xid)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (["txn", b"no xid"], "amqp:invalid-field"),
        (["txn", "text"], "amqp:invalid-field"),
        (["txn"], "amqp:invalid-field"),
        (["txn", new_xid().to_wire(), 1], "amqp:invalid-field"),
    ],
)
def test_a_transaction_that_failed_to_promote_is_not_committed_alone(
    raw: Raw, channel: BlockingChannel, queue: str, form: list[Value], expected: str
) -> None:
    """A discharge may follow the promotion immediately. It must not commit a part of a global transaction."""
    channel.basic_publish("", queue, b"old")
    session = raw.begin()
    control = raw.control(session)
    txn_id = work(raw, session, control, queue)
    request = Declare(global_id=Described(PROMOTE, [txn_id, *form[1:]]))
    assert condition(raw.ask(session, control, request)) == expected
    answer = raw.discharge(session, control, txn_id)
    assert condition(answer) == "amqp:transaction:rollback"
    assert "could not be promoted" in str(answer)
    assert take_all(channel, queue, at_least=1) == [b"old"]


def test_a_promotion_that_names_no_transaction_is_refused(raw: Raw) -> None:
    session = raw.begin()
    control = raw.control(session)
    nothings: tuple[Value, ...] = ([], ["txn", b"x"], {}, None)
    for nothing in nothings:
        request = Declare(global_id=Described(PROMOTE, nothing))
        assert condition(raw.ask(session, control, request)) == "amqp:invalid-field"


def test_a_prepared_or_rollback_only_branch_takes_no_promoted_work(
    raw: Raw, channel: BlockingChannel, queue: str, manager: Coordinator
) -> None:
    session = raw.begin()
    control = raw.control(session)
    voted, failed = new_xid(), new_xid()
    for xid, fail in ((voted, False), (failed, True)):
        txn_id = raw.declare(session, control, xid.to_wire())
        raw.outcome(session, raw.post(raw.sender(session, queue, f"sender-{fail}"), b"branch", txn_id))
        assert raw.discharge(session, control, txn_id, fail=fail) == ACCEPTED
    manager.prepare(voted)
    for xid, expected in ((voted, "amqp:illegal-state"), (failed, "amqp:transaction:rollback")):
        channel.basic_publish("", queue, b"old")
        txn_id = work(raw, session, control, queue, str(xid))
        assert condition(raw.promote(session, control, txn_id, xid.to_wire())) == expected
        assert condition(raw.discharge(session, control, txn_id)) == "amqp:transaction:rollback"
        assert take_all(channel, queue, at_least=1) == [b"old"]
    manager.commit(voted)
    assert take_all(channel, queue, at_least=1) == [b"branch"]
    with pytest.raises(XARollback):
        manager.prepare(failed)


def test_the_branch_of_another_user_takes_no_promoted_work(small: DtxService) -> None:
    xid = new_xid()
    users = StandaloneUsers(small)
    users.add("alice")
    users.permit("alice")
    with Raw(small) as mine, Raw(small, user="alice", password="alice") as theirs:
        session, far = mine.opened().begin(), theirs.opened().begin()
        mine.declare(session, mine.control(session), xid.to_wire())
        control = theirs.control(far)
        txn_id = theirs.declare(far, control)
        assert condition(theirs.promote(far, control, txn_id, xid.to_wire())) == "amqp:unauthorized-access"
        assert condition(theirs.discharge(far, control, txn_id)) == "amqp:transaction:rollback"
    users.remove("alice")


def test_promoted_work_counts_towards_the_limits_of_the_branch(small: DtxService) -> None:
    """A branch that has no room for the work of a promoted transaction continues without it."""
    xid = new_xid()
    with Raw(small) as raw, connected(small.url()) as connection:
        queue = connection.channel().queue_declare("limited", durable=True).method.queue
        session = raw.opened().begin()
        control, sender = raw.control(session), raw.sender(session, queue)
        branch, local = raw.declare(session, control, xid.to_wire()), raw.declare(session, control)
        for txn_id, body in ((branch, b"branch"), (local, b"local"), (local, b"local")):
            raw.outcome(session, raw.post(sender, body, txn_id))
        assert condition(raw.promote(session, control, local, xid.to_wire())) == "amqp:resource-limit-exceeded"
        assert condition(raw.discharge(session, control, local)) == "amqp:transaction:rollback"
        assert raw.discharge(session, control, branch) == ACCEPTED
        Coordinator(connection).commit(xid, one_phase=True)
        assert take_all(connection.channel(), queue) == [b"branch"]


def test_a_transaction_that_took_too_long_is_not_promoted(postgres: PostgresServer) -> None:
    database, xid = postgres.create_database(), new_xid()
    with DtxService(database=database, options=("--default-timeout", "1")) as service, Raw(service) as raw:
        session = raw.opened().begin()
        control = raw.control(session)
        txn_id = raw.declare(session, control)
        wait_until(lambda: "branch timed out" in service.log_path.read_text())
        assert condition(raw.promote(session, control, txn_id, xid.to_wire())) == "amqp:transaction:timeout"
        assert condition(raw.discharge(session, control, txn_id)) == "amqp:transaction:rollback"
    postgres.drop_database(database)


def test_a_discharge_that_fails_makes_the_branch_rollback_only(
    raw: Raw, channel: BlockingChannel, queue: str, manager: Coordinator
) -> None:
    channel.basic_publish("", queue, b"old")
    xid, session = new_xid(), raw.begin()
    control = raw.control(session)
    txn_id = work(raw, session, control, queue)
    raw.promote(session, control, txn_id, xid.to_wire())
    assert raw.discharge(session, control, txn_id, fail=True) == ACCEPTED
    with pytest.raises(XARollback):
        manager.prepare(xid)
    assert take_all(channel, queue, at_least=1) == [b"old"]


def test_the_end_of_the_control_link_dooms_the_branch(
    raw: Raw, channel: BlockingChannel, queue: str, manager: Coordinator
) -> None:
    channel.basic_publish("", queue, b"old")
    xid, session = new_xid(), raw.begin()
    control = raw.control(session)
    txn_id = work(raw, session, control, queue)
    raw.promote(session, control, txn_id, xid.to_wire())
    raw.detach(session, control)
    with pytest.raises(XARollback):
        manager.prepare(xid)
    assert take_all(channel, queue, at_least=1) == [b"old"]


def test_a_promotion_and_its_discharge_may_be_sent_at_once(
    raw: Raw, channel: BlockingChannel, queue: str, manager: Coordinator
) -> None:
    channel.basic_publish("", queue, b"old")
    xid, session = new_xid(), raw.begin()
    control = raw.control(session)
    txn_id = work(raw, session, control, queue)
    control.send(b"p", message.value(Declare(global_id=Described(PROMOTE, [txn_id, xid.to_wire()]))))
    assert raw.ask(session, control, Discharge(txn_id=txn_id)) == ACCEPTED
    assert take_all(channel, queue) == []
    manager.prepare(xid)
    manager.commit(xid)
    assert take_all(channel, queue, at_least=1) == [b"new"]


@contextmanager
def busy(service: DtxService, operation: Callable[[Coordinator], object]) -> Iterator[None]:
    """Start *operation* of a transaction manager, which waits for the database until this context ends."""
    assert service.database is not None
    with (
        psycopg.connect(service.database) as stalling,
        psycopg.connect(service.database, autocommit=True) as looking,
        ThreadPoolExecutor(1) as pool,
    ):
        stalling.execute("LOCK TABLE branch, journal IN ACCESS EXCLUSIVE MODE")

        def ask() -> None:
            with connected(service.url()) as connection:
                operation(Coordinator(connection))

        asked = pool.submit(ask)
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
        wait_until(lambda: looking.execute(waiting).fetchone() != (0,) or asked.done())
        assert not asked.done()
        yield
        stalling.rollback()
        asked.result()


def test_a_waiting_declare_without_its_link_begins_nothing(small: DtxService) -> None:
    """Another link may have its handle by then, and the association would never end."""
    xid = new_xid()
    with Raw(small) as raw, connected(small.url()) as connection:
        connection.channel().queue_declare("taken", durable=True)
        session = raw.opened().begin()
        control, other, sender = raw.control(session), raw.control(session, "other"), raw.sender(session, "taken")
        branch = raw.declare(session, control, xid.to_wire())
        raw.outcome(session, raw.post(sender, b"branch", branch))
        assert raw.discharge(session, control, branch) == ACCEPTED
        with busy(small, lambda manager: manager.commit(xid, one_phase=True)):
            other.send(b"d", message.value(Declare(global_id=xid.to_wire())))
            raw.flush()
            raw.detach(session, other)
            assert raw.sender(session, "taken", "place").handle == other.handle
        branch = raw.declare(session, control, xid.to_wire())  # the branch begins anew
        raw.outcome(session, raw.post(sender, b"again", branch))
        assert raw.discharge(session, control, branch) == ACCEPTED
        Coordinator(connection).commit(xid, one_phase=True)
        assert take_all(connection.channel(), "taken", at_least=2) == [b"branch", b"again"]


@pytest.mark.parametrize("voted", [True, False])
def test_a_promotion_waits_for_pending_work_of_its_branch(small: DtxService, voted: bool) -> None:
    """A discharge that immediately follows it waits as well: it must not commit work that is to be promoted."""
    xid = new_xid()
    queue = f"waiting-{voted}"
    with Raw(small) as raw, connected(small.url()) as connection:
        connection.channel().queue_declare(queue, durable=True)
        session = raw.opened().begin()
        control, sender = raw.control(session), raw.sender(session, queue)
        branch = raw.declare(session, control, xid.to_wire())
        raw.outcome(session, raw.post(sender, b"branch", branch))
        assert raw.discharge(session, control, branch) == ACCEPTED
        local, lost = raw.declare(session, control), raw.declare(session, control)
        raw.outcome(session, raw.post(sender, b"local", local))
        other = raw.control(session, "other")
        alone = raw.declare(session, other)
        raw.outcome(session, raw.post(sender, b"alone", alone))

        def end(manager: Coordinator) -> None:
            if voted:
                manager.prepare(xid)
            else:
                manager.commit(xid, one_phase=True)  # then the branch is unknown, and begins anew

        with busy(small, end):
            requests = [
                control.send(b"p", message.value(Declare(global_id=Described(PROMOTE, [txn_id, xid.to_wire()]))))
                for txn_id in (local, lost, alone)
            ]
            discharge = control.send(b"d", message.value(Discharge(txn_id=local)))
            again = raw.promote(session, control, local, xid.to_wire())
            assert condition(again) == "amqp:transaction:unknown-id"  # it is being discharged
            assert condition(raw.promote(session, control, lost, xid.to_wire())) == "amqp:illegal-state"
            raw.detach(session, other)  # which ends its transaction, whose promotion waits
        promoted, ended = raw.outcome(session, requests[0]), raw.outcome(session, discharge)
        assert condition(raw.outcome(session, requests[2])) == "amqp:transaction:rollback"
        manager = Coordinator(connection)
        if voted:
            assert condition(promoted) == "amqp:illegal-state"
            assert condition(ended) == "amqp:transaction:rollback"
            manager.commit(xid)
            assert take_all(connection.channel(), queue) == [b"branch"]
        else:
            assert promoted == Declared(txn_id=local)
            assert ended == ACCEPTED
            assert raw.discharge(session, control, lost) == ACCEPTED
            manager.commit(xid, one_phase=True)
            assert take_all(connection.channel(), queue) == [b"branch", b"local"]


def test_a_crash_behind_the_promotion_leaves_nothing_of_the_branch(postgres: PostgresServer) -> None:
    database, xid = postgres.create_database(), new_xid()
    with DtxService(database=database) as service:
        with connected(service.url()) as connection:
            connection.channel().queue_declare("q", durable=True)
            channel = connection.channel()
            channel.confirm_delivery()
            channel.basic_publish("", "q", b"old", BasicProperties(delivery_mode=2))
        with Raw(service) as raw:
            session = raw.opened().begin()
            control = raw.control(session)
            txn_id = raw.declare(session, control)
            raw.receiver(session, "q")
            got = raw.take()
            state = TransactionalState(txn_id=txn_id, outcome=ACCEPTED)
            session.dispose(Role.RECEIVER, [got.delivery_id], state, settled=True)
            durable = message.head(message.Header(durable=True)) + message.data(b"new")
            raw.sender(session, "q").send(b"t", durable, state=TransactionalState(txn_id=txn_id), settled=True)
            assert raw.promote(session, control, txn_id, xid.to_wire()) == Declared(txn_id=txn_id)
            service.kill9()
        service.start()
        with connected(service.url()) as connection:
            manager = Coordinator(connection)
            assert list(manager.recover()) == []
            assert unknown(manager, xid)
        with connected(service.url()) as connection:
            assert take_all(connection.channel(), "q") == [b"old"]
    postgres.drop_database(database)
