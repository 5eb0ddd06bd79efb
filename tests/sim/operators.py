"""An operator in the simulation: decides what is in doubt, gives up messages that are stuck, and forgets outcomes.

Orders are given where the API gives them, in a process of dtx; whoever gives one hears nothing when that dies. What was
ordered is in the ledger before, for it may be durable from then on.
"""

import asyncio
from collections.abc import Callable, Sequence
from random import Random
from typing import Final

from dtx.log.records import WITH_OUTCOME, BranchRecord, LogState, WorkKind
from dtx.manager.operators import Action, Operators, Order
from dtx.xa.codes import XaError
from dtx.xa.xid import Xid
from tests.sim.database import SimDatabase
from tests.sim.instance import Instance
from tests.sim.ledger import Branch, Ledger

_PAUSE: Final = 0.6
"""Seconds between two orders, at most."""
_COMMITS: Final = frozenset({LogState.COMMITTING, LogState.HEURISTIC_COMMITTING})


class Operator:
    """Gives an order now and then.

    Args:
        database: what the list of branches is read from.
        ledger: of what was decided.
        random: chance.
        instances: of dtx.
        until: when to stop.
    """

    def __init__(
        self,
        database: SimDatabase,
        ledger: Ledger,
        random: Random,
        instances: Sequence[Instance],
        until: Callable[[], bool],
    ) -> None:
        self._database = database
        self._ledger = ledger
        self._random = random
        self._instances = instances
        self._until = until

    async def run(self) -> None:
        """Until it is told to stop."""
        while not self._until():
            await asyncio.sleep(_PAUSE * self._random.random())
            orders = list(filter(None, map(self._order, self._records())))
            serving = [one for one in self._instances if one.operators is not None and one.process is not None]
            if orders and serving:
                self._give(self._random.choice(serving), self._random.choice(orders))

    def _records(self) -> list[BranchRecord]:
        return [row.branch for row in self._database.tables.database.rows.values()]

    def _order(self, record: BranchRecord) -> Order | None:
        """What could be ordered about it."""
        if record.state is LogState.PREPARED:
            return _order(record.xid, self._random.choice((Action.COMMIT, Action.ROLLBACK)))
        if record.state is LogState.HEURISTIC and self._random.random() < 0.1:
            return _order(record.xid, Action.FORGET)
        if record.stuck is not None and not record.one_phase:
            positions = self._open(record)
            some = positions if self._random.random() < 0.5 else positions[:1]
            return _order(record.xid, Action.DISCARD, *some) if some else None
        return None

    def _open(self, record: BranchRecord) -> list[int]:
        kind = WorkKind.PUBLISH if record.state in _COMMITS else WorkKind.CONSUME
        work = self._database.tables.database.rows[record.id].work.values()
        return [item.position for item in work if item.kind is kind and item.is_open]

    def _give(self, instance: Instance, order: Order) -> None:
        branch = self._ledger.branches[order.xid]
        branch.ordered.append(order.action)
        if order.positions:
            record = self._database.tables.look(order.vhost, order.xid)
            assert record is not None
            work = self._database.tables.database.rows[record.id].work
            branch.given_up += [bytes(work[position].body) for position in order.positions]
        operators, process = instance.operators, instance.process
        assert operators is not None
        assert process is not None
        process.spawn(self._carry_out(operators, order, branch))

    async def _carry_out(self, operators: Operators, order: Order, branch: Branch) -> None:
        try:
            done = await operators.carry_out(order)
        except XaError as error:
            self._ledger.answers[f"operator: {order.action} {error.code:d}"] += 1
            return
        self._ledger.answers[f"operator: {order.action} {done.answer}"] += 1
        record = self._database.tables.look(order.vhost, order.xid)
        state = None if record is None else record.state
        if order.action is Action.FORGET:
            if state is not None:
                self._ledger.wrong(f"{branch.xid} was forgotten, and the log has {state}")
        elif state not in WITH_OUTCOME and not (state is None and branch.may_be_forgotten):
            self._ledger.wrong(f"an operator's {order.action} of {branch.xid} is done, and the log has {state}")


def _order(xid: Xid, action: Action, *positions: int) -> Order:
    return Order(vhost="/", xid=xid, action=action, actor="operator", reason="nobody answers", positions=positions)
