"""A lake of Parquet files becomes a Delta table, and archive goes on with it."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from pyarrow import parquet

from dtx.pipeline.files import Files, LakeError
from dtx.pipeline.lake import Lake
from dtx.pipeline.migration import migrate
from tests.servers.pipeline.test_archive import NAMES, in_lake, journal, result_of, run, write


def _older(lake: Path, url: str, scratch: Path) -> None:
    """A lake as older versions wrote it: of each resource manager a directory, whose name Spark wrote its own way."""
    run(scratch, url)
    names = {"007": "007", "bank/a=b c%d": "bank%2Fa%3Db c%25d", "é.1": "é.1"}
    for number, (name, word) in enumerate(names.items()):
        table = Lake(str(scratch)).table.load().to_pyarrow_table(filters=[("rm", "=", name)])
        place = lake / f"rm={word}/day=2026-03-02/batch=prod.1a2b.{number:09d}"
        place.mkdir(parents=True)
        lines = table.drop_columns(["rm", "batch", "month"]).append_column("origin", pa.array(["x"] * len(table)))
        parquet.write_table(lines, place / "part-0.parquet")
    (lake / "_checkpoints/prod/1a2b").mkdir(parents=True)
    (lake / "_lake.json").write_text('{"version": 1}')


@pytest.fixture
def older(database: str, tmp_path: Path) -> Path:
    for name in NAMES:
        write(database, 5, rm=name)
    _older(tmp_path / "lake", database, tmp_path / "scratch")
    return tmp_path / "lake"


def test_an_older_lake_is_migrated_and_archive_continues(older: Path, database: str) -> None:
    with pytest.raises(LakeError, match=r"an older dtx has made the lake .*: dtx pipeline migrate-lake converts it"):
        run(older, database)
    seen: list[int] = []
    assert migrate(str(older), seen.append) == 15
    assert seen[-1] == 15
    assert in_lake(older) == journal(database)
    assert sorted(path.name for path in older.iterdir()) == ["_delta_log", "month=2026-03"]
    write(database, 2)
    result = result_of(older, database)
    assert (result.rows, result.again) == (2, 15)
    assert in_lake(older) == journal(database)
    with pytest.raises(LakeError, match="there is nothing to migrate"):
        migrate(str(older))


def test_a_migration_that_dies_is_repeated(older: Path, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for place in ("dtx.pipeline.migration.write_deltalake", "dtx.pipeline.files.Files.remove"):
        with monkeypatch.context() as patch:
            patch.setattr(place, die)
            with pytest.raises(KeyboardInterrupt):
                migrate(str(older))
    assert migrate(str(older)) == 15
    assert in_lake(older) == journal(database)


def test_a_compaction_that_was_cut_off_is_finished_first(older: Path, database: str) -> None:
    """It had removed one of its batches, and moved none of what it had written."""
    files = Files(str(older))
    days = [f"{rm}/day=2026-03-02" for rm in files.names() if rm.startswith("rm=")]
    batches = [f"{day}/{name}" for day in days for name in files.names(day)]
    moves = []
    for number, (day, batch) in enumerate(zip(days, batches, strict=True)):
        source = f"_upkeep/0c/{number}"
        shutil.copytree(older / batch, older / source)
        moves.append((source, f"{day}/batch=_compacted-0c"))
    files.remove(batches[0])
    plan = {"id": "0c", "remove": batches, "move": moves}
    (older / "_upkeep/plan-0c.json").write_text(json.dumps(plan))
    assert migrate(str(older)) == 15
    assert in_lake(older) == journal(database)


def test_a_table_beside_the_older_lake_is_taken_over(database: str, tmp_path: Path) -> None:
    for name in NAMES:
        write(database, 5, rm=name)
    run(tmp_path / "scratch", database)
    table = Lake(str(tmp_path / "scratch")).table.load().to_pyarrow_table()
    days = pa.array([at.date() for at in table["at"].to_pylist()])
    table = table.drop_columns(["batch", "month"]).append_column("day", days)
    lake = tmp_path / "lake"
    write_deltalake(lake / "delta", table, partition_by=["rm", "day"])
    (lake / "delta/_lake.json").write_text("{}")
    assert migrate(str(lake)) == 15
    assert in_lake(lake) == journal(database)
    assert not (lake / "delta").exists()


def test_lines_that_the_table_alone_has_are_copied_once(older: Path, database: str, tmp_path: Path) -> None:
    for name in NAMES:
        write(database, 2, rm=name)
    run(tmp_path / "scratch", database)
    table = Lake(str(tmp_path / "scratch")).table.load().to_pyarrow_table()
    days = pa.array([at.date() for at in table["at"].to_pylist()])
    table = table.drop_columns(["batch", "month"]).append_column("day", days)
    write_deltalake(older / "delta", table, partition_by=["rm", "day"])
    (older / "delta/_lake.json").write_text("{}")
    assert migrate(str(older)) == 21
    assert in_lake(older) == journal(database)
