"""Messages with a user-id, when dtx's own user at the broker does not have the tag impersonator."""

import secrets
from collections.abc import Iterator

import pika
import pytest

from dtx.client import XaFlag, XAResource
from tests.conftest import ServiceFactory
from tests.servers.alongside.refusals import is_not_consumed
from tests.support.client import bodies, connected, fresh_queue, new_xid
from tests.support.processes import wait_until
from tests.support.rabbitmq import RabbitNode


@pytest.fixture
def plain_user(rabbitmq: RabbitNode) -> Iterator[str]:
    """The URL of a user without tags."""
    name = f"plain-{secrets.token_hex(4)}"
    yield rabbitmq.add_user(name, tags="")
    rabbitmq.mend()
    rabbitmq.delete_user(name)


def test_a_message_with_an_unrepeatable_user_id_cannot_be_consumed(
    dtx_service: ServiceFactory, rabbitmq: RabbitNode, plain_user: str
) -> None:
    """The broker accepts another user's user-id only from an impersonator, so the message could not be put back."""
    service = dtx_service("--replay", "always", broker=plain_user)
    with fresh_queue(rabbitmq) as queue, connected(service.url()) as connection:
        with rabbitmq.channel() as channel:
            channel.confirm_delivery()
            channel.basic_publish("", queue, b"of guest", pika.BasicProperties(user_id="guest"))
            channel.basic_publish("", queue, b"of nobody")
        xid = is_not_consumed(connection, queue, code=406, match="impersonator")
        other = XAResource(connection.channel())
        other.rollback(xid)
        wait_until(lambda: rabbitmq.count(queue) == 2, what="the message being back")
        channel, xid = other.channel, new_xid()
        other.select()
        first = channel.basic_get(queue)[0]
        assert first is not None
        other.start(xid)
        second = channel.basic_get(queue)[0]
        assert second is not None
        channel.basic_ack(second.delivery_tag)
        other.end(xid)
        assert other.prepare(xid) is XaFlag.OK
        assert other.rollback(xid) is XaFlag.OK
        channel.basic_nack(first.delivery_tag)
        wait_until(lambda: rabbitmq.count(queue) == 2, what="both being back")
        assert sorted(bodies(rabbitmq, queue)) == [b"of guest", b"of nobody"]
