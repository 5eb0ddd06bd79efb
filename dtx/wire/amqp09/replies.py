"""What a server says to a client, outside the dtx classes: whole frames, each put together once.

Answers to dtx methods are in :mod:`~dtx.wire.amqp09.answers`, closes in :mod:`~dtx.wire.amqp09.errors`. Names longer
than a shortstr may be (255 octets) raise WireError 502.
"""

from struct import Struct
from typing import Final

from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.frames import BODY, FRAME_END, HEADER, METHOD, OVERHEAD, body_frames
from dtx.wire.amqp09.tables import put_long, put_short

_BASIC: Final = 60
_END: Final = b"\xce"
_HEAD: Final = Struct(">BHII")
_EMPTY: Final = Struct(">BHIIB")
_OCTET: Final = Struct(">BHIIBB")
_SHORT: Final = Struct(">BHIIHB")
_LONG: Final = Struct(">BHIIIB")
_SETTLE: Final = Struct(">BHIIQBB")
_COUNTS: Final = Struct(">IIB")
_TAG: Final = Struct(">QB")
_COUNT: Final = Struct(">I")
_CODE: Final = Struct(">H")
_CONTENT: Final = Struct(">BBHIHHQ")
_BODY: Final = Struct(">BBHI")


def _frame(channel: int, key: int, arguments: bytes) -> bytes:
    return _HEAD.pack(METHOD, channel, 4 + len(arguments), key) + arguments + _END


def empty(channel: int, key: int) -> bytes:
    """A method without arguments: exchange.declare-ok, queue.bind-ok, basic.qos-ok, tx.commit-ok and so on."""
    return _EMPTY.pack(METHOD, channel, 4, key, FRAME_END)


def channel_open_ok(channel: int) -> bytes:
    """channel.open-ok."""
    return _LONG.pack(METHOD, channel, 8, methods.ChannelOpenOk.KEY, 0, FRAME_END)


def flow_ok(channel: int, active: bool) -> bytes:
    """channel.flow-ok."""
    return _OCTET.pack(METHOD, channel, 5, methods.ChannelFlowOk.KEY, active, FRAME_END)


def ticket_ok(channel: int, ticket: int) -> bytes:
    """access.request-ok."""
    return _SHORT.pack(METHOD, channel, 6, methods.AccessRequestOk.KEY, ticket, FRAME_END)


def blocked(reason: bytes) -> bytes:
    """connection.blocked; *reason* has at most 255 octets."""
    return _frame(0, methods.ConnectionBlocked.KEY, put_short(reason))


def queue_declare_ok(channel: int, queue: bytes, messages: int, consumers: int) -> bytes:
    """queue.declare-ok.

    Args:
        channel: number.
        queue: name.
        messages: that are ready.
        consumers: that are there.
    """
    name = put_short(queue)
    head = _HEAD.pack(METHOD, channel, 12 + len(name), methods.QueueDeclareOk.KEY)
    return head + name + _COUNTS.pack(messages, consumers, FRAME_END)


def count_ok(channel: int, key: int, messages: int) -> bytes:
    """queue.purge-ok or queue.delete-ok: how many messages are gone."""
    return _LONG.pack(METHOD, channel, 8, key, messages, FRAME_END)


def consumer_ok(channel: int, key: int, consumer_tag: bytes) -> bytes:
    """basic.consume-ok or basic.cancel-ok."""
    return _frame(channel, key, put_short(consumer_tag))


def cancelled(channel: int, consumer_tag: bytes) -> bytes:
    """basic.cancel from the server: the consumer's queue is gone. No answer is waited for."""
    return _frame(channel, methods.BasicCancel.KEY, put_short(consumer_tag) + b"\x01")


def ack(channel: int, delivery_tag: int, multiple: bool) -> bytes:
    """basic.ack to a publisher."""
    return _SETTLE.pack(METHOD, channel, 13, methods.BasicAck.KEY, delivery_tag, multiple, FRAME_END)


def nack(channel: int, delivery_tag: int, multiple: bool) -> bytes:
    """basic.nack to a publisher: the message is not safe."""
    return _SETTLE.pack(METHOD, channel, 13, methods.BasicNack.KEY, delivery_tag, multiple, FRAME_END)


def get_empty(channel: int) -> bytes:
    """basic.get-empty."""
    return _OCTET.pack(METHOD, channel, 5, methods.BasicGetEmpty.KEY, 0, FRAME_END)


def address(exchange: bytes, routing_key: bytes) -> bytes:
    """Exchange and routing key as a delivery has them; the same for all deliveries of a message."""
    return put_short(exchange) + put_short(routing_key)


def _content(channel: int, properties: bytes, body: bytes, frame_max: int) -> tuple[bytes, ...]:
    """What follows the arguments of a method with content: its end, the header frame, the body frames."""
    size = len(body)
    head = _CONTENT.pack(FRAME_END, HEADER, channel, 12 + len(properties), _BASIC, 0, size)
    if not size:
        return head, properties, _END
    if not frame_max or size <= frame_max - OVERHEAD:
        return head, properties, _BODY.pack(FRAME_END, BODY, channel, size), body, _END
    return head, properties, _END, *body_frames(channel, body, frame_max)


def delivery(
    channel: int,
    consumer_tag: bytes,
    delivery_tag: int,
    redelivered: bool,
    where: bytes,
    properties: bytes,
    body: bytes,
    frame_max: int,
) -> bytes:
    """basic.deliver with its content.

    Args:
        channel: number.
        consumer_tag: as a shortstr, its length first.
        delivery_tag: number.
        redelivered: whether it may have been delivered before.
        where: from :func:`address`.
        properties: from the property flags on.
        body: octets.
        frame_max: agreed with the client, octets; 0 for none.
    """
    return b"".join(
        (
            _HEAD.pack(METHOD, channel, 13 + len(consumer_tag) + len(where), methods.BasicDeliver.KEY),
            consumer_tag,
            _TAG.pack(delivery_tag, redelivered),
            where,
            *_content(channel, properties, body, frame_max),
        )
    )


def got(
    channel: int,
    delivery_tag: int,
    redelivered: bool,
    where: bytes,
    left: int,
    properties: bytes,
    body: bytes,
    frame_max: int,
) -> bytes:
    """basic.get-ok with its content; *left* is how many messages are still ready. See :func:`delivery`."""
    return b"".join(
        (
            _HEAD.pack(METHOD, channel, 17 + len(where), methods.BasicGetOk.KEY),
            _TAG.pack(delivery_tag, redelivered),
            where,
            _COUNT.pack(left),
            *_content(channel, properties, body, frame_max),
        )
    )


def returned(
    channel: int, code: int, text: bytes, where: bytes, properties: bytes, body: bytes, frame_max: int
) -> bytes:
    """basic.return with its content; *text* is at most 255 octets. See :func:`delivery`."""
    reason = put_short(text)
    return b"".join(
        (
            _HEAD.pack(METHOD, channel, 6 + len(reason) + len(where), methods.BasicReturn.KEY),
            _CODE.pack(code),
            reason,
            where,
            *_content(channel, properties, body, frame_max),
        )
    )


def binding_query_ok(
    channel: int,
    *,
    exchange_not_found: bool,
    queue_not_found: bool,
    queue_not_matched: bool,
    key_not_matched: bool,
    args_not_matched: bool,
) -> bytes:
    """binding.query-ok."""
    bits = exchange_not_found | queue_not_found << 1 | queue_not_matched << 2
    bits |= key_not_matched << 3 | args_not_matched << 4
    return _OCTET.pack(METHOD, channel, 5, methods.BindingQueryOk.KEY, bits, FRAME_END)


def exchange_query_ok(channel: int, kind: bytes, *, durable: bool, not_found: bool, arguments: bytes) -> bytes:
    """exchange.query-ok, which has the number of exchange.bind-ok; *arguments* are a table without its length."""
    octet = bytes((durable | not_found << 1,))
    return _frame(channel, methods.ExchangeBindOk.KEY, put_short(kind) + octet + put_long(arguments))


def complete(channel: int, mark: int) -> bytes:
    """execution.complete; *mark* counts the commands that have been executed, modulo 2**32."""
    return _LONG.pack(METHOD, channel, 8, methods.ExecutionComplete.KEY, mark & 0xFFFFFFFF, FRAME_END)
