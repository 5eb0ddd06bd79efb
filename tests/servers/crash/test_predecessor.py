"""A predecessor is stopped (SIGSTOP), not dead: the broker may still apply its units, so the successor waits."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from dtx.client import XAER_RMFAIL, XaFlag, Xid
from tests.support.crash import Stage, work
from tests.support.failpoints import ArmedService
from tests.support.service import DtxService


@contextlib.contextmanager
def stalled(stage: Stage, call: str, state: str) -> Iterator[Xid]:
    """A branch during *call*: dtx is stopped when it has sent the unit, which the network holds back.

    The branch publishes ``a`` to ``out`` and takes ``one`` from ``in``.
    """
    stage.declare("out")
    stage.declare("in")
    stage.fill("in", b"one")
    # A failpoint stops dtx: the log has the state before the unit is sent, so the state does not show the right moment.
    service = stage.service
    assert isinstance(service, ArmedService)
    service.arming = ("--at", "taking-sent" if call == "prepare" else "unit-sent", "--do", "stop")
    service.restart()
    service.arming = ()
    with stage.connected() as connection:
        xa, xid = work(connection.channel(), publish={"out": [b"a"]}, consume={"in": 1})
        if call != "prepare":
            assert xa.prepare(xid) is XaFlag.OK
        stage.proxy.stall("up")
        answer: Future[object] = stage.background(lambda: getattr(xa, call)(xid))
        try:
            stage.wait_for(lambda: b"FAILPOINT" in stage.service.log_path.read_bytes(), "the unit")
            assert stage.states() == {xid: state}
            yield xid
        finally:
            stage.service.resume()
            stage.proxy.resume()
            with pytest.raises(XAER_RMFAIL):
                answer.result(30)


def waits(stage: Stage, service: DtxService) -> None:
    """Wait until *service* logs that it waits for the lock."""
    stage.wait_for(lambda: b"waiting for a predecessor" in service.log_path.read_bytes(), "the wait for the lock")


def test_a_commit_that_arrives_late_is_not_done_twice(stage: Stage) -> None:
    """Locks: "a restarted or standby dtx decides a row only when that row's lock is free"."""
    with stalled(stage, "commit", "committing") as xid:
        heir = stage.another_service()
        waits(stage, heir)
        assert stage.states() == {xid: "committing"}
        assert stage.count("out") == 0
        stage.proxy.resume()  # now the unit arrives
        stage.wait_for_count("out", 1)
        assert stage.states() == {xid: "committing"}
        stage.service.kill9()
        stage.wait_for_end()
    assert stage.bodies("out") == [b"a"]
    assert stage.history(xid) == ["prepared", "committed"]


def test_a_commit_that_never_arrives_is_done_by_the_successor(stage: Stage) -> None:
    with stalled(stage, "commit", "committing") as xid:
        waits(stage, stage.another_service())
        stage.service.kill9()
        stage.proxy.cut()
        stage.wait_for_end()
    assert stage.bodies("out") == [b"a"]
    assert stage.history(xid) == ["prepared", "committed"]


def test_a_taking_that_arrives_late_makes_the_branch_prepared(stage: Stage) -> None:
    with stalled(stage, "prepare", "taking") as xid:
        heir = stage.another_service()
        waits(stage, heir)
        stage.proxy.resume()
        stage.wait_for(lambda: stage.receipts() == 1, "the receipt")
        assert stage.states() == {xid: "taking"}
        stage.service.kill9()
        stage.wait_for_state(xid, "prepared")
        with stage.coordinator(heir) as coordinator:
            assert list(coordinator.recover()) == [xid]
            assert coordinator.rollback(xid) is XaFlag.OK
    assert stage.bodies("in") == [b"one"]
    assert stage.bodies("out") == []


def test_while_the_lock_is_held_calls_are_answered_541(stage: Stage) -> None:
    """Any call: "541: the log or store failed and the outcome is not known; the TM may retry"."""
    stage.options = (*stage.options, "--unit-deadline", "1")
    with stalled(stage, "commit", "committing") as xid:
        heir = stage.another_service()
        with stage.coordinator(heir) as coordinator:
            assert list(coordinator.recover()) == [xid]
            with pytest.raises(XAER_RMFAIL, match="still under way"):
                coordinator.commit(xid)
            stage.service.kill9()
            stage.proxy.cut()
            assert coordinator.commit(xid) is XaFlag.OK
    assert stage.bodies("out") == [b"a"]


def test_a_resumed_predecessor_writes_nothing_and_ends(stage: Stage) -> None:
    """The lease has another epoch: "every write proves its epoch"."""
    with stalled(stage, "commit", "committing"):
        heir = stage.another_service()
        waits(stage, heir)
        stage.service.resume()
        assert stage.service.wait() == 5
        stage.proxy.resume()
        stage.wait_for_end()
    assert stage.bodies("out") == [b"a"]
    assert heir.running


def test_a_channel_that_hangs_in_tx_commit_is_waited_for(stage_with: Callable[..., Stage]) -> None:
    """The channel outlives its connection and holds the lock until the queue answers.

    By default, units that publish are not sent in tx mode where there is a quorum queue.
    """
    stage = stage_with(options=("--replay", "receipts"))
    stage.declare("out")
    stage.declare("hangs", **{"x-queue-type": "quorum"})
    with stage.connected() as connection:
        xa, xid = work(connection.channel(), publish={"out": [b"a"], "hangs": [b"b"]})
        assert xa.prepare(xid) is XaFlag.OK
        with stage.node.suspended("hangs", vhost=stage.vhost):
            answer = stage.background(lambda: xa.commit(xid))
            stage.wait_for_count("out", 1)
            stage.service.kill9()
            with pytest.raises(XAER_RMFAIL):
                answer.result(30)
            stage.service.start()
            waits(stage, stage.service)
            assert stage.count("out") == 1
    stage.wait_for_end()
    assert stage.bodies("out") == [b"a"]
    assert stage.bodies("hangs") == [b"b"]
