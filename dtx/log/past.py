"""Pages of what has happened: lines of the journal, and messages of the archive.

Both are ordered by time; pages are cut by time and key, so a page costs the same wherever it is, and lines that come
or are dropped meanwhile are neither repeated nor passed over.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Self
from uuid import UUID

from sqlalchemy import Column, ColumnElement, Select, Table, and_, func, select, tuple_

from dtx.log.queries import JOURNAL_COLUMNS, journal_entry
from dtx.log.reading import LogReader
from dtx.log.records import ENDINGS, Archived, Fate, JournalEntry, JournalEvent, WorkKind
from dtx.log.tables import archive, journal
from dtx.xa.xid import Xid

_MARK: Final = re.compile(r"([0-9]{1,18})-([0-9a-fA-F]{32})-([0-9]{1,10})")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
OUTCOMES: Final = tuple(sorted(ENDINGS))
"""Events of the journal that end a branch: together they are the outcome memory."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a page ends: the next one begins behind it.

    Args:
        micros: microseconds since the epoch.
        id: of the journal's line, or of the branch whose message it is.
        position: of that message.
    """

    micros: int
    id: UUID
    position: int = 0

    def __str__(self) -> str:
        return f"{self.micros}-{self.id.hex}-{self.position}"

    @classmethod
    def of(cls, at: float, key: UUID, position: int = 0) -> Self:
        """The mark of something that happened *at* (seconds since the epoch)."""
        return cls(round(at * 1e6), key, position)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The mark that *text* says.

        Raises:
            ValueError: it says none.
        """
        found = _MARK.fullmatch(text)
        if found is not None:
            micros, key, position = int(found[1]), UUID(hex=found[2]), int(found[3])
            if micros < 1 << 57 and position < 1 << 31:  # the year 6500
                return cls(micros, key, position)
        raise ValueError(f"{text[:80]!r} is no cursor")

    @property
    def at(self) -> datetime:
        """The time, as precisely as the database has it."""
        return _EPOCH + timedelta(microseconds=self.micros)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Which lines are asked for; ``None`` is every.

    Args:
        xid, gtrid, vhost, owner: exactly these.
        events: one of these.
        since, until: seconds since the epoch; not before, and before.
    """

    xid: Xid | None = None
    gtrid: bytes | None = None
    vhost: str | None = None
    owner: str | None = None
    events: tuple[JournalEvent, ...] = ()
    since: float | None = None
    until: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A line of the journal, and the mark behind it."""

    mark: Mark
    entry: JournalEntry


def lines(
    log: LogReader, rm: str, asked: Asked, *, after: Mark | None = None, latest_first: bool = False, limit: int = 100
) -> list[Told]:
    """The next page of the journal.

    Args:
        log: read from.
        rm: name of the resource manager.
        asked: for which lines.
        after: mark of the last one of the page before.
        latest_first: else the oldest comes first.
        limit: how many at most.
    """
    statement = _page(
        select(journal.c.id, *JOURNAL_COLUMNS).where(journal.c.rm == rm, *_conditions(journal, asked)),
        (journal.c.at, journal.c.id),
        None if after is None else (after.at, after.id),
        latest_first=latest_first,
    ).limit(limit)
    if asked.events:
        statement = statement.where(journal.c.event.in_([str(event) for event in asked.events]))
    found = []
    for row in log.rows(statement):
        entry = journal_entry(row[1:])
        found.append(Told(mark=Mark.of(entry.at, row[0]), entry=entry))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A message of the archive without its contents.

    Args:
        mark: behind it.
        message: its properties and body are empty.
        bytes: of its body.
    """

    mark: Mark
    message: Archived
    bytes: int


_ABOUT: Final = (
    archive.c.branch_id, archive.c.position, archive.c.vhost, archive.c.format_id, archive.c.gtrid, archive.c.bqual,
    archive.c.owner, archive.c.kind, archive.c.exchange, archive.c.routing_key, archive.c.queue, archive.c.fate,
    archive.c.at,
)  # fmt: skip


def archived(log: LogReader, rm: str, asked: Asked, *, after: Mark | None = None, limit: int = 100) -> list[Kept]:
    """The next page of the archive, what came last first; arguments as for :func:`lines`."""
    statement = _page(
        select(*_ABOUT, func.octet_length(archive.c.body)).where(archive.c.rm == rm, *_conditions(archive, asked)),
        (archive.c.at, archive.c.branch_id, archive.c.position),
        None if after is None else (after.at, after.id, after.position),
        latest_first=True,
    ).limit(limit)
    found = []
    for row in log.rows(statement):
        message = _archived(row[:-1], b"", b"")
        mark = Mark.of(message.at, message.branch_id, message.position)
        found.append(Kept(mark=mark, message=message, bytes=row[-1]))
    return found


def archived_message(log: LogReader, rm: str, branch_id: UUID, position: int) -> Archived | None:
    """One message of the archive with its contents; ``None`` where it has no such."""
    statement = select(*_ABOUT, archive.c.properties, archive.c.body).where(
        archive.c.rm == rm, archive.c.branch_id == branch_id, archive.c.position == position
    )
    for row in log.rows(statement):
        return _archived(row[:-2], bytes(row[-2]), bytes(row[-1]))
    return None


def _archived(row: Sequence[Any], properties: bytes, body: bytes) -> Archived:
    branch_id, position, vhost, format_id, gtrid, bqual, owner, kind, exchange, routing_key, queue, fate, at = row
    return Archived(
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


def _conditions(table: Table, asked: Asked) -> list[ColumnElement[bool]]:
    columns = table.c
    found: list[ColumnElement[bool]] = []
    if asked.xid is not None:
        xid = asked.xid
        found += [columns.format_id == xid.format_id, columns.gtrid == xid.gtrid, columns.bqual == xid.bqual]
    exact = ((columns.gtrid, asked.gtrid), (columns.vhost, asked.vhost), (columns.owner, asked.owner))
    found += [column == value for column, value in exact if value is not None]
    if asked.since is not None:
        found.append(columns.at >= _time(asked.since))
    if asked.until is not None:
        found.append(columns.at < _time(asked.until))
    return found


def _time(seconds: float) -> datetime:
    return _EPOCH + timedelta(seconds=seconds)


def _page(
    statement: Select[Any], key: tuple[Column[Any], ...], after: tuple[Any, ...] | None, *, latest_first: bool
) -> Select[Any]:
    """*statement* in the order of *key*, behind *after*; its first column is a time."""
    if after is not None:
        at = key[0]
        # The comparison of the time alone says nothing new, but it is what partitions are left out by.
        behind = (
            and_(at <= after[0], tuple_(*key) < tuple_(*after))
            if latest_first
            else and_(at >= after[0], tuple_(*key) > tuple_(*after))
        )
        statement = statement.where(behind)
    return statement.order_by(*(column.desc() if latest_first else column.asc() for column in key))
