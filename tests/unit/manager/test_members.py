"""A manager whose log has branches of other members."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any
from uuid import UUID, uuid4

import pytest

from dtx.log.api import LogUnavailable
from dtx.log.records import BranchRecord, LogState, Lookup
from dtx.manager import BranchManager, Limits, Requester
from dtx.telemetry import Metrics
from dtx.xa.codes import ReplyCode, XaFlag
from dtx.xa.model import Operation, State
from dtx.xa.xid import Xid
from tests.support.branches import a_branch, a_unit
from tests.support.memory_log import MemoryLog
from tests.unit.manager.requests import answer_of
from tests.unit.manager.test_operators import Broker

WHO = Requester("guest", "/")
XID = Xid(1, b"gtrid", b"bqual")
ME, OTHER = uuid4(), uuid4()


class MemberLog(MemoryLog):
    """A log with branches of several members."""

    def __init__(self) -> None:
        super().__init__("rm")
        self.rows: list[BranchRecord] = []
        self.fails_at: int | None = None
        """The row at which the next load fails."""
        self.answers = asyncio.Event()
        """While cleared, look-ups do not answer."""
        self.answers.set()
        self.asked = asyncio.Event()

    @property
    def member(self) -> UUID | None:
        return ME

    async def load(self, member: UUID | None = None) -> AsyncIterator[BranchRecord]:
        for number, row in enumerate([row for row in self.rows if member is None or row.member == member]):
            if number == self.fails_at:
                self.fails_at = None
                raise LogUnavailable("the database is away")
            yield row

    async def load_listed(self, vhost: str) -> AsyncIterator[BranchRecord]:
        for row in self.rows:
            if row.vhost == vhost:
                yield row

    async def lookup(self, vhost: str, xid: Xid, branch_id: UUID | None = None) -> Lookup:
        found = next((row for row in self.rows if row.xid == xid), None)
        self.asked.set()
        await self.answers.wait()
        return await super().lookup(vhost, xid, branch_id) if found is None else Lookup(branch=found)


def a_row(state: LogState, member: UUID) -> BranchRecord:
    """A branch of *member* in the log."""
    times = {"prepared_at": 1.0, "decided_at": None if state is LogState.PREPARED else 2.0}
    return a_branch(xid=XID, state=state, member=member, vhost="/", owner="guest", units=(a_unit(),), **times)


@pytest.fixture
async def manager() -> AsyncIterator[BranchManager]:
    """Return a manager on a :class:`MemberLog`."""
    log = MemberLog()
    await log.open()
    manager = BranchManager(log, Broker(), Limits(patience=1), Metrics())
    await manager.start()
    yield manager
    await manager.close()


@pytest.fixture
def log(manager: BranchManager) -> MemberLog:
    """Return its log."""
    assert isinstance(manager.log, MemberLog)
    return manager.log


def unvoted(manager: BranchManager) -> None:
    """Start and end the branch here."""
    for operation in (Operation.START, Operation.END):
        manager.demarcate(WHO, XID, operation, 1)


async def test_a_takeover_that_failed_resumes_every_branch(manager: BranchManager, log: MemberLog) -> None:
    log.rows = [a_row(LogState.COMMITTING, ME)._replace(id=uuid4(), xid=Xid(1, b"%d" % n, b"b")) for n in range(2)]
    log.fails_at = 1
    with pytest.raises(LogUnavailable):
        await manager.take_over()
    await manager.take_over()
    async with asyncio.timeout(5):
        while any(entry.busy for entry in manager.entries()):
            await asyncio.sleep(0.01)


async def test_the_log_is_asked_before_a_tombstone(manager: BranchManager, log: MemberLog) -> None:
    """Another member may have a prepared branch with the xid of one that was rolled back here."""
    manager.demarcate(WHO, XID, Operation.START, 1)
    manager.demarcate(WHO, XID, Operation.FAIL, 1)
    assert await answer_of(manager, WHO, XID, Operation.PREPARE) is XaFlag.RBROLLBACK
    log.rows = [a_row(LogState.PREPARED, OTHER)]
    assert await answer_of(manager, WHO, XID, Operation.ROLLBACK) is ReplyCode.INTERNAL_ERROR
    log.rows = []
    assert await answer_of(manager, WHO, XID, Operation.ROLLBACK) is XaFlag.RBROLLBACK
    assert await answer_of(manager, WHO, XID, Operation.ROLLBACK) is ReplyCode.NOT_FOUND


async def test_a_prepared_branch_hides_an_unvoted_one(manager: BranchManager, log: MemberLog) -> None:
    unvoted(manager)
    log.rows = [a_row(LogState.PREPARED, OTHER)]
    assert await manager.in_doubt(WHO) == [XID]
    assert await answer_of(manager, WHO, XID, Operation.ROLLBACK) is ReplyCode.INTERNAL_ERROR


async def test_of_two_rollbacks_the_second_finds_no_branch(manager: BranchManager, log: MemberLog) -> None:
    unvoted(manager)
    log.answers.clear()
    both: list[Awaitable[Any]] = [
        asyncio.ensure_future(answer_of(manager, WHO, XID, Operation.ROLLBACK)) for _ in range(2)
    ]
    await log.asked.wait()
    await asyncio.sleep(0.05)
    log.answers.set()
    assert await asyncio.gather(*both) == [XaFlag.OK, ReplyCode.NOT_FOUND]


async def test_a_rollback_waits_for_the_vote_before_it(manager: BranchManager, log: MemberLog) -> None:
    """The vote begins while the rollback looks into the log."""
    unvoted(manager)
    log.answers.clear()
    rollback = asyncio.ensure_future(answer_of(manager, WHO, XID, Operation.ROLLBACK))
    await log.asked.wait()
    log.running.clear()
    vote = asyncio.ensure_future(answer_of(manager, WHO, XID, Operation.PREPARE))
    await asyncio.sleep(0.05)
    log.answers.set()
    await asyncio.sleep(0.05)
    assert not rollback.done()
    log.running.set()
    assert [await vote, await rollback] in ([XaFlag.RDONLY, XaFlag.OK], [XaFlag.RDONLY, ReplyCode.NOT_FOUND])


async def test_a_new_branch_outlives_the_row_of_an_ended_one(manager: BranchManager, log: MemberLog) -> None:
    """Its xid was used again while a takeover read the log."""
    log.rows = [a_row(LogState.PREPARED, ME)]
    await manager.take_over()
    load = log.load

    async def late(member: UUID | None = None) -> AsyncIterator[BranchRecord]:
        async for row in load(member):
            entry = manager.known("/", XID)
            assert entry is not None
            manager._branches._forget(entry)
            manager.demarcate(WHO, XID, Operation.START, 1)
            yield row

    log.load = late  # type: ignore[method-assign]
    await manager.take_over()
    entry = manager.known("/", XID)
    assert entry is not None
    assert (entry.id == log.rows[0].id, entry.branch.state) == (False, State.ACTIVE)


async def test_a_takeover_removes_an_unvoted_branch(manager: BranchManager, log: MemberLog) -> None:
    """The log has a branch with its xid, so it can never vote."""
    unvoted(manager)
    log.rows = [a_row(LogState.PREPARED, ME)]
    await manager.take_over()
    entry = manager.known("/", XID)
    assert entry is not None
    assert (entry.id, entry.branch.state) == (log.rows[0].id, State.PREPARED)


async def test_the_store_keeps_receipts_of_a_found_branch(
    manager: BranchManager, log: MemberLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request may find a branch that was taken over before it is loaded."""
    expected: list[UUID] = []
    monkeypatch.setattr(Broker, "expect", lambda _, branch_id, *__: expected.append(branch_id))
    log.rows = [a_row(LogState.COMMITTING, ME)]
    await answer_of(manager, WHO, XID, Operation.COMMIT)
    assert expected == [log.rows[0].id]
