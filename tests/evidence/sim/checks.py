"""The invariants at the end of a run: the ledger, the log and the queues must agree."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import combinations, zip_longest
from typing import Final
from uuid import UUID

from dtx.log.records import ENDINGS, Advance, Insert, JournalEvent, LogState
from dtx.wire.amqp09 import properties
from dtx.xa.codes import Heuristic
from dtx.xa.xid import Xid
from tests.evidence.sim.broker import SimBroker, copy_number
from tests.evidence.sim.database import SimDatabase
from tests.evidence.sim.ledger import Branch, Delivered, Ledger, Move

_ID: Final = b"x-dtx-id"
_PUT_BACK: Final = b"x-dtx-put-back"
_MOST: Final = 20
_COMMITS: Final = frozenset({LogState.COMMITTING, LogState.HEURISTIC_COMMITTING})
_UNDOES: Final = frozenset({LogState.ROLLING_BACK, LogState.HEURISTIC_ROLLING_BACK})
Copies = dict[bytes, list[Delivered]]
"""The copies of each message, by body."""


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
                copy = Delivered(0, message.body, queue.name, message.properties)
                copies.setdefault(message.body, []).append(copy)
    return copies


def judge(
    ledger: Ledger, database: SimDatabase, broker: SimBroker, copies: Copies, got: Sequence[Delivered], *, exact: bool
) -> Verdict:
    """Compare them.

    Args:
        ledger: the decisions.
        database: of dtx.
        broker: which dtx was alongside, if there was one.
        copies: the messages in the queues.
        got: what consumers got when they emptied these queues through dtx.
        exact: no message may be repeated: no broker has died and no queue has refused.
    """
    verdict = Verdict([*ledger.violations, *database.violations, *database.members.violations])
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
    lines = _Lines(broker)
    read = lines.apart(ledger, committed, copies)
    taken = {each.body for each in ledger.perhaps_settled}
    for branch in ledger.branches.values():
        for body, queue in branch.publishes:
            origin[body] = branch
            if branch.xid in committed:
                expected[body] = queue
        if branch.xid in committed:
            consumed.update(body for body, _ in branch.consumes)
    for body, queue in expected.items():
        there = [copy.queue for copy in copies.get(body, [])]
        gone = consumed[body] + read[body]
        if not there and not gone and body not in taken and not (body in given_up and body in archived):
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
    _judge_origins(copies, taken, {*expected, *given_up, *ledger.strays}, origin, wrong)
    _judge_moves(moves, _places(ledger, committed, copies), given_up, wrong)
    if broker.numbered:
        settled = [*_consumed(ledger, committed), *ledger.settled, *got]
        for body in copies.keys() - taken - {each.body for each in settled}:
            wrong(f"{body!r} is in a queue, and no consumer gets it")
        _judge_settled(lines, settled, ledger.imitated | moves.keys(), wrong)
    del verdict.violations[_MOST:]
    return verdict


def _judge_origins(
    copies: Copies, read: set[bytes], allowed: set[bytes], origin: dict[bytes, Branch], wrong: Callable[[str], None]
) -> None:
    """Check that all messages in queues, and all that were read, are of committed branches, and have one id."""
    for body in sorted((read | copies.keys()) - allowed):
        where = [copy.queue for copy in copies.get(body, [])] or "no queue, and was read"
        wrong(f"{body!r} is in {where}, of {_of(origin.get(body))}, which did not commit")
    for body, found in copies.items():
        ids = {_id(copy) for copy in found}
        if body in origin and len(ids) > 1:
            wrong(f"the copies of {body!r} have different ids: {ids}")


def _key(raw: bytes) -> bytes | None:
    """Return the key of a message, as docs/explanation/duplicates.md defines it."""
    found = properties.read(raw)
    entry = found.header(_PUT_BACK) or found.header(_ID)
    return None if entry is None else bytes(entry.value)


def _id(copy: Delivered) -> bytes | None:
    entry = properties.read(copy.properties).header(_ID)
    return None if entry is None else bytes(entry.value)


def _consumed(ledger: Ledger, committed: set[Xid]) -> list[Delivered]:
    """Return what the committed branches consumed."""
    return [each for branch in ledger.branches.values() if branch.xid in committed for each in branch.deliveries]


class _Lines:
    """The line of each copy: a message is published, and each rollback puts back what its branch has consumed."""

    def __init__(self, broker: SimBroker) -> None:
        self._numbered = broker.numbered

    def of(self, number: int) -> list[int]:
        """Return the numbers of the published copy, and of all that were put back, up to *number*."""
        line: list[int] = []
        while number:
            line.insert(0, number)
            number = copy_number(self._numbered[number])
        return line

    def same_message(self, first: int, second: int) -> bool:
        """Whether two copies, or those that were put back as them, are copies of one published message.

        If not, two branches have put back the same delivery, or one copy was put back as the other.
        """
        a, b = next(((a, b) for a, b in zip_longest(self.of(first), self.of(second)) if a != b), (None, None))
        return a is not None and b is not None and _key(self._numbered[a]) == _key(self._numbered[b])

    def apart(self, ledger: Ledger, committed: set[Xid], copies: Copies) -> Counter[bytes]:
        """Count, by body, copies that were read outside of branches and are in no line of another one.

        The broker may deliver a settled message again. So a copy that is in a queue as well does not count twice.
        """
        others = [*_consumed(ledger, committed), *(copy for found in copies.values() for copy in found)]
        known = {number for each in others for number in self.of(copy_number(each.properties))}
        read = {copy_number(each.properties): each.body for each in ledger.settled}
        known.update(number for each in read for number in self.of(each)[:-1])
        return Counter(body for number, body in read.items() if number not in known)


def _judge_settled(
    lines: _Lines, settled: Sequence[Delivered], exempt: Collection[bytes], wrong: Callable[[str], None]
) -> None:
    """Check that consumers which read through dtx have settled one copy of each message; *exempt*: these may differ.

    docs/explanation/duplicates.md has the exceptions. The broker delivers the same copy again. A message is put back
    although the broker has not taken it: then both messages have different keys. An operator redirects it.
    """
    numbers: dict[bytes, dict[int, None]] = {}
    for each in settled:
        numbers.setdefault(each.body, {})[copy_number(each.properties)] = None
    for body, found in numbers.items():
        twice = any(lines.same_message(*pair) for pair in combinations(found, 2))
        if twice and body not in exempt:
            wrong(f"consumers have settled {len(found)} copies of {body!r}: {[lines.of(number) for number in found]}")


def _judge_strays(ledger: Ledger, copies: Copies, consumed: Counter[bytes], wrong: Callable[[str], None]) -> None:
    """Check messages that were published outside of any branch: they may be lost, but must not be repeated."""
    for body in ledger.strays:
        there = [copy.queue for copy in copies.get(body, ())]
        if len(there) + consumed[body] > 1:
            wrong(f"{body!r}, of no branch, is in {there} and was consumed {consumed[body]} times")


def _moves(ledger: Ledger) -> dict[bytes, list[Move]]:
    """By body, the orders of operators to redirect the message."""
    moves: dict[bytes, list[Move]] = {}
    for branch in ledger.branches.values():
        for move in branch.moves:
            moves.setdefault(move.body, []).append(move)
    return moves


def _places(ledger: Ledger, committed: set[Xid], copies: Copies) -> dict[bytes, set[bytes]]:
    """By body, the queues that hold the message, or from which it was consumed."""
    places = {body: {copy.queue for copy in found} for body, found in copies.items()}
    for each in ledger.perhaps_settled:
        places.setdefault(each.body, set()).add(each.queue)
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
