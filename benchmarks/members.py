"""Branches through several members: processor time per branch, contention of the log, and the latency of a hop.

Each client plays whole branches at one member, as in ``benchmarks.branches``. All members, PostgreSQL, RabbitMQ and the
load share the processors of this machine. So the rate cannot grow; the processor time for each branch can be compared.
The first row is one dtx that knows no members.

The log: records in each commit of PostgreSQL, and how often a writer that works waits for a lock of another session.
A hop: commits in turns at the member that has the branch, and at another one, by one client.
"""

import argparse
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import psycopg

from benchmarks.support.amqp import RawConnection, message_frames
from benchmarks.support.branch_player import BranchPlayer
from benchmarks.support.dialogue import Cycle
from benchmarks.support.load import LoadError
from benchmarks.support.measuring import Rig, Row, count, measure, noise, verdict
from benchmarks.support.report import Table, machine, milliseconds, percentile
from benchmarks.support.servers import Servers
from dtx.wire.amqp09.codec import Method
from dtx.wire.amqp09.methods import (
    DtxCommit,
    DtxCommitOk,
    DtxEnd,
    DtxEndOk,
    DtxPrepare,
    DtxPrepareOk,
    DtxStart,
    DtxStartOk,
)
from dtx.xa.xid import Xid
from tests.support.postgres import PostgresServer
from tests.support.raw import Address
from tests.support.service import DtxService

HEADS = (
    "per s", "p50 ms", "p99", "commit p50", "dtx µs", "postgres µs", "broker µs", "load µs", "others",
    "records/commit", "waits for lock",
)  # fmt: skip
MOST_CPU = 1.15
"""Aim: the processor time of dtx for each branch, compared with one member."""
MOST_HOP_MS = 1.0
"""Aim: the longer latency of a forwarded commit, in the median."""
RECORDS = 3
"""Of each branch: its vote, its decision, its end."""
_SAMPLE_SECONDS = 0.005
_COMMITS = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
_WRITERS = """
SELECT coalesce(wait_event_type, 'works') FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE 'dtx writer%' AND state = 'active'
"""


class Samples:
    """What the writers of all members do, and the commits of their database, during a block."""

    def __init__(self, database: str) -> None:
        self._database = database
        self.states: Counter[str] = Counter()
        self.commits = 0

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Take samples during the block."""
        over = threading.Event()
        sampling = threading.Thread(target=self._sample, args=(over,))
        before = self._read_commits()
        sampling.start()
        try:
            yield
        finally:
            over.set()
            sampling.join()
            self.commits = self._read_commits() - before

    def _read_commits(self) -> int:
        time.sleep(1.1)  # a session reports its commits once a second
        with psycopg.connect(self._database) as connection:
            row = connection.execute(_COMMITS).fetchone()
        assert row is not None
        return int(row[0])

    def _sample(self, over: threading.Event) -> None:
        with psycopg.connect(self._database) as connection:  # one transaction: it counts as no commit
            while not over.wait(_SAMPLE_SECONDS):
                self.states.update(state for (state,) in connection.execute(_WRITERS))
                connection.execute("SELECT pg_stat_clear_snapshot()")

    def waits(self) -> float:
        """Return the share of samples of busy writers that waited for a lock of another session."""
        return self.states["Lock"] / max(1, self.states.total())


def serve(servers: Servers, database: str, *options: str) -> DtxService:
    """Return another ``dtx serve``, not started, on *database*."""
    behind = ("--management", servers.rabbitmq.management_url, "--log-level", "warning")
    return DtxService(broker=servers.rabbitmq.url(), database=database, options=(*behind, *options), start=False)


def measure_members(
    servers: Servers, postgres: PostgresServer, members: int, first: int, options: argparse.Namespace
) -> tuple[Row, Samples]:
    """Run the load; 0 *members* is one dtx that is alone.

    Raises:
        LoadError: an answer was wrong, or the queue does not hold the committed messages.
    """
    database = postgres.create_database()
    words: tuple[str, ...] = ()
    if members == 1:
        words = ("--advertise", "amqp://127.0.0.1")
    elif members:
        words = ("--processes", str(members))
    with serve(servers, database, *words) as service:
        service.start()
        cycle = Cycle(queue=b"bench-members", size=options.size)
        with RawConnection(servers.broker) as connection:
            connection.declare(cycle.queue)
        rig = Rig(servers=servers, postgres=postgres, service=service, options=options)
        samples = Samples(database)
        with samples.taken():
            row = measure(rig, partial(BranchPlayer, cycle), options.connections, first, f"members-{members}")
        with RawConnection(servers.broker) as connection:
            count(connection, cycle.queue, row.tally)
    postgres.drop_database(database)
    return row, samples


def cells(row: Row, samples: Samples) -> list[str]:
    """Return the cells for :data:`HEADS`."""
    branches = len(row.tally.branches)
    committed = sum(row.tally.committed.values())
    return [
        f"{row.rate:,.0f}",
        *(milliseconds(row.tally.branches, percent) for percent in (50, 99)),
        milliseconds(row.tally.commits, 50),
        *(f"{row.usage.busy[name] / branches * 1e6:.0f}" for name in ("dtx", "postgres", "broker", "load")),
        f"{row.usage.share('others') * 100:.0f} %",
        f"{committed * RECORDS / max(1, samples.commits):.2f}",
        f"{samples.waits() * 100:.1f} %",
    ]


def measure_hop(servers: Servers, postgres: PostgresServer, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of commits where the branch is, and at another member."""
    database, queue = postgres.create_database(), b"bench-hop"
    times: dict[str, list[float]] = {"here": [], "at another member": []}
    words = ("--advertise", "amqp://127.0.0.1")
    with serve(servers, database, *words) as one, serve(servers, database, *words) as other:
        one.start()
        other.start()
        with RawConnection(servers.broker) as connection:
            connection.declare(queue)
        with RawConnection(Address.of(one.url())) as near, RawConnection(Address.of(other.url())) as far:
            near.select_dtx()
            run = os.urandom(8)
            for number in range(2 * options.hops + 200):
                xid = Xid(1, run + number.to_bytes(4), b"")
                steps: tuple[tuple[Method, type[Method]], ...] = (
                    (DtxStart(xid=xid), DtxStartOk), (DtxEnd(xid=xid), DtxEndOk), (DtxPrepare(xid=xid), DtxPrepareOk),
                )  # fmt: skip
                for request, answer in steps:
                    near.call(request, answer)
                    if answer is DtxStartOk:
                        near.socket.sendall(message_frames(b"", queue, bytes(options.size)))
                where = "here" if number % 2 else "at another member"
                began = time.perf_counter()
                (near if number % 2 else far).call(DtxCommit(xid=xid), DtxCommitOk)
                if number >= 200:  # before that, connections are made and plans are cached
                    times[where].append(time.perf_counter() - began)
        with RawConnection(servers.broker) as connection:
            connection.delete(queue)
    postgres.drop_database(database)
    return times


def conclusions(rows: dict[int, Row], hop: dict[str, list[float]]) -> Iterator[str]:
    """Compare with the aims."""
    cost = {members: row.usage.busy["dtx"] / len(row.tally.branches) for members, row in rows.items()}
    for members in sorted(cost.keys() - {0, 1}):
        ratio = cost[members] / cost[1]
        yield f"{members} members: {ratio:.0%} of one member's processor time: {verdict(ratio <= MOST_CPU)}"
    near, far = (percentile(values, 50) * 1e3 for values in hop.values())
    yield f"a hop costs {far - near:.2f} ms in the median, aim {MOST_HOP_MS} ms: {verdict(far - near <= MOST_HOP_MS)}"
    yield from noise(rows.values())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.members", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--members", type=int, nargs="+", default=[0, 1, 2, 4], metavar="N", help="numbers of members; 0: dtx alone")
    add("--connections", type=int, default=32, help="number of clients (default 32)")
    add("--seconds", type=int, default=10, help="measured time of each row (default 10)")
    add("--size", type=int, default=1024, help="bytes of the published message (default 1024)")
    add("--processes", type=int, default=min(2, os.cpu_count() or 1), help="number of load processes (default 2)")
    add("--hops", type=int, default=1000, help="number of commits at each member (default 1000)")
    options = parser.parse_args()
    options.standalone, options.profile = False, None
    return options


def main() -> None:
    options = arguments()
    print(f"{options.connections} clients, {options.size} bytes, {options.seconds} s a row; {machine()}")
    print(f"load of the machine before: {os.getloadavg()[0]:.1f}")
    rows: dict[int, Row] = {}
    with Servers() as servers:
        postgres = servers.postgres("pg")
        table = Table(("members", 8), HEADS)
        for members in options.members:
            try:
                row, samples = measure_members(servers, postgres, members, len(rows) * options.connections, options)
            except LoadError as error:
                raise SystemExit(str(error)) from None
            rows[members] = row
            table.row(str(members) if members else "alone", cells(row, samples))
            print("writers: " + ", ".join(f"{state} {number}" for state, number in samples.states.most_common()))
        hop = measure_hop(servers, postgres, options)
        latencies = Table(("commit", 18), ("p50 ms", "p90", "p99"))
        for where, values in hop.items():
            latencies.row(where, [milliseconds(values, percent) for percent in (50, 90, 99)])
    print("every answer was xa-ok, every committed message was in the queue exactly once")
    print("\n".join(conclusions(rows, hop)))


if __name__ == "__main__":
    main()
