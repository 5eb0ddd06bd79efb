"""The journals as a Delta table: every line once, whatever dies between the table's commit and the checkpoint's."""

import shutil
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, TableFeatures
from pyspark.sql import DataFrame, SparkSession

from dtx.pipeline.archive import DeltaLake, Form, LakeError, archive, read_lake
from dtx.pipeline.source import register
from tests.integration.pipeline.test_archive import MONDAY, NAMES, journal, write
from tests.support.processes import spawn
from tests.support.spark import shared_spark

pytestmark = pytest.mark.timeout(1800)  # a first job of Spark can take a minute where many others compute
RM = "bank/a=b c%d"


@pytest.fixture(scope="module")
def session() -> SparkSession:
    spark = shared_spark()
    register(spark)
    return spark


def run(spark: SparkSession, lake: Path, url: str) -> int:
    (result,) = archive(spark, str(lake), {"prod": {"url": url, "name": "prod"}}, form=Form.DELTA)
    assert result.error is None, result.error
    return result.rows


def rows(frame: DataFrame) -> list[tuple[Any, ...]]:
    """As ``journal`` has them."""
    frame = frame.drop("source", "day", "branch_id")
    return sorted(tuple(row.values()) for row in frame.toArrow().to_pylist())


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


def test_the_table_is_read_as_the_lake_is(session: SparkSession, database: str, tmp_path: Path) -> None:
    """What one run has read, the next leaves out; files that no version of the table names are nobody's rows."""
    lake = tmp_path / "a lake, 100%"
    with pytest.raises(LakeError, match="is no Delta table: dtx pipeline archive --format delta makes one"):
        DeltaLake(str(lake)).frame(session)
    for name in NAMES:
        write(database, 5, rm=name)
    run(session, lake, database)
    stray = next((lake / "delta").glob("rm=*/day=*/*.parquet"))
    shutil.copy(stray, stray.with_name("part-00000-stray-c000.snappy.parquet"))
    everything, token = DeltaLake(str(lake)).frame(session)
    assert rows(everything) == journal(database)
    assert {row["rm"] for row in everything.collect()} == set(NAMES)
    write(database, 7, rm="007", at=MONDAY + timedelta(days=1))
    run(session, lake, database)
    new, later = DeltaLake(str(lake)).frame(session, token)
    assert new.count() == 7
    assert DeltaLake(str(lake)).frame(session, later)[0].count() == 0
    assert rows(DeltaLake(str(lake)).frame(session)[0]) == journal(database)


@pytest.mark.slow
def test_a_fleet_may_have_its_journals_in_the_table(database: str, tmp_path: Path) -> None:
    """``form = "delta"``: archive and run write the table where no flag says otherwise, and reconcile reads it."""
    (tmp_path / "pipeline.toml").write_text(
        f'lake = "lake"\nresults = "results"\nform = "delta"\n[[database]]\nname = "bank"\nurl = "{database}"\n'
    )

    def call(*command: str) -> str:
        quick = "spark.driver.defaultJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
        words = ["pipeline", *command, "--master", "local[2]", "--memory", "1GB", "--set", quick]
        with (tmp_path / "output").open("w+b") as output:
            process = spawn([sys.executable, "-m", "dtx", *words], output=output.fileno(), cwd=tmp_path)
            status = process.wait(800)
            output.seek(0)
            said = output.read().decode()
        assert status == 0, said
        return said

    write(database, 5)
    assert "archived 5 lines" in call("archive")
    assert lines(tmp_path / "lake") == journal(database)
    assert not list((tmp_path / "lake").glob("rm=*"))
    assert "reconciled 5 transactions from 5 lines, 5 of them new" in call("run", "--no-publish")
    write(database, 7, rm="other")
    assert "reconciled 7 transactions from 12 lines, 7 of them new" in call("run", "--no-publish")
    assert not list((tmp_path / "lake").glob("rm=*"))
    assert "archived 12 lines" in call("archive", "--format", "parquet")
    assert sorted(path.name for path in (tmp_path / "lake").glob("rm=*")) == ["rm=other", "rm=rm"]


def test_a_table_whose_files_do_not_say_all_is_refused(session: SparkSession, database: str, tmp_path: Path) -> None:
    write(database, 3)
    run(session, tmp_path, database)
    table = DeltaTable(tmp_path / "delta")
    table.alter.add_feature(TableFeatures.DeletionVectors, allow_protocol_versions_increase=True)
    with pytest.raises(LakeError, match="needs version 3 of Delta's reader protocol"):
        DeltaLake(str(tmp_path)).frame(session)
