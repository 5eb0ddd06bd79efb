"""The active dtx stops (SIGSTOP) for longer than its lease and continues (SIGCONT): it is fenced and ends."""

import contextlib
from collections.abc import Callable

import pytest

from dtx.client import XAException, XaFlag, XAResource
from tests.support.client import connected, new_xid
from tests.support.crash import Scene, work
from tests.support.standby_pair import FENCED, LEASE, Crowd, Pair


def test_a_stalled_predecessor_changes_nothing_that_the_successor_decided(
    pair_with: Callable[..., Pair],
) -> None:
    """It is stopped under load, and resumed when the standby has decided all branches in doubt."""
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


def test_a_predecessor_resumed_immediately_changes_nothing(pair_with: Callable[..., Pair]) -> None:
    """It continues while the standby is still taking over."""
    pair = pair_with()
    with Crowd(pair) as crowd:
        crowd.wait_for(40)
        epoch = pair.epoch()
        pair.active.pause()
        pair.scene.wait_for(lambda: pair.epoch() > epoch, "the takeover of the lease")
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


def test_an_expired_lease_that_is_still_free_is_renewed(pair_with: Callable[..., Pair]) -> None:
    """Design: "running out is not losing": without a standby the stalled dtx continues to serve."""
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


def test_requests_to_the_stalled_dtx_follow_the_standbys_decision(pair: Pair) -> None:
    """The transaction manager gets no answer from the stalled dtx and repeats its calls at the standby.

    If it asks the standby for the opposite, the decision that is durable first counts. dtx answers "unknown xid" only
    after it has read the log under a valid lease.
    """
    scene = pair.scene
    with contextlib.ExitStack() as stack:
        # one connection each: a connection that waits for an answer makes no other call
        committed, rolled_back, contradicted, unvoted = (
            Asked(scene, stack, name) for name in ("committed", "rolled-back", "contradicted", "unvoted")
        )
        voted = (committed, rolled_back, contradicted)
        for asked in voted:
            assert asked.xa.prepare(asked.xid) is XaFlag.OK
        stranger = XAResource(stack.enter_context(scene.connected()).channel(), timeout=60)
        pair.active.pause()
        answers = [
            scene.background(lambda: committed.xa.commit(committed.xid)),
            scene.background(lambda: rolled_back.xa.rollback(rolled_back.xid)),
            scene.background(lambda: contradicted.xa.commit(contradicted.xid)),
            scene.background(lambda: unvoted.xa.prepare(unvoted.xid)),
        ]
        unknown = scene.background(lambda: stranger.commit(new_xid()))
        pair.succeed()
        with scene.coordinator() as coordinator:
            assert set(coordinator.recover()) == {asked.xid for asked in voted}, "presumed abort"
            assert coordinator.commit(committed.xid) is XaFlag.OK
            assert coordinator.rollback(rolled_back.xid) is XaFlag.OK
            assert coordinator.rollback(contradicted.xid) is XaFlag.OK
        with connected(pair.standby.url(vhost=scene.vhost)) as other:
            again = XAResource(other.channel())
            assert again.start(unvoted.xid) is XaFlag.OK  # the xid is free
            again.end(unvoted.xid)
            assert again.rollback(unvoted.xid) is XaFlag.OK
        pair.active.resume()
        assert pair.active.wait() == FENCED
        for answer in answers:
            with pytest.raises(XAException):
                answer.result(30)
        error = unknown.exception(30)
    assert isinstance(error, XAException)
    assert "unknown xid" not in str(error)
    scene.wait_for_end()
    # the message of the unprepared branch returns when the stalled dtx's connections end, at the latest at its exit
    scene.wait_for_count(unvoted.source, 1)
    assert committed.bodies() == ([], [b"a"])
    assert rolled_back.bodies() == contradicted.bodies() == unvoted.bodies() == ([b"one"], [])
    assert scene.history(committed.xid)[-1] == "committed"
    assert scene.history(rolled_back.xid)[-1] == "rolled-back"
    assert scene.history(contradicted.xid) == ["prepared", "rolled-back"]
    assert scene.states() == {}


class Asked:
    """A branch on its own connection that publishes ``a`` and takes ``one`` from its source.

    Args:
        scene: the dtx under test.
        stack: closes the connection.
        name: prefix of the names of its queues.
    """

    def __init__(self, scene: Scene, stack: contextlib.ExitStack, name: str) -> None:
        self._scene = scene
        self.source, self._target = scene.declare(f"{name}-in"), scene.declare(f"{name}-out")
        scene.fill(self.source, b"one")
        connection = stack.enter_context(scene.connected())
        self.xa, self.xid = work(connection.channel(), publish={self._target: [b"a"]}, consume={self.source: 1})

    def bodies(self) -> tuple[list[bytes], list[bytes]]:
        """What its source and its target have at the end."""
        return self._scene.bodies(self.source), self._scene.bodies(self._target)
