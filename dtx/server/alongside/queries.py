"""The classes of the AMQP 0-9 preview that no RabbitMQ knows: for a method of theirs it drops the connection.

binding.query and exchange.query are answered through the broker's management API, execution.flush by dtx itself. An
answer tells how things are when all that was sent before it on the channel has been done, and what is sent behind it
waits: so each waits for the broker first, and for nothing else afterwards.
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


def decode(key: int, payload: bytes) -> tuple[Query, int]:
    """Read a method of the preview's: what it says, and with which access ticket, if any.

    Raises:
        XaError: 503 for a method that only servers send, 540 for one that there is not.
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
            raise XaError(ReplyCode.COMMAND_INVALID, "an answer to a query is sent by servers only")
        case _:
            raise XaError(ReplyCode.NOT_IMPLEMENTED, f"class {key >> 16} has no method {key & 0xFFFF}")


def is_command(key: int) -> bool:
    """Whether execution.complete counts a frame."""
    return key >> 16 not in _NOT_COMMANDS


class Preview:
    """What one channel does of the preview.

    Args:
        client: whose channel it is.
        number: of the channel, as the client knows it.
    """

    def __init__(self, client: ProxiedClient, number: int) -> None:
        self._client = client
        self._number = number
        self.counting = client.speaks_0_9
        """Whether every command is counted, for execution.complete; then none passes unseen."""
        self.commands = 0
        """Those that did not pass unseen."""
        self.ticket = 0
        """The ticket that access.request was answered with."""

    def answer(self, query: Query, ticket: int, executed: _Executed, *, used: bool) -> Awaitable[bytes] | None:
        """What answers a query: it returns the frame, none when the channel has been closed meanwhile.

        Args:
            query: the method.
            ticket: that came with it.
            executed: waits until all that was sent before it has been done; whether the channel is still open then.
            used: whether something was sent to the broker before it.

        Returns:
            ``None`` where nothing is to be answered.

        Raises:
            XaError: 540 for what dtx cannot answer, 403 for a ticket that the channel was not given.
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
                return None  # an answer to a flush that dtx never sends: there is nothing to it

    def _check_ticket(self, query: Query, ticket: int) -> None:
        """Judge the ticket of a query: "a valid ticket should be provided".

        That is the one that the broker gave to this channel, or 0: no broker demands any.
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
