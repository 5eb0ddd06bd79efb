"""The instants at which tests let a transaction manager die. Nothing happens there unless a test armed them."""

from collections.abc import Callable
from enum import IntEnum
from typing import Final

DIED: Final = 86
"""Exit status of a process that died at a point, as of :mod:`dtx.failpoint`."""


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


def at(point: Point) -> None:
    """This is *point*."""
    for reached in _armed:
        reached(point)


def arm(reached: Callable[[Point], None] | None) -> None:
    """From now on *reached* is called at each point, ``None``: nothing is; for tests."""
    _armed[:] = [] if reached is None else [reached]
