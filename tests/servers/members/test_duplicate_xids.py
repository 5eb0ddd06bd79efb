"""One xid has one outcome, also if branches of two members have it."""

import pytest

from dtx.client import XA_RBROLLBACK, XAER_NOTA, XaFlag
from tests.support.client import new_xid
from tests.support.crash import Stage, work


@pytest.mark.parametrize("one_phase", [False, True], ids=["prepare", "one-phase"])
def test_a_vote_is_refused_after_an_ending_elsewhere(stage: Stage, one_phase: bool) -> None:
    """The other branch has left the log, and only the journal has its ending."""
    other, (mine, theirs, source) = stage.another_service(), [stage.declare(name) for name in ("a", "b", "c")]
    stage.fill(source, b"in")
    with stage.connected() as here, stage.connected(other) as there:
        xa, xid = work(here.channel(), publish={mine: [b"a"]})
        late, _ = work(there.channel(), publish={theirs: [b"b"]}, consume={source: 1}, xid=xid)
        assert xa.commit(xid, one_phase=True) is XaFlag.OK
        stage.wait_for_state(xid, None)
        with pytest.raises(XA_RBROLLBACK):
            late.commit(xid, one_phase=True) if one_phase else late.prepare(xid)
        assert late.rollback(xid) is XaFlag.RBROLLBACK
        with pytest.raises(XAER_NOTA, match="completed: committed"):
            late.rollback(xid)
    assert [stage.bodies(queue) for queue in (mine, theirs, source)] == [[b"a"], [], [b"in"]]
    assert stage.history(xid) == ["committed"]


def test_a_vote_is_refused_after_a_vote_elsewhere(stage: Stage) -> None:
    other, (mine, theirs) = stage.another_service(), [stage.declare(name) for name in "ab"]
    with stage.connected() as here, stage.connected(other) as there:
        xa, xid = work(here.channel(), publish={mine: [b"a"]})
        late, _ = work(there.channel(), publish={theirs: [b"b"]}, xid=xid)
        assert xa.prepare(xid) is XaFlag.OK
        with pytest.raises(XA_RBROLLBACK):
            late.prepare(xid)
        assert late.commit(xid) is XaFlag.OK  # of the branch that has voted
    assert [stage.bodies(queue) for queue in (mine, theirs)] == [[b"a"], []]


def test_a_commit_means_the_branch_that_has_voted(stage: Stage) -> None:
    other, (mine, theirs) = stage.another_service(), [stage.declare(name) for name in "ab"]
    with stage.connected() as here, stage.connected(other) as there:
        xa, xid = work(here.channel(), publish={mine: [b"a"]})
        late, _ = work(there.channel(), publish={theirs: [b"b"]}, xid=xid)
        assert xa.prepare(xid) is XaFlag.OK
        assert late.commit(xid) is XaFlag.OK
        with pytest.raises(XA_RBROLLBACK):
            late.prepare(xid)
    assert [stage.bodies(queue) for queue in (mine, theirs)] == [[b"a"], []]


def test_an_xid_is_used_again_at_the_same_member(stage: Stage) -> None:
    stage.another_service()
    queue, xid = stage.declare("q"), new_xid()
    with stage.connected() as connection:
        for number in range(4):
            xa, _ = work(connection.channel(), publish={queue: [b"%d" % number]}, xid=xid)
            if number % 2:
                assert xa.prepare(xid) is XaFlag.OK
            assert xa.commit(xid, one_phase=not number % 2) is XaFlag.OK
            stage.wait_for_state(xid, None)
    assert stage.bodies(queue) == [b"0", b"1", b"2", b"3"]
