"""A message that one member had to send again reaches the consumers of all members once."""

import time
from collections.abc import Iterator
from contextlib import suppress

import psycopg
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import AMQPError

from dtx.client import XaFlag, XAResource, Xid
from tests.support.client import connected, new_xid
from tests.support.crash import Stage, work
from tests.support.failpoints import ArmedService
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.rabbitmq import RabbitNode
from tests.support.service import DtxService

PATIENCE = 1.5
"""Seconds in which a second copy would come."""


@pytest.fixture
def stage(shared_rabbitmq: RabbitNode, postgres: PostgresServer) -> Iterator[Stage]:
    """A member that sends each unit of unknown outcome again, and a queue."""
    options = ("--advertise", "amqp://127.0.0.1")
    with Stage(shared_rabbitmq, postgres, replay="always", options=options) as stage:
        stage.declare("out")
        yield stage


def dies_after_sending(stage: Stage, *bodies: bytes) -> Xid:
    """A branch with messages to ``out``; its member dies after commit-ok, and another one will send them again."""
    service = stage.service
    assert isinstance(service, ArmedService)
    service.stop()
    service.arming = ("--at", "unit-committed", "--do", "die")
    service.start()
    with stage.connected() as connection:
        xa, xid = work(connection.channel(), publish={"out": list(bodies)})
        assert xa.prepare(xid) is XaFlag.OK
        with pytest.raises(Exception):  # noqa: B017 - the connection ends in one of several ways
            xa.commit(xid)
    service.wait(10)
    return xid


def has_ended(stage: Stage, xid: Xid) -> None:
    """Wait until another member has finished the branch."""
    wait_until(lambda: xid not in stage.states(), what="the end of the branch", seconds=20)


def take(channel: BlockingChannel, seconds: float = PATIENCE) -> tuple[int, bytes] | None:
    """Tag and body of the next message of ``out``; ``None`` if none comes."""
    for method, _, body in channel.consume("out", inactivity_timeout=seconds):
        return None if method is None else (method.delivery_tag, body)
    return None


def consumed(stage: Stage, service: DtxService, most: int) -> list[bytes]:
    """What a consumer of a member gets."""
    found: list[bytes] = []
    with stage.connected(service) as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=1)
        while len(found) < most and (got := take(channel)) is not None:
            channel.basic_ack(got[0])
            found.append(got[1])
    return found


def test_a_copy_is_suppressed_at_all_members(stage: Stage) -> None:
    """One member is dead, another one has settled the first copies, and a third one has the second ones."""
    others = [stage.another_service(), stage.another_service()]
    xid = dies_after_sending(stage, b"one", b"two")
    assert consumed(stage, others[0], 2) == [b"one", b"two"]
    has_ended(stage, xid)
    assert consumed(stage, others[1], 1) == []
    wait_until(lambda: stage.held("out") == 0, what="an empty queue")
    with psycopg.connect(stage.database) as connection:
        assert connection.execute("SELECT count(*) FROM dtx.duplicate").fetchone() == (2,)


@pytest.mark.parametrize("answer", ["acknowledged", "returned", "killed"])
def test_a_copy_waits_for_that_of_another_member(stage: Stage, answer: str) -> None:
    holder, other = stage.another_service(), stage.another_service()
    xid = dies_after_sending(stage, b"one")
    holding = connected(holder.url(vhost=stage.vhost))
    with stage.connected(other) as connection:
        channel, first = connection.channel(), holding.__enter__().channel()
        got = take(first)
        assert got is not None
        has_ended(stage, xid)
        assert take(channel) is None, "it waits"
        if answer == "acknowledged":
            first.basic_ack(got[0])
        elif answer == "returned":
            first.basic_nack(got[0], requeue=True)
        else:
            holder.kill9()
        with suppress(AMQPError):
            holding.__exit__(None, None, None)
        got = take(channel, PATIENCE if answer == "acknowledged" else 15)
        if answer == "acknowledged":
            assert got is None
        else:
            assert got is not None
            assert got[1] == b"one"
            channel.basic_ack(got[0])
            assert take(channel) is None
    wait_until(lambda: stage.held("out") == 0, what="an empty queue")


def test_many_copies_are_consumed_once_at_any_member(stage: Stage) -> None:
    """In branches and outside, by basic.get and by consumers, at all members together."""
    members = [stage.another_service(), stage.another_service()]
    bodies = [b"%d" % number for number in range(60)]
    xid = dies_after_sending(stage, *bodies)
    assert isinstance(stage.service, ArmedService)
    stage.service.arming = ()
    stage.service.start()
    members.append(stage.service)
    found: list[bytes] = []
    with (
        stage.connected(members[0]) as one,
        stage.connected(members[1]) as two,
        stage.connected(members[2]) as three,
    ):
        plain, getting, selected = one.channel(), two.channel(), three.channel()
        plain.basic_qos(prefetch_count=3)
        xa, quiet_since = XAResource(selected), time.monotonic()
        while time.monotonic() - quiet_since < 4:
            before = len(found)
            if (got := take(plain, 0.05)) is not None:
                plain.basic_ack(got[0])
                found.append(got[1])
            method, _, body = getting.basic_get("out")
            if method is not None:
                getting.basic_ack(method.delivery_tag)
                found.append(body)
            found += work_of(xa, selected)
            if len(found) > before or xid in stage.states():
                quiet_since = time.monotonic()
    assert sorted(found, key=int) == bodies
    wait_until(lambda: stage.held("out") == 0, what="an empty queue")


def work_of(xa: XAResource, channel: BlockingChannel) -> list[bytes]:
    """What one branch consumes from ``out``."""
    xid, found = new_xid(), []
    xa.start(xid)
    method, _, body = channel.basic_get("out")
    if method is not None:
        channel.basic_ack(method.delivery_tag)
        found.append(body)
    xa.end(xid)
    if xa.prepare(xid) is XaFlag.OK:
        xa.commit(xid)
    return found
