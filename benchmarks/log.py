"""The transaction log alone: branches per second, processor time per branch, latency of one write.

Each branch is three writes, one after the other: insert (prepared, one publish of 1 KB), advance (committing),
complete; two journal lines. Run it on an empty database, in which it makes the tables:

    python -m benchmarks.log postgresql:///scratch --branches 30000 --concurrent 1 32 128
"""

import argparse
import asyncio
import os
import resource
import time
from itertools import count
from pathlib import Path
from random import Random
from uuid import UUID

import psycopg
import uvloop

from benchmarks.support.report import Table
from dtx.db import migrate
from dtx.log.postgres import PostgresTransactionLog
from dtx.log.records import (
    Advance,
    BranchRecord,
    CompleteWrite,
    Insert,
    JournalEntry,
    JournalEvent,
    LogState,
    WorkKind,
    WorkRow,
)
from dtx.xa.xid import Xid

HEADS = ("branches/s", "python µs/branch", "postgres µs/branch", "records/group", "write p50 ms", "write p99 ms")
BODY = bytes(1024)
PROPERTIES = bytes.fromhex("9000") + b"\x18application/octet-stream\x02"
_random = Random(6774)
_numbers = count()


async def one_branch(log: PostgresTransactionLog, latencies: list[float]) -> None:
    """Insert, advance and complete one branch."""
    branch_id = UUID(int=_random.getrandbits(128))
    xid = Xid(4660, b"gtrid-%016d" % next(_numbers), b"bqual-0001")
    started = time.time()
    branch = BranchRecord(
        id=branch_id,
        vhost="/",
        xid=xid,
        state=LogState.PREPARED,
        owner="guest",
        started_at=started,
        prepared_at=started,
        publishes=1,
        bytes=len(BODY),
    )
    work = WorkRow(
        position=0, kind=WorkKind.PUBLISH, exchange=b"", routing_key=b"orders", properties=PROPERTIES, body=BODY
    )

    def line(event: JournalEvent) -> JournalEntry:
        return JournalEntry(
            event=event,
            branch_id=branch_id,
            vhost="/",
            xid=xid,
            owner="guest",
            at=time.time(),
            actor="guest",
            publishes=1,
            bytes=len(BODY),
            started_at=started,
            prepared_at=started,
        )

    records = (
        Insert(branch=branch, work=(work,), journal=line(JournalEvent.PREPARED)),
        Advance(
            id=branch_id, expect=LogState.PREPARED, version=1, to=LogState.COMMITTING, decided_at=started, journal=None
        ),
        CompleteWrite(id=branch_id, expect=LogState.COMMITTING, version=2, journal=line(JournalEvent.COMMITTED)),
    )
    for record in records:
        began = time.perf_counter()
        await log.write(record)
        latencies.append(time.perf_counter() - began)


async def measure(url: str, branches: int, concurrent: int) -> list[str]:
    """Measure and return the cells of one row."""
    groups: list[int] = []
    log = PostgresTransactionLog(url, "benchmark", observe=lambda records, _: groups.append(records))
    await log.open()
    latencies: list[float] = []
    left = iter(range(branches))

    async def worker() -> None:
        for _ in left:
            await one_branch(log, latencies)

    for _ in range(50):
        await one_branch(log, [])
    backends = backends_of(url)
    groups.clear()
    postgres = sum(map(processor_seconds, backends))
    own = processor_seconds(os.getpid())
    began = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrent)))
    elapsed = time.perf_counter() - began
    own = processor_seconds(os.getpid()) - own
    postgres = sum(map(processor_seconds, backends)) - postgres
    await log.close()
    latencies.sort()
    return [
        f"{branches / elapsed:,.0f}",
        f"{own / branches * 1e6:.1f}",
        f"{postgres / branches * 1e6:.1f}",
        f"{len(latencies) / len(groups):.1f}",
        f"{latencies[len(latencies) // 2] * 1e3:.3f}",
        f"{latencies[len(latencies) * 99 // 100] * 1e3:.3f}",
    ]


def backends_of(url: str) -> list[int]:
    """Return the ids of the processes that serve the log's sessions."""
    with psycopg.connect(url) as connection:
        rows = connection.execute("SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'dtx %'").fetchall()
    return [int(pid) for (pid,) in rows]


def processor_seconds(pid: int) -> float:
    """Return the user and system time of a process so far."""
    if pid == os.getpid():
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime
    runtime = Path(f"/proc/{pid}/schedstat").read_text().split()[0]
    return int(runtime) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--branches", type=int, default=20_000)
    parser.add_argument("--concurrent", type=int, nargs="*", default=[1, 8, 32, 128])
    options = parser.parse_args()
    migrate.upgrade(options.url)
    table = Table(("concurrent", 10), HEADS)
    for concurrent in options.concurrent:
        branches = options.branches if concurrent > 1 else options.branches // 8
        table.row(str(concurrent), uvloop.run(measure(options.url, branches, concurrent)))


if __name__ == "__main__":
    main()
