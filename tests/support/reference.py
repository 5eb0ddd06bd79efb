"""The reference implementation: verdicts in plain Python, for transactions that fit into memory.

Tests compare the implementation on Spark with it, on random fleets. Times are microseconds since the epoch (UTC).
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from dtx.log.records import JournalEvent
from dtx.pipeline.verdicts import (
    DECIDED,
    DIRECTIONS,
    ENDED,
    EVENT_MARK,
    HEURISTIC_MARK,
    OPENED,
    PLAIN,
    RULES,
    STATE_MARK,
    TO_COMMIT,
    TO_ROLL_BACK,
    WITH_OUTCOME,
    Choice,
    Mark,
    Rules,
    SourceKind,
    Verdict,
)
from dtx.xa.codes import Heuristic

_NOTHING: Final = Mark(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts about one global transaction that the rules read.

    Args:
        marks: of all branches and decisions.
        reused: an xid was used for two branches in the same place.
        unknown: the outcome of a branch is not known.
        open: number of branches in doubt or in phase two.
        since: when the first open branch was opened.
        age: the longest time, in microseconds, for which a branch is known to have been open.
        known_at: the latest time at which a branch is known to have been open.
        gone: a branch has ended, and its journal was not read since.
        forgotten_at: when a user other than the branch's owner first forgot an outcome.
        owners_differ: the branches in dtx have different owners.
        decided_at: the time of the latest decision.
        undone: the log of a transaction manager has it as not finished.
        last_at: the latest time of any line, observation or decision.
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
        """Return whether *marks* has any of these."""
        return bool(self.marks & mark)

    @property
    def decided(self) -> bool:
        """Whether a decision is known, from a log or from a branch that was completed by a transaction manager."""
        return self.has(DECIDED | TO_COMMIT | TO_ROLL_BACK)

    def is_quiet(self, until: int | None, rules: Rules) -> bool:
        """Return whether there was no activity in the :attr:`Rules.skew` before *until*."""
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
    # a log was read as of now; a branch may have been read earlier, at known_at
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


_MATCHES: Final[dict[Verdict, Callable[[Facts, Rules], bool]]] = {
    Verdict.XID_REUSED: lambda facts, _: facts.reused,
    Verdict.MIXED: _mixed,
    Verdict.AGAINST_DECISION: _against_decision,
    Verdict.HEURISTIC_DAMAGE: _heuristic_damage,
    Verdict.HAZARD: lambda facts, _: facts.unknown,
    Verdict.FORGOTTEN_EARLY: _forgotten_early,
    Verdict.UNFINISHED: _unfinished,
    Verdict.NOT_ARCHIVED: lambda facts, _: facts.gone,
    Verdict.ORPHAN: _orphan,
    Verdict.OWNER_MISMATCH: lambda facts, _: facts.owners_differ,
    Verdict.IN_DOUBT: lambda facts, _: facts.open > 0,
    Verdict.ROLLED_BACK: _rolled_back,
    Verdict.COMMITTED: lambda *_: True,
}


def judge(facts: Facts, rules: Rules) -> tuple[Verdict, ...]:
    """Return all verdicts that match, in order of precedence; a plain one only where no other matches.

    Args:
        facts: of one transaction.
        rules: the parameters.
    """
    found = [verdict for verdict in RULES if _MATCHES[verdict](facts, rules)]
    return tuple(verdict for verdict in found if verdict not in PLAIN) or (found[0],)


def mark_of(event: JournalEvent, outcome: Heuristic | None) -> Mark:
    """The mark that a line of the journal gives to its branch."""
    mark = EVENT_MARK[event]
    if event in WITH_OUTCOME and outcome is not None:
        mark |= HEURISTIC_MARK[outcome]
    elif event is JournalEvent.HEURISTIC:
        mark |= Mark.HEURISTIC_HAZARD
    return mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A line of a journal, as far as verdicts need it.

    Args:
        id: the id of the line.
        branch_id: identifies one use of the xid; a later branch with the same xid has another.
        at: the time of the event, by the clock of its resource manager.
    """

    source: str
    rm: str
    vhost: str
    format_id: int
    gtrid: bytes
    bqual: bytes
    branch_id: str
    id: str
    event: JournalEvent
    outcome: Heuristic | None = None
    at: int
    owner: str
    actor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A branch that a participant has in doubt now.

    Args:
        format_id: ``None`` if the participant's name for the branch is no xid; then *gtrid* is that name.
        branch_id: for branches in dtx, as for :class:`Event`.
        state: the state that the participant reports; see :data:`STATE_MARK`.
        since: when it was prepared, if that is known.
    """

    source: str
    kind: SourceKind
    rm: str
    vhost: str
    format_id: int | None
    gtrid: bytes
    bqual: bytes
    state: str
    owner: str
    since: int | None
    observed_at: int
    branch_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The record of a global transaction in the log of a transaction manager.

    Args:
        format_id: ``None`` if the log does not store it; then the decision applies to every known format id.
        at: ``None`` if the log does not store it.
        finished: whether every branch has acknowledged; ``None`` if the log does not store it.
    """

    source: str
    tm: str
    format_id: int | None
    gtrid: bytes
    decision: Choice
    at: int | None
    finished: bool | None = None


@dataclass(slots=True)
class Branch:
    """Everything that is known of one branch of one owner at one place.

    Args:
        marks: the marks of all its lines in the journal.
        opened_at: when it was prepared, or phase two began.
        forgotten_at: when a user other than its owner first forgot its outcome.
        seen: the marks of the participant's current state.
        seen_since: the latest time since which the participant has had it; ``None`` if unknown.
        seen_at: the latest time at which the participant was queried.
    """

    marks: Mark = _NOTHING
    opened_at: int | None = None
    forgotten_at: int | None = None
    seen: Mark = _NOTHING
    seen_since: int | None = None
    seen_at: int | None = None

    @property
    def now(self) -> Mark:
        """Its marks, with the participant's unless the journal has its end."""
        return self.marks if self.marks & ENDED else self.marks | self.seen

    @property
    def is_open(self) -> bool:
        """Whether it has voted, or phase two has begun, and it has not ended."""
        return bool(self.now & OPENED and not self.now & ENDED)

    @property
    def since(self) -> int | None:
        """When it was opened, or the latest known time."""
        return self.seen_since if self.opened_at is None else self.opened_at

    @property
    def is_unknown(self) -> bool:
        """Whether its outcome is unknown."""
        marks = self.now
        return bool(
            (marks & Mark.HEURISTIC_HAZARD and not marks & (Mark.COMMITTED | Mark.ROLLED_BACK))
            or (marks & Mark.FORGOTTEN and not marks & DIRECTIONS)
        )


Key = tuple[int | None, bytes]
"""Format id and gtrid; the format id is ``None`` if no source has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The verdict about one global transaction; times in microseconds since the epoch.

    Args:
        findings: all that match, in order of precedence; ``verdict`` is the first.
        since: when the first of the open branches was opened; ``None`` if none is open.
        first_at, last_at: the first and last known time; ``None`` if there is none.
        rms: names of the resource managers, in order.
        owners: the owners of its branches, in order.
        branches: the number of places with a branch.
        decision: ``commit``, ``rollback``, or ``conflict`` if the logs disagree.
        tm: the transaction managers that decided, in order, joined by a comma.
        known_at: the latest time at which a branch is known to be open; ``None`` if none is open.
    """

    format_id: int | None
    gtrid: bytes
    findings: tuple[Verdict, ...]
    since: int | None
    first_at: int | None
    last_at: int | None
    rms: tuple[str, ...]
    owners: tuple[str, ...]
    branches: int
    decision: str | None
    tm: str | None
    known_at: int | None = None

    @property
    def verdict(self) -> Verdict:
        """The first of the findings."""
        return self.findings[0]

    @property
    def fingerprint(self) -> bytes:
        """16 bytes of SHA-256 over the canonical form: they change with everything except the evidence."""
        fields: list[str] = [
            _number(self.format_id),
            self.gtrid.hex().upper(),
            ",".join(self.findings),
            _number(self.since),
            _number(self.first_at),
            _number(self.last_at),
            _words(self.rms),
            _words(self.owners),
            str(self.branches),
            self.decision or "",
            _words((self.tm or "",)),
        ]
        return hashlib.sha256("|".join(fields).encode()).digest()[:16]


def _number(value: int | None) -> str:
    return "" if value is None else str(value)


def _words(words: Iterable[str]) -> str:
    """The words with their lengths, so that different lists have different forms."""
    return ",".join(f"{len(word)}:{word}" for word in words)


def _later(one: int | None, other: int | None) -> int | None:
    return max((time for time in (one, other) if time is not None), default=None)


def _earlier(one: int | None, other: int | None) -> int | None:
    return min((time for time in (one, other) if time is not None), default=None)


@dataclass(slots=True)
class _Transaction:
    branches: dict[tuple[str, str, str, bytes, str, str | None], Branch] = field(default_factory=dict)
    dtx_owners: set[str] = field(default_factory=set)
    times: list[int] = field(default_factory=list)
    decisions: dict[tuple[str, str, Choice], Mark] = field(default_factory=dict)
    decided_at: int | None = None

    def _branch(self, of: Event | Observation) -> Branch:
        return self.branches.setdefault((of.source, of.rm, of.vhost, of.bqual, of.owner, of.branch_id), Branch())

    def add_event(self, line: Event) -> None:
        branch = self._branch(line)
        mark = mark_of(line.event, line.outcome)
        branch.marks |= mark
        self.dtx_owners.add(line.owner)
        self.times.append(line.at)
        if mark & OPENED:
            branch.opened_at = _earlier(branch.opened_at, line.at)
        if line.event is JournalEvent.FORGOTTEN and line.actor != line.owner:
            branch.forgotten_at = _earlier(branch.forgotten_at, line.at)

    def add_observation(self, seen: Observation) -> None:
        branch = self._branch(seen)
        branch.seen |= STATE_MARK[seen.state]
        branch.seen_since = _later(branch.seen_since, seen.since)
        branch.seen_at = _later(branch.seen_at, seen.observed_at)
        self.times.append(seen.observed_at if seen.since is None else seen.since)
        if seen.kind is SourceKind.DTX:
            self.dtx_owners.add(seen.owner)

    def add_decision(self, made: Decision) -> None:
        key = (made.source, made.tm, made.decision)
        mark = Mark.DECIDED_COMMIT if made.decision is Choice.COMMIT else Mark.DECIDED_ROLLBACK
        if made.finished is not None:
            mark |= Mark.DONE if made.finished else Mark.UNDONE
        self.decisions[key] = self.decisions.get(key, _NOTHING) | mark
        if made.at is not None:
            self.times.append(made.at)
        self.decided_at = _later(self.decided_at, made.at)

    def facts(self, rules: Rules) -> Facts:
        marks, since, forgotten_at, known_at, gone, count = _NOTHING, None, None, None, False, 0
        age: int | None = None
        for (source, *_), branch in self.branches.items():
            marks |= branch.now
            forgotten_at = _earlier(forgotten_at, branch.forgotten_at)
            if branch.is_open and not branch.seen and source in rules.asked:
                gone = True
            elif branch.is_open:
                count += 1
                since = _earlier(since, branch.since)
                known = _later(branch.seen_at, rules.archived.get(source))
                known = rules.as_of if known is None else known
                known_at = _later(known_at, known)
                age = _later(age, None if branch.since is None else known - branch.since)
        for mark in self.decisions.values():
            marks |= mark
        places = {place[:4] for place in self.branches}
        return Facts(
            marks=marks,
            reused=len(places) < len(self.branches),
            unknown=any(branch.is_unknown for branch in self.branches.values()),
            open=count,
            since=since,
            age=age,
            known_at=known_at,
            gone=gone,
            forgotten_at=forgotten_at,
            owners_differ=len(self.dtx_owners) > 1,
            decided_at=self.decided_at,
            undone=any(mark & Mark.UNDONE and not mark & Mark.DONE for mark in self.decisions.values()),
            last_at=max(self.times, default=None),
        )

    def judged(self, key: Key, rules: Rules) -> Judgement:
        facts = self.facts(rules)
        choices = sorted({str(choice) for _, _, choice in self.decisions})
        return Judgement(
            format_id=key[0],
            gtrid=key[1],
            findings=judge(facts, rules),
            since=facts.since,
            first_at=min(self.times, default=None),
            last_at=max(self.times, default=None),
            rms=tuple(sorted({rm for _, rm, *_ in self.branches})),
            owners=tuple(sorted({owner for *_, owner, _ in self.branches})),
            branches=len({place[:4] for place in self.branches}),
            decision="conflict" if len(choices) > 1 else choices[0] if choices else None,
            tm=",".join(sorted({tm for _, tm, _ in self.decisions})) or None,
            known_at=facts.known_at,
        )


def reconcile(
    events: Iterable[Event], observations: Iterable[Observation], decisions: Iterable[Decision], rules: Rules
) -> dict[Key, Judgement]:
    """The verdict about every known global transaction.

    Args:
        events: lines of all journals, in any order.
        observations: the branches that participants have in doubt.
        decisions: the decisions in the logs of transaction managers.
        rules: the other parameters of verdicts.
    """
    found: dict[Key, _Transaction] = defaultdict(_Transaction)
    for line in events:
        found[line.format_id, line.gtrid].add_event(line)
    for seen in observations:
        if seen.state in STATE_MARK:
            found[seen.format_id, seen.gtrid].add_observation(seen)
    made = list(decisions)
    for decision in made:
        if decision.format_id is not None:
            found[decision.format_id, decision.gtrid].add_decision(decision)
    known: dict[bytes, list[Key]] = defaultdict(list)
    for key in found:
        known[key[1]].append(key)
    for decision in made:
        if decision.format_id is None:
            for key in known.get(decision.gtrid, [(None, decision.gtrid)]):
                found[key].add_decision(decision)
    return {key: transaction.judged(key, rules) for key, transaction in found.items()}
