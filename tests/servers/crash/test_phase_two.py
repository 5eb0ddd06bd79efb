"""kill -9 of dtx during phase two: receipts show which units happened, and no unit happens twice."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from dtx.client import XaFlag, Xid, calls, submit
from tests.support.crash import Stage, ids, work

MANY = 12


def prepared(stage: Stage, count: int = MANY) -> list[Xid]:
    """Prepared branches, each with one message published to ``out`` and one taken from ``in``."""
    stage.declare("in")
    stage.declare("out")
    stage.fill("in", *(b"in %d" % number for number in range(count)))
    xids = []
    with stage.connected() as connection:
        for number in range(count):
            channel = connection.channel()
            xa, xid = work(channel, publish={"out": [b"out %d" % number]}, consume={"in": 1})
            assert xa.prepare(xid) is XaFlag.OK
            xids.append(xid)
            channel.close()
    assert stage.count("in") == 0
    return xids


@contextlib.contextmanager
def asker(stage: Stage, xids: list[Xid], *, commit: bool) -> Iterator[Callable[[], Callable[[], list[object]]]]:
    """Yields a function that completes every branch; it returns a function that returns the answers so far."""
    with stage.connected() as connection:
        channels = [connection.channel() for _ in xids]
        answers: list[object] = []

        def answered() -> list[object]:
            connection.process_data_events(time_limit=0.01)
            return answers

        def ask() -> Callable[[], list[object]]:
            for channel, xid in zip(channels, xids, strict=True):
                submit(
                    channel._impl, calls.commit(xid, one_phase=False) if commit else calls.rollback(xid), answers.append
                )
            answered()  # sends what was submitted
            for xid in xids:
                stage.wait_for_state(xid, "committing" if commit else "rolling-back")
            return answered

        try:
            yield ask
        finally:
            stage.proxy.resume()  # else closing the connection would wait


def decided_and_killed(stage: Stage, xids: list[Xid], *, commit: bool, stalled: str) -> None:
    """Decide every branch, and kill dtx before it answers."""
    with asker(stage, xids, commit=commit) as ask:
        stage.proxy.stall("up" if stalled == "up" else "down")
        answered = ask()
        if stalled == "down":  # the broker has applied all units, and dtx has no answer
            stage.wait_for_count("out" if commit else "in", len(xids))
        assert answered() == []
        stage.service.kill9()
        stage.proxy.cut()


def each_once(stage: Stage, xids: list[Xid], *, commit: bool) -> None:
    """Check that every branch had its outcome exactly once."""
    out, back = stage.take("out"), stage.take("in")
    bodies = sorted(body for body, _, _ in (out if commit else back))
    assert bodies == sorted(b"%s %d" % (b"out" if commit else b"in", number) for number in range(len(xids)))
    assert (back if commit else out) == []
    event = "committed" if commit else "rolled-back"
    assert [stage.history(xid) for xid in xids] == [["prepared", event]] * len(xids)


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "rollback"])
def test_units_that_were_not_sent_are_sent_by_the_successor(stage: Stage, commit: bool) -> None:
    xids = prepared(stage)
    decided_and_killed(stage, xids, commit=commit, stalled="up")
    assert stage.count("out") == stage.count("in") == 0
    stage.service.start()
    stage.wait_for_end()
    each_once(stage, xids, commit=commit)


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "rollback"])
def test_units_that_happened_unseen_are_not_repeated(stage: Stage, commit: bool) -> None:
    """A receipt is part of the unit: its presence shows that the unit happened."""
    xids = prepared(stage)
    decided_and_killed(stage, xids, commit=commit, stalled="down")
    stage.service.start()
    stage.wait_for_end()
    each_once(stage, xids, commit=commit)


def test_a_successor_killed_while_reading_receipts_changes_nothing(stage: Stage) -> None:
    xids = prepared(stage)
    decided_and_killed(stage, xids, commit=True, stalled="down")
    stage.proxy.delay(0.01)
    for _ in range(3):
        stage.service.start()
        stage.service.kill9()
    stage.proxy.resume()
    stage.service.start()
    stage.wait_for_end()
    each_once(stage, xids, commit=True)


def test_receipts_that_are_forced_are_believed_without_a_management_api(
    stage_with: Callable[..., Stage],
) -> None:
    stage = stage_with(replay="receipts", options=("--management", "http://127.0.0.1:1"))
    xids = prepared(stage, 2)
    decided_and_killed(stage, xids, commit=True, stalled="down")
    stage.service.start()
    stage.wait_for_end()
    each_once(stage, xids, commit=True)


@pytest.mark.parametrize("doubt", ["always", "no management", "policy"])
def test_without_trusted_receipts_a_message_repeats_with_its_id(stage_with: Callable[..., Stage], doubt: str) -> None:
    """The promise: "messages of that branch may be repeated (never lost), each with the same x-dtx-id header"."""
    if doubt == "always":
        stage = stage_with(replay="always")
    elif doubt == "no management":
        stage = stage_with(options=("--management", "http://127.0.0.1:1"))
    else:
        stage = stage_with()
    xids = prepared(stage, 2)
    decided_and_killed(stage, xids, commit=True, stalled="down")
    if doubt == "policy":
        stage.node.set_policy("short", ".*", {"message-ttl": 600_000}, vhost=stage.vhost)
    stage.service.start()
    stage.wait_for_end()
    taken = stage.take("out")
    assert sorted(body for body, _, _ in taken) == [b"out 0", b"out 0", b"out 1", b"out 1"]
    assert len(set(ids(taken))) == 2
    assert stage.take("in") == []


def test_receipts_are_deleted_when_the_log_has_their_outcomes(stage: Stage) -> None:
    xids = prepared(stage)
    decided_and_killed(stage, xids, commit=True, stalled="down")
    assert stage.receipts() >= MANY
    stage.service.start()
    stage.wait_for_end()
    stage.wait_for(lambda: stage.receipts() == 0, "the receipts' end")


def test_after_a_broken_connection_the_receipt_gives_the_outcome(stage: Stage) -> None:
    """The units have happened: dtx is not restarted, nothing is repeated, and every commit is answered."""
    xids = prepared(stage)
    with asker(stage, xids, commit=True) as ask:
        stage.proxy.stall("down")
        answered = ask()
        stage.wait_for_count("out", MANY)
        stage.proxy.cut()
        stage.proxy.resume()
        stage.wait_for(lambda: len(answered()) == MANY, "an answer for each")
        assert answered() == [XaFlag.OK] * MANY
    each_once(stage, xids, commit=True)
