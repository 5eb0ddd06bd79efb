"""``format("dtx")`` through Spark: a few reads and streams; test_source.py has the rest, without Spark."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from dtx.pipeline.source import register
from tests.support.journal import write
from tests.support.processes import free_port


@pytest.fixture
def url(migrated_postgres_url: str) -> str:
    """A database with the log's tables."""
    return migrated_postgres_url


@pytest.fixture
def writer(url: str) -> Iterator[psycopg.Connection]:
    """A connection to it in autocommit mode."""
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection


@pytest.fixture(autouse=True)
def _registered(spark: SparkSession) -> None:
    register(spark)


def load(spark: SparkSession, url: str, **options: Any) -> DataFrame:
    """The journal."""
    return spark.read.format("dtx").options(url=url, **options).load()


def numbers(frame: DataFrame) -> list[int]:
    """What :func:`write` counted."""
    return sorted(row["publishes"] for row in frame.select("publishes").collect())


def test_several_databases_are_one_dataframe(spark: SparkSession, url: str, writer: psycopg.Connection) -> None:
    write(writer, 1, 12)
    frame = spark.read.format("dtx").options(sources=json.dumps({"a": url, "b": url})).load()
    some = frame.where("rm = 'rm1' AND publishes > 4 AND gtrid > X'00000005' AND source = 'a'")
    assert sorted(some.select("source", "publishes").collect()) == [("a", 7), ("a", 10)]
    assert frame.count() == 24


def test_one_dataframe_with_several_filters_has_the_rows_of_each(
    spark: SparkSession, url: str, writer: psycopg.Connection
) -> None:
    """Spark 4.3 keeps the filter that it pushed last with the DataFrame: pushed, this had rm2 twice and rm1 never."""
    write(writer, 1, 9)
    frame = load(spark, url)
    both = frame.where("rm = 'rm1'").unionByName(frame.where("rm = 'rm2'"))
    assert {row["rm"]: row["count"] for row in both.groupBy("rm").count().collect()} == {"rm1": 3, "rm2": 3}
    assert frame.count() == 9


def test_a_stream_goes_on_at_its_checkpoint(
    spark: SparkSession, url: str, writer: psycopg.Connection, tmp_path: Path
) -> None:
    """Two runs with Trigger.AvailableNow, a transaction that commits late between them."""

    def run() -> list[int]:
        stream = spark.readStream.format("dtx").options(url=url, maxRowsPerBatch=15).load()
        to_files = stream.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
        to_files.trigger(availableNow=True).start(str(tmp_path / "lake")).awaitTermination()
        return numbers(spark.read.parquet(str(tmp_path / "lake")))

    with psycopg.connect(url) as slow:
        write(slow, 1, 10)
        write(writer, 11, 20)
        write(writer, 21, 30)
        assert run() == list(range(11, 31))
        slow.commit()
    assert run() == list(range(1, 31))


def test_a_database_that_is_away_is_named_without_its_password(spark: SparkSession) -> None:
    gone = f"postgresql://dtx:hunter2@127.0.0.1:{free_port()}/dtx"
    with pytest.raises(PySparkException, match="bank-a: ") as caught:
        load(spark, gone, name="bank-a", connectTimeout=2).count()
    assert "hunter2" not in str(caught.value)
