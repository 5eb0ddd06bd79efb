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
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

import psycopg

from dtx.db.pipeline import CONFLICT, SessionLost, StatementRefused
from dtx.log import lease, writer
from dtx.log.api import LeaseLost, LogConflict, LogUnavailable
from dtx.log.changes import Definitions, QueueContents, Slot, StoredMessage
from dtx.log.lease import Lease
from dtx.log.postgres import PostgresTransactionLog
from dtx.log.queries import Fetch, LogQueries
from dtx.log.records import (
    BranchRecord,
    Duplicate,
    DuplicateWrite,
    Insert,
    LoggedCopies,
    LogWrite,
    Lookup,
    WorkKind,
    WorkRow,
)
from dtx.log.statements import LEASE_LOST, OUT_OF_ORDER, WriteSequence
from dtx.log.writer import Writer
from dtx.xa.xid import Xid
from tests.evidence.sim.scheduler import Process, SimLoop, current
from tests.support.memory_log import MemoryDatabase, MemoryLog

RM: Final = "dtx"
LOG: Final = UUID(int=1)
"""Id of the log."""
RETRY_WINDOW: Final = 10.0
"""Seconds for which a write waits while the database is unavailable."""
_ANSWER_TIMEOUT: Final = 30.0
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
class _LeaseRow:
    instance: UUID
    process: str
    holder: str
    epoch: int
    expires_at: float


@dataclass(slots=True)
class SimDatabase:
    """The durable state, and the lease on it.

    Args:
        loop: the scheduler.
    """

    loop: SimLoop
    tables: _Tables = field(default_factory=lambda: _Tables(RM, MemoryDatabase()))
    lease: _LeaseRow | None = None
    away: bool = False
    """No connection is possible."""
    slow: float = 0.001
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
        if self.away:
            raise ConnectionRefusedError("the database is away")

    def crash(self) -> None:
        """Crash the database: all sessions break."""
        self.away = True
        for session in list(self.sessions):
            session.end()

    # -- writing

    def write(
        self, epoch: int, group: Group, session: "SimSession", process: Process, sequence: WriteSequence | None
    ) -> None:
        """Run one transaction.

        Raises:
            StatementRefused: nothing was written.
        """
        row = self.lease
        if row is None or row.epoch != epoch:
            raise StatementRefused(LEASE_LOST, "another dtx has the lease")
        if sequence is not None and sequence.predecessor not in {0, session.sequence}:
            raise StatementRefused(OUT_OF_ORDER, "the group before was not written")
        if self.writers.setdefault(epoch, process.name) != process.name:
            self.violations.append(f"{process.name} wrote under epoch {epoch} of {self.writers[epoch]}")
        before = self._snapshot() if len(group) > 1 else None
        try:
            for record, _ in group:
                self.tables.put(record)
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
        for owner, saved in ((database.messages, tables), (database, copies)):
            for name, table in saved.items():
                mine = getattr(owner, name)
                mine.clear()
                mine.update(table)

    # -- the lease's statements

    def execute(self, statement: str, values: dict[str, Any]) -> tuple[Any, ...] | None:
        """Run a statement of :mod:`dtx.log.lease`, and return its row."""
        row, now = self.lease, self.loop.now
        match statement:
            case lease._HOLDER:
                return None if row is None else (row.holder, row.process, row.instance)
            case lease._TAKE:
                if row is not None and not (row.expires_at < now or row.instance == values["dead"]):
                    return None
                epoch = 1 if row is None else row.epoch + 1
                self.lease = _LeaseRow(
                    values["instance"], values["process"], values["holder"], epoch, now + values["ttl"]
                )
                return (epoch, LOG)
            case lease._RENEW:
                if row is None or row.instance != values["instance"]:
                    return None
                row.expires_at = now + values["ttl"]
                return (row.epoch,)
            case lease._RELEASE:
                if row is not None and row.instance == values["instance"]:
                    row.expires_at = float("-inf")
                return None
            case _:
                raise AssertionError(f"not a statement of the lease: {statement}")

    def raise_epoch(self, instance: UUID) -> int:
        """See :func:`dtx.log.writer.raise_epoch`.

        Raises:
            LeaseLost: another dtx has the lease.
        """
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
        self.sequence = 0
        """The number of the last written group; a setting of the session, as in PostgreSQL."""
        self._process = current()
        self._loop = asyncio.get_running_loop()
        self._on_their_way: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._on_their_way_back: deque[tuple[asyncio.Future[Any], Any, Exception | None]] = deque()
        self._waiting: dict[asyncio.Future[Any], None] = {}
        database.sessions[self] = None

    def end(self) -> None:
        """Break the connection."""
        self.alive = False
        self.database.sessions.pop(self, None)
        if self._process.alive and self._waiting:
            self._process.call(0, self._break)

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
        return self.begin(lambda: self.database.write(epoch, group, self, self._process, sequence))

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
        overdue = self._loop.call_later(_ANSWER_TIMEOUT, self.end)
        answer.add_done_callback(lambda _: overdue.cancel())
        self._on_their_way.append((work, answer))
        # In the world, not in the process: a sent request is executed even if its process dies meanwhile.
        self.database.loop.in_world(self._delay(), self._arrive)
        return answer

    def _arrive(self) -> None:
        work, answer = self._on_their_way.popleft()
        database, process = self.database, self._process
        if not self.alive and database.loop.random.random() < 0.5:
            return
        if database.lost_groups:
            database.lost_groups -= 1
            self.end()
            return
        try:
            result, error = work(), None
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


class _LeaseConnection:
    """The lease's connection: it runs four statements."""

    closed = False

    def __init__(self, database: SimDatabase) -> None:
        self._session = SimSession(database)

    async def execute(self, statement: str, values: dict[str, Any]) -> "_Cursor":
        """Run a statement.

        Raises:
            psycopg.OperationalError: the connection is gone, and the outcome is not known.
        """
        try:
            return _Cursor(await self._session.over(lambda: self._session.database.execute(statement, values)))
        except SessionLost as lost:
            self.closed = True
            raise psycopg.OperationalError(str(lost)) from None

    async def close(self) -> None:
        """Disconnect."""
        self.closed = True
        self._session.end()


class _Cursor:
    def __init__(self, row: tuple[Any, ...] | None) -> None:
        self._row = row

    async def fetchone(self) -> tuple[Any, ...] | None:
        """Return the row."""
        return self._row


class _SimLease(Lease):
    """The real lease, on a connection of the simulation."""

    database: SimDatabase

    async def _connect(self, seconds: float) -> Any:
        if self._connection is None or self._connection.closed:
            try:
                await self.database.connect()
            except OSError as error:
                raise LogUnavailable(f"cannot connect: {error}") from None
            self._connection = _LeaseConnection(self.database)  # type: ignore[assignment]
        return self._connection


class _SimQueries(LogQueries):
    """The queries of the log, on the tables of the twin."""

    database: SimDatabase

    @property
    def fetch(self) -> Fetch:
        """There is no SQL."""
        raise NotImplementedError

    async def _go(self) -> None:
        await self.database.pause()
        if self.database.away:
            raise LogUnavailable("the database is away")

    async def load(self, member: UUID | None = None) -> AsyncIterator[BranchRecord]:
        """Yield every branch."""
        await self._go()
        for record in [record async for record in self.database.tables.load()]:
            yield record

    async def read_work(self, branch_id: UUID) -> list[WorkRow]:
        """Return the work of a branch."""
        await self._go()
        found = await self.database.tables.read_work(branch_id)
        await self.database.pause()
        return found

    async def read_messages_of(self, branch_id: UUID) -> list[WorkRow]:
        """Return the work of a branch, with messages from the log or from queues."""
        await self._go()
        found = await self.database.tables.read_messages_of(branch_id)
        await self.database.pause()
        return found

    async def load_copies(
        self, branch_ids: Collection[UUID] | None = None, position: int | None = None
    ) -> LoggedCopies:
        """Return replays, settlements and duplicates."""
        await self._go()
        found = await self.database.tables.load_copies(branch_ids, position)
        await self.database.pause()
        return found

    async def unended(self, branch_ids: Collection[UUID]) -> set[UUID]:
        """Return those of the branches that the tables have."""
        await self._go()
        return await self.database.tables.unended(branch_ids)

    async def read_duplicates(self, branch_ids: Collection[UUID]) -> list[Duplicate]:
        """Return the duplicates of messages of these branches."""
        await self._go()
        return await self.database.tables.read_duplicates(branch_ids)

    async def lookup(self, vhost: str, xid: Xid, branch_id: UUID | None = None) -> Lookup:
        """Return the result of the tables."""
        await self._go()
        found = await self.database.tables.lookup(vhost, xid, branch_id)
        await self.database.pause()
        return found

    async def load_definitions(self) -> Definitions:
        """Return all definitions."""
        await self._go()
        return await self.database.tables.load_definitions()

    async def load_queues(
        self, queues: Sequence[int], *, detailed: Collection[int] = ()
    ) -> AsyncIterator[QueueContents]:
        """Yield the contents of queues."""
        await self._go()
        async for contents in self.database.tables.load_queues(queues, detailed=detailed):
            yield contents

    async def read_messages(self, slots: Sequence[Slot], octets: int | None = None) -> dict[Slot, StoredMessage]:
        """Return messages by slot."""
        await self._go()
        found = await self.database.tables.read_messages(slots, octets)
        await self.database.pause()
        return found

    async def which_exist(self, slots: Sequence[Slot]) -> set[Slot]:
        """Return the slots with a message."""
        await self._go()
        return await self.database.tables.which_exist(slots)

    async def stray_queues(self, known: Collection[int]) -> list[int]:
        """Return queues that are not in *known*."""
        await self._go()
        return await self.database.tables.stray_queues(known)


class SimLog(PostgresTransactionLog, _SimQueries):
    """The real log with the real lease, the real writer, and the database of the simulation."""

    def __init__(self, database: SimDatabase, *, lease_ttl: float, on_lost: Callable[[], None]) -> None:
        self.database = database
        self._lost = on_lost
        self._ttl = lease_ttl
        self._name = current().name
        super().__init__("postgresql://sim@nowhere/sim", RM)

    async def open(self, *, wait: bool = True, on_standby: Callable[[str], None] = lambda _: None) -> None:
        """Take the lease, and start the writer; wait while another dtx has the lease."""
        assert wait, "the simulation runs no commands"
        self._lease = lease_ = _SimLease(self._dsn, RM, self._name, ttl=self._ttl, on_lost=self._lost)
        lease_.database = self.database
        await lease_.take(on_standby=on_standby)
        self._writer = Writer(
            self._dsn, RM, lease_, durable=True, retry_window=RETRY_WINDOW, answer_timeout=_ANSWER_TIMEOUT,
            on_failed=self._lost,
        )  # fmt: skip
        await self._writer.start()


def bind_group(
    _rm: bytes, epoch: int, group: Iterable[tuple[LogWrite, bytes]], sequence: WriteSequence | None = None
) -> "_Bound":
    """Replaces :func:`dtx.log.statements.bind_group`: returns the records themselves."""
    return epoch, list(group), sequence


async def raise_epoch(session: SimSession, _rm: bytes, holder: Lease) -> int:
    """Replaces :func:`dtx.log.writer.raise_epoch`."""
    epoch = await session.over(lambda: session.database.raise_epoch(holder.instance))
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
