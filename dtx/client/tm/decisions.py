"""The log of decisions: what must be durable before a branch is told, and how several writers share one fsync.

Theory of operation. Presumed abort: only the decision to commit is written before it is told, and what the log does not
have is rolled back. A row's primary key is the gtrid, which makes it the one point where a transaction can be decided:
recovery that wants to roll an orphan back first inserts ``rollback`` under the same key. Whoever comes second finds the
row of the first. So a process that only seemed dead, because it was stopped for an hour or its clock was wrong, cannot
commit what was rolled back behind its back; nor can a commit that is stuck in a lost connection come in afterwards.

    decision   gtrid (primary key), format_id, node, decision ('commit' or 'rollback'), at, finished (null: not yet),
               resources (JSON: the names of the resources with a branch that votes, which are the bquals),
               recoveries (how often recovery took it up)
    heuristic  gtrid, resource (together the primary key), outcome, decision, reason, at, forgotten (null: not yet)
"""

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final, Self

from dtx.client.tm.errors import HeuristicReport, LogFailed

_FINISHED_KEPT: Final = 200
"""Finished decisions that wait for the next write, which takes them along without an fsync of their own."""


class Decision(StrEnum):
    """What was decided about a transaction."""

    COMMIT = "commit"
    ROLLBACK = "rollback"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRow:
    """One row of the table ``decision``; the module explains the columns."""

    gtrid: bytes
    format_id: int
    node: str
    decision: Decision
    at: datetime
    finished: datetime | None = None
    resources: tuple[str, ...] = ()
    recoveries: int = 0


@dataclass(slots=True)
class Entry:
    """A decision that waits to be written."""

    row: DecisionRow
    stands: Decision | None = None
    """What the log says afterwards: of two that decide, the first one wins."""
    error: Exception | None = None
    settled: bool = False


@dataclass(slots=True)
class Batch:
    """What goes into one transaction of the log."""

    entries: list[Entry] = field(default_factory=list)
    finished: list[tuple[bytes, datetime]] = field(default_factory=list)


class DecisionLog(ABC):
    """A log of decisions. Several threads may use it, and several processes of one node.

    Every method raises :class:`~dtx.client.tm.errors.LogFailed` where the log cannot be used. After that of
    :meth:`decide` or :meth:`fence` it is *not known* whether the row was written: :meth:`fence` finds out.
    """

    def __init__(self) -> None:
        self._queue = threading.Lock()
        self._waiting = Batch()
        self._writing = threading.RLock()

    # -- decisions ----------------------------------------------------------------------------------------------------

    def decide(self, row: DecisionRow) -> Decision:
        """Make a decision durable, unless there is one.

        Args:
            row: the decision.

        Returns:
            What stands: the row's, or the earlier one of somebody else.
        """
        entry = Entry(row)
        with self._queue:
            self._waiting.entries.append(entry)
        with self._writing:  # whoever gets in first writes for all who wait: one fsync for the group
            if not entry.settled:
                self._write_waiting()
        if entry.error is not None:
            raise LogFailed(f"the log of decisions did not answer: {entry.error}") from entry.error
        assert entry.stands is not None
        return entry.stands

    def fence(self, row: DecisionRow) -> Decision:
        """Decide to roll back, unless it was decided to commit; what stands. For orphans, and after an error."""
        return self.decide(
            DecisionRow(
                gtrid=row.gtrid,
                format_id=row.format_id,
                node=row.node,
                decision=Decision.ROLLBACK,
                at=row.at,
                resources=row.resources,
            )
        )

    def finish(self, gtrid: bytes) -> None:
        """All branches are completed. It is written with the next decision, or by :meth:`flush`: if it is lost,
        recovery asks the resources once more.
        """
        with self._queue:
            self._waiting.finished.append((gtrid, now()))
            full = len(self._waiting.finished) >= _FINISHED_KEPT
        if full:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        with self._writing:
            self._write_waiting()

    def _write_waiting(self) -> None:
        with self._queue:
            batch, self._waiting = self._waiting, Batch()
        if not batch.entries and not batch.finished:
            return
        try:
            self.write(batch)
        except BaseException as error:
            with self._queue:
                self._waiting.finished[:0] = batch.finished
            for entry in batch.entries:
                entry.error = LogFailed(str(error) or type(error).__name__)
            if not batch.entries or not isinstance(error, Exception):
                raise
        finally:
            for entry in batch.entries:
                entry.settled = True

    @abstractmethod
    def write(self, batch: Batch) -> None:
        """Write *batch* in one transaction, durable when this returns; fill in what stands."""

    @abstractmethod
    def read(self, gtrid: bytes) -> DecisionRow | None:
        """The decision about a transaction, ``None``: there is none, so it is rolled back."""

    @abstractmethod
    def unfinished(self, node: str, decision: Decision = Decision.COMMIT) -> list[DecisionRow]:
        """Decisions of a node that are not finished, the oldest first."""

    @abstractmethod
    def take_up(self, gtrid: bytes) -> None:
        """Count, durably, that recovery is about to complete the branches of a transaction."""

    @abstractmethod
    def withdraw(self, gtrid: bytes) -> None:
        """Remove a decision to roll back that turned out to be none of ours: the branch decided alone, in one phase."""

    @abstractmethod
    def prune(self, older: timedelta) -> int:
        """Remove decisions that were finished so long ago; how many. Heuristic outcomes are kept."""

    # -- heuristic outcomes -------------------------------------------------------------------------------------------

    @abstractmethod
    def record(self, report: HeuristicReport) -> None:
        """Make a heuristic outcome durable; a second report of the same branch changes nothing."""

    @abstractmethod
    def forgotten(self, gtrid: bytes, resource: str) -> None:
        """The resource has forgotten it."""

    @abstractmethod
    def heuristics(self, *, unforgotten: bool = False) -> list[tuple[HeuristicReport, datetime, datetime | None]]:
        """Reports with the times at which they were recorded and forgotten, the oldest first."""

    # -- who lives ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def claim(self, node: str, process: str) -> None:
        """Show others that *process* lives, until it ends in whatever way."""

    @abstractmethod
    def alive(self, node: str, process: str) -> bool:
        """Whether a process lives that has claimed this name."""

    @abstractmethod
    def close(self) -> None:
        """Write what waits, and let go of the claim. Doing it again changes nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def now() -> datetime:
    """This moment, UTC."""
    return datetime.now(UTC)
