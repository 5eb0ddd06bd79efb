"""What the transaction log stores: rows as values, and the closed union of writes.

Bytes that came over the wire (names, keys, properties, bodies) stay bytes. Times are seconds since the epoch (UTC).
What standalone mode stores beside branches is in :mod:`dtx.log.changes`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple
from uuid import UUID

from dtx.log.changes import Change, Define, Slot, Store
from dtx.xa.codes import Heuristic
from dtx.xa.value import value
from dtx.xa.xid import Xid


class LogState(StrEnum):
    """The state of a logged branch; what is not logged is presumed aborted."""

    TAKING = "taking"
    PREPARED = "prepared"
    COMMITTING = "committing"
    ROLLING_BACK = "rolling-back"
    HEURISTIC_COMMITTING = "heuristic-committing"
    HEURISTIC_ROLLING_BACK = "heuristic-rolling-back"
    HEURISTIC = "heuristic"


WITH_OUTCOME = frozenset({LogState.HEURISTIC_COMMITTING, LogState.HEURISTIC_ROLLING_BACK, LogState.HEURISTIC})
"""The states that have a heuristic outcome."""


class WorkKind(StrEnum):
    """What a piece of work does to its message."""

    PUBLISH = "publish"
    CONSUME = "consume"


class Fate(StrEnum):
    """What became of one message while its branch is in the log: which way it went."""

    UNSURE = "unsure"
    """It may have come in and is tried again: its unit was refused in part, or nobody knows what became of that."""
    PUBLISHED = "published"
    CONSUMED = "consumed"
    PUT_BACK = "put-back"
    DROPPED = "dropped"
    """Published in a branch that was rolled back: nobody will see it."""
    DISCARDED = "discarded"
    """An operator gave it up."""


OPEN_FATES = frozenset({None, Fate.UNSURE})
"""Of messages that phase two has still to finish."""
UNDELIVERED = frozenset({Fate.DROPPED, Fate.DISCARDED})
"""Of undelivered messages, which go to the archive when their branch is forgotten."""


EXCLUSIVE = 2
"""Flag of a consumption: its queue goes with the connection that declared it."""


@value
class WorkRow:
    """One message published or consumed in a branch.

    Args:
        position: order within the branch, from 0.
        kind: publish or consume.
        exchange: where it is (was) published.
        routing_key: with which key.
        queue: where it was consumed from; ``None`` for a publish that is not routed yet.
        flags: publish: bit 0 mandatory; consume: bit 0 redelivered, bit 1 :data:`EXCLUSIVE`; ``None`` where that is
            not kept (standalone mode).
        properties: content header from the property flags on, as received.
        body: the message body.
        unit: number of the unit that takes it; ``None`` for a publish.
        fate: what became of it; ``None`` while that is open.
    """

    position: int
    kind: WorkKind
    exchange: bytes
    routing_key: bytes
    queue: bytes | None = None
    flags: int | None = 0
    properties: bytes
    body: bytes
    unit: int | None = None
    fate: Fate | None = None

    @property
    def is_open(self) -> bool:
        """Whether phase two has still to finish it."""
        return self.fate in OPEN_FATES


@dataclass(frozen=True, slots=True, kw_only=True)
class Redirect:
    """A message goes elsewhere than it was meant to.

    Args:
        position: which.
        exchange, routing_key: where a publish goes from now on.
        queue: where a consumption is put back to; ``None`` for a publish.
    """

    position: int
    exchange: bytes = b""
    routing_key: bytes = b""
    queue: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseWrite:
    """What became of all messages whose fate is open, by their kind."""

    publishes: Fate
    consumes: Fate


def redirected(work: WorkRow, to: Redirect) -> WorkRow:
    """*work* as it goes elsewhere."""
    if work.kind is WorkKind.PUBLISH:
        return replace(work, exchange=to.exchange, routing_key=to.routing_key)
    return replace(work, queue=to.queue, flags=None if work.flags is None else work.flags & ~EXCLUSIVE)


def closed(work: WorkRow, close: CloseWrite) -> WorkRow:
    """*work* as it has gone, where that was open."""
    if not work.is_open:
        return work
    return replace(work, fate=close.publishes if work.kind is WorkKind.PUBLISH else close.consumes)


class UnitState(StrEnum):
    """What is known of a unit."""

    PENDING = "pending"
    DONE = "done"


@value
class Unit:
    """One upstream AMQP transaction made on behalf of a branch.

    Args:
        number: 0 is phase two (publishes or puts back); from 1 on, a taking-over of consumed messages.
        lock: name of the exclusive queue of the upstream connection that runs it.
        nonce: random; the receipt carries it.
        incarnation: of the broker, as its marker message said when the unit was logged; ``None`` when unknown.
        receipt: whether the unit leaves a receipt (not on a blocked connection).
        state: pending until it is known to have happened.
    """

    number: int
    lock: str
    nonce: UUID
    incarnation: str | None = None
    receipt: bool = True
    state: UnitState = UnitState.PENDING


class BranchRecord(NamedTuple):
    """One row of ``branch`` with its units; its work is read apart, since bodies are large.

    Args:
        published: standalone mode: where its messages are stored; nobody sees them while the branch is in the log.
            ``None`` in alongside mode (so a branch of the other mode is recognised).
        consumed: standalone mode: the messages that it holds; they leave when it commits. ``None`` as above.
    """

    id: UUID
    vhost: str
    xid: Xid
    state: LogState
    owner: str
    started_at: float
    version: int = 1
    timeout: int = 0
    prepared_at: float | None = None
    decided_at: float | None = None
    one_phase: bool = False
    publishes: int = 0
    consumes: int = 0
    bytes: int = 0
    stuck: str | None = None
    outcome: Heuristic | None = None
    units: tuple[Unit, ...] = ()
    published: tuple[Slot, ...] | None = None
    consumed: tuple[Slot, ...] | None = None


class JournalEvent(StrEnum):
    """What the journal tells; the last four of them end a branch."""

    PREPARED = "prepared"
    TIMED_OUT = "timed-out"
    STUCK = "stuck"
    DECIDED = "decided"
    """A heuristic decision is durable, its work begins."""
    DISCARDED = "discarded"
    """Messages that phase two was stuck with are given up."""
    REDIRECTED = "redirected"
    """A message that phase two was stuck with goes elsewhere."""
    HAZARD = "hazard"
    HEURISTIC = "heuristic"
    REPEATED = "repeated"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled-back"
    READ_ONLY = "read-only"
    FORGOTTEN = "forgotten"


ENDINGS = frozenset(
    {
        JournalEvent.COMMITTED,
        JournalEvent.ROLLED_BACK,
        JournalEvent.READ_ONLY,
        JournalEvent.FORGOTTEN,
    }
)


@value
class JournalEntry:
    """One line of the journal.

    Args:
        at: when it happened.
        actor: who caused it (user, operator, ``dtx`` for timers and restart).
        reason: for people; never a body, never a secret.
        started_at, prepared_at, decided_at: the times of the steps so far, where known.
    """

    event: JournalEvent
    branch_id: UUID
    vhost: str
    xid: Xid
    owner: str
    at: float
    actor: str
    reason: str | None = None
    outcome: Heuristic | None = None
    one_phase: bool = False
    publishes: int = 0
    consumes: int = 0
    bytes: int = 0
    started_at: float | None = None
    prepared_at: float | None = None
    decided_at: float | None = None


class Line(NamedTuple):
    """A line of the journal that says nothing beside this but what the branch's row says: PostgreSQL makes it of that.

    That is so where a branch enters the log with its vote, and where it leaves it in the ordinary way: two lines for
    each of thousands of branches a second.

    Args:
        event: ``PREPARED`` when the branch enters.
        at: when it happened: to enter is the time of the vote, to end, but for ``forgotten``, that of the decision.
        actor: see :class:`JournalEntry`.
    """

    event: JournalEvent
    at: float
    actor: str

    def entry(self, branch: BranchRecord) -> JournalEntry:
        """The whole line.

        Args:
            branch: as it is in the log with this line, or was in it until then.
        """
        decided_at = branch.decided_at
        if decided_at is None and self.event not in {JournalEvent.PREPARED, JournalEvent.FORGOTTEN}:
            decided_at = self.at
        return JournalEntry(
            event=self.event,
            branch_id=branch.id,
            vhost=branch.vhost,
            xid=branch.xid,
            owner=branch.owner,
            at=self.at,
            actor=self.actor,
            outcome=branch.outcome,
            one_phase=branch.one_phase,
            publishes=branch.publishes,
            consumes=branch.consumes,
            bytes=branch.bytes,
            started_at=branch.started_at,
            prepared_at=branch.prepared_at,
            decided_at=decided_at,
        )


@value
class Insert:
    """A branch enters the log, with all its work and units. Refused (LogConflict) where (vhost, xid) is there.

    With a :class:`Line` the branch is a prepared one of version 1, without units and outcome.
    """

    branch: BranchRecord
    work: Sequence[WorkRow] = ()
    journal: JournalEntry | Line | None = None
    change: Change | None = None


@value
class Advance:
    """A logged branch changes state (or notes something); version goes up by one.

    Args:
        id, expect, version: compare: the row must be in this state with this version, else LogConflict.
        to: set: the new state (may equal *expect*).
        prepared_at, decided_at: set where not ``None``.
        stuck: the broker's words, or ``None`` to clear.
        unit: insert or replace this unit (by number).
        units_done: these units are known to have happened.
        settled: positions of work that is finished and leaves the log.
        outcome: heuristic outcome; writes ``heuristic_outcome`` with actor, reason and time of *journal*.
        fates: what became of single messages.
        close: what became of all others that are open.
        redirects: messages that go elsewhere.
        change: standalone mode: what happens to messages with this.
        released: standalone mode: kinds of work whose messages the branch holds no more.
    """

    id: UUID
    expect: LogState
    version: int
    to: LogState
    prepared_at: float | None = None
    decided_at: float | None = None
    stuck: str | None = None
    unit: Unit | None = None
    units_done: tuple[int, ...] = ()
    settled: tuple[int, ...] = ()
    outcome: Heuristic | None = None
    fates: tuple[tuple[int, Fate], ...] = ()
    close: CloseWrite | None = None
    redirects: tuple[Redirect, ...] = ()
    change: Change | None = None
    released: frozenset[WorkKind] = frozenset()
    journal: JournalEntry | None = None


@value
class CompleteWrite:
    """A logged branch ends: branch, work, units and heuristic outcome leave, the journal keeps its ending.

    With a :class:`Line` and a change the branch has neither work nor units.

    Args:
        archive: what nobody got is kept in the archive: work with a fate of :data:`UNDELIVERED`, and in standalone mode
            whatever the branch still hides.
    """

    id: UUID
    expect: LogState
    version: int
    journal: JournalEntry | Line
    change: Change | None = None
    archive: bool = False


@value
class NoteWrite:
    """A journal line alone (a timeout of a branch that was never logged, a hazard).

    With a *change* it is the whole of a one-phase commit. If its outcome is unknown, :attr:`JournalEnding.branch_id`
    shows later whether it happened.
    """

    journal: JournalEntry
    change: Change | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedMessage:
    """An undelivered message of a forgotten branch."""

    branch_id: UUID
    position: int
    vhost: str
    xid: Xid
    owner: str
    kind: WorkKind
    exchange: bytes
    routing_key: bytes
    queue: bytes | None
    properties: bytes
    body: bytes
    fate: Fate
    at: float


LogWrite = Insert | Advance | CompleteWrite | NoteWrite | Store | Define


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEnding:
    """What the outcome memory has of a completed branch."""

    event: JournalEvent
    at: float
    branch_id: UUID
    owner: str
    outcome: Heuristic | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """The answer to "does the log know this xid": the branch where it is there, else its last ending."""

    branch: BranchRecord | None = None
    ending: JournalEnding | None = None
