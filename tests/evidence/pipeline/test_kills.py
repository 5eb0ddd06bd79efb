"""``dtx pipeline run``, killed at random moments: the next run ends with the results of a run over everything."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any
from uuid import NAMESPACE_OID, uuid4, uuid5

import psycopg
import pytest
from deltalake import DeltaTable

from tests.servers.pipeline.test_archive import in_lake, journal
from tests.support.fleets import fleet_of
from tests.support.processes import end, spawn
from tests.support.reference import Decision, Event

KILLS = 12
TRANSACTIONS = 60
"""Limit of the global transactions in the lines that are new in one run."""
FIRST = datetime(2026, 3, 2, tzinfo=UTC)
SPARK = ("--master", "local[2]", "--memory", "1g")
COMPARED = (
    "format_id", "gtrid", "verdict", "findings", "since", "first_at", "last_at", "rms", "owners", "branches",
    "decision", "tm", "fingerprint", "evidence", "lines",
)  # fmt: skip
"""Columns of a verdict that do not depend on the time of the run."""
_INSERT = """
INSERT INTO dtx.journal (id, at, rm, event, branch_id, vhost, format_id, gtrid, bqual, owner, actor, outcome, one_phase,
    publishes, consumes, bytes, started_at) VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, false, 1, 0, 1, %s)
"""


class Nights:
    """A journal and a decision log that grow, and runs over them.

    Args:
        directory: for all files.
        url: of the database.
    """

    def __init__(self, directory: Path, url: str) -> None:
        self._directory = directory
        self._url = url
        self.lake, self.results = directory / "lake", directory / "results"
        (directory / "decisions.jsonl").touch()

    def write(self, seed: int) -> None:
        """Write random lines and decisions, also of earlier transactions."""
        fleet = fleet_of(seed, TRANSACTIONS)
        with psycopg.connect(self._url) as connection, connection.cursor() as cursor:
            cursor.executemany(_INSERT, [_row(line) for line in fleet.events])
        with (self._directory / "decisions.jsonl").open("a") as log:
            for made in fleet.decisions:
                print(json.dumps(_decision(made)), file=log)

    def start(self, step: str = "run", results: str = "results") -> subprocess.Popen[bytes]:
        path = self._directory / f"{results}.toml"
        path.write_text(
            f'lake = "lake"\nresults = "{results}"\n[[database]]\nname = "bank"\nurl = "{self._url}"\n'
            '[[decisions]]\nname = "tm"\nformat = "json"\npath = "decisions.jsonl"\n'
        )
        with (self._directory / "output").open("wb") as output:
            words = [sys.executable, "-m", "dtx", "pipeline", step, "--fleet", str(path), *SPARK]
            return spawn(words, output=output.fileno(), cwd=self._directory)

    def finish(self, process: subprocess.Popen[bytes]) -> None:
        try:
            assert process.wait(800) == 0, (self._directory / "output").read_text()
        finally:
            end(process, signal.SIGKILL)

    def verdicts(self, results: str = "results") -> list[tuple[Any, ...]]:
        table = DeltaTable(self._directory / results / "verdicts").to_pyarrow_table(columns=list(COMPARED))
        return sorted(map(_comparable, table.to_pylist()))

    def last_changes(self) -> dict[tuple[int | None, bytes], str | None]:
        """Return the verdict after the last change of each transaction in the history."""
        rows = DeltaTable(self.results / "history").to_pyarrow_table().to_pylist()
        keys = [(row["run"], row["format_id"], row["gtrid"]) for row in rows]
        assert len(keys) == len(set(keys)), "a run has written its history twice"
        rows.sort(key=lambda row: row["run"])
        return {(row["format_id"], row["gtrid"]): row["verdict"] for row in rows}


def _row(line: Event) -> Sequence[object]:
    at = FIRST + timedelta(microseconds=line.at)
    life = (line.source, line.rm, line.vhost, line.format_id, line.gtrid, line.bqual, line.branch_id)
    return (
        uuid4(), at, line.rm, str(line.event), uuid5(NAMESPACE_OID, repr(life)), line.vhost, line.format_id, line.gtrid,
        line.bqual, line.owner, line.actor, line.outcome and str(line.outcome), at,
    )  # fmt: skip


def _decision(made: Decision) -> dict[str, object]:
    time = (FIRST + timedelta(microseconds=made.at or 0)).isoformat()
    found = {"gtrid": made.gtrid.hex(), "decision": str(made.decision), "time": time, "tm": made.tm}
    optional = {"format_id": made.format_id, "finished": made.finished}
    return found | {name: value for name, value in optional.items() if value is not None}


def _comparable(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(json.dumps(value, default=str) for value in row.values())


@pytest.mark.timeout(7_200)
def test_a_run_after_a_kill_ends_like_a_full_one(database: str, tmp_path: Path, figures: Callable[..., None]) -> None:
    """Half of the kills end the process of Java as well; the others leave it to itself."""
    seed = int.from_bytes(os.urandom(4), "big")
    print(f"seed {seed}")
    dice, nights = Random(seed), Nights(tmp_path, database)
    nights.write(seed)
    begun = time.monotonic()
    nights.finish(nights.start())
    took = time.monotonic() - begun
    for kill in range(1, KILLS + 1):
        nights.write(seed + kill)
        process = nights.start()
        moment = dice.uniform(0.5, took)
        try:
            process.wait(moment)
        except subprocess.TimeoutExpired:
            if kill % 2:
                process.kill()
            else:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)
        nights.finish(nights.start())
        assert in_lake(nights.lake) == journal(database)
        nights.finish(nights.start("reconcile", f"full-{kill}"))
        assert nights.verdicts() == nights.verdicts(f"full-{kill}"), f"kill {kill} after {moment:.2f} s"
        now = DeltaTable(nights.results / "verdicts").to_pyarrow_table(columns=["format_id", "gtrid", "verdict"])
        verdicts = {(row["format_id"], row["gtrid"]): row["verdict"] for row in now.to_pylist()}
        changes = nights.last_changes()
        assert changes.items() <= verdicts.items()
        assert {
            key for key, verdict in verdicts.items() if verdict not in {"committed", "rolled-back"}
        } <= changes.keys()
    figures(kills_of_a_run=KILLS)
