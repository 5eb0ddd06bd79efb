"""Time and memory for copying a journal into the lake, with a check that every line is there once.

Lines of twenty resource managers and thirty days are written directly into the journal of a private PostgreSQL, with
partitions of a day as dtx makes them. ``dtx pipeline archive`` copies them; the time includes the start of Python. Then
it runs again without new lines. Arrow counts and sums the lines of the lake, and the result is compared with the
journal. Memory and processor seconds are those of the command, without PostgreSQL.

    python -m benchmarks.archive --lines 1000000 10000000
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, NamedTuple

import psycopg
import pyarrow.compute as pc
from deltalake import DeltaTable

from benchmarks.reconcile import highest
from benchmarks.source import server
from benchmarks.support.processor import seconds
from benchmarks.support.report import Table, machine
from dtx.db import migrate
from dtx.db.migrate import partition_name

_LOOK: Final = 0.25
"""Seconds between two readings of the command's processor time."""
_DAYS: Final = 30
_AT_ONCE: Final = 500_000
_PARTITION: Final = """
CREATE TABLE IF NOT EXISTS dtx.{name} PARTITION OF dtx.journal
FOR VALUES FROM ('{first} 00:00+00') TO ('{end} 00:00+00')
"""
_LINES: Final = """
INSERT INTO dtx.journal (id, at, rm, event, branch_id, vhost, format_id, gtrid, bqual, owner, actor, outcome, one_phase,
    publishes, consumes, bytes, started_at, prepared_at, decided_at)
SELECT gen_random_uuid(), at, 'rm-' || lpad((i / 2 %% 20)::text, 3, '0'), CASE i %% 2 WHEN 0 THEN 'prepared' ELSE
    'committed' END, md5((i / 2)::text)::uuid, '/', 4660, int8send(i / 2), '\\x6231', 'app' || i %% 7, 'app' || i %% 7,
    NULL, false, i %% 100, i %% 5, i, at - interval '1 second', at, CASE i %% 2 WHEN 1 THEN at END
FROM (SELECT i, %(first)s::timestamptz + i * (interval '1 day' * %(days)s / %(all)s) AS at
    FROM generate_series(%(from)s::bigint, %(to)s::bigint) i) AS each
"""


class Totals(NamedTuple):
    """Totals that a lost or repeated line changes.

    Args:
        lines: number of lines.
        bytes: the sum of a column with a different number in every line.
        crossed: the sum of that column times the number of messages of the transaction.
    """

    lines: int
    bytes: int
    note_crossed_close: int


class Seen(NamedTuple):
    """The time, memory and output of one run of the command."""

    seconds: float
    busy: float
    peak: int
    said: str


def fill(url: str, lines: int) -> Totals:
    """Write *lines* lines of the last days, and return their totals."""
    migrate.upgrade(url)
    midnight = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    first = midnight - timedelta(days=_DAYS)
    with psycopg.connect(url, autocommit=True) as connection:
        for number in range(_DAYS):
            day = (first + timedelta(days=number)).date()
            partition = _PARTITION.format(name=partition_name(day), first=day, end=day + timedelta(days=1))
            connection.execute(partition.encode())  # names and dates come from this program
        for begin in range(0, lines, _AT_ONCE):
            values = {
                "first": first,
                "days": _DAYS,
                "all": lines,
                "from": begin,
                "to": min(lines, begin + _AT_ONCE) - 1,
            }
            connection.execute(_LINES, values)
        connection.execute("VACUUM ANALYZE dtx.journal")
        row = connection.execute("SELECT count(*), sum(bytes), sum(bytes * publishes) FROM dtx.journal").fetchone()
    assert row is not None
    return Totals(*map(int, row))


def in_lake(lake: Path) -> Totals:
    """Return the totals of a lake, read without Spark."""
    table = DeltaTable(lake).to_pyarrow_table(columns=["bytes", "publishes"])
    note_crossed_close = pc.sum(pc.multiply(table["bytes"], pc.cast(table["publishes"], "int64")))
    return Totals(table.num_rows, pc.sum(table["bytes"]).as_py(), note_crossed_close.as_py())


def archive(fleet: Path) -> Seen:
    """Run the command.

    Raises:
        SystemExit: the command failed.
    """
    command = [sys.executable, "-m", "dtx", "pipeline", "archive", "--fleet", str(fleet)]
    begun, busy = time.perf_counter(), 0.0
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=said, stderr=errors) as process, highest(process.pid) as peak:
            while process.poll() is None:
                busy = max(busy, seconds(process.pid))
                time.sleep(_LOOK)
        taken = time.perf_counter() - begun
        said.seek(0)
        errors.seek(0)
        if process.returncode:
            raise SystemExit(
                f"{' '.join(command)} ended with {process.returncode}: {said.read()}{errors.read()[-3000:]}"
            )
        return Seen(taken, busy, peak[0], said.read().strip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, nargs="+", default=[1_000_000], help="number of journal lines (1,000,000)")
    parser.add_argument("--directory", type=Path, help="for all files: 0.6 GB for a million lines, with PostgreSQL")
    asked = parser.parse_args()
    print(machine())
    heads = [
        "seconds",
        "of a processor",
        "lines/s",
        "peak GB",
        "lake GB",
        "files",
        "nothing new s",
        "lines in the lake",
    ]
    table = Table(("lines of the journal", 20), heads)
    failed = []
    for lines in asked.lines:
        with tempfile.TemporaryDirectory(prefix="dtx-archive-", dir=asked.directory) as name, server() as url:
            directory = Path(name)
            totals = fill(url, lines)
            fleet = directory / "pipeline.toml"
            database = f'[[database]]\nname = "bank"\nurl = {json.dumps(url)}\n'
            fleet.write_text(f'lake = "lake"\nresults = "results"\n{database}')
            first, second = (archive(fleet) for _ in range(2))
            lake = directory / "lake"
            found = in_lake(lake)
            sizes = [file.stat().st_size for file in lake.glob("month=*/*.parquet")]
            table.row(
                f"{lines:,}",
                [
                    f"{first.seconds:.1f}", f"{first.busy:.1f}", f"{lines / first.seconds:,.0f}",
                    f"{first.peak / 1e9:.2f}", f"{sum(sizes) / 1e9:.3f}", f"{len(sizes):,}", f"{second.seconds:.1f}",
                    "each once" if found == totals else "WRONG",
                ],
            )  # fmt: skip
            if (
                found != totals
                or f"archived {lines:,} new lines" not in first.said
                or "archived 0 new lines" not in second.said
            ):
                failed.append(f"journal {totals}, lake {found}; said: {first.said!r}, then {second.said!r}")
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
