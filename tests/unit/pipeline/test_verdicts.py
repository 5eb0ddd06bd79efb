"""Each rule has cases that match it, and close cases that do not."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from dtx.log.records import JournalEvent
from dtx.pipeline.verdicts import (
    EVENT_MARK,
    HEURISTIC_MARK,
    MICROS,
    PLAIN,
    RULES,
    Choice,
    Rules,
    SourceKind,
    Verdict,
)
from dtx.xa.codes import Heuristic
from tests.support.reference import Decision, Event, Judgement, Observation, reconcile

NOW = 100_000 * MICROS
RULES_NOW = Rules(as_of=NOW)
JUST_NOW = 99_701.0
"""Seconds: a little less than five minutes ago."""
E, V = JournalEvent, Verdict


def line(event: JournalEvent, at: float, rm: str = "rm1", outcome: Heuristic | None = None, **more: Any) -> Event:
    return replace(
        Event(
            source="db", rm=rm, vhost="/", format_id=1, gtrid=b"g", bqual=b"", branch_id=f"life of {rm}",
            id=f"{rm} {event} {at}", event=event, outcome=outcome, at=int(at * MICROS), owner="ann", actor="ann",
        ),
        **more,
    )  # fmt: skip


def decided(choice: Choice, at: float = 2, finished: bool | None = None, **more: Any) -> Decision:
    found = Decision(
        source="log", tm="tm", format_id=1, gtrid=b"g", decision=choice, at=int(at * MICROS), finished=finished
    )
    return replace(found, **more)


def seen(
    state: str,
    since: float | None,
    rm: str = "rm1",
    kind: SourceKind = SourceKind.DTX,
    owner: str = "ann",
    life: str = "",
) -> Observation:
    branch_id = (life or f"life of {rm}") if kind is SourceKind.DTX else None
    return Observation(
        source="db", rm=rm, vhost="/", format_id=1, gtrid=b"g", bqual=b"", branch_id=branch_id, kind=kind, state=state,
        owner=owner,
        since=None if since is None else int(since * MICROS), observed_at=NOW,
    )  # fmt: skip


Known = Event | Observation | Decision


def judged(*known: Known, rules: Rules = RULES_NOW) -> Judgement:
    found = reconcile(
        [each for each in known if isinstance(each, Event)],
        [each for each in known if isinstance(each, Observation)],
        [each for each in known if isinstance(each, Decision)],
        rules,
    )
    (judgement,) = found.values()
    return judgement


def committed(rm: str, at: float = 3) -> tuple[Event, Event]:
    return line(E.PREPARED, 1, rm), line(E.COMMITTED, at, rm)


def rolled_back(rm: str) -> tuple[Event, Event]:
    return line(E.PREPARED, 1, rm), line(E.ROLLED_BACK, 3, rm)


def by_hand(rm: str, outcome: Heuristic, *, forgotten: float | None = None, actor: str = "ann") -> tuple[Event, ...]:
    lines = (line(E.PREPARED, 1, rm), line(E.HEURISTIC, 2, rm, outcome, actor="operator"))
    return lines if forgotten is None else (*lines, line(E.FORGOTTEN, forgotten, rm, outcome, actor=actor))


OPEN = line(E.PREPARED, 1)
YOUNG = line(E.PREPARED, 99_000)
COMMIT, ROLLBACK = decided(Choice.COMMIT), decided(Choice.ROLLBACK)
LATER = 1_000

CASES: dict[str, tuple[Verdict, tuple[Known, ...]]] = {
    "two phases": (V.COMMITTED, (*committed("rm1"), *committed("rm2"), COMMIT)),
    "one phase": (V.COMMITTED, (line(E.COMMITTED, 1),)),
    "the same xid in every resource manager": (V.COMMITTED, (*committed("rm1"), *committed("rm2"), *committed("rm3"))),
    "nothing but reading": (V.COMMITTED, (line(E.READ_ONLY, 1),)),
    "nothing but reading, and rolled back": (V.ROLLED_BACK, (line(E.READ_ONLY, 1), ROLLBACK)),
    "one reads, one commits": (V.COMMITTED, (line(E.READ_ONLY, 1), *committed("rm2"), COMMIT)),
    "presumed abort": (V.ROLLED_BACK, (*rolled_back("rm1"), *rolled_back("rm2"))),
    "timed out": (V.ROLLED_BACK, (line(E.TIMED_OUT, 1), *rolled_back("rm2"))),
    "timed out, and nothing else": (V.ROLLED_BACK, (line(E.TIMED_OUT, 1),)),
    "timed out, and another had nothing to do": (V.ROLLED_BACK, (line(E.TIMED_OUT, 1), line(E.READ_ONLY, 1, "rm2"))),
    "all had nothing to do": (V.COMMITTED, (line(E.READ_ONLY, 1), line(E.READ_ONLY, 1, "rm2"))),
    "a decision and no branch": (V.COMMITTED, (COMMIT,)),
    "a decision to roll back and no branch": (V.ROLLED_BACK, (ROLLBACK,)),
    "stuck and then committed": (V.COMMITTED, (OPEN, line(E.STUCK, 2), line(E.REDIRECTED, 4), line(E.COMMITTED, 5))),
    "by hand as was decided": (V.COMMITTED, (*by_hand("rm1", Heuristic.COMMITTED), *committed("rm2"), COMMIT)),
    "by hand, and nobody decided": (V.ROLLED_BACK, by_hand("rm1", Heuristic.ROLLED_BACK)),
    "reused": (V.XID_REUSED, (*committed("rm1"), *(replace(each, branch_id="next") for each in committed("rm1")))),
    "reused, and open again": (V.XID_REUSED, (*committed("rm1"), line(E.PREPARED, 9, branch_id="next"))),
    "reused by another user": (
        V.XID_REUSED,
        (*committed("rm1"), *(replace(each, branch_id="next", owner="bob") for each in committed("rm1"))),
    ),
    "seen again after its end": (V.XID_REUSED, (*committed("rm1"), seen("prepared", 9, life="next"))),
    "seen again, says a clock that was set back": (V.XID_REUSED, (*committed("rm1"), seen("prepared", 2, life="next"))),
    "mixed": (V.MIXED, (*committed("rm1"), *rolled_back("rm2"))),
    "mixed, whatever was decided": (V.MIXED, (*committed("rm1"), *rolled_back("rm2"), COMMIT)),
    "committed against it": (V.AGAINST_DECISION, (*committed("rm1"), ROLLBACK)),
    "rolled back against it": (V.AGAINST_DECISION, (*rolled_back("rm1"), COMMIT)),
    "timed out, and committed elsewhere as was decided": (
        V.AGAINST_DECISION,
        (line(E.TIMED_OUT, 1), *committed("rm2"), COMMIT),
    ),
    "timed out, and committed elsewhere": (V.AGAINST_DECISION, (line(E.TIMED_OUT, 1), *committed("rm2"))),
    "timed out against the decision": (V.AGAINST_DECISION, (line(E.TIMED_OUT, 1), COMMIT)),
    "timed out, while another is told to commit": (
        V.AGAINST_DECISION,
        (line(E.TIMED_OUT, 1), seen("committing", 5, "rm2")),
    ),
    "by hand, and another timed out": (
        V.HEURISTIC_DAMAGE,
        (*by_hand("rm1", Heuristic.COMMITTED), line(E.TIMED_OUT, 1, "rm2")),
    ),
    "by hand as another that timed out": (
        V.ROLLED_BACK,
        (*by_hand("rm1", Heuristic.ROLLED_BACK), line(E.TIMED_OUT, 1, "rm2")),
    ),
    "decided both ways": (V.AGAINST_DECISION, (*committed("rm1"), COMMIT, decided(Choice.ROLLBACK, tm="other"))),
    "by hand against the decision": (V.HEURISTIC_DAMAGE, (*by_hand("rm1", Heuristic.ROLLED_BACK), COMMIT)),
    "by hand against another": (V.HEURISTIC_DAMAGE, (*by_hand("rm1", Heuristic.COMMITTED), *rolled_back("rm2"))),
    "by hand both ways": (
        V.HEURISTIC_DAMAGE,
        (*by_hand("rm1", Heuristic.COMMITTED), *by_hand("rm2", Heuristic.ROLLED_BACK)),
    ),
    "by hand in part": (V.HEURISTIC_DAMAGE, by_hand("rm1", Heuristic.MIXED)),
    "by hand while another is told to commit": (
        V.HEURISTIC_DAMAGE,
        (*by_hand("rm1", Heuristic.ROLLED_BACK), seen("committing", 5, "rm2")),
    ),
    "hazard": (V.HAZARD, (*by_hand("rm1", Heuristic.HAZARD), COMMIT)),
    "hazard that was resolved": (V.COMMITTED, (OPEN, line(E.HAZARD, 2), line(E.COMMITTED, 3))),
    "forgotten, and nobody knows how it was": (V.HAZARD, (OPEN, line(E.FORGOTTEN, 3))),
    "heuristic without an outcome": (V.HAZARD, (OPEN, line(E.HEURISTIC, 3))),
    "forgotten before it was decided": (
        V.FORGOTTEN_EARLY,
        (*by_hand("rm1", Heuristic.COMMITTED, forgotten=3, actor="op"), decided(Choice.COMMIT, LATER)),
    ),
    "forgotten before, as far as clocks can tell": (
        V.COMMITTED,
        (*by_hand("rm1", Heuristic.COMMITTED, forgotten=3, actor="op"), decided(Choice.COMMIT, 200)),
    ),
    "forgotten by its own manager": (
        V.COMMITTED,
        (*by_hand("rm1", Heuristic.COMMITTED, forgotten=3), decided(Choice.COMMIT, LATER)),
    ),
    "forgotten while the manager is at it": (
        V.FORGOTTEN_EARLY,
        (*by_hand("rm1", Heuristic.COMMITTED, forgotten=9, actor="op"), decided(Choice.COMMIT, finished=False)),
    ),
    "forgotten while another is open": (
        V.FORGOTTEN_EARLY,
        (*by_hand("rm2", Heuristic.COMMITTED, forgotten=9, actor="op"), OPEN),
    ),
    "decided, and one is open": (V.UNFINISHED, (OPEN, *committed("rm2"), COMMIT)),
    "another branch shows the decision": (V.UNFINISHED, (OPEN, *rolled_back("rm2"))),
    "told to commit and stuck": (V.UNFINISHED, (OPEN, seen("committing", 1))),
    "not finished, says the manager": (V.UNFINISHED, (*committed("rm1"), decided(Choice.COMMIT, finished=False))),
    "decided just now": (V.IN_DOUBT, (OPEN, decided(Choice.COMMIT, JUST_NOW))),
    "decided some time ago": (V.UNFINISHED, (OPEN, decided(Choice.COMMIT, JUST_NOW - 1))),
    "another branch has just shown the decision": (V.IN_DOUBT, (OPEN, *committed("rm2", JUST_NOW))),
    "committed just now, and the manager has not noted it yet": (
        V.COMMITTED,
        (*committed("rm1", JUST_NOW), decided(Choice.COMMIT, finished=False)),
    ),
    "not finished, says an older line": (
        V.COMMITTED,
        (*committed("rm1"), decided(Choice.COMMIT, finished=False), decided(Choice.COMMIT, finished=True)),
    ),
    "orphan": (V.ORPHAN, (OPEN,)),
    "orphan beside one that timed out": (V.ORPHAN, (OPEN, line(E.TIMED_OUT, 1, "rm2"))),
    "in doubt beside one that timed out": (V.IN_DOUBT, (YOUNG, line(E.TIMED_OUT, 1, "rm2"))),
    "orphan that only a database has": (V.ORPHAN, (seen("prepared", 1, kind=SourceKind.POSTGRESQL),)),
    "other users": (
        V.OWNER_MISMATCH,
        (*committed("rm1"), *(replace(each, owner="bob") for each in committed("rm2"))),
    ),
    "roles of databases are no users of dtx": (
        V.IN_DOUBT,
        (YOUNG, seen("prepared", 99_000, "bank", SourceKind.POSTGRESQL, owner="role")),
    ),
    "in doubt": (V.IN_DOUBT, (YOUNG,)),
    "in doubt since nobody knows when": (V.IN_DOUBT, (seen("prepared", None),)),
    "seen before its end was read": (V.COMMITTED, (*committed("rm1"), seen("prepared", 1))),
    "seen before its end was read, which a clock that was set back wrote": (
        V.COMMITTED,
        (line(E.PREPARED, 9), line(E.COMMITTED, 3), seen("prepared", 9)),
    ),
    "committed, while its clock was set back": (V.COMMITTED, (line(E.PREPARED, 9), line(E.COMMITTED, 3))),
}


@pytest.mark.parametrize("case", CASES)
def test_a_case_has_its_verdict(case: str) -> None:
    verdict, known = CASES[case]
    assert judged(*known).verdict == verdict
    assert judged(*reversed(known)) == judged(*known), "the order of lines does not matter"
    assert judged(*known, *known) == judged(*known), "duplicate lines do not matter"


def with_other_clocks(known: Known, dice: Random) -> Known:
    """Each time is from a clock that is right, or four minutes ahead or behind."""
    name = "since" if isinstance(known, Observation) else "at"
    at = getattr(known, name)
    return known if at is None else replace(known, **changed(name, at + dice.choice((-240, 0, 240)) * MICROS))


ON_THE_EDGE = {
    "decided just now",
    "decided some time ago",
    "another branch has just shown the decision",
    "committed just now, and the manager has not noted it yet",
    "forgotten before, as far as clocks can tell",
}
"""Cases that depend on five minutes: clocks that differ by eight change them."""
CLOCKS = tuple(range(30))
"""Seeds."""


@pytest.mark.parametrize("case", sorted(CASES.keys() - ON_THE_EDGE))
def test_clocks_that_differ_change_no_verdict(case: str) -> None:
    verdict, known = CASES[case]
    for seed in CLOCKS:
        dice = Random(seed)
        assert judged(*(with_other_clocks(each, dice) for each in known)).verdict == verdict, f"seed {seed}"


def test_every_verdict_has_one_rule_and_a_case() -> None:
    assert list(RULES) == list(Verdict)
    assert {verdict for verdict, _ in CASES.values()} == set(Verdict) - {Verdict.NOT_ARCHIVED}
    assert all(sentence.endswith(".") for sentence in RULES.values())


def test_every_event_and_outcome_of_the_journal_has_a_mark() -> None:
    assert set(EVENT_MARK) == set(JournalEvent)
    assert set(HEURISTIC_MARK) == set(Heuristic)


def test_a_branch_without_a_vote_is_no_finding() -> None:
    assert reconcile([], [seen("taking", 1)], [], RULES_NOW) == {}


def test_nothing_is_an_orphan_where_no_log_was_read() -> None:
    assert judged(OPEN, rules=Rules(as_of=NOW, decisions_read=False)).verdict is Verdict.IN_DOUBT


def test_a_branch_missing_in_its_dtx_has_ended() -> None:
    """A branch that its dtx no longer has is never an orphan, unfinished or in doubt, even in an old lake."""
    asked = Rules(as_of=NOW, asked=frozenset({"db"}))
    assert judged(OPEN, rules=asked).findings == (Verdict.NOT_ARCHIVED,)
    assert judged(OPEN, COMMIT, rules=asked).findings == (Verdict.NOT_ARCHIVED,)
    assert judged(OPEN, *committed("rm2"), rules=asked).findings == (Verdict.NOT_ARCHIVED,)
    assert judged(OPEN, seen("prepared", 1), rules=asked).verdict is Verdict.ORPHAN
    assert judged(OPEN, seen("prepared", 1), COMMIT, rules=asked).verdict is Verdict.UNFINISHED
    assert judged(OPEN, seen("prepared", 1, "bank", SourceKind.POSTGRESQL), rules=asked).findings == (
        Verdict.NOT_ARCHIVED, Verdict.IN_DOUBT,
    ), "the branch that ended may have been committed"  # fmt: skip
    assert judged(OPEN, *committed("rm2"), *rolled_back("rm3"), rules=asked).verdict is Verdict.MIXED
    assert judged(OPEN, rules=replace(asked, asked=frozenset({"another"}))).verdict is Verdict.ORPHAN


def test_an_unreachable_participant_is_judged_by_its_journal() -> None:
    """Its database has been unavailable since then. A branch that was young at that time need not be an orphan."""
    young = line(E.PREPARED, 50_000)
    then = replace(RULES_NOW, archived={"db": 50_600 * MICROS})
    assert judged(young).verdict is Verdict.ORPHAN
    assert (judged(young, rules=then).verdict, judged(young, rules=then).known_at) == (V.IN_DOUBT, 50_600 * MICROS)
    just = decided(Choice.COMMIT, 50_400)
    assert judged(young, just).verdict is Verdict.UNFINISHED
    assert judged(young, just, rules=then).verdict is Verdict.IN_DOUBT
    old = replace(RULES_NOW, archived={"db": 60_000 * MICROS})
    assert judged(young, rules=old).verdict is Verdict.ORPHAN, "it was already an orphan then"
    assert judged(young, seen("prepared", 50_000), rules=then).known_at == NOW


def test_an_unreachable_participant_hides_nothing_of_others() -> None:
    """Each branch is judged by the time of its data. A transaction manager's log is as of now."""
    away = replace(seen("prepared", 60, "bank", SourceKind.POSTGRESQL), observed_at=60 * MICROS)
    assert judged(OPEN, seen("prepared", 1), away).verdict is Verdict.ORPHAN
    assert judged(OPEN, seen("prepared", 1), away, decided(Choice.COMMIT, 100)).verdict is Verdict.UNFINISHED
    assert judged(away, decided(Choice.COMMIT, 100)).verdict is Verdict.IN_DOUBT
    assert judged(away, decided(Choice.COMMIT, 100, finished=False)).verdict is Verdict.UNFINISHED
    before = replace(seen("prepared", 1), observed_at=60 * MICROS)
    fresh = replace(RULES_NOW, archived={"db": NOW - 10})
    assert judged(OPEN, before, rules=fresh).verdict is Verdict.ORPHAN, "the journal has no end of the branch"


def test_a_decision_without_format_id_matches_any_with_its_gtrid() -> None:
    known = [OPEN, replace(line(E.PREPARED, 1, "rm2"), format_id=2)]
    found = reconcile(known, [], [decided(Choice.COMMIT, format_id=None)], RULES_NOW)
    assert {key: judgement.verdict for key, judgement in found.items()} == {
        (1, b"g"): Verdict.UNFINISHED,
        (2, b"g"): Verdict.UNFINISHED,
    }
    alone = reconcile([], [], [decided(Choice.COMMIT, format_id=None)], RULES_NOW)
    assert [(key, judgement.verdict) for key, judgement in alone.items()] == [((None, b"g"), Verdict.COMMITTED)]


def test_all_findings_are_listed_the_worst_first() -> None:
    found = judged(*committed("rm1"), *rolled_back("rm2"), line(E.PREPARED, 1, "rm3", owner="bob"), COMMIT)
    assert found.findings == (V.MIXED, V.AGAINST_DECISION, V.UNFINISHED, V.OWNER_MISMATCH, V.IN_DOUBT)
    assert not set(found.findings) & PLAIN


def test_the_text_about_a_transaction() -> None:
    found = judged(OPEN, *committed("rm2", 7), COMMIT)
    assert (found.since, found.first_at, found.last_at) == (MICROS, MICROS, 7 * MICROS)
    assert (found.rms, found.owners, found.branches) == (("rm1", "rm2"), ("ann",), 2)
    assert (found.decision, found.tm) == ("commit", "tm")


def changed(name: str, to: object) -> dict[str, Any]:
    return {name: to}


def test_fingerprints_differ_in_every_part() -> None:
    found = judged(OPEN, *committed("rm2"), COMMIT)
    others = [
        replace(found, **changed(name, other))
        for name, other in (
            ("format_id", None), ("gtrid", b"G"), ("findings", (V.ORPHAN,)), ("since", None), ("first_at", 0),
            ("last_at", 0), ("rms", ("rm1,rm2",)), ("rms", ("rm1", "rm2", "")), ("owners", ()), ("branches", 9),
            ("decision", None), ("tm", None), ("tm", "tm|"),
        )
    ]  # fmt: skip
    assert len({each.fingerprint for each in (found, *others)}) == len(others) + 1
    assert len(found.fingerprint) == 16


def test_rules_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="not negative"):
        Rules(as_of=0, skew=-1)
