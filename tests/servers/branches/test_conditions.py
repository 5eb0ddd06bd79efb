"""Memory alarms of the broker."""

import contextlib
import json
from collections.abc import Iterator

from dtx.client import XaFlag
from tests.support.broker import only_alongside
from tests.support.crash import Stage, work

pytestmark = only_alongside


@contextlib.contextmanager
def alarm(stage: Stage) -> Iterator[None]:
    """A memory alarm of the broker that dtx has noticed."""

    def told() -> int:
        return stage.service.log_path.read_bytes().count(b"the broker takes no publishes")

    before = told()
    stage.node.memory_alarm(on=True)
    try:
        stage.wait_for(lambda: told() > before, "the alarm in the log of dtx")
        yield
    finally:
        stage.node.memory_alarm(on=False)


def test_a_commit_waits_for_the_end_of_a_memory_alarm(stage: Stage) -> None:
    stage.declare("out")
    with stage.connected() as connection:
        xa, xid = work(connection.channel(), publish={"out": [b"a"]})
        with alarm(stage):
            assert xa.prepare(xid) is XaFlag.OK
            answer = stage.background(lambda: xa.commit(xid))
            stage.wait_for_state(xid, "committing")
            assert stage.count("out") == 0
        assert answer.result(30) is XaFlag.OK
    assert stage.bodies("out") == [b"a"]


def test_during_a_memory_alarm_a_prepare_uses_acks_alone(stage: Stage) -> None:
    """Design: "blocked connection (memory alarm): acks alone, noted in the row"."""
    stage.declare("in")
    stage.fill("in", b"one")
    with stage.connected() as connection:
        xa, xid = work(connection.channel(), consume={"in": 1})
        with alarm(stage):
            assert xa.prepare(xid) is XaFlag.OK
            shown = json.loads(stage.service.run("show", str(xid), "--json").stdout)
            assert [unit["receipt"] for unit in shown["in_log"]["units"]] == [False]
            answer = stage.background(lambda: xa.rollback(xid))
            stage.wait_for_state(xid, "rolling-back")
            assert stage.count("in") == 0
        assert answer.result(30) is XaFlag.OK
    assert stage.bodies("in") == [b"one"]


def test_a_one_phase_commit_of_a_consumer_needs_no_publish(stage: Stage) -> None:
    stage.declare("in")
    stage.fill("in", b"one")
    with stage.connected() as connection:
        xa, xid = work(connection.channel(), consume={"in": 1})
        with alarm(stage):
            assert xa.commit(xid, one_phase=True) is XaFlag.OK
    assert stage.bodies("in") == []
