"""Pages of branches for operators, by whatever they look for; the order is that of the branches' start, or another.

The id of a branch is ordered by time, so pages are cut by the primary key: a page costs the same wherever it is, and
branches that come and go meanwhile are neither repeated nor passed over. In another order pages are cut by that column
and the id.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final
from uuid import UUID

from sqlalchemy import ColumnElement, Select, and_, case, exists, func, literal, or_, select, tuple_

from dtx.log.marks import mark
from dtx.log.queries import BRANCH_FACTS, UNSHOWN, branch_record, slots
from dtx.log.reading import InDoubt, LogReader, age_of, concerned, to_queue
from dtx.log.records import BranchRecord, LogState, WorkKind
from dtx.log.tables import branch, message, queue, work
from dtx.xa.xid import Xid

_OPEN: Final = or_(work.c.fate.is_(None), work.c.fate == "unsure")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which branches are asked for; ``None`` is every.

    Args:
        vhost, owner, format_id, xid: exactly these.
        states: in one of these.
        ids: one of these branches.
        gtrid: octets, with ``*`` for any number of octets.
        queue: consumed from there, or publishes to it (see :attr:`~dtx.log.reading.InDoubt.destinations`).
        exchange: publishes there; empty is the default exchange.
        older_than: seconds since the branch was started, at least.
        stuck: whether phase two is stuck.
    """

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


class Sort(StrEnum):
    """What branches can be ordered by."""

    STARTED = "started"
    BYTES = "bytes"
    MESSAGES = "messages"
    OWNER = "owner"
    STATE = "state"


_SORT_KEYS: Final[dict[Sort, Callable[[Any], ColumnElement[Any]]]] = {
    Sort.BYTES: lambda columns: columns.bytes,
    Sort.MESSAGES: lambda columns: columns.publishes + columns.consumes,
    Sort.OWNER: lambda columns: columns.owner,
    Sort.STATE: lambda columns: columns.state,
}
_NUMBERS: Final = frozenset({Sort.BYTES, Sort.MESSAGES})


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a page ended.

    Args:
        id: of its last branch.
        key: of that branch, what the pages are ordered by; ``None`` for its start.
    """

    id: UUID
    key: int | str | None = None

    def __str__(self) -> str:
        """The form that :meth:`parse` reads: the id, and a dot with the key where there is one."""
        return str(self.id) if self.key is None else f"{self.id}.{self.key}"

    @classmethod
    def parse(cls, text: str, by: Sort) -> "Cursor":
        """Read a cursor of pages in the order *by*.

        Raises:
            ValueError: it is none.
        """
        number, dot, key = text.partition(".")
        with suppress(ValueError):
            if by is Sort.STARTED and not dot:
                return cls(UUID(number))
            if by in _NUMBERS and 0 <= int(key) < 1 << 63:
                return cls(UUID(number), int(key))
            if by in (Sort.OWNER, Sort.STATE) and dot and "\0" not in key:
                return cls(UUID(number), key)
        raise ValueError(f"{text[:80]!r} is no cursor of pages by {by}")

    @classmethod
    def of(cls, branch: BranchRecord, by: Sort) -> "Cursor":
        """The cursor behind *branch*."""
        keys: dict[Sort, int | str] = {
            Sort.BYTES: branch.bytes,
            Sort.MESSAGES: branch.publishes + branch.consumes,
            Sort.OWNER: branch.owner,
            Sort.STATE: str(branch.state),
        }
        return cls(branch.id, keys.get(by))


def gtrid_pattern(text: str) -> tuple[bytes, ...]:
    """What stands between the wildcards of a pattern: ``order-*``, or ``hex:6f72*`` for octets that are no text.

    Raises:
        ValueError: what follows ``hex:`` is not hexadecimal.
    """
    if text.startswith("hex:"):
        return tuple(bytes.fromhex(piece) for piece in text.removeprefix("hex:").split("*"))
    return tuple(piece.encode() for piece in text.split("*"))


def page(
    log: LogReader,
    rm: str,
    wanted: Wanted,
    *,
    after: Cursor | None = None,
    limit: int = 100,
    by: Sort = Sort.STARTED,
    descending: bool = False,
) -> list[InDoubt]:
    """The next page of branches that are *wanted*.

    Args:
        log: read from.
        rm: name of the resource manager.
        wanted: which.
        after: where the page before ended.
        limit: how many at most.
        by: the order; branches that are equal in that come in the order of their start.
        descending: the order backwards.
    """
    return [_in_doubt(row) for row in log.rows(_statement(rm, wanted, after, limit, by, descending=descending))]


def _statement(rm: str, wanted: Wanted, after: Cursor | None, limit: int, by: Sort, *, descending: bool) -> Select[Any]:
    found = select(branch).where(branch.c.rm == rm, *conditions(rm, wanted)).limit(limit)
    keys = _keys(by, branch.c)
    if after is not None:
        values = (after.id,) if by is Sort.STARTED else (after.key, after.id)
        mark = tuple_(*(literal(value, key.type) for value, key in zip(values, keys, strict=True)))
        found = found.where(tuple_(*keys) < mark if descending else tuple_(*keys) > mark)
    # What a branch holds is looked at for those of the page alone.
    chosen = found.order_by(*_ordered(keys, descending=descending)).subquery("chosen")
    names = concerned(chosen)
    columns = [column if column.name in UNSHOWN else chosen.c[column.name] for column in BRANCH_FACTS]
    return (
        select(*columns, chosen.c.rm, age_of(chosen), names.c.queues, names.c.destinations, names.c.exchanges)
        .select_from(chosen.join(names, literal(True)))
        .order_by(*_ordered(_keys(by, chosen.c), descending=descending))
    )


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


def conditions(rm: str, wanted: Wanted) -> list[ColumnElement[bool]]:
    """What must hold for a branch that is *wanted*."""
    columns = branch.c
    exact = ((columns.vhost, wanted.vhost), (columns.owner, wanted.owner), (columns.format_id, wanted.format_id))
    found: list[ColumnElement[bool]] = [column == value for column, value in exact if value is not None]
    if wanted.xid is not None:
        xid = wanted.xid
        found += [columns.format_id == xid.format_id, columns.gtrid == xid.gtrid, columns.bqual == xid.bqual]
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
        found.append(_works_with(rm, wanted.queue))
    if wanted.exchange is not None:
        found.append(_publishes_to(wanted.exchange))
    return found


def _matches(pieces: tuple[bytes, ...]) -> ColumnElement[bool]:
    if len(pieces) == 1:
        return branch.c.gtrid == pieces[0]
    escaped = b"%".join(piece.replace(b"\\", b"\\\\").replace(b"%", b"\\%").replace(b"_", b"\\_") for piece in pieces)
    like = branch.c.gtrid.op("LIKE", is_comparison=True)  # SQLAlchemy has it for text alone, PostgreSQL for octets too
    return like(literal(escaped, branch.c.gtrid.type))


def _works_with(rm: str, name: bytes) -> ColumnElement[bool]:
    held = (_has_slot_in(column, rm, name) for column in (branch.c.consumed, branch.c.published))
    return or_(_in_work((work.c.queue == name) | (to_queue == name)), *held)


def _has_slot_in(column: ColumnElement[bytes], rm: str, name: bytes) -> ColumnElement[bool]:
    mine = (queue.c.rm == rm) & (queue.c.name == name)
    held = slots(column, "held")
    exact = exists(select(held.c.queue).where(held.c.queue.in_(select(queue.c.id).where(mine))).correlate(branch))
    # The octets of an id are nowhere in most slots, and looking for them is far cheaper than taking slots apart.
    packed = select(func.array_agg(func.int8send(queue.c.id))).where(mine).scalar_subquery()
    octets = func.unnest(packed).column_valued("octets")
    found = select(literal(True)).where(func.pg_catalog.position(column, octets) > 0).limit(1)
    perhaps = found.correlate(branch).scalar_subquery()
    return case((perhaps, exact), else_=False)


def _publishes_to(name: bytes) -> ColumnElement[bool]:
    hidden = slots(branch.c.published, "hidden")
    # One look by the primary key for each message: as a join, PostgreSQL would read the whole table for each branch.
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
    """Whether a branch whose messages are in a broker has such work.

    If there is any, a page is full soon, and its branches are looked at one by one, by the primary key; the limits keep
    PostgreSQL from reading all work instead. If there is none, it is read once, to its end.
    """
    anywhere = select(literal(True)).select_from(work).where(wanted, _OPEN).limit(1).scalar_subquery()
    here = select(literal(True)).where(work.c.branch_id == branch.c.id, wanted, _OPEN).limit(1)
    return and_(branch.c.published.is_(None), case((anywhere, here.correlate(branch).scalar_subquery()), else_=False))
