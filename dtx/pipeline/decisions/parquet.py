"""The neutral format in Parquet. Damaged files and files of other formats are reported and left out."""

import re
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import functions as sf
from pyspark.sql.types import BinaryType, StringType, TimestampType

from dtx.pipeline.decisions.kinds import DECISIONS
from dtx.pipeline.quarantine import Quarantined, sample

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_REQUIRED: Final = {"gtrid": BinaryType(), "decision": StringType(), "time": TimestampType()}
_COLUMNS: Final = (*_REQUIRED, "tm", "format_id", "finished")
_REASON: Final = 300
_EMPTY: Final = "the file is empty"
SPARK_ERRORS: Final = (PySparkException, Py4JJavaError)
"""Errors of Spark; the second one is for errors of Java that PySpark has no class for."""


def parquet(spark: "SparkSession", name: str, place: str) -> "tuple[DataFrame, list[Quarantined]]":
    """Read the decisions of a file or a directory of files."""
    found, wrong = sound(spark, name, place)
    decisions = spark.createDataFrame([], DECISIONS)
    for whole, item in found:
        if reason := _refused(whole):
            wrong.append(Quarantined(source=name, item=item, reason=reason, count=whole.count(), whole=True))
            continue
        judged = whole.withColumn("reason", _reason(whole.columns)).withColumn("path", sf.col("_metadata.file_path"))
        bad = (
            judged.where("reason IS NOT NULL")
            .groupBy("path", "reason")
            .agg(sf.count("*").alias("n"), sf.min(sf.hex("gtrid")).alias("gtrid"))
            .orderBy("path", "reason")
        )
        wrong += [
            Quarantined(source=name, item=path, reason=reason, count=count, sample=sample(gtrid or ""))
            for path, reason, count, gtrid in bad.limit(1_000).collect()
        ]
        decisions = decisions.unionByName(_decisions(judged, name, set(whole.columns)))
    return decisions, wrong


def sound(spark: "SparkSession", name: str, place: str) -> "tuple[list[tuple[DataFrame, str]], list[Quarantined]]":
    """Return the files of *place* that can be read to their end, and records of the others.

    Args:
        spark: a session.
        name: of the log, for the records.
        place: a file or a directory.

    Returns:
        DataFrames, each with its place: several if files have columns of different types.
    """
    try:
        # without mergeSchema the columns are those of one file alone
        options = {"recursiveFileLookup": "true", "mergeSchema": "true"}
        whole = spark.read.options(**options).parquet(place)
        _to_the_end(whole)
        empty = _empty(spark, place)
    except SPARK_ERRORS as error:
        return _one_by_one(spark, name, place, error)
    return [(whole, place)], [Quarantined(source=name, item=path, reason=_EMPTY, count=None) for path in empty]


def _empty(spark: "SparkSession", place: str) -> list[str]:
    """Return files of 0 bytes, which Spark lists, and skips without an error when it reads."""
    listed = spark.read.format("binaryFile").option("recursiveFileLookup", "true").load(place)
    there = {row["path"] for row in listed.select("path").collect()}
    # column path has one slash after the scheme, inputFiles() has three
    names = (re.sub("^file:/+", "file:/", unquote(uri)) for uri in listed.inputFiles())
    return sorted(name for name in names if name not in there)


def _one_by_one(
    spark: "SparkSession", name: str, place: str, error: Exception
) -> "tuple[list[tuple[DataFrame, str]], list[Quarantined]]":
    try:
        listed = spark.read.format("binaryFile").option("recursiveFileLookup", "true").load(place).select("path")
        paths = sorted(row["path"] for row in listed.collect())
        empty = _empty(spark, place)
    except SPARK_ERRORS:
        return [], [Quarantined(source=name, item=place, reason=_sentence(error), count=None)]
    alike: dict[str, list[str]] = {}
    wrong = [Quarantined(source=name, item=path, reason=_EMPTY, count=None) for path in empty]
    for path in paths:
        try:
            frame = spark.read.parquet(path)
            _to_the_end(frame)
        except SPARK_ERRORS as refused:
            wrong.append(Quarantined(source=name, item=path, reason=_sentence(refused), count=None))
        else:
            # Spark fails where files that it reads together differ in the types of columns
            types = [
                f"{field.name} {field.dataType.simpleString()}" for field in frame.schema if field.name in _COLUMNS
            ]
            alike.setdefault(", ".join(sorted(types)), []).append(path)
    if not paths and not empty:
        wrong.append(Quarantined(source=name, item=place, reason="there are no files", count=0))
    found = [
        (spark.read.parquet(*some), some[0] if len(some) == 1 else f"{some[0]} and {len(some) - 1:,} others like it")
        for some in alike.values()
    ]
    return found, wrong


def _to_the_end(frame: "DataFrame") -> None:
    """Read all used columns to the end: only that shows that no page is damaged."""
    wanted = [column for column in _COLUMNS if column in frame.columns]
    frame.agg(sf.count("*"), *(sf.bit_xor(sf.xxhash64(column)) for column in wanted)).collect()


def _refused(frame: "DataFrame") -> str | None:
    """Return why no row of these files can be a decision, ``None`` where each row must be checked."""
    lacking = [column for column in _REQUIRED if column not in frame.columns]
    if lacking:
        return f"there is no column {', '.join(lacking)}"
    types = {field.name: field.dataType for field in frame.schema.fields}
    for column, wanted in _REQUIRED.items():
        if types[column] != wanted:
            return f"column {column} is {types[column].simpleString()}, not {wanted.simpleString()}"
    return None


def _reason(columns: list[str]) -> "Column":
    length = sf.octet_length("gtrid")
    reason = sf.when(sf.col("gtrid").isNull() | ~length.between(1, 64), "gtrid does not have 1 to 64 bytes")
    decision = sf.col("decision")
    reason = reason.when(decision.isNull() | ~decision.isin("commit", "rollback"), "decision is not commit or rollback")
    reason = reason.when(sf.col("time").isNull(), "there is no time")
    if "format_id" in columns:
        outside = ~sf.coalesce(sf.col("format_id").try_cast("bigint").between(0, 0xFFFFFFFF), sf.lit(False))
        reason = reason.when(sf.col("format_id").isNotNull() & outside, "format_id is not an unsigned 32 bit number")
    if "finished" in columns:
        neither = sf.col("finished").isNotNull() & sf.col("finished").try_cast("boolean").isNull()
        reason = reason.when(neither, "finished is not true or false")
    return reason


def _decisions(judged: "DataFrame", name: str, there: set[str]) -> "DataFrame":
    """Return the valid rows as :data:`DECISIONS`; columns of other types are converted where possible, else null."""

    def tried(column: str, kind: str) -> "Column":
        return (sf.col(column).try_cast(kind) if column in there else sf.lit(None).cast(kind)).alias(column)

    return judged.where("reason IS NULL").select(
        sf.coalesce(tried("tm", "string"), sf.lit(name)).alias("tm"),
        tried("format_id", "bigint"),
        "gtrid",
        "decision",
        sf.col("time").alias("at"),
        tried("finished", "boolean"),
        sf.lit(name).alias("source"),
    )


def _sentence(error: Exception) -> str:
    """Return the message of an error of Spark, without its stack."""
    text = str(error)
    for known, sentence in (
        ("is not a Parquet file", "not a Parquet file, or cut off: its end is missing"),
        ("PATH_NOT_FOUND", "there is no such file or directory"),
        ("UNABLE_TO_INFER_SCHEMA", "there are no Parquet files"),
    ):
        if known in text:
            return sentence
    return sample(text.splitlines()[0][:_REASON] if text else type(error).__name__)
