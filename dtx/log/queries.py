"""Reading the log: the start's load, look-ups, work, history. Statements are SQLAlchemy's, compiled once."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import psycopg
from psycopg.abc import AdaptContext, Buffer
from psycopg.adapt import Loader
from psycopg.pq import Format
from sqlalchemy import (
    BigInteger,
    BindParameter,
    Column,
    ColumnElement,
    CompoundSelect,
    Select,
    Table,
    TableValuedAlias,
    TextClause,
    bindparam,
    func,
    literal,
    null,
    select,
    true,
    union_all,
)
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from dtx.log import binary
from dtx.log.api import LogUnavailable
from dtx.log.connecting import Dsn, connect
from dtx.log.records import (
    ENDINGS,
    Archived,
    BranchRecord,
    Ending,
    Fate,
    JournalEntry,
    JournalEvent,
    LogState,
    Lookup,
    Unit,
    UnitState,
    Work,
    WorkKind,
)
from dtx.log.session import session_settings
from dtx.log.tables import archive, body, branch, journal, message, queue, unit, work
from dtx.xa.codes import Heuristic
from dtx.xa.xid import Xid

PAGE: Final = 2_000
"""Branches in one batch of the load: about a megabyte."""
MAX_CONNECTIONS: Final = 3
"""Reading sessions: look-ups do not wait behind one long read of bodies, and PostgreSQL has few connections to give."""

_PLANNER_OFF: Final = (
    "enable_seqscan", "enable_bitmapscan", "enable_sort", "enable_hashjoin", "enable_mergejoin", "jit",
)  # fmt: skip

_GRACE: Final = 5.0
"""Seconds beyond a statement's own time-out."""

_SLOT_OCTETS: Final = 16
_DIALECT: Final = PGDialect_psycopg()  # type: ignore[no-untyped-call]  # SQLAlchemy leaves dialects untyped
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
    branch.c.published, branch.c.consumed,
)  # fmt: skip
UNSHOWN: Final = frozenset({branch.c.published.name, branch.c.consumed.name})
"""Columns that people get as null: slots of messages, of which a branch may have a hundred thousand."""
BRANCH_FACTS: Final = tuple(
    null().label(column.name) if column.name in UNSHOWN else column for column in BRANCH_COLUMNS
)
"""The columns of a branch for people."""
JOURNAL_COLUMNS: Final = (
    journal.c.event, journal.c.branch_id, journal.c.vhost, journal.c.format_id, journal.c.gtrid, journal.c.bqual,
    journal.c.owner, journal.c.at, journal.c.actor, journal.c.reason, journal.c.outcome, journal.c.one_phase,
    journal.c.publishes, journal.c.consumes, journal.c.bytes, journal.c.started_at, journal.c.prepared_at,
    journal.c.decided_at,
)  # fmt: skip
UNIT_COLUMNS: Final = (
    unit.c.branch_id, unit.c.number, unit.c.lock, unit.c.nonce, unit.c.incarnation, unit.c.receipt, unit.c.state,
)  # fmt: skip
WORK_COLUMNS: Final = (
    work.c.position, work.c.kind, work.c.exchange, work.c.routing_key, work.c.queue, work.c.flags, work.c.properties,
    work.c.body, work.c.unit, work.c.fate,
)  # fmt: skip

SIZED_WORK_COLUMNS: Final = (
    *(literal(b"").label("body") if column is work.c.body else column for column in WORK_COLUMNS),
    func.octet_length(work.c.body),
)
"""The same without bodies; their octets come last."""


def _is_xid(table: Table) -> tuple[ColumnElement[bool], ...]:
    return tuple(table.c[name] == _given(name, table.c[name]) for name in ("format_id", "gtrid", "bqual"))


_RM: Final = _given("rm", branch.c.rm)
_VHOST: Final = _given("vhost", branch.c.vhost)
_BRANCH_ID: Final = _given("branch_id", branch.c.id)
_AFTER: Final = _given("after", branch.c.id)

LOAD: Final = Query(
    select(*BRANCH_COLUMNS).where(branch.c.rm == _RM, branch.c.id > _AFTER).order_by(branch.c.id).limit(PAGE)
)
LOAD_UNITS: Final = Query(
    select(*UNIT_COLUMNS)
    .where(unit.c.rm == _RM, unit.c.branch_id > _AFTER, unit.c.branch_id <= _given("last", branch.c.id))
    .order_by(unit.c.branch_id, unit.c.number)
)
UNITS: Final = Query(select(*UNIT_COLUMNS).where(unit.c.branch_id == _BRANCH_ID).order_by(unit.c.number))
FIND: Final = Query(select(*BRANCH_COLUMNS).where(branch.c.rm == _RM, branch.c.vhost == _VHOST, *_is_xid(branch)))
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
    """The messages that a branch of standalone mode names: they are where all messages are."""
    columns = (Column("ordinal", BigInteger), Column("queue", BigInteger), Column("position", BigInteger))
    return func.dtx.slots(packed).table_valued(*columns, name=name)


def slot_count(packed: ColumnElement[Any]) -> ColumnElement[int]:
    """How many messages these are."""
    return func.coalesce(func.octet_length(packed, type_=BigInteger) // _SLOT_OCTETS, 0)


def kept(
    branch_id: UUID | BindParameter[Any], *, sizes: bool = False, between: tuple[int, int] | None = None
) -> CompoundSelect[Any]:
    """The messages of a branch of standalone mode, as rows of the work columns: those it publishes come first.

    Those are kept once for each queue that they go to, which is named then.

    Args:
        branch_id: of the branch.
        sizes: no bodies; their octets are counted in a further column.
        between: only positions from the first of these numbers to the last; others are not looked at.
    """

    def rows(packed: ColumnElement[Any], kind: WorkKind, offset: ColumnElement[Any]) -> Select[Any]:
        found = slots(packed, str(kind))
        stored = (message.c.queue == found.c.queue) & (message.c.position == found.c.position)
        # a queue that is gone has no name any more
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


ARCHIVED: Final = Query(
    select(
        archive.c.branch_id, archive.c.position, archive.c.vhost, archive.c.owner, archive.c.kind, archive.c.exchange,
        archive.c.routing_key, archive.c.queue, archive.c.properties, archive.c.body, archive.c.fate, archive.c.at,
    )
    .where(archive.c.rm == _RM, *_is_xid(archive))
    .order_by(archive.c.at, archive.c.branch_id, archive.c.position)
)  # fmt: skip
KEPT: Final = Query(kept(_BRANCH_ID))


class _TimeLoader(Loader):
    """``timestamptz`` to seconds since 1970, without a datetime in between."""

    format = Format.BINARY

    def load(self, data: Buffer) -> float:
        return binary.seconds_of(bytes(data))


class _TextTimeLoader(Loader):
    """The same for sessions that read text; they are set to UTC."""

    format = Format.TEXT

    def load(self, data: Buffer) -> float:
        return datetime.fromisoformat(bytes(data).decode()).timestamp()


def as_floats(connection: AdaptContext) -> None:
    """Let *connection* read times as seconds since 1970."""
    adapters = connection.adapters
    adapters.register_loader("timestamptz", _TimeLoader)
    adapters.register_loader("timestamptz", _TextTimeLoader)


def branch_record(row: Sequence[Any], units: tuple[Unit, ...]) -> BranchRecord:
    """A row of the branch columns as a value."""
    (id_, vhost, format_id, gtrid, bqual, state, owner, version, timeout, started_at, prepared_at, decided_at,
     one_phase, publishes, consumes, bytes_, stuck, outcome, published, consumed) = row  # fmt: skip
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
        published=binary.unpack_slots(published),
        consumed=binary.unpack_slots(consumed),
    )


def unit_record(row: Sequence[Any]) -> Unit:
    """A row of the unit columns as a value."""
    _, number, lock, nonce, incarnation, receipt, state = row
    return Unit(number=number, lock=lock, nonce=nonce, incarnation=incarnation, receipt=receipt, state=UnitState(state))


def work_record(row: Sequence[Any]) -> Work:
    """A row of the work columns as a value."""
    position, kind, exchange, routing_key, queue, flags, properties, body, number, fate = row
    return Work(
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
    (event, branch_id, vhost, format_id, gtrid, bqual, owner, at, actor, reason, outcome, one_phase, publishes,
     consumes, bytes_, started_at, prepared_at, decided_at) = row  # fmt: skip
    return JournalEntry(
        event=JournalEvent(event),
        branch_id=branch_id,
        vhost=vhost,
        xid=Xid(format_id, gtrid, bqual),
        owner=owner,
        at=at,
        actor=actor,
        reason=reason,
        outcome=_OUTCOMES[outcome],
        one_phase=one_phase,
        publishes=publishes,
        consumes=consumes,
        bytes=bytes_,
        started_at=started_at,
        prepared_at=prepared_at,
        decided_at=decided_at,
    )


class Readers:
    """A few sessions that read; each is made when it is needed and made again when it died.

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

    async def load(self) -> AsyncIterator[BranchRecord]:
        """Every branch, a page at a time, so that neither memory nor a transaction grows with their number."""
        after = UUID(int=0)
        while True:
            rows = await self.fetch(LOAD, after=after)
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

    async def read_work(self, branch_id: UUID) -> list[Work]:
        """The work of a branch, bodies included."""
        return [work_record(row) for row in await self.fetch(WORK, branch_id=branch_id)]

    async def read_messages_of(self, branch_id: UUID) -> list[Work]:
        """As :meth:`read_work`, wherever the messages are."""
        rows = [*await self.fetch(WORK, branch_id=branch_id), *await self.fetch(KEPT, branch_id=branch_id)]
        return [work_record(row) for row in rows]

    async def read_archive(self, xid: Xid) -> list[Archived]:
        """Messages that nobody got, of branches with *xid* that were forgotten."""
        key = {"format_id": xid.format_id, "gtrid": xid.gtrid, "bqual": xid.bqual}
        return [
            Archived(
                branch_id=branch_id,
                position=position,
                vhost=vhost,
                xid=xid,
                owner=owner,
                kind=WorkKind(kind),
                exchange=exchange,
                routing_key=routing_key,
                queue=queue_name,
                properties=properties,
                body=body,
                fate=Fate(fate),
                at=at,
            )
            for (
                branch_id, position, vhost, owner, kind, exchange, routing_key, queue_name, properties, body, fate, at,
            ) in await self.fetch(ARCHIVED, **key)
        ]  # fmt: skip

    async def lookup(self, vhost: str, xid: Xid, branch_id: UUID | None = None) -> Lookup:
        """The branch with *xid*, or else its last ending, or that of *branch_id*."""
        key = {"vhost": vhost, "format_id": xid.format_id, "gtrid": xid.gtrid, "bqual": xid.bqual}
        for row in await self.fetch(FIND, **key):
            units = await self.fetch(UNITS, branch_id=row[0])
            return Lookup(branch=branch_record(row, tuple(map(unit_record, units))))
        query, of_it = (ENDING, {}) if branch_id is None else (ENDING_OF_BRANCH, {"branch_id": branch_id})
        for event, at, ended, owner, outcome in await self.fetch(query, **key, **of_it):
            return Lookup(
                ending=Ending(
                    event=JournalEvent(event), at=at, branch_id=ended, owner=owner, outcome=_OUTCOMES[outcome]
                )
            )
        return Lookup()

    async def history(self, vhost: str | None, xid: Xid) -> list[JournalEntry]:
        """The journal of *xid*, oldest first."""
        key = {"vhost": vhost, "format_id": xid.format_id, "gtrid": xid.gtrid, "bqual": xid.bqual}
        rows = await self.fetch(HISTORY if vhost is None else HISTORY_OF_VHOST, **key)
        return [journal_entry(row) for row in rows]

    async def fetch(self, query: Query, **given: object) -> list[tuple[Any, ...]]:
        """All rows. A connection that died while it was spare is replaced once.

        Raises:
            LogUnavailable: the database is away.
        """
        async with self._slots:
            for attempt in (1, 2):
                connection: psycopg.AsyncConnection | None = None
                try:
                    # PostgreSQL ends what takes too long; here, one that has stopped to answer is given up.
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
                    while self._spare:  # they died together
                        await self._spare.pop().close()
                else:
                    self._spare.append(connection)
                    return rows
        raise AssertionError("unreachable")

    async def _connect(self) -> psycopg.AsyncConnection:
        connection = await connect(self._dsn, self._settings, timeout=self._timeout)
        as_floats(connection)
        return connection
