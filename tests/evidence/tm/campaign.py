"""Programs with a transaction manager are killed at random points, again and again.

There are two databases and two dtx, and several programs at a time, with the same node and log. Each program recovers,
does transactions over all four resources, and dies at a point in its recovery or in its work; then another one
continues. A few transactions are rolled back by the program, and a few have only one resource. At the end, no branch
may be in doubt, all four resources must have the same ids, and each message must be there once. All transactions that
were reported as committed must be there, and none that was reported as rolled back.

The points of heuristic outcomes need an operator: ``tests/servers/crash/test_tm.py`` covers them and all others.
"""

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dtx.client.tm.steps import CommitPoint
from tests.support.broker import MODES
from tests.support.prefork import Preforker
from tests.support.rabbitmq import RabbitNode
from tests.support.tm import ALL, World, two_phase_server
from tests.support.tm_child import DIED_AT, UNDONE

IN_WORK: Final = [point for point in CommitPoint if point <= CommitPoint.ROLLED_BACK]
IN_RECOVERY: Final = [point for point in CommitPoint if point >= CommitPoint.RECOVERY_SCANNED]
_BATCH: Final = 250
"""Number of transactions of one program and its successors."""
_DEATHS: Final = 0.9
"""The share of programs with a point of death in their work."""
_RECOVERIES: Final = 0.5
"""The share of programs with a point of death in their recovery."""
_LIFE: Final = 30
"""Limit of the occurrence number of a point; a transaction reaches a point once or four times."""
_RARE: Final = (CommitPoint.ONE_PHASE_BEFORE, CommitPoint.ONE_PHASE_AFTER, CommitPoint.ROLLED_BACK)
"""Points of few transactions: their occurrence number is at most 2, because they are seldom reached."""
_PROGRAM_SECONDS: Final = 600.0
_TELL_EVERY: Final = 5.0
"""Seconds between two lines of progress."""


def preforker() -> Preforker:
    """Return a factory for copies of the program."""
    return Preforker("tests.support.tm_child")


@dataclass(slots=True)
class Ended:
    """A program that has ended."""

    status: int
    output: str
    errors: str

    @property
    def died_at(self) -> CommitPoint | None:
        """The point at which it died."""
        points = [point for point in CommitPoint if DIED_AT + point == self.status]
        return points[0] if points else None


def program(copies: Preforker, world: World, **order: Any) -> Ended:
    """Run a copy of the program until it has ended."""
    urls = world.databases | {name: service.url() for name, service in world.services.items()}
    words = [json.dumps({"log": str(world.log), "resources": urls, **order})]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        copy = copies.copy(
            "tests.support.tm_child",
            words,
            output=output.fileno(),
            errors=errors.fileno(),
            env=os.environ,
            cwd=world.log.parent,
        )
        status = copy.wait(_PROGRAM_SECONDS)
        output.seek(0)
        errors.seek(0)
        return Ended(status, output.read().decode(), errors.read().decode())


@dataclass(slots=True)
class Tally:
    """The reports of programs, and the state at the end."""

    total: int
    begun: int = 0
    programs: int = 0
    committed: set[str] = field(default_factory=set)
    rolled_back: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)
    deaths: Counter[CommitPoint] = field(default_factory=Counter)
    found: dict[str, int] = field(default_factory=dict)
    """Number of rows or messages of each resource at the end."""
    in_doubt: int = 0
    wrong: list[str] = field(default_factory=list)
    since: float = field(default_factory=time.monotonic)
    told: float = 0.0

    @property
    def rate(self) -> float:
        """Transactions per second."""
        return self.begun / max(time.monotonic() - self.since, 0.001)

    def tell(self) -> None:
        """Print the progress from time to time."""
        if time.monotonic() - self.told < _TELL_EVERY and self.begun < self.total:
            return
        self.told = time.monotonic()
        left = (self.total - self.begun) / max(self.rate, 0.001)
        done = f"{self.begun:,} of {self.total:,} transactions, {self.deaths.total():,} deaths"
        print(f"{done}, {self.rate:.0f} a second, {left / 60:.1f} minutes left", file=sys.stderr, flush=True)


def ids(seed: int, total: int) -> list[str]:
    """Return the ids of all transactions: of a hundred, five are rolled back, and one uses only each resource."""
    kinds = {7: UNDONE, 27: UNDONE, 47: UNDONE, 67: UNDONE, 87: UNDONE}
    kinds |= {13 + 20 * position: name for position, name in enumerate(ALL)}
    return [f"{kinds.get(number % 100, 'all')}-{seed}-{number}" for number in range(total)]


def play(copies: Preforker, world: World, total: int, seed: int, programs: int = 4) -> Tally:
    """Do *total* transactions, with deaths; recover; check all resources.

    Args:
        copies: of the program.
        world: the empty resources.
        total: number of transactions to begin.
        seed: of all random choices.
        programs: number at a time.
    """
    tally = Tally(total)
    lots = random.Random(seed)
    mutex = threading.Lock()
    every = ids(seed, total)

    def run(first: int) -> None:
        """Run programs one after the other, until each transaction has been begun."""
        left = every[first : first + _BATCH]
        while left and not tally.wrong:
            with mutex:
                fates = _fates(lots)
            ended = program(copies, world, ids=left, recover=True, threads=4, fates=fates)
            with mutex:
                begun = count(tally, ended)
                tally.tell()
            left = [id_ for id_ in left if id_ not in begun]

    with ThreadPoolExecutor(programs) as pool:
        list(pool.map(run, range(0, total, _BATCH)))
    _judge(world, tally)
    return tally


def _fates(lots: random.Random) -> list[tuple[CommitPoint, int]]:
    """Draw the points of death, with occurrence numbers; the first one that is reached applies."""
    fates = []
    if lots.random() < _RECOVERIES:
        fates.append((lots.choice(IN_RECOVERY), lots.randint(1, 2)))
    if lots.random() < _DEATHS:
        point = lots.choice(IN_WORK)
        fates.append((point, lots.randint(1, 2 if point in _RARE else _LIFE)))
    return fates


def count(tally: Tally, ended: Ended) -> set[str]:
    """Add the reports of a program, and return the transactions that it began."""
    tally.programs += 1
    if ended.died_at is not None:
        tally.deaths[ended.died_at] += 1
    elif ended.status != 0:
        tally.wrong.append(f"a program ended with {ended.status}: {ended.errors[-2000:]}")
    heard: dict[str, set[str]] = {
        "begun": set(),
        "committed": tally.committed,
        "rolled-back": tally.rolled_back,
        "unknown": tally.unknown,
    }
    for line in ended.output.splitlines():
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
    doubtful = world.in_doubt()
    tally.in_doubt = len(doubtful)
    tally.wrong += [f"in doubt: {branch}" for branch in doubtful]
    found = {name: world.rows(name) for name in ("db1", "db2")}
    for name in ("q1", "q2"):
        messages = world.messages(name)
        found[name] = set(messages)
        if len(messages) != len(found[name]):
            tally.wrong.append(f"{name} has {len(messages) - len(found[name])} messages twice")
    tally.found = {name: len(ids) for name, ids in found.items()}
    compare(tally, found)


def compare(tally: Tally, found: dict[str, set[str]]) -> None:
    """Check that each transaction is in all of its resources or in none, and in no other one."""

    def of(kind: str, ids: set[str]) -> set[str]:
        return {id_ for id_ in ids if id_.partition("-")[0] == kind}

    everywhere = of("all", found["db1"])
    there = set[str]().union(*found.values())
    for name, ids in found.items():
        if differ := of("all", ids) ^ everywhere:
            tally.wrong.append(f"db1 and {name} differ in {_some(differ)}")
        if strange := ids - of("all", ids) - of(name, ids):
            tally.wrong.append(f"{name} has what does not belong there: {_some(strange)}")
    if lost := tally.committed - there:
        tally.wrong.append(f"committed and not there: {_some(lost)}")
    if undone := tally.rolled_back & there:
        tally.wrong.append(f"rolled back and there: {_some(undone)}")


def _some(ids: set[str]) -> Sequence[str]:
    return sorted(ids)[:10]


def table(tally: Tally, seed: int) -> str:
    """Return the results as a table."""
    seconds = time.monotonic() - tally.since
    rows: list[tuple[str, object]] = [
        ("seed", seed),
        ("transactions", f"{tally.begun:,} in {seconds / 60:.1f} minutes, {tally.rate:.0f} a second"),
        ("programs", f"{tally.programs:,}, of which {tally.deaths.total():,} died"),
        *((f"died at {point.name.lower().replace('_', '-')}", tally.deaths[point]) for point in IN_WORK + IN_RECOVERY),
        ("heard as committed", f"{len(tally.committed):,}"),
        ("heard as rolled back", f"{len(tally.rolled_back):,}"),
        ("not heard of", f"{tally.begun - len(tally.committed) - len(tally.rolled_back):,}"),
        *((f"found in {name}", f"{count:,}") for name, count in tally.found.items()),
        ("in doubt after recovery", tally.in_doubt),
        ("sums agree, each message once", "no" if tally.wrong else "yes"),
    ]
    return "\n".join(f"| {name} | {value} |" for name, value in [("", ""), ("---", "---"), *rows])


def main() -> int:
    """Run the campaign; return 1 if something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transactions", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=None, help="of all random choices; printed")
    parser.add_argument("--programs", type=int, default=4, help="number of programs at a time")
    parser.add_argument("--mode", choices=MODES, default="standalone", help="where both dtx have their messages")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 30) if options.seed is None else options.seed
    print(f"seed {seed}", file=sys.stderr, flush=True)
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(RabbitNode()) if options.mode == "alongside" else None
        server = stack.enter_context(two_phase_server())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        world = stack.enter_context(World(server, directory, node))
        copies = stack.enter_context(preforker())
        tally = play(copies, world, options.transactions, seed, options.programs)
    print(table(tally, seed))
    for wrong in tally.wrong:
        print(f"WRONG: {wrong}")
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
