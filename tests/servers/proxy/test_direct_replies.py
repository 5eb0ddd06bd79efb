"""Direct reply-to on a selected channel outside a branch: the channel that asks receives the reply."""

from collections.abc import Iterator

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.exceptions import ChannelClosedByBroker

from dtx.client import XAResource
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.frames import BODY, header_frame
from dtx.wire.amqp09.methods import DtxEnd, DtxEndOk, DtxSelect, DtxStart
from dtx.xa.codes import XaFlag
from tests.servers.proxy.channels import select
from tests.support.client import bodies, connected, new_xid
from tests.support.processes import wait_until
from tests.support.rabbitmq import RabbitNode
from tests.support.raw import RawClient, body_frames, logged_in
from tests.support.service import DtxService

REPLY_TO = "amq.rabbitmq.reply-to"
ASKING = pika.BasicProperties(reply_to=REPLY_TO)
WANTS_REPLY = b"".join(ASKING.encode())


@pytest.fixture
def replies(selected: BlockingChannel) -> list[bytes]:
    """The replies that ``selected`` has received."""
    got: list[bytes] = []
    selected.basic_consume(REPLY_TO, lambda *call: got.append(call[3]), auto_ack=True)
    return got


@pytest.fixture
def answering(service: DtxService, rabbitmq: RabbitNode, queue: str) -> Iterator[BlockingConnection]:
    """A connection that answers the messages of ``queue``, also on a selected channel."""
    with connected(service.url()) as connection:
        channel = select(connection)

        def answer(_channel: object, method: object, properties: pika.BasicProperties, body: bytes) -> None:
            assert properties.reply_to is not None
            channel.basic_publish("", properties.reply_to, b"answer to " + body)

        channel.basic_consume(queue, answer, auto_ack=True)
        yield connection


def test_questions_are_answered(
    through: BlockingConnection,
    selected: BlockingChannel,
    answering: BlockingConnection,
    replies: list[bytes],
    queue: str,
) -> None:
    questions = [b"%d" % number for number in range(50)] + [bytes(300_000)]
    for question in questions:
        selected.basic_publish("", queue, question, ASKING)

    def answered() -> bool:
        answering.process_data_events(0.02)
        through.process_data_events(0.02)
        return len(replies) == len(questions)

    wait_until(answered, what="all answers")
    assert replies == [b"answer to " + question for question in questions]


def test_questions_and_other_messages_keep_their_order(
    selected: BlockingChannel, replies: list[bytes], queue: str, rabbitmq: RabbitNode
) -> None:
    """Section 4.7 of AMQP 0-9-1: the order of messages on one channel through one exchange to one queue."""
    named = pika.BasicProperties(headers={"about": REPLY_TO})
    for number in range(30):
        selected.basic_publish("", queue, b"%d" % number, (ASKING, None, named)[number % 3])
    assert selected.basic_get(queue, auto_ack=True)[2] == b"0"
    selected.close()
    assert bodies(rabbitmq, queue) == [b"%d" % number for number in range(1, 30)]


def test_a_request_without_a_receiver_is_returned(
    through: BlockingConnection, selected: BlockingChannel, replies: list[bytes]
) -> None:
    returned: list[bytes] = []
    selected.add_on_return_callback(lambda *call: returned.append(call[3]))
    selected.basic_publish("", "nowhere", b"body", ASKING, mandatory=True)
    wait_until(lambda: through.process_data_events(0.05) or returned, what="a return")
    assert returned == [b"body"]


def test_a_request_before_a_reply_consumer_is_refused_as_usual(
    through: BlockingConnection, selected: BlockingChannel, queue: str
) -> None:
    selected.basic_publish("", queue, b"question", ASKING)
    with pytest.raises(ChannelClosedByBroker) as raised:
        selected.queue_declare(queue, passive=True)
    assert raised.value.reply_code == 406
    assert select(through).is_open


def test_after_the_reply_consumer_publishes_go_their_usual_way(
    selected: BlockingChannel, queue: str, rabbitmq: RabbitNode
) -> None:
    consumer = selected.basic_consume(REPLY_TO, lambda *_: None, auto_ack=True)
    selected.basic_publish("", queue, b"question", ASKING)
    selected.basic_cancel(consumer)
    selected.basic_publish("", queue, b"other")
    selected.close()
    assert bodies(rabbitmq, queue) == [b"question", b"other"]


def test_a_question_to_a_missing_exchange_costs_its_channel_alone(
    through: BlockingConnection, selected: BlockingChannel, replies: list[bytes]
) -> None:
    selected.basic_publish("no such exchange", "key", b"question", ASKING)
    with pytest.raises(ChannelClosedByBroker) as raised:
        selected.queue_declare("any", passive=True)
    assert raised.value.reply_code == 404
    assert select(through).is_open


def question(channel: int, queue: str, body: bytes, properties: bytes = WANTS_REPLY) -> bytes:
    parts = (
        methods.BasicPublish(b"", queue.encode()).frame(channel),
        header_frame(channel, 60, len(body), properties),
        *body_frames(channel, body, 1024),
    )
    return b"".join(parts)


def waiting_for_replies(peer: RawClient) -> None:
    peer.say(1, DtxSelect().encode(), methods.BasicConsume(REPLY_TO.encode(), b"tag", no_ack=True).encode())
    peer.wait(methods.BasicConsumeOk.KEY)


def test_questions_count_when_a_close_comes_behind_them(
    service: DtxService, queue: str, filled: str, rabbitmq: RabbitNode
) -> None:
    """With and without a branch that keeps the connection; alone or after another publish."""
    with rabbitmq.channel() as control:
        target = control.queue_declare(f"{queue}-target", durable=True).method.queue
    expected: list[bytes] = []
    for number, (close_of, branch) in enumerate([(0, True), (1, True), (0, False), (1, False)] * 2):
        row = methods.ChannelClose if close_of else methods.ConnectionClose
        xid, body = new_xid(), b"%d" % number
        with logged_in(service.url()) as peer:
            waiting_for_replies(peer)
            if branch:
                peer.say(1, methods.BasicGet(filled.encode()).encode())
                peer.wait(methods.BasicGetOk.KEY)
                peer.say(1, DtxStart(xid=xid).encode(), methods.BasicAck(1).encode(), DtxEnd(xid=xid).encode())
                peer.wait(DtxEndOk.KEY)
            before = question(1, target, b"before", b"\x00\x00") if number < 4 else b""
            close = row(200, b"bye").frame(close_of)
            peer.send_raw(before, question(1, target, body * 3000), close)
            peer.wait(methods.ChannelCloseOk.KEY, methods.ConnectionCloseOk.KEY)
            expected += ([b"before"] if before else []) + [body * 3000]
            assert rabbitmq.count(target) == len(expected)
        if branch:
            with connected(service.url()) as connection:
                assert XAResource(connection.channel()).rollback(xid) == XaFlag.OK
    assert bodies(rabbitmq, target) == expected
    with rabbitmq.channel() as control:
        control.queue_delete(target)


def test_an_incomplete_request_harms_no_client(service: DtxService, queue: str, rabbitmq: RabbitNode) -> None:
    """Content that is missing, incomplete, sent twice or without its header."""
    whole = question(1, queue, b"question")
    header = header_frame(1, 60, 8, WANTS_REPLY)
    method = methods.BasicPublish(b"", queue.encode()).frame(1)
    for data in (method, method + header, method + header * 2, method + method, method + body_frames(1, b"x", 0)[0]):
        with logged_in(service.url()) as peer:
            waiting_for_replies(peer)
            peer.send_raw(data)
    assert rabbitmq.count(queue) == 0
    with logged_in(service.url()) as peer:
        waiting_for_replies(peer)
        peer.send_raw(whole)
        wait_until(lambda: rabbitmq.count(queue) == 1, what="the question")
        peer.say(1, methods.BasicGet(queue.encode(), no_ack=True).encode())
        assert peer.wait(BODY).payload == b"question"
