"""Which failpoints stand around the write of a record."""

from typing import Final, assert_never

from dtx.failpoint import Point
from dtx.log.changes import Define, Store
from dtx.log.records import Advance, Complete, Insert, JournalEvent, LogState, LogWrite, Note

Around = tuple[Point, Point]
"""The point before a record's group is sent, and the one when its commit is known and nobody was told."""

_ENTERS: Final[dict[LogState, Around]] = {
    LogState.TAKING: (Point.LOG_TAKING_BEFORE, Point.LOG_TAKING_AFTER),
    LogState.PREPARED: (Point.LOG_PREPARED_BEFORE, Point.LOG_PREPARED_AFTER),
    LogState.COMMITTING: (Point.LOG_COMMITTING_BEFORE, Point.LOG_COMMITTING_AFTER),
    LogState.ROLLING_BACK: (Point.LOG_ROLLING_BACK_BEFORE, Point.LOG_ROLLING_BACK_AFTER),
    LogState.HEURISTIC_COMMITTING: (Point.LOG_HEURISTIC_COMMITTING_BEFORE, Point.LOG_HEURISTIC_COMMITTING_AFTER),
    LogState.HEURISTIC_ROLLING_BACK: (
        Point.LOG_HEURISTIC_ROLLING_BACK_BEFORE,
        Point.LOG_HEURISTIC_ROLLING_BACK_AFTER,
    ),
    LogState.HEURISTIC: (Point.LOG_HEURISTIC_BEFORE, Point.LOG_HEURISTIC_AFTER),
}
_LEAVES: Final[dict[JournalEvent, Around]] = {
    JournalEvent.COMMITTED: (Point.LOG_COMMITTED_BEFORE, Point.LOG_COMMITTED_AFTER),
    JournalEvent.ROLLED_BACK: (Point.LOG_ROLLED_BACK_BEFORE, Point.LOG_ROLLED_BACK_AFTER),
    JournalEvent.FORGOTTEN: (Point.LOG_FORGOTTEN_BEFORE, Point.LOG_FORGOTTEN_AFTER),
}
_MENDS: Final = frozenset({JournalEvent.DISCARDED, JournalEvent.REDIRECTED})
"""Events of what operators do to messages that phase two is stuck with."""


def around(record: LogWrite) -> Around:
    """The points around *record*."""
    match record:
        case Insert():
            return _ENTERS[record.branch.state]
        case Advance():
            if record.to is not record.expect:
                return _ENTERS[record.to]
            if record.journal is not None and record.journal.event in _MENDS:
                return Point.LOG_MENDED_BEFORE, Point.LOG_MENDED_AFTER
            if record.stuck is not None:
                return Point.LOG_STUCK_BEFORE, Point.LOG_STUCK_AFTER
            return Point.LOG_UNIT_BEFORE, Point.LOG_UNIT_AFTER
        case Complete():
            return _LEAVES[record.journal.event]
        case Note(change=None):
            return Point.LOG_NOTED_BEFORE, Point.LOG_NOTED_AFTER
        case Note():
            return Point.LOG_ONE_PHASE_BEFORE, Point.LOG_ONE_PHASE_AFTER
        case Store():
            return Point.LOG_STORED_BEFORE, Point.LOG_STORED_AFTER
        case Define():
            return Point.LOG_DEFINED_BEFORE, Point.LOG_DEFINED_AFTER
        case _ as never:
            assert_never(never)
