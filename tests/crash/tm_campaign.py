"""Programs with a transaction manager are killed at random points, again and again: ``make crash-tm``.

Two databases and two dtx; several programs at a time, of one node, on one log. Each recovers, does transactions over
all four, and dies at a point; another one comes after it. In the end nothing may be in doubt, all four must have the
same ids, each message once, everything that a program heard was committed, and nothing that it heard was rolled back.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtx.client.tm.points import DIED, Point
from tests.support.tm import World, two_phase_server

ALL = ("db1", "db2", "q1", "q2")
_POINTS = [point for point in Point if point < Point.ONE_PHASE_BEFORE]
_BATCH = 250
"""Transactions that are the work of one program, and of those that come after it."""
_DEATHS = 0.9
"""The share of programs that are to die."""


@dataclass(slots=True)
class Tally:
    """What programs have said."""

    begun: int = 0
    committed: set[str] = field(default_factory=set)
    rolled_back: set[str] = field(default_factory=set)
    deaths: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def play(world: World, total: int, seed: int, programs: int = 2) -> Tally:
    """Do *total* transactions, with deaths; recover; look at everything.

    Args:
        world: empty.
        total: transactions that are begun.
        seed: of points and lots.
        programs: at a time.
    """
    tally = Tally()
    lots = random.Random(seed)
    urls = world.databases | {name: service.url() for name, service in world.services.items()}
    mutex = threading.Lock()

    def run(first: int) -> None:
        """One program after the other, until each transaction was begun by one of them."""
        left = [f"{seed}-{number}" for number in range(first, min(first + _BATCH, total))]
        while left and not tally.wrong:
            order = {"log": str(world.log), "resources": urls, "ids": left, "recover": True, "threads": 4}
            with mutex:
                if lots.random() < _DEATHS:
                    order |= {"point": int(lots.choice(_POINTS)), "number": lots.randint(1, len(left))}
            words = [sys.executable, "-m", "tests.crash.tm_child", json.dumps(order)]
            ended = subprocess.run(words, capture_output=True, text=True, check=False)
            with mutex:
                begun = _count(tally, order, ended)
                print(f"{tally.begun} of {total}, {tally.deaths.total()} deaths", file=sys.stderr, flush=True)
            left = [id_ for id_ in left if id_ not in begun]

    with ThreadPoolExecutor(programs) as pool:
        list(pool.map(run, range(0, total, _BATCH)))
    _judge(world, tally)
    return tally


def _count(tally: Tally, order: dict[str, Any], ended: subprocess.CompletedProcess[str]) -> set[str]:
    """Take down what a program said; the transactions that it began."""
    if ended.returncode not in (0, DIED):
        tally.wrong.append(f"a program ended with {ended.returncode}: {ended.stderr[-2000:]}")
    if ended.returncode == DIED:
        tally.deaths[Point(order["point"]).name] += 1
    heard: dict[str, set[str]] = {"begun": set(), "committed": tally.committed, "rolled-back": tally.rolled_back}
    for line in ended.stdout.splitlines():
        word, _, id_ = line.partition(" ")
        heard[word].add(id_)
    tally.begun += len(heard["begun"])
    return heard["begun"]


def _judge(world: World, tally: Tally) -> None:
    with world.manager() as tm:
        report = tm.recover()
        if not report.clean or tm.log.unfinished("n"):
            tally.wrong.append(f"recovery left something open: {report}")
        tally.wrong += [f"heuristic outcome: {found}" for found, _, _ in tm.log.heuristics()]
    tally.wrong += [f"in doubt: {branch}" for branch in world.in_doubt()]
    found = {name: world.rows(name) for name in ("db1", "db2")}
    for name in ("q1", "q2"):
        messages = world.messages(name)
        found[name] = set(messages)
        if len(messages) != len(found[name]):
            tally.wrong.append(f"{name} has {len(messages) - len(found[name])} messages twice")
    for name, ids in found.items():
        if ids != found["db1"]:
            tally.wrong.append(f"db1 and {name} differ in {sorted(ids ^ found['db1'])[:10]}")
    if lost := tally.committed - found["db1"]:
        tally.wrong.append(f"committed and not there: {sorted(lost)[:10]}")
    if undone := tally.rolled_back & found["db1"]:
        tally.wrong.append(f"rolled back and there: {sorted(undone)[:10]}")


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transactions", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=None, help="of points and lots; printed")
    parser.add_argument("--programs", type=int, default=2, help="at a time")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 30) if options.seed is None else options.seed
    began = time.monotonic()
    with (
        two_phase_server() as server,
        tempfile.TemporaryDirectory() as directory,
        World(server, Path(directory)) as world,
    ):
        tally = play(world, options.transactions, seed, options.programs)
    seconds = time.monotonic() - began
    print(f"seed {seed}: {tally.begun} transactions, {len(tally.committed)} heard as committed, {seconds:.0f} s")
    print(f"deaths: {dict(tally.deaths)}")
    for wrong in tally.wrong:
        print(f"WRONG: {wrong}")
    print("all agree, nothing is in doubt" if not tally.wrong else f"{len(tally.wrong)} things are wrong")
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
