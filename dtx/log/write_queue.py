"""Records that wait to be written: in the order in which they came, but for those that nobody waits for.

Company is what makes writes cheap, so whoever is in no hurry waits for it: :meth:`WriteQueue.add` says how long.
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
    Insert,
    JournalEvent,
    LogState,
    LogWrite,
    NoteWrite,
)
from dtx.telemetry import get_logger

MAX_GROUP: Final = 256
"""Records in one transaction: a larger group saves nothing more, and its first waiter waits longer."""
MAX_GROUP_BYTES: Final = 4 * 1024 * 1024
"""Octets in one transaction, unless one record alone has more: what a disk writes in some milliseconds."""
MAX_QUEUED: Final = 8_192
"""Records that wait: a second of work. Whoever writes more waits before queueing; the bodies are in memory anyway."""
_PATIENCE: Final = 0.003
"""Seconds that a record which nobody waits for may wait for company: the next prepare of the same client, mostly."""
_LEISURE: Final = 0.02
"""Seconds that the record of a branch which nobody waits for may wait for others of its kind. It keeps no place in the
queue: no other record can mean its branch before it is written, and what others wait for need not write it along."""
_MOST_AT_LEISURE: Final = 64
"""Records that wait like that; more are not cheaper together, and those who hear of them at once hold up others."""
_ROW_BYTES: Final = 512

log = get_logger()


class Pending:
    """A record on its way, and who is to be told of its outcome.

    Its *subject* occurs once in a group: the branch, as the number of its UUID, or topology as a whole.
    """

    __slots__ = ("_told", "alone", "deadline", "line_id", "record", "size", "subject")

    def __init__(self, record: LogWrite, line_id: bytes, told: OnWritten, deadline: float) -> None:
        self.record = record
        self.line_id = line_id
        self._told: OnWritten | None = told
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
        """Whether the outcome was told."""
        return self._told is None

    def answer(self, error: LogError | None = None) -> None:
        """Tell the outcome, unless that was done: it is durable, or *error* says what is known."""
        told, self._told = self._told, None
        if told is not None:
            try:
                told(error)
            except Exception:
                log.exception("who waited for a write failed when it was told")


class WriteQueue:
    """The queue of the writer.

    Args:
        loop: its timers are made with.
        wake: called when there is a group worth sending.
    """

    __slots__ = ("_at_leisure", "_leisure", "_loop", "_patience", "_queue", "_room", "_wake", "enough")

    def __init__(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        self._loop = loop
        self._wake = wake
        self.enough = 1
        """So many records are worth a group: the writer is woken."""
        self._queue: deque[Pending] = deque()
        self._patience: asyncio.TimerHandle | None = None
        self._at_leisure: list[Pending] = []
        self._leisure: asyncio.TimerHandle | None = None
        self._room = asyncio.Event()

    def __len__(self) -> int:
        """How many records could be sent now."""
        return len(self._queue)

    @property
    def count(self) -> int:
        """How many records wait, those that let others pass among them."""
        return len(self._queue) + len(self._at_leisure)

    @property
    def full(self) -> bool:
        """Whether so many wait that whoever adds more should pause."""
        return len(self._queue) >= MAX_QUEUED

    @property
    def alone(self) -> bool:
        """Whether the first is to be written without others. There is one."""
        return self._queue[0].alone

    async def room(self) -> None:
        """Return when there may be room again."""
        self._room.clear()
        await self._room.wait()

    def add(self, pending: Pending, *, urgent: bool) -> None:
        """Queue a record, however many wait.

        Args:
            pending: the record.
            urgent: ``False``: it waits for company, a little; one of a branch for longer, and lets others pass.
        """
        if not urgent and pending.subject is not None:
            self._add_at_leisure(pending)
            return
        self._queue.append(pending)
        if urgent:
            if len(self._queue) >= self.enough:
                self._wake()
        elif self._patience is None:
            self._patience = self._loop.call_later(_PATIENCE, self._lose_patience)

    def put_back(self, group: Sequence[Pending]) -> None:
        """Queue the records of *group*, in their order, before all others."""
        self._queue.extendleft(reversed(group))

    def take(self) -> list[Pending]:
        """The next group. It ends before a second record of one subject: statements run by kind, not in order."""
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
        """Those whose deadline is over."""
        late = [pending for pending in self._queue if pending.deadline <= now]
        self._queue = deque([pending for pending in self._queue if pending.deadline > now])
        self._make_room()
        return late

    def take_all(self) -> list[Pending]:
        """All that wait, those that let others pass among them."""
        self.end_leisure()
        every = list(self._queue)
        self._queue.clear()
        self._make_room()
        return every

    def end_leisure(self) -> None:
        """Those that nobody waits for have waited long enough."""
        if self._leisure is not None:
            self._leisure.cancel()
            self._leisure = None
        if self._at_leisure:
            self._queue.extend(self._at_leisure)
            self._at_leisure.clear()
            self._wake()

    def _lose_patience(self) -> None:
        self._patience = None
        self._wake()

    def _add_at_leisure(self, pending: Pending) -> None:
        self._at_leisure.append(pending)
        if len(self._at_leisure) >= _MOST_AT_LEISURE:
            self.end_leisure()
        elif self._leisure is None:
            self._leisure = self._loop.call_later(_LEISURE, self.end_leisure)

    def _make_room(self) -> None:
        if not self._room.is_set():
            self._room.set()


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
        case CompleteWrite():
            return _LEAVES[record.journal.event]
        case NoteWrite(change=None):
            return Point.LOG_NOTED_BEFORE, Point.LOG_NOTED_AFTER
        case NoteWrite():
            return Point.LOG_ONE_PHASE_BEFORE, Point.LOG_ONE_PHASE_AFTER
        case Store():
            return Point.LOG_STORED_BEFORE, Point.LOG_STORED_AFTER
        case Define():
            return Point.LOG_DEFINED_BEFORE, Point.LOG_DEFINED_AFTER
        case _ as never:
            assert_never(never)
