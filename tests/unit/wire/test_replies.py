"""What a server says: frame by frame the octets that pika writes."""

import pytest
from pika import amqp_object, frame, spec

from dtx.wire.amqp09 import methods, replies
from dtx.wire.amqp09.errors import WireError
from tests.support.preview import Binding, Exchange, Execution

WHERE = replies.address(b"ex", b"key")
PROPERTIES = b"\x10\x00\x02"
"""delivery-mode 2, from the property flags on."""

FRAMES: list[tuple[bytes, amqp_object.Method]] = [
    (replies.empty(513, methods.QueueBindOk.KEY), spec.Queue.BindOk()),
    (replies.empty(513, methods.TxCommitOk.KEY), spec.Tx.CommitOk()),
    (replies.empty(513, methods.BasicRecoverOk.KEY), spec.Basic.RecoverOk()),
    (replies.channel_open_ok(513), spec.Channel.OpenOk(b"")),
    (replies.flow_ok(513, active=True), spec.Channel.FlowOk(True)),
    (replies.flow_ok(513, active=False), spec.Channel.FlowOk(False)),
    (replies.ticket_ok(513, 258), spec.Access.RequestOk(258)),
    (replies.queue_declare_ok(513, b"q", 5, 6), spec.Queue.DeclareOk("q", 5, 6)),
    (replies.count_ok(513, methods.QueuePurgeOk.KEY, 7), spec.Queue.PurgeOk(7)),
    (replies.count_ok(513, methods.QueueDeleteOk.KEY, 0), spec.Queue.DeleteOk(0)),
    (replies.consumer_ok(513, methods.BasicConsumeOk.KEY, b"tag"), spec.Basic.ConsumeOk("tag")),
    (replies.consumer_ok(513, methods.BasicCancelOk.KEY, b"tag"), spec.Basic.CancelOk("tag")),
    (replies.cancelled(513, b"tag"), spec.Basic.Cancel("tag", nowait=True)),
    (replies.ack(513, 2**40, multiple=True), spec.Basic.Ack(2**40, multiple=True)),
    (replies.ack(513, 1, multiple=False), spec.Basic.Ack(1, multiple=False)),
    (replies.nack(513, 1, multiple=True), spec.Basic.Nack(1, multiple=True, requeue=False)),
    (replies.get_empty(513), spec.Basic.GetEmpty()),
    (
        replies.binding_query_ok(
            513,
            exchange_not_found=False,
            queue_not_found=True,
            queue_not_matched=False,
            key_not_matched=True,
            args_not_matched=False,
        ),
        Binding.QueryOk(queue_not_found=True, key_not_matched=True),
    ),
    (
        replies.binding_query_ok(
            513,
            exchange_not_found=True,
            queue_not_found=False,
            queue_not_matched=True,
            key_not_matched=False,
            args_not_matched=True,
        ),
        Binding.QueryOk(exchange_not_found=True, queue_not_matched=True, args_not_matched=True),
    ),
    (
        replies.exchange_query_ok(513, b"topic", durable=True, not_found=False, arguments=b"\x01aV"),
        Exchange.QueryOk(b"topic", durable=True, arguments=b"\x01aV"),
    ),
    (
        replies.exchange_query_ok(513, b"", durable=False, not_found=True, arguments=b""),
        Exchange.QueryOk(not_found=True),
    ),
    (replies.complete(513, 3), Execution.Complete(3)),
]


@pytest.mark.parametrize(("octets", "method"), FRAMES, ids=lambda value: repr(value)[:60])
def test_a_reply_is_one_whole_frame(octets: bytes, method: amqp_object.Method) -> None:
    assert octets == frame.Method(513, method).marshal()
    consumed, read = frame.decode_frame(octets)
    assert (consumed, read.method) == (len(octets), method)


def test_blocked_is_said_on_channel_0() -> None:
    assert replies.blocked(b"low on disk") == frame.Method(0, spec.Connection.Blocked("low on disk")).marshal()


def test_the_execution_mark_goes_round() -> None:
    """The XML: cumulative-execution-mark, domain long."""
    assert replies.complete(1, 2**32 + 5) == replies.complete(1, 5)


def frames_of(octets: bytes) -> list[object]:
    """What pika reads: methods, header frames as (size, properties), fragments of the body."""
    found: list[object] = []
    while octets:
        consumed, read = frame.decode_frame(octets)
        assert read.channel_number == 9
        match read:
            case frame.Method():
                found.append(read.method)
            case frame.Header():
                found.append((read.body_size, read.properties))
            case _:
                found.append(read.fragment)
        octets = octets[consumed:]
    return found


PERSISTENT = spec.BasicProperties(delivery_mode=2)


@pytest.mark.parametrize("frame_max", [0, 4096, 131_072])
@pytest.mark.parametrize("size", [0, 1, 4088, 4089, 10_000])
def test_a_delivery_is_a_method_a_header_and_a_body_within_frame_max(size: int, frame_max: int) -> None:
    body = bytes(range(256)) * (size // 256) + bytes(size % 256)
    octets = replies.delivery(9, b"\x03tag", 7, True, WHERE, PROPERTIES, body, frame_max)
    method, header, *fragments = frames_of(octets)
    assert method == spec.Basic.Deliver("tag", 7, True, "ex", "key")
    assert header == (size, PERSISTENT)
    assert b"".join(fragments) == body  # type: ignore[arg-type]
    assert all(0 < len(fragment) <= (frame_max or size) - 8 * bool(frame_max) for fragment in fragments)  # type: ignore[arg-type]


def test_a_message_that_is_got_comes_with_the_number_of_those_left() -> None:
    octets = replies.got(9, 7, False, WHERE, 12, PROPERTIES, b"body", 4096)
    assert frames_of(octets) == [spec.Basic.GetOk(7, False, "ex", "key", 12), (4, PERSISTENT), b"body"]


def test_a_returned_message_comes_whole() -> None:
    octets = replies.returned(9, 312, b"NO_ROUTE", WHERE, PROPERTIES, b"body", 4096)
    assert frames_of(octets) == [spec.Basic.Return(312, "NO_ROUTE", "ex", "key"), (4, PERSISTENT), b"body"]


def test_a_name_longer_than_a_shortstr_cannot_be_said() -> None:
    with pytest.raises(WireError, match="256 octets"):
        replies.queue_declare_ok(1, bytes(256), 0, 0)
