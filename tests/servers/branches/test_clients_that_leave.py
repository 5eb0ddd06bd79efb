"""Clients that die, disconnect or are slow: unfinished work is rolled back, idle branches outlive their client."""

from collections.abc import Iterator

import pytest
from pika.adapters.blocking_connection import BlockingConnection

from dtx.client import XA_RBROLLBACK, XA_RBTIMEOUT, XAER_NOTA, Coordinator, XaFlag
from tests.support.broker import only_alongside
from tests.support.client import connected
from tests.support.crash import Scene, Stage, work
from tests.support.proxy import Proxy


class Mortal:
    """A client whose connection may break at any time.

    Args:
        connection: to dtx.
        between: the network between client and dtx.
    """

    def __init__(self, connection: BlockingConnection, between: Proxy) -> None:
        self.connection = connection
        self._between = between

    def die(self) -> None:
        """Its socket is reset, as when its machine reboots."""
        self._between.cut()


@pytest.fixture
def coordinator(stage: Scene) -> Iterator[Coordinator]:
    """The transaction manager, whose connection stays open."""
    with stage.coordinator() as alive:
        yield alive


@pytest.fixture
def client(stage: Scene) -> Iterator[Mortal]:
    """A client whose connection the test may cut."""
    with Proxy(stage.service.host, stage.service.port) as between:
        url = stage.service.url(vhost=stage.vhost).replace(f":{stage.service.port}/", f":{between.port}/")
        with connected(url) as connection:
            yield Mortal(connection, between)


def test_a_client_lost_while_associated_leaves_a_rollback_only_branch(
    stage: Scene, client: Mortal, coordinator: Coordinator
) -> None:
    """Design: "Gone while associated: rollback-only"; the consumed message is back at once."""
    stage.declare("in")
    stage.declare("out")
    stage.fill("in", b"one", b"two")
    _, xid = work(client.connection.channel(), publish={"out": [b"a"]}, consume={"in": 1}, end=False)
    client.die()
    stage.wait_for_count("in", 2)
    with pytest.raises(XA_RBROLLBACK):
        coordinator.prepare(xid)
    assert coordinator.rollback(xid) is XaFlag.RBROLLBACK
    with pytest.raises(XAER_NOTA):
        coordinator.rollback(xid)
    assert [(body, again) for body, _, again in stage.take("in")] == [(b"one", True), (b"two", False)]
    assert stage.count("out") == 0


def test_a_suspended_branch_dies_with_its_channel(stage: Scene, client: Mortal, coordinator: Coordinator) -> None:
    stage.declare("in")
    stage.fill("in", b"one")
    channel = client.connection.channel()
    xa, xid = work(channel, consume={"in": 1}, end=False)
    xa.end(xid, suspend=True)
    channel.close()
    stage.wait_for_count("in", 1)
    assert coordinator.rollback(xid) is XaFlag.OK
    assert stage.bodies("in") == [b"one"]


@pytest.mark.parametrize("how", ["dies", "closes", "closes its channel"])
@pytest.mark.parametrize("outcome", ["commit", "rollback", "one phase", "rollback of an idle branch"])
def test_an_idle_branch_survives_its_client(
    stage: Scene, client: Mortal, coordinator: Coordinator, how: str, outcome: str
) -> None:
    """Design: "idle branches keep the upstream connection until prepare has taken over or the branch is gone"."""
    before = stage.locks()
    stage.declare("in")
    stage.declare("out")
    stage.fill("in", b"one", b"two")
    channel = client.connection.channel()
    _, xid = work(channel, publish={"out": [b"a"]}, consume={"in": 1})
    if how == "dies":
        client.die()
    elif how == "closes":
        client.connection.close()
    else:
        channel.close()
    assert stage.count("in") == 1
    if outcome == "one phase":
        assert coordinator.commit(xid, one_phase=True) is XaFlag.OK
    elif outcome == "rollback of an idle branch":
        assert coordinator.rollback(xid) is XaFlag.OK
        stage.wait_for_count("in", 2)
    else:
        assert coordinator.prepare(xid) is XaFlag.OK
        assert (coordinator.commit if outcome == "commit" else coordinator.rollback)(xid) is XaFlag.OK
    done = outcome in ("commit", "one phase")
    assert stage.bodies("out") == ([b"a"] if done else [])
    assert sorted(stage.bodies("in")) == ([b"two"] if done else [b"one", b"two"])
    if how == "closes its channel":
        client.connection.close()
    # A connection that is no longer needed is closed: it would lock exclusive queues.
    stage.wait_for(lambda: stage.locks() == before, "the end of the connection")


@only_alongside
def test_a_client_lost_during_prepare_has_voted(stage: Stage, client: Mortal, coordinator: Coordinator) -> None:
    stage.declare("in")
    stage.fill("in", b"one")
    xa, xid = work(client.connection.channel(), consume={"in": 1})
    stage.proxy.stall("down")
    try:
        stage.background(lambda: xa.prepare(xid))
        stage.wait_for_state(xid, "taking")
        client.die()
    finally:
        stage.proxy.resume()
    stage.wait_for_state(xid, "prepared")
    assert coordinator.rollback(xid) is XaFlag.OK
    assert stage.bodies("in") == [b"one"]


@pytest.mark.parametrize("idle", [True, False], ids=["idle", "active"])
def test_a_branch_that_takes_too_long_is_rolled_back(stage: Scene, coordinator: Coordinator, idle: bool) -> None:
    """Prepare: "xa-rbtimeout: the work represented by this transaction branch took too long"."""
    stage.declare("in")
    stage.declare("out")
    stage.fill("in", b"one")
    with stage.connected() as connection:
        xa, xid = work(connection.channel(), publish={"out": [b"a"]}, consume={"in": 1}, end=idle)
        xa.set_timeout(xid, 1)
        stage.wait_for_count("in", 1)
        if not idle:
            with pytest.raises(XA_RBTIMEOUT):
                xa.end(xid)
        with pytest.raises(XA_RBTIMEOUT):
            coordinator.prepare(xid)
        assert coordinator.rollback(xid) is XaFlag.RBTIMEOUT
        with pytest.raises(XAER_NOTA):
            coordinator.rollback(xid)
    assert [(body, again) for body, _, again in stage.take("in")] == [(b"one", True)]
    assert stage.count("out") == 0
    assert stage.history(xid) == ["timed-out"]


def test_a_prepared_branch_never_times_out(stage: Scene, coordinator: Coordinator) -> None:
    """Never guess: "No prepared branch is ever completed by a timeout"."""
    stage.declare("out")
    with stage.connected() as connection:
        xa, xid = work(connection.channel(), publish={"out": [b"a"]})
        _, other = work(connection.channel(), publish={"out": [b"b"]})
        for each in (xid, other):
            xa.set_timeout(each, 1)
        assert xa.prepare(xid) is XaFlag.OK
        stage.wait_for(lambda: stage.history(other) == ["timed-out"], "the timeout of the other branch")
        assert stage.states() == {xid: "prepared"}
        assert coordinator.rollback(other) is XaFlag.RBTIMEOUT
    assert coordinator.commit(xid) is XaFlag.OK
    assert stage.bodies("out") == [b"a"]
