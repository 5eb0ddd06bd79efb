"""What must hold when everything has come to rest: the ledger, the log and the queues tell the same story."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from dtx.log.records import ENDINGS, JournalEvent
from dtx.wire.amqp09 import properties
from dtx.xa.codes import Heuristic
from dtx.xa.xid import Xid
from tests.sim.broker import SimBroker
from tests.sim.database import SimDatabase
from tests.sim.ledger import Branch, Ledger

_ID: Final = b"x-dtx-id"
_MOST: Final = 20
Copies = dict[bytes, list[tuple[bytes, bytes | None]]]
"""By body: the queue and the ``x-dtx-id`` of each copy."""


@dataclass(slots=True)
class Verdict:
    """What was found.

    Args:
        violations: what must never happen, and has.
        repeated: messages that are there more than once, or again.
    """

    violations: list[str] = field(default_factory=list)
    repeated: int = 0


def in_broker(broker: SimBroker) -> Copies:
    """What lies in the queues of the broker."""
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
        ledger: what was decided.
        database: of dtx.
        copies: what lies in the queues.
        exact: whether nothing may be there twice: no broker has died and no queue has refused.
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
        if any(where != queue for where in there):
            wrong(f"{body!r} is in {there}, it belongs into {queue!r}")
    for body, found in copies.items():
        if body not in expected and body not in given_up:
            wrong(f"{body!r} is in {found}, of {_of(origin.get(body))}, which did not commit")
        ids = {id_ for _, id_ in found}
        if body in origin and len(ids) > 1:
            wrong(f"the copies of {body!r} have different ids: {ids}")
    del verdict.violations[_MOST:]
    return verdict


def _committed(ledger: Ledger, database: SimDatabase, wrong: Callable[[str], None]) -> set[Xid]:
    """Branches that have committed, by whomever; each has ended as whoever decided it wanted."""
    endings, outcomes = _endings(database, wrong), _outcomes(database, wrong)
    committed = {xid for xid, events in endings.items() if JournalEvent.COMMITTED in events}
    for branch in ledger.branches.values():
        outcome = outcomes.get(branch.xid)
        if outcome is None:
            _judge_branch(branch, endings.get(branch.xid, Counter()), wrong)
            continue
        _judge_heuristic(branch, outcome, wrong)
        if _goes_on(branch, outcome):
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
    """How branches have ended by operators' orders."""
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


def _goes_on(branch: Branch, outcome: Heuristic) -> bool:
    """Whether the messages that nobody gave up have gone the way of a commit."""
    if branch.given_up and outcome in {Heuristic.MIXED, Heuristic.HAZARD}:
        return "commit" in branch.ordered or branch.decision == "commit"
    return outcome is Heuristic.COMMITTED


def _judge_branch(branch: Branch, events: Counter[JournalEvent], wrong: Callable[[str], None]) -> None:
    committed = JournalEvent.COMMITTED in events
    if branch.decision == "commit" and not committed:
        wrong(f"{branch.xid} was to be committed, the journal has {list(events)}")
    if branch.decision == "rollback" and committed:
        wrong(f"{branch.xid} was to be rolled back, the journal has {list(events)}")
