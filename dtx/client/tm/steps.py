"""What the two-phase commit asks its shell to do, and how threads and asyncio do it.

There is one algorithm for threads and for asyncio, and it can be tested without any resource. It has two layers, both
generators:

- Commitment and recovery yield *steps*. The answer to a step is what was asked for, or the XAException or
  TransactionError that came instead: nothing is raised into these algorithms.
- *Work* yields calls, and whoever drives it makes them, or awaits them. What a call returns or raises comes back from
  its ``yield``, so ``try`` and ``finally`` mean what they always mean. :func:`calls` turns steps into work.

:class:`Point` names the instants at which tests let a transaction manager die. Nothing happens there unless a test
armed them.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, Final, TypeVar, assert_never

from dtx.client.errors import XAER_RMFAIL, XAException
from dtx.client.tm.decisions import DecisionLog
from dtx.client.tm.errors import LogFailed, TransactionError
from dtx.xa.xid import Xid

T = TypeVar("T")
Work = Generator[Callable[[], Any], Any, T]
"""Calls in their order, and a result."""


def drive(work: Work[T]) -> T:
    """Make the calls of *work* in this thread; its result."""
    try:
        call = next(work)
        while True:
            try:
                answer = call()
            except BaseException as error:  # noqa: BLE001 - it goes to where the call was made
                call = work.throw(error)
            else:
                call = work.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


async def drive_async(work: Work[T]) -> T:
    """Make the calls of *work* in this task, and await each; its result."""
    try:
        call = next(work)
        while True:
            try:
                answer = await call()
            except BaseException as error:  # noqa: BLE001 - it goes to where the call was made
                call = work.throw(error)
            else:
                call = work.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


class Point(IntEnum):
    """Where a transaction is, and what dying there means. README has the table."""

    BEGUN = 1
    """The branches exist; work is done in them."""
    ENDED = 2
    """One more branch is dissociated from its channel."""
    PREPARED = 3
    """One more branch is prepared."""
    VOTED = 4
    """All branches are prepared; nothing is decided."""
    DECIDED = 5
    """The decision to commit is durable; no branch was told."""
    COMMITTED = 6
    """One more branch is committed."""
    COMPLETED = 7
    """All branches are told; the log calls the decision unfinished."""
    FINISHED = 8
    """The log was told that all of it is done."""
    ONE_PHASE_BEFORE = 9
    """The only branch that has work is about to be committed in one phase."""
    ONE_PHASE_AFTER = 10
    """It is committed, or not; the application was not told."""
    ROLLED_BACK = 11
    """One more branch is rolled back."""
    HEURISTIC_RECORDED = 12
    """The log has a heuristic outcome; the resource has not forgotten it."""
    HEURISTIC_FORGOTTEN = 13
    """The resource has forgotten it; the log does not know that."""
    RECOVERY_SCANNED = 14
    """Recovery knows which branches one more resource has in doubt."""
    RECOVERY_FENCED = 15
    """Recovery has made it durable that an orphan will never commit; the branch is still there."""
    RECOVERY_TAKEN_UP = 16
    """Recovery has written that it completes an unfinished decision; no branch was told."""
    RECOVERY_COMPLETED = 17
    """Recovery has completed one more branch."""
    RECOVERY_FINISHED = 18
    """Recovery has told the log that a decision is finished."""


_armed: Final[list[Callable[[Point], None]]] = []


def reach(point: Point) -> None:
    """Tell the test that armed the points, if any."""
    for told in _armed:
        told(point)


def arm(reached: Callable[[Point], None] | None) -> None:
    """From now on *reached* is called at each point, ``None``: nothing is; for tests."""
    _armed[:] = [] if reached is None else [reached]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Call a method of a session.

    Args:
        session: whose.
        operation: its name.
        xid: its argument, unless it takes none.
    """

    session: Any
    operation: str
    xid: Xid | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Acquire:
    """Get a session of a resource: a free one, or with *fresh* one on a new connection."""

    resource: Any
    fresh: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Give a session back."""

    resource: Any
    session: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """Call the log."""

    call: Callable[[DecisionLog], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """This is a point."""

    point: Point


Step = Ask | Acquire | Release | Write | Reach
Steps = Generator[Step, Any, T]


def calls(steps: Steps[T], write: Callable[[Callable[[DecisionLog], Any]], Any]) -> Work[T]:
    """The calls that carry out *steps*.

    Args:
        steps: to be carried out.
        write: calls the log; with asyncio where that does not hold the event loop up.
    """
    answer: Any = None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        try:
            match step:
                case Ask(session=session, operation=operation, xid=xid):
                    answer = yield partial(getattr(session, operation), *(() if xid is None else (xid,)))
                case Acquire(resource=resource, fresh=fresh):
                    answer = yield resource.open if fresh else resource.acquire
                case Release(resource=resource, session=session):
                    answer = yield partial(resource.release, session)
                case Write(call=call):
                    answer = yield partial(write, call)
                case Reach(point=point):
                    reach(point)
                    answer = None
                case _:
                    assert_never(step)
        except Exception as error:  # noqa: BLE001 - see _answer
            answer = _answer(step, error)


def run(steps: Steps[T], log: DecisionLog) -> T:
    """Carry out *steps* in this thread."""
    return drive(calls(steps, lambda call: call(log)))


def _answer(step: Step, error: Exception) -> Exception:
    """What an algorithm gets in the place of an answer.

    A driver that raises what it should not must not keep the other branches from being told: nobody knows what became
    of its call, which is XAER_RMFAIL. The same of a log is that it failed.
    """
    if isinstance(error, XAException | TransactionError):
        return error
    words = f"{type(error).__name__}: {error}"
    match step:
        case Ask() | Acquire() | Release():
            return XAER_RMFAIL(words)
        case Write():
            return LogFailed(words)
        case Reach():
            raise error
        case _:
            assert_never(step)
