"""dtx-demarcation.select on a channel that has consumed works if no consumer or unsettled delivery is left."""

from collections.abc import Callable

import pytest
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection

from dtx.client import XAError, XAResource
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.methods import DtxSelect, DtxSelectOk
from dtx.xa.codes import XaFlag
from tests.servers.proxy.channels import get, numbers
from tests.support.client import bodies, new_xid
from tests.support.processes import wait_until
from tests.support.rabbitmq import RabbitNode
from tests.support.raw import logged_in
from tests.support.service import DtxService


@pytest.fixture
def channel(through: BlockingConnection) -> BlockingChannel:
    """A channel of a connection through dtx."""
    return through.channel()


def ack_each(channel: BlockingChannel, tags: list[int]) -> None:
    for tag in tags:
        channel.basic_ack(tag)


def ack_backwards(channel: BlockingChannel, tags: list[int]) -> None:
    ack_each(channel, tags[::-1])


def ack_multiple(channel: BlockingChannel, tags: list[int]) -> None:
    channel.basic_ack(tags[-1], multiple=True)


def ack_all(channel: BlockingChannel, _tags: list[int]) -> None:
    channel.basic_ack(0, multiple=True)


def drop_each(channel: BlockingChannel, tags: list[int]) -> None:
    for tag in tags:
        channel.basic_reject(tag, requeue=False)


def drop_all(channel: BlockingChannel, tags: list[int]) -> None:
    channel.basic_nack(tags[-1], multiple=True, requeue=False)


@pytest.mark.parametrize("settle", [ack_each, ack_backwards, ack_multiple, ack_all, drop_each, drop_all])
@pytest.mark.parametrize("how", ["get", "consumer"])
def test_a_channel_that_has_settled_everything_can_be_selected(
    through: BlockingConnection,
    channel: BlockingChannel,
    filled: str,
    rabbitmq: RabbitNode,
    how: str,
    settle: Callable[[BlockingChannel, list[int]], None],
) -> None:
    """Later deliveries can be part of a branch; delivery tags continue."""
    if how == "get":
        tags = get(channel, filled, 4)
    else:
        tags = []
        channel.basic_qos(prefetch_count=4)
        consumer = channel.basic_consume(filled, lambda *call: tags.append(call[1].delivery_tag))
        wait_until(lambda: through.process_data_events(0.05) or len(tags) == 4, what="four deliveries")
        channel.basic_qos(prefetch_count=1)
        channel.basic_cancel(consumer)
    settle(channel, tags)
    xa, xid = XAResource(channel), new_xid()
    xa.select()
    (tag,) = get(channel, filled)
    assert tag == 5
    xa.start(xid)
    channel.basic_ack(tag)
    xa.end(xid)
    assert xa.prepare(xid) == XaFlag.OK
    assert xa.commit(xid) == XaFlag.OK
    channel.close()
    assert bodies(rabbitmq, filled) == numbers(6)


def test_recovered_deliveries_are_not_open(channel: BlockingChannel, filled: str, rabbitmq: RabbitNode) -> None:
    """basic.recover: "redeliver all unacknowledged messages on a specified channel"."""
    get(channel, filled, 3)
    channel.basic_recover(requeue=True)
    XAResource(channel).select()
    channel.close()
    assert sorted(bodies(rabbitmq, filled)) == numbers(1, 2, 3, 4, 5, 6)


def test_a_channel_that_consumed_without_acks_can_be_selected(
    through: BlockingConnection, channel: BlockingChannel, filled: str
) -> None:
    got: list[bytes] = []
    consumer = channel.basic_consume(filled, lambda *call: got.append(call[3]), auto_ack=True)
    wait_until(lambda: through.process_data_events(0.05) or len(got) == 6, what="six deliveries")
    channel.basic_cancel(consumer)
    channel.basic_get(filled, auto_ack=True)
    XAResource(channel).select()


def test_an_open_consumer_or_delivery_prevents_selecting_the_channel(
    through: BlockingConnection, filled: str, rabbitmq: RabbitNode
) -> None:
    """The channel number can be opened again and selected."""

    def refused(prepare: Callable[[BlockingChannel], object], words: str) -> None:
        channel = through.channel()
        prepare(channel)
        with pytest.raises(XAError, match=words):
            XAResource(channel).select()

    refused(lambda channel: get(channel, filled, 2), "with 2 unacknowledged deliveries: settle them first")
    refused(lambda channel: channel.basic_ack(get(channel, filled, 3)[1]), "with 2 unacknowledged deliveries")
    refused(lambda channel: channel.basic_consume(filled, lambda *_: None), "that has consumers: cancel them first")
    again = through.channel()
    (tag,) = get(again, filled)
    again.basic_ack(tag)
    XAResource(again).select()
    again.close()
    assert len(bodies(rabbitmq, filled)) == 4


def test_a_select_pipelined_behind_consuming(service: DtxService, filled: str, rabbitmq: RabbitNode) -> None:
    """An unanswered basic.get counts as an unsettled delivery; one settled in the same packet does not."""
    select = DtxSelect().encode()
    with logged_in(service.url()) as peer:
        peer.say(1, methods.BasicGet(filled.encode()).encode(), select)
        assert b"not answered yet" in peer.channel_end(1).reply_text
        peer.say(1, methods.ChannelCloseOk().encode())
        wait_until(lambda: rabbitmq.count(filled) == 6, what="the message of the closed channel")  # it may be late
        peer.open(1)
        peer.say(1, methods.BasicGet(filled.encode()).encode(), methods.BasicGet(filled.encode()).encode())
        peer.wait(methods.BasicGetOk.KEY)
        peer.wait(methods.BasicGetOk.KEY)
        peer.say(1, methods.BasicAck(2).encode(), methods.BasicAck(1).encode(), select)
        peer.wait(DtxSelectOk.KEY)
    assert bodies(rabbitmq, filled) == numbers(3, 4, 5, 6)
