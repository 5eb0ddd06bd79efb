"""A crowd, part of which behaves badly: a client that does everything right hardly notices, and memory has a bound.

Ten thousand connections that do nothing, two thousand that work, and a hundred each that never read, never settle,
send a byte a second, or open branches and vanish.
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
from tests.support.postgres import PostgresServer
from tests.support.processes import resident, wait_until
from tests.support.rabbitmq import RabbitNode
from tests.support.raw import RawClient, logged_in, message
from tests.support.service import DtxService
from tests.support.watched import slowness

Mode = Literal["alongside", "standalone"]

KIB: Final = 1 << 10
MIB: Final = 1 << 20
IDLE_COST: Final = 24 * KIB
"""Memory of dtx for a connection that has a channel and does nothing, at most; seen: 9 KiB, alongside a broker 12."""
ACTIVE_COST: Final = 48 * KIB
"""The same for one that works on branches; seen: 14 KiB, alongside a broker 28."""
BAD_COST: Final = 1 * MIB
"""The same for one that behaves badly: what waits for a client that does not read; seen: 35 KiB."""
ELBOW_ROOM: Final = 32 * MIB
"""Memory that dtx may take as well: caches that fill, and what the allocator keeps."""


@dataclass(frozen=True)
class Size:
    """How much of everything.

    Args:
        idle, active, bad: connections; *bad* of each kind.
        every: seconds between two branches of an active one.
        seconds: how long each state of affairs is looked at.
        p99: seconds, of a healthy client's branch from start to commit-ok; beside a broker, of what the branch takes
            longer than one of the broker's own transactions in the same crowd. More where the processor is slower.
        processes: in which the crowd is.
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
        """In all."""
        return self.idle + self.active + self.bad * len(BADLY) + 10

    def within(self, connections: int) -> "Size":
        """The same shape with so many connections at most."""
        if connections >= self.connections:
            return self
        part = connections / self.connections
        return replace(
            self, idle=int(self.idle * part), active=int(self.active * part), bad=int(self.bad * part), every=self.every
        )


CROWD: Final = Size(idle=10_000, active=2_000, bad=100, every=10.0, seconds=20.0, p99=0.1, processes=4)


@contextmanager
def open_files() -> Iterator[int]:
    """As many open files as this machine allows, for us and for what we start; how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def prepare(peer: RawClient) -> None:
    """The queues, and messages for those who take them and do nothing with them."""
    for queue in (*map(queue_of, range(NUMBERS)), PLENTY, QUEUE, BESIDE):
        peer.say(1, methods.QueueDeclare(queue, durable=True).encode())
        peer.wait(methods.QueueDeclareOk.KEY)
    for _ in range(2000):
        peer.send_raw(message(1, PLENTY, bytes(4 * KIB)))
    assert depth(peer, QUEUE) == 0


def depth(peer: RawClient, queue: bytes) -> int:
    """How many messages are ready."""
    peer.say(1, methods.QueueDeclare(queue, passive=True).encode())
    return methods.QueueDeclareOk.decode(peer.wait(methods.QueueDeclareOk.KEY).payload).message_count


class Watch:
    """Says what was seen, and judges it.

    Args:
        service: it runs.
        healthy: a client that does everything right.
        beside: another one, of the broker.
    """

    def __init__(self, service: DtxService, healthy: Healthy, beside: Healthy | None) -> None:
        self.service = service
        self.healthy = healthy
        self._beside = beside
        self.broker = 0.0
        """What the broker's own client has waited meanwhile (p99)."""
        self.base = self.memory = resident(service.pid)

    def waits(self, what: str, seconds: float = 0.0) -> Waits:
        """How long the client has waited since the last call, *seconds* from now."""
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
        """*count* connections have come: not more than *cost* bytes of memory for each."""
        memory = resident(self.service.pid)
        each = (memory - self.memory) / count
        print(f"{what}: {each / KIB:.1f} KiB for each of {count}, {memory / MIB:.0f} MiB in all")
        assert memory - self.memory <= count * cost + ELBOW_ROOM
        self.memory = memory

    def descriptors(self) -> int:
        """Open files of dtx."""
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
        idle.done()  # none of them was disturbed
        for crowd in (bad, active, idle):
            crowd.leave()
        wait_until(lambda: watch.descriptors() <= before + 10, seconds=120, what="all sockets closed")
        watch.waits("alone again", size.seconds)
        come("idle again", idle=size.idle).leave()
        watch.waits("and alone again")
        assert resident(service.pid) <= watch.memory + ELBOW_ROOM // 2, "memory is not used again"
        figures(**{f"{mode} connections": size.connections})
        watch.healthy.leave()
        with logged_in(service.url()) as peer:
            assert depth(peer, QUEUE) in (watch.healthy.committed, watch.healthy.committed + 1)
        log = service.log_path.read_text(errors="replace")
        assert "Traceback" not in log, log[log.index("Traceback") - 1000 :][:4000]
