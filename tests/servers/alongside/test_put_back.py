"""Rollback of a prepared branch that consumed: each message is put back into its own queue only."""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pika
import pytest

from dtx.client import XAResource, Xid
from dtx.xa.codes import XaFlag
from tests.conftest import ServiceFactory
from tests.support.client import connected, new_xid
from tests.support.processes import wait_until
from tests.support.rabbitmq import RabbitNode
from tests.support.service import DtxService

Message = tuple[bytes, pika.BasicProperties, bool]


@dataclass(frozen=True)
class Place:
    """A topic exchange, the queue that is bound to it, and one that gets a copy by CC."""

    exchange: str
    queue: str
    copies: str


@pytest.fixture
def place(rabbitmq: RabbitNode) -> Iterator[Place]:
    """A place with one message in each queue."""
    mark = secrets.token_hex(4)
    place = Place(f"x-{mark}", f"q-{mark}", f"c-{mark}")
    with rabbitmq.channel() as channel:
        channel.exchange_declare(place.exchange, "topic")
        for queue, key in ((place.queue, "a.#"), (place.copies, "copy")):
            channel.queue_declare(queue)
            channel.queue_bind(queue, place.exchange, key)
        headers = {"CC": ["copy"], "mine": 1}
        properties = pika.BasicProperties(message_id="m1", priority=3, timestamp=7, delivery_mode=2, headers=headers)
        channel.confirm_delivery()
        channel.basic_publish(place.exchange, "a.b", b"one", properties)
        yield place
        for queue in (place.queue, place.copies):
            channel.queue_delete(queue)
        channel.exchange_delete(place.exchange)


def put_back(service: DtxService, queue: str) -> Xid:
    """Consume a message in a branch, prepare it, and roll it back."""
    xid = new_xid()
    with connected(service.url()) as connection:
        channel = connection.channel()
        xa = XAResource(channel)
        xa.start(xid)
        method, _, _ = channel.basic_get(queue)
        assert method is not None
        channel.basic_ack(method.delivery_tag)
        xa.end(xid)
        assert xa.prepare(xid) is XaFlag.OK
        assert channel.basic_get(queue)[0] is None
        assert xa.rollback(xid) is XaFlag.OK
    return xid


@pytest.fixture
def retries(rabbitmq: RabbitNode) -> Iterator[str]:
    """A queue whose rejected messages come back after a second, with one message."""
    work, later = (f"{name}-{secrets.token_hex(4)}" for name in ("work", "later"))
    with rabbitmq.channel() as channel:
        for queue, other, more in ((work, later, {}), (later, work, {"x-message-ttl": 1100})):
            arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": other, **more}
            channel.queue_declare(queue, arguments=arguments)
        channel.confirm_delivery()
        channel.basic_publish("", work, b"one")
        yield work
        for queue in (work, later):
            channel.queue_delete(queue)


def test_the_history_of_dead_letters_survives_put_backs(
    dtx_service: ServiceFactory, rabbitmq: RabbitNode, retries: str
) -> None:
    """RabbitMQ 4 begins x-death anew when a message is put back: a retry counter would never reach its limit."""
    service = dtx_service()
    for _ in range(3):
        with rabbitmq.channel() as channel:
            method, _, _ = channel.basic_get(retries)
            assert method is not None
            channel.basic_reject(method.delivery_tag, requeue=False)
        wait_until(lambda: rabbitmq.count(retries) == 1, what="the message to come back")
        put_back(service, retries)
    _, headers = look(rabbitmq, retries)
    counts = {(death["queue"], death["reason"]): death["count"] for death in headers["x-dtx-death"]}
    assert counts[retries, "rejected"] == 3
    assert sorted(counts.values()) == [3, 3]


def look(rabbitmq: RabbitNode, queue: str) -> tuple[pika.BasicProperties, dict[str, Any]]:
    """The only message of *queue*, which stays there."""
    with rabbitmq.channel() as channel:
        method, properties, body = channel.basic_get(queue)
        assert (method is not None, body) == (True, b"one")
        assert channel.basic_get(queue)[0] is None
        channel.basic_nack(method.delivery_tag)
    return properties, dict(properties.headers)


def test_a_message_is_put_back_only_into_its_own_queue(
    dtx_service: ServiceFactory, rabbitmq: RabbitNode, place: Place
) -> None:
    """Design: "CC/BCC renamed so that nobody else gets a copy, original exchange, key and redelivery kept"."""
    put_back(dtx_service(), place.queue)
    properties, headers = look(rabbitmq, place.queue)
    identity = headers.pop("x-dtx-put-back")
    assert headers == {
        "mine": 1,
        "x-dtx-cc": ["copy"],
        "x-dtx-id": identity,
        "x-dtx-original-exchange": place.exchange,
        "x-dtx-original-routing-key": "a.b",
        "x-dtx-redelivered": False,
    }
    assert (properties.message_id, properties.priority, properties.timestamp) == ("m1", 3, 7)
    assert properties.delivery_mode == 2
    copy, untouched = look(rabbitmq, place.copies)
    assert (copy.message_id, untouched) == ("m1", {"CC": ["copy"], "mine": 1})


def test_a_message_put_back_twice_keeps_its_first_headers(
    dtx_service: ServiceFactory, rabbitmq: RabbitNode, place: Place
) -> None:
    """Headers name the first exchange, not the default exchange that put it back. The x-dtx-id is still the same."""
    service = dtx_service()
    put_back(service, place.queue)
    _, first = look(rabbitmq, place.queue)  # from now on the broker marks it as redelivered
    put_back(service, place.queue)
    _, second = look(rabbitmq, place.queue)
    assert first.pop("x-dtx-put-back") != second.pop("x-dtx-put-back")
    assert second == {**first, "x-dtx-redelivered": True}
    look(rabbitmq, place.copies)
