"""Branches whose messages are in the log's own database: each decision is done once, whatever fails."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from dtx.log.api import LogError
from dtx.log.changes import Change, Slot, StoredMessage
from dtx.log.records import BranchRecord, Fate, JournalEvent, WorkKind
from dtx.manager import BranchManager, Limits, Requester
from dtx.manager.operators import OperatorAction, Operators, Order
from dtx.store.api import Plan
from dtx.store.work import Delivery, HeldPublish, HeldWork
from dtx.telemetry import Metrics
from dtx.xa.codes import ReplyCode, XaError, XaFlag
from dtx.xa.model import Operation
from dtx.xa.xid import Xid
from tests.support.branches import a_branch, an_insert
from tests.support.memory_log import Fault, MemoryDatabase, MemoryLog
from tests.unit.manager.requests import answer_of, took_a_task

WHO = Requester("guest", "/")
XID = Xid(1, b"gtrid", b"bqual")
QUEUE = 7
ANSWERS = (Fault.REFUSED, Fault.ANSWER_LOST)


@dataclass
class Ledger:
    """A LocalStore that records which slots are visible, held and gone."""

    seen: set[Slot] = field(default_factory=set)
    held: set[Slot] = field(default_factory=set)
    promised: set[Slot] = field(default_factory=set)
    """Planned, and neither committed nor rolled back yet."""
    position: int = 100
    lost: int = 0
    """Messages for no queue."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    def restore(self, record: BranchRecord) -> None:
        self.held |= set(record.consumed or ())

    def defined_for(self, work: HeldWork) -> Awaitable[None] | None:
        return None

    def plan(self, vhost: str, work: HeldWork) -> Plan:
        puts = []
        for item in work.items:
            if isinstance(item, HeldPublish) and item.queues:
                self.position += 1
                puts.append(StoredMessage(QUEUE, self.position, b"", b"q", 1, item.properties, item.body))
        self.promised |= {message.slot for message in puts}
        return Plan(
            change=Change(puts=puts),
            published=tuple(message.slot for message in puts),
            consumed=tuple(Slot(QUEUE, item.tag) for item in work.items if isinstance(item, Delivery)),
            unroutable=tuple(item for item in work.items if isinstance(item, HeldPublish) and not item.queues),
        )

    def committing(self, published: Sequence[Slot], consumed: Sequence[Slot]) -> Change:
        return Change(drops=consumed)

    def rolling_back(self, published: Sequence[Slot], consumed: Sequence[Slot]) -> Change:
        return Change(drops=published)

    def committed(self, published: Sequence[Slot], consumed: Sequence[Slot]) -> None:
        assert not self.seen & set(published), "made visible twice"
        self.promised -= set(published)
        self.seen |= set(published)
        self.held -= set(consumed)

    def dropped(self) -> None:
        self.lost += 1

    def rolled_back(self, published: Sequence[Slot], consumed: Sequence[Slot]) -> None:
        assert not self.seen & set(published)
        self.promised -= set(published)
        assert set(consumed) <= self.held, "released twice"
        self.held -= set(consumed)
        self.seen |= set(consumed)


class Channel:
    """Holds deliveries, and records returned messages."""

    lock = ""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.back: list[int] = []

    def release(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            self.ledger.held.discard(Slot(QUEUE, delivery.tag))
            self.ledger.seen.add(Slot(QUEUE, delivery.tag))

    def returned(self, work: Any, code: int, text: bytes) -> None:
        self.back.append(code)


class Stand:
    """A manager, its store and its log, with one branch that published and consumed."""

    def __init__(self, database: MemoryDatabase, *, at_once: bool = False) -> None:
        self.at_once = at_once
        self.ledger = Ledger()
        self.log = MemoryLog("rm", database)
        self.manager = BranchManager(self.log, self.ledger, Limits(), Metrics())
        self.channel = Channel(self.ledger)

    async def start(self) -> None:
        await self.log.open()
        await self.manager.start()

    def work(self) -> None:
        """Publish a message that is routed and two that are not, of which one is mandatory, and consume one."""
        found = self.manager.demarcate(WHO, XID, Operation.START, 1)
        assert found is not None
        work = found[1].work
        assert work is not None
        work.add_publish(HeldPublish(b"", b"q", False, b"", b"body", None, (QUEUE,)))
        work.add_publish(HeldPublish(b"", b"nobody", True, b"", b"body", self.channel))
        work.add_publish(HeldPublish(b"", b"nobody", False, b"", b"body"))
        self.ledger.held.add(Slot(QUEUE, 1))
        work.add_consume(Delivery(self.channel, 1, b"q", b"", b"q", False, b"", b"body", 4))
        self.manager.demarcate(WHO, XID, Operation.END, 1)

    async def ask(self, operation: Operation) -> XaFlag | ReplyCode:
        self.log.congested = not self.at_once
        return await answer_of(self.manager, WHO, XID, operation)

    @property
    def stored(self) -> set[Slot]:
        """The slots of messages in the database."""
        return set(self.log.database.messages.messages)


@pytest.fixture(params=[False, True], ids=["task", "at-once"])
async def stand(request: pytest.FixtureRequest) -> AsyncIterator[Stand]:
    """A request with a single write runs with or without a task. The results are the same."""
    stand = Stand(MemoryDatabase(), at_once=request.param)
    await stand.start()
    stand.work()
    yield stand
    await stand.manager.close()


PUBLISHED = Slot(QUEUE, 101)
CONSUMED = Slot(QUEUE, 1)


async def test_prepared_messages_are_stored_but_not_visible(stand: Stand) -> None:
    assert await stand.ask(Operation.PREPARE) is XaFlag.OK
    assert stand.stored == {PUBLISHED}
    assert (stand.ledger.seen, stand.ledger.held) == (set(), {CONSUMED})


async def test_a_commit_shows_published_messages_and_drops_consumed_ones(stand: Stand) -> None:
    await stand.ask(Operation.PREPARE)
    assert await stand.ask(Operation.COMMIT) is XaFlag.OK
    assert (stand.ledger.seen, stand.ledger.held) == ({PUBLISHED}, set())
    assert stand.channel.back == [312], "the unroutable mandatory message is returned"
    assert stand.ledger.lost == 1
    assert await stand.ask(Operation.COMMIT) is ReplyCode.NOT_FOUND


async def test_a_rollback_returns_consumed_messages(stand: Stand) -> None:
    await stand.ask(Operation.PREPARE)
    assert await stand.ask(Operation.ROLLBACK) is XaFlag.OK
    assert stand.stored == set()
    assert (stand.ledger.seen, stand.ledger.held) == ({CONSUMED}, set())
    assert stand.channel.back == []


async def test_a_one_phase_commit_is_one_write(stand: Stand) -> None:
    assert await stand.ask(Operation.ONE_PHASE) is XaFlag.OK
    assert len(stand.log.written) == 1
    assert stand.stored == {PUBLISHED}
    assert (stand.ledger.seen, stand.ledger.held) == ({PUBLISHED}, set())


@pytest.mark.parametrize("fault", ANSWERS)
@pytest.mark.parametrize("operation", [Operation.COMMIT, Operation.ROLLBACK])
async def test_a_decision_after_a_failed_write_is_done_once(stand: Stand, operation: Operation, fault: Fault) -> None:
    """A write with an unknown outcome changes nothing visible until the log has been read again."""
    await stand.ask(Operation.PREPARE)
    stand.log.faults.append(fault)
    assert await stand.ask(operation) is ReplyCode.INTERNAL_ERROR
    assert (stand.ledger.seen, stand.ledger.held) == (set(), {CONSUMED})
    assert await stand.ask(operation) is XaFlag.OK
    seen = {PUBLISHED} if operation is Operation.COMMIT else {CONSUMED}
    assert (stand.ledger.seen, stand.ledger.held) == (seen, set())
    ends = [line.event for _, line in stand.log.database.journal if line.event is not JournalEvent.PREPARED]
    assert len(ends) == 1


@pytest.mark.parametrize("fault", ANSWERS)
async def test_a_failed_one_phase_write_is_repeated_once(stand: Stand, fault: Fault) -> None:
    stand.log.faults.append(fault)
    assert await stand.ask(Operation.ONE_PHASE) is ReplyCode.INTERNAL_ERROR
    assert (stand.ledger.seen, stand.ledger.held) == (set(), {CONSUMED})
    assert await stand.ask(Operation.ONE_PHASE) is XaFlag.OK
    assert len(stand.stored) == 1
    assert (stand.ledger.seen, stand.ledger.held) == (stand.stored, set())
    assert len(stand.log.written) == 1
    assert stand.channel.back == [312]


@pytest.mark.parametrize("operation", [Operation.PREPARE, Operation.ONE_PHASE])
@pytest.mark.parametrize("tries", [1, 2])
async def test_messages_missing_in_the_log_are_promised_to_no_queue(
    stand: Stand, operation: Operation, tries: int
) -> None:
    """Otherwise an auto-delete queue would stay for ever."""
    stand.log.faults.extend([Fault.REFUSED] * tries)
    for _ in range(tries):
        assert await stand.ask(operation) is ReplyCode.INTERNAL_ERROR
    assert await stand.ask(Operation.ROLLBACK) is XaFlag.OK
    assert stand.ledger.promised == set()


@pytest.mark.parametrize("fault", ANSWERS)
async def test_after_a_failed_write_a_prepare_follows_the_log(stand: Stand, fault: Fault) -> None:
    stand.log.faults.append(fault)
    assert await stand.ask(Operation.PREPARE) is ReplyCode.INTERNAL_ERROR
    again = await stand.ask(Operation.PREPARE)
    assert again is (XaFlag.OK if fault is Fault.REFUSED else ReplyCode.COMMAND_INVALID)  # prepared already
    assert await stand.ask(Operation.COMMIT) is XaFlag.OK
    assert (stand.ledger.seen, stand.ledger.held) == (stand.stored, set())
    assert len(stand.stored) == 1


@pytest.mark.parametrize("operation", [Operation.COMMIT, Operation.ROLLBACK])
async def test_the_successor_completes_a_branch_of_a_dead_dtx(stand: Stand, operation: Operation) -> None:
    await stand.ask(Operation.PREPARE)
    stand.log.crash()
    following = Stand(stand.log.database)
    await following.start()
    try:
        assert await following.manager.in_doubt(WHO) == [XID]
        assert following.ledger.held == {CONSUMED}
        assert await following.ask(operation) is XaFlag.OK
        seen = {PUBLISHED} if operation is Operation.COMMIT else {CONSUMED}
        assert (following.ledger.seen, following.ledger.held) == (seen, set())
        assert following.stored == ({PUBLISHED} if operation is Operation.COMMIT else set())
    finally:
        await following.manager.close()


@pytest.mark.parametrize("operation", [Operation.PREPARE, Operation.ONE_PHASE])
async def test_a_request_behind_a_write_begins_immediately(stand: Stand, operation: Operation) -> None:
    """No answer is given before the write is durable, and a service that stops waits for it."""
    stand.log.running.clear()
    answers: list[XaFlag | XaError] = []
    assert not took_a_task(stand.manager, WHO, XID, operation, answers.append)
    assert not await stand.manager.drain(0.01)
    assert (answers, stand.ledger.seen) == ([], set())
    stand.log.running.set()
    assert await stand.manager.drain(30)
    assert answers == [XaFlag.OK]
    assert stand.ledger.seen == (stand.stored if operation is Operation.ONE_PHASE else set())


async def test_a_request_that_came_second_is_answered_as_the_first(stand: Stand) -> None:
    """As the table says, "a repeated commit waits for the first". The second request takes a task."""
    await stand.ask(Operation.PREPARE)
    answers: list[XaFlag | XaError] = []
    stand.manager.ask(WHO, XID, Operation.COMMIT, answers.append)
    assert took_a_task(stand.manager, WHO, XID, Operation.COMMIT, answers.append), "one at a time"
    assert await stand.manager.drain(30)
    assert answers == [XaFlag.OK, XaFlag.OK]
    assert len(stand.log.written) == 2


@pytest.mark.parametrize("first", [Operation.COMMIT, Operation.ROLLBACK])
async def test_the_first_request_wins_over_a_faster_one(stand: Stand, first: Operation) -> None:
    """A request that takes a task claims the branch at once."""
    await stand.ask(Operation.PREPARE)
    second = Operation.ROLLBACK if first is Operation.COMMIT else Operation.COMMIT
    answers: list[XaFlag | XaError] = []
    refusals: list[XaFlag | XaError] = []
    stand.log.congested = True
    stand.manager.ask(WHO, XID, first, answers.append)
    stand.log.congested = False
    stand.manager.ask(WHO, XID, second, refusals.append)
    assert await stand.manager.drain(30)
    assert answers == [XaFlag.OK]
    (refusal,) = refusals
    assert isinstance(refusal, XaError)
    assert refusal.code is ReplyCode.NOT_FOUND
    assert stand.ledger.seen == {PUBLISHED if first is Operation.COMMIT else CONSUMED}


async def test_a_refused_request_changes_nothing(stand: Stand) -> None:
    other, another = Requester("other", "/"), Xid(1, b"another")
    assert await answer_of(stand.manager, WHO, XID, Operation.COMMIT) is ReplyCode.COMMAND_INVALID
    assert await answer_of(stand.manager, other, XID, Operation.PREPARE) is ReplyCode.ACCESS_REFUSED
    assert await answer_of(stand.manager, WHO, XID, Operation.FORGET) is ReplyCode.COMMAND_INVALID
    assert await answer_of(stand.manager, WHO, another, Operation.PREPARE) is ReplyCode.NOT_FOUND
    assert stand.log.written == []
    assert await stand.ask(Operation.PREPARE) is XaFlag.OK


async def test_a_reply_that_fails_leaves_the_branch_usable(stand: Stand) -> None:
    """An internal error after the write leaves no client waiting."""
    answers: list[XaFlag | XaError] = []

    def reply(answer: XaFlag | XaError) -> None:
        answers.append(answer)
        if len(answers) == 1:
            raise ValueError("as the test wants it")

    assert not took_a_task(stand.manager, WHO, XID, Operation.PREPARE, reply)
    assert await stand.manager.drain(30)
    assert answers[0] is XaFlag.OK
    assert isinstance(answers[1], XaError)
    assert await stand.ask(Operation.COMMIT) is XaFlag.OK


async def test_a_branch_that_did_not_vote_is_given_back(stand: Stand) -> None:
    assert await stand.ask(Operation.ROLLBACK) is XaFlag.OK
    assert (stand.ledger.seen, stand.ledger.held) == ({CONSUMED}, set())
    assert stand.log.written == []


async def test_a_dry_run_of_forget_names_each_messages_fate(stand: Stand) -> None:
    """Without a fate, the message would get a new destination."""
    await stand.ask(Operation.PREPARE)
    operators = Operators(stand.manager)
    order = Order(vhost="/", xid=XID, action=OperatorAction.ROLLBACK, actor="olga", reason="the site is lost")
    await operators.carry_out(order)
    said = await operators.forecast(replace(order, action=OperatorAction.FORGET))
    assert [(step.kind, step.fate) for step in said.steps] == [(WorkKind.PUBLISH, Fate.DROPPED)]


async def test_start_and_end_wait_for_the_request_under_way(stand: Stand) -> None:
    stand.log.running.clear()
    answers: list[XaFlag | XaError] = []
    stand.manager.ask(WHO, XID, Operation.PREPARE, answers.append)
    assert stand.manager.demarcate(WHO, XID, Operation.JOIN, 2) is None
    waiting = asyncio.ensure_future(stand.manager.settle(WHO, XID, Operation.START))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    stand.log.running.set()
    await waiting
    assert answers == [XaFlag.OK]
    with pytest.raises(XaError, match="illegal in state prepared"):
        stand.manager.demarcate(WHO, XID, Operation.JOIN, 2)


async def test_branches_of_a_broker_are_not_taken_for_local_ones() -> None:
    """Their messages are in the broker, so standalone mode could not complete them."""
    database = MemoryDatabase()
    log = MemoryLog("rm", database)
    await log.open()
    await log.write(an_insert(a_branch()))
    log.crash()
    stand = Stand(database)
    with pytest.raises(
        LogError, match="1 branches in the log have their messages in a broker: start dtx with --broker"
    ):
        await stand.start()
