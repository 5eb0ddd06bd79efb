"""One-phase commits under faults: all or nothing, and never twice."""

import contextlib
from collections.abc import Iterator

import pytest

from dtx.client import XA_RBROLLBACK, XAER_NOTA, XAER_RMFAIL, XaFlag, XAResource, Xid
from tests.support.crash import Stage, work

KINDS = ["publish", "consume", "both"]


@contextlib.contextmanager
def idle_branch(stage: Stage, kind: str) -> Iterator[tuple[XAResource, Xid]]:
    """A branch that publishes ``a`` to ``out``, takes ``one`` from ``in``, or both."""
    stage.declare("in")
    stage.declare("out")
    stage.fill("in", b"one", b"two")
    with stage.connected() as connection:
        yield work(
            connection.channel(),
            publish={"out": [b"a"]} if kind != "consume" else {},
            consume={"in": 1} if kind != "publish" else {},
        )


def committed(stage: Stage, kind: str) -> None:
    """Check that everything happened exactly once."""
    assert stage.bodies("out") == ([] if kind == "consume" else [b"a"])
    assert stage.bodies("in") == ([b"one", b"two"] if kind == "publish" else [b"two"])


@pytest.mark.parametrize("kind", KINDS)
def test_one_phase_does_it_all_at_once(stage: Stage, kind: str) -> None:
    with idle_branch(stage, kind) as (xa, xid):
        assert xa.commit(xid, one_phase=True) is XaFlag.OK
        stage.wait_for_end()
    committed(stage, kind)
    assert stage.history(xid) == ["committed"]


@pytest.mark.parametrize("instant", ["not sent", "happened"])
def test_publishes_are_committed_once_though_dtx_is_killed(stage: Stage, instant: str) -> None:
    """The decision is in the log before the first message is sent."""
    with idle_branch(stage, "publish") as (xa, xid):
        stage.proxy.stall("up" if instant == "not sent" else "down")
        answer = stage.background(lambda: xa.commit(xid, one_phase=True))
        stage.wait_for_state(xid, "committing")
        if instant == "happened":
            stage.wait_for_count("out", 1)
        stage.service.kill9()
        stage.proxy.cut()
        stage.proxy.resume()
        with pytest.raises(XAER_RMFAIL):
            answer.result(30)
    stage.service.start()
    stage.wait_for_end()
    committed(stage, "publish")
    with stage.coordinator() as coordinator, pytest.raises(XAER_NOTA, match="completed: committed"):
        coordinator.commit(xid, one_phase=True)


@pytest.mark.parametrize("kind", ["consume", "both"])
def test_untaken_messages_are_rolled_back_when_dtx_is_killed(stage: Stage, kind: str) -> None:
    with idle_branch(stage, kind) as (xa, xid):
        stage.proxy.stall("up")
        answer = stage.background(lambda: xa.commit(xid, one_phase=True))
        stage.wait_for_state(xid, "taking")
        stage.service.kill9()
        stage.proxy.cut()
        stage.proxy.resume()
        with pytest.raises(XAER_RMFAIL):
            answer.result(30)
    stage.service.start()
    stage.wait_for_end()
    assert stage.bodies("in") == [b"one", b"two"]
    assert stage.bodies("out") == []
    assert stage.history(xid) == ["rolled-back"]


@pytest.mark.parametrize("kind", ["consume", "both"])
def test_taken_messages_are_kept_when_dtx_is_killed(stage: Stage, kind: str) -> None:
    """Only the taking is known: dtx finishes the commit, or the branch is in doubt and can be committed."""
    with idle_branch(stage, kind) as (xa, xid):
        stage.proxy.stall("down")
        answer = stage.background(lambda: xa.commit(xid, one_phase=True))
        stage.wait_for_state(xid, "taking")
        stage.wait_for(lambda: stage.receipts() == 1, "the receipt")
        stage.service.kill9()
        stage.proxy.cut()
        stage.proxy.resume()
        with pytest.raises(XAER_RMFAIL):
            answer.result(30)
    stage.service.start()
    stage.wait_for(lambda: stage.states().get(xid) != "taking", "the end of the taking")
    with stage.coordinator() as coordinator:
        for found in coordinator.recover():
            assert found == xid
            assert coordinator.commit(xid) is XaFlag.OK
    stage.wait_for_end()
    committed(stage, kind)
    assert stage.history(xid)[-1] == "committed"


def test_a_consumption_that_cannot_be_taken_is_rolled_back(stage: Stage) -> None:
    """Commit: "xa-rbrollback: the broker marked the transaction branch rollback-only for an unspecified reason"."""
    with idle_branch(stage, "both") as (_, xid):
        stage.proxy.cut()
    stage.proxy.resume()
    with stage.coordinator() as coordinator:
        with pytest.raises(XA_RBROLLBACK):
            coordinator.commit(xid, one_phase=True)
        assert coordinator.rollback(xid) is XaFlag.RBROLLBACK
    assert stage.bodies("in") == [b"one", b"two"]
    assert stage.bodies("out") == []
