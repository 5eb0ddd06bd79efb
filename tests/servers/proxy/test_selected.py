"""A selected channel outside a branch behaves like any channel; its acknowledgements are not transactional."""

from typing import Any

import pytest
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.exceptions import ChannelClosedByBroker

from dtx.client import XAResource
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.methods import DtxSelect, DtxSelectOk
from tests.servers.proxy.channels import fill, get, get_body, numbers
from tests.support.client import bodies, new_xid
from tests.support.processes import wait_until
from tests.support.rabbitmq import RabbitNode
from tests.support.raw import logged_in, message
from tests.support.service import DtxService


def test_single_acks_take_messages_off_the_queue(
    through: BlockingConnection, selected: BlockingChannel, filled: str, rabbitmq: RabbitNode
) -> None:
    """Select: "Acknowledgements outside of a start/end block are NOT transactional"."""
    tags = get(selected, filled, 4)
    selected.basic_ack(tags[1])
    selected.basic_ack(tags[3])
    selected.close()
    assert bodies(rabbitmq, filled) == numbers(1, 3, 5, 6)


def test_an_empty_queue_name_means_the_one_declared_last(through: BlockingConnection, filled: str) -> None:
    """Queue: "blank: the server uses the last declared queue on the channel"; dtx itself declares none there."""
    channel = through.channel()
    channel.queue_declare(filled, durable=True)
    XAResource(channel).start(new_xid())
    assert get_body(channel, "") == b"1"


def test_multiple_acks_take_all_before_them(selected: BlockingChannel, filled: str, rabbitmq: RabbitNode) -> None:
    tags = get(selected, filled, 5)
    selected.basic_ack(tags[2], multiple=True)
    selected.close()
    assert bodies(rabbitmq, filled) == numbers(4, 5, 6)


def test_an_ack_of_everything(selected: BlockingChannel, filled: str, rabbitmq: RabbitNode) -> None:
    """basic.ack: "If the multiple field is 1, and the delivery tag is zero, this indicates acknowledgement of all
    outstanding messages."
    """
    get(selected, filled, 5)
    selected.basic_ack(0, multiple=True)
    selected.close()
    assert bodies(rabbitmq, filled) == numbers(6)


def test_acks_count_when_the_connection_closes_behind_them(
    through: BlockingConnection, selected: BlockingChannel, filled: str, rabbitmq: RabbitNode
) -> None:
    for tag in get(selected, filled, 5):
        selected.basic_ack(tag)
    through.close()
    wait_until(lambda: rabbitmq.count(filled) == 1, what="one left")
    assert bodies(rabbitmq, filled) == numbers(6)


def test_unacknowledged_messages_return_when_the_channel_closes(
    selected: BlockingChannel, filled: str, rabbitmq: RabbitNode
) -> None:
    get(selected, filled, 6)
    selected.close()
    assert bodies(rabbitmq, filled) == numbers(1, 2, 3, 4, 5, 6)


def test_reject_and_nack_return_or_drop(selected: BlockingChannel, filled: str, rabbitmq: RabbitNode) -> None:
    tags = get(selected, filled, 6)
    selected.basic_reject(tags[0], requeue=False)
    selected.basic_reject(tags[1], requeue=True)
    selected.basic_nack(tags[3], multiple=True, requeue=False)
    selected.basic_nack(tags[4], requeue=True)
    selected.close()
    assert bodies(rabbitmq, filled) == numbers(2, 5, 6)


def test_recover_requeues_unacknowledged_deliveries(selected: BlockingChannel, filled: str) -> None:
    get(selected, filled, 3)
    selected.basic_recover(requeue=True)
    method, _, body = selected.basic_get(filled)
    assert (body, method.redelivered, method.delivery_tag) == (b"1", True, 4)


@pytest.mark.parametrize("settle", ["basic_ack", "basic_nack", "basic_reject"])
def test_an_unknown_delivery_tag_is_refused(
    through: BlockingConnection, selected: BlockingChannel, settle: str
) -> None:
    getattr(selected, settle)(77)
    with pytest.raises(ChannelClosedByBroker) as raised:
        selected.queue_declare("", exclusive=True)
    assert raised.value.reply_code == 406
    assert "77" in raised.value.reply_text
    assert through.channel().is_open


def test_an_ack_twice_is_refused(selected: BlockingChannel, filled: str) -> None:
    (tag,) = get(selected, filled)
    selected.basic_ack(tag)
    selected.basic_ack(tag)
    with pytest.raises(ChannelClosedByBroker) as raised:
        selected.queue_declare("", exclusive=True)
    assert raised.value.reply_code == 406


def test_consumers_get_acknowledge_and_cancel(
    through: BlockingConnection, selected: BlockingChannel, filled: str, rabbitmq: RabbitNode
) -> None:
    seen: list[bytes] = []

    def consumed(channel: BlockingChannel, method: Any, properties: Any, body: bytes) -> None:
        seen.append(body)
        channel.basic_ack(method.delivery_tag)

    selected.basic_qos(prefetch_count=1)
    tag = selected.basic_consume(filled, consumed)
    wait_until(lambda: through.process_data_events(0.05) or len(seen) == 6, what="six deliveries")
    selected.basic_cancel(tag)
    fill(rabbitmq, filled, 1)
    selected.close()
    assert seen == numbers(1, 2, 3, 4, 5, 6)
    assert bodies(rabbitmq, filled) == numbers(1)


def test_a_consumer_without_acks(through: BlockingConnection, selected: BlockingChannel, filled: str) -> None:
    seen: list[bytes] = []
    selected.basic_consume(filled, lambda *call: seen.append(call[3]), auto_ack=True)
    wait_until(lambda: through.process_data_events(0.05) or len(seen) == 6, what="six deliveries")
    assert seen == numbers(1, 2, 3, 4, 5, 6)


def test_a_consumer_is_notified_of_its_deleted_queue(through: BlockingConnection, selected: BlockingChannel) -> None:
    queue = selected.queue_declare("", exclusive=True).method.queue
    cancelled: list[Any] = []
    selected.add_on_cancel_callback(cancelled.append)
    selected.basic_consume(queue, lambda *_: None)
    through.channel().queue_delete(queue)
    wait_until(lambda: through.process_data_events(0.05) or cancelled, what="cancel")


def test_the_queue_declared_last_has_an_empty_name(through: BlockingConnection) -> None:
    channel = through.channel()
    queue = channel.queue_declare("", exclusive=True).method.queue
    XAResource(channel).select()
    channel.queue_bind("", "amq.direct", queue)
    channel.basic_publish("amq.direct", queue, b"body")
    assert get_body(channel, "") == b"body"
    other = channel.queue_declare("", exclusive=True).method.queue
    channel.basic_publish("", other, b"other")
    assert get_body(channel, "") == b"other"


def test_a_published_message_can_be_got_immediately(selected: BlockingChannel) -> None:
    """The methods of a channel run in order, although dtx uses two channels of the broker for it."""
    queue = selected.queue_declare("", exclusive=True).method.queue
    for number in range(200):
        selected.basic_publish("", queue, b"%d" % number)
        assert get_body(selected, queue) == b"%d" % number


def test_a_queue_takes_messages_published_after_its_declaration(service: DtxService) -> None:
    with logged_in(service.url()) as peer:
        peer.say(1, DtxSelect().encode())
        peer.wait(DtxSelectOk.KEY)
        for number in range(100):
            name = b"pipelined-%d" % number
            declare = methods.QueueDeclare(name, exclusive=True).frame(1)
            peer.send_raw(declare, message(1, name, b"body"), methods.BasicGet(name, no_ack=True).frame(1))
            peer.wait(methods.QueueDeclareOk.KEY)
            answer = peer.wait(methods.BasicGetOk.KEY, methods.BasicGetEmpty.KEY)
            assert answer.key == methods.BasicGetOk.KEY, number
