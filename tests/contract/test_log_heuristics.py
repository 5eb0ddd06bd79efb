"""The contract of the transaction log for heuristic decisions: the fate of each message, and the archive."""

from dataclasses import replace

import pytest

from dtx.log.api import LogConflict, MessageLog
from dtx.log.changes import Change, Define, QueueRow, Slot, StoredMessage
from dtx.log.records import EXCLUSIVE, CloseWrite, Fate, JournalEvent, Line, LogState, Redirect, WorkKind
from dtx.xa.codes import Heuristic
from tests.support.branches import a_branch, a_commit, a_completion, a_consume, a_line, a_publish, an_insert

COMMITTED = CloseWrite(publishes=Fate.PUBLISHED, consumes=Fate.CONSUMED)


async def fates(log: MessageLog) -> list[Fate | None]:
    """The fate of each message of the only branch."""
    found = [record async for record in log.load()]
    assert len(found) == 1
    return [work.fate for work in await log.read_messages_of(found[0].id)]


@pytest.mark.parametrize("state", [LogState.HEURISTIC_COMMITTING, LogState.HEURISTIC_ROLLING_BACK])
async def test_a_decision_that_is_under_way_has_its_outcome(log: MessageLog, state: LogState) -> None:
    branch = a_branch()
    await log.write(an_insert(branch))
    with pytest.raises(LogConflict):
        await log.write(a_commit(branch, to=state))
    line = a_line(branch, JournalEvent.DECIDED, actor="alice", reason="site lost", outcome=Heuristic.COMMITTED)
    await log.write(a_commit(branch, to=state, outcome=Heuristic.COMMITTED, journal=line))
    stored = (await log.lookup("/", branch.xid)).branch
    assert stored is not None
    assert (stored.state, stored.outcome, stored.version) == (state, Heuristic.COMMITTED, 2)
    assert (await log.history(None, branch.xid))[-1] == line
    # The end of the decision names no outcome: the decided one stays.
    await log.write(a_commit(branch, expect=state, version=2, to=LogState.HEURISTIC, close=COMMITTED))
    stored = (await log.lookup("/", branch.xid)).branch
    assert stored is not None
    assert (stored.state, stored.outcome) == (LogState.HEURISTIC, Heuristic.COMMITTED)


async def test_a_fate_is_set_once_and_an_unsure_one_again(log: MessageLog) -> None:
    branch = a_branch(publishes=3)
    await log.write(an_insert(branch, *(a_publish(position) for position in range(3))))
    await log.write(a_commit(branch, fates=((0, Fate.DISCARDED), (2, Fate.UNSURE))))
    assert await fates(log) == [Fate.DISCARDED, None, Fate.UNSURE]
    change = a_commit(branch, expect=LogState.COMMITTING, version=2)
    for position in (0, 7):
        with pytest.raises(LogConflict):
            await log.write(replace(change, fates=((position, Fate.DISCARDED),)))
    await log.write(replace(change, fates=((2, Fate.DISCARDED),)))
    assert await fates(log) == [Fate.DISCARDED, None, Fate.DISCARDED]


async def test_messages_open_at_the_end_get_their_kinds_fate(log: MessageLog) -> None:
    branch = a_branch(publishes=3, consumes=1)
    work = (a_publish(0), a_publish(1), a_consume(2), a_publish(3))
    await log.write(an_insert(branch, *work))
    await log.write(a_commit(branch, fates=((3, Fate.UNSURE),)))
    line = a_line(branch, JournalEvent.HEURISTIC, outcome=Heuristic.MIXED)
    end = a_commit(
        branch, expect=LogState.COMMITTING, version=2, to=LogState.HEURISTIC, outcome=Heuristic.MIXED, journal=line
    )
    await log.write(replace(end, fates=((1, Fate.DISCARDED),), close=COMMITTED))
    assert await fates(log) == [Fate.PUBLISHED, Fate.DISCARDED, Fate.CONSUMED, Fate.PUBLISHED]


async def test_a_redirected_message_is_unchanged_in_its_new_queue(log: MessageLog) -> None:
    branch = a_branch(publishes=1, consumes=1)
    await log.write(an_insert(branch, a_publish(0), a_consume(1, flags=1 | EXCLUSIVE)))
    to = (Redirect(position=0, exchange=b"spare", routing_key=b"k\xff"), Redirect(position=1, queue=b"spare queue"))
    await log.write(a_commit(branch, redirects=to))
    assert await log.read_work(branch.id) == [
        replace(a_publish(0), exchange=b"spare", routing_key=b"k\xff"),
        replace(a_consume(1, flags=1), queue=b"spare queue"),
    ]
    gone = a_commit(branch, expect=LogState.COMMITTING, version=2, fates=((0, Fate.DISCARDED),))
    await log.write(gone)
    with pytest.raises(LogConflict):
        await log.write(replace(gone, version=3, fates=(), redirects=to[:1]))


async def test_forget_archives_undelivered_messages(log: MessageLog) -> None:
    branch = a_branch(publishes=3, consumes=1, owner="Jürgen")
    work = (a_publish(0), a_publish(1, body=bytes(range(256))), a_consume(2), a_consume(3))
    await log.write(an_insert(branch, *work))
    line = a_line(branch, JournalEvent.HEURISTIC, outcome=Heuristic.MIXED)
    close = CloseWrite(publishes=Fate.DROPPED, consumes=Fate.PUT_BACK)
    decision = a_commit(branch, to=LogState.HEURISTIC, outcome=Heuristic.MIXED, journal=line, close=close)
    await log.write(replace(decision, fates=((3, Fate.DISCARDED),)))
    assert await log.read_archive(branch.xid) == []
    forgotten = a_line(branch, JournalEvent.FORGOTTEN)
    await log.write(
        a_completion(branch, expect=LogState.HEURISTIC, version=2, journal=forgotten, archive=True),
    )
    found = await log.read_archive(branch.xid)
    assert [(kept.position, kept.kind, kept.fate) for kept in found] == [
        (0, WorkKind.PUBLISH, Fate.DROPPED),
        (1, WorkKind.PUBLISH, Fate.DROPPED),
        (3, WorkKind.CONSUME, Fate.DISCARDED),
    ]
    assert (found[1].body, found[1].exchange, found[1].routing_key) == (work[1].body, b"orders", b"key\x00\xff")
    assert (found[2].queue, found[2].properties) == (b"incoming\xfe", work[3].properties)
    assert {(kept.branch_id, kept.vhost, kept.owner, kept.at) for kept in found} == {
        (branch.id, "/", "Jürgen", forgotten.at)
    }


async def test_a_completion_that_is_refused_archives_nothing(log: MessageLog) -> None:
    branch = a_branch()
    await log.write(an_insert(branch))
    close = CloseWrite(publishes=Fate.DROPPED, consumes=Fate.PUT_BACK)
    line = a_line(branch, JournalEvent.HEURISTIC, outcome=Heuristic.ROLLED_BACK)
    outcome = Heuristic.ROLLED_BACK
    await log.write(a_commit(branch, to=LogState.HEURISTIC, outcome=outcome, journal=line, close=close))
    with pytest.raises(LogConflict):
        await log.write(a_completion(branch, expect=LogState.HEURISTIC, version=1, archive=True))
    assert await log.read_archive(branch.xid) == []


QUEUE = QueueRow(vhost="/", id=77, name=b"orders")
HIDDEN, HELD = Slot(77, 1), Slot(77, 2)


def stored(slot: Slot, body: bytes, shared: int | None = None) -> StoredMessage:
    return StoredMessage(*slot, b"", b"orders", 1, b"\0\0", body, None, shared)


@pytest.mark.parametrize("shared", [None, 5])
async def test_a_decision_with_messages_in_the_log_is_one_write(log: MessageLog, shared: int | None) -> None:
    await log.write(Define(queues=[QUEUE]))
    branch = a_branch(published=(HIDDEN,), consumed=(HELD,), consumes=1)
    await log.write(an_insert(branch))
    assert (await log.read_messages_of(branch.id))[1:] == []  # the slots are still empty
    await log.write(
        a_commit(
            branch,
            to=LogState.HEURISTIC,
            outcome=Heuristic.ROLLED_BACK,
            journal=a_line(branch, JournalEvent.HEURISTIC, outcome=Heuristic.ROLLED_BACK),
            change=Change(puts=[stored(HIDDEN, b"mine", shared)]),
            released=frozenset({WorkKind.CONSUME}),
        )
    )
    record = (await log.lookup("/", branch.xid)).branch
    assert record is not None
    assert (record.published, record.consumed) == ((HIDDEN,), ())
    kept = (await log.read_messages_of(branch.id))[-1]
    assert (kept.kind, kept.queue, kept.body) == (WorkKind.PUBLISH, b"orders", b"mine")
    end = Line(JournalEvent.FORGOTTEN, a_line(branch).at, "alice")
    await log.write(
        a_completion(
            branch, expect=LogState.HEURISTIC, version=2, journal=end, archive=True, change=Change(drops=[HIDDEN])
        )
    )
    (archived,) = await log.read_archive(branch.xid)
    assert (archived.fate, archived.queue, archived.body, archived.position) == (Fate.DROPPED, b"orders", b"mine", 0)
    assert await log.which_exist([HIDDEN]) == set()
