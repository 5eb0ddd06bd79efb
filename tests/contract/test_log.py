"""The contract of the transaction log, for PostgreSQL and its in-memory twin."""

import asyncio
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest

from dtx.log.api import LogConflict, TransactionLog
from dtx.log.records import (
    Advance,
    Insert,
    JournalEnding,
    JournalEntry,
    JournalEvent,
    Line,
    LogState,
    Lookup,
    NoteWrite,
    UnitState,
)
from dtx.xa.codes import Heuristic
from dtx.xa.xid import Xid
from tests.contract.conftest import OpenLog
from tests.support.branches import (
    a_branch,
    a_commit,
    a_completion,
    a_consume,
    a_line,
    a_publish,
    a_unit,
    a_xid,
    all_of,
    an_insert,
)


async def test_a_written_branch_is_there_with_all_its_parts(log: TransactionLog) -> None:
    """Prepared means durable."""
    branch = a_branch(
        state=LogState.TAKING, prepared_at=None, owner="Jürgen", timeout=2**33, consumes=1, units=(a_unit(1), a_unit(0))
    )
    work = (a_publish(0, body=bytes(range(256))), a_consume(1, properties=b"", body=b"", flags=-1))
    await log.write(an_insert(branch, *work))
    stored = branch._replace(units=(branch.units[1], branch.units[0]))
    assert await all_of(log.load()) == {branch.id: stored}
    assert await log.read_work(branch.id) == list(work)
    assert await log.lookup("/", branch.xid) == Lookup(branch=stored)


@pytest.mark.parametrize(
    "xid",
    [Xid(0, b"\0"), Xid(0xFFFFFFFF, bytes(64), b"\xff" * 64), Xid(0xFFFFFFFE, b"'; --", b"\\")],
    ids=["shortest", "longest", "quotes"],
)
async def test_any_xid_is_kept_byte_by_byte(log: TransactionLog, xid: Xid) -> None:
    branch = a_branch(xid=xid)
    await log.write(an_insert(branch))
    assert (await log.lookup("/", xid)).branch == branch
    await log.write(a_completion(branch))
    assert [line.xid for line in await log.history(None, xid)] == [xid, xid]


async def test_a_branch_advances_with_its_version(log: TransactionLog) -> None:
    branch = a_branch()
    await log.write(an_insert(branch))
    await log.write(a_commit(branch))
    stored = (await log.lookup("/", branch.xid)).branch
    assert stored == branch._replace(state=LogState.COMMITTING, version=2, decided_at=1_800_000_002.5)


@pytest.mark.parametrize("event", [JournalEvent.COMMITTED, JournalEvent.ROLLED_BACK])
async def test_a_journal_line_of_a_branch_agrees_with_its_row(log: TransactionLog, event: JournalEvent) -> None:
    """A ``Line`` takes its values from the row of the branch; the journal entry is complete."""
    branch = a_branch(
        xid=Xid(0xFFFFFFFF, bytes(64), b"\xff" * 64),
        owner="Jürgen",
        timeout=2**33,
        consumes=3,
        published=(),
        consumed=(),
    )
    assert branch.prepared_at is not None
    decided_at = branch.prepared_at + 1.000001
    await log.write(Insert(branch=branch, journal=Line(JournalEvent.PREPARED, branch.prepared_at, "Jürgen")))
    assert await log.lookup("/", branch.xid) == Lookup(branch=branch)
    await log.write(a_completion(branch, journal=Line(event, decided_at, "dtx")))
    assert await all_of(log.load()) == {}
    assert await log.history("/", branch.xid) == [
        a_line(branch, JournalEvent.PREPARED, at=branch.prepared_at, actor="Jürgen", consumes=3),
        a_line(branch, event, at=decided_at, actor="dtx", consumes=3, decided_at=decided_at),
    ]


async def test_a_branch_with_messages_has_lines_at_start_and_end(log: TransactionLog) -> None:
    branch, other = a_branch(consumes=1, bytes=11), a_branch()
    assert branch.prepared_at is not None
    pieces = [a_publish(0), a_consume(1, unit=None)]
    vote = Line(JournalEvent.PREPARED, branch.prepared_at, "guest")
    await asyncio.gather(
        log.write(Insert(branch=branch, work=pieces, journal=vote)),
        log.write(an_insert(other, a_publish(0, body=b"other"))),
    )
    assert await log.lookup("/", branch.xid) == Lookup(branch=branch)
    assert await log.read_work(branch.id) == pieces
    await log.write(a_commit(branch, unit=a_unit(0)))
    end = Line(JournalEvent.COMMITTED, branch.prepared_at + 2, "dtx")
    await log.write(a_completion(branch, expect=LogState.COMMITTING, version=2, journal=end))
    assert list(await all_of(log.load())) == [other.id]
    assert await log.read_work(branch.id) == []
    assert len(await log.read_work(other.id)) == 1
    assert await log.history("/", branch.xid) == [
        a_line(branch, at=branch.prepared_at, consumes=1),
        a_line(branch, JournalEvent.COMMITTED, at=end.at, actor="dtx", consumes=1, decided_at=1_800_000_002.5),
    ]


async def test_a_forgotten_branch_keeps_the_time_of_its_decision(log: TransactionLog) -> None:
    """``forget`` decides nothing: its line has the outcome and the time of the heuristic decision."""
    branch = a_branch(published=(), consumed=())
    assert branch.prepared_at is not None
    await log.write(Insert(branch=branch, journal=Line(JournalEvent.PREPARED, branch.prepared_at, "guest")))
    decided = {"to": LogState.HEURISTIC, "outcome": Heuristic.COMMITTED, "decided_at": branch.prepared_at + 1}
    line = a_line(branch, JournalEvent.HEURISTIC, outcome=Heuristic.COMMITTED)
    await log.write(a_commit(branch, journal=line, **decided))
    forgotten = Line(JournalEvent.FORGOTTEN, branch.prepared_at + 2, "guest")
    await log.write(a_completion(branch, expect=LogState.HEURISTIC, version=2, journal=forgotten))
    last = (await log.history("/", branch.xid))[-1]
    assert (last.event, last.outcome) == (JournalEvent.FORGOTTEN, Heuristic.COMMITTED)
    assert last.decided_at == branch.prepared_at + 1


async def test_lines_of_branches_and_others_share_one_group(log: TransactionLog) -> None:
    """Records written in one group keep their own values; only the conflicting record fails."""
    branches = [a_branch(published=(), consumed=(), vhost=f"v{number % 2}", owner=f"o{number}") for number in range(6)]
    for branch in branches:
        assert branch.prepared_at is not None
    prepared = [
        log.write(Insert(branch=branch, journal=Line(JournalEvent.PREPARED, branch.prepared_at or 0.0, branch.owner)))
        for branch in branches
    ]
    await asyncio.gather(*prepared, log.write(an_insert(a_branch())))
    assert {branch.id: branch for branch in branches}.items() <= (await all_of(log.load())).items()
    ends = [
        log.write(a_completion(branch, version=1 + (index == 2), journal=Line(JournalEvent.COMMITTED, 1.9e9, "a")))
        for index, branch in enumerate(branches)
    ]
    results = await asyncio.gather(*ends, return_exceptions=True)
    assert [type(result) for result in results] == [LogConflict if index == 2 else type(None) for index in range(6)]
    for index, branch in enumerate(branches):
        events = [line.event for line in await log.history(branch.vhost, branch.xid)]
        assert events == [JournalEvent.PREPARED, *([] if index == 2 else [JournalEvent.COMMITTED])]


@pytest.mark.parametrize(
    "wrong",
    [{"version": 2}, {"expect": LogState.TAKING}, {"id": uuid4()}],
    ids=["version", "state", "branch"],
)
async def test_a_write_that_expects_something_else_is_refused(log: TransactionLog, wrong: dict[str, Any]) -> None:
    """Every write names the state that it expects; if no row matches, the write fails."""
    branch = a_branch()
    await log.write(an_insert(branch))
    with pytest.raises(LogConflict):
        await log.write(a_commit(branch, **wrong))
    with pytest.raises(LogConflict):
        await log.write(a_completion(branch, **wrong))
    assert await all_of(log.load()) == {branch.id: branch}
    assert [line.event for line in await log.history("/", branch.xid)] == [JournalEvent.PREPARED]


async def test_an_xid_is_there_once_in_a_vhost(log: TransactionLog) -> None:
    """A vhost is one resource manager: the same xid may exist in two vhosts."""
    branch = a_branch()
    await log.write(an_insert(branch))
    with pytest.raises(LogConflict):
        await log.write(an_insert(a_branch(xid=branch.xid)))
    elsewhere = a_branch(xid=branch.xid, vhost="elsewhere")
    await log.write(an_insert(elsewhere))
    assert (await log.lookup("elsewhere", branch.xid)).branch == elsewhere
    assert (await log.lookup("/", branch.xid)).branch == branch


async def test_a_branch_is_there_once(log: TransactionLog) -> None:
    branch = a_branch()
    await log.write(an_insert(branch))
    with pytest.raises(LogConflict):
        await log.write(an_insert(branch._replace(xid=a_xid())))


async def test_resource_managers_do_not_see_each_other(open_log: OpenLog) -> None:
    mine, other = await open_log("mine"), await open_log("other")
    branch = a_branch()
    await mine.write(an_insert(branch))
    await other.write(an_insert(branch._replace(id=uuid4())))
    assert list(await all_of(mine.load())) == [branch.id]
    with pytest.raises(LogConflict):
        await other.write(a_commit(branch))
    await mine.write(a_completion(branch))
    assert len(await other.history(None, branch.xid)) == 1
    assert (await other.lookup("/", branch.xid)).branch is not None


async def test_a_completed_branch_leaves_and_is_remembered(log: TransactionLog) -> None:
    """Outcome memory: "404 for an xid that completed recently says so"."""
    branch = a_branch(units=(a_unit(0),))
    await log.write(an_insert(branch))
    completion = a_completion(branch, JournalEvent.ROLLED_BACK)
    await log.write(completion)
    assert await all_of(log.load()) == {}
    assert await log.read_work(branch.id) == []
    assert await log.lookup("/", branch.xid) == Lookup(
        ending=JournalEnding(
            event=JournalEvent.ROLLED_BACK, at=completion.journal.at, branch_id=branch.id, owner=branch.owner
        )
    )


async def test_the_ending_of_a_branch_is_found_despite_wrong_clocks(
    log: TransactionLog,
) -> None:
    before = a_branch()
    branch = a_branch()._replace(xid=before.xid)
    later = a_completion(before, JournalEvent.ROLLED_BACK)
    assert isinstance(later.journal, JournalEntry)
    for begun, ended in (
        (before, replace(later, journal=replace(later.journal, at=later.journal.at + 3600))),
        (branch, a_completion(branch)),
    ):
        await log.write(an_insert(begun))
        await log.write(ended)
    last = (await log.lookup("/", branch.xid)).ending
    found = (await log.lookup("/", branch.xid, branch.id)).ending
    assert last is not None
    assert found is not None
    assert (last.branch_id, last.event) == (before.id, JournalEvent.ROLLED_BACK)
    assert (found.branch_id, found.event) == (branch.id, JournalEvent.COMMITTED)
    assert await log.lookup("/", branch.xid, uuid4()) == Lookup()


async def test_an_unknown_xid_is_unknown(log: TransactionLog) -> None:
    assert await log.lookup("/", a_xid()) == Lookup()
    assert await log.history(None, a_xid()) == []


async def test_the_last_ending_of_a_reused_xid_counts(log: TransactionLog) -> None:
    xid = a_xid()
    for event in (JournalEvent.COMMITTED, JournalEvent.ROLLED_BACK):
        branch = a_branch(xid=xid)
        await log.write(an_insert(branch))
        await log.write(a_completion(branch, event))
    await log.write(NoteWrite(journal=a_line(a_branch(xid=xid), JournalEvent.TIMED_OUT)))
    ending = (await log.lookup("/", xid)).ending
    assert ending is not None
    assert ending.event is JournalEvent.ROLLED_BACK
    assert len(await log.history("/", xid)) == 5


async def test_the_journal_has_all_events_in_order(log: TransactionLog) -> None:
    branch = a_branch()
    lines = [
        a_line(branch, JournalEvent.TIMED_OUT, reason="after 60 s"),
        a_line(branch, JournalEvent.HAZARD, actor="dtx", outcome=Heuristic.HAZARD, one_phase=True, consumes=3),
        a_line(branch, JournalEvent.FORGOTTEN, started_at=None, prepared_at=None, decided_at=1_800_000_009.0),
    ]
    for line in lines:
        await log.write(NoteWrite(journal=line))
    assert await log.history("/", branch.xid) == lines
    assert await log.history(None, branch.xid) == lines
    assert await log.history("elsewhere", branch.xid) == []


async def test_a_stuck_branch_keeps_the_brokers_text_until_cleared(log: TransactionLog) -> None:
    branch = a_branch(state=LogState.COMMITTING)
    await log.write(an_insert(branch))
    words = "NOT_FOUND - no exchange 'ö\0rders'"
    await log.write(a_commit(branch, stuck=words, decided_at=None))
    stuck = (await log.lookup("/", branch.xid)).branch
    assert stuck is not None
    assert stuck.stuck is not None
    assert stuck.stuck.startswith("NOT_FOUND - no exchange 'ö")
    await log.write(a_commit(branch, version=2))
    cleared = (await log.lookup("/", branch.xid)).branch
    assert cleared is not None
    assert cleared.stuck is None


async def test_units_are_added_replaced_and_done(log: TransactionLog) -> None:
    branch = a_branch(state=LogState.TAKING, units=(a_unit(1), a_unit(2)))
    await log.write(an_insert(branch, a_consume(0), a_consume(1, unit=2)))
    phase_two = a_unit(0, incarnation="rabbit@host:1", receipt=False)
    replaced = a_unit(2, lock="another")
    await log.write(
        a_commit(branch, to=LogState.PREPARED, units_done=(1,), unit=phase_two, prepared_at=1_800_000_001.0)
    )
    await log.write(a_commit(branch, expect=LogState.PREPARED, version=2, unit=replaced))
    stored = (await log.lookup("/", branch.xid)).branch
    assert stored is not None
    assert stored.units == (phase_two, replace(branch.units[0], state=UnitState.DONE), replaced)
    assert (await all_of(log.load()))[branch.id] == stored


async def test_a_unit_that_is_not_there_cannot_be_done(log: TransactionLog) -> None:
    branch = a_branch(units=(a_unit(0),))
    await log.write(an_insert(branch))
    with pytest.raises(LogConflict):
        await log.write(a_commit(branch, units_done=(0, 7)))
    assert (await log.lookup("/", branch.xid)).branch == branch


async def test_settled_work_leaves_before_the_branch(log: TransactionLog) -> None:
    branch = a_branch(publishes=3)
    await log.write(an_insert(branch, *(a_publish(position) for position in range(3))))
    await log.write(a_commit(branch, settled=(0, 2)))
    assert [work.position for work in await log.read_work(branch.id)] == [1]
    with pytest.raises(LogConflict):
        await log.write(a_commit(branch, expect=LogState.COMMITTING, version=2, settled=(0,)))


async def test_a_heuristic_outcome_stays_until_it_is_forgotten(log: TransactionLog) -> None:
    """A heuristic decision is recorded with actor and reason, and stays until forget."""
    branch = a_branch()
    await log.write(an_insert(branch))
    line = a_line(branch, JournalEvent.HEURISTIC, actor="alice", reason="site lost", outcome=Heuristic.HAZARD)
    await log.write(a_commit(branch, to=LogState.HEURISTIC, outcome=Heuristic.HAZARD, journal=line))
    await log.write(
        a_commit(
            branch,
            expect=LogState.HEURISTIC,
            version=2,
            to=LogState.HEURISTIC,
            outcome=Heuristic.MIXED,
            journal=replace(line, outcome=Heuristic.MIXED),
        )
    )
    stored = (await log.lookup("/", branch.xid)).branch
    assert stored is not None
    assert (stored.state, stored.outcome, stored.version) == (LogState.HEURISTIC, Heuristic.MIXED, 3)
    forgotten = replace(a_line(branch, JournalEvent.FORGOTTEN), outcome=Heuristic.MIXED)
    await log.write(a_completion(branch, expect=LogState.HEURISTIC, version=3, journal=forgotten))
    assert await log.lookup("/", branch.xid) == Lookup(
        ending=JournalEnding(
            event=JournalEvent.FORGOTTEN,
            at=forgotten.at,
            branch_id=branch.id,
            owner=branch.owner,
            outcome=Heuristic.MIXED,
        )
    )


@pytest.mark.parametrize(
    "record",
    [
        an_insert(a_branch(outcome=Heuristic.COMMITTED)),
        an_insert(a_branch(state=LogState.HEURISTIC)),
        an_insert(a_branch(version=0)),
        an_insert(a_branch(publishes=-1)),
        an_insert(a_branch(), a_publish(queue=b"queue")),
        an_insert(a_branch(), a_consume(queue=None)),
        an_insert(a_branch(), a_publish(unit=1)),
        an_insert(a_branch(), a_publish(0), a_publish(0)),
        an_insert(a_branch(), a_publish(-1)),
        an_insert(a_branch(units=(a_unit(1), a_unit(1)))),
    ],
    ids=[
        "outcome-without-heuristic", "heuristic-without-outcome", "version", "count", "publish-with-queue",
        "consume-without-queue", "publish-with-unit", "same-position", "negative-position", "same-unit",
    ],
)  # fmt: skip
async def test_a_record_unreadable_for_recovery_is_not_stored(log: TransactionLog, record: Insert) -> None:
    """Constraints of the database repeat the invariants of the core."""
    with pytest.raises(LogConflict):
        await log.write(record)
    assert await all_of(log.load()) == {}
    assert await log.history(None, record.branch.xid) == []


async def test_a_refused_record_does_not_fail_others(log: TransactionLog) -> None:
    """A failing record is retried separately; the others of its group are written."""
    taken = a_branch()
    await log.write(an_insert(taken))
    branches = [a_branch(xid=taken.xid) if number % 7 == 3 else a_branch() for number in range(50)]
    results = await asyncio.gather(*(log.write(an_insert(branch)) for branch in branches), return_exceptions=True)
    for branch, result in zip(branches, results, strict=True):
        assert isinstance(result, LogConflict) if branch.xid == taken.xid else result is None
    fine = {branch.id for branch in branches if branch.xid != taken.xid}
    assert (await all_of(log.load())).keys() == fine | {taken.id}


async def test_concurrent_records_of_one_branch_are_written_in_order(log: TransactionLog) -> None:
    branch = a_branch()
    again = a_branch(xid=branch.xid)
    await asyncio.gather(
        log.write(an_insert(branch)),
        log.write(a_commit(branch)),
        log.write(a_completion(branch, expect=LogState.COMMITTING, version=2)),
        log.write(an_insert(again)),
        log.write(a_completion(again)),
    )
    assert await all_of(log.load()) == {}
    events = [line.event for line in await log.history("/", branch.xid)]
    assert events.count(JournalEvent.COMMITTED) == 2


async def test_two_decisions_at_once_have_one_winner(log: TransactionLog) -> None:
    branch = a_branch()
    await log.write(an_insert(branch))
    results = await asyncio.gather(
        log.write(a_commit(branch)),
        log.write(a_commit(branch, to=LogState.ROLLING_BACK)),
        return_exceptions=True,
    )
    assert [type(result) for result in results] == [type(None), LogConflict]


async def test_a_later_log_finds_the_records_of_an_earlier_one(open_log: OpenLog) -> None:
    first = await open_log()
    branches = [a_branch() for _ in range(20)]
    await asyncio.gather(*(first.write(an_insert(branch)) for branch in branches))
    await first.close()
    second = await open_log()
    assert await all_of(second.load()) == {branch.id: branch for branch in branches}


async def test_a_standby_waits_until_the_active_log_closes(open_log: OpenLog) -> None:
    """One active dtx for each resource manager; a standby waits."""
    first = await open_log()
    standby = asyncio.create_task(open_log())
    await first.write(an_insert(a_branch()))
    assert first.lease_valid
    assert not standby.done()
    await first.close()
    second = await asyncio.wait_for(standby, 5)
    assert second.lease_valid
    assert not first.lease_valid


async def test_a_note_belongs_to_no_branch(log: TransactionLog) -> None:
    line = a_line(a_branch(), JournalEvent.READ_ONLY)
    await log.write(NoteWrite(journal=line))
    assert (await log.lookup("/", line.xid)).ending == JournalEnding(
        event=JournalEvent.READ_ONLY, at=line.at, branch_id=line.branch_id, owner=line.owner
    )
    assert await all_of(log.load()) == {}


async def test_an_advance_may_only_note(log: TransactionLog) -> None:
    branch = a_branch(state=LogState.COMMITTING)
    await log.write(an_insert(branch))
    same = Advance(id=branch.id, expect=LogState.COMMITTING, version=1, to=LogState.COMMITTING, unit=a_unit(0))
    await log.write(same)
    stored = (await log.lookup("/", branch.xid)).branch
    assert stored is not None
    assert (stored.version, len(stored.units), stored.decided_at) == (2, 1, None)
