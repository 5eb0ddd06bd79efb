"""What a run leaves for the next: damaged, lost, retained, or written by two at once."""

import shutil
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import psycopg
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from dtx.pipeline import decisions
from dtx.pipeline import steps as module
from dtx.pipeline.archive import archive
from dtx.pipeline.delta import Table
from dtx.pipeline.files import LakeError
from dtx.pipeline.fleet import load
from dtx.pipeline.reconcile import Results, Run, StateDamaged, current, run
from dtx.pipeline.session import SessionOptions
from dtx.pipeline.steps import Steps
from dtx.pipeline.verdicts import Rules
from tests.servers.pipeline.test_reconcile_runs import Batches
from tests.support.fleets import decisions_frame, events_frame, line, observations_frame

pytestmark = pytest.mark.timeout(900)  # a first job of Spark can take a minute where many others compute
DAY = 86_400_000_000

_LINE = """
INSERT INTO dtx.journal (id, at, rm, event, branch_id, vhost, format_id, gtrid, bqual, owner, actor, one_phase,
    publishes, consumes, bytes, started_at)
VALUES (gen_random_uuid(), now(), 'rm', 'prepared', %(id)s, '/', 1, %(gtrid)s, '', 'alice', 'alice', false, 1, 0, 10,
    now())
"""


def verdicts(spark: SparkSession, out: str) -> dict[bytes, str]:
    return {bytes(row.gtrid): row.verdict for row in current(spark, out).collect()}


@pytest.fixture
def out(tmp_path: Path) -> str:
    return str(tmp_path / "results")


@pytest.fixture
def reconcile(spark: SparkSession, out: str) -> Callable[..., Run]:
    none, nothing = observations_frame(spark, ()), decisions_frame(spark, ())

    def again(lake: Batches, **more: Any) -> Run:
        return run(spark, lake, none, nothing, out, Rules(as_of=100 * DAY), logs_read=["log"], **more)

    return again


def test_lines_arriving_during_observation_wait_for_the_next_run(
    spark: SparkSession, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A branch that was prepared after its dtx was asked has not ended unheard of."""
    (tmp_path / "pipeline.toml").write_text(
        f'lake = "lake"\nresults = "results"\n[[database]]\nname = "bank"\nurl = "{database}"\n'
    )
    fleet = load(tmp_path / "pipeline.toml")
    archive(fleet.lake, fleet.sources())
    read = decisions.read

    def slowly(*given: Any) -> Any:
        with psycopg.connect(database) as connection:
            connection.execute(_LINE, {"id": "11111111-1111-1111-1111-111111111111", "gtrid": b"young"})
        archive(fleet.lake, fleet.sources())
        return read(*given)

    monkeypatch.setattr(module, "read_decisions", slowly)
    steps = Steps(fleet, SessionOptions(), show=lambda _: None)
    steps.__dict__["spark"] = spark
    steps.reconcile(full=False, to_publish=False)
    assert verdicts(spark, fleet.results) == {}


def test_of_two_concurrent_runs_the_refused_one_changes_nothing(
    spark: SparkSession, tmp_path: Path, out: str, reconcile: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no lock. The slower one has read more lines; they come with the next run."""
    lake, older = Batches(), Batches()
    lake.batches.append(events_frame(spark, [line(b"a", "committed", 1), line(b"x", "prepared", 1)]))
    reconcile(lake)
    lake.batches.append(events_frame(spark, [line(b"b", "committed", 1), line(b"y", "prepared", 1)], 10))
    older.batches = list(lake.batches)
    lake.batches.append(events_frame(spark, [line(b"b", "rolled-back", 2, rm="rm2")], 20))
    create = Table.create

    def late(table: Table) -> Any:
        if table.files.uri.endswith("history"):
            monkeypatch.setattr(Table, "create", create)
            assert reconcile(older).number == 2
        return create(table)

    monkeypatch.setattr(Table, "create", late)
    with pytest.raises(LakeError, match="at the same time: run again"):
        reconcile(lake)
    history = DeltaTable(tmp_path / "results/history").to_pyarrow_table(columns=["run", "gtrid", "verdict"])
    found = sorted(tuple(row.values()) for row in history.to_pylist())
    assert found == [(1, b"x", "orphan"), (2, b"y", "orphan")]
    assert Results(out).runs()[-1].token == 2
    assert reconcile(lake).lines_read == 1
    assert verdicts(spark, out)[b"b"] == "mixed"


def test_removed_lines_are_noted_for_their_transactions(
    spark: SparkSession, out: str, reconcile: Callable[..., Run]
) -> None:
    """Also when all lines are read again: what is open is still known, and what has ended both ways is mixed."""
    lake = Batches()
    old = [line(b"g", "committed", 5 * DAY), line(b"open", "prepared", 5 * DAY), line(b"over", "committed", DAY)]
    lake.batches.append(events_frame(spark, old))
    lake.batches.append(events_frame(spark, [line(b"g", "rolled-back", 20 * DAY, rm="rm2")], 10))
    reconcile(lake)
    assert verdicts(spark, out) == {b"g": "mixed", b"open": "orphan", b"over": "committed"}
    removed = Results(out).retain(date(1970, 1, 11), dry_run=False)
    assert removed == {"verdicts": 1, "changes of verdicts": 0, "runs": 0}
    lake.batches[0] = events_frame(spark, ())  # its lines are removed from the lake, too
    for full in (False, True, False):
        reconcile(lake, full=full)
        assert verdicts(spark, out) == {b"g": "mixed", b"open": "orphan"}


def test_a_full_run_repairs_damaged_or_lost_state(
    spark: SparkSession, tmp_path: Path, out: str, reconcile: Callable[..., Run]
) -> None:
    lake = Batches()
    lake.batches.append(events_frame(spark, [line(b"a", "prepared", 1)]))
    reconcile(lake)
    (tmp_path / "results/runs/00000001.json").write_text('{"cut')
    with pytest.raises(StateDamaged, match="cannot be read"):
        reconcile(lake)
    assert reconcile(lake, full=True).number == 2
    (tmp_path / "results/runs/00000002.json").unlink()
    done = reconcile(lake)
    assert (done.number, done.lines_read) == (3, 1)
    shutil.rmtree(tmp_path / "results/state")
    done = reconcile(lake)
    assert (done.number, done.lines_read) == (4, 1)
    assert verdicts(spark, out) == {b"a": "orphan"}


def test_results_may_be_written_with_two_dots(spark: SparkSession, tmp_path: Path) -> None:
    """And with signs that mean something to Spark or in a URI."""
    none, nothing = observations_frame(spark, ()), decisions_frame(spark, ())
    lake = Batches()
    lake.batches.append(events_frame(spark, [line(b"a", "prepared", 1)]))
    (tmp_path / "a b").mkdir()
    place = f"{tmp_path}/a b/../results é"
    for _ in range(2):
        run(spark, lake, none, nothing, place, Rules(as_of=100 * DAY), logs_read=["log"])
    assert verdicts(spark, place) == {b"a": "orphan"}
    assert current(spark, place).count() == 1
