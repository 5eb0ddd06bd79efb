"""kill -9 of dtx between TAKING and PREPARED: dtx has not voted, and no message is lost."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Literal

import pytest

from dtx.client import XAER_NOTA, XAER_RMFAIL, XaFlag, Xid
from tests.support.crash import Stage, ids, work

Instant = Literal["unit not sent", "unit happened"]
NOT_SENT: Instant = "unit not sent"
HAPPENED: Instant = "unit happened"


@contextlib.contextmanager
def preparing(stage: Stage, instant: Instant) -> Iterator[Xid]:
    """A branch during prepare: it publishes a message and takes the first of two. The caller kills dtx."""
    stage.declare("in")
    stage.declare("out")
    stage.fill("in", b"one", b"two")
    with stage.connected() as connection:
        xa, xid = work(connection.channel(), publish={"out": [b"a"]}, consume={"in": 1})
        stage.proxy.stall("up" if instant == NOT_SENT else "down")
        answer = stage.background(lambda: xa.prepare(xid))
        try:
            stage.wait_for_state(xid, "taking")
            if instant == HAPPENED:  # without trust in receipts there is none
                stage.wait_for(lambda: stage.receipts() == 1 or stage.held("in") == 1, "the end of the message")
            yield xid
            with pytest.raises(XAER_RMFAIL):  # dtx has answered no vote
                answer.result(30)
        finally:
            stage.proxy.resume()


def killed(stage: Stage, instant: Instant) -> Xid:
    """Kill dtx during :func:`preparing`; returns the branch."""
    with preparing(stage, instant) as xid:
        stage.service.kill9()
        stage.proxy.cut()
    assert stage.states() == {xid: "taking"}
    return xid


def test_a_unit_that_was_not_sent_never_happened(stage: Stage) -> None:
    """Restart: "TAKING without, receipts trusted and broker not restarted: never happened, drop"."""
    xid = killed(stage, NOT_SENT)
    (line,) = stage.in_doubt()
    assert (line["xid"], line["state"], line["prepared_at"]) == (str(xid), "taking", None)
    stage.service.start()
    stage.wait_for_end()
    assert [(body, again) for body, _, again in stage.take("in")] == [(b"one", True), (b"two", False)]
    with stage.coordinator() as coordinator:
        assert list(coordinator.recover()) == []
        assert coordinator.rollback(xid) is XaFlag.RBROLLBACK
        with pytest.raises(XAER_NOTA, match="completed: rolled-back at"):
            coordinator.rollback(xid)
    assert stage.take("out") == []
    assert stage.history(xid) == ["rolled-back"]


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "rollback"])
def test_a_unit_that_happened_makes_the_branch_prepared(stage: Stage, commit: bool) -> None:
    """Restart: "TAKING with a trusted receipt: PREPARED". A prepare without an answer "may or may not have"."""
    xid = killed(stage, HAPPENED)
    stage.service.start()
    stage.wait_for_state(xid, "prepared")
    assert stage.count("in") == 1
    with stage.coordinator() as coordinator:
        assert list(coordinator.recover()) == [xid]
        assert (coordinator.commit if commit else coordinator.rollback)(xid) is XaFlag.OK
    assert stage.bodies("out") == ([b"a"] if commit else [])
    assert stage.bodies("in") == ([b"two"] if commit else [b"two", b"one"])
    assert stage.history(xid) == ["prepared", "committed" if commit else "rolled-back"]


def test_a_unit_that_happened_while_the_log_was_paused(stage: Stage) -> None:
    """While PostgreSQL is stopped, dtx receives commit-ok: PREPARED may or may not be written."""
    with preparing(stage, HAPPENED) as xid:
        stage.postgres.pause()
        try:
            seen = stage.proxy.bytes["down"]
            stage.proxy.resume()
            stage.proxy.wait_for_bytes("down", seen + 1)
            stage.service.kill9()
        finally:
            stage.postgres.resume()
    stage.service.start()
    stage.wait_for_state(xid, "prepared")
    with stage.coordinator() as coordinator:
        assert coordinator.rollback(xid) is XaFlag.OK
    assert stage.bodies("in") == [b"two", b"one"]
    assert stage.bodies("out") == []


@pytest.mark.parametrize("instant", [NOT_SENT, HAPPENED])
def test_without_trusted_receipts_taken_messages_are_put_back(
    stage_with: Callable[..., Stage], instant: Instant
) -> None:
    """Restart: "TAKING, outcome unknown: put back (a repeat, never a loss) and drop"."""
    stage = stage_with(replay="always")
    xid = killed(stage, instant)
    stage.service.start()
    stage.wait_for_end()
    taken = stage.take("in")
    back = [(body, ("x-dtx-put-back" in (properties.headers or {}))) for body, properties, _ in taken]
    repeat = [(b"one", False)] if instant == NOT_SENT else []
    assert back == [*repeat, (b"two", False), (b"one", True)]
    assert ids(taken)[-1].endswith("/1")
    assert stage.take("out") == []
    assert "rolled-back" in stage.history(xid)
    assert "prepared" not in stage.history(xid)


@pytest.mark.parametrize("instant", [NOT_SENT, HAPPENED])
def test_a_broker_restart_leaves_no_evidence_of_the_outcome(stage: Stage, instant: Instant) -> None:
    """The receipts are lost with the broker, so the message is put back. It may be repeated, but not lost."""
    killed(stage, instant)
    stage.node.restart()
    stage.service.start()
    stage.wait_for_end()
    taken = [body for body, _, _ in stage.take("in")]
    assert taken[-1] == b"one"  # the message that was put back
    assert sorted(taken) in ([b"one", b"one", b"two"], *([[b"one", b"two"]] if instant == HAPPENED else []))
    assert stage.take("out") == []


def test_the_clients_connection_breaks_behind_a_unit_that_happened(stage: Stage) -> None:
    """The running dtx waits for the lock of the lost connection and reads the receipt; the vote is yes."""
    stage.declare("in")
    stage.fill("in", b"one")
    with stage.connected() as connection:
        xa, xid = work(connection.channel(), consume={"in": 1})
        stage.proxy.stall("down")
        answer = stage.background(lambda: xa.prepare(xid))
        try:
            stage.wait_for_state(xid, "taking")
            stage.wait_for(lambda: stage.receipts() == 1, "the receipt")
        finally:
            stage.proxy.cut()
            stage.proxy.resume()
        stage.wait_for_state(xid, "prepared")
        with contextlib.suppress(XAER_RMFAIL):  # if the client's connection ends with the broker's
            assert answer.result(30) is XaFlag.OK
    with stage.coordinator() as coordinator:
        assert coordinator.rollback(xid) is XaFlag.OK
    assert stage.bodies("in") == [b"one"]


def test_the_clients_connection_breaks_before_the_unit_arrives(stage: Stage) -> None:
    """The unit never happened: the branch is rolled back, and the message is in its queue."""
    stage.declare("in")
    stage.fill("in", b"one")
    with stage.connected() as connection:
        xa, xid = work(connection.channel(), consume={"in": 1})
        stage.proxy.stall("up")
        answer = stage.background(lambda: xa.prepare(xid))
        try:
            stage.wait_for_state(xid, "taking")
        finally:
            stage.proxy.cut()
            stage.proxy.resume()
        stage.wait_for_end()
        assert answer.exception(30) is not None
    assert [(body, again) for body, _, again in stage.take("in")] == [(b"one", True)]


def test_a_policy_that_removes_receipts_is_noticed_in_time(stage: Stage) -> None:
    """Receipts: "policies with wildcards (message-ttl, max-length) eat receipts"; dtx had checked before.

    The taken message is put back, not dropped.
    """
    stage.declare("in")
    stage.fill("in", b"one")
    number = stage.proxy.accepted + 1
    with stage.connected() as connection:
        xa, xid = work(connection.channel(), consume={"in": 1})
        stage.proxy.stall("down")
        answer = stage.background(lambda: xa.prepare(xid))
        try:
            stage.wait_for_state(xid, "taking")
            stage.wait_for(lambda: stage.receipts() == 1, "the receipt")
            stage.node.set_policy("eater", "^dtx[.]receipts", {"max-length": 0}, vhost=stage.vhost)
            stage.wait_for(lambda: stage.receipts() == 0, "the end of the receipt")
        finally:
            stage.proxy.cut_one(number)
            stage.proxy.resume()
        stage.wait_for_end()
        assert answer.exception(30) is not None
    assert stage.bodies("in") == [b"one"]
