"""Reading the log from outside: no lease, no service needed, nothing is written. For the command line and operators.

Everything is read as it is committed at that moment; a running dtx may change it a moment later. What comes in pages is
in :mod:`dtx.log.pages`.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Self
from uuid import UUID

from sqlalchemy import (
    Connection,
    Engine,
    Executable,
    Select,
    Subquery,
    Text,
    case,
    cast,
    func,
    literal,
    null,
    select,
    text,
    union,
    union_all,
)
from sqlalchemy.dialects.postgresql import REGCLASS

from dtx.db.connections import Dsn, explained, timed_engine
from dtx.log.api import LogError
from dtx.log.lease import Keep, is_dead
from dtx.log.queries import (
    BRANCH_FACTS,
    SIZED_WORK_COLUMNS,
    UNIT_COLUMNS,
    WORK_COLUMNS,
    branch_record,
    kept,
    slot_count,
    unit_record,
    work_record,
)
from dtx.log.records import BranchRecord, Fate, LogState, WorkKind, WorkRow
from dtx.log.tables import archive, branch, heuristic_outcome, lease, queue, unit, work
from dtx.xa.codes import Heuristic
from dtx.xa.xid import Xid

_MESSAGES: Final = cast(literal("dtx.message"), REGCLASS)
_BODIES: Final = cast(literal("dtx.body"), REGCLASS)
_STANDBYS: Final = text("""
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE 'dtx lease %'
    AND substr(application_name, 11) NOT IN (SELECT instance::text FROM dtx.lease)
""")
BATCH: Final = 1_000
"""Rows fetched at a time: a list of any length is read in constant memory."""


_HEAD: Final = ("position", "kind", "fate", "exchange", "routing_key", "queue", "properties")
_SMALL: Final = 64 * 1024
"""Octets of a body up to which it comes with its row."""
_ROWS: Final = 32
_CHUNK: Final = 1024 * 1024
"""Octets of a larger body that are read at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedDecision:
    """A heuristic decision: who ended the branch without its transaction manager, and why."""

    outcome: Heuristic
    actor: str
    reason: str | None
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    """One branch with everything that the log has of it.

    Args:
        rm: its resource manager.
        branch: with its units.
        work: its messages, or a page of them; their bodies are empty where they were not asked for.
        sizes: octets of the bodies, in the same order.
        decision: where it was decided heuristically.
        cursor: where the page of messages ends: the next one begins behind this position; ``None`` for the last.
    """

    rm: str
    branch: BranchRecord
    work: tuple[WorkRow, ...]
    sizes: tuple[int, ...]
    decision: LoggedDecision | None
    cursor: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """Which messages of a branch are shown.

    Args:
        after: those behind this position.
        limit: how many at most; ``None`` for all.
        bodies: whether they come with their bodies: these may be many megabytes.
    """

    after: int = -1
    limit: int | None = None
    bodies: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseHolder:
    """Who is the active dtx of a resource manager.

    Args:
        rm: name of the resource manager.
        holder: the dtx that took the lease last.
        epoch: grows with every taking.
        taken_at: seconds since the epoch.
        remaining: seconds until the lease runs out; negative where it has; minus infinity where it was given back.
        log: id of the log of this resource manager.
    """

    rm: str
    holder: str
    epoch: int
    taken_at: float
    remaining: float
    log: UUID


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What standalone mode keeps.

    Args:
        queues: durable ones of the resource manager.
        local: its branches whose messages are in the database.
        brokered: its branches whose messages are in a broker.
        live_rows, dead_rows: of the table of messages, of all resource managers, as PostgreSQL estimates them.
        table_bytes: of that table with its indexes.
        vhosts: virtual hosts that have durable queues or branches in the log.
    """

    queues: int
    local: int
    brokered: int
    live_rows: int
    dead_rows: int
    table_bytes: int
    vhosts: frozenset[str]


_ALL: Final = Messages()


@lru_cache(maxsize=8)
def _source(url: str, patience: float) -> tuple[Dsn, Engine]:
    """Where readers get their connections: the engine knows the server, and statements that it has compiled before.

    For a page of branches that is half of the work.
    """
    dsn = Dsn(url)
    return dsn, timed_engine(dsn, patience=patience)


class LogReader:
    """Reads a log. Use as a context manager.

    Args:
        url: ``postgresql://user:password@host:port/name``.
        patience: seconds that a question may take; 0 for any.

    Raises:
        LogError: the URL is not one, or the tables are missing.
        LogUnavailable: the database cannot be reached.
    """

    def __init__(self, url: str, *, patience: float = 0.0) -> None:
        self._dsn, self._engine = _source(url, patience)
        self._connection: Connection | None = None

    def __enter__(self) -> Self:
        with self._explained():
            self._connection = self._engine.connect().execution_options(
                isolation_level="AUTOCOMMIT", postgresql_readonly=True
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def rows(self, statement: Executable) -> Sequence[Sequence[Any]]:
        """All rows of *statement*."""
        assert self._connection is not None, "LogReader is a context manager"
        with self._explained():
            return self._connection.execute(statement).all()

    def stream(self, statement: Executable) -> Iterator[Sequence[Any]]:
        """The same one by one, through a server-side cursor: a list of any length is read in constant memory."""
        options = {"postgresql_readonly": True, "yield_per": BATCH}
        # a cursor lives in a transaction: a connection of its own, and the transaction ends with the stream
        with (
            self._explained(),
            self._engine.connect().execution_options(**options) as connection,
            connection.execute(statement) as rows,
        ):
            yield from rows

    def show(
        self, xid: Xid, *, vhost: str | None = None, rm: str | None = None, messages: Messages = _ALL
    ) -> list[Detail]:
        """What is logged of *xid* now: one branch for each vhost and resource manager that has it.

        Args:
            xid: of the branches.
            vhost: only in this one.
            rm: only of this one.
            messages: which of their messages.
        """
        held = slot_count(branch.c.published) + slot_count(branch.c.consumed)
        columns = branch.c
        exact = zip(
            (columns.format_id, columns.gtrid, columns.bqual), (xid.format_id, xid.gtrid, xid.bqual), strict=True
        )
        where = [
            column == value for column, value in (*exact, (columns.vhost, vhost), (columns.rm, rm)) if value is not None
        ]
        statement = select(columns.rm, held, *BRANCH_FACTS).where(*where).order_by(columns.rm, columns.vhost)
        return [self._detail(str(row[0]), int(row[1]), row[2:], messages) for row in self.rows(statement)]

    def _detail(self, rm: str, held: int, row: Any, wanted: Messages) -> Detail:
        branch_id = row[0]
        units = self.rows(select(*UNIT_COLUMNS).where(unit.c.branch_id == branch_id).order_by(unit.c.number))
        pieces, cursor = self._pieces(branch_id, held, wanted)
        found = tuple(work_record(piece[: len(WORK_COLUMNS)]) for piece in pieces)
        sizes = tuple(len(item.body) for item in found) if wanted.bodies else tuple(int(piece[-1]) for piece in pieces)
        decided = heuristic_outcome.c
        decisions = self.rows(
            select(decided.outcome, decided.actor, decided.reason, decided.at).where(decided.branch_id == branch_id)
        )
        return Detail(
            rm=rm,
            branch=branch_record(row, tuple(map(unit_record, units))),
            work=found,
            sizes=sizes,
            decision=next(
                (
                    LoggedDecision(outcome=Heuristic(outcome), actor=actor, reason=reason, at=at)
                    for outcome, actor, reason, at in decisions
                ),
                None,
            ),
            cursor=cursor,
        )

    def _pieces(self, branch_id: Any, held: int, wanted: Messages) -> tuple[Sequence[Sequence[Any]], int | None]:
        """Rows of messages, and the position behind which there are more: of a branch that names *held* slots, or none.

        Slots are numbered without gaps, so a page of them is told by numbers.
        """
        after, limit = wanted.after, wanted.limit
        if held:
            between = None if limit is None else (after + 1, after + limit)
            pieces = self.rows(kept(branch_id, sizes=not wanted.bodies, between=between))
            return pieces, None if between is None or between[1] >= held - 1 else between[1]
        columns = WORK_COLUMNS if wanted.bodies else SIZED_WORK_COLUMNS
        pieces = self.rows(
            select(*columns)
            .where(work.c.branch_id == branch_id, work.c.position > after)
            .order_by(work.c.position)
            .limit(None if limit is None else limit + 1)
        )
        if limit is None or len(pieces) <= limit:
            return pieces, None
        return pieces[:limit], int(pieces[limit - 1][0])

    def leases(self) -> list[LeaseHolder]:
        """Who holds the lease of each resource manager that ever was in this database."""
        remaining = case(
            (func.isfinite(lease.c.expires_at), func.extract("epoch", lease.c.expires_at - func.clock_timestamp())),
            else_=float("-inf"),
        )
        columns = (lease.c.rm, lease.c.holder, lease.c.epoch, lease.c.taken_at, remaining, lease.c.log)
        return [
            LeaseHolder(rm=rm, holder=holder, epoch=epoch, taken_at=taken_at, remaining=float(left), log=log)
            for rm, holder, epoch, taken_at, left, log in self.rows(select(*columns).order_by(lease.c.rm))
        ]

    def standbys(self) -> int:
        """How many dtx wait for a lease in this database: their sessions tell, to a user who may see them."""
        return int(self.rows(_STANDBYS)[0][0])

    def retention(self, rm: str) -> Keep | None:
        """What the last dtx of *rm* wanted kept; ``None`` where there was none."""
        columns = (lease.c.retention_days, lease.c.archive_days, lease.c.audit_days)
        for journal_days, archive_days, audit_days in self.rows(select(*columns).where(lease.c.rm == rm)):
            return Keep(journal=journal_days, archive=archive_days, audit=audit_days)
        return None

    def holder_is_dead(self, rm: str) -> bool:
        """Whether the dtx that took the lease of *rm* last is certainly gone: then nobody need wait for its lease."""
        rows = self.rows(select(lease.c.process).where(lease.c.rm == rm))
        return bool(rows) and is_dead(rows[0][0])

    def stored(self, rm: str) -> Stored:
        """What standalone mode keeps for a resource manager: quickly, however much it is."""
        rows = self.rows(
            select(
                select(func.count()).select_from(queue).where(queue.c.rm == rm).scalar_subquery(),
                select(func.count(branch.c.published)).where(branch.c.rm == rm).scalar_subquery(),
                select(func.count()).where(branch.c.rm == rm, branch.c.published.is_(None)).scalar_subquery(),
                func.coalesce(func.pg_stat_get_live_tuples(_MESSAGES), 0),
                func.coalesce(func.pg_stat_get_dead_tuples(_MESSAGES), 0),
                func.pg_total_relation_size(_MESSAGES) + func.pg_total_relation_size(_BODIES),
            )
        )
        hosts = self.rows(union(*(select(table.c.vhost).where(table.c.rm == rm) for table in (queue, branch))))
        queues, local, brokered, live, dead, octets = rows[0]
        return Stored(
            queues=queues,
            local=local,
            brokered=brokered,
            live_rows=live,
            dead_rows=dead,
            table_bytes=octets,
            vhosts=frozenset(name for (name,) in hosts),
        )

    def _explained(self) -> AbstractContextManager[None]:
        return explained(self._dsn, doing="cannot read ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A message without its body.

    Args:
        branch_id: of the branch.
        position: within it.
        kind: what the branch does with it.
        fate: what became of it; ``None`` while that is open.
        exchange, routing_key, queue: where it goes, or comes from.
        properties: content header from the property flags on.
        size: octets of the body.
    """

    branch_id: UUID
    position: int
    kind: WorkKind
    fate: Fate | None
    exchange: bytes
    routing_key: bytes
    queue: bytes | None
    properties: bytes
    size: int


class Export:
    """The messages of an xid, one after the other: whatever it holds, some MiB of memory will do.

    Nothing is kept open between two looks. A branch that ends meanwhile takes its messages along; then the export ends
    with an error rather than short.

    Args:
        log: read from.
        rm: name of the resource manager.
        vhost: of the branch.
        xid: of the branch.
        archived: whether what nobody got of a forgotten branch is meant, rather than what a branch holds.
        positions: these messages alone; empty for all.
    """

    def __init__(
        self, log: LogReader, rm: str, vhost: str, xid: Xid, *, archived: bool = False, positions: Sequence[int] = ()
    ) -> None:
        self._log = log
        source = archive if archived else branch
        column = source.c.branch_id if archived else source.c.id
        found = log.rows(
            select(column)
            .distinct()
            .where(
                source.c.rm == rm,
                source.c.vhost == vhost,
                source.c.format_id == xid.format_id,
                source.c.gtrid == xid.gtrid,
                source.c.bqual == xid.bqual,
            )
            .order_by(column)
        )
        self.branches: tuple[UUID, ...] = tuple(row[0] for row in found)
        """Those of that xid: several may have been forgotten, one is there."""
        self._archived = archived
        self._positions = tuple(positions)
        self.count = sum(self._count(branch_id) for branch_id in self.branches)
        """How many messages it will be."""

    def __iter__(self) -> Iterator[tuple[Piece, Iterator[bytes]]]:
        """Each message with its body, which is to be read before the next one.

        Raises:
            LogError: the branch has ended meanwhile, or the database is away.
        """
        told = 0
        for branch_id in self.branches:
            last = -1
            while rows := self._log.rows(self._page(branch_id, last)):
                for row in rows:
                    piece = _piece(branch_id, row)
                    yield piece, self._body(piece, row[7])
                    last, told = piece.position, told + 1
        if told != self.count:
            raise _ended()

    def _count(self, branch_id: UUID) -> int:
        messages = self._messages(branch_id)
        return int(self._log.rows(select(func.count()).select_from(messages).where(*self._chosen(messages)))[0][0])

    def _page(self, branch_id: UUID, last: int) -> Select[Any]:
        of = self._messages(branch_id)
        size = func.octet_length(of.c.body)
        return (
            select(*(of.c[name] for name in _HEAD), case((size <= _SMALL, of.c.body)), size)
            .where(of.c.position > last, *self._chosen(of))
            .order_by(of.c.position)
            .limit(_ROWS)
        )

    def _body(self, piece: Piece, whole: bytes | None) -> Iterator[bytes]:
        if whole is not None:
            yield bytes(whole)
            return
        of = self._messages(piece.branch_id)
        for start in range(0, piece.size, _CHUNK):
            chunk = select(func.substring(of.c.body, start + 1, _CHUNK)).where(of.c.position == piece.position)
            found = self._log.rows(chunk)
            if not found:
                raise _ended()
            yield bytes(found[0][0])

    def _messages(self, branch_id: UUID) -> Subquery:
        if self._archived:
            return select(*_named(archive.c)).where(archive.c.branch_id == branch_id).subquery("messages")
        held = kept(branch_id).order_by(None).subquery("held")
        by_name: dict[str, Any] = {column.name: found for column, found in zip(WORK_COLUMNS, held.c, strict=True)}
        by_name["fate"] = cast(null(), Text)  # of messages in the database that is open as long as they are there
        own = select(*_named(work.c)).where(work.c.branch_id == branch_id)
        return union_all(own, select(*_named(by_name))).subquery("messages")

    def _chosen(self, of: Subquery) -> tuple[Any, ...]:
        return (of.c.position.in_(self._positions),) if self._positions else ()


def _named(columns: Any) -> list[Any]:
    return [columns[name] for name in (*_HEAD, "body")]


def _piece(branch_id: UUID, row: Sequence[Any]) -> Piece:
    position, kind, fate, exchange, routing_key, queue, properties, _, size = row
    return Piece(
        branch_id=branch_id,
        position=int(position),
        kind=WorkKind(kind),
        fate=None if fate is None else Fate(fate),
        exchange=bytes(exchange),
        routing_key=bytes(routing_key),
        queue=None if queue is None else bytes(queue),
        properties=bytes(properties),
        size=int(size),
    )


def _ended() -> LogError:
    return LogError("the branch has ended while its messages were read: look again")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgedBranch:
    """A branch that has been prepared for long.

    Args:
        age: seconds since the vote, by the database's clock now.
    """

    id: UUID
    vhost: str
    xid: Xid
    owner: str
    version: int
    age: float


_VOTE_AGE: Final = func.extract("epoch", func.clock_timestamp() - branch.c.prepared_at)


def database_time(log: LogReader) -> float:
    """The time of the database, seconds since the epoch."""
    ((now,),) = log.rows(select(func.extract("epoch", func.clock_timestamp())))
    return float(now)


def prepared_of_ids(log: LogReader, rm: str, ids: Sequence[UUID]) -> list[AgedBranch]:
    """Those of *ids* that are prepared, the oldest vote first."""
    return _aged(log, _prepared(rm).where(branch.c.id.in_(ids)))


def prepared_longer(log: LogReader, rm: str, seconds: float, *, limit: int) -> tuple[int, list[AgedBranch]]:
    """How many votes are older than *seconds*, and the oldest *limit* of them."""
    old = branch.c.prepared_at <= func.clock_timestamp() - func.make_interval(0, 0, 0, 0, 0, 0, seconds)
    ((count,),) = log.rows(select(func.count()).where(branch.c.rm == rm, branch.c.state == str(LogState.PREPARED), old))
    return int(count), _aged(log, _prepared(rm).where(old).limit(limit)) if count else []


def _prepared(rm: str) -> Select[Any]:
    columns = (branch.c.id, branch.c.vhost, branch.c.format_id, branch.c.gtrid, branch.c.bqual)
    return (
        select(*columns, branch.c.owner, branch.c.version, _VOTE_AGE)
        .where(branch.c.rm == rm, branch.c.state == str(LogState.PREPARED), branch.c.prepared_at.is_not(None))
        .order_by(branch.c.prepared_at, branch.c.id)
    )


def _aged(log: LogReader, statement: Select[Any]) -> list[AgedBranch]:
    return [
        AgedBranch(
            id=id_,
            vhost=vhost,
            xid=Xid(format_id, bytes(gtrid), bytes(bqual)),
            owner=owner,
            version=version,
            age=float(age),
        )
        for id_, vhost, format_id, gtrid, bqual, owner, version, age in log.rows(statement)
    ]
