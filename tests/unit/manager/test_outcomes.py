"""Outcomes registered with a branch run once, after its decision. A branch that has only outcomes still votes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import uuid4

import pytest

from dtx.manager import BranchManager, Limits, Requester
from dtx.manager.branch_runtime import BranchRuntime
from dtx.manager.operators import OperatorAction, Operators, Order
from dtx.store.work import Budget, HeldPublish, HeldWork
from dtx.telemetry import Metrics
from dtx.xa.codes import ReplyCode, XaFlag
from dtx.xa.model import Operation, State
from dtx.xa.xid import Xid
from tests.support.memory_log import Fault, MemoryLog
from tests.unit.manager.requests import answer_of
from tests.unit.manager.test_fast_path import Preparing
from tests.unit.manager.test_operators import Broker

WHO = Requester("guest", "/")


class Rig:
    """A manager, and a branch that has one outcome and no messages.

    Args:
        manager: the started manager.
        log: the manager's log.
        broker: the manager's broker.
        entry: the branch.
    """

    def __init__(self, manager: BranchManager, log: MemoryLog, broker: Broker, entry: BranchRuntime) -> None:
        self.manager = manager
        self.broker = broker
        self.log = log
        self.entry = entry
        self.decided: list[bool] = []
        assert entry.work is not None
        entry.work.add_outcome(self.decided.append)

    async def ask(self, operation: Operation) -> XaFlag | ReplyCode:
        return await answer_of(self.manager, WHO, self.entry.xid, operation)

    async def operator(self, action: OperatorAction) -> None:
        order = Order(action=action, actor="olga", reason="the site is lost", vhost="/", xid=self.entry.xid)
        await Operators(self.manager).carry_out(order)


@asynccontextmanager
async def branch() -> AsyncIterator[Rig]:
    log = MemoryLog("rm")
    await log.open()
    broker = Preparing()
    manager = BranchManager(log, broker, Limits(), Metrics())
    await manager.start()
    started = manager.demarcate(WHO, Xid(1, uuid4().bytes, b"o"), Operation.START, log)
    assert started is not None
    yield Rig(manager, log, broker, started[1])
    await manager.close()


def end(rig: Rig, operation: Operation = Operation.END) -> None:
    rig.manager.demarcate(WHO, rig.entry.xid, operation, rig.log)


async def test_a_branch_with_only_outcomes_votes_and_keeps_them() -> None:
    """A read-only answer would end the branch, and the decision would never arrive."""
    for operation, committed in ((Operation.COMMIT, True), (Operation.ROLLBACK, False)):
        async with branch() as rig:
            end(rig)
            assert await rig.ask(Operation.PREPARE) is XaFlag.OK
            assert rig.decided == []
            assert await rig.manager.in_doubt(WHO) == [rig.entry.xid]
            assert await rig.ask(operation) is XaFlag.OK
            assert await rig.manager.drain(30)
            assert rig.decided == [committed]


async def test_one_phase_is_the_decision() -> None:
    async with branch() as rig:
        end(rig)
        assert await rig.ask(Operation.ONE_PHASE) is XaFlag.OK
        assert await rig.manager.drain(30)
        assert rig.decided == [True]


@pytest.mark.parametrize("operation", [Operation.ROLLBACK, Operation.PREPARE])
async def test_a_branch_that_fails_applies_nothing(operation: Operation) -> None:
    async with branch() as rig:
        end(rig, Operation.FAIL)
        assert rig.decided == [False]
        assert await rig.ask(operation) is (XaFlag.OK if operation is Operation.ROLLBACK else XaFlag.RBROLLBACK)
        assert rig.decided == [False]


@pytest.mark.parametrize("action", [OperatorAction.COMMIT, OperatorAction.ROLLBACK])
async def test_an_operators_decision_is_one(action: OperatorAction) -> None:
    async with branch() as rig:
        end(rig)
        assert await rig.ask(Operation.PREPARE) is XaFlag.OK
        await rig.operator(action)
        assert rig.decided == [action is OperatorAction.COMMIT]
        assert await rig.ask(Operation.FORGET) is XaFlag.OK
        assert rig.decided == [action is OperatorAction.COMMIT]


@pytest.mark.parametrize("operation", [Operation.COMMIT, Operation.ROLLBACK])
async def test_an_end_of_unknown_outcome_follows_the_log(operation: Operation) -> None:
    async with branch() as rig:
        end(rig)
        assert await rig.ask(Operation.PREPARE) is XaFlag.OK
        rig.log.faults.append(Fault.ANSWER_LOST)
        assert await rig.ask(operation) is ReplyCode.INTERNAL_ERROR
        assert rig.decided == []
        assert await rig.ask(operation) is XaFlag.OK
        assert rig.decided == [operation is Operation.COMMIT]


async def test_an_outcome_that_fails_does_not_stop_the_others() -> None:
    def fail(_: bool) -> None:
        raise ValueError("no such delivery")

    async with branch() as rig:
        assert rig.entry.work is not None
        rig.entry.outcomes.insert(0, fail)
        end(rig)
        assert await rig.ask(Operation.PREPARE) is XaFlag.OK
        assert await rig.ask(Operation.COMMIT) is XaFlag.OK
        assert await rig.manager.drain(30)
        assert rig.decided == [True]


async def test_outcomes_wait_for_the_end_of_phase_two() -> None:
    async with branch() as rig:
        assert rig.entry.work is not None
        rig.entry.work.add_publish(HeldPublish(b"x", b"key", False, b"\x00\x00", b"body"))
        end(rig)
        assert await rig.ask(Operation.PREPARE) is XaFlag.OK
        rig.broker.answering.clear()
        asked = asyncio.ensure_future(rig.ask(Operation.COMMIT))
        while rig.entry.branch.state is not State.COMMITTING:
            await asyncio.sleep(0)
        assert rig.decided == []
        rig.broker.answering.set()
        assert await asked is XaFlag.OK
        assert await rig.manager.drain(30)
        assert rig.decided == [True]


def test_outcomes_count_as_messages_and_are_passed_along() -> None:
    budget = Budget(1 << 20)
    first, second = HeldWork(1 << 20, 2, budget), HeldWork(1 << 20, 2, budget)
    first.add_outcome(lambda _: None)
    assert (first.count, first.fits(0), first.fits(0, 2)) == (1, True, False)
    first.add_outcome(lambda _: None)
    assert not first.fits(0)
    assert "3 messages" in first.excess(0)
    first.hand_over(second)
    assert (first.count, second.count, second.fits(0)) == (0, 2, False)
