"""After a lost connection: make sure that the old session writes no more, and find out what it wrote.

All of a group was committed or nothing, so the surest trace of any of its records tells of all:

1. A journal line: its id is random, nobody else writes it, it stays for days.
2. A branch that entered or advanced: only this record could give it its state and version.
3. A message that was put and not dropped by the same group: a slot is used once, and until the group is settled only
   the group behind it may drop it. (The removal of a deleted queue's messages may, too; it does no harm when those are
   put again.)
4. Without any of these the group has only dropped messages, given them another time to expire, marked what was
   delivered, or defined topology. All of that may be written twice: it counts as not applied. No record that was not
   in the group can have come between.

Of two groups that were under way the second is looked for first: it was written only if the first was. Where it left no
trace, or dropped the only one of the first, both are written again, in their order, and that comes to the same.

So nothing is written for the sake of a trace alone, and a group of acknowledgements costs no more than its deletions.
"""

from collections.abc import Iterable, Sequence
from typing import Final, assert_never
from uuid import UUID

from psycopg.pq.abc import PGresult

from dtx import failpoint
from dtx.failpoint import Point
from dtx.log import binary
from dtx.log.api import LeaseLost
from dtx.log.changes import Change, Define, Slot, Store
from dtx.log.records import Advance, Complete, Insert, JournalEntry, Line, LogWrite, Note
from dtx.log.session import Session, application_name
from dtx.log.statement import Bound, Statement

_END_PREDECESSOR: Final = Statement(
    b"end_predecessor",
    # A session cut off in mid-transaction holds its lock on the lease until the server notices. Our own role may end
    # it.
    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
    "WHERE application_name = $1::text AND usename = current_user AND pid <> pg_backend_pid()",
)
_RAISE_EPOCH: Final = Statement(
    b"raise_epoch",
    # Waits for the lock of a transaction of the old session that has proved the old epoch; one that has not, will fail.
    "UPDATE dtx.lease SET epoch = epoch + 1 WHERE rm = $1::text AND instance = $2::uuid RETURNING epoch",
)
_LINE: Final = Statement(
    b"find_line", "SELECT count(*) FROM dtx.journal WHERE at = ($1::timestamptz[])[1] AND id = ($2::uuid[])[1]"
)
_BRANCH: Final = Statement(
    b"find_branch",
    "SELECT count(*) FROM dtx.branch WHERE rm = $1::text AND id = ($2::uuid[])[1] "
    "AND state = ($3::text[])[1] AND version = ($4::integer[])[1]",
)
_MESSAGE: Final = Statement(
    b"find_message",
    "SELECT count(*) FROM (SELECT 1 FROM unnest($2::bigint[], $3::bigint[]) AS u(queue, position) "
    "JOIN dtx.message m ON m.queue = u.queue AND m.position = u.position AND m.rm = $1::text LIMIT 1) AS found",
)
STATEMENTS: Final = (_END_PREDECESSOR, _RAISE_EPOCH, _LINE, _BRANCH, _MESSAGE)


async def raise_epoch(session: Session, rm: bytes, instance: UUID) -> int:
    """Fence off every earlier session of this instance.

    Returns:
        The epoch to write with.

    Raises:
        LeaseLost: another dtx has the lease.
        Refused, SessionLost: not done.
    """
    failpoint.at(Point.EPOCH_BEFORE)
    await session.run([(_END_PREDECESSOR, [application_name("writer", instance).encode()])])
    answer = session.send([(_RAISE_EPOCH, [rm, instance.bytes])])
    failpoint.at(Point.EPOCH_SENT)
    epoch = _number(await answer)
    if epoch is None:
        raise LeaseLost("another dtx has taken the lease")
    failpoint.at(Point.EPOCH_AFTER)
    return epoch


async def was_applied(session: Session, rm: bytes, group: Iterable[tuple[LogWrite, bytes]]) -> bool:
    """Whether *group* was committed by a session that is fenced off, or may be written again without harm.

    Args:
        session: under a new epoch.
        rm: name of the resource manager.
        group: each record with the id of its journal line.

    Raises:
        Refused, SessionLost: not known yet.
    """
    trace = _trace(rm, group)
    return trace is not None and _number(await session.run([trace])) == 1


def _trace(rm: bytes, group: Iterable[tuple[LogWrite, bytes]]) -> Bound | None:
    """The question whose answer is 1 where the group was committed; ``None`` where none is needed."""
    of_branch: Bound | None = None
    changes: list[Change] = []
    for record, line_id in group:
        journal, change = _parts(record)
        if journal is not None:
            return _LINE, [binary.times([journal.at]), binary.raw_uuids([line_id])]
        match record:
            case Insert(branch=branch):
                of_branch = _branch_trace(rm, branch.id, branch.state, branch.version)
            case Advance(id=branch_id, to=to, version=version):
                of_branch = _branch_trace(rm, branch_id, to, version + 1)
            case _:
                pass
        if change is not None:
            changes.append(change)
    if of_branch is not None:
        return of_branch
    dropped = {slot for change in changes for slot in change.drops}
    put = [put.slot for change in changes for put in change.puts if put.slot not in dropped]
    return _message_trace(rm, put) if put else None


def _parts(record: LogWrite) -> tuple[JournalEntry | Line | None, Change | None]:
    match record:
        case Insert(journal=journal, change=change) | Complete(journal=journal, change=change):
            return journal, change
        case Note(journal=journal, change=change):
            return journal, change
        case Advance(journal=journal, change=change):
            return journal, change
        case Store(change=change):
            return None, change
        case Define():
            return None, None
        case _ as never:
            assert_never(never)


def _branch_trace(rm: bytes, branch_id: UUID, state: str, version: int) -> Bound:
    return _BRANCH, [rm, binary.uuids([branch_id]), binary.texts([state]), binary.int4s([version])]


def _message_trace(rm: bytes, slots: Sequence[Slot]) -> Bound:
    queues, positions = zip(*slots, strict=True)
    return _MESSAGE, [rm, binary.int8s(queues), binary.int8s(positions)]


def _number(results: list[PGresult]) -> int | None:
    """The one integer of the last result; ``None`` where it has no row."""
    result = results[-1]
    if result.ntuples == 0:
        return None
    value = result.get_value(0, 0)
    assert value is not None
    return int.from_bytes(value, signed=True)
