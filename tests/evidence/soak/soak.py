"""One soak: rounds of transfers with faults, each of which ends with a count."""

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from tests.evidence.soak.counting import Count, Findings, Reader
from tests.evidence.soak.money import OPENING_AMOUNT, OPENING_COINS, QUEUES, Transfer
from tests.evidence.soak.nemesis import Nemesis
from tests.evidence.soak.recovery import Desk, Recovery
from tests.evidence.soak.sides import BankSide, QueueSide
from tests.evidence.soak.ways import open_ways
from tests.evidence.soak.world import World
from tests.support.broker import Mode
from tests.support.processes import wait_until
from tests.support.soak import declare, insist

_COUNTS: Final = 3
"""The most counts of a round: a message that comes twice may hide one that is still out."""
QUIET_SECONDS: Final = 120.0
"""Limit of seconds until all branches have ended after the last fault: a branch without a vote times out, a database
recovers from its crash, the machine may be busy.
"""


@dataclass(slots=True, kw_only=True)
class Report:
    """The results of a soak."""

    mode: Mode
    seed: int
    rounds: int = 0
    seconds: float = 0.0
    looks: int = 0
    """Number of comparisons of a bank with the decisions while money moved."""
    in_doubt: int = 0
    nemesis: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    exits: Counter[int] = field(default_factory=Counter)
    copies_left: int = 0
    """Copies of messages that a death of the broker has left in queues until the end of a round."""
    copies_delivered: int = 0
    """Further copies that clients of dtx got in rounds in which the broker died."""
    same_copies: int = 0
    """Repeats that dtx has published once: RabbitMQ has lost the acknowledgement, and delivered the message again."""
    lost: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def bad(self) -> list[str]:
        """All broken guarantees."""
        return [
            f"{kind}: {text}"
            for kind, texts in (("lost", self.lost), ("repeated", self.repeated), ("wrong", self.wrong))
            for text in texts
        ]

    @property
    def repeated_by_broker_deaths(self) -> int:
        """All copies after deaths of the broker."""
        return self.copies_left + self.copies_delivered

    @property
    def committed(self) -> int:
        """Number of committed transfers."""
        return sum(n for name, n in self.counts.items() if name.startswith("committed: "))

    @property
    def rolled_back(self) -> int:
        """Number of rolled back transfers."""
        return sum(n for name, n in self.counts.items() if name.startswith("rolled back: "))


class Soak:
    """Runs rounds with its own servers.

    Args:
        mode: alongside or standalone.
        seed: of all random choices in this process; timing is not reproducible.
        say: prints a line of progress.
        afterwards: called after the rounds if there are no findings, before the servers are stopped.
        harm: only faults with one of these in their name; empty: all.
    """

    def __init__(
        self,
        mode: Mode,
        seed: int,
        say: Callable[[str], None],
        *,
        afterwards: Callable[[World, Count], None] = lambda *_: None,
        harm: Sequence[str] = (),
    ) -> None:
        self._mode: Mode = mode
        self._chance = random.Random(seed)
        self._say = say
        self._afterwards = afterwards
        self._harm = harm
        self.report = Report(mode=mode, seed=seed)
        self._recognised = 0
        self._doubts = 0

    def run(self, seconds: float, *, each: float, broker_deaths: Callable[[int], bool]) -> Report:
        """Run rounds of *each* seconds for *seconds* (at least one round), until there is a finding.

        Args:
            seconds: with faults; setup, recovery and counting take additional time.
            each: seconds of a round.
            broker_deaths: whether the broker is killed in the round with that number. Only there a message may be
                repeated, with the same x-dtx-id.
        """
        began = time.monotonic()
        with self._make_world(self._chance.getrandbits(32)) as world:
            self._open(world)
            counts = Count(world)
            nemesis = self._make_nemesis(world, self._chance)
            while not self.report.bad and (self.report.rounds == 0 or self.report.seconds + each <= seconds + 0.1):
                deaths = self._mode == "alongside" and broker_deaths(self.report.rounds)
                self._round(world, counts, nemesis, each, broker_dies=deaths)
                self.report.seconds += each
                self.report.rounds += 1
                self.report.nemesis, self.report.in_doubt = nemesis.done, nemesis.in_doubt
                self.report.counts, self.report.exits = world.ledger.counts(), world.exits
                self._say(
                    f"{self._mode}, round {self.report.rounds}, {time.monotonic() - began:.0f} s: "
                    f"{self.report.committed} committed, {self.report.rolled_back} rolled back, "
                    f"{nemesis.done.total()} events, {len(self.report.bad)} findings"
                )
            if not self.report.bad:
                self._afterwards(world, counts)
        return self.report

    def _make_world(self, seed: int) -> World:
        return World(self._mode, seed)

    def _make_nemesis(self, world: World, chance: random.Random) -> Nemesis:
        return Nemesis(world, chance, self._harm)

    def _declare(self, world: World) -> None:
        declare(world.service.url(), *QUEUES)

    def _open(self, world: World) -> None:
        """Publish the first coins to the queues."""
        self._declare(world)
        open_ways(world.service.url(), QUEUES)
        opening = Transfer(gtrid="opening", kind="opening")
        side = QueueSide(world.service.url())
        insist(side.select)
        side.start(opening.gtrid)
        for queue in QUEUES:
            for coin in list(opening.coins(*[OPENING_AMOUNT] * OPENING_COINS)):
                side.put(queue, coin)
                opening.made.append((coin, queue))
        side.end(opening.gtrid)
        side.prepare(opening.gtrid)
        world.ledger.decide(opening)
        side.commit(opening.gtrid)
        side.close()
        world.ledger.settle([opening.gtrid], Counter())

    def _round(self, world: World, counts: Count, nemesis: Nemesis, seconds: float, *, broker_dies: bool) -> None:
        ledger = world.ledger
        opened = ledger.progress()
        reader = Reader(world, dict(counts.opening))
        reader.start()
        world.begin(f"r{self.report.rounds}")
        try:
            wait_until(lambda: ledger.progress() > opened, seconds=60, what="the first transfer")
            nemesis.rage(seconds, broker_dies=broker_dies, until=lambda: bool(ledger.faults()))
        finally:
            world.heal()
            world.stop_clients(40)
            reader.stop.set()
            reader.join(60)
        self.report.looks += reader.looks
        self._recover(world)
        findings = self._count(counts)
        doubts = world.doubts()[self._doubts :]
        self._doubts += len(doubts)
        if broker_dies and not findings.lost and not findings.wrong:
            self.report.copies_left += counts.allow_copies(findings)
        self.report.lost += findings.lost
        self.report.repeated += findings.repeated
        self.report.wrong += [*findings.wrong, *ledger.faults(), *world.trouble()]
        recognised = ledger.repeats()[self._recognised :]
        self._recognised += len(recognised)
        allowed = [text for text in recognised if broker_dies or text.partition(" ")[0] in counts.allowed]
        self.report.copies_delivered += len(allowed)
        self.report.same_copies = ledger.same_copies()
        for text in allowed:
            self._say(text)
        self.report.repeated += [text for text in recognised if text not in allowed]
        if self.report.bad:
            for line in doubts:
                self._say(line)
        else:
            counts.close_round()

    def _recover(self, world: World) -> None:
        """Recover for all transaction managers, as each would do at its next start."""
        desk = Desk(world.ledger, "s")
        recovery = Recovery(
            desk,
            QueueSide(world.service.url()),
            {name: BankSide(url, "recovery") for name, url in world.banks.items()},
        )

        def at_rest() -> bool:
            return recovery.attempt() and world.branches() == 0

        try:
            wait_until(at_rest, seconds=QUIET_SECONDS, what="the end of all branches")
        except TimeoutError:
            left = [gtrid for gtrid, _ in world.ledger.unended("s")]
            self.report.wrong.append(f"{world.branches()} branches do not end, decided are {left}")
        finally:
            recovery.close()

    def _count(self, counts: Count) -> Findings:
        """Count when enough messages are ready: those of dead clients return after a moment.

        Each count returns every message once, and RabbitMQ may drop a message that has returned too often.
        """
        with contextlib.suppress(TimeoutError):
            wait_until(counts.enough, seconds=QUIET_SECONDS / 2, what="as many messages as coins")
        findings = counts.count()
        for _ in range(_COUNTS - 1):
            if not findings.lost:
                break
            time.sleep(2.0)
            findings = counts.count()
        return findings
