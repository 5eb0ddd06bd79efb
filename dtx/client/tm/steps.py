"""What the two-phase commit asks its shell to do. The algorithms are generators that yield steps, and get answers.

So there is one algorithm for threads and for asyncio, and it can be tested without any resource. An answer is what was
asked for, or the XAException or TransactionError that came instead: nothing is raised into an algorithm.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, assert_never

from dtx.client.errors import XAER_RMFAIL, XAException
from dtx.client.tm import points
from dtx.client.tm.decisions import DecisionLog
from dtx.client.tm.driving import Work, drive
from dtx.client.tm.errors import LogFailed, TransactionError
from dtx.client.tm.points import Point
from dtx.xa.xid import Xid

T = TypeVar("T")


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
                    points.at(point)
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
