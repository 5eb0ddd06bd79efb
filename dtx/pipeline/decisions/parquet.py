"""The neutral format in Parquet. Damaged files and files of other formats are reported and left out."""

import re
from typing import Final
from urllib.parse import unquote

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.types import BinaryType, StringType, TimestampType

from dtx.pipeline.decisions.kinds import DECISIONS, checked, decisions
from dtx.pipeline.quarantine import Quarantined, first_line, sample
from dtx.pipeline.session import no_rows

_REQUIRED: Final = {"gtrid": BinaryType(), "decision": StringType(), "time": TimestampType()}
_OPTIONAL: Final = ("tm", "format_id", "finished")
SPARK_ERRORS: Final = (PySparkException, Py4JJavaError)
"""Errors of Spark; the second one is for errors of Java that PySpark has no class for."""


def parquet(spark: SparkSession, name: str, place: str) -> tuple[DataFrame, list[Quarantined]]:
    """Read the decisions of a file or a directory of files."""
    found, wrong = _sound(spark, name, place)
    read = no_rows(spark, DECISIONS)
    for whole, item in found:
        if reason := _refused(whole):
            wrong.append(Quarantined(source=name, item=item, reason=reason, count=whole.count(), whole=True))
            continue
        judged = _judged(whole, name)
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
        read = read.unionByName(decisions(judged))
    return read, wrong


def _sound(spark: SparkSession, name: str, place: str) -> tuple[list[tuple[DataFrame, str]], list[Quarantined]]:
    """Return the files that can be read to their end, and records of the others.

    There are several DataFrames, each with its place, if files have columns of different types.
    """
    try:
        # without mergeSchema the columns are those of one file alone
        options = {"recursiveFileLookup": "true", "mergeSchema": "true"}
        whole = spark.read.options(**options).parquet(place)
        _to_the_end(whole)
    except SPARK_ERRORS:
        return _one_by_one(spark, name, place)
    return [(whole, place)], _empty(name, _files(spark, place)[1])


def _files(spark: SparkSession, place: str) -> tuple[list[str], list[str]]:
    """Return the files, and those of 0 bytes, which Spark lists, and skips without an error when it reads."""
    listed = spark.read.format("binaryFile").option("recursiveFileLookup", "true").load(place)
    there = {row["path"] for row in listed.select("path").collect()}
    # column path has one slash after the scheme, inputFiles() has three
    names = (re.sub("^file:/+", "file:/", unquote(uri)) for uri in listed.inputFiles())
    return sorted(there), sorted(name for name in names if name not in there)


def _empty(name: str, paths: list[str]) -> list[Quarantined]:
    return [Quarantined(source=name, item=path, reason="the file is empty", count=None) for path in paths]


def _one_by_one(spark: SparkSession, name: str, place: str) -> tuple[list[tuple[DataFrame, str]], list[Quarantined]]:
    paths, empty = _files(spark, place)
    alike: dict[str, list[str]] = {}
    wrong = _empty(name, empty)
    for path in paths:
        try:
            frame = spark.read.parquet(path)
            _to_the_end(frame)
        except SPARK_ERRORS as refused:
            wrong.append(Quarantined(source=name, item=path, reason=spark_sentence(refused), count=None))
        else:
            # Spark fails where files that it reads together differ in the types of columns
            types = [f"{column} {frame.schema[column].dataType.simpleString()}" for column in _used(frame)]
            alike.setdefault(", ".join(types), []).append(path)
    if not paths and not empty:
        wrong.append(Quarantined(source=name, item=place, reason="there are no files", count=0))
    found = [
        (spark.read.parquet(*some), some[0] if len(some) == 1 else f"{some[0]} and {len(some) - 1:,} others like it")
        for some in alike.values()
    ]
    return found, wrong


def _used(frame: DataFrame) -> list[str]:
    return [column for column in (*_REQUIRED, *_OPTIONAL) if column in frame.columns]


def _to_the_end(frame: DataFrame) -> None:
    """Read all used columns to the end: only that shows that no page is damaged."""
    frame.agg(sf.count("*"), *(sf.bit_xor(sf.xxhash64(column)) for column in _used(frame))).collect()


def _refused(frame: DataFrame) -> str | None:
    """Return why no row of these files can be a decision, ``None`` where each row must be checked."""
    lacking = [column for column in _REQUIRED if column not in frame.columns]
    if lacking:
        return f"there is no column {', '.join(lacking)}"
    types = {field.name: field.dataType for field in frame.schema.fields}
    for column, wanted in _REQUIRED.items():
        if types[column] != wanted:
            return f"column {column} is {types[column].simpleString()}, not {wanted.simpleString()}"
    return None


def _judged(frame: DataFrame, name: str) -> DataFrame:
    """Check each row; columns of other types are converted where possible, else they are null."""
    lacking = {column: sf.lit(None).cast("string") for column in _OPTIONAL if column not in frame.columns}
    return checked(
        frame.withColumn("path", sf.col("_metadata.file_path")).withColumns(lacking),
        name,
        gtrid=(sf.when(sf.octet_length("gtrid").between(1, 64), sf.col("gtrid")), "gtrid does not have 1 to 64 bytes"),
        time=(sf.col("time"), "there is no time"),
        finished=sf.col("finished").try_cast("boolean"),
    )


def spark_sentence(error: Exception) -> str:
    """Return the message of an error of Spark, without its stack."""
    text = str(error)
    for known, sentence in (
        ("is not a Parquet file", "not a Parquet file, or cut off: its end is missing"),
        ("PATH_NOT_FOUND", "there is no such file or directory"),
    ):
        if known in text:
            return sentence
    return sample(first_line(error))
