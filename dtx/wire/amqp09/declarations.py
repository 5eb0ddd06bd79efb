"""Reading what a client asks of a server: classes access, channel, exchange, queue, binding, confirm, tx.

The methods that move messages are in :mod:`~dtx.wire.amqp09.content`. Every function takes the payload of a method
frame, class and method first, and raises WireError 502 when the arguments are truncated or something comes after them.
Names are never decoded to text; ``arguments`` are tables without their length, not looked into.
"""

from typing import NamedTuple, Never

from dtx.wire.amqp09 import tables
from dtx.wire.amqp09.errors import syntax_error


class AccessRequest(NamedTuple):
    """access.request."""

    realm: bytes
    exclusive: bool
    passive: bool
    active: bool
    write: bool
    read: bool


class ExchangeDeclare(NamedTuple):
    """exchange.declare."""

    exchange: bytes
    kind: bytes
    passive: bool
    durable: bool
    auto_delete: bool
    internal: bool
    no_wait: bool
    arguments: bytes


class ExchangeDelete(NamedTuple):
    """exchange.delete."""

    exchange: bytes
    if_unused: bool
    no_wait: bool


class Bind(NamedTuple):
    """exchange.bind, exchange.unbind, queue.bind or queue.unbind (which has no ``no_wait``).

    Args:
        destination: exchange or queue; an empty queue is the one that the channel declared last.
        source: an exchange.
    """

    destination: bytes
    source: bytes
    routing_key: bytes
    no_wait: bool
    arguments: bytes


class QueueDeclare(NamedTuple):
    """queue.declare. An empty name asks the server for one."""

    queue: bytes
    passive: bool
    durable: bool
    exclusive: bool
    auto_delete: bool
    no_wait: bool
    arguments: bytes


class QueuePurge(NamedTuple):
    """queue.purge."""

    queue: bytes
    no_wait: bool


class QueueDelete(NamedTuple):
    """queue.delete."""

    queue: bytes
    if_unused: bool
    if_empty: bool
    no_wait: bool


class BindingQuery(NamedTuple):
    """binding.query. What is empty stands for any."""

    exchange: bytes
    queue: bytes
    routing_key: bytes
    arguments: bytes


def _malformed(name: str) -> Never:
    raise syntax_error(f"{name} is truncated or too long")


def ticket(payload: bytes) -> int:
    """The access ticket, which 0-9-1 calls reserved: the first argument of a method that has one."""
    if len(payload) < 6:
        _malformed("access ticket")
    return int.from_bytes(payload[4:6], "big")


def no_arguments(payload: bytes) -> None:
    """Read a method that has none: channel.close-ok, tx.select and so on."""
    if len(payload) != 4:
        _malformed("method without arguments")


def flag(payload: bytes) -> bool:
    """Read channel.flow or flow-ok (whether it is active), or confirm.select (whether no answer is wanted)."""
    if len(payload) != 5:
        _malformed("method with one bit")
    return payload[4] & 1 != 0


def execution_complete(payload: bytes) -> int:
    """Read execution.complete of the preview: the mark."""
    if len(payload) != 8:
        _malformed("execution.complete")
    return int.from_bytes(payload[4:], "big")


def access_request(payload: bytes) -> AccessRequest:
    """Read access.request."""
    realm, position = tables.short_string(payload, 4)
    bits = _last_octet(payload, position, "access.request")
    return AccessRequest(realm, bits & 1 != 0, bits & 2 != 0, bits & 4 != 0, bits & 8 != 0, bits & 16 != 0)


def _last_octet(payload: bytes, position: int, name: str) -> int:
    if position + 1 != len(payload):
        _malformed(name)
    return payload[position]


def _octet_and_table(payload: bytes, position: int, name: str) -> tuple[int, bytes]:
    table, end = tables.long_string(payload, position + 1)
    if end != len(payload):
        _malformed(name)
    return payload[position], table


def exchange_declare(payload: bytes) -> ExchangeDeclare:
    """Read exchange.declare."""
    exchange, position = tables.short_string(payload, 6)
    kind, position = tables.short_string(payload, position)
    bits, arguments = _octet_and_table(payload, position, "exchange.declare")
    return ExchangeDeclare(
        exchange, kind, bits & 1 != 0, bits & 2 != 0, bits & 4 != 0, bits & 8 != 0, bits & 16 != 0, arguments
    )


def exchange_delete(payload: bytes) -> ExchangeDelete:
    """Read exchange.delete."""
    exchange, position = tables.short_string(payload, 6)
    bits = _last_octet(payload, position, "exchange.delete")
    return ExchangeDelete(exchange, bits & 1 != 0, bits & 2 != 0)


def is_query(payload: bytes) -> bool:
    """Whether a method 40.30 is the preview's exchange.query: it ends behind one name, where exchange.bind goes on."""
    return len(payload) > 6 and len(payload) == 7 + payload[6]


def exchange_query(payload: bytes) -> bytes:
    """Read exchange.query: the name."""
    exchange, position = tables.short_string(payload, 6)
    if position != len(payload):
        _malformed("exchange.query")
    return exchange


def _names(payload: bytes) -> tuple[bytes, bytes, bytes, int]:
    """Three names behind a ticket, and where they end."""
    first, position = tables.short_string(payload, 6)
    second, position = tables.short_string(payload, position)
    third, position = tables.short_string(payload, position)
    return first, second, third, position


def bind(payload: bytes) -> Bind:
    """Read exchange.bind, exchange.unbind or queue.bind."""
    destination, source, key, position = _names(payload)
    bits, arguments = _octet_and_table(payload, position, "bind")
    return Bind(destination, source, key, bits & 1 != 0, arguments)


def queue_unbind(payload: bytes) -> Bind:
    """Read queue.unbind."""
    queue, exchange, key, position = _names(payload)
    arguments, end = tables.long_string(payload, position)
    if end != len(payload):
        _malformed("queue.unbind")
    return Bind(queue, exchange, key, no_wait=False, arguments=arguments)


def binding_query(payload: bytes) -> BindingQuery:
    """Read binding.query."""
    exchange, queue, key, position = _names(payload)
    arguments, end = tables.long_string(payload, position)
    if end != len(payload):
        _malformed("binding.query")
    return BindingQuery(exchange, queue, key, arguments)


def queue_declare(payload: bytes) -> QueueDeclare:
    """Read queue.declare."""
    queue, position = tables.short_string(payload, 6)
    bits, arguments = _octet_and_table(payload, position, "queue.declare")
    return QueueDeclare(queue, bits & 1 != 0, bits & 2 != 0, bits & 4 != 0, bits & 8 != 0, bits & 16 != 0, arguments)


def queue_purge(payload: bytes) -> QueuePurge:
    """Read queue.purge."""
    queue, position = tables.short_string(payload, 6)
    return QueuePurge(queue, _last_octet(payload, position, "queue.purge") & 1 != 0)


def queue_delete(payload: bytes) -> QueueDelete:
    """Read queue.delete."""
    queue, position = tables.short_string(payload, 6)
    bits = _last_octet(payload, position, "queue.delete")
    return QueueDelete(queue, bits & 1 != 0, bits & 2 != 0, bits & 4 != 0)
