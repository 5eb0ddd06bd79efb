"""The journals as a Delta table: every line once, whatever dies between the table's commit and the checkpoint's."""

import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from dtx.pipeline.archive import Form, LakeError, archive, read_lake
from dtx.pipeline.source import register
from tests.integration.pipeline.test_archive import MONDAY, journal, write
from tests.support.postgres import PostgresServer
from tests.support.spark import shared_spark

pytestmark = pytest.mark.timeout(900)  # a first job of Spark can take a minute where many others compute
RM = "bank/a=b c%d"


@pytest.fixture(scope="module")
def session() -> SparkSession:
    spark = shared_spark()
    register(spark)
    return spark


@pytest.fixture
def database(postgres: PostgresServer) -> Iterator[str]:
    url = postgres.create_migrated_database()
    yield url
    postgres.drop_database(url)


def run(spark: SparkSession, lake: Path, url: str) -> int:
    (result,) = archive(spark, str(lake), {"prod": {"url": url, "name": "prod"}}, form=Form.DELTA)
    assert result.error is None, result.error
    return result.rows


def lines(lake: Path) -> list[tuple[Any, ...]]:
    table: pa.Table = DeltaTable(lake / "delta").to_pyarrow_dataset().to_table()
    return sorted(
        tuple(row.values()) for row in table.drop_columns(["source", "day", "branch_id", "origin"]).to_pylist()
    )


def test_every_line_is_in_the_table_once_whatever_is_repeated(
    session: SparkSession, database: str, tmp_path: Path
) -> None:
    lake = tmp_path / "a lake"
    write(database, 20, rm=RM)
    write(database, 5, rm="007", at=MONDAY + timedelta(days=1))
    assert run(session, lake, database) == 25
    assert lines(lake) == journal(database)
    assert DeltaTable(lake / "delta").metadata().partition_columns == ["rm", "day"]
    version = DeltaTable(lake / "delta").version()

    # killed between the commit of the table and that of the checkpoint: the first batch, which is number 0, comes again
    (commit,) = (lake / "delta/_checkpoints/prod").glob("*/commits/0")
    commit.unlink()
    commit.with_name(".0.crc").unlink()
    run(session, lake, database)
    assert DeltaTable(lake / "delta").version() == version
    assert lines(lake) == journal(database)

    # killed before the commit of the table: there are files that belong to nothing, and the batch is written
    write(database, 7, rm=RM)
    stray = next((lake / "delta").glob("rm=*/day=*/*.parquet"))
    shutil.copy(stray, stray.with_name("part-00000-stray-c000.snappy.parquet"))
    run(session, lake, database)
    assert DeltaTable(lake / "delta").version() == version + 1
    assert lines(lake) == journal(database)

    # the checkpoint is lost
    shutil.rmtree(lake / "delta/_checkpoints")
    write(database, 3, rm="007", at=MONDAY + timedelta(days=1))
    run(session, lake, database)
    assert lines(lake) == journal(database)
    with pytest.raises(LakeError, match="is no lake"):
        read_lake(session, str(lake))
