"""How a global transaction has ended: the rules.

Theory of operation. A global transaction is (format id, gtrid). What is known of it comes from three sides: lines of
journals, what participants have in doubt, and what transaction managers have decided. Its *branches* are the places
where it has been: (source, rm, vhost, bqual), so a transaction manager that gives every resource manager the same xid
has as many branches as resource managers. Each of them is folded, all together make :class:`Facts`,
and :data:`RULES` reads those: one verdict per transaction, the first rule that matches.

Folding is made of "or", "least" and "greatest" alone. So the order of lines does not matter, a line that is read twice
changes nothing, and what arrives late is folded into what was known before.

Clocks differ between resource managers. Times are compared across them for ``forgotten-early`` and ``unfinished``, with
:attr:`Rules.skew` between them, and for ``orphan``. Whether a branch is open, and whether an xid was reused, follows
from the ids of branches and their events.

Times are microseconds since the epoch (UTC), as Spark and PostgreSQL keep them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntFlag, StrEnum
from typing import Final

from dtx.log.records import JournalEvent
from dtx.xa.codes import Heuristic

MICROS: Final = 1_000_000


class Verdict(StrEnum):
    """How a global transaction stands; :data:`RULES` says when, in order of precedence."""

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
"""The verdicts that nobody needs to look at."""


class SourceKind(StrEnum):
    """Where an observation comes from."""

    DTX = "dtx"
    POSTGRESQL = "postgresql"
    MYSQL = "mysql"


class Choice(StrEnum):
    """What a transaction manager decides."""

    COMMIT = "commit"
    ROLLBACK = "rollback"


class Mark(IntFlag):
    """What has happened to a branch; the marks of its lines are joined by "or"."""

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
    """Phase two has begun and is not over."""
    WILL_COMMIT = 1024
    WILL_ROLL_BACK = 2048
    DECIDED_COMMIT = 4096
    """This and what follows is said by the log of a transaction manager."""
    DECIDED_ROLLBACK = 8192
    UNDONE = 16384
    DONE = 32768
    """Says so in one line of its log, whatever an older one says."""
    TIMED_OUT = 65536
    """Was rolled back by its resource manager, before its vote: not by decision of a transaction manager."""
    GONE = 131072
    """Its dtx, which was asked after its journal was read, has it no more."""


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
"""Any of these ends a branch as far as its resource manager is concerned."""
OPENED: Final = Mark.PREPARED | Mark.WORKING
TO_COMMIT: Final = Mark.COMMITTED | Mark.WILL_COMMIT
"""Any of these is done by order of a transaction manager that has decided so."""
TO_ROLL_BACK: Final = Mark.ROLLED_BACK | Mark.WILL_ROLL_BACK
DECIDED: Final = Mark.DECIDED_COMMIT | Mark.DECIDED_ROLLBACK
DIRECTIONS: Final = ENDED & ~(Mark.FORGOTTEN | Mark.READ_ONLY)
"""Any of these says which way a branch went, or that this is not known."""

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
    # with its outcome's mark; without one nobody knows which way it went
    JournalEvent.HEURISTIC: Mark(0),
    # it has been completed before, and the work was done once more: says nothing about how the branch stands
    JournalEvent.REPEATED: Mark(0),
    JournalEvent.COMMITTED: Mark.COMMITTED,
    JournalEvent.ROLLED_BACK: Mark.ROLLED_BACK,
    JournalEvent.READ_ONLY: Mark.READ_ONLY,
    JournalEvent.FORGOTTEN: Mark.FORGOTTEN,
}
"""What each event of the journal says of its branch."""
WITH_OUTCOME: Final = frozenset({JournalEvent.HEURISTIC, JournalEvent.FORGOTTEN})
"""Events whose outcome says which way the branch went."""
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
"""What a participant's word for the state of a branch says; any other word (``taking``) is no vote and says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the rules need beside the facts.

    Args:
        as_of: microseconds since the epoch; ages are counted up to then, or up to when something was last known.
        orphan_after: microseconds; a branch that is in doubt for so long would be known to its transaction manager.
        skew: microseconds by which clocks of different machines may differ. What has happened so lately is under way
            still: lines, decisions and what participants say are not of one moment.
        decisions_read: whether the logs of the transaction managers were read: else nothing is an orphan.
        asked: sources of dtx that were asked what they have in doubt, after what is known of their journals was read.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that the rules read about one global transaction.

    Args:
        marks: of all branches.
        reused: an xid had two lives in one place.
        unknown: a branch went nobody knows which way.
        open: branches that are in doubt or under way.
        since: when the first of them was opened.
        age: microseconds for which one of them is known to have been open; the longest.
        known_at: up to when one of them is known to have been open; the latest.
        gone: a branch has ended, and its journal was not read since.
        forgotten_at: when an outcome was first forgotten by somebody other than the branch's owner.
        owners_differ: dtx's branches of it have different owners.
        decided_at: the latest decision.
        undone: a transaction manager says that it has not finished.
        last_at: when anything was last heard of it.
    """

    marks: Mark
    reused: bool = False
    unknown: bool = False
    open: int = 0
    since: int | None = None
    age: int | None = None
    known_at: int | None = None
    gone: bool = False
    forgotten_at: int | None = None
    owners_differ: bool = False
    decided_at: int | None = None
    undone: bool = False
    last_at: int | None = None

    def has(self, mark: Mark) -> bool:
        """Whether any branch has any of these marks."""
        return bool(self.marks & mark)

    @property
    def decided(self) -> bool:
        """Whether a decision is known: from a log, or since a branch went one way by order of its manager."""
        return self.has(DECIDED | TO_COMMIT | TO_ROLL_BACK)

    def is_quiet(self, until: int | None, rules: Rules) -> bool:
        """Whether nothing is known to have happened in the last moments before *until*."""
        return until is not None and (self.last_at is None or until - self.last_at >= rules.skew)


def _mixed(facts: Facts, _: Rules) -> bool:
    return facts.has(Mark.COMMITTED) and facts.has(Mark.ROLLED_BACK)


def _against_decision(facts: Facts, _: Rules) -> bool:
    return (
        (facts.has(Mark.COMMITTED) and facts.has(Mark.DECIDED_ROLLBACK))
        or (facts.has(Mark.ROLLED_BACK) and facts.has(Mark.DECIDED_COMMIT))
        or (facts.has(Mark.TIMED_OUT) and facts.has(Mark.DECIDED_COMMIT | TO_COMMIT))
    )


def _heuristic_damage(facts: Facts, _: Rules) -> bool:
    committed, rolled_back = facts.has(Mark.HEURISTIC_COMMITTED), facts.has(Mark.HEURISTIC_ROLLED_BACK)
    return (
        facts.has(Mark.HEURISTIC_MIXED)
        or (committed and rolled_back)
        or (committed and facts.has(Mark.DECIDED_ROLLBACK | TO_ROLL_BACK | Mark.TIMED_OUT))
        or (rolled_back and facts.has(Mark.DECIDED_COMMIT | TO_COMMIT))
    )


def _forgotten_early(facts: Facts, rules: Rules) -> bool:
    if facts.forgotten_at is None:
        return False
    decided_later = facts.decided_at is not None and facts.decided_at > facts.forgotten_at + rules.skew
    return facts.open > 0 or facts.undone or decided_later


def _unfinished(facts: Facts, rules: Rules) -> bool:
    # what a log says is read now; a branch is as old as what is known of it
    return (facts.undone and facts.is_quiet(rules.as_of, rules)) or (
        facts.open > 0 and facts.decided and facts.is_quiet(facts.known_at, rules)
    )


def _orphan(facts: Facts, rules: Rules) -> bool:
    return (
        rules.decisions_read
        and not facts.decided
        and not facts.gone
        and facts.age is not None
        and facts.age > rules.orphan_after
    )


def _rolled_back(facts: Facts, _: Rules) -> bool:
    if facts.has(Mark.COMMITTED | Mark.HEURISTIC_COMMITTED):
        return False
    if facts.has(Mark.ROLLED_BACK | Mark.TIMED_OUT | Mark.HEURISTIC_ROLLED_BACK):
        return True
    return facts.has(Mark.DECIDED_ROLLBACK) and not facts.has(Mark.DECIDED_COMMIT)


@dataclass(frozen=True, slots=True)
class VerdictRule:
    """When a verdict is given.

    Args:
        verdict: which.
        sentence: its definition, for people.
        matches: the same for facts.
    """

    verdict: Verdict
    sentence: str
    matches: Callable[[Facts, Rules], bool]


RULES: Final = (
    VerdictRule(
        Verdict.XID_REUSED,
        "The same xid had two lives in the same resource manager and virtual host, so nothing else can be told apart.",
        lambda facts, _: facts.reused,
    ),
    VerdictRule(
        Verdict.MIXED,
        "One branch was committed and another rolled back, both by order of a transaction manager.",
        _mixed,
    ),
    VerdictRule(
        Verdict.AGAINST_DECISION,
        "A branch was committed although a transaction manager decided to roll back, or the other way round, or one"
        " timed out and another was committed.",
        _against_decision,
    ),
    VerdictRule(
        Verdict.HEURISTIC_DAMAGE,
        "A heuristic outcome is mixed, or goes against the decision, another branch or another heuristic outcome.",
        _heuristic_damage,
    ),
    VerdictRule(
        Verdict.HAZARD,
        "Nobody knows which way a branch went: its heuristic outcome is hazard, or was forgotten unrecorded.",
        lambda facts, _: facts.unknown,
    ),
    VerdictRule(
        Verdict.FORGOTTEN_EARLY,
        "Somebody other than its owner had a heuristic outcome forgotten while another branch was open, the transaction"
        " manager had not finished, or before it decided.",
        _forgotten_early,
    ),
    VerdictRule(
        Verdict.UNFINISHED,
        "The decision is known, from a log or from another branch, and a branch is still open; or the transaction"
        " manager says itself that it has not finished; and nothing has happened lately.",
        _unfinished,
    ),
    VerdictRule(
        Verdict.NOT_ARCHIVED,
        "A branch has ended, and its journal was not archived since: how it ended is not known yet.",
        lambda facts, _: facts.gone,
    ),
    VerdictRule(
        Verdict.ORPHAN,
        "A branch has been in doubt for longer than a transaction manager takes, none has a decision about it, and no"
        " other branch has ended unheard of.",
        _orphan,
    ),
    VerdictRule(
        Verdict.OWNER_MISMATCH,
        "Branches of it in dtx belong to different users.",
        lambda facts, _: facts.owners_differ,
    ),
    VerdictRule(
        Verdict.IN_DOUBT,
        "A branch has voted and waits for a decision, or for what has just been decided.",
        lambda facts, _: facts.open > 0,
    ),
    VerdictRule(
        Verdict.ROLLED_BACK,
        "A branch was rolled back or timed out, and the others had nothing to do or were, too; or none had anything to"
        " do, or there is none, and the decision is to roll back.",
        _rolled_back,
    ),
    VerdictRule(
        Verdict.COMMITTED,
        "A branch was committed, and the others had nothing to do or were, too; or none had anything to do, or there is"
        " none, and the decision is not to roll back.",
        lambda *_: True,
    ),
)
"""Who comes first wins; what else matches stands in the findings, but for the last two, of which one always holds."""


def judge(facts: Facts, rules: Rules) -> tuple[Verdict, ...]:
    """All verdicts that match, the one that counts first.

    Args:
        facts: of one transaction.
        rules: what else they depend on.
    """
    found = tuple(rule.verdict for rule in RULES if rule.verdict not in PLAIN and rule.matches(facts, rules))
    if found:
        return found
    return (next(rule.verdict for rule in RULES if rule.verdict in PLAIN and rule.matches(facts, rules)),)
