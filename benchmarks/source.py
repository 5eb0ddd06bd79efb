"""Reading the journal with Spark through format("dtx"), compared with Spark's JDBC source with the same ranges.

A private PostgreSQL, reached by TCP because JDBC needs it, is filled with lines of a journal. Both readers take turns.
Each round reads every column of every line and hashes it in Spark, so that nothing is left out.
"""

import argparse
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Final

import psycopg
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from benchmarks.support.report import Table, machine, spread
from dtx.db import migrate
from dtx.embedded.cluster import find_programs
from dtx.log import tables
from dtx.pipeline.session import SessionOptions, open_session
from dtx.pipeline.source import Waits, register
from dtx.pipeline.source.batch_reader import cuts, times
from dtx.pipeline.source.options import parse
from dtx.pipeline.source.server import connected
from tests.support.journal import write
from tests.support.processes import end, free_port, short_directory, spawn, wait_until

_AT_ONCE: Final = 100_000
_ACCOUNT: Final = "postgres"
"""The account for PostgreSQL if this program runs as root."""
_USER: Final = "dtx"
_FETCHED: Final = "10000"
"""Rows that the JDBC driver fetches at a time; by default it fetches all."""
_SHOWN: Final = {"id": "id::text", "branch_id": "branch_id::text", "xid8": "xid8::text::bigint"}
"""SQL for the columns whose types Spark does not have."""


@contextmanager
def server() -> Iterator[str]:
    """Start a PostgreSQL on loopback, and yield its URL."""
    programs = find_programs().directory
    account = _ACCOUNT if os.geteuid() == 0 else None
    with short_directory("bench-source") as directory:
        data, port = directory / "data", free_port()
        data.mkdir()
        if account is not None:
            shutil.chown(data, account)
        initdb: list[str | Path] = [
            programs / "initdb",
            "-D",
            data,
            "-U",
            _USER,
            "-A",
            "trust",
            "--no-sync",
            "-E",
            "UTF8",
            "--locale=C",
        ]
        subprocess.run(initdb, check=True, user=account, capture_output=True)
        settings = (f"port={port}", "listen_addresses=127.0.0.1", "unix_socket_directories=", "shared_buffers=512MB")
        command: list[str | Path] = [
            programs / "postgres",
            "-D",
            data,
            *(word for setting in settings for word in ("-c", setting)),
        ]
        url = f"postgresql://{_USER}@127.0.0.1:{port}/postgres"
        with (directory / "log").open("wb") as log:
            switch = [] if account is None else ["setpriv", f"--reuid={account}", f"--regid={account}", "--init-groups"]
            process = spawn([*switch, *command], output=log.fileno())
        try:
            wait_until(lambda: _answers(url), seconds=60, what="PostgreSQL's start")
            yield url
        finally:
            end(process)


def _answers(url: str) -> bool:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return False
    return True


def fill(url: str, rows: int) -> None:
    """Write *rows* lines of today, and analyze the table."""
    migrate.upgrade(url)
    with psycopg.connect(url, autocommit=True) as connection:
        for first in range(0, rows, _AT_ONCE):
            write(connection, first + 1, min(rows, first + _AT_ONCE), "today")
        connection.execute("VACUUM ANALYZE dtx.journal")


def digest(frame: DataFrame) -> tuple[int, int]:
    """Return the number of lines, and a hash of all their columns."""
    row = frame.agg(sf.count("*"), sf.bit_xor(sf.xxhash64(*frame.columns))).collect()[0]
    return int(row[0]), int(row[1])


def by_jdbc(spark: SparkSession, url: str, partitions: int) -> DataFrame:
    """Return the journal with the columns and ranges of format("dtx"), read by Spark's JDBC source."""
    with connected("dtx", url, Waits()) as asked:
        ranges = times(cuts(asked, parse({"url": url, "partitions": str(partitions)})))
    columns = ", ".join(f"{_SHOWN.get(column.name, column.name)} AS {column.name}" for column in tables.journal.columns)
    frame = spark.read.jdbc(
        f"jdbc:{url.replace(f'{_USER}@', '')}",
        f"(SELECT {columns} FROM dtx.journal) AS lines",
        predicates=[" AND ".join(conditions) or "true" for conditions in ranges],
        properties={"driver": "org.postgresql.Driver", "user": _USER, "fetchsize": _FETCHED},
    )
    return frame.withColumn("source", sf.lit("dtx"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000, help="number of journal lines (%(default)s)")
    parser.add_argument("--partitions", type=int, default=4, help="number of ranges for both readers (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each, after an uncounted one (%(default)s)")
    parser.add_argument("--jar", type=Path, required=True, help="path of postgresql-42….jar of pgjdbc")
    words = parser.parse_args()
    print(machine())
    options = SessionOptions(master="local[2]", settings={"spark.jars": str(words.jar)})
    with server() as url, open_session(options) as spark:
        fill(url, words.rows)
        register(spark)
        compare(spark, url, words.rows, words.partitions, words.rounds)


def compare(spark: SparkSession, url: str, rows: int, partitions: int, rounds: int) -> None:
    """Read with both in turns, and print.

    Raises:
        SystemExit: the two have read different lines.
    """
    readers: dict[str, Callable[[], DataFrame]] = {
        'format("dtx")': lambda: spark.read.format("dtx").options(url=url, partitions=partitions).load(),
        "JDBC": lambda: by_jdbc(spark, url, partitions),
    }
    seconds: dict[str, list[float]] = {name: [] for name in readers}
    found = set()
    for number in range(rounds + 1):
        for name, read in readers.items():
            began = time.monotonic()
            found.add(digest(read()))
            if number:
                seconds[name].append(time.monotonic() - began)
    if len(found) != 1 or {count for count, _ in found} != {rows}:
        raise SystemExit(f"the readers disagree: {found}")
    table = Table((f"{rows:,} lines, {partitions} ranges", 32), ["seconds (of rounds)    ", "lines/s"])
    for name, taken in seconds.items():
        table.row(name, [spread(taken), f"{rows / median(taken):,.0f}"])


if __name__ == "__main__":
    main()
