"""A branch that consumed, between "taking" in the log and its vote: a rollback in this state."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from uuid import UUID, uuid4

import pytest

from dtx.log.records import Fate, JournalEvent, LogState, Unit, UnitState
from dtx.manager import BranchManager, Limits, Requester
from dtx.manager.branches import branch_stats
from dtx.store.api import Applied, PhaseTwo, Refused, UnitOutcome
from dtx.store.work import Delivery, HeldWork, Holder
from dtx.telemetry import Metrics
from dtx.xa.codes import ReplyCode, XaError, XaFlag
from dtx.xa.model import Operation, State
from dtx.xa.xid import Xid
from tests.support.branches import a_consume, a_publish, a_unit
from tests.support.memory_log import Fault, MemoryLog
from tests.unit.manager.requests import answer_of
from tests.unit.manager.test_operators import Broker, Stand

WHO = Requester("guest", "/")


class Queue:
    """Holds one delivery, and records its release."""

    def __init__(self) -> None:
        self.lock = "dtx.lock.t"
        self.released: list[Delivery] = []

    def release(self, deliveries: Sequence[Delivery]) -> None:
        self.released += deliveries


class Taking(Broker):
    """A store that would take the consumed messages."""

    def units_to_take(self, vhost: str, work: HeldWork) -> dict[Holder, Unit]:
        return {holder: a_unit(number) for number, holder in enumerate(work.holders(), 1)}


async def a_consumer(broker: Broker, queue: Queue) -> tuple[MemoryLog, BranchManager, Xid, Delivery]:
    """A manager with an idle branch that has consumed one message."""
    log, xid = MemoryLog("rm"), Xid(1, uuid4().bytes, b"taking")
    await log.open()
    manager = BranchManager(log, broker, Limits(), Metrics())
    await manager.start()
    started = manager.demarcate(WHO, xid, Operation.START, log)
    assert started is not None
    assert started[1].work is not None
    delivery = Delivery(
        holder=queue, tag=1, queue=b"in", exchange=b"", routing_key=b"in", redelivered=False, properties=b"\x00\x00",
        body=b"one", size=3,
    )  # fmt: skip
    started[1].work.add_consume(delivery)
    manager.demarcate(WHO, xid, Operation.END, log)
    return log, manager, xid, delivery


async def test_a_vote_refused_by_the_log_is_resumed_later() -> None:
    class Refusing(Taking):
        async def take(
            self, branch_id: UUID, vhost: str, units: Sequence[Unit], work: HeldWork
        ) -> dict[int, UnitOutcome]:
            log.faults.append(Fault.REFUSED)
            return {unit.number: UnitOutcome.HAPPENED for unit in units}

        async def resolve(self, vhost: str, unit: Unit) -> UnitOutcome:
            return UnitOutcome.HAPPENED

    log, manager, xid, _ = await a_consumer(Refusing(), Queue())
    assert await answer_of(manager, WHO, xid, Operation.PREPARE) is ReplyCode.INTERNAL_ERROR
    assert [row.branch.state for row in log.database.rows.values()] == [LogState.TAKING]
    assert await manager.drain(30)
    await manager._upkeep._resume_decided()
    while not await manager.drain(30):
        pass
    assert [row.branch.state for row in log.database.rows.values()] == [LogState.PREPARED]
    await manager.close()


async def test_a_rollback_of_untaken_messages_leaves_them_in_place() -> None:
    """The answer to "taking" was lost before any request to the broker. The message never leaves its queue."""
    broker, queue = Taking(), Queue()
    log, manager, xid, delivery = await a_consumer(broker, queue)
    log.faults.append(Fault.ANSWER_LOST)
    assert await answer_of(manager, WHO, xid, Operation.PREPARE) is ReplyCode.INTERNAL_ERROR
    assert [row.branch.state for row in log.database.rows.values()] == [LogState.TAKING]
    assert await answer_of(manager, WHO, xid, Operation.ROLLBACK) is XaFlag.OK  # a request to the broker would raise
    assert queue.released == [delivery]
    assert await manager.drain(30)
    assert broker.seen == []
    assert log.database.rows == {}
    await manager.close()


@pytest.mark.parametrize(
    ("prepared_at", "stuck", "is_listed"),
    [(None, None, False), (1_800_000_001.0, None, True), (None, "the queue is full", True)],
)
async def test_a_recovery_scan_lists_only_branches_that_have_voted(
    prepared_at: float | None, stuck: str | None, is_listed: bool
) -> None:
    """xa_recover returns the branches "currently in a prepared state", and its caller may commit what it finds."""
    stand = Stand()
    stand.broker.answering.clear()  # the messages are being put back
    await stand.holds(a_consume(), state=LogState.ROLLING_BACK, prepared_at=prepared_at, stuck=stuck)
    assert await stand.manager.in_doubt(WHO) == ([stand.branch.xid] if is_listed else [])
    stand.broker.answering.set()
    assert await stand.manager.drain(30)
    assert await stand.manager.in_doubt(WHO) == []
    await stand.manager.close()


@pytest.mark.parametrize(("fate", "said"), [(Fate.UNSURE, True), (None, False)])
async def test_a_commit_behind_a_partial_one_counts_as_repeated(fate: Fate | None, said: bool) -> None:
    """After 406, "partial tx completion", in a dtx that has ended, the messages it sent may be in the queues twice."""
    stand = Stand()
    await stand.holds(a_publish(fate=fate), state=LogState.COMMITTING, units=(a_unit(0, lock=""),))
    assert await stand.manager.drain(30)
    _, end = stand.database.journal[-1]
    assert ("may have been repeated" in (end.reason or "")) is said
    await stand.manager.close()


async def test_a_finished_one_phase_commit_is_complete_after_restart() -> None:
    """The units in the log show that nothing is left to ask the broker."""
    stand = Stand()
    done = replace(a_unit(1), state=UnitState.DONE)
    await stand.holds(a_consume(), state=LogState.TAKING, one_phase=True, units=(done,))
    (entry,) = stand.manager.entries()
    assert await stand.manager.drain(30)
    assert entry.answered
    _, end = stand.database.journal[-1]
    assert end.event is JournalEvent.COMMITTED
    await stand.manager.close()


async def test_an_unknown_outcome_survives_a_refusal_of_the_next_unit() -> None:
    """An operator who discards the message later must see that it may have been stored."""

    class Breaking(Broker):
        attempts = 0

        async def apply(self, phase: PhaseTwo) -> Applied | Refused:
            self.attempts += 1
            if self.attempts == 1:
                phase.repeated = True
                raise XaError(ReplyCode.INTERNAL_ERROR, "the log cannot be read")
            return Refused(reason="not found")

    stand = Stand()
    stand.broker = Breaking()
    await stand.holds(a_publish())
    for _ in range(2):
        assert await stand.ask(Operation.COMMIT) is ReplyCode.INTERNAL_ERROR
    (row,) = stand.database.rows.values()
    assert [item.fate for item in row.work.values()] == [Fate.UNSURE]
    await stand.manager.close()


async def test_a_possible_repeat_is_reported_despite_a_log_failure() -> None:
    """The outcome of a unit is unknown, and a new unit cannot be sent yet. It stays unknown."""

    class Away(Broker):
        async def apply(self, phase: PhaseTwo) -> Applied | Refused:
            self.apply = super().apply  # type: ignore[method-assign]
            phase.repeated = True
            raise XaError(ReplyCode.INTERNAL_ERROR, "the log cannot be read")

    stand = Stand()
    stand.broker = Away()
    await stand.holds(a_publish())
    assert await stand.ask(Operation.COMMIT) is ReplyCode.INTERNAL_ERROR
    assert await stand.ask(Operation.COMMIT) is XaFlag.OK
    assert await stand.manager.drain(30)
    _, end = stand.database.journal[-1]
    assert "may have been repeated" in (end.reason or "")
    await stand.manager.close()


async def test_a_branch_that_ends_during_counting_does_not_count() -> None:
    log = MemoryLog("rm")
    await log.open()
    manager = BranchManager(log, Broker(), Limits(), Metrics())
    await manager.start()
    xids = [Xid(1, number.to_bytes(4, "big"), b"counted") for number in range(6000)]
    for xid in xids:
        manager.demarcate(WHO, xid, Operation.START, log)
        manager.demarcate(WHO, xid, Operation.END, log)
    counting = asyncio.ensure_future(branch_stats(manager.entries()))
    await asyncio.sleep(0)  # the first 1,000 are counted
    answers: list[XaFlag | XaError] = []
    manager.ask(WHO, xids[-1], Operation.ROLLBACK, answers.append)
    stats = await counting
    assert answers == [XaFlag.OK]
    assert stats.states == {State.IDLE: 5999}
