"""The neutral format in Parquet. A file that is cut off, or is none, is named and left out; the others are read."""

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

_REQUIRED: Final = ("gtrid", "decision", "time")
_REASON: Final = 300
_EMPTY: Final = "empty: 0 octets are no Parquet file"
SPARK_ERRORS: Final = (PySparkException, Py4JJavaError)
"""What Spark refuses with; the second one where it has no error of its own for what Java says."""


def parquet(spark: "SparkSession", name: str, place: str) -> "tuple[DataFrame, list[Quarantined]]":
    """Decisions of a file or a directory of files."""
    whole, wrong = sound(spark, name, place, columns=_REQUIRED)
    if whole is None:
        return spark.createDataFrame([], DECISIONS), wrong
    lacking = [column for column in _REQUIRED if column not in whole.columns]
    if lacking:
        reason = f"there is no column {', '.join(lacking)}"
        return spark.createDataFrame([], DECISIONS), [
            *wrong, Quarantined(source=name, item=place, reason=reason, count=whole.count())
        ]  # fmt: skip
    types = {field.name: field.dataType for field in whole.schema.fields}
    wanted = {"gtrid": BinaryType(), "decision": StringType(), "time": TimestampType()}
    other = [column for column, type_ in wanted.items() if types[column] != type_]
    if other:
        reason = f"column {other[0]} is {types[other[0]].simpleString()}, not {wanted[other[0]].simpleString()}"
        return spark.createDataFrame([], DECISIONS), [
            *wrong, Quarantined(source=name, item=place, reason=reason, count=whole.count())
        ]  # fmt: skip
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
    there = set(whole.columns)
    return judged.where("reason IS NULL").select(
        (sf.coalesce(sf.col("tm"), sf.lit(name)) if "tm" in there else sf.lit(name)).alias("tm"),
        (sf.col("format_id").cast("bigint") if "format_id" in there else sf.lit(None).cast("bigint")).alias(
            "format_id"
        ),
        "gtrid",
        "decision",
        sf.col("time").alias("at"),
        (sf.col("finished").cast("boolean") if "finished" in there else sf.lit(None).cast("boolean")).alias("finished"),
        sf.lit(name).alias("source"),
    ), wrong


def sound(
    spark: "SparkSession", name: str, place: str, *, columns: tuple[str, ...] = ()
) -> "tuple[DataFrame | None, list[Quarantined]]":
    """The files of *place* that can be read to their end, and what is wrong with the others.

    Args:
        spark: a session.
        name: for the quarantine.
        place: a file or a directory.
        columns: those that are looked at; empty: all.

    Returns:
        A DataFrame, ``None`` where no file can be read.
    """
    try:
        whole = spark.read.option("recursiveFileLookup", "true").parquet(place)
        _to_the_end(whole, columns)
        empty = _empty(spark, place)
    except SPARK_ERRORS as error:
        return _one_by_one(spark, name, place, columns, error)
    return whole, [Quarantined(source=name, item=path, reason=_EMPTY, count=None) for path in empty]


def _empty(spark: "SparkSession", place: str) -> list[str]:
    """Files of no octets at all: Spark lists them, and passes over them without a word when it reads."""
    listed = spark.read.format("binaryFile").option("recursiveFileLookup", "true").load(place)
    there = {row["path"] for row in listed.select("path").collect()}
    # the one is told as a path, the other as a URI with three slashes
    names = (re.sub("^file:/+", "file:/", unquote(uri)) for uri in listed.inputFiles())
    return sorted(name for name in names if name not in there)


def _one_by_one(
    spark: "SparkSession", name: str, place: str, columns: tuple[str, ...], error: Exception
) -> "tuple[DataFrame | None, list[Quarantined]]":
    try:
        listed = spark.read.format("binaryFile").option("recursiveFileLookup", "true").load(place).select("path")
        paths = sorted(row["path"] for row in listed.collect())
        empty = _empty(spark, place)
    except SPARK_ERRORS:
        return None, [Quarantined(source=name, item=place, reason=_sentence(error), count=None)]
    good: list[str] = []
    wrong = [Quarantined(source=name, item=path, reason=_EMPTY, count=None) for path in empty]
    for path in paths:
        try:
            _to_the_end(spark.read.parquet(path), columns)
        except SPARK_ERRORS as refused:
            wrong.append(Quarantined(source=name, item=path, reason=_sentence(refused), count=None))
        else:
            good.append(path)
    if not paths and not empty:
        wrong.append(Quarantined(source=name, item=place, reason="there are no files", count=0))
    return (spark.read.parquet(*good) if good else None), wrong


def _to_the_end(frame: "DataFrame", columns: tuple[str, ...]) -> None:
    """Read all of it: only then it is known that no page is damaged."""
    wanted = [column for column in columns or frame.columns if column in frame.columns]
    frame.agg(sf.count("*"), *(sf.bit_xor(sf.xxhash64(column)) for column in wanted)).collect()


def _reason(columns: list[str]) -> "Column":
    length = sf.octet_length("gtrid")
    reason = sf.when(sf.col("gtrid").isNull() | ~length.between(1, 64), "gtrid is not of 1 to 64 octets")
    decision = sf.col("decision")
    reason = reason.when(decision.isNull() | ~decision.isin("commit", "rollback"), "decision is not commit or rollback")
    reason = reason.when(sf.col("time").isNull(), "there is no time")
    if "format_id" in columns:
        outside = ~sf.coalesce(sf.col("format_id").try_cast("bigint").between(0, 0xFFFFFFFF), sf.lit(False))
        reason = reason.when(sf.col("format_id").isNotNull() & outside, "format_id is not an unsigned 32 bit number")
    return reason


def _sentence(error: Exception) -> str:
    """What Spark says, without its stack: the last cause is the one that names the damage."""
    text = str(error)
    for known, sentence in (
        ("is not a Parquet file", "not a Parquet file, or cut off: its end is missing"),
        ("PATH_NOT_FOUND", "there is no such file or directory"),
        ("UNABLE_TO_INFER_SCHEMA", "there are no Parquet files"),
    ):
        if known in text:
            return sentence
    return sample(text.splitlines()[0][:_REASON] if text else type(error).__name__)
