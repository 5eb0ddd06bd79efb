"""The cases of the kill matrix: the work of a branch, its outcome, and the process that dies meanwhile."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

Mode = Literal["alongside", "standalone"]
MODES: Final[tuple[Mode, ...]] = ("alongside", "standalone")


class Kind(StrEnum):
    """The work of the branch, and the disturbance."""

    PUBLISH = "publish"
    CONSUME = "consume"
    BOTH = "publish and consume"
    JOINED = "joined by a second connection"
    ONE_PHASE = "one-phase"
    ONE_PHASE_PUBLISH = "one-phase, publish"
    ONE_PHASE_CONSUME = "one-phase, consume"
    HEURISTIC_COMMIT = "heuristic commit"
    HEURISTIC_ROLLBACK = "heuristic rollback"
    NOTHING = "no work"
    """The branch has no work when it votes; its channel works outside of the branch."""
    ABANDONED = "rolled back before the vote"
    STOPPED = "dtx stopped in order behind the vote"
    CARRIED = "the log's connection breaks under the vote"
    DOUBTED = "the database refuses the vote"
    TAKEN_OVER = "another dtx takes over behind the vote"
    SEVERED = "the broker ends dtx's connections under phase two"
    MENDED = "phase two is stuck, an operator redirects a message"
    LINKED = "joined by a client of AMQP 1.0"
    ACQUIRED = "joined by a client of AMQP 1.0 that acquires"
    PROMOTED = "joined by a client of AMQP 1.0 that promotes"
    LOCAL = "a local transaction of AMQP 1.0"
    OWNED = "another member is asked to complete it"
    OWNED_ONE_PHASE = "one-phase, another member is asked"
    FORWARDED = "another member has it"
    FORWARDED_ONE_PHASE = "one-phase, another member has it"
    INHERITED = "the member that has it dies behind the vote"
    HANDED_OVER = "its member stops in order behind the vote"

    @property
    def publishes(self) -> bool:
        """Whether the branch publishes messages."""
        return self not in (Kind.CONSUME, Kind.ONE_PHASE_CONSUME, Kind.NOTHING)

    @property
    def consumes(self) -> bool:
        """Whether the branch consumes messages."""
        return self not in (Kind.PUBLISH, Kind.ONE_PHASE_PUBLISH, Kind.NOTHING)

    @property
    def decides(self) -> bool:
        """Whether there are cases with both decisions."""
        return self in (Kind.PUBLISH, Kind.CONSUME, Kind.BOTH, Kind.OWNED, Kind.FORWARDED) or self.joined

    @property
    def joined(self) -> bool:
        """Whether a second connection joins the branch."""
        return self is Kind.JOINED or self.linked

    @property
    def linked(self) -> bool:
        """Whether the second connection is one of AMQP 1.0."""
        return self in (Kind.LINKED, Kind.ACQUIRED, Kind.PROMOTED)

    @property
    def one_phase(self) -> bool:
        """Whether the resource manager decides."""
        return self in (
            Kind.ONE_PHASE,
            Kind.ONE_PHASE_PUBLISH,
            Kind.ONE_PHASE_CONSUME,
            Kind.LOCAL,
            Kind.OWNED_ONE_PHASE,
            Kind.FORWARDED_ONE_PHASE,
        )

    @property
    def needs_broker(self) -> bool:
        """Whether the case exists only alongside a broker."""
        return self in (Kind.SEVERED, Kind.MENDED)

    @property
    def needs_members(self) -> bool:
        """Whether the case needs a second member."""
        return self in (
            Kind.OWNED,
            Kind.OWNED_ONE_PHASE,
            Kind.FORWARDED,
            Kind.FORWARDED_ONE_PHASE,
            Kind.INHERITED,
            Kind.HANDED_OVER,
        )

    @property
    def begins_elsewhere(self) -> bool:
        """Whether the member that dies at the failpoint does not have the branch at first."""
        return self in (Kind.FORWARDED, Kind.FORWARDED_ONE_PHASE, Kind.INHERITED)

    @property
    def operator(self) -> "Decision | None":
        """The order of an operator before the transaction manager's decision."""
        return {Kind.HEURISTIC_COMMIT: Decision.COMMIT, Kind.HEURISTIC_ROLLBACK: Decision.ROLLBACK}.get(self)


class Decision(StrEnum):
    """The decision of the transaction manager."""

    COMMIT = "commit"
    ROLLBACK = "rollback"


class Condition(StrEnum):
    """The process that dies at the failpoint, and the circumstances."""

    DTX = "dtx dies"
    POSTGRES = "PostgreSQL dies"
    BROKER = "RabbitMQ dies"
    REPLAY = "dtx dies, --replay always"
    REFUSING = "dtx dies, a queue refuses"
    MEMBERS = "one of two members dies"

    @property
    def kills_dtx(self) -> bool:
        """Whether dtx dies at the point; otherwise it stops there while another process is killed."""
        return self not in (Condition.POSTGRES, Condition.BROKER)


@dataclass(frozen=True, slots=True)
class Case:
    """One branch, from start to end.

    Args:
        mode: alongside or standalone.
        kind: its work.
        decision: of its transaction manager after the vote.
        killed_at: the first process of dtx dies at this point, and the cells are points of the second one.
    """

    mode: Mode
    kind: Kind
    decision: Decision = Decision.COMMIT
    killed_at: str | None = None

    @property
    def name(self) -> str:
        """A name that is unique within a mode."""
        asked = f", {self.decision}" if self.kind.decides else ""
        return f"{self.kind}{asked}" + (f", restarted after {self.killed_at}" if self.killed_at else "")


@dataclass(frozen=True, slots=True)
class Row:
    """A case under a condition: one row of the table. Each point that it reaches is a cell."""

    case: Case
    condition: Condition

    @property
    def may_repeat(self) -> bool:
        """Whether messages may be repeated: the exceptions of "Exactly once" in docs/explanation/guarantees."""
        sure = (Condition.DTX, Condition.POSTGRES, Condition.MEMBERS)
        return self.case.mode == "alongside" and self.condition not in sure

    @property
    def name(self) -> str:
        """A unique name."""
        return f"{self.case.mode}: {self.condition}: {self.case.name}"


_EVERYWHERE: Final = frozenset(
    {
        Kind.PUBLISH,
        Kind.CONSUME,
        Kind.BOTH,
        Kind.JOINED,
        Kind.ONE_PHASE,
        Kind.HEURISTIC_COMMIT,
        Kind.HEURISTIC_ROLLBACK,
        Kind.LINKED,
        Kind.ACQUIRED,
        Kind.PROMOTED,
        Kind.LOCAL,
    }
)
"""Kinds to play under every condition; the others are there for points that only they reach."""
_KINDS: Final = tuple(
    (kind, decision) for kind in Kind for decision in Decision if decision is Decision.COMMIT or kind.decides
)
_HALF_WAY: Final[dict[Mode, tuple[tuple[Kind, Decision, str], ...]]] = {
    "alongside": (
        (Kind.BOTH, Decision.COMMIT, "log-taking-after"),
        (Kind.BOTH, Decision.COMMIT, "taking-sent"),
        (Kind.BOTH, Decision.COMMIT, "log-prepared-after"),
        (Kind.BOTH, Decision.COMMIT, "log-committing-after"),
        (Kind.BOTH, Decision.COMMIT, "unit-sent"),
        (Kind.BOTH, Decision.ROLLBACK, "log-rolling-back-after"),
        (Kind.BOTH, Decision.ROLLBACK, "unit-sent"),
        (Kind.JOINED, Decision.COMMIT, "taking-sent"),
        (Kind.ONE_PHASE, Decision.COMMIT, "taking-sent"),
        (Kind.ONE_PHASE, Decision.COMMIT, "unit-sent"),
        (Kind.HEURISTIC_COMMIT, Decision.COMMIT, "log-heuristic-committing-after"),
        (Kind.HEURISTIC_ROLLBACK, Decision.COMMIT, "log-heuristic-rolling-back-after"),
    ),
    "standalone": (
        (Kind.BOTH, Decision.COMMIT, "log-prepared-after"),
        (Kind.BOTH, Decision.ROLLBACK, "log-prepared-after"),
        (Kind.BOTH, Decision.COMMIT, "log-committed-after"),
    ),
}
"""Points at which first processes die: during each write and unit that a restart must look up."""


def cases(mode: Mode) -> tuple[Case, ...]:
    """Return all cases of one mode."""
    alongside = mode == "alongside"
    kinds = [which for which in _KINDS if alongside or not (which[0].needs_broker or which[0].needs_members)]
    whole = (Case(mode, kind, decision) for kind, decision in kinds)
    half = (Case(mode, kind, decision, killed_at) for kind, decision, killed_at in _HALF_WAY[mode])
    return (*whole, *half)


def conditions(mode: Mode) -> tuple[Condition, ...]:
    """Return all conditions of one mode."""
    alone = (Condition.DTX, Condition.POSTGRES, Condition.REFUSING)
    return tuple(Condition) if mode == "alongside" else alone


def rows(mode: Mode, condition: Condition) -> tuple[Row, ...]:
    """Return the rows of a mode under a condition."""
    if condition is Condition.MEMBERS:
        return tuple(Row(case, condition) for case in cases(mode) if case.kind.needs_members)
    return tuple(
        Row(case, condition)
        for case in cases(mode)
        if not case.kind.needs_members
        if condition is Condition.DTX or (case.killed_at is None and case.kind in _EVERYWHERE)
        if condition is not Condition.REFUSING or (case.kind.publishes and not case.kind.operator)
    )


def all_rows() -> tuple[Row, ...]:
    """Return the whole matrix."""
    return tuple(row for mode in MODES for condition in conditions(mode) for row in rows(mode, condition))
