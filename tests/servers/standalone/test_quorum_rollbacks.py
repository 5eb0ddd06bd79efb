"""Rollbacks and the delivery limit of quorum queues without a broker."""

from collections.abc import Iterator

import pytest
from pika.adapters.blocking_connection import BlockingChannel

from dtx.client import XAResource, XARollback
from tests.support.client import connected, new_xid
from tests.support.dialogue import unique
from tests.support.service import DtxService


@pytest.fixture
def channel(standalone: DtxService) -> Iterator[BlockingChannel]:
    with connected(standalone.url()) as connection:
        yield connection.channel()


@pytest.mark.parametrize("letters", [False, True], ids=["dropped", "dead letters in a circle"])
def test_rollbacks_beyond_the_limit_keep_the_message(channel: BlockingChannel, letters: bool) -> None:
    queue = unique()
    arguments: dict[str, object] = {"x-queue-type": "quorum", "x-delivery-limit": 1}
    if letters:
        arguments |= {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": queue}
    channel.queue_declare(queue, durable=True, arguments=arguments)
    channel.basic_publish("", queue, b"one")
    xa = XAResource(channel)
    for count in range(4):
        xid = new_xid()
        xa.start(xid)
        method, properties, body = channel.basic_get(queue)
        assert (body, (properties.headers or {}).get("x-delivery-count", 0)) == (b"one", count)
        channel.basic_ack(method.delivery_tag)
        xa.end(xid)
        if count % 2:
            xa.prepare(xid)
        xa.rollback(xid)
    channel.queue_delete(queue)


def test_a_late_ack_in_a_branch_keeps_the_message(channel: BlockingChannel) -> None:
    queue = unique()
    channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum", "x-delivery-limit": 0})
    channel.basic_publish("", queue, b"one")
    xa, xid = XAResource(channel), new_xid()
    xa.start(xid)
    xa.set_timeout(xid, 1)
    method, _, _ = channel.basic_get(queue)
    channel.connection.sleep(1.6)
    channel.basic_ack(method.delivery_tag)
    with pytest.raises(XARollback):
        xa.end(xid)
    other = channel.connection.channel()
    assert other.basic_get(queue)[2] == b"one"
    other.close()
    channel.connection.channel().queue_delete(queue)
