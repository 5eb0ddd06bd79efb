"""Reading the methods that move messages: just the fields that matter to who passes them on, as the bytes they are.

Every function takes the payload of a method frame, class and method first, and raises WireError 502 when the arguments
are truncated or something comes after them. Names are never decoded to text.
"""

from struct import Struct
from struct import error as struct_error
from typing import Final, NamedTuple, Never

from dtx.wire.amqp09 import tables
from dtx.wire.amqp09.errors import syntax_error

MANDATORY: Final = 1
IMMEDIATE: Final = 2

_TAG: Final = Struct(">QB")
_SETTLE: Final = Struct(">IQB")
_HEADER: Final = Struct(">HHQ")
_QOS: Final = Struct(">IIHB")
_LONG: Final = Struct(">I")
_LONGS: Final = Struct(">II")
_CODE: Final = Struct(">H")


class Publish(NamedTuple):
    """basic.publish. ``flags``: :data:`MANDATORY` and :data:`IMMEDIATE`."""

    exchange: bytes
    routing_key: bytes
    flags: int


class Deliver(NamedTuple):
    """basic.deliver."""

    consumer_tag: bytes
    delivery_tag: int
    redelivered: bool
    exchange: bytes
    routing_key: bytes


class GetOk(NamedTuple):
    """basic.get-ok."""

    delivery_tag: int
    redelivered: bool
    exchange: bytes
    routing_key: bytes
    message_count: int


class Return(NamedTuple):
    """basic.return."""

    reply_code: int
    reply_text: bytes
    exchange: bytes
    routing_key: bytes


class Settle(NamedTuple):
    """basic.ack, basic.nack or basic.reject, whichever it was: what it lacks is ``False``."""

    delivery_tag: int
    multiple: bool
    requeue: bool


class Consume(NamedTuple):
    """basic.consume. An empty queue is the one that the channel declared last."""

    queue: bytes
    consumer_tag: bytes
    no_local: bool
    no_ack: bool
    exclusive: bool
    no_wait: bool
    arguments: bytes


class Get(NamedTuple):
    """basic.get. An empty queue is the one that the channel declared last."""

    queue: bytes
    no_ack: bool


class Cancel(NamedTuple):
    """basic.cancel."""

    consumer_tag: bytes
    no_wait: bool


class Qos(NamedTuple):
    """basic.qos."""

    prefetch_size: int
    prefetch_count: int
    everywhere: bool


class DeclareOk(NamedTuple):
    """queue.declare-ok."""

    queue: bytes
    message_count: int
    consumer_count: int


class Close(NamedTuple):
    """channel.close or connection.close. ``key``: class << 16 | method of what failed."""

    reply_code: int
    reply_text: bytes
    key: int


class Header(NamedTuple):
    """A content header. ``properties`` from the property flags on."""

    class_id: int
    body_size: int
    properties: bytes


def _malformed(name: str) -> Never:
    raise syntax_error(f"{name} is truncated or too long") from None


def publish(payload: bytes) -> Publish:
    """Read basic.publish."""
    try:
        middle = 7 + payload[6]
        end = middle + 1 + payload[middle]
        flags = payload[end]
    except IndexError:
        _malformed("basic.publish")
    if end + 1 != len(payload):
        _malformed("basic.publish")
    return Publish(payload[7:middle], payload[middle + 1 : end], flags)


def deliver(payload: bytes) -> Deliver:
    """Read basic.deliver."""
    try:
        tag = 5 + payload[4]
        delivery_tag, redelivered = _TAG.unpack_from(payload, tag)
        middle = tag + 10 + payload[tag + 9]
        end = middle + 1 + payload[middle]
    except (IndexError, struct_error):
        _malformed("basic.deliver")
    if end != len(payload):
        _malformed("basic.deliver")
    return Deliver(
        payload[5:tag], delivery_tag, redelivered & 1 != 0, payload[tag + 10 : middle], payload[middle + 1 :]
    )


def get_ok(payload: bytes) -> GetOk:
    """Read basic.get-ok."""
    try:
        delivery_tag, redelivered = _TAG.unpack_from(payload, 4)
        middle = 14 + payload[13]
        end = middle + 1 + payload[middle]
        (message_count,) = _LONG.unpack_from(payload, end)
    except (IndexError, struct_error):
        _malformed("basic.get-ok")
    if end + 4 != len(payload):
        _malformed("basic.get-ok")
    return GetOk(delivery_tag, redelivered & 1 != 0, payload[14:middle], payload[middle + 1 : end], message_count)


def returned(payload: bytes) -> Return:
    """Read basic.return."""
    try:
        (code,) = _CODE.unpack_from(payload, 4)
    except struct_error:
        _malformed("basic.return")
    text, position = tables.short_string(payload, 6)
    exchange, position = tables.short_string(payload, position)
    key, position = tables.short_string(payload, position)
    if position != len(payload):
        _malformed("basic.return")
    return Return(code, text, exchange, key)


def _settle(payload: bytes, name: str) -> tuple[int, int]:
    if len(payload) != _SETTLE.size:
        _malformed(name)
    _, tag, bits = _SETTLE.unpack(payload)
    return tag, bits


def ack(payload: bytes) -> Settle:
    """Read basic.ack."""
    tag, bits = _settle(payload, "basic.ack")
    return Settle(tag, bits & 1 != 0, requeue=False)


def nack(payload: bytes) -> Settle:
    """Read basic.nack."""
    tag, bits = _settle(payload, "basic.nack")
    return Settle(tag, bits & 1 != 0, bits & 2 != 0)


def reject(payload: bytes) -> Settle:
    """Read basic.reject."""
    tag, bits = _settle(payload, "basic.reject")
    return Settle(tag, multiple=False, requeue=bits & 1 != 0)


def recover(payload: bytes) -> bool:
    """Read basic.recover or basic.recover-async: whether to requeue."""
    if len(payload) != 5:
        _malformed("basic.recover")
    return payload[4] & 1 != 0


def consume(payload: bytes) -> Consume:
    """Read basic.consume."""
    queue, position = tables.short_string(payload, 6)
    tag, position = tables.short_string(payload, position)
    arguments, end = tables.long_string(payload, position + 1)
    if end != len(payload):
        _malformed("basic.consume")
    bits = payload[position]
    return Consume(queue, tag, bits & 1 != 0, bits & 2 != 0, bits & 4 != 0, bits & 8 != 0, arguments)


def _name_and_bit(payload: bytes, position: int, name: str) -> tuple[bytes, bool]:
    value, position = tables.short_string(payload, position)
    if position + 1 != len(payload):
        _malformed(name)
    return value, payload[position] & 1 != 0


def get(payload: bytes) -> Get:
    """Read basic.get."""
    return Get(*_name_and_bit(payload, 6, "basic.get"))


def cancel(payload: bytes) -> Cancel:
    """Read basic.cancel."""
    return Cancel(*_name_and_bit(payload, 4, "basic.cancel"))


def consumer_tag(payload: bytes) -> bytes:
    """Read basic.consume-ok or basic.cancel-ok: the consumer's tag."""
    tag, position = tables.short_string(payload, 4)
    if position != len(payload):
        _malformed("consumer tag")
    return tag


def qos(payload: bytes) -> Qos:
    """Read basic.qos."""
    if len(payload) != _QOS.size:
        _malformed("basic.qos")
    _, size, count, bits = _QOS.unpack(payload)
    return Qos(size, count, bits & 1 != 0)


def declare_ok(payload: bytes) -> DeclareOk:
    """Read queue.declare-ok."""
    queue, position = tables.short_string(payload, 4)
    if position + _LONGS.size != len(payload):
        _malformed("queue.declare-ok")
    return DeclareOk(queue, *_LONGS.unpack_from(payload, position))


def close(payload: bytes) -> Close:
    """Read channel.close or connection.close."""
    try:
        (code,) = _CODE.unpack_from(payload, 4)
    except struct_error:
        _malformed("close")
    text, position = tables.short_string(payload, 6)
    if position + 4 != len(payload):
        _malformed("close")
    return Close(code, text, _LONG.unpack_from(payload, position)[0])


def header(payload: bytes) -> Header:
    """Read the payload of a content header frame.

    Raises:
        WireError: 502 when not even the property flags are there; the properties are not looked at.
    """
    if len(payload) < _HEADER.size + 2:
        _malformed("content header")
    class_id, _, body_size = _HEADER.unpack_from(payload)
    return Header(class_id, body_size, payload[_HEADER.size :])
