"""The invariants at the end of a run: the ledger, the log and the queues must agree."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from dtx.log.records import ENDINGS, Advance, Insert, JournalEvent, LogState
from dtx.wire.amqp09 import properties
from dtx.xa.codes import Heuristic
from dtx.xa.xid import Xid
from tests.evidence.sim.broker import SimBroker
from tests.evidence.sim.database import SimDatabase
from tests.evidence.sim.ledger import Branch, Ledger, Move

_ID: Final = b"x-dtx-id"
_MOST: Final = 20
_COMMITS: Final = frozenset({LogState.COMMITTING, LogState.HEURISTIC_COMMITTING})
_UNDOES: Final = frozenset({LogState.ROLLING_BACK, LogState.HEURISTIC_ROLLING_BACK})
Copies = dict[bytes, list[tuple[bytes, bytes | None]]]
"""By body: the queue and the ``x-dtx-id`` of each copy."""


@dataclass(slots=True)
class Verdict:
    """The result of the checks.

    Args:
        violations: descriptions of broken invariants.
        repeated: number of surplus copies of messages.
    """

    violations: list[str] = field(default_factory=list)
    repeated: int = 0


def in_broker(broker: SimBroker) -> Copies:
    """Return the messages in the queues of the broker."""
    copies: Copies = {}
    for queue in broker.queues.values():
        if not queue.name.startswith(b"dtx."):
            for message in queue.ready:
                entry = properties.read(message.properties).header(_ID)
                copies.setdefault(message.body, []).append((queue.name, None if entry is None else bytes(entry.value)))
    return copies


def judge(ledger: Ledger, database: SimDatabase, copies: Copies, *, exact: bool) -> Verdict:
    """Compare them.

    Args:
        ledger: the decisions.
        database: of dtx.
        copies: the messages in the queues.
        exact: no message may be repeated: no broker has died and no queue has refused.
    """
    verdict = Verdict([*ledger.violations, *database.violations])
    wrong = verdict.violations.append
    for row in database.tables.database.rows.values():
        wrong(f"{row.branch.xid} is still in the log: {row.branch.state} {row.branch.stuck or ''}")
    committed = _committed(ledger, database, wrong)
    archived = {bytes(message.body) for _, message in database.tables.database.archive}
    given_up = {body for branch in ledger.branches.values() for body in branch.given_up}
    expected = dict(ledger.seeds)
    consumed: Counter[bytes] = Counter()
    moves = _moves(ledger)
    origin: dict[bytes, Branch] = {}
    for branch in ledger.branches.values():
        for body, queue in branch.publishes:
            origin[body] = branch
            if branch.xid in committed:
                expected[body] = queue
        if branch.xid in committed:
            consumed.update(body for body, _ in branch.consumes)
    for body, queue in expected.items():
        there = [where for where, _ in copies.get(body, [])]
        gone = consumed[body]
        if not there and not gone and not (body in given_up and body in archived):
            wrong(f"{body!r} is lost: it should be in {queue!r} (of {_of(origin.get(body))})")
        surplus = len(there) + gone - 1
        if surplus > 0:
            verdict.repeated += surplus
            if exact:
                wrong(
                    f"{body!r} is there {len(there)} times and was consumed {gone} times (of {_of(origin.get(body))})"
                )
        may_be = {queue, *(move.queue for move in moves.get(body, ()))}
        if not may_be.issuperset(there):
            wrong(f"{body!r} is in {there}, it belongs into {may_be}")
    if exact:
        _judge_strays(ledger, copies, consumed, wrong)
    for body, found in copies.items():
        if body not in expected and body not in given_up and body not in ledger.strays:
            wrong(f"{body!r} is in {found}, of {_of(origin.get(body))}, which did not commit")
        ids = {id_ for _, id_ in found}
        if body in origin and len(ids) > 1:
            wrong(f"the copies of {body!r} have different ids: {ids}")
    _judge_moves(moves, _places(ledger, committed, copies), given_up, wrong)
    del verdict.violations[_MOST:]
    return verdict


def _judge_strays(ledger: Ledger, copies: Copies, consumed: Counter[bytes], wrong: Callable[[str], None]) -> None:
    """Check messages that were published outside of any branch: they may be lost, but must not be repeated."""
    for body in ledger.strays:
        if len(copies.get(body, ())) + consumed[body] > 1:
            wrong(f"{body!r}, of no branch, is in {copies.get(body, [])} and was consumed {consumed[body]} times")


def _moves(ledger: Ledger) -> dict[bytes, list[Move]]:
    """By body, the orders of operators to redirect the message."""
    moves: dict[bytes, list[Move]] = {}
    for branch in ledger.branches.values():
        for move in branch.moves:
            moves.setdefault(move.body, []).append(move)
    return moves


def _places(ledger: Ledger, committed: set[Xid], copies: Copies) -> dict[bytes, set[bytes]]:
    """By body, the queues that hold the message, or from which it was consumed."""
    places = {body: {where for where, _ in found} for body, found in copies.items()}
    for branch in ledger.branches.values():
        if branch.xid in committed:
            for body, where in branch.consumes:
                places.setdefault(body, set()).add(where)
    return places


def _judge_moves(
    moves: dict[bytes, list[Move]],
    places: dict[bytes, set[bytes]],
    given_up: set[bytes],
    wrong: Callable[[str], None],
) -> None:
    """Check that a redirected message is or was in its new queue. The last of several orders is not known."""
    for body, ordered in moves.items():
        there = places.get(body)
        if len(ordered) == 1 and ordered[0].done and there and body not in given_up and ordered[0].queue not in there:
            wrong(f"{body!r} was sent to {ordered[0].queue!r} by an operator, and went to {there}")


def _committed(ledger: Ledger, database: SimDatabase, wrong: Callable[[str], None]) -> set[Xid]:
    """Return the committed branches; check that each branch ended as decided."""
    endings, outcomes = _endings(database, wrong), _outcomes(database, wrong)
    ways = _ways(database)
    committed = {xid for xid, events in endings.items() if JournalEvent.COMMITTED in events}
    for branch in ledger.branches.values():
        outcome = outcomes.get(branch.xid)
        _judge_way(branch, ways.get(branch.xid, set()), wrong)
        if outcome is None:
            _judge_branch(branch, endings.get(branch.xid, Counter()), wrong)
            continue
        _judge_heuristic(branch, outcome, wrong)
        if _goes_on(branch, outcome, ways[branch.xid]):
            committed.add(branch.xid)
    return committed


def _of(branch: Branch | None) -> str:
    return "nobody" if branch is None else f"{branch.xid}, {branch.decision}"


def _endings(database: SimDatabase, wrong: Callable[[str], None]) -> dict[Xid, Counter[JournalEvent]]:
    endings: dict[Xid, Counter[JournalEvent]] = {}
    for _, line in database.tables.database.journal:
        events = endings.setdefault(line.xid, Counter())
        if line.event in ENDINGS:
            if events:
                wrong(f"{line.xid} ended twice: {[*events, line.event]}")
            events[line.event] += 1
    return endings


def _outcomes(database: SimDatabase, wrong: Callable[[str], None]) -> dict[Xid, Heuristic]:
    """Return the heuristic outcomes by xid."""
    outcomes: dict[Xid, Heuristic] = {}
    for _, line in database.tables.database.journal:
        if line.event is JournalEvent.HEURISTIC:
            assert line.outcome is not None
            if line.xid in outcomes:
                wrong(f"{line.xid} has two heuristic outcomes")
            outcomes[line.xid] = line.outcome
    return outcomes


def _judge_heuristic(branch: Branch, outcome: Heuristic, wrong: Callable[[str], None]) -> None:
    orders = {Heuristic.COMMITTED: "commit", Heuristic.ROLLED_BACK: "rollback"}
    if orders.get(outcome) not in branch.ordered and not branch.given_up:
        wrong(f"{branch.xid} is heuristically {outcome}, and operators have ordered {branch.ordered}")
    if branch.answered:
        wrong(f"{branch.decision} of {branch.xid} was answered as done, and it is heuristically {outcome}")
    if not branch.may_be_forgotten:  # all rows of the log have been removed: see judge
        wrong(f"{branch.xid} is heuristically {outcome}, and was forgotten though nobody had asked for that")


def _goes_on(branch: Branch, outcome: Heuristic, way: set[LogState]) -> bool:
    """Whether the messages that were not discarded were committed."""
    if branch.given_up and outcome in {Heuristic.MIXED, Heuristic.HAZARD}:
        return not way.isdisjoint(_COMMITS)
    return outcome is Heuristic.COMMITTED


def _ways(database: SimDatabase) -> dict[Xid, set[LogState]]:
    """Return all states of each branch in the log."""
    xids: dict[UUID, Xid] = {}
    ways: dict[Xid, set[LogState]] = {}
    for *_, record in database.written:
        if isinstance(record, Insert):
            xids[record.branch.id] = record.branch.xid
            ways.setdefault(record.branch.xid, set()).add(record.branch.state)
        elif isinstance(record, Advance):
            ways[xids[record.id]].add(record.to)
    return ways


def _judge_way(branch: Branch, way: set[LogState], wrong: Callable[[str], None]) -> None:
    """Check that phase two has one direction, and that a commit was requested."""
    commits, undoes = way & _COMMITS, way & _UNDOES
    if commits and undoes:
        wrong(f"{branch.xid} went both ways: {sorted(commits | undoes)}")
    if commits and not (branch.one_phase or branch.decision == "commit" or "commit" in branch.ordered):
        wrong(f"{branch.xid} is committed, and nobody wanted that: {branch.decision}, {branch.ordered}")


def _judge_branch(branch: Branch, events: Counter[JournalEvent], wrong: Callable[[str], None]) -> None:
    committed = JournalEvent.COMMITTED in events
    if branch.decision == "commit" and not committed:
        wrong(f"{branch.xid} was to be committed, the journal has {list(events)}")
    if branch.decision == "rollback" and committed:
        wrong(f"{branch.xid} was to be rolled back, the journal has {list(events)}")
