"""The invariants for one branch and its surroundings after its end.

The branch ended as its transaction manager decided. Each message of a committed branch is in its queue exactly once,
and no message of a rolled-back one. Each consumed message is gone after a commit, and back exactly once after a
rollback. The journal agrees, and nothing else has changed.
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
"""Journal events that are not part of the outcome."""
_SETTLING = 5.0
"""Seconds in which a broker requeues the messages of a dead connection."""

Taken = Sequence[tuple[bytes, pika.BasicProperties, bool]]


@dataclass
class Verdict:
    """The result of an audit.

    Args:
        lost, repeated: numbers of messages.
        wrong: descriptions of all other differences.
    """

    lost: int = 0
    repeated: int = 0
    wrong: list[str] = field(default_factory=list)

    def broken(self, *, may_repeat: bool) -> list[str]:
        """Return descriptions of the broken guarantees."""
        lost = [f"{self.lost} messages are lost"] if self.lost else []
        repeated = [f"{self.repeated} messages are repeated"] if self.repeated and not may_repeat else []
        return [*self.wrong, *lost, *repeated]


def audit(stage: MatrixStage, transaction: Transaction) -> Verdict:
    """Check the end of *transaction*, and empty its queues."""
    verdict = Verdict()
    outcome = transaction.outcome
    verdict.wrong += transaction.faults
    if outcome is None:
        verdict.wrong.append(f"{transaction.xid} did not come to an end")
        outcome = Decision.ROLLBACK
    try:
        wait_until(lambda: transaction.xid not in stage.states(), seconds=INSISTING, what="the branch's end in the log")
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
    """Take all messages of *queue*; wait some seconds for at least *count*."""
    with contextlib.suppress(TimeoutError):
        wait_until(lambda: ready(channel, queue) >= count, seconds=_SETTLING, what=f"the messages of {queue}")
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
    # "RabbitMQ may redeliver messages of a classic queue that were acknowledged moments before the broker died."
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
    """Return the sequences of journal events that are allowed; only one if the vote was received."""
    kind = transaction.kind
    if transaction.operated:
        return [["prepared", "heuristic", "forgotten"]]
    if kind is Kind.NOTHING:
        return [[], ["read-only"], ["rolled-back"]]
    if outcome is Decision.COMMIT:
        return [["committed"]] if kind.one_phase else [["prepared", "committed"]]
    if transaction.heard:
        return [["prepared", "rolled-back"]]
    # A branch without a vote is presumed aborted, and may be missing. A rollback may come after a vote that was lost.
    return [[], ["rolled-back"], *([] if kind.one_phase else [["prepared", "rolled-back"]])]
