"""One run of the simulation: its seed, its shape and its result."""

import asyncio
import sys
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Final, NoReturn
from uuid import UUID

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
from tests.evidence.sim.instance import Instance
from tests.evidence.sim.ledger import Branch, Delivered, Ledger
from tests.evidence.sim.many_branches import ManyBranches
from tests.evidence.sim.nemesis import Trouble
from tests.evidence.sim.network import Network
from tests.evidence.sim.operators import Operator
from tests.evidence.sim.readers import Reader, drain
from tests.evidence.sim.scheduler import Process, SimLoop, current, scheduler
from tests.evidence.sim.world import simulated

QUEUES: Final = [b"q0", b"q1", b"q2"]
_SEEDS: Final = 8
"""Number of initial messages in each queue."""
_REST: Final = 600.0
"""Limit of seconds until all branches have ended after the last fault."""
_STOPPED: Final = 60.0
"""Seconds between the end of all processes and the look at the queues."""
_AFTERMATH: Final = 20.0
"""Seconds after its end in which a fault may still have effects: leases expire, heartbeats are missed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The parameters of a run.

    Args:
        broker: alongside a broker; otherwise standalone.
        replay: see the setting.
        instances: number of dtx, on one database.
        applications: number of concurrent applications.
        seconds: duration of work and faults.
        troubles: number of faults.
        exact: no faults that make dtx repeat messages.
        refusing: the last queue refuses messages above a limit.
        database: usual limit of the database's delay in seconds.
        kinds: of faults; empty: all.
        forgets_acks: a broker that dies also forgets the last acks.
        operators: an operator gives orders about branches in doubt.
        joins: share of branches that a second connection joins.
        explorers: number of applications that suspend, fail and time out.
        hoards: a transaction manager has more branches in doubt than a page of recover holds.
        readers: number of consumers outside of any branch.
        members: all dtx are active, and applications send votes and outcomes to any of them.
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
    readers: int = 0
    members: bool = False

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
                (self.members, ", members"),
                (self.hoards, ", a hoarder"),
                (bool(self.readers), f", {self.readers} readers"),
            )
            if on
        )
        return f"{mode}, {self.instances} dtx, {self.applications} applications{more}"


def shape_of(seed: int) -> Shape:
    """Return the shape for a seed: every fourth is standalone, and some brokers die."""
    random = Random(f"shape {seed}")
    broker = seed % 4 != 3
    exact = not broker or random.random() < 0.6
    replay = random.choice(("auto", "auto", "receipts", "always")) if broker else "auto"
    refusing = not exact and random.random() < 0.4 and replay != "receipts"  # docs/explanation/limits excludes receipts
    if broker and random.random() < 0.25:
        return members_shape(random)
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
        readers=random.choice((0, 1, 1, 2)) if broker else 0,
    )


def members_shape(random: Random) -> Shape:
    """Return a shape with three members; in some runs they send messages again."""
    again = random.random() < 0.3
    return Shape(
        replay="always" if again else "auto",
        exact=not again,
        readers=random.choice((0, 1, 2)),
        instances=3,
        applications=random.choice((2, 3, 4)),
        troubles=random.choice((3, 6, 10, 20)),
        database=random.choice((0.0005, 0.001, 0.01)),
        operators=random.random() < 0.3,
        joins=0.1,
        members=True,
    )


@dataclass(slots=True)
class Result:
    """The result of a run.

    Args:
        seed, shape, plan: its parameters.
        steps: number of executed callbacks.
        seconds: simulated duration.
        violations: descriptions of broken invariants.
        repeated: number of surplus copies, in queues or consumed.
        suppressed: number of copies that dtx has kept from consumers.
        branches: number of branches.
        takeovers: number of members whose branches others have taken, without those that stopped in order.
        handovers: number of members that stopped in order.
        answers: number of each kind of answer of dtx.
        trace: the last lines of the trace.
    """

    seed: int
    shape: Shape
    plan: tuple[Trouble, ...]
    steps: int = 0
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)
    repeated: int = 0
    suppressed: int = 0
    branches: int = 0
    takeovers: int = 0
    handovers: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    trace: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether there are violations."""
        return bool(self.violations)


class Simulation:
    """All participants of one run.

    Args:
        loop: the scheduler.
        shape: the parameters of the run.
        random: source of random choices.
    """

    def __init__(self, loop: SimLoop, shape: Shape, random: Random) -> None:
        self.loop = loop
        self.shape = shape
        self.network = Network(loop)
        self.database = SimDatabase(loop, slow=shape.database)
        self.broker = SimBroker(loop, self.network, forgets_acks=shape.forgets_acks, numbers_copies=True)
        self.ledger = Ledger()
        self.instances: list[Instance] = []
        self.stopping = False
        self.trace: deque[str] = deque(maxlen=400)
        self.errors: list[str] = []
        self.recovery: Recovery | None = None
        self.unproved = False
        """Whether dtx may have repeated messages because of an alarm of the broker."""
        self._random = random
        self._applications: dict[int, Process] = {}
        self._readers: list[Process] = []
        self._calm_from = 0.0
        self._writes = 0
        self._at_write: dict[int, Callable[[], None]] = {}
        self.database.on_write = self._written

    # -- for the nemesis

    def later(self, seconds: float, do: Callable[[], None]) -> None:
        """Call *do* after *seconds*, whichever processes are dead by then."""
        self.loop.in_world(seconds, do)

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        self.trace.append(f"{self.loop.now - 100:9.4f}  {text}")

    def on_next_write(self, count: int, do: Callable[[], None]) -> None:
        """Call *do* at the write after the next *count* writes."""
        self._at_write[self._writes + 1 + count] = do

    def _written(self, record: LogWrite) -> None:
        self._writes += 1
        self.note(f"database     {_words(record)}")
        do = self._at_write.pop(self._writes, None)
        if do is not None:
            self.loop.in_world(0.0, do)

    def holds_lease(self, instance: Instance) -> bool:
        """Whether *instance* was the last to take the lease; of members, whether it was the last to write."""
        if self.shape.members:
            return bool(self.database.written) and self.database.written[-1][2] == instance.host
        return self.database.lease is not None and self.database.lease.holder == instance.host

    def database_back(self) -> None:
        """End the outage of the database."""
        self.database.away = False

    def database_fast(self) -> None:
        """Reset the speed of the database."""
        self.database.slow = self.shape.database

    def broker_back(self) -> None:
        """Start the broker again."""
        if not self.broker.running:
            self.broker.start()

    def end_alarm(self) -> None:
        """End the memory alarm of the broker."""
        self.broker.set_alarm(False)

    def kill_application(self, whom: int) -> None:
        """Kill an application, and start another one half a second later."""
        number = whom % self.shape.applications
        process = self._applications.get(number)
        if process is not None and process.alive:
            process.kill()
            self.network.died(process)
            if not self.stopping:
                self.later(0.5, lambda: self.start_application(number))

    def start_application(self, number: int) -> None:
        """Start an application."""
        process = self._applications[number] = Process(self.loop, f"application-{number}")
        hosts = [instance.host for instance in self.instances]
        application = Application(
            self.database, self.ledger, self._random, number, hosts, QUEUES, lambda: self.stopping,
            hesitates=self.shape.operators, joins=self.shape.joins,
            holders=self.holders if self.shape.members else None,
        )  # fmt: skip
        process.spawn(application.run())

    def holders(self, xid: Xid) -> frozenset[UUID]:
        """The members that have *xid* in memory, and whose branches no other one has taken."""
        return frozenset(filter(None, (instance.has(xid) for instance in self.instances)))

    def _start_others(self) -> None:
        """Start explorers, readers, and the hoarder if the shape has one."""
        hosts = [instance.host for instance in self.instances]
        for number in range(self.shape.explorers):
            explorer = Explorer(
                self.database, self.ledger, self._random, number, hosts, QUEUES, lambda: self.stopping, self._is_calm
            )
            Process(self.loop, f"explorer-{number}").spawn(explorer.run())
        for number in range(self.shape.readers):
            reader = Reader(self.ledger, self._random, hosts, QUEUES, lambda: self.stopping)
            self._readers.append(Process(self.loop, f"reader-{number}"))
            self._readers[-1].spawn(reader.run())
        if self.shape.hoards:
            hoarder = ManyBranches(self.database, self.ledger, self._random, hosts, QUEUES, lambda: self.stopping)
            Process(self.loop, "hoarder").spawn(hoarder.run())

    def _is_calm(self) -> bool:
        """Whether the effects of the last fault have ended, and none waits for a write."""
        return self.loop.now > self._calm_from and not self._at_write and not self.shape.refusing

    # -- the run

    def log(self, level: str, event: Mapping[str, Any]) -> NoReturn:
        """Add a log event of dtx to the trace; a traceback is a violation."""
        if event.get("exc_info") or level == "exception":
            last = "".join(traceback.format_exception(sys.exception())[-3:])
            self.errors.append(f"{event.get('event')}: {last}")
        rest = " ".join(f"{key}={value}" for key, value in event.items() if key not in {"event", "part", "level"})
        self.note(f"{current().name:12} {event.get('event')} {rest}")
        # A broker with an alarm takes no receipt: then the outcome of a unit may remain unknown.
        self.unproved |= self.broker.alarms > 0 and event.get("event") == "messages may have been repeated"
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
                replay=self.shape.replay, is_member=self.shape.members,
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
        """Run the applications during the faults of *plan*."""
        self.recovery = Recovery(
            self.database, self.ledger, self._random, [instance.host for instance in self.instances],
            holders=self.holders if self.shape.members else None,
        )  # fmt: skip
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
        """End faults and work; return whether all branches have ended within :data:`_REST` seconds."""
        self.stopping = True
        self._at_write.clear()
        self.network.heal()
        self.database_back()
        self.database.unite()
        self.database_fast()
        self.database.lost_answers = self.database.lost_groups = 0
        self.end_alarm()
        if self.shape.broker:
            self.broker_back()
            for queue in self.broker.queues.values():
                queue.limit = None  # an operator makes room for stuck branches
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
        """Return all messages in the queues after all processes were killed."""
        if not self.shape.broker:
            for instance in self.instances:
                instance.kill()
            task = self._operator().spawn(self._drain())
            self._wait(task)
            return task.result()
        for process in (*self._applications.values(), *self._readers):
            process.kill()
            self.network.died(process)
        for instance in self.instances:
            instance.kill(again=_STOPPED)
        end = self.loop.now + _STOPPED
        self.loop.call_at(end, lambda: None)
        self.loop.run(lambda: self.loop.now >= end)
        return in_broker(self.broker)

    def what_consumers_get(self) -> list[Delivered]:
        """Empty the queues of the broker through a new dtx."""
        hosts = [instance.host for instance in self.instances]
        task = Process(self.loop, "consumers").spawn(drain(self.broker, lambda: Client(hosts), self._random, QUEUES))
        self._wait(task)
        got, is_empty = task.result()
        if not is_empty:
            self.ledger.wrong("consumers do not get all messages of the queues")
        return got

    async def _drain(self) -> Copies:
        """Standalone: consume all messages after a restart of dtx."""
        copies: Copies = {}
        client = await self._connected()
        for queue in QUEUES:
            while (got := await client.get(queue)) is not None:
                copies.setdefault(got.body, []).append(got)
        client.close()
        return copies


def _words(record: LogWrite) -> str:
    branch = getattr(record, "branch", None)
    to = getattr(record, "to", getattr(branch, "state", ""))
    return f"{type(record).__name__} {branch.xid if branch is not None else getattr(record, 'id', '')} {to}"


def simulate(seed: int, shape: Shape | None = None, plan: Sequence[Trouble] | None = None) -> Result:
    """Run the simulation.

    Args:
        seed: determines all random choices.
        shape: default: that of the seed.
        plan: the faults; default: those that the seed draws.
    """
    shape = shape or shape_of(seed)
    if plan is None:
        plan = nemesis.draw(
            Random(f"plan {seed}"), shape.seconds, shape.troubles, broker=shape.broker, exact=shape.exact,
            members=shape.members, kinds=shape.kinds,
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
                exact = shape.exact and not (sim.broker.restarts or sim.broker.refusals or sim.unproved)
                copies = sim.what_lies_there()
                got = sim.what_consumers_get() if shape.broker else []
                verdict = judge(sim.ledger, sim.database, sim.broker, copies, got, exact=exact)
                result.violations = verdict.violations
                result.repeated = verdict.repeated
                result.suppressed = len(sim.database.tables.database.duplicates)
            except Exception as error:
                result.violations = [*sim.ledger.violations, f"the run failed: {type(error).__name__} {error}"]
                raise
            result.violations += [f"logged with a traceback: {text}" for text in sim.errors]
            result.violations += [f"not handled: {text}" for text in loop.failures]
            result.steps = loop.steps
            result.seconds = loop.now - 100
            result.branches = len(sim.ledger.branches)
            result.takeovers = sim.database.members.takeovers
            result.handovers = sum(instance.stops for instance in sim.instances)
            result.answers = sim.ledger.answers
            result.trace = list(sim.trace)
    return result


def shrink(result: Result, *, fails: Callable[[Result], bool] = lambda result: result.failed) -> Result:
    """Remove faults from the plan one by one, as long as the run still fails."""
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
