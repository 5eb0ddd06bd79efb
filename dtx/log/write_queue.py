"""Records that wait to be written, in the order in which they came. Writes of low priority wait beside the queue.

A larger group costs little more, so records that are not urgent wait for others: see :meth:`WriteQueue.add`.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, assert_never

from dtx.failpoint import Point
from dtx.log.api import LogError, OnWritten
from dtx.log.changes import Define, Store
from dtx.log.records import (
    Advance,
    CompleteWrite,
    DuplicateWrite,
    Insert,
    JournalEvent,
    LogState,
    LogWrite,
    NoteWrite,
    SettlementsWrite,
)
from dtx.telemetry import get_logger

MAX_GROUP: Final = 256
"""Records in one transaction: a larger group saves nothing more, and its first record waits longer."""
MAX_GROUP_BYTES: Final = 4 * 1024 * 1024
"""Bytes in one transaction, unless one record alone has more: a disk writes them in some milliseconds."""
MAX_QUEUED: Final = 8_192
"""Records in the queue, about one second of work; writes of low priority are not counted. At this limit, callers
of ``write`` wait before they queue; ``post`` queues regardless. The bodies are in memory in either case."""
_PATIENCE: Final = 0.003
"""Seconds for which a record without subject that is not urgent waits for others, mostly for the next prepare of the
same client. It waits in the queue, and leaves with the next group."""
_LOW_PRIORITY_WAIT: Final = 0.02
"""Seconds for which a write of low priority waits for others: a record with a subject that is not urgent. It waits
outside the queue. No other record can concern its branch before it is written, and urgent groups do not carry it."""
_MOST_LOW_PRIORITY: Final = 64
"""Writes of low priority that wait; at this number all join the queue. More save nothing, and so many callbacks at once
would delay others."""
_ROW_BYTES: Final = 512
_SETTLEMENT_BYTES: Final = 128

log = get_logger()


class Pending:
    """A record to write, and the callback for its outcome.

    A group has at most one record of each *subject*: the branch, as the number of its UUID, or all topology. Other
    records have none.
    """

    __slots__ = ("_written", "alone", "deadline", "line_id", "record", "size", "subject")

    def __init__(self, record: LogWrite, line_id: bytes, written: OnWritten, deadline: float) -> None:
        self.record = record
        self.line_id = line_id
        self._written: OnWritten | None = written
        self.deadline = deadline
        self.alone = False
        self.size = _ROW_BYTES
        self.subject: int | type[Define] | None = None
        match record:
            case Insert():
                self.subject = record.branch.id.int
                for piece in record.work:
                    self.size += len(piece.body) + len(piece.properties) + _ROW_BYTES
            case CompleteWrite() | Advance():
                self.subject = record.id.int
            case SettlementsWrite():
                self.size = len(record.settlements) * _SETTLEMENT_BYTES
            case DuplicateWrite():
                self.size += len(record.duplicate.body) + len(record.duplicate.properties)
            case NoteWrite() | Store():
                pass
            case Define():
                self.subject = Define
            case _ as never:
                assert_never(never)
        if record.change is not None:
            self.size += record.change.size

    @property
    def answered(self) -> bool:
        """Whether the callback was called."""
        return self._written is None

    def answer(self, error: LogError | None = None) -> None:
        """Call the callback, unless that was done: the record is durable, or *error* says what is known."""
        written, self._written = self._written, None
        if written is not None:
            try:
                written(error)
            except Exception:
                log.exception("the callback of a write failed")


class WriteQueue:
    """The queue of the writer.

    Args:
        loop: makes the timers.
        wake: called when there is a group to send.
    """

    __slots__ = ("_loop", "_low_priority", "_low_priority_timer", "_patience", "_queue", "_room", "_wake", "enough")

    def __init__(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        self._loop = loop
        self._wake = wake
        self.enough = 1
        """At this number of records in the queue, an urgent one wakes the writer."""
        self._queue: deque[Pending] = deque()
        self._patience: asyncio.TimerHandle | None = None
        self._low_priority: list[Pending] = []
        self._low_priority_timer: asyncio.TimerHandle | None = None
        self._room = asyncio.Event()

    def __len__(self) -> int:
        """The number of records that can be sent now: without writes of low priority."""
        return len(self._queue)

    @property
    def count(self) -> int:
        """The number of records that wait, including writes of low priority."""
        return len(self._queue) + len(self._low_priority)

    @property
    def full(self) -> bool:
        """Whether callers should pause: :data:`MAX_QUEUED` records are in the queue."""
        return len(self._queue) >= MAX_QUEUED

    @property
    def alone(self) -> bool:
        """Whether the first record must be written alone. The queue must not be empty."""
        return self._queue[0].alone

    async def room(self) -> None:
        """Return after the next removal of records: there may be room."""
        self._room.clear()
        await self._room.wait()

    def add(self, pending: Pending, *, urgent: bool) -> None:
        """Queue a record, regardless of :attr:`full`.

        Args:
            pending: the record.
            urgent: ``True`` wakes the writer when the queue has :attr:`enough` records. ``False`` waits for others:
                without a subject, 3 ms; with one, outside the queue, until 20 ms are over or 64 wait.
        """
        if not urgent and pending.subject is not None:
            self._add_low_priority(pending)
            return
        self._queue.append(pending)
        if urgent:
            if len(self._queue) >= self.enough:
                self._wake()
        elif self._patience is None:
            self._patience = self._loop.call_later(_PATIENCE, self._flush_patient)

    def put_back(self, group: Sequence[Pending]) -> None:
        """Queue the records of *group*, in their order, before all others."""
        self._queue.extendleft(reversed(group))

    def take(self) -> list[Pending]:
        """Remove the next group from the queue.

        It ends at :data:`MAX_GROUP` records, and before :data:`MAX_GROUP_BYTES` are exceeded. It ends before a second
        record of one subject, since statements run by kind, not in order. A record that must be *alone* is a group.
        """
        queue = self._queue
        group: list[Pending] = []
        subjects = set()
        size = 0
        while queue and len(group) < MAX_GROUP:
            pending = queue[0]
            subject = pending.subject
            if group and (subject in subjects or size + pending.size > MAX_GROUP_BYTES or pending.alone):
                break
            group.append(queue.popleft())
            if pending.alone:
                break
            if subject is not None:
                subjects.add(subject)
            size += pending.size
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        self._make_room()
        return group

    def take_late(self, now: float) -> list[Pending]:
        """Remove the records whose deadline is over, without writes of low priority."""
        late = [pending for pending in self._queue if pending.deadline <= now]
        self._queue = deque([pending for pending in self._queue if pending.deadline > now])
        self._make_room()
        return late

    def take_all(self) -> list[Pending]:
        """Remove all records, including writes of low priority."""
        self.flush_low_priority()
        every = list(self._queue)
        self._queue.clear()
        self._make_room()
        return every

    def flush_low_priority(self) -> None:
        """Move all writes of low priority into the queue, and wake the writer."""
        if self._low_priority_timer is not None:
            self._low_priority_timer.cancel()
            self._low_priority_timer = None
        if self._low_priority:
            self._queue.extend(self._low_priority)
            self._low_priority.clear()
            self._wake()

    def _flush_patient(self) -> None:
        self._patience = None
        self._wake()

    def _add_low_priority(self, pending: Pending) -> None:
        self._low_priority.append(pending)
        if len(self._low_priority) >= _MOST_LOW_PRIORITY:
            self.flush_low_priority()
        elif self._low_priority_timer is None:
            self._low_priority_timer = self._loop.call_later(_LOW_PRIORITY_WAIT, self.flush_low_priority)

    def _make_room(self) -> None:
        if not self._room.is_set():
            self._room.set()


Around = tuple[Point, Point]
"""The failpoint before a record's group is sent, and the one between its commit and the callbacks."""

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
"""Events of operators' actions on messages that phase two cannot finish."""


def points_around(record: LogWrite) -> Around:
    """The failpoints around *record*."""
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
        case CompleteWrite():
            return _LEAVES[record.journal.event]
        case NoteWrite(change=None):
            return Point.LOG_NOTED_BEFORE, Point.LOG_NOTED_AFTER
        case NoteWrite():
            return Point.LOG_ONE_PHASE_BEFORE, Point.LOG_ONE_PHASE_AFTER
        case Store() | SettlementsWrite() | DuplicateWrite():
            return Point.LOG_STORED_BEFORE, Point.LOG_STORED_AFTER
        case Define():
            return Point.LOG_DEFINED_BEFORE, Point.LOG_DEFINED_AFTER
        case _ as never:
            assert_never(never)
