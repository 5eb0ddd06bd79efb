"""The classes of the AMQP 0-9 preview that no RabbitMQ knows: for a method of theirs it drops the connection.

binding.query and exchange.query are answered through the broker's management API, execution.flush by dtx itself. An
answer tells how things are when all that was sent before it on the channel has been done, and what is sent behind it
waits: so each waits for the broker first, and for nothing else afterwards.
"""

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Final

from dtx.store.rabbitmq.arguments import Plain, from_table
from dtx.wire.amqp09 import methods
from dtx.xa.codes import ReplyCode, XaError

if TYPE_CHECKING:
    from dtx.server.alongside.channel import Channel

_PREVIEW: Final = frozenset((methods.BindingQuery.KEY >> 16, methods.ExecutionFlush.KEY >> 16))
_BINDS: Final = frozenset((methods.ExchangeBind.KEY, methods.ExchangeBindOk.KEY))
"""Methods of RabbitMQ's whose numbers the preview gave to exchange.query and its answer."""
_NOT_COMMANDS: Final = frozenset((0, methods.ChannelOpen.KEY >> 16, methods.ExecutionFlush.KEY >> 16))
"""Frames that execution.complete does not count: contents, and methods that are about the channel itself."""


def is_query(key: int, buffer: bytes, start: int, end: int) -> bool:
    """Whether a frame of a client, ``buffer[start:end]``, is a method of the preview's.

    Raises:
        WireError: 502, it is 40.30 and neither exchange.query nor exchange.bind.
    """
    if key not in _BINDS:
        return key >> 16 in _PREVIEW
    payload = buffer[start + 7 : end - 1]
    if key == methods.ExchangeBind.KEY and not methods.is_query(payload):
        methods.ExchangeBind.decode(payload)
        return False
    return True


def is_command(key: int) -> bool:
    """Whether execution.complete counts a frame."""
    return key >> 16 not in _NOT_COMMANDS


def answer(channel: "Channel", key: int, payload: bytes) -> Coroutine[Any, Any, bytes] | None:
    """What answers a method of the preview: it returns the frame, none when the channel has been closed meanwhile.

    Returns:
        ``None`` where nothing is to be answered.

    Raises:
        XaError: 503 for a method that only servers send, 540 for one that there is not, or that dtx cannot answer; 403
            for a ticket that the channel was not given.
        WireError: 502, the arguments are malformed; 320, the broker is away.
    """
    match key:
        case methods.ExchangeBind.KEY:
            channel.need_broker()
            name = methods.ExchangeQuery.decode(payload).exchange
            channel.check_ticket("exchange.query", payload)
            return _exchange(channel, name)
        case methods.BindingQuery.KEY:
            channel.need_broker()
            asked = methods.BindingQuery.decode(payload)
            channel.check_ticket("binding.query", payload)
            return _binding(channel, asked, from_table(asked.arguments))
        case methods.ExecutionFlush.KEY:
            methods.ExecutionFlush.decode(payload)
            return _complete(channel, channel.commands_so_far())
        case methods.ExecutionComplete.KEY:
            return None  # an answer to a flush that dtx never sends: there is nothing to it
        case methods.ExchangeBindOk.KEY | methods.BindingQueryOk.KEY:
            raise XaError(ReplyCode.COMMAND_INVALID, "an answer to a query is sent by servers only")
        case _:
            raise XaError(ReplyCode.NOT_IMPLEMENTED, f"class {key >> 16} has no method {key & 0xFFFF}")


async def _exchange(channel: "Channel", name: bytes) -> bytes:
    await channel.executed()
    if not channel.is_open():
        return b""
    session = channel.session
    facts = await session.store.queries.exchange(session.who.vhost, session.user, name)
    answer = methods.ExchangeQueryOk(
        facts.type, durable=facts.durable, not_found=facts.not_found, arguments=facts.arguments
    )
    return answer.frame(channel.number)


async def _binding(channel: "Channel", asked: methods.BindingQuery, arguments: dict[bytes, Plain]) -> bytes:
    await channel.executed()
    if not channel.is_open():
        return b""
    session = channel.session
    facts = await session.store.queries.binding(
        session.who.vhost, session.user, asked.exchange, asked.queue, asked.routing_key, arguments
    )
    answer = methods.BindingQueryOk(
        exchange_not_found=facts.exchange_not_found,
        queue_not_found=facts.queue_not_found,
        queue_not_matched=facts.queue_not_matched,
        key_not_matched=facts.key_not_matched,
        args_not_matched=facts.args_not_matched,
    )
    return answer.frame(channel.number)


async def _complete(channel: "Channel", mark: int) -> bytes:
    await channel.executed()
    return methods.ExecutionComplete.of(mark).frame(channel.number)
