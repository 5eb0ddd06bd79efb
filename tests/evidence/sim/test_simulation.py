"""dtx under the simulation: as many steps as the time allows, every mutation, and the properties of the simulation."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Final

import pytest

from tests.evidence.sim.__main__ import report
from tests.evidence.sim.mutations import MUTATIONS, Mutation
from tests.evidence.sim.run import Result, Shape, shape_of, shrink, simulate
from tests.evidence.sim.short import ALL, EVERY, runs

ROOT: Final = Path(__file__).parents[3]


def test_everything_that_can_go_wrong(minutes: float, figures: Callable[..., None]) -> None:
    """Both modes, with and without a broker that dies, keep the documented guarantees."""
    end = time.monotonic() + minutes * 60
    steps = branches = repeated = seed = members = takeovers = handovers = 0
    modes = set()
    while time.monotonic() < end:
        result = simulate(seed)
        assert not result.failed, report(result)
        steps += result.steps
        branches += result.branches
        repeated += result.repeated
        members += result.shape.members
        takeovers += result.takeovers
        handovers += result.handovers
        modes.add((result.shape.broker, result.shape.exact, result.shape.replay))
        seed += 1
    figures(seeds=seed, steps=steps, branches=branches, messages_repeated_where_allowed=repeated)
    figures(runs_with_members=members, takeovers=takeovers, handovers=handovers)
    assert len(modes) > 4


def essence(result: Result) -> str:
    """Return a text that differs between different runs."""
    trace = sha256("\n".join(result.trace).encode()).hexdigest()
    return f"{result.steps} {result.seconds!r} {sorted(result.answers.items())} {trace}"


@pytest.mark.parametrize("seed", [2, 3, 13, 34, 37])
def test_a_seed_is_the_same_run_in_every_process(seed: int) -> None:
    """Neither addresses, nor hashes of strings, nor earlier runs in the same process have an effect."""
    program = (
        "import sys\nfrom tests.evidence.sim.run import simulate\n"
        "from tests.evidence.sim.test_simulation import essence\n"
        "for seed in sys.argv[1:]:\n    told = essence(simulate(int(seed)))\nprint(told)"
    )
    told = {essence(simulate(seed))}
    for hashes, before in (("1", []), ("2", []), ("3", ["36", "7"])):
        kept = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
        environment = {**kept, "PYTHONHASHSEED": hashes, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", program, *before, str(seed)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        told.add(done.stdout.strip())
    assert len(told) == 1, told


def test_other_seeds_are_other_runs() -> None:
    assert len({essence(simulate(seed, Shape(seconds=3))) for seed in range(4)}) == 4


def test_seeds_are_about_all_that_there_is() -> None:
    shapes = [shape_of(seed) for seed in range(200)]
    assert {shape.broker for shape in shapes} == {True, False}
    assert {shape.replay for shape in shapes} == {"auto", "receipts", "always"}
    assert {shape.instances for shape in shapes if not shape.members} == {1, 2}
    assert {shape.instances for shape in shapes if shape.members} == {3}
    assert any(shape.forgets_acks for shape in shapes)
    for broker in (True, False):
        assert any(shape.explorers for shape in shapes if shape.broker is broker)
        assert any(shape.hoards for shape in shapes if shape.broker is broker)


@pytest.mark.parametrize("mutation", EVERY, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_a_mistake_is_found(mutation: Mutation, figures: Callable[..., None]) -> None:
    """The simulation can fail; otherwise it would prove nothing."""
    with mutation.applied():
        seeds = range(mutation.first, mutation.first + mutation.seeds)
        found = next((seed for seed in seeds if simulate(seed, mutation.shape).failed), None)
    assert found is not None, f"not found in {mutation.seeds} seeds: {mutation.name}"
    print(f"{mutation.name}: found by seed {found}")
    figures(mutations_found=1)


@pytest.mark.parametrize("mutation", ALL, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_the_short_simulation_finds_a_mistake(mutation: Mutation, figures: Callable[..., None]) -> None:
    """The default tier has this simulation; ``python -m tests.evidence.sim.short`` chooses its runs again."""
    assert any(run.finds(mutation) for run in runs())
    figures(mutations_found_by_the_short_simulation=1)


def test_a_failing_run_is_shrunk_while_it_still_fails() -> None:
    mutation = next(mutation for mutation in MUTATIONS if mutation.name == "nothing is put back")
    with mutation.applied():
        shape = replace(mutation.shape, seconds=5.0, troubles=4)
        result = next(result for seed in range(20) if (result := simulate(seed, shape)).failed)
        smallest = shrink(result)
        assert smallest.failed
        assert len(smallest.plan) < len(result.plan)
        assert set(smallest.plan) <= set(result.plan)
        for index in range(len(smallest.plan)):
            rest = smallest.plan[:index] + smallest.plan[index + 1 :]
            assert not simulate(result.seed, shape, rest).failed
        text = report(result)
    assert f"seed {result.seed} " in text
    assert f"--first {result.seed} " in text
