"""Writes the verdicts that need attention into PostgreSQL, for the admin pages of a dtx."""

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

import psycopg
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as sf

from dtx.pipeline.quarantine import first_line
from dtx.pipeline.reconcile.judged_rows import VERDICT_COLUMNS, evidence_json, is_finding
from dtx.pipeline.reconcile.state import Run, Total
from dtx.pipeline.verdicts import RULES, time_of

MOST: Final = 1_000_000
"""Limit of published verdicts, the latest ones: about a gigabyte with their evidence. The results have all of them."""
_COLUMNS: Final = (*VERDICT_COLUMNS, "evidence")
_TYPES: Final = (
    "int8", "bytea", "text", "text[]", "timestamptz", "timestamptz", "timestamptz", "text[]", "text[]", "int4", "text",
    "text", "bytea", "timestamptz", "text",
)  # fmt: skip
_EDGES: Final = ("first_at", "last_at")
_TIMES: Final = ("since", "known_at", *_EDGES)


class PublishingFailed(Exception):
    """The database has refused the verdicts and is unchanged; the message says why, without passwords."""


def publish(
    verdicts: DataFrame, run: Run, url: str, *, most: int = MOST, note: Callable[[str], None] = lambda _: None
) -> int:
    """Replace the verdicts in a database by the latest ones that need attention, and return their number.

    After :class:`PublishingFailed` the database is unchanged.
    """
    rows = _ready(verdicts.where(is_finding()).orderBy(sf.col("last_at").desc(), "gtrid").limit(most))
    try:
        with psycopg.connect(url.replace("postgresql+psycopg://", "postgresql://", 1)) as connection:
            return _replace(connection, rows, run, note)
    except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn, psycopg.errors.InvalidSchemaName):
        raise PublishingFailed("the database has no tables for verdicts: run dtx migrate of this version") from None
    except psycopg.Error as error:
        raise PublishingFailed(f"verdicts cannot be published: {first_line(error)}") from None


def _replace(connection: psycopg.Connection[Any], rows: DataFrame, run: Run, note: Callable[[str], None]) -> int:
    count = 0
    with connection.cursor() as cursor:
        # one writer at a time; readers see the earlier verdicts until the commit
        cursor.execute("LOCK TABLE dtx.verdict IN SHARE ROW EXCLUSIVE MODE")
        cursor.execute("DELETE FROM dtx.verdict")
        with cursor.copy(f"COPY dtx.verdict ({', '.join(_COLUMNS)}) FROM STDIN (FORMAT BINARY)") as copy:
            copy.set_types(_TYPES)
            for row in rows.toLocalIterator(prefetchPartitions=True):
                copy.write_row(_values(row, run))
                count += 1
                if count % 10_000 == 0:
                    note(f"published {count:,} verdicts")
        sources = json.dumps([row._asdict() for row in run.sources], default=lambda at: at.isoformat())
        cursor.execute(
            "INSERT INTO dtx.reconciliation (number, as_of, lines, fingerprint, totals, shown, sources)"
            " VALUES (%s, %s, %s, %s, %s, %s, %s)"
            " ON CONFLICT (number) DO UPDATE SET as_of = excluded.as_of, published_at = now(), lines = excluded.lines,"
            " fingerprint = excluded.fingerprint, totals = excluded.totals, shown = excluded.shown,"
            " sources = excluded.sources",
            (run.number, time_of(run.as_of), run.lines, run.fingerprint, _totals(run), count, sources),
        )
    return count


def _totals(run: Run) -> str:
    """Return the totals of all verdicts, the worst first, with their sentences: the admin pages lack the rules."""
    nothing = Total()
    return json.dumps(
        {
            str(verdict): asdict(run.totals.get(verdict, nothing)) | {"sentence": sentence}
            for verdict, sentence in RULES.items()
        }
    )


def _ready(verdicts: DataFrame) -> DataFrame:
    """Return the columns for PostgreSQL: times in microseconds, evidence as JSON."""
    return verdicts.select(
        *(
            sf.unix_micros(name).alias(name) if name in _TIMES else sf.col(name)
            for name in _COLUMNS
            if name != "evidence"
        ),
        evidence_json().alias("evidence"),
    )


def _values(row: Row, run: Run) -> tuple[Any, ...]:
    values = row.asDict()
    for name in _EDGES:
        # a decision without a time and without a known branch: use the time of the run
        values[name] = run.as_of if values[name] is None else values[name]
    for name in _TIMES:
        values[name] = None if values[name] is None else time_of(values[name])
    # PostgreSQL's text cannot have NUL
    values["evidence"] = values["evidence"].replace("\\u0000", "\\ufffd")
    for name in ("rms", "owners"):
        values[name] = [word.replace("\0", "\ufffd") for word in values[name]]
    values["tm"] = None if values["tm"] is None else values["tm"].replace("\0", "\ufffd")
    for name in ("gtrid", "fingerprint"):
        values[name] = bytes(values[name])
    return tuple(values[name] for name in _COLUMNS)
