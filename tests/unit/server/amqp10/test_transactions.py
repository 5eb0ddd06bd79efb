"""Discharges that fail: the state of the branch and of retired deliveries afterwards."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import pytest

from dtx.log.records import Unit
from dtx.manager import BranchManager, Limits, Requester
from dtx.manager.branch_runtime import BranchRuntime
from dtx.server.amqp10.nodes import failure_of
from dtx.server.amqp10.transactions import Retired, Transactions
from dtx.store.api import UnitOutcome
from dtx.store.slices import Slices
from dtx.store.work import Delivery, HeldWork, Holder
from dtx.telemetry import Metrics
from dtx.wire.amqp10.coordination import (
    CoordinationEngine,
    CoordinatorAnswer,
    DeclareAsked,
    DischargeAsked,
    PromoteAsked,
    Rejects,
)
from dtx.wire.amqp10.coordination import Work as Kind
from dtx.wire.amqp10.errors import Condition
from dtx.wire.amqp10.performatives import ACCEPTED, RELEASED, Declared, Outcome, Rejected, TransactionCapability
from dtx.xa.codes import XaFlag
from dtx.xa.model import Operation, State
from dtx.xa.xid import Xid
from tests.support.branches import a_unit
from tests.support.memory_log import Fault, MemoryLog
from tests.unit.manager.requests import answer_of
from tests.unit.manager.test_fast_path import Preparing
from tests.unit.manager.test_operators import Broker

WHO = Requester("guest", "/")
CONTROL = (0, 0)


def _raise(error: Exception) -> None:
    raise error


class Place:
    """Connection, nodes and control link in one."""

    def __init__(self, manager: BranchManager) -> None:
        self.manager = manager
        self.who = WHO
        self.nodes = self
        self.slices = Slices(_raise)
        self.said: list[CoordinatorAnswer] = []
        self.attached: object = self
        """The current link with the handle of the control link."""

    def after_work(self, act: Callable[[], None]) -> None:
        self.slices.then(act)

    def shell(self, _: object) -> object:
        return self.attached

    def refusal(self, _: BranchRuntime) -> None:
        return None

    def reply(self, answer: Any) -> None:
        self.said.append(answer)


@asynccontextmanager
async def declared(
    global_id: bytes | None, limits: Limits, broker: Broker
) -> AsyncIterator[tuple[Place, Transactions, DischargeAsked, BranchRuntime]]:
    """A transaction, and the request to discharge it."""
    log = MemoryLog("rm")
    await log.open()
    manager = BranchManager(log, broker, limits, Metrics())
    await manager.start()
    place: Any = Place(manager)
    coordination = CoordinationEngine(frozenset(TransactionCapability), Rejects.ALWAYS)
    coordination.control_attached(CONTROL, None)
    transactions = Transactions(place, coordination)
    transactions.declare(DeclareAsked(control=CONTROL, delivery_id=1, global_id=global_id))
    outcome = place.said.pop().outcome
    assert isinstance(outcome, Declared)
    transaction = coordination.live(outcome.txn_id)
    assert transaction is not None
    asked = DischargeAsked(control=CONTROL, delivery_id=2, transaction=transaction, commit=True)
    yield place, transactions, asked, transactions.work(transaction).entry
    await manager.close()


@asynccontextmanager
async def discharging(
    global_id: bytes | None,
) -> AsyncIterator[tuple[Place, Transactions, DischargeAsked, BranchRuntime]]:
    """The same, while another operation on its branch takes longer than dtx's patience."""
    async with declared(global_id, Limits(patience=0.01), Preparing()) as found:
        found[-1].claim()
        yield found


@pytest.mark.parametrize("commit", [True, False])
async def test_a_branch_with_a_failed_discharge_can_be_rolled_back(commit: bool) -> None:
    xid = Xid(1, uuid4().bytes, b"b")
    async with discharging(xid.to_wire()) as (place, transactions, asked, entry):
        transactions.discharge(replace(asked, commit=commit))
        assert await place.manager.drain(30)
        (answer,) = place.said
        assert isinstance(answer.outcome, Rejected) is commit  # a rollback always succeeds
        assert transactions.associations == []
        place.manager._branches.finish_operation(entry)  # the other operation ends
        assert entry.branch.state is State.ROLLBACK_ONLY
        assert entry.branch.associations == {}
        assert await answer_of(place.manager, WHO, xid, Operation.PREPARE) is XaFlag.RBROLLBACK


async def test_a_local_transaction_whose_discharge_came_to_nothing_is_gone() -> None:
    async with discharging(None) as (place, transactions, asked, entry):
        transactions.discharge(asked)
        while not await place.manager.drain(30):
            pass  # a task may start another one
        place.manager._branches.finish_operation(entry)  # the other operation ends
        assert entry.branch.state is State.ROLLBACK_ONLY  # it is removed later
        assert entry.branch.associations == {}
        assert entry.work is not None
        assert entry.work.count == 0


@pytest.mark.parametrize("promoting", [False, True], ids=["discharge", "promotion"])
async def test_a_late_answer_does_not_reach_a_newer_link(promoting: bool) -> None:
    """It would end that link without notice to its client, or settle deliveries that were sent on it."""
    async with discharging(None) as (place, transactions, asked, _):
        if promoting:
            found = asked.transaction
            xid = Xid(1, uuid4().bytes, b"b").to_wire()
            transactions.promote(PromoteAsked(control=CONTROL, delivery_id=2, transaction=found, global_id=xid))
        else:
            transactions.discharge(asked)
        place.attached = object()
        while not await place.manager.drain(30):
            pass  # a task may start another one
        assert place.said == []


class Node:
    """A source, and the broker channel that holds its deliveries."""

    lock = "lock"

    def __init__(self) -> None:
        self.held: dict[int, Callable[[], None]] = {}

    def keep(self, taken: Delivery, _: object, held: HeldWork, released: Callable[[], None]) -> None:
        self.held[taken.tag] = released
        held.add_consume(taken)

    def release(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            released = self.held.pop(delivery.tag, None)
            if released is not None:  # it was not taken by a unit
                released()


class Source:
    """A link to a client."""

    is_open = True

    def __init__(self) -> None:
        self.node = Node()
        self.retired: dict[int, Retired] = {}
        self.unsettled: dict[int, object] = {}
        self.told: list[tuple[list[int], Outcome]] = []

    def settle(self, deliveries: Sequence[int], outcome: Outcome) -> None:
        self.told.append((list(deliveries), outcome))


class Taking(Broker):
    """A broker that reports some units as happened."""

    def __init__(self, happened: set[Node]) -> None:
        super().__init__()
        self.happened = happened

    def units_to_take(self, vhost: str, work: HeldWork) -> dict[Holder, Unit]:
        return {holder: a_unit(number) for number, holder in enumerate(work.holders(), 1)}

    async def take(self, branch_id: UUID, vhost: str, units: Sequence[Unit], work: HeldWork) -> dict[int, UnitOutcome]:
        outcomes = {}
        for number, holder in enumerate(work.holders(), 1):
            assert isinstance(holder, Node)
            outcomes[number] = UnitOutcome.HAPPENED if holder in self.happened else UnitOutcome.NEVER
            if holder in self.happened:
                holder.held.clear()
        return outcomes


@pytest.mark.parametrize("part", [False, True], ids=["none", "part"])
async def test_a_failed_one_phase_commit_reports_released_deliveries(
    part: bool,
) -> None:
    """4.4.2: rolled-back deliveries remain the controller's. Messages that were put back may be sent again."""
    links = Source(), Source()
    broker = Taking({links[0].node} if part else set())
    async with declared(None, Limits(), broker) as (place, transactions, asked, entry):
        work = transactions.work(asked.transaction)
        for number, link in enumerate(links):
            taken = Delivery(link.node, 7, b"q", b"", b"q", False, b"\x00\x00", b"body", 6)
            source: Any = link
            work.retire(source, number, taken, ACCEPTED, settled=False, kind=Kind.RETIREMENT)
        transactions.discharge(asked)
        while entry in place.manager.entries():
            await asyncio.sleep(0)
        (answer,) = place.said
        assert isinstance(answer.outcome, Rejected)
        assert answer.outcome.error is not None
        assert answer.outcome.error.condition == Condition.ROLLBACK
        assert broker.seen == ([(b"q", b"body")] if part else [])
        assert links[0].told == ([([0], RELEASED)] if part else [])
        assert list(links[0].unsettled) == ([] if part else [0])
        assert (links[1].told, list(links[1].unsettled)) == ([], [1])
        assert links[0].retired == links[1].retired == {}


async def test_a_local_transaction_ended_during_an_outage_is_released() -> None:
    """No client knows the xid of its branch, and there may be no timeout."""
    link = Source()
    async with declared(None, Limits(default_timeout=0), Taking(set())) as (place, transactions, asked, entry):
        taken = Delivery(link.node, 7, b"q", b"", b"q", False, b"\x00\x00", b"body", 6)
        source: Any = link
        transactions.work(asked.transaction).retire(source, 0, taken, ACCEPTED, settled=False, kind=Kind.RETIREMENT)
        log: Any = place.manager.log
        log.faults.append(Fault.REFUSED)
        transactions.discharge(asked)
        async with asyncio.timeout(30):
            while entry in place.manager.entries():
                await asyncio.sleep(0.01)
        (answer,) = place.said
        assert isinstance(answer.outcome, Rejected)
        assert list(link.unsettled) == [0]


async def test_a_promotion_during_an_outage_leaves_no_empty_branch() -> None:
    async with declared(None, Limits(default_timeout=0), Taking(set())) as (place, transactions, asked, entry):
        log: Any = place.manager.log
        log.faults.append(Fault.REFUSED)
        xid = Xid(1, uuid4().bytes, b"b")
        promotion = PromoteAsked(control=CONTROL, delivery_id=2, transaction=asked.transaction, global_id=xid.to_wire())
        transactions.promote(promotion)
        async with asyncio.timeout(30):
            while entry in place.manager.entries():
                await asyncio.sleep(0.01)
        assert transactions.work(asked.transaction).entry.branch.state is State.ACTIVE


async def test_a_waiting_discharge_without_its_link_commits_nothing() -> None:
    xid = Xid(1, uuid4().bytes, b"b")
    async with declared(xid.to_wire(), Limits(), Broker()) as (place, transactions, asked, entry):
        verdict: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        transactions.work(asked.transaction).wait_for(verdict)
        transactions.discharge(asked)
        busy = [True]

        def work() -> Iterator[None]:
            while busy:
                time.sleep(0.01)
                yield

        place.slices.run(work())  # as when many transactions end or many deliveries return
        transactions.lose([asked.transaction])
        verdict.set_result(None)
        for _ in range(20):
            await asyncio.sleep(0)
        assert entry.branch.state is not State.IDLE  # in idle it could be prepared without what has returned
        busy.clear()
        assert await place.manager.drain(30)
        assert entry.branch.state is State.ROLLBACK_ONLY
        assert entry.branch.associations == {}


def test_a_discharge_is_rolled_back_only_as_a_whole() -> None:
    """After an operator's decision a part may be published: then the client gets neither success nor rollback."""
    conditions = {answer: None if (error := failure_of(answer)) is None else error.condition for answer in XaFlag}
    assert conditions == {
        XaFlag.OK: None,
        XaFlag.RDONLY: None,
        XaFlag.HEURCOM: None,
        XaFlag.RBROLLBACK: Condition.ROLLBACK,
        XaFlag.HEURRB: Condition.ROLLBACK,
        XaFlag.RBTIMEOUT: Condition.TIMEOUT,
        XaFlag.HEURMIX: Condition.INTERNAL_ERROR,
        XaFlag.HEURHAZ: Condition.INTERNAL_ERROR,
    }
