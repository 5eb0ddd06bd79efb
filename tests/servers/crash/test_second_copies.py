"""A message that dtx had to send again reaches each consumer once, whatever happened to its copies."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from urllib.request import Request, urlopen

import psycopg
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from dtx.client import XaFlag, XAResource
from tests.support.client import new_xid
from tests.support.crash import PERSISTENT, Stage, work
from tests.support.failpoints import ArmedService
from tests.support.processes import wait_until
from tests.support.service import ADMIN

PATIENCE = 1.0
"""Seconds in which a second copy would come."""


@pytest.fixture
def stage(stage_with: Callable[..., Stage]) -> Stage:
    """A dtx that sends each unit of unknown outcome again."""
    stage = stage_with(replay="always")
    stage.declare("out")
    return stage


def armed(stage: Stage, point: str = "") -> None:
    """The next dtx dies at *point*."""
    assert isinstance(stage.service, ArmedService)
    stage.service.arming = ("--at", point, "--do", "die") if point else ()


def commits_twice(stage: Stage, *bodies: bytes) -> None:
    """Commit a branch with messages to ``out``; dtx dies after commit-ok, so the next one sends the unit again."""
    stage.service.stop()
    armed(stage, "unit-committed")
    stage.service.start()
    with stage.connected() as connection:
        xa, xid = work(connection.channel(), publish={"out": list(bodies)})
        assert xa.prepare(xid) is XaFlag.OK
        with pytest.raises(Exception):  # noqa: B017 - the connection ends in one of several ways
            xa.commit(xid)
    stage.service.wait(10)
    armed(stage)
    stage.service.start()
    stage.wait_for_end()
    stage.wait_for_count("out", 2 * len(bodies))


def consumed(channel: BlockingChannel, *, seconds: float = PATIENCE, **options: Any) -> list[bytes]:
    """All messages that a consumer of ``out`` gets until none comes for a while."""
    found = []
    for method, _, body in channel.consume("out", inactivity_timeout=seconds, **options):
        if method is None:
            break
        found.append(body)
        if not options.get("auto_ack"):
            channel.basic_ack(method.delivery_tag)
    channel.cancel()
    return found


def got(channel: BlockingChannel, *, auto_ack: bool = False) -> list[bytes]:
    """All messages of ``out`` that basic.get gets."""
    found: list[bytes] = []
    while True:
        method, _, body = channel.basic_get("out", auto_ack)
        if method is None:
            return found
        found.append(body)
        if not auto_ack:
            channel.basic_ack(method.delivery_tag)


def in_a_branch(channel: BlockingChannel) -> list[bytes]:
    """All messages of ``out``, each consumed in a branch."""
    xa = XAResource(channel)
    found = []
    while True:
        xid = new_xid()
        xa.start(xid)
        method, _, body = channel.basic_get("out")
        if method is not None:
            found.append(body)
            channel.basic_ack(method.delivery_tag)
        xa.end(xid)
        xa.prepare(xid)
        if method is None:
            return found
        xa.commit(xid)


def selected(channel: BlockingChannel) -> list[bytes]:
    """All messages of ``out``, consumed on a selected channel outside a branch."""
    XAResource(channel)
    return consumed(channel)


CONSUMERS: dict[str, Callable[[BlockingChannel], list[bytes]]] = {
    "consume": consumed,
    "get": got,
    "get without acknowledgement": lambda channel: got(channel, auto_ack=True),
    "consume without acknowledgement": lambda channel: consumed(channel, auto_ack=True),
    "in a branch": in_a_branch,
    "selected": selected,
}


@pytest.mark.parametrize("consumer", CONSUMERS.values(), ids=CONSUMERS.keys())
def test_a_consumer_gets_a_replayed_message_once(
    stage: Stage, consumer: Callable[[BlockingChannel], list[bytes]]
) -> None:
    commits_twice(stage, b"one", b"two", b"x" * 300_000)
    with stage.connected() as connection:
        channel = connection.channel()
        assert consumer(channel) == [b"one", b"two", b"x" * 300_000]
        wait_until(lambda: stage.held("out") == 0, what="an empty queue")


def test_an_amqp10_link_gets_a_replayed_message_once(stage: Stage) -> None:
    commits_twice(stage, b"one", b"two")
    proton = pytest.importorskip("tests.support.proton")
    with proton.Client(stage.service, virtual_host=f"vhost:{stage.vhost}") as client:
        receiver = client.receiver("/queues/out", credit=10)
        bodies = []
        for _ in range(2):
            message, delivery = client.take(receiver)
            bodies.append(bytes(message.body))
            delivery.update(delivery.ACCEPTED)
            delivery.settle()
        assert bodies == [b"one", b"two"]
        with pytest.raises(Exception, match=r"[Tt]imed? ?out"):
            receiver.receive(timeout=PATIENCE)
    wait_until(lambda: stage.held("out") == 0, what="an empty queue")


@pytest.fixture
def two(stage: Stage) -> Iterator[tuple[BlockingChannel, BlockingChannel]]:
    """Channels of two connections, and a queue with two copies of one message."""
    commits_twice(stage, b"one")
    with stage.connected() as first, stage.connected() as second:
        channels = first.channel(), second.channel()
        channels[0].basic_qos(prefetch_count=1)
        yield channels


def unsettled(channel: BlockingChannel) -> tuple[int, bytes]:
    """Tag and body of the one message that a new consumer of the channel gets."""
    method, _, body = next(iter(channel.consume("out", inactivity_timeout=10)))
    assert method is not None
    return method.delivery_tag, body


@pytest.mark.parametrize("answer", ["acknowledged", "rejected"])
def test_a_copy_waits_for_another_one_that_is_settled(
    stage: Stage, two: tuple[BlockingChannel, BlockingChannel], answer: str
) -> None:
    first, second = two
    tag, body = unsettled(first)
    assert body == b"one"
    assert next(iter(second.consume("out", inactivity_timeout=PATIENCE)))[0] is None
    if answer == "acknowledged":
        first.basic_ack(tag)
    else:
        first.basic_reject(tag, requeue=False)
    assert next(iter(second.consume("out", inactivity_timeout=PATIENCE)))[0] is None
    wait_until(lambda: stage.held("out") == 0, what="an empty queue")


def test_a_waiting_copy_comes_if_the_other_one_is_lost(
    stage: Stage, two: tuple[BlockingChannel, BlockingChannel]
) -> None:
    first, second = two
    unsettled(first)
    assert next(iter(second.consume("out", inactivity_timeout=PATIENCE)))[0] is None
    first.connection.close()
    found = consumed(second)
    assert found == [b"one"]
    wait_until(lambda: stage.held("out") == 0, what="an empty queue")


def test_a_multiple_acknowledgement_settles_no_copy_that_waits(
    stage: Stage, two: tuple[BlockingChannel, BlockingChannel]
) -> None:
    """The client of the second channel has never seen the copy: if the first one is returned, it must come again."""
    first, second = two
    unsettled(first)
    stage.fill("out", b"another")
    tag, body = unsettled(second)
    assert body == b"another"
    second.basic_ack(tag, multiple=True)
    second.connection.process_data_events(0.2)
    first.connection.close()
    method, _, body = next(iter(second.consume("out", inactivity_timeout=10)))
    assert (method is not None, body) == (True, b"one")
    second.basic_ack(method.delivery_tag, multiple=True)
    assert next(iter(second.consume("out", inactivity_timeout=PATIENCE)))[0] is None
    wait_until(lambda: stage.held("out") == 0, what="an empty queue")


def test_a_copy_that_was_consumed_before_the_replay_counts(stage: Stage) -> None:
    """One queue refuses the message, another takes it: when the commit is tried again, that one gets a second copy."""
    stage.declare("full", **{"x-max-length": 1, "x-overflow": "reject-publish"})
    with stage.broker.channel(stage.vhost) as channel:
        for queue in ("out", "full"):
            channel.queue_bind(queue, "amq.fanout")
    stage.fill("full", b"in the way")
    with stage.connected() as connection:
        xa = XAResource(connection.channel())
        xid = new_xid()
        xa.start(xid)
        xa.channel.basic_publish("amq.fanout", "", b"one", PERSISTENT)
        xa.end(xid)
        assert xa.prepare(xid) is XaFlag.OK
    with stage.coordinator() as coordinator, pytest.raises(Exception, match="XAER_RMFAIL"):
        coordinator.commit(xid)
    with stage.connected() as connection:
        assert consumed(connection.channel()) == [b"one"]
    assert stage.bodies("full") == [b"in the way"]
    stage.service.kill9()
    stage.service.start()
    with stage.coordinator() as coordinator:
        assert coordinator.commit(xid) is XaFlag.OK
    stage.wait_for_count("out", 1)
    with stage.connected() as connection:
        assert consumed(connection.channel()) == []
    assert stage.bodies("full") == [b"one"]
    wait_until(lambda: stage.held("out") == 0, what="an empty queue")


def test_a_message_that_was_put_back_twice_is_consumed_once(stage: Stage) -> None:
    """A message that was put back has another key than before: its first settlement does not count."""
    stage.fill("out", b"one")
    with stage.connected() as connection:
        xa, xid = work(connection.channel(), consume={"out": 1})
        assert xa.prepare(xid) is XaFlag.OK
    stage.service.stop()
    armed(stage, "unit-committed")
    stage.service.start()
    with stage.connected() as connection, pytest.raises(Exception):  # noqa: B017
        XAResource(connection.channel()).rollback(xid)
    stage.service.wait(10)
    armed(stage)
    stage.service.start()
    stage.wait_for_end()
    stage.wait_for_count("out", 2)
    with stage.connected() as connection:
        assert in_a_branch(connection.channel()) == [b"one"]
    wait_until(lambda: stage.held("out") == 0, what="an empty queue")


@pytest.mark.parametrize("dies_again", ["", "before", "behind"])
@pytest.mark.parametrize("copies", [1, 2])
def test_no_client_gets_a_message_that_a_restart_puts_back(stage: Stage, copies: int, dies_again: str) -> None:
    """Clients are served when it is known that the message in the queue is not needed. The log knows that, too.

    dtx may die again *before* it puts the message back, or *behind* that.
    """
    if copies == 2:
        commits_twice(stage, b"one")
    else:
        with stage.connected() as connection:
            xa, xid = work(connection.channel(), publish={"out": [b"one"]})
            xa.commit(xid, one_phase=True)
    stage.service.stop()
    armed(stage, "taking-committed" if copies == 2 else "taking-acked")
    stage.service.start()
    with stage.connected() as connection:
        xa, xid = work(connection.channel(), consume={"out": 1})
        with pytest.raises(Exception):  # noqa: B017 - the connection ends in one of several ways
            xa.prepare(xid)
    stage.service.wait(10)
    if dies_again == "before":
        armed(stage, "put-back-before")
        with suppress(Exception):
            stage.service.start()
        stage.service.wait(10)
    armed(stage)
    stage.service.start()
    with psycopg.connect(stage.database) as database:
        assert database.execute("SELECT gtrid FROM dtx.branch").fetchall() == []
    if dies_again == "behind":
        stage.wait_for_end()
        stage.service.kill9()
        stage.service.start()
    with stage.connected() as connection:
        assert consumed(connection.channel()) == [b"one"]
        wait_until(lambda: stage.held("out") == 0, what="an empty queue")


@pytest.mark.parametrize("changed", [True, False], ids=["another message", "the same message"])
def test_a_message_that_an_application_published_again_is_delivered(stage: Stage, changed: bool) -> None:
    """It has the headers of the copy that was settled, so it is a message of its own."""
    commits_twice(stage, b"one")
    with stage.connected() as connection:
        channel = connection.channel()
        method, properties, body = next(iter(channel.consume("out", inactivity_timeout=10)))
        channel.basic_ack(method.delivery_tag)
        time.sleep(PATIENCE)
        channel.basic_publish("", "out", b"changed" if changed else body, properties)
        assert consumed(channel) == [b"changed" if changed else b"one"]


def test_a_crash_between_record_and_acknowledgement_shows_no_second_copy(stage: Stage) -> None:
    commits_twice(stage, b"one")
    stage.service.stop()
    armed(stage, "log-stored-after")
    stage.service.start()
    attempts = []
    with stage.connected() as connection:
        channel = connection.channel()
        method, properties, _ = next(iter(channel.consume("out", inactivity_timeout=10)))
        attempts.append((properties.headers or {}).get("x-dtx-attempt"))
        channel.basic_ack(method.delivery_tag)
        with suppress(Exception):
            connection.process_data_events(5)
    stage.service.wait(10)
    armed(stage)
    stage.service.start()
    with stage.connected() as connection:
        channel = connection.channel()
        for method, properties, _ in channel.consume("out", inactivity_timeout=PATIENCE):
            if method is None:
                break
            attempts.append((properties.headers or {}).get("x-dtx-attempt"))
            channel.basic_ack(method.delivery_tag)
    assert attempts in ([None, None], ["2", "2"])  # it was not acknowledged, so the same copy comes again
    wait_until(lambda: stage.held("out") == 0, what="an empty queue")


def test_an_operator_restores_a_suppressed_copy(stage_with: Callable[..., Stage]) -> None:
    """It is put back, and so it is a message of its own that no other copy suppresses."""
    stage = stage_with(replay="always", options=ADMIN)
    stage.declare("out")
    commits_twice(stage, b"one")
    with stage.connected() as connection:
        channel = connection.channel()
        assert consumed(channel) == [b"one"]
        (line,) = stage.service.run("duplicates", "list", "--vhost", stage.vhost, "--json").stdout.splitlines()
        kept = json.loads(line)
        assert (kept["queue"], kept["attempt"] in (1, 2), kept["bytes"]) == ("out", True, 3)
        restore = ("duplicates", "restore", kept["id"], "--vhost", stage.vhost, "--reason", "wanted", "--queue")
        assert "no second copy" in stage.service.run(*restore, "other", check=False).stderr
        assert f"{kept['id']} is in queue out again" in stage.service.run(*restore, "out").stdout
        assert consumed(channel) == [b"one"]
    stage.delete("out")
    assert "queue 'out' has not confirmed the message" in stage.service.run(*restore, "out", check=False).stderr
    lines = [
        json.loads(line) for line in stage.service.run("audit", "--action", "restore", "--json").stdout.splitlines()
    ]
    assert [(line["reason"], line["result"][:8]) for line in lines] == [
        ("wanted", "412: que"), ("wanted", "restored"), ("wanted", "404: the")
    ]  # fmt: skip


def test_metrics_count_repeated_and_suppressed_messages(stage_with: Callable[..., Stage]) -> None:
    stage = stage_with(replay="always", options=ADMIN)
    stage.declare("out")
    commits_twice(stage, b"one", b"two")
    with stage.connected() as connection:
        assert consumed(connection.channel()) == [b"one", b"two"]
    words = ("token", "add", "reader", "--role", "viewer", "--reason", "metrics")
    token = stage.service.run(*words).stdout.split()[-1]
    request = Request(f"{stage.service.admin_url}/metrics", headers={"Authorization": f"Bearer {token}"})
    with urlopen(request, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    assert {"dtx_messages_replayed_total 2.0", "dtx_copies_suppressed_total 2.0"} <= set(lines)


def test_copies_pass_if_the_operator_wants_that(stage_with: Callable[..., Stage]) -> None:
    stage = stage_with(replay="always", options=("--duplicates", "pass"))
    stage.declare("out")
    commits_twice(stage, b"one")
    with stage.connected() as connection:
        assert consumed(connection.channel()) == [b"one", b"one"]


def test_acknowledgements_before_a_close_reach_the_broker(stage: Stage) -> None:
    """An acknowledgement may wait for the log; the client's close must not overtake it."""
    commits_twice(stage, b"one", b"two")
    for close in ("channel", "connection"):
        with stage.connected() as connection:
            channel = connection.channel()
            method, _, _ = next(iter(channel.consume("out", inactivity_timeout=10)))
            channel.basic_ack(method.delivery_tag)
            (channel if close == "channel" else connection).close()
    with stage.connected() as connection:
        assert consumed(connection.channel()) == []
    wait_until(lambda: stage.held("out") == 0, what="an empty queue")


def test_a_client_in_tx_mode_gets_both_copies(stage: Stage) -> None:
    """What dtx settles there would wait for a commit of the client, which may wait for messages."""
    commits_twice(stage, b"one")
    with stage.connected() as connection:
        channel = connection.channel()
        channel.tx_select()
        found = []
        for method, _, body in channel.consume("out", inactivity_timeout=PATIENCE):
            if method is None:
                break
            found.append(body)
            channel.basic_ack(method.delivery_tag)
            channel.tx_commit()
    assert found == [b"one", b"one"]


def test_a_first_replay_counts_for_channels_that_consume_already(stage: Stage) -> None:
    """The consumer began before anything was sent again."""
    stage.declare("full", **{"x-max-length": 1, "x-overflow": "reject-publish"})
    with stage.broker.channel(stage.vhost) as channel:
        for queue in ("out", "full"):
            channel.queue_bind(queue, "amq.fanout")
    stage.fill("full", b"in the way")
    with stage.connected() as connection, stage.connected() as other, stage.coordinator() as coordinator:
        consumer = connection.channel()
        assert next(iter(consumer.consume("out", inactivity_timeout=0.1)))[0] is None
        xa = XAResource(other.channel())
        xid = new_xid()
        xa.start(xid)
        xa.channel.basic_publish("amq.fanout", "", b"x" * 300_000, PERSISTENT)
        xa.end(xid)
        assert xa.prepare(xid) is XaFlag.OK
        with pytest.raises(Exception, match="XAER_RMFAIL"):
            coordinator.commit(xid)
        method, _, body = next(iter(consumer.consume("out", inactivity_timeout=10)))
        assert (method is not None, body) == (True, b"x" * 300_000)
        consumer.basic_ack(method.delivery_tag)
        assert stage.bodies("full") == [b"in the way"]
        assert coordinator.commit(xid) is XaFlag.OK
        assert next(iter(consumer.consume("out", inactivity_timeout=PATIENCE)))[0] is None
        stage.fill("out", b"next")
        assert next(iter(consumer.consume("out", inactivity_timeout=10)))[2] == b"next"
    assert stage.bodies("full") == [b"x" * 300_000]
