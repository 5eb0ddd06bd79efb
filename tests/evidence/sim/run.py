"""One run of the simulation: a seed, what it is about, and what came of it."""

import asyncio
import sys
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Final, NoReturn

import structlog

from dtx.log.records import LogWrite
from dtx.xa.xid import Xid
from tests.evidence.sim import nemesis
from tests.evidence.sim.applications import Application, Recovery
from tests.evidence.sim.broker import Queue, SimBroker
from tests.evidence.sim.broker_session import persistent_message
from tests.evidence.sim.checks import Copies, in_broker, judge
from tests.evidence.sim.client import GONE, Client
from tests.evidence.sim.database import SimDatabase
from tests.evidence.sim.explorer import Explorer
from tests.evidence.sim.hoarder import Hoarder
from tests.evidence.sim.instance import Instance
from tests.evidence.sim.ledger import Branch, Ledger
from tests.evidence.sim.nemesis import Trouble
from tests.evidence.sim.network import Network
from tests.evidence.sim.operators import Operator
from tests.evidence.sim.scheduler import Process, SimLoop, current, scheduler
from tests.evidence.sim.world import simulated

QUEUES: Final = [b"q0", b"q1", b"q2"]
_SEEDS: Final = 8
"""Messages in each queue at the beginning."""
_REST: Final = 600.0
"""Seconds in which everything has come to rest after the last trouble."""
_AFTERMATH: Final = 20.0
"""Seconds for which a trouble that is over may still be felt: leases run out, heartbeats are missed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a run is about.

    Args:
        broker: alongside a broker, or standalone.
        replay: see the setting.
        instances: of dtx, on one database.
        applications: that work at the same time.
        seconds: for which there is work and trouble.
        troubles: how many.
        exact: no trouble that makes dtx repeat.
        refusing: whether the last queue refuses what is too much.
        database: seconds that the database takes for most things at most.
        kinds: of trouble; all where none is named.
        forgets_acks: whether a broker that dies forgets the last acks, too.
        operators: whether one gives orders about branches in doubt.
        joins: how often a second connection joins a branch.
        explorers: applications that suspend, fail and time out.
        hoards: whether somebody has more in doubt than a page of recover holds.
    """

    broker: bool = True
    replay: str = "auto"
    instances: int = 2
    applications: int = 3
    seconds: float = 20.0
    troubles: int = 6
    exact: bool = True
    refusing: bool = False
    database: float = 0.001
    kinds: tuple[str, ...] = ()
    forgets_acks: bool = False
    operators: bool = False
    joins: float = 0.15
    explorers: int = 0
    hoards: bool = False

    def __str__(self) -> str:
        mode = f"alongside, replay {self.replay}" if self.broker else "standalone"
        more = "".join(
            text
            for on, text in (
                (not self.exact, ", the broker dies"),
                (self.refusing, ", a queue refuses"),
                (self.forgets_acks, ", the broker forgets acks"),
                (self.operators, ", an operator gives orders"),
                (bool(self.explorers), f", {self.explorers} explorers"),
                (self.hoards, ", a hoarder"),
            )
            if on
        )
        return f"{mode}, {self.instances} dtx, {self.applications} applications{more}"


def shape_of(seed: int) -> Shape:
    """What the run with this seed is about: every fourth is standalone, some brokers die."""
    random = Random(f"shape {seed}")
    broker = seed % 4 != 3
    exact = not broker or random.random() < 0.6
    replay = random.choice(("auto", "auto", "receipts", "always")) if broker else "auto"
    refusing = not exact and random.random() < 0.4 and replay != "receipts"  # docs/explanation/limits: not with these
    return Shape(
        broker=broker,
        replay=replay,
        instances=random.choice((1, 2, 2)),
        applications=random.choice((1, 2, 3, 4)),
        troubles=random.choice((1, 3, 6, 10)),
        exact=exact and replay != "always",
        forgets_acks=not exact and random.random() < 0.5,
        refusing=refusing,
        database=random.choice((0.0005, 0.001, 0.01)),
        operators=random.random() < (0.7 if refusing else 0.3),
        explorers=random.choice((0, 0, 1, 2)),
        hoards=random.random() < 0.2,
    )


@dataclass(slots=True)
class Result:
    """What came of a run.

    Args:
        seed, shape, plan: what it was.
        steps: callbacks that have run.
        violations: what must never happen.
        repeated: messages that were repeated.
        answers: how often dtx answered what.
        trace: what was logged, the last of it.
        digest: changes with everything that happens.
    """

    seed: int
    shape: Shape
    plan: tuple[Trouble, ...]
    steps: int = 0
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)
    repeated: int = 0
    branches: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    trace: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether something was wrong."""
        return bool(self.violations)


class Simulation:
    """Everything that takes part in one run.

    Args:
        loop: the scheduler.
        shape: what it is about.
    """

    def __init__(self, loop: SimLoop, shape: Shape, random: Random) -> None:
        self.loop = loop
        self.shape = shape
        self.network = Network(loop)
        self.database = SimDatabase(loop, slow=shape.database)
        self.broker = SimBroker(loop, self.network, forgets_acks=shape.forgets_acks)
        self.ledger = Ledger()
        self.instances: list[Instance] = []
        self.stopping = False
        self.trace: deque[str] = deque(maxlen=400)
        self.errors: list[str] = []
        self.recovery: Recovery | None = None
        self._random = random
        self._applications: dict[int, Process] = {}
        self._calm_from = 0.0
        self._writes = 0
        self._at_write: dict[int, Callable[[], None]] = {}
        self.database.on_write = self._written

    # -- for the nemesis

    def later(self, seconds: float, do: Callable[[], None]) -> None:
        """Do something after so many seconds."""
        self.loop.in_world(seconds, do)

    def note(self, text: str) -> None:
        """A line of the trace."""
        self.trace.append(f"{self.loop.now - 100:9.4f}  {text}")

    def on_next_write(self, count: int, do: Callable[[], None]) -> None:
        """Do something in the moment of the write after the next *count*."""
        self._at_write[self._writes + 1 + count] = do

    def _written(self, record: LogWrite) -> None:
        self._writes += 1
        self.note(f"database     {_words(record)}")
        do = self._at_write.pop(self._writes, None)
        if do is not None:
            self.loop.in_world(0.0, do)

    def holds_lease(self, instance: Instance) -> bool:
        """Whether *instance* was the last to take the lease."""
        return self.database.lease is not None and self.database.lease.holder == instance.host

    def database_back(self) -> None:
        """The database is there again."""
        self.database.away = False

    def database_fast(self) -> None:
        """The database is as fast as before."""
        self.database.slow = self.shape.database

    def broker_back(self) -> None:
        """The broker is started again."""
        if not self.broker.running:
            self.broker.start()

    def end_alarm(self) -> None:
        """The broker has memory again."""
        self.broker.set_alarm(False)

    def kill_application(self, whom: int) -> None:
        """An application dies; another one takes its place."""
        number = whom % self.shape.applications
        process = self._applications.get(number)
        if process is not None and process.alive:
            process.kill()
            self.network.died(process)
            if not self.stopping:
                self.later(0.5, lambda: self.start_application(number))

    def start_application(self, number: int) -> None:
        """An application begins to work."""
        process = self._applications[number] = Process(self.loop, f"application-{number}")
        hosts = [instance.host for instance in self.instances]
        application = Application(
            self.database, self.ledger, self._random, number, hosts, QUEUES, lambda: self.stopping,
            hesitates=self.shape.operators, joins=self.shape.joins,
        )  # fmt: skip
        process.spawn(application.run())

    def _start_others(self) -> None:
        """Whoever asks for what applications do not ask for."""
        hosts = [instance.host for instance in self.instances]
        for number in range(self.shape.explorers):
            explorer = Explorer(
                self.database, self.ledger, self._random, number, hosts, QUEUES, lambda: self.stopping, self._is_calm
            )
            Process(self.loop, f"explorer-{number}").spawn(explorer.run())
        if self.shape.hoards:
            hoarder = Hoarder(self.database, self.ledger, self._random, hosts, QUEUES, lambda: self.stopping)
            Process(self.loop, "hoarder").spawn(hoarder.run())

    def _is_calm(self) -> bool:
        """Whether the last trouble is over long since, and none waits for its moment."""
        return self.loop.now > self._calm_from and not self._at_write and not self.shape.refusing

    # -- the run

    def log(self, level: str, event: Mapping[str, Any]) -> NoReturn:
        """What dtx logs; a traceback is a bug of its."""
        if event.get("exc_info") or level == "exception":
            last = "".join(traceback.format_exception(sys.exception())[-3:])
            self.errors.append(f"{event.get('event')}: {last}")
        rest = " ".join(f"{key}={value}" for key, value in event.items() if key not in {"event", "part", "level"})
        self.note(f"{current().name:12} {event.get('event')} {rest}")
        raise structlog.DropEvent

    def prepare(self) -> None:
        """Start everything, and put messages into the queues."""
        if self.shape.broker:
            self.broker.start()
            for queue in QUEUES:
                limit = 12 if self.shape.refusing and queue == QUEUES[-1] else None
                self.broker.queues[queue] = Queue(queue, True, limit=limit)
        for index in range(self.shape.instances):
            instance = Instance(
                self.loop, self.network, self.database, f"127.0.0.{index + 1}", broker=self.shape.broker,
                replay=self.shape.replay,
            )  # fmt: skip
            self.instances.append(instance)
            self.later(index * 0.3, instance.start)
        for queue in QUEUES:
            for number in range(_SEEDS):
                body = b"seed-%b-%d" % (queue, number)
                self.ledger.seeds[body] = queue
                if self.shape.broker:
                    self.broker.enqueue(self.broker.queues[queue], b"", queue, *persistent_message(body))
        if not self.shape.broker:
            self._wait(self._operator().spawn(self._fill()))

    def _operator(self) -> Process:
        return Process(self.loop, "operator")

    async def _fill(self) -> None:
        client = await self._connected()
        for queue in QUEUES:
            await client.declare(queue)
        xid = Xid(1, b"seeds", b"")
        self.ledger.branches[xid] = Branch(
            xid,
            Process(self.loop, "operator"),
            decision="commit",
            answered=True,
            finished=True,
            working=False,
        )
        await client.start(xid)
        for body, queue in self.ledger.seeds.items():
            client.publish(queue, body)
        await client.end(xid)
        await client.commit(xid, one_phase=True)
        client.close()

    async def _connected(self) -> Client:
        client = Client([instance.host for instance in self.instances])
        while True:
            try:
                await client.open()
            except GONE:
                await asyncio.sleep(0.1)
            else:
                return client

    def _wait(self, task: Any) -> None:
        self.loop.run(task.done)
        task.result()

    def work(self, plan: Sequence[Trouble]) -> None:
        """Let the applications work while *plan* happens."""
        self.recovery = Recovery(
            self.database, self.ledger, self._random, [instance.host for instance in self.instances]
        )
        Process(self.loop, "tm").spawn(self.recovery.run())
        if self.shape.operators:
            operator = Operator(
                self.database, self.ledger, self._random, self.instances, QUEUES, lambda: self.stopping
            )  # fmt: skip
            Process(self.loop, "desk").spawn(operator.run())
        for number in range(self.shape.applications):
            self.start_application(number)
        self._start_others()
        begin = self.loop.now
        for trouble in plan:
            self.loop.call_at(begin + trouble.at, self._happen, trouble)
        end = begin + self.shape.seconds
        self.loop.call_at(end, lambda: None)
        self.loop.run(lambda: self.loop.now >= end)

    def _happen(self, trouble: Trouble) -> None:
        self.note(f"nemesis      {trouble.kind} (whom {trouble.whom}, {trouble.seconds:.3f} s)")
        self._calm_from = max(self._calm_from, self.loop.now + trouble.seconds + _AFTERMATH)
        nemesis.KINDS[trouble.kind](self, trouble)

    def rest(self) -> bool:
        """No more trouble and no more work: everything comes to its end, or not within a long time."""
        self.stopping = True
        self._at_write.clear()
        self.network.heal()
        self.database_back()
        self.database_fast()
        self.database.lost_answers = self.database.lost_groups = 0
        self.end_alarm()
        if self.shape.broker:
            self.broker_back()
            for queue in self.broker.queues.values():
                queue.limit = None  # an operator makes room for what is stuck
        for instance in self.instances:
            if instance.process is not None:
                instance.process.resume()
                instance.process.skew = 0.0
        until = self.loop.now + _REST
        self.loop.call_at(until, lambda: None)
        self.loop.run(lambda: self._at_rest() or self.loop.now >= until)
        return self._at_rest()

    def _at_rest(self) -> bool:
        return (
            not self.ledger.unfinished
            and not self.database.tables.database.rows
            and all(
                instance.process is None or not instance.process.paused for instance in self.instances
            )
            and not any(branch.owner.alive and branch.working for branch in self.ledger.branches.values())
        )  # fmt: skip

    def what_lies_there(self) -> Copies:
        """All messages in the queues, when nobody holds any."""
        if not self.shape.broker:
            for instance in self.instances:
                instance.kill()
            task = self._operator().spawn(self._drain())
            self._wait(task)
            return task.result()
        for process in (*self._applications.values(), *(instance.process for instance in self.instances)):
            if process is not None:
                process.kill()
                self.network.died(process)
        end = self.loop.now + 60.0
        self.loop.call_at(end, lambda: None)
        self.loop.run(lambda: self.loop.now >= end)
        return in_broker(self.broker)

    async def _drain(self) -> Copies:
        """Standalone: what a client is given after a restart of dtx."""
        copies: Copies = {}
        client = await self._connected()
        for queue in QUEUES:
            while (got := await client.get(queue)) is not None:
                copies.setdefault(got[1], []).append((queue, None))
        client.close()
        return copies


def _words(record: LogWrite) -> str:
    branch = getattr(record, "branch", None)
    to = getattr(record, "to", getattr(branch, "state", ""))
    return f"{type(record).__name__} {branch.xid if branch is not None else getattr(record, 'id', '')} {to}"


def simulate(seed: int, shape: Shape | None = None, plan: Sequence[Trouble] | None = None) -> Result:
    """Run the simulation.

    Args:
        seed: decides everything that is left to chance.
        shape: what it is about; default what the seed says.
        plan: what goes wrong; default what the seed draws.
    """
    shape = shape or shape_of(seed)
    if plan is None:
        plan = nemesis.draw(
            Random(f"plan {seed}"), shape.seconds, shape.troubles, broker=shape.broker, exact=shape.exact,
            kinds=shape.kinds,
        )  # fmt: skip
    result = Result(seed, shape, tuple(plan))
    random = Random(seed)
    with scheduler(random) as loop:
        sim = Simulation(loop, shape, random)
        with simulated(loop, sim.database, sim.broker, sim.log):
            try:
                sim.prepare()
                sim.work(plan)
                rested = sim.rest()
                if not rested:
                    unfinished = [str(branch.xid) for branch in sim.ledger.unfinished]
                    sim.ledger.wrong(f"not at rest after {_REST:g} s; unfinished: {unfinished}")
                exact = shape.exact and not sim.broker.restarts and not sim.broker.refusals
                verdict = judge(sim.ledger, sim.database, sim.what_lies_there(), exact=exact)
                result.violations = verdict.violations
                result.repeated = verdict.repeated
            except Exception as error:
                result.violations = [*sim.ledger.violations, f"the run failed: {type(error).__name__} {error}"]
                raise
            result.violations += [f"logged with a traceback: {text}" for text in sim.errors]
            result.violations += [f"not handled: {text}" for text in loop.failures]
            result.steps = loop.steps
            result.seconds = loop.now - 100
            result.branches = len(sim.ledger.branches)
            result.answers = sim.ledger.answers
            result.trace = list(sim.trace)
    return result


def shrink(result: Result, *, fails: Callable[[Result], bool] = lambda result: result.failed) -> Result:
    """Leave out what goes wrong, event by event, as long as the run still fails."""
    smallest = result
    shorter = True
    while shorter:
        shorter = False
        for index in range(len(smallest.plan)):
            plan = smallest.plan[:index] + smallest.plan[index + 1 :]
            tried = simulate(result.seed, replace(smallest.shape), plan)
            if fails(tried):
                smallest, shorter = tried, True
                break
    return smallest
