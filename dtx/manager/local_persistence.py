"""The log side of branches whose messages are in the log's own database.

There is nothing to take, and no phase two: the transaction that decides a branch also does its work. So a crash finds
the work done or not done. The store changes its memory when the write is known to be durable. After a write of unknown
outcome it changes nothing until the log has been read again.
"""

from collections.abc import Awaitable
from dataclasses import replace
from typing import Final

from dtx.log.api import TransactionLog
from dtx.log.changes import Change, Slot
from dtx.log.records import (
    Advance,
    BranchRecord,
    CompleteWrite,
    Insert,
    JournalEntry,
    JournalEvent,
    Line,
    LogState,
    NoteWrite,
    WorkKind,
    WorkRow,
)
from dtx.manager.branch_persistence import EVENT, BranchPersistence
from dtx.manager.branch_runtime import BranchRuntime
from dtx.store.api import LocalStore, Plan
from dtx.store.work import HeldPublish, HeldWork
from dtx.telemetry import get_logger
from dtx.xa.codes import Heuristic
from dtx.xa.model import Ending, Persist, State, Vote

_log = get_logger(part="manager")
_NO_ROUTE = 312
"""AMQP 0-9-1, basic.return: no-route."""
_KINDS: Final = frozenset(WorkKind)


class LocalPersistence(BranchPersistence):
    """Writes branches together with their changes of messages.

    Args:
        log: the transaction log.
        store: in the same database.
    """

    local = True

    def __init__(self, log: TransactionLog, store: LocalStore) -> None:
        super().__init__(log)
        self._store = store

    def vote(self, entry: BranchRuntime) -> Vote:
        """All work is local."""
        vote = super().vote(entry)
        return vote if vote is Vote.NOTHING else Vote.LOCAL

    def restore(self, entry: BranchRuntime, record: BranchRecord) -> None:  # noqa: ARG002 - nothing of it is half-way
        """Hide its published messages and hold its consumed ones."""
        self._store.restore(record)

    def _new_advance(
        self, entry: BranchRuntime, record: BranchRecord, effect: Persist, now: float, actor: str
    ) -> Advance:
        """The write for an operator's decision, its work and journal in one transaction.

        Messages published in a branch that is rolled back stay stored and invisible until forget archives them.
        """
        decision, outcome = entry.decision, effect.outcome
        assert decision is not None, "phase two of local work is never apart from its decision"
        assert outcome is not None, "no other state of local work is in the table"
        published, consumed = _released(record, outcome)
        journal = entry.journal(JournalEvent.HEURISTIC, now, actor=actor, reason=decision.reason)
        return Advance(
            id=record.id,
            expect=record.state,
            version=record.version,
            to=LogState.HEURISTIC,
            decided_at=now,
            outcome=outcome,
            change=self._store.committing(published, consumed) if outcome is Heuristic.COMMITTED else None,
            released=_KINDS if outcome is Heuristic.COMMITTED else frozenset({WorkKind.CONSUME}),
            journal=replace(journal, outcome=outcome, decided_at=now),
        )

    def _apply_advance(self, entry: BranchRuntime, change: Advance) -> None:
        record, outcome = entry.record, change.outcome
        assert record is not None
        assert outcome is not None
        self._decided(entry, record, outcome)
        entry.record = record._replace(
            state=change.to,
            version=record.version + 1,
            decided_at=change.decided_at,
            outcome=outcome,
            published=() if outcome is Heuristic.COMMITTED else record.published,
            consumed=(),
        )

    def _decided(self, entry: BranchRuntime, record: BranchRecord, outcome: Heuristic) -> None:
        """Update the store: an operator's decision about *record* is durable."""
        published, consumed = _released(record, outcome)
        if outcome is Heuristic.COMMITTED:
            self._store.committed(published, consumed)
            self._notify_publishers(entry)
        else:
            self._store.rolled_back(published, consumed)
        entry.plan = None

    def _found(self, entry: BranchRuntime, record: BranchRecord) -> None:
        before = entry.record
        if before is not None and record.state is not before.state and record.outcome is not None:
            self._decided(entry, before, record.outcome)
        super()._found(entry, record)

    def _new_insert(self, entry: BranchRuntime, state: State, now: float, actor: str) -> Insert:
        """The write for the vote: messages are stored, and stay invisible."""
        assert state is State.PREPARED, "no other state of local work is in the table"
        plan, work = self._plan(entry)
        record = BranchRecord(
            id=entry.id,
            vhost=entry.vhost,
            xid=entry.xid,
            state=LogState.PREPARED,
            owner=entry.branch.owner,
            timeout=entry.branch.timeout,
            started_at=entry.started_at,
            prepared_at=now,
            publishes=work.publishes,
            consumes=work.consumes,
            bytes=work.bytes,
            published=plan.published,
            consumed=plan.consumed,
        )
        return Insert(branch=record, change=plan.change, journal=Line(JournalEvent.PREPARED, now, actor))

    def _apply_insert(self, entry: BranchRuntime, record: Insert) -> None:
        entry.record = record.branch
        plan = entry.plan
        if plan is not None:  # the log has the messages
            entry.plan = replace(plan, change=Change()) if plan.unroutable else None

    def _new_end(self, entry: BranchRuntime, ending: Ending, now: float, actor: str) -> CompleteWrite | NoteWrite:
        """The write for decision, work and journal in one transaction."""
        event = EVENT[ending]
        record = entry.record
        if record is None:
            journal = replace(entry.journal(event, now, actor=actor), decided_at=now)
            plan, _ = self._plan(entry)
            change = _both(plan.change, self._store.committing(plan.published, plan.consumed))
            return NoteWrite(journal=journal, change=change)
        return CompleteWrite(
            id=record.id,
            expect=record.state,
            version=record.version,
            journal=self._line(entry, event, now, actor),
            change=self._change(record, event),
            archive=ending is Ending.FORGOTTEN,
        )

    @staticmethod
    def _line(entry: BranchRuntime, event: JournalEvent, now: float, actor: str) -> JournalEntry | Line:
        if entry.decision is None:
            return Line(event, now, actor)
        return entry.journal(event, now, actor=actor, reason=entry.decision.reason)

    def undefined(self, entry: BranchRuntime) -> Awaitable[None] | None:
        """Wait for the queues that the branch publishes to, when the log does not have them yet."""
        return None if entry.record is not None or entry.work is None else self._store.defined_for(entry.work)

    def _plan(self, entry: BranchRuntime) -> tuple[Plan, HeldWork]:
        work = entry.work
        assert work is not None, "a branch that is not logged holds its work in memory"
        plan = entry.plan = self._store.plan(entry.vhost, work)
        return plan, work

    def _change(self, record: BranchRecord, event: JournalEvent) -> Change | None:
        published, consumed = _slots(record)
        match event:
            case JournalEvent.COMMITTED:
                return self._store.committing(published, consumed)
            case JournalEvent.ROLLED_BACK | JournalEvent.FORGOTTEN:
                # The work of a forgotten branch was done with the decision; only archived messages are left to drop.
                return self._store.rolling_back(published, consumed)
            case _:
                return None

    def _apply_end(self, entry: BranchRuntime, event: JournalEvent | None) -> None:
        if entry.record is not None:
            published, consumed = _slots(entry.record)
        elif entry.plan is not None:
            published, consumed = entry.plan.published, entry.plan.consumed
        else:
            return
        match event:
            case JournalEvent.COMMITTED:
                self._store.committed(published, consumed)
                self._notify_publishers(entry)
            case JournalEvent.ROLLED_BACK | JournalEvent.FORGOTTEN:
                self._store.rolled_back(published, consumed)
            case _:
                pass
        entry.plan = None

    def not_written(self, entry: BranchRuntime) -> None:
        """See :meth:`BranchPersistence.not_written`."""
        plan, entry.plan = entry.plan, None
        if plan is not None:  # its published messages keep no queue alive now; it still has the consumed ones
            self._store.rolled_back(plan.published, ())

    def _notify_publishers(self, entry: BranchRuntime) -> None:
        for publish in entry.plan.unroutable if entry.plan is not None else ():
            if publish.origin is not None:
                publish.origin.returned(_as_work(publish), _NO_ROUTE, b"NO_ROUTE")
            else:
                self._store.dropped()
            _log.info(
                "message could not be routed",
                xid=entry.xid,
                vhost=entry.vhost,
                exchange=publish.exchange,
                publisher="told" if publish.origin is not None else "not mandatory",
            )


def _slots(record: BranchRecord) -> tuple[tuple[Slot, ...], tuple[Slot, ...]]:
    return record.published or (), record.consumed or ()


def _released(record: BranchRecord, outcome: Heuristic) -> tuple[tuple[Slot, ...], tuple[Slot, ...]]:
    """The published and consumed slots that the branch no longer has after a decision for *outcome*."""
    published, consumed = _slots(record)
    return (published if outcome is Heuristic.COMMITTED else ()), consumed


def _both(first: Change, second: Change) -> Change:
    return Change(
        puts=(*first.puts, *second.puts),
        drops=(*first.drops, *second.drops),
        expiries=(*first.expiries, *second.expiries),
        delivered=(*first.delivered, *second.delivered),
    )


def _as_work(publish: HeldPublish) -> WorkRow:
    return WorkRow(
        position=0,
        kind=WorkKind.PUBLISH,
        exchange=publish.exchange,
        routing_key=publish.routing_key,
        flags=int(publish.mandatory),
        properties=publish.properties,
        body=publish.body,
    )
