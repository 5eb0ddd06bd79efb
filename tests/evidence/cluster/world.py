"""The soak alongside a cluster: the same clients, banks and counts, but the faults are those of three nodes."""

import itertools
import random
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dtx.client import XAER_NOTA, XAER_PROTO, XAER_RMFAIL, Coordinator, XAResource
from tests.evidence.soak.money import QUEUES
from tests.evidence.soak.nemesis import Nemesis
from tests.evidence.soak.sides import BROKEN
from tests.evidence.soak.soak import Soak
from tests.evidence.soak.world import World
from tests.support.client import connected, new_xid
from tests.support.crash import PERSISTENT
from tests.support.processes import wait_until
from tests.support.rabbitmq_cluster import NET_TICK, Cluster

QUORUM: Final = QUEUES[::2]
"""Half of the queues; the others are classic, and distributed over the nodes."""
_QUORUM: Final = {"x-queue-type": "quorum", "x-delivery-limit": 1_000_000}
"""Each count of the soak returns every message; by default RabbitMQ 4 drops a message after 20 returns."""
CONTROLS: Final = tuple(f"control{number}" for number in range(4))
"""Quorum queues of clients without dtx."""
_CONTROL_MESSAGES: Final = 20
PROBES: Final = "probe0", "probe1"
"""Quorum queues of the clients that measure times without a commit."""
_CLIENTS: Final = 2
"""Processes with clients: three nodes and three databases share the machine with them."""
PARTIAL: Final = "two nodes cut off from each other"
"""RabbitMQ then pauses nodes until no majority may be left (its guide: partial partitions)."""
_AFTER: Final = 8.0
"""Seconds after the death of a node until it starts again."""
_SILENCE: Final = NET_TICK * 5.0
"""Seconds of a stop or a partition: the other nodes notice, and dtx as well."""


class ClusterWorld(World):
    """dtx alongside a cluster, with all nodes in ``--broker``.

    Args:
        seed: of the clients' random choices.
        version: the major version of RabbitMQ.
        logs: a directory for copies of all logs.
    """

    cluster: Cluster

    def __init__(self, seed: int, version: str, logs: Path | None = None) -> None:
        super().__init__("alongside", seed, _CLIENTS)
        self._version = version
        self._logs = logs

    def __exit__(self, *_: object) -> None:
        if self._logs is not None:
            self._logs.mkdir(parents=True, exist_ok=True)
            for log in (self.service.log_path, *(node.log_path for node in self.cluster.nodes)):
                shutil.copy(log, self._logs / f"{log.parent.name}.log")
            for file in self.directory.glob("ledger*"):
                shutil.copy(file, self._logs)
        super().__exit__()

    def _start_broker(self) -> None:
        self.node = self.cluster = self._stack.enter_context(Cluster(self._version))
        self._broker = f"amqp://guest:guest@{self.cluster.hosts}/"

    def declare(self) -> None:
        """Declare the queues at the nodes: a classic queue is where it is declared."""
        for number, queue in enumerate((*QUEUES, *PROBES, *CONTROLS)):
            kind = _QUORUM if queue in (*QUORUM, *PROBES, *CONTROLS) else {"x-queue-type": "classic"}
            with self.cluster.nodes[number // 2 % len(self.cluster.nodes)].channel() as channel:
                channel.queue_declare(queue, durable=True, arguments=kind)


class Probe(threading.Thread):
    """A client that commits branches on a quorum queue as often as it can, and keeps the times of the answers.

    Args:
        url: of dtx.
        queue: its queue.
    """

    def __init__(self, url: str, queue: str) -> None:
        super().__init__(name=queue, daemon=True)
        self._url = url + "?heartbeat=6&socket_timeout=5&stack_timeout=8"
        self._queue = queue
        self.commits: list[float] = []
        """Monotonic times."""
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.wait(0.1):
            try:
                with connected(self._url) as connection:
                    xa = XAResource(connection.channel(), timeout=5.0)
                    while not self.stop.wait(0.02):
                        self._commit(xa)
            except BROKEN:
                continue

    def recovered(self) -> bool:
        """End what is in doubt, after the end of the thread; return whether nothing is any more."""
        with suppress(*BROKEN), connected(self._url) as connection, Coordinator(connection, timeout=5.0) as coordinator:
            for xid in coordinator.recover():
                if xid.bqual == self._queue.encode():
                    with suppress(XAER_NOTA, XAER_RMFAIL):
                        try:
                            coordinator.rollback(xid)
                        except XAER_PROTO:  # it was to commit, and may be stuck: only a further commit ends it then
                            coordinator.commit(xid)
            return all(xid.bqual != self._queue.encode() for xid in coordinator.recover())
        return False

    def _commit(self, xa: XAResource) -> None:
        xid = new_xid(self._queue.encode())
        xa.start(xid)
        method, _, _ = xa.channel.basic_get(self._queue)
        if method is not None:
            xa.channel.basic_ack(method.delivery_tag)
        xa.channel.basic_publish("", self._queue, b"probe", PERSISTENT)
        xa.end(xid)
        xa.prepare(xid)
        xa.commit(xid)
        self.commits.append(time.monotonic())


class Control(threading.Thread):
    """A client without dtx, which publishes with confirms and consumes: shows what RabbitMQ itself loses.

    Args:
        cluster: it connects to each node in turn.
        queue: its queue.
    """

    def __init__(self, cluster: Cluster, queue: str) -> None:
        super().__init__(name=queue, daemon=True)
        self._cluster = cluster
        self._queue = queue
        self._there: set[bytes] = set()
        """Confirmed, and not taken."""
        self._numbers = itertools.count()
        self._nodes = itertools.cycle(cluster.nodes)
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.wait(0.1):
            url = next(self._nodes).url() + "?heartbeat=6&socket_timeout=3&stack_timeout=5"
            with suppress(*BROKEN), connected(url) as connection:
                channel = connection.channel()
                channel.confirm_delivery()
                while not self.stop.wait(0.02):
                    body = b"%s %d" % (self._queue.encode(), next(self._numbers))
                    channel.basic_publish("", self._queue, body, PERSISTENT)
                    self._there.add(body)
                    if len(self._there) > _CONTROL_MESSAGES:
                        method, _, taken = channel.basic_get(self._queue)
                        if method is not None:
                            self._there.discard(taken)  # its acknowledgement may be lost, the message is not
                            channel.basic_ack(method.delivery_tag)

    def lost(self) -> set[bytes]:
        """The confirmed messages that are not there, after the end of the thread."""
        found = {body for body, *_ in self._cluster.nodes[0].take_all(self._queue)}
        lost, self._there = self._there - found, set()
        return lost


def longest_gap(commits: list[float], begin: float, end: float) -> float:
    """Return the longest time without a commit between two times, in seconds."""
    times = [begin, *sorted(at for at in commits if begin < at < end), end]
    return max(after - before for before, after in itertools.pairwise(times))


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """One kind of fault of nodes.

    Args:
        name: for the table.
        target: chooses the node.
        act: causes it, and returns when it has ended.
    """

    name: str
    target: Callable[[Cluster, random.Random], int]
    act: Callable[[Cluster, int, threading.Event], None]


def _leader(cluster: Cluster, chance: random.Random) -> int:
    return cluster.node_of_queue(chance.choice((*QUORUM, *PROBES)))


def _of_dtx(cluster: Cluster, chance: random.Random) -> int:
    """The node with the connection, locks and receipts of dtx."""
    found = cluster.node_of_connection("dtx ")
    return _any(cluster, chance) if found is None else found


def _any(cluster: Cluster, chance: random.Random) -> int:
    return chance.randrange(len(cluster.nodes))


def _kill(cluster: Cluster, number: int, over: threading.Event) -> None:
    cluster.nodes[number].kill9()
    over.wait(_AFTER)
    cluster.nodes[number].start()


def _stop(cluster: Cluster, number: int, over: threading.Event) -> None:
    cluster.nodes[number].pause()
    over.wait(_SILENCE)
    cluster.nodes[number].resume()


def _switch_off(cluster: Cluster, number: int, over: threading.Event) -> None:
    cluster.network.switch_off(number)
    over.wait(_SILENCE)


def _cut_from_nodes(cluster: Cluster, number: int, over: threading.Event) -> None:
    for other in range(len(cluster.nodes)):
        if other != number:
            cluster.network.cut(number, other)
    over.wait(_SILENCE)


def _cut_from_one(cluster: Cluster, number: int, over: threading.Event) -> None:
    cluster.network.cut(number, (number + 1) % len(cluster.nodes))
    over.wait(_SILENCE)


def _restart_all(cluster: Cluster, _number: int, _over: threading.Event) -> None:
    for node in cluster.nodes:
        node.stop()
        node.start()
        cluster.mend()


def blows() -> Iterator[Blow]:
    """Yield all faults."""
    for act, deed in ((_kill, "killed"), (_stop, "stopped"), (_switch_off, "cut off")):
        yield Blow(name=f"leader {deed}", target=_leader, act=act)
        yield Blow(name=f"node of dtx's connection {deed}", target=_of_dtx, act=act)
        yield Blow(name=f"any node {deed}", target=_any, act=act)
    yield Blow(name="node of dtx's connection cut off from the other nodes", target=_of_dtx, act=_cut_from_nodes)
    yield Blow(name="leader cut off from the other nodes", target=_leader, act=_cut_from_nodes)
    yield Blow(name=PARTIAL, target=_leader, act=_cut_from_one)
    yield Blow(name="rolling restart", target=_any, act=_restart_all)


class ClusterNemesis(Nemesis):
    """Causes faults of nodes, one at a time: a majority of the nodes always works.

    Args:
        world: the target.
        chance: source of random choices.
        harm: only faults with one of these in their name; empty: all.
        say: prints a line of progress.
    """

    def __init__(
        self, world: ClusterWorld, chance: random.Random, harm: Sequence[str], say: Callable[[str], None]
    ) -> None:
        super().__init__(world, chance, harm)
        self._cluster = world.cluster
        self._url = world.service.url()
        self._say = say
        self._deck: list[Blow] = []
        self.lost_without_dtx = 0
        """The number of confirmed messages that RabbitMQ lost although dtx had no part in them."""
        self.gaps: defaultdict[str, float] = defaultdict(float)
        """The longest time without a commit during each kind of fault, in seconds."""

    def rage(self, seconds: float, *, broker_dies: bool, until: Callable[[], bool]) -> None:
        """Cause faults until *seconds* have passed or *until* holds, and return after the end of the last one."""
        probes = [Probe(self._url, queue) for queue in PROBES]
        controls = [Control(self._cluster, queue) for queue in CONTROLS]
        clients: list[Probe | Control] = [*probes, *controls]
        for client in clients:
            client.start()
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end and not until():
                wait_until(lambda: commits_since(probes, 1.0) > 5, seconds=60, what="commits of all probes")
                self._strike_one(probes)
        finally:
            for client in clients:
                client.stop.set()
            for control in controls:
                control.join(30)
                if lost := control.lost():
                    self.lost_without_dtx += len(lost)
                    self._say(f"RabbitMQ has lost {len(lost)} confirmed messages of {control.name}")
            for probe in probes:
                probe.join(30)
                wait_until(probe.recovered, seconds=60, what="the end of all branches of probes")

    def _strike_one(self, probes: Sequence[Probe]) -> None:
        if not self._deck:
            self._deck = [blow for blow in blows() if any(name in blow.name for name in self._harm)]
            self._chance.shuffle(self._deck)
        blow = self._deck.pop()
        number = blow.target(self._cluster, self._chance)
        began = time.monotonic()
        blow.act(self._cluster, number, self._over)
        healed = time.monotonic()
        self._cluster.mend()
        self._over.wait(1.0)
        gap = longest_gap([at for probe in probes for at in probe.commits], began, time.monotonic())
        self.done[blow.name] += 1
        self.gaps[blow.name] = max(gap, self.gaps[blow.name])
        self._say(f"{blow.name}: node {number}, {healed - began:.1f} s, {gap:.1f} s without a commit")


def commits_since(probes: Sequence[Probe], seconds: float) -> int:
    """Return the number of commits in the last *seconds*."""
    since = time.monotonic() - seconds
    return sum(at > since for probe in probes for at in probe.commits[-100:])


class ClusterSoak(Soak):
    """A soak alongside a cluster.

    Args:
        version: the major version of RabbitMQ.
        seed: of all random choices in this process.
        say: prints a line of progress.
        harm: only faults with one of these in their name; empty: all.
        logs: a directory for copies of all logs.
    """

    nemesis: ClusterNemesis

    def __init__(
        self,
        version: str,
        seed: int,
        say: Callable[[str], None],
        harm: Sequence[str] = (),
        *,
        logs: Path | None = None,
    ) -> None:
        super().__init__("alongside", seed, say, harm=harm)
        self._version = version
        self._logs = logs

    def _make_world(self, seed: int) -> World:
        return ClusterWorld(seed, self._version, self._logs)

    def _make_nemesis(self, world: World, chance: random.Random) -> Nemesis:
        assert isinstance(world, ClusterWorld)
        self.nemesis = ClusterNemesis(world, chance, self._harm, self._say)
        return self.nemesis

    def _declare(self, world: World) -> None:
        assert isinstance(world, ClusterWorld)
        world.declare()
