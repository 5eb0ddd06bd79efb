"""One branch at run time: the core's value, the row that the log has of it, and the work that it holds."""

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
"""States in which the store was asked to take what the branch consumed, and has not said that it did."""
UNFINISHED: Final = {
    State.TAKING: Operation.PREPARE,
    State.TAKING_ONE_PHASE: Operation.ONE_PHASE,
    State.COMMITTING: Operation.COMMIT,
    State.ROLLING_BACK: Operation.ROLLBACK,
    State.HEURISTIC_COMMITTING: Operation.HEURISTIC_COMMIT,
    State.HEURISTIC_ROLLING_BACK: Operation.HEURISTIC_ROLLBACK,
}
"""States that go on by themselves, with the operation that takes them further."""


def log_state(state: State) -> LogState:
    """The state in the log behind a state of the core."""
    return _LOG_STATE[state]


def core_state(record: BranchRecord) -> State:
    """The state of the core for a row of the log."""
    if record.state is LogState.TAKING and record.one_phase:
        return State.TAKING_ONE_PHASE  # it asked to commit, and no transaction manager will ask again
    return _STATE[record.state]


def _random_octets(count: int) -> Iterator[bytes]:
    """*count* octets of the system's randomness at a time; it is asked for many at once."""
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
    """What an operator has decided about a branch, and why; it is written with the state that it leads to.

    Args:
        reason: for people.
        fates: messages that are given up.
    """

    reason: str
    fates: tuple[tuple[int, Fate], ...] = ()


class BranchEnd(Enum):
    """How a branch is over, and what those hear who asked the same again meanwhile."""

    COMMITTED = (Operation.COMMIT, Operation.ONE_PHASE)
    ROLLED_BACK = (Operation.ROLLBACK,)
    FORGOTTEN = (Operation.FORGET,)
    OTHER = ()
    """By itself, or nobody knows how."""

    def answer(self, operation: Operation) -> XaFlag | None:
        """What *operation* is answered behind it; ``None`` where the log tells how the branch ended."""
        return XaFlag.OK if operation in self.value else None


class Activity(Enum):
    """Whether an operation runs on a branch, and whether the branch is known or only the log knows its state."""

    IDLE = auto()
    RUNNING = auto()
    FAILING = auto()
    """An operation runs, and a write of it may or may not have happened."""
    UNCERTAIN = auto()
    """It has ended so: the branch is read from the log before anything else is done with it."""
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
"""Back to UNSENT leads a durable write alone, of a new unit or of another state, or to know what every unit has taken.
An end is answered again where the log did not take it."""


class BranchRuntime:
    """A branch that is known: open, in doubt or heuristic.

    One operation at a time runs on it; others wait for their turn. Events that come meanwhile are *deferred*: they are
    applied afterwards.
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
        "origins",
        "outcomes",
        "plan",
        "progress",
        "record",
        "settled",
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
        self.work = work
        self.holdings: Holdings
        """Where it is counted; set by what begins a branch, or makes known one of the log."""
        self.doubt: int | None = None
        """Bytes that it holds as a branch in doubt; ``None`` while it does not count as one."""
        self.record: BranchRecord | None = None
        self.cached: Sequence[WorkRow] | None = None
        self._activity = _IDLE
        self.progress = UnitProgress.UNSENT
        self.may_repeat = False
        """What became of a unit is not known, or it happened in part: messages may have been repeated."""
        self.asked: Operation | None = None
        """What was asked last of a branch that was not in the log then."""
        self.plan: Plan | None = None
        """How the log's own database keeps the work, as it was last written or tried to."""
        self.origins: dict[int, Returner] = {}
        """Channels that want to hear of messages that could not be routed."""
        self.settled: frozenset[int] = frozenset()
        """Positions that phase two is through with, whatever the log says."""
        self.taken: dict[int, UnitOutcome] = {}
        self.decision: BranchDecision | None = None
        """The operator's, while it is being written."""
        self.deferred: list[ChannelLost | Happened] = []
        self.outcomes: list[Decided] = [] if work is None else work.outcomes
        """They wait for the end of the branch, see :meth:`HeldWork.add_outcome`; the work itself goes with the vote."""
        self.end: BranchEnd | None = None
        self._waiters: list[asyncio.Future[None]] = []

    @classmethod
    def restored(cls, record: BranchRecord) -> "BranchRuntime":
        """The entry of a row that the log has."""
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
        """Take over what the log says."""
        self.id = record.id
        self.record = record
        if record.state not in {LogState.PREPARED, LogState.HEURISTIC}:
            self.progress = UnitProgress.SENT

    @property
    def one_phase(self) -> bool:
        """Whether its commit was its vote: as the log has it, and before that as it was asked."""
        return self.asked is Operation.ONE_PHASE if self.record is None else self.record.one_phase

    def journal(self, event: JournalEvent, now: float, *, actor: str, reason: str | None = None) -> JournalEntry:
        """A line of the journal about this branch as it stands."""
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
        """The branch has ended: what waited for that happens. Idempotent."""
        if not self.outcomes:
            return
        outcomes = self.outcomes[:]
        self.outcomes.clear()
        for decided in outcomes:
            try:
                decided(committed)
            except Exception:  # noqa: BLE001 - logged; the others, and whoever ends the branch, have no part in it
                _log.exception("an outcome was not applied", xid=self.xid, vhost=self.vhost)

    # -- its units

    @property
    def applied(self) -> bool:
        """Whether phase two is known to have happened, though the log may not have it yet."""
        return self.progress in {UnitProgress.APPLIED, UnitProgress.ANSWERED}

    @property
    def answered(self) -> bool:
        """Whether its end was answered; only the log may not have it yet."""
        return self.progress is UnitProgress.ANSWERED

    def move_units(self, to: UnitProgress) -> None:
        """Its units have come to this."""
        assert to in _LEADS_TO[self.progress], f"{self.progress} -> {to} (xid {self.xid})"
        self.progress = to

    # -- whose turn

    @property
    def idle(self) -> bool:
        """Whether nothing runs on it, and nothing about it is uncertain."""
        return self._activity is _IDLE

    @property
    def busy(self) -> bool:
        """Whether an operation runs on it."""
        return self._activity is not _IDLE and self._activity is not Activity.UNCERTAIN

    @property
    def uncertain(self) -> bool:
        """Whether only the log knows its state."""
        return self._activity is not _IDLE and self._activity is not _RUNNING

    def _move(self, to: Activity, *after: Activity) -> None:
        assert self._activity in after, f"{self._activity} -> {to} (xid {self.xid})"
        self._activity = to

    def claim(self) -> None:
        """An operation begins."""
        assert self._activity is _IDLE, f"{self._activity} -> RUNNING (xid {self.xid})"
        self._activity = _RUNNING

    def lost_track(self) -> None:
        """A write of the running operation may or may not have happened."""
        self._move(Activity.FAILING, Activity.RUNNING, Activity.FAILING)

    def reread(self) -> None:
        """The branch, which is uncertain, is being read from the log."""
        self._move(Activity.REREADING, Activity.UNCERTAIN)

    def known(self) -> None:
        """What was read says what the branch is."""
        self._move(Activity.RUNNING, Activity.REREADING)

    async def through(self) -> None:
        """Wait until the running operation is through."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def done(self) -> None:
        """The running operation is through."""
        if self._activity is _RUNNING:
            self._activity = _IDLE
        else:
            self._move(Activity.UNCERTAIN, Activity.FAILING, Activity.REREADING)
        if self._waiters:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._waiters.clear()
