"""The log of decisions in SQLite and in PostgreSQL: one contract for both."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from dtx.client.tm import Decision, HeuristicReport, LogFailed, open_log
from dtx.client.tm.decisions import Batch, DecisionEntry, DecisionLog, DecisionRow, now
from dtx.xa.codes import Heuristic
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request: pytest.FixtureRequest, server: PostgresServer, tmp_path: Path) -> Iterator[str]:
    """The path or URL of a log."""
    if request.param == "sqlite":
        yield str(tmp_path / "tm.db")
        return
    url = server.create_database()
    yield url
    server.drop_database(url)


@pytest.fixture
def log(where: str) -> Iterator[DecisionLog]:
    """An empty log."""
    with open_log(where) as opened:
        yield opened


def row(name: str, decision: Decision = Decision.COMMIT, node: str = "n") -> DecisionRow:
    gtrid = name.encode()
    return DecisionRow(gtrid=gtrid, format_id=7, node=node, decision=decision, at=now(), resources=("db1", "q1/2"))


def test_a_decision_is_read_as_written(log: DecisionLog) -> None:
    written = row("a")
    assert log.decide(written) is Decision.COMMIT
    found = log.read(b"a")
    assert found == written
    assert log.read(b"b") is None


def test_the_first_decision_counts(log: DecisionLog, where: str) -> None:
    with open_log(where) as other:
        assert other.fence(row("a")) is Decision.ROLLBACK
        assert log.decide(row("a")) is Decision.ROLLBACK
        assert log.decide(row("b")) is Decision.COMMIT
        assert other.fence(row("b")) is Decision.COMMIT


def test_decisions_of_many_are_one_transaction(log: DecisionLog) -> None:
    log.decide(row("500", Decision.ROLLBACK))
    entries = [DecisionEntry(row(str(number))) for number in range(1000)]
    log.write(Batch(entries=entries))
    assert [entry.row.gtrid for entry in entries if entry.logged is Decision.ROLLBACK] == [b"500"]
    assert len(log.unfinished("n")) == 999


def test_unfinished_decisions_are_listed_by_node_and_decision(log: DecisionLog) -> None:
    for name, decision, node in (
        ("a", Decision.COMMIT, "n"),
        ("b", Decision.ROLLBACK, "n"),
        ("c", Decision.COMMIT, "m"),
        ("d", Decision.COMMIT, "n"),
    ):
        log.decide(row(name, decision, node))
    assert [found.gtrid for found in log.unfinished("n")] == [b"a", b"d"]
    assert [found.gtrid for found in log.unfinished("n", Decision.ROLLBACK)] == [b"b"]
    log.finish(b"a")
    log.finish(b"b")
    log.flush()
    assert [found.gtrid for found in log.unfinished("n")] == [b"d"]
    assert log.unfinished("n", Decision.ROLLBACK) == []


def test_recovery_is_counted(log: DecisionLog) -> None:
    log.decide(row("a"))
    log.count_recovery(b"a")
    log.count_recovery(b"a")
    found = log.read(b"a")
    assert found is not None
    assert found.recoveries == 2


def test_only_a_roll_back_can_be_withdrawn(log: DecisionLog) -> None:
    log.decide(row("a"))
    log.decide(row("b", Decision.ROLLBACK))
    for gtrid in (b"a", b"b", b"c"):
        log.withdraw(gtrid)
    assert log.read(b"a") is not None
    assert log.read(b"b") is None
    assert log.decide(row("b")) is Decision.COMMIT


def test_old_finished_decisions_are_pruned(log: DecisionLog) -> None:
    for name, decision in (("a", Decision.COMMIT), ("b", Decision.COMMIT), ("c", Decision.ROLLBACK)):
        log.decide(row(name, decision))
    log.finish(b"a")
    log.flush()
    assert log.prune(timedelta(hours=1)) == 0
    assert log.prune(timedelta(0)) == 2  # a roll-back needs no row: it is presumed
    assert log.read(b"b") is not None


def test_a_heuristic_outcome_is_recorded_once(log: DecisionLog) -> None:
    first = HeuristicReport(gtrid=b"a", resource="q1", outcome=Heuristic.MIXED, decision="commit", reason="as said")
    again = HeuristicReport(gtrid=b"a", resource="q1", outcome=Heuristic.HAZARD, decision="commit", reason="later")
    log.record(first)
    log.record(again)
    ((report, at, forgotten),) = log.heuristics(unforgotten=True)
    assert report == first
    assert forgotten is None
    log.forgotten(b"a", "q1")
    assert log.heuristics(unforgotten=True) == []
    ((_, recorded, forgotten),) = log.heuristics()
    assert forgotten is not None
    assert recorded == at <= forgotten


def test_every_process_knows_which_others_live(log: DecisionLog, where: str) -> None:
    log.claim("n", "p1")
    with open_log(where) as other:
        assert other.alive("n", "p1")
        assert not other.alive("n", "p2")
        assert not other.alive("m", "p1")
        log.close()
        wait_until(
            lambda: not other.alive("n", "p1"), what="the end of the process"
        )  # PostgreSQL notices it with a delay


def test_a_log_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(LogFailed, match="the directory of the log of decisions does not exist"):
        open_log(tmp_path / "nowhere" / "tm.db")
    strange = tmp_path / "letter.txt"
    strange.write_text("Dear Sir or Madam, " * 100)
    with pytest.raises(LogFailed, match=r"letter\.txt: file is not a database"):
        open_log(strange)
    with pytest.raises(LogFailed, match="log of decisions in PostgreSQL"):
        open_log("postgresql://nobody:secret@127.0.0.1:1/nowhere")
