"""Direct reply-to works the same in RabbitMQ and in standalone mode."""

from collections.abc import Iterator

import pytest

from dtx.wire.amqp09 import content, methods, properties
from dtx.wire.amqp09.frames import HEADER
from dtx.wire.amqp09.properties import Property
from tests.support.raw import RawClient, message, session
from tests.support.raw_calls import (
    ask,
    code_of_end,
    confirmed,
    consume,
    declare,
    get,
    next_delivery,
    publish,
)
from tests.support.service import DtxService

REPLY_TO = b"amq.rabbitmq.reply-to"
ASKING = properties.build({Property.REPLY_TO: REPLY_TO, Property.CORRELATION_ID: b"7"})
MANDATORY = 1


@pytest.fixture
def asker(either_url: str) -> Iterator[RawClient]:
    """A client whose channel 1 waits for replies."""
    with session(either_url) as client:
        client.open(1)
        consume(client, REPLY_TO, b"replies", no_ack=True)
        yield client


@pytest.fixture
def answerer(either_url: str) -> Iterator[RawClient]:
    """Another client, which answers questions."""
    with session(either_url) as client:
        client.open(1)
        yield client


def question(asker: RawClient, answerer: RawClient) -> bytes:
    """Ask a question; return the reply address that *answerer* receives."""
    queue = declare(answerer).queue
    ask(asker, 1, methods.ConfirmSelect().encode(), methods.ConfirmSelectOk.KEY)
    publish(asker, queue, b"question", properties=ASKING)
    confirmed(asker, 1)
    answerer.say(1, methods.BasicGet(queue, no_ack=True).encode())
    answerer.read_method(1, methods.BasicGetOk.KEY)
    header = answerer.read()
    assert header.key == HEADER
    view = properties.read(content.header(header.payload).properties)
    assert view.correlation_id == b"7"
    assert answerer.read().payload == b"question"
    ask(answerer, 1, methods.QueueDelete(queue).encode(), methods.QueueDeleteOk.KEY)
    address = view.reply_to
    assert address is not None
    assert address.startswith(REPLY_TO + b".")
    return address


def test_a_reply_comes_to_the_channel_that_asked(asker: RawClient, answerer: RawClient) -> None:
    address = question(asker, answerer)
    publish(answerer, address, b"one", bytes(300_000), properties=properties.build({Property.CORRELATION_ID: b"7"}))
    for body in (b"one", bytes(300_000)):
        method, found = next_delivery(asker)
        assert (method.consumer_tag, method.redelivered) == (b"replies", False)
        assert (method.exchange, method.routing_key, found) == (b"", address, body)


def test_a_reply_is_not_a_routed_message(asker: RawClient, answerer: RawClient) -> None:
    """Direct Reply-to: "amq.rabbitmq.reply-to.* is treated as not a queue … a basic.return will be sent"."""
    address = question(asker, answerer)
    ask(answerer, 1, methods.ConfirmSelect().encode(), methods.ConfirmSelectOk.KEY)
    publish(answerer, address, b"reply", flags=MANDATORY)
    assert methods.BasicReturn.decode(answerer.read_method(1)) == (methods.BasicReturn(312, b"NO_ROUTE", b"", address))
    assert answerer.read_content(1) == b"reply"
    confirmed(answerer, 1)
    assert next_delivery(asker)[1] == b"reply"


def test_a_reply_to_a_lost_client_is_dropped(asker: RawClient, answerer: RawClient) -> None:
    """Direct Reply-to: "the RPC server can check whether a reply queue is still there by declaring it passively"."""
    address = question(asker, answerer)
    assert declare(answerer, address, passive=True) == methods.QueueDeclareOk(address, 0, 1)
    ask(asker, 1, methods.BasicCancel(b"replies").encode(), methods.BasicCancelOk.KEY)
    consume(asker, REPLY_TO, b"replies", no_ack=True)
    asker.close_channel(1)
    refusal = answerer.refusal_of(1, methods.QueueDeclare(address, passive=True).encode())
    assert refusal.code == 404
    ask(answerer, 1, methods.ConfirmSelect().encode(), methods.ConfirmSelectOk.KEY)
    publish(answerer, address, b"reply")
    confirmed(answerer, 1)


def test_a_reply_of_a_transaction_comes_with_it(asker: RawClient, answerer: RawClient) -> None:
    address = question(asker, answerer)
    ask(answerer, 1, methods.TxSelect().encode(), methods.TxSelectOk.KEY)
    publish(answerer, address, b"reply")
    ask(answerer, 1, methods.TxCommit().encode(), methods.TxCommitOk.KEY)
    assert next_delivery(asker)[1] == b"reply"


def test_the_pseudo_queue_may_be_declared(answerer: RawClient) -> None:
    assert declare(answerer, REPLY_TO) == methods.QueueDeclareOk(REPLY_TO, 0, 1)
    assert declare(answerer, REPLY_TO, passive=True) == methods.QueueDeclareOk(REPLY_TO, 0, 1)


def test_a_client_without_a_reply_consumer_cannot_request_replies(answerer: RawClient) -> None:
    publish(answerer, b"anywhere", b"question", properties=ASKING)
    refusal = answerer.refused(1)
    assert (refusal.code, refusal.text) == (406, "PRECONDITION_FAILED - fast reply consumer does not exist")


def test_a_cancelled_reply_consumer_gets_no_replies(asker: RawClient) -> None:
    ask(asker, 1, methods.BasicCancel(b"replies").encode(), methods.BasicCancelOk.KEY)
    publish(asker, b"anywhere", b"question", properties=ASKING)
    assert asker.refused(1).code == 406


def test_replies_are_not_acknowledged(answerer: RawClient) -> None:
    refusal = answerer.refusal_of(1, methods.BasicConsume(REPLY_TO, b"tag").encode())
    assert (refusal.code, refusal.text) == (406, "PRECONDITION_FAILED - reply consumer cannot acknowledge")


def test_a_channel_has_one_consumer_of_replies(asker: RawClient) -> None:
    refusal = asker.refusal_of(1, methods.BasicConsume(REPLY_TO, b"another", no_ack=True).encode())
    assert (refusal.code, refusal.text) == (406, "PRECONDITION_FAILED - reply consumer already set")


def test_its_tag_is_used_once(standalone_service: DtxService) -> None:
    """basic.consume: "The client MUST NOT specify a tag that refers to an existing consumer"; RabbitMQ allows it."""
    with session(standalone_service.url()) as asker:
        asker.open(1)
        consume(asker, REPLY_TO, b"replies", no_ack=True)
        assert (
            code_of_end(asker, methods.BasicConsume(declare(asker, exclusive=True).queue, b"replies").encode()) == 530
        )


def test_the_pseudo_queue_cannot_be_asked_for_a_message(asker: RawClient) -> None:
    assert asker.refusal_of(1, methods.BasicGet(REPLY_TO).encode()).code == 404


def test_an_invented_reply_address_reaches_no_client(asker: RawClient, answerer: RawClient) -> None:
    queue = declare(answerer).queue
    answerer.send_raw(message(1, REPLY_TO + b".made-up") + message(1, queue))
    assert get(answerer, queue) is not None
    ask(answerer, 1, methods.QueueDelete(queue).encode(), methods.QueueDeleteOk.KEY)
