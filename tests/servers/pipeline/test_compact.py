"""Compaction: fewer files, the same lines; whoever dies at whatever step, and whoever reads or writes meanwhile."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from dtx.pipeline.archive import Lake, LakeError, compact, read_lake
from dtx.pipeline.archive.files import Files
from dtx.pipeline.archive.layout import UPKEEP
from dtx.pipeline.archive.reading import finish, plans
from dtx.pipeline.source import register
from tests.servers.pipeline.test_archive import MONDAY, in_lake, journal, run, write
from tests.support.postgres import PostgresServer
from tests.support.spark import shared_spark

pytestmark = pytest.mark.timeout(900)  # a first job of Spark can take a minute where many others compute
RMS, BATCHES, ROWS = ("bank/a=b", "007"), 4, 5


class Killed(Exception):
    """What is on disk stays as it is, and nothing else happens."""


@dataclass(frozen=True)
class Archived:
    """A lake in many small files, and the journal that it is of."""

    lake: Path
    database: str
    lines: list[tuple[Any, ...]]

    def copy(self, to: Path) -> Path:
        return Path(shutil.copytree(self.lake, to, symlinks=True))


@pytest.fixture(scope="module")
def session() -> SparkSession:
    spark = shared_spark()
    register(spark)
    return spark


@pytest.fixture(scope="module")
def archived(
    session: SparkSession, postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Archived]:
    database = postgres.create_migrated_database()
    for batch in range(BATCHES):
        for number, rm in enumerate(RMS):
            write(database, ROWS, rm=rm, at=MONDAY + timedelta(days=number, hours=batch / 10))
    lake = tmp_path_factory.mktemp("lake") / "a lake, 100 % full"
    # one transaction of the journal is one batch: they are not divided
    assert run(session, lake, database, maxRowsPerBatch="1") == len(RMS) * BATCHES * ROWS
    yield Archived(lake, database, journal(database))
    postgres.drop_database(database)


@pytest.fixture(scope="module")
def planned(session: SparkSession, archived: Archived, tmp_path_factory: pytest.TempPathFactory) -> Archived:
    """The moment after a compaction has written down what is to be done."""
    lake = archived.copy(tmp_path_factory.mktemp("planned") / "lake")
    with pytest.MonkeyPatch.context() as patch:
        dies(patch, after=1)
        with pytest.raises(Killed):
            compact(session, str(lake), least_files=2)
    assert len(plans(Files(str(lake)))) == 1
    return Archived(lake, archived.database, archived.lines)


def dies(patch: pytest.MonkeyPatch, *, after: int) -> None:
    """Whoever changes files is killed after so many steps; of the removal that it is at, half is done."""
    done = 0

    def counted(step: Callable[..., None]) -> Callable[..., None]:
        def do(files: Files, name: str, *more: Any) -> None:
            nonlocal done
            if done == after:
                if step is remove and files.exists(name):
                    parts = sorted(path for path in Path(files.uri.removeprefix("file://"), name).rglob("part-*"))
                    for path in parts[: (len(parts) + 1) // 2]:
                        path.unlink()
                raise Killed(name)
            done += 1
            step(files, name, *more)

        return do

    remove = Files.remove
    for name in ("write", "move", "remove"):
        patch.setattr(Files, name, counted(getattr(Files, name)))


def files(lake: Path) -> int:
    return len([*lake.glob("rm=*/day=*/batch=*/part-*.parquet")])


def test_small_files_are_joined_and_every_line_stays(session: SparkSession, archived: Archived, tmp_path: Path) -> None:
    lake = archived.copy(tmp_path / "lake")
    before = files(lake)
    _, seen = Lake(str(lake)).frame(session)
    done = compact(session, str(lake), least_files=2)
    # the last batch of a stream is left alone
    assert (done.days, done.rows) == (2, (len(RMS) * BATCHES - 1) * ROWS)
    assert (done.before, done.after) == (before - 1, 2)
    assert files(lake) == 3
    assert in_lake(session, lake) == archived.lines
    assert compact(session, str(lake), least_files=2).days == 0
    new, _ = Lake(str(lake)).frame(session, since=seen)
    assert new.count() == 0, "who has read the lines before has read them"
    assert [*(lake / UPKEEP).glob("*/")] == []


def test_a_crash_before_the_plan_changes_nothing(session: SparkSession, archived: Archived, tmp_path: Path) -> None:
    lake = archived.copy(tmp_path / "lake")
    with pytest.MonkeyPatch.context() as patch:
        dies(patch, after=0)
        with pytest.raises(Killed):
            compact(session, str(lake), least_files=2)
    assert files(lake) == files(archived.lake)
    assert in_lake(session, lake) == archived.lines
    assert compact(session, str(lake), least_files=2).days == 2, "what was left is swept away, and it is done again"
    assert in_lake(session, lake) == archived.lines


def test_a_compaction_that_dies_at_any_step_is_finished_by_the_next_reader(
    session: SparkSession, planned: Archived, tmp_path: Path
) -> None:
    step = 0
    while True:
        lake = planned.copy(tmp_path / str(step))
        with pytest.MonkeyPatch.context() as patch:
            dies(patch, after=step)
            try:
                finish(Files(str(lake)))
                break
            except Killed:
                pass
        assert in_lake(session, lake) == planned.lines, f"killed after {step} steps"
        assert not plans(Files(str(lake)))
        assert files(lake) == 3
        step += 1
    # every batch removed, two days moved, the generation, the plan, what is left of the preparation
    assert step == len(RMS) * BATCHES - 1 + 2 + 3


def test_a_writer_who_lost_its_checkpoint_repeats_nothing_that_is_being_compacted(
    session: SparkSession, planned: Archived, tmp_path: Path
) -> None:
    lake = planned.copy(tmp_path / "lake")
    with pytest.MonkeyPatch.context() as patch:
        dies(patch, after=len(RMS) * BATCHES - 1)
        with pytest.raises(Killed):
            finish(Files(str(lake)))
    assert files(lake) == 1, "all is removed, and nothing is there again"
    shutil.rmtree(lake / "_checkpoints")
    assert run(session, lake, planned.database) == len(planned.lines)
    assert in_lake(session, lake) == planned.lines


def test_a_reader_looks_again_when_files_changed_under_it(
    session: SparkSession, planned: Archived, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = planned.copy(tmp_path / "lake")
    (plan,) = plans(Files(str(lake)))
    (lake / plan).rename(tmp_path / "plan")
    looked = 0
    listed = Lake._listed

    def look(self: Lake, spark: SparkSession) -> Any:
        nonlocal looked
        looked += 1
        found = listed(self, spark)
        if looked == 1:  # a compaction, from its beginning to its end
            (tmp_path / "plan").rename(lake / plan)
            finish(Files(str(lake)))
        return found

    monkeypatch.setattr(Lake, "_listed", look)
    assert in_lake(session, lake) == planned.lines
    assert looked == 2


def test_who_is_late_to_finish_a_plan_leaves_the_next_one(planned: Archived, tmp_path: Path) -> None:
    lake = planned.copy(tmp_path / "lake")
    move = Files.move
    later = f"{UPKEEP}/plan-later.json"

    def meanwhile(here: Files, name: str, to: str) -> None:
        """Another process is done with this plan, and begins the next."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Files, "move", move)
            finish(here)
        here.write(later, {"id": "later", "remove": [], "move": []})
        move(here, name, to)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Files, "move", meanwhile)
        finish(Files(str(lake)))
    assert plans(Files(str(lake))) == [later]


def test_a_day_with_a_damaged_file_is_left_alone_and_named(
    session: SparkSession, archived: Archived, tmp_path: Path
) -> None:
    lake = archived.copy(tmp_path / "lake")
    empty, cut = sorted(lake.glob("rm=007/day=*/batch=*/part-*.parquet"))[:2]
    empty.write_bytes(b"")
    cut.write_bytes(cut.read_bytes()[:-10])
    names = [str(path.relative_to(lake)) for path in (empty, cut)]
    done = compact(session, str(lake), least_files=2)
    assert done.days == 1
    assert [row.item for row in done.quarantined] == names
    assert empty.exists()
    reader = Lake(str(lake))
    frame, _ = reader.frame(session)
    assert frame.count() == len(archived.lines) - 2 * ROWS
    assert [(row.source, row.item, row.count) for row in reader.quarantined] == [("lake", n, None) for n in names]
    assert [row.reason.partition(":")[0] for row in reader.quarantined] == ["empty", "cut off, or no Parquet file"]


def test_two_at_a_time_are_refused(session: SparkSession, archived: Archived, tmp_path: Path) -> None:
    lake = archived.copy(tmp_path / "lake")
    with Files(str(lake)).alone(f"{UPKEEP}/lock"), pytest.raises(LakeError, match="another process is at work"):
        compact(session, str(lake))
    assert read_lake(session, str(lake)).count() == len(archived.lines)
