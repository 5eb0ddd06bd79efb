"""A crowd, part of which behaves badly, hardly delays a well-behaved client, and the memory of dtx is bounded.

Ten thousand idle connections, two thousand that work, and a hundred each that never read, never settle, send one byte
per second, or open branches and reset the connection.
"""

import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import pytest

from dtx.wire.amqp09 import methods
from tests.evidence.overload.crowd import Crowd
from tests.evidence.overload.healthy import BESIDE, QUEUE, Healthy, Waits, percentile
from tests.evidence.overload.members import BADLY, NUMBERS, PLENTY, queue_of
from tests.support.loop_watch import slowness
from tests.support.postgres import PostgresServer
from tests.support.processes import resident, wait_until
from tests.support.rabbitmq import RabbitNode
from tests.support.raw import RawClient, logged_in, message
from tests.support.service import DtxService

Mode = Literal["alongside", "standalone"]

KIB: Final = 1 << 10
MIB: Final = 1 << 20
IDLE_COST: Final = 24 * KIB
"""Limit of dtx's memory for an idle connection with a channel; measured: 9 KiB, alongside a broker 12."""
ACTIVE_COST: Final = 48 * KIB
"""The same for a connection that works on branches; measured: 14 KiB, alongside a broker 28."""
BAD_COST: Final = 1 * MIB
"""The same for a badly behaved one: bytes queue up for a client that does not read; measured: 35 KiB."""
ELBOW_ROOM: Final = 32 * MIB
"""Memory that dtx may take in addition: caches that fill, and reserves of the allocator."""


@dataclass(frozen=True)
class Size:
    """The size of the test.

    Args:
        idle, active, bad: numbers of connections; *bad* of each kind.
        every: seconds between two branches of an active client.
        seconds: duration of each measurement.
        p99: limit in seconds for a well-behaved client's branch from start to commit-ok; alongside a broker, for the
            time in addition to a transaction of the broker in the same crowd. It grows on slower processors.
        processes: number of processes of the crowd.
    """

    idle: int
    active: int
    bad: int
    every: float
    seconds: float
    p99: float
    processes: int

    @property
    def connections(self) -> int:
        """Number of connections in all."""
        return self.idle + self.active + self.bad * len(BADLY) + 10

    def within(self, connections: int) -> "Size":
        """Return the same proportions with at most *connections*."""
        if connections >= self.connections:
            return self
        part = connections / self.connections
        return replace(
            self, idle=int(self.idle * part), active=int(self.active * part), bad=int(self.bad * part), every=self.every
        )


CROWD: Final = Size(idle=10_000, active=2_000, bad=100, every=10.0, seconds=20.0, p99=0.1, processes=4)


@contextmanager
def open_files() -> Iterator[int]:
    """Raise the limit of open files to its maximum, also for child processes; yield it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def prepare(peer: RawClient) -> None:
    """Declare the queues, and publish messages for clients that do not settle them."""
    for queue in (*map(queue_of, range(NUMBERS)), PLENTY, QUEUE, BESIDE):
        peer.say(1, methods.QueueDeclare(queue, durable=True).encode())
        peer.wait(methods.QueueDeclareOk.KEY)
    for _ in range(2000):
        peer.send_raw(message(1, PLENTY, bytes(4 * KIB)))
    assert depth(peer, QUEUE) == 0


def depth(peer: RawClient, queue: bytes) -> int:
    """Return the number of ready messages."""
    peer.say(1, methods.QueueDeclare(queue, passive=True).encode())
    return methods.QueueDeclareOk.decode(peer.wait(methods.QueueDeclareOk.KEY).payload).message_count


class Watch:
    """Prints measurements, and compares them with limits.

    Args:
        service: dtx.
        healthy: a well-behaved client.
        beside: another one, of the broker.
    """

    def __init__(self, service: DtxService, healthy: Healthy, beside: Healthy | None) -> None:
        self.service = service
        self.healthy = healthy
        self._beside = beside
        self.broker = 0.0
        """The p99 of the broker's client in the last measurement."""
        self.base = self.memory = resident(service.pid)

    def waits(self, what: str, seconds: float = 0.0) -> Waits:
        """Return the client's waiting times since the last call; with *seconds*, of the next *seconds*."""
        if self._beside is not None:
            self._beside.waits()
        waits = self.healthy.waits(seconds)
        if self._beside is not None:
            self.broker = percentile(self._beside.waits().branches, 99)
        names = (f"{name} {percentile(each, 99) * 1000:.0f}" for name, each in waits.requests.items())
        figures = ", ".join(f"p{p} {percentile(waits.branches, p) * 1000:.1f}" for p in (50, 99, 100))
        print(
            f"{what}: {len(waits.branches)} branches, ms: {figures}; p99 of {', '.join(names)}, "
            f"broker {self.broker * 1000:.0f}"
        )
        return waits

    def grown(self, what: str, count: int, cost: int) -> None:
        """Check that *count* new connections take at most *cost* bytes of memory each."""
        memory = resident(self.service.pid)
        each = (memory - self.memory) / count
        print(f"{what}: {each / KIB:.1f} KiB for each of {count}, {memory / MIB:.0f} MiB in all")
        assert memory - self.memory <= count * cost + ELBOW_ROOM
        self.memory = memory

    def descriptors(self) -> int:
        """Return the number of open files of dtx."""
        return len(list(Path(f"/proc/{self.service.pid}/fd").iterdir()))


@pytest.mark.parametrize("mode", ["alongside", "standalone"])
def test_a_healthy_client_hardly_notices_a_crowd(
    mode: Mode,
    own_postgres: PostgresServer,
    request: pytest.FixtureRequest,
    left_out: Callable[[str], None],
    figures: Callable[..., None],
) -> None:
    with ExitStack() as stack:
        allowed = stack.enter_context(open_files())
        size = CROWD.within((allowed - 500) // (2 if mode == "alongside" else 1))
        if size is not CROWD:
            left_out(f"{mode}: {size.connections} of {CROWD.connections} connections: only {allowed} files may be open")
        options: tuple[str, ...] = ("--handshake-timeout", "10")
        for limit in ("--max-connections", "--max-handshakes"):  # all come from one address
            options += (limit, str(size.connections))
        broker = None
        if mode == "alongside":
            node: RabbitNode = request.getfixturevalue("own_rabbitmq")
            broker = node.url()
            options += ("--management", node.management_url)
        database = own_postgres.create_database()
        service = stack.enter_context(DtxService(broker=broker, database=database, options=options))
        with logged_in(service.url()) as peer:
            prepare(peer)
        beside = None if broker is None else stack.enter_context(Healthy(broker, beside=True))
        watch = Watch(service, stack.enter_context(Healthy(service.url())), beside)
        watch.waits("alone", 2.0)
        before = watch.descriptors()

        def come(name: str, **counts: int) -> Crowd:
            crowd = Crowd(service.url(), counts, every=size.every, processes=size.processes)
            stack.enter_context(crowd)
            watch.waits(f"{name} come")
            return crowd

        def stay(name: str, cost: int, count: int) -> None:
            watch.waits(f"{name} settle", size.seconds / 4)  # logins, and the first messages of clients that consume
            waits = watch.waits(name, size.seconds)
            watch.grown(name, count, cost)
            p99 = percentile(waits.branches, 99)
            figures(**{f"{mode} p99 beside {name} ms": round(p99 * 1000, 1)})
            if beside is not None:
                figures(**{f"{mode} p99 beside {name} ms, broker alone": round(watch.broker * 1000, 1)})
            assert p99 - watch.broker < size.p99 * slowness()

        idle = come("idle", idle=size.idle)
        stay("idle", IDLE_COST, size.idle)
        assert watch.descriptors() >= size.idle
        active = come("active", active=size.active)
        stay("active", ACTIVE_COST, size.active)
        bad = come("bad", **dict.fromkeys(BADLY, size.bad))
        worked = active.done()["active"]
        stay("bad", BAD_COST, size.bad * len(BADLY))
        worked = active.done()["active"] - worked
        print(f"{worked / size.seconds:.0f} branches a second of {size.active} active ones; {dict(bad.done())}")
        assert worked >= size.active / size.every * size.seconds / 4
        idle.done()  # fails if a member had an error
        for crowd in (bad, active, idle):
            crowd.leave()
        wait_until(lambda: watch.descriptors() <= before + 10, seconds=120, what="the end of all connections")
        watch.waits("alone again", size.seconds)
        come("idle again", idle=size.idle).leave()
        watch.waits("and alone again")
        assert resident(service.pid) <= watch.memory + ELBOW_ROOM // 2, "memory is not reused"
        figures(**{f"{mode} connections": size.connections})
        watch.healthy.leave()
        with logged_in(service.url()) as peer:
            assert depth(peer, QUEUE) in (watch.healthy.committed, watch.healthy.committed + 1)
        log = service.log_path.read_text(errors="replace")
        assert "Traceback" not in log, log[log.index("Traceback") - 1000 :][:4000]
