"""What was measured with a number of connections, and how: processor time, profile, counting the queue."""

import argparse
import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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
    "dtx CPU",
    "postgres",
    "broker",
    "load",
    "others",
    "dtx µs",
    "all µs",
)
WARM_UP_SECONDS = 1.0
NOISE = 0.2
"""Of one processor: a machine that does more than this besides tells little about dtx."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was measured with one number of connections.

    Args:
        tally: branches, or pgbench's transactions.
        rate: a second.
        usage: processor time.
    """

    tally: Tally
    rate: float
    usage: Usage

    @property
    def work(self) -> float:
        """Processor time that everybody concerned used for one branch, seconds."""
        everybody = sum(busy for name, busy in self.usage.busy.items() if name != "others")
        return everybody / max(1, len(self.tally.branches))

    def cells(self) -> list[str]:
        """As the table has it."""
        busy = self.usage.busy
        latencies = (self.tally.branches, self.tally.prepares, self.tally.commits)
        names = ("dtx", "postgres", "broker", "load", "others")
        return [
            f"{self.rate:,.0f}",
            *(milliseconds(values, percent) for values in latencies for percent in (50, 99)),
            *(f"{self.usage.share(name) * 100:.0f} %" if name in busy else "-" for name in names),
            f"{busy['dtx'] / max(1, len(self.tally.branches)) * 1e6:.0f}" if "dtx" in busy else "-",
            f"{self.work * 1e6:.0f}",
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """What runs, and what it is asked to do."""

    servers: Servers
    postgres: PostgresServer
    service: DtxService
    options: argparse.Namespace

    @property
    def messages(self) -> Address:
        """Where the queues are."""
        return Address.of(self.service.url()) if self.options.standalone else self.servers.broker


def measure(rig: Rig, play: Play, connections: int, first: int, name: str, address: Address | None = None) -> Row:
    """Run the load on so many connections.

    Args:
        rig: the servers; its options have seconds, processes, standalone and profile.
        play: makes a client.
        connections: how many clients.
        first: number of the first connection.
        name: of the row, for the file of its profile.
        address: where they connect; ``None``: dtx.

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
        meter = Meter(roots)
        with _profiling(rig, name):
            _sleep_until(begin + options.seconds)
            usage = meter.read()
        tally = load.collect()
    return Row(tally=tally, rate=len(tally.branches) / options.seconds, usage=usage)


@contextlib.contextmanager
def _profiling(rig: Rig, name: str) -> Iterator[None]:
    """Profile dtx meanwhile, where that is asked for."""
    if rig.options.profile is None:
        yield
        return
    target = rig.options.profile / f"{name}.txt"
    with Profiler(rig.service.pid, max(1, rig.options.seconds - 1), target) as profiler:
        yield
    print(f"where dtx spent its time in {name} (stacks in {target}):")
    print(profiler.summary(), flush=True)


def count(connection: RawConnection, queue: bytes, tally: Tally) -> None:
    """Compare a queue with what was committed, and remove it.

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
    """A warning where the machine was not quiet."""
    most = max(row.usage.share("others") for row in rows)
    if most > NOISE:
        yield f"this machine did something else meanwhile, up to {most:.1f} processors: measure again when it is quiet"


def verdict(reached: bool) -> str:
    """Of an aim."""
    return "reached" if reached else "MISSED"


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))
