"""The broker refuses phase two: the branch stays decided, shows the broker's error, and ends when it can."""

import pytest

from dtx.client import XAER_NOTA, XAER_RMFAIL, Coordinator, XaFlag, Xid
from tests.support.client import new_xid
from tests.support.crash import PERSISTENT, Stage, ids, work


def published(stage: Stage, exchange: str, key: str, *bodies: bytes) -> Xid:
    """A prepared branch with messages for *exchange*."""
    with stage.connected() as connection:
        channel = connection.channel()
        xa, xid = work(channel, end=False)
        for body in bodies:
            channel.basic_publish(exchange, key, body, PERSISTENT)
        xa.end(xid)
        assert xa.prepare(xid) is XaFlag.OK
    return xid


def taken(stage: Stage, **counts: int) -> Xid:
    """A prepared branch that took messages from queues."""
    with stage.connected() as connection:
        xa, xid = work(connection.channel(), consume=counts)
        assert xa.prepare(xid) is XaFlag.OK
    return xid


def stuck_line(stage: Stage) -> tuple[str, str]:
    """State and reason of the only branch, as ``dtx in-doubt`` shows them."""
    (line,) = stage.in_doubt()
    return line["state"], line["stuck"] or ""


def test_a_deleted_exchange_keeps_the_branch_committing_until_redeclared(stage: Stage) -> None:
    """Design: "the branch stays COMMITTING, shown as stuck with the broker's words; TM gets 541 and may retry"."""
    stage.declare("out")
    with stage.node.channel(stage.vhost) as direct:
        direct.exchange_declare("orders", "fanout", durable=True)
        direct.queue_bind("out", "orders")
    xid = published(stage, "orders", "", b"a", b"b")
    with stage.node.channel(stage.vhost) as direct:
        direct.exchange_delete("orders")
    with stage.coordinator() as coordinator:
        for _ in range(2):
            with pytest.raises(XAER_RMFAIL, match="no exchange 'orders'"):
                coordinator.commit(xid)
        assert list(coordinator.recover()) == [xid]
        state, reason = stuck_line(stage)
        assert state == "committing"
        assert "NOT_FOUND - no exchange 'orders'" in reason
        assert stage.take("out") == []
        for attempt in (1, 2):
            stage.service.restart()
            log = stage.service.log_path.read_bytes
            stage.wait_for(lambda: log().count(b"branch is stuck") == 2 + attempt, "dtx's own attempt")  # noqa: B023
    with stage.coordinator() as coordinator:
        assert list(coordinator.recover()) == [xid]
        with stage.node.channel(stage.vhost) as direct:
            direct.exchange_declare("orders", "fanout", durable=True)
            direct.queue_bind("out", "orders")
        assert coordinator.commit(xid) is XaFlag.OK
    assert stage.bodies("out") == [b"a", b"b"]
    assert stage.history(xid) == ["prepared", "stuck", "committed"]


def test_a_refusing_queue_keeps_the_branch_committing_until_it_accepts(stage: Stage) -> None:
    """Guarantee: "a queue refuses in the middle of phase two: messages may be repeated (never lost)"."""
    stage.declare("full", **{"x-max-length": 1, "x-overflow": "reject-publish"})
    stage.declare("free")
    stage.fill("full", b"in the way")
    with stage.connected() as connection:
        xa, xid = work(connection.channel(), publish={"free": [b"a"], "full": [b"b"]})
        assert xa.prepare(xid) is XaFlag.OK
    with stage.coordinator() as coordinator:
        with pytest.raises(XAER_RMFAIL, match="a queue did not take 1 of"):
            coordinator.commit(xid)
        assert stuck_line(stage)[0] == "committing"
        assert stage.bodies("full") == [b"in the way"]
        assert coordinator.commit(xid) is XaFlag.OK
    assert stage.bodies("full") == [b"b"]
    free = stage.take("free")
    assert {body for body, _, _ in free} == {b"a"}
    assert len(set(ids(free))) == 1  # every copy has the same id
    assert stage.history(xid)[-1] == "committed"


def test_a_queue_that_refuses_is_still_refused_after_a_restart(stage: Stage) -> None:
    """The receipt of a unit that was refused in part proves nothing."""
    stage.declare("full", **{"x-max-length": 1, "x-overflow": "reject-publish"})
    stage.fill("full", b"in the way")
    xid = published(stage, "", "full", b"b")
    with stage.coordinator() as coordinator, pytest.raises(XAER_RMFAIL):
        coordinator.commit(xid)
    stage.service.restart()
    stage.wait_for_state(xid, "committing")
    assert stage.bodies("full") == [b"in the way"]
    with stage.coordinator() as coordinator:
        assert coordinator.commit(xid) is XaFlag.OK
    assert stage.bodies("full") == [b"b"]


def test_a_deleted_queue_at_put_back_keeps_only_its_message(stage: Stage) -> None:
    """Design: "A returned one (queue gone) is kept and shown"."""
    for queue in ("one", "two"):
        stage.declare(queue)
        stage.fill(queue, queue.encode())
    xid = taken(stage, one=1, two=1)
    with stage.node.channel(stage.vhost) as direct:
        direct.queue_delete("one")
    with stage.coordinator() as coordinator:
        with pytest.raises(XAER_RMFAIL, match="could not be put back"):
            coordinator.rollback(xid)
        (line,) = stage.in_doubt()
        assert (line["state"], line["queues"]) == ("rolling-back", ["one"])
        assert "NO_ROUTE" in line["stuck"]
        stage.declare("one")
        assert coordinator.rollback(xid) is XaFlag.OK
    assert stage.bodies("one") == [b"one"]
    assert stage.bodies("two") == [b"two"]
    assert stage.history(xid) == ["prepared", "stuck", "rolled-back"]


@pytest.mark.parametrize("queues", [["one"], ["one", "two"]], ids=["all are gone", "one of two is gone"])
def test_a_message_that_is_not_put_back_survives_dtx(stage: Stage, queues: list[str]) -> None:
    """If a put-back was returned, its receipt does not prove that the message is in its queue."""
    for queue in queues:
        stage.declare(queue)
        stage.fill(queue, queue.encode())
    xid = taken(stage, **dict.fromkeys(queues, 1))
    with stage.node.channel(stage.vhost) as direct:
        direct.queue_delete("one")
    with stage.coordinator() as coordinator, pytest.raises(XAER_RMFAIL):
        coordinator.rollback(xid)
    for _ in range(2):
        stage.service.restart()
        with stage.coordinator() as coordinator:
            assert list(coordinator.recover()) == [xid]
            with pytest.raises(XAER_RMFAIL, match="could not be put back"):
                coordinator.rollback(xid)
    stage.declare("one")
    with stage.coordinator() as coordinator:
        assert coordinator.rollback(xid) is XaFlag.OK
    for queue in queues:
        assert stage.bodies(queue) == [queue.encode()]


def test_one_stuck_branch_stops_no_other(stage: Stage) -> None:
    """Design: "one bad branch never blocks start-up or others"."""
    stage.declare("out")
    with stage.node.channel(stage.vhost) as direct:
        direct.exchange_declare("gone", "direct")
    xids = [published(stage, "gone", "", b"x") for _ in range(20)]
    good = published(stage, "", "out", b"a")
    with stage.node.channel(stage.vhost) as direct:
        direct.exchange_delete("gone")
    with stage.coordinator() as coordinator:
        for xid in xids:  # more than the commit connection has channels
            with pytest.raises(XAER_RMFAIL):
                coordinator.commit(xid)
        assert coordinator.commit(good) is XaFlag.OK
    stage.service.restart()
    good = published(stage, "", "out", b"b")
    with stage.coordinator() as coordinator:
        assert coordinator.commit(good) is XaFlag.OK
        # If the kill followed commit-ok at once, the end is not in the log yet; recovery writes it.
        stage.wait_for(lambda: set(coordinator.recover()) == set(xids), "the end of the branch before the kill")
    assert stage.bodies("out") == [b"a", b"b"]
    assert set(stage.states().values()) == {"committing"}


def test_a_queue_deleted_before_a_crash_during_put_back(stage: Stage) -> None:
    """The receipt proves that the unit happened, but not that no message was returned: dtx checks the queue."""
    for queue in ("one", "two"):
        stage.declare(queue)
        stage.fill(queue, queue.encode())
    xid = taken(stage, one=1, two=1)
    with stage.node.channel(stage.vhost) as direct:
        direct.queue_delete("one")
    with stage.connected() as connection:
        coordinator = Coordinator(connection)
        with pytest.raises(XAER_NOTA):
            coordinator.forget(new_xid())  # opens its channel and what it needs
        coordinator.get_timeout(xid)
        stage.proxy.stall("down")
        answer = stage.background(lambda: coordinator.rollback(xid))
        stage.wait_for_count("two", 1)
        stage.service.kill9()
        with pytest.raises(XAER_RMFAIL):
            answer.result(30)
        stage.proxy.cut()
        stage.proxy.resume()
    stage.service.start()
    stage.wait_for(lambda: "could not be put back" in stuck_line(stage)[1], "the branch being shown as stuck")
    (line,) = stage.in_doubt()
    assert line["queues"] == ["one"]
    stage.declare("one")
    with stage.coordinator() as again:
        assert again.rollback(xid) is XaFlag.OK
    assert (stage.bodies("one"), stage.bodies("two")) == ([b"one"], [b"two"])
