"""Reads the decision logs of all transaction managers into one DataFrame."""

from collections.abc import Sequence
from typing import assert_never

from pyspark.sql import DataFrame, SparkSession

from dtx.config.values import redact
from dtx.pipeline.decisions.kinds import DECISIONS
from dtx.pipeline.decisions.own import postgresql, sqlite
from dtx.pipeline.decisions.parquet import SPARK_ERRORS, parquet, spark_sentence
from dtx.pipeline.decisions.text import atomikos, csv_lines, json_lines
from dtx.pipeline.fleet import Decisions
from dtx.pipeline.quarantine import Quarantined
from dtx.pipeline.session import few_rows, no_rows
from dtx.pipeline.source.server import SourceError, Waits, without_name

__all__ = ["DECISIONS", "read"]


def read(
    spark: SparkSession, logs: Sequence[Decisions], *, waits: Waits = Waits()
) -> tuple[DataFrame, list[Quarantined]]:
    """Return every decision as :data:`DECISIONS`, and the lines, files and logs that could not be read."""
    whole = no_rows(spark, DECISIONS)
    wrong: list[Quarantined] = []
    for log in logs:
        try:
            frame, quarantined = _read(spark, log, waits)
        except (*SPARK_ERRORS, SourceError) as error:
            reason = without_name(log.name, error) if isinstance(error, SourceError) else spark_sentence(error)
            wrong.append(Quarantined(source=log.name, item=redact(log.place), reason=reason, count=None))
            continue
        whole = whole.unionByName(frame)
        wrong += quarantined
    rows = few_rows(whole)
    return whole if rows is None else spark.createDataFrame(rows, DECISIONS), wrong


def _read(spark: SparkSession, log: Decisions, waits: Waits) -> tuple[DataFrame, list[Quarantined]]:
    match log.format:
        case "parquet":
            return parquet(spark, log.name, log.place)
        case "csv":
            return csv_lines(spark, log.name, log.place)
        case "json":
            return json_lines(spark, log.name, log.place)
        case "atomikos":
            return atomikos(spark, log.name, log.place)
        case "dtx" if log.url is None:
            return sqlite(spark, log.name, log.place)
        case "dtx":
            return postgresql(spark, log.name, log.place, waits)
        case _:
            assert_never(log.format)
