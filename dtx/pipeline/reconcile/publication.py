"""What somebody has to look at goes into PostgreSQL, where the admin pages of a dtx show it."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import psycopg
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as sf

from dtx.pipeline.reconcile.judged_rows import evidence_json, is_finding
from dtx.pipeline.reconcile.state import Run, Total
from dtx.pipeline.verdicts import RULES

MOST: Final = 1_000_000
"""Verdicts that are published, the latest of them: about a gigabyte with their evidence. All are in the files."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_COLUMNS: Final = (
    "format_id", "gtrid", "verdict", "findings", "since", "first_at", "last_at", "rms", "owners", "branches",
    "decision", "tm", "fingerprint", "evidence",
)  # fmt: skip
_TYPES: Final = (
    "int8", "bytea", "text", "text[]", "timestamptz", "timestamptz", "timestamptz", "text[]", "text[]", "int4", "text",
    "text", "bytea", "text",
)  # fmt: skip
_EDGES: Final = ("first_at", "last_at")
_TIMES: Final = ("since", *_EDGES)


class PublishingFailed(Exception):
    """The database did not take it, and has what it had; the sentence says why, without passwords."""


def publish(
    verdicts: DataFrame, run: Run, url: str, *, most: int = MOST, say: Callable[[str], None] = lambda _: None
) -> int:
    """Replace what the database shows with what there is to look at; all at once, or not at all.

    Args:
        verdicts: as :func:`~dtx.pipeline.reconcile.current` gives them.
        run: they are of.
        url: of a database that a dtx of this version has prepared.
        most: verdicts that are written, the latest of them.
        say: is told how far it is.

    Returns:
        How many were written.

    Raises:
        PublishingFailed: the database is away or refuses; it shows what it showed.
    """
    rows = _ready(verdicts.where(is_finding()).orderBy(sf.col("last_at").desc(), "gtrid").limit(most))
    try:
        with psycopg.connect(url.replace("postgresql+psycopg://", "postgresql://", 1)) as connection:
            return _replace(connection, rows, run, say)
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        raise PublishingFailed("the database has no tables for verdicts: dtx migrate, of this version") from None
    except psycopg.Error as error:
        words = str(error).strip().splitlines() or [type(error).__name__]
        raise PublishingFailed(f"verdicts cannot be published: {words[0]}") from None


def _replace(connection: psycopg.Connection[Any], rows: DataFrame, run: Run, say: Callable[[str], None]) -> int:
    count = 0
    with connection.cursor() as cursor:
        # one at a time; who reads sees what was there until this is committed
        cursor.execute("LOCK TABLE dtx.verdict IN SHARE ROW EXCLUSIVE MODE")
        cursor.execute("DELETE FROM dtx.verdict")
        with cursor.copy(f"COPY dtx.verdict ({', '.join(_COLUMNS)}) FROM STDIN (FORMAT BINARY)") as copy:
            copy.set_types(_TYPES)
            for row in rows.toLocalIterator(prefetchPartitions=True):
                copy.write_row(_values(row, run))
                count += 1
                if count % 10_000 == 0:
                    say(f"published {count:,} verdicts")
        cursor.execute(
            "INSERT INTO dtx.reconciliation (number, as_of, lines, fingerprint, totals, shown)"
            " VALUES (%s, %s, %s, %s, %s, %s)"
            " ON CONFLICT (number) DO UPDATE SET as_of = excluded.as_of, published_at = now(), lines = excluded.lines,"
            " fingerprint = excluded.fingerprint, totals = excluded.totals, shown = excluded.shown",
            (run.number, _time(run.as_of), run.lines, run.fingerprint, _totals(run), count),
        )
    return count


def _totals(run: Run) -> str:
    """All verdicts, the worst first, with what each means: whoever shows them need not know the rules."""
    nothing = Total()
    return json.dumps(
        {
            str(rule.verdict): {
                "transactions": run.totals.get(rule.verdict, nothing).transactions,
                "branches": run.totals.get(rule.verdict, nothing).branches,
                "sentence": rule.sentence,
            }
            for rule in RULES
        }
    )


def _ready(verdicts: DataFrame) -> DataFrame:
    """As PostgreSQL takes them: times in microseconds, evidence as JSON."""
    return verdicts.select(
        *(
            sf.unix_micros(name).alias(name) if name in _TIMES else sf.col(name)
            for name in _COLUMNS
            if name != "evidence"
        ),
        evidence_json().alias("evidence"),
    )


def _values(row: Row, run: Run) -> tuple[Any, ...]:
    told = row.asDict()
    for name in _EDGES:
        # a decision in a log without times, about no branch that is known: it was heard of when it was looked at
        told[name] = run.as_of if told[name] is None else told[name]
    for name in _TIMES:
        told[name] = None if told[name] is None else _time(told[name])
    # text of PostgreSQL has no NUL
    told["evidence"] = told["evidence"].replace("\\u0000", "\\ufffd")
    for name in ("rms", "owners"):
        told[name] = [word.replace("\0", "\ufffd") for word in told[name]]
    told["tm"] = None if told["tm"] is None else told["tm"].replace("\0", "\ufffd")
    for name in ("gtrid", "fingerprint"):
        told[name] = bytes(told[name])
    return tuple(told[name] for name in _COLUMNS)


def _time(micros: int) -> datetime:
    return _EPOCH + timedelta(microseconds=micros)
