"""Recovery: which branches it ends and when, and its behaviour with unreachable resources and logs."""

import json
import os
import sqlite3
import subprocess
import sys
import time
from functools import partial
from typing import Any

import psycopg
import pytest

from dtx.client import Xid
from dtx.client.tm import (
    Decision,
    DtxResource,
    HeuristicMixed,
    LogFailed,
    Misuse,
    OutcomeUnknown,
    Pep249Resource,
    RolledBack,
    steps,
)
from dtx.client.tm.decisions import DecisionRow, now
from dtx.client.tm.recovery import Gtrid
from dtx.client.tm.steps import CommitPoint
from tests.support.broker import only_alongside
from tests.support.processes import wait_until
from tests.support.tm import ALL, World, left_at, new_id, write


def prepared_elsewhere(world: World, name: str, xid: Xid) -> None:
    """Prepare branch *xid* at resource *name*, outside the transaction manager."""
    (resource,) = [each for each in world.resources() if each.name == name]
    session = resource.open()
    session.start(xid)
    if name.startswith("db"):
        session.handle.execute("INSERT INTO entry VALUES (%s, 1)", (new_id(),))
    else:
        session.handle.basic_publish("", "q", b"foreign")
    session.end(xid)
    session.prepare(xid)
    session.close()


def test_branches_of_others_are_never_touched(world: World) -> None:
    """Branches of another node, with another format id or with an unreadable gtrid belong to others."""
    with world.manager() as tm:
        mine = tm.identity
        old = Gtrid("other", "0123456789ab", time.time() - 3600, 1).to_octets()
        like = Gtrid("n", "0123456789ab", time.time() - 3600, 1).to_octets()
        foreign = [Xid(mine.format_id, old, b"q1"), Xid(7, like, b"q1"), Xid(mine.format_id, b"n.x", b"q1")]
        for xid in foreign:
            prepared_elsewhere(world, "q1", xid)
            prepared_elsewhere(world, "db1", Xid(xid.format_id, xid.gtrid, b"db1"))
        before = world.in_doubt()
        report = tm.recover()
        assert report.clean
        assert not report.rolled_back
        assert world.in_doubt() == before
        assert len(before) == 6


@pytest.mark.parametrize("name", ["db1", "q1"])
def test_an_orphan_is_rolled_back_when_it_is_old_enough(world: World, name: str) -> None:
    dead = Gtrid("n", "0123456789ab", time.time() - 100, 1).to_octets()
    with world.manager(interval=3600.0) as tm:
        xid = tm.identity.xid(dead, name)
        prepared_elsewhere(world, name, xid)
        report = tm.recover()
        assert "not touched" in report.waiting[xid]
        assert tm.log.read(dead) is None
    with world.manager(interval=60.0) as tm:
        assert tm.recover().rolled_back == [xid]
        row = tm.log.read(dead)
        assert row is not None
        assert row.decision is Decision.ROLLBACK
    assert world.in_doubt() == []


def test_a_branch_without_a_known_resource_is_rolled_back(world: World) -> None:
    """The gtrid identifies the owner; any bytes in the bqual must not stop recovery."""
    dead = Gtrid("n", "0123456789ab", time.time() - 100, 1).to_octets()
    with world.manager() as tm:
        strange = [Xid(tm.identity.format_id, dead, bqual) for bqual in (b"\xff\x00/7", b"", bytes(64))]
        for xid in strange:
            prepared_elsewhere(world, "q1", xid)
        assert sorted(map(str, tm.recover().rolled_back)) == sorted(map(str, strange))
    assert world.in_doubt() == []


def test_a_transaction_of_a_live_process_is_left_alone(world: World) -> None:
    with world.manager() as owner, world.manager() as other:
        tx = left_at(owner, CommitPoint.VOTED)
        report = other.recover()
        assert not report.rolled_back
        assert all("is alive" in why for why in report.waiting.values())
        assert len(report.waiting) == 4
        assert len(owner.recover().rolled_back) == 4  # its own transaction, which it knows to be over
        assert owner.log.read(tx.gtrid) is not None
    assert world.in_doubt() == []


def test_a_transaction_that_runs_in_this_process_is_left_alone(world: World) -> None:
    with world.manager() as tm:
        seen: list[Any] = []

        def reached(here: CommitPoint) -> None:
            if here in (CommitPoint.VOTED, CommitPoint.DECIDED):
                steps.arm(None)
                seen.append(tm.recover())
                steps.arm(reached)

        steps.arm(reached)
        try:
            with tm.transaction() as tx:
                write(tx, "one", *ALL)
        finally:
            steps.arm(None)
        assert len(seen) == 2
        for report in seen:
            assert (report.committed, report.rolled_back, report.waiting) == ([], [], {})
    assert world.rows("db1") == {"one"}


def test_recovery_completes_a_resource_down_in_the_second_phase(world: World) -> None:
    with world.manager() as tm:

        def reached(here: CommitPoint) -> None:
            if here is CommitPoint.DECIDED:
                world.services["q1"].kill9()

        steps.arm(reached)
        try:
            with tm.transaction() as tx:
                write(tx, "one", *ALL)
        finally:
            steps.arm(None)
        assert tx.outcome is not None
        assert tx.outcome.unfinished == ("q1",)
        assert world.rows("db1") == world.rows("db2") == set(world.messages("q2")) == {"one"}
        report = tm.recover()
        assert "q1" in report.unreachable
        assert len(tm.log.unfinished("n")) == 1
        world.services["q1"].start()
        assert tm.recover().clean
        assert tm.log.unfinished("n") == []
    assert world.messages("q1") == ["one"]
    assert world.in_doubt() == []


def test_a_resource_lost_in_the_first_phase_rolls_back_everything(world: World) -> None:
    with world.manager() as tm:
        tx = tm.begin()
        write(tx, "one", *ALL)
        world.services["q2"].kill9()
        with pytest.raises(RolledBack):
            tx.commit()
        world.services["q2"].start()
        assert tm.recover().clean
        with tm.transaction() as tx:  # the free sessions of the dead service are not used again
            write(tx, "two", *ALL)
    assert world.rows("db1") == world.rows("db2") == {"two"}
    assert world.messages("q1") == world.messages("q2") == ["two"]


def test_a_session_that_is_lost_between_transactions_is_replaced(world: World) -> None:
    with world.manager() as tm:
        with tm.transaction() as tx:
            write(tx, "one", *ALL)
        with world.server.connection() as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
                " AND datname = ANY(%s)",
                ([url.rsplit("/", 1)[1].split("?")[0] for url in world.databases.values()],),
            )
        world.services["q1"].restart()
        with tm.transaction() as tx:
            write(tx, "two", *ALL)
    assert world.rows("db1") == {"one", "two"}


def test_a_heuristic_rollback_of_one_branch_is_raised_and_logged(world: World) -> None:
    with world.manager() as tm:

        def reached(here: CommitPoint) -> None:
            if here is CommitPoint.DECIDED:
                steps.arm(None)
                world.decide("q1", "rollback")

        tx = tm.begin()
        write(tx, "one", *ALL)
        steps.arm(reached)
        with pytest.raises(HeuristicMixed) as raised:
            tx.commit()
        ((report, _, forgotten),) = tm.log.heuristics()
        assert raised.value.reports == (report,)
        assert report.resource == "q1"
        assert forgotten is not None
    assert world.in_doubt() == []


def test_a_heuristic_commit_of_a_committed_branch_is_no_damage(world: World) -> None:
    with world.manager() as tm:
        tx = left_at(tm, CommitPoint.DECIDED)
        world.decide("q1", "commit")
        report = tm.recover()
        assert report.clean
        assert [(found.resource, found.damaging) for found in report.heuristics] == [("q1", False)]
        assert tm.log.read(tx.gtrid) is not None
    assert world.in_doubt() == []


@only_alongside
def test_a_delayed_one_phase_commit_is_not_logged_as_rollback(world: World) -> None:
    """The resource manager has decided to commit: a roll-back in the log would contradict its journal."""
    with world.channel(world.services["q1"]) as direct:
        direct.exchange_declare("orders", "fanout", durable=True)
    with world.manager() as tm:
        tx = tm.begin()
        tx.enlist("q1").basic_publish("orders", "", b"one")
        with world.channel(world.services["q1"]) as direct:
            direct.exchange_delete("orders")
        with pytest.raises(OutcomeUnknown, match="no exchange 'orders'"):
            tx.commit()
    with world.manager() as tm:  # as another process would
        (branch,) = world.in_doubt()
        report = tm.recover()
        assert [f"q1 {xid}" for xid in report.one_phase] == [branch]
        assert report.clean
        assert tm.log.read(tx.gtrid) is None
        assert world.in_doubt() == [branch]
        with world.channel(world.services["q1"]) as direct:
            direct.exchange_declare("orders", "fanout", durable=True)
            direct.queue_bind("q", "orders")
        service = world.services["q1"]
        service.run("retry", branch.split()[1], "--vhost", service.vhost, "--yes", "--reason", "a test")
        wait_until(lambda: not world.in_doubt(), what="the end of the branch")
        assert tm.recover().clean
        assert tm.log.read(tx.gtrid) is None
    with world.channel(world.services["q1"]) as direct:
        direct.exchange_delete("orders")
    assert world.messages("q1") == ["one"]


def test_a_log_failure_before_the_decision_leaves_recovery_to_decide(world: World) -> None:
    with world.manager() as tm:
        real = world.log.with_name("kept")

        def reached(here: CommitPoint) -> None:
            if here is CommitPoint.VOTED:
                tm.log._drop()
                for path in world.log.parent.glob(f"{world.log.name}*"):
                    if not path.name.endswith(".alive"):
                        path.rename(real.with_name(path.name.replace(world.log.name, "kept")))
                world.log.mkdir()  # cannot be opened as a log

        tx = tm.begin()
        write(tx, "one", *ALL)
        steps.arm(reached)
        try:
            with pytest.raises(OutcomeUnknown):
                tx.commit()
            with pytest.raises(LogFailed):
                tm.recover()
            assert len(world.in_doubt()) == 4
        finally:
            steps.arm(None)
            world.log.rmdir()
            real.rename(world.log)
        assert len(tm.recover().rolled_back) == 4
    assert world.in_doubt() == []


def test_an_unconfirmed_decision_is_looked_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decision was written but its confirmation was lost: the fence finds the decision, which stands."""
    with world.manager() as tm:
        write_batch = tm.log.write
        lost: list[int] = []

        def losing(batch: Any) -> None:
            write_batch(batch)
            if not lost and batch.entries:
                lost.append(1)
                raise sqlite3.OperationalError("disk I/O error")

        monkeypatch.setattr(tm.log, "write", losing)
        with tm.transaction() as tx:
            write(tx, "one", *ALL)
        assert lost
        assert tx.outcome is not None
        assert tx.outcome.decision is Decision.COMMIT
    assert world.rows("db1") == {"one"}


def test_the_log_in_postgresql_does_the_same(world: World) -> None:
    url = world.server.create_database()
    try:
        with world.manager(log=url) as owner, world.manager(log=url) as other:
            with owner.transaction() as tx:
                write(tx, "one", *ALL)
            left_at(owner, CommitPoint.VOTED)
            assert all("is alive" in why for why in other.recover().waiting.values())
            with world.server.connection() as connection:  # the log replaces its lost connections
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'dtx tm'"
                )
            assert len(owner.recover().rolled_back) == 4
            late = owner.begin()
            write(late, "late", *ALL)
            row = owner.plan(late.gtrid, []).row([])
            assert other.log.fence(row) is Decision.ROLLBACK
            with pytest.raises(RolledBack):
                late.commit()
            left_at(owner, CommitPoint.DECIDED)
        with world.manager(log=url) as tm:
            assert len(tm.recover().committed) == 4
            assert tm.log.unfinished("n") == []
    finally:
        world.server.drop_database(url)
    assert world.in_doubt() == []
    assert len(world.rows("db1")) == len(world.messages("q1")) == 2


def test_a_log_without_fsync_is_refused(world: World) -> None:
    url = world.server.create_database()
    with world.server.connection() as connection:
        connection.execute("ALTER SYSTEM SET fsync = off")
        connection.execute("SELECT pg_reload_conf()")
    try:
        deadline = time.monotonic() + 30
        while True:  # the postmaster reads the setting with a delay
            with world.server.connection() as connection:
                if connection.execute("SHOW fsync").fetchone() == ("off",):
                    break
            assert time.monotonic() < deadline
        with pytest.raises(LogFailed, match="fsync=off"):
            world.manager(log=url)
    finally:
        with world.server.connection() as connection:
            connection.execute("ALTER SYSTEM RESET fsync")
            connection.execute("SELECT pg_reload_conf()")
        world.server.drop_database(url)


def test_a_forked_process_does_not_reuse_names_of_its_parent(world: World) -> None:
    with world.manager() as tm:
        tm.identity._pid = os.getpid() + 1
        with pytest.raises(Misuse, match="after the fork"):
            tm.begin()


def test_old_finished_decisions_are_pruned(world: World) -> None:
    from datetime import timedelta

    with world.manager() as tm:
        row = DecisionRow(
            gtrid=b"n.0123456789ab.a.1", format_id=tm.identity.format_id, node="n", decision=Decision.COMMIT, at=now()
        )
        tm.log.decide(row)
        assert tm.log.prune(timedelta(0)) == 0
        tm.log.finish(row.gtrid)
        tm.log.flush()
        assert tm.log.prune(timedelta(hours=1)) == 0
        assert tm.log.prune(timedelta(0)) == 1


def test_recover_as_a_command(world: World) -> None:
    """``dtx tm recover`` recovers a node as the node itself would; transactions of live programs are not touched.

    A branch that is over already is refused; this is expected and not printed.
    """
    service = world.services["q1"]
    words = ["--node", "n", "--log", str(world.log), "--interval", "0s"]
    for resource in (*world.databases.items(), *((name, each.url()) for name, each in world.services.items())):
        words += ["--resource", "=".join(resource)]

    def recover() -> tuple[int, dict[str, Any]]:
        command = [sys.executable, "-m", "dtx", "tm", "recover", *words, "--json"]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
        assert ended.stderr == ""
        return ended.returncode, json.loads(ended.stdout)

    with world.manager() as tm:
        left_at(tm, CommitPoint.COMPLETED)
        left_at(tm, CommitPoint.DECIDED)
        left_at(tm, CommitPoint.VOTED)
        code, report = recover()
        assert code == 1
        assert (len(report["rolled_back"]), len(report["waiting"])) == (0, 4)
    code, report = recover()
    assert code == 0
    assert len(report["rolled_back"]) == 4
    assert world.in_doubt() == []
    assert len(world.rows("db1")) == 2
    assert service.running


def test_an_unreachable_resource_does_not_delay_the_others(world: World) -> None:
    nowhere = DtxResource("q3", "amqp://guest:guest@127.0.0.1:1/")
    gone = Pep249Resource("db3", partial(psycopg.connect, "postgresql://127.0.0.1:1/nothing"))
    with world.manager() as tm:
        left_at(tm, CommitPoint.DECIDED)
        tm.register(nowhere)
        tm.register(gone)
        report = tm.recover()
        assert len(report.committed) == 4
        assert set(report.unreachable) == {"q3", "db3"}
        assert not report.clean
    assert world.in_doubt() == []
