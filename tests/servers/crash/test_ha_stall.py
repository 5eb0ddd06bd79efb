"""The active dtx stands still (SIGSTOP), longer than its lease, and then goes on (SIGCONT): it is fenced and ends."""

from collections.abc import Callable

import pytest

from dtx.client import XAException, XaFlag, XAResource
from tests.support.client import connected, new_xid
from tests.support.crash import work
from tests.support.heirs import FENCED, LEASE, Crowd, Pair


def test_a_stalled_predecessor_ends_and_has_changed_nothing_that_its_successor_decided(
    pair_with: Callable[..., Pair],
) -> None:
    """It is stopped under load, resumed when the standby has decided everything, and works for nobody."""
    pair = pair_with()
    with Crowd(pair) as crowd:
        crowd.wait_for(40)
        pair.active.pause()
        took = pair.succeed()
        stalled = set(crowd.books)
        crowd.join(2)
        crowd.wait_for(20)
        in_doubt = crowd.recover(stalled)
        pair.active.resume()
        assert pair.active.wait() == FENCED
        crowd.wait_for(20)
        crowd.settle()
    print(f"the standby served {took:.2f} s after the stop; {in_doubt} branches were in doubt")
    assert took > LEASE / 2


def test_a_predecessor_that_wakes_up_at_once_changes_nothing_either(pair_with: Callable[..., Pair]) -> None:
    """It goes on while the standby is still taking over."""
    pair = pair_with()
    with Crowd(pair) as crowd:
        crowd.wait_for(40)
        epoch = pair.epoch()
        pair.active.pause()
        pair.scene.wait_for(lambda: pair.epoch() > epoch, "the lease in other hands")
        pair.active.resume()
        pair.succeed()
        assert pair.active.wait() == FENCED
        crowd.wait_for(20)
        crowd.settle()


def test_a_stop_shorter_than_the_lease_changes_nothing(pair_with: Callable[..., Pair]) -> None:
    pair = pair_with("--lease-ttl", "30")
    with Crowd(pair) as crowd:
        crowd.wait_for(40)
        epoch = pair.epoch()
        for _ in range(3):
            pair.active.pause()
            pair.scene.in_doubt()  # takes about a second
            pair.active.resume()
            crowd.wait_for(10)
        assert pair.epoch() == epoch
        crowd.settle()
    assert pair.active.running
    assert not pair.standby.ready_line


def test_a_lease_that_ran_out_and_that_nobody_took_is_renewed(pair_with: Callable[..., Pair]) -> None:
    """Design: "running out is not losing": without a standby the stalled one goes on as if nothing had been."""
    pair = pair_with()
    pair.standby.kill9()
    with Crowd(pair) as crowd:
        crowd.wait_for(40)
        pair.active.pause()
        pair.scene.wait_for(lambda: _ran_out(pair), "the end of the lease")
        pair.active.resume()
        crowd.wait_for(20)
        crowd.settle()
    assert pair.active.running


def _ran_out(pair: Pair) -> bool:
    with pair.scene.postgres.connection(pair.scene.database) as connection:
        return connection.execute("SELECT expires_at < clock_timestamp() FROM dtx.lease").fetchone() == (True,)


@pytest.mark.parametrize("decision", ["commit", "rollback"])
def test_a_decision_that_reaches_both_is_done_once(pair: Pair, decision: str) -> None:
    """The transaction manager asked the stalled one, hears nothing, and asks the standby for the same."""
    scene = pair.scene
    for queue in ("in", "out"):
        scene.declare(queue)
    scene.fill("in", b"one")
    with scene.connected() as connection:
        xa, xid = work(connection.channel(), publish={"out": [b"a"]}, consume={"in": 1})
        assert xa.prepare(xid) is XaFlag.OK
        pair.active.pause()
        answer = scene.background(lambda: getattr(xa, decision)(xid))
        pair.succeed()
        with scene.coordinator() as coordinator:
            assert list(coordinator.recover()) == [xid]
            assert getattr(coordinator, decision)(xid) is XaFlag.OK
        pair.active.resume()
        assert pair.active.wait() == FENCED
        with pytest.raises(XAException):
            answer.result(30)
    scene.wait_for_end()
    assert scene.bodies("out") == ([b"a"] if decision == "commit" else [])
    assert scene.bodies("in") == ([b"one"] if decision == "rollback" else [])
    assert scene.history(xid)[-1] == ("committed" if decision == "commit" else "rolled-back")


def test_a_decision_that_the_stalled_one_had_heard_loses_against_one_that_the_standby_has_done(pair: Pair) -> None:
    """An operator's mistake, but nobody's money: what is durable first counts, and the other is told that."""
    scene = pair.scene
    for queue in ("in", "out"):
        scene.declare(queue)
    scene.fill("in", b"one")
    with scene.connected() as connection:
        xa, xid = work(connection.channel(), publish={"out": [b"a"]}, consume={"in": 1})
        assert xa.prepare(xid) is XaFlag.OK
        pair.active.pause()
        answer = scene.background(lambda: xa.commit(xid))
        pair.succeed()
        with scene.coordinator() as coordinator:
            assert coordinator.rollback(xid) is XaFlag.OK
        pair.active.resume()
        assert pair.active.wait() == FENCED
        with pytest.raises(XAException):
            answer.result(30)
    assert (scene.bodies("in"), scene.bodies("out")) == ([b"one"], [])
    assert scene.history(xid) == ["prepared", "rolled-back"]


def test_a_branch_that_had_not_voted_when_its_dtx_was_stopped_is_unknown_to_the_successor(pair: Pair) -> None:
    """Presumed abort; what it consumed returns when the stalled one's connections end, at its exit at the latest."""
    scene = pair.scene
    for queue in ("in", "out"):
        scene.declare(queue)
    scene.fill("in", b"one")
    with scene.connected() as connection:
        xa, xid = work(connection.channel(), publish={"out": [b"a"]}, consume={"in": 1})
        pair.active.pause()
        answer = scene.background(lambda: xa.prepare(xid))
        pair.succeed()
        with scene.coordinator() as coordinator:
            assert list(coordinator.recover()) == []
        with connected(pair.standby.url(vhost=scene.vhost)) as other:
            again = XAResource(other.channel())
            assert again.start(xid) is XaFlag.OK  # it is free
            again.end(xid)
            assert again.rollback(xid) is XaFlag.OK
        pair.active.resume()
        assert pair.active.wait() == FENCED
        with pytest.raises(XAException):
            answer.result(30)
    scene.wait_for_count("in", 1)
    assert (scene.bodies("in"), scene.bodies("out")) == ([b"one"], [])
    assert scene.states() == {}


def test_no_unknown_xid_is_said_by_one_whose_lease_has_run_out(pair: Pair) -> None:
    """Guarantee: ""unknown xid" is said only when the log has been read, under a valid lease"."""
    scene = pair.scene
    with scene.connected() as connection:
        xa = XAResource(connection.channel(), timeout=60)
        pair.active.pause()
        answer = scene.background(lambda: xa.commit(new_xid()))
        pair.succeed()
        pair.active.resume()
        assert pair.active.wait() == FENCED
        error = answer.exception(30)
    assert isinstance(error, XAException)
    assert "unknown xid" not in str(error)
