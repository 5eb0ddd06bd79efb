"""``python -m tests.evidence.sim``: run seeds of the simulation until a limit of time, steps or seeds.

Prints lines of progress. A seed that fails is shrunk and printed with its trace.
"""

import argparse
import sys
import time
from collections import Counter
from itertools import count
from random import Random

from tests.evidence.sim.run import Result, members_shape, shrink, simulate

_PROGRESS = 10.0
"""Seconds between two lines of progress."""


def report(result: Result) -> str:
    """Return the violations of a failed run, the shrunk plan, and the command that repeats the run."""
    smallest = shrink(result)
    members = " --members" if result.shape.members else ""
    lines = [
        f"seed {result.seed} ({result.shape}) fails:",
        *(f"  {text}" for text in smallest.violations or result.violations),
        f"with these of {len(result.plan)} troubles ({smallest.steps:,} steps):",
        *(f"  {trouble}" for trouble in smallest.plan),
        "and this at the end of the trace:",
        *(f"  {text}" for text in smallest.trace[-150:]),
        f"again: python -m tests.evidence.sim --first {result.seed} --seeds 1{members}",
    ]
    return "\n".join(lines)


def main() -> int:
    """Run seeds; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=0, help="number of seeds; 0: no limit")
    parser.add_argument("--steps", type=int, default=0, help="limit of steps; 0: no limit")
    parser.add_argument("--seconds", type=float, default=0, help="limit of time; 0: no limit")
    parser.add_argument("--members", action="store_true", help="only runs with three members")
    parser.add_argument("--keep-going", action="store_true", help="continue after a seed that fails")
    given = parser.parse_args()
    began = told = time.monotonic()
    steps = branches = repeated = failed = takeovers = handovers = 0
    answers: Counter[str] = Counter()
    for done in count():
        seed = given.first + done
        took = time.monotonic() - began
        over = (given.seeds and done >= given.seeds) or (given.steps and steps >= given.steps)
        over = over or (given.seconds and took >= given.seconds)
        if over or time.monotonic() - told > _PROGRESS:
            told = time.monotonic()
            print(
                f"{took:6.0f} s  {done:,} seeds, {steps:,} steps, {branches:,} branches, {repeated:,} messages "
                f"repeated where that is allowed, {takeovers} takeovers, {handovers} handovers, {failed} seeds failed",
                flush=True,
            )
        if over:
            break
        result = simulate(seed, members_shape(Random(f"shape {seed}")) if given.members else None)
        steps += result.steps
        branches += result.branches
        takeovers += result.takeovers
        handovers += result.handovers
        repeated += result.repeated
        answers += result.answers
        if result.failed:
            failed += 1
            print(report(result), flush=True)
            if not given.keep_going:
                return 1
    print("answers: " + ", ".join(f"{answer} {number:,}" for answer, number in sorted(answers.items())))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
