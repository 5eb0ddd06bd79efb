"""The journals as a Delta table: every line once, whatever dies between the table's commit and the checkpoint's."""

import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, TableFeatures
from deltalake.table import TableOptimizer
from pyspark.sql import DataFrame, SparkSession

from dtx.pipeline.archive import DeltaLake, Form, LakeError, archive, compact_table, read_lake, retain_table
from dtx.pipeline.archive.reading import LOCK
from dtx.pipeline.source import register
from tests.servers.pipeline.test_archive import MONDAY, NAMES, journal, write
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


def in_table(lake: Path, under: str) -> list[str]:
    """The files that the table has."""
    return sorted(name for name in DeltaTable(lake / "delta").file_uris() if f"/{under}/" in name)


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


def test_a_table_whose_files_do_not_say_all_is_refused(session: SparkSession, database: str, tmp_path: Path) -> None:
    write(database, 3)
    run(session, tmp_path, database)
    table = DeltaTable(tmp_path / "delta")
    table.alter.add_feature(TableFeatures.DeletionVectors, allow_protocol_versions_increase=True)
    with pytest.raises(LakeError, match="needs version 3 of Delta's reader protocol"):
        DeltaLake(str(tmp_path)).frame(session)


def test_a_compacted_table_has_the_same_lines_and_goes_on(session: SparkSession, database: str, tmp_path: Path) -> None:
    """Small files are joined, the days that have few are left; archive and readers go on where they were."""
    for _ in range(4):
        for name in NAMES:
            write(database, 2, rm=name)
        run(session, tmp_path, database)
    write(database, 3, rm="lonely", at=MONDAY + timedelta(days=1))
    run(session, tmp_path, database)
    lake = DeltaLake(str(tmp_path))
    older, token = lake.frame(session)
    seen: list[tuple[int, int]] = []
    done = compact_table(str(tmp_path), watch=lambda *days: seen.append(days))
    assert (done.days, done.before, done.after, done.rows) == (len(NAMES), 4 * len(NAMES), len(NAMES), 8 * len(NAMES))
    assert seen == [(number, len(NAMES)) for number in range(1, len(NAMES) + 1)]
    assert done.quarantined == ()
    assert lines(tmp_path) == rows(lake.frame(session)[0]) == journal(database)
    assert rows(older) == journal(database), "who reads the version before it has its files"
    assert lake.frame(session, token)[0].count() == 0, "nothing is new"

    # a batch that comes once more is still known, and a new one comes
    (last,) = (tmp_path / "delta/_checkpoints/prod").glob("*/commits/4")
    last.unlink()
    last.with_name(".4.crc").unlink()
    write(database, 7, rm="007")
    run(session, tmp_path, database)
    assert lines(tmp_path) == journal(database)
    assert lake.frame(session, token)[0].count() == 7
    assert compact_table(str(tmp_path)).days == 0, "nothing is left to join"
    # the checkpoint is lost
    shutil.rmtree(tmp_path / "delta/_checkpoints")
    run(session, tmp_path, database)
    assert lines(tmp_path) == journal(database)


def test_a_compaction_by_another_program_at_the_same_time_is_told(
    session: SparkSession, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package compacts what is no part of the table any more: lines are there twice."""
    for _ in range(2):
        write(database, 2)
        run(session, tmp_path, database)
    ours = TableOptimizer.compact

    def beside(optimizer: TableOptimizer, **words: Any) -> dict[str, Any]:
        ours(DeltaTable(tmp_path / "delta").optimize)
        return ours(optimizer, **words)

    monkeypatch.setattr(TableOptimizer, "compact", beside)
    with pytest.raises(LakeError, match=r"something else has changed .* \(OPTIMIZE, OPTIMIZE\), and lines may be"):
        compact_table(str(tmp_path), least_files=2)
    monkeypatch.undo()
    assert len(lines(tmp_path)) == 8, "deltalake has learnt to tell: the check can go"


def test_a_day_with_a_damaged_file_is_left_as_it_is_and_named(
    session: SparkSession, database: str, tmp_path: Path
) -> None:
    for _ in range(2):
        for name in ("sound", "spoilt"):
            write(database, 2, rm=name)
        run(session, tmp_path, database)
    damaged = next((tmp_path / "delta/rm=spoilt").rglob("*.parquet"))
    damaged.write_bytes(damaged.read_bytes()[:100])
    files = in_table(tmp_path, "rm=spoilt")
    seen: list[tuple[int, int]] = []
    done = compact_table(str(tmp_path), least_files=2, watch=lambda *days: seen.append(days))
    assert (done.days, done.before, done.after, done.rows) == (1, 2, 1, 4)
    assert seen == [(1, 2), (2, 2)], "progress counts it, too"
    (told,) = done.quarantined
    assert (told.source, told.item) == ("lake", f"rm=spoilt/day={MONDAY.date()}")
    assert "arquet" in told.reason
    assert in_table(tmp_path, "rm=spoilt") == files


def test_a_damaged_file_of_the_table_is_named_and_the_others_are_read(
    session: SparkSession, database: str, tmp_path: Path
) -> None:
    """As those of the lake are: one file stops nobody. A table that nothing has come into yet is an empty one."""
    assert run(session, tmp_path, database) == 0
    empty, token = DeltaLake(str(tmp_path)).frame(session)
    assert (empty.count(), token) == (0, {})
    for name in ("sound", "cut", "gone"):
        write(database, 2, rm=name)
    run(session, tmp_path, database)
    (cut,), (gone,) = ([*(tmp_path / "delta" / f"rm={name}").rglob("*.parquet")] for name in ("cut", "gone"))
    cut.write_bytes(cut.read_bytes()[:100])
    gone.unlink()
    lake = DeltaLake(str(tmp_path))
    frame, _ = lake.frame(session)
    assert {row["rm"] for row in frame.collect()} == {"sound"}
    assert sorted((told.item, told.reason.partition(",")[0]) for told in lake.quarantined) == [
        (str(cut.relative_to(tmp_path)), "cut off"),
        (str(gone.relative_to(tmp_path)), "it is not there"),
    ]
    assert lake.identity is not None
    (tmp_path / "delta").rename(tmp_path / "before")
    run(session, tmp_path, database)
    assert DeltaLake(str(tmp_path)).identity not in {None, lake.identity}


def test_old_days_leave_the_table_and_their_files_when_its_time_is_over(
    session: SparkSession, database: str, tmp_path: Path
) -> None:
    with pytest.raises(LakeError, match="is no Delta table"):
        retain_table(str(tmp_path), before=MONDAY.date())
    for days in range(3):
        write(database, 2, rm="bank/a", at=MONDAY + timedelta(days=days))
        write(database, 2, rm="b", at=MONDAY + timedelta(days=days))
    run(session, tmp_path, database)
    kept = (MONDAY + timedelta(days=2)).date()
    would = retain_table(str(tmp_path), before=kept, dry_run=True)
    assert (would.days, would.before) == (4, 4)
    assert lines(tmp_path) == journal(database)
    assert retain_table(str(tmp_path), before=kept) == would
    assert {row[1].date() for row in lines(tmp_path)} == {kept}
    assert len(list((tmp_path / "delta").rglob("part-*.parquet"))) == 6, "for who reads the version before it"
    assert retain_table(str(tmp_path), before=kept).days == 0

    write(database, 5, rm="b", at=MONDAY + timedelta(days=2))
    run(session, tmp_path, database)
    assert len(lines(tmp_path)) == 9, "what was removed does not come again"
    DeltaTable(tmp_path / "delta").alter.set_table_properties({"delta.deletedFileRetentionDuration": "interval 0 days"})
    retain_table(str(tmp_path), before=kept)
    assert len(list((tmp_path / "delta").rglob("part-*.parquet"))) == 3
    assert len(lines(tmp_path)) == 9
    assert (tmp_path / "delta/_checkpoints").is_dir()


def test_two_do_not_look_after_a_table_at_once(session: SparkSession, database: str, tmp_path: Path) -> None:
    write(database, 1)
    run(session, tmp_path, database)
    with (
        DeltaLake(str(tmp_path)).files.alone(LOCK),
        pytest.raises(LakeError, match="another process is at work"),
    ):
        compact_table(str(tmp_path))
