"""Orders of operators: the decision is durable first; work, answer to the transaction manager and archive follow."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

import pytest

from dtx.log.records import BranchRecord, Fate, JournalEvent, LogState, Redirect, Unit, WorkKind, WorkRow
from dtx.manager import BranchManager, Limits, Requester, maintenance
from dtx.manager.operators import Done, OperatorAction, Operators, Order
from dtx.store.api import Applied, PhaseTwo, Refused, UnitOutcome, UnitProgress
from dtx.store.work import HeldWork, Holder
from dtx.telemetry import Metrics
from dtx.xa.codes import Heuristic, ReplyCode, XaError, XaFlag
from dtx.xa.model import Operation, State
from tests.support.branches import a_branch, a_consume, a_publish, a_unit, an_insert
from tests.support.memory_log import Fault, MemoryDatabase, MemoryLog
from tests.unit.manager.requests import answer_of

TM = Requester("guest", "/")


@dataclass
class Broker:
    """A BrokerStore that accepts all messages except those in *refused*, and records where they were sent."""

    seen: list[tuple[bytes, bytes]] = field(default_factory=list)
    refused: dict[bytes, Refused] = field(default_factory=dict)
    on_refused: Callable[[], None] | None = None
    """Called at the first refusal. Only the first one settles messages."""
    answering: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.answering.set()

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    def expect(self, branch_id: UUID, vhost: str, unit: Unit) -> None: ...

    def next_unit(self, vhost: str) -> Unit:
        return a_unit(0)

    def units_to_take(self, vhost: str, work: HeldWork) -> dict[Holder, Unit]:
        raise AssertionError("nothing is prepared here")

    async def take(self, branch_id: UUID, vhost: str, units: Sequence[Unit], work: HeldWork) -> dict[int, UnitOutcome]:
        raise AssertionError("nothing is prepared here")

    async def resolve(self, vhost: str, unit: Unit) -> UnitOutcome:
        return UnitOutcome.NEVER

    async def apply(self, phase: PhaseTwo) -> Applied | Refused:
        return await self._send(phase, WorkKind.PUBLISH)

    async def put_back(self, phase: PhaseTwo) -> Applied | Refused:
        return await self._send(phase, WorkKind.CONSUME)

    async def _send(self, phase: PhaseTwo, kind: WorkKind) -> Applied | Refused:
        await self.answering.wait()
        if phase.progress is UnitProgress.REFUSED:
            await phase.assign(self.next_unit(phase.vhost), ())
        work = [item for item in await phase.work() if item.kind is kind]
        for item in work:
            where = item.exchange if item.queue is None else item.queue
            if where in self.refused:
                on_refused, self.on_refused = self.on_refused, None
                if on_refused is None:
                    return self.refused[where]
                on_refused()
                now, self.refused[where] = self.refused[where], replace(self.refused[where], settled=())
                return now
        self.seen += [((item.exchange if item.queue is None else item.queue), item.body) for item in work]
        return Applied()

    async def note_taken(
        self, branch_id: UUID, vhost: str, taken: Sequence[WorkRow], unknown: Sequence[WorkRow]
    ) -> None: ...

    def logged(self, vhost: str, unit: Unit) -> None: ...

    def ended(self, branch_id: UUID) -> None: ...


class Stand:
    """A manager over a broker, with one branch in its log."""

    def __init__(self) -> None:
        self.database = MemoryDatabase()
        self.broker = Broker()
        self.branch = a_branch()

    async def start(self, limits: Limits | None = None) -> None:
        self.log = MemoryLog("rm", self.database)
        await self.log.open()
        self.manager = BranchManager(self.log, self.broker, limits or Limits(), Metrics())
        await self.manager.start()
        self.operators = Operators(self.manager)

    async def restart(self) -> None:
        await self.manager.close()
        self.log.crash()
        await self.start()

    async def holds(self, *work: WorkRow, state: LogState = LogState.PREPARED, **changes: Any) -> None:
        """Write a branch with *work* to the log before dtx starts."""
        publishes = sum(item.kind is WorkKind.PUBLISH for item in work)
        self.branch = a_branch(state=state, publishes=publishes, consumes=len(work) - publishes, **changes)
        log = MemoryLog("rm", self.database)
        await log.open()
        await log.write(replace(an_insert(self.branch, *work), journal=None))
        await log.close()
        await self.start()

    def order(self, action: OperatorAction, **changes: Any) -> Order:
        values: dict[str, Any] = {"actor": "olga", "reason": "the site is lost", "vhost": "/", "xid": self.branch.xid}
        return Order(action=action, **(values | changes))

    async def do(self, action: OperatorAction, **changes: Any) -> Done:
        return await self.operators.carry_out(self.order(action, **changes))

    async def refusal(self, action: OperatorAction, **changes: Any) -> XaError:
        with pytest.raises(XaError) as caught:
            await self.do(action, **changes)
        with pytest.raises(XaError) as dry:
            await self.operators.forecast(self.order(action, **changes))
        assert dry.value.code is caught.value.code
        return caught.value

    async def ask(self, operation: Operation) -> XaFlag | ReplyCode:
        """Send a request as the transaction manager."""
        return await answer_of(self.manager, TM, self.branch.xid, operation)

    @property
    def record(self) -> BranchRecord | None:
        """The durable record of the branch."""
        row = self.database.rows.get(self.branch.id)
        return None if row is None else row.branch

    @property
    def fates(self) -> dict[int, Fate | None]:
        return {position: work.fate for position, work in self.database.rows[self.branch.id].work.items()}

    @property
    def journal(self) -> list[tuple[JournalEvent, str, str | None, Heuristic | None]]:
        return [(line.event, line.actor, line.reason, line.outcome) for _, line in self.database.journal]


@pytest.fixture
async def stand() -> AsyncIterator[Stand]:
    stand = Stand()
    yield stand
    await stand.manager.close()


REASON = "the site is lost"
BOTH = (a_publish(0, exchange=b"x", body=b"a"), a_consume(1, queue=b"q", body=b"b"))


async def test_a_heuristic_commit_publishes_and_is_reported_later(stand: Stand) -> None:
    await stand.holds(*BOTH)
    done = await stand.do(OperatorAction.COMMIT)
    assert (done.answer, done.state) == ("xa-heurcom", State.HEURISTIC)
    assert stand.broker.seen == [(b"x", b"a")]
    assert stand.fates == {0: Fate.PUBLISHED, 1: Fate.CONSUMED}
    assert stand.journal == [
        (JournalEvent.DECIDED, "olga", REASON, Heuristic.COMMITTED),
        (JournalEvent.HEURISTIC, "olga", REASON, Heuristic.COMMITTED),
    ]
    for _ in range(2):
        assert await stand.ask(Operation.COMMIT) is XaFlag.HEURCOM
        assert await stand.ask(Operation.ROLLBACK) is XaFlag.HEURCOM
        await stand.restart()
    assert await stand.ask(Operation.FORGET) is XaFlag.OK
    assert await stand.ask(Operation.COMMIT) is ReplyCode.NOT_FOUND
    assert await stand.log.read_archive(stand.branch.xid) == []
    assert stand.broker.seen == [(b"x", b"a")]


async def test_a_heuristic_rollback_puts_back_and_forget_archives_publishes(stand: Stand) -> None:
    await stand.holds(*BOTH)
    done = await stand.do(OperatorAction.ROLLBACK)
    assert (done.answer, done.forecast.archived) == ("xa-heurrb", 1)
    assert stand.broker.seen == [(b"q", b"b")]
    assert stand.fates == {0: Fate.DROPPED, 1: Fate.PUT_BACK}
    assert await stand.ask(Operation.COMMIT) is XaFlag.HEURRB
    done = await stand.do(OperatorAction.FORGET)
    assert (done.answer, done.state, done.version, done.forecast.archived) == ("xa-ok", State.UNKNOWN, None, 1)
    (kept,) = await stand.log.read_archive(stand.branch.xid)
    assert (kept.body, kept.fate, kept.exchange) == (b"a", Fate.DROPPED, b"x")
    assert stand.journal[-1] == (JournalEvent.FORGOTTEN, "olga", REASON, Heuristic.ROLLED_BACK)


@pytest.mark.parametrize(
    ("work", "action", "events"),
    [
        (BOTH[:1], OperatorAction.ROLLBACK, [JournalEvent.HEURISTIC]),
        (BOTH[1:], OperatorAction.COMMIT, [JournalEvent.HEURISTIC]),
        (BOTH[:1], OperatorAction.COMMIT, [JournalEvent.DECIDED, JournalEvent.HEURISTIC]),
        (BOTH[1:], OperatorAction.ROLLBACK, [JournalEvent.DECIDED, JournalEvent.HEURISTIC]),
    ],
    ids=["drop", "consume", "publish", "put back"],
)
async def test_a_dry_run_reports_the_effects_and_does_nothing(
    stand: Stand, work: tuple[WorkRow, ...], action: OperatorAction, events: list[JournalEvent]
) -> None:
    await stand.holds(*work)
    said = await stand.operators.forecast(stand.order(action))
    assert (stand.record, stand.broker.seen, stand.log.written) == (stand.branch, [], [])
    done = await stand.do(action, version=said.version)
    assert done.forecast == said
    assert {step.position: step.fate for step in said.steps} == stand.fates
    assert stand.record is not None
    assert (done.state, done.answer, stand.record.outcome) == (said.becomes, said.later_answer, said.outcome)
    assert [line[0] for line in stand.journal] == events


async def test_of_two_operators_one_decides_the_other_is_refused(stand: Stand) -> None:
    """The version check lets only one of two operators decide."""
    await stand.holds(*BOTH)
    version = (await stand.operators.forecast(stand.order(OperatorAction.COMMIT))).version
    orders = [stand.order(action, version=version) for action in (OperatorAction.COMMIT, OperatorAction.ROLLBACK)]
    results = await asyncio.gather(*map(stand.operators.carry_out, orders), return_exceptions=True)
    (conflict,) = [result for result in results if isinstance(result, XaError)]
    assert conflict.code is ReplyCode.PRECONDITION_FAILED
    assert "the branch has changed" in conflict.reason
    assert len(stand.broker.seen) == 1


@pytest.mark.parametrize("reason", ["", "  ", "x" * 2001])
async def test_an_order_needs_a_reason(stand: Stand, reason: str) -> None:
    await stand.holds(*BOTH)
    assert (await stand.refusal(OperatorAction.COMMIT, reason=reason)).code is ReplyCode.PRECONDITION_FAILED


@pytest.mark.parametrize(
    "action", [OperatorAction.FORGET, OperatorAction.RETRY, OperatorAction.DISCARD, OperatorAction.REDIRECT]
)
async def test_a_prepared_branch_can_only_be_decided(stand: Stand, action: OperatorAction) -> None:
    await stand.holds(*BOTH)
    more = (
        {"positions": (0,), "redirect": Redirect(position=0, exchange=b"y")}
        if action is not OperatorAction.FORGET
        else {}
    )
    assert (await stand.refusal(action, **more)).code is ReplyCode.COMMAND_INVALID
    assert stand.record == stand.branch


async def test_an_unknown_xid_is_unknown(stand: Stand) -> None:
    await stand.start()
    assert (await stand.refusal(OperatorAction.COMMIT)).code is ReplyCode.NOT_FOUND


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.ANSWER_LOST])
@pytest.mark.parametrize("action", [OperatorAction.COMMIT, OperatorAction.ROLLBACK])
async def test_nothing_is_done_before_the_decision_is_durable(
    stand: Stand, action: OperatorAction, fault: Fault
) -> None:
    await stand.holds(*BOTH)
    stand.log.faults.append(fault)
    with pytest.raises(XaError) as caught:
        await stand.do(action)
    assert caught.value.code is ReplyCode.INTERNAL_ERROR
    assert stand.broker.seen == []
    flag = {OperatorAction.COMMIT: XaFlag.HEURCOM, OperatorAction.ROLLBACK: XaFlag.HEURRB}[action]
    if fault is Fault.REFUSED:
        assert (await stand.do(action)).answer == flag.wire_name
    else:  # the decision is durable, and later requests report it
        assert await stand.ask(Operation.COMMIT) is flag
    assert len(stand.broker.seen) == 1
    assert await stand.ask(Operation.ROLLBACK) is flag


@pytest.mark.parametrize("action", [OperatorAction.COMMIT, OperatorAction.ROLLBACK])
async def test_a_decision_goes_on_after_a_restart(stand: Stand, action: OperatorAction) -> None:
    """The decision is durable before the work begins."""
    await stand.holds(*BOTH)
    stand.broker.answering.clear()
    order = asyncio.ensure_future(stand.do(action))
    decided = {LogState.HEURISTIC_COMMITTING, LogState.HEURISTIC_ROLLING_BACK}
    while stand.record is None or stand.record.state not in decided:
        await asyncio.sleep(0)
    await stand.manager.close()
    with pytest.raises(XaError):
        await order
    assert stand.broker.seen == []
    stand.broker.answering.set()
    stand.log.crash()
    await stand.start()
    flag = {OperatorAction.COMMIT: XaFlag.HEURCOM, OperatorAction.ROLLBACK: XaFlag.HEURRB}[action]
    assert await stand.ask(Operation.COMMIT) is flag
    assert len(stand.broker.seen) == 1
    assert [line[0] for line in stand.journal] == [JournalEvent.DECIDED, JournalEvent.HEURISTIC]


async def test_the_transaction_manager_waits_for_a_decision_under_way(stand: Stand) -> None:
    await stand.holds(*BOTH)
    stand.broker.answering.clear()
    order = asyncio.ensure_future(stand.do(OperatorAction.COMMIT))
    asked = asyncio.ensure_future(stand.ask(Operation.ROLLBACK))
    while stand.record is None or stand.record.state is LogState.PREPARED:
        await asyncio.sleep(0)
    stand.broker.answering.set()
    assert await asked is XaFlag.HEURCOM
    assert (await order).answer == "xa-heurcom"


GONE = Refused(reason="404 NOT_FOUND - no exchange 'gone'")
PARTLY = Refused(reason="406 PRECONDITION_FAILED - partial tx completion", partial=True)


async def stuck(stand: Stand, refused: Refused = GONE, *more: WorkRow) -> None:
    """A branch whose commit cannot finish: one of two messages cannot be published."""
    stand.broker.refused[b"gone"] = refused
    work = (a_publish(0, exchange=b"x", body=b"a"), a_publish(1, exchange=b"gone", body=b"b"), *more)
    await stand.holds(*work)
    assert await stand.ask(Operation.COMMIT) is ReplyCode.INTERNAL_ERROR
    assert stand.record is not None
    assert stand.record.stuck == refused.reason


async def test_a_stuck_branch_is_retried_and_ends_as_decided(stand: Stand) -> None:
    await stuck(stand)
    with pytest.raises(XaError, match="no exchange 'gone'"):
        await stand.do(OperatorAction.RETRY)
    stand.broker.refused.clear()
    done = await stand.do(OperatorAction.RETRY)
    assert (done.answer, done.state, done.forecast.later_answer) == ("xa-ok", State.UNKNOWN, "xa-ok")
    assert stand.broker.seen == [(b"x", b"a"), (b"gone", b"b")]


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.LEASE_LOST, Fault.ANSWER_LOST])
async def test_a_retry_without_a_logged_end_is_not_successful(stand: Stand, fault: Fault) -> None:
    """The transaction manager's answer needs only the published messages. An operator's needs the end in the log."""
    await stuck(stand)
    stand.broker.refused.clear()
    stand.broker.answering.clear()
    order = asyncio.ensure_future(stand.do(OperatorAction.RETRY))
    for _ in range(100):  # until it waits for the broker
        await asyncio.sleep(0)
    assert stand.broker.seen == []
    stand.log.faults.append(fault)
    stand.broker.answering.set()
    with pytest.raises(XaError, match=r"writing the end \(committed\)") as caught:
        await order
    assert caught.value.code is ReplyCode.INTERNAL_ERROR
    assert stand.broker.seen == [(b"x", b"a"), (b"gone", b"b")]


async def test_a_redirected_message_keeps_the_commit_complete(stand: Stand) -> None:
    await stuck(stand)
    to = Redirect(position=1, exchange=b"spare", routing_key=b"k")
    done = await stand.do(OperatorAction.REDIRECT, redirect=to)
    assert (done.answer, done.state) == ("xa-ok", State.COMMITTING)
    assert stand.broker.seen == []
    line = stand.journal[-1]
    assert (line[0], line[2]) == (JournalEvent.REDIRECTED, f"message 1 goes to 'spare', 'k': {REASON}")
    await stand.restart()
    assert await stand.ask(Operation.COMMIT) in {XaFlag.OK, ReplyCode.NOT_FOUND}  # the restart may have done it
    assert stand.broker.seen == [(b"x", b"a"), (b"spare", b"b")]


async def test_a_message_that_is_given_up_makes_the_outcome_mixed(stand: Stand) -> None:
    """A mixed outcome records the fate of each message. Forget archives messages that were never delivered."""
    await stuck(stand)
    done = await stand.do(OperatorAction.DISCARD, positions=(1,))
    assert (done.answer, done.state, done.forecast.outcome) == (
        "xa-ok", State.HEURISTIC_COMMITTING, Heuristic.MIXED,
    )  # fmt: skip
    assert stand.broker.seen == []
    done = await stand.do(OperatorAction.RETRY)
    assert (done.answer, done.state) == ("xa-heurmix", State.HEURISTIC)
    assert stand.broker.seen == [(b"x", b"a")]
    assert stand.fates == {0: Fate.PUBLISHED, 1: Fate.DISCARDED}
    assert await stand.ask(Operation.COMMIT) is XaFlag.HEURMIX
    said = await stand.operators.forecast(stand.order(OperatorAction.FORGET))
    assert [(step.position, step.fate) for step in said.steps] == [(1, Fate.DISCARDED)]
    assert await stand.ask(Operation.FORGET) is XaFlag.OK
    assert [(kept.position, kept.fate) for kept in await stand.log.read_archive(stand.branch.xid)] == [
        (1, Fate.DISCARDED)
    ]


async def test_a_given_up_message_stays_given_up_after_a_restart(stand: Stand) -> None:
    await stuck(stand)
    await stand.do(OperatorAction.DISCARD, positions=(1,))
    stand.broker.refused.clear()
    await stand.restart()
    assert await stand.ask(Operation.COMMIT) is XaFlag.HEURMIX
    assert stand.broker.seen == [(b"x", b"a")]


async def test_to_give_up_all_of_it_ends_the_branch(stand: Stand) -> None:
    await stuck(stand)
    done = await stand.do(OperatorAction.DISCARD, positions=(0, 1))
    assert (done.answer, done.state) == ("xa-heurrb", State.HEURISTIC)
    assert stand.broker.seen == []
    assert stand.fates == {0: Fate.DISCARDED, 1: Fate.DISCARDED}


async def test_consumed_messages_are_gone_although_all_publishes_are_discarded(stand: Stand) -> None:
    await stuck(stand, GONE, a_consume(2))
    assert (await stand.do(OperatorAction.DISCARD, positions=(0, 1))).answer == "xa-heurmix"
    assert stand.fates[2] is Fate.CONSUMED


async def test_a_stuck_branch_that_is_done_leaves_the_log(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """The transaction manager has its answer and sends no more requests. Maintenance writes the end."""
    monkeypatch.setattr(maintenance, "_TICK", 0.005)
    monkeypatch.setattr(maintenance, "_REVIVE", 0.01)
    await stuck(stand)
    stand.broker.refused.clear()
    stand.broker.answering.clear()
    asked = asyncio.ensure_future(stand.ask(Operation.COMMIT))
    for _ in range(100):  # until it waits for the broker
        await asyncio.sleep(0)
    stand.log.faults.append(Fault.REFUSED)
    stand.broker.answering.set()
    assert await asked is XaFlag.OK
    assert not stand.log.faults, "the end was refused"
    async with asyncio.timeout(5):
        while stand.record is not None:
            await asyncio.sleep(0.01)
    assert stand.broker.seen == [(b"x", b"a"), (b"gone", b"b")]


async def test_discarding_possibly_delivered_messages_is_a_hazard(stand: Stand) -> None:
    """If one queue refuses, it is unknown which other messages of the unit were stored. A restart keeps this."""
    await stuck(stand, PARTLY)
    assert stand.fates == {0: Fate.UNSURE, 1: Fate.UNSURE}
    await stand.restart()
    while stand.record is None or stand.record.version < 4:
        await asyncio.sleep(0)
    assert (await stand.do(OperatorAction.DISCARD, positions=(1,))).forecast.outcome is Heuristic.HAZARD
    assert (await stand.do(OperatorAction.RETRY)).answer == "xa-heurhaz"
    assert await stand.ask(Operation.ROLLBACK) is XaFlag.HEURHAZ


async def test_a_message_that_cannot_be_put_back_is_given_up(stand: Stand) -> None:
    stand.broker.refused[b"gone"] = Refused(reason="312 NO_ROUTE", settled=(0,))
    await stand.holds(a_consume(0, queue=b"q"), a_consume(1, queue=b"gone"))
    assert await stand.ask(Operation.ROLLBACK) is ReplyCode.INTERNAL_ERROR
    assert stand.fates == {0: Fate.PUT_BACK, 1: None}
    refusal = await stand.refusal(OperatorAction.DISCARD, positions=(0,))
    assert (refusal.code, "[1]" in refusal.reason) == (ReplyCode.PRECONDITION_FAILED, True)
    assert (await stand.refusal(OperatorAction.REDIRECT, redirect=Redirect(position=1, exchange=b"x"))).code == 406
    await stand.do(OperatorAction.REDIRECT, redirect=Redirect(position=1, queue=b"gone too"))
    assert (await stand.do(OperatorAction.DISCARD, positions=(1,))).answer == "xa-heurmix"
    assert stand.fates == {0: Fate.PUT_BACK, 1: Fate.DISCARDED}


async def test_put_back_messages_are_known_despite_a_log_failure(stand: Stand) -> None:
    """Otherwise discarding a message that is already in its queue would be answered as a full commit."""
    stand.broker.refused[b"gone"] = Refused(reason="312 NO_ROUTE", settled=(0,))
    await stand.holds(a_consume(0, queue=b"q"), a_consume(1, queue=b"gone"))
    stand.broker.on_refused = lambda: stand.log.faults.append(Fault.REFUSED)
    assert await stand.ask(Operation.ROLLBACK) is ReplyCode.INTERNAL_ERROR
    while stand.record is None or stand.record.stuck is None:
        await asyncio.sleep(0.01)
    assert stand.fates == {0: Fate.PUT_BACK, 1: None}
    assert (await stand.do(OperatorAction.DISCARD, positions=(1,))).answer == "xa-heurmix"


async def test_an_order_continues_without_its_operator(stand: Stand) -> None:
    await stand.holds(*BOTH)
    stand.broker.answering.clear()
    order = asyncio.ensure_future(stand.do(OperatorAction.COMMIT))
    while stand.record is None or stand.record.state is LogState.PREPARED:
        await asyncio.sleep(0)
    order.cancel()
    stand.broker.answering.set()
    assert await stand.ask(Operation.COMMIT) is XaFlag.HEURCOM


async def test_a_slow_order_reports_that_it_is_under_way(stand: Stand) -> None:
    await stand.holds(*BOTH)
    await stand.manager.close()
    stand.log.crash()
    await stand.start(Limits(patience=0.01))
    stand.broker.answering.clear()
    with pytest.raises(XaError, match="it goes on, try again"):
        await stand.do(OperatorAction.COMMIT)
    stand.broker.answering.set()


async def test_a_branch_that_has_not_voted_is_not_decided(stand: Stand) -> None:
    await stand.start()
    assert stand.manager.demarcate(TM, stand.branch.xid, Operation.START, 1) is not None
    assert (await stand.refusal(OperatorAction.ROLLBACK)).code is ReplyCode.COMMAND_INVALID
