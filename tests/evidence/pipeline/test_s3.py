"""Lake and results on S3: conditional writes keep each line once, and Spark needs no jar."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from dtx.pipeline.lake import SCHEMA
from tests.servers.pipeline.test_archive import journal, run, write
from tests.support import s3

LAKE, RESULTS = "s3://bucket/lake", "s3://bucket/results"
_NOT_COMPARED = {"source", "branch_id", "batch", "month"}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    with s3.server(tmp_path) as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield variables


def in_lake() -> list[tuple[Any, ...]]:
    names = [name for name in SCHEMA.names if name not in _NOT_COMPARED]
    return sorted(tuple(row.values()) for row in DeltaTable(LAKE).to_pyarrow_table(columns=names).to_pylist())


_ARCHIVE = """
import sys
from pathlib import Path
from dtx.pipeline.archive import archive
from dtx.pipeline.files import LakeError
lake, url, met = sys.argv[1:]
while not Path(met).exists():
    try:
        (done,) = archive(lake, {"prod": {"url": url, "name": "prod"}})
        assert done.error is None, done.error
    except LakeError as error:
        assert "run again" in str(error), error
        Path(met).touch()
"""


def test_two_archivers_of_one_place_do_not_repeat_a_line(store: dict[str, str], database: str, tmp_path: Path) -> None:
    """There is no lock: Delta refuses the commit of the second one."""
    write(database, 50)
    met = tmp_path / "met"
    words = [sys.executable, "-c", _ARCHIVE, LAKE, database, str(met)]
    both = [subprocess.Popen(words, env=os.environ | store) for _ in range(2)]
    ends = time.monotonic() + 240
    while not met.exists():
        assert time.monotonic() < ends, "there was no conflict"
        write(database, 3, at=datetime.now(UTC))
    assert [process.wait(120) for process in both] == [0, 0]
    run(LAKE, database)
    assert in_lake() == journal(database)


def test_a_fleet_night_after_night_on_s3(store: dict[str, str], database: str, tmp_path: Path) -> None:
    (tmp_path / "pipeline.toml").write_text(
        f'lake = "{LAKE}"\nresults = "{RESULTS}"\n[[database]]\nname = "bank"\nurl = "{database}"\n'
    )

    def call(*command: str) -> str:
        words = [sys.executable, "-m", "dtx", "pipeline", *command]
        done = subprocess.run(
            words, capture_output=True, text=True, cwd=tmp_path, env=os.environ | store, timeout=600, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def verdicts() -> list[tuple[Any, ...]]:
        table = DeltaTable(f"{RESULTS}/verdicts").to_pyarrow_table(columns=["verdict", "run"])
        counted = table.group_by(["verdict", "run"]).aggregate([("verdict", "count")])
        return sorted(tuple(row.values()) for row in counted.to_pylist())

    spark = ("--no-publish", "--master", "local[2]", "--memory", "1g")
    write(database, 5)
    assert "reconciled 5 transactions from 5 lines, 5 of them new" in call("run", *spark)
    assert (tmp_path / "report/report.html").exists()
    write(database, 7, rm="other")
    assert "reconciled 7 transactions from 12 lines, 7 of them new" in call("run", *spark)
    assert verdicts() == [("committed", 2, 7)]
    assert in_lake() == journal(database)
    assert "reconciled 7 transactions from 12 lines, 12 of them new" in call("reconcile", "--full", *spark)
    assert verdicts() == [("committed", 3, 7)]
    assert "removed 12 lines of journals, 7 verdicts" in call("retain", "--keep", "1d", "--yes")
