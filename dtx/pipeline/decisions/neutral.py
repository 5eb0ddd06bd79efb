"""The neutral format in CSV and JSON lines: every line is judged for itself, by Spark's own functions."""

import csv
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as sf
from pyspark.sql.types import StringType, StructField, StructType

from dtx.pipeline.decisions.lines import LINE, lines, one_object, quarantined, written
from dtx.pipeline.quarantine import Quarantined, sample

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_CORRUPT: Final = "_corrupt"
_COLUMNS: Final = ("gtrid", "decision", "time", "format_id", "tm", "finished")
_REQUIRED: Final = ("gtrid", "decision", "time")
_GTRID: Final = "^([0-9A-Fa-f]{2}){1,64}$"
_ZONED: Final = r"(?i).*([zZ]|[+-]\d{2}(:?\d{2})?)$"


def json_lines(spark: "SparkSession", name: str, place: str) -> "tuple[DataFrame, list[Quarantined]]":
    """A JSON object to a line."""
    every = lines(spark, place)
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    schema = StructType([StructField(column, StringType()) for column in (*_COLUMNS, _CORRUPT)])
    row = sf.when(one_object(), sf.from_json(LINE, schema, options))
    parsed = every.where(written()).withColumn("row", row)
    judged = _judged(parsed, "not a JSON object")
    return _decisions(judged, name), quarantined(name, every, judged)


def csv_lines(spark: "SparkSession", name: str, place: str) -> "tuple[DataFrame, list[Quarantined]]":
    """CSV with a header in each file; columns in any order, others than the known ones are passed over."""
    every = lines(spark, place)
    first = sf.min(sf.struct("block", "seq", LINE)).alias("first")
    headers: dict[str, list[str]] = {}
    for path, found in every.where(written()).groupBy("path").agg(first).collect():
        headers.setdefault(found[LINE], []).append(path)
    frames: list[DataFrame] = []
    wrong: list[Quarantined] = []
    for header, paths in sorted(headers.items()):
        columns = [column.strip().lower() for column in next(csv.reader([header.lstrip("\ufeff")]))]
        lacking = [column for column in _REQUIRED if columns.count(column) != 1]
        of_these = every.where(sf.col("path").isin(paths))
        if lacking:
            reason = f"the header lacks {', '.join(lacking)}, or has it twice"
            counts: dict[str, int] = dict(of_these.where(written()).groupBy("path").count().collect())
            wrong += [
                Quarantined(
                    source=name,
                    item=f"{path}:1",
                    reason=reason,
                    count=counts[path] - 1,
                    sample=sample(header),
                    whole=True,
                )
                for path in sorted(paths)
            ]
            continue
        judged = _judged(
            _csv(of_these.where(written()).where(sf.col(LINE) != header), columns), "not as many fields as the header"
        )
        frames.append(_decisions(judged, name))
        wrong += quarantined(name, every, judged)
    if not frames:
        frames.append(_decisions(_judged(_csv(every.where(sf.lit(False)), list(_REQUIRED)), ""), name))
    whole = frames[0]
    for frame in frames[1:]:
        whole = whole.unionByName(frame)
    return whole, wrong


def _csv(rows: "DataFrame", columns: list[str]) -> "DataFrame":
    # names that nobody asks for may be odd, or there twice
    names = [column if column in _COLUMNS else f"other {number}" for number, column in enumerate(columns)]
    ddl = ", ".join(f"`{column}` STRING" for column in [*names, _CORRUPT])
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    parsed = rows.withColumn("found", sf.from_csv(LINE, ddl, options))
    kept = [
        (sf.col(f"found.`{column}`") if column in names else sf.lit(None).cast("string")).alias(column)
        for column in (*_COLUMNS, _CORRUPT)
    ]
    return parsed.withColumn("row", sf.struct(*kept)).drop("found")


def _judged(parsed: "DataFrame", malformed: str) -> "DataFrame":
    row = {column: sf.col(f"row.{column}") for column in (*_COLUMNS, _CORRUPT)}
    reason = sf.when(sf.col("row").isNull() | row[_CORRUPT].isNotNull(), malformed)
    for wrong, sentence in (
        (row["gtrid"].isNull() | ~row["gtrid"].rlike(_GTRID), "gtrid is not 1 to 64 octets in hexadecimal"),
        (row["decision"].isNull() | ~row["decision"].isin("commit", "rollback"), "decision is not commit or rollback"),
        (_time(row["time"]).isNull(), "time is not one of ISO 8601"),
        (row["format_id"].isNotNull() & ~_in_range(row["format_id"]), "format_id is not an unsigned 32 bit number"),
        (
            row["finished"].isNotNull() & ~sf.lower(row["finished"]).isin("true", "false"),
            "finished is not true or false",
        ),
    ):
        reason = reason.when(wrong, sentence)
    return parsed.withColumn("reason", reason)


def _time(text: "Column") -> "Column":
    trimmed = sf.trim(text)
    return sf.when(
        trimmed.rlike(r"^\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}"),
        sf.when(trimmed.rlike(_ZONED), sf.try_to_timestamp(trimmed)).otherwise(
            sf.try_to_timestamp(sf.concat(trimmed, sf.lit("Z")))
        ),
    )


def _in_range(text: "Column") -> "Column":
    return sf.coalesce(text.try_cast("bigint").between(0, 0xFFFFFFFF), sf.lit(False))


def _decisions(judged: "DataFrame", name: str) -> "DataFrame":
    return judged.where("reason IS NULL").select(
        sf.coalesce("row.tm", sf.lit(name)).alias("tm"),
        sf.col("row.format_id").try_cast("bigint").alias("format_id"),
        sf.unhex("row.gtrid").alias("gtrid"),
        sf.col("row.decision").alias("decision"),
        _time(sf.col("row.time")).alias("at"),
        (sf.lower("row.finished") == "true").alias("finished"),
        sf.lit(name).alias("source"),
    )
