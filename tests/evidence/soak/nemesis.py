"""Faults while money moves: kills, stops, partitions, a full disk, wrong clocks, alarms.

Faults with a duration (a stop, a partition, a full disk) run in the background, so several faults overlap. Each target
has only one fault at a time.
"""

import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from tests.evidence.soak.money import BANKS
from tests.evidence.soak.world import World
from tests.support.proxy import Direction
from tests.support.rabbitmq import RabbitNode

SECONDS: Final = (0.2, 3.5)
"""Range of durations in seconds: shorter and longer than the lease (2 s), shorter than heartbeats and patience."""
FIRST: Final = ("dtx killed", "RabbitMQ killed")
"""Events at the start of every round; if the broker may die, its death comes first."""
SKEWS: Final = (-86400.0 * 3, -3600.0, -7.0, -1.0, 1.0, 7.0, 3600.0, 86400.0 * 9)
"""Clock errors in seconds; nine days are beyond the partitions of the journal that were made in advance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """One kind of event.

    Args:
        name: for the table.
        victim: its target.
        cards: its frequency.
        act: causes it, and returns when it has ended.
    """

    name: str
    victim: str
    cards: int
    act: Callable[[World, "Pause"], None]


class Pause:
    """Waits for the random duration of an event; the end of the round ends it early."""

    def __init__(self, chance: random.Random, over: threading.Event) -> None:
        self.chance = chance
        self._over = over

    def __call__(self, seconds: tuple[float, float] = SECONDS) -> None:
        self._over.wait(self.chance.uniform(*seconds))


# -- processes


def _kill_dtx(world: World, _pause: Pause) -> None:
    world.kill_dtx()


def _stop_dtx(world: World, _pause: Pause) -> None:
    world.stop_dtx()


def _pause_dtx(world: World, pause: Pause) -> None:
    world.service.pause()
    pause()
    world.service.resume()


def kill_client(world: World, pause: Pause) -> None:
    pause.chance.choice(world.clients).kill9()


def _pause_client(world: World, pause: Pause) -> None:
    client = pause.chance.choice(world.clients)
    client.signal(signal.SIGSTOP)
    pause()
    client.signal(signal.SIGCONT)


# -- databases


def _kill_server(name: str) -> Callable[[World, Pause], None]:
    def act(world: World, _pause: Pause) -> None:
        world.servers[name].kill9()
        world.servers[name].wait_ready(seconds=180)

    return act


def _restart_server(name: str) -> Callable[[World, Pause], None]:
    def act(world: World, _pause: Pause) -> None:
        world.servers[name].restart()
        world.servers[name].wait_ready(seconds=180)

    return act


def _pause_server(name: str) -> Callable[[World, Pause], None]:
    def act(world: World, pause: Pause) -> None:
        world.servers[name].pause()
        pause()
        world.servers[name].resume()

    return act


def _fill_disk(world: World, pause: Pause) -> None:
    world.disk.fill()
    pause()
    world.disk.free()
    world.servers["log"].wait_ready(seconds=180)


# -- network and time


def _partition(link: str) -> Callable[[World, Pause], None]:
    def act(world: World, pause: Pause) -> None:
        proxy = world.links[link]
        both: tuple[Direction, ...] = ("up", "down")
        match pause.chance.randrange(6):
            case 0 | 1:
                proxy.cut()
                return
            case 2:
                proxy.cut(refuse=True)
            case 3:
                proxy.stall(*both)
            case 4:
                proxy.stall(pause.chance.choice(both))
            case _:
                proxy.delay(0.05)
        pause()
        if pause.chance.random() < 0.5:
            proxy.cut()
        proxy.resume()

    return act


def _skew(clock: str) -> Callable[[World, Pause], None]:
    def act(world: World, pause: Pause) -> None:
        world.clocks[clock].skew(pause.chance.choice(SKEWS))
        pause()
        world.clocks[clock].skew(0)

    return act


# -- the broker


def _alarm(world: World, pause: Pause) -> None:
    assert isinstance(world.node, RabbitNode)
    world.node.memory_alarm(on=True)
    pause()
    world.node.memory_alarm(on=False)


def _disk_alarm(world: World, pause: Pause) -> None:
    assert isinstance(world.node, RabbitNode)
    world.node.disk_alarm(on=True)
    pause()
    world.node.disk_alarm(on=False)


def _kill_broker(world: World, _pause: Pause) -> None:
    assert isinstance(world.node, RabbitNode)
    world.node.restart()


def _restart_broker(world: World, _pause: Pause) -> None:
    assert isinstance(world.node, RabbitNode)
    world.node.stop()
    world.node.start()


def _pause_broker(world: World, pause: Pause) -> None:
    assert isinstance(world.node, RabbitNode)
    world.node.pause()
    pause()
    world.node.resume()


def _events(world: World, *, broker_dies: bool) -> Iterator[Trouble]:
    """Yield the events that are possible here."""
    yield Trouble(name="dtx killed", victim="dtx", cards=8, act=_kill_dtx)
    yield Trouble(name="dtx stopped in order", victim="dtx", cards=2, act=_stop_dtx)
    yield Trouble(name="dtx paused", victim="dtx", cards=3, act=_pause_dtx)
    yield Trouble(name="clients killed", victim="clients", cards=4, act=kill_client)
    yield Trouble(name="clients paused", victim="clients", cards=2, act=_pause_client)
    yield Trouble(name="dtx's PostgreSQL killed", victim="log", cards=4, act=_kill_server("log"))
    yield Trouble(name="dtx's PostgreSQL restarted", victim="log", cards=2, act=_restart_server("log"))
    yield Trouble(name="dtx's PostgreSQL paused", victim="log", cards=3, act=_pause_server("log"))
    if world.disk.real:
        yield Trouble(name="dtx's PostgreSQL: disk full", victim="log", cards=3, act=_fill_disk)
    for name in BANKS:
        yield Trouble(name="a bank killed", victim=name, cards=1, act=_kill_server(name))
        yield Trouble(name="a bank paused", victim=name, cards=1, act=_pause_server(name))
    for name in world.links:
        between = {"clients": "clients and dtx", "log": "dtx and its PostgreSQL", "broker": "dtx and RabbitMQ"}
        what = f"partition of {between.get(name, 'clients and a bank')}"
        yield Trouble(name=what, victim=f"link {name}", cards=1 if name in BANKS else 3, act=_partition(name))
    for name, clock in world.clocks.items():
        if clock.library is not None:
            owner = "dtx" if name == "dtx" else "dtx's PostgreSQL"
            yield Trouble(name=f"{owner}: clock wrong", victim=f"clock {name}", cards=2, act=_skew(name))
    if world.node is not None:
        yield Trouble(name="RabbitMQ: memory alarm", victim="RabbitMQ", cards=2, act=_alarm)
        yield Trouble(name="RabbitMQ: disk full", victim="RabbitMQ", cards=2, act=_disk_alarm)
        if broker_dies:
            yield Trouble(name="RabbitMQ killed", victim="RabbitMQ", cards=3, act=_kill_broker)
            yield Trouble(name="RabbitMQ restarted", victim="RabbitMQ", cards=1, act=_restart_broker)
            yield Trouble(name="RabbitMQ paused", victim="RabbitMQ", cards=2, act=_pause_broker)


class Nemesis:
    """Causes faults in *world*.

    Args:
        world: the target.
        chance: source of random choices.
        harm: only events with one of these in their name; empty: all.
    """

    def __init__(self, world: World, chance: random.Random, harm: Sequence[str] = ()) -> None:
        self._world = world
        self._harm = harm or [""]
        self._chance = chance
        self._over = threading.Event()
        self.done: Counter[str] = Counter()
        """Number of events by name."""
        self.in_doubt = 0
        """Sum of the branches in the log each time dtx was killed."""

    def rage(self, seconds: float, *, broker_dies: bool, until: Callable[[], bool]) -> None:
        """Cause events until *seconds* have passed or *until* holds, and return after the end of all of them."""
        possible = self._possible(broker_dies=broker_dies)
        events = [event for event in possible if any(name in event.name for name in self._harm)]
        if not events:
            raise ValueError(f"no harm has {' or '.join(self._harm)} in its name")
        deck = [event for event in events if event.name in FIRST]
        running: dict[str, Future[None]] = {}
        self._over.clear()
        timer = threading.Timer(seconds, self._over.set)
        timer.start()
        try:
            with ThreadPoolExecutor(thread_name_prefix="nemesis") as pool:
                while not self._over.is_set() and not until():
                    if not deck:
                        deck = [event for event in events for _ in range(event.cards)]
                        self._chance.shuffle(deck)
                    event = deck.pop()
                    before = running.get(event.victim)
                    if before is None or before.done():
                        if before is not None:
                            before.result()
                        running[event.victim] = pool.submit(self._strike, event)
                        self.done[event.name] += 1
                    self._let_them_work(self._chance.randrange(100), self._chance.uniform(1.0, 8.0))
                self._over.set()
            for future in running.values():
                future.result()
        finally:
            timer.cancel()

    def _possible(self, *, broker_dies: bool) -> Iterator[Trouble]:
        return _events(self._world, broker_dies=broker_dies)

    def _let_them_work(self, transfers: int, seconds: float) -> None:
        """Wait until that many more transfers are decided, at most *seconds*: faults need work to have an effect."""
        goal = self._world.ledger.progress() + transfers
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._world.ledger.progress() < goal:
            if self._over.wait(0.02):
                return

    def _strike(self, event: Trouble) -> None:
        if event.name == "dtx killed":
            self.in_doubt += max(0, self._world.branches())
        try:
            event.act(self._world, Pause(random.Random(self._chance.getrandbits(32)), self._over))
        except (OSError, subprocess.SubprocessError) as error:  # TimeoutError is an OSError
            self.done[f"(given up: {event.name}: {type(error).__name__})"] += 1  # the machine is too busy for it
