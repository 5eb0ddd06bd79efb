"""Identity, and the log of decisions in SQLite, without a server."""

import sqlite3
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtx.client import Xid
from dtx.client.tm import Decision, DecisionRow, Gtrid, LogFailed, Misuse, open_log
from dtx.client.tm.databases import SqliteLog
from dtx.client.tm.decisions import now
from dtx.client.tm.recovery import ResourceIdentity
from dtx.client.tm.resources import check_resource_name


def test_a_gtrid_names_its_owner_and_is_unique() -> None:
    identity = ResourceIdentity("shop-1")
    made = [identity.new() for _ in range(1000)]
    assert len(set(made)) == 1000
    assert all(len(gtrid) <= 64 for gtrid in made)
    parts = Gtrid.read(made[-1])
    assert parts is not None
    assert (parts.node, parts.process, parts.number) == ("shop-1", identity.process, 1000)
    assert parts.to_octets() == made[-1]
    assert len(ResourceIdentity("x" * 24).new()) <= 64


def test_a_node_that_is_the_beginning_of_another_is_another() -> None:
    first, second = ResourceIdentity("shop"), ResourceIdentity("shop-1")
    xid = second.xid(second.new(), "queue")
    assert first.owns(xid) is None
    assert second.owns(xid) is not None
    assert second.owns(Xid(7, xid.gtrid, xid.bqual)) is None


@given(st.binary(min_size=1, max_size=64))
def test_any_bytes_are_a_gtrid_or_none(octets: bytes) -> None:
    """Other names of transactions give ``None``, never an error."""
    parts = Gtrid.read(octets)
    assert parts is None or isinstance(parts.begun, float)


@pytest.mark.parametrize("name", ["", "a b", "ä", "x" * 57, "a/b", "a\n"])
def test_a_name_that_does_not_fit_an_xid_is_refused(name: str) -> None:
    with pytest.raises(Misuse):
        check_resource_name(name)
    with pytest.raises(Misuse):
        ResourceIdentity(name)


def test_a_node_has_no_dot() -> None:
    with pytest.raises(Misuse, match="node name"):
        ResourceIdentity("a.b")
    with pytest.raises(Misuse, match="format id"):
        ResourceIdentity("a", 1 << 31)


def row(number: int) -> DecisionRow:
    return DecisionRow(
        gtrid=b"n.p.a.%d" % number, format_id=1, node="n", decision=Decision.COMMIT, at=now(), resources=("a", "b")
    )


def test_of_two_concurrent_decisions_the_first_wins(tmp_path: Path) -> None:
    with SqliteLog(tmp_path / "tm.db") as log, SqliteLog(tmp_path / "tm.db") as other:
        assert log.decide(row(1)) is Decision.COMMIT
        assert other.fence(row(1)) is Decision.COMMIT
        assert other.fence(row(2)) is Decision.ROLLBACK
        assert log.decide(row(2)) is Decision.ROLLBACK
        assert [found.gtrid for found in log.unfinished("n")] == [row(1).gtrid]
        found = log.read(row(1).gtrid)
        assert found is not None
        assert found.resources == ("a", "b")
        assert found.at.utcoffset() is not None


def test_each_of_many_threads_gets_its_own_decision(tmp_path: Path) -> None:
    heard: dict[int, Decision] = {}
    with SqliteLog(tmp_path / "tm.db") as log:
        for number in range(0, 40, 4):
            log.fence(row(number))

        def decide(number: int) -> None:
            heard[number] = log.decide(row(number))
            log.finish(row(number).gtrid)

        threads = [threading.Thread(target=decide, args=(number,)) for number in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        log.flush()
        assert log.unfinished("n") == []
    wanted = {number: Decision.COMMIT if number % 4 else Decision.ROLLBACK for number in range(40)}
    assert heard == wanted


def test_an_end_that_could_not_be_written_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SqliteLog(tmp_path / "tm.db") as log:
        log.decide(row(1))
        log.finish(row(1).gtrid)

        def failing(_batch: object) -> None:
            raise LogFailed("no space left on device")

        monkeypatch.setattr(log, "write", failing)
        with pytest.raises(LogFailed):
            log.decide(row(2))
        monkeypatch.undo()
        log.flush()
        assert log.unfinished("n") == []


def test_a_claim_ends_with_its_log(tmp_path: Path) -> None:
    with SqliteLog(tmp_path / "tm.db") as other:
        with SqliteLog(tmp_path / "tm.db") as log:
            log.claim("n", "p")
            assert log.alive("n", "p")
            assert other.alive("n", "p")
            assert not other.alive("n", "q")
        assert not other.alive("n", "p")
    assert not list(tmp_path.glob("*.alive"))


def test_an_invalid_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("this is not a database, and longer than its header would have to be " * 10)
    with pytest.raises(LogFailed, match="not a database"):
        open_log(tmp_path / "text")
    with pytest.raises(LogFailed, match="directory"):
        open_log(f"sqlite://{tmp_path}/nowhere/tm.db")


def test_the_file_is_written_with_full_synchronisation(tmp_path: Path) -> None:
    with SqliteLog(tmp_path / "tm.db") as log:
        assert log._connect().execute("PRAGMA synchronous").fetchone() == (2,)
    database = sqlite3.connect(tmp_path / "tm.db")
    columns = [name for _, name, *_ in database.execute("PRAGMA table_info(decision)")]
    database.close()
    assert columns == ["gtrid", "format_id", "node", "decision", "at", "finished", "resources", "recoveries"]
