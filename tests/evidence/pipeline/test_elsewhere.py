"""Lake and results on a store of objects: no locks, no moves of directories, and the same lines and verdicts."""

from datetime import date, timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from dtx.pipeline.archive import Lake, compact, retain
from dtx.pipeline.archive.files import Files
from dtx.pipeline.archive.reading import plans
from dtx.pipeline.reconcile import current, run, runs
from dtx.pipeline.source import register
from dtx.pipeline.verdicts import Rules
from tests.servers.pipeline import elsewhere
from tests.servers.pipeline.elsewhere import ROOT
from tests.servers.pipeline.test_archive import MONDAY, in_lake, journal, write
from tests.servers.pipeline.test_archive import run as archive
from tests.support.fleets import decisions_frame, observations_frame
from tests.support.spark import shared_spark

pytestmark = pytest.mark.timeout(900)  # a first job of Spark can take a minute where many others compute
LAKE, RESULTS = f"{ROOT}/lake", f"{ROOT}/results"
RM = "bank/a=b"


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SparkSession:
    """A session that finds the store."""
    for name in ("lake", "results"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("dtx.pipeline.archive.files.fs", elsewhere.arrows(tmp_path))
    spark = shared_spark()
    register(spark)
    elsewhere.mount(spark, tmp_path)
    return spark


def in_files(lake: Path) -> int:
    return len([*lake.glob("rm=*/day=*/batch=*/part-*.parquet")])


def test_a_lake_on_a_store_of_objects_is_archived_compacted_reconciled_and_retained(
    session: SparkSession, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        write(database, 5, rm=RM, at=MONDAY + timedelta(hours=number))
    write(database, 4, rm=RM, at=MONDAY + timedelta(days=1))
    assert not Files(LAKE).is_local
    # one transaction of the journal is one batch: they are not divided
    assert archive(session, LAKE, database, maxRowsPerBatch="1") == 19
    lines = journal(database)
    assert in_lake(session, LAKE) == lines
    before = in_files(tmp_path / "lake")

    # killed after one file of a directory: whoever reads next moves the others
    step = Files._move
    moved: list[str] = []

    def die(files: Files, name: str, to: str) -> None:
        if moved:
            raise KeyboardInterrupt
        moved.append(name)
        step(files, name, to)

    with monkeypatch.context() as patch:
        patch.setattr(Files, "_move", die)
        with pytest.raises(KeyboardInterrupt):
            compact(session, LAKE, least_files=2)
    assert len(plans(Files(LAKE))) == 1
    assert in_lake(session, LAKE) == lines
    assert plans(Files(LAKE)) == []
    assert in_files(tmp_path / "lake") < before

    rules = Rules(as_of=0, orphan_after=1)
    seen, made = observations_frame(session, ()), decisions_frame(session, ())
    done = run(session, Lake(LAKE), seen, made, RESULTS, rules)
    assert (done.lines, done.transactions) == (19, 5)
    write(database, 6, rm=RM, at=MONDAY + timedelta(days=2))
    assert archive(session, LAKE, database) == 6
    again = run(session, Lake(LAKE), seen, made, RESULTS, rules)
    assert (again.lines_read, again.lines, again.transactions) == (6, 25, 6)
    assert current(session, RESULTS).count() == 6
    assert len(runs(session, RESULTS)) == 2

    assert retain(LAKE, before=date(2026, 3, 3)).days == 1
    assert len(in_lake(session, LAKE)) == 10
