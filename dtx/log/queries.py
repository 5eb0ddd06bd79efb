"""Reading the log in a running dtx: load at startup, look-ups, work, history, messages and topology.

A startup reads no body of standalone mode, but only the primary key of ``message``. PostgreSQL packs the positions of a
queue into one value, which becomes an array without a Python object for each. A million take one or two seconds.

Statements are compiled once. Other readers also use the columns and the functions that convert rows.
"""

import asyncio
import sys
from abc import ABC, abstractmethod
from array import array
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any, Final, Protocol
from uuid import UUID

import psycopg
from sqlalchemy import (
    ARRAY,
    BigInteger,
    BindParameter,
    Column,
    ColumnElement,
    CompoundSelect,
    Integer,
    Select,
    Table,
    TableValuedAlias,
    TextClause,
    Uuid,
    any_,
    bindparam,
    exists,
    func,
    literal,
    null,
    or_,
    select,
    text,
    true,
    tuple_,
    union_all,
)
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from dtx.db.columns import seconds_from
from dtx.db.connections import Dsn, as_floats, connect, session_settings
from dtx.log.api import LogError, LogUnavailable
from dtx.log.changes import (
    BindingRow,
    Definitions,
    DestinationKind,
    ExchangeRow,
    QueueContents,
    QueueRow,
    Slot,
    StoredMessage,
    unpack_slots,
)
from dtx.log.records import (
    ENDINGS,
    MOVED,
    ArchivedMessage,
    BranchRecord,
    Duplicate,
    Fate,
    JournalEnding,
    JournalEntry,
    JournalEvent,
    LoggedCopies,
    LogState,
    Lookup,
    Replay,
    SettledCopy,
    Unit,
    UnitState,
    WorkKind,
    WorkRow,
)
from dtx.log.tables import (
    archive,
    binding,
    body,
    branch,
    duplicate,
    exchange,
    journal,
    message,
    queue,
    replay,
    settlement,
    unit,
    work,
)
from dtx.xa.codes import Heuristic
from dtx.xa.xid import Xid

PAGE: Final = 2_000
"""Branches in one batch of the load: about a megabyte."""
MAX_CONNECTIONS: Final = 3
"""Reading sessions: look-ups do not wait for one long read of bodies, and PostgreSQL allows few connections."""

QUEUES_AT_ONCE: Final = 50
"""Queues whose positions are in the first result."""
MAX_QUEUES_AT_ONCE: Final = 2_000
"""Maximum in any result: it doubles while queues are short, so that 100,000 do not take a round trip each."""
POSITIONS_AT_ONCE: Final = 500_000
"""Positions in one result above which the next has fewer queues: some megabytes."""
MESSAGES_AT_ONCE: Final = 1_000
"""Messages whose bodies are in one result, unless a number of bytes ends it before."""
_NO_LIMIT: Final = 2**62
SLOTS_AT_ONCE: Final = 10_000
"""Slots in one query for existence."""

_PLANNER_OFF: Final = (
    "enable_seqscan", "enable_bitmapscan", "enable_sort", "enable_hashjoin", "enable_mergejoin", "jit",
)  # fmt: skip

_GRACE: Final = 5.0
"""Seconds that are added to a statement's time-out."""

_SLOT_OCTETS: Final = 16
_DIALECT: Final = PGDialect_psycopg()  # type: ignore[no-untyped-call]  # SQLAlchemy leaves dialects untyped
_WAITING: Final = (LogState.PREPARED, LogState.HEURISTIC)
_STATES: Final = {state.value: state for state in LogState}
_FATES: Final[Mapping[str | None, Fate | None]] = {None: None} | {word.value: word for word in Fate}
_OUTCOMES: Final[Mapping[str | None, Heuristic | None]] = {None: None} | {word.value: word for word in Heuristic}


class Query:
    """A SQLAlchemy select, or SQL, compiled to what psycopg executes."""

    __slots__ = ("_constants", "sql")

    def __init__(self, statement: Select[Any] | CompoundSelect[Any] | TextClause) -> None:
        compiled = statement.compile(dialect=_DIALECT, compile_kwargs={"render_postcompile": True})
        self.sql = str(compiled).encode()
        self._constants = dict(compiled.params)

    def parameters(self, given: Mapping[str, object]) -> dict[str, object]:
        """*given* and the constants of the statement."""
        return {**self._constants, **given}


def _given(name: str, like: Column[Any]) -> BindParameter[Any]:
    return bindparam(name, None, type_=like.type)


BRANCH_COLUMNS: Final = (
    branch.c.id, branch.c.vhost, branch.c.format_id, branch.c.gtrid, branch.c.bqual, branch.c.state, branch.c.owner,
    branch.c.version, branch.c.timeout, branch.c.started_at, branch.c.prepared_at, branch.c.decided_at,
    branch.c.one_phase, branch.c.publishes, branch.c.consumes, branch.c.bytes, branch.c.stuck, branch.c.outcome,
    branch.c.published, branch.c.consumed, branch.c.member,
)  # fmt: skip
UNSHOWN: Final = frozenset({branch.c.published.name, branch.c.consumed.name})
"""Columns that are null for people: slots of messages, of which a branch may have 100,000."""
BRANCH_FACTS: Final = tuple(
    null().label(column.name) if column.name in UNSHOWN else column for column in BRANCH_COLUMNS
)
"""The columns of a branch for people."""
JOURNAL_COLUMNS: Final = tuple(column for column in journal.c if column.name not in {"id", "rm", "xid8"})
"""The columns of a journal entry's value."""
_JOURNAL_NAMES: Final = [str(column.name) for column in JOURNAL_COLUMNS]
UNIT_COLUMNS: Final = (
    unit.c.branch_id, unit.c.number, unit.c.lock, unit.c.nonce, unit.c.incarnation, unit.c.receipt, unit.c.state,
    unit.c.attempt,
)  # fmt: skip
WORK_COLUMNS: Final = (
    work.c.position, work.c.kind, work.c.exchange, work.c.routing_key, work.c.queue, work.c.flags, work.c.properties,
    work.c.body, work.c.unit, work.c.fate,
)  # fmt: skip

SIZED_WORK_COLUMNS: Final = (
    *(literal(b"").label("body") if column is work.c.body else column for column in WORK_COLUMNS),
    func.octet_length(work.c.body),
)
"""The same without bodies; their sizes in bytes are the last column."""


def _is_xid(table: Table) -> tuple[ColumnElement[bool], ...]:
    return tuple(table.c[name] == _given(name, table.c[name]) for name in ("format_id", "gtrid", "bqual"))


_RM: Final = _given("rm", branch.c.rm)
_VHOST: Final = _given("vhost", branch.c.vhost)
_BRANCH_ID: Final = _given("branch_id", branch.c.id)
_AFTER: Final = _given("after", branch.c.id)

_LOAD: Final = select(*BRANCH_COLUMNS).where(branch.c.rm == _RM, branch.c.id > _AFTER).order_by(branch.c.id).limit(PAGE)
LOAD: Final = Query(_LOAD)
LOAD_MEMBER: Final = Query(_LOAD.where(branch.c.member == _given("member", branch.c.member)))
_MINE: Final = _given("mine", branch.c.member)
LOAD_PREPARED: Final = Query(
    _LOAD.where(
        branch.c.vhost == _VHOST,
        or_(branch.c.state.in_([str(state) for state in _WAITING]), branch.c.stuck.is_not(None)),
        or_(_MINE.is_(None), branch.c.member.is_distinct_from(_MINE)),
    )
)
LOAD_UNITS: Final = Query(
    select(*UNIT_COLUMNS)
    .where(unit.c.rm == _RM, unit.c.branch_id > _AFTER, unit.c.branch_id <= _given("last", branch.c.id))
    .order_by(unit.c.branch_id, unit.c.number)
)
UNITS: Final = Query(select(*UNIT_COLUMNS).where(unit.c.branch_id == _BRANCH_ID).order_by(unit.c.number))
FIND: Final = Query(select(*BRANCH_COLUMNS).where(branch.c.rm == _RM, branch.c.vhost == _VHOST, *_is_xid(branch)))
_LOGGED: Final = Query(
    text("""
SELECT u.number FROM unnest(CAST(:vhosts AS text[]), CAST(:format_ids AS bigint[]), CAST(:gtrids AS bytea[]),
    CAST(:bquals AS bytea[])) WITH ORDINALITY AS u(vhost, format_id, gtrid, bqual, number)
CROSS JOIN LATERAL (SELECT FROM dtx.branch b WHERE b.rm = :rm AND b.vhost = u.vhost AND b.format_id = u.format_id
    AND b.gtrid = u.gtrid AND b.bqual = u.bqual) AS found
""")
)
_ENDING: Final = (
    select(journal.c.event, journal.c.at, journal.c.branch_id, journal.c.owner, journal.c.outcome)
    .where(
        journal.c.rm == _RM,
        journal.c.vhost == _VHOST,
        *_is_xid(journal),
        journal.c.event.in_([str(event) for event in sorted(ENDINGS)]),
    )
    .order_by(journal.c.at.desc(), journal.c.id.desc())
    .limit(1)
)
ENDING: Final = Query(_ENDING)
ENDING_OF_BRANCH: Final = Query(_ENDING.where(journal.c.branch_id == _BRANCH_ID))
WORK: Final = Query(select(*WORK_COLUMNS).where(work.c.branch_id == _BRANCH_ID).order_by(work.c.position))
_HISTORY: Final = (
    select(*JOURNAL_COLUMNS).where(journal.c.rm == _RM, *_is_xid(journal)).order_by(journal.c.at, journal.c.id)
)
HISTORY: Final = Query(_HISTORY)
HISTORY_OF_VHOST: Final = Query(_HISTORY.where(journal.c.vhost == _VHOST))


def slots(packed: ColumnElement[Any], name: str) -> TableValuedAlias:
    """The messages in the packed slots of a branch of standalone mode, as a table."""
    columns = (Column("ordinal", BigInteger), Column("queue", BigInteger), Column("position", BigInteger))
    return func.dtx.slots(packed).table_valued(*columns, name=name)


def slot_count(packed: ColumnElement[Any]) -> ColumnElement[int]:
    """The number of slots in *packed*."""
    return func.coalesce(func.octet_length(packed, type_=BigInteger) // _SLOT_OCTETS, 0)


def standalone_messages(
    branch_id: UUID | BindParameter[Any], *, sizes: bool = False, between: tuple[int, int] | None = None
) -> CompoundSelect[Any]:
    """The messages of a branch of standalone mode, as rows of the work columns: those it publishes come first.

    A published message has one row for each queue that it is routed to, with the queue's name.

    Args:
        branch_id: of the branch.
        sizes: no bodies; a last column has their sizes in bytes.
        between: only positions from the first of these numbers to the last; no others are read.
    """

    def rows(packed: ColumnElement[Any], kind: WorkKind, offset: ColumnElement[Any]) -> Select[Any]:
        found = slots(packed, str(kind))
        stored = (message.c.queue == found.c.queue) & (message.c.position == found.c.position)
        # a deleted queue has no name
        name = func.coalesce(queue.c.name, literal(b"")) if kind is WorkKind.CONSUME else queue.c.name
        content = func.coalesce(message.c.body, body.c.content)
        found_body = literal(b"") if sizes else content
        return (
            select(
                (found.c.ordinal + offset).label("position"), literal(str(kind)), message.c.exchange,
                message.c.routing_key, name, null(), message.c.properties, found_body, null(), null(),
                *([func.octet_length(content)] if sizes else []),
            )
            .select_from(
                branch.join(found, true())
                .join(message, stored)
                .outerjoin(queue, queue.c.id == message.c.queue)
                .outerjoin(body, body.c.id == message.c.shared)
            )
            .where(
                branch.c.id == branch_id,
                *([] if between is None else [(found.c.ordinal + offset).between(*between)]),
            )
        )  # fmt: skip

    before = slot_count(branch.c.published)
    return union_all(
        rows(branch.c.published, WorkKind.PUBLISH, literal(0)), rows(branch.c.consumed, WorkKind.CONSUME, before)
    ).order_by("position")


ARCHIVE_COLUMNS: Final = (
    archive.c.branch_id, archive.c.position, archive.c.vhost, archive.c.format_id, archive.c.gtrid, archive.c.bqual,
    archive.c.owner, archive.c.kind, archive.c.exchange, archive.c.routing_key, archive.c.queue, archive.c.fate,
    archive.c.at,
)  # fmt: skip
"""The columns of an archived message without its contents."""
ARCHIVED: Final = Query(
    select(*ARCHIVE_COLUMNS, archive.c.properties, archive.c.body)
    .where(archive.c.rm == _RM, *_is_xid(archive))
    .order_by(archive.c.at, archive.c.branch_id, archive.c.position)
)
KEPT: Final = Query(standalone_messages(_BRANCH_ID))
_ANY_BRANCH: Final = any_(bindparam("branch_ids", None, type_=ARRAY(Uuid)))
_UNENDED: Final = Query(select(branch.c.id).where(branch.c.rm == _RM, branch.c.id == _ANY_BRANCH))
COPIES_AT_ONCE: Final = 10_000
"""Rows of copies in one result: a few megabytes."""
_LAST_POSITION: Final = (1 << 31) - 1


def _copies(
    table: Table, keys: Sequence[str], more: Sequence[str], *conditions: ColumnElement[bool]
) -> tuple[Query, Query]:
    """Rows of *table* behind a row, in the order of the primary key: of all branches, and of some."""
    key = tuple_(*(table.c[name] for name in keys))
    after = tuple_(*(_given(name, table.c[name]) for name in keys))
    rows = (
        select(*(table.c[name] for name in (*keys, *more)))
        .where(table.c.rm == _RM, key > after, *conditions)
        .order_by(*(table.c[name] for name in keys))
        .limit(bindparam("most", None, type_=Integer))
    )
    some = rows.where(
        table.c.branch_id == _ANY_BRANCH,
        table.c.position.between(bindparam("first", None, type_=Integer), bindparam("last", None, type_=Integer)),
    )
    return Query(rows), Query(some)


_REPLAY_KEY: Final = {"branch_id": UUID(int=0), "position": -1}
_SETTLEMENT_KEY: Final = {**_REPLAY_KEY, "vhost": "", "queue": b""}
_DUPLICATE_KEY: Final = {**_SETTLEMENT_KEY, "attempt": 0}
"""The keys, with values before any row."""
_REPLAYS: Final = _copies(replay, list(_REPLAY_KEY), ("exchange", "routing_key", "digest"))
_SETTLEMENTS: Final = _copies(
    settlement,
    list(_SETTLEMENT_KEY),
    ("attempt", "digest"),
    or_(
        exists().where(replay.c.branch_id == settlement.c.branch_id, replay.c.position == settlement.c.position),
        exists().where(branch.c.id == settlement.c.branch_id),
        settlement.c.attempt == MOVED,
    ),
)
_SUPPRESSED: Final = _copies(duplicate, list(_DUPLICATE_KEY), ())
_DUPLICATES: Final = Query(
    select(
        duplicate.c.branch_id, duplicate.c.position, duplicate.c.vhost, duplicate.c.queue, duplicate.c.attempt,
        duplicate.c.exchange, duplicate.c.routing_key, duplicate.c.properties, duplicate.c.body,
    )
    .where(duplicate.c.rm == _RM, duplicate.c.branch_id == _ANY_BRANCH)
    .order_by(*(duplicate.c[name] for name in _DUPLICATE_KEY))
)  # fmt: skip
_EXCHANGES: Final = Query(
    select(exchange.c.vhost, exchange.c.name, exchange.c.type, exchange.c.auto_delete, exchange.c.internal,
           exchange.c.arguments)
    .where(exchange.c.rm == _RM)
    .order_by(exchange.c.vhost, exchange.c.name)
)  # fmt: skip
_QUEUES: Final = Query(
    select(queue.c.vhost, queue.c.id, queue.c.name, queue.c.auto_delete, queue.c.arguments, queue.c.delivered)
    .where(queue.c.rm == _RM)
    .order_by(queue.c.vhost, queue.c.name)
)
_BINDINGS: Final = Query(
    select(binding.c.vhost, binding.c.source, binding.c.destination_kind, binding.c.destination,
           binding.c.routing_key, binding.c.arguments)
    .where(binding.c.rm == _RM)
    .order_by(binding.c.vhost, binding.c.source, binding.c.destination_kind, binding.c.destination,
              binding.c.routing_key)
)  # fmt: skip
_OF_EACH: Final = """
SELECT q.id, s.*
FROM unnest(CAST(:queues AS bigint[])) WITH ORDINALITY AS q(id, ordinal)
CROSS JOIN LATERAL (SELECT {packed} FROM (
    SELECT {columns} FROM dtx.message m WHERE m.queue = q.id {condition} ORDER BY m.position) AS m
) AS s(positions{more})
WHERE s.positions IS NOT NULL
"""


def _of_each(packed: str, columns: str, *, more: str = "", condition: str = "") -> Query:
    values = ", ".join(f"string_agg({value}, CAST('' AS bytea))" for value in ("int8send(m.position)", *packed.split()))
    return Query(text(_OF_EACH.format(packed=values, columns=f"m.position{columns}", more=more, condition=condition)))


_POSITIONS: Final = _of_each("", "")
_SIZE: Final = (
    "coalesce(octet_length(m.body), (SELECT octet_length(b.content) FROM dtx.body b WHERE b.id = m.shared), 0)"
)
_DETAILS: Final = _of_each("int4send(m.flags) int4send(m.size)", f", m.flags, {_SIZE} AS size", more=", flags, sizes")
_TRANSIENT: Final = _of_each("", "", condition="AND m.flags & 1 = 0")
_EXPIRIES: Final = _of_each(
    "timestamptz_send(m.expires_at)", ", m.expires_at", more=", times", condition="AND m.expires_at IS NOT NULL"
)
_IN_SLOTS: Final = """
FROM unnest(CAST(:queues AS bigint[]), CAST(:positions AS bigint[])) AS u(queue, position)
CROSS JOIN LATERAL (
    SELECT * FROM dtx.message m WHERE m.queue = u.queue AND m.position = u.position OFFSET 0) AS m
"""
"""OFFSET 0: with statistics of an empty table, the plan would read all of it and compare each row with each slot."""
_MESSAGES: Final = Query(
    # PostgreSQL knows sizes without reading values stored out of line.
    text(f"""
SELECT m.queue, m.position, m.exchange, m.routing_key, m.flags, m.properties,
    coalesce(m.body, (SELECT b.content FROM dtx.body b WHERE b.id = m.shared)), m.expires_at, m.shared
FROM (
    SELECT m.*, sum(m.size) OVER (ORDER BY m.ordinal) - m.size AS before
    FROM (
        SELECT m.*, {_SIZE} AS size, u.ordinal
        FROM unnest(CAST(:queues AS bigint[]), CAST(:positions AS bigint[]))
            WITH ORDINALITY AS u(queue, position, ordinal)
        CROSS JOIN LATERAL (
            SELECT * FROM dtx.message m WHERE m.queue = u.queue AND m.position = u.position OFFSET 0) AS m
    ) AS m
) AS m
WHERE m.before < :octets ORDER BY m.ordinal
""")
)
_BODY: Final = StoredMessage._fields.index("body")
_EXIST: Final = Query(text("SELECT m.queue, m.position" + _IN_SLOTS))
_STRAYS: Final = Query(
    # one look-up for each queue, for any number of messages
    text("""
WITH RECURSIVE q AS (
    (SELECT m.queue, m.rm FROM dtx.message m ORDER BY m.queue, m.position LIMIT 1)
    UNION ALL
    SELECT n.queue, n.rm FROM q CROSS JOIN LATERAL (
        SELECT m.queue, m.rm FROM dtx.message m WHERE m.queue > q.queue ORDER BY m.queue, m.position LIMIT 1) AS n
)
SELECT q.queue FROM q WHERE q.rm = :rm
""")
)


def branch_record(row: Sequence[Any], units: tuple[Unit, ...]) -> BranchRecord:
    """A row of the branch columns as a value."""
    (id_, vhost, format_id, gtrid, bqual, state, owner, version, timeout, started_at, prepared_at, decided_at,
     one_phase, publishes, consumes, bytes_, stuck, outcome, published, consumed, member) = row  # fmt: skip
    return BranchRecord(
        id=id_,
        vhost=vhost,
        xid=Xid(format_id, gtrid, bqual),
        state=_STATES[state],
        owner=owner,
        version=version,
        timeout=timeout,
        started_at=started_at,
        prepared_at=prepared_at,
        decided_at=decided_at,
        one_phase=one_phase,
        publishes=publishes,
        consumes=consumes,
        bytes=bytes_,
        stuck=stuck,
        outcome=_OUTCOMES[outcome],
        units=units,
        published=unpack_slots(published),
        consumed=unpack_slots(consumed),
        member=member,
    )


def unit_record(row: Sequence[Any]) -> Unit:
    """A row of the unit columns as a value."""
    _, number, lock, nonce, incarnation, receipt, state, attempt = row
    return Unit(
        number=number,
        lock=lock,
        nonce=nonce,
        incarnation=incarnation,
        receipt=receipt,
        state=UnitState(state),
        attempt=attempt,
    )


def work_record(row: Sequence[Any]) -> WorkRow:
    """A row of the work columns as a value."""
    position, kind, exchange, routing_key, queue, flags, properties, body, number, fate = row
    return WorkRow(
        position=position,
        kind=WorkKind(kind),
        exchange=exchange,
        routing_key=routing_key,
        queue=queue,
        flags=flags,
        properties=properties,
        body=body,
        unit=number,
        fate=_FATES[fate],
    )


def journal_entry(row: Sequence[Any]) -> JournalEntry:
    """A row of the journal columns as a value."""
    values = dict(zip(_JOURNAL_NAMES, row, strict=True))
    values |= {"event": JournalEvent(values["event"]), "outcome": _OUTCOMES[values["outcome"]]}
    return JournalEntry(xid=Xid(values.pop("format_id"), values.pop("gtrid"), values.pop("bqual")), **values)


def archived_message(row: Sequence[Any], properties: bytes = b"", body: bytes = b"") -> ArchivedMessage:
    """A row of the archive's columns as a value, with these contents."""
    branch_id, position, vhost, format_id, gtrid, bqual, owner, kind, exchange, routing_key, queue, fate, at = row
    return ArchivedMessage(
        branch_id=branch_id,
        position=position,
        vhost=vhost,
        xid=Xid(format_id, bytes(gtrid), bytes(bqual)),
        owner=owner,
        kind=WorkKind(kind),
        exchange=bytes(exchange),
        routing_key=bytes(routing_key),
        queue=None if queue is None else bytes(queue),
        properties=properties,
        body=body,
        fate=Fate(fate),
        at=at,
    )


class Fetch(Protocol):
    """Runs queries."""

    async def __call__(self, query: Query, **given: object) -> list[tuple[Any, ...]]:
        """All rows of *query*.

        Raises:
            LogUnavailable: the database is away.
        """


class LogQueries(ABC):
    """The queries of the log; each raises LogUnavailable while the database is away."""

    @property
    @abstractmethod
    def fetch(self) -> Fetch:
        """Runs queries.

        Raises:
            LogUnavailable: the log is not open.
        """

    async def load(self, member: UUID | None = None) -> AsyncIterator[BranchRecord]:
        """Every branch, or those of *member*, read page by page, so that memory and transactions stay small."""
        after = UUID(int=0)
        query, of_it = (LOAD, {}) if member is None else (LOAD_MEMBER, {"member": member})
        while True:
            rows = await self.fetch(query, after=after, **of_it)
            if not rows:
                return
            last = rows[-1][0]
            units: defaultdict[UUID, tuple[Unit, ...]] = defaultdict(tuple)
            for row in await self.fetch(LOAD_UNITS, after=after, last=last):
                units[row[0]] += (unit_record(row),)
            for row in rows:
                yield branch_record(row, units.get(row[0], ()))
            after = last
            if len(rows) < PAGE:
                return

    async def load_prepared(self, vhost: str, mine: UUID | None) -> AsyncIterator[BranchRecord]:
        """The branches of *vhost* that wait for their transaction managers, without units and those of *mine*."""
        after = UUID(int=0)
        while rows := await self.fetch(LOAD_PREPARED, after=after, vhost=vhost, mine=mine):
            for row in rows:
                yield branch_record(row, ())
            after = rows[-1][0]
            if len(rows) < PAGE:
                return

    async def read_work(self, branch_id: UUID) -> list[WorkRow]:
        """The work of a branch, bodies included."""
        return [work_record(row) for row in await self.fetch(WORK, branch_id=branch_id)]

    async def read_messages_of(self, branch_id: UUID) -> list[WorkRow]:
        """As :meth:`read_work`, and also messages that are stored in standalone mode."""
        rows = [*await self.fetch(WORK, branch_id=branch_id), *await self.fetch(KEPT, branch_id=branch_id)]
        return [work_record(row) for row in rows]

    async def read_archive(self, xid: Xid) -> list[ArchivedMessage]:
        """Undelivered messages of forgotten branches with *xid*."""
        rows = await self.fetch(ARCHIVED, format_id=xid.format_id, gtrid=xid.gtrid, bqual=xid.bqual)
        return [archived_message(row[:-2], row[-2], row[-1]) for row in rows]

    async def load_copies(
        self, branch_ids: Collection[UUID] | None = None, position: int | None = None
    ) -> LoggedCopies:
        """See :class:`dtx.log.api.TransactionLog`."""

        def rows(queries: tuple[Query, Query], key: Mapping[str, Any]) -> AsyncIterator[tuple[Any, ...]]:
            if branch_ids is None:
                return self._copies(queries[0], key)
            first, last = (0, _LAST_POSITION) if position is None else (position, position)
            return self._copies(queries[1], key, branch_ids=list(branch_ids), first=first, last=last)

        replays = [
            (branch_id, Replay(position=position, exchange=exchange, routing_key=key, digest=digest))
            async for branch_id, position, exchange, key, digest in rows(_REPLAYS, _REPLAY_KEY)
        ]
        settlements = [_settlement(row) async for row in rows(_SETTLEMENTS, _SETTLEMENT_KEY)]
        suppressed = [_settlement(row) async for row in rows(_SUPPRESSED, _DUPLICATE_KEY)]
        return LoggedCopies(replays=tuple(replays), settlements=tuple(settlements), suppressed=tuple(suppressed))

    async def _copies(self, query: Query, key: Mapping[str, Any], **given: object) -> AsyncIterator[tuple[Any, ...]]:
        after = dict(key)
        while True:
            rows = await self.fetch(query, **after, **given, most=COPIES_AT_ONCE)
            for row in rows:
                yield row
            if len(rows) < COPIES_AT_ONCE:
                return
            after = dict(zip(key, rows[-1], strict=False))

    async def unended(self, branch_ids: Collection[UUID]) -> set[UUID]:
        """See :class:`dtx.log.api.TransactionLog`."""
        found = await self.fetch(_UNENDED, branch_ids=list(branch_ids)) if branch_ids else ()
        return {branch_id for (branch_id,) in found}

    async def read_duplicates(self, branch_ids: Collection[UUID]) -> list[Duplicate]:
        """See :class:`dtx.log.api.TransactionLog`."""
        rows = await self.fetch(_DUPLICATES, branch_ids=list(branch_ids))
        return [
            Duplicate(
                branch_id=branch_id,
                position=position,
                vhost=vhost,
                queue=queue,
                attempt=attempt,
                exchange=exchange,
                routing_key=key,
                properties=properties,
                body=body,
            )
            for branch_id, position, vhost, queue, attempt, exchange, key, properties, body in rows
        ]

    async def lookup(self, vhost: str, xid: Xid, branch_id: UUID | None = None) -> Lookup:
        """The branch with *xid*; else its last ending, or that of *branch_id*."""
        key = {"vhost": vhost, "format_id": xid.format_id, "gtrid": xid.gtrid, "bqual": xid.bqual}
        for row in await self.fetch(FIND, **key):
            units = await self.fetch(UNITS, branch_id=row[0])
            return Lookup(branch=branch_record(row, tuple(map(unit_record, units))))
        query, of_it = (ENDING, {}) if branch_id is None else (ENDING_OF_BRANCH, {"branch_id": branch_id})
        for event, at, ended, owner, outcome in await self.fetch(query, **key, **of_it):
            return Lookup(
                ending=JournalEnding(
                    event=JournalEvent(event), at=at, branch_id=ended, owner=owner, outcome=_OUTCOMES[outcome]
                )
            )
        return Lookup()

    async def which_logged(self, keys: Sequence[tuple[str, Xid]]) -> set[tuple[str, Xid]]:
        """See :class:`dtx.log.api.TransactionLog`."""
        rows = await self.fetch(
            _LOGGED,
            vhosts=[vhost for vhost, _ in keys],
            format_ids=[xid.format_id for _, xid in keys],
            gtrids=[xid.gtrid for _, xid in keys],
            bquals=[xid.bqual for _, xid in keys],
        )
        return {keys[number - 1] for (number,) in rows}

    async def history(self, vhost: str | None, xid: Xid) -> list[JournalEntry]:
        """The journal of *xid*, oldest first; all vhosts where *vhost* is ``None``."""
        key = {"vhost": vhost, "format_id": xid.format_id, "gtrid": xid.gtrid, "bqual": xid.bqual}
        rows = await self.fetch(HISTORY if vhost is None else HISTORY_OF_VHOST, **key)
        return [journal_entry(row) for row in rows]

    async def load_definitions(self) -> Definitions:
        """See :class:`dtx.log.api.MessageLog`."""
        fetch = self.fetch
        return Definitions(
            exchanges=tuple(
                ExchangeRow(
                    vhost=vhost, name=name, type=type_, auto_delete=auto, internal=internal, arguments=arguments
                )
                for vhost, name, type_, auto, internal, arguments in await fetch(_EXCHANGES)
            ),
            queues=tuple(
                QueueRow(vhost=vhost, id=id_, name=name, auto_delete=auto, arguments=arguments, delivered=delivered)
                for vhost, id_, name, auto, arguments, delivered in await fetch(_QUEUES)
            ),
            bindings=tuple(
                BindingRow(vhost, source, DestinationKind(kind), destination, key, arguments)
                for vhost, source, kind, destination, key, arguments in await fetch(_BINDINGS)
            ),
        )

    async def load_queues(
        self, queues: Sequence[int], *, detailed: Collection[int] = ()
    ) -> AsyncIterator[QueueContents]:
        """See :class:`dtx.log.api.MessageLog`."""
        start, size = 0, QUEUES_AT_ONCE
        while start < len(queues):
            count = 0
            for contents in await self._contents(queues[start : start + size], detailed):
                count += len(contents.positions)
                yield contents
            start += size
            size = max(1, size // 2) if count > POSITIONS_AT_ONCE else min(2 * size, MAX_QUEUES_AT_ONCE)

    async def _contents(self, queues: Sequence[int], detailed: Collection[int]) -> list[QueueContents]:
        fetch = self.fetch
        plain = [id_ for id_ in queues if id_ not in detailed]
        packed = {id_: packed for id_, *packed in await fetch(_POSITIONS, queues=plain)} if plain else {}
        if len(plain) < len(queues):
            wanted = [id_ for id_ in queues if id_ in detailed]
            packed |= {id_: packed for id_, *packed in await fetch(_DETAILS, queues=wanted)}
        full = list(packed)
        transient: dict[int, bytes] = dict(await fetch(_TRANSIENT, queues=full)) if full else {}
        expiries = {id_: packed for id_, *packed in await fetch(_EXPIRIES, queues=full)} if full else {}
        return [
            QueueContents(
                queue=id_,
                positions=_unpacked("q", packed[id_][0]) if id_ in packed else array("q"),
                transient=_unpacked("q", transient.get(id_)),
                expiries=_expiries(*expiries[id_]) if id_ in expiries else (),
                flags=_unpacked("i", packed[id_][1] if id_ in packed else None) if id_ in detailed else None,
                sizes=_unpacked("i", packed[id_][2] if id_ in packed else None) if id_ in detailed else None,
            )
            for id_ in queues
        ]

    async def read_messages(self, slots: Sequence[Slot], octets: int | None = None) -> dict[Slot, StoredMessage]:
        """See :class:`dtx.log.api.MessageLog`."""
        fetch = self.fetch
        found: dict[Slot, StoredMessage] = {}
        left = _NO_LIMIT if octets is None else octets
        for start in range(0, len(slots), MESSAGES_AT_ONCE):
            queues, positions = zip(*slots[start : start + MESSAGES_AT_ONCE], strict=True)
            rows = await fetch(_MESSAGES, queues=list(queues), positions=list(positions), octets=left)
            for row in rows:
                message = StoredMessage._make(row)
                if row[_BODY] is None:
                    raise LogError(f"body {message.shared} is not in the database, but a message uses it")
                found[message.slot] = message
                left -= len(message.body)
            if left <= 0:
                break
        return found

    async def which_exist(self, slots: Sequence[Slot]) -> set[Slot]:
        """See :class:`dtx.log.api.MessageLog`."""
        fetch = self.fetch
        found: set[Slot] = set()
        for start in range(0, len(slots), SLOTS_AT_ONCE):
            queues, positions = zip(*slots[start : start + SLOTS_AT_ONCE], strict=True)
            rows = await fetch(_EXIST, queues=list(queues), positions=list(positions))
            found.update(map(Slot._make, rows))
        return found

    async def stray_queues(self, known: Collection[int]) -> list[int]:
        """See :class:`dtx.log.api.MessageLog`."""
        there = set(known)
        return [queue for (queue,) in await self.fetch(_STRAYS) if queue not in there]


def _settlement(row: Sequence[Any]) -> SettledCopy:
    branch_id, position, vhost, queue, attempt, *digest = row
    return SettledCopy(
        branch_id=branch_id,
        position=position,
        vhost=vhost,
        queue=queue,
        attempt=attempt,
        digest=digest[0] if digest else b"",
    )


def _unpacked(typecode: str, data: bytes | None) -> "array[int]":
    """Big endian integers from PostgreSQL, as an array of this machine's integers."""
    numbers: array[int] = array(typecode)
    numbers.frombytes(data or b"")
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers


def _expiries(positions: bytes, times: bytes) -> list[tuple[int, float]]:
    return list(zip(_unpacked("q", positions), map(seconds_from, _unpacked("q", times)), strict=True))


class Readers:
    """A few sessions that read. Each is made when needed, and replaced when it was lost.

    Args:
        dsn: the database.
        rm: name of the resource manager.
        instance: of this process, for ``pg_stat_activity``.
        timeout: seconds for one statement.
    """

    def __init__(self, dsn: Dsn, rm: str, instance: UUID, *, timeout: float) -> None:
        self._dsn = dsn
        self._rm = rm
        self._timeout = timeout
        # Every query here has an index in its order; a planner without statistics would scan and sort for each page.
        planner = dict.fromkeys(_PLANNER_OFF, "off")
        self._settings = session_settings("reader", instance, statement_timeout=timeout) | planner
        self._spare: list[psycopg.AsyncConnection] = []
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)

    async def close(self) -> None:
        """Disconnect."""
        while self._spare:
            await self._spare.pop().close()

    async def fetch(self, query: Query, **given: object) -> list[tuple[Any, ...]]:
        """All rows of *query*. An idle connection that was lost is replaced once.

        Raises:
            LogUnavailable: the database is away.
        """
        async with self._slots:
            for attempt in (1, 2):
                connection: psycopg.AsyncConnection | None = None
                try:
                    # PostgreSQL ends slow statements; this limit ends a session that does not answer.
                    async with asyncio.timeout(self._timeout + _GRACE):
                        connection = self._spare.pop() if self._spare else await self._connect()
                        cursor = connection.cursor(binary=True)
                        await cursor.execute(query.sql, query.parameters({"rm": self._rm, **given}), prepare=True)
                        rows = await cursor.fetchall()
                except BaseException as error:
                    if connection is not None:
                        await connection.close()
                    if not isinstance(error, psycopg.Error | OSError):
                        raise
                    if attempt == 2 or not isinstance(error, psycopg.OperationalError):
                        raise LogUnavailable(f"cannot read the log: {self._dsn.explain(error)}") from None
                    while self._spare:  # all were lost together
                        await self._spare.pop().close()
                else:
                    self._spare.append(connection)
                    return rows
        raise AssertionError("unreachable")

    async def _connect(self) -> psycopg.AsyncConnection:
        connection = await connect(self._dsn, self._settings, timeout=self._timeout)
        as_floats(connection)
        return connection
