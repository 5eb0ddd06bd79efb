"""An operator in the simulation: completes branches in doubt, discards or redirects stuck messages, and forgets.

Orders run in a process of dtx, as with the API, and get no answer if it dies. The ledger has each order before it
is given, because it may be durable from then on.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Final

from dtx.log.records import WITH_OUTCOME, BranchRecord, LogState, Redirect, WorkKind, WorkRow
from dtx.manager.operators import OperatorAction, Operators, Order
from dtx.xa.codes import XaError
from dtx.xa.xid import Xid
from tests.evidence.sim.database import SimDatabase
from tests.evidence.sim.instance import Instance
from tests.evidence.sim.ledger import Branch, Ledger, Move

_PAUSE: Final = 0.6
"""Limit of seconds between two orders."""
_COMMITS: Final = frozenset({LogState.COMMITTING, LogState.HEURISTIC_COMMITTING})
_UNFINISHED: Final = _COMMITS | {LogState.ROLLING_BACK, LogState.HEURISTIC_ROLLING_BACK}


class Operator:
    """Gives orders from time to time.

    Args:
        database: for the list of branches.
        ledger: the decisions.
        random: source of random choices.
        instances: of dtx.
        queues: possible targets of redirects.
        until: returns true when the operator must stop.
    """

    def __init__(
        self,
        database: SimDatabase,
        ledger: Ledger,
        random: Random,
        instances: Sequence[Instance],
        queues: Sequence[bytes],
        until: Callable[[], bool],
    ) -> None:
        self._database = database
        self._ledger = ledger
        self._random = random
        self._instances = instances
        self._queues = queues
        self._until = until

    async def run(self) -> None:
        """Give orders until it must stop."""
        while not self._until():
            await asyncio.sleep(_PAUSE * self._random.random())
            orders = list(filter(None, map(self._order, self._records())))
            serving = [one for one in self._instances if one.operators is not None and one.process is not None]
            if orders and serving:
                self._give(self._random.choice(serving), self._random.choice(orders))

    def _records(self) -> list[BranchRecord]:
        return [row.branch for row in self._database.tables.database.rows.values()]

    def _order(self, record: BranchRecord) -> Order | None:
        """Return a possible order for a branch, if there is one."""
        if record.state is LogState.PREPARED:
            return _order(record.xid, self._random.choice((OperatorAction.COMMIT, OperatorAction.ROLLBACK)))
        if record.state is LogState.HEURISTIC and self._random.random() < 0.1:
            return _order(record.xid, OperatorAction.FORGET)
        if record.stuck is not None and not record.one_phase:
            return self._mend(record, self._open(record))
        return None

    def _mend(self, record: BranchRecord, work: list[WorkRow]) -> Order | None:
        """Return an order for a branch that is stuck with *work*."""
        if not work:
            return None
        match self._random.choice(
            (OperatorAction.RETRY, OperatorAction.REDIRECT, OperatorAction.REDIRECT, OperatorAction.DISCARD)
        ):
            case OperatorAction.RETRY:
                return _order(record.xid, OperatorAction.RETRY)
            case OperatorAction.REDIRECT:
                item = self._random.choice(work)
                to = self._random.choice(self._queues)
                publish = item.kind is WorkKind.PUBLISH
                redirect = (
                    Redirect(position=item.position, routing_key=to)
                    if publish
                    else Redirect(position=item.position, queue=to)
                )
                return replace(_order(record.xid, OperatorAction.REDIRECT), redirect=redirect)
            case _:
                some = work if self._random.random() < 0.5 else work[:1]
                return _order(record.xid, OperatorAction.DISCARD, *(item.position for item in some))

    def _open(self, record: BranchRecord) -> list[WorkRow]:
        kind = WorkKind.PUBLISH if record.state in _COMMITS else WorkKind.CONSUME
        return [item for item in self._work(record).values() if item.kind is kind and item.is_open]

    def _work(self, record: BranchRecord) -> dict[int, WorkRow]:
        return self._database.tables.database.rows[record.id].work

    def _give(self, instance: Instance, order: Order) -> None:
        branch = self._ledger.branches[order.xid]
        branch.ordered.append(order.action)
        record = self._database.tables.look(order.vhost, order.xid)
        assert record is not None
        work = self._work(record)
        branch.given_up += [bytes(work[position].body) for position in order.positions]
        move = None
        if order.redirect is not None:
            move = Move(bytes(work[order.redirect.position].body), _target(order.redirect))
            branch.moves.append(move)
        operators, process = instance.operators, instance.process
        assert operators is not None
        assert process is not None
        process.spawn(self._carry_out(operators, order, branch, move))

    async def _carry_out(self, operators: Operators, order: Order, branch: Branch, move: Move | None) -> None:
        try:
            done = await operators.carry_out(order)
        except XaError as error:
            self._ledger.answers[f"operator: {order.action} {error.code:d}"] += 1
            return
        self._ledger.answers[f"operator: {order.action} {done.answer}"] += 1
        record = self._database.tables.look(order.vhost, order.xid)
        state = None if record is None else record.state
        if move is not None:
            move.done = True
            self._is_redirected(order, branch, record)
        elif order.action is OperatorAction.RETRY:
            if state in _UNFINISHED:
                self._ledger.wrong(f"a retry of {branch.xid} is done, and the log has {state}")
        elif order.action is OperatorAction.FORGET:
            if state is not None:
                self._ledger.wrong(f"{branch.xid} was forgotten, and the log has {state}")
        elif state not in WITH_OUTCOME and not (state is None and branch.may_be_forgotten):
            self._ledger.wrong(f"an operator's {order.action} of {branch.xid} is done, and the log has {state}")

    def _is_redirected(self, order: Order, branch: Branch, record: BranchRecord | None) -> None:
        """Check that an answered redirect is in the log, unless another order came later."""
        assert order.redirect is not None
        item = None if record is None else self._work(record).get(order.redirect.position)
        if item is None:
            return
        goes = item.routing_key if item.kind is WorkKind.PUBLISH else item.queue
        if goes not in {move.queue for move in branch.moves if move.body == bytes(item.body)}:
            self._ledger.wrong(f"{bytes(item.body)!r} of {branch.xid} is redirected, and the log has it go to {goes!r}")


def _target(to: Redirect) -> bytes:
    return to.routing_key if to.queue is None else to.queue


def _order(xid: Xid, action: OperatorAction, *positions: int) -> Order:
    return Order(vhost="/", xid=xid, action=action, actor="operator", reason="nobody answers", positions=positions)
