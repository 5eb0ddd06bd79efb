"""What recovery records about orphans, without a server, mainly for branches that commit in one phase."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dtx.client import XA_HEURCOM, XAER_NOTA, XAER_PROTO, XAER_RMFAIL, XAException, Xid
from dtx.client.tm import Decision, steps
from dtx.client.tm.databases import SqliteLog
from dtx.client.tm.decisions import DecisionRow, now
from dtx.client.tm.recovery import Gtrid, RecoveryReport, RecoveryRound, ResourceIdentity
from dtx.client.tm.steps import CommitPoint, access, drive

DEAD = Gtrid("n", "0123456789ab", time.time() - 3600, 1).to_octets()
"""A transaction of a process that has ended."""
COMMITTING = XAER_PROTO("COMMAND_INVALID - state=committing; not now")
COMMITTED = XAER_NOTA("NOT_FOUND - ended=committed; at=2026-01-01T00:00:00Z; no more")


class Died(BaseException):
    """The process dies here."""


class FakeResource:
    """A resource and its only session.

    Args:
        name: name of the resource.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.in_doubt: list[Xid] = []
        self.answer: XAException | None = None
        """The answer to a rollback. ``None`` means success."""
        self.asked: list[str] = []
        self.away = False

    def acquire(self) -> "FakeResource":
        if self.away:
            raise XAER_RMFAIL("away")
        return self

    def usable(self) -> bool:
        return True

    def release(self, _session: object) -> None:
        """Do nothing."""

    def recover(self) -> list[Xid]:
        return list(self.in_doubt)

    def rollback(self, xid: Xid) -> None:
        self.asked.append(f"rollback {xid.bqual.decode()}")
        if self.answer is not None:
            raise self.answer
        self.in_doubt.remove(xid)

    def forget(self, _xid: Xid) -> None:
        """Do nothing."""


class Node:
    """A node whose program has died, and its recovery.

    Args:
        directory: directory of its log.
    """

    def __init__(self, directory: Path) -> None:
        self.log = SqliteLog(directory / "tm.db")
        self.identity = ResourceIdentity("n")
        self.queue = FakeResource("q")
        self.xid = self.identity.xid(DEAD, "q")
        self.queue.in_doubt = [self.xid]
        self.alone: set[Xid] = set()

    def recover(self) -> RecoveryReport:
        """Run one round."""
        work = RecoveryRound(
            identity=self.identity,
            resources={"q": self.queue},
            log=access(lambda call: call(self.log)),
            running=lambda _gtrid: False,
            interval=0.0,
            first_seen={},
            alone=self.alone,
        )
        return drive(work.steps())

    def fence(self, *names: str) -> None:
        """Recovery has decided to roll back, and gone no further."""
        self.log.decide(
            DecisionRow(
                gtrid=DEAD,
                format_id=self.identity.format_id,
                node="n",
                decision=Decision.ROLLBACK,
                at=now(),
                resources=names,
            )
        )


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A node whose queue has a branch in doubt without a decision."""
    node = Node(tmp_path)
    yield node
    steps.arm(None)
    node.log.close()


def test_an_orphan_leaves_a_roll_back_that_is_finished(node: Node) -> None:
    assert node.recover().rolled_back == [node.xid]
    row = node.log.read(DEAD)
    assert row is not None
    assert row.decision is Decision.ROLLBACK
    assert row.finished is not None
    assert node.recover() == RecoveryReport()
    assert node.queue.asked == ["rollback q"]


def test_a_one_phase_branch_leaves_nothing_in_the_log(node: Node) -> None:
    """The program died in its one-phase commit. The resource manager decided, and the log must not contradict it."""
    node.queue.answer = COMMITTING
    report = node.recover()
    assert report.one_phase == [node.xid]
    assert (report.rolled_back, report.committed, report.heuristics) == ([], [], [])
    assert report.clean
    assert "1 committed in one phase" in str(report)
    assert node.log.read(DEAD) is None
    assert node.log.heuristics() == []


def test_it_is_asked_about_once(node: Node) -> None:
    """A branch may be stuck for days. Otherwise each round would fence it and withdraw the fence."""
    node.queue.answer = COMMITTING
    node.recover()
    assert node.recover() == RecoveryReport()
    assert node.queue.asked == ["rollback q"]
    node.queue.in_doubt = []
    node.recover()
    assert node.alone == set()


def test_a_branch_committed_a_moment_ago_is_no_damage(node: Node) -> None:
    node.queue.answer = COMMITTED
    report = node.recover()
    assert (report.one_phase, report.heuristics) == ([node.xid], [])
    assert node.log.read(DEAD) is None


def test_a_heuristic_commit_of_an_orphan_is_damage(node: Node) -> None:
    node.queue.answer = XA_HEURCOM("by hand")
    report = node.recover()
    assert report.one_phase == []
    assert [found.damaging for found in report.heuristics] == [True]
    row = node.log.read(DEAD)
    assert row is not None
    assert row.decision is Decision.ROLLBACK


@pytest.mark.parametrize(
    "answer", [XAER_PROTO("COMMAND_INVALID - state=active; not committing"), XAER_RMFAIL("gone")], ids=str
)
def test_an_orphan_that_cannot_be_rolled_back_yet_stays_decided(node: Node, answer: XAException) -> None:
    node.queue.answer = answer
    report = node.recover()
    assert list(report.waiting) == [node.xid]
    row = node.log.read(DEAD)
    assert row is not None
    assert row.finished is None
    node.queue.answer = None
    assert node.recover().rolled_back == [node.xid]


@pytest.mark.parametrize(
    ("answer", "left"),
    [(COMMITTED, None), (XAER_NOTA("unknown xid"), Decision.ROLLBACK), (COMMITTING, None)],
    ids=["committed", "not known", "committing"],
)
def test_a_dead_recoverys_fence_is_completed_without_a_listed_branch(
    node: Node, answer: XAException, left: Decision | None
) -> None:
    """The branch ended in the meantime, and the log must match its outcome."""

    def die(here: CommitPoint) -> None:
        if here is CommitPoint.RECOVERY_FENCED:
            raise Died

    steps.arm(die)
    with pytest.raises(Died):
        node.recover()
    steps.arm(None)
    assert node.log.read(DEAD) is not None
    node.queue.in_doubt = []
    node.queue.answer = answer
    report = node.recover()
    assert report.rolled_back == []
    assert report.one_phase == ([node.xid] if left is None else [])
    row = node.log.read(DEAD)
    assert (row and row.decision) == left
    assert row is None or row.finished is not None
    assert node.recover() == RecoveryReport()


@pytest.mark.parametrize(
    "spoil", [lambda node: setattr(node.queue, "away", True), lambda node: node.fence("other")], ids=["away", "unknown"]
)
def test_a_fence_whose_resource_cannot_be_asked_waits(node: Node, spoil: Callable[[Node], Any]) -> None:
    node.queue.in_doubt = []
    spoil(node)
    node.fence("q")
    node.recover()
    row = node.log.read(DEAD)
    assert row is not None
    assert row.finished is None


def test_a_decision_to_commit_cannot_be_withdrawn(node: Node) -> None:
    node.log.decide(
        DecisionRow(gtrid=DEAD, format_id=1, node="n", decision=Decision.COMMIT, at=now(), resources=("q",))
    )
    node.log.withdraw(DEAD)
    assert node.log.read(DEAD) is not None
