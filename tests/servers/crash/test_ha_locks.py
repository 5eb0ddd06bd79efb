"""A dtx stalls with a unit under way: for this unit only, its successor waits until the broker closes the connection.

No process is killed. The broker closes a connection without heartbeats, which limits the wait.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Final, cast

import pytest

from dtx.client import XAER_NOTA, XAException, XaFlag, XAResource, Xid
from tests.support.crash import Stage, work
from tests.support.proxy import Direction
from tests.support.standby_pair import FENCED, Pair

HEARTBEAT: Final = 2
"""Seconds: ``--upstream-heartbeat`` of the pairs."""
BOUND: Final = 3 * HEARTBEAT + 2
"""RabbitMQ closes after two checks without data, at most three heartbeats; two seconds for what dtx does then."""
SLOW: Final = 20
"""Seconds that a busy machine may need in addition."""

pytestmark = pytest.mark.parametrize("mode", ["alongside"], indirect=True)
on_the_way = pytest.mark.parametrize("held", ["up", "down"], ids=["not-arrived", "not-answered"])


@contextlib.contextmanager
def stalled(pair: Pair, held: Direction, call: str, state: str) -> Iterator[tuple[Xid, Xid, "Future[object]"]]:
    """A branch whose dtx is stopped during *call*, another branch that is prepared, and the answer to *call*.

    The first publishes ``a`` to ``out`` and takes ``one`` from ``in``, the other publishes ``b`` to ``other``.
    """
    stage = cast("Stage", pair.scene)
    for queue in ("in", "out", "other"):
        stage.declare(queue)
    stage.fill("in", b"one")
    with stage.connected() as connection:
        first, warm = work(connection.channel(), publish={"out": [b"w"]})  # dtx sends its one-time requests
        assert first.prepare(warm) is XaFlag.OK
        assert first.commit(warm) is XaFlag.OK
        assert stage.bodies("out") == [b"w"]
        stage.wait_for_end()  # the end is logged shortly after the answer; the successor must not find this branch
        bystander, prepared = work(connection.channel(), publish={"other": [b"b"]})
        assert bystander.prepare(prepared) is XaFlag.OK
        xa, xid = work(connection.channel(), publish={"out": [b"a"]}, consume={"in": 1})
        if call in {"commit", "rollback"}:
            assert xa.prepare(xid) is XaFlag.OK
        calls = {"commit": xa.commit, "rollback": xa.rollback, "prepare": xa.prepare, "commit_one_phase": one_phase(xa)}
        stage.proxy.stall(held)
        answer = stage.background(lambda: calls[call](xid))
        stage.wait_for_state(xid, state)
        if held == "down":  # the unit has arrived, and the broker applies it
            done = {"commit": lambda: stage.count("out") == 1, "rollback": lambda: stage.count("in") == 1}
            stage.wait_for(done.get(call, lambda: stage.held("in") == 0), "the unit at the broker")
        pair.active.pause()
        try:
            yield xid, prepared, answer
        finally:
            pair.active.resume()
            stage.proxy.resume()


def one_phase(xa: XAResource) -> Callable[[Xid], object]:
    """The one-phase commit of *xa*."""
    return lambda xid: xa.commit(xid, one_phase=True)


def decided(pair: Pair, condition: Callable[[], object]) -> float:
    """Wait for *condition*; returns how many seconds that took."""
    began = time.monotonic()
    pair.scene.wait_for(condition, "the end of the wait for the lock", seconds=BOUND + SLOW)
    return time.monotonic() - began


def ends(pair: Pair, answer: "Future[object]") -> None:
    """Resume the stalled dtx: it is fenced, confirms nothing, and ends."""
    pair.active.resume()
    assert pair.active.wait() == FENCED
    with pytest.raises(XAException):
        answer.result(30)


@on_the_way
def test_a_commit_under_way_is_decided_when_the_connection_ends(pair: Pair, held: Direction) -> None:
    """Locks: "its heartbeat bounds the wait"; other branches are decided at once."""
    stage = cast("Stage", pair.scene)
    with stalled(pair, held, "commit", "committing") as (xid, prepared, answer):
        pair.succeed()
        began = time.monotonic()
        with stage.coordinator() as coordinator:
            assert set(coordinator.recover()) == {xid, prepared}
            assert coordinator.commit(prepared) is XaFlag.OK
        others = time.monotonic() - began
        assert stage.bodies("other") == [b"b"]
        took = others + decided(pair, lambda: not stage.states())
        assert others < took
        ends(pair, answer)
    print(f"{held}: others were decided {others:.2f} s after READY, the commit under way {took:.2f} s")
    assert stage.bodies("out") == [b"a"]
    assert stage.bodies("in") == []
    assert stage.history(xid) == ["prepared", "committed"]


@on_the_way
def test_a_rollback_under_way_puts_back_once(pair: Pair, held: Direction) -> None:
    stage = cast("Stage", pair.scene)
    with stalled(pair, held, "rollback", "rolling-back") as (xid, prepared, answer):
        pair.succeed()
        with stage.coordinator() as coordinator:
            assert coordinator.rollback(prepared) is XaFlag.OK
        decided(pair, lambda: not stage.states())
        ends(pair, answer)
    assert (stage.bodies("in"), stage.bodies("out"), stage.bodies("other")) == ([b"one"], [], [])
    assert stage.history(xid) == ["prepared", "rolled-back"]


@on_the_way
def test_a_taking_under_way_is_a_vote_or_never_happened(pair: Pair, held: Direction) -> None:
    """Restart: "TAKING with a trusted receipt: PREPARED. Without: never happened, drop"."""
    stage = cast("Stage", pair.scene)
    with stalled(pair, held, "prepare", "taking") as (xid, prepared, answer):
        pair.succeed()
        with stage.coordinator() as coordinator:
            listed = set(coordinator.recover())
            assert listed == {prepared} or stage.states()[xid] != "taking", "state taking is no vote"
            assert coordinator.rollback(prepared) is XaFlag.OK
            took = decided(pair, lambda: stage.states().get(xid) != "taking")
            if held == "up":
                assert stage.states() == {}
            else:
                assert list(coordinator.recover()) == [xid]
                assert stage.bodies("in") == []
                assert coordinator.commit(xid) is XaFlag.OK
        ends(pair, answer)
    print(f"{held}: the taking was decided {took:.2f} s after READY")
    stage.wait_for_count("in", 1 if held == "up" else 0)
    assert stage.bodies("in") == ([b"one"] if held == "up" else [])
    assert stage.bodies("out") == ([] if held == "up" else [b"a"])


@on_the_way
def test_a_one_phase_commit_under_way_finishes_or_never_happened(pair: Pair, held: Direction) -> None:
    """If only the taking is known, the branch is in doubt, and the transaction manager commits again."""
    stage = cast("Stage", pair.scene)
    with stalled(pair, held, "commit_one_phase", "taking") as (xid, prepared, answer):
        pair.succeed()
        with stage.coordinator() as coordinator:
            assert coordinator.commit(prepared) is XaFlag.OK
            decided(pair, lambda: stage.states().get(xid) != "taking")
            for left in coordinator.recover():
                assert left == xid
                try:
                    assert coordinator.commit(xid) is XaFlag.OK
                except XAER_NOTA as error:
                    if "completed: committed" not in str(error):  # else it has ended since the scan
                        raise
        stage.wait_for_end()
        ends(pair, answer)
    stage.wait_for_count("in", 1 if held == "up" else 0)
    found = [stage.bodies(queue) for queue in ("in", "out", "other")]
    assert found == ([[b"one"], [], [b"b"]] if held == "up" else [[], [b"a"], [b"b"]])
    assert stage.history(xid)[-1] == ("rolled-back" if held == "up" else "committed")
