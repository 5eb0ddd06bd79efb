"""A group is sent while the group before it is written: their order is kept, even if the earlier one fails."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from uuid import uuid4

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from dtx.log.api import LeaseLost, LogConflict, LogUnavailable
from dtx.log.changes import Define, Store
from dtx.log.postgres import PostgresTransactionLog
from dtx.log.records import LogState, LogWrite
from tests.servers.log.conftest import OpenLog
from tests.support.branches import a_branch, a_commit, a_completion, all_of, an_insert
from tests.support.proxy import Proxy
from tests.support.stored import QUEUE, a_message, a_queue, drops, puts

_GATE = 4711
_SLOW = "slow"
"""Owner of branches whose insertion waits until the gate is open."""
_WRITER = "FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'dtx writer%'"
_ENDED = f"SELECT pg_terminate_backend(pid) {_WRITER}"
_CANCELLED = f"SELECT pg_cancel_backend(pid) {_WRITER}"
_TAKE_OVER = "UPDATE dtx.lease SET epoch = epoch + 1, instance = %s, holder = 'successor', expires_at = 'infinity'"


@asynccontextmanager
async def gate(url: str) -> AsyncIterator[psycopg.AsyncConnection]:
    """PostgreSQL writes slow branches only after the connection has opened the gate; it refuses those without bytes."""
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await connection.execute(
            "CREATE FUNCTION wait_at_gate() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            f"IF NEW.owner = '{_SLOW}' THEN PERFORM pg_advisory_xact_lock_shared({_GATE}); "
            "IF NEW.bytes = 0 THEN RAISE SQLSTATE '23514'; END IF; END IF; RETURN NEW; END $$"
        )
        await connection.execute(
            "CREATE TRIGGER g BEFORE INSERT ON dtx.branch FOR EACH ROW EXECUTE FUNCTION wait_at_gate()"
        )
        await connection.execute(f"SELECT pg_advisory_lock({_GATE})")
        yield connection


def _open(connection: psycopg.AsyncConnection) -> "asyncio.Future[object]":
    return asyncio.ensure_future(connection.execute(f"SELECT pg_advisory_unlock({_GATE})"))


async def write(log: PostgresTransactionLog, *groups: Sequence[LogWrite]) -> "list[asyncio.Task[None]]":
    """Write *groups*, each of several records; all of them are under way when this returns."""
    assert log._writer is not None
    writes = []
    for number, group in enumerate(groups, 1):
        writes += [asyncio.create_task(log.write(record)) for record in group]
        while len(log._writer._under_way) < number:
            await asyncio.sleep(0.001)
        assert len(log._writer._under_way[-1].group) == len(group)
    return writes


async def outcomes(writes: "Sequence[asyncio.Task[None]]") -> list[type[BaseException] | None]:
    """The error type of each write; ``None``: it succeeded."""
    results = await asyncio.wait_for(asyncio.gather(*writes, return_exceptions=True), 20)
    return [None if result is None else type(result) for result in results]


async def test_a_group_behind_a_partly_refused_one_is_written_later(
    open_log: OpenLog, migrated_postgres_url: str
) -> None:
    """The second group drops the message that the first puts: in the other order the message would stay."""
    message, kept = a_message(), a_message()
    good, bad = a_branch(owner=_SLOW), a_branch(owner=_SLOW, bytes=0)
    log = await open_log()
    async with gate(migrated_postgres_url) as connection:
        writes = await write(
            log,
            [an_insert(good), an_insert(bad), Store(change=puts(message))],
            [Store(change=drops(message)), Store(change=puts(kept)), *(an_insert(a_branch()) for _ in range(2))],
        )
        await _open(connection)
        assert await outcomes(writes) == [None, LogConflict, *[None] * 5]
    found = await all_of(log.load())
    assert good.id in found
    assert len(found) == 3
    assert await log.which_exist([message.slot, kept.slot]) == {kept.slot}


async def test_records_behind_repeated_bad_ones_keep_their_order(open_log: OpenLog, migrated_postgres_url: str) -> None:
    """While the first group is written record by record, the next group and the queued records wait."""
    log = await open_log()
    branches = [a_branch() for _ in range(8)]
    bad = a_branch(owner=_SLOW, bytes=0)
    async with gate(migrated_postgres_url) as connection:
        writes = await write(
            log,
            [an_insert(bad), *(an_insert(branch) for branch in branches)],
            [a_commit(branch) for branch in branches],
        )
        later = [
            asyncio.create_task(log.write(a_completion(branch, expect=LogState.COMMITTING, version=2)))
            for branch in branches
        ]
        await _open(connection)
        assert await outcomes([*writes, *later]) == [LogConflict, *[None] * 24]
    assert not await all_of(log.load())


async def test_a_session_that_ends_under_two_groups_wrote_neither(
    open_log: OpenLog, migrated_postgres_url: str
) -> None:
    """Both are written again, in their order."""
    log = await open_log()
    branches = [a_branch(owner=_SLOW) for _ in range(4)]
    async with gate(migrated_postgres_url) as connection:
        writes = await write(log, [an_insert(branch) for branch in branches], [a_commit(branch) for branch in branches])
        await connection.execute(_ENDED)
        await _open(connection)
        assert await outcomes(writes) == [None] * 8
    assert {record.version for record in (await all_of(log.load())).values()} == {2}


async def test_a_cancelled_statement_under_two_groups_loses_nothing(
    open_log: OpenLog, migrated_postgres_url: str
) -> None:
    """A cancelled statement (57014) fails its group and the group behind it; both are written again."""
    log = await open_log()
    branches = [a_branch(owner=_SLOW) for _ in range(4)]
    async with gate(migrated_postgres_url) as connection:
        writes = await write(log, [an_insert(branch) for branch in branches], [a_commit(branch) for branch in branches])
        await waits_for_a_lock(connection)
        await connection.execute(_CANCELLED)
        await _open(connection)
        assert await outcomes(writes) == [None] * 8
    assert {record.version for record in (await all_of(log.load())).values()} == {2}


async def waits_for_a_lock(connection: psycopg.AsyncConnection) -> None:
    """Return when the writer waits for the gate."""
    while True:
        cursor = await connection.execute(f"SELECT wait_event_type {_WRITER}".encode())
        if await cursor.fetchone() == ("Lock",):
            return
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("sqlstate", ["23514", "53100", "53200", "57014", "58030", "XX000"])
async def test_a_group_that_fails_at_commit_fails_alone(
    open_log: OpenLog, migrated_postgres_url: str, sqlstate: str
) -> None:
    """The error comes at the end of the transaction, after every statement has succeeded."""
    log = await open_log()
    slow, bad, others = a_branch(owner=_SLOW), a_branch(owner="late"), [a_branch() for _ in range(4)]
    async with gate(migrated_postgres_url) as connection:
        await connection.execute(
            "CREATE FUNCTION fail_late() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            f"IF NEW.owner = 'late' THEN RAISE SQLSTATE '{sqlstate}'; END IF; RETURN NEW; END $$"
        )
        await connection.execute(
            "CREATE CONSTRAINT TRIGGER late AFTER INSERT ON dtx.branch DEFERRABLE INITIALLY DEFERRED "
            "FOR EACH ROW EXECUTE FUNCTION fail_late()"
        )
        writes = await write(
            log,
            [an_insert(slow), an_insert(bad)],
            [a_commit(slow), a_commit(bad), *(an_insert(branch) for branch in others)],
        )
        await _open(connection)
        refusal = LogConflict if sqlstate == "23514" else LogUnavailable
        assert await outcomes(writes) == [None, refusal, None, LogConflict, *[None] * 4]
    found = await all_of(log.load())
    assert {id_: record.version for id_, record in found.items()} == {slow.id: 2} | {branch.id: 1 for branch in others}


async def test_closing_a_log_writes_two_groups_of_a_lost_session(open_log: OpenLog, migrated_postgres_url: str) -> None:
    log = await open_log()
    branches = [a_branch(owner=_SLOW) for _ in range(4)]
    async with gate(migrated_postgres_url) as connection:
        writes = await write(log, [an_insert(branch) for branch in branches], [a_commit(branch) for branch in branches])
        closing = asyncio.create_task(log.close())
        await waits_for_a_lock(connection)
        await connection.execute(_ENDED)
        await _open(connection)
        assert await outcomes(writes) == [None] * 8
        await closing
        cursor = await connection.execute("SELECT count(*) FROM dtx.branch WHERE version = 2")
        assert await cursor.fetchone() == (4,)


async def test_a_lease_lost_under_two_groups_writes_neither(open_log: OpenLog, migrated_postgres_url: str) -> None:
    """The first waits for the successor, which has the lock on the lease; the second is behind it."""
    log = await open_log()
    async with await psycopg.AsyncConnection.connect(migrated_postgres_url) as successor:
        await successor.execute(_TAKE_OVER, [uuid4()])
        writes = await write(log, [an_insert(a_branch()) for _ in range(4)], [an_insert(a_branch()) for _ in range(5)])
        await successor.commit()
        assert await outcomes(writes) == [LeaseLost] * 9
        cursor = await successor.execute("SELECT count(*) FROM dtx.branch")
        assert await cursor.fetchone() == (0,)


@pytest.fixture
def proxy(migrated_postgres_url: str) -> Iterator[Proxy]:
    """A proxy between the log and PostgreSQL."""
    values = conninfo_to_dict(migrated_postgres_url)
    with Proxy(str(values["host"]), int(values["port"] or 5432)) as proxy:
        yield proxy


def through(proxy: Proxy, url: str) -> str:
    """The same database, through *proxy*."""
    values = conninfo_to_dict(url)
    return f"postgresql://{values['user']}:{values['password']}@127.0.0.1:{proxy.port}/{values['dbname']}"


@pytest.mark.parametrize("traceless", [False, True], ids=["with a trace", "whose first left no trace"])
async def test_answers_that_are_lost_after_two_commits_repeat_neither(
    open_log: OpenLog, migrated_postgres_url: str, proxy: Proxy, *, traceless: bool
) -> None:
    """What the second group wrote proves the first, which has no trace of its own if it only defines a queue.

    The second deletes the queue. If the first were written again, the queue would exist again.
    """
    log = await open_log(url=through(proxy, migrated_postgres_url), answer_timeout=30.0)
    branches = [a_branch() for _ in range(4)]
    queue = a_queue(name=b"other")
    first: list[LogWrite] = [Define(queues=[queue]), Store(change=drops(a_message()))]
    if not traceless:
        first += [an_insert(branch) for branch in branches]
    else:
        await asyncio.gather(*(log.write(an_insert(branch)) for branch in branches))
    proxy.stall("down")
    writes = await write(log, first, [*(a_commit(branch) for branch in branches), Define(removed_queues=[QUEUE])])
    async with await psycopg.AsyncConnection.connect(migrated_postgres_url, autocommit=True) as connection:
        while True:
            cursor = await connection.execute("SELECT count(*) FROM dtx.branch WHERE version = 2")
            if await cursor.fetchone() == (4,):
                break
            await asyncio.sleep(0.01)
        proxy.cut()
        proxy.resume()
        assert await outcomes(writes) == [None] * len(writes)
        cursor = await connection.execute("SELECT count(*), max(version) FROM dtx.branch")
        assert await cursor.fetchone() == (4, 2)
        cursor = await connection.execute("SELECT count(*) FROM dtx.queue")
        assert await cursor.fetchone() == (0,)


async def test_of_two_groups_only_the_second_is_written_again(
    open_log: OpenLog, migrated_postgres_url: str, proxy: Proxy
) -> None:
    """Only the second is written again."""
    log = await open_log(url=through(proxy, migrated_postgres_url), answer_timeout=30.0)
    branches = [a_branch() for _ in range(4)]
    slow = a_branch(owner=_SLOW)
    async with gate(migrated_postgres_url) as connection:
        proxy.stall("down")
        writes = await write(
            log,
            [an_insert(branch) for branch in branches],
            [an_insert(slow), *(a_commit(branch) for branch in branches)],
        )
        while True:
            cursor = await connection.execute("SELECT count(*) FROM dtx.branch")
            if await cursor.fetchone() == (4,):
                break
            await asyncio.sleep(0.01)
        await connection.execute(_ENDED)
        await _open(connection)
        proxy.resume()
        assert await outcomes(writes) == [None] * 9
    found = await all_of(log.load())
    assert found.keys() == {slow.id, *(branch.id for branch in branches)}
    assert {found[branch.id].version for branch in branches} == {2}


async def test_after_a_lost_lease_unanswered_writes_are_unknown(
    open_log: OpenLog, migrated_postgres_url: str, proxy: Proxy
) -> None:
    """The records were written, and the successor may have read them: no answer may deny that."""
    log = await open_log(url=through(proxy, migrated_postgres_url), answer_timeout=30.0, lease_ttl=60.0)
    proxy.stall("down")
    writes = await write(log, [an_insert(a_branch()) for _ in range(4)], [an_insert(a_branch()) for _ in range(4)])
    async with await psycopg.AsyncConnection.connect(migrated_postgres_url, autocommit=True) as connection:
        while True:
            cursor = await connection.execute("SELECT count(*) FROM dtx.branch")
            if await cursor.fetchone() == (8,):
                break
            await asyncio.sleep(0.01)
        await connection.execute(_TAKE_OVER, [uuid4()])
    proxy.cut()
    proxy.resume()
    for written in writes:
        with pytest.raises(LeaseLost, match="the outcome of the write is not known"):
            await asyncio.wait_for(written, 20)
