"""The log of :mod:`dtx.client.tm`: table ``decision`` of its SQLite file, or of schema ``dtx_tm`` in PostgreSQL.

This process reads it without Spark. A transaction without a row is rolled back (presumed abort), so most rows are
commits. An unfinished row ``rollback`` is a fence. Recovery removes it if it learns that the branch had committed in
one phase. The row adds nothing to presumed abort, so it is left out: as a remembered decision, it would contradict that
branch for good.
"""

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from dtx.pipeline.decisions.kinds import DECISIONS, MOST_FORMAT_ID, NO_CHOICE, NO_FORMAT_ID
from dtx.pipeline.quarantine import Quarantined, sample
from dtx.pipeline.source.columns import arrow_schema
from dtx.pipeline.source.server import SourceError, Waits, connected, sentence

_SELECT: Final = "SELECT node, format_id, gtrid, decision, at, finished FROM "


def sqlite(spark: SparkSession, name: str, place: str) -> tuple[DataFrame, list[Quarantined]]:
    """Read the decisions of a SQLite file, which may be in use."""
    path = Path(place)
    if not path.is_file():
        raise SourceError("there is no such file")
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=10)) as connection:
            rows = connection.execute(_SELECT + "decision ORDER BY gtrid").fetchall()
    except sqlite3.Error as error:
        raise SourceError(sentence(error)) from None
    return _frame(spark, name, f"{place}: decision", rows)


def postgresql(spark: SparkSession, name: str, place: str, waits: Waits) -> tuple[DataFrame, list[Quarantined]]:
    """Read the decisions of a PostgreSQL database."""
    with connected(name, place, waits) as server:
        rows = server.rows(_SELECT + "dtx_tm.decision ORDER BY gtrid")
    return _frame(spark, name, "dtx_tm.decision", rows)


def _frame(
    spark: SparkSession, name: str, item: str, rows: Iterable[tuple[Any, ...]]
) -> tuple[DataFrame, list[Quarantined]]:
    found: list[tuple[Any, ...]] = []
    wrong: dict[str, list[str]] = {}
    for node, format_id, gtrid, decision, at, finished in rows:
        if decision == "rollback" and finished is None:
            continue
        try:
            time = _checked(format_id, gtrid, decision, at)
        except ValueError as error:
            wrong.setdefault(str(error), []).append(gtrid.hex() if isinstance(gtrid, bytes) else str(gtrid))
        else:
            found.append((node, format_id, gtrid, decision, time, finished is not None, name))
    columns = list(zip(*found, strict=True)) or [()] * len(DECISIONS.fields)
    schema = arrow_schema(DECISIONS)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return spark.createDataFrame(pa.Table.from_arrays(arrays, schema=schema), DECISIONS), [
        Quarantined(source=name, item=item, reason=reason, count=len(bad), sample=sample(bad[0]))
        for reason, bad in sorted(wrong.items())
    ]


def _checked(format_id: object, gtrid: object, decision: object, at: object) -> datetime:
    """Return the time of a decision; a value error has the reason why the row is not one: SQLite checks no types."""
    if not isinstance(gtrid, bytes) or not 1 <= len(gtrid) <= 64:
        raise ValueError("gtrid does not have 1 to 64 bytes")
    if not isinstance(format_id, int) or not 0 <= format_id <= MOST_FORMAT_ID:
        raise ValueError(NO_FORMAT_ID)
    if decision not in {"commit", "rollback"}:
        raise ValueError(NO_CHOICE)
    try:
        time = at if isinstance(at, datetime) else datetime.fromisoformat(str(at))
    except ValueError:
        raise ValueError("at is not a time") from None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)
