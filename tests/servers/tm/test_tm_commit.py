"""Atomic transactions of the transaction manager over two databases and two dtx."""

import threading
from typing import Any

import pika
import psycopg
import pytest
import sqlalchemy as sa
from pika.exceptions import ChannelClosedByBroker, ChannelWrongStateError
from prometheus_client import CollectorRegistry
from sqlalchemy.orm import Session

from dtx.client import XA_RBROLLBACK
from dtx.client.tm import Decision, Misuse, RolledBack, TimedOut, Transaction
from dtx.client.tm.sqlalchemy import session
from tests.support.tm import ALL, World, new_id, write


def everywhere(world: World) -> list[set[str]]:
    """The rows or messages of each of the four resources."""
    return [world.rows("db1"), world.rows("db2"), set(world.messages("q1")), set(world.messages("q2"))]


def test_all_resources_commit(world: World) -> None:
    id_ = new_id()
    with world.manager() as tm:
        with tm.transaction() as tx:
            write(tx, id_, *ALL)
        assert tx.outcome is not None
        assert tx.outcome.decision is Decision.COMMIT
        assert not tx.outcome.unfinished
        row = tm.log.read(tx.gtrid)
        assert row is not None
        assert row.resources == ALL
        tm.log.flush()
        assert tm.log.unfinished("n") == []
    assert everywhere(world) == [{id_}] * 4
    assert world.in_doubt() == []


def test_transactions_are_counted(world: World) -> None:
    registry = CollectorRegistry()
    with world.manager(registry=registry) as tm:
        for id_ in ("a", "b"):
            with tm.transaction() as tx:
                write(tx, id_, "db1", "db2")
        tx = tm.begin()
        assert registry.get_sample_value("dtx_tm_running", {"node": "n"}) == 1
        tx.rollback()
        tm.recover()
    for outcome, number in (("committed", 2), ("rolled-back", 1)):
        labels = {"node": "n", "outcome": outcome}
        assert registry.get_sample_value("dtx_tm_transactions_total", labels) == number
    assert registry.get_sample_value("dtx_tm_running", {"node": "n"}) == 0
    assert registry.get_sample_value("dtx_tm_waiting_branches", {"node": "n"}) == 0


def test_an_exception_rolls_everything_back(world: World) -> None:
    with world.manager() as tm:
        tx = tm.transaction()

        def fail() -> None:
            with tx:
                write(tx, new_id(), *ALL)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert tm.log.read(tx.gtrid) is None  # presumed abort: nothing is written
    assert everywhere(world) == [set()] * 4


def test_a_channel_closed_within_its_transaction_takes_no_further_work(world: World) -> None:
    with world.manager() as tm:
        tx = tm.begin()
        write(tx, new_id(), "q1", "db1")
        with pytest.raises(ChannelClosedByBroker):
            tx.enlist("q1").queue_declare("no-such-queue", passive=True)
        with pytest.raises(ChannelWrongStateError):
            write(tx, new_id(), "q1")
        with pytest.raises(RolledBack):
            tx.commit()
    assert everywhere(world) == [set()] * 4


def insert(session: Session, id_: str) -> None:
    session.execute(sa.text("INSERT INTO entry VALUES (:id, 1)"), {"id": id_})


def test_a_session_of_sqlalchemy_commits_with_the_transaction(world: World) -> None:
    id_ = new_id()
    with world.manager() as tm, tm.transaction() as tx:
        with session(tx, "db1") as first:
            insert(first, id_)
            first.commit()  # only a flush
            assert world.rows("db1") == set()
            with first.begin_nested() as savepoint:
                insert(first, new_id())
                savepoint.rollback()
        with session(tx, "db1") as second:
            assert second.execute(sa.text("SELECT id FROM entry")).scalars().all() == [id_]
        write(tx, id_, "q1")
    assert everywhere(world) == [{id_}, set(), {id_}, set()]


def test_a_session_that_was_rolled_back_dooms_the_transaction(world: World) -> None:
    """SQLAlchemy's rollback cannot undo a part of the transaction: none of it may be committed."""
    with world.manager() as tm:
        tx = tm.begin()
        write(tx, new_id(), "q1")
        with session(tx, "db1") as rolled_back:
            insert(rolled_back, new_id())
            rolled_back.rollback()
            insert(rolled_back, new_id())
        with pytest.raises(RolledBack, match="a session of db1 was rolled back"):
            tx.commit()
        assert tm.log.read(tx.gtrid) is None
    assert everywhere(world) == [set()] * 4


def test_an_exception_in_a_session_dooms_the_transaction(world: World) -> None:
    with world.manager() as tm:
        tx = tm.begin()

        def fail() -> None:
            with session(tx, "db1") as failed:
                insert(failed, new_id())
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        write(tx, new_id(), "q1")
        with pytest.raises(RolledBack):
            tx.commit()
        with pytest.raises(Misuse):
            tx.set_rollback_only("it is over")
    assert everywhere(world) == [set()] * 4


def test_a_resource_that_cannot_prepare_rolls_the_others_back(world: World) -> None:
    """PostgreSQL turns PREPARE TRANSACTION of a failed transaction into a ROLLBACK that looks like success."""
    with world.manager() as tm:
        tx = tm.begin()
        write(tx, new_id(), "q1", "db1", "q2", "db2")
        with pytest.raises(Exception, match="syntax"):
            tx.enlist("db2").execute("SELEKT")
        with pytest.raises(RolledBack) as raised:
            tx.commit()
        assert isinstance(raised.value.causes[0], XA_RBROLLBACK)
    assert everywhere(world) == [set()] * 4
    assert world.in_doubt() == []


def test_one_resource_alone_commits_in_one_phase(world: World) -> None:
    for name in ("db1", "q1"):
        with world.manager() as tm, tm.transaction() as tx:
            write(tx, name, name)
        assert tx.outcome is not None
        assert tx.outcome.one_phase
    with world.manager() as tm:
        assert tm.log.unfinished("n") == []
    assert everywhere(world) == [{"db1"}, set(), {"q1"}, set()]


def test_read_only_votes_leave_a_one_phase_commit(world: World) -> None:
    """X/Open 2.3.2: a read-only branch needs no second phase; the only other branch commits in one phase."""
    with world.manager() as tm:
        with tm.transaction() as tx:
            tx.enlist("q1")
            tx.enlist("q2")
            write(tx, "one", "db1")
        assert tx.outcome is not None
        assert tx.outcome.one_phase
        assert tm.log.read(tx.gtrid) is None
    assert everywhere(world) == [{"one"}, set(), set(), set()]


def test_a_read_only_branch_is_not_in_the_decision(world: World) -> None:
    with world.manager() as tm:
        with tm.transaction() as tx:
            write(tx, "one", "db1")
            tx.enlist("q1")
            write(tx, "one", "db2")
        row = tm.log.read(tx.gtrid)
        assert row is not None
        assert row.resources == ("db1", "db2")
    assert everywhere(world) == [{"one"}, {"one"}, set(), set()]


def test_a_transaction_that_takes_too_long_is_rolled_back(world: World) -> None:
    with world.manager() as tm:
        tx = tm.begin(timeout=0.0)
        write(tx, new_id(), *ALL)
        with pytest.raises(TimedOut):
            tx.commit()
    assert everywhere(world) == [set()] * 4


def test_a_consumed_message_and_a_row_are_one(world: World) -> None:
    with world.manager() as tm:
        with tm.transaction() as tx:
            write(tx, "paid", "q1")
        for attempt in (1, 2):
            tx = tm.begin()
            channel: Any = tx.enlist("q1")
            method, _, body = channel.basic_get("q")
            assert body == b"paid"
            channel.basic_ack(method.delivery_tag)
            write(tx, body.decode(), "db1")
            if attempt == 1:
                tx.rollback()
            else:
                tx.commit()
    assert everywhere(world) == [{"paid"}, set(), set(), set()]


def test_the_decorator_joins_the_transaction_that_there_is(world: World) -> None:
    with world.manager() as tm:

        @tm.transactional
        def place(id_: str) -> Transaction:
            tm.enlist("db1").execute("INSERT INTO entry VALUES (%s, 1)", (id_,))
            tm.enlist("q1").basic_publish("", "q", id_.encode())
            return tm.current

        first = place("a")
        with tm.transaction() as tx:
            assert place("b") is tx
        assert first is not tx
        with pytest.raises(Misuse, match="no transaction is under way"):
            _ = tm.current
    assert everywhere(world)[0] == {"a", "b"}


def test_many_threads_commit_at_the_same_time(world: World) -> None:
    with world.manager() as tm:

        def work(number: int) -> None:
            for position in range(5):
                with tm.transaction() as tx:
                    write(tx, f"{number}-{position}", *ALL)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        tm.log.flush()
        assert tm.log.unfinished("n") == []
    wanted = {f"{number}-{position}" for number in range(8) for position in range(5)}
    assert everywhere(world) == [wanted] * 4


def test_connections_of_the_application_take_part_and_stay_open(world: World) -> None:
    connection = pika.BlockingConnection(pika.URLParameters(world.services["q1"].url()))
    channel: Any = connection.channel()
    with world.manager() as tm, psycopg.connect(world.databases["db1"]) as database:
        for id_ in ("a", "b"):
            with tm.transaction() as tx:
                tx.enlist("db1", database).execute("INSERT INTO entry VALUES (%s, 1)", (id_,))
                assert tx.enlist("q1", channel) is channel
                channel.basic_publish("", "q", id_.encode())
                with pytest.raises(Misuse, match="another handle"):
                    tx.enlist("q1", connection.channel())
        assert channel.is_open
        with tm.transaction() as tx:  # they are not used for other transactions
            assert tx.enlist("q1") is not channel
            assert tx.enlist("db1") is not database
    connection.close()
    assert everywhere(world) == [{"a", "b"}, set(), {"a", "b"}, set()]


def test_an_unregistered_resource_cannot_be_enlisted(world: World) -> None:
    with world.manager() as tm, tm.transaction() as tx:
        with pytest.raises(Misuse, match="not registered"):
            tx.enlist("q3")
        with pytest.raises(Misuse, match="not registered"):
            tx.enlist(world.resources()[0])
