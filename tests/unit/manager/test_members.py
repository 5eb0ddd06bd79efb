"""A manager whose log has branches of other members."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

import pytest

from dtx.log.api import DuplicateXid, LogUnavailable
from dtx.log.membership import Membership
from dtx.log.records import BranchRecord, JournalEvent, LogState, Lookup
from dtx.manager import BranchManager, Limits, Requester
from dtx.manager.branches import OF_VOTED, Elsewhere
from dtx.manager.operators import OperatorAction, Operators, Order
from dtx.server.members.forwarding import Forwarding
from dtx.store.work import HeldPublish
from dtx.telemetry import Metrics
from dtx.xa.codes import Heuristic, ReplyCode, XaError, XaFlag
from dtx.xa.model import Operation, State
from dtx.xa.xid import Xid
from tests.support.branches import a_branch, a_line, a_unit
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
        self.queries: list[int] = []
        """The number of xids in each query of new branches."""

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

    async def which_logged(self, keys: Sequence[tuple[str, Xid]]) -> set[tuple[str, Xid]]:
        self.queries.append(len(keys))
        await self.answers.wait()
        if not self.reachable:
            raise LogUnavailable("the database is away")
        return {(row.vhost, row.xid) for row in self.rows}.intersection(keys)

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


def unvoted(manager: BranchManager, *, publishes: bool = False) -> None:
    """Start and end the branch here."""
    started = manager.demarcate(WHO, XID, Operation.START, 1)
    assert started is not None
    if publishes:
        assert started[1].work is not None
        started[1].work.add_publish(HeldPublish(b"x", b"key", False, b"\x00\x00", b"body"))
    manager.demarcate(WHO, XID, Operation.END, 1)


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


@pytest.mark.parametrize("operation", [Operation.PREPARE, Operation.ONE_PHASE])
async def test_a_duplicate_vote_is_rolled_back(
    manager: BranchManager, log: MemberLog, monkeypatch: pytest.MonkeyPatch, operation: Operation
) -> None:
    """The work is given back, and the rollback that may follow gets the same answer."""

    def refuse(*_: object) -> None:
        raise DuplicateXid("a branch with this xid has ended")

    monkeypatch.setattr(log, "_insert", refuse)
    monkeypatch.setattr(Broker, "units_to_take", lambda *_: {})
    unvoted(manager, publishes=True)
    assert await answer_of(manager, WHO, XID, operation) is XaFlag.RBROLLBACK
    assert manager.is_empty
    assert manager.budget.used == 0
    assert await answer_of(manager, WHO, XID, Operation.ROLLBACK) is XaFlag.RBROLLBACK
    assert await answer_of(manager, WHO, XID, Operation.ROLLBACK) is ReplyCode.NOT_FOUND


@pytest.mark.parametrize("operation", [Operation.COMMIT, Operation.FORGET])
async def test_a_decision_means_the_branch_that_has_voted(
    manager: BranchManager, log: MemberLog, operation: Operation
) -> None:
    unvoted(manager)
    assert await answer_of(manager, WHO, XID, operation) is ReplyCode.COMMAND_INVALID
    log.rows = [a_row(LogState.PREPARED, OTHER)]
    assert await answer_of(manager, WHO, XID, operation) is ReplyCode.INTERNAL_ERROR


class Others:
    """Other members, which have no branches."""

    exist = True

    async def order(self, *_: Any) -> None:
        return None

    async def unvoted(self, *_: Any) -> Any:
        return [], []

    async def ask(
        self, who: Requester, xid: Xid, operation: Operation, seconds: int, found: Elsewhere, _: float
    ) -> Any:
        raise XaError(found.code, found.reason, found.facts)


async def test_a_start_shares_the_query_of_others(manager: BranchManager, log: MemberLog) -> None:
    manager.others = Others()
    log.rows = [a_row(LogState.PREPARED, OTHER)]
    log.answers.clear()
    xids = [XID, *(Xid(1, b"%d" % number, b"b") for number in range(50))]
    assert manager.demarcate(WHO, XID, Operation.START, 1) is None
    settling = [asyncio.ensure_future(manager.settle(WHO, xid, Operation.START)) for xid in xids]
    await asyncio.sleep(0.05)
    log.answers.set()
    known, *new = await asyncio.gather(*settling, return_exceptions=True)
    assert isinstance(known, XaError)
    assert (known.code, new) == (ReplyCode.NOT_ALLOWED, [True] * 50)
    assert log.queries in ([1, 50], [51])
    assert manager.demarcate(WHO, xids[1], Operation.START, 1, is_new=True) is not None


async def test_a_start_does_not_need_the_log(manager: BranchManager, log: MemberLog) -> None:
    """The vote needs it, and refuses a duplicate."""
    manager.others = Others()
    log.reachable = False
    assert await manager.settle(WHO, XID, Operation.START)


ENDED = {
    JournalEvent.COMMITTED: {Operation.COMMIT: XaFlag.OK, Operation.ONE_PHASE: XaFlag.OK},
    JournalEvent.ROLLED_BACK: {
        Operation.ROLLBACK: XaFlag.OK, Operation.ONE_PHASE: XaFlag.RBROLLBACK, Operation.PREPARE: XaFlag.RBROLLBACK,
    },
    JournalEvent.READ_ONLY: {Operation.PREPARE: XaFlag.RDONLY},
    JournalEvent.FORGOTTEN: {Operation.FORGET: XaFlag.OK},
}  # fmt: skip


@pytest.mark.parametrize("event", ENDED)
async def test_an_ending_is_the_answer_that_was_lost(
    manager: BranchManager, log: MemberLog, event: JournalEvent
) -> None:
    row = a_row(LogState.PREPARED, OTHER)
    line = a_line(row, event)
    log.database.journal.append(("rm", line))
    ending = (await log.lookup("/", XID)).ending
    voted = Elsewhere(row, ReplyCode.INTERNAL_ERROR, "")
    unvoted = Elsewhere(None, ReplyCode.NOT_FOUND, "")
    ended_before = Elsewhere(None, ReplyCode.NOT_FOUND, "", ending=ending)
    another = Elsewhere(row._replace(id=uuid4()), ReplyCode.INTERNAL_ERROR, "")
    stranger = Requester("stranger", "/")
    for operation in (*OF_VOTED, Operation.PREPARE, Operation.ONE_PHASE):
        for found in (voted, unvoted):
            expected = ENDED[event].get(operation)
            assert await manager.answer_of_log(WHO, XID, operation, found) is expected, operation
            assert await manager.answer_of_log(stranger, XID, operation, found) is None
        for found in (ended_before, another):
            assert await manager.answer_of_log(WHO, XID, operation, found) is None, operation


async def test_the_row_is_the_answer_that_was_lost(manager: BranchManager, log: MemberLog) -> None:
    before = Elsewhere(None, ReplyCode.NOT_FOUND, "")
    log.rows = [a_row(LogState.PREPARED, OTHER)]
    assert await manager.answer_of_log(WHO, XID, Operation.PREPARE, before) is XaFlag.OK
    assert await manager.answer_of_log(WHO, XID, Operation.ONE_PHASE, before) is None
    voted = Elsewhere(log.rows[0], ReplyCode.INTERNAL_ERROR, "")
    for operation in (*OF_VOTED, Operation.PREPARE):
        assert await manager.answer_of_log(WHO, XID, operation, voted) is None, operation
    log.rows = [log.rows[0]._replace(state=LogState.HEURISTIC, outcome=Heuristic.MIXED)]
    answers = [await manager.answer_of_log(WHO, XID, operation, voted) for operation in OF_VOTED]
    assert answers == [XaFlag.HEURMIX, XaFlag.HEURMIX, None]


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


class Lonely:
    """A membership without other members; *read* is called when they are read."""

    others: tuple[Any, ...] = ()

    def __init__(self, read: Callable[[], None]) -> None:
        self._read = read

    async def read(self) -> tuple[Any, ...]:
        """Return nobody."""
        self._read()
        return ()


async def test_the_log_is_read_again_before_404(manager: BranchManager, log: MemberLog) -> None:
    """The branch votes and ends while the members are asked."""
    ended = a_line(a_row(LogState.PREPARED, OTHER), JournalEvent.COMMITTED)
    lonely = Lonely(lambda: log.database.journal.append(("rm", ended)))
    manager.others = Forwarding(manager, cast("Membership", lonely), ssl.create_default_context(), Metrics())
    with pytest.raises(XaError, match="completed: committed"):
        await manager.get_timeout(WHO, XID)


async def test_a_forwarded_request_goes_no_further(
    manager: BranchManager, log: MemberLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two members that believe the other one to have the branch would send it to and fro."""
    lonely = cast("Membership", Lonely(lambda: None))
    manager.others = Forwarding(manager, lonely, ssl.create_default_context(), Metrics())
    asked: list[Any] = []
    monkeypatch.setattr(manager.others, "ask", asked.append)
    log.rows = [a_row(LogState.PREPARED, OTHER)]
    for unvoted in (False, True):
        assert await manager.ask_here(WHO, XID, Operation.COMMIT, 0, unvoted=unvoted) is None
    assert asked == []


async def test_an_order_ends_although_no_member_loads_the_branch(manager: BranchManager, log: MemberLog) -> None:
    """The log names a member, which has not loaded the branch yet."""

    async def order(*_: object) -> None:
        await asyncio.sleep(0)

    manager.limits = replace(manager.limits, forward_timeout=0.3)
    manager.others = cast("Any", SimpleNamespace(order=order))
    log.rows = [a_row(LogState.PREPARED, OTHER)]
    given = Order(vhost="/", xid=XID, action=OperatorAction.COMMIT, actor="o", reason="it waits", positions=())
    with pytest.raises(XaError, match="taking the branch"):
        await Operators(manager).carry_out(given)
