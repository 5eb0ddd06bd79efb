"""The invariants: what must be true of one branch, and of everything beside it, when it has ended.

Every branch ended as its transaction manager decided; each message of a committed branch is in its queue exactly once,
and none of a rolled-back one; each consumed message is gone after a commit and back exactly once after a rollback; the
journal tells the same story; and nothing else has changed.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pika
from pika.adapters.blocking_connection import BlockingChannel

from tests.evidence.matrix.cases import Condition, Decision, Kind
from tests.evidence.matrix.stages import FULL, SOURCES, TARGETS, MatrixStage, ready
from tests.evidence.matrix.transaction import INSISTING, Transaction
from tests.support.crash import ids
from tests.support.processes import wait_until
from tests.support.queues import take_all

_ASIDE = frozenset({"stuck", "hazard", "repeated", "decided", "redirected"})
"""Events that tell of the way, and of trouble on it."""
_SETTLING = 5.0
"""Seconds in which a broker requeues what a dead connection had."""

Taken = Sequence[tuple[bytes, pika.BasicProperties, bool]]


@dataclass
class Verdict:
    """What an audit found.

    Args:
        lost, repeated: messages.
        wrong: everything else that does not agree, for people.
    """

    lost: int = 0
    repeated: int = 0
    wrong: list[str] = field(default_factory=list)

    def broken(self, *, may_repeat: bool) -> list[str]:
        """The promises that were broken, for people."""
        lost = [f"{self.lost} messages are lost"] if self.lost else []
        repeated = [f"{self.repeated} messages are repeated"] if self.repeated and not may_repeat else []
        return [*self.wrong, *lost, *repeated]


def audit(stage: MatrixStage, transaction: Transaction) -> Verdict:
    """Look at the end of *transaction*; its queues are empty afterwards."""
    verdict = Verdict()
    outcome = transaction.outcome
    verdict.wrong += transaction.faults
    if outcome is None:
        verdict.wrong.append(f"{transaction.xid} did not come to an end")
        outcome = Decision.ROLLBACK
    try:
        wait_until(lambda: transaction.xid not in stage.states(), seconds=INSISTING, what="the end in the log")
    except TimeoutError:
        verdict.wrong.append(f"the log still has {transaction.xid}: {stage.rows().get(transaction.xid)}")
    else:
        verdict.wrong += _story(stage.history(transaction.xid), transaction, outcome)
    expected = transaction.expected(outcome)
    with stage.broker.channel(stage.vhost) as channel:
        for queue in (*SOURCES, *TARGETS, *([FULL] if FULL in transaction.targets else [])):
            bodies = expected.get(queue, [])
            taken = _take(channel, queue, len(bodies))
            _compare(stage, transaction, queue, bodies, taken, verdict)
        verdict.wrong += stage.changed(channel)
    others = set(stage.rows()) - set(stage.bystanders) - {transaction.xid}
    if others:
        verdict.wrong.append(f"the log has branches from nowhere: {sorted(map(str, others))}")
    if orphans := stage.orphans():
        verdict.wrong.append(f"the log has {orphans} rows of branches that are gone")
    return verdict


def _take(channel: BlockingChannel, queue: str, count: int) -> Taken:
    """Everything that is in *queue*, *count* messages at least if they come in time."""
    with contextlib.suppress(TimeoutError):
        wait_until(lambda: ready(channel, queue) >= count, seconds=_SETTLING, what=f"what is in {queue}")
    return take_all(channel, queue)


def _compare(
    stage: MatrixStage, transaction: Transaction, queue: str, expected: list[bytes], taken: Taken, verdict: Verdict
) -> None:
    found = Counter(body for body, _, _ in taken)
    if queue == FULL:
        found += Counter(transaction.relieved)
        found.subtract([b"full"])
        found = +found
    for body in expected:
        verdict.lost += not found[body]
        verdict.repeated += max(0, found[body] - 1)
    # "RabbitMQ itself may redeliver what a classic queue had acked moments before its death."
    redelivered = transaction.filled(queue) if stage.condition is Condition.BROKER and queue in SOURCES else []
    for body in found.keys() - expected:
        if body in redelivered:
            verdict.repeated += found[body]
        elif stage.condition is not Condition.BROKER or not transaction.is_of_an_earlier_one(body):
            verdict.wrong.append(f"{queue} has {body!r}, which should not be there")
    in_order = [body for body, _, _ in taken]
    if stage.mode == "standalone" and queue != FULL and sorted(in_order) == sorted(expected) and in_order != expected:
        verdict.wrong.append(f"{queue} has {in_order}, and they should come in this order: {expected}")
    verdict.wrong += _strange_copies(queue, taken)


def _strange_copies(queue: str, taken: Taken) -> Iterator[str]:
    """docs/explanation/guarantees: "may be repeated. […] Each copy has the same x-dtx-id header"."""
    copies: dict[bytes, set[str]] = {}
    for (body, _, _), identity in zip(taken, ids(taken), strict=True):
        if identity or queue in TARGETS:
            copies.setdefault(body, set()).add(identity)
    for body, identities in copies.items():
        if len(identities) > 1:
            yield f"{queue} has copies of {body!r} with different ids: {sorted(identities)}"


def _story(events: list[str], transaction: Transaction, outcome: Decision) -> Iterator[str]:
    told = [event for event in events if event not in _ASIDE]
    if told not in _stories(transaction, outcome):
        yield f"the journal tells {events} of a {outcome}"


def _stories(transaction: Transaction, outcome: Decision) -> list[list[str]]:
    """What the journal may tell: one story when the vote was heard."""
    kind = transaction.kind
    if transaction.operated:
        return [["prepared", "heuristic", "forgotten"]]
    if kind is Kind.NOTHING:
        return [[], ["read-only"], ["rolled-back"]]
    if outcome is Decision.COMMIT:
        return [["committed"]] if kind.one_phase else [["prepared", "committed"]]
    if transaction.heard:
        return [["prepared", "rolled-back"]]
    # What did not vote is presumed aborted, and need not be told of. A rollback may have met a vote that nobody heard.
    return [[], ["rolled-back"], *([] if kind.one_phase else [["prepared", "rolled-back"]])]
