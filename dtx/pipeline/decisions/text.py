"""Decision logs that are files of lines: the neutral format in CSV and JSON lines, and the log of Atomikos.

Spark's own functions check each line. A line that is refused is reported with its file and number.

Atomikos writes ``tmlog*.log``, one entry in each line, later entries of a transaction after earlier ones. Release 4
writes JSON (``{"id":…,"wasCommitted":…,"participants":[{"uri":…,"state":…}]}``), later releases write
``id|state|expires|domain|superior``. There is a line when a transaction is COMMITTING, and another one when it is
TERMINATED. A checkpoint drops terminated transactions. The log has no times of decisions, so these are null.
"""

import csv
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sf

from dtx.pipeline.decisions.kinds import DECISIONS, checked, decisions
from dtx.pipeline.quarantine import Quarantined, sample
from dtx.pipeline.session import no_rows
from dtx.pipeline.source.columns import spark_schema

LINE: Final = "value"
_BLOCK: Final = ("path", "block")
_MOST_REASONS: Final = 1_000
"""Limit of records (one for each file and reason) of one log; further ones are left out."""
_CORRUPT: Final = "_corrupt"
_COLUMNS: Final = ("gtrid", "decision", "time", "format_id", "tm", "finished")
_REQUIRED: Final = ("gtrid", "decision", "time")
_GTRID: Final = "^([0-9A-Fa-f]{2}){1,64}$"
_ZONED: Final = r"(?i).*([zZ]|[+-]\d{2}(:?\d{2})?)$"
_ENTRY: Final = (
    "id STRING, wasCommitted BOOLEAN, participants ARRAY<STRUCT<uri: STRING, state: STRING>>, _corrupt STRING"
)
_STATES: Final = (
    "ACTIVE", "MARKED_ABORT", "LOCALLY_DONE", "PREPARING", "IN_DOUBT", "ABORTING", "COMMITTING", "SUSPENDED",
    "HEUR_COMMITTED", "HEUR_ABORTED", "HEUR_MIXED", "HEUR_HAZARD", "TERMINATED", "COMMITTED", "ABORTED", "ABANDONED",
)  # fmt: skip
_UNDECIDED: Final = "the transaction is terminated, and no line of this log has its decision"


def lines(spark: SparkSession, place: str) -> DataFrame:
    """Return the lines of a file or directory; ``seq`` grows within each ``block`` of a ``path``."""
    return spark.read.text(place).select(
        LINE,
        sf.col("_metadata.file_path").alias("path"),
        sf.col("_metadata.file_block_start").alias("block"),
        sf.monotonically_increasing_id().alias("seq"),
    )


def written() -> Column:
    """Return whether a line is not blank."""
    return sf.length(sf.trim(LINE)) > 0


def one_object() -> Column:
    """Return whether a line is one JSON object: of several, or of a list, Spark reads only the first, without an error.

    A comma after the object is allowed: a list that is written over many lines has one.
    """
    text = sf.rtrim(sf.ltrim(LINE, sf.lit(" \t")), sf.lit(" \t,"))
    count = sf.json_array_length(sf.concat(sf.lit("["), text, sf.lit("]")))
    return sf.coalesce(text.startswith("{") & text.endswith("}") & (count == 1), sf.lit(False))


def quarantined(name: str, every: DataFrame, judged: DataFrame) -> list[Quarantined]:
    """Return a record for each file and reason: the number of lines, and number and text of the first line.

    *every* is the result of :func:`lines`, and *judged* are some of these, with a ``reason`` if they are not valid.
    """
    first = sf.min(sf.struct("block", "seq", LINE)).alias("first")
    found = (
        judged.where("reason IS NOT NULL")
        .groupBy("path", "reason")
        .agg(sf.count("*").alias("count"), first)
        .orderBy("path", "reason")
        .limit(_MOST_REASONS)
        .collect()
    )
    if not found:
        return []
    paths = sorted({row["path"] for row in found})
    blocks: dict[str, list[tuple[int, int, int]]] = {}
    counted = every.where(sf.col("path").isin(paths)).groupBy(*_BLOCK).agg(sf.count("*").alias("n"), sf.min("seq"))
    for path, block, count, least in counted.collect():
        blocks.setdefault(path, []).append((block, count, least))
    return [
        Quarantined(
            source=name,
            item=f"{row['path']}:{_number(blocks[row['path']], row['first']['block'], row['first']['seq'])}",
            reason=row["reason"],
            count=row["count"],
            sample=sample(row["first"][LINE]),
        )
        for row in found
    ]


def _number(blocks: list[tuple[int, int, int]], block: int, seq: int) -> int:
    """Return the number of a line, from 1: all lines of earlier blocks, and its place in its own block."""
    before = sum(count for start, count, _ in blocks if start < block)
    least = next(least for start, _, least in blocks if start == block)
    return before + seq - least + 1


def json_lines(spark: SparkSession, name: str, place: str) -> tuple[DataFrame, list[Quarantined]]:
    """Read JSON lines in the neutral format."""
    every = lines(spark, place)
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    schema = spark_schema(**dict.fromkeys((*_COLUMNS, _CORRUPT), "string"))
    row = sf.when(one_object(), sf.from_json(LINE, schema, options))
    parsed = every.where(written()).withColumn("row", row).select("*", "row.*")
    judged = _judged(parsed, name, sf.col("row").isNull() | sf.col(_CORRUPT).isNotNull(), "not a JSON object")
    return decisions(judged), quarantined(name, every, judged)


def csv_lines(spark: SparkSession, name: str, place: str) -> tuple[DataFrame, list[Quarantined]]:
    """Read CSV with a header in each file; columns are in any order, and unknown ones are ignored."""
    every = lines(spark, place)
    first = sf.min(sf.struct("block", "seq", LINE)).alias("first")
    headers: dict[str, list[str]] = {}
    for path, found in every.where(written()).groupBy("path").agg(first).collect():
        headers.setdefault(found[LINE], []).append(path)
    read = no_rows(spark, DECISIONS)
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
        rows = _csv(of_these.where(written()).where(sf.col(LINE) != header), columns)
        judged = _judged(rows, name, sf.col(_CORRUPT).isNotNull(), "not as many fields as the header")
        read = read.unionByName(decisions(judged))
        wrong += quarantined(name, every, judged)
    return read, wrong


def _csv(rows: DataFrame, columns: list[str]) -> DataFrame:
    # unknown columns may have invalid or repeated names
    names = [column if column in _COLUMNS else f"other {number}" for number, column in enumerate(columns)]
    ddl = ", ".join(f"`{column}` STRING" for column in [*names, _CORRUPT])
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    parsed = rows.withColumn("found", sf.from_csv(LINE, ddl, options))
    kept = [
        (sf.col(f"found.`{column}`") if column in names else sf.lit(None).cast("string")).alias(column)
        for column in (*_COLUMNS, _CORRUPT)
    ]
    return parsed.select("*", *kept)


def _judged(rows: DataFrame, name: str, malformed: Column, sentence: str) -> DataFrame:
    finished = sf.lower("finished")
    judged = checked(
        rows,
        name,
        gtrid=(
            sf.when(sf.col("gtrid").rlike(_GTRID), sf.unhex("gtrid")),
            "gtrid is not 1 to 64 bytes in hexadecimal",
        ),
        time=(_time(sf.col("time")), "time is not in ISO 8601"),
        finished=sf.when(finished.isin("true", "false"), finished == "true"),
    )
    return judged.withColumn("reason", sf.when(malformed, sentence).otherwise(sf.col("reason")))


def _time(text: Column) -> Column:
    trimmed = sf.trim(text)
    return sf.when(
        trimmed.rlike(r"^\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}"),
        sf.when(trimmed.rlike(_ZONED), sf.try_to_timestamp(trimmed)).otherwise(
            sf.try_to_timestamp(sf.concat(trimmed, sf.lit("Z")))
        ),
    )


def atomikos(spark: SparkSession, name: str, place: str) -> tuple[DataFrame, list[Quarantined]]:
    """Read the log of Atomikos: one decision for each transaction, which is finished if its last state says so."""
    every = lines(spark, place)
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    number = sf.coalesce(sf.regexp_extract("path", r"(\d+)[^/\d]*$", 1).try_cast("bigint"), sf.lit(0))
    states = sf.array(*map(sf.lit, _STATES))
    entries = (
        every.where(written())
        .withColumn("json", sf.from_json(LINE, _ENTRY, options))
        .withColumn("bars", sf.split(LINE, r"\|"))
        .withColumn("is_json", sf.ltrim(LINE).startswith("{"))
        .withColumn("id", sf.when(sf.col("is_json"), sf.col("json.id")).otherwise(sf.col("bars")[0]))
        .withColumn(
            "states",
            sf.when(
                sf.col("is_json"), sf.coalesce("json.participants.state", sf.array().cast("array<string>"))
            ).otherwise(sf.array(sf.get("bars", sf.lit(1)))),
        )
        .withColumn("log_number", number)
    )
    no_json = ~one_object() | sf.col("json").isNull() | sf.col("json._corrupt").isNotNull()
    broken = sf.when(sf.col("is_json"), no_json).otherwise(
        (sf.size("bars") < 3) | sf.get("bars", sf.lit(2)).try_cast("bigint").isNull()
    )
    length = sf.coalesce(sf.octet_length("id"), sf.lit(0))
    judged = entries.withColumn(
        "reason",
        sf.when(broken, "not an entry of Atomikos: neither JSON nor id|state|expires|…")
        .when(~length.between(1, 64), "id does not have 1 to 64 bytes")
        .when(~sf.forall("states", lambda state: sf.coalesce(sf.array_contains(states, state), sf.lit(False))),
              "Atomikos does not have this state"),
    )  # fmt: skip
    order = sf.struct("log_number", "path", "block", "seq")
    whole = (
        judged.where("reason IS NULL")
        .groupBy("id")
        .agg(
            sf.max(sf.arrays_overlap("states", sf.array(sf.lit("COMMITTING"), sf.lit("HEUR_COMMITTED")))).alias(
                "commits"
            ),
            sf.max(sf.coalesce("json.wasCommitted", sf.lit(False))).alias("was_committed"),
            sf.max(sf.arrays_overlap("states", sf.array(sf.lit("ABORTING"), sf.lit("HEUR_ABORTED")))).alias("aborts"),
            sf.max_by("states", order).alias("last"),
        )
        .withColumn(
            "decision",
            sf.when(sf.col("commits") | sf.col("was_committed"), "commit").when(sf.col("aborts"), "rollback"),
        )
        .withColumn("finished", sf.forall("last", lambda state: state == "TERMINATED"))
    )
    found = whole.where("decision IS NOT NULL").select(
        sf.lit(name).alias("tm"),
        sf.lit(None).cast("bigint").alias("format_id"),
        sf.encode("id", "UTF-8").alias("gtrid"),
        "decision",
        sf.lit(None).cast("timestamp").alias("at"),
        "finished",
        sf.lit(name).alias("source"),
    )
    return found, [*quarantined(name, every, judged), *_unknown(name, place, whole)]


def _unknown(name: str, place: str, whole: DataFrame) -> list[Quarantined]:
    """Return a record of terminated transactions without a decision: ended by a superior, or after a checkpoint."""
    terminated = whole.where("decision IS NULL AND finished")
    count, first = terminated.agg(sf.count("*"), sf.min("id")).collect()[0]
    if not count:
        return []
    return [Quarantined(source=name, item=place, reason=_UNDECIDED, count=count, sample=first)]
