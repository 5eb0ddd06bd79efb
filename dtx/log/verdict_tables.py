"""The tables of what the pipeline has found: about the whole fleet, so they name no resource manager of their own.

A run of the pipeline replaces them in one transaction. No lease is needed, and nothing of dtx writes them.
"""

from typing import Final

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
    text,
)

from dtx.log.tables import metadata


def _word(name: str, *, nullable: bool = False) -> Column[str]:
    return Column(name, Text(collation="C"), nullable=nullable)


def _words(name: str) -> Column[list[str]]:
    return Column(name, ARRAY(Text(collation="C")), nullable=False)


def _time(name: str, *, nullable: bool = False, now: bool = False) -> Column[object]:
    return Column(name, DateTime(timezone=True), nullable=nullable, server_default=text("now()") if now else None)


reconciliation: Final = Table(
    "reconciliation",
    metadata,
    Column("number", BigInteger, nullable=False, autoincrement=False),
    _time("as_of"),
    _time("published_at", now=True),
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
    _time("since", nullable=True),
    _time("first_at"),
    _time("last_at"),
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
