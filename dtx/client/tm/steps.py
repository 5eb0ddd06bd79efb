"""How the algorithms of a transaction manager run, with threads and with asyncio.

There is one algorithm for both, a generator: it yields calls, and whoever drives it makes them, or awaits them. What a
call returns or raises comes back from its ``yield``, so ``try`` and ``finally`` mean what they always mean. Commitment
and recovery get what went wrong as an answer (:func:`ask`, :func:`access`).

:class:`CommitPoint` names the instants at which tests let a transaction manager die. They do nothing unless a test arms
them.
"""

from collections.abc import Callable, Generator
from enum import IntEnum
from functools import partial
from typing import Any, Final, TypeVar

from dtx.client.errors import XAER_RMFAIL, XAException
from dtx.client.tm.decisions import DecisionLog
from dtx.client.tm.errors import LogFailed, TransactionError

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


class CommitPoint(IntEnum):
    """Where a transaction is, and what dying there means. docs/how-to/python.md has the table."""

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


_armed: Final[list[Callable[[CommitPoint], None]]] = []


def reach(point: CommitPoint) -> None:
    """Tell the test that armed the points, if any."""
    for told in _armed:
        told(point)


def arm(reached: Callable[[CommitPoint], None] | None) -> None:
    """From now on *reached* is called at each point, ``None``: nothing is; for tests."""
    _armed[:] = [] if reached is None else [reached]


def ask(of: Any, operation: str, *arguments: Any) -> Work[Any]:
    """Call a method of a session or resource.

    Returns:
        What it returns, or the XAException that came instead: nothing is raised into an algorithm. A driver that raises
        what it should not must not keep the other branches from being told. The outcome of its call is not known, which
        is XAER_RMFAIL.
    """
    try:
        return (yield partial(getattr(of, operation), *arguments))
    except (XAException, TransactionError) as error:
        return error
    except Exception as error:  # noqa: BLE001 - see above
        return XAER_RMFAIL(f"{type(error).__name__}: {error}")


Access = Callable[[Callable[[DecisionLog], Any]], Work[Any]]
"""How algorithms call the log; see :func:`access`."""


def access(write: Callable[[Callable[[DecisionLog], Any]], Any]) -> Access:
    """A function that calls the log. Its result is what the log returns, or the TransactionError that came instead.

    Args:
        write: calls the log; with asyncio where that does not hold the event loop up.
    """

    def log(call: Callable[[DecisionLog], Any]) -> Work[Any]:
        try:
            return (yield partial(write, call))
        except (XAException, TransactionError) as error:
            return error
        except Exception as error:  # noqa: BLE001 - whatever it is, the log failed
            return LogFailed(f"{type(error).__name__}: {error}")

    return log
