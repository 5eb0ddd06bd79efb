"""Consumer time-out: the broker closes a channel with unacknowledged deliveries, and its close names no method."""

from collections.abc import Iterator

import pytest
from pika.adapters.blocking_connection import BlockingChannel

from dtx.client import XA_RBROLLBACK, XAER_RMFAIL, XaFlag
from tests.support.crash import Stage, work
from tests.support.postgres import PostgresServer
from tests.support.rabbitmq import RabbitNode


@pytest.fixture(scope="module")
def impatient(impatient_rabbitmq: RabbitNode, postgres: PostgresServer) -> Iterator[Stage]:
    """A stage whose broker closes channels with late acknowledgements when :func:`look` is called."""
    with Stage(impatient_rabbitmq, postgres, replay="receipts") as made:  # without asking a busy node
        yield made


def look(node: RabbitNode) -> None:
    """Make all channels check for late acknowledgements; by default they do so once a minute."""
    node.ctl("eval", "[Channel ! tick || Channel <- rabbit_channel:list_local()], ok.")


def test_a_branch_whose_deliveries_were_taken_back_is_rollback_only(impatient: Stage) -> None:
    """Design: "upstream trouble before the vote (consumer time-out): rollback-only"; also if the branch has ended."""
    stage = impatient
    for queue in ("active", "idle", "voted", "out"):
        stage.declare(queue)
    for queue in ("active", "idle", "voted"):
        stage.fill(queue, queue.encode())
    with stage.connected() as connection, stage.coordinator() as coordinator:
        channels = [connection.channel() for _ in range(3)]
        closed = closings(channels)
        _, active = work(channels[0], publish={"out": [b"a"]}, consume={"active": 1}, end=False)
        _, idle = work(channels[1], publish={"out": [b"b"]}, consume={"idle": 1})
        xa, voted = work(channels[2], publish={"out": [b"c"]}, consume={"voted": 1})
        assert xa.prepare(voted) is XaFlag.OK

        def two_have_ended() -> bool:
            look(stage.node)
            connection.process_data_events(0.05)
            return len(closed) >= 2

        stage.wait_for(two_have_ended, "the end of two channels")
        assert [(code, "delivery acknowledgement on channel" in text) for code, text in closed] == [(406, True)] * 2
        for xid in (active, idle):
            with pytest.raises(XA_RBROLLBACK):
                coordinator.prepare(xid)
        assert channels[2].is_open  # the taking has acknowledged its delivery
        assert coordinator.commit(voted) is XaFlag.OK
    assert [stage.bodies(queue) for queue in ("active", "idle", "voted")] == [[b"active"], [b"idle"], []]
    assert stage.bodies("out") == [b"c"]


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "rollback"])
def test_after_a_close_behind_tx_commit_the_lock_decides(impatient: Stage, commit: bool) -> None:
    """The close names no method: the unit may have happened. Design: "decides a row only when that row's lock is free".

    The receipt's queue hangs, so commit-ok does not come; a delivery outside the branch is not acknowledged in time.
    """
    stage = impatient
    stage.declare("in")
    stage.declare("out")
    stage.fill("in", b"one", b"two")
    with stage.connected() as connection:
        channel = connection.channel()
        xa, xid = work(channel, publish={"out": [b"a"]}, consume={"in": 1})
        channel.basic_get("in")
        with stage.node.suspended(*stage.receipt_queues(), vhost=stage.vhost):
            answer = stage.background(lambda: xa.prepare(xid))
            stage.wait_for_state(xid, "taking")

            def answered() -> bool:
                look(stage.node)
                return answer.done()

            stage.wait_for(answered, "the end of its channel")
            with pytest.raises(XAER_RMFAIL):  # dtx ends the connection to free the lock
                answer.result(30)
            assert stage.states() == {xid: "taking"}
    stage.wait_for_state(xid, "prepared")
    with stage.coordinator() as coordinator:
        assert (coordinator.commit if commit else coordinator.rollback)(xid) is XaFlag.OK
    assert stage.bodies("in") == ([b"two"] if commit else [b"two", b"one"])
    assert stage.bodies("out") == ([b"a"] if commit else [])
    assert stage.history(xid) == ["prepared", "committed" if commit else "rolled-back"]


def closings(channels: list[BlockingChannel]) -> list[tuple[int, str]]:
    """A list that gets the code and the text of each close of *channels*."""
    found: list[tuple[int, str]] = []
    for channel in channels:
        channel._impl.add_on_close_callback(lambda _, why: found.append((why.reply_code, why.reply_text)))
    return found
