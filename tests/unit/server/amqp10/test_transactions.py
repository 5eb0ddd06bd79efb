"""A discharge that cannot end its association leaves none behind: nobody could end it later."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest

from dtx.log.memory import MemoryLog
from dtx.manager import Limits, TransactionManager, Who
from dtx.manager.entry import Entry
from dtx.server.amqp10.transactions import Transactions
from dtx.telemetry import Metrics
from dtx.wire.amqp10.coordination import Answer, Coordination, DeclareAsked, DischargeAsked, Rejects
from dtx.wire.amqp10.states import Declared, Rejected
from dtx.wire.amqp10.terminus import TransactionCapability
from dtx.xa.codes import XaFlag
from dtx.xa.model import Operation, State
from dtx.xa.xid import Xid
from tests.unit.manager.asking import answer_of
from tests.unit.manager.test_quick import Preparing

WHO = Who("guest", "/")
CONTROL = (0, 0)


class Place:
    """Connection, nodes and control link in one."""

    def __init__(self, manager: TransactionManager) -> None:
        self.manager = manager
        self.who = WHO
        self.nodes = self
        self.said: list[Answer] = []

    def shell(self, _: object) -> "Place":
        return self

    def refusal(self, _: Entry) -> None:
        return None

    def say(self, answer: Any) -> None:
        self.said.append(answer)


@asynccontextmanager
async def discharging(global_id: bytes | None) -> AsyncIterator[tuple[Place, Transactions, DischargeAsked, Entry]]:
    """A transaction that is about to be discharged, while something else runs on its branch for too long."""
    log = MemoryLog("rm")
    await log.open()
    manager = TransactionManager(log, Preparing(), Limits(patience=0.01), Metrics())
    await manager.start()
    place: Any = Place(manager)
    coordination = Coordination(frozenset(TransactionCapability), Rejects.ALWAYS)
    coordination.control_attached(CONTROL, None)
    transactions = Transactions(place, coordination)
    transactions.declare(DeclareAsked(control=CONTROL, delivery_id=1, global_id=global_id))
    declared = place.said.pop().outcome
    assert isinstance(declared, Declared)
    transaction = coordination.live(declared.txn_id)
    assert transaction is not None
    entry = transactions.work(transaction).entry
    entry.busy = True
    asked = DischargeAsked(control=CONTROL, delivery_id=2, transaction=transaction, commit=True)
    yield place, transactions, asked, entry
    await manager.close()


@pytest.mark.parametrize("commit", [True, False])
async def test_a_branch_whose_discharge_came_to_nothing_can_be_rolled_back(commit: bool) -> None:
    xid = Xid(1, uuid4().bytes, b"b")
    async with discharging(xid.to_wire()) as (place, transactions, asked, entry):
        transactions.discharge(replace(asked, commit=commit))
        assert await place.manager.drain(30)
        (answer,) = place.said
        assert isinstance(answer.outcome, Rejected) is commit  # one that fails it always succeeds
        assert transactions.ties == []
        place.manager._branches.through(entry)  # what ran is through
        assert entry.branch.state is State.ROLLBACK_ONLY
        assert entry.branch.associations == {}
        assert await answer_of(place.manager, WHO, xid, Operation.PREPARE) is XaFlag.RBROLLBACK


async def test_a_local_transaction_whose_discharge_came_to_nothing_is_gone() -> None:
    async with discharging(None) as (place, transactions, asked, entry):
        transactions.discharge(asked)
        while not await place.manager.drain(30):
            pass  # one task asks for what the next one does
        place.manager._branches.through(entry)  # what ran is through
        assert entry.branch.state is State.ROLLBACK_ONLY  # it is dropped after a while
        assert entry.branch.associations == {}
        assert entry.work is not None
        assert entry.work.count == 0
