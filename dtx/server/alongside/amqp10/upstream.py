"""The connection to the broker of one AMQP 1.0 client, requests on it, and the mapping of its errors."""

import asyncio
from collections.abc import Callable
from typing import Any, Final, Protocol

from dtx.server.amqp10.addresses import Address, ExchangeAddress, QueueAddress, known_kind, route, subscription
from dtx.server.amqp10.nodes import Home, amqp_error
from dtx.store.rabbitmq.commit_connection import CommitConnection
from dtx.store.rabbitmq.management import ManagementError
from dtx.store.rabbitmq.service import Broker, ServiceConnection
from dtx.store.rabbitmq.store import RabbitStore
from dtx.store.rabbitmq.upstream import OwnChannel, UpstreamChannelClosed, UpstreamLost, words
from dtx.store.rabbitmq.validation import Validation, Validator
from dtx.telemetry import Metrics, get_logger
from dtx.wire.amqp09 import methods, properties, tables
from dtx.wire.amqp09.codec import Method
from dtx.wire.amqp09.methods import BasicPublish, ChannelClose
from dtx.wire.amqp10.errors import AmqpError, Condition
from dtx.xa.codes import ReplyCode, XaError

_log = get_logger(part="connection")
STREAM_OFFSET: Final = b"x-stream-offset"
"""Argument of a stream's consumer, and header of its messages."""
_FRESH: Final = 10.0
"""Seconds for which existence and type of a queue are cached."""
_TYPE_FRESH: Final = 60.0
"""Seconds for which the type is cached if the request causes an error in the broker's log."""
_MAX_KNOWN: Final = 1024
"""Maximum number of cached queues of one connection."""
_CODES: Final = frozenset(ReplyCode)


def broker_error(close: ChannelClose) -> AmqpError:
    """The broker's *close* as an AMQP 1.0 error, with its text and the condition for its reply code."""
    if close.reply_code not in _CODES:
        return AmqpError(Condition.INTERNAL_ERROR, words(close))
    return amqp_error(XaError(ReplyCode(close.reply_code), words(close)))


def check_address(address: Address) -> None:
    """Refuse names for which a broker would close the whole connection: "Malformed UTF-8 in shortstr" (501).

    Raises:
        AmqpError: invalid-field.
    """
    try:
        b"/".join(route(address)).decode()
    except UnicodeDecodeError:
        raise AmqpError(Condition.INVALID_FIELD, "names in the address are not UTF-8") from None


def broker_lost(reason: object) -> AmqpError:
    """The error for the client after the loss of its connection to the broker."""
    return AmqpError(Condition.CONNECTION_FORCED, f"the connection to the broker is gone: {reason}")


class ClientUpstream(ServiceConnection):
    """A connection to the broker with the credentials of an AMQP 1.0 client.

    Args:
        broker: address and the client's credentials.
        name: shown in the broker's list of connections.
        home: the client's connection.
        lost: called with the reason when the connection is lost.
    """

    def __init__(self, broker: Broker, name: str, home: Home, lost: Callable[[str], None]) -> None:
        super().__init__(broker, name)
        self._home = home
        self._lost = lost

    def pause_writing(self) -> None:
        """Stop reading from the client, because the broker is slow."""
        self._home.hold_client(self)

    def resume_writing(self) -> None:
        """Read from the client again."""
        self._home.release_client(self)

    def on_lost(self, reason: str) -> None:
        """See :class:`Upstream`."""
        super().on_lost(reason)
        self._lost(reason)


class Touched(Protocol):
    """A link with changes to handle."""

    def flush(self) -> None:
        """Handle all changes of one read together."""


class BrokerAccess:
    """The broker's virtual host, for the links of one client connection.

    Args:
        store: of the broker.
        metrics: of the service.
        home: the client's connection.
        upstream: the connection to the broker, in the virtual host.
        validator: checks publishes on a channel of *upstream*.
    """

    def __init__(
        self, store: RabbitStore, metrics: Metrics, home: Home, upstream: ClientUpstream, validator: Validator
    ) -> None:
        self.home = home
        self.store = store
        self.upstream = upstream
        self._metrics = metrics
        self._validator = validator
        self._known: dict[bytes, float] = {}
        self._streams: dict[bytes, tuple[bool, float]] = {}
        self._touched: dict[Touched, None] = {}

    @property
    def commit_connection(self) -> CommitConnection:
        """The commit connection of this virtual host, which completes its branches."""
        return self.store.commit_connection(self.home.who.vhost)

    # -- changes

    def touch(self, link: Touched) -> None:
        """Schedule a flush of *link* at the end of this turn of the event loop."""
        self._touched[link] = None
        self.home.flush_soon()

    def flush(self) -> None:
        """Flush all touched links."""
        touched, self._touched = self._touched, {}
        for link in touched:
            link.flush()

    # -- targets

    async def check_target(self, address: Address) -> None:
        """Refuse a target that does not exist, or to which the client may not publish.

        Raises:
            AmqpError, UpstreamChannelClosed, XaError: the target is refused.
            UpstreamLost: the connection to the broker is lost.
        """
        check_address(address)
        exchange, key = route(address)
        if isinstance(address, QueueAddress):
            await self.find_target(address.name)
        elif exchange:
            await self._find_exchange(exchange)
        validation = self.validate(exchange, key, properties.EMPTY)
        close = None if validation is None else await validation
        # Without a key in the address, the subject of each message is its topic.
        fixed = isinstance(address, QueueAddress) or address.key is not None
        if close is not None and (fixed or b"to topic" not in close.reply_text):
            raise UpstreamChannelClosed(close)

    def knows(self, queue: bytes) -> bool:
        """Whether *queue* existed within the last :data:`_FRESH` seconds."""
        return self._known.get(queue, 0.0) > asyncio.get_running_loop().time()

    async def _find_exchange(self, exchange: bytes) -> None:
        await self._find(methods.ExchangeDeclare(exchange, b"", passive=True))

    async def _find(self, declare: methods.ExchangeDeclare | methods.QueueDeclare) -> None:
        """Send a passive declaration.

        RabbitMQ 4.2.6 and 4.3.0 refuse it without the configure permission, later versions without any permission. Then
        the first use of the queue or exchange shows whether it exists.
        """
        try:
            await self._ask(declare)
        except UpstreamChannelClosed as closed:
            if closed.close.reply_code != ReplyCode.ACCESS_REFUSED:
                raise

    async def find_queue(self, queue: bytes) -> None:
        """Check that a queue exists.

        Raises:
            UpstreamChannelClosed: 404, it does not exist; 405, it is exclusive to another connection.
        """
        await self._find(methods.QueueDeclare(queue, passive=True))

    async def find_target(self, queue: bytes) -> None:
        """Refuse a target queue that does not exist; clients may publish to exclusive queues of other connections.

        Raises:
            AmqpError: the broker's error.
            XaError: 506, no upstream channel is free.
        """
        if self.knows(queue):
            return
        try:
            await self._ask(methods.QueueDeclare(queue, passive=True))
        except UpstreamChannelClosed as closed:  # 403 too: a transaction would lose messages to a queue that is missing
            if closed.close.reply_code != ReplyCode.RESOURCE_LOCKED:
                raise broker_error(closed.close) from closed
        except UpstreamLost as error:
            raise broker_lost(error) from error
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[queue] = asyncio.get_running_loop().time() + _FRESH

    def no_queue(self, queue: bytes) -> AmqpError:
        """The error for a queue that no longer exists; removes it from the cache."""
        self._known.pop(queue, None)
        name, vhost = queue.decode("utf-8", "replace"), self.home.who.vhost
        return AmqpError(Condition.NOT_FOUND, f"no queue '{name}' in vhost '{vhost}'")

    def validate(self, exchange: bytes, routing_key: bytes, raw: bytes) -> Validation | None:
        """Let the broker check a publish; ``None`` if it is known to be allowed.

        Raises:
            WireError: 502, the properties *raw* are malformed.
        """
        validation = self._validator.validate(BasicPublish(exchange, routing_key, 0), raw)
        (self._metrics.validation_hits if validation is None else self._metrics.validation_misses).inc()
        return validation

    # -- queues and exchanges

    async def is_stream(self, queue: bytes) -> bool:
        """Whether a queue is a stream; for methods that a stream lacks, the broker ends the whole connection (540).

        Without an answer of the management API, dtx requests an impossible consumer: one with an offset, which only
        streams support, but without a prefetch, which streams need. The error text tells the type.

        The cached type may become wrong. That loses no message: only a stream accepts a consumer with an offset, and a
        method that a stream lacks only ends the connection.
        """
        known = self._streams.get(queue)
        if known is not None and known[1] > asyncio.get_running_loop().time():
            return known[0]
        try:
            found, fresh = await self.store.queries.is_stream(self.home.who.vhost, queue), _FRESH
        except ManagementError:
            found, fresh = await self._refuses_for_want_of_prefetch(queue), _TYPE_FRESH
        if len(self._streams) >= _MAX_KNOWN:
            self._streams.clear()
        self._streams[queue] = found, asyncio.get_running_loop().time() + fresh
        return found

    def forget_type(self, queue: bytes) -> None:
        """Remove the type of *queue* from the cache."""
        self._streams.pop(queue, None)

    async def _refuses_for_want_of_prefetch(self, queue: bytes) -> bool:
        impossible = methods.BasicConsume(queue, b"type", arguments=tables.entry(STREAM_OFFSET, b"S", b"next"))
        try:
            await self._ask(impossible)
        except UpstreamChannelClosed as closed:
            if closed.close.reply_code == ReplyCode.ACCESS_REFUSED:
                raise  # the client may not read the queue, so its type does not matter
            failed = closed.close.reply_code == ReplyCode.PRECONDITION_FAILED
            return failed and STREAM_OFFSET not in closed.close.reply_text
        return True

    async def subscribe(self, queue: bytes, address: ExchangeAddress, filters: dict[str, Any] | None) -> dict[str, Any]:
        """Bind the queue of a link to an exchange.

        The queue is not auto-delete: a link without credit has no consumer, and its messages must wait.

        Returns:
            The filters that are in effect.
        """
        found = subscription(address, filters, await self._kind(address))
        await self._ask(methods.QueueBind(queue, address.name, found.key, arguments=found.arguments))
        return found.filters

    async def _kind(self, address: ExchangeAddress) -> str | None:
        """The type of an exchange; ``None`` if it does not matter, or there is no management API.

        Raises:
            UpstreamChannelClosed: 404, the exchange does not exist.
            XaError: 403, the client may not read it.
        """
        known = known_kind(address.name)
        if known is not None:
            return known
        await self._find_exchange(address.name)
        if address.key is not None:
            return None
        who = self.home.who
        try:
            facts = await self.store.queries.exchange(who.vhost, who.user, address.name)
        except XaError as error:
            if error.code is ReplyCode.NOT_IMPLEMENTED:  # no management API
                return None
            raise
        return facts.type.decode("utf-8", "replace") or None

    async def new_queue(self) -> bytes:
        """Declare the exclusive queue of a dynamic node; the broker deletes it with the connection at the latest."""
        channel = await OwnChannel(self.upstream).open()
        queue = (await channel.declare(methods.QueueDeclare(b"", exclusive=True))).queue
        await channel.close()
        self.upstream.exclusive.add(queue)
        return queue

    def drop_queue(self, queue: bytes) -> None:
        """Delete the queue of a dynamic node, because its link is closed."""
        self.upstream.exclusive.discard(queue)
        self.home.manager.spawn(self._drop_queue(queue))

    async def _drop_queue(self, queue: bytes) -> None:
        try:
            await self._ask(methods.QueueDelete(queue))
        except (UpstreamChannelClosed, UpstreamLost, XaError) as error:
            _log.debug("queue not deleted", connection=self.home.id, queue=queue, reason=str(error))

    async def _ask(self, request: Method) -> None:
        channel = await OwnChannel(self.upstream).open()
        await channel.call(request)
        await channel.close()
