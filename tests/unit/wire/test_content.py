"""Methods that move messages: read as pika writes them, written as pika reads them."""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
from pika import amqp_object, frame, spec

from dtx.wire.amqp09 import content, methods, requests
from dtx.wire.amqp09.errors import WireError


def payload(method: amqp_object.Method) -> bytes:
    marshalled: bytes = frame.Method(1, method).marshal()
    return marshalled[7:-1]


READ: list[tuple[Callable[[bytes], Any], amqp_object.Method, object]] = [
    (content.publish, spec.Basic.Publish(exchange="ex", routing_key="key"), (b"ex", b"key", 0)),
    (content.publish, spec.Basic.Publish(routing_key="q", mandatory=True), (b"", b"q", content.MANDATORY)),
    (content.publish, spec.Basic.Publish(immediate=True), (b"", b"", content.IMMEDIATE)),
    (content.deliver, spec.Basic.Deliver("tag", 2**40, True, "ex", "key"), (b"tag", 2**40, True, b"ex", b"key")),
    (content.deliver, spec.Basic.Deliver("", 1, False, "", ""), (b"", 1, False, b"", b"")),
    (content.get_ok, spec.Basic.GetOk(7, True, "ex", "key", 12), (7, True, b"ex", b"key", 12)),
    (content.get_ok, spec.Basic.GetOk(7, False, "", "", 0), (7, False, b"", b"", 0)),
    (content.returned, spec.Basic.Return(312, "NO_ROUTE", "ex", "key"), (312, b"NO_ROUTE", b"ex", b"key")),
    (content.ack, spec.Basic.Ack(3, multiple=True), (3, True, False)),
    (content.ack, spec.Basic.Ack(3), (3, False, False)),
    (content.nack, spec.Basic.Nack(3, multiple=True, requeue=False), (3, True, False)),
    (content.nack, spec.Basic.Nack(3, multiple=False, requeue=True), (3, False, True)),
    (content.reject, spec.Basic.Reject(3, requeue=True), (3, False, True)),
    (content.reject, spec.Basic.Reject(3, requeue=False), (3, False, False)),
    (content.recover, spec.Basic.Recover(requeue=True), True),
    (content.recover, spec.Basic.RecoverAsync(requeue=False), False),
    (
        content.consume,
        spec.Basic.Consume(queue="q", consumer_tag="t", no_local=True, exclusive=True, arguments={"a": None}),
        (b"q", b"t", True, False, True, False, b"\x01aV"),
    ),
    (content.consume, spec.Basic.Consume(no_ack=True, nowait=True), (b"", b"", False, True, False, True, b"")),
    (content.get, spec.Basic.Get(queue="q", no_ack=True), (b"q", True)),
    (content.cancel, spec.Basic.Cancel("t", nowait=False), (b"t", False)),
    (content.consumer_tag, spec.Basic.ConsumeOk("t"), b"t"),
    (content.consumer_tag, spec.Basic.CancelOk("t"), b"t"),
    (content.qos, spec.Basic.Qos(prefetch_size=1, prefetch_count=2, global_qos=True), (1, 2, True)),
    (content.declare_ok, spec.Queue.DeclareOk("q", 5, 6), (b"q", 5, 6)),
    (content.close, spec.Channel.Close(404, "gone", 60, 40), (404, b"gone", methods.BasicPublish.KEY)),
    (content.close, spec.Connection.Close(320, "", 0, 0), (320, b"", 0)),
]


def name_of(value: object) -> str:
    """The same in every process: a function by its name."""
    return value.__name__ if isinstance(value, FunctionType) else repr(value)[:60]


each_read = pytest.mark.parametrize(("read", "method", "expected"), READ, ids=name_of)


@each_read
def test_a_method_is_read_as_bytes(read: Callable[[bytes], Any], method: amqp_object.Method, expected: object) -> None:
    assert read(payload(method)) == expected


@each_read
def test_a_truncated_method_is_a_syntax_error(
    read: Callable[[bytes], Any], method: amqp_object.Method, expected: object
) -> None:
    octets = payload(method)
    for length in range(4, len(octets)):
        with pytest.raises(WireError) as caught:
            read(octets[:length])
        assert caught.value.code == 502


@each_read
def test_a_method_with_something_after_it_is_a_syntax_error(
    read: Callable[[bytes], Any], method: amqp_object.Method, expected: object
) -> None:
    with pytest.raises(WireError, match="too long") as caught:
        read(payload(method) + b"\x00")
    assert caught.value.code == 502


def test_a_name_that_is_no_text_stays_what_it_is() -> None:
    octets = bytes.fromhex("003c0028 0000 02 ff00 03 c328fe 01")
    assert content.publish(octets) == (b"\xff\x00", b"\xc3\x28\xfe", content.MANDATORY)
    assert requests.publish(b"\xff\x00", b"\xc3\x28\xfe", content.MANDATORY) == octets


def test_a_content_header_is_read_without_its_properties() -> None:
    octets = frame.Header(1, 2**33, spec.BasicProperties(priority=3)).marshal()[7:-1]
    assert content.header(octets) == (60, 2**33, b"\x08\x00\x03")


@pytest.mark.parametrize("length", range(14))
def test_a_truncated_content_header_is_a_syntax_error(length: int) -> None:
    with pytest.raises(WireError, match="content header"):
        content.header(frame.Header(1, 1, spec.BasicProperties()).marshal()[7:-1][:length])


WRITTEN: list[tuple[bytes, amqp_object.Method]] = [
    (requests.TX_SELECT, spec.Tx.Select()),
    (requests.TX_COMMIT, spec.Tx.Commit()),
    (requests.TX_ROLLBACK, spec.Tx.Rollback()),
    (requests.CHANNEL_OPEN, spec.Channel.Open()),
    (requests.CHANNEL_CLOSE_OK, spec.Channel.CloseOk()),
    (requests.CONNECTION_CLOSE_OK, spec.Connection.CloseOk()),
    (requests.CONFIRM_SELECT, spec.Confirm.Select()),
    (requests.publish(b"ex", b"key", content.MANDATORY), spec.Basic.Publish(0, "ex", "key", mandatory=True)),
    (requests.publish(b"", b""), spec.Basic.Publish()),
    (requests.deliver(b"t", 9, True, b"ex", b"key"), spec.Basic.Deliver("t", 9, True, "ex", "key")),
    (requests.returned(312, b"NO_ROUTE", b"ex", b"key"), spec.Basic.Return(312, "NO_ROUTE", "ex", "key")),
    (requests.ack(2**63), spec.Basic.Ack(2**63)),
    (requests.ack(1, multiple=True), spec.Basic.Ack(1, multiple=True)),
    (requests.nack(1), spec.Basic.Nack(1)),
    (requests.nack(1, multiple=True, requeue=False), spec.Basic.Nack(1, multiple=True, requeue=False)),
    (requests.reject(1), spec.Basic.Reject(1)),
    (requests.reject(1, requeue=False), spec.Basic.Reject(1, requeue=False)),
    (requests.qos(10, everywhere=True), spec.Basic.Qos(prefetch_count=10, global_qos=True)),
    (requests.consume(b"q", b"t", no_ack=True), spec.Basic.Consume(queue="q", consumer_tag="t", no_ack=True)),
    (
        requests.consume(b"q", b"t", exclusive=True, no_wait=True, arguments=b"\x01aV"),
        spec.Basic.Consume(queue="q", consumer_tag="t", exclusive=True, nowait=True, arguments={"a": None}),
    ),
    (requests.cancel(b"t", no_wait=True), spec.Basic.Cancel("t", nowait=True)),
    (requests.get(b"q", no_ack=True), spec.Basic.Get(queue="q", no_ack=True)),
    (methods.QueueDeclare(b"q", passive=True).encode(), spec.Queue.Declare(queue="q", passive=True)),
    (
        methods.QueueDeclare(
            b"q", durable=True, exclusive=True, auto_delete=True, no_wait=True, arguments=b"\x01aV"
        ).encode(),
        spec.Queue.Declare(
            queue="q", durable=True, exclusive=True, auto_delete=True, nowait=True, arguments={"a": None}
        ),
    ),
    (
        methods.QueueDelete(b"q", if_unused=True, no_wait=True).encode(),
        spec.Queue.Delete(queue="q", if_unused=True, nowait=True),
    ),
    (methods.QueueDelete(b"q", if_empty=True).encode(), spec.Queue.Delete(queue="q", if_empty=True)),
    (methods.QueuePurge(b"q").encode(), spec.Queue.Purge(queue="q")),
    (methods.QueueBind(b"q", b"ex", b"key").encode(), spec.Queue.Bind(queue="q", exchange="ex", routing_key="key")),
    (
        methods.ExchangeDeclare(b"ex", b"fanout", passive=True, durable=True).encode(),
        spec.Exchange.Declare(exchange="ex", type="fanout", passive=True, durable=True),
    ),
    (
        requests.close(methods.ChannelClose.KEY, 406, b"why", methods.BasicAck.KEY),
        spec.Channel.Close(406, "why", 60, 80),
    ),
    (requests.close(methods.ConnectionClose.KEY, 200, b"bye"), spec.Connection.Close(200, "bye", 0, 0)),
]


@pytest.mark.parametrize(("written", "method"), WRITTEN, ids=lambda value: repr(value)[:60])
def test_a_request_is_written_as_pika_writes_it(written: bytes, method: amqp_object.Method) -> None:
    assert written == payload(method)


def test_a_name_longer_than_a_shortstr_is_refused() -> None:
    with pytest.raises(WireError, match="short string of 256 octets"):
        requests.get(bytes(256))
