"""A queue that does not answer, and a log that is unavailable after a decision was carried out."""

import contextlib

import pytest

from dtx.client import XAER_NOTA, XAER_RMFAIL, Coordinator, XaFlag, Xid, calls, submit
from tests.support.client import connected
from tests.support.crash import Stage, ids, work
from tests.support.postgres import PostgresServer
from tests.support.rabbitmq import RabbitNode

CHANNELS = 2


def prepared(stage: Stage, queue: str, count: int) -> list[Xid]:
    """Prepared branches, each with one message for *queue*."""
    xids = []
    with stage.connected() as connection:
        channel = connection.channel()
        for number in range(count):
            xa, xid = work(channel, publish={queue: [b"%d" % number]})
            assert xa.prepare(xid) is XaFlag.OK
            xids.append(xid)
    return xids


def test_one_dead_queue_does_not_block_others(shared_rabbitmq: RabbitNode, postgres: PostgresServer) -> None:
    """Design: "deadline per unit so that one dead queue stops nobody"; there are twice as many units as channels."""
    options = ("--commit-channels", str(CHANNELS), "--unit-deadline", "500ms")
    with Stage(shared_rabbitmq, postgres, options=options) as stage:
        stage.declare("dead")
        stage.declare("out")
        hanging, good = prepared(stage, "dead", 2 * CHANNELS), prepared(stage, "out", 5)
        with (
            stage.node.suspended("dead", vhost=stage.vhost),
            connected(stage.service.url(vhost=stage.vhost)) as connection,
        ):
            answers: list[object] = []
            for xid in hanging:
                submit(connection.channel()._impl, calls.commit(xid, one_phase=False), answers.append)
            connection.process_data_events(0)
            for xid in hanging:
                stage.wait_for_state(xid, "committing")
            with stage.coordinator() as coordinator:
                for xid in good:
                    insist(coordinator, xid)
            stage.wait_for(lambda: connection.process_data_events(0.05) or len(answers) == len(hanging), "the answers")
            assert all(isinstance(answer, XAER_RMFAIL) for answer in answers)
            # A commit is answered shortly before its end is in the log.
            left = dict.fromkeys(hanging, "committing")
            stage.wait_for(lambda: stage.states() == left, "the ends of the others in the log")
        assert b"a unit has not been answered in time" in stage.service.log_path.read_bytes()
        stage.wait_for_end()  # dtx finishes the units without a further call
        for queue, xids in (("dead", hanging), ("out", good)):
            taken = stage.take(queue)
            assert sorted(body for body, _, _ in taken) == [b"%d" % number for number in range(len(xids))]
            assert len(set(ids(taken))) == len(xids)
        assert [stage.history(xid) for xid in hanging] == [["prepared", "committed"]] * len(hanging)


def insist(coordinator: Coordinator, xid: Xid) -> None:
    """Commit, and repeat the call while the commit is under way."""
    for _ in range(20):
        try:
            assert coordinator.commit(xid) is XaFlag.OK
        except XAER_RMFAIL:
            continue
        except XAER_NOTA as error:
            if "completed: committed" not in str(error):  # else: the commit has ended meanwhile
                raise
        return
    raise AssertionError(f"{xid} does not end")


def test_a_decided_branch_without_a_logged_end_is_finished_automatically(
    shared_rabbitmq: RabbitNode, own_postgres: PostgresServer
) -> None:
    """A prepared branch whose decision was not logged waits for its transaction manager: "never guess"."""
    with Stage(shared_rabbitmq, own_postgres) as stage:
        stage.declare("in")
        stage.declare("out")
        stage.fill("in", b"one", b"two", b"three")
        with stage.connected() as connection:
            channel = connection.channel()
            xids = []
            for body in (b"a", b"b", b"c"):
                xa, xid = work(channel, publish={"out": [body]}, consume={"in": 1})
                assert xa.prepare(xid) is XaFlag.OK
                xids.append(xid)
        committed, rolled_back, undecided = xids
        with stage.coordinator() as first, stage.coordinator() as second, stage.coordinator() as third:
            for coordinator in (first, second, third):
                assert set(coordinator.recover()) == set(xids)  # opens its channel
            stage.proxy.stall("down")
            answers = [
                stage.background(lambda: first.commit(committed)),
                stage.background(lambda: second.rollback(rolled_back)),
            ]
            stage.wait_for_state(committed, "committing")
            stage.wait_for_state(rolled_back, "rolling-back")
            stage.wait_for_count("out", 1)
            stage.wait_for_count("in", 1)
            own_postgres.stop()
            try:
                refused = stage.background(lambda: third.commit(undecided))
                stage.proxy.resume()
                for answer in answers:
                    with contextlib.suppress(XAER_RMFAIL):  # both answers are possible
                        assert answer.result(60) is XaFlag.OK
                with pytest.raises(XAER_RMFAIL):
                    refused.result(60)
            finally:
                own_postgres.start()
                own_postgres.wait_ready()
        stage.wait_for(lambda: stage.states() == {undecided: "prepared"}, "the end of what was decided")
        assert stage.history(committed) == ["prepared", "committed"]
        assert stage.history(rolled_back) == ["prepared", "rolled-back"]
        with stage.coordinator() as coordinator:
            assert list(coordinator.recover()) == [undecided]
            assert coordinator.commit(undecided) is XaFlag.OK
        assert stage.bodies("out") == [b"a", b"c"]
        assert stage.bodies("in") == [b"two"]
