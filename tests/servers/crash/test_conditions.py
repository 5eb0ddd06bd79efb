"""dtx is killed during an alarm of the broker, or while policies apply to its own queues."""

from collections.abc import Callable

import pytest

from dtx.client import XAER_RMFAIL, XaFlag
from tests.support.crash import Stage, ids, work


def test_a_taking_without_receipt_is_put_back_if_unknown(stage: Stage) -> None:
    """During an alarm the unit has acks but no receipt. After kill -9 a message may be repeated, but not lost."""
    stage.declare("in")
    stage.fill("in", b"one")
    with stage.connected() as connection:
        xa, xid = work(connection.channel(), consume={"in": 1})
        stage.node.memory_alarm(on=True)
        stage.wait_for(lambda: b"the broker takes no publishes" in stage.service.log_path.read_bytes(), "the log entry")
        stage.proxy.stall("down")
        answer = stage.background(lambda: xa.prepare(xid))
        stage.wait_for_state(xid, "taking")
        stage.service.kill9()
        with pytest.raises(XAER_RMFAIL):
            answer.result(30)
        stage.proxy.cut()
        stage.proxy.resume()
    stage.service.start()
    stage.node.memory_alarm(on=False)
    stage.wait_for_end()
    taken = stage.take("in")
    assert [body for body, _, _ in taken] in ([b"one"], [b"one", b"one"])
    assert ids(taken)[-1]
    assert b"cannot be found out" in stage.service.log_path.read_bytes()


@pytest.mark.parametrize("definition", [{"message-ttl": 0}, {"max-length": 0}, {"expires": 600_000}], ids=str)
def test_policies_on_everything_cost_exactly_once_and_no_message(
    stage_with: Callable[..., Stage], definition: dict[str, int]
) -> None:
    """Receipts: "policies with wildcards eat receipts: a self-test at start notices, and then ``always`` holds"."""
    stage = stage_with(start=False)
    stage.node.set_policy("all", "^dtx", definition, vhost=stage.vhost)
    stage.service.start()
    stage.declare("in")
    stage.declare("out")
    stage.fill("in", b"one", b"two")
    with stage.connected() as connection:
        xa, first = work(connection.channel(), publish={"out": [b"a"]}, consume={"in": 1})
        assert xa.prepare(first) is XaFlag.OK
        stage.proxy.stall("down")
        answer = stage.background(lambda: xa.commit(first))
        stage.wait_for_count("out", 1)
        stage.service.kill9()
        with pytest.raises(XAER_RMFAIL):
            answer.result(30)
        stage.proxy.cut()
        stage.proxy.resume()
    assert b"receipts are not trusted" in stage.service.log_path.read_bytes()
    # Without the policy, dtx cannot see that it was there.
    stage.node.delete_policy("all", vhost=stage.vhost)
    stage.service.start()
    stage.wait_for_end()
    taken = stage.take("out")
    assert [body for body, _, _ in taken] in ([b"a"], [b"a", b"a"])
    assert len(set(ids(taken))) == 1
    assert stage.bodies("in") == [b"two"]
