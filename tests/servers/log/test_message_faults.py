"""Messages and topology when connections are lost in the middle of writes."""

import asyncio
import time
from collections.abc import AsyncIterator
from itertools import count
from uuid import uuid4

import psycopg
import pytest

from dtx.db.connections import Dsn
from dtx.db.pipeline import PipelineSession
from dtx.log import statements, write_queue, writer
from dtx.log.api import LogError, LogUnavailable
from dtx.log.changes import Change, Define, Slot, Store
from dtx.log.postgres import PostgresTransactionLog
from dtx.log.records import Insert, JournalEvent, Line, LogWrite, NoteWrite
from tests.servers.log.conftest import OpenLog
from tests.support.branches import a_branch, a_commit, a_completion, a_line, an_insert
from tests.support.stored import QUEUE, a_message, a_queue, an_exchange, drops, puts


@pytest.fixture
async def session(migrated_postgres_url: str) -> AsyncIterator[PipelineSession]:
    """A session like the one that the writer uses after it has fenced off its old session."""
    session = await PipelineSession.connect(
        Dsn(migrated_postgres_url), writer.UNKNOWN_COMMIT, settings={}, timeout=5, answer_timeout=5, durable=True
    )
    yield session
    await session.close()


async def applied(session: PipelineSession, *records: LogWrite) -> bool:
    return await writer.was_applied(session, b"rm", [(record, bytes(16)) for record in records])


async def test_a_message_is_the_trace_of_its_group(open_log: OpenLog, session: PipelineSession) -> None:
    log = await open_log()
    stored, lost, held = a_message(), a_message(), a_message()
    await log.write(Store(change=puts(stored)))
    drop = Store(change=drops(held))
    assert await applied(session, drop, Define(), Store(change=puts(lost)), Store(change=puts(stored)))
    assert not await applied(session, drop, Store(change=puts(lost)))


async def test_a_message_that_its_own_group_drops_is_no_trace(open_log: OpenLog, session: PipelineSession) -> None:
    log = await open_log()
    stored, lost = a_message(), a_message()
    await log.write(Store(change=puts(stored)))
    assert not await applied(session, Store(change=puts(stored, lost)), Store(change=drops(stored)))


async def test_a_branch_is_the_trace_of_its_group(open_log: OpenLog, session: PipelineSession) -> None:
    log = await open_log()
    branch, message = a_branch(), a_message()
    await log.write(an_insert(branch))
    decision = a_commit(branch)
    message_alone = Store(change=puts(message))
    assert not await applied(session, message_alone, decision)
    await log.write(decision)
    assert await applied(session, message_alone, decision)


async def test_a_journal_line_is_the_surest_trace(open_log: OpenLog, session: PipelineSession) -> None:
    log = await open_log()
    branch, message = a_branch(), a_message()
    await log.write(Store(change=puts(message)))
    for record in (
        an_insert(branch),
        a_completion(branch),
        NoteWrite(journal=a_line(branch), change=puts(a_message())),
    ):
        assert not await applied(session, Store(change=puts(message)), record)


async def test_a_line_made_from_its_branch_is_a_trace(open_log: OpenLog, migrated_postgres_url: str) -> None:
    """PostgreSQL writes it with the time and the id that dtx looks for after a lost connection."""
    await open_log()
    with psycopg.connect(migrated_postgres_url) as connection:
        found = connection.execute("SELECT epoch FROM dtx.lease WHERE rm = 'rm'").fetchone()
    assert found is not None
    known = (*statements.PREPARED, *writer.UNKNOWN_COMMIT)
    session = await PipelineSession.connect(
        Dsn(migrated_postgres_url), known, settings={}, timeout=5, answer_timeout=5, durable=True
    )
    at = time.time()
    branch = a_branch(prepared_at=at, published=(), consumed=())
    vote = Insert(branch=branch, journal=Line(JournalEvent.PREPARED, at, "guest"))
    end = a_completion(branch, journal=Line(JournalEvent.COMMITTED, at + 1, "guest"))
    try:
        for record in (vote, end):
            group = [(record, uuid4().bytes)]
            assert not await writer.was_applied(session, b"rm", group)
            await session.send(statements.bind_group(b"rm", found[0], group))
            assert await writer.was_applied(session, b"rm", group)
    finally:
        await session.close()


async def test_a_repeatable_write_needs_no_trace(session: PipelineSession) -> None:
    """A group of acknowledgements costs no more than its deletions."""
    slot = Slot(QUEUE, 1)
    change = Change(drops=[slot], expiries=[(slot, 1.0)], delivered=[(QUEUE, 1)])
    assert not await applied(session, Store(change=change), Define(queues=[a_queue()]))


async def test_stores_survive_the_loss_of_their_session(open_log: OpenLog, migrated_postgres_url: str) -> None:
    """No message is lost or repeated, and no dropped message comes back."""
    log = await open_log(retry_window=20.0)
    kept: list[int] = []
    writes = count()
    stopping = asyncio.Event()

    async def worker(number: int) -> None:
        exchange = an_exchange(name=b"%d" % number)
        while not stopping.is_set():
            first, second, third = a_message(), a_message(), a_message()
            await log.write(Store(change=puts(first, second)))
            await log.write(Define(exchanges=[exchange]))
            await log.write(Store(change=drops(first)))
            await log.write(Define(removed_exchanges=[exchange.key]))
            await log.write(Store(change=Change(puts=[third], drops=[second.slot])))
            kept.append(third.position)
            next(writes)

    running = asyncio.gather(*(worker(number) for number in range(8)))
    with psycopg.connect(migrated_postgres_url, autocommit=True) as other:
        for _ in range(10):
            goal = next(writes) + 10
            while next(writes) < goal:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(
                other.execute,
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND application_name LIKE 'dtx writer%'",
            )
    stopping.set()
    await running
    (contents,) = [found async for found in log.load_queues([QUEUE])]
    assert contents.positions.tolist() == sorted(kept)
    assert (await log.load_definitions()).exchanges == ()


async def test_a_log_that_is_not_open_reads_no_messages() -> None:
    log = PostgresTransactionLog("postgresql://nowhere/x", "rm")
    assert not log.congested
    for call in (
        log.settled(),
        log.load_definitions(),
        log.read_messages([]),
        log.which_exist([]),
        log.stray_queues([]),
    ):
        with pytest.raises(LogUnavailable, match="the log is not open"):
            await call
    with pytest.raises(LogUnavailable, match="the log is not open"):
        log.post(Define(), print)
    with pytest.raises(LogUnavailable, match="the log is not open"):
        await anext(log.load_queues([1]))


async def test_a_write_to_a_closed_log_fails(open_log: OpenLog) -> None:
    log = await open_log()
    await log.close()
    told: asyncio.Future[LogError | None] = asyncio.get_running_loop().create_future()
    log.post(Define(), told.set_result)
    assert isinstance(await told, LogUnavailable)


async def test_bodies_count_for_the_size_of_a_group(open_log: OpenLog) -> None:
    groups: list[int] = []
    log = await open_log(observe=lambda records, _: groups.append(records))
    heavy = bytes(write_queue.MAX_GROUP_BYTES // 2)
    await asyncio.gather(*(log.write(Store(change=puts(a_message(body=heavy)))) for _ in range(3)))
    assert groups == [1, 1, 1]


async def test_topology_is_changed_once_in_a_group(open_log: OpenLog) -> None:
    """The same name may be removed and defined again."""
    groups: list[int] = []
    log = await open_log(observe=lambda records, _: groups.append(records))
    await asyncio.gather(
        log.write(Store(change=puts(a_message()))),
        log.write(Define(queues=[a_queue()])),
        log.write(Store(change=puts(a_message()))),
        log.write(Define(removed_queues=[QUEUE])),
    )
    assert groups == [3, 1]


async def test_very_large_changes_are_written_in_pieces(open_log: OpenLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtx.db.pipeline.MAX_STATEMENT_BYTES", 1_000)
    log = await open_log()
    messages = [a_message(body=bytes(400)) for _ in range(9)]
    await log.write(Store(change=puts(*messages)))
    assert len(await log.which_exist([message.slot for message in messages])) == 9
