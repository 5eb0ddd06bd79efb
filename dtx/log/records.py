"""The rows of the transaction log as values, and the closed union of writes.

Bytes that came over the wire (names, keys, properties, bodies) stay bytes. Times are seconds since the epoch (UTC).
:mod:`dtx.log.changes` has the other rows of standalone mode.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar, Final, NamedTuple
from uuid import UUID

from dtx.log.changes import Change, Define, Slot, Store
from dtx.xa.codes import Heuristic
from dtx.xa.value import value
from dtx.xa.xid import Xid


class LogState(StrEnum):
    """The state of a logged branch; a branch that is not logged is presumed aborted."""

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
    """The operation of a branch on a message."""

    PUBLISH = "publish"
    CONSUME = "consume"


class Fate(StrEnum):
    """The fate of one message while its branch is in the log: the direction that it took."""

    UNSURE = "unsure"
    """Perhaps published or put back, and tried again: its unit was refused in part, or has an unknown outcome."""
    PUBLISHED = "published"
    CONSUMED = "consumed"
    PUT_BACK = "put-back"
    DROPPED = "dropped"
    """Published in a branch that was rolled back: no client will receive it."""
    DISCARDED = "discarded"
    """An operator gave it up."""


OPEN_FATES = frozenset({None, Fate.UNSURE})
"""The fates of messages that phase two must still finish."""
UNDELIVERED = frozenset({Fate.DROPPED, Fate.DISCARDED})
"""The fates of undelivered messages, which are archived when their branch is forgotten."""


EXCLUSIVE = 2
"""Flag of a consumed message: its queue is deleted with the connection that declared it."""


@value
class WorkRow:
    """One message published or consumed in a branch.

    Args:
        position: order within the branch, from 0.
        kind: publish or consume.
        exchange: the exchange of its publish.
        routing_key: the routing key of its publish.
        queue: the queue it was consumed from, or that it is routed to; ``None`` for a publish that is not routed yet.
        flags: publish: bit 0 mandatory; consume: bit 0 redelivered, bit 1 :data:`EXCLUSIVE`; ``None`` when they are
            not stored (standalone mode).
        properties: content header from the property flags on, as received.
        body: the message body.
        unit: number of the unit that takes it from the broker; ``None`` for a publish.
        fate: the fate; ``None`` while it is open.
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
        """Whether phase two must still finish it."""
        return self.fate in OPEN_FATES


@dataclass(frozen=True, slots=True, kw_only=True)
class Redirect:
    """A message gets another destination.

    Args:
        position: of the message.
        exchange, routing_key: the new destination of a publish.
        queue: the queue that a consumed message is put back to; ``None`` for a publish.
    """

    position: int
    exchange: bytes = b""
    routing_key: bytes = b""
    queue: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseWrite:
    """The fates of all open messages, by kind."""

    publishes: Fate
    consumes: Fate


def redirected(work: WorkRow, to: Redirect) -> WorkRow:
    """*work* with the destination *to*."""
    if work.kind is WorkKind.PUBLISH:
        return replace(work, exchange=to.exchange, routing_key=to.routing_key)
    return replace(work, queue=to.queue, flags=None if work.flags is None else work.flags & ~EXCLUSIVE)


def closed(work: WorkRow, close: CloseWrite) -> WorkRow:
    """*work* with its fate from *close*, if it was open."""
    if not work.is_open:
        return work
    return replace(work, fate=close.publishes if work.kind is WorkKind.PUBLISH else close.consumes)


class UnitState(StrEnum):
    """Whether a unit has certainly happened."""

    PENDING = "pending"
    DONE = "done"


@value
class Unit:
    """One AMQP transaction of dtx at the broker, for a branch.

    Args:
        number: 0 is phase two (publishes or puts back); from 1 on, it takes consumed messages.
        lock: name of the exclusive queue of the upstream connection that runs it.
        nonce: random; the receipt carries it.
        incarnation: of the broker, by its marker message when the unit was logged; ``None`` when unknown.
        receipt: whether the unit leaves a receipt (not on a blocked connection).
        state: pending until it is known to have happened.
        attempt: its number among the units that were sent for the same work, from 1.
    """

    number: int
    lock: str
    nonce: UUID
    incarnation: str | None = None
    receipt: bool = True
    state: UnitState = UnitState.PENDING
    attempt: int = 1


class BranchRecord(NamedTuple):
    """One row of ``branch`` with its units; its work is read separately, since bodies are large.

    Args:
        published: standalone mode: the slots of its messages, invisible while the branch is in the log. ``None`` in
            alongside mode, which distinguishes branches of the two modes.
        consumed: standalone mode: the slots of messages that it consumed; deleted when it commits. ``None`` as above.
        member: the member that has it; ``None`` for a branch that is not written yet, and if dtx is alone.
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
    member: UUID | None = None


class JournalEvent(StrEnum):
    """The events of the journal; the last four end a branch."""

    PREPARED = "prepared"
    TIMED_OUT = "timed-out"
    STUCK = "stuck"
    DECIDED = "decided"
    """A heuristic decision is durable; its work begins."""
    DISCARDED = "discarded"
    """An operator has given up messages that phase two could not finish."""
    REDIRECTED = "redirected"
    """An operator has changed the destination of a message that phase two could not finish."""
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
    """One entry of the journal.

    Args:
        at: the time of the event.
        actor: the user or operator that caused it, ``dtx`` for timers and restart.
        reason: for people; never a body, never a secret.
        started_at, prepared_at, decided_at: the times of earlier steps, where known.
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
    """A journal entry whose other columns PostgreSQL copies from the branch's row.

    It is used when a branch enters the log with its vote, and when it leaves the log normally. That saves the transfer
    of two entries for each of thousands of branches a second.

    Args:
        event: ``PREPARED`` when the branch enters.
        at: the time of the event: on entry that of the vote, at the end that of the decision, unless ``forgotten``.
        actor: see :class:`JournalEntry`.
    """

    event: JournalEvent
    at: float
    actor: str

    def entry(self, branch: BranchRecord) -> JournalEntry:
        """The whole entry.

        Args:
            branch: its row after it has entered, or before it leaves.
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
    """A branch enters the log, with all its work and units. DuplicateXid when (vhost, xid) is already there.

    With a :class:`Line` the branch is a prepared one of version 1, without units and outcome.

    Args:
        since: a moment of the log before the branch began. DuplicateXid when a branch of another member with its xid
            has ended since then. ``None`` if there are no other members.
    """

    branch: BranchRecord
    work: Sequence[WorkRow] = ()
    journal: JournalEntry | Line | None = None
    change: Change | None = None
    since: str | None = None


@value
class Replay:
    """A message of a branch that dtx sends again: an earlier copy may be in a queue.

    Args:
        position: of the message in its branch.
        exchange, routing_key: where the first copy was sent.
        digest: identifies destination and body.
    """

    position: int
    exchange: bytes
    routing_key: bytes
    digest: bytes


@value
class Advance:
    """A logged branch changes state (or only its details); version goes up by one.

    Args:
        id, expect, version: compare: the row must be in this state with this version, else LogConflict.
        to: set: the new state (may equal *expect*).
        prepared_at, decided_at: set where not ``None``.
        stuck: the broker's message, or ``None`` to clear it.
        unit: insert or replace this unit (by number).
        units_done: these units have certainly happened.
        settled: positions of work that is finished and leaves the log.
        outcome: heuristic outcome; writes ``heuristic_outcome`` with actor, reason and time of *journal*.
        fates: of single messages, by position.
        close: the fates of all other open messages.
        redirects: new destinations of messages.
        replays: messages that *unit* sends again, one for each position; the first replay of a message stays, with the
            time of the last one.
        change: standalone mode: changes of messages, in the same transaction.
        released: standalone mode: kinds of work whose messages no longer belong to the branch.
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
    replays: tuple[Replay, ...] = ()
    change: Change | None = None
    released: frozenset[WorkKind] = frozenset()
    journal: JournalEntry | None = None


@value
class CompleteWrite:
    """A logged branch ends: branch, work, units and heuristic outcome are deleted, the journal keeps its ending.

    With a :class:`Line` and a change the branch has neither work nor units.

    Args:
            archive: archive the undelivered messages: work with a fate of :data:`UNDELIVERED`, and in standalone mode
                the messages that the branch published.
    """

    id: UUID
    expect: LogState
    version: int
    journal: JournalEntry | Line
    change: Change | None = None
    archive: bool = False


@value
class NoteWrite:
    """A journal entry alone (a timeout of a branch that was never logged, a hazard).

    With a *change* it is a complete one-phase commit. If its outcome is unknown, :attr:`JournalEnding.branch_id`
    shows later whether it happened.
    """

    journal: JournalEntry
    change: Change | None = None


MOVED: Final = 2**31 - 1
"""The attempt of a message that a branch puts back, although it was perhaps not taken: no copy of it is needed."""


@value
class SettledCopy:
    """A consumer has settled a copy of a message in a queue.

    Args:
        branch_id, position: of the message.
        vhost, queue: where it was consumed.
        attempt: of the unit that published this copy, or :data:`MOVED`.
        digest: of its content, see :class:`Replay`.
    """

    branch_id: UUID
    position: int
    vhost: str
    queue: bytes
    attempt: int
    digest: bytes = b""


@value
class SettlementsWrite:
    """Settlements. The first one of a message in a queue stays; only one of a moved message replaces it."""

    settlements: tuple[SettledCopy, ...]
    change: ClassVar[None] = None
    journal: ClassVar[None] = None


@value
class Duplicate:
    """A copy of a message that was not delivered, because another copy was settled in its queue before.

    Args:
        branch_id, position: of the message.
        vhost, queue: where the copy was.
        attempt: of the unit that published this copy.
        exchange, routing_key: as published.
        properties: content header from the property flags on, as received.
        body: the message body.
    """

    branch_id: UUID
    position: int
    vhost: str
    queue: bytes
    attempt: int
    exchange: bytes
    routing_key: bytes
    properties: bytes
    body: bytes


@value
class DuplicateWrite:
    """A duplicate is kept. Writing it again has no effect."""

    duplicate: Duplicate
    change: ClassVar[None] = None
    journal: ClassVar[None] = None


@value
class LoggedCopies:
    """The replays, settlements and duplicates in the log.

    Args:
        replays: each with the id of its branch.
        settlements: of replayed messages, of branches in the log, and of moved messages; no others matter.
        suppressed: the duplicates, without contents.
    """

    replays: tuple[tuple[UUID, Replay], ...] = ()
    settlements: tuple[SettledCopy, ...] = ()
    suppressed: tuple[SettledCopy, ...] = ()


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


LogWrite = Insert | Advance | CompleteWrite | NoteWrite | SettlementsWrite | DuplicateWrite | Store | Define


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEnding:
    """The ending of a completed branch, from the outcome memory."""

    event: JournalEvent
    at: float
    branch_id: UUID
    owner: str
    outcome: Heuristic | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """The result of a search for an xid: the branch when it is in the log, else its last ending."""

    branch: BranchRecord | None = None
    ending: JournalEnding | None = None
