"""The drivers for the algorithms of a transaction manager, with threads and with asyncio.

Both use the same algorithms. An algorithm is a generator that yields calls. The driver makes the calls, or awaits them.
The ``yield`` returns the result of the call, or raises its exception. ``try`` and ``finally`` therefore work as usual.
Commitment and recovery get errors as answers (:func:`ask`, :func:`access`).

:class:`CommitPoint` names the points at which tests stop a transaction manager. The points do nothing unless a test
arms them.
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
"""A generator that yields calls in their order and returns a result."""


def drive(work: Work[T]) -> T:
    """Make the calls of *work* in this thread and return its result."""
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
    """Make the calls of *work* in this task, await each, and return the result."""
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
    """The points of a transaction at which the process may die. docs/how-to/python.md has the table of results."""

    BEGUN = 1
    """The branches exist, and the application works in them."""
    ENDED = 2
    """One more branch is dissociated from its channel."""
    PREPARED = 3
    """One more branch is prepared."""
    VOTED = 4
    """All branches are prepared; nothing is decided."""
    DECIDED = 5
    """The decision to commit is durable; no branch has got it."""
    COMMITTED = 6
    """One more branch is committed."""
    COMPLETED = 7
    """All branches have got the decision; in the log the decision is unfinished."""
    FINISHED = 8
    """The log has been told that the decision is finished."""
    ONE_PHASE_BEFORE = 9
    """The only branch that has work is about to be committed in one phase."""
    ONE_PHASE_AFTER = 10
    """The branch is committed or not; the application does not know it yet."""
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
    """Recovery has written that it completes an unfinished decision; no branch has got it."""
    RECOVERY_COMPLETED = 17
    """Recovery has completed one more branch."""
    RECOVERY_FINISHED = 18
    """Recovery has told the log that a decision is finished."""


_armed: Final[list[Callable[[CommitPoint], None]]] = []


def reach(point: CommitPoint) -> None:
    """Call the function of the test that armed the points, if there is one."""
    for callback in _armed:
        callback(point)


def arm(reached: Callable[[CommitPoint], None] | None) -> None:
    """Arm the points for a test: each point calls *reached*. ``None`` disarms them."""
    _armed[:] = [] if reached is None else [reached]


def ask(of: Any, operation: str, *arguments: Any) -> Work[Any]:
    """Call a method of a session or resource.

    Returns:
        The result of the method, or the XAException or TransactionError that it raised. Nothing is raised into an
        algorithm. An unexpected exception of a driver must not keep the decision from the other branches. The outcome
        of its call is not known, so the answer is XAER_RMFAIL.
    """
    try:
        return (yield partial(getattr(of, operation), *arguments))
    except (XAException, TransactionError) as error:
        return error
    except Exception as error:  # noqa: BLE001 - see above
        return XAER_RMFAIL(f"{type(error).__name__}: {error}")


Access = Callable[[Callable[[DecisionLog], Any]], Work[Any]]
"""The type of the function with which algorithms call the log; see :func:`access`."""


def access(write: Callable[[Callable[[DecisionLog], Any]], Any]) -> Access:
    """Make a function that calls the log. It returns the result of the log, or the exception as an answer.

    Args:
        write: a function that calls the log. With asyncio it must not block the event loop.
    """

    def log(call: Callable[[DecisionLog], Any]) -> Work[Any]:
        try:
            return (yield partial(write, call))
        except (XAException, TransactionError) as error:
            return error
        except Exception as error:  # noqa: BLE001 - whatever it is, the log failed
            return LogFailed(f"{type(error).__name__}: {error}")

    return log
