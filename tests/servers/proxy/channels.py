"""Helpers of the tests of selected channels."""

from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection

from dtx.client import XAResource
from tests.support.rabbitmq import RabbitNode


def select(connection: BlockingConnection) -> BlockingChannel:
    channel = connection.channel()
    XAResource(channel).select()
    return channel


def fill(node: RabbitNode, queue: str, count: int) -> None:
    with node.channel() as channel:
        channel.confirm_delivery()
        for number in range(1, count + 1):
            channel.basic_publish("", queue, b"%d" % number)


def get(channel: BlockingChannel, queue: str, count: int = 1) -> list[int]:
    """Get *count* messages; return their delivery tags."""
    return [channel.basic_get(queue)[0].delivery_tag for _ in range(count)]


def numbers(*which: int) -> list[bytes]:
    return [b"%d" % number for number in which]


def get_body(channel: BlockingChannel, queue: str) -> bytes | None:
    body: bytes | None = channel.basic_get(queue, auto_ack=True)[2]
    return body
