"""Measures a load on a number of connections: rates, processor time, profile, and the count of the queue."""

import argparse
import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Self

import psycopg

from benchmarks.support.amqp import RawConnection
from benchmarks.support.load import Load, LoadError, Play, Tally
from benchmarks.support.processor import Meter, Usage
from benchmarks.support.profile import Profiler
from benchmarks.support.report import milliseconds
from benchmarks.support.servers import Servers
from benchmarks.support.streams import drain
from tests.support.postgres import PostgresServer
from tests.support.raw import Address
from tests.support.service import DtxService

HEADS = (
    "per s",
    "p50 ms",
    "p99",
    "prepare p50",
    "p99",
    "commit p50",
    "p99",
    "dtx µs",
    "postgres µs",
    "broker µs",
    "load µs",
    "others",
    "commits",
    "WAL bytes",
)
"""Processor time of each process, writing transactions and WAL of PostgreSQL are for one branch."""
WARM_UP_SECONDS = 1.0
NOISE = 0.2
"""Limit of other load, in processors: on a busier machine the results say little about dtx."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The results with one number of connections.

    Args:
        tally: branches, or transactions of pgbench.
        rate: of these per second.
        usage: processor time.
        written: what PostgreSQL has written; ``None`` if that was not measured.
    """

    tally: Tally
    rate: float
    usage: Usage
    written: "Written | None" = None

    @property
    def work(self) -> float:
        """Processor seconds of all measured processes for one branch."""
        everybody = sum(busy for name, busy in self.usage.busy.items() if name != "others")
        return everybody / max(1, len(self.tally.branches))

    def cells(self) -> list[str]:
        """Return the cells for :data:`HEADS`."""
        busy, branches = self.usage.busy, max(1, len(self.tally.branches))
        latencies = (self.tally.branches, self.tally.prepares, self.tally.commits)
        written = self.written
        return [
            f"{self.rate:,.0f}",
            *(milliseconds(values, percent) for values in latencies for percent in (50, 99)),
            *(
                f"{busy[name] / branches * 1e6:.0f}" if name in busy else "-"
                for name in ("dtx", "postgres", "broker", "load")
            ),
            f"{self.usage.share('others') * 100:.0f} %",
            "-" if written is None else f"{written.transactions / branches:.2f}",
            "-" if written is None else f"{written.bytes / branches:,.0f}",
        ]


class Written(NamedTuple):
    """What a PostgreSQL has written.

    Args:
        transactions: number of transactions that wrote.
        bytes: of its write-ahead log.
    """

    transactions: int
    bytes: int

    @classmethod
    def by(cls, server: PostgresServer) -> Self:
        """What *server* has written so far."""
        with psycopg.connect(server.url) as connection:
            row = connection.execute(
                "SELECT pg_snapshot_xmax(pg_current_snapshot())::text, pg_current_wal_insert_lsn() - '0/0'"
            ).fetchone()
        assert row is not None
        return cls(*map(int, row))

    def since(self, before: Self) -> Self:
        """The difference."""
        return type(self)(self.transactions - before.transactions, self.bytes - before.bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """The running servers, and the options of the command line."""

    servers: Servers
    postgres: PostgresServer
    service: DtxService
    options: argparse.Namespace

    @property
    def messages(self) -> Address:
        """The address of the server that has the queues."""
        return Address.of(self.service.url()) if self.options.standalone else self.servers.broker


def measure(rig: Rig, play: Play, connections: int, first: int, name: str, address: Address | None = None) -> Row:
    """Run the load, and measure it.

    Args:
        rig: the servers; its options have seconds, processes, standalone and profile.
        play: makes a client.
        connections: number of clients.
        first: number of the first connection.
        name: of the row, for the file of its profile.
        address: for the clients; ``None``: dtx.

    Raises:
        LoadError: an answer was wrong.
    """
    options = rig.options
    with Load(address or Address.of(rig.service.url()), play, connections, options.processes, first=first) as load:
        load.wait_connected()
        roots = {
            "dtx": (rig.service.pid,),
            "postgres": (rig.postgres.embedded.pid or 0,),
            "load": load.pids,
        }
        if not options.standalone:
            roots["broker"] = (rig.servers.rabbitmq.pid,)
        begin = time.monotonic() + WARM_UP_SECONDS
        load.go(begin, begin + options.seconds)
        _sleep_until(begin)
        before, meter = Written.by(rig.postgres), Meter(roots)
        with _profiling(rig, name):
            _sleep_until(begin + options.seconds)
            usage = meter.read()
        written = Written.by(rig.postgres).since(before)
        tally = load.collect()
    return Row(tally=tally, rate=len(tally.branches) / options.seconds, usage=usage, written=written)


@contextlib.contextmanager
def _profiling(rig: Rig, name: str) -> Iterator[None]:
    """Profile dtx during the block if there is the option for it."""
    if rig.options.profile is None:
        yield
        return
    target = rig.options.profile / f"{name}.txt"
    with Profiler(rig.service.pid, max(1, rig.options.seconds - 1), target) as profiler:
        yield
    print(f"where dtx spent its time in {name} (stacks in {target}):")
    print(profiler.summary(), flush=True)


def count(connection: RawConnection, queue: bytes, tally: Tally) -> None:
    """Compare a queue with the committed branches, and remove it.

    Raises:
        LoadError: they differ.
    """
    found = sorted(drain(connection, queue))
    committed = sorted(tally.stamps())
    if found != committed:
        missing = len(set(committed) - set(found))
        raise LoadError(
            f"{len(committed)} branches were committed and the queue holds {len(found)} messages: "
            f"{missing} are missing, {len(found) - len(set(found))} are there twice"
        )
    connection.delete(queue)


def noise(rows: Iterable[Row]) -> Iterator[str]:
    """Yield a warning if the machine was busy with other work."""
    most = max(row.usage.share("others") for row in rows)
    if most > NOISE:
        yield f"this machine did something else meanwhile, up to {most:.1f} processors: measure again when it is quiet"


def verdict(reached: bool) -> str:
    return "reached" if reached else "MISSED"


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))
