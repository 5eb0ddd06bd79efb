"""Several branches in one channel, several channels in one branch, many branches at once, every kind of xid."""

import random
import secrets

import pytest

from dtx.client import XA_RBROLLBACK, XAER_PROTO, Coordinator, XaFlag, XAResource, Xid
from tests.support.crash import PERSISTENT, Scene, work

NULS = b"\x00" * 64
_OCTETS = random.Random(64)  # the same in every process that collects the tests
XIDS = [
    Xid(0xFFFFFFFE, _OCTETS.randbytes(64), _OCTETS.randbytes(64)),
    Xid(0, NULS, NULS),
    Xid(0, NULS, b""),
    Xid(0x7FFFFFFF, b"\x00a\x00" + _OCTETS.randbytes(30), b"\x00"),
    Xid(0x80000000, b"\xff" * 64, b"\xff" * 64),
]


def test_two_branches_in_one_channel_one_after_the_other(stage: Scene) -> None:
    for queue in ("in", "out"):
        stage.declare(queue)
    stage.fill("in", b"one", b"two")
    with stage.connected() as connection:
        channel = connection.channel()
        xa, first = work(channel, publish={"out": [b"a"]}, consume={"in": 1})
        _, second = work(channel, publish={"out": [b"b"]}, consume={"in": 1})
        for xid in (second, first):
            assert xa.prepare(xid) is XaFlag.OK
        assert xa.rollback(first) is XaFlag.OK
        assert xa.commit(second) is XaFlag.OK
    assert stage.bodies("out") == [b"b"]
    assert stage.bodies("in") == [b"one"]


def test_two_branches_in_one_channel_one_of_them_suspended(stage: Scene) -> None:
    """End: "suspend: the client is not finished with the transaction branch"; work belongs to the active branch."""
    for queue in ("in", "out"):
        stage.declare(queue)
    stage.fill("in", b"one", b"two", b"three")
    with stage.connected() as connection:
        channel = connection.channel()
        xa, first = work(channel, publish={"out": [b"a1"]}, consume={"in": 1}, end=False)
        xa.end(first, suspend=True)
        channel.basic_publish("", "out", b"outside", PERSISTENT)
        stage.wait_for_count("out", 1)
        _, second = work(channel, publish={"out": [b"b1"]}, consume={"in": 1}, end=False)
        xa.end(second, suspend=True)
        xa.start(first, resume=True)
        channel.basic_publish("", "out", b"a2", PERSISTENT)
        method, _, body = channel.basic_get("in")
        assert method is not None
        assert body == b"three"
        channel.basic_ack(method.delivery_tag)
        xa.end(first)
        xa.end(second)
        assert [xa.prepare(xid) for xid in (first, second)] == [XaFlag.OK] * 2
        assert xa.rollback(second) is XaFlag.OK
        assert xa.commit(first) is XaFlag.OK
    assert stage.bodies("out") == [b"outside", b"a1", b"a2"]
    assert stage.bodies("in") == [b"two"]


@pytest.mark.parametrize("outcome", ["commit", "rollback", "one phase", "killed"])
def test_two_connections_work_in_one_branch(stage: Scene, outcome: str) -> None:
    """Join: prepare takes one unit from each connection, and all the work has one outcome."""
    for queue in ("in", "out"):
        stage.declare(queue)
    stage.fill("in", b"one", b"two", b"three")
    with stage.connected() as first, stage.connected() as second:
        xa, xid = work(first.channel(), publish={"out": [b"a"]}, consume={"in": 1}, end=False)
        channel = second.channel()
        joined = XAResource(channel)
        joined.start(xid, join=True)
        channel.basic_publish("", "out", b"b", PERSISTENT)
        method, _, _ = channel.basic_get("in")
        assert method is not None
        channel.basic_ack(method.delivery_tag)
        xa.end(xid)
        with pytest.raises(XAER_PROTO, match="associated"), stage.coordinator() as early:
            early.prepare(xid)
        joined.end(xid)
        if outcome == "one phase":
            assert xa.commit(xid, one_phase=True) is XaFlag.OK
        else:
            assert joined.prepare(xid) is XaFlag.OK
            if outcome != "killed":
                assert (joined.commit if outcome == "commit" else joined.rollback)(xid) is XaFlag.OK
    if outcome == "killed":
        stage.service.restart()
        with stage.coordinator() as coordinator:
            assert list(coordinator.recover()) == [xid]
            assert coordinator.rollback(xid) is XaFlag.OK
    done = outcome in ("commit", "one phase")
    assert stage.bodies("out") == ([b"a", b"b"] if done else [])
    assert sorted(stage.bodies("in")) == ([b"three"] if done else [b"one", b"three", b"two"])


def test_one_of_two_connections_breaks_before_the_vote(stage: Scene) -> None:
    """A part of the work is lost, so all of it is rolled back."""
    for queue in ("in", "out"):
        stage.declare(queue)
    stage.fill("in", b"one", b"two")
    with stage.connected() as first:
        xa, xid = work(first.channel(), publish={"out": [b"a"]}, consume={"in": 1}, end=False)
        with stage.connected() as second:
            channel = second.channel()
            joined = XAResource(channel)
            joined.start(xid, join=True)
            method, _, _ = channel.basic_get("in")
            assert method is not None
            channel.basic_ack(method.delivery_tag)
        with pytest.raises(XA_RBROLLBACK):
            xa.end(xid)
        stage.wait_for_count("in", 2)
        assert xa.rollback(xid) is XaFlag.OK
    assert stage.bodies("in") == [b"one", b"two"]
    assert stage.count("out") == 0


def test_five_hundred_branches_open_at_once(stage: Scene) -> None:
    """All branches are open at the same time, then all are prepared, and half are committed."""
    count = 500
    for queue in ("in", "out"):
        stage.declare(queue)
    stage.fill("in", *(b"%d" % number for number in range(count)))
    xids = []
    with stage.connected() as connection:
        channel = connection.channel()
        xa = XAResource(channel)
        for number in range(count):
            _, xid = work(channel, publish={"out": [b"%d" % number]}, consume={"in": 1}, end=False)
            xa.end(xid, suspend=True)
            xids.append(xid)
        for xid in xids:
            xa.end(xid)
        stage.wait_for_end()
        assert [xa.prepare(xid) for xid in xids] == [XaFlag.OK] * count
        assert set(xa.recover()) == set(xids) == set(stage.states())
        for number, xid in enumerate(xids):
            assert (xa.rollback if number % 2 else xa.commit)(xid) is XaFlag.OK
    assert stage.bodies("out") == [b"%d" % number for number in range(0, count, 2)]
    assert sorted(map(int, stage.bodies("in"))) == list(range(1, count, 2))


@pytest.mark.parametrize("xid", XIDS, ids=str)
def test_every_xid_comes_back_from_recovery_as_it_went_in(stage: Scene, xid: Xid) -> None:
    stage.declare("out")
    with stage.connected() as connection:
        xa, _ = work(connection.channel(), publish={"out": [b"a"]}, xid=xid)
        assert xa.prepare(xid) is XaFlag.OK
        assert list(xa.recover()) == [xid]
        (line,) = stage.in_doubt()
        assert (line["xid"], line["format_id"]) == (str(xid), xid.format_id)
        assert bytes.fromhex(line["gtrid"]) == xid.gtrid
        assert bytes.fromhex(line["bqual"]) == xid.bqual
        assert xa.commit(xid) is XaFlag.OK
    assert stage.bodies("out") == [b"a"]


def test_branches_of_one_global_transaction_have_outcomes_of_their_own(stage: Scene) -> None:
    gtrid = secrets.token_bytes(32)
    xids = [Xid(1, gtrid, bytes((number,))) for number in range(3)]
    stage.declare("out")
    with stage.connected() as connection, Coordinator(connection) as coordinator:
        for number, xid in enumerate(xids):
            xa, _ = work(connection.channel(), publish={"out": [b"%d" % number]}, xid=xid)
            assert xa.prepare(xid) is XaFlag.OK
        assert coordinator.commit(xids[1]) is XaFlag.OK
        assert set(coordinator.recover()) == {xids[0], xids[2]}
        assert [coordinator.rollback(xids[position]) for position in (0, 2)] == [XaFlag.OK] * 2
    assert stage.bodies("out") == [b"1"]
