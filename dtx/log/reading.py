"""Reading the log from outside: no lease, no service needed, nothing is written. For the command line and operators.

Everything is read as it is committed at that moment; a running dtx may change it a moment later.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Self
from uuid import UUID

import psycopg
from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Executable,
    FromClause,
    Select,
    Table,
    and_,
    case,
    cast,
    distinct,
    event,
    func,
    literal,
    null,
    or_,
    select,
    text,
    true,
    union,
    union_all,
)
from sqlalchemy.dialects.postgresql import REGCLASS
from sqlalchemy.exc import DBAPIError, ProgrammingError, SQLAlchemyError

from dtx.log.api import LogError, LogUnavailable
from dtx.log.connecting import Dsn
from dtx.log.engine import engine
from dtx.log.process import is_dead
from dtx.log.queries import (
    BRANCH_FACTS,
    JOURNAL_COLUMNS,
    SIZED_WORK_COLUMNS,
    UNIT_COLUMNS,
    WORK_COLUMNS,
    as_floats,
    branch_record,
    journal_entry,
    kept,
    slot_count,
    slots,
    unit_record,
    work_record,
)
from dtx.log.records import BranchRecord, Fate, JournalEntry, LogState, Work, WorkKind
from dtx.log.retention import Keep
from dtx.log.tables import branch, heuristic_outcome, journal, lease, message, queue, unit, work
from dtx.xa.codes import Heuristic
from dtx.xa.xid import Xid

_SLOT_OCTETS: Final = 16
_MESSAGES: Final = cast(literal("dtx.message"), REGCLASS)
_BODIES: Final = cast(literal("dtx.body"), REGCLASS)
_STANDBYS: Final = text("""
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE 'dtx lease %'
    AND substr(application_name, 11) NOT IN (SELECT instance::text FROM dtx.lease)
""")
BATCH: Final = 1_000
"""Rows fetched at a time: a list of any length is read in constant memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which branches are asked for; ``None`` is every.

    Args:
        rm, vhost, owner: exactly these.
        state: in this state.
        older_than: seconds since the branch was started, at least.
    """

    rm: str | None = None
    vhost: str | None = None
    state: LogState | None = None
    owner: str | None = None
    older_than: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InDoubt:
    """A branch that has voted and is not completed.

    Args:
        rm: its resource manager.
        branch: without units.
        age: seconds since it was started, by the database's clock.
        queues: where it consumed.
        destinations: queues that it publishes to, as far as the log knows: without a broker all, with one those of the
            default exchange.
        exchanges: where it publishes; empty is the default exchange.
    """

    rm: str
    branch: BranchRecord
    age: float
    queues: tuple[bytes, ...]
    destinations: tuple[bytes, ...]
    exchanges: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over the branches of one state."""

    state: LogState
    branches: int
    publishes: int
    consumes: int
    bytes: int
    stuck: int
    oldest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
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
    work: tuple[Work, ...]
    sizes: tuple[int, ...]
    decision: Decision | None
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
class Line:
    """A line of the journal and the resource manager that wrote it."""

    rm: str
    entry: JournalEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
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
    found = engine(dsn)

    def prepare_session(driver: psycopg.Connection, _: object) -> None:
        as_floats(driver)
        driver.execute(
            "SELECT set_config('TimeZone', 'UTC', false), set_config('statement_timeout', %s, false)",
            [str(round(patience * 1000))],
        )
        driver.commit()

    event.listen(found, "connect", prepare_session)
    return dsn, found


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

    def in_doubt(
        self, wanted: Filter | None = None, *, where: Sequence[ColumnElement[bool]] = (), limit: int | None = None
    ) -> Iterator[InDoubt]:
        """Branches in doubt, oldest first, as a stream.

        Args:
            wanted: which.
            where: what must hold besides.
            limit: how many at most.
        """
        names = concerned(branch)
        statement = (
            select(*BRANCH_FACTS, branch.c.rm, age_of(branch), names.c.queues, names.c.destinations, names.c.exchanges)
            .select_from(branch.join(names, true()))
            .where(*where)
            .order_by(branch.c.started_at, branch.c.id)
            .limit(limit)
        )
        for row in self._stream(_filtered(statement, wanted or Filter())):
            rm, age, queues, destinations, exchanges = row[len(BRANCH_FACTS) :]
            yield InDoubt(
                rm=rm,
                branch=branch_record(row[: len(BRANCH_FACTS)], ()),
                age=float(age),
                queues=tuple(queues or ()),
                destinations=tuple(destinations or ()),
                exchanges=tuple(exchanges or ()),
            )

    def rows(self, statement: Executable) -> Sequence[Sequence[Any]]:
        """All rows of *statement*."""
        return self._all(statement)

    def totals(self, wanted: Filter | None = None, *, where: Sequence[ColumnElement[bool]] = ()) -> list[Totals]:
        """Sums by state over the same branches; states without a branch are left out."""
        statement = (
            select(
                branch.c.state,
                func.count(),
                func.sum(branch.c.publishes),
                func.sum(branch.c.consumes),
                func.sum(branch.c.bytes),
                func.count(branch.c.stuck),
                func.max(age_of(branch)),
            )
            .where(*where)
            .group_by(branch.c.state)
        )
        return [
            Totals(
                state=LogState(state),
                branches=int(count),
                publishes=int(publishes),
                consumes=int(consumes),
                bytes=int(octets),
                stuck=int(stuck),
                oldest=float(oldest),
            )
            for state, count, publishes, consumes, octets, stuck, oldest in self._all(
                _filtered(statement.order_by(branch.c.state), wanted or Filter())
            )
        ]

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
        statement = _filtered(
            select(branch.c.rm, held, *BRANCH_FACTS).where(*_is(branch, xid)), Filter(rm=rm, vhost=vhost)
        )
        return [
            self._detail(str(row[0]), int(row[1]), row[2:], messages)
            for row in self._all(statement.order_by(branch.c.rm, branch.c.vhost))
        ]

    def _detail(self, rm: str, held: int, row: Any, wanted: Messages) -> Detail:
        branch_id = row[0]
        units = self._all(select(*UNIT_COLUMNS).where(unit.c.branch_id == branch_id).order_by(unit.c.number))
        pieces, cursor = self._pieces(branch_id, held, wanted)
        found = tuple(work_record(piece[: len(WORK_COLUMNS)]) for piece in pieces)
        sizes = tuple(len(item.body) for item in found) if wanted.bodies else tuple(int(piece[-1]) for piece in pieces)
        decided = heuristic_outcome.c
        decisions = self._all(
            select(decided.outcome, decided.actor, decided.reason, decided.at).where(decided.branch_id == branch_id)
        )
        return Detail(
            rm=rm,
            branch=branch_record(row, tuple(map(unit_record, units))),
            work=found,
            sizes=sizes,
            decision=next(
                (
                    Decision(outcome=Heuristic(outcome), actor=actor, reason=reason, at=at)
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
            pieces = self._all(kept(branch_id, sizes=not wanted.bodies, between=between))
            return pieces, None if between is None or between[1] >= held - 1 else between[1]
        columns = WORK_COLUMNS if wanted.bodies else SIZED_WORK_COLUMNS
        pieces = self._all(
            select(*columns)
            .where(work.c.branch_id == branch_id, work.c.position > after)
            .order_by(work.c.position)
            .limit(None if limit is None else limit + 1)
        )
        if limit is None or len(pieces) <= limit:
            return pieces, None
        return pieces[:limit], int(pieces[limit - 1][0])

    def history(
        self, xid: Xid, *, vhost: str | None = None, rm: str | None = None, limit: int | None = None
    ) -> list[Line]:
        """The journal of *xid*, oldest first; with *limit* no more than its last lines."""
        statement = (
            select(journal.c.rm, *JOURNAL_COLUMNS)
            .where(*_is(journal, xid))
            .order_by(journal.c.at.desc(), journal.c.id.desc())
            .limit(limit)
        )
        if vhost is not None:
            statement = statement.where(journal.c.vhost == vhost)
        if rm is not None:
            statement = statement.where(journal.c.rm == rm)
        return [Line(rm=row[0], entry=journal_entry(row[1:])) for row in reversed(self._all(statement))]

    def leases(self) -> list[Holder]:
        """Who holds the lease of each resource manager that ever was in this database."""
        remaining = case(
            (func.isfinite(lease.c.expires_at), func.extract("epoch", lease.c.expires_at - func.clock_timestamp())),
            else_=float("-inf"),
        )
        columns = (lease.c.rm, lease.c.holder, lease.c.epoch, lease.c.taken_at, remaining, lease.c.log)
        return [
            Holder(rm=rm, holder=holder, epoch=epoch, taken_at=taken_at, remaining=float(left), log=log)
            for rm, holder, epoch, taken_at, left, log in self._all(select(*columns).order_by(lease.c.rm))
        ]

    def standbys(self) -> int:
        """How many dtx wait for a lease in this database: their sessions tell, to a user who may see them."""
        return int(self._all(_STANDBYS)[0][0])

    def retention(self, rm: str) -> Keep | None:
        """What the last dtx of *rm* wanted kept; ``None`` where there was none."""
        columns = (lease.c.retention_days, lease.c.archive_days, lease.c.audit_days)
        for journal_days, archive_days, audit_days in self._all(select(*columns).where(lease.c.rm == rm)):
            return Keep(journal=journal_days, archive=archive_days, audit=audit_days)
        return None

    def holder_is_dead(self, rm: str) -> bool:
        """Whether the dtx that took the lease of *rm* last is certainly gone: then nobody need wait for its lease."""
        rows = self._all(select(lease.c.process).where(lease.c.rm == rm))
        return bool(rows) and is_dead(rows[0][0])

    def stored(self, rm: str) -> Stored:
        """What standalone mode keeps for a resource manager: quickly, however much it is."""
        rows = self._all(
            select(
                select(func.count()).select_from(queue).where(queue.c.rm == rm).scalar_subquery(),
                select(func.count(branch.c.published)).where(branch.c.rm == rm).scalar_subquery(),
                select(func.count()).where(branch.c.rm == rm, branch.c.published.is_(None)).scalar_subquery(),
                func.coalesce(func.pg_stat_get_live_tuples(_MESSAGES), 0),
                func.coalesce(func.pg_stat_get_dead_tuples(_MESSAGES), 0),
                func.pg_total_relation_size(_MESSAGES) + func.pg_total_relation_size(_BODIES),
            )
        )
        hosts = self._all(union(*(select(table.c.vhost).where(table.c.rm == rm) for table in (queue, branch))))
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

    def _all(self, statement: Executable) -> Sequence[Sequence[Any]]:
        with self._explained():
            return self._open().execute(statement).all()

    def _stream(self, statement: Select[Any]) -> Iterator[Sequence[Any]]:
        """Rows through a server-side cursor."""
        options = {"postgresql_readonly": True, "yield_per": BATCH}
        # a cursor lives in a transaction: a connection of its own, and the transaction ends with the stream
        with (
            self._explained(),
            self._engine.connect().execution_options(**options) as connection,
            connection.execute(statement) as rows,
        ):
            yield from rows

    def _open(self) -> Connection:
        assert self._connection is not None, "LogReader is a context manager"
        return self._connection

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
            if isinstance(error, ProgrammingError) and isinstance(cause, psycopg.errors.UndefinedTable):
                raise LogError(f"there are no tables of dtx in {self._dsn.shown}: run dtx migrate") from None
            raise LogUnavailable(f"cannot read {self._dsn.shown}: {self._dsn.explain(cause)}") from None
        except (psycopg.Error, OSError) as error:
            raise LogUnavailable(f"cannot read {self._dsn.shown}: {self._dsn.explain(error)}") from None


to_queue: Final = case((and_(work.c.kind == str(WorkKind.PUBLISH), work.c.exchange == b""), work.c.routing_key))
"""The queue that a message goes to by a broker's default exchange: "the queue name and routing key are identical"."""


def concerned(table: FromClause) -> Any:
    """The queues where a branch consumed, and the queues and exchanges where it publishes, whatever the mode."""
    published, consumed = slots(table.c.published, "p"), slots(table.c.consumed, "c")
    stored = (message.c.queue == published.c.queue) & (message.c.position == published.c.position)
    names = union_all(
        select(
            work.c.queue.label("queue"),
            to_queue.label("destination"),
            case((work.c.kind == str(WorkKind.PUBLISH), work.c.exchange)).label("exchange"),
        )
        .where(work.c.branch_id == table.c.id, or_(work.c.fate.is_(None), work.c.fate == str(Fate.UNSURE)))
        .correlate(table),
        select(null(), queue.c.name, message.c.exchange)
        .select_from(published.join(message, stored).outerjoin(queue, queue.c.id == published.c.queue))
        .correlate(table),
        select(queue.c.name, null(), null())
        .select_from(consumed.join(queue, queue.c.id == consumed.c.queue))
        .correlate(table),
    ).subquery("names")
    return select(
        *(
            func.array_agg(distinct(names.c[name])).filter(names.c[name].is_not(None)).label(f"{name}s")
            for name in ("queue", "destination", "exchange")
        )
    ).lateral()


def age_of(table: FromClause) -> Any:
    """Seconds since branches of *table* were started, by the database's clock."""
    return func.extract("epoch", func.clock_timestamp() - table.c.started_at)


def _is(table: Table, xid: Xid) -> tuple[Any, ...]:
    return table.c.format_id == xid.format_id, table.c.gtrid == xid.gtrid, table.c.bqual == xid.bqual


def _filtered(statement: Select[Any], wanted: Filter) -> Select[Any]:
    for column, value in (
        (branch.c.rm, wanted.rm),
        (branch.c.vhost, wanted.vhost),
        (branch.c.state, wanted.state),
        (branch.c.owner, wanted.owner),
    ):
        if value is not None:
            statement = statement.where(column == str(value))
    if wanted.older_than is not None:
        statement = statement.where(age_of(branch) >= wanted.older_than)
    return statement
