"""A prepare with a broker that needs one write and no task, and its answers when that write fails."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import uuid4

import pytest

from dtx.log.records import LogState, Unit
from dtx.manager import BranchManager, Limits, Requester
from dtx.store.work import HeldPublish, HeldWork, Holder
from dtx.telemetry import Metrics
from dtx.xa.codes import ReplyCode, XaError, XaFlag
from dtx.xa.model import Operation
from dtx.xa.xid import Xid
from tests.support.memory_log import Fault, MemoryLog
from tests.unit.manager.requests import took_a_task
from tests.unit.manager.test_operators import Broker

WHO = Requester("guest", "/")
Answer = XaFlag | XaError


class Preparing(Broker):
    """A broker store with no messages to take."""

    def units_to_take(self, vhost: str, work: HeldWork) -> dict[Holder, Unit]:
        return {}


@asynccontextmanager
async def idle_branch() -> AsyncIterator[tuple[BranchManager, MemoryLog, Broker, Xid]]:
    """A manager, and a branch that has published one message."""
    log, broker, xid = MemoryLog("rm"), Preparing(), Xid(1, uuid4().bytes, b"quick")
    await log.open()
    manager = BranchManager(log, broker, Limits(), Metrics())
    await manager.start()
    started = manager.demarcate(WHO, xid, Operation.START, log)
    assert started is not None
    assert started[1].work is not None
    started[1].work.add_publish(HeldPublish(b"x", b"key", False, b"\x00\x00", b"body"))
    manager.demarcate(WHO, xid, Operation.END, log)
    yield manager, log, broker, xid
    await manager.close()


async def at_once(manager: BranchManager, xid: Xid, operation: Operation) -> XaFlag | ReplyCode:
    """The answer to a request that starts no task."""
    answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    assert not took_a_task(manager, WHO, xid, operation, answered.set_result)
    assert not answered.done(), "the answer waits for the write"
    async with asyncio.timeout(30):
        answer = await answered
    return answer.code if isinstance(answer, XaError) else answer


async def slowly(manager: BranchManager, xid: Xid, operation: Operation) -> XaFlag | ReplyCode:
    """The answer to a request that starts a task."""
    answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    assert took_a_task(manager, WHO, xid, operation, answered.set_result)
    async with asyncio.timeout(30):
        answer = await answered
    return answer.code if isinstance(answer, XaError) else answer


def states(log: MemoryLog) -> list[LogState]:
    return [row.branch.state for row in log.database.rows.values()]


async def test_a_publishing_branch_votes_with_one_write_and_commits() -> None:
    async with idle_branch() as (manager, log, broker, xid):
        assert await at_once(manager, xid, Operation.PREPARE) is XaFlag.OK
        assert states(log) == [LogState.PREPARED]
        assert len(log.written) == 1
        assert await slowly(manager, xid, Operation.COMMIT) is XaFlag.OK
        assert broker.seen == [(b"x", b"body")]
        assert await manager.drain(30)
        assert states(log) == []


async def test_its_roll_back_is_one_write_too() -> None:
    async with idle_branch() as (manager, log, broker, xid):
        assert await at_once(manager, xid, Operation.PREPARE) is XaFlag.OK
        assert await at_once(manager, xid, Operation.ROLLBACK) is XaFlag.OK
        assert states(log) == []
        assert broker.seen == []
        answers: list[Answer] = []
        manager.ask(WHO, xid, Operation.COMMIT, answers.append)
        assert await manager.drain(30)
        (refusal,) = answers
        assert isinstance(refusal, XaError)
        assert "rolled-back at" in refusal.reason


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.ANSWER_LOST])
async def test_a_possibly_lost_vote_is_not_given_but_repeatable(fault: Fault) -> None:
    async with idle_branch() as (manager, log, broker, xid):
        log.faults.append(fault)
        assert await at_once(manager, xid, Operation.PREPARE) is ReplyCode.INTERNAL_ERROR
        there = fault is Fault.ANSWER_LOST
        assert states(log) == ([LogState.PREPARED] if there else [])
        if there:
            assert await slowly(manager, xid, Operation.COMMIT) is XaFlag.OK
        else:
            assert await slowly(manager, xid, Operation.PREPARE) is XaFlag.OK  # the log is read first
            assert await slowly(manager, xid, Operation.COMMIT) is XaFlag.OK
        assert broker.seen == [(b"x", b"body")]


@pytest.mark.parametrize("operation", [Operation.ROLLBACK, Operation.ONE_PHASE])
async def test_an_answer_that_cannot_be_given_stops_nothing_behind_it(operation: Operation) -> None:
    """A channel that fails while it handles the answer does not affect its branch, which has ended."""

    def failing(_answer: Answer) -> None:
        raise RuntimeError("nobody is there")

    async with idle_branch() as (manager, log, broker, xid):
        manager.ask(WHO, xid, operation, failing)
        assert await manager.drain(30)
        assert manager.known("/", xid) is None
        assert states(log) == []
        assert broker.seen == ([(b"x", b"body")] if operation is Operation.ONE_PHASE else [])
