"""The log when PostgreSQL dies, stalls, or loses connections in the middle of writes."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from itertools import count

import psycopg
import pytest

from dtx.db import migrate
from dtx.log.api import LogConflict, LogError, LogUnavailable
from dtx.log.postgres import PostgresTransactionLog
from dtx.log.records import BranchRecord, JournalEvent, LogState
from tests.servers.log.conftest import OpenLog
from tests.support.branches import a_branch, a_commit, a_completion, a_line, a_xid, all_of, an_insert
from tests.support.postgres import PostgresServer


class Stream:
    """Several workers insert, decide and complete branches; keeps the answer to each write."""

    def __init__(self, log: PostgresTransactionLog) -> None:
        self._log = log
        self.answers: dict[BranchRecord, list[LogError | None]] = {}
        self.writes = count()
        self.stopping = False

    async def worker(self) -> None:
        while not self.stopping:
            branch = a_branch()
            answers = self.answers[branch] = []
            for record in (
                an_insert(branch),
                a_commit(branch, journal=a_line(branch, JournalEvent.REPEATED)),
                a_completion(branch, expect=LogState.COMMITTING, version=2),
            ):
                try:
                    await self._log.write(record)
                except LogError as error:
                    answers.append(error)
                    break
                answers.append(None)
                next(self.writes)

    async def reach(self, writes: int) -> None:
        """Return when that many more writes have succeeded."""
        goal = next(self.writes) + writes
        while next(self.writes) < goal + writes:
            await asyncio.sleep(0.01)

    async def check(self) -> Counter[str]:
        """Compare every answer with what the log has."""
        stored = await all_of(self._log.load())
        kinds: Counter[str] = Counter()
        for branch, answers in self.answers.items():
            events = Counter(line.event for line in await self._log.history("/", branch.xid))
            assert not [event for event, times in events.items() if times > 1], "a write was applied twice"
            succeeded = sum(answer is None for answer in answers)
            failed = answers[-1] if answers and answers[-1] is not None else None
            kinds[type(failed).__name__] += 1
            assert not isinstance(failed, LogConflict), "a write that was applied was written again"
            applied = len(events)
            assert succeeded <= applied <= succeeded + (failed is not None)
            state = stored.get(branch.id)
            expected = [None, LogState.PREPARED, LogState.COMMITTING, None][applied]
            assert (state and state.state) == expected
        return kinds


@pytest.fixture
async def own_log(own_postgres: PostgresServer) -> AsyncIterator[PostgresTransactionLog]:
    migrate.upgrade(own_postgres.url)
    log = PostgresTransactionLog(own_postgres.url, "rm", lease_ttl=30, retry_window=20, answer_timeout=10)
    await log.open()
    yield log
    await log.close()


async def run(stream: Stream, workers: int = 24) -> asyncio.Task[list[None]]:
    async def gather() -> list[None]:
        return await asyncio.gather(*(stream.worker() for _ in range(workers)))

    return asyncio.create_task(gather())


async def test_kill_9_of_postgresql_loses_no_answered_write(
    own_log: PostgresTransactionLog, own_postgres: PostgresServer
) -> None:
    """Prepared means durable, whatever dies."""
    stream = Stream(own_log)
    running = await run(stream)
    for _ in range(3):
        await stream.reach(300)
        await asyncio.to_thread(own_postgres.kill9)
    await stream.reach(300)
    stream.stopping = True
    await running
    kinds = await stream.check()
    print(kinds)
    assert kinds["NoneType"] > 100


async def test_sessions_that_are_ended_lose_and_repeat_nothing(open_log: OpenLog, migrated_postgres_url: str) -> None:
    stream = Stream(await open_log())
    running = await run(stream)
    async with await psycopg.AsyncConnection.connect(migrated_postgres_url, autocommit=True) as connection:
        for _ in range(30):
            await stream.reach(40)
            await connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND application_name LIKE 'dtx writer%'"
            )
    stream.stopping = True
    await running
    kinds = await stream.check()
    assert kinds == {"NoneType": len(stream.answers)}, "a write did not outlive the loss of its session"


async def test_a_stalled_server_is_fenced_before_a_write_is_repeated(own_postgres: PostgresServer) -> None:
    """After a failed or unknown commit the row is read again before anything else."""
    migrate.upgrade(own_postgres.url)
    log = PostgresTransactionLog(own_postgres.url, "rm", lease_ttl=30, retry_window=20, answer_timeout=0.3)
    await log.open()
    stream = Stream(log)
    running = await run(stream)
    for _ in range(3):
        await stream.reach(100)
        assert log._writer is not None
        session = log._writer._session
        assert session is not None
        own_postgres.pause()
        while session.alive:  # until the writer gives it up
            await asyncio.sleep(0.01)
        own_postgres.resume()
    await stream.reach(100)
    stream.stopping = True
    await running
    await stream.check()
    await log.close()


async def test_a_database_that_stays_away_is_unavailable_and_then_settled(own_postgres: PostgresServer) -> None:
    migrate.upgrade(own_postgres.url)
    log = PostgresTransactionLog(own_postgres.url, "rm", lease_ttl=30, retry_window=0.5, answer_timeout=5)
    await log.open()
    branch = a_branch()
    await log.write(an_insert(branch))
    own_postgres.stop()
    with pytest.raises(LogUnavailable):
        await log.write(a_commit(branch))
    with pytest.raises(LogUnavailable):
        await log.lookup("/", branch.xid)
    with pytest.raises(LogUnavailable):
        await log.read_work(branch.id)
    own_postgres.start()
    assert (await log.lookup("/", branch.xid)).branch == branch
    await log.write(a_commit(branch))
    await log.close()


async def test_no_xid_is_called_unknown_while_a_write_is_unsettled(own_postgres: PostgresServer) -> None:
    """An xid is called unknown only when the log has been read."""
    migrate.upgrade(own_postgres.url)
    log = PostgresTransactionLog(own_postgres.url, "rm", lease_ttl=60, retry_window=0.2, answer_timeout=0.3)
    await log.open()
    branch = a_branch()
    own_postgres.pause()
    with pytest.raises(LogUnavailable, match="the outcome of the write is not known"):
        await log.write(an_insert(branch))
    with pytest.raises(LogUnavailable, match="the outcome of an earlier write is not known"):
        await log.lookup("/", a_xid())
    own_postgres.resume()
    assert log._writer is not None
    await log._writer._known.wait()
    found = (await log.lookup("/", branch.xid)).branch
    assert found in {None, branch}
    if found is None:
        await log.write(an_insert(branch))
    await log.write(a_commit(branch))
    await log.close()


async def test_a_postgresql_standby_does_not_answer_for_the_log(own_postgres: PostgresServer) -> None:
    """While the primary is down, the URL leads to a standby: an xid that the standby does not have is not unknown.

    After its promotion the log works again.
    """
    migrate.upgrade(own_postgres.url)
    log = PostgresTransactionLog(own_postgres.url, "rm", lease_ttl=60, retry_window=20, answer_timeout=10)
    await log.open()
    branch = a_branch()
    await log.write(an_insert(branch))
    own_postgres.stop()
    (own_postgres.data_dir / "postgres" / "standby.signal").touch()
    own_postgres.start()
    with pytest.raises(LogUnavailable, match="this server is a read-only standby"):
        await log.lookup("/", branch.xid)
    with pytest.raises(LogUnavailable, match="this server is a read-only standby"):
        await log.read_work(branch.id)
    with pytest.raises(LogError, match="connect to the primary"):
        await PostgresTransactionLog(own_postgres.url, "rm").open()
    write = asyncio.create_task(log.write(a_commit(branch)))
    await asyncio.wait([write], timeout=0.5)
    assert not write.done()
    with own_postgres.connection() as connection:
        connection.execute("SELECT pg_promote()")
    await write
    found = (await log.lookup("/", branch.xid)).branch
    assert found is not None
    assert found.state is LogState.COMMITTING
    await log.close()


async def test_a_closing_log_writes_its_records(open_log: OpenLog) -> None:
    log = await open_log()
    branches = [a_branch() for _ in range(500)]
    writes = [asyncio.ensure_future(log.write(an_insert(branch))) for branch in branches]
    await asyncio.sleep(0)
    await log.close()
    await asyncio.gather(*writes)
    with pytest.raises(LogUnavailable):
        await log.write(an_insert(a_branch()))
    again = await open_log()
    assert (await all_of(again.load())).keys() == {branch.id for branch in branches}


async def test_a_database_that_is_not_there_is_unavailable() -> None:
    log = PostgresTransactionLog("postgresql://someone:s3cret@127.0.0.1:1/nowhere", "rm")
    with pytest.raises(
        LogUnavailable, match=r"cannot connect to postgresql://someone@127\.0\.0\.1:1/nowhere"
    ) as caught:
        await log.open()
    assert "s3cret" not in repr(caught.value)
    assert caught.value.__cause__ is None
    with pytest.raises(LogUnavailable):
        await log.write(an_insert(a_branch()))
    await log.close()


async def test_a_database_without_tables_is_named(postgres_url: str) -> None:
    log = PostgresTransactionLog(postgres_url, "rm")
    with pytest.raises(LogError, match="run dtx migrate"):
        await log.open()


def poison(url: str, action: str) -> None:
    """Let PostgreSQL do *action* for each branch of the owner ``poison``."""
    with psycopg.connect(url) as connection:
        connection.execute("CREATE SEQUENCE poisoned")
        connection.execute(
            "CREATE FUNCTION poison() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            f"IF NEW.owner = 'poison' THEN {action} END IF; RETURN NEW; END $$"
        )
        connection.execute("CREATE TRIGGER p BEFORE INSERT ON dtx.branch FOR EACH ROW EXECUTE FUNCTION poison()")


async def test_a_record_that_ends_every_session_fails_alone(open_log: OpenLog, migrated_postgres_url: str) -> None:
    """A failing record does not fail its group."""
    poison(migrated_postgres_url, "PERFORM pg_terminate_backend(pg_backend_pid()); PERFORM pg_sleep(1);")
    log = await open_log(retry_window=1.5)
    good = [a_branch() for _ in range(20)]
    bad = a_branch(owner="poison")
    results = await asyncio.gather(
        *(log.write(an_insert(branch)) for branch in (*good[:10], bad, *good[10:])), return_exceptions=True
    )
    assert [type(result) for result in results] == [type(None)] * 10 + [LogUnavailable] + [type(None)] * 10
    assert (await all_of(log.load())).keys() == {branch.id for branch in good}


@pytest.mark.parametrize("sqlstate", ["40001", "40P01", "55P03"])
async def test_a_record_that_is_in_somebodys_way_comes_again(
    open_log: OpenLog, migrated_postgres_url: str, sqlstate: str
) -> None:
    poison(migrated_postgres_url, f"IF nextval('poisoned') < 4 THEN RAISE SQLSTATE '{sqlstate}'; END IF;")
    log = await open_log()
    branches = [a_branch(owner="poison"), a_branch()]
    await asyncio.gather(*(log.write(an_insert(branch)) for branch in branches))
    assert (await all_of(log.load())).keys() == {branch.id for branch in branches}


async def test_an_internal_fault_ends_all_writes_with_an_error(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that cannot write any more must not keep the lease from another dtx: it calls *on_failed* once."""
    told: list[bool] = []
    log = await open_log(on_failed=lambda: told.append(True))

    def fails(*_: object) -> None:
        raise KeyError("unexpected")

    monkeypatch.setattr("dtx.log.writer.bind_group", fails)
    for _ in range(2):
        with pytest.raises(LogError, match="the log's writer failed: KeyError"):
            await log.write(an_insert(a_branch()))
    assert told == [True]


async def test_a_log_that_is_not_open_reports_it() -> None:
    log = PostgresTransactionLog("postgresql://nowhere/x", "rm")
    for call in (
        log.write(an_insert(a_branch())),
        log.lookup("/", a_xid()),
        log.history(None, a_xid()),
    ):
        with pytest.raises(LogUnavailable, match="the log is not open"):
            await call
    assert not log.lease_valid


async def test_a_log_closes_although_the_database_is_away(own_postgres: PostgresServer) -> None:
    migrate.upgrade(own_postgres.url)
    log = PostgresTransactionLog(own_postgres.url, "rm", lease_ttl=30, retry_window=0.5, answer_timeout=5)
    await log.open()
    own_postgres.stop()
    writes = [asyncio.ensure_future(log.write(an_insert(a_branch()))) for _ in range(5)]
    await asyncio.sleep(0)
    await asyncio.wait_for(log.close(), 10)
    results = await asyncio.gather(*writes, return_exceptions=True)
    assert [type(result) for result in results] == [LogUnavailable] * 5
