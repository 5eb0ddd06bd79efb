"""The log side of the manager: the rows that an effect writes, and what follows after success or failure.

A reply must never precede the durable write that it promises. A write that failed is answered with 541, and leaves the
entry *uncertain*: it is read from the log before any other operation.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from enum import Enum
from typing import ClassVar, Final

from dtx import failpoint
from dtx.failpoint import Point
from dtx.log.api import LeaseLost, LogConflict, LogError, TransactionLog
from dtx.log.records import (
    ENDINGS,
    Advance,
    BranchRecord,
    CloseWrite,
    CompleteWrite,
    Fate,
    Insert,
    JournalEntry,
    JournalEvent,
    Line,
    LogState,
    LogWrite,
    NoteWrite,
    Redirect,
    Replay,
    Unit,
    UnitState,
    WorkKind,
)
from dtx.manager.branch_runtime import TAKING, UNFINISHED, BranchEnd, BranchRuntime, core_state, log_state
from dtx.store.api import BrokerStore, UnitOutcome, UnitProgress
from dtx.xa import model
from dtx.xa.codes import Heuristic, ReplyCode, XaError
from dtx.xa.model import Ending, Persist, State, Vote
from dtx.xa.table import LOGGED
from dtx.xa.xid import Xid

EVENT: Final = {
    Ending.COMMITTED: JournalEvent.COMMITTED,
    Ending.ROLLED_BACK: JournalEvent.ROLLED_BACK,
    Ending.READ_ONLY: JournalEvent.READ_ONLY,
    Ending.TIMED_OUT: JournalEvent.TIMED_OUT,
    Ending.FORGOTTEN: JournalEvent.FORGOTTEN,
}
_END: Final = {
    JournalEvent.COMMITTED: BranchEnd.COMMITTED,
    JournalEvent.ROLLED_BACK: BranchEnd.ROLLED_BACK,
    JournalEvent.READ_ONLY: BranchEnd.READ_ONLY,
    JournalEvent.FORGOTTEN: BranchEnd.FORGOTTEN,
}
_REPEATED: Final = "messages may have been repeated, with the same x-dtx-id"
DTX: Final = "dtx"
"""The actor of events that no client or operator caused."""


class Direction(Enum):
    """The direction in which a decision sends the messages of a branch."""

    COMMIT = CloseWrite(publishes=Fate.PUBLISHED, consumes=Fate.CONSUMED)
    ROLLBACK = CloseWrite(publishes=Fate.DROPPED, consumes=Fate.PUT_BACK)

    @property
    def close(self) -> CloseWrite:
        """The fates of its messages."""
        return self.value


def direction(state: LogState, outcome: Heuristic) -> Direction:
    """The direction for a branch in *state* with the heuristic *outcome*."""
    if state is LogState.PREPARED:
        return Direction.COMMIT if outcome is Heuristic.COMMITTED else Direction.ROLLBACK
    return Direction.COMMIT if state in {LogState.COMMITTING, LogState.HEURISTIC_COMMITTING} else Direction.ROLLBACK


def event_of(fates: Sequence[object], *, over: bool) -> JournalEvent:
    """The journal event when an operator gives up messages with these *fates*, or when the branch is *over*."""
    if over:
        return JournalEvent.HEURISTIC
    return JournalEvent.DISCARDED if fates else JournalEvent.DECIDED


LoggedEffect = Persist | model.Complete | model.Note
"""An effect that is a write to the log."""


class BranchPersistence(ABC):
    """Converts effects to writes, and updates entries after them; one class for each kind of store.

    Args:
        log: the transaction log.
    """

    local: ClassVar[bool]
    """Whether messages are in the log's own database."""

    def __init__(self, log: TransactionLog) -> None:
        self._log = log

    def vote(self, entry: BranchRuntime) -> Vote:
        """The kind of work in the branch that its vote is about."""
        if entry.record is not None:
            return Vote.of(entry.record.publishes, entry.record.consumes)
        vote = Vote.NOTHING if entry.work is None else Vote.of(entry.work.publishes, entry.work.consumes)
        if vote is Vote.NOTHING and entry.outcomes and not entry.one_phase:
            return Vote.PUBLISHED  # its outcomes wait for the decision, so it must not end as read-only
        return vote

    @abstractmethod
    def restore(self, entry: BranchRuntime, record: BranchRecord) -> None:
        """At startup: tell the store the messages of the branch, or its units that may still happen."""

    def undefined(self, entry: BranchRuntime) -> Awaitable[None] | None:  # noqa: ARG002 - a broker has its own topology
        """Wait for definitions that must be in the log before the branch; ``None`` for none. Raises LogError."""
        return None

    def writing(self, entry: BranchRuntime, effect: LoggedEffect, now: float, actor: str) -> LogWrite:
        """The write for *effect*.

        Args:
            entry: the branch.
            effect: from the core.
            now: seconds since the epoch.
            actor: the user or operator that caused it.

        Raises:
            XaError: 541, nothing was written.
        """
        if isinstance(effect, model.Complete):
            return self._new_end(entry, effect.ending, now, actor)
        if isinstance(effect, model.Note):
            return NoteWrite(journal=entry.journal(EVENT[effect.ending], now, actor=actor))
        if entry.record is None:
            return self._new_insert(entry, effect.state, now, actor)
        return self._new_advance(entry, entry.record, effect, now, actor)

    def written(self, entry: BranchRuntime, effect: LoggedEffect, record: LogWrite) -> None:
        """Update *entry*: *record*, the write for *effect*, is durable."""
        if isinstance(effect, Persist):
            if isinstance(record, Insert):
                self._apply_insert(entry, record)
            elif isinstance(record, Advance):
                self._apply_advance(entry, record)
            return
        event = EVENT[effect.ending]
        if isinstance(effect, model.Complete):
            self._apply_end(entry, event)
            entry.record = None
        if event in ENDINGS:
            entry.end = _END.get(event, BranchEnd.OTHER)

    @abstractmethod
    def _new_insert(self, entry: BranchRuntime, state: State, now: float, actor: str) -> Insert:
        """The write by which the branch enters the log."""

    @abstractmethod
    def _apply_insert(self, entry: BranchRuntime, record: Insert) -> None:
        """Update *entry* after that write."""

    @abstractmethod
    def _new_advance(
        self, entry: BranchRuntime, record: BranchRecord, effect: Persist, now: float, actor: str
    ) -> Advance:
        """The write by which a branch with the row *record* changes its state."""

    @abstractmethod
    def _apply_advance(self, entry: BranchRuntime, change: Advance) -> None:
        """Update *entry* after that write."""

    @abstractmethod
    def _new_end(self, entry: BranchRuntime, ending: Ending, now: float, actor: str) -> CompleteWrite | NoteWrite:
        """The write by which the branch leaves the log; local work is committed or undone with it."""

    @abstractmethod
    def _apply_end(self, entry: BranchRuntime, event: JournalEvent | None) -> None:
        """Update the store: the branch has left the log, with *event* as its ending."""

    def failed(self, entry: BranchRuntime, record: LogWrite, what: str, error: LogError) -> XaError:
        """The 541 for a failed write of *record*; makes the entry uncertain, unless it was a note of no end."""
        # With a lost lease nothing was written, but the state in memory may be outdated.
        if not isinstance(record, NoteWrite) or record.journal.event in ENDINGS:
            entry.mark_uncertain()
        return log_failed(error, what, entry.xid)

    async def reread(self, entry: BranchRuntime) -> bool:
        """Replace the uncertain state of *entry* by the log's.

        Returns:
            Whether the branch still exists; otherwise ``entry.end`` is its ending.

        Raises:
            XaError: 541, the log cannot be read.
        """
        failpoint.at(Point.REREAD_BEFORE)
        try:
            found = await self._log.lookup(entry.vhost, entry.xid, entry.id)
        except LogError as error:
            raise log_failed(error, "reading the branch", entry.xid) from error
        failpoint.at(Point.REREAD_AFTER)
        if found.branch is not None and found.branch.id == entry.id:
            self._found(entry, found.branch)
            known = entry.branch
            if (
                known.state not in LOGGED
                or log_state(known.state) is not found.branch.state
                or known.outcome is not found.branch.outcome
            ):
                state = core_state(found.branch)
                entry.branch = entry.branch._replace(state=state, outcome=found.branch.outcome, deadline=None)
            entry.known()
            return True
        entry.known()
        ending = found.ending if found.ending is not None and found.ending.branch_id == entry.id else None
        if entry.record is None and ending is None:
            self.not_written(entry)
            return True  # it was never in the log; its work is still in memory
        event = ending.event if ending is not None and ending.event in ENDINGS else None
        self._apply_end(entry, event)
        entry.end = BranchEnd.OTHER if event is None else _END.get(event, BranchEnd.OTHER)
        return False

    def _found(self, entry: BranchRuntime, record: BranchRecord) -> None:
        entry.record = record

    def not_written(self, entry: BranchRuntime) -> None:  # noqa: B027 - a broker was not asked for anything yet
        """Undo the preparations for the first write of the branch, which the log does not have."""


class BrokerPersistence(BranchPersistence):
    """Branches whose messages are in a broker.

    Args:
        log: the transaction log.
        store: provides the units that are logged before they are sent.
    """

    local = False

    def __init__(self, log: TransactionLog, store: BrokerStore) -> None:
        super().__init__(log)
        self._store = store

    def restore(self, entry: BranchRuntime, record: BranchRecord) -> None:
        """Tell the store the units of an unfinished branch that may still happen."""
        if entry.branch.state not in UNFINISHED:
            return
        taking = entry.branch.state in TAKING
        for unit in record.units:
            if unit.state is UnitState.PENDING and taking == bool(unit.number):
                self._store.expect(record.id, record.vhost, unit)

    def _new_decision(
        self, entry: BranchRuntime, record: BranchRecord, state: State, outcome: Heuristic, now: float, actor: str
    ) -> Advance:
        """The write for a heuristic state: an operator's decision, or the end of its phase two."""
        to = log_state(state)
        decision = entry.decision
        fates = decision.fates if decision is not None else ()
        reason = decision.reason if decision is not None else None
        over = state is State.HEURISTIC
        begins = not over and record.state is LogState.PREPARED
        unit = self._store.next_unit(entry.vhost) if begins else None
        if fates:
            entry.cached = None  # phase two continues with the rows in the log
        return Advance(
            id=record.id,
            expect=record.state,
            version=record.version,
            to=to,
            decided_at=now if record.decided_at is None else None,
            stuck=None if begins or over else record.stuck,
            unit=unit,
            outcome=outcome if decision is not None else None,
            fates=fates,
            close=direction(record.state, outcome).close if over else None,
            journal=replace(
                entry.journal(event_of(fates, over=over), now, actor=actor, reason=reason),
                outcome=outcome,
            ),
        )

    def _apply_insert(self, entry: BranchRuntime, record: Insert) -> None:
        entry.record = record.branch
        entry.cached = record.work
        entry.origins = entry.work.origins() if entry.work is not None else {}

    def _new_insert(self, entry: BranchRuntime, state: State, now: float, actor: str) -> Insert:
        work = entry.work
        assert work is not None, "a branch that is not logged holds its work in memory"
        units = self._store.units_to_take(entry.vhost, work)
        logged = log_state(state)
        decided = state is State.COMMITTING
        record = BranchRecord(
            id=entry.id,
            vhost=entry.vhost,
            xid=entry.xid,
            state=logged,
            owner=entry.branch.owner,
            timeout=entry.branch.timeout,
            started_at=entry.started_at,
            prepared_at=now if state is State.PREPARED else None,
            decided_at=now if decided else None,
            one_phase=entry.one_phase,
            publishes=work.publishes,
            consumes=work.consumes,
            bytes=work.bytes,
            units=(self._store.next_unit(entry.vhost),) if decided else tuple(units.values()),
        )
        rows = work.to_log({holder: unit.number for holder, unit in units.items()})
        journal = Line(JournalEvent.PREPARED, now, actor) if state is State.PREPARED else None
        return Insert(branch=record, work=rows, journal=journal, since=entry.since)

    def _new_advance(
        self, entry: BranchRuntime, record: BranchRecord, effect: Persist, now: float, actor: str
    ) -> Advance:
        if effect.outcome is not None:
            return self._new_decision(entry, record, effect.state, effect.outcome, now, actor)
        to = log_state(effect.state)
        prepared = to is LogState.PREPARED
        decided = to in (LogState.COMMITTING, LogState.ROLLING_BACK)
        done = tuple(n for n, outcome in entry.taken.items() if outcome is UnitOutcome.HAPPENED)
        unit = self._store.next_unit(entry.vhost) if decided else None
        journal = entry.journal(JournalEvent.PREPARED, now, actor=actor) if prepared else None
        if journal is not None:
            journal = replace(journal, prepared_at=now)
        return Advance(
            id=record.id,
            expect=record.state,
            version=record.version,
            to=to,
            prepared_at=now if prepared else None,
            decided_at=now if decided else None,
            unit=unit,
            units_done=done,
            settled=self._not_taken(entry) if to is LogState.ROLLING_BACK else (),
            journal=journal,
        )

    def _not_taken(self, entry: BranchRuntime) -> tuple[int, ...]:
        """Positions that need no rollback: publishes, and deliveries that never left their queues."""
        if not entry.cached:
            return ()
        never = {number for number, outcome in entry.taken.items() if outcome is UnitOutcome.NEVER}
        return tuple(work.position for work in entry.cached if work.kind is WorkKind.PUBLISH or work.unit in never)

    async def advance(self, entry: BranchRuntime, change: Advance) -> None:
        """Write *change* and update *entry*.

        Raises:
            XaError: 541; the write may or may not have happened.
        """
        try:
            await self._log.write(change, urgent=not entry.answered)
        except LogError as error:
            raise self.failed(entry, change, f"writing {change.to}", error) from error
        self._apply_advance(entry, change)

    def _apply_advance(self, entry: BranchRuntime, change: Advance) -> None:
        record = entry.record
        assert record is not None
        units = {
            unit.number: replace(unit, state=UnitState.DONE) if unit.number in change.units_done else unit
            for unit in record.units
        }
        if change.unit is not None:
            units[change.unit.number] = change.unit
        entry.record = record._replace(
            state=change.to,
            version=record.version + 1,
            prepared_at=change.prepared_at or record.prepared_at,
            decided_at=change.decided_at or record.decided_at,
            stuck=change.stuck,
            outcome=change.outcome or record.outcome,
            units=tuple(units.values()),
        )
        if change.unit is not None or change.to is not record.state:
            entry.move_units(UnitProgress.UNSENT)
        self._free_receipts(record, entry.record)
        if entry.cached is not None and (change.settled or change.fates):
            settled, fates = frozenset(change.settled), dict(change.fates)
            entry.cached = [
                replace(work, fate=fates[work.position]) if work.position in fates else work
                for work in entry.cached
                if work.position not in settled
            ]

    def _free_receipts(self, before: BranchRecord, after: BranchRecord) -> None:
        """Delete the receipts of units whose outcome is no longer needed, now that the log has *after*."""
        taking = after.state is LogState.TAKING
        asked = {unit.nonce for unit in after.units if unit.state is not UnitState.DONE and (taking or not unit.number)}
        for unit in before.units:
            if unit.nonce not in asked:
                self._store.logged(after.vhost, unit)
        if after.state is LogState.HEURISTIC:
            self._store.ended(after.id)

    async def assign(self, entry: BranchRuntime, unit: Unit, replays: Sequence[Replay]) -> None:
        """Make a new unit 0 durable before it is sent, and the messages that it sends again.

        Raises:
            XaError: 541.
        """
        record = entry.record
        assert record is not None
        await self.advance(
            entry,
            Advance(
                id=record.id,
                expect=record.state,
                version=record.version,
                to=record.state,
                unit=unit,
                replays=tuple(replays),
            ),
        )
        entry.move_units(UnitProgress.SENT)

    async def note_stuck(
        self,
        entry: BranchRuntime,
        reason: str,
        now: float,
        actor: str,
        fates: tuple[tuple[int, Fate], ...] = (),
        unit: Unit | None = None,
    ) -> None:
        """Store the broker's message in the log. It is for people: the journal gets the same message only once.

        Raises:
            XaError: 541; the write may or may not have happened.
        """
        record = entry.record
        assert record is not None
        if record.stuck == reason and unit is None:
            return
        await self.advance(
            entry,
            Advance(
                id=record.id,
                expect=record.state,
                version=record.version,
                to=record.state,
                stuck=reason,
                unit=unit,
                fates=fates,
                journal=None
                if entry.noted == reason
                else entry.journal(JournalEvent.STUCK, now, actor=actor, reason=reason),
            ),
        )
        entry.noted = reason

    async def redirect(self, entry: BranchRuntime, to: Redirect, reason: str, now: float, actor: str) -> None:
        """Change the destination of a message that phase two cannot finish; the decision stays.

        Raises:
            XaError: 541; the write may or may not have happened.
        """
        record = entry.record
        assert record is not None
        entry.cached = None
        await self.advance(
            entry,
            Advance(
                id=record.id,
                expect=record.state,
                version=record.version,
                to=record.state,
                stuck=record.stuck,
                redirects=(to,),
                journal=entry.journal(JournalEvent.REDIRECTED, now, actor=actor, reason=reason),
            ),
        )

    def _new_end(self, entry: BranchRuntime, ending: Ending, now: float, actor: str) -> CompleteWrite:
        record = entry.record
        assert record is not None
        event = EVENT[ending]
        reason = _REPEATED if entry.may_repeat else None
        if entry.decision is not None:
            reason = entry.decision.reason
        journal: JournalEntry | Line = Line(event, now, actor)
        if reason is not None:
            journal = entry.journal(event, now, actor=actor, reason=reason)
            if journal.decided_at is None and ending is not Ending.FORGOTTEN:
                journal = replace(journal, decided_at=now)
        return CompleteWrite(
            id=record.id,
            expect=record.state,
            version=record.version,
            journal=journal,
            archive=ending is Ending.FORGOTTEN,
        )

    def _found(self, entry: BranchRuntime, record: BranchRecord) -> None:
        entry.cached = None  # the write of unknown outcome may have been about messages
        if entry.record is not None:
            self._free_receipts(entry.record, record)
        super()._found(entry, record)

    def _apply_end(self, entry: BranchRuntime, event: JournalEvent | None) -> None:  # noqa: ARG002 - receipts go in any case
        for unit in entry.record.units if entry.record is not None else ():
            if unit.state is not UnitState.DONE:
                self._store.logged(entry.vhost, unit)
        self._store.ended(entry.id)


def log_failed(error: LogError, what: str, xid: Xid) -> XaError:
    """The 541 for a failed log operation; the message of a LogError is safe to show."""
    if isinstance(error, LeaseLost):
        hint = "this dtx is not the active one any more"
    elif isinstance(error, LogConflict):
        hint = "the log does not have the expected state"
    else:
        hint = "the outcome is not known, try again"
    return XaError(ReplyCode.INTERNAL_ERROR, f"{what} failed: {error}; {hint} (xid {xid})")
