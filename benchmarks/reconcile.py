"""Time and memory for the reconciliation of a fleet, and the correctness of its verdicts, compared with DuckDB.

The fleet and its correct verdicts are generated first, as Parquet. Both programs read the same files and give the same
verdicts. These are compared with the correct ones: precision and recall of every verdict must be 1. Times are of a
whole run. DuckDB writes its verdicts as one Parquet file. The pipeline also writes the folded rows for the next run,
control totals and the evidence of every finding. On a busy machine, processor seconds are more reliable than elapsed
seconds.

    python -m benchmarks.reconcile --lines 1000000 10000000 --anomalies 1000
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from benchmarks.support.duck import question
from benchmarks.support.processor import resident, seconds, tree
from benchmarks.support.report import Table, machine
from dtx.pipeline.reconcile import current, run
from dtx.pipeline.session import SessionOptions, open_session
from dtx.pipeline.verdicts import Rules, Verdict
from tests.support.generated_fleet import INJECTED, FleetPlan, generate, write

_OUT_OF_MEMORY = 7
"""The exit code of DuckDB's process if it runs out of memory."""
_PARTS = (1, 4, 16)
_LINES_OF_ONE = 4.6
"""Average journal lines of a transaction."""


class Stored:
    """The stored lines of a generated fleet; see :class:`~dtx.pipeline.reconcile.Lines`."""

    identity = None
    quarantined = ()

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def frame(self, spark: SparkSession, since: int | None = None, between: object = None) -> tuple[DataFrame, int]:
        """Return all lines, or none if they were read before; *between* has no effect."""
        _ = between
        events = spark.read.parquet(str(self._directory / "events"))
        return (events.limit(0) if since else events), 1


def _resident(process: int) -> int:
    """Return the resident bytes of a process and its descendants."""
    total = 0
    for each in tree(process):
        with suppress(OSError):
            total += resident(each)
    return total


@contextmanager
def highest(process: int) -> Iterator[list[int]]:
    """Record the highest memory of a process tree during the block, in bytes, four times a second."""
    most, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.25):
            try:
                most[0] = max(most[0], _resident(process))
            except OSError:
                continue

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield most
    finally:
        over.set()
        watcher.join()


@dataclass(frozen=True)
class Answer:
    """The verdicts of one program, and its cost.

    Args:
        who: the name in the table.
        verdicts: one row for each transaction.
        taken: elapsed seconds.
        busy: processor seconds.
        peak: highest memory in bytes.
    """

    who: str
    verdicts: DataFrame
    taken: float
    busy: float
    peak: int


def wrong(spark: SparkSession, verdicts: DataFrame, fleet: Path) -> list[str]:
    """Return a line for each verdict whose precision or recall is not 1."""
    true = spark.read.parquet(str(fleet / "truth")).select("format_id", "gtrid", sf.col("verdict").alias("true"))
    counted = (
        true.join(verdicts.select("format_id", "gtrid", "verdict"), ["format_id", "gtrid"], "full")
        .groupBy("true", "verdict")
        .count()
        .collect()
    )
    counts = {(row.true, row.verdict): row["count"] for row in counted}
    found = []
    for verdict in Verdict:
        right = counts.get((str(verdict), str(verdict)), 0)
        said = sum(count for (_, told), count in counts.items() if told == verdict)
        there = sum(count for (true_, _), count in counts.items() if true_ == verdict)
        if right != said or right != there:
            found.append(f"{verdict}: precision {right}/{said}, recall {right}/{there}")
    return found


def by_spark(spark: SparkSession, fleet: Path, out: Path, rules: Rules) -> Answer:
    begun, busy = time.perf_counter(), seconds(os.getpid())
    with highest(os.getpid()) as peak:
        run(
            spark,
            Stored(fleet),
            spark.read.parquet(str(fleet / "observations")),
            spark.read.parquet(str(fleet / "decisions")),
            str(out),
            rules,
        )
        taken, busy = time.perf_counter() - begun, seconds(os.getpid()) - busy
    return Answer("dtx on Spark", current(spark, str(out)), taken, busy, peak[0])


def by_duckdb(spark: SparkSession, fleet: Path, out: Path, rules: Rules, memory: str) -> Answer | None:
    """Run DuckDB in its own process; ``None`` if it ends with an error, which it has printed.

    DuckDB keeps the distinct values of a group in memory. If the memory is not enough, the query runs again for parts
    of the transactions. The time is that of the successful attempt.
    """
    program = (
        "import duckdb, json, sys\n"
        "db = duckdb.connect()\n"
        f"db.execute(\"SET memory_limit = '{memory}'; SET temp_directory = '{out.parent}/spilled'; SET threads = 2\")\n"
        "db.execute(\"SET TimeZone = 'UTC'; SET preserve_insertion_order = false; SET enable_progress_bar = false\")\n"
        "try:\n"
        "    [db.execute(question) for question in json.load(sys.stdin)]\n"
        "except duckdb.OutOfMemoryException:\n"
        f"    sys.exit({_OUT_OF_MEMORY})\n"
    )
    for parts in _PARTS:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        questions = [question(str(fleet), f"{out}/{part}.parquet", rules, (part, parts)) for part in range(parts)]
        begun, busy = time.perf_counter(), _waited_for()
        with (
            subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, text=True) as process,
            highest(process.pid) as peak,
        ):
            process.communicate(json.dumps(questions))
        taken, busy = time.perf_counter() - begun, _waited_for() - busy
        if process.returncode == 0:
            who = "DuckDB" if parts == 1 else f"DuckDB ({parts} parts)"
            return Answer(who, spark.read.parquet(str(out)), taken, busy, peak[0])
        if process.returncode != _OUT_OF_MEMORY:
            break
        _say(f"DuckDB had not enough memory for {'all' if parts == 1 else f'a part of {parts}'}, after {taken:.1f} s")
    return None


def _waited_for() -> float:
    """Return the processor seconds of ended children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _say(words: str) -> None:
    """Print a line of progress on stderr."""
    print(f"{time.strftime('%H:%M:%S')} {words}", file=sys.stderr, flush=True)


def measure(spark: SparkSession, directory: Path, lines: int, asked: argparse.Namespace, table: Table) -> list[str]:
    """Generate a fleet, reconcile it with both, and print a row for each.

    Returns:
        A line for each wrong verdict.
    """
    plan = FleetPlan(transactions=round(lines / _LINES_OF_ONE), anomalies=asked.anomalies)
    rules, fleet = plan.rules, directory / "fleet"
    _say(f"generating about {lines:,} lines")
    write(generate(spark, plan), str(fleet))
    events = spark.read.parquet(str(fleet / "events"))
    count, branches = events.count(), events.select("rm", "gtrid", "bqual").distinct().count()
    failed: list[str] = []

    def tell(answer: Answer) -> None:
        _say(f"{answer.who} took {answer.taken:.1f} s; its verdicts beside the truth")
        differs = wrong(spark, answer.verdicts, fleet)
        failed.extend(f"{answer.who}, {count:,} lines: {words}" for words in differs)
        table.row(
            f"{count:,}",
            [
                f"{branches:,}", answer.who, f"{answer.taken:.1f}", f"{answer.busy:.1f}",
                f"{count / answer.taken:,.0f}", f"{answer.peak / 1e9:.2f}",
                f"{asked.anomalies * len(INJECTED):,}", "no" if differs else "all",
            ],
        )  # fmt: skip

    _say(f"reconciling {count:,} lines of {branches:,} branches")
    tell(by_spark(spark, fleet, directory / "out", rules))
    if not asked.no_duckdb:
        duck = by_duckdb(spark, fleet, directory / "duck", rules, f"{asked.memory}GB")
        if duck is None:
            failed.append(f"DuckDB, {count:,} lines: it ended with an error")
        else:
            tell(duck)
    for written in (fleet, directory / "out", directory / "duck"):
        shutil.rmtree(written, ignore_errors=True)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--lines", type=int, nargs="+", default=[1_000_000], help="approximate numbers of journal lines (1,000,000)"
    )
    parser.add_argument("--anomalies", type=int, default=100, help="number of anomalies of each kind (100)")
    parser.add_argument("--memory", type=int, default=4, help="GiB of Java heap, and GB of DuckDB's memory (4)")
    parser.add_argument("--directory", type=Path, help="for all files: about 0.3 GB for a million lines")
    parser.add_argument("--no-duckdb", action="store_true", help="run only the pipeline")
    asked = parser.parse_args()
    print(machine())
    directory = Path(tempfile.mkdtemp(prefix="dtx-reconcile-", dir=asked.directory))
    failed = []
    try:
        options = SessionOptions(
            master="local[2]", memory=asked.memory << 30, local_dir=directory / "spark", lines=max(asked.lines)
        )
        with open_session(options) as spark:
            table = Table(
                ("lines of journals", 18),
                ["branches", "               who", "seconds", "of a processor", "lines/s", "peak GB", "found", "right"],
            )
            for lines in asked.lines:
                failed += measure(spark, directory, lines, asked, table)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
