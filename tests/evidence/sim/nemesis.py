"""Faults: a seed draws a plan, which can be shrunk event by event."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Final

from tests.evidence.sim.broker import HOST as BROKER
from tests.evidence.sim.database import RETRY_WINDOW

if TYPE_CHECKING:
    from tests.evidence.sim.run import Simulation


@dataclass(frozen=True, slots=True)
class Trouble:
    """One fault.

    Args:
        at: seconds after the beginning.
        kind: a key of :data:`KINDS`.
        whom: the index of the target, modulo the number of targets; some kinds use it as a count.
        seconds: its duration.
    """

    at: float
    kind: str
    whom: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.at:8.3f} s  {self.kind} (whom {self.whom}, {self.seconds:.3f} s)"


def _kill_dtx(sim: "Simulation", trouble: Trouble) -> None:
    instance = sim.instances[trouble.whom % len(sim.instances)]
    instance.kill(again=trouble.seconds)


def _kill_active(sim: "Simulation", trouble: Trouble) -> None:
    """Kill the dtx with the lease immediately after a write, the critical moment for its guarantees."""
    sim.on_next_write(trouble.whom % 40, lambda: _active(sim, trouble))


def _active(sim: "Simulation", trouble: Trouble) -> None:
    for instance in sim.instances:
        if instance.process is not None and sim.holds_lease(instance):
            instance.kill(again=trouble.seconds)


def _pause_dtx(sim: "Simulation", trouble: Trouble) -> None:
    process = sim.instances[trouble.whom % len(sim.instances)].process
    if process is not None:
        process.pause()
        sim.later(trouble.seconds, process.resume)


def _kill_application(sim: "Simulation", trouble: Trouble) -> None:
    sim.kill_application(trouble.whom)


def _cut_off(sim: "Simulation", trouble: Trouble) -> None:
    ends = [end for end in sim.network.ends if end.process.alive]
    if ends:
        sim.network.break_off(ends[trouble.whom % len(ends)])


def _cut_off_broker(sim: "Simulation", trouble: Trouble) -> None:
    """Break all connections of one dtx to the broker, which keeps running: requests in progress may be executed."""
    host = sim.instances[trouble.whom % len(sim.instances)].host
    for end in list(sim.network.ends):
        if end.process.name == host and end.other.process.name == BROKER:
            sim.network.break_off(end)


def _cut_one_at_a_write(sim: "Simulation", trouble: Trouble) -> None:
    """Break one connection of a dtx to the broker at a write, so that a unit may be done in part."""

    def cut() -> None:
        ends = [end for end in sim.network.ends if end.process.alive and end.other.process.name == BROKER]
        if ends:
            sim.network.break_off(ends[trouble.whom % len(ends)])

    sim.on_next_write(trouble.whom % 40, cut)


def _cut_off_and_kill(sim: "Simulation", trouble: Trouble) -> None:
    """The dtx with the lease loses the broker at a write, and is killed before it has handled that."""

    def cut() -> None:
        for index, instance in enumerate(sim.instances):
            if sim.holds_lease(instance):
                _cut_off_broker(sim, replace(trouble, whom=index))
        sim.on_next_write(trouble.whom % 5, lambda: _active(sim, trouble))

    sim.on_next_write(trouble.whom % 40, cut)


def _partition_broker(sim: "Simulation", trouble: Trouble) -> None:
    sim.network.partition(sim.instances[trouble.whom % len(sim.instances)].host, BROKER)
    sim.later(trouble.seconds, sim.network.heal)


def _partition_application(sim: "Simulation", trouble: Trouble) -> None:
    host = sim.instances[trouble.whom % len(sim.instances)].host
    sim.network.partition(host, f"application-{trouble.whom % sim.shape.applications}")
    sim.later(trouble.seconds, sim.network.heal)


def _database_away(sim: "Simulation", trouble: Trouble) -> None:
    sim.database.crash()
    sim.later(trouble.seconds, sim.database_back)


def _database_long_away(sim: "Simulation", trouble: Trouble) -> None:
    """The database is unavailable for longer than a write waits: the outcome of the write is not known."""
    sim.database.crash()
    sim.later(RETRY_WINDOW + trouble.seconds / 2, sim.database_back)


def _database_slow(sim: "Simulation", trouble: Trouble) -> None:
    sim.database.slow = 0.5
    sim.later(trouble.seconds, sim.database_fast)


def _answer_lost(sim: "Simulation", trouble: Trouble) -> None:
    sim.database.lost_answers += 1 + trouble.whom % 2


def _write_lost(sim: "Simulation", trouble: Trouble) -> None:
    sim.database.lost_groups += 1 + trouble.whom % 2


def _skew(sim: "Simulation", trouble: Trouble) -> None:
    process = sim.instances[trouble.whom % len(sim.instances)].process
    if process is not None:
        process.skew = (trouble.seconds - 3) * 1000


def _stop_dtx(sim: "Simulation", trouble: Trouble) -> None:
    sim.instances[trouble.whom % len(sim.instances)].stop()


def _cut_off_database(sim: "Simulation", trouble: Trouble) -> None:
    """One dtx cannot reach the database, and goes on to serve."""
    sim.database.separate(sim.instances[trouble.whom % len(sim.instances)].host)
    sim.later(trouble.seconds, sim.database.unite)


def _partition_members(sim: "Simulation", trouble: Trouble) -> None:
    count = len(sim.instances)
    one = trouble.whom % count
    other = (one + 1 + trouble.whom // count % (count - 1)) % count
    sim.network.partition(sim.instances[one].host, sim.instances[other].host)
    sim.later(trouble.seconds, sim.network.heal)


def _kill_broker(sim: "Simulation", trouble: Trouble) -> None:
    sim.broker.crash()
    sim.later(trouble.seconds, sim.broker_back)


def _alarm(sim: "Simulation", trouble: Trouble) -> None:
    sim.broker.set_alarm(True)
    sim.later(trouble.seconds, sim.end_alarm)


KINDS: Final[dict[str, Callable[["Simulation", Trouble], None]]] = {
    "dtx is killed": _kill_dtx,
    "the active dtx is killed at a write": _kill_active,
    "dtx is stopped": _pause_dtx,
    "an application is killed": _kill_application,
    "a connection is cut off": _cut_off,
    "dtx loses its connections to the broker": _cut_off_broker,
    "a connection to the broker breaks at a write": _cut_one_at_a_write,
    "dtx loses the broker at a write and is killed": _cut_off_and_kill,
    "dtx and the broker are separated": _partition_broker,
    "dtx and an application are separated": _partition_application,
    "the database is away": _database_away,
    "the database is away for long": _database_long_away,
    "the database is slow": _database_slow,
    "a write is done and not answered": _answer_lost,
    "a write is neither done nor answered": _write_lost,
    "a wall clock is wrong": _skew,
    "the broker is killed": _kill_broker,
    "the broker has an alarm": _alarm,
    "dtx stops in order": _stop_dtx,
    "a dtx and the database are separated": _cut_off_database,
    "two dtx are separated": _partition_members,
}
_OF_BROKER: Final = {
    "dtx loses its connections to the broker",
    "a connection to the broker breaks at a write",
    "dtx loses the broker at a write and is killed",
    "dtx and the broker are separated",
    "the broker is killed",
    "the broker has an alarm",
}
_OF_MEMBERS: Final = {"dtx stops in order", "a dtx and the database are separated", "two dtx are separated"}
_REPEATING: Final = {"the broker is killed"}
_LONG: Final = {
    "dtx is stopped": 9.0,
    "dtx and the broker are separated": 45.0,
    "the database is away": 14.0,
    "a dtx and the database are separated": 9.0,
    "two dtx are separated": 14.0,
}


def draw(
    random: Random, seconds: float, count: int, *, broker: bool, exact: bool, members: bool = False,
    kinds: Sequence[str] = (),
) -> tuple[Trouble, ...]:  # fmt: skip
    """Draw a plan for the first *seconds*.

    Args:
        random: source of random choices.
        seconds: duration of the period with faults.
        count: number of events.
        broker: alongside a broker.
        exact: no faults that make dtx repeat messages.
        members: several dtx are active.
        kinds: only these kinds, if there are any.
    """
    kinds = kinds or [
        kind
        for kind in KINDS
        if (broker or kind not in _OF_BROKER) and not (exact and kind in _REPEATING)
        if members or kind not in _OF_MEMBERS
    ]  # fmt: skip
    plan = []
    for _ in range(count):
        kind = random.choice(kinds)
        lasts = random.random() ** 2 * _LONG.get(kind, 6.0)
        plan.append(Trouble(random.random() * seconds, kind, random.randrange(1000), lasts))
    return tuple(sorted(plan, key=lambda trouble: trouble.at))
