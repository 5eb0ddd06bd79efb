"""kill -9 of dtx after the vote: the transaction manager's decision is carried out exactly once."""

import pytest
from pika.adapters.blocking_connection import BlockingConnection

from dtx.client import XAER_NOTA, XaFlag, Xid
from tests.support.crash import Stage, ids, work


def a_prepared_branch(connection: BlockingConnection, stage: Stage) -> Xid:
    """Publishes two messages to ``out`` and takes two of three from ``in``."""
    stage.declare("in")
    stage.declare("out")
    stage.fill("in", b"one", b"two", b"three")
    xa, xid = work(connection.channel(), publish={"out": [b"a", b"b"]}, consume={"in": 2})
    assert xa.prepare(xid) is XaFlag.OK
    return xid


def test_a_prepared_branch_is_recovered_and_committed_after_kill_9(stage: Stage) -> None:
    """Prepare: "it is guaranteed that the transaction branch may be either committed or rolled back"."""
    with stage.connected() as connection:
        xid = a_prepared_branch(connection, stage)
        stage.service.kill9()
    (line,) = stage.in_doubt()
    assert (line["xid"], line["state"], line["messages"], line["queues"]) == (str(xid), "prepared", 4, ["in"])
    stage.service.start()
    assert (stage.count("out"), stage.count("in")) == (0, 1)
    with stage.coordinator() as coordinator:
        assert list(coordinator.recover()) == [xid]
        assert coordinator.commit(xid) is XaFlag.OK
        assert list(coordinator.recover()) == []
        with pytest.raises(XAER_NOTA, match="completed: committed at"):
            coordinator.commit(xid)
    taken = stage.take("out")
    assert [body for body, _, _ in taken] == [b"a", b"b"]
    assert [identity.rpartition("/")[2] for identity in ids(taken)] == ["0", "1"]
    assert [(body, redelivered) for body, _, redelivered in stage.take("in")] == [(b"three", False)]
    assert stage.history(xid) == ["prepared", "committed"]


def test_a_prepared_branch_is_recovered_and_rolled_back_after_kill9(stage: Stage) -> None:
    """Rollback: "any produced messages are discarded and any consumed messages are re-enqueued"."""
    with stage.connected() as connection:
        xid = a_prepared_branch(connection, stage)
        stage.service.kill9()
    stage.service.start()
    with stage.coordinator() as coordinator:
        assert list(coordinator.recover()) == [xid]
        assert coordinator.rollback(xid) is XaFlag.OK
        with pytest.raises(XAER_NOTA, match="completed: rolled-back at"):
            coordinator.rollback(xid)
    assert stage.take("out") == []
    taken = stage.take("in")
    assert [body for body, _, _ in taken] == [b"three", b"one", b"two"]  # messages that are put back come last
    headers = [properties.headers for _, properties, _ in taken[1:]]
    assert [header["x-dtx-original-routing-key"] for header in headers] == ["in", "in"]
    assert all(header["x-dtx-put-back"] == header["x-dtx-id"] for header in headers)
    assert [properties.content_type for _, properties, _ in taken[1:]] == ["text/plain"] * 2
    assert stage.history(xid) == ["prepared", "rolled-back"]


def test_nothing_remains_of_unprepared_branches_after_a_kill(stage: Stage) -> None:
    """Presumed abort: "the broker marked the transaction branch rollback-only"; here dtx keeps no record of it."""
    stage.declare("in")
    stage.declare("out")
    stage.fill("in", b"one")
    with stage.connected() as connection:
        _, xid = work(connection.channel(), publish={"out": [b"a"]}, consume={"in": 1})
        stage.service.kill9()
    stage.service.start()
    stage.wait_for_count("in", 1)
    with stage.coordinator() as coordinator:
        assert list(coordinator.recover()) == []
        with pytest.raises(XAER_NOTA):
            coordinator.prepare(xid)
    assert [(body, redelivered) for body, _, redelivered in stage.take("in")] == [(b"one", True)]
    assert stage.take("out") == []


def test_the_application_may_leave_between_prepare_and_commit(stage: Stage) -> None:
    with stage.connected() as connection:
        xid = a_prepared_branch(connection, stage)
    with stage.coordinator() as coordinator:
        assert coordinator.commit(xid) is XaFlag.OK
    assert stage.bodies("out") == [b"a", b"b"]
    assert stage.bodies("in") == [b"three"]


def test_dtx_stopped_in_order_and_killed_many_times_in_between(stage: Stage) -> None:
    with stage.connected() as connection:
        xid = a_prepared_branch(connection, stage)
    for _ in range(2):
        assert stage.service.stop() == 0
        stage.service.start()
        stage.service.restart()
    with stage.coordinator() as coordinator:
        assert coordinator.commit(xid) is XaFlag.OK
    assert stage.bodies("out") == [b"a", b"b"]
    assert stage.bodies("in") == [b"three"]
