"""The database of the simulation; it replaces PostgreSQL below dtx's lease and writer.

The lease and the group-committing writer are the real ones. They run on a session of :class:`SimDatabase`, whose tables
are the log's in-memory twin (it passes the same contract tests as PostgreSQL). A group is written completely or not at
all, under the epoch of the lease. Its answer comes later, or is lost although the group was written. Written records
are durable: they survive every crash of dtx. A crash of the database breaks the sessions; a write in progress is done
or not.
"""

import asyncio
import copy
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

from dtx.db.pipeline import CONFLICT, SessionLost, StatementRefused
from dtx.log import lease, membership, writer
from dtx.log.api import DuplicateXid, LeaseLost, LogConflict
from dtx.log.lease import Lease
from dtx.log.records import (
    ENDINGS,
    Advance,
    BranchRecord,
    CompleteWrite,
    Duplicate,
    DuplicateWrite,
    Insert,
    LogWrite,
    WorkKind,
)
from dtx.log.statements import DUPLICATE_XID, LEASE_LOST, OUT_OF_ORDER, WriteSequence
from dtx.xa.xid import Xid
from tests.evidence.sim.members import Blocked, LeaseRow, MemberTable, Rows, Takeover
from tests.evidence.sim.scheduler import Process, SimLoop, current
from tests.support.memory_log import MemoryDatabase, MemoryLog

RM: Final = "dtx"
LOG: Final = UUID(int=1)
"""Id of the log."""
RETRY_WINDOW: Final = 10.0
"""Seconds for which a write waits while the database is unavailable."""
ANSWER_TIMEOUT: Final = 30.0
_LOCK_POLL: Final = 0.002
"""Seconds between two looks at a lock."""
Group = Sequence[tuple[LogWrite, bytes]]
_Bound = tuple[int, Group, WriteSequence | None]


class _Tables(MemoryLog):
    """The tables of the twin; :class:`SimDatabase` checks the epoch of writes."""

    def put(self, record: LogWrite) -> None:
        """Write *record*.

        Raises:
            LogConflict: it does not fit.
        """
        self._apply(record)

    def look(self, vhost: str, xid: Xid) -> BranchRecord | None:
        """Return the row of *xid*."""
        row = self._row(vhost, xid)
        return None if row is None else row.branch

    @property
    def lease_valid(self) -> bool:
        """Always true: reading the tables needs no lease."""
        return True


@dataclass(slots=True)
class SimDatabase:
    """The durable state, and the lease on it.

    Args:
        loop: the scheduler.
    """

    loop: SimLoop
    tables: _Tables = field(default_factory=lambda: _Tables(RM, MemoryDatabase()))
    lease: LeaseRow | None = None
    away: bool = False
    """No connection is possible."""
    cut_off: set[str] = field(default_factory=set)
    """Processes that cannot reach it."""
    members: MemberTable = field(init=False)
    slow: float = 0.001
    journal_writers: dict[int, UUID | None] = field(default_factory=dict)
    """By the number of a line of the journal, the member that wrote it."""
    sessions: "dict[SimSession, None]" = field(default_factory=dict)
    written: list[tuple[float, int, str, LogWrite]] = field(default_factory=list)
    """Every record that became durable: time, epoch, process."""
    seen: dict[bytes, None] = field(default_factory=dict)
    """Ids of the records; a writer that lost its session looks here for its records."""
    on_write: Callable[[LogWrite], None] | None = None
    writers: dict[int, str] = field(default_factory=dict)
    """By epoch, the process that wrote under it."""
    violations: list[str] = field(default_factory=list)
    lost_answers: int = 0
    """Number of next groups that are written without an answer."""
    lost_groups: int = 0
    """Number of next groups that are neither written nor answered."""

    def __post_init__(self) -> None:
        self.members = MemberTable(self.loop, self.tables.database)

    @property
    def is_reachable(self) -> bool:
        """Whether the current process can reach it."""
        return not self.away and current().name not in self.cut_off

    async def pause(self) -> None:
        """Wait as long as one direction over the network and through the database takes."""
        random = self.loop.random
        await asyncio.sleep(random.random() * self.slow * (100 if random.random() < 0.01 else 1))

    async def connect(self) -> None:
        """Connect to the database.

        Raises:
            OSError: it is unavailable.
        """
        await self.pause()
        if not self.is_reachable:
            raise ConnectionRefusedError("the database is away")

    def crash(self) -> None:
        """Crash the database: all sessions break."""
        self.away = True
        for session in list(self.sessions):
            session.end()

    def separate(self, process: str) -> None:
        """Break all sessions of *process*; it can make no new ones until :meth:`unite`."""
        self.cut_off.add(process)
        for session in [session for session in self.sessions if session.process.name == process]:
            session.end()

    def unite(self) -> None:
        """Let all processes reach the database again."""
        self.cut_off.clear()

    # -- writing

    def write(
        self, epoch: int, group: Group, session: "SimSession", process: Process, sequence: WriteSequence | None
    ) -> None:
        """Run one transaction.

        Raises:
            StatementRefused: nothing was written.
            Blocked: a takeover under way has locked the row of the member.
        """
        member = self.prove(epoch)
        if sequence is not None and sequence.predecessor not in {0, session.sequence}:
            raise StatementRefused(OUT_OF_ORDER, "the group before was not written")
        if self.writers.setdefault(epoch, process.name) != process.name:
            self.violations.append(f"{process.name} wrote under epoch {epoch} of {self.writers[epoch]}")
        before = self._snapshot() if len(group) > 1 else None
        try:
            for record, _ in group:
                self._put(record, member)
        except DuplicateXid as duplicate:
            if before is not None:
                self._restore(before)
            raise StatementRefused(DUPLICATE_XID, str(duplicate)) from None
        except LogConflict as conflict:
            if before is not None:
                self._restore(before)
            raise StatementRefused(CONFLICT, str(conflict)) from None
        if sequence is not None:
            session.sequence = sequence.number
        for record, line in group:
            self.seen[line] = None
            self.written.append((self.loop.now, epoch, process.name, record))
            if isinstance(record, DuplicateWrite):
                self._judge_suppressed(record.duplicate)
            if self.on_write is not None:
                self.on_write(record)

    def prove(self, epoch: int) -> UUID | None:
        """Check that *epoch* is valid, and return the member that has it; ``None`` for a dtx that is alone.

        Raises:
            StatementRefused: it is not valid.
            Blocked: it may end now.
        """
        if self.lease is not None and self.lease.epoch == epoch:
            return None
        member = self.members.writer(epoch)
        if member is None:
            raise StatementRefused(LEASE_LOST, "another dtx has the lease")
        return member

    def _put(self, record: LogWrite, member: UUID | None) -> None:
        """Write *record*; only the member that has a branch may write it."""
        rows = self.tables.database.rows
        if member is not None and member not in self.members.rows:
            self.violations.append(f"member {member} writes, and others have taken its branches")
        if isinstance(record, (Advance, CompleteWrite)) and record.id in rows:
            owner = rows[record.id].branch.member
            if owner != member:
                self.violations.append(f"{rows[record.id].branch.xid} of member {owner} is written by {member}")
        self.tables.put(record)
        journal = self.tables.database.journal
        if isinstance(record, Insert) and record.since is not None:
            others = enumerate(journal[int(record.since) :], int(record.since))
            if any(
                line.xid == record.branch.xid and line.event in ENDINGS and self.journal_writers.get(number) != member
                for number, (_, line) in others
            ):
                del self.tables.database.rows[record.branch.id], journal[len(self.journal_writers) :]
                raise DuplicateXid("a branch with this xid has ended since this one began")
        self.journal_writers |= dict.fromkeys(range(len(self.journal_writers), len(journal)), member)
        if isinstance(record, Insert):
            row = rows[record.branch.id]
            row.branch = row.branch._replace(member=member)

    def _judge_suppressed(self, copy_: Duplicate) -> None:
        """Check that a copy is suppressed only after the settlement of another one is durable."""
        key = (copy_.branch_id, copy_.position, copy_.vhost, copy_.queue)
        _, settled = self.tables.database.settlements.get(key, ("", None))
        if (settled is None or settled.attempt == copy_.attempt) and not self._has_taken(copy_):
            self.violations.append(f"copy {copy_.attempt} of {copy_.body!r} is suppressed, and settled is {settled}")

    def _has_taken(self, copy_: Duplicate) -> bool:
        """Whether a branch has the message in its work: if it is put back, the copy in the queue is not needed."""
        mark = f"{copy_.branch_id}/{copy_.position}".encode()
        return any(
            item.kind is WorkKind.CONSUME and item.queue == copy_.queue and mark in item.properties
            for _, _, _, record in self.written
            if isinstance(record, Insert)
            for item in record.work
        )

    def _snapshot(self) -> Any:
        database = self.tables.database
        rows = {key: copy.copy(row) for key, row in database.rows.items()}
        for row in rows.values():
            row.work = dict(row.work)
        tables = {name: dict(getattr(database.messages, name)) for name in _DICTS}
        copies = {name: dict(getattr(database, name)) for name in _COPIES}
        return rows, (len(database.journal), len(database.archive)), tables, copies

    def _restore(self, snapshot: Any) -> None:
        rows, lines, tables, copies = snapshot
        database = self.tables.database
        database.rows.clear()
        database.rows.update(rows)
        del database.journal[lines[0] :], database.archive[lines[1] :]
        self.journal_writers = dict(list(self.journal_writers.items())[: lines[0]])
        for owner, saved in ((database.messages, tables), (database, copies)):
            for name, table in saved.items():
                mine = getattr(owner, name)
                mine.clear()
                mine.update(table)

    # -- the lease's statements

    def execute(self, statement: str, values: dict[str, Any], takeover: Takeover | None = None) -> Rows:
        """Run a statement of :mod:`dtx.log.lease` or :mod:`dtx.log.membership`, and return its rows."""
        row, now = self.lease, self.loop.now
        match statement:
            case lease._HOLDER:
                return [] if row is None else [(row.holder, row.process, row.instance)]
            case lease._TAKE:
                if row is not None and not (row.expires_at < now or row.instance == values["dead"]):
                    return []
                epoch = 1 if row is None else row.epoch + 1
                self.lease = LeaseRow(
                    values["instance"], values["process"], values["holder"], epoch, now + values["ttl"]
                )
                return [(epoch, LOG)]
            case lease._RENEW:
                if row is None or row.instance != values["instance"]:
                    return []
                row.expires_at = now + values["ttl"]
                return [(row.epoch,)]
            case lease._RELEASE:
                if row is not None and row.instance == values["instance"]:
                    row.expires_at = float("-inf")
                return []
            case membership._JOIN:
                joined = self.members.join(row, values)
                self.lease = joined or row
                return [] if joined is None else [(self.members.rows[values["instance"]].epoch, LOG)]
            case membership._RENEW:
                return self.members.renew(row, values)
            case membership._LEAVE:
                return self.members.leave(row, values)
            case _:
                return self.members.execute(statement, values, takeover)

    def raise_epoch(self, instance: UUID, *, is_member: bool) -> int:
        """See :func:`dtx.log.writer.raise_epoch`.

        Raises:
            LeaseLost: another dtx has the lease.
            Blocked: a takeover under way has locked the row of the member.
        """
        if is_member:
            epoch = self.members.raise_epoch(instance)
            if epoch is None:
                raise LeaseLost("another member has taken the branches")
            return epoch
        if self.lease is None or self.lease.instance != instance:
            raise LeaseLost("another dtx has taken the lease")
        self.lease.epoch += 1
        return self.lease.epoch


_DICTS: Final = ("messages", "_exchanges", "_queues", "_bindings")
_COPIES: Final = ("replays", "settlements", "duplicates")


class SimSession:
    """A session of the writer; see :class:`dtx.db.pipeline.PipelineSession`."""

    def __init__(self, database: SimDatabase) -> None:
        self.database = database
        self.alive = True
        self.on_end: Callable[[], None] = lambda: None
        """Called at its end."""
        self.sequence = 0
        """The number of the last written group; a setting of the session, as in PostgreSQL."""
        self.process = current()
        self._loop = asyncio.get_running_loop()
        self._on_their_way: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._on_their_way_back: deque[tuple[asyncio.Future[Any], Any, Exception | None]] = deque()
        self._waiting: dict[asyncio.Future[Any], None] = {}
        database.sessions[self] = None

    def end(self) -> None:
        """Break the connection."""
        self.alive = False
        self.database.sessions.pop(self, None)
        self.on_end()
        if self.process.alive and self._waiting:
            self.process.call(0, self._break)

    async def run(self, bound: "_Bound") -> None:
        """Run one transaction, and wait for its answer.

        Raises:
            StatementRefused: nothing was written.
            SessionLost: the outcome is not known.
        """
        await self.send(bound)

    def send(self, bound: "_Bound") -> "asyncio.Future[Any]":
        """Run one transaction; later ones may be sent before its answer."""
        epoch, group, sequence = bound
        return self.begin(lambda: self.database.write(epoch, group, self, self.process, sequence))

    async def over(self, work: Callable[[], Any]) -> Any:
        """Do *work* in the database, and wait for its answer.

        Raises:
            SessionLost: the outcome is not known.
        """
        return await self.begin(work)

    def begin(self, work: Callable[[], Any]) -> "asyncio.Future[Any]":
        """Do *work* in the database, and return the future of its answer."""
        answer: asyncio.Future[Any] = self._loop.create_future()
        if not self.alive:
            answer.set_exception(SessionLost("the connection to the database is closed"))
            return answer
        self._waiting[answer] = None
        overdue = self._loop.call_later(ANSWER_TIMEOUT, self.end)
        answer.add_done_callback(lambda _: overdue.cancel())
        self._on_their_way.append((work, answer))
        # In the world, not in the process: a sent request is executed even if its process dies meanwhile.
        self.database.loop.in_world(self._delay(), self._arrive)
        return answer

    def _arrive(self) -> None:
        work, answer = self._on_their_way.popleft()
        database, process = self.database, self.process
        if not self.alive and database.loop.random.random() < 0.5:
            return
        if database.lost_groups:
            database.lost_groups -= 1
            self.end()
            return
        try:
            result, error = work(), None
        except Blocked:
            self._on_their_way.appendleft((work, answer))
            database.loop.in_world(_LOCK_POLL, self._arrive)
            return
        except (StatementRefused, LeaseLost) as refused:
            result, error = None, refused
        if database.lost_answers:
            database.lost_answers -= 1
            self.end()
        elif process.alive and self.alive:
            self._on_their_way_back.append((answer, result, error))
            process.call(self._delay(), self._return)

    def _return(self) -> None:
        answer, result, error = self._on_their_way_back.popleft()
        self._waiting.pop(answer, None)
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)

    def _break(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for answer in waiting:
            if not answer.done():
                answer.set_exception(SessionLost("the connection to the database was lost"))

    def _delay(self) -> float:
        random = self.database.loop.random
        return random.random() * self.database.slow * (100 if random.random() < 0.01 else 1)

    async def close(self) -> None:
        """Disconnect."""
        self.end()


def bind_group(
    _rm: bytes, epoch: int, group: Iterable[tuple[LogWrite, bytes]], sequence: WriteSequence | None = None
) -> "_Bound":
    """Replaces :func:`dtx.log.statements.bind_group`: returns the records themselves."""
    return epoch, list(group), sequence


async def raise_epoch(session: SimSession, _rm: bytes, holder: Lease) -> int:
    """Replaces :func:`dtx.log.writer.raise_epoch`."""
    epoch = await session.over(lambda: session.database.raise_epoch(holder.instance, is_member=holder.is_member))
    assert isinstance(epoch, int)
    return epoch


async def was_applied(session: SimSession, _rm: bytes, group: Iterable[tuple[LogWrite, bytes]]) -> bool:
    """Replaces :func:`dtx.log.writer.was_applied`."""
    records = list(group)
    if writer._trace(b"", records) is None:
        return False  # the group leaves no trace, and may be written again
    return bool(await session.over(lambda: all(line in session.database.seen for _, line in records)))


def connector(database: SimDatabase) -> Any:
    """Replaces :class:`dtx.db.pipeline.PipelineSession`."""

    class Sessions:
        @staticmethod
        async def connect(*_: object, **__: object) -> SimSession:
            await database.connect()
            return SimSession(database)

    return Sessions
