"""The faults of the in-memory log, which other tests inject."""

import asyncio

import pytest

from dtx.log.api import LeaseLost, LogUnavailable
from tests.support.branches import a_branch, a_commit, all_of, an_insert
from tests.support.memory_log import Fault, MemoryLog


@pytest.fixture
async def log() -> MemoryLog:
    log = MemoryLog()
    await log.open()
    return log


async def test_a_refused_write_wrote_nothing(log: MemoryLog) -> None:
    log.faults.append(Fault.REFUSED)
    with pytest.raises(LogUnavailable):
        await log.write(an_insert(a_branch()))
    assert await all_of(log.load()) == {}
    assert log.written == []


async def test_an_answer_is_lost_after_the_write(log: MemoryLog) -> None:
    branch = a_branch()
    log.faults.append(Fault.ANSWER_LOST)
    with pytest.raises(LogUnavailable):
        await log.write(an_insert(branch))
    assert (await log.lookup("/", branch.xid)).branch == branch
    await log.write(a_commit(branch))
    assert len(log.written) == 2


async def test_the_lease_is_lost_to_another(log: MemoryLog) -> None:
    log.faults.append(Fault.LEASE_LOST)
    branch = a_branch()
    with pytest.raises(LeaseLost):
        await log.write(an_insert(branch))
    assert not log.lease_valid
    with pytest.raises(LeaseLost):
        await log.lookup("/", branch.xid)


async def test_writes_wait_while_the_log_is_paused(log: MemoryLog) -> None:
    log.running.clear()
    write = asyncio.create_task(log.write(an_insert(a_branch())))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not write.done()
    log.running.set()
    await write


async def test_a_database_that_is_away_answers_nothing(log: MemoryLog) -> None:
    log.reachable = False
    branch = a_branch()
    assert not log.lease_valid
    for call in (
        log.open(), log.write(an_insert(branch)), log.lookup("/", branch.xid), log.history(None, branch.xid),
        log.read_work(branch.id), all_of(log.load()),
    ):  # fmt: skip
        with pytest.raises(LogUnavailable):
            await call


async def test_written_records_survive_a_crash(log: MemoryLog) -> None:
    branch = a_branch()
    await log.write(an_insert(branch))
    log.crash()
    again = MemoryLog("dtx", log.database)
    await again.open()
    assert await all_of(again.load()) == {branch.id: branch}
