"""The broker of one client of AMQP 1.0: the connection to it, what it is asked, and what its errors become."""

import asyncio
from collections.abc import Callable
from typing import Any, Final, Protocol

from dtx.server.amqp10.addresses import Address, ExchangeAddress, QueueAddress, known_kind, route, subscription
from dtx.server.amqp10.nodes import Home, amqp_error
from dtx.store.rabbitmq.management import ManagementError
from dtx.store.rabbitmq.phase_two import Lane
from dtx.store.rabbitmq.service import Broker, ServiceConnection
from dtx.store.rabbitmq.store import RabbitStore
from dtx.store.rabbitmq.upstream import OwnChannel, UpstreamChannelClosed, UpstreamLost, words
from dtx.store.rabbitmq.validation import Judgement, Validator
from dtx.telemetry import Metrics, get_logger
from dtx.wire.amqp09 import methods, properties, tables
from dtx.wire.amqp09.codec import Method
from dtx.wire.amqp09.methods import BasicPublish, ChannelClose
from dtx.wire.amqp10.errors import AmqpError, Condition
from dtx.xa.codes import ReplyCode, XaError

_log = get_logger(part="connection")
STREAM_OFFSET: Final = b"x-stream-offset"
"""Argument of a stream's consumer, and header of what it gets."""
_FRESH: Final = 10.0
"""Seconds for which it holds that a queue is there, and of what type it is."""
_TYPE_FRESH: Final = 60.0
"""Seconds for which its type holds where only an error in the broker's log tells."""
_MAX_KNOWN: Final = 1024
"""Queues that one connection remembers."""
_CODES: Final = frozenset(ReplyCode)


def broker_error(close: ChannelClose) -> AmqpError:
    """The broker's own words, with the condition that says the same as its reply code."""
    if close.reply_code not in _CODES:
        return AmqpError(Condition.INTERNAL_ERROR, words(close))
    return amqp_error(XaError(ReplyCode(close.reply_code), words(close)))


def check_address(address: Address) -> None:
    """Refuse what a broker would close the whole connection for: "Malformed UTF-8 in shortstr" (501).

    Raises:
        AmqpError: invalid-field.
    """
    try:
        b"/".join(route(address)).decode()
    except UnicodeDecodeError:
        raise AmqpError(Condition.INVALID_FIELD, "the names that a broker has are UTF-8") from None


def broker_gone(reason: object) -> AmqpError:
    """The connection to the broker is lost, and that of the client cannot go on."""
    return AmqpError(Condition.CONNECTION_FORCED, f"the connection to the broker is gone: {reason}")


class ClientUpstream(ServiceConnection):
    """A connection to the broker on which dtx acts for a client, with the client's own credentials.

    Args:
        broker: where to, and as whom.
        name: shown in the broker's list of connections.
        home: the client's connection.
        lost: called with the reason when the connection is gone.
    """

    def __init__(self, broker: Broker, name: str, home: Home, lost: Callable[[str], None]) -> None:
        super().__init__(broker, name)
        self._home = home
        self._lost = lost

    def pause_writing(self) -> None:
        """The broker is slow: so is the client, from now on."""
        self._home.hold_client(self)

    def resume_writing(self) -> None:
        """The broker has caught up."""
        self._home.release_client(self)

    def on_lost(self, reason: str) -> None:
        """The client's connection ends."""
        super().on_lost(reason)
        self._lost(reason)


class Touched(Protocol):
    """A link about which something has changed."""

    def flush(self) -> None:
        """Look at what client and broker have said in one read, all together."""


class BrokerAccess:
    """The virtual host of the broker, as the links of one connection use it.

    Args:
        store: its broker.
        metrics: numbers.
        home: the connection.
        upstream: the connection to the broker, with the virtual host open.
        validator: of publishes, on a channel of that connection.
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
    def lane(self) -> Lane:
        """That completes the branches of this virtual host."""
        return self.store.lane(self.home.who.vhost)

    # -- pace

    def touch(self, link: Touched) -> None:
        """Something has changed for a link: it is looked at when the client has said all that it said at once."""
        self._touched[link] = None
        self.home.soon()

    def flush(self) -> None:
        """Look at all links that were touched."""
        touched, self._touched = self._touched, {}
        for link in touched:
            link.flush()

    # -- targets

    async def check_target(self, address: Address) -> None:
        """Refuse a target that does not exist, or that the client may not publish to.

        Raises:
            AmqpError, ChannelClosed, XaError: it is refused.
        """
        check_address(address)
        exchange, key = route(address)
        if isinstance(address, QueueAddress):
            await self.find_target(address.name)
        elif exchange:
            await self._find_exchange(exchange)
        judgement = self.judged(exchange, key, properties.EMPTY)
        close = None if judgement is None else await judgement
        # Which topics the messages have, their subjects say.
        fixed = isinstance(address, QueueAddress) or address.key is not None
        if close is not None and (fixed or b"to topic" not in close.reply_text):
            raise UpstreamChannelClosed(close)

    def knows(self, queue: bytes) -> bool:
        """Whether *queue* was there a moment ago."""
        return self._known.get(queue, 0.0) > asyncio.get_running_loop().time()

    async def _find_exchange(self, exchange: bytes) -> None:
        await self._ask(methods.ExchangeDeclare(exchange, b"", passive=True))

    async def find_queue(self, queue: bytes) -> None:
        """Ask for a queue.

        Raises:
            ChannelClosed: it is not there, or another connection's own.
        """
        await self._ask(methods.QueueDeclare(queue, passive=True))

    async def find_target(self, queue: bytes) -> None:
        """Refuse a queue that is not there; anybody may publish to another connection's own.

        Raises:
            AmqpError: the broker's words.
            XaError: 506, no channel is free to ask.
        """
        if self.knows(queue):
            return
        try:
            await self.find_queue(queue)
        except UpstreamChannelClosed as closed:
            if closed.close.reply_code != ReplyCode.RESOURCE_LOCKED:
                raise broker_error(closed.close) from closed
        except UpstreamLost as error:
            raise broker_gone(error) from error
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[queue] = asyncio.get_running_loop().time() + _FRESH

    def no_queue(self, queue: bytes) -> AmqpError:
        """A queue that was there is not any more."""
        self._known.pop(queue, None)
        name, vhost = queue.decode("utf-8", "replace"), self.home.who.vhost
        return AmqpError(Condition.NOT_FOUND, f"no queue '{name}' in vhost '{vhost}'")

    def judged(self, exchange: bytes, routing_key: bytes, raw: bytes) -> Judgement | None:
        """Have the broker judge a publish; ``None`` when it is known to be good.

        Raises:
            WireError: 502, the properties are malformed.
        """
        judgement = self._validator.judge(BasicPublish(exchange, routing_key, 0), raw)
        (self._metrics.validation_hits if judgement is None else self._metrics.validation_misses).inc()
        return judgement

    # -- queues and exchanges

    async def is_stream(self, queue: bytes) -> bool:
        """Whether a queue is a stream, which for what it does not know ends the whole connection (540).

        Where the management API does not tell, a consumer is asked for that no queue takes: one at an offset, which
        streams alone know, but without a prefetch, which they want.

        What was found holds for a while, though the name may be another kind of queue's by then. No message is lost by
        that: the consumer of a stream has an offset, which nothing else takes, and what a stream does not know only
        costs the connection.
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
        """What was found of the type of *queue* does not hold."""
        self._streams.pop(queue, None)

    async def _refuses_for_want_of_prefetch(self, queue: bytes) -> bool:
        impossible = methods.BasicConsume(queue, b"type", arguments=tables.entry(STREAM_OFFSET, b"S", b"next"))
        try:
            await self._ask(impossible)
        except UpstreamChannelClosed as closed:
            if closed.close.reply_code == ReplyCode.ACCESS_REFUSED:
                raise  # then it does not matter
            failed = closed.close.reply_code == ReplyCode.PRECONDITION_FAILED
            return failed and STREAM_OFFSET not in closed.close.reply_text
        return True

    async def subscribe(self, queue: bytes, address: ExchangeAddress, filters: dict[str, Any] | None) -> dict[str, Any]:
        """Bind the queue of a link to an exchange; the filters that are in place.

        It does not delete itself: a link without credit has no consumer, and its messages are to wait.
        """
        found = subscription(address, filters, await self._kind(address))
        await self._ask(methods.QueueBind(queue, address.name, found.key, arguments=found.arguments))
        return found.filters

    async def _kind(self, address: ExchangeAddress) -> str | None:
        """The type of an exchange; ``None`` where it does not matter, or the broker does not tell.

        Raises:
            XaError: 403, 404.
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
        """The queue of a dynamic node: it is the connection's own, and goes with it at the latest."""
        channel = await OwnChannel(self.upstream).open()
        queue = (await channel.declare(methods.QueueDeclare(b"", exclusive=True))).queue
        await channel.close()
        self.upstream.exclusive.add(queue)
        return queue

    def drop_queue(self, queue: bytes) -> None:
        """The link of a dynamic node is gone."""
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
