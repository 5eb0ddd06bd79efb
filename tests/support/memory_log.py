"""The in-memory twin of the log: the same contract, no database, faults on demand. For tests of code that uses the log.

Several logs may share one :class:`MemoryDatabase`, as several dtx share a PostgreSQL: a log that is opened later on
the same database finds the records and the lease of the earlier one.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, Final, assert_never
from uuid import UUID

from dtx.log.api import DuplicateXid, LeaseLost, LogConflict, LogError, LogUnavailable, OnWritten
from dtx.log.changes import Change, Define, Definitions, QueueContents, Slot, Store, StoredMessage
from dtx.log.records import (
    ENDINGS,
    MOVED,
    UNDELIVERED,
    WITH_OUTCOME,
    Advance,
    ArchivedMessage,
    BranchRecord,
    CompleteWrite,
    Duplicate,
    DuplicateWrite,
    Fate,
    Insert,
    JournalEnding,
    JournalEntry,
    Line,
    LoggedCopies,
    LogState,
    LogWrite,
    Lookup,
    NoteWrite,
    Replay,
    SettledCopy,
    SettlementsWrite,
    Unit,
    UnitState,
    WorkKind,
    WorkRow,
    closed,
    redirected,
)
from dtx.xa.xid import Xid
from tests.support.memory_messages import MemoryMessages


class Fault(Enum):
    """The fault of one write."""

    REFUSED = auto()
    """LogUnavailable; the record is not written."""
    ANSWER_LOST = auto()
    """LogUnavailable, although the record is written."""
    LEASE_LOST = auto()
    """Another dtx takes the lease before the write."""


@dataclass(slots=True)
class _Row:
    rm: str
    branch: BranchRecord
    work: dict[int, WorkRow]


@dataclass(slots=True)
class MemoryDatabase:
    """The durable data, which outlives the logs that use it."""

    rows: dict[UUID, _Row] = field(default_factory=dict)
    journal: list[tuple[str, JournalEntry]] = field(default_factory=list)
    messages: MemoryMessages = field(default_factory=MemoryMessages)
    archive: list[tuple[str, ArchivedMessage]] = field(default_factory=list)
    replays: dict[tuple[UUID, int], tuple[str, Replay]] = field(default_factory=dict)
    settlements: dict[tuple[UUID, int, str, bytes], tuple[str, SettledCopy]] = field(default_factory=dict)
    duplicates: dict[tuple[UUID, int, str, bytes, int], tuple[str, Duplicate]] = field(default_factory=dict)
    holders: dict[str, "MemoryLog"] = field(default_factory=dict)
    released: asyncio.Condition = field(default_factory=asyncio.Condition)


class MemoryLog:
    """See :class:`dtx.log.api.TransactionLog`.

    Args:
        rm: the name of the resource manager.
        database: may be shared with other logs; default: a new one.
    """

    def __init__(self, rm: str = "dtx", database: MemoryDatabase | None = None) -> None:
        self.database: Final = database or MemoryDatabase()
        self.faults: Final[deque[Fault]] = deque()
        """The faults of the next writes, in order; empty: writes succeed."""
        self.running: Final = asyncio.Event()
        """While cleared, writes wait before they do anything, as with a slow disk."""
        self.running.set()
        self.written: Final[list[LogWrite]] = []
        """Every record that became durable through this log, in order."""
        self.reachable = True
        """False: every call raises LogUnavailable, and the lease is not valid."""
        self.congested = False
        """True: the log reports congestion, as with a slow database."""
        self._rm = rm
        self._posted: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Take the lease; waits while another log holds it."""
        self._require_reachable()
        database = self.database
        async with database.released:
            await database.released.wait_for(lambda: self._rm not in database.holders)
            database.holders[self._rm] = self

    async def close(self) -> None:
        """Release the lease."""
        async with self.database.released:
            if self._holds_lease:
                del self.database.holders[self._rm]
            self.database.released.notify_all()

    def crash(self) -> None:
        """End as after kill -9 with an expired lease: the next log may open at once."""
        if self._holds_lease:
            del self.database.holders[self._rm]

    @property
    def _holds_lease(self) -> bool:
        return self.database.holders.get(self._rm) is self

    @property
    def lease_valid(self) -> bool:
        """Whether this log is known to hold the lease."""
        return self._holds_lease and self.reachable

    @property
    def member(self) -> UUID | None:
        """Always ``None``: it is alone."""
        return None

    @property
    def moment(self) -> str | None:
        """Always ``None``: it is alone."""
        return None

    @property
    def disk_full(self) -> bool:
        """Always False."""
        return False

    def _require_reachable(self) -> None:
        if not self.reachable:
            raise LogUnavailable("the database is away")

    async def write(self, record: LogWrite, *, urgent: bool = True) -> None:
        """Make *record* durable, or fail as :attr:`faults` says.

        Raises:
            LogConflict, LogUnavailable, LeaseLost.
        """
        await asyncio.sleep(0)
        await self.running.wait()
        self._require_reachable()
        fault = self.faults.popleft() if self.faults else None
        if fault is Fault.REFUSED:
            raise LogUnavailable("the database refused the record: as the test wants it")
        if fault is Fault.LEASE_LOST:
            self.database.holders[self._rm] = MemoryLog(self._rm, self.database)
        if not self._holds_lease:
            raise LeaseLost("another dtx holds the lease")
        self._apply(record)
        self.written.append(record)
        if fault is Fault.ANSWER_LOST:
            raise LogUnavailable("the database is away, the outcome of the write is not known: as the test wants it")

    def post(self, record: LogWrite, written: OnWritten, *, urgent: bool = True) -> None:
        """Start writing *record*; records are written in the order of the calls."""

        def ended(write: "asyncio.Task[None]") -> None:
            self._posted.discard(write)
            if not write.cancelled():
                error = write.exception()
                written(error if error is None or isinstance(error, LogError) else LogError(type(error).__name__))

        write = asyncio.get_running_loop().create_task(self.write(record, urgent=urgent))
        self._posted.add(write)
        write.add_done_callback(ended)

    async def settled(self) -> None:
        """Return at once: every write has a known outcome unless the database is unreachable."""
        self._require_reachable()

    def _apply(self, record: LogWrite) -> None:
        messages = self.database.messages
        journal: JournalEntry | Line | None = None
        change: Change | None = None
        match record:
            case Insert(branch=branch, journal=journal, change=change):
                messages.check(change)
                self._insert(record)
                if isinstance(journal, Line):
                    journal = journal.entry(branch)
            case Advance(journal=journal, change=change):
                messages.check(change)
                self._advance(record)
            case CompleteWrite(journal=journal, change=change):
                messages.check(change)
                row = self._find(record.id, record.expect, record.version)
                if record.archive:
                    self._archive(row, journal.at)
                del self.database.rows[record.id]
                if isinstance(journal, Line):
                    journal = journal.entry(row.branch)
            case NoteWrite(journal=journal, change=change):
                messages.check(change)
            case SettlementsWrite():
                self._settle(record)
            case DuplicateWrite(duplicate=duplicate):
                _check_copy(duplicate.position, duplicate.attempt)
                self.database.duplicates.setdefault(_copy(duplicate), (self._rm, duplicate))
            case Store(change=change):
                messages.check(change)
            case Define():
                messages.define(self._rm, record)
            case _ as never:
                assert_never(never)
        if change is not None:
            messages.apply(self._rm, change)
        if journal is not None:
            assert not isinstance(journal, Line), "a line of a branch is whole by now"
            self.database.journal.append((self._rm, _rounded_entry(journal)))

    def _insert(self, record: Insert) -> None:
        branch = record.branch
        if self._row(branch.vhost, branch.xid) is not None:
            raise DuplicateXid(f"the xid is in the log already (xid {branch.xid})")
        if branch.id in self.database.rows:
            raise LogConflict(f"the branch is in the log already (xid {branch.xid})")
        _check_branch(branch)
        _check_unique("unit", [unit.number for unit in branch.units])
        _check_unique("work", [work.position for work in record.work])
        for work in record.work:
            _check_work(work)
        work_by_position = {work.position: work for work in record.work}
        self.database.rows[branch.id] = _Row(self._rm, _rounded_branch(branch), work_by_position)

    def _advance(self, record: Advance) -> None:
        row = self._find(record.id, record.expect, record.version)
        old = row.branch
        units = {unit.number: unit for unit in old.units}
        if record.unit is not None:
            units[record.unit.number] = record.unit
        for number in record.units_done:
            if number not in units:
                raise LogConflict("the unit is not there")
            units[number] = replace(units[number], state=UnitState.DONE)
        if not row.work.keys() >= set(record.settled):
            raise LogConflict("the work is not there")
        for position in {*dict(record.fates), *(to.position for to in record.redirects)}:
            if position not in row.work or not row.work[position].is_open:
                raise LogConflict("the work is not there, or not open")
        new = old._replace(
            state=record.to,
            version=old.version + 1,
            prepared_at=old.prepared_at if record.prepared_at is None else record.prepared_at,
            decided_at=old.decided_at if record.decided_at is None else record.decided_at,
            stuck=record.stuck,
            outcome=record.outcome or old.outcome,
            units=_ordered(units),
            published=() if WorkKind.PUBLISH in record.released else old.published,
            consumed=() if WorkKind.CONSUME in record.released else old.consumed,
        )
        _check_branch(new)
        _check_unique("replays", [replay.position for replay in record.replays])
        row.branch = _rounded_branch(new)
        for replay in record.replays:
            self.database.replays.setdefault((record.id, replay.position), (self._rm, replay))
        for position in record.settled:
            del row.work[position]
        for to in record.redirects:
            row.work[to.position] = redirected(row.work[to.position], to)
        for position, fate in record.fates:
            row.work[position] = replace(row.work[position], fate=fate)
        if record.close is not None:
            row.work = {position: closed(work, record.close) for position, work in row.work.items()}

    def _settle(self, record: SettlementsWrite) -> None:
        for settlement in record.settlements:
            _check_copy(settlement.position, settlement.attempt)
        for settlement in record.settlements:
            key = (settlement.branch_id, settlement.position, settlement.vhost, settlement.queue)
            if settlement.attempt == MOVED:
                self.database.settlements[key] = self._rm, settlement
            self.database.settlements.setdefault(key, (self._rm, settlement))

    def _archive(self, row: _Row, at: float) -> None:
        branch = row.branch
        undelivered = [work for work in row.work.values() if work.fate in UNDELIVERED]
        hidden = branch._replace(consumed=())
        undelivered += [replace(work, fate=Fate.DROPPED) for work in self._kept(hidden)]
        for work in undelivered:
            assert work.fate is not None
            archived = ArchivedMessage(
                branch_id=branch.id,
                position=work.position,
                vhost=branch.vhost,
                xid=branch.xid,
                owner=branch.owner,
                kind=work.kind,
                exchange=work.exchange,
                routing_key=work.routing_key,
                queue=work.queue,
                properties=work.properties,
                body=work.body,
                fate=work.fate,
                at=_rounded(at) or 0.0,
            )
            self.database.archive.append((self._rm, archived))

    def _find(self, branch_id: UUID, expect: LogState, version: int) -> _Row:
        row = self.database.rows.get(branch_id)
        if row is None or row.rm != self._rm or (row.branch.state, row.branch.version) != (expect, version):
            raise LogConflict("the branch is not in the expected state and version")
        return row

    def _row(self, vhost: str, xid: Xid) -> _Row | None:
        for row in self.database.rows.values():
            if (row.rm, row.branch.vhost, row.branch.xid) == (self._rm, vhost, xid):
                return row
        return None

    async def load(self, member: UUID | None = None) -> AsyncIterator[BranchRecord]:
        """Every logged branch of this resource manager, or those of *member*."""
        self._require_reachable()
        for row in [row for row in self.database.rows.values() if row.rm == self._rm]:
            if member is None or row.branch.member == member:
                yield row.branch

    async def load_listed(self, vhost: str) -> AsyncIterator[BranchRecord]:
        """See :class:`dtx.log.api.TransactionLog`."""
        self._require_reachable()
        for row in [row for row in self.database.rows.values() if row.rm == self._rm]:
            if row.branch.vhost == vhost and row.branch.member != self.member:
                yield row.branch

    async def read_work(self, branch_id: UUID) -> list[WorkRow]:
        """The work of a branch, in order of position."""
        self._require_reachable()
        row = self.database.rows.get(branch_id)
        return [] if row is None else [row.work[position] for position in sorted(row.work)]

    async def read_messages_of(self, branch_id: UUID) -> list[WorkRow]:
        """As :meth:`read_work`, also with messages that are stored in the log."""
        row = self.database.rows.get(branch_id)
        return [] if row is None else [*await self.read_work(branch_id), *self._kept(row.branch)]

    def _kept(self, branch: BranchRecord) -> list[WorkRow]:
        published, consumed = branch.published or (), branch.consumed or ()
        found = self.database.messages.read((*published, *consumed), None)
        kept = []
        for position, slot in enumerate((*published, *consumed)):
            message = found.get(slot)
            if message is not None:
                publish = position < len(published)
                name = self.database.messages.name(slot.queue)
                kept.append(
                    WorkRow(
                        position=position,
                        kind=WorkKind.PUBLISH if publish else WorkKind.CONSUME,
                        exchange=message.exchange,
                        routing_key=message.routing_key,
                        queue=name if publish else name or b"",
                        flags=None,
                        properties=message.properties,
                        body=message.body,
                    )
                )
        return kept

    async def read_archive(self, xid: Xid) -> list[ArchivedMessage]:
        """Undelivered messages of forgotten branches with *xid*."""
        self._require_reachable()
        found = [message for rm, message in self.database.archive if rm == self._rm and message.xid == xid]
        return sorted(found, key=lambda message: (message.at, message.position))

    async def load_copies(
        self, branch_ids: Collection[UUID] | None = None, position: int | None = None
    ) -> LoggedCopies:
        """The replays, settlements and duplicates of this resource manager, of these branches, or of one message."""
        self._require_reachable()
        database = self.database

        def is_meant(rm: str, branch_id: UUID, at: int) -> bool:
            return rm == self._rm and (branch_ids is None or branch_id in branch_ids) and position in (None, at)

        return LoggedCopies(
            replays=tuple(
                (branch_id, replay)
                for (branch_id, at), (rm, replay) in sorted(database.replays.items(), key=_key)
                if is_meant(rm, branch_id, at)
            ),
            settlements=tuple(
                settlement
                for key, (rm, settlement) in sorted(database.settlements.items(), key=_key)
                if is_meant(rm, key[0], key[1])
                and (key[:2] in database.replays or key[0] in database.rows or settlement.attempt == MOVED)
            ),
            suppressed=tuple(
                SettledCopy(branch_id=key[0], position=key[1], vhost=key[2], queue=key[3], attempt=key[4])
                for key, (rm, _) in sorted(database.duplicates.items(), key=_key)
                if is_meant(rm, key[0], key[1])
            ),
        )

    async def unended(self, branch_ids: Collection[UUID]) -> set[UUID]:
        """Those of the branches that the log has."""
        self._require_reachable()
        return {each for each in branch_ids if each in self.database.rows and self.database.rows[each].rm == self._rm}

    async def read_duplicates(self, branch_ids: Collection[UUID]) -> list[Duplicate]:
        """The duplicates of messages of these branches."""
        self._require_reachable()
        return [
            duplicate
            for key, (rm, duplicate) in sorted(self.database.duplicates.items(), key=_key)
            if rm == self._rm and key[0] in branch_ids
        ]

    async def lookup(self, vhost: str, xid: Xid, branch_id: UUID | None = None) -> Lookup:
        """The entry of *xid* in the log; see :meth:`dtx.log.api.TransactionLog.lookup`.

        Raises:
            LeaseLost: the lease is not valid.
        """
        self._require_reachable()
        if not self.lease_valid:
            raise LeaseLost("the lease has run out, or another dtx has it")
        row = self._row(vhost, xid)
        if row is not None:
            return Lookup(branch=row.branch)
        lines = [
            line
            for line in await self.history(vhost, xid)
            if line.event in ENDINGS and branch_id in {None, line.branch_id}
        ]
        if not lines:
            return Lookup()
        last = lines[-1]
        return Lookup(
            ending=JournalEnding(
                event=last.event, at=last.at, branch_id=last.branch_id, owner=last.owner, outcome=last.outcome
            )
        )

    async def which_logged(self, keys: Sequence[tuple[str, Xid]]) -> set[tuple[str, Xid]]:
        """Those of *keys* that branches have."""
        self._require_reachable()
        return {key for key in keys if self._row(*key) is not None}

    async def history(self, vhost: str | None, xid: Xid) -> list[JournalEntry]:
        """The journal of *xid*, oldest first."""
        self._require_reachable()
        lines = [
            line
            for rm, line in self.database.journal
            if rm == self._rm and line.xid == xid and vhost in {None, line.vhost}
        ]
        return sorted(lines, key=lambda line: line.at)

    async def load_definitions(self) -> Definitions:
        """All durable topology of this resource manager."""
        self._require_reachable()
        return self.database.messages.definitions(self._rm)

    async def load_queues(
        self, queues: Sequence[int], *, detailed: Collection[int] = ()
    ) -> AsyncIterator[QueueContents]:
        """The stored messages of *queues*."""
        self._require_reachable()
        for queue in queues:
            yield self.database.messages.contents(queue, detailed=queue in detailed)

    async def read_messages(self, slots: Sequence[Slot], octets: int | None = None) -> dict[Slot, StoredMessage]:
        """The messages in *slots* that exist."""
        self._require_reachable()
        return self.database.messages.read(slots, octets)

    async def which_exist(self, slots: Sequence[Slot]) -> set[Slot]:
        """Those of *slots* that hold a message."""
        return set(await self.read_messages(slots))

    async def stray_queues(self, known: Collection[int]) -> list[int]:
        """Queues of this resource manager that have messages and are not among *known*."""
        self._require_reachable()
        return self.database.messages.strays(self._rm, known)


def _ordered(units: dict[int, Unit]) -> tuple[Unit, ...]:
    return tuple(units[number] for number in sorted(units))


def _check_branch(branch: BranchRecord) -> None:
    if (branch.state in WITH_OUTCOME) != (branch.outcome is not None):
        raise LogConflict("a heuristic outcome belongs to a heuristic state, and the state to an outcome")
    if branch.version < 1 or min(branch.timeout, branch.publishes, branch.consumes, branch.bytes) < 0:
        raise LogConflict("a count of the branch is negative")


def _check_unique(what: str, numbers: list[int]) -> None:
    if len(set(numbers)) != len(numbers) or min(numbers, default=0) < 0:
        raise LogConflict(f"the numbers of the {what} are not different ones from 0 on")


def _check_work(work: WorkRow) -> None:
    consumed = work.kind is WorkKind.CONSUME
    if consumed != (work.queue is not None) or (work.unit is not None and not consumed):
        raise LogConflict("a consumption has a queue, a publish has neither queue nor unit")


def _check_copy(position: int, attempt: int) -> None:
    if position < 0 or attempt < 1:
        raise LogConflict("a copy has a position from 0 and an attempt from 1")


def _copy(duplicate: Duplicate) -> tuple[UUID, int, str, bytes, int]:
    return duplicate.branch_id, duplicate.position, duplicate.vhost, duplicate.queue, duplicate.attempt


def _key(row: tuple[Any, Any]) -> Any:
    """The key of a table's row: rows are read in its order."""
    return row[0]


def _rounded(at: float | None) -> float | None:
    """PostgreSQL keeps microseconds."""
    return None if at is None else round(at * 1_000_000) / 1_000_000


def _rounded_branch(branch: BranchRecord) -> BranchRecord:
    return branch._replace(
        started_at=_rounded(branch.started_at) or 0.0,
        prepared_at=_rounded(branch.prepared_at),
        decided_at=_rounded(branch.decided_at),
        units=_ordered({unit.number: unit for unit in branch.units}),
    )


def _rounded_entry(entry: JournalEntry) -> JournalEntry:
    return replace(
        entry,
        at=_rounded(entry.at) or 0.0,
        started_at=_rounded(entry.started_at),
        prepared_at=_rounded(entry.prepared_at),
        decided_at=_rounded(entry.decided_at),
    )
