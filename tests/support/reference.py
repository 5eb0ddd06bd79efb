"""The reference: verdicts with nothing but Python, for as many transactions as fit into memory.

Tests hold the implementation on Spark against it, on fleets at random. Times are microseconds since the epoch (UTC).
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from dtx.log.records import JournalEvent
from dtx.pipeline.verdicts import (
    DIRECTIONS,
    ENDED,
    EVENT_MARK,
    HEURISTIC_MARK,
    OPENED,
    STATE_MARK,
    WITH_OUTCOME,
    Choice,
    Facts,
    Mark,
    Rules,
    SourceKind,
    Verdict,
    judge,
)
from dtx.xa.codes import Heuristic

_NOTHING: Final = Mark(0)


def mark_of(event: JournalEvent, outcome: Heuristic | None) -> Mark:
    """What a line of the journal says of its branch."""
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
        id: of the line.
        branch_id: of one life of the branch; an xid that is used again has another.
        at: when it happened, by the clock of its resource manager.
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
        format_id: ``None`` where the participant's name for it is no xid; *gtrid* is that name then.
        branch_id: of dtx: as for :class:`Event`.
        state: the participant's word; see :data:`STATE_MARK`.
        since: when it was prepared, where that is known.
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
    """What the log of a transaction manager has about a global transaction.

    Args:
        format_id: ``None`` where the log does not keep it: then of every format id that the gtrid is known with.
        at: ``None`` where the log does not keep it.
        finished: whether every branch has acknowledged; ``None`` where the log does not say.
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
    """Everything that is known of one life of one owner's branch at one place.

    Args:
        marks: of all its lines in the journal.
        opened_at: when it was prepared, or phase two was under way.
        forgotten_at: when somebody other than its owner first had its outcome forgotten.
        seen: marks of what its participant has of it now.
        seen_since: the latest time since when; ``None`` where nothing is known of it.
        seen_at: the latest time at which it was asked.
    """

    marks: Mark = _NOTHING
    opened_at: int | None = None
    forgotten_at: int | None = None
    seen: Mark = _NOTHING
    seen_since: int | None = None
    seen_at: int | None = None

    @property
    def now(self) -> Mark:
        """Its marks with what its participant has, unless the journal has its end."""
        return self.marks if self.marks & ENDED else self.marks | self.seen

    @property
    def is_open(self) -> bool:
        """Whether it has voted, or phase two has begun, and it has not ended."""
        return bool(self.now & OPENED and not self.now & ENDED)

    @property
    def since(self) -> int | None:
        """When it was opened, as far as that is known."""
        return self.seen_since if self.opened_at is None else self.opened_at

    @property
    def is_unknown(self) -> bool:
        """Whether nobody knows which way it went."""
        marks = self.now
        return bool(
            (marks & Mark.HEURISTIC_HAZARD and not marks & (Mark.COMMITTED | Mark.ROLLED_BACK))
            or (marks & Mark.FORGOTTEN and not marks & DIRECTIONS)
        )


Key = tuple[int | None, bytes]
"""Format id and gtrid; the former is ``None`` where it is known from nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The verdict about one global transaction; times in microseconds since the epoch.

    Args:
        findings: all that match, in order of precedence; ``verdict`` is the first.
        since: when the first of the branches that are open was opened; ``None`` when none is.
        first_at, last_at: of everything that is known about it; ``None``: nothing of that has a time.
        rms: names of the resource managers, in order.
        owners: of its branches, in order.
        branches: places where it has been.
        decision: ``commit``, ``rollback``, or ``conflict`` where logs disagree.
        tm: the transaction managers that decided, in order, joined by a comma.
        known_at: up to when a branch is known to have been open, the latest; ``None`` when none is.
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
        """The one that counts."""
        return self.findings[0]

    @property
    def fingerprint(self) -> bytes:
        """16 octets that differ when anything but the evidence does: of SHA-256 over the canonical form."""
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
    """Each with its length before it: no two lists have the same form."""
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
    """The verdict about every global transaction that anything is known about.

    Args:
        events: lines of all journals, in any order.
        observations: what participants have in doubt.
        decisions: what the logs of transaction managers have.
        rules: what else verdicts depend on.
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
