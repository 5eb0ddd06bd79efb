"""Methods of the AMQP 0-9 preview that RabbitMQ does not have: it would drop the connection for one of them.

The broker's management API answers binding.query and exchange.query; dtx itself answers execution.flush. An answer
describes the state after all earlier frames of the channel, and later frames wait for it. So each query first waits
until the broker has handled the earlier frames.
"""

from collections.abc import Awaitable, Callable
from typing import Final

from dtx.server.alongside.client import ProxiedClient
from dtx.store.rabbitmq.arguments import Plain, from_table
from dtx.wire.amqp09 import methods
from dtx.xa.codes import ReplyCode, XaError

_Executed = Callable[[], Awaitable[bool]]
Query = methods.ExchangeQuery | methods.BindingQuery | methods.ExecutionFlush | methods.ExecutionComplete
_PREVIEW: Final = frozenset((methods.BindingQuery.KEY >> 16, methods.ExecutionFlush.KEY >> 16))
_BINDS: Final = frozenset((methods.ExchangeBind.KEY, methods.ExchangeBindOk.KEY))
"""Methods of RabbitMQ with the same numbers as exchange.query and its answer in the preview."""
_NOT_COMMANDS: Final = frozenset((0, methods.ChannelOpen.KEY >> 16, methods.ExecutionFlush.KEY >> 16))
"""Frames that execution.complete does not count: contents, and methods of the classes channel and execution."""


def is_query(key: int, buffer: bytes, start: int, end: int) -> bool:
    """Whether the frame ``buffer[start:end]`` of a client is a method of the preview.

    Raises:
        WireError: 502, the method is 40.30 and neither exchange.query nor exchange.bind.
    """
    if key not in _BINDS:
        return key >> 16 in _PREVIEW
    payload = buffer[start + 7 : end - 1]
    if key == methods.ExchangeBind.KEY and not methods.is_query(payload):
        methods.ExchangeBind.decode(payload)
        return False
    return True


def decode(key: int, payload: bytes) -> tuple[Query, int]:
    """Decode a method of the preview, and its access ticket (0 without one).

    Raises:
        XaError: 503, only servers send the method; 540, the method does not exist.
        WireError: 502, the arguments are malformed.
    """
    match key:
        case methods.ExchangeBind.KEY:
            return methods.ExchangeQuery.decode(payload), methods.ticket(payload)
        case methods.BindingQuery.KEY:
            return methods.BindingQuery.decode(payload), methods.ticket(payload)
        case methods.ExecutionFlush.KEY:
            return methods.ExecutionFlush.decode(payload), 0
        case methods.ExecutionComplete.KEY:
            return methods.ExecutionComplete.decode(payload), 0
        case methods.ExchangeBindOk.KEY | methods.BindingQueryOk.KEY:
            raise XaError(ReplyCode.COMMAND_INVALID, "only servers send the answer to a query")
        case _:
            raise XaError(ReplyCode.NOT_IMPLEMENTED, f"class {key >> 16} has no method {key & 0xFFFF}")


def is_command(key: int) -> bool:
    """Whether execution.complete counts a frame."""
    return key >> 16 not in _NOT_COMMANDS


class Preview:
    """The preview methods of one channel.

    Args:
        client: has the channel.
        number: channel number on the client's side.
    """

    def __init__(self, client: ProxiedClient, number: int) -> None:
        self._client = client
        self._number = number
        self.counting = client.speaks_0_9
        """Whether every command is counted, for execution.complete; then dtx inspects all of them."""
        self.commands = 0
        """The number of commands that dtx has inspected."""
        self.ticket = 0
        """The ticket in the broker's last access.request-ok; 0 without one."""

    def answer(self, query: Query, ticket: int, executed: _Executed, *, used: bool) -> Awaitable[bytes] | None:
        """Answer a query.

        Args:
            query: the method.
            ticket: its access ticket.
            executed: waits until the broker has handled all earlier frames; returns whether the channel is still open.
            used: whether earlier frames were sent to the broker.

        Returns:
            An awaitable of the answering frame, which is empty if the channel was closed meanwhile; ``None`` if the
            method needs no answer.

        Raises:
            XaError: 540, dtx cannot answer; 403, the channel does not have this ticket.
        """
        match query:
            case methods.ExchangeQuery():
                self._check_ticket(query, ticket)
                return self._exchange(query.exchange, executed)
            case methods.BindingQuery():
                self._check_ticket(query, ticket)
                return self._binding(query, from_table(query.arguments), executed)
            case methods.ExecutionFlush():
                return self._complete(self._commands_so_far(used), executed)
            case methods.ExecutionComplete():
                return None  # it answers a flush, and dtx never sends one

    def _check_ticket(self, query: Query, ticket: int) -> None:
        """Check the ticket of a query: "a valid ticket should be provided".

        Valid are the last ticket that the broker gave to this channel, and 0, because brokers do not need tickets.
        """
        if ticket not in (0, self.ticket):
            raise XaError(
                ReplyCode.ACCESS_REFUSED,
                f"{query.NAME} with ticket {ticket}, which this channel was not given: send access.request first",
            )

    def _commands_so_far(self, used: bool) -> int:
        if used and not self.counting:
            raise XaError(
                ReplyCode.NOT_IMPLEMENTED,
                "commands of this channel have not been counted: send one execution.flush before anything else on it, "
                "or open the connection with the header of AMQP 0-9",
            )
        self.counting = True
        return self.commands

    async def _exchange(self, name: bytes, executed: _Executed) -> bytes:
        if not await executed():
            return b""
        client = self._client
        facts = await client.store.queries.exchange(client.who.vhost, client.user, name)
        answer = methods.ExchangeQueryOk(
            facts.type, durable=facts.durable, not_found=facts.not_found, arguments=facts.arguments
        )
        return answer.frame(self._number)

    async def _binding(self, asked: methods.BindingQuery, arguments: dict[bytes, Plain], executed: _Executed) -> bytes:
        if not await executed():
            return b""
        client = self._client
        facts = await client.store.queries.binding(
            client.who.vhost, client.user, asked.exchange, asked.queue, asked.routing_key, arguments
        )
        answer = methods.BindingQueryOk(
            exchange_not_found=facts.exchange_not_found,
            queue_not_found=facts.queue_not_found,
            queue_not_matched=facts.queue_not_matched,
            key_not_matched=facts.key_not_matched,
            args_not_matched=facts.args_not_matched,
        )
        return answer.frame(self._number)

    async def _complete(self, mark: int, executed: _Executed) -> bytes:
        await executed()
        return methods.ExecutionComplete.of(mark).frame(self._number)
