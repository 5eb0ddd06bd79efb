"""kill -9 of PostgreSQL and of RabbitMQ: prepared branches wait for them, and dtx continues."""

import time

import pytest

from dtx.client import XAER_NOTA, XAER_RMFAIL, Coordinator, XAException, XaFlag, Xid
from tests.support.crash import Stage, ids, work


def a_prepared_branch(stage: Stage) -> Xid:
    """Publishes ``a`` to ``out`` and takes ``one`` from ``in``."""
    stage.declare("in")
    stage.declare("out")
    stage.fill("in", b"one", b"two")
    with stage.connected() as connection:
        xa, xid = work(connection.channel(), publish={"out": [b"a"]}, consume={"in": 1})
        assert xa.prepare(xid) is XaFlag.OK
    return xid


def insist(stage: Stage, xid: Xid, *, commit: bool, seconds: float = 30.0) -> XaFlag | None:
    """Ask for the outcome until there is an answer, as a transaction manager does; ``None``: completed already."""
    deadline = time.monotonic() + seconds
    while True:
        with stage.coordinator() as coordinator:
            try:
                return (coordinator.commit if commit else coordinator.rollback)(xid)
            except XAER_NOTA:
                return None  # an earlier attempt has completed it
            except XAER_RMFAIL:
                assert time.monotonic() < deadline


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "rollback"])
def test_a_prepared_branch_survives_kill_9_of_postgresql(stage: Stage, commit: bool) -> None:
    xid = a_prepared_branch(stage)
    stage.postgres.kill9()
    assert insist(stage, xid, commit=commit) in (XaFlag.OK, None)
    stage.wait_for_end()
    assert stage.bodies("out") == ([b"a"] if commit else [])
    assert stage.bodies("in") == ([b"two"] if commit else [b"two", b"one"])
    assert stage.history(xid) == ["prepared", "committed" if commit else "rolled-back"]
    assert stage.service.running


def test_branches_of_all_states_survive_kill_9_of_rabbitmq(stage: Stage) -> None:
    """Design: "broker away: commits wait and resume"; and the coordinator's connection outlives the broker.

    Before the vote: "upstream trouble: rollback-only". A branch that only published has nothing at the broker yet.
    """
    queues = [stage.declare(f"{name}-{way}") for name in ("rolled", "waiting", "idle") for way in ("in", "out")]
    rolled_in, rolled_out, waiting_in, waiting_out, idle_in, idle_out = queues
    stage.fill(rolled_in, b"one", b"two")
    stage.fill(waiting_in, b"one", b"two")
    stage.fill(idle_in, b"one")
    with stage.connected() as connection, stage.connected() as other, Coordinator(other) as coordinator:
        rolled, rolled_xid = work(connection.channel(), publish={rolled_out: [b"a"]}, consume={rolled_in: 1})
        waiting, waiting_xid = work(connection.channel(), publish={waiting_out: [b"a"]}, consume={waiting_in: 1})
        assert rolled.prepare(rolled_xid) is waiting.prepare(waiting_xid) is XaFlag.OK
        _, consuming = work(connection.channel(), publish={idle_out: [b"a"]}, consume={idle_in: 1})
        _, publishing = work(connection.channel(), publish={idle_out: [b"b"]})
        assert set(coordinator.recover()) == {rolled_xid, waiting_xid}
        stage.node.kill9()
        assert stage.states() == {rolled_xid: "prepared", waiting_xid: "prepared"}
        answer = stage.background(lambda: coordinator.commit(waiting_xid))
        stage.wait_for_state(waiting_xid, "committing")
        assert {line["xid"]: line["state"] for line in stage.in_doubt()}[str(waiting_xid)] == "committing"
        stage.node.start()
        assert answer.result(30) is XaFlag.OK
    assert insist(stage, rolled_xid, commit=False) in (XaFlag.OK, None)
    with stage.coordinator() as coordinator:
        with pytest.raises(XAException, match="XA_RBROLLBACK"):
            coordinator.prepare(consuming)
        assert coordinator.prepare(publishing) is XaFlag.OK
        assert coordinator.commit(publishing) is XaFlag.OK
    assert stage.bodies(waiting_out) == [b"a"]
    assert stage.bodies(waiting_in)[-1] == b"two"
    assert stage.bodies(rolled_out) == []
    # "RabbitMQ itself may redeliver what a classic queue had acked moments before its death"
    assert stage.bodies(rolled_in) in ([b"two", b"one"], [b"one", b"two", b"one"])
    assert [(body, again) for body, _, again in stage.take(idle_in)] == [(b"one", True)]
    assert stage.bodies(idle_out) == [b"b"]


def test_rabbitmq_dies_behind_units_that_it_has_applied(stage: Stage) -> None:
    """Guarantee: "if a broker node dies in the middle of phase two, messages may be repeated (never lost)"."""
    xid = a_prepared_branch(stage)
    with stage.connected() as connection, Coordinator(connection) as coordinator:
        assert list(coordinator.recover()) == [xid]
        stage.proxy.stall("down")
        answer = stage.background(lambda: coordinator.commit(xid))
        stage.wait_for_count("out", 1)
        stage.node.kill9()
        stage.proxy.cut()
        stage.proxy.resume()
        stage.node.start()
        assert answer.result(30) is XaFlag.OK
    taken = stage.take("out")
    assert [body for body, _, _ in taken] == [b"a"] * len(taken)
    assert 1 <= len(taken) <= 2
    assert len(set(ids(taken))) == 1


def test_a_publishing_branch_is_prepared_while_the_broker_is_paused(stage: Stage) -> None:
    """Design: "prepares of publish-only branches go on"."""
    stage.declare("out")
    with stage.connected() as connection:
        xa, xid = work(connection.channel(), publish={"out": [b"a"]})
        stage.node.pause()
        try:
            assert xa.prepare(xid) is XaFlag.OK
            answer = stage.background(lambda: xa.commit(xid))
            stage.wait_for_state(xid, "committing")
        finally:
            stage.node.resume()
        assert answer.result(30) is XaFlag.OK
    assert stage.bodies("out") == [b"a"]


def test_a_prepare_waits_for_a_paused_log(stage: Stage) -> None:
    """The vote comes only when it is in the log."""
    stage.declare("out")
    with stage.connected() as connection:
        xa, xid = work(connection.channel(), publish={"out": [b"a"]})
        stage.postgres.pause()
        try:
            answer = stage.background(lambda: xa.prepare(xid))
            with pytest.raises(TimeoutError):
                answer.result(0.5)
        finally:
            stage.postgres.resume()
        assert answer.result(30) is XaFlag.OK
        assert xa.commit(xid) is XaFlag.OK
    assert stage.bodies("out") == [b"a"]


def test_postgresql_goes_away_behind_a_unit_that_happened(stage: Stage) -> None:
    """The decision is in the log and the message in its queue: the end is logged later, and nothing is repeated."""
    xid = a_prepared_branch(stage)
    with stage.connected() as connection, Coordinator(connection) as coordinator:
        assert list(coordinator.recover()) == [xid]
        stage.proxy.stall("down")
        answer = stage.background(lambda: coordinator.commit(xid))
        stage.wait_for_count("out", 1)
        stage.postgres.stop()
        try:
            stage.proxy.resume()
            assert answer.result(60) is XaFlag.OK  # everything that this promises has happened
            with pytest.raises(XAER_RMFAIL):
                coordinator.commit(xid)  # without the log dtx cannot tell whether the xid is known
        finally:
            stage.postgres.start()
    assert insist(stage, xid, commit=True) in (XaFlag.OK, None)
    stage.wait_for_end()
    assert stage.bodies("out") == [b"a"]
    assert stage.history(xid) == ["prepared", "committed"]
