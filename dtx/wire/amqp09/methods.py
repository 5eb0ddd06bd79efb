"""The table of methods: what clients ask for in the classes access, channel, exchange, queue, binding, confirm and tx.

Each class is a row: name and numbers, and the wire fields in order. The codec of a row serves both ends
(:mod:`~dtx.wire.amqp09.codec`). The methods that move messages are in :mod:`~dtx.wire.amqp09.content` and
:mod:`~dtx.wire.amqp09.requests`. An empty queue is the one that the channel declared last.
"""

from typing import ClassVar

from dtx.wire.amqp09.codec import Bit, Long, Method, ShortString, Table, method
from dtx.wire.amqp09.errors import syntax_error


@method("channel.flow", 20, 20)
class ChannelFlow(Method):
    active: Bit


@method("access.request", 30, 10)
class AccessRequest(Method):
    realm: ShortString
    exclusive: Bit
    passive: Bit
    active: Bit
    write: Bit
    read: Bit


@method("exchange.declare", 40, 10, ticket=True)
class ExchangeDeclare(Method):
    exchange: ShortString
    kind: ShortString
    passive: Bit = False
    durable: Bit = False
    auto_delete: Bit = False
    internal: Bit = False
    no_wait: Bit = False
    arguments: Table = b""


@method("exchange.delete", 40, 20, ticket=True)
class ExchangeDelete(Method):
    exchange: ShortString
    if_unused: Bit = False
    no_wait: Bit = False


@method("exchange.query", 40, 30, ticket=True)
class ExchangeQuery(Method):
    """Of the preview; RabbitMQ gave its number to exchange.bind: see :func:`is_query`."""

    exchange: ShortString


@method("exchange.bind", 40, 30, ticket=True)
class ExchangeBind(Method):
    destination: ShortString
    source: ShortString
    routing_key: ShortString
    no_wait: Bit = False
    arguments: Table = b""


@method("exchange.unbind", 40, 40, ticket=True)
class ExchangeUnbind(Method):
    destination: ShortString
    source: ShortString
    routing_key: ShortString
    no_wait: Bit = False
    arguments: Table = b""


@method("queue.declare", 50, 10, ticket=True)
class QueueDeclare(Method):
    """An empty name asks the server for one."""

    queue: ShortString
    passive: Bit = False
    durable: Bit = False
    exclusive: Bit = False
    auto_delete: Bit = False
    no_wait: Bit = False
    arguments: Table = b""


@method("queue.bind", 50, 20, ticket=True)
class QueueBind(Method):
    """The destination is the queue."""

    destination: ShortString
    source: ShortString
    routing_key: ShortString
    no_wait: Bit = False
    arguments: Table = b""


@method("queue.purge", 50, 30, ticket=True)
class QueuePurge(Method):
    queue: ShortString
    no_wait: Bit = False


@method("queue.delete", 50, 40, ticket=True)
class QueueDelete(Method):
    queue: ShortString
    if_unused: Bit = False
    if_empty: Bit = False
    no_wait: Bit = False


@method("queue.unbind", 50, 50, ticket=True)
class QueueUnbind(Method):
    no_wait: ClassVar[bool] = False
    destination: ShortString
    source: ShortString
    routing_key: ShortString
    arguments: Table = b""


@method("binding.query", 130, 10, ticket=True)
class BindingQuery(Method):
    """What is empty stands for any."""

    exchange: ShortString
    queue: ShortString
    routing_key: ShortString
    arguments: Table


@method("confirm.select", 85, 10)
class ConfirmSelect(Method):
    no_wait: Bit = False


@method("tx.select", 90, 10)
class TxSelect(Method): ...


@method("tx.commit", 90, 20)
class TxCommit(Method): ...


@method("tx.rollback", 90, 30)
class TxRollback(Method): ...


@method("execution.flush", 140, 10)
class ExecutionFlush(Method): ...


@method("execution.complete", 140, 20)
class ExecutionComplete(Method):
    """``mark`` counts the commands that have been executed, modulo 2**32."""

    mark: Long


def ticket(payload: bytes) -> int:
    """The access ticket, which 0-9-1 calls reserved: the first argument of a method that has one.

    Raises:
        WireError: 502 when it is truncated.
    """
    if len(payload) < 6:
        raise syntax_error("access ticket is truncated or too long")
    return int.from_bytes(payload[4:6], "big")


def is_query(payload: bytes) -> bool:
    """Whether a method 40.30 is the preview's exchange.query: it ends behind one name, where exchange.bind goes on."""
    return len(payload) > 6 and len(payload) == 7 + payload[6]
