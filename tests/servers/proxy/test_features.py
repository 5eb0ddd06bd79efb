"""Everything that an AMQP 0-9-1 client can do with the broker works through dtx: each test runs against both."""

import secrets
import threading
from collections.abc import Callable
from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.exceptions import ChannelClosedByBroker, ConnectionClosedByBroker, NackError, UnroutableError

from tests.support.client import connected
from tests.support.processes import wait_until
from tests.support.rabbitmq import RabbitNode


def take(channel: BlockingChannel, queue: str) -> list[bytes]:
    """Take all ready messages of *queue*; return their bodies."""
    taken = []
    while (got := channel.basic_get(queue, auto_ack=True))[0] is not None:
        taken.append(got[2])
    return taken


def temporary(channel: BlockingChannel, **arguments: Any) -> str:
    """A server-named exclusive queue."""
    name = channel.queue_declare("", exclusive=True, **arguments).method.queue
    assert isinstance(name, str)
    return name


def until(connection: BlockingConnection, condition: Callable[[], object]) -> None:
    """Process events until *condition* holds."""
    for _ in range(200):
        if condition():
            return
        connection.process_data_events(time_limit=0.1)
    raise AssertionError("the condition did not hold within 200 rounds")


def test_a_published_message_is_confirmed(channel: BlockingChannel) -> None:
    queue = temporary(channel)
    channel.confirm_delivery()
    for number in range(20):
        channel.basic_publish("", queue, b"%d" % number, mandatory=True)
    assert take(channel, queue) == [b"%d" % number for number in range(20)]


def test_a_refused_message_is_nacked(channel: BlockingChannel) -> None:
    queue = temporary(channel, arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    channel.confirm_delivery()
    channel.basic_publish("", queue, b"fits")
    with pytest.raises(NackError):
        channel.basic_publish("", queue, b"does not fit")


def test_an_unroutable_mandatory_message_comes_back_with_its_properties(channel: BlockingChannel) -> None:
    channel.confirm_delivery()
    with pytest.raises(UnroutableError) as raised:
        channel.basic_publish("", "nowhere", b"body", pika.BasicProperties(headers={"a": 1}), mandatory=True)
    (message,) = raised.value.messages
    assert (message.method.reply_code, message.body, message.properties.headers) == (312, b"body", {"a": 1})


def test_a_local_transaction_commits_and_rolls_back(channel: BlockingChannel) -> None:
    queue = temporary(channel)
    channel.tx_select()
    channel.basic_publish("", queue, b"rolled back")
    channel.tx_rollback()
    channel.basic_publish("", queue, b"committed")
    channel.tx_commit()
    assert take(channel, queue) == [b"committed"]


def test_exchanges_are_bound_to_exchanges(channel: BlockingChannel) -> None:
    queue = temporary(channel)
    source, target = f"source-{queue}", f"target-{queue}"
    channel.exchange_declare(source, "topic", auto_delete=True)
    channel.exchange_declare(target, "fanout")
    channel.exchange_bind(target, source, "a.#")
    channel.queue_bind(queue, target)
    channel.basic_publish(source, "a.b", b"routed")
    channel.basic_publish(source, "b.a", b"not routed")
    assert take(channel, queue) == [b"routed"]
    channel.exchange_unbind(target, source, "a.#")
    channel.exchange_delete(target)


def test_a_headers_exchange_routes_by_headers(channel: BlockingChannel) -> None:
    queue = temporary(channel)
    channel.queue_bind(queue, "amq.headers", arguments={"x-match": "all", "kind": queue, "size": 3})
    for size in (3, 4):
        properties = pika.BasicProperties(headers={"kind": queue, "size": size})
        channel.basic_publish("amq.headers", "", b"%d" % size, properties)
    assert take(channel, queue) == [b"3"]


def test_a_consumer_is_notified_of_its_deleted_queue(connection: BlockingConnection, channel: BlockingChannel) -> None:
    queue = channel.queue_declare(f"gone-{secrets.token_hex(4)}").method.queue
    cancelled: list[Any] = []
    channel.add_on_cancel_callback(cancelled.append)
    tag = channel.basic_consume(queue, lambda *_: None)
    connection.channel().queue_delete(queue)
    until(connection, lambda: cancelled)
    assert cancelled[0].method.consumer_tag == tag


def test_a_consumer_can_be_cancelled_and_begun_again(connection: BlockingConnection, channel: BlockingChannel) -> None:
    queue = temporary(channel)
    seen: list[bytes] = []
    for body in (b"1", b"2"):
        tag = channel.basic_consume(queue, lambda *call: seen.append(call[3]), auto_ack=True)
        channel.basic_publish("", queue, body)
        until(connection, lambda: body in seen)  # noqa: B023 - called only in this round
        channel.basic_cancel(tag)
    assert seen == [b"1", b"2"]


def test_urgent_messages_come_first(channel: BlockingChannel) -> None:
    queue = temporary(channel, arguments={"x-max-priority": 5})
    for priority in (1, 5, 3):
        channel.basic_publish("", queue, b"%d" % priority, pika.BasicProperties(priority=priority))
    assert take(channel, queue) == [b"5", b"3", b"1"]


def test_prefetch_limits_unacknowledged_deliveries(connection: BlockingConnection, channel: BlockingChannel) -> None:
    queue = temporary(channel)
    channel.basic_qos(prefetch_count=2)
    for number in range(5):
        channel.basic_publish("", queue, b"%d" % number)
    seen: list[int] = []
    channel.basic_consume(queue, lambda *call: seen.append(call[1].delivery_tag))
    until(connection, lambda: len(seen) >= 2)
    connection.process_data_events(time_limit=0.2)
    assert seen == [1, 2]
    channel.basic_ack(2, multiple=True)
    until(connection, lambda: len(seen) >= 4)
    assert seen == [1, 2, 3, 4]


def test_unacknowledged_messages_are_recovered(channel: BlockingChannel) -> None:
    queue = temporary(channel)
    channel.basic_publish("", queue, b"again")
    assert channel.basic_get(queue)[0].redelivered is False
    channel.basic_recover(requeue=True)
    assert channel.basic_get(queue)[0].redelivered is True


def test_rejected_messages_return_or_are_dropped(channel: BlockingChannel) -> None:
    queue = temporary(channel)
    for number in range(4):
        channel.basic_publish("", queue, b"%d" % number)
    tags = [channel.basic_get(queue)[0].delivery_tag for _ in range(4)]
    channel.basic_reject(tags[0], requeue=False)
    channel.basic_reject(tags[1], requeue=True)
    channel.basic_nack(tags[3], multiple=True, requeue=True)
    assert take(channel, queue) == [b"1", b"2", b"3"]


def test_an_answer_comes_by_direct_reply_to(url: str, connection: BlockingConnection, channel: BlockingChannel) -> None:
    queue = temporary(channel)
    with connected(url) as other:
        asking = other.channel()
        answers: list[bytes] = []
        asking.basic_consume("amq.rabbitmq.reply-to", lambda *call: answers.append(call[3]), auto_ack=True)
        # every connection may publish to an exclusive queue
        asking.basic_publish("", queue, b"question", pika.BasicProperties(reply_to="amq.rabbitmq.reply-to"))
        until(connection, lambda: channel.queue_declare(queue, passive=True).method.message_count)
        _, properties, _ = channel.basic_get(queue, auto_ack=True)
        channel.basic_publish("", properties.reply_to, b"answer")
        until(other, lambda: answers)
    assert answers == [b"answer"]


def test_an_exclusive_queue_is_locked_and_goes_with_its_connection(url: str) -> None:
    with connected(url) as owner, connected(url) as other:
        queue = temporary(owner.channel())
        with pytest.raises(ChannelClosedByBroker) as raised:
            other.channel().queue_declare(queue, passive=True)
        assert raised.value.reply_code == 405
        owner.close()
        with pytest.raises(ChannelClosedByBroker) as raised:
            other.channel().queue_declare(queue, passive=True)
        assert raised.value.reply_code == 404


def test_an_empty_name_is_the_queue_declared_last(connection: BlockingConnection, channel: BlockingChannel) -> None:
    queue = temporary(channel)
    channel.queue_bind("", "amq.direct", queue)
    channel.basic_publish("amq.direct", queue, b"body")
    assert channel.basic_get("", auto_ack=True)[2] == b"body"


def test_flow_is_answered(channel: BlockingChannel) -> None:
    assert channel.flow(active=True) is True


def test_a_channel_exception_leaves_the_others_alone(connection: BlockingConnection, channel: BlockingChannel) -> None:
    broken = connection.channel()
    number = broken.channel_number
    with pytest.raises(ChannelClosedByBroker) as raised:
        broken.queue_declare("no such queue", passive=True)
    assert raised.value.reply_code == 404
    assert channel.is_open
    assert connection.channel(number).queue_declare("", exclusive=True)


def test_a_publish_to_no_exchange_closes_the_channel(channel: BlockingChannel, connection: BlockingConnection) -> None:
    channel.basic_publish("no such exchange", "", b"body")
    until(connection, lambda: channel.is_closed)
    assert connection.channel().is_open


def test_a_connection_error_is_that_of_the_broker(connection: BlockingConnection, channel: BlockingChannel) -> None:
    with pytest.raises(ConnectionClosedByBroker) as raised:
        channel.basic_recover(requeue=False)
    assert raised.value.reply_code == 540


def test_publishers_are_notified_of_a_memory_alarm_and_its_end(url: str, rabbitmq: RabbitNode) -> None:
    parameters = pika.URLParameters(url)
    with connected(url) as consumer:
        queue = consumer.channel().queue_declare("", exclusive=True).method.queue
        heard: list[str] = []
        connection = BlockingConnection(parameters)
        connection.add_on_connection_blocked_callback(lambda _connection, method: heard.append(method.method.reason))
        connection.add_on_connection_unblocked_callback(lambda *_: heard.append("unblocked"))
        channel = connection.channel()
        rabbitmq.memory_alarm(on=True)
        channel.basic_publish("", queue, b"waits")
        until(connection, lambda: heard)
        assert heard == ["low on memory"]
        rabbitmq.memory_alarm(on=False)
        until(connection, lambda: len(heard) > 1)
        until(consumer, lambda: consumer.channel().queue_declare(queue, passive=True).method.message_count)
        connection.close()
    assert heard[1] == "unblocked"


def test_update_secret_is_answered(connection: BlockingConnection) -> None:
    """``guest`` logs in by password; the broker accepts a new secret nevertheless."""
    done = threading.Event()
    connection._impl.update_secret("guest", "renewed", callback=lambda _frame: done.set())
    until(connection, done.is_set)


def test_nothing_is_lost_when_a_connection_closes_behind_its_publishes(
    url: str, queue: str, rabbitmq: RabbitNode
) -> None:
    with connected(url) as connection:
        channel = connection.channel()
        for number in range(3000):
            channel.basic_publish("", queue, b"%d" % number)
    wait_until(lambda: rabbitmq.count(queue) == 3000, what="3,000 messages")
