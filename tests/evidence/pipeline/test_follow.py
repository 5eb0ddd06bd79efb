"""``dtx pipeline archive --follow`` with a writer at full speed, and kill -9 of both: every line is there once."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import psycopg
from deltalake import DeltaTable

from tests.evidence.pipeline import busy_writer
from tests.servers.pipeline.test_archive import in_lake, journal, run
from tests.support.processes import end, spawn, wait_until

KILLS = 20
"""Number of kills of each of the two."""
SECONDS = 600.0
"""Limit for a batch on a busy machine."""


@contextmanager
def writer(url: str, first: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a writer, and wait until it has written a round."""
    with log.open("wb") as output:
        process = spawn(
            [sys.executable, str(busy_writer.__file__), url, str(first)],
            output=output.fileno(),
            env=os.environ | {"PYTHONPATH": str(Path.cwd())},
        )
    try:
        wait_until(lambda: log.stat().st_size or process.poll() is not None, seconds=SECONDS, what="the first lines")
        assert process.poll() is None, log.read_text()
        yield process
    finally:
        end(process)


@contextmanager
def follower(here: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start the archive."""
    words = ["pipeline", "archive", "--follow", "--interval", "200ms"]
    with (here / "follower.log").open("ab") as output:
        process = spawn([sys.executable, "-m", "dtx", *words], output=output.fileno(), cwd=here)
    try:
        yield process
    finally:
        end(process)


def batches(lake: Path) -> int:
    """Return the number of batches in the lake."""
    return (DeltaTable(lake).transaction_version("dtx") or 0) if DeltaTable.is_deltatable(str(lake)) else 0


def until(following: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
    """Wait for a condition, or for the end of the archive."""
    wait_until(lambda: condition() or following.poll() is not None, seconds=SECONDS, what="progress of the archive")


def test_journal_and_lake_agree_whichever_process_is_killed(
    migrated_postgres_url: str, tmp_path: Path, figures: Callable[..., None]
) -> None:
    dice = Random(os.environ.get("DTX_SEED", "7"))
    lake = tmp_path / "lake"
    (tmp_path / "pipeline.toml").write_text(
        f'lake = "lake"\nresults = "results"\n[[database]]\nname = "bank"\nurl = "{migrated_postgres_url}"\n'
        'options = { maxRowsPerBatch = "2000" }\n'
    )
    for number in range(KILLS):
        log = tmp_path / f"writer-{number}.log"
        with follower(tmp_path) as following, writer(migrated_postgres_url, number * 10_000_000, log) as writing:
            wanted = batches(lake) + dice.randint(1, 3)
            until(following, lambda wanted=wanted: batches(lake) >= wanted)  # type: ignore[misc]
            assert following.poll() is None, (tmp_path / "follower.log").read_text()[-3000:]
            # in a random order
            for process in dice.sample([writing, following], 2):
                process.kill()
                process.wait()
        if number == 0:
            assert 0 < len(in_lake(lake)) < len(journal(migrated_postgres_url)), "the kill came too early or late"
    with psycopg.connect(migrated_postgres_url) as connection:
        row = connection.execute("SELECT count(*) FROM dtx.journal").fetchone()
    run(lake, migrated_postgres_url, source="bank", maxRowsPerBatch="100000")
    assert in_lake(lake) == journal(migrated_postgres_url)
    assert row is not None
    figures(lines_followed=row[0], kills=2 * KILLS)
