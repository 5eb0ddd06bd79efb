"""tx.commit waits for the queues that get messages, not for those whose deliveries it acknowledges.

So a queue may not have an acknowledgement yet when dtx has commit-ok, and loses it if its node dies.
"""

import pytest

from dtx.client import XaFlag
from tests.support.crash import Stage, work

TYPES = ("classic", "quorum")


@pytest.mark.parametrize("kind", TYPES)
def test_a_commit_waits_for_publishes_and_not_for_acknowledgements(stage: Stage, kind: str) -> None:
    for queue in ("in", "out"):
        stage.declare(queue, **{"x-queue-type": kind})
    stage.fill("in", b"one")
    with stage.connected() as connection:
        xa, xid = work(connection.channel(), publish={"out": [b"a"]}, consume={"in": 1})
        with stage.node.suspended("in", vhost=stage.vhost):
            assert xa.prepare(xid) is XaFlag.OK
        with stage.node.suspended("out", vhost=stage.vhost):
            answer = stage.background(lambda: xa.commit(xid))
            stage.wait_for_state(xid, "committing")
            with pytest.raises(TimeoutError):
                answer.result(1)
        assert answer.result(30) is XaFlag.OK
    assert (stage.bodies("in"), stage.bodies("out")) == ([], [b"a"])


@pytest.mark.parametrize("kind", TYPES)
def test_an_acknowledgement_that_its_node_loses_repeats_the_message(stage: Stage, kind: str) -> None:
    """Guarantees: "RabbitMQ may redeliver messages that were acknowledged moments before the broker died"."""
    stage.declare("in", **{"x-queue-type": kind})
    stage.declare("out")
    stage.fill("in", b"one", b"two")
    with stage.connected() as connection:
        xa, first = work(connection.channel(), publish={"out": [b"a"]}, consume={"in": 1})
        other, second = work(connection.channel(), publish={"out": [b"b"]}, consume={"in": 1})
        # a node writes the names of its quorum queues late, and forgets those of the last second when it is killed
        stage.node.ctl("eval", "[ok = dets:sync(Table) || Table <- dets:all()], ok.")
        with stage.node.suspended("in", vhost=stage.vhost):
            assert xa.prepare(first) is other.prepare(second) is XaFlag.OK
            stage.node.kill9()
            stage.node.start()
    stage.wait_for_count("in", 2)
    assert stage.states() == {first: "prepared", second: "prepared"}
    with stage.coordinator() as coordinator:
        assert coordinator.commit(first) is coordinator.rollback(second) is XaFlag.OK
    assert stage.bodies("out") == [b"a"]
    assert [(body, "x-dtx-put-back" in (properties.headers or {})) for body, properties, _ in stage.take("in")] == [
        (b"one", False),
        (b"two", False),
        (b"two", True),
    ]
    assert stage.history(first) == ["prepared", "committed"]
    assert stage.history(second) == ["prepared", "rolled-back"]
