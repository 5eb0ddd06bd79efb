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
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from dtx.pipeline.decisions.kinds import DECISIONS, MOST_FORMAT_ID, NO_CHOICE, NO_FORMAT_ID
from dtx.pipeline.quarantine import Quarantined, sample
from dtx.pipeline.source.columns import arrow_schema
from dtx.pipeline.source.server import SourceError, Waits, connected, sentence, without_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SELECT: Final = "SELECT node, format_id, gtrid, decision, at, finished FROM "


def sqlite(spark: "SparkSession", name: str, place: str) -> "tuple[DataFrame, list[Quarantined]]":
    """Read the decisions of a SQLite file, which may be in use."""
    path = Path(place)
    if not path.is_file():
        return _frame(spark, name, place, [], "there is no such file")
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=10)) as connection:
            rows = connection.execute(_SELECT + "decision ORDER BY gtrid").fetchall()
    except sqlite3.Error as error:
        return _frame(spark, name, place, [], sentence(error))
    return _frame(spark, name, f"{place}: decision", rows)


def postgresql(spark: "SparkSession", name: str, place: str, waits: Waits) -> "tuple[DataFrame, list[Quarantined]]":
    """Read the decisions of a PostgreSQL database."""
    try:
        with connected(name, place, waits) as server:
            rows = server.rows(_SELECT + "dtx_tm.decision ORDER BY gtrid")
    except SourceError as error:
        return _frame(spark, name, "dtx_tm.decision", [], without_name(name, error))
    return _frame(spark, name, "dtx_tm.decision", rows)


def _frame(
    spark: "SparkSession", name: str, item: str, rows: Iterable[tuple[Any, ...]], failed: str | None = None
) -> "tuple[DataFrame, list[Quarantined]]":
    found: list[tuple[Any, ...]] = []
    wrong: dict[str, list[str]] = {}
    for node, format_id, gtrid, decision, at, finished in rows:
        if decision == "rollback" and finished is None:
            continue
        reason = _wrong(format_id, gtrid, decision)
        time = _time(at)
        if reason is None and time is None:
            reason = "at is not a time"
        if reason is not None:
            wrong.setdefault(reason, []).append(gtrid.hex() if isinstance(gtrid, bytes) else str(gtrid))
            continue
        found.append((node, format_id, bytes(gtrid), decision, time, finished is not None, name))
    columns = list(zip(*found, strict=True)) or [()] * len(DECISIONS.fields)
    schema = arrow_schema(DECISIONS)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    frame = spark.createDataFrame(pa.Table.from_arrays(arrays, schema=schema), DECISIONS)
    quarantined = [
        Quarantined(source=name, item=item, reason=reason, count=len(bad), sample=sample(bad[0]))
        for reason, bad in sorted(wrong.items())
    ]
    if failed is not None:
        quarantined.append(Quarantined(source=name, item=item, reason=failed, count=None))
    return frame, quarantined


def _wrong(format_id: object, gtrid: object, decision: object) -> str | None:
    if not isinstance(gtrid, bytes | memoryview) or not 1 <= len(bytes(gtrid)) <= 64:
        return "gtrid does not have 1 to 64 bytes"
    if not isinstance(format_id, int) or not 0 <= format_id <= MOST_FORMAT_ID:
        return NO_FORMAT_ID
    return None if decision in {"commit", "rollback"} else NO_CHOICE


def _time(at: object) -> datetime | None:
    try:
        time = datetime.fromisoformat(at) if isinstance(at, str) else at
    except ValueError:
        return None
    if not isinstance(time, datetime):
        return None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)
