"""Group commit: groups, their limits, and what PostgreSQL refuses."""

import asyncio
import time
from typing import Any

import psycopg
import pytest
import uvloop

from dtx.log import write_queue
from dtx.log.api import LeaseLost, LogConflict, LogError
from dtx.log.postgres import PostgresTransactionLog
from dtx.log.records import JournalEvent, Line, LogState, NoteWrite
from dtx.xa.codes import Heuristic
from tests.servers.log.conftest import OpenLog
from tests.support.branches import a_branch, a_commit, a_completion, a_line, a_publish, a_unit, all_of, an_insert


async def test_records_that_come_together_are_committed_together(open_log: OpenLog) -> None:
    """Group commit: one writer task drains all pending records into one transaction."""
    groups: list[int] = []
    log = await open_log(observe=lambda records, _: groups.append(records))
    await asyncio.gather(*(log.write(an_insert(a_branch())) for _ in range(100)))
    assert groups == [100]


async def test_clients_of_one_group_share_the_next(open_log: OpenLog) -> None:
    """Clients that get answers together write again soon, but not in the same turn of the event loop."""
    groups: list[int] = []
    log = await open_log(observe=lambda records, _: groups.append(records))

    async def ask(turns: int) -> None:
        for _ in range(5):
            await log.write(an_insert(a_branch()))
            for _ in range(turns):
                await asyncio.sleep(0)

    await asyncio.gather(*(ask(turns) for turns in (0, 1, 2, 2)))
    assert groups == [4] * 5
    groups.clear()
    await ask(0)
    assert groups == [1] * 5


async def test_a_group_has_limits(open_log: OpenLog, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[int] = []
    log = await open_log(observe=lambda records, _: groups.append(records))
    await asyncio.gather(*(log.write(an_insert(a_branch())) for _ in range(write_queue.MAX_GROUP + 44)))
    assert groups == [write_queue.MAX_GROUP, 44]
    groups.clear()
    heavy = bytes(write_queue.MAX_GROUP_BYTES // 2)
    await asyncio.gather(*(log.write(an_insert(a_branch(), a_publish(body=heavy))) for _ in range(3)))
    assert groups == [1, 1, 1]


async def test_writers_wait_when_the_queue_is_full(open_log: OpenLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every queue in memory has a named limit."""
    monkeypatch.setattr(write_queue, "MAX_QUEUED", 10)
    log = await open_log()
    assert log._writer is not None
    writes = [asyncio.ensure_future(log.write(an_insert(a_branch()))) for _ in range(100)]
    await asyncio.sleep(0)
    assert len(log._writer._waiting) == 10
    await asyncio.gather(*writes)


async def test_a_low_priority_end_lets_other_records_pass(open_log: OpenLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_queue, "_LOW_PRIORITY_WAIT", 3600.0)
    groups: list[int] = []
    log = await open_log(observe=lambda records, _: groups.append(records))
    branch = a_branch()
    await log.write(an_insert(branch))
    end = asyncio.create_task(log.write(a_completion(branch), urgent=False))
    await asyncio.sleep(0)
    await log.write(an_insert(a_branch()))
    assert not end.done()
    await log.close()
    await end
    assert groups == [1, 1, 1]


async def test_low_priority_ends_are_written_together_within_a_limit(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[int] = []
    log = await open_log(observe=lambda records, _: groups.append(records))
    branches = [a_branch() for _ in range(5)]
    await asyncio.gather(*(log.write(an_insert(branch)) for branch in branches))
    await asyncio.gather(*(log.write(a_completion(branch), urgent=False) for branch in branches[:2]))
    monkeypatch.setattr(write_queue, "_LOW_PRIORITY_WAIT", 3600.0)
    monkeypatch.setattr(write_queue, "_MOST_LOW_PRIORITY", 3)
    await asyncio.gather(*(log.write(a_completion(branch), urgent=False) for branch in branches[2:]))
    assert groups == [5, 2, 3]
    assert await all_of(log.load()) == {}


async def test_a_low_priority_end_fails_with_the_log(open_log: OpenLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_queue, "_LOW_PRIORITY_WAIT", 3600.0)
    log = await open_log()
    branch = a_branch()
    await log.write(an_insert(branch))
    end = asyncio.create_task(log.write(a_completion(branch), urgent=False))
    await asyncio.sleep(0)
    assert log._writer is not None
    log._writer._stop(LeaseLost("another dtx holds the lease"))
    with pytest.raises(LeaseLost):
        await end


async def test_a_cancelled_caller_does_not_stop_the_write(open_log: OpenLog) -> None:
    log = await open_log()
    branch, other = a_branch(), a_branch()
    write = asyncio.create_task(log.write(an_insert(branch)))
    await asyncio.sleep(0)
    write.cancel()
    await log.write(an_insert(other))
    assert (await all_of(log.load())).keys() == {branch.id, other.id}


async def test_a_large_branch_is_written_whole(open_log: OpenLog) -> None:
    log = await open_log()
    megabytes = (1, 20, 14, 50, 0, 3)
    work = [a_publish(n, body=bytes([n]) * (size << 20)) for n, size in enumerate(megabytes)]
    branch = a_branch(publishes=len(work))
    await log.write(an_insert(branch, *work))
    assert [(piece.position, piece.body) for piece in await log.read_work(branch.id)] == [
        (piece.position, piece.body) for piece in work
    ]
    await log.write(a_completion(branch))
    assert await log.read_work(branch.id) == []


@pytest.mark.parametrize(
    "changes",
    [{"vhost": "\ud800"}, {"publishes": 2**31}, {"timeout": 2**63}, {"owner": "a\0b"}],
    ids=["surrogate", "int4", "int8", "nul"],
)
async def test_an_unfitting_record_is_refused_alone(open_log: OpenLog, changes: dict[str, object]) -> None:
    log = await open_log()
    good = a_branch()
    results = await asyncio.gather(
        log.write(an_insert(good)), log.write(an_insert(a_branch(**changes))), return_exceptions=True
    )
    assert results[0] is None
    assert type(results[1]) is LogError
    assert str(results[1]).startswith("the log cannot keep the record: ")
    assert (await all_of(log.load())).keys() == {good.id}


@pytest.mark.parametrize("line", [True, False], ids=["its own line", "a whole line"])
async def test_rows_of_a_branch_leave_with_it(open_log: OpenLog, migrated_postgres_url: str, line: bool) -> None:
    """There are no foreign keys: the writer removes all rows."""
    log = await open_log()
    branch = a_branch(units=(a_unit(0), a_unit(1)))
    await log.write(an_insert(branch, a_publish(0), a_publish(1)))
    decided = a_line(branch, JournalEvent.HEURISTIC, reason="why")
    await log.write(a_commit(branch, to=LogState.HEURISTIC, outcome=Heuristic.COMMITTED, journal=decided))
    with psycopg.connect(migrated_postgres_url) as connection:
        row = connection.execute("SELECT outcome, actor, reason FROM dtx.heuristic_outcome").fetchone()
        assert row == ("committed", "guest", "why")
    end: dict[str, Any] = {"journal": Line(JournalEvent.FORGOTTEN, time.time(), "guest")} if line else {}
    await log.write(a_completion(branch, JournalEvent.FORGOTTEN, expect=LogState.HEURISTIC, version=2, **end))
    with psycopg.connect(migrated_postgres_url) as connection:
        for table in ("branch", "work", "unit", "heuristic_outcome"):
            assert connection.execute(f"SELECT count(*) FROM dtx.{table}").fetchone() == (0,)
        assert connection.execute("SELECT count(*) FROM dtx.journal").fetchone() == (3,)


async def test_a_journal_line_of_any_time_finds_a_partition(open_log: OpenLog) -> None:
    log = await open_log()
    branch = a_branch()
    times = [round(time.time()) - 20 * 86_400.0, 4_000_000_000.25]
    for at in times:
        await log.write(NoteWrite(journal=a_line(branch, JournalEvent.COMMITTED, at=at)))
    assert [line.at for line in await log.history(None, branch.xid)] == times


async def test_waiting_for_another_lock_is_no_refusal(open_log: OpenLog, migrated_postgres_url: str) -> None:
    log = await open_log(answer_timeout=30.0)
    branch = a_branch()
    await log.write(an_insert(branch))
    with psycopg.connect(migrated_postgres_url) as other:
        other.execute("SELECT 1 FROM dtx.branch FOR UPDATE")
        write = asyncio.create_task(log.write(a_commit(branch)))
        rows = None
        while rows != (1,):
            rows = await asyncio.to_thread(waiting_sessions, migrated_postgres_url)
        other.rollback()
    await write


def waiting_sessions(url: str) -> tuple[int, ...] | None:
    with psycopg.connect(url) as connection:
        return connection.execute(
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name LIKE 'dtx %' AND wait_event_type = 'Lock'"
        ).fetchone()


async def test_a_database_that_refuses_has_written_nothing(open_log: OpenLog, migrated_postgres_url: str) -> None:
    log = await open_log()
    with psycopg.connect(migrated_postgres_url, autocommit=True) as connection:
        connection.execute("ALTER TABLE dtx.work RENAME TO work_away")
        with pytest.raises(LogError, match="the database refused the record") as caught:
            await log.write(an_insert(a_branch()))
        assert not isinstance(caught.value, LogConflict)
        connection.execute("ALTER TABLE dtx.work_away RENAME TO work")
    assert await all_of(log.load()) == {}


def test_the_log_works_on_uvloop(migrated_postgres_url: str) -> None:
    async def use() -> None:
        log = PostgresTransactionLog(migrated_postgres_url, "rm")
        await log.open()
        branches = [a_branch() for _ in range(300)]
        await asyncio.gather(*(log.write(an_insert(branch, a_publish(body=bytes(50_000)))) for branch in branches))
        assert await all_of(log.load()) == {branch.id: branch for branch in branches}
        assert (await log.lookup("/", branches[0].xid)).branch == branches[0]
        await log.close()

    uvloop.run(use())


async def test_the_writing_session_is_durable_despite_other_defaults(
    open_log: OpenLog, migrated_postgres_url: str
) -> None:
    """synchronous_commit is set explicitly on the session."""
    log = await open_log()
    with psycopg.connect(migrated_postgres_url, autocommit=True) as connection:
        connection.execute(
            "CREATE FUNCTION note_setting() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "NEW.owner := current_setting('synchronous_commit') || ' ' || current_setting('transaction_isolation'); "
            "RETURN NEW; END $$"
        )
        connection.execute("CREATE TRIGGER t BEFORE INSERT ON dtx.branch FOR EACH ROW EXECUTE FUNCTION note_setting()")
        database = connection.info.dbname
        connection.execute(f"ALTER DATABASE {database} SET synchronous_commit = off")
        connection.execute(f"ALTER DATABASE {database} SET default_transaction_isolation = serializable")
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'dtx w%'"
        )
    branch = a_branch()
    await log.write(an_insert(branch))
    stored = (await log.lookup("/", branch.xid)).branch
    assert stored is not None
    assert stored.owner == "on read committed"
