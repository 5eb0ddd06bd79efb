"""What the pipeline has found, read page by page, what was last heard of first."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from sqlalchemy import and_, func, or_, select

from dtx.log.past import Mark
from dtx.log.reading import LogReader
from dtx.log.verdict_tables import reconciliation, verdict

_NO_FORMAT: Final = -1
_LINE: Final = ("source", "rm", "vhost", "bqual", "event", "outcome", "at", "actor", "id")
"""Of a line of evidence; what is not written of it is null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciled:
    """The run that was published last.

    Args:
        number: of the run.
        as_of: when the fleet was looked at.
        published_at: when its verdicts came here.
        lines: of journals, that they rest on.
        totals: for each verdict, the worst first: ``transactions``, ``branches``, ``sentence``.
        shown: verdicts that are kept here.
    """

    number: int
    as_of: datetime
    published_at: datetime
    lines: int
    totals: Mapping[str, Mapping[str, Any]]
    shown: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The verdict about one global transaction; see ``dtx.pipeline.verdicts``.

    Args:
        format_id: ``None`` where nobody says it.
        evidence: the lines that it rests on, oldest first; each with ``source``, ``rm``, ``vhost``, ``bqual``,
            ``event``, ``outcome``, ``at``, ``actor`` and ``id``, ``None`` where nothing is known.
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
    evidence: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a page ends: the next one begins behind it.

    Args:
        last_at, gtrid, format_id: of its last line.
    """

    last_at: datetime
    gtrid: bytes
    format_id: int | None

    def __str__(self) -> str:
        micros = (self.last_at - Mark.parse("0-" + "0" * 32 + "-0").at) // timedelta(microseconds=1)
        return f"{micros}-{self.gtrid.hex()}-{'' if self.format_id is None else self.format_id}"

    @classmethod
    def parse(cls, words: str) -> "Place":
        """The place that *words* say.

        Raises:
            ValueError: they say none.
        """
        if len(words) > 200:
            raise ValueError(f"{words[:80]!r} is no place")
        micros, gtrid, format_id = words.split("-")
        at = Mark.parse(f"{micros}-{'0' * 32}-0").at
        return cls(last_at=at, gtrid=bytes.fromhex(gtrid), format_id=int(format_id) if format_id else None)


def reconciled(log: LogReader) -> Reconciled | None:
    """The run that was published last; ``None`` where there was none."""
    statement = select(reconciliation).order_by(reconciliation.c.published_at.desc(), reconciliation.c.number.desc())
    for row in log.rows(statement.limit(1)):
        number, as_of, published_at, lines, _, totals, shown = row
        return Reconciled(
            number=number,
            as_of=_time(as_of),
            published_at=_time(published_at),
            lines=lines,
            totals=json.loads(totals),
            shown=shown,
        )
    return None


def found(
    log: LogReader,
    *,
    word: str | None = None,
    gtrid: bytes | None = None,
    rm: str | None = None,
    owner: str | None = None,
    after: Place | None = None,
    limit: int = 50,
) -> list[Found]:
    """The next page of verdicts.

    Args:
        log: read from.
        word: this verdict alone.
        gtrid: of this transaction.
        rm: with a branch there.
        owner: with a branch of that user.
        after: the place behind the page before.
        limit: how many at most.
    """
    columns = verdict.c
    format_id = func.coalesce(columns.format_id, _NO_FORMAT)
    statement = select(verdict).order_by(columns.last_at.desc(), columns.gtrid, format_id).limit(limit)
    if word is not None:
        statement = statement.where(columns.verdict == word)
    if gtrid is not None:
        statement = statement.where(columns.gtrid == gtrid)
    if rm is not None:
        statement = statement.where(columns.rms.any(rm))
    if owner is not None:
        statement = statement.where(columns.owners.any(owner))
    if after is not None:
        number = _NO_FORMAT if after.format_id is None else after.format_id
        same = and_(columns.last_at == after.last_at, columns.gtrid == after.gtrid, format_id > number)
        behind = and_(columns.last_at == after.last_at, columns.gtrid > after.gtrid)
        statement = statement.where(or_(columns.last_at < after.last_at, behind, same))
    return [_found(row) for row in log.rows(statement)]


def _found(row: Any) -> Found:
    told = dict(zip(verdict.c.keys(), row, strict=True))
    told.pop("fingerprint")
    told["gtrid"] = bytes(told["gtrid"])
    for name in ("findings", "rms", "owners"):
        told[name] = tuple(told[name])
    for name in ("since", "first_at", "last_at"):
        told[name] = None if told[name] is None else _time(told[name])
    told["evidence"] = tuple(dict.fromkeys(_LINE) | line for line in json.loads(told["evidence"]))
    return Found(**told)


def _time(seconds: float) -> datetime:
    """To the microsecond: a reader's connection has times as numbers, which are that precise for centuries."""
    return datetime.fromtimestamp(seconds, UTC)
