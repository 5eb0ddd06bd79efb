"""The soak with three members behind a TCP balancer: the same clients, banks and counts, but the faults of members."""

import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import psycopg

from tests.evidence.cluster.world import longest_gap
from tests.evidence.soak.nemesis import FIRST, Nemesis, Pause, Trouble, kill_client
from tests.evidence.soak.soak import Soak
from tests.evidence.soak.world import World
from tests.support.processes import wait_until
from tests.support.service import DtxService

LEASE: Final = 4
"""Seconds."""
ROLLING: Final = "rolling restart"
FENCED: Final = "dtx paused for longer than its lease"
_CLIENTS: Final = 2
"""Processes with clients: three dtx, RabbitMQ and three databases share the machine with them."""
_MEMBERS: Final = 3
_SHORT: Final = (0.1, 1.5)
_LONG: Final = (LEASE + 2.0, LEASE + 3.0)
_AWAY: Final = (0.0, 6.0)
"""Ranges of seconds of a short and a long pause, and until the restart after a kill."""
_FENCING: Final = 15.0
"""Seconds in which a member without a lease ends: it closes the connections of its clients first."""


class MembersWorld(World):
    """Three members alongside a single RabbitMQ node with its management API.

    Args:
        seed: of the clients' random choices.
        logs: a directory for copies of all logs.
    """

    def __init__(self, seed: int, logs: Path | None = None) -> None:
        super().__init__("alongside", seed, _CLIENTS, _MEMBERS)
        self._logs = logs

    def __exit__(self, *error: object) -> None:
        if self._logs is not None:
            self._logs.mkdir(parents=True, exist_ok=True)
            for number, service in enumerate(self.services):
                shutil.copy(service.log_path, self._logs / f"member{number}.log")
            for file in (*self.directory.glob("ledger*"), *self.directory.glob("client*.log")):
                shutil.copy(file, self._logs)
        super().__exit__(*error)

    def _make_service(self) -> DtxService:
        assert self.node is not None
        options = ["--advertise", "amqp://127.0.0.1", "--lease-ttl", str(LEASE), "--default-timeout", "8"]
        options += ["--management", self.node.management_url]
        database = self._through("log", self.database)
        return DtxService(broker=self._broker, database=database, options=tuple(options))


def _up(world: World, service: DtxService) -> None:
    """Start a member that is held, if it has ended, and return when it is ready."""

    def is_ready() -> bool:
        world.restart(service)
        return service.running and bool(service.ready_line)

    wait_until(is_ready, seconds=60, what="a member that is ready")


def _has_lease(world: World, service: DtxService) -> bool:
    """Whether no other member has taken the branches of this one."""
    with psycopg.connect(world.database) as database:
        query = "SELECT FROM dtx.member WHERE address = %s"
        return database.execute(query, [f"amqp://127.0.0.1:{service.port}"]).rowcount > 0


def _kill(world: World, pause: Pause) -> None:
    with world.hold(pause.chance.choice(world.services)) as service:
        service.kill9()
        pause(_AWAY)
        _up(world, service)


def _stop(world: World, pause: Pause) -> None:
    with world.hold(pause.chance.choice(world.services)) as service:
        world.stop(service)
        _up(world, service)


def _suspend(seconds: tuple[float, float]) -> Callable[[World, Pause], None]:
    def act(world: World, pause: Pause) -> None:
        with world.hold(pause.chance.choice(world.services)) as service:
            service.signal(signal.SIGSTOP)
            pause(seconds)
            service.signal(signal.SIGCONT)
            if not _has_lease(world, service):
                try:
                    service.wait(_FENCING)
                except subprocess.TimeoutExpired:
                    world.ledger.fault(f"the member at port {service.port} goes on without a lease")
            _up(world, service)

    return act


def _restart_all(world: World, _pause: Pause) -> None:
    for service in world.services:
        with world.hold(service):
            world.stop(service)
            _up(world, service)


class MembersNemesis(Nemesis):
    """Causes faults of members, of at most two of the three at a time.

    Args:
        world: the target.
        chance: source of random choices.
        harm: only events with one of these in their name; empty: all.
    """

    def __init__(self, world: World, chance: random.Random, harm: Sequence[str]) -> None:
        super().__init__(world, chance, harm)
        self._soaked = world
        self.longest_gap = 0.0
        """The longest time without a commit, in seconds."""

    def rage(self, seconds: float, *, broker_dies: bool, until: Callable[[], bool]) -> None:
        """See :meth:`Nemesis.rage`."""
        super().rage(seconds, broker_dies=broker_dies, until=until)
        times = self._soaked.ledger.decision_times()
        self.longest_gap = max(self.longest_gap, longest_gap(times, min(times), max(times)))

    def _possible(self, *, broker_dies: bool) -> Iterator[Trouble]:
        for victim in ("one member", "another member"):
            yield Trouble(name=FIRST[0], victim=victim, cards=3, act=_kill)
            yield Trouble(name="dtx stopped in order", victim=victim, cards=2, act=_stop)
            yield Trouble(name="dtx paused", victim=victim, cards=2, act=_suspend(_SHORT))
            yield Trouble(name=FENCED, victim=victim, cards=3, act=_suspend(_LONG))
        yield Trouble(name=ROLLING, victim="one member", cards=2, act=_restart_all)
        yield Trouble(name="clients killed", victim="clients", cards=2, act=kill_client)


class MembersSoak(Soak):
    """A soak with three members.

    Args:
        seed: of all random choices in this process.
        say: prints a line of progress.
        harm: only faults with one of these in their name; empty: all.
        logs: a directory for copies of all logs.
    """

    nemesis: MembersNemesis

    def __init__(
        self, seed: int, say: Callable[[str], None], harm: Sequence[str] = (), *, logs: Path | None = None
    ) -> None:
        super().__init__("alongside", seed, say, harm=harm)
        self._logs = logs

    def _make_world(self, seed: int) -> World:
        return MembersWorld(seed, self._logs)

    def _make_nemesis(self, world: World, chance: random.Random) -> Nemesis:
        self.nemesis = MembersNemesis(world, chance, self._harm)
        return self.nemesis
