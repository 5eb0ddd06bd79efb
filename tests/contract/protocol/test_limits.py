"""Work that cannot be part of a branch, and the limits of a branch."""

import struct
from collections.abc import Callable

import pika
import pytest

from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.methods import DtxCommit, DtxEnd, DtxPrepare, DtxRollback, DtxSelect, DtxStart
from dtx.xa.codes import XaFlag
from dtx.xa.xid import Xid
from tests.support.broker import Broker, only_alongside, only_standalone
from tests.support.client import bodies
from tests.support.processes import wait_until
from tests.support.raw import RawClient, Refusal

MESSAGES = 20
MESSAGE_BYTES = 512 * 1024


def check(refusal: Refusal, code: int, words: str, key: int = methods.BasicPublish.KEY) -> None:
    """Check the code, the refused method and the text."""
    assert (refusal.code, refusal.class_id, refusal.method_id) == (code, key >> 16, key & 0xFFFF)
    assert words in refusal.text


def tx_select(_queue: str) -> bytes:
    return methods.TxSelect().encode()


def confirm_select(_queue: str) -> bytes:
    return methods.ConfirmSelect().encode()


def get(queue: str) -> bytes:
    return methods.BasicGet(queue.encode()).encode()


def consume(queue: str) -> bytes:
    return methods.BasicConsume(queue.encode(), b"tag").encode()


@pytest.mark.parametrize("before", [tx_select, confirm_select])
def test_select_is_refused_on_a_channel_with_another_mode(raw: RawClient, before: Callable[[str], bytes]) -> None:
    raw.say(2, before(""))
    raw.next_method(2)
    check(raw.refusal(2, DtxSelect()), 406, "select on a channel", 101 << 16 | 10)


@only_standalone
def test_deliveries_before_select_can_be_part_of_a_branch(raw: RawClient, broker: Broker, queue: str, xid: Xid) -> None:
    """In standalone mode a delivery before select can be acknowledged in a branch."""
    raw.publish(3, queue)
    wait_until(lambda: broker.count(queue) == 1, what="a message")
    tag = raw.get(2, queue)
    assert tag is not None
    raw.ask(2, DtxSelect())
    raw.ask(2, DtxStart(xid=xid))
    raw.say(2, methods.BasicAck(tag).encode())
    assert raw.ask(2, DtxEnd(xid=xid)) is XaFlag.OK
    assert raw.ask(1, DtxCommit(xid=xid, one_phase=True)) is XaFlag.OK
    raw.close_channel(2)
    assert bodies(broker, queue) == []


@only_alongside
@pytest.mark.parametrize("before", [get, consume])
def test_select_is_refused_on_a_channel_with_deliveries(
    raw: RawClient, broker: Broker, queue: str, before: Callable[[str], bytes]
) -> None:
    if before is get:
        raw.publish(3, queue)
        wait_until(lambda: broker.count(queue) == 1, what="a message")
    raw.say(2, before(queue))
    raw.next_method(2)
    check(raw.refusal(2, DtxSelect()), 406, "select on a channel", 101 << 16 | 10)


@pytest.mark.parametrize(
    "other", [methods.TxSelect().encode(), methods.ConfirmSelect().encode(), methods.TxCommit().encode()]
)
def test_a_selected_channel_takes_no_other_mode(raw: RawClient, other: bytes) -> None:
    key = int.from_bytes(other[:4], "big")
    check(raw.refusal_of(1, other), 406, "selected for distributed transactions", key)


@pytest.mark.parametrize("how", ["reply-to", "target"])
def test_direct_reply_to_cannot_be_part_of_a_branch(raw: RawClient, queue: str, xid: Xid, how: str) -> None:
    """A reply is bound to a connection, which may be closed when the branch commits."""
    raw.ask(1, DtxStart(xid=xid))
    if how == "target":
        raw.publish(1, "amq.rabbitmq.reply-to.g1h2AA5yZXBseUAx.abc")
    else:
        raw.publish(1, queue, properties=b"".join(pika.BasicProperties(reply_to="amq.rabbitmq.reply-to").encode()))
    check(raw.refused(1), 540, "direct reply-to")
    assert raw.ask(2, DtxPrepare(xid=xid)) is XaFlag.RBROLLBACK


@only_alongside
def test_deliveries_of_a_stream_cannot_be_part_of_a_branch(
    raw: RawClient, broker: Broker, queue: str, xid: Xid
) -> None:
    """A stream keeps acknowledged messages: there is nothing to consume or to put back."""
    stream = f"{queue}-stream"
    with broker.channel() as channel:
        channel.queue_declare(stream, durable=True, arguments={"x-queue-type": "stream"})
        channel.confirm_delivery()
        channel.basic_publish("", stream, b"one")
    raw.say(1, methods.BasicQos(0, 1).encode())
    raw.read_method(1, methods.BasicQosOk.KEY)
    first = b"\x0fx-stream-offsetS" + struct.pack(">I", 5) + b"first"
    raw.say(1, methods.BasicConsume(stream.encode(), b"tag", arguments=first).encode())
    raw.read_method(1, methods.BasicConsumeOk.KEY)
    tag = struct.unpack_from(">Q", raw.read_method(1, methods.BasicDeliver.KEY), 8)[0]
    raw.ask(1, DtxStart(xid=xid))
    check(raw.refusal_of(1, methods.BasicAck(tag).encode()), 540, "stream", methods.BasicAck.KEY)
    assert raw.ask(2, DtxPrepare(xid=xid)) is XaFlag.RBROLLBACK
    with broker.channel() as channel:
        channel.queue_delete(stream)


def test_a_message_has_a_largest_size(raw: RawClient, broker: Broker, queue: str, xid: Xid) -> None:
    """As with the broker's max_message_size: 406, decided by the header before the body arrives."""
    raw.ask(1, DtxStart(xid=xid))
    raw.publish(1, queue, bytes(MESSAGE_BYTES))
    assert raw.ask(1, DtxEnd(xid=xid)) is XaFlag.OK
    assert raw.ask(1, DtxRollback(xid=xid)) is XaFlag.OK
    raw.ask(1, DtxStart(xid=xid))
    raw.publish(1, queue, bytes(MESSAGE_BYTES + 1))
    check(raw.refused(1), 406, f"larger than configured max size {MESSAGE_BYTES}")
    assert raw.ask(2, DtxPrepare(xid=xid)) is XaFlag.RBROLLBACK
    assert bodies(broker, queue) == []


def test_a_branch_has_a_largest_number_of_messages(raw: RawClient, broker: Broker, queue: str, xid: Xid) -> None:
    """Above the limit the branch is rollback-only and the channel is closed with 506."""
    raw.ask(1, DtxStart(xid=xid))
    for _ in range(MESSAGES):
        raw.publish(1, queue)
    assert raw.ask(1, DtxEnd(xid=xid)) is XaFlag.OK
    raw.ask(1, DtxStart(xid=xid, join=True))
    raw.publish(1, queue)
    check(raw.refused(1), 506, "limits of a branch exceeded")
    assert raw.ask(2, DtxCommit(xid=xid, one_phase=True)) is XaFlag.RBROLLBACK
    assert bodies(broker, queue) == []


def test_a_branch_has_a_largest_number_of_bytes(raw: RawClient, broker: Broker, queue: str, xid: Xid) -> None:
    raw.ask(1, DtxStart(xid=xid))
    raw.publish(1, queue, bytes(MESSAGE_BYTES))
    raw.publish(1, queue, bytes(MESSAGE_BYTES - 1024))
    raw.publish(1, queue, bytes(2048))
    check(raw.refused(1), 506, "limits of a branch exceeded")
    assert raw.ask(2, DtxPrepare(xid=xid)) is XaFlag.RBROLLBACK
    assert bodies(broker, queue) == []


@pytest.mark.parametrize("multiple", [True, False])
def test_consumed_messages_count_too_and_are_back_afterwards(
    raw: RawClient, broker: Broker, queue: str, xid: Xid, multiple: bool
) -> None:
    """One ack with multiple counts all messages that it covers."""
    count = MESSAGES + 1
    with broker.channel() as channel:
        for number in range(count):
            channel.basic_publish("", queue, str(number).encode())
    raw.ask(1, DtxStart(xid=xid))
    for _ in range(count):
        assert raw.get(1, queue) is not None
    if multiple:
        raw.say(1, methods.BasicAck(0, multiple=True).encode())
    else:
        raw.say(1, *(methods.BasicAck(tag).encode() for tag in range(1, count + 1)))
    check(raw.refused(1), 506, "limits of a branch exceeded", methods.BasicAck.KEY)
    assert raw.ask(2, DtxPrepare(xid=xid)) is XaFlag.RBROLLBACK
    raw.close_channel(1)
    assert sorted(bodies(broker, queue), key=int) == [str(number).encode() for number in range(count)]


@only_alongside
def test_a_delivery_too_large_to_keep_cannot_be_consumed(raw: RawClient, broker: Broker, queue: str, xid: Xid) -> None:
    """Each channel keeps a limited number of bytes; the refusal names the option."""
    with broker.channel() as channel:
        for _ in range(9):
            channel.basic_publish("", queue, bytes(30 * 1024))
    tags = [raw.get(1, queue) for _ in range(9)]
    raw.ask(1, DtxStart(xid=xid))
    assert tags[0] is not None
    raw.say(1, methods.BasicAck(tags[0]).encode())
    raw.ask(1, DtxEnd(xid=xid))
    assert raw.ask(2, DtxPrepare(xid=xid)) is XaFlag.OK
    assert raw.ask(2, DtxCommit(xid=xid)) is XaFlag.OK
    raw.ask(1, DtxStart(xid=xid))
    assert tags[8] is not None
    check(raw.refusal_of(1, methods.BasicAck(tags[8]).encode()), 506, "--max-kept-bytes", methods.BasicAck.KEY)
    assert raw.ask(2, DtxPrepare(xid=xid)) is XaFlag.RBROLLBACK


def test_an_unknown_delivery_tag_is_refused_as_by_the_broker(raw: RawClient, queue: str, xid: Xid) -> None:
    """An ack within a branch of a tag that was never delivered is refused."""
    raw.publish(1, queue)
    raw.ask(1, DtxStart(xid=xid))
    raw.consume_one(1, queue)
    check(raw.refusal_of(1, methods.BasicAck(99).encode()), 406, "unknown delivery tag 99", methods.BasicAck.KEY)
    assert raw.ask(2, DtxPrepare(xid=xid)) is XaFlag.RBROLLBACK


@pytest.mark.parametrize("multiple", [False, True], ids=["alone", "multiple"])
@pytest.mark.parametrize("within", [False, True], ids=["outside", "within"])
def test_a_delivery_is_settled_once(
    raw: RawClient, broker: Broker, queue: str, xid: Xid, within: bool, multiple: bool
) -> None:
    """RabbitMQ refuses a tag that is settled already, also with multiple."""
    raw.publish(3, queue)
    raw.publish(3, queue)
    wait_until(lambda: broker.count(queue) == 2, what="two messages")
    earlier, later = raw.get(1, queue), raw.get(1, queue)
    assert earlier is not None
    assert later is not None
    if within:
        raw.ask(1, DtxStart(xid=xid))
    raw.say(1, methods.BasicAck(later).encode())
    check(
        raw.refusal_of(1, methods.BasicAck(later, multiple).encode()),
        406,
        f"unknown delivery tag {later}",
        methods.BasicAck.KEY,
    )
