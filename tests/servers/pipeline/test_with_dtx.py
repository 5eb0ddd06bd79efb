"""The pipeline on journals that a real dtx has written: with a clock that jumps, and a lake that is older than dtx."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from dtx.client import XAResource, Xid
from dtx.pipeline.fleet import load
from dtx.pipeline.session import SessionOptions
from dtx.pipeline.steps import Steps
from tests.servers.crash.test_ha_clock import WRONG_CLOCK, set_clock
from tests.support.client import new_xid
from tests.support.crash import StandaloneStage
from tests.support.postgres import PostgresServer
from tests.support.service import ADMIN

pytestmark = pytest.mark.timeout(900)  # a first job of Spark can take a minute where many others compute
AHEAD, BEHIND = 120.0, -120.0
"""Offsets of the clock in seconds."""


class Pipeline:
    """The pipeline over the journal of one dtx.

    Args:
        spark: the session.
        directory: for ``pipeline.toml``, the log of decisions, the lake and the results.
        database: URL of the database of dtx.
    """

    def __init__(self, spark: SparkSession, directory: Path, database: str) -> None:
        self._spark = spark
        self._directory = directory
        self.database = database
        self.decisions = directory / "decisions.jsonl"
        self.decisions.touch()

    def decide(self, xid: Xid, decision: str) -> None:
        row = {"gtrid": xid.gtrid.hex(), "decision": decision, "time": datetime.now(UTC).isoformat(), "finished": True}
        with self.decisions.open("a") as log:
            print(json.dumps(row), file=log)

    @contextmanager
    def steps(self, orphan_after: str) -> Iterator[Steps]:
        path = self._directory / "pipeline.toml"
        path.write_text(
            f'lake = "lake"\nresults = "results"\norphan_after = "{orphan_after}"\nskew = "0s"\n'
            f'[[database]]\nname = "bank"\nurl = {json.dumps(self.database)}\n'
            f'[[decisions]]\nname = "tm"\nformat = "json"\npath = "{self.decisions.name}"\n'
        )
        with Steps(load(path), SessionOptions(), show=lambda _: None) as steps:
            steps.__dict__["spark"] = self._spark
            yield steps

    def archive(self) -> None:
        with self.steps("0s") as steps:
            assert steps.archive(()) == []

    def reconcile(self, orphan_after: str = "0s") -> tuple[set[str], dict[bytes, str]]:
        """Return the sources that were not read, and the verdict of each gtrid."""
        with self.steps(orphan_after) as steps:
            unread = {row.source for row in steps.reconcile(full=False, to_publish=False)}
        rows = DeltaTable(self._directory / "results/verdicts").to_pyarrow_table(columns=["gtrid", "verdict"])
        return unread, {row["gtrid"]: row["verdict"] for row in rows.to_pylist()}


@pytest.fixture
def stage(postgres: PostgresServer) -> Iterator[StandaloneStage]:
    with StandaloneStage(postgres, options=ADMIN, env={"PYTHONPATH": WRONG_CLOCK}) as stage:
        yield stage


@pytest.fixture
def pipeline(spark: SparkSession, stage: StandaloneStage, tmp_path: Path) -> Pipeline:
    return Pipeline(spark, tmp_path, stage.database)


def prepare(stage: StandaloneStage, *xids: Xid) -> None:
    with stage.connected() as connection:
        xa = XAResource(connection.channel(), timeout=60)
        for xid in xids:
            xa.start(xid)
            xa.channel.basic_publish("", "transfers", b"1")
            xa.end(xid)
            xa.prepare(xid)


def commit(stage: StandaloneStage, *xids: Xid) -> None:
    with stage.connected() as connection:
        xa = XAResource(connection.channel(), timeout=60)
        for xid in xids:
            xa.commit(xid)


def test_a_clock_that_is_set_back_reuses_no_xid(stage: StandaloneStage, pipeline: Pipeline) -> None:
    """Prepared two minutes ahead, ended two minutes behind: by an operator, by the manager, or not at all."""
    set_clock(stage.service, AHEAD)
    by_operator, by_manager, waiting = (new_xid() for _ in range(3))
    prepare(stage, by_operator, by_manager, waiting)
    stage.service.kill9()
    set_clock(stage.service, BEHIND)
    stage.service.start()
    stage.service.run("commit", str(by_operator), "--reason", "it has waited too long", "--yes")
    commit(stage, by_manager)
    for xid in (by_operator, by_manager):
        pipeline.decide(xid, "commit")
    ended = {by_operator.gtrid: "committed", by_manager.gtrid: "committed"}
    pipeline.archive()
    assert pipeline.reconcile("1h") == (set(), ended | {waiting.gtrid: "in-doubt"})
    prepare(stage, by_manager)
    pipeline.archive()
    assert pipeline.reconcile("1h")[1] == ended | {by_manager.gtrid: "xid-reused", waiting.gtrid: "in-doubt"}


def test_branches_that_ended_after_the_archive_are_no_orphans(stage: StandaloneStage, pipeline: Pipeline) -> None:
    """Their dtx, or only their database, is asked again. The source with the old journal is named."""
    xids = [new_xid() for _ in range(3)]
    prepare(stage, *xids)
    pipeline.archive()
    assert pipeline.reconcile() == (set(), {xid.gtrid: "orphan" for xid in xids})
    commit(stage, *xids[:2])
    stage.service.run("rollback", str(xids[2]), "--reason", "it has waited too long", "--yes")
    heuristic = {xids[2].gtrid: "rolled-back"}  # dtx still has this branch, with its outcome
    assert pipeline.reconcile() == ({"bank"}, {xid.gtrid: "not-archived" for xid in xids[:2]} | heuristic)
    pipeline.archive()
    assert pipeline.reconcile() == (set(), {xid.gtrid: "committed" for xid in xids[:2]} | heuristic)


def test_branches_of_an_unreachable_database_are_judged_as_last_known(
    stage: StandaloneStage, pipeline: Pipeline
) -> None:
    """They have ended since. They were young when they were last seen, so they are no orphans."""
    xids = [new_xid() for _ in range(2)]
    prepare(stage, *xids)
    pipeline.archive()
    in_doubt = {xid.gtrid: "in-doubt" for xid in xids}
    assert pipeline.reconcile("1h") == (set(), in_doubt)
    commit(stage, *xids)
    pipeline.database, right = "postgresql://nobody@127.0.0.1:1/none", pipeline.database
    assert pipeline.reconcile("1h") == ({"bank"}, in_doubt)
    pipeline.database = right
    pipeline.archive()
    assert pipeline.reconcile("1h") == (set(), {xid.gtrid: "committed" for xid in xids})
