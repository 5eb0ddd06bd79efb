"""Pages of branches for operators, by whatever they look for; the order is that of the branches' start.

The id of a branch is ordered by time, so pages are cut by the primary key: a page costs the same wherever it is, and
branches that come and go meanwhile are neither repeated nor passed over.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from sqlalchemy import ColumnElement, Select, and_, exists, func, literal, or_, select

from dtx.log.queries import BRANCH_COLUMNS, branch_record, slots
from dtx.log.reading import InDoubt, LogReader, age_of, concerned
from dtx.log.records import LogState, WorkKind
from dtx.log.tables import branch, message, queue, work
from dtx.xa.xid import Xid

_OPEN: Final = or_(work.c.fate.is_(None), work.c.fate == "unsure")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which branches are asked for; ``None`` is every.

    Args:
        vhost, owner, format_id, xid: exactly these.
        states: in one of these.
        gtrid: octets, with ``*`` for any number of octets.
        queue: consumed from there.
        exchange: publishes there; empty is the default exchange.
        older_than: seconds since the branch was started, at least.
        stuck: whether phase two is stuck.
    """

    vhost: str | None = None
    owner: str | None = None
    format_id: int | None = None
    xid: Xid | None = None
    states: tuple[LogState, ...] = ()
    gtrid: tuple[bytes, ...] | None = None
    queue: bytes | None = None
    exchange: bytes | None = None
    older_than: float | None = None
    stuck: bool | None = None


def gtrid_pattern(text: str) -> tuple[bytes, ...]:
    """What stands between the wildcards of a pattern: ``order-*``, or ``hex:6f72*`` for octets that are no text.

    Raises:
        ValueError: what follows ``hex:`` is not hexadecimal.
    """
    if text.startswith("hex:"):
        return tuple(bytes.fromhex(piece) for piece in text.removeprefix("hex:").split("*"))
    return tuple(piece.encode() for piece in text.split("*"))


def page(log: LogReader, rm: str, wanted: Wanted, *, after: UUID | None = None, limit: int = 100) -> list[InDoubt]:
    """The next page of branches that are *wanted*.

    Args:
        log: read from.
        rm: name of the resource manager.
        wanted: which.
        after: id of the last one of the page before.
        limit: how many at most.
    """
    return [_in_doubt(row) for row in log.rows(_statement(rm, wanted, after, limit))]


def _statement(rm: str, wanted: Wanted, after: UUID | None, limit: int) -> Select[Any]:
    found = select(branch).where(branch.c.rm == rm, *_conditions(rm, wanted)).order_by(branch.c.id).limit(limit)
    if after is not None:
        found = found.where(branch.c.id > after)
    # What a branch holds is looked at for those of the page alone.
    chosen = found.subquery("chosen")
    names = concerned(chosen)
    columns = [chosen.c[column.name] for column in BRANCH_COLUMNS]
    return (
        select(*columns, chosen.c.rm, age_of(chosen), names.c.queues, names.c.exchanges)
        .select_from(chosen.join(names, literal(True)))
        .order_by(chosen.c.id)
    )


def _in_doubt(row: Sequence[Any]) -> InDoubt:
    rm, seconds, queues, exchanges = row[len(BRANCH_COLUMNS) :]
    return InDoubt(
        rm=rm,
        branch=branch_record(row[: len(BRANCH_COLUMNS)], ()),
        age=float(seconds),
        queues=tuple(queues or ()),
        exchanges=tuple(exchanges or ()),
    )


def _conditions(rm: str, wanted: Wanted) -> list[ColumnElement[bool]]:
    columns = branch.c
    exact = ((columns.vhost, wanted.vhost), (columns.owner, wanted.owner), (columns.format_id, wanted.format_id))
    found: list[ColumnElement[bool]] = [column == value for column, value in exact if value is not None]
    if wanted.xid is not None:
        xid = wanted.xid
        found += [columns.format_id == xid.format_id, columns.gtrid == xid.gtrid, columns.bqual == xid.bqual]
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
        found.append(_consumes_from(rm, wanted.queue))
    if wanted.exchange is not None:
        found.append(_publishes_to(wanted.exchange))
    return found


def _matches(pieces: tuple[bytes, ...]) -> ColumnElement[bool]:
    if len(pieces) == 1:
        return branch.c.gtrid == pieces[0]
    escaped = b"%".join(piece.replace(b"\\", b"\\\\").replace(b"%", b"\\%").replace(b"_", b"\\_") for piece in pieces)
    return branch.c.gtrid.like(literal(escaped, branch.c.gtrid.type))


def _consumes_from(rm: str, name: bytes) -> ColumnElement[bool]:
    here = select(work.c.branch_id).where(work.c.queue == name, _OPEN)
    ids = select(queue.c.id).where(queue.c.rm == rm, queue.c.name == name)
    held = slots(branch.c.consumed, "held")
    local = exists(select(held.c.queue).where(held.c.queue.in_(ids)).correlate(branch))
    return or_(branch.c.id.in_(here), and_(branch.c.consumed.is_not(None), branch.c.consumed != b"", local))


def _publishes_to(name: bytes) -> ColumnElement[bool]:
    here = select(work.c.branch_id).where(work.c.kind == str(WorkKind.PUBLISH), work.c.exchange == name, _OPEN)
    hidden = slots(branch.c.published, "hidden")
    # One look by the primary key for each message: as a join, PostgreSQL would read the whole table for each branch.
    stored = (message.c.queue == hidden.c.queue) & (message.c.position == hidden.c.position)
    of_slot = select(message.c.exchange).where(stored).correlate(hidden).scalar_subquery()
    local = exists(select(hidden.c.queue).where(of_slot == name).correlate(branch))
    return or_(branch.c.id.in_(here), and_(branch.c.published.is_not(None), branch.c.published != b"", local))
