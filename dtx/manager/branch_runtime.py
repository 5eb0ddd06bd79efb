"""One branch at run time: the core's value, its row in the log, and its work in memory."""

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import Final
from uuid import UUID

from dtx.log.records import BranchRecord, Fate, JournalEntry, JournalEvent, LogState, WorkRow
from dtx.manager.limits import Holdings
from dtx.store.api import Plan, UnitOutcome, UnitProgress
from dtx.store.work import Decided, HeldWork, Returner
from dtx.telemetry import get_logger
from dtx.xa.branch import Branch
from dtx.xa.codes import XaFlag
from dtx.xa.model import ChannelLost, Happened, Operation, State
from dtx.xa.value import value

_log = get_logger(part="manager")

_LOG_STATE = {
    State.TAKING: LogState.TAKING,
    State.TAKING_ONE_PHASE: LogState.TAKING,
    State.PREPARED: LogState.PREPARED,
    State.COMMITTING: LogState.COMMITTING,
    State.ROLLING_BACK: LogState.ROLLING_BACK,
    State.HEURISTIC_COMMITTING: LogState.HEURISTIC_COMMITTING,
    State.HEURISTIC_ROLLING_BACK: LogState.HEURISTIC_ROLLING_BACK,
    State.HEURISTIC: LogState.HEURISTIC,
}
_STATE = {log: state for state, log in _LOG_STATE.items() if state is not State.TAKING_ONE_PHASE}

TAKING: Final = (State.TAKING, State.TAKING_ONE_PHASE)
"""States in which the store must take the consumed messages, and has not confirmed it."""
UNFINISHED: Final = {
    State.TAKING: Operation.PREPARE,
    State.TAKING_ONE_PHASE: Operation.ONE_PHASE,
    State.COMMITTING: Operation.COMMIT,
    State.ROLLING_BACK: Operation.ROLLBACK,
    State.HEURISTIC_COMMITTING: Operation.HEURISTIC_COMMIT,
    State.HEURISTIC_ROLLING_BACK: Operation.HEURISTIC_ROLLBACK,
}
"""States that dtx continues without a request, with the operation that does so."""


def log_state(state: State) -> LogState:
    """The state in the log for a state of the core."""
    return _LOG_STATE[state]


def core_state(record: BranchRecord) -> State:
    """The state of the core for a row of the log."""
    if record.state is LogState.TAKING and record.one_phase:
        return State.TAKING_ONE_PHASE  # the request was a commit, which no transaction manager repeats
    return _STATE[record.state]


def _random_octets(count: int) -> Iterator[bytes]:
    """*count* random bytes at a time, from larger reads of the system's randomness."""
    while True:
        octets = os.urandom(512 * count)
        for start in range(0, len(octets), count):
            yield octets[start : start + count]


_entropy = _random_octets(10)
_VERSION: Final = 0x7000 << 64 | 0x8000 << 48
_FREE: Final = ~(0xF000 << 64 | 0xC000 << 48)


def new_branch_id() -> UUID:
    """A UUID of version 7: ordered by time, so that the log's index grows at its end."""
    milliseconds = time.time_ns() // 1_000_000
    value = (milliseconds & 0xFFFF_FFFF_FFFF) << 80 | int.from_bytes(next(_entropy), "big")
    return UUID(int=value & _FREE | _VERSION)


@value
class BranchDecision:
    """An operator's decision about a branch; it is written with the state that it leads to.

    Args:
        reason: for people.
        fates: messages that are given up, by position.
    """

    reason: str
    fates: tuple[tuple[int, Fate], ...] = ()


class BranchEnd(Enum):
    """How a branch ended, and the operations that were waiting for that and get the answer to the first request."""

    COMMITTED = (Operation.COMMIT, Operation.ONE_PHASE)
    ROLLED_BACK = (Operation.ROLLBACK,)
    READ_ONLY = (Operation.PREPARE,)
    FORGOTTEN = (Operation.FORGET,)
    OTHER = ()
    """Without a request, or in an unknown way."""

    def answer(self, operation: Operation) -> XaFlag | None:
        """The answer to *operation* after this end; ``None`` where the log must be read for it."""
        if operation not in self.value:
            return None
        return XaFlag.RDONLY if self is BranchEnd.READ_ONLY else XaFlag.OK


class Activity(Enum):
    """Whether an operation runs on a branch, and whether its state is certain."""

    IDLE = auto()
    RUNNING = auto()
    FAILING = auto()
    """An operation runs, and a write of it has an unknown outcome."""
    UNCERTAIN = auto()
    """An operation ended like that: the branch is read from the log before any other operation."""
    REREADING = auto()


_IDLE: Final = Activity.IDLE
_RUNNING: Final = Activity.RUNNING

_LEADS_TO: Final = {
    UnitProgress.UNSENT: {UnitProgress.UNSENT, UnitProgress.SENT, UnitProgress.ANSWERED},
    UnitProgress.SENT: {UnitProgress.UNSENT, UnitProgress.SENT, UnitProgress.REFUSED, UnitProgress.APPLIED},
    UnitProgress.REFUSED: {UnitProgress.UNSENT},
    UnitProgress.APPLIED: {UnitProgress.UNSENT, UnitProgress.ANSWERED},
    UnitProgress.ANSWERED: {UnitProgress.ANSWERED},
}
"""Only three things lead back to UNSENT: a durable write of a new unit, one of another state, and the knowledge of what
each unit has taken. An end is answered again if its write to the log failed."""


class BranchRuntime:
    """A known branch: open, in doubt or heuristic.

    Only one operation at a time runs on it; others wait. Events that come meanwhile are *deferred*: they are applied
    afterwards.
    """

    __slots__ = (
        "_activity",
        "_waiters",
        "asked",
        "branch",
        "cached",
        "decision",
        "deferred",
        "doubt",
        "end",
        "holdings",
        "id",
        "may_repeat",
        "noted",
        "origins",
        "outcomes",
        "plan",
        "progress",
        "record",
        "settled",
        "since",
        "started_at",
        "taken",
        "vhost",
        "work",
        "xid",
    )

    def __init__(self, branch: Branch, vhost: str, *, now: float, work: HeldWork | None = None) -> None:
        self.branch = branch
        self.xid: Final = branch.xid
        self.vhost = vhost
        self.id = new_branch_id()
        self.started_at = now
        self.since: str | None = None
        """A moment of the log before it began here, if there are other members."""
        self.work = work
        self.holdings: Holdings
        """Where it is counted; set when a branch begins, or is restored from the log."""
        self.doubt: int | None = None
        """Bytes that it counts with as a branch in doubt; ``None`` while it does not count."""
        self.record: BranchRecord | None = None
        self.cached: Sequence[WorkRow] | None = None
        self._activity = _IDLE
        self.progress = UnitProgress.UNSENT
        self.may_repeat = False
        """The outcome of a unit is not known, or it happened in part: messages may have been repeated."""
        self.noted: str | None = None
        """The reason in the last line of the journal about a stuck phase two."""
        self.asked: Operation | None = None
        """The last request before the branch was in the log."""
        self.plan: Plan | None = None
        """How the log's database stores the work, in the last write or attempt."""
        self.origins: dict[int, Returner] = {}
        """Channels to which unroutable messages are returned, by position."""
        self.settled: frozenset[int] = frozenset()
        """Positions that phase two has finished, even if the log does not have that."""
        self.taken: dict[int, UnitOutcome] = {}
        self.decision: BranchDecision | None = None
        """The operator's decision while it is being written."""
        self.deferred: list[ChannelLost | Happened] = []
        self.outcomes: list[Decided] = [] if work is None else work.outcomes
        """Callbacks for the end of the branch, see :meth:`HeldWork.add_outcome`; the work is released at the vote."""
        self.end: BranchEnd | None = None
        self._waiters: list[asyncio.Future[None]] = []

    @classmethod
    def restored(cls, record: BranchRecord) -> "BranchRuntime":
        """The entry for a row of the log."""
        branch = Branch(
            xid=record.xid,
            owner=record.owner,
            state=core_state(record),
            timeout=record.timeout,
            outcome=record.outcome,
        )
        entry = cls(branch, record.vhost, now=record.started_at)
        entry.adopt(record)
        return entry

    def adopt(self, record: BranchRecord) -> None:
        """Set the id and the state from the row *record*."""
        self.id = record.id
        self.record = record
        self.noted = record.stuck
        if record.state not in {LogState.PREPARED, LogState.HEURISTIC}:
            self.progress = UnitProgress.SENT

    @property
    def one_phase(self) -> bool:
        """Whether it commits in one phase: as in the log, and before that as in the request."""
        return self.asked is Operation.ONE_PHASE if self.record is None else self.record.one_phase

    def journal(self, event: JournalEvent, now: float, *, actor: str, reason: str | None = None) -> JournalEntry:
        """A journal entry about this branch in its present state."""
        record = self.record
        work = self.work
        return JournalEntry(
            event=event,
            branch_id=self.id,
            vhost=self.vhost,
            xid=self.branch.xid,
            owner=self.branch.owner,
            at=now,
            actor=actor,
            reason=reason,
            outcome=self.branch.outcome,
            one_phase=self.one_phase,
            publishes=record.publishes if record else work.publishes if work else 0,
            consumes=record.consumes if record else work.consumes if work else 0,
            bytes=record.bytes if record else work.bytes if work else 0,
            started_at=self.started_at,
            prepared_at=record.prepared_at if record else None,
            decided_at=record.decided_at if record else None,
        )

    def conclude(self, *, committed: bool) -> None:
        """Call the callbacks that wait for the end of the branch. Idempotent."""
        if not self.outcomes:
            return
        outcomes = self.outcomes[:]
        self.outcomes.clear()
        for decided in outcomes:
            try:
                decided(committed)
            except Exception:  # noqa: BLE001 - logged; it concerns neither the others nor the caller
                _log.exception("an outcome was not applied", xid=self.xid, vhost=self.vhost)

    # -- its units

    @property
    def applied(self) -> bool:
        """Whether phase two has certainly happened, even if the log does not have that."""
        return self.progress in {UnitProgress.APPLIED, UnitProgress.ANSWERED}

    @property
    def answered(self) -> bool:
        """Whether its end was answered, even if the log does not have that."""
        return self.progress is UnitProgress.ANSWERED

    def move_units(self, to: UnitProgress) -> None:
        """Set the progress of its units."""
        assert to in _LEADS_TO[self.progress], f"{self.progress} -> {to} (xid {self.xid})"
        self.progress = to

    # -- order of operations

    @property
    def idle(self) -> bool:
        """Whether no operation runs on it and its state is certain."""
        return self._activity is _IDLE

    @property
    def busy(self) -> bool:
        """Whether an operation runs on it."""
        return self._activity is not _IDLE and self._activity is not Activity.UNCERTAIN

    @property
    def uncertain(self) -> bool:
        """Whether only the log has its state."""
        return self._activity is not _IDLE and self._activity is not _RUNNING

    def _move(self, to: Activity, *after: Activity) -> None:
        assert self._activity in after, f"{self._activity} -> {to} (xid {self.xid})"
        self._activity = to

    def claim(self) -> None:
        """Begin an operation."""
        assert self._activity is _IDLE, f"{self._activity} -> RUNNING (xid {self.xid})"
        self._activity = _RUNNING

    def mark_uncertain(self) -> None:
        """Note that a write of the running operation has an unknown outcome."""
        self._move(Activity.FAILING, Activity.RUNNING, Activity.FAILING)

    def reread(self) -> None:
        """Begin to read the branch, whose state is uncertain, from the log."""
        self._move(Activity.REREADING, Activity.UNCERTAIN)

    def known(self) -> None:
        """Note that the state was read from the log."""
        self._move(Activity.RUNNING, Activity.REREADING)

    async def wait_for_operation(self) -> None:
        """Wait until the running operation has finished."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def done(self) -> None:
        """Finish the running operation, and wake those that wait for it."""
        if self._activity is _RUNNING:
            self._activity = _IDLE
        else:
            self._move(Activity.UNCERTAIN, Activity.FAILING, Activity.REREADING)
        if self._waiters:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._waiters.clear()
