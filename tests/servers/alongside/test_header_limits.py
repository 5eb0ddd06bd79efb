"""Headers: dtx refuses those with which the broker would end the connection when the branch commits."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pika
import pytest

from dtx.client import XAER_RMFAIL, XaFlag
from dtx.store.rabbitmq.messages import MAX_MARKS
from dtx.wire.amqp09 import properties, tables
from dtx.wire.amqp09.methods import DtxCommit, DtxEnd, DtxPrepare, DtxRollback, DtxStart
from dtx.wire.amqp09.properties import Property
from tests.support.client import new_xid
from tests.support.crash import Stage, work
from tests.support.postgres import PostgresServer
from tests.support.rabbitmq import RabbitNode
from tests.support.raw import logged_in

FRAME_MAX = 131_072
LONG = "n" * 255
UNREADABLE = {
    "infinite": tables.entry(b"x", b"d", struct.pack(">d", float("inf"))),
    "NaN in an array": tables.entry(b"x", b"A", b"f" + struct.pack(">f", float("nan"))),
    "unknown type": tables.entry(b"x", b"F", tables.entry(b"y", b"U", b"\0\1")),
}


@pytest.fixture
def stage(rabbitmq: RabbitNode, postgres: PostgresServer) -> Iterator[Stage]:
    """A broker, a log and a dtx."""
    with Stage(rabbitmq, postgres) as made:
        yield made


def sized(size: int) -> bytes:
    """Properties of *size* bytes."""
    empty = properties.build({Property.DELIVERY_MODE: b"\2"}, {b"large": b""})
    return properties.build({Property.DELIVERY_MODE: b"\2"}, {b"large": b"x" * (size - len(empty))})


def test_the_largest_headers_can_be_committed_and_put_back(stage: Stage) -> None:
    """Dtx adds most to a message with the longest exchange and routing key."""
    with stage.broker.channel(stage.vhost) as channel:
        channel.exchange_declare(LONG, "topic")
        channel.queue_declare("q", durable=True)
        channel.queue_bind("q", LONG, LONG)
    with logged_in(stage.service.url(vhost=stage.vhost)) as client:
        client.open(2, select=True)
        committed, rolled_back = new_xid(), new_xid()
        client.ask(2, DtxStart(xid=committed))
        client.publish(2, LONG, b"committed", exchange=LONG, properties=sized(FRAME_MAX - MAX_MARKS))
        client.ask(2, DtxEnd(xid=committed))
        client.ask(2, DtxPrepare(xid=committed))
        client.ask(2, DtxCommit(xid=committed))
        assert stage.bodies("q") == [b"committed"]
        client.publish(1, LONG, b"put back", exchange=LONG, properties=sized(FRAME_MAX - MAX_MARKS))
        client.ask(2, DtxStart(xid=rolled_back))
        client.consume_one(2, "q")
        client.ask(2, DtxEnd(xid=rolled_back))
        client.ask(2, DtxPrepare(xid=rolled_back))
        client.ask(2, DtxRollback(xid=rolled_back))
        ((body, found, _),) = stage.take("q")
    assert (body, found.headers["x-dtx-original-exchange"]) == (b"put back", LONG)


def test_more_headers_than_dtx_can_add_to_are_refused(stage: Stage) -> None:
    """A second attempt adds two."""
    stage.declare("q")
    headers = {b"%d" % number: b"" for number in range(4096)}
    with logged_in(stage.service.url(vhost=stage.vhost)) as client:
        client.open(2, select=True)
        client.ask(2, DtxStart(xid=new_xid()))
        client.publish(2, "q", properties=properties.build({}, headers))
        refusal = client.refused(2)
    assert (refusal.code, "4096 headers are too many" in refusal.text) == (406, True)


@pytest.mark.parametrize("headers", UNREADABLE.values(), ids=UNREADABLE)
def test_headers_that_rabbitmq_cannot_read_are_refused(stage: Stage, headers: bytes) -> None:
    """The broker has just checked a publish like this, with other headers."""
    stage.declare("q")
    with logged_in(stage.service.url(vhost=stage.vhost)) as client:
        client.open(2, select=True)
        client.idle(2, new_xid(), queue="q")
        client.ask(2, DtxStart(xid=new_xid()))
        client.publish(2, "q", properties=properties.build({Property.HEADERS: headers}))
        refusal = client.refused(2)
    assert (refusal.code, "RabbitMQ cannot read headers" in refusal.text) == (406, True)


def test_a_message_too_large_for_a_frame_is_refused_alone(stage: Stage) -> None:
    """Otherwise the broker ends the connection of all commits each time."""
    stage.declare("q")
    with stage.connected() as connection:
        channel = connection.channel()
        xa, large = work(channel, end=False)
        channel.basic_publish("", "q", b"large", pika.BasicProperties(headers={"x": "y" * 50_000}))
        xa.end(large)
        assert xa.prepare(large) is XaFlag.OK
        other, small = work(connection.channel(), publish={"q": [b"small"]})
        assert other.prepare(small) is XaFlag.OK
    with broker_frame_max(stage, 8192), stage.coordinator() as coordinator:
        with pytest.raises(XAER_RMFAIL, match="too large for the broker's frame-max of 8192"):
            coordinator.commit(large)
        assert coordinator.commit(small) is XaFlag.OK
    assert b"commit connection is down" not in stage.service.log_path.read_bytes()
    with stage.coordinator() as coordinator:
        assert coordinator.commit(large) is XaFlag.OK
    assert stage.bodies("q") == [b"small", b"large"]


@contextmanager
def broker_frame_max(stage: Stage, size: int) -> Iterator[None]:
    """The limit of the broker is *size*; dtx starts again, so that its connections have it."""
    try:
        stage.node.ctl("eval", f"application:set_env(rabbit, frame_max, {size}).")
        stage.service.restart()
        yield
    finally:
        stage.node.ctl("eval", f"application:set_env(rabbit, frame_max, {FRAME_MAX}).")
        stage.service.restart()
