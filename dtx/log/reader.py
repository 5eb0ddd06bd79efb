"""Reading the log from other processes, without a lease or a running dtx, for the command line and operators.

Each read sees what is committed at that moment; a running dtx may change it a moment later. Paged lists are in
:mod:`dtx.log.pages`.
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
from sqlalchemy.dialects.postgresql import REGCLASS, aggregate_order_by

from dtx.db.connections import Dsn, explained, timed_engine
from dtx.log.api import LogError
from dtx.log.lease import Keep, is_dead
from dtx.log.queries import (
    BRANCH_FACTS,
    SIZED_WORK_COLUMNS,
    UNIT_COLUMNS,
    WORK_COLUMNS,
    branch_record,
    slot_count,
    standalone_messages,
    unit_record,
    work_record,
)
from dtx.log.records import BranchRecord, Fate, LogState, WorkKind, WorkRow
from dtx.log.tables import archive, branch, heuristic_outcome, lease, member, queue, unit, work
from dtx.xa.codes import Heuristic
from dtx.xa.xid import Xid

_MESSAGES: Final = cast(literal("dtx.message"), REGCLASS)
_BODIES: Final = cast(literal("dtx.body"), REGCLASS)
_STANDBYS: Final = text("""
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE 'dtx lease %'
    AND substr(application_name, 11) NOT IN (SELECT instance::text FROM dtx.lease)
    AND substr(application_name, 11) NOT IN (SELECT instance::text FROM dtx.member)
""")
BATCH: Final = 1_000
"""Rows fetched at a time: a list of any length needs constant memory."""


_HEAD: Final = ("position", "kind", "fate", "exchange", "routing_key", "queue", "properties")
_SMALL: Final = 64 * 1024
"""Bytes of a body up to which it is read with its row."""
_ROWS: Final = 32
_CHUNK: Final = 1024 * 1024
"""Bytes of a larger body that are read at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedDecision:
    """A heuristic decision: its actor, who ended the branch without the transaction manager, and the reason."""

    outcome: Heuristic
    actor: str
    reason: str | None
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    """One branch with all its data in the log.

    Args:
        rm: its resource manager.
        branch: with its units.
        work: its messages, or a page of them; bodies are empty when they were not requested.
        sizes: bytes of the bodies, in the same order.
        decision: of a branch that was decided heuristically.
        cursor: the last position of the page: the next page begins after it; ``None`` for the last page.
    """

    rm: str
    branch: BranchRecord
    work: tuple[WorkRow, ...]
    sizes: tuple[int, ...]
    decision: LoggedDecision | None
    cursor: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """Selects messages of a branch.

    Args:
        after: only messages after this position.
        limit: their maximum number; ``None`` for all.
        bodies: whether to read bodies: these may be many megabytes.
    """

    after: int = -1
    limit: int | None = None
    bodies: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseHolder:
    """The lease of a resource manager.

    Args:
        rm: name of the resource manager.
        holder: the dtx that took the lease last.
        epoch: grows each time the lease is taken.
        taken_at: seconds since the epoch.
        remaining: seconds until the lease runs out; negative after that; minus infinity after a release.
        log: id of the log of this resource manager.
    """

    rm: str
    holder: str
    epoch: int
    taken_at: float
    remaining: float
    log: UUID


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRow:
    """One of several active dtx of a resource manager, with its lease.

    Args:
        instance: its id, new for each start.
        holder: for people: ``host:pid``.
        address: for other members: ``amqp://host:port``.
        epoch: with which its writes prove the lease.
        joined_at: seconds since the epoch.
        remaining: seconds until its lease runs out; negative after that.
        branches: its branches in the log.
    """

    instance: UUID
    holder: str
    address: str
    epoch: int
    joined_at: float
    remaining: float
    branches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """The contents of standalone mode.

    Args:
        queues: durable ones of the resource manager.
        local: its branches whose messages are in the database.
        brokered: its branches whose messages are in a broker.
        live_rows, dead_rows: of the table of messages, of all resource managers, estimated by PostgreSQL.
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
    """The connections of readers. The engine knows the server, and the statements that it has compiled.

    Without that, a page of branches takes twice as long.
    """
    dsn = Dsn(url)
    return dsn, timed_engine(dsn, patience=patience)


class LogReader:
    """Reads a log. Use as a context manager.

    Args:
        url: ``postgresql://user:password@host:port/name``.
        patience: seconds that a statement may take; 0 for no limit.

    Raises:
        LogError: the URL is invalid, or the tables are missing.
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
        """All rows of *statement*.

        Raises:
            LogUnavailable: the database is away or too slow.
        """
        assert self._connection is not None, "LogReader is a context manager"
        with self._explained():
            return self._connection.execute(statement).all()

    def stream(self, statement: Executable) -> Iterator[Sequence[Any]]:
        """The rows of *statement* one by one, through a server-side cursor: any number needs constant memory."""
        options = {"postgresql_readonly": True, "yield_per": BATCH}
        # a cursor lives in a transaction: hence its own connection; the transaction ends with the stream
        with (
            self._explained(),
            self._engine.connect().execution_options(**options) as connection,
            connection.execute(statement) as rows,
        ):
            yield from rows

    def show(
        self, xid: Xid, *, vhost: str | None = None, rm: str | None = None, messages: Messages = _ALL
    ) -> list[Detail]:
        """The branches with *xid* in the log now: one for each vhost and resource manager that has it.

        Args:
            xid: of the branches.
            vhost: only in this virtual host.
            rm: only of this resource manager.
            messages: the messages to read.
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
        """Rows of messages, and the position after which there are more, or ``None``. The branch names *held* slots.

        Slots are numbered without gaps, so numbers select a page of them.
        """
        after, limit = wanted.after, wanted.limit
        if held:
            between = None if limit is None else (after + 1, after + limit)
            pieces = self.rows(standalone_messages(branch_id, sizes=not wanted.bodies, between=between))
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
        """The leases of all resource managers that were ever in this database."""
        remaining = case(
            (func.isfinite(lease.c.expires_at), func.extract("epoch", lease.c.expires_at - func.clock_timestamp())),
            else_=float("-inf"),
        )
        names = func.string_agg(member.c.holder, aggregate_order_by(literal(" and "), member.c.joined_at))
        members = select(names).where(member.c.rm == lease.c.rm, member.c.expires_at > func.clock_timestamp())
        holder = func.coalesce(members.scalar_subquery(), lease.c.holder)
        columns = (lease.c.rm, holder, lease.c.epoch, lease.c.taken_at, remaining, lease.c.log)
        return [
            LeaseHolder(rm=rm, holder=holder, epoch=epoch, taken_at=taken_at, remaining=float(left), log=log)
            for rm, holder, epoch, taken_at, left, log in self.rows(select(*columns).order_by(lease.c.rm))
        ]

    def members(self, rm: str) -> list[MemberRow]:
        """The active dtx of *rm* that share its branches, the first one first; none if one dtx is alone."""
        columns = member.c
        remaining = func.extract("epoch", columns.expires_at - func.clock_timestamp())
        branches = select(func.count()).where(branch.c.member == columns.instance).scalar_subquery()
        statement = select(
            columns.instance, columns.holder, columns.address, columns.epoch, columns.joined_at, remaining, branches
        )
        return [
            MemberRow(
                instance=instance,
                holder=holder,
                address=address,
                epoch=epoch,
                joined_at=joined_at,
                remaining=float(left),
                branches=count,
            )
            for instance, holder, address, epoch, joined_at, left, count in self.rows(
                statement.where(columns.rm == rm).order_by(columns.joined_at, columns.instance)
            )
        ]

    def standbys(self) -> int:
        """The number of dtx that wait for a lease in this database, by their sessions; the user must see these."""
        return int(self.rows(_STANDBYS)[0][0])

    def retention(self, rm: str) -> Keep | None:
        """The retention periods of the last dtx of *rm*; ``None`` where there was none."""
        columns = (lease.c.retention_days, lease.c.archive_days, lease.c.audit_days, lease.c.duplicate_days)
        for journal_days, archive_days, audit_days, copy_days in self.rows(select(*columns).where(lease.c.rm == rm)):
            return Keep(journal=journal_days, archive=archive_days, audit=audit_days, duplicates=copy_days)
        return None

    def holder_is_dead(self, rm: str) -> bool:
        """Whether the last dtx that took the lease of *rm* has certainly ended: its lease need not be waited for."""
        rows = self.rows(select(lease.c.process).where(lease.c.rm == rm))
        return bool(rows) and is_dead(rows[0][0])

    def stored(self, rm: str) -> Stored:
        """The contents of standalone mode for a resource manager; fast for any size."""
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
        branch_id: id of the branch.
        position: within it.
        kind: published or consumed.
        fate: the fate; ``None`` while it is open.
        exchange, routing_key, queue: its destination or source.
        properties: content header from the property flags on.
        size: bytes of the body.
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
    """The messages of an xid, one after the other; some MiB of memory suffice for any size.

    No transaction stays open between two reads. When a branch ends meanwhile, its messages are gone. Then the export
    raises an error instead of ending early.

    Args:
        log: the reader.
        rm: name of the resource manager.
        vhost: of the branch.
        xid: of the branch.
        archived: whether to read the undelivered messages of forgotten branches, instead of those of a branch.
        positions: only these messages; empty for all.
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
        """The branches of that xid: one in the log, or any number of forgotten ones."""
        self._archived = archived
        self._positions = tuple(positions)
        self.count = sum(self._count(branch_id) for branch_id in self.branches)
        """The number of messages to export."""

    def __iter__(self) -> Iterator[tuple[Piece, Iterator[bytes]]]:
        """Each message with its body, which must be read before the next message.

        Raises:
            LogError: the branch has ended meanwhile, or the database is away.
        """
        exported = 0
        for branch_id in self.branches:
            last = -1
            while rows := self._log.rows(self._page(branch_id, last)):
                for row in rows:
                    piece = _piece(branch_id, row)
                    yield piece, self._body(piece, row[7])
                    last, exported = piece.position, exported + 1
        if exported != self.count:
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
        held = standalone_messages(branch_id).order_by(None).subquery("held")
        by_name: dict[str, Any] = {column.name: found for column, found in zip(WORK_COLUMNS, held.c, strict=True)}
        by_name["fate"] = cast(null(), Text)  # the fate of messages in ``message`` is always open
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
    return LogError("the branch has ended while its messages were read: try again")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgedBranch:
    """A branch that was prepared long ago.

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
    """The number of votes older than *seconds*, and the oldest *limit* of these branches."""
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
