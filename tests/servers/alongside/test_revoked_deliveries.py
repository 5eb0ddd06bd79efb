"""Deliveries of a consumer that the broker has cancelled: it may deliver them again, and ignores acknowledgements.

RabbitMQ 4.3 cancels a consumer of a quorum queue at the consumer timeout, and the channel stays open. The tests delete
the queue, which cancels the consumer in all versions.
"""

from collections.abc import Iterator

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from dtx.client import XA_RBROLLBACK, XAER_RMFAIL, XAResource
from dtx.xa.codes import XaFlag
from tests.conftest import ServiceFactory
from tests.support.client import connected, fresh_queue, new_xid
from tests.support.processes import wait_until
from tests.support.rabbitmq import RabbitNode


@pytest.fixture
def consumer(dtx_service: ServiceFactory, rabbitmq: RabbitNode) -> Iterator[tuple[BlockingChannel, str, list[int]]]:
    """A selected channel, its queue, and the tags of two deliveries that it got."""
    service, tags = dtx_service("--management", rabbitmq.management_url), []

    def note(_channel: object, method: pika.spec.Basic.Deliver, _properties: object, _body: bytes) -> None:
        tags.append(method.delivery_tag)

    with fresh_queue(rabbitmq) as queue, connected(service.url()) as connection:
        with rabbitmq.channel() as publisher:
            for body in (b"one", b"two"):
                publisher.basic_publish("", queue, body)
        channel = connection.channel()
        XAResource(channel).select()
        channel.basic_consume(queue, note)
        wait_until(lambda: connection.process_data_events(0.05) or len(tags) == 2, what="two deliveries")
        yield channel, queue, tags


def cancel(rabbitmq: RabbitNode, channel: BlockingChannel, queue: str) -> None:
    """Delete *queue*, and wait until the client has got basic.cancel."""
    with rabbitmq.channel() as other:
        other.queue_delete(queue)
    wait_until(lambda: channel.connection.process_data_events(0.05) or not channel.consumer_tags, what="the cancel")


def test_a_branch_that_holds_a_revoked_delivery_can_only_be_rolled_back(
    rabbitmq: RabbitNode, consumer: tuple[BlockingChannel, str, list[int]]
) -> None:
    channel, queue, tags = consumer
    xa, xid = XAResource(channel), new_xid()
    xa.start(xid)
    channel.basic_ack(tags[0])
    xa.end(xid)
    cancel(rabbitmq, channel, queue)
    with pytest.raises(XA_RBROLLBACK):
        xa.prepare(xid)


def test_no_branch_takes_a_revoked_delivery(
    rabbitmq: RabbitNode, consumer: tuple[BlockingChannel, str, list[int]]
) -> None:
    channel, queue, tags = consumer
    cancel(rabbitmq, channel, queue)
    xa, xid = XAResource(channel), new_xid()
    xa.start(xid)
    channel.basic_ack(tags[1])
    with pytest.raises(XAER_RMFAIL, match="may deliver the message again"):
        xa.end(xid)


def test_a_branch_of_another_queue_is_not_concerned(
    rabbitmq: RabbitNode, consumer: tuple[BlockingChannel, str, list[int]]
) -> None:
    channel, queue, _ = consumer
    xa, xid = XAResource(channel), new_xid()
    with fresh_queue(rabbitmq) as other:
        with rabbitmq.channel() as publisher:
            publisher.confirm_delivery()
            publisher.basic_publish("", other, b"three")
        xa.start(xid)
        method, _, _ = channel.basic_get(other)
        assert method is not None
        channel.basic_ack(method.delivery_tag)
        xa.end(xid)
        cancel(rabbitmq, channel, queue)
        assert xa.prepare(xid) is XaFlag.OK
        assert xa.commit(xid) is XaFlag.OK


def test_a_client_that_deletes_its_queue_commits_what_it_consumed(
    consumer: tuple[BlockingChannel, str, list[int]],
) -> None:
    """The broker cancels the consumer then as well, but no other consumer can get the message."""
    channel, queue, tags = consumer
    xa, xid = XAResource(channel), new_xid()
    xa.start(xid)
    channel.basic_ack(tags[0])
    xa.end(xid)
    channel.queue_delete(queue)
    wait_until(lambda: channel.connection.process_data_events(0.05) or not channel.consumer_tags, what="the cancel")
    assert xa.prepare(xid) is XaFlag.OK
    assert xa.commit(xid) is XaFlag.OK
