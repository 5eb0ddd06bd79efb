"""The short simulation of the default tier: few steps, chosen to find as many mutations as possible.

The runs are in a file. ``python -m tests.evidence.sim.short`` chooses them again, beginning with the present ones: for
each mutation that the chosen runs do not find yet, it takes the shortest run that does. Then it shortens runs, as long
as each still finds the mutations that no other run finds. Do that if ``make evidence PARTS=sim`` reports that the short
simulation no longer finds all of its mutations.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

from tests.evidence.sim.mutations import MUTATIONS, Mutation
from tests.evidence.sim.mutations_copies import COPIES
from tests.evidence.sim.mutations_demarcation import DEMARCATION
from tests.evidence.sim.mutations_members import MEMBERS
from tests.evidence.sim.run import Result, Shape, simulate

FILE: Final = Path(__file__).with_name("short.json")
_IN_LONG_RUNS: Final = frozenset(
    {
        "a member is not fenced",
        "a silent member does not count",
        "branches are taken before the lease has run out",
        "members of the last look are asked",
        "branches that were taken are not loaded",
        "branches of a member that has left are not taken",
        "a request without an answer is sent again",
        "a member keeps its epoch",
    }
)
"""Mutations that only longer simulations find."""
EVERY: Final = (*MUTATIONS, *DEMARCATION, *COPIES, *MEMBERS)
ALL: Final = tuple(mutation for mutation in EVERY if mutation.name not in _IN_LONG_RUNS)
_SECONDS: Final = (3.0, 6.0, 12.0, 20.0)
"""Durations of work and faults: shorter runs have fewer steps and find less."""
_SEEDS: Final = 20
"""Number of seeds to try for each duration; the last one has all seeds of the mutation."""
_SHARES: Final = (0.3, 0.45, 0.6)
"""Shares of the length of a chosen run to try."""
_OTHERS: Final = 5
"""Number of seeds to try for each of these lengths."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the short simulation."""

    seed: int
    shape: Shape

    def play(self) -> Result:
        """Simulate it."""
        return simulate(self.seed, self.shape)

    def finds(self, mutation: Mutation) -> bool:
        """Whether the run fails with this mutation."""
        with mutation.applied():
            return self.play().failed

    def to_json(self) -> dict[str, Any]:
        """Return the seed, and the differences from the default shape."""
        usual = asdict(Shape())
        return {"seed": self.seed} | {name: value for name, value in asdict(self.shape).items() if value != usual[name]}

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> "Run":
        """Do the reverse of :meth:`to_json`."""
        shape: dict[str, Any] = {name: value for name, value in given.items() if name != "seed"}
        return cls(given["seed"], Shape(**shape | {"kinds": tuple(shape.get("kinds", ()))}))


def runs() -> list[Run]:
    """Return the chosen runs."""
    return [Run.from_json(given) for given in json.loads(FILE.read_text(encoding="utf-8"))]


def choose(mutations: Sequence[Mutation] = ALL) -> Iterator[Run]:
    """Choose runs that together find *mutations*, and print the result of each new one."""
    present = [run for run in runs() if not run.play().failed]
    yield from present
    left = [mutation for mutation in mutations if not any(run.finds(mutation) for run in present)]
    while left:
        mutation = left.pop(0)
        found = _shortest(mutation)
        if found is None:
            _say(f"{mutation.name}: no short run finds it")
            continue
        others = [other for other in left if found.finds(other)]
        left = [other for other in left if other not in others]
        _say(f"{mutation.name}: seed {found.seed}, {found.play().steps:,} steps, finds {len(others)} others too")
        yield found


def cut(chosen: Sequence[Run]) -> list[Run]:
    """Remove or shorten runs, so that together they find the same mutations as *chosen*."""
    found = {run: {mutation for mutation in ALL if run.finds(mutation)} for run in chosen}
    for run in sorted(chosen, key=lambda run: run.play().steps, reverse=True):
        wanted = found.pop(run).difference(*found.values())
        if wanted:
            best = min((run, *_shorter(run, wanted)), key=lambda run: run.play().steps)
            found[best] = {mutation for mutation in ALL if best.finds(mutation)}
            _say(f"seed {run.seed}: {run.play().steps:,} steps, now {best.play().steps:,}")
    return list(found)


def _shorter(run: Run, wanted: Iterable[Mutation]) -> Iterator[Run]:
    """Yield runs that are shorter than *run* and find *wanted*."""
    for share in _SHARES:
        seconds, troubles = round(run.shape.seconds * share, 1), max(1, round(run.shape.troubles * share))
        shape = replace(run.shape, seconds=seconds, troubles=troubles)
        for seed in range(run.seed, run.seed + _OTHERS):
            one = Run(seed, shape)
            if not one.play().failed and all(one.finds(mutation) for mutation in wanted):
                yield one


def _shortest(mutation: Mutation) -> Run | None:
    for seconds in _SECONDS:
        shape = replace(mutation.shape, seconds=seconds, troubles=max(1, round(mutation.shape.troubles * seconds / 20)))
        seeds = mutation.seeds if seconds == _SECONDS[-1] else _SEEDS
        tried = (Run(seed, shape) for seed in range(mutation.first, mutation.first + seeds))
        found = list(islice((run for run in tried if run.finds(mutation)), 3))
        if found:
            return min(found, key=lambda run: run.play().steps)
    return None


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    """Choose runs, and write them to the file."""
    chosen = cut(list(choose()))
    lines = ",\n".join(f" {json.dumps(run.to_json())}" for run in chosen)
    FILE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    _say(f"{len(chosen)} runs, {sum(run.play().steps for run in chosen):,} steps")


if __name__ == "__main__":
    main()
