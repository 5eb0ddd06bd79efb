"""Mutations of dtx: each must be found, otherwise the simulation proves nothing."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from unittest.mock import patch

from dtx.log import writer
from dtx.log.postgres import PostgresTransactionLog
from dtx.log.records import BranchRecord, Lookup, Redirect, Unit, WorkKind, redirected
from dtx.log.statements import WriteSequence
from dtx.manager import effects
from dtx.manager.branch_persistence import BrokerPersistence
from dtx.manager.branch_runtime import Activity, BranchRuntime
from dtx.manager.broker import BrokerEffects
from dtx.manager.effects import Effects, Reply, Steps
from dtx.manager.local_persistence import LocalPersistence
from dtx.manager.maintenance import Maintenance
from dtx.manager.operators import Done, OperatorAction, Operators, Order
from dtx.store.api import UnitOutcome, UnitProgress
from dtx.store.postgres.store import PostgresStore
from dtx.store.rabbitmq.commit_connection import CommitConnection
from dtx.store.rabbitmq.receipts import Receipts, ReceiptScan
from dtx.xa.branch import Branch
from dtx.xa.codes import Heuristic, XaFlag
from dtx.xa.model import Answer, Complete, Effect, Happened, Operation, Persist, Request, State
from tests.evidence.sim.broker_session import BrokerChannel
from tests.evidence.sim.run import Shape

Change = tuple[Any, str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One mutation.

    Args:
        name: the mistake, in words.
        changes: object, attribute and new value of each patch.
        shape: of the runs that must find it.
        seeds: number of seeds, one of which must find it.
        first: the first of these seeds, to skip many that do not find it.
    """

    name: str
    changes: Callable[[], Sequence[Change]]
    shape: Shape
    seeds: int = 150
    first: int = 0

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Patch dtx during the block."""
        patches = [patch.object(where, what, by) for where, what, by in self.changes()]
        for change in patches:
            change.start()
        try:
            yield
        finally:
            for change in reversed(patches):
                change.stop()


_KILLED: Final = ("the active dtx is killed at a write", "dtx is killed")
_ALONGSIDE: Final = Shape(troubles=10, kinds=_KILLED)
_SLOW: Final = Shape(troubles=4, kinds=_KILLED, database=0.05)
_BROKER_DIES: Final = Shape(troubles=8, exact=False, readers=2, kinds=("the broker is killed", *_KILLED))
_SEPARATED: Final = Shape(troubles=10, kinds=("dtx and the broker are separated", "dtx is stopped", *_KILLED))
_LOST: Final = Shape(troubles=20, kinds=("dtx loses its connections to the broker",))
_AGAIN: Final = Shape(
    troubles=20, kinds=("dtx loses the broker at a write and is killed", "dtx loses its connections to the broker")
)
_LONG_WAITS: Final = Shape(troubles=8, kinds=("the database is away", "the active dtx is killed at a write"))
_AWAY: Final = Shape(troubles=3, kinds=("the database is away for long",))
_IN_PART: Final = Shape(troubles=40, joins=0.9, kinds=("a connection to the broker breaks at a write",))
_ORDERS: Final = Shape(troubles=10, operators=True, kinds=_KILLED, database=0.02)
_REFUSED: Final = Shape(troubles=4, operators=True, exact=False, refusing=True, kinds=_KILLED)
_WRITE_LOST: Final = Shape(
    broker=False, troubles=30, applications=6, database=0.05, kinds=("a write is neither done nor answered",)
)
_STANDALONE: Final = Shape(broker=False, troubles=6, database=0.05, kinds=_KILLED)


def _answer_first() -> Sequence[Change]:
    """The answer is sent before the write that it depends on."""
    step: Any = effects.__dict__["step"]

    def hasty(*args: Any) -> tuple[Any, tuple[Effect, ...]]:
        branch, planned = step(*args)
        answers = tuple(effect for effect in planned if isinstance(effect, Answer))
        if answers and any(isinstance(effect, (Persist, Complete)) for effect in planned):
            planned = (*answers, *(effect for effect in planned if not isinstance(effect, Answer)))
        return branch, planned

    return [(effects, "step", hasty)]


def _no_decision() -> Sequence[Change]:
    """Phase two begins before the decision is in the log."""
    return [_without_the_write_of(State.COMMITTING)]


def _without_the_write_of(*states: State) -> Change:
    """A transition to one of *states* is in memory, but not in the log."""
    steps = Effects._steps

    def forgetful(
        self: Effects, entry: BranchRuntime, branch: Branch, planned: Sequence[Effect], reply: Reply, actor: str
    ) -> Steps:
        first = planned[0] if planned else None
        if entry.record is not None and isinstance(first, Persist) and first.state in states:
            assert isinstance(self._durable, BrokerPersistence)
            unit = self._durable._store.next_unit(entry.vhost)
            entry.record = entry.record._replace(units=(unit,), outcome=first.outcome)
            entry.branch = branch
            planned = planned[1:]
        return steps(self, entry, branch, planned, reply, actor)

    return Effects, "_steps", forgetful


def _no_lock() -> Sequence[Change]:
    """The outcome of a unit is determined while the connection that sent it can still have an effect."""

    async def at_once(self: CommitConnection, lock: str) -> None:
        await asyncio.sleep(0)

    return [(CommitConnection, "_until_free", at_once)]


def _lock_of_the_connection() -> Sequence[Change]:
    """A lock ends with its connection, like an exclusive queue, not with the last channel that can have an effect."""
    ended = BrokerChannel.connection_ended

    def early(self: BrokerChannel, gone: float) -> None:
        def release() -> None:
            for tag, queue in self.consumers.items():
                if tag.startswith(b"dtx.lock."):
                    queue.consumers = [consumer for consumer in queue.consumers if consumer.channel is not self]

        self.broker.process.call(gone, release)
        ended(self, gone)

    return [(BrokerChannel, "connection_ended", early)]


def _marker_ignored() -> Sequence[Change]:
    """A missing receipt is a proof even after a restart of the broker."""
    left_by = Receipts.left_by

    async def believing(self: Receipts, lock: str, upstream: Any) -> ReceiptScan:
        found = await left_by(self, lock, upstream)
        return ReceiptScan(found.nonces, _Everything())

    return [(Receipts, "left_by", believing)]


def _out_of_turn() -> Sequence[Change]:
    """A group is written although the group before it was not."""
    return [(writer, "WriteSequence", lambda mine, _: WriteSequence(mine, 0))]


class _Everything(frozenset[str]):
    def __contains__(self, _: object) -> bool:
        return True


def _unknown_is_never() -> Sequence[Change]:
    """A unit with an unknown outcome counts as not applied."""
    resolve = CommitConnection.resolve

    async def sure(self: CommitConnection, unit: Unit) -> UnitOutcome:
        outcome = await resolve(self, unit)
        return UnitOutcome.NEVER if outcome is UnitOutcome.UNKNOWN else outcome

    return [(CommitConnection, "resolve", sure)]


def _always_again() -> Sequence[Change]:
    """A unit whose connection was lost is repeated without a check."""

    async def never(self: CommitConnection, unit: Unit) -> UnitOutcome:
        return UnitOutcome.NEVER

    return [(CommitConnection, "resolve", never)]


def _log_not_read() -> Sequence[Change]:
    """A start does not read the log, and a branch that is not in memory counts as unknown."""

    async def load(self: PostgresTransactionLog) -> AsyncIterator[BranchRecord]:
        nothing: list[BranchRecord] = []
        for record in nothing:
            yield record

    async def lookup(self: PostgresTransactionLog, vhost: str, xid: Any, branch_id: Any = None) -> Lookup:
        return Lookup()

    return [(PostgresTransactionLog, "load", load), (PostgresTransactionLog, "lookup", lookup)]


def _not_put_back() -> Sequence[Change]:
    """Consumed messages of a branch that is rolled back are not put back."""
    return [(BrokerEffects, "put_back", _pretend("put-back"))]


def _pretend(operation: str) -> Any:
    async def done(self: BrokerEffects, entry: BranchRuntime) -> Any:
        return Happened(operation=Operation(operation), vote=self._durable.vote(entry))

    return done


def _shown_early() -> Sequence[Change]:
    """Standalone: messages of a prepared branch are visible before its commit."""
    entered = LocalPersistence._apply_insert

    def hasty(self: LocalPersistence, entry: BranchRuntime, vote: Any) -> None:
        entered(self, entry, vote)
        record = entry.record
        assert record is not None
        self._store.committed(record.published or (), ())

    return [(LocalPersistence, "_apply_insert", hasty)]


def _not_hidden() -> Sequence[Change]:
    """Standalone: a restart makes messages visible that prepared branches hold."""
    return [(PostgresStore, "restore", lambda *_: None)]


def _unit_not_logged() -> Sequence[Change]:
    """A unit that replaces a lost one is in memory, but not in the log."""

    async def forgetful(self: BrokerPersistence, entry: BranchRuntime, unit: Unit, _: object) -> None:
        assert entry.record is not None
        others = (other for other in entry.record.units if other.number != unit.number)
        entry.record = entry.record._replace(units=(*others, unit))
        entry.progress = UnitProgress.SENT

    return [(BrokerPersistence, "assign", forgetful)]


def _purged_early() -> Sequence[Change]:
    """Receipts are purged before the log has the completion that they prove."""
    use = Receipts.use

    def hasty(self: Receipts, unit: Unit) -> bytes:
        queue = use(self, unit)
        self.logged(unit)
        return queue

    return [(Receipts, "use", hasty)]


def _no_doubt() -> Sequence[Change]:
    """A write with an unknown outcome counts as not done."""
    failed = BrokerPersistence.failed

    def sure(self: BrokerPersistence, entry: BranchRuntime, *rest: Any) -> Any:
        error = failed(self, entry, *rest)
        entry._activity = Activity.RUNNING
        return error

    return [(BrokerPersistence, "failed", sure)]


def _never_taken_put_back() -> Sequence[Change]:
    """A partially applied branch puts back messages that never left their queue."""

    def everything(self: BrokerPersistence, entry: BranchRuntime) -> tuple[int, ...]:
        return tuple(work.position for work in entry.cached or () if work.kind is WorkKind.PUBLISH)

    return [(BrokerPersistence, "_not_taken", everything)]


def _one_outcome() -> Sequence[Change]:
    """Every heuristic outcome is answered as committed."""
    return [(Heuristic, "flag", property(lambda _: XaFlag.HEURCOM))]


def _forgets_by_itself() -> Sequence[Change]:
    """Operators: an order is carried out before it is in the log."""
    return [_without_the_write_of(State.HEURISTIC_COMMITTING, State.HEURISTIC_ROLLING_BACK)]


def _goes_where_it_was_to_go() -> Sequence[Change]:
    """Operators: a redirect does not change the copy in memory."""
    redirect = BrokerPersistence.redirect

    async def stale(self: BrokerPersistence, entry: BranchRuntime, *rest: Any) -> None:
        cached = entry.cached
        await redirect(self, entry, *rest)
        entry.cached = cached

    return [(BrokerPersistence, "redirect", stale)]


def _redirected_in_memory() -> Sequence[Change]:
    """Operators: a redirect is not in the log."""

    async def forgetful(self: BrokerPersistence, entry: BranchRuntime, to: Redirect, *_: Any) -> None:
        if entry.cached is not None:
            entry.cached = [redirected(item, to) if item.position == to.position else item for item in entry.cached]

    return [(BrokerPersistence, "redirect", forgetful)]


def _retried_in_vain() -> Sequence[Change]:
    """Operators: a retry is answered as done when it begins."""
    carry_out = Operators.carry_out

    async def hasty(self: Operators, order: Order) -> Done:
        if order.action is not OperatorAction.RETRY:
            return await carry_out(self, order)
        forecast = await self.forecast(order)
        return Done(forecast=forecast, answer="xa-ok", state=forecast.becomes, version=None)

    return [(Operators, "carry_out", hasty)]


def _impatient(state: State, operation: Operation) -> Sequence[Change]:
    """Every few seconds dtx carries out *operation* on branches in *state* without a request."""
    resume_decided = Maintenance._resume_decided

    async def impatient(self: Maintenance) -> None:
        for entry in list(self._branches):
            if entry.branch.state is state and entry.idle:
                entry.claim()
                event = Request(operation=operation, vote=self._durable.vote(entry))
                self._spawn(self._run(entry, event, lambda _: None, "dtx"))
        await resume_decided(self)

    return [(Maintenance, "_resume_decided", impatient)]


def _prepared_times_out() -> Sequence[Change]:
    """A prepared branch is rolled back without a request."""
    return _impatient(State.PREPARED, Operation.ROLLBACK)


def _outcomes_are_forgotten() -> Sequence[Change]:
    """A heuristic outcome is forgotten before a transaction manager has received it."""
    return _impatient(State.HEURISTIC, Operation.FORGET)


MUTATIONS: Final = (
    Mutation(name="an answer before its write", changes=_answer_first, shape=_SLOW),
    Mutation(name="an answer before its write, standalone", changes=_answer_first, shape=_STANDALONE),
    Mutation(name="phase two without a decision", changes=_no_decision, shape=_SLOW),
    Mutation(name="locks are not waited for", changes=_no_lock, shape=_SEPARATED),
    Mutation(name="locks end with connections", changes=_lock_of_the_connection, shape=_LOST),
    Mutation(name="a broker's restart is overlooked", changes=_marker_ignored, shape=_BROKER_DIES),
    Mutation(name="unknown is taken for never", changes=_unknown_is_never, shape=_BROKER_DIES),
    Mutation(name="units are repeated without asking", changes=_always_again, shape=_LOST),
    Mutation(name="404 without a look at the log", changes=_log_not_read, shape=_ALONGSIDE),
    Mutation(name="nothing is put back", changes=_not_put_back, shape=_SLOW),
    Mutation(name="prepared messages are seen", changes=_shown_early, shape=_STANDALONE),
    Mutation(name="a new unit is not in the log", changes=_unit_not_logged, shape=_AGAIN),
    Mutation(name="receipts are purged too early", changes=_purged_early, shape=_LONG_WAITS),
    Mutation(name="a group is written out of turn", changes=_out_of_turn, shape=_WRITE_LOST),
    Mutation(name="unknown writes are taken for none", changes=_no_doubt, shape=_AWAY),
    Mutation(name="what was never taken is put back", changes=_never_taken_put_back, shape=_IN_PART),
    Mutation(name="one outcome for all orders", changes=_one_outcome, shape=_ORDERS),
    Mutation(name="orders are not in the log", changes=_forgets_by_itself, shape=_ORDERS),
    Mutation(name="a redirected message goes where it was to go", changes=_goes_where_it_was_to_go, shape=_REFUSED),
    Mutation(name="redirects are not in the log", changes=_redirected_in_memory, shape=_REFUSED),
    Mutation(name="a retry is done when it has begun", changes=_retried_in_vain, shape=_REFUSED),
    Mutation(name="what is prepared times out", changes=_prepared_times_out, shape=Shape(troubles=1)),
    Mutation(name="heuristic outcomes are forgotten", changes=_outcomes_are_forgotten, shape=_ORDERS, first=20),
    Mutation(name="a restart shows what branches hold", changes=_not_hidden, shape=_STANDALONE),
)
