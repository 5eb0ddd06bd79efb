"""The pipeline's commands, as they run every night."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from dtx.pipeline.java import class_archive, find_java
from tests.servers.pipeline.test_archive import in_lake, journal, write
from tests.support.processes import spawn

NIGHTS = 5
LINES = 2_000
"""New lines of each of these nights."""


def test_a_fleet_night_after_night(database: str, tmp_path: Path, figures: Callable[..., None]) -> None:
    (tmp_path / "pipeline.toml").write_text(
        f'lake = "lake"\nresults = "results"\n[[database]]\nname = "bank"\nurl = "{database}"\n'
    )

    def call(*command: str) -> str:
        with (tmp_path / "output").open("w+b") as output:
            process = spawn([sys.executable, "-m", "dtx", "pipeline", *command], output=output.fileno(), cwd=tmp_path)
            status = process.wait(800)
            output.seek(0)
            said = output.read().decode()
        assert status == 0, said
        return said

    def verdicts() -> list[tuple[Any, ...]]:
        table = DeltaTable(tmp_path / "results/verdicts").to_pyarrow_table(columns=["verdict", "run"])
        counted = table.group_by(["verdict", "run"]).aggregate([("verdict", "count")])
        return sorted(tuple(row.values()) for row in counted.to_pylist())

    spark = ("--no-publish", "--master", "local[2]", "--memory", "1g")
    write(database, 5)
    assert "reconciled 5 transactions from 5 lines, 5 of them new" in call("run", *spark)
    assert class_archive(find_java()).stat().st_size > 100_000_000
    assert in_lake(tmp_path / "lake") == journal(database)
    assert verdicts() == [("committed", 1, 5)]
    write(database, 7, rm="other")
    assert "reconciled 7 transactions from 12 lines, 7 of them new" in call("run", *spark)
    assert verdicts() == [("committed", 2, 7)]
    assert "12 lines of journals, 7 verdicts, 0 changes of verdicts, 0 runs" in call("retain", "--keep", "1d", "--yes")
    assert "reconciled 0 transactions from 0 lines, 0 of them new" in call("run", *spark)
    assert in_lake(tmp_path / "lake") == []
    taken = []
    for night in range(1, NIGHTS + 1):
        write(database, LINES, rm=f"rm-{night}")
        begun = time.perf_counter()
        said = call("run", "--no-publish", "--master", "local[2]")
        taken.append(f"{time.perf_counter() - begun:.1f}")
        assert f"from {night * LINES:,} lines, {LINES:,} of them new" in said
    figures(lines_of_a_night=LINES, seconds_of_each_night=", ".join(taken))
