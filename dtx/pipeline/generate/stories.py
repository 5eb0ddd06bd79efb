"""What happens in a transaction of each kind: the lines of each of its branches, and what its manager has decided.

Times are seconds after the transaction's begin. ``first`` is said of its first branch, ``others`` of all others.
"""

from dataclasses import dataclass
from typing import Final

from dtx.log.records import JournalEvent
from dtx.pipeline.verdicts import Choice, Verdict
from dtx.xa.codes import Heuristic

OPERATOR: Final = "operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One line of a journal.

    Args:
        event: what it tells.
        after: seconds after the begin of the transaction.
        outcome: of a heuristic decision.
        life: which of the lives of its xid.
        actor: who does it; ``None``: the branch's owner.
    """

    event: JournalEvent
    after: float
    outcome: Heuristic | None = None
    life: int = 0
    actor: str | None = None
    one_phase: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """What the transaction manager's log has.

    Args:
        choice: which way.
        after: seconds after the begin.
        finished: whether all branches have acknowledged.
    """

    choice: Choice
    after: float = 1.0
    finished: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A kind of transaction.

    Args:
        name: of the kind.
        verdict: that is right.
        first, others: lines of the first branch, and of each of the others.
        decided: ``None``: no log has it.
        least, most: branches.
        seen: the first branch, or with *others_seen* every one, is in doubt now.
        age: seconds before the end of the time that is looked at when it begins; ``None``: any time before.
        foreign: a PostgreSQL has a branch of it in doubt, too.
        two_owners: the second branch is another user's.
        share: of a thousand ordinary transactions; 0 for those that are put in by number.
    """

    name: str
    verdict: Verdict
    first: tuple[Step, ...]
    others: tuple[Step, ...]
    decided: Decided | None = None
    least: int = 2
    most: int = 4
    seen: bool = False
    others_seen: bool = False
    age: tuple[int, int] | None = None
    foreign: bool = False
    two_owners: bool = False
    share: int = 0


def _step(
    event: JournalEvent, after: float, outcome: Heuristic | None = None, *, life: int = 0, actor: str | None = None
) -> Step:
    return Step(event=event, after=after, outcome=outcome, life=life, actor=actor)


_E = JournalEvent
_PREPARED = _step(_E.PREPARED, 0.2)
_COMMITTED = (_PREPARED, _step(_E.COMMITTED, 1.2))
_ROLLED_BACK = (_PREPARED, _step(_E.ROLLED_BACK, 1.2))
_COMMIT = Decided(choice=Choice.COMMIT)

ORDINARY: Final = (
    Story(name="two-phase", verdict=Verdict.COMMITTED, first=_COMMITTED, others=_COMMITTED, decided=_COMMIT, share=868),
    Story(
        name="one-phase",
        verdict=Verdict.COMMITTED,
        first=(Step(event=_E.COMMITTED, after=0.3, one_phase=True),),
        others=(),
        least=1,
        most=1,
        share=60,
    ),
    Story(
        name="read-only",
        verdict=Verdict.COMMITTED,
        first=(_step(_E.READ_ONLY, 0.2),),
        others=_COMMITTED,
        decided=_COMMIT,
        share=20,
    ),
    Story(name="presumed-abort", verdict=Verdict.ROLLED_BACK, first=_ROLLED_BACK, others=_ROLLED_BACK, share=30),
    Story(
        name="timed-out",
        verdict=Verdict.ROLLED_BACK,
        first=(_step(_E.TIMED_OUT, 0.3, actor="dtx"),),
        others=_ROLLED_BACK,
        share=10,
    ),
    Story(
        name="stuck-for-a-while",
        verdict=Verdict.COMMITTED,
        first=(_PREPARED, _step(_E.STUCK, 1.2), _step(_E.REDIRECTED, 60.0, actor=OPERATOR), _step(_E.COMMITTED, 61.0)),
        others=_COMMITTED,
        decided=Decided(choice=Choice.COMMIT),
        share=8,
    ),
    Story(
        name="heuristic-as-decided",
        verdict=Verdict.COMMITTED,
        first=(
            _PREPARED,
            _step(_E.DECIDED, 30.0, actor=OPERATOR),
            _step(_E.HEURISTIC, 30.1, Heuristic.COMMITTED, actor=OPERATOR),
            _step(_E.FORGOTTEN, 900.0, Heuristic.COMMITTED),
        ),
        others=_COMMITTED,
        decided=_COMMIT,
        share=4,
    ),
)
"""What a fleet does all day; none of it is to be found. The first takes what is missing of a thousand."""

INJECTED: Final = (
    Story(
        name="xid-reused",
        verdict=Verdict.XID_REUSED,
        first=(*_COMMITTED, _step(_E.PREPARED, 5_000.0, life=1), _step(_E.COMMITTED, 5_001.0, life=1)),
        others=_COMMITTED,
        decided=_COMMIT,
    ),
    Story(name="mixed", verdict=Verdict.MIXED, first=_ROLLED_BACK, others=_COMMITTED),
    Story(
        name="against-decision",
        verdict=Verdict.AGAINST_DECISION,
        first=_ROLLED_BACK,
        others=_ROLLED_BACK,
        decided=_COMMIT,
    ),
    Story(
        name="heuristic-damage",
        verdict=Verdict.HEURISTIC_DAMAGE,
        first=(_PREPARED, _step(_E.HEURISTIC, 30.0, Heuristic.ROLLED_BACK, actor=OPERATOR)),
        others=_COMMITTED,
        decided=_COMMIT,
    ),
    Story(
        name="hazard",
        verdict=Verdict.HAZARD,
        first=(_PREPARED, _step(_E.HEURISTIC, 30.0, Heuristic.HAZARD, actor=OPERATOR)),
        others=_COMMITTED,
        decided=_COMMIT,
    ),
    Story(
        name="forgotten-early",
        verdict=Verdict.FORGOTTEN_EARLY,
        first=(
            _PREPARED,
            _step(_E.HEURISTIC, 30.0, Heuristic.COMMITTED, actor=OPERATOR),
            _step(_E.FORGOTTEN, 32.0, Heuristic.COMMITTED, actor=OPERATOR),
        ),
        others=(_PREPARED, _step(_E.COMMITTED, 4_000.0)),
        decided=Decided(choice=Choice.COMMIT, after=3_999.0),
    ),
    Story(
        name="unfinished",
        verdict=Verdict.UNFINISHED,
        first=(_PREPARED,),
        others=_COMMITTED,
        decided=Decided(choice=Choice.COMMIT, finished=False),
        seen=True,
        age=(1_200, 86_400),
    ),
    Story(
        name="orphan",
        verdict=Verdict.ORPHAN,
        first=(_PREPARED,),
        others=(_PREPARED,),
        seen=True,
        others_seen=True,
        foreign=True,
        age=(7_200, 86_400),
    ),
    Story(
        name="owner-mismatch",
        verdict=Verdict.OWNER_MISMATCH,
        first=_COMMITTED,
        others=_COMMITTED,
        decided=_COMMIT,
        two_owners=True,
    ),
    Story(
        name="in-doubt",
        verdict=Verdict.IN_DOUBT,
        first=(_PREPARED,),
        others=(_PREPARED,),
        seen=True,
        others_seen=True,
        age=(600, 1_800),
    ),
)
"""What is to be found: one for each verdict that is not plain."""
