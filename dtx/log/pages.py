"""Pages of the log's contents: branches in doubt, journal, archive, verdicts of the pipeline.

Pages are selected by the key that orders them. So each page costs the same, and rows added or removed meanwhile cause
neither repetitions nor gaps. A :class:`Cursor` is the end of a page.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final, NamedTuple
from uuid import UUID

from sqlalchemy import (
    ColumnElement,
    FromClause,
    Select,
    Table,
    and_,
    any_,
    case,
    distinct,
    exists,
    func,
    literal,
    null,
    or_,
    select,
    true,
    tuple_,
    union_all,
)

from dtx.log.changes import mark
from dtx.log.queries import (
    ARCHIVE_COLUMNS,
    BRANCH_FACTS,
    JOURNAL_COLUMNS,
    UNSHOWN,
    archived_message,
    branch_record,
    journal_entry,
    slots,
)
from dtx.log.reader import LogReader
from dtx.log.records import (
    ENDINGS,
    ArchivedMessage,
    BranchRecord,
    Duplicate,
    Fate,
    JournalEntry,
    JournalEvent,
    LogState,
    WorkKind,
)
from dtx.log.tables import archive, branch, duplicate, journal, message, queue, reconciliation, replay, verdict, work
from dtx.xa.xid import Xid

MOST_COUNTED: Final = 10_000
"""Rows that are counted for the total of a list: more would cost seconds, and a person reads only the first pages."""
OUTCOMES: Final = tuple(sorted(ENDINGS))
"""Events of the journal that end a branch: together they form the outcome memory."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_OPEN: Final = or_(work.c.fate.is_(None), work.c.fate == str(Fate.UNSURE))
_TO_QUEUE: Final = case((and_(work.c.kind == str(WorkKind.PUBLISH), work.c.exchange == b""), work.c.routing_key))
"""The queue to which a broker's default exchange routes a message: "the queue name and routing key are identical"."""


class _Part(NamedTuple):
    """A value within a cursor: the pattern of its text, its maximum, and the functions that read and write it."""

    pattern: str
    read: Callable[[str], Any]
    write: Callable[[Any], str] = str
    most: int | None = None


def _moment(micros: int) -> datetime:
    return _EPOCH + timedelta(microseconds=micros)


def _micros(at: datetime) -> int:
    return (at - _EPOCH) // timedelta(microseconds=1)


_NUMBER: Final = _Part("[0-9]{1,19}", int, most=(1 << 63) - 1)
_POSITION: Final = _Part("[0-9]{1,10}", int, most=(1 << 31) - 1)
_TEXT: Final = _Part(r"[^\0]*", str)
_ID: Final = _Part("[0-9a-fA-F-]{32,36}", UUID)
_HEX_ID: Final = _Part("[0-9a-fA-F]{32}", UUID, lambda value: str(value.hex))
_TIME: Final = _Part("[0-9]{1,18}", int, str, (1 << 57) - 1)  # microseconds since 1970, until the year 6500
_OCTETS: Final = _Part("(?:[0-9a-fA-F]{2}){1,200}", bytes.fromhex, bytes.hex)
_FORMAT: Final = _Part(
    "[0-9]{0,10}", lambda text: int(text) if text else None, lambda value: "" if value is None else str(value)
)


@dataclass(frozen=True, slots=True)
class CursorForm:
    """The text form of the cursors of one kind of page.

    Args:
        parts: the values of a cursor.
        between: the separator of the values.
        pages: the kind of page, for error texts.
    """

    parts: tuple[_Part, ...]
    between: str = "-"
    pages: str = ""

    def parse(self, text: str) -> "Cursor":
        """Read a cursor.

        Raises:
            ValueError: *text* is not a cursor of this form.
        """
        pattern = re.escape(self.between).join(f"({part.pattern})" for part in self.parts)
        try:
            found = re.fullmatch(pattern, text, re.DOTALL)
            if found is not None:
                values = [part.read(word) for part, word in zip(self.parts, found.groups(), strict=True)]
                if all(part.most is None or value <= part.most for part, value in zip(self.parts, values, strict=True)):
                    return Cursor(self, tuple(values))
        except ValueError:
            pass  # not a UUID
        raise ValueError(f"{text[:80]!r} is no cursor{self.pages}")


@dataclass(frozen=True, slots=True)
class Cursor:
    """The end of a page: the next page begins after it.

    Args:
        form: of this kind of page.
        values: the key of the last row.
    """

    form: CursorForm
    values: tuple[Any, ...]

    def __str__(self) -> str:
        """The text that the form can parse."""
        return self.form.between.join(
            part.write(value) for part, value in zip(self.form.parts, self.values, strict=True)
        )


class Sort(StrEnum):
    """The possible orders of branches."""

    STARTED = "started"
    BYTES = "bytes"
    MESSAGES = "messages"
    OWNER = "owner"
    STATE = "state"


_SORT_KEYS: Final[dict[Sort, Callable[[Any], Any]]] = {
    Sort.BYTES: lambda of: of.bytes,
    Sort.MESSAGES: lambda of: of.publishes + of.consumes,
    Sort.OWNER: lambda of: of.owner,
    Sort.STATE: lambda of: of.state,
}
"""The sort key of a record, or the expression for a table's columns."""
BRANCH_CURSORS: Final = {
    by: CursorForm(
        (_ID,) if by is Sort.STARTED else (_ID, _NUMBER if by in {Sort.BYTES, Sort.MESSAGES} else _TEXT),
        ".",
        f" of pages by {by}",
    )
    for by in Sort
}
JOURNAL_CURSORS: Final = CursorForm((_TIME, _HEX_ID, _POSITION))
"""For pages of the archive and of the journal (position 0): microseconds since 1970, id, position."""
VERDICT_CURSORS: Final = CursorForm((_TIME, _OCTETS, _FORMAT))


def branch_cursor(found: BranchRecord, by: Sort) -> Cursor:
    """The cursor after a branch."""
    key = () if by is Sort.STARTED else (_SORT_KEYS[by](found),)
    return Cursor(BRANCH_CURSORS[by], (found.id, *key))


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchFilter:
    """A selection of branches; ``None`` does not restrict it.

    Args:
        rm, vhost, owner, format_id, xid: exactly these.
        states: any of these.
        ids: any of these branches.
        gtrid: the bytes between wildcards, see :func:`gtrid_pattern`.
        queue: branches that consumed from it, or publish to it (see :attr:`InDoubt.destinations`).
        exchange: branches that publish to it; empty is the default exchange.
        older_than: minimum of seconds since the branch was started.
        stuck: whether phase two is stuck.
    """

    rm: str | None = None
    vhost: str | None = None
    owner: str | None = None
    format_id: int | None = None
    xid: Xid | None = None
    states: tuple[LogState, ...] = ()
    ids: tuple[UUID, ...] = ()
    gtrid: tuple[bytes, ...] | None = None
    queue: bytes | None = None
    exchange: bytes | None = None
    older_than: float | None = None
    stuck: bool | None = None


def gtrid_pattern(text: str) -> tuple[bytes, ...]:
    """The bytes between the wildcards of a pattern: ``order-*``, or ``hex:6f72*`` for bytes that are no text.

    Raises:
        ValueError: the rest after ``hex:`` is not hexadecimal.
    """
    if text.startswith("hex:"):
        return tuple(bytes.fromhex(piece) for piece in text.removeprefix("hex:").split("*"))
    return tuple(piece.encode() for piece in text.split("*"))


@dataclass(frozen=True, slots=True, kw_only=True)
class InDoubt:
    """A branch that has voted and has not ended.

    Args:
        rm: its resource manager.
        branch: without units.
        age: seconds since it was started, by the database's clock.
        queues: the queues that it consumed from.
        destinations: the queues that it publishes to, as far as the log knows. In standalone mode these are all of
            them; with a broker, those reached by the default exchange.
        exchanges: the exchanges that it publishes to; empty is the default exchange.
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


_EVERY: Final = BranchFilter()


def in_doubt(log: LogReader, wanted: BranchFilter = _EVERY, *, limit: int | None = None) -> Iterator[InDoubt]:
    """Branches in doubt, oldest first, as a stream.

    Args:
        log: the reader.
        wanted: the selection.
        limit: maximum number; ``None`` for all.
    """
    found = _listed(branch).where(*_conditions(wanted)).order_by(branch.c.started_at, branch.c.id).limit(limit)
    for row in log.stream(found):
        yield _in_doubt(row)


def branch_page(
    log: LogReader,
    wanted: BranchFilter,
    *,
    after: Cursor | None = None,
    limit: int = 100,
    by: Sort = Sort.STARTED,
    descending: bool = False,
) -> list[InDoubt]:
    """The next page of branches in doubt.

    The id of a branch is ordered by the time of its start, so it serves as that order. For another order, the key of a
    page is that column and the id.

    Args:
        log: the reader.
        wanted: the selection.
        after: the end of the previous page.
        limit: maximum number.
        by: the order; equal branches are in the order of their start.
        descending: reverse the order.
    """
    found = select(branch).where(*_conditions(wanted)).limit(limit)
    keys = _keys(by, branch.c)
    if after is not None:
        values = reversed(after.values)  # the id comes first there
        place = tuple_(*(literal(value, key.type) for value, key in zip(values, keys, strict=True)))
        found = found.where(tuple_(*keys) < place if descending else tuple_(*keys) > place)
    # The messages of a branch are read only for the branches of the page.
    chosen = found.order_by(*_ordered(keys, descending=descending)).subquery("chosen")
    listed = _listed(chosen).order_by(*_ordered(_keys(by, chosen.c), descending=descending))
    return [_in_doubt(row) for row in log.rows(listed)]


def totals(log: LogReader, wanted: BranchFilter = _EVERY) -> list[Totals]:
    """Sums by state of branches in doubt; states without a branch are left out."""
    columns = branch.c
    sums = [func.sum(column) for column in (columns.publishes, columns.consumes, columns.bytes)]
    statement = (
        select(columns.state, func.count(), *sums, func.count(columns.stuck), func.max(_age_of(branch)))
        .where(*_conditions(wanted))
        .group_by(columns.state)
        .order_by(columns.state)
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
        for state, count, publishes, consumes, octets, stuck, oldest in log.rows(statement)
    ]


def _listed(table: FromClause) -> Select[Any]:
    """The rows of *table*, all branches or a selection of them, in the columns that :func:`_in_doubt` reads."""
    names = _concerned(table)
    columns = [column if column.name in UNSHOWN else table.c[column.name] for column in BRANCH_FACTS]
    names_of_branch = (names.c.queues, names.c.destinations, names.c.exchanges)
    return select(*columns, table.c.rm, _age_of(table), *names_of_branch).select_from(table.join(names, true()))


def _keys(by: Sort, columns: Any) -> tuple[ColumnElement[Any], ...]:
    return (columns.id,) if by is Sort.STARTED else (_SORT_KEYS[by](columns), columns.id)


def _ordered(keys: Sequence[ColumnElement[Any]], *, descending: bool) -> list[ColumnElement[Any]]:
    return [key.desc() if descending else key for key in keys]


def _in_doubt(row: Sequence[Any]) -> InDoubt:
    rm, seconds, queues, destinations, exchanges = row[len(BRANCH_FACTS) :]
    return InDoubt(
        rm=rm,
        branch=branch_record(row[: len(BRANCH_FACTS)], ()),
        age=float(seconds),
        queues=tuple(queues or ()),
        destinations=tuple(destinations or ()),
        exchanges=tuple(exchanges or ()),
    )


def _concerned(table: FromClause) -> Any:
    """The queues that a branch consumed from, and the queues and exchanges that it publishes to, in either mode."""
    published, consumed = slots(table.c.published, "p"), slots(table.c.consumed, "c")
    stored = (message.c.queue == published.c.queue) & (message.c.position == published.c.position)
    names = union_all(
        select(
            work.c.queue.label("queue"),
            _TO_QUEUE.label("destination"),
            case((work.c.kind == str(WorkKind.PUBLISH), work.c.exchange)).label("exchange"),
        )
        .where(work.c.branch_id == table.c.id, _OPEN)
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


def _age_of(table: FromClause) -> Any:
    """Seconds since branches of *table* were started, by the database's clock."""
    return func.extract("epoch", func.clock_timestamp() - table.c.started_at)


def _conditions(wanted: BranchFilter) -> list[ColumnElement[bool]]:
    columns = branch.c
    exact = [(columns[name], getattr(wanted, name)) for name in ("rm", "vhost", "owner", "format_id")]
    found = _exactly(columns, exact, wanted.xid)
    if wanted.ids:
        found.append(columns.id.in_(wanted.ids))
    if wanted.states:
        found.append(columns.state.in_([str(state) for state in wanted.states]))
    if wanted.gtrid is not None:
        found.append(_matches(wanted.gtrid))
    if wanted.older_than is not None:
        least = func.make_interval(0, 0, 0, 0, 0, 0, wanted.older_than)
        found.append(columns.started_at <= func.clock_timestamp() - least)
    if wanted.stuck is not None:
        found.append(columns.stuck.is_not(None) if wanted.stuck else columns.stuck.is_(None))
    if wanted.queue is not None:
        found.append(_works_with(wanted.rm, wanted.queue))
    if wanted.exchange is not None:
        found.append(_publishes_to(wanted.exchange))
    return found


def _matches(pieces: tuple[bytes, ...]) -> ColumnElement[bool]:
    if len(pieces) == 1:
        return branch.c.gtrid == pieces[0]
    escaped = b"%".join(piece.replace(b"\\", b"\\\\").replace(b"%", b"\\%").replace(b"_", b"\\_") for piece in pieces)
    like = branch.c.gtrid.op("LIKE", is_comparison=True)  # SQLAlchemy has it only for text, PostgreSQL also for bytes
    return like(literal(escaped, branch.c.gtrid.type))


def _works_with(rm: str | None, name: bytes) -> ColumnElement[bool]:
    held = (_has_slot_in(column, rm, name) for column in (branch.c.consumed, branch.c.published))
    return or_(_in_work((work.c.queue == name) | (name == _TO_QUEUE)), *held)


def _has_slot_in(column: ColumnElement[bytes], rm: str | None, name: bytes) -> ColumnElement[bool]:
    mine = (queue.c.name == name) if rm is None else (queue.c.rm == rm) & (queue.c.name == name)
    held = slots(column, "held")
    exact = exists(select(held.c.queue).where(held.c.queue.in_(select(queue.c.id).where(mine))).correlate(branch))
    # Most slots do not have the bytes of the id, and a search for these is far cheaper than unpacking slots.
    packed = select(func.array_agg(func.int8send(queue.c.id))).where(mine).scalar_subquery()
    octets = func.unnest(packed).column_valued("octets")
    found = select(literal(True)).where(func.pg_catalog.position(column, octets) > 0).limit(1)
    perhaps = found.correlate(branch).scalar_subquery()
    return case((perhaps, exact), else_=False)


def _publishes_to(name: bytes) -> ColumnElement[bool]:
    hidden = slots(branch.c.published, "hidden")
    # One look-up by primary key for each message: with a join, PostgreSQL would read the whole table for each branch.
    stored = (message.c.queue == hidden.c.queue) & (message.c.position == hidden.c.position)
    of_slot = select(message.c.exchange).where(stored).correlate(hidden).scalar_subquery()
    exact = exists(select(hidden.c.queue).where(of_slot == name).correlate(branch))
    found = func.pg_catalog.position(branch.c.exchange_marks, literal(mark(name), branch.c.exchange_marks.type)) > 0
    perhaps = and_(branch.c.published != b"", or_(branch.c.exchange_marks.is_(None), found))
    return or_(
        _in_work((work.c.kind == str(WorkKind.PUBLISH)) & (work.c.exchange == name)),
        case((perhaps, exact), else_=False),
    )


def _in_work(wanted: ColumnElement[bool]) -> ColumnElement[bool]:
    """The condition that a branch whose messages are in a broker has such work.

    When many have it, a page is soon full: its branches are checked one by one, by primary key. The limits keep
    PostgreSQL from reading all work instead. When none has it, all work is read once.
    """
    anywhere = select(literal(True)).select_from(work).where(wanted, _OPEN).limit(1).scalar_subquery()
    here = select(literal(True)).where(work.c.branch_id == branch.c.id, wanted, _OPEN).limit(1)
    return and_(branch.c.published.is_(None), case((anywhere, here.correlate(branch).scalar_subquery()), else_=False))


def _exactly(
    columns: Any, pairs: Sequence[tuple[ColumnElement[Any], object]], xid: Xid | None
) -> list[ColumnElement[bool]]:
    """Conditions that *columns* have the values of *pairs* that are not ``None``, and *xid*."""
    found = [column == value for column, value in pairs if value is not None]
    if xid is not None:
        found += [columns.format_id == xid.format_id, columns.gtrid == xid.gtrid, columns.bqual == xid.bqual]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalFilter:
    """A selection of journal entries; ``None`` does not restrict it.

    Args:
        rm, xid, gtrid, vhost, owner: exactly these.
        events: any of these.
        since, until: seconds since the epoch; from *since* until before *until*.
    """

    rm: str | None = None
    xid: Xid | None = None
    gtrid: bytes | None = None
    vhost: str | None = None
    owner: str | None = None
    events: tuple[JournalEvent, ...] = ()
    since: float | None = None
    until: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRow:
    """A journal entry, the resource manager that wrote it, and the cursor after it."""

    rm: str
    entry: JournalEntry
    cursor: Cursor


def _counted(log: LogReader, statement: Select[Any]) -> int:
    """The number of rows of *statement*, up to one more than ``MOST_COUNTED``."""
    return int(log.rows(select(func.count()).select_from(statement.limit(MOST_COUNTED + 1).subquery()))[0][0])


def branch_count(log: LogReader, wanted: BranchFilter) -> int:
    """The number of branches in doubt, up to one more than ``MOST_COUNTED``."""
    return _counted(log, select(branch.c.id).where(*_conditions(wanted)))


def journal_page(
    log: LogReader,
    asked: JournalFilter,
    *,
    after: Cursor | None = None,
    latest_first: bool = False,
    limit: int | None = 100,
) -> list[JournalRow]:
    """The next page of the journal.

    Args:
        log: the reader.
        asked: the selection.
        after: the end of the previous page.
        latest_first: otherwise oldest first.
        limit: maximum number; ``None`` for all.
    """
    statement = _behind(
        select(journal.c.id, journal.c.rm, *JOURNAL_COLUMNS).where(*_in_journal(asked)),
        (journal.c.at, journal.c.id),
        after,
        latest_first=latest_first,
    ).limit(limit)
    found = []
    for row in log.rows(statement):
        entry = journal_entry(row[2:])
        found.append(JournalRow(rm=row[1], entry=entry, cursor=_past_cursor(entry.at, row[0])))
    return found


def journal_count(log: LogReader, asked: JournalFilter) -> int:
    """The number of journal entries, up to one more than ``MOST_COUNTED``."""
    return _counted(log, select(journal.c.id).where(*_in_journal(asked)))


def _in_journal(asked: JournalFilter) -> list[ColumnElement[bool]]:
    events = [journal.c.event.in_([str(event) for event in asked.events])] if asked.events else []
    return [*_past(journal, asked), *events]


def history(
    log: LogReader, xid: Xid, *, vhost: str | None = None, rm: str | None = None, limit: int | None = None
) -> list[JournalRow]:
    """The journal of *xid*, oldest first; *limit* keeps only the latest entries."""
    asked = JournalFilter(rm=rm, vhost=vhost, xid=xid)
    return journal_page(log, asked, latest_first=True, limit=limit)[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyCounts:
    """The numbers of messages of a branch that were sent again, and of their copies that were not delivered."""

    replayed: int = 0
    suppressed: int = 0


def copies_of(log: LogReader, rm: str, branch_ids: Collection[UUID]) -> dict[UUID, CopyCounts]:
    """The counts of those of *branch_ids* that have any."""
    replayed, suppressed = (
        {
            branch_id: int(count)
            for branch_id, count in log.rows(
                select(table.c.branch_id, func.count())
                .where(table.c.rm == rm, table.c.branch_id.in_(branch_ids))
                .group_by(table.c.branch_id)
            )
        }
        for table in (replay, duplicate)
    )
    return {
        branch_id: CopyCounts(replayed=replayed.get(branch_id, 0), suppressed=suppressed.get(branch_id, 0))
        for branch_id in replayed.keys() | suppressed.keys()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedRow:
    """A message of the archive without its contents.

    Args:
        cursor: the cursor after it.
        message: with empty properties and body.
        bytes: size of its body.
    """

    cursor: Cursor
    message: ArchivedMessage
    bytes: int


def archive_page(
    log: LogReader, asked: JournalFilter, *, after: Cursor | None = None, limit: int = 100
) -> list[ArchivedRow]:
    """The next page of the archive, latest first; arguments as for :func:`journal_page`."""
    statement = _behind(
        select(*ARCHIVE_COLUMNS, func.octet_length(archive.c.body)).where(*_past(archive, asked)),
        (archive.c.at, archive.c.branch_id, archive.c.position),
        after,
        latest_first=True,
    ).limit(limit)
    found = []
    for row in log.rows(statement):
        message = archived_message(row[:-1])
        cursor = _past_cursor(message.at, message.branch_id, message.position)
        found.append(ArchivedRow(cursor=cursor, message=message, bytes=row[-1]))
    return found


def archive_count(log: LogReader, asked: JournalFilter) -> int:
    """The number of messages of the archive, up to one more than ``MOST_COUNTED``."""
    return _counted(log, select(archive.c.position).where(*_past(archive, asked)))


def message_of_archive(log: LogReader, rm: str, branch_id: UUID, position: int) -> ArchivedMessage | None:
    """One message of the archive with its contents; ``None`` where there is none."""
    statement = select(*ARCHIVE_COLUMNS, archive.c.properties, archive.c.body).where(
        archive.c.rm == rm, archive.c.branch_id == branch_id, archive.c.position == position
    )
    for row in log.rows(statement):
        return archived_message(row[:-2], bytes(row[-2]), bytes(row[-1]))
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class DuplicateRow:
    """A second copy that was not delivered.

    Args:
        duplicate: the copy; properties and body are empty unless they were asked for.
        at: time at which it was kept, seconds since the epoch.
        bytes: size of its body.
    """

    duplicate: Duplicate
    at: float
    bytes: int


def duplicates(
    log: LogReader,
    rm: str,
    *,
    vhost: str | None = None,
    queue: bytes | None = None,
    branch_id: UUID | None = None,
    position: int | None = None,
    limit: int = 100,
    contents: bool = False,
) -> list[DuplicateRow]:
    """The latest second copies that were not delivered, with their contents if *contents* is true."""
    columns = duplicate.c
    kept = (columns.properties, columns.body) if contents else (literal(b""), literal(b""))
    statement = select(
        columns.branch_id, columns.position, columns.vhost, columns.queue, columns.attempt, columns.exchange,
        columns.routing_key, *kept, columns.at, func.octet_length(columns.body),
    )  # fmt: skip
    given = {"rm": rm, "vhost": vhost, "queue": queue, "branch_id": branch_id, "position": position}
    statement = statement.where(*(columns[name] == value for name, value in given.items() if value is not None))
    return [
        DuplicateRow(
            duplicate=Duplicate(
                branch_id=branch_id,
                position=position,
                vhost=vhost,
                queue=bytes(queue),
                attempt=attempt,
                exchange=bytes(exchange),
                routing_key=bytes(key),
                properties=bytes(properties),
                body=bytes(body),
            ),
            at=at,
            bytes=size,
        )
        for branch_id, position, vhost, queue, attempt, exchange, key, properties, body, at, size in log.rows(
            statement.order_by(columns.at.desc(), *duplicate.primary_key).limit(limit)
        )
    ]


def _past_cursor(at: float, key: UUID, position: int = 0) -> Cursor:
    return Cursor(JOURNAL_CURSORS, (round(at * 1e6), key, position))


def _past(table: Table, asked: JournalFilter) -> list[ColumnElement[bool]]:
    columns = table.c
    exact = [(columns[name], getattr(asked, name)) for name in ("rm", "gtrid", "vhost", "owner")]
    found = _exactly(columns, exact, asked.xid)
    if asked.since is not None:
        found.append(columns.at >= _EPOCH + timedelta(seconds=asked.since))
    if asked.until is not None:
        found.append(columns.at < _EPOCH + timedelta(seconds=asked.until))
    return found


def _behind(
    statement: Select[Any], key: tuple[ColumnElement[Any], ...], after: Cursor | None, *, latest_first: bool
) -> Select[Any]:
    """*statement* ordered by *key*, which begins with a time, and starting after *after*."""
    if after is not None:
        at = _moment(after.values[0])
        values = (at, *after.values[1:])[: len(key)]
        # The comparison of the time alone is redundant, but PostgreSQL skips partitions by it.
        behind = (
            and_(key[0] <= at, tuple_(*key) < tuple_(*values))
            if latest_first
            else and_(key[0] >= at, tuple_(*key) > tuple_(*values))
        )
        statement = statement.where(behind)
    return statement.order_by(*(column.desc() if latest_first else column.asc() for column in key))


_NO_FORMAT: Final = -1
_EVIDENCE: Final = ("source", "rm", "vhost", "bqual", "event", "outcome", "at", "actor", "id")
"""The fields of an evidence entry; a missing field is null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconciliationRun:
    """The run that was published last.

    Args:
        number: of the run.
        as_of: the time of the data.
        published_at: the time of the publication in this database.
        lines: number of journal entries that the verdicts rest on.
        totals: for each verdict, the worst first: ``transactions``, ``branches``, ``sentence``.
        shown: number of verdicts stored in this database.
        sources: when each source was last read: ``source``, ``part`` of its data, ``read_at`` (``None``: never), and
            ``is_missing``: whether the run could not read it.
    """

    number: int
    as_of: datetime
    published_at: datetime
    lines: int
    totals: Mapping[str, Mapping[str, Any]]
    shown: int
    sources: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictRow:
    """The verdict about one global transaction; see ``dtx.pipeline.verdicts``.

    Args:
        format_id: ``None`` where it is unknown.
        known_at: when its open branches were last known; ``None`` if none is open.
        evidence: the entries that it rests on, oldest first; each with ``source``, ``rm``, ``vhost``, ``bqual``,
            ``event``, ``outcome``, ``at``, ``actor`` and ``id``, ``None`` where unknown.
    """

    format_id: int | None
    gtrid: bytes
    verdict: str
    findings: tuple[str, ...]
    since: datetime | None
    first_at: datetime
    last_at: datetime
    rms: tuple[str, ...]
    owners: tuple[str, ...]
    branches: int
    decision: str | None
    tm: str | None
    known_at: datetime | None
    evidence: tuple[Mapping[str, Any], ...]

    @property
    def cursor(self) -> Cursor:
        """The cursor after it."""
        return Cursor(VERDICT_CURSORS, (_micros(self.last_at), self.gtrid, self.format_id))


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictFilter:
    """A selection of verdicts; ``None`` does not restrict it.

    Args:
        word: only this verdict.
        gtrid: only this transaction.
        rm: only transactions with a branch in this resource manager.
        owner: only transactions with a branch of this user.
    """

    word: str | None = None
    gtrid: bytes | None = None
    rm: str | None = None
    owner: str | None = None


_ANY_VERDICT: Final = VerdictFilter()


def last_reconciliation(log: LogReader) -> ReconciliationRun | None:
    """The run that was published last; ``None`` where there was none."""
    statement = select(reconciliation).order_by(reconciliation.c.published_at.desc(), reconciliation.c.number.desc())
    for row in log.rows(statement.limit(1)):
        number, as_of, published_at, lines, _, totals, shown, sources = row
        return ReconciliationRun(
            number=number,
            as_of=_time(as_of),
            published_at=_time(published_at),
            lines=lines,
            totals=json.loads(totals),
            shown=shown,
            sources=[
                source | {"read_at": source["read_at"] and datetime.fromisoformat(source["read_at"])}
                for source in json.loads(sources)
            ],
        )
    return None


def verdict_page(
    log: LogReader, asked: VerdictFilter = _ANY_VERDICT, *, after: Cursor | None = None, limit: int = 50
) -> list[VerdictRow]:
    """The next page of verdicts.

    Args:
        log: the reader.
        asked: the selection.
        after: the end of the previous page.
        limit: maximum number.
    """
    columns = verdict.c
    format_id = func.coalesce(columns.format_id, _NO_FORMAT)
    statement = select(verdict).order_by(columns.last_at.desc(), columns.gtrid, format_id).limit(limit)
    statement = statement.where(*_verdicts(asked))
    if after is not None:
        last_at, key, number = _moment(after.values[0]), *after.values[1:]
        same = and_(
            columns.last_at == last_at, columns.gtrid == key, format_id > (_NO_FORMAT if number is None else number)
        )
        behind = and_(columns.last_at == last_at, columns.gtrid > key)
        statement = statement.where(or_(columns.last_at < last_at, behind, same))
    return [_verdict(row) for row in log.rows(statement)]


def verdict_count(log: LogReader, asked: VerdictFilter) -> int:
    """The number of verdicts, up to one more than ``MOST_COUNTED``."""
    return _counted(log, select(verdict.c.gtrid).where(*_verdicts(asked)))


def _verdicts(asked: VerdictFilter) -> list[ColumnElement[bool]]:
    columns = verdict.c
    pairs = (
        (asked.word, columns.verdict == asked.word),
        (asked.gtrid, columns.gtrid == asked.gtrid),
        (asked.rm, literal(asked.rm) == any_(columns.rms)),
        (asked.owner, literal(asked.owner) == any_(columns.owners)),
    )
    return [condition for value, condition in pairs if value is not None]


def _verdict(row: Any) -> VerdictRow:
    values = dict(zip(verdict.c.keys(), row, strict=True))
    values.pop("fingerprint")
    values["gtrid"] = bytes(values["gtrid"])
    for name in ("findings", "rms", "owners"):
        values[name] = tuple(values[name])
    for name in ("since", "first_at", "last_at", "known_at"):
        values[name] = None if values[name] is None else _time(values[name])
    values["evidence"] = tuple(dict.fromkeys(_EVIDENCE) | line for line in json.loads(values["evidence"]))
    return VerdictRow(**values)


def _time(seconds: float) -> datetime:
    """Exact to the microsecond: reader connections return times as numbers, precise enough for centuries."""
    return datetime.fromtimestamp(seconds, UTC)
