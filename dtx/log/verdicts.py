"""What the pipeline has found about the whole fleet: its tables, and pages of it, what was last heard of first.

The tables name no resource manager of their own. A run of the pipeline replaces them in one transaction; no lease is
needed, and nothing of dtx writes them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from sqlalchemy import (
    ARRAY,
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    Index,
    Integer,
    LargeBinary,
    PrimaryKeyConstraint,
    Table,
    Text,
    and_,
    func,
    or_,
    select,
    text,
)

from dtx.log.past import Mark
from dtx.log.reading import LogReader
from dtx.log.tables import metadata

_NO_FORMAT: Final = -1
_LINE: Final = ("source", "rm", "vhost", "bqual", "event", "outcome", "at", "actor", "id")
"""Of a line of evidence; what is not written of it is null."""


def _word(name: str, *, nullable: bool = False) -> Column[str]:
    return Column(name, Text(collation="C"), nullable=nullable)


def _words(name: str) -> Column[list[str]]:
    return Column(name, ARRAY(Text(collation="C")), nullable=False)


def _time_column(name: str, *, nullable: bool = False, now: bool = False) -> Column[object]:
    return Column(name, DateTime(timezone=True), nullable=nullable, server_default=text("now()") if now else None)


reconciliation: Final = Table(
    "reconciliation",
    metadata,
    Column("number", BigInteger, nullable=False, autoincrement=False),
    _time_column("as_of"),
    _time_column("published_at", now=True),
    Column("lines", BigInteger, nullable=False),
    Column("fingerprint", BigInteger, nullable=False),
    Column("totals", Text, nullable=False, comment="JSON: for each verdict its transactions and branches"),
    Column("shown", BigInteger, nullable=False),
    PrimaryKeyConstraint("number", name="reconciliation_pkey"),
    CheckConstraint("number >= 1 AND lines >= 0 AND shown >= 0", name="reconciliation_counts_check"),
)
"""The runs that were published; the verdicts are those of the one that was published last."""

verdict: Final = Table(
    "verdict",
    metadata,
    Column("format_id", BigInteger),
    Column("gtrid", LargeBinary, nullable=False),
    _word("verdict"),
    _words("findings"),
    _time_column("since", nullable=True),
    _time_column("first_at"),
    _time_column("last_at"),
    _words("rms"),
    _words("owners"),
    Column("branches", Integer, nullable=False),
    _word("decision", nullable=True),
    Column("tm", Text),
    Column("fingerprint", LargeBinary, nullable=False),
    Column("evidence", Text, nullable=False, comment="JSON: the lines that it rests on"),
    CheckConstraint("format_id BETWEEN 0 AND 4294967295", name="verdict_format_id_check"),
    # names that PostgreSQL's own prepared transactions may have are longer than a gtrid
    CheckConstraint("octet_length(gtrid) BETWEEN 1 AND 200", name="verdict_gtrid_check"),
    CheckConstraint("branches >= 0", name="verdict_branches_check"),
    CheckConstraint("octet_length(fingerprint) = 16", name="verdict_fingerprint_check"),
    # There is no primary key, since there may be no format id: where a participant's name for it is no xid, or where
    # a decision is about no branch that is known, of a log that keeps none.
    Index("verdict_key", "gtrid", text("coalesce(format_id, -1)"), unique=True),
    Index("verdict_last_at_idx", "last_at", "gtrid"),
    Index("verdict_verdict_idx", "verdict", "last_at", "gtrid"),
)


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
