"""Standalone mode: dtx is stopped during its transaction in PostgreSQL, which then commits without dtx."""

import contextlib

import pytest

from dtx.client import XAER_NOTA, XAException, XaFlag
from tests.support.broker import only_standalone
from tests.support.crash import work
from tests.support.database_faults import Lock
from tests.support.standby_pair import FENCED, Pair

pytestmark = only_standalone


@pytest.mark.parametrize("decision", ["commit", "rollback"])
def test_a_durable_unanswered_decision_is_known_to_the_successor(pair: Pair, decision: str) -> None:
    """The transaction has proved its epoch and commits; the successor then finds the branch completed."""
    scene = pair.scene
    for queue in ("in", "out"):
        scene.declare(queue)
    scene.fill("in", b"one", b"two")
    with scene.connected() as connection:
        xa, xid = work(connection.channel(), publish={"out": [b"a"]}, consume={"in": 1})
        assert xa.prepare(xid) is XaFlag.OK
        with Lock(scene.database, "journal") as lock:
            answer = scene.background(lambda: getattr(xa, decision)(xid))
            lock.wait_felt()
            pair.active.pause()
        pair.succeed()
        ending = "committed" if decision == "commit" else "rolled-back"
        with scene.coordinator() as coordinator:
            assert list(coordinator.recover()) == []
            with pytest.raises(XAER_NOTA, match=f"completed: {ending}"):
                getattr(coordinator, decision)(xid)
        pair.active.resume()
        assert pair.active.wait() == FENCED
        with contextlib.suppress(XAException):  # dtx may see the commit before it sees its successor
            assert answer.result(30) is XaFlag.OK
    assert scene.bodies("out") == ([b"a"] if decision == "commit" else [])
    assert scene.bodies("in") == ([b"two"] if decision == "commit" else [b"one", b"two"])
    assert scene.history(xid) == ["prepared", ending]


def test_a_durable_unanswered_vote_is_in_doubt(pair: Pair) -> None:
    """Prepared means durable, answered or not: the transaction manager finds the branch and decides."""
    scene = pair.scene
    for queue in ("in", "out"):
        scene.declare(queue)
    scene.fill("in", b"one", b"two")
    with scene.connected() as connection:
        xa, xid = work(connection.channel(), publish={"out": [b"a"]}, consume={"in": 1})
        with Lock(scene.database, "journal") as lock:
            answer = scene.background(lambda: xa.prepare(xid))
            lock.wait_felt()
            pair.active.pause()
        pair.succeed()
        assert scene.count("in") == 1  # the branch holds the other message
        with scene.coordinator() as coordinator:
            assert list(coordinator.recover()) == [xid]
            assert coordinator.rollback(xid) is XaFlag.OK
        pair.active.resume()
        assert pair.active.wait() == FENCED
        with contextlib.suppress(XAException):
            assert answer.result(30) is XaFlag.OK
    assert (scene.bodies("in"), scene.bodies("out")) == ([b"one", b"two"], [])
    assert scene.history(xid) == ["prepared", "rolled-back"]
