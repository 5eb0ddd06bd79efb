"""The broker accepts headers that are nested deeper than dtx reads. Messages with them are not lost."""

from collections.abc import Callable
from typing import Any

import pika
import pytest

from dtx.client import XAResource
from dtx.wire.amqp09.tables import MAX_DEPTH
from tests.conftest import ServiceFactory
from tests.servers.alongside.refusals import is_not_consumed
from tests.support.client import bodies, connected, fresh_queue, new_xid
from tests.support.processes import wait_until
from tests.support.proxy import Proxy
from tests.support.rabbitmq import RabbitNode
from tests.support.service import DtxService


def deep() -> dict[str, Any]:
    """Nested tables, two levels deeper than dtx reads."""
    headers: dict[str, Any] = {"end": 1}
    for _ in range(MAX_DEPTH + 2):
        headers = {"in": headers}
    return headers


@pytest.fixture
def service(dtx_service: ServiceFactory) -> DtxService:
    return dtx_service()


def put(rabbitmq: RabbitNode, queue: str) -> None:
    """Publish a message with such headers and then a plain one, directly to the broker."""
    with rabbitmq.channel() as channel:
        channel.confirm_delivery()
        channel.basic_publish("", queue, b"deep", pika.BasicProperties(headers=deep(), delivery_mode=2))
        channel.basic_publish("", queue, b"plain", pika.BasicProperties(delivery_mode=2))


def test_unacknowledged_deliveries_of_a_disconnected_client_return_to_their_queue(
    service: DtxService, rabbitmq: RabbitNode, proxy: Callable[[str, int], Proxy]
) -> None:
    network = proxy(service.host, service.port)
    url = service.url().replace(f":{service.port}", f":{network.port}")
    with fresh_queue(rabbitmq) as queue:
        put(rabbitmq, queue)
        with connected(url) as connection:
            channel = connection.channel()
            xa, other = XAResource(channel), XAResource(connection.channel())
            xa.select()
            first = new_xid()
            other.start(first)
            assert [channel.basic_get(queue)[2] for _ in range(2)] == [b"deep", b"plain"]
            network.cut()
        wait_until(lambda: rabbitmq.count(queue) == 2, what="both messages being back")
        assert bodies(rabbitmq, queue) == [b"deep", b"plain"]
        with connected(service.url()) as connection:
            coordinator = XAResource(connection.channel())
            coordinator.rollback(first)  # 503 if its channel were still associated


def test_a_deeply_nested_message_can_only_be_consumed_outside_branches(
    service: DtxService, rabbitmq: RabbitNode
) -> None:
    """After a rollback of the branch, dtx could not put it back."""
    with fresh_queue(rabbitmq) as queue:
        put(rabbitmq, queue)
        with connected(service.url()) as connection:
            xid = is_not_consumed(connection, queue, code=506, match="cannot be put back")
            XAResource(connection.channel()).rollback(xid)
            wait_until(lambda: rabbitmq.count(queue) == 2, what="the message being back")
            again = connection.channel()
            XAResource(again).select()
            method, _, body = again.basic_get(queue)
            assert (method is not None, body) == (True, b"deep")
            again.basic_ack(method.delivery_tag)
            again.close()
        assert bodies(rabbitmq, queue) == [b"plain"]
