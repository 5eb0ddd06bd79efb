"""The rules of the verdicts on global transactions.

Theory of operation. A global transaction is (format id, gtrid). There are three sources of facts about it: lines of
journals, branches that participants have in doubt, and decisions of transaction managers. A *branch* is (source, rm,
vhost, bqual): a transaction manager that gives every resource manager the same xid has as many branches as resource
managers. The facts of each branch are folded. A transaction has one verdict: the first of :data:`RULES` that matches
the facts of all its branches. :mod:`dtx.pipeline.reconcile.judged_rows` has the condition of each rule.

Folding uses only "or", least and greatest. So the order of lines does not matter. A line that is read twice changes
nothing, and a late line is folded into the earlier facts.

Clocks of resource managers differ. Their times are compared only for ``forgotten-early`` and ``unfinished``, with
:attr:`Rules.skew` between them, and for ``orphan``. The ids of branches and their events tell whether a branch is open,
and whether an xid was reused.

Times are microseconds since the epoch (UTC), as in Spark and PostgreSQL.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import IntFlag, StrEnum
from typing import Final

from dtx.log.records import JournalEvent
from dtx.xa.codes import Heuristic

MICROS: Final = 1_000_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def time_of(micros: int) -> datetime:
    """Return the time of *micros* since the epoch."""
    return _EPOCH + timedelta(microseconds=micros)


def micros_of(time: datetime) -> int:
    """Return the microseconds from the epoch to *time*."""
    return (time - _EPOCH) // timedelta(microseconds=1)


class Verdict(StrEnum):
    """The verdicts, in order of precedence; see :data:`RULES`."""

    XID_REUSED = "xid-reused"
    MIXED = "mixed"
    AGAINST_DECISION = "against-decision"
    HEURISTIC_DAMAGE = "heuristic-damage"
    HAZARD = "hazard"
    FORGOTTEN_EARLY = "forgotten-early"
    UNFINISHED = "unfinished"
    NOT_ARCHIVED = "not-archived"
    ORPHAN = "orphan"
    OWNER_MISMATCH = "owner-mismatch"
    IN_DOUBT = "in-doubt"
    ROLLED_BACK = "rolled-back"
    COMMITTED = "committed"


PLAIN: Final = frozenset({Verdict.COMMITTED, Verdict.ROLLED_BACK})
"""The verdicts that need no attention."""


class SourceKind(StrEnum):
    """Kinds of participants that have observations."""

    DTX = "dtx"
    POSTGRESQL = "postgresql"
    MYSQL = "mysql"
    """MySQL and MariaDB."""


class Choice(StrEnum):
    """Decisions of a transaction manager."""

    COMMIT = "commit"
    ROLLBACK = "rollback"


class Mark(IntFlag):
    """What is known of a branch or decision; the marks of its rows are joined by "or"."""

    PREPARED = 1
    COMMITTED = 2
    ROLLED_BACK = 4
    READ_ONLY = 8
    HEURISTIC_COMMITTED = 16
    HEURISTIC_ROLLED_BACK = 32
    HEURISTIC_MIXED = 64
    HEURISTIC_HAZARD = 128
    FORGOTTEN = 256
    WORKING = 512
    """Phase two has begun and has not ended."""
    WILL_COMMIT = 1024
    WILL_ROLL_BACK = 2048
    DECIDED_COMMIT = 4096
    """This mark and the next three come from the log of a transaction manager."""
    DECIDED_ROLLBACK = 8192
    UNDONE = 16384
    DONE = 32768
    """One line of the log has the decision as finished; this overrides ``UNDONE`` of other lines."""
    TIMED_OUT = 65536
    """The resource manager rolled the branch back before its vote, without a decision of a transaction manager."""
    GONE = 131072
    """Its dtx, which was read after its journal, no longer has the branch."""


ENDED: Final = (
    Mark.COMMITTED
    | Mark.ROLLED_BACK
    | Mark.READ_ONLY
    | Mark.HEURISTIC_COMMITTED
    | Mark.HEURISTIC_ROLLED_BACK
    | Mark.HEURISTIC_MIXED
    | Mark.HEURISTIC_HAZARD
    | Mark.FORGOTTEN
    | Mark.TIMED_OUT
)
"""Any of these marks ends the branch for its resource manager."""
OPENED: Final = Mark.PREPARED | Mark.WORKING
TO_COMMIT: Final = Mark.COMMITTED | Mark.WILL_COMMIT
"""Each of these marks implies that a transaction manager has decided to commit."""
TO_ROLL_BACK: Final = Mark.ROLLED_BACK | Mark.WILL_ROLL_BACK
DECIDED: Final = Mark.DECIDED_COMMIT | Mark.DECIDED_ROLLBACK
DIRECTIONS: Final = ENDED & ~(Mark.FORGOTTEN | Mark.READ_ONLY)
"""Each of these marks has the outcome of a branch, or that the outcome is not known."""

HEURISTIC_MARK: Final = {
    Heuristic.COMMITTED: Mark.HEURISTIC_COMMITTED,
    Heuristic.ROLLED_BACK: Mark.HEURISTIC_ROLLED_BACK,
    Heuristic.MIXED: Mark.HEURISTIC_MIXED,
    Heuristic.HAZARD: Mark.HEURISTIC_HAZARD,
}
EVENT_MARK: Final = {
    JournalEvent.PREPARED: Mark.PREPARED,
    JournalEvent.TIMED_OUT: Mark.TIMED_OUT,
    JournalEvent.STUCK: Mark.WORKING,
    JournalEvent.DECIDED: Mark.WORKING,
    JournalEvent.DISCARDED: Mark.WORKING,
    JournalEvent.REDIRECTED: Mark.WORKING,
    JournalEvent.HAZARD: Mark.HEURISTIC_HAZARD,
    # its outcome has the mark; without an outcome the way of the branch is not known
    JournalEvent.HEURISTIC: Mark(0),
    # the branch was completed before and its work was repeated: this does not change its state
    JournalEvent.REPEATED: Mark(0),
    JournalEvent.COMMITTED: Mark.COMMITTED,
    JournalEvent.ROLLED_BACK: Mark.ROLLED_BACK,
    JournalEvent.READ_ONLY: Mark.READ_ONLY,
    JournalEvent.FORGOTTEN: Mark.FORGOTTEN,
}
"""The mark of a branch for each event of its journal."""
WITH_OUTCOME: Final = frozenset({JournalEvent.HEURISTIC, JournalEvent.FORGOTTEN})
"""Events that have the outcome of the branch."""
STATE_MARK: Final = {
    "prepared": Mark.PREPARED,
    "committing": Mark.WORKING | Mark.WILL_COMMIT,
    "rolling-back": Mark.WORKING | Mark.WILL_ROLL_BACK,
    "heuristic-committing": Mark.WORKING,
    "heuristic-rolling-back": Mark.WORKING,
    "heuristic-committed": Mark.HEURISTIC_COMMITTED,
    "heuristic-rolled-back": Mark.HEURISTIC_ROLLED_BACK,
    "heuristic-mixed": Mark.HEURISTIC_MIXED,
    "heuristic-hazard": Mark.HEURISTIC_HAZARD,
    "heuristic": Mark.HEURISTIC_HAZARD,
}
"""The mark for each state that a participant reports; any other state (``taking``) comes before the vote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Parameters of the rules.

    Args:
        as_of: microseconds since the epoch: the time of the run.
        orphan_after: microseconds: a branch in doubt for longer, without a known decision, is an orphan.
        skew: microseconds by which clocks of different machines may differ. A transaction that changed more recently is
            not yet unfinished: lines, decisions and observations are not of the same moment.
        decisions_read: whether the logs of the transaction managers were read; if not, no transaction is an orphan.
        asked: sources of dtx whose branches in doubt were read after their lines in the lake.
        archived: microseconds since the epoch at which the journal of each source was last read to its end.
    """

    as_of: int
    orphan_after: int = 3600 * MICROS
    skew: int = 300 * MICROS
    decisions_read: bool = True
    asked: frozenset[str] = frozenset()
    archived: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.orphan_after < 0 or self.skew < 0:
            raise ValueError("orphan_after and skew are not negative")


RULES: Final = {
    Verdict.XID_REUSED: (
        "The same xid was used for two branches of the same resource manager and virtual host. The two cannot be told"
        " apart."
    ),
    Verdict.MIXED: "One branch was committed and another was rolled back, both by a transaction manager.",
    Verdict.AGAINST_DECISION: (
        "A branch was committed against the decision to roll back. Or a branch was rolled back, or timed out, against"
        " the decision to commit. Or a branch timed out and another one was committed."
    ),
    Verdict.HEURISTIC_DAMAGE: (
        "A heuristic outcome is mixed, or contradicts the decision, another branch or another heuristic outcome."
    ),
    Verdict.HAZARD: (
        "The outcome of a branch is not known: its heuristic outcome is hazard, or it was forgotten without a recorded"
        " outcome."
    ),
    Verdict.FORGOTTEN_EARLY: (
        "A user other than the owner of a branch forgot its heuristic outcome too early: before the decision, while a"
        " branch was open, or before the transaction manager had finished."
    ),
    Verdict.UNFINISHED: (
        "The decision is known, from a log or another branch, and a branch is still open. Or the log of the transaction"
        " manager has it as not finished. There was no recent activity."
    ),
    Verdict.NOT_ARCHIVED: "A branch has ended, and its journal was not archived since. Its outcome is not known yet.",
    Verdict.ORPHAN: (
        "A branch has been in doubt for longer than orphan_after. No decision is known, and no branch has ended without"
        " an archived outcome."
    ),
    Verdict.OWNER_MISMATCH: "Its branches in dtx belong to different users.",
    Verdict.IN_DOUBT: "A branch has voted and waits for the decision, or phase two has just begun.",
    Verdict.ROLLED_BACK: (
        "A branch was rolled back or timed out, and no branch was committed. Or no branch did any work, or none is"
        " known, and the decision is to roll back."
    ),
    Verdict.COMMITTED: (
        "A branch was committed, and no branch was rolled back. Or no branch did any work, or none is known, and the"
        " decision is not to roll back."
    ),
}
"""In order of precedence: the first match is the verdict. The last two apply only where no other rule matches."""
