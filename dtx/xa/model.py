"""The vocabulary of the branch machine: states, operations, votes, associations, events and effects.

Events go in, effects come out (see :mod:`dtx.xa.branch`). Both are closed unions of frozen values.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum

from dtx.xa.codes import Heuristic, ReplyCode, XaError, XaFlag
from dtx.xa.value import value


class State(StrEnum):
    """The state of a branch; X/Open XA table 6-4 (S0 to S5), with the steps that a broker needs between them."""

    UNKNOWN = "unknown"
    """Never started, or ended: the xid is not known (S0)."""
    ACTIVE = "active"
    """Some channel is associated or suspended (S1)."""
    IDLE = "idle"
    """Ended on every channel (S2)."""
    ROLLBACK_ONLY = "rollback-only"
    """Only a rollback is possible, and no final answer has said so yet (S4)."""
    TIMED_OUT = "timed-out"
    """As rollback-only, by its timeout; kept until one answer has said so (S4)."""
    TAKING = "taking"
    """Logged; dtx takes the consumed messages from the broker. Not a vote yet."""
    TAKING_ONE_PHASE = "taking-one-phase"
    """As taking, for a one-phase commit."""
    PREPARED = "prepared"
    """Voted yes; only the transaction manager decides (S3)."""
    COMMITTING = "committing"
    """The decision to commit is durable, phase two is under way."""
    ROLLING_BACK = "rolling-back"
    """The decision to roll back is durable, dtx puts consumed messages back."""
    HEURISTIC_COMMITTING = "heuristic-committing"
    """An operator's decision to commit all or some messages is durable; phase two is under way."""
    HEURISTIC_ROLLING_BACK = "heuristic-rolling-back"
    """As heuristic-committing, for a rollback."""
    HEURISTIC = "heuristic"
    """Completed without the transaction manager; kept until forget (S5)."""


class Operation(StrEnum):
    """The requests to a branch, and the events that change it."""

    START = "start"
    JOIN = "join"
    RESUME = "resume"
    END = "end"
    FAIL = "end-fail"
    SUSPEND = "end-suspend"
    PREPARE = "prepare"
    COMMIT = "commit"
    ONE_PHASE = "commit-one-phase"
    ROLLBACK = "rollback"
    FORGET = "forget"
    GET_TIMEOUT = "get-timeout"
    SET_TIMEOUT = "set-timeout"
    TIMEOUT = "timeout"
    CHANNEL_LOST = "channel-lost"
    DOOM = "doom"
    EXPIRE = "expire"
    TAKEN = "taken"
    NOT_TAKEN = "not-taken"
    TAKEN_IN_PART = "taken-in-part"
    APPLIED = "applied"
    PUT_BACK = "put-back"
    STUCK = "stuck"
    DUPLICATE = "duplicate"
    HEURISTIC_COMMIT = "heuristic-commit"
    HEURISTIC_ROLLBACK = "heuristic-rollback"
    DISCARD = "discard"
    DISCARD_LAST = "discard-last"


DECISIONS = (
    Operation.HEURISTIC_COMMIT,
    Operation.HEURISTIC_ROLLBACK,
    Operation.DISCARD,
    Operation.DISCARD_LAST,
)
"""The decisions of operators, instead of the transaction manager."""

REQUESTS = (
    Operation.START,
    Operation.JOIN,
    Operation.RESUME,
    Operation.END,
    Operation.FAIL,
    Operation.SUSPEND,
    Operation.PREPARE,
    Operation.COMMIT,
    Operation.ONE_PHASE,
    Operation.ROLLBACK,
    Operation.FORGET,
    Operation.GET_TIMEOUT,
    Operation.SET_TIMEOUT,
)
"""The operations that peers request; the others are events."""


def start_operation(*, join: bool, resume: bool) -> Operation:
    """The operation for a start with these bits.

    Raises:
        XaError: 503 when both are set (rule joinAndresume).
    """
    if join and resume:
        raise XaError(ReplyCode.COMMAND_INVALID, "start is illegal with both join and resume")
    if join:
        return Operation.JOIN
    return Operation.RESUME if resume else Operation.START


def end_operation(*, fail: bool, suspend: bool) -> Operation:
    """The operation for an end with these bits.

    Raises:
        XaError: 503 when both are set (rule suspendAndfail).
    """
    if fail and suspend:
        raise XaError(ReplyCode.COMMAND_INVALID, "end is illegal with both fail and suspend")
    if fail:
        return Operation.FAIL
    return Operation.SUSPEND if suspend else Operation.END


class Vote(StrEnum):
    """The kind of work in the branch that its vote is about."""

    ASSOCIATED = "associated"
    """Some channel is (still) associated or suspended: no vote is possible."""
    NOTHING = "nothing"
    PUBLISHED = "published"
    CONSUMED = "consumed"
    BOTH = "both"
    LOCAL = "local"
    """Work on messages in the log's own database: one transaction writes it and the decision."""

    @classmethod
    def of(cls, publishes: int, consumes: int) -> "Vote":
        """The vote of an unassociated branch with so many published and consumed messages."""
        if publishes:
            return cls.BOTH if consumes else cls.PUBLISHED
        return cls.CONSUMED if consumes else cls.NOTHING


class Association(StrEnum):
    """The association of one channel with one branch; X/Open XA table 6-2 (T0 to T2)."""

    NONE = "none"
    ASSOCIATED = "associated"
    SUSPENDED = "suspended"


ChannelId = Hashable
"""Identifies a channel; the core only compares it."""


@value
class Demarcation:
    """A start or end, in any form, on a channel."""

    operation: Operation
    channel: ChannelId


@value
class Request:
    """A coordination request; *vote* is the kind of work in the branch."""

    operation: Operation
    vote: Vote = Vote.NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTimeout:
    """A new timeout in seconds, 0 for none (the caller has filled in the default)."""

    seconds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelLost:
    """A channel that was associated or suspended was closed or lost."""

    channel: ChannelId


@value
class Happened:
    """The result of an effect, or an event from outside; *reason* for people."""

    operation: Operation
    vote: Vote = Vote.NOTHING
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decide:
    """An operator's decision, instead of the transaction manager's.

    Args:
        operation: one of :data:`DECISIONS`. To discard is to give up a message that phase two cannot finish; to
            discard the last one ends the branch.
        vote: the kind of work in the branch.
        outcome: the heuristic outcome once phase two has finished.
    """

    operation: Operation
    vote: Vote = Vote.NOTHING
    outcome: Heuristic


Event = Demarcation | Request | SetTimeout | ChannelLost | Happened | Decide


@dataclass(frozen=True, slots=True, kw_only=True)
class Persist:
    """Make this state durable; with the work, when the branch is not in the log. Later effects wait for it.

    Args:
        state: the new one.
        outcome: the heuristic outcome, where the state has one; the step adds it.
    """

    state: State
    outcome: Heuristic | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """Take the consumed messages from the broker; ends in TAKEN, NOT_TAKEN or TAKEN_IN_PART."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """Publish the branch's messages; ends in APPLIED or STUCK."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PutBack:
    """Put the taken messages back into their queues; ends in PUT_BACK or STUCK."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Discard publishes and return deliveries that are held but not taken. Idempotent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    """Remove the branch from the log; the journal keeps its ending. Local work is committed or undone with that."""

    ending: "Ending"


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Write a journal entry for a branch that is not in the log; durable before the next effect."""

    ending: "Ending"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteStuck:
    """Phase two could not finish; the log keeps the broker's message."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Remember:
    """Leave a tombstone: one further rollback is answered with *flag* instead of 404."""

    flag: XaFlag


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Answer the request."""

    flag: XaFlag


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """Refuse the request; the state remains that of the log."""

    code: ReplyCode
    reason: str


class Ending(StrEnum):
    """How a branch ended, for the journal."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled-back"
    READ_ONLY = "read-only"
    TIMED_OUT = "timed-out"
    FORGOTTEN = "forgotten"


Effect = Persist | Take | Apply | PutBack | Release | Complete | Note | NoteStuck | Remember | Answer | Refuse
