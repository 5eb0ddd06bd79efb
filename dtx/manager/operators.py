"""Operators' decisions, for a lost transaction manager or for messages that phase two cannot finish.

Every order is first checked and forecast from the log: that is the dry run. Then it is carried out only if the branch
still has the version of the forecast. So of two operators one decides, and the other learns that the branch has
changed. The decision is durable before its work begins; interrupted work continues after a restart. Callers have
checked the operator's role.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any, Final
from uuid import UUID

from dtx import failpoint
from dtx.failpoint import Point
from dtx.log.api import LogError
from dtx.log.records import BranchRecord, Fate, LogState, Redirect, WorkKind, WorkRow
from dtx.manager.branch_persistence import log_failed
from dtx.manager.branch_runtime import UNFINISHED, BranchDecision, BranchRuntime
from dtx.manager.branches import Elsewhere, Requester
from dtx.manager.effects import Reply
from dtx.manager.manager import BranchManager
from dtx.store.api import UnitProgress
from dtx.telemetry import get_logger
from dtx.xa.branch import is_legal, step
from dtx.xa.codes import Heuristic, ReplyCode, XaError, XaFlag
from dtx.xa.model import Decide, Event, Operation, Persist, Request, State, Vote
from dtx.xa.value import value
from dtx.xa.xid import Xid

_log = get_logger(part="operators")
_PAUSE: Final = 0.1
"""Seconds before an order begins again."""
_MOST_REASON: Final = 2_000
"""Characters: a reason is a sentence, and is in every entry about the decision."""


class OperatorAction(StrEnum):
    """The actions of orders."""

    COMMIT = "commit"
    ROLLBACK = "rollback"
    FORGET = "forget"
    RETRY = "retry"
    DISCARD = "discard"
    REDIRECT = "redirect"


@value
class Order:
    """An operator's order about one branch.

    Args:
        vhost, xid: of the branch.
        action: what to do.
        actor: the operator, for the journal.
        reason: for the journal; never empty.
        version: the version that the branch must have; ``None`` for any.
        positions: messages to discard.
        redirect: the new destination of a message.
    """

    vhost: str
    xid: Xid
    action: OperatorAction
    actor: str
    reason: str
    version: int | None = None
    positions: tuple[int, ...] = ()
    redirect: Redirect | None = None


@value
class OrderStep:
    """The effect of an order on one message; without a *fate* it gets a new destination, for the next attempt."""

    position: int
    kind: WorkKind
    fate: Fate | None
    exchange: bytes
    routing_key: bytes
    queue: bytes | None
    bytes: int


@value
class Forecast:
    """The effects of an order, before or after it is carried out.

    Args:
        state, version: of the branch before the order.
        becomes: its state afterwards.
        outcome: the heuristic outcome afterwards, if any.
        later_answer: the answer to the transaction manager's commit or rollback afterwards.
        steps: the effect on each message.
        archived: number of undelivered messages that go to the archive.
    """

    state: State
    version: int
    becomes: State
    outcome: Heuristic | None
    later_answer: str
    steps: tuple[OrderStep, ...]
    archived: int = 0


@value
class Done:
    """The result of an order that was carried out.

    Args:
        forecast: the forecast.
        answer: the answer of the branch: ``xa-ok``, or the heuristic outcome.
        state: of the branch now.
        version: of the branch now; ``None`` where it has ended.
    """

    forecast: Forecast
    answer: str
    state: State
    version: int | None


def to_json(order: Order) -> dict[str, Any]:
    """*order* for another member."""
    to = order.redirect
    return {
        "vhost": order.vhost, "xid": str(order.xid), "action": order.action, "actor": order.actor,
        "reason": order.reason, "version": order.version, "positions": order.positions,
        "redirect": None if to is None else {
            "position": to.position, "exchange": to.exchange.hex(), "routing_key": to.routing_key.hex(),
            "queue": None if to.queue is None else to.queue.hex(),
        },
    }  # fmt: skip


def from_json(given: Mapping[str, Any]) -> Order:
    """The inverse of :func:`to_json`.

    Raises:
        KeyError, TypeError, ValueError, XaError: it is malformed.
    """
    to = given["redirect"]
    return Order(
        vhost=str(given["vhost"]),
        xid=Xid.parse(given["xid"]),
        action=OperatorAction(given["action"]),
        actor=str(given["actor"]),
        reason=str(given["reason"]),
        version=given["version"],
        positions=tuple(map(int, given["positions"])),
        redirect=None
        if to is None
        else Redirect(
            position=int(to["position"]),
            exchange=bytes.fromhex(to["exchange"]),
            routing_key=bytes.fromhex(to["routing_key"]),
            queue=None if to["queue"] is None else bytes.fromhex(to["queue"]),
        ),
    )


class Operators:
    """Carries out the orders of operators.

    Args:
        manager: of the branches.
    """

    def __init__(self, manager: BranchManager) -> None:
        self._manager = manager

    async def forecast(self, order: Order) -> Forecast:
        """The effects that *order* would have now: a dry run, which changes nothing.

        Raises:
            XaError: 404 for an unknown xid. 406 where the branch has another version or the order has no reason. 503
                where the order is illegal in its state. 541 when the log cannot be read.
        """
        return (await self._evaluate_order(order))[2]

    async def carry_out(self, order: Order) -> Done:
        """Carry out *order*; cancellation of the caller does not stop it.

        Returns:
            The result. When work waits too long for the broker, a 541 is raised and the work continues.

        Raises:
            XaError: as :meth:`forecast`. 541 where phase two is stuck, or the outcome is not known. Also where the log
                may not have the end of a branch that has ended.
        """
        until = asyncio.get_running_loop().time() + self._manager.limits.forward_timeout
        while True:
            entry, member, forecast, event, decision = await self._evaluate_order(order)
            if member is None:
                break
            order = replace(order, version=forecast.version)
            done = await self._let_carry_out(order, forecast, member)
            if done is not None:
                return done
            # another member, perhaps this one, is about to load the branch
            if asyncio.get_running_loop().time() > until:
                raise XaError(
                    ReplyCode.INTERNAL_ERROR, f"another member is taking the branch, try again (xid {order.xid})"
                )
            await asyncio.sleep(_PAUSE)
        answered: asyncio.Future[XaFlag | XaError] = asyncio.get_running_loop().create_future()
        failed: list[XaError] = []

        def reply(answer: XaFlag | XaError) -> None:
            if not answered.done():
                answered.set_result(answer)
            elif isinstance(answer, XaError):
                failed.append(answer)

        failpoint.at(Point.ORDER_JUDGED)
        entry.claim()  # nothing has been awaited since the branch was checked
        if order.redirect is not None:
            task = self._manager.spawn(self._redirect(entry, order, reply))
        else:
            assert event is not None
            task = self._manager.spawn(self._manager.operate(entry, event, reply, order.actor, decision))
        await asyncio.wait((task, answered), return_when=asyncio.FIRST_COMPLETED)
        answer = answered.result() if answered.done() else XaError(ReplyCode.INTERNAL_ERROR, "internal error")
        if isinstance(answer, XaError):
            raise answer
        if answered.done() and not task.done():
            await asyncio.wait((task,))  # only the write of the end is left
        if failed:
            raise failed[0]
        _log.warning(
            "an operator's order was carried out",
            action=order.action,
            xid=order.xid,
            vhost=order.vhost,
            actor=order.actor,
            reason=order.reason,
            answer=answer.wire_name,
        )
        failpoint.at(Point.ORDER_DONE)
        record = entry.record
        state = entry.branch.state if record is not None else State.UNKNOWN
        return Done(
            forecast=forecast,
            answer=answer.wire_name,
            state=state,
            version=None if record is None else record.version,
        )

    async def _let_carry_out(self, order: Order, forecast: Forecast, member: UUID) -> Done | None:
        """Let the member that has the branch carry out *order*; ``None`` if that member does not have it."""
        others = self._manager.others
        assert others is not None, "it has the branch"
        answer = await others.order(to_json(order), member)
        if answer is None:
            return None
        state, version = State(answer["state"]), answer["version"]
        return Done(forecast=forecast, answer=answer["answer"], state=state, version=version)

    async def _redirect(self, entry: BranchRuntime, order: Order, reply: Reply) -> None:
        to = order.redirect
        assert to is not None
        where = f"queue {_text(to.queue)}" if to.queue is not None else f"{_text(to.exchange)}, {_text(to.routing_key)}"
        try:
            await self._manager.redirect(
                entry, to, f"message {to.position} goes to {where}: {order.reason}", order.actor
            )
        except XaError as error:
            reply(error)
        else:
            reply(XaFlag.OK)

    async def _evaluate_order(self, order: Order) -> "_Evaluation":
        """Check *order*: between the last check of the branch and the return, this awaits nothing."""
        if not 0 < len(order.reason.strip()) <= _MOST_REASON:
            raise XaError(ReplyCode.PRECONDITION_FAILED, f"a reason of 1 to {_MOST_REASON} characters is needed")
        who = Requester(order.actor, order.vhost, operator=True)
        while True:
            member = None
            try:
                entry = await self._manager.find(who, order.xid)
            except Elsewhere as elsewhere:
                member = elsewhere.member
                if member is None or self._manager.others is None:
                    raise
                entry = await self._read(order, elsewhere)
            record = entry.record
            if record is None:
                raise XaError(
                    ReplyCode.COMMAND_INVALID,
                    f"{order.action} is illegal: the branch has not voted (xid {order.xid})",
                )
            _require_version(order, record)
            work = await self._work(entry, record)
            # The messages were read meanwhile: if the branch has not changed, decide; otherwise check again.
            if entry.record is record and entry.idle:
                vote = self._manager.vote(entry)
                case = _Case(order=order, entry=entry, record=record, work=work, vote=vote)
                forecast, event, decision = _evaluate(case)
                return entry, member, forecast, event, decision

    async def _read(self, order: Order, elsewhere: Elsewhere) -> BranchRuntime:
        """The branch of another member, as the log has it."""
        try:
            found = await self._manager.log.lookup(order.vhost, order.xid)
        except LogError as error:
            raise log_failed(error, "reading the branch", order.xid) from error
        if found.branch is None:
            raise elsewhere  # it has ended meanwhile
        entry = BranchRuntime.restored(found.branch)
        if found.branch.stuck is not None:
            entry.progress = UnitProgress.UNSENT  # after a refusal
        return entry

    async def _work(self, entry: BranchRuntime, record: BranchRecord) -> Sequence[WorkRow]:
        try:
            return await self._manager.log.read_messages_of(record.id)
        except LogError as error:
            raise log_failed(error, "reading the messages", entry.xid) from error


@value
class _Case:
    """An order, and its branch as it was read."""

    order: Order
    entry: BranchRuntime
    record: BranchRecord
    work: Sequence[WorkRow]
    vote: Vote

    def illegal(self, why: str = "") -> XaError:
        """The error for an order that is not possible in this state."""
        reason = f"{self.order.action} is illegal in state {self.entry.branch.state}{why} (xid {self.order.xid})"
        return XaError(ReplyCode.COMMAND_INVALID, reason)

    def refused(self, why: str) -> XaError:
        """The error for an order with wrong arguments."""
        return XaError(ReplyCode.PRECONDITION_FAILED, f"{why} (xid {self.order.xid})")


_Effects = tuple[Forecast, Event | None, BranchDecision | None]
_Evaluation = tuple[BranchRuntime, UUID | None, Forecast, Event | None, BranchDecision | None]
"""With the member that has the branch, if it is another one."""
_COMMITS: Final = (State.COMMITTING, State.HEURISTIC_COMMITTING)


def _text(name: bytes) -> str:
    return repr(name.decode("utf-8", "backslashreplace"))


def _require_version(order: Order, record: BranchRecord) -> None:
    if order.version is not None and order.version != record.version:
        raise XaError(
            ReplyCode.PRECONDITION_FAILED,
            f"the branch has changed: it has version {record.version}, not {order.version} (xid {order.xid})",
        )


def _evaluate(case: _Case) -> _Effects:
    match case.order.action:
        case OperatorAction.COMMIT | OperatorAction.ROLLBACK:
            return _complete(case)
        case OperatorAction.FORGET:
            return _forget(case)
        case OperatorAction.RETRY:
            return _retry(case)
        case OperatorAction.DISCARD:
            return _discard(case)
        case OperatorAction.REDIRECT:
            return _redirect(case)


def _steps(work: Sequence[WorkRow], fates: dict[WorkKind, Fate]) -> tuple[OrderStep, ...]:
    return tuple(_step(item, fates[item.kind]) for item in work if item.is_open and item.kind in fates)


def _step(item: WorkRow, fate: Fate) -> OrderStep:
    return OrderStep(
        position=item.position,
        kind=item.kind,
        fate=fate,
        exchange=item.exchange,
        routing_key=item.routing_key,
        queue=item.queue,
        bytes=len(item.body),
    )


_FATES: Final = {
    True: {WorkKind.PUBLISH: Fate.PUBLISHED, WorkKind.CONSUME: Fate.CONSUMED},
    False: {WorkKind.PUBLISH: Fate.DROPPED, WorkKind.CONSUME: Fate.PUT_BACK},
}
"""The fates of a branch's messages, by whether it commits."""


def _complete(case: _Case) -> _Effects:
    commits = case.order.action is OperatorAction.COMMIT
    operation = Operation.HEURISTIC_COMMIT if commits else Operation.HEURISTIC_ROLLBACK
    if case.entry.branch.state is not State.PREPARED or not is_legal(case.entry.branch, operation, case.vote):
        raise case.illegal()
    outcome = Heuristic.COMMITTED if commits else Heuristic.ROLLED_BACK
    steps = _steps(case.work, _FATES[commits])
    event = Decide(operation=operation, vote=case.vote, outcome=outcome)
    return (
        _heuristic(case, State.HEURISTIC, outcome, steps),
        event,
        BranchDecision(reason=case.order.reason),
    )


def _heuristic(case: _Case, becomes: State, outcome: Heuristic | None, steps: tuple[OrderStep, ...]) -> Forecast:
    answer = "xa-ok" if outcome is None else outcome.flag.wire_name
    return Forecast(
        state=case.entry.branch.state,
        version=case.record.version,
        becomes=becomes,
        outcome=outcome,
        later_answer=answer,
        steps=steps,
        archived=sum(step.fate in {Fate.DROPPED, Fate.DISCARDED} for step in steps),
    )


def _forget(case: _Case) -> _Effects:
    if case.entry.branch.state is not State.HEURISTIC:
        raise case.illegal()
    kept = [item for item in case.work if item.fate in {Fate.DROPPED, Fate.DISCARDED} or case.record.published]
    forecast = Forecast(
        state=case.entry.branch.state,
        version=case.record.version,
        becomes=State.UNKNOWN,
        outcome=case.record.outcome,
        later_answer="404",
        steps=tuple(_step(item, item.fate or Fate.DROPPED) for item in kept),
        archived=len(kept),
    )
    event = Request(operation=Operation.FORGET, vote=case.vote)
    return forecast, event, BranchDecision(reason=case.order.reason)


def _retry(case: _Case) -> _Effects:
    state = case.entry.branch.state
    if case.record.state not in {
        LogState.COMMITTING,
        LogState.ROLLING_BACK,
        LogState.HEURISTIC_COMMITTING,
        LogState.HEURISTIC_ROLLING_BACK,
    }:
        raise case.illegal()
    event = Request(operation=UNFINISHED[state], vote=case.vote)
    steps = _steps(case.work, _FATES[state in _COMMITS])
    becomes = State.UNKNOWN if case.record.outcome is None else State.HEURISTIC
    return _heuristic(case, becomes, case.record.outcome, steps), event, None


def _stuck(case: _Case) -> dict[int, WorkRow]:
    """The messages that a stuck branch must still finish."""
    if case.record.stuck is None:
        raise case.illegal(": phase two is not stuck")
    if case.entry.progress is not UnitProgress.UNSENT:
        raise case.illegal(": the outcome of its last unit is not known, retry first")
    kind = WorkKind.PUBLISH if case.entry.branch.state in _COMMITS else WorkKind.CONSUME
    return {item.position: item for item in case.work if item.is_open and item.kind is kind}


def _discard(case: _Case) -> _Effects:
    left = _stuck(case)
    wanted = set(case.order.positions)
    if not wanted or not wanted <= left.keys():
        raise case.refused(f"discard takes positions of messages that are not finished: {sorted(left)[:20]}")
    outcome = _heuristic_outcome(case, wanted)
    last = wanted == left.keys()
    operation = Operation.DISCARD_LAST if last else Operation.DISCARD
    event = Decide(operation=operation, vote=case.vote, outcome=outcome)
    _, effects = step(case.entry.branch, event, 0.0)
    becomes = next(effect.state for effect in effects if isinstance(effect, Persist))
    fates = tuple((position, Fate.DISCARDED) for position in sorted(wanted))
    steps = tuple(_step(left[position], fate) for position, fate in fates)
    forecast = _heuristic(case, becomes, outcome, steps)
    return forecast, event, BranchDecision(reason=case.order.reason, fates=fates)


def _heuristic_outcome(case: _Case, wanted: set[int]) -> Heuristic:
    """The outcome of the branch if the messages in *wanted* are given up and all others are finished."""
    total = case.record.publishes + case.record.consumes
    given_up = len(wanted) + sum(item.fate is Fate.DISCARDED for item in case.work)
    unsure = sum(item.fate is Fate.UNSURE for item in case.work if item.position in wanted)
    unsure += case.record.outcome is Heuristic.HAZARD
    if case.entry.branch.state in _COMMITS:
        return Heuristic.of(committed=total - given_up, rolled_back=given_up, unknown=unsure)
    return Heuristic.of(committed=given_up, rolled_back=total - given_up, unknown=unsure)


def _redirect(case: _Case) -> _Effects:
    to = case.order.redirect
    assert to is not None, "an order to redirect says where to"
    left = _stuck(case)
    item = left.get(to.position)
    if item is None:
        raise case.refused(f"redirect takes the position of a message that is not finished: {sorted(left)[:20]}")
    if (item.kind is WorkKind.CONSUME) != (to.queue is not None):
        needed = "a queue" if item.kind is WorkKind.CONSUME else "an exchange and a routing key"
        raise case.refused(f"message {to.position} needs {needed}")
    moved = OrderStep(
        position=item.position,
        kind=item.kind,
        fate=None,
        exchange=to.exchange if to.queue is None else item.exchange,
        routing_key=to.routing_key if to.queue is None else item.routing_key,
        queue=to.queue,
        bytes=len(item.body),
    )
    forecast = _heuristic(case, case.entry.branch.state, case.record.outcome, (moved,))
    return forecast, None, None
