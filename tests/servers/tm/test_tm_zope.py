"""Queues in transactions of the package ``transaction``, with the real zope.sqlalchemy and pyramid_tm."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
import transaction
import zope.sqlalchemy
from pika.exceptions import AMQPError, ChannelClosedByBroker
from prometheus_client import CollectorRegistry
from sqlalchemy.orm import Session, sessionmaker

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # webob's import of cgi
    from pyramid.config import Configurator
    from pyramid.request import Request
    from pyramid.response import Response

from dtx.client import XA_RBROLLBACK, XAER_RMERR, XAResource
from dtx.client.tm import HeuristicRollback, LogFailed, Misuse, RolledBack, TransactionManager
from dtx.client.zope import QueueDataManager, join
from tests.support.client import connected
from tests.support.tm import World


class Veto:
    """A data manager that votes no after all others have voted."""

    def __init__(self) -> None:
        self.transaction_manager = transaction.manager

    def sortKey(self) -> str:  # noqa: N802 - the interface's name
        return "~~~"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("tpc_vote"):
            return self._vote
        if name in ("tpc_begin", "commit", "abort", "tpc_abort", "tpc_finish"):
            return lambda _transaction: None
        raise AttributeError(name)

    def _vote(self, _transaction: object) -> None:
        raise ValueError("no")


@pytest.fixture
def tm(world: World) -> Iterator[TransactionManager]:
    with world.manager() as manager:
        yield manager
    transaction.abort()


@pytest.fixture
def plain_sessions(world: World) -> Iterator[Any]:
    """A factory of two-phase sessions of the first database, not yet registered."""
    engine = sa.create_engine(world.databases["db1"].replace("postgresql://", "postgresql+psycopg://"))
    yield sessionmaker(engine, twophase=True)
    engine.dispose()


@pytest.fixture
def sessions(plain_sessions: Any) -> Any:
    """The same factory, registered with the thread's transaction manager."""
    zope.sqlalchemy.register(plain_sessions)
    return plain_sessions


def publish(tm: TransactionManager, body: str, name: str = "q1") -> None:
    join(tm, name).basic_publish("", "q", body.encode())


def insert(session: Session, id_: str, manager: Any = transaction.manager) -> None:
    session.execute(sa.text("INSERT INTO entry VALUES (:id, 1)"), {"id": id_})
    zope.sqlalchemy.mark_changed(session, manager)


def test_a_message_is_there_when_the_transaction_commits(world: World, tm: TransactionManager) -> None:
    with transaction.manager:
        publish(tm, "one")
        publish(tm, "two")
        publish(tm, "other", "q2")
    assert world.messages("q1") == ["one", "two"]
    assert world.messages("q2") == ["other"]
    assert world.in_doubt() == []
    tm.log.flush()
    assert tm.log.unfinished("n") == []


def test_an_abort_leaves_nothing(world: World, tm: TransactionManager) -> None:
    publish(tm, "one")
    transaction.abort()
    publish(tm, "two")
    transaction.commit()
    assert world.messages("q1") == ["two"]


def test_a_veto_after_our_vote_rolls_the_prepared_branch_back(world: World, tm: TransactionManager) -> None:
    publish(tm, "one")
    transaction.get().join(Veto())
    with pytest.raises(ValueError, match="no"):
        transaction.commit()
    transaction.abort()
    assert world.messages("q1") == []
    assert world.in_doubt() == []


def test_a_sqlalchemy_session_and_a_queue_commit_together(world: World, tm: TransactionManager, sessions: Any) -> None:
    with transaction.manager:
        publish(tm, "one")
        insert(sessions(), "one")
    publish(tm, "two")
    insert(sessions(), "two")
    transaction.get().join(Veto())
    with pytest.raises(ValueError, match="no"):
        transaction.commit()
    transaction.abort()
    assert world.rows("db1") == {"one"}
    assert world.messages("q1") == ["one"]
    assert world.in_doubt() == []


def test_a_dtx_lost_before_the_vote_votes_no(world: World, tm: TransactionManager, sessions: Any) -> None:
    publish(tm, "one")
    insert(sessions(), "one")
    world.services["q1"].kill9()
    with pytest.raises(RolledBack):
        transaction.commit()
    transaction.abort()
    world.services["q1"].start()
    assert tm.recover().clean
    assert world.rows("db1") == set()
    assert world.messages("q1") == []


def test_an_unreachable_log_votes_no(world: World, tm: TransactionManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors that are known at the vote are not left to ``tpc_finish``."""

    def failing() -> None:
        raise LogFailed("no space left on device")

    publish(tm, "one")
    monkeypatch.setattr(tm.log, "flush", failing)
    with pytest.raises(LogFailed):
        transaction.commit()
    monkeypatch.undo()
    transaction.abort()
    assert world.messages("q1") == []
    assert world.in_doubt() == []


class Between(Veto):
    """A data manager that calls *act* after all other votes and before ``tpc_finish``."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self._act = act

    def _vote(self, _transaction: object) -> None:
        self._act()


def test_recovery_completes_a_dtx_lost_after_the_vote(world: World, tm: TransactionManager) -> None:
    publish(tm, "one")
    transaction.get().join(Between(world.services["q1"].kill9))
    transaction.commit()
    assert len(tm.log.unfinished("n")) == 1
    world.services["q1"].start()
    assert tm.recover().clean
    assert world.messages("q1") == ["one"]
    assert world.in_doubt() == []


def test_a_branch_rolled_back_heuristically_after_the_vote_is_raised(world: World, tm: TransactionManager) -> None:
    def by_hand() -> None:
        world.decide("q1", "rollback")

    publish(tm, "one")
    transaction.get().join(Between(by_hand))
    with pytest.raises(HeuristicRollback):
        transaction.commit()
    transaction.abort()
    assert len(tm.log.heuristics()) == 1


def test_a_savepoint_is_undone_alone(world: World, tm: TransactionManager) -> None:
    with transaction.manager:
        publish(tm, "kept")
        first = transaction.savepoint()
        publish(tm, "undone")
        second = transaction.savepoint()
        publish(tm, "undone, too")
        second.rollback()
        publish(tm, "undone again")
        first.rollback()
        publish(tm, "kept, too")
        transaction.savepoint()
    assert world.messages("q1") == ["kept", "kept, too"]
    assert world.in_doubt() == []
    tm.log.flush()
    assert tm.log.unfinished("n") == []


def test_a_savepoint_before_the_queue_joined_undoes_its_work(world: World, tm: TransactionManager) -> None:
    with transaction.manager:
        before = transaction.savepoint()
        publish(tm, "undone")
        before.rollback()
        publish(tm, "kept")
    assert world.messages("q1") == ["kept"]


def queue_manager() -> QueueDataManager:
    """The data manager of the queue in the current transaction."""
    return next(found for found in transaction.get()._resources if isinstance(found, QueueDataManager))


def test_a_channel_closed_within_its_transaction_takes_no_further_work(world: World, tm: TransactionManager) -> None:
    publish(tm, "one")
    with pytest.raises(ChannelClosedByBroker):
        join(tm, "q1").queue_declare("no-such-queue", passive=True)
    with pytest.raises(AMQPError):
        publish(tm, "escaped")
    with pytest.raises(AMQPError):
        publish(tm, "escaped")
    with pytest.raises(RolledBack):
        transaction.commit()
    transaction.abort()
    assert world.messages("q1") == []


def test_a_savepoint_that_fails_ends_work_on_the_channel(world: World, tm: TransactionManager) -> None:
    """The channel has left its branch: a publish on it would take effect at once."""
    channel = join(tm, "q1")
    xid = queue_manager()._branches[-1].xid
    with connected(world.services["q1"].url()) as connection:
        other = XAResource(connection.channel())
        other.start(xid, join=True)
        other.end(xid, fail=True)
    with pytest.raises(XA_RBROLLBACK):
        transaction.savepoint()
    with pytest.raises(AMQPError):
        channel.basic_publish("", "q", b"escaped")
    transaction.abort()
    assert world.messages("q1") == []


def test_a_savepoint_whose_rollback_fails_ends_work_on_the_channel(
    world: World, tm: TransactionManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_xid: object) -> None:
        raise XAER_RMERR("no further branch")

    publish(tm, "one")
    savepoint = transaction.savepoint()
    publish(tm, "two")
    monkeypatch.setattr(queue_manager()._session, "start", refuse)
    with pytest.raises(XAER_RMERR):
        savepoint.rollback()
    with pytest.raises(AMQPError):
        publish(tm, "escaped")
    transaction.abort()
    assert world.messages("q1") == []


def test_recovery_commits_branches_prepared_with_a_savepoint(world: World, tm: TransactionManager) -> None:
    publish(tm, "one")
    transaction.savepoint()
    publish(tm, "two")
    transaction.get().join(Between(world.services["q1"].kill9))
    transaction.commit()
    world.services["q1"].start()
    assert len(tm.recover().committed) == 2
    assert world.messages("q1") == ["one", "two"]


def test_a_transaction_without_work_leaves_no_decision(world: World, tm: TransactionManager) -> None:
    with transaction.manager:
        join(tm, "q1")
    with pytest.raises(Misuse):
        join(tm, "q9")
    assert world.in_doubt() == []


def test_transactions_of_the_package_are_counted_too(world: World) -> None:
    registry = CollectorRegistry()
    with world.manager(registry=registry) as tm:
        for body in ("one", "two"):
            publish(tm, body)
            transaction.commit()
        publish(tm, "three")
        transaction.abort()
        publish(tm, "four")
        transaction.get().join(Between(lambda: world.decide("q1", "rollback")))
        with pytest.raises(HeuristicRollback):
            transaction.commit()
        transaction.abort()
    for outcome, number in (("committed", 2), ("rolled-back", 1), ("heuristic", 1)):
        labels = {"node": "n", "outcome": outcome}
        assert registry.get_sample_value("dtx_tm_transactions_total", labels) == number
    assert registry.get_sample_value("dtx_tm_heuristics_total", {"node": "n", "outcome": "rolled-back"}) == 1
    assert registry.get_sample_value("dtx_tm_running", {"node": "n"}) == 0


def test_pyramid_tm_commits_a_request_that_succeeds_and_no_other(
    world: World, tm: TransactionManager, plain_sessions: Any
) -> None:
    def place(request: Request) -> Response:
        session = plain_sessions()
        zope.sqlalchemy.register(session, transaction_manager=request.tm)
        join(tm, "q1", request.tm).basic_publish("", "q", request.params["id"].encode())
        insert(session, request.params["id"], request.tm)
        if "fail" in request.params:
            request.response.status_code = 400
            raise ZeroDivisionError
        return Response("placed")

    with Configurator(settings={"tm.manager_hook": "pyramid_tm.explicit_manager"}) as config:
        config.include("pyramid_tm")
        config.add_route("place", "/place")
        config.add_view(place, route_name="place")
        app = config.make_wsgi_app()
    assert Request.blank("/place?id=one").get_response(app).text == "placed"
    with pytest.raises(ZeroDivisionError):
        Request.blank("/place?id=two&fail=1").get_response(app)
    assert world.rows("db1") == {"one"}
    assert world.messages("q1") == ["one"]
    assert world.in_doubt() == []


def test_a_failed_transaction_accepts_no_resource(world: World, tm: TransactionManager) -> None:
    """A transaction begun for it would run until its time-out and keep its connection."""
    running = tm.metrics.running.labels("n")._value
    before = running.get()  # a counter of the process: another test may have left a value
    publish(tm, "one")
    transaction.get().join(Veto())
    with pytest.raises(ValueError, match="no"):
        transaction.commit()
    with pytest.raises(transaction.interfaces.TransactionFailedError):
        join(tm, "q2")
    assert running.get() == before
    transaction.abort()
    assert world.in_doubt() == []
