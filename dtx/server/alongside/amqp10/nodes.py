"""The nodes of AMQP 1.0 in a broker behind dtx; see :mod:`dtx.server.amqp10.nodes`.

Each client has a connection to the broker, with its own user and password: who may do what, the broker says. A link to
a client has a channel in tx mode, as a selected channel has for what it consumes; a link from a client has one in
confirm mode. What a transaction holds is held, judged, taken and published as the work of any branch.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Final, cast

from dtx.manager import Who
from dtx.manager.entry import Entry
from dtx.server.alongside.amqp10.destination import BrokerDestination
from dtx.server.alongside.amqp10.origin import BrokerOrigin
from dtx.server.alongside.amqp10.reader import Reader
from dtx.server.alongside.amqp10.refusals import broker_error, broker_gone, check_address
from dtx.server.alongside.amqp10.stream import OFFSET, StreamOrigin
from dtx.server.alongside.amqp10.upstream import ClientUpstream
from dtx.server.alongside.lock import declare_lock
from dtx.server.amqp10.addresses import (
    Address,
    ExchangeAddress,
    QueueAddress,
    known_kind,
    of_queue,
    stream_offset,
    subscription,
)
from dtx.server.amqp10.nodes import Home, Working
from dtx.server.front import ClientTransport
from dtx.store.rabbitmq.confirming import ConfirmChannel
from dtx.store.rabbitmq.lane import Lane
from dtx.store.rabbitmq.management import ManagementError
from dtx.store.rabbitmq.service import LoginRefused
from dtx.store.rabbitmq.store import RabbitStore
from dtx.store.rabbitmq.taking import TakingChannel
from dtx.store.rabbitmq.upstream import ChannelClosed, OwnChannel, UpstreamLost
from dtx.store.rabbitmq.validation import Judgement, Validator
from dtx.telemetry import Metrics, get_logger
from dtx.wire.amqp09 import handshake, methods, properties, tables
from dtx.wire.amqp09.handshake import Credentials
from dtx.wire.amqp09.methods import BasicPublish
from dtx.wire.amqp10.errors import AmqpError, Condition
from dtx.wire.amqp10.performatives import PLAIN, Login, SaslCode
from dtx.xa.codes import ReplyCode, XaError

_log = get_logger(part="connection")

_VHOST: Final = "vhost:"
_DEFAULT_VHOST: Final = "/"
_MAX_NAME: Final = 255
"""Octets of a name that AMQP 0-9-1 can say."""
_LANE_PATIENCE: Final = 5.0
"""Seconds that a control link waits for the lane of its vhost."""
_FRESH: Final = 10.0
"""Seconds for which it holds that a queue is there, and of what type it is."""
_TYPE_FRESH: Final = 60.0
"""Seconds for which its type holds where only an error in the broker's log tells."""
_MAX_KNOWN: Final = 1024
"""Queues that one connection remembers."""


class BrokerNodes:
    """A virtual host of the broker, for one connection.

    Args:
        store: its broker.
        metrics: numbers.
        max_kept: octets of the contents that are kept of unsettled deliveries of one link.
        home: the connection.
    """

    mechanisms: tuple[str, ...] = (PLAIN,)

    def __init__(self, store: RabbitStore, metrics: Metrics, max_kept: int, home: Home) -> None:
        self.home = home
        self.store = store
        self._upstream: ClientUpstream | None = None
        self._metrics = metrics
        self._max_kept = max_kept
        self._user: str | None = None
        self._may_work = False
        """The user's name can be relied on."""
        self._validator: Validator
        self._known: dict[bytes, float] = {}
        self._streams: dict[bytes, tuple[bool, float]] = {}
        self._touched: dict[Reader, None] = {}
        self._opening: set[StreamOrigin] = set()
        self._running = False
        self._left: Callable[[], None] | None = None
        self._ended: Callable[[], None] | None = None
        self._said_goodbye = False

    # -- who

    async def log_in(self, login: Login | None, transport: ClientTransport) -> SaslCode:
        """See :class:`~dtx.server.amqp10.nodes.Nodes`: the broker decides."""
        if not isinstance(login, Credentials):
            return SaslCode.AUTH
        try:
            user, password = login.user.decode(), login.password.decode()
        except UnicodeDecodeError:
            return SaslCode.AUTH
        broker = replace(self.store.broker, user=user, password=password)
        self._upstream = upstream = ClientUpstream(broker, f"dtx, for AMQP 1.0 from {transport.peer}", self)
        try:
            await upstream.authenticate()
        except LoginRefused as error:
            _log.info("login refused", connection=self.home.id, user=user, reason=str(error))
            return SaslCode.AUTH
        except (OSError, UpstreamLost) as error:
            _log.warning("broker cannot be reached", connection=self.home.id, broker=str(broker), reason=str(error))
            return SaslCode.SYS_TEMP
        self._user = user
        response = handshake.plain(login.user, login.password)
        self._may_work = handshake.user_name(handshake.PLAIN, response) is not None
        return SaslCode.OK

    def enter(self, hostname: str | None) -> Awaitable[Who]:
        """See :class:`~dtx.server.amqp10.nodes.Nodes`: a name with ``vhost:`` before it, as RabbitMQ has it."""
        name = hostname or ""
        return self._enter(name[len(_VHOST) :] if name.startswith(_VHOST) else _DEFAULT_VHOST)

    async def _enter(self, vhost: str) -> Who:
        user = self._user
        assert user is not None, "open is taken after the login only"
        if len(vhost.encode()) > _MAX_NAME:
            raise AmqpError(Condition.NOT_FOUND, f"vhost {vhost} not found")
        try:
            await self.upstream.open(vhost)
            side = await OwnChannel(self.upstream).open()
            await side.call(methods.TxSelect().encode(), methods.TxSelectOk.KEY)
        except LoginRefused as error:
            missing = "not found" in str(error)
            raise AmqpError(Condition.NOT_FOUND if missing else Condition.UNAUTHORIZED_ACCESS, str(error)) from error
        except (OSError, UpstreamLost, ChannelClosed) as error:
            raise broker_gone(error) from error
        self._validator = Validator(self.upstream, side.number)
        self._running = True
        return Who(user, vhost)

    def barred(self) -> str | None:
        """See :class:`~dtx.server.amqp10.nodes.Nodes`: the broker says so itself."""
        return None

    @property
    def upstream(self) -> ClientUpstream:
        """The connection to the broker, once the client has logged in."""
        assert self._upstream is not None, "nothing is done before the login"
        return self._upstream

    @property
    def lane(self) -> Lane:
        """That completes the branches of this virtual host."""
        return self.store.lane(self.home.who.vhost)

    # -- transactions

    def coordinate(self) -> Awaitable[None] | None:
        """See :class:`~dtx.server.amqp10.nodes.Nodes`: what a selected channel needs is needed here, too."""
        if not self._may_work:
            raise XaError(
                ReplyCode.ACCESS_REFUSED, "transactions need a user name that can be relied on, and not a token"
            )
        return None if self.upstream.lock else self._lock_up()

    async def _lock_up(self) -> None:
        await self.lane.ready(_LANE_PATIENCE)
        try:
            side = await declare_lock(self.upstream, self.store, self.home.who, "a transaction")
            await side.close()
        except UpstreamLost as error:
            raise broker_gone(error) from error

    def refusal(self, entry: Entry) -> str | None:  # noqa: ARG002 - nobody knows before
        """See :class:`~dtx.server.amqp10.nodes.Nodes`."""
        return None

    # -- nodes

    def destination(self, address: Address | None, *, dynamic: bool) -> Awaitable[BrokerDestination]:
        """See :class:`~dtx.server.amqp10.nodes.Nodes`."""
        return self._destination(address, dynamic)

    async def _destination(self, address: Address | None, dynamic: bool) -> BrokerDestination:
        made = None
        try:
            if dynamic:
                made = await self._new_queue()
                address = QueueAddress(made)
            if address is not None:
                await self._check_target(address)
            channel = await OwnChannel(self.upstream).open()
            await channel.call(methods.ConfirmSelect().encode(), methods.ConfirmSelectOk.KEY)
        except ChannelClosed as closed:
            raise broker_error(closed.close) from closed
        except UpstreamLost as error:
            raise broker_gone(error) from error
        return BrokerDestination(self, channel.number, None if made is None else of_queue(made), made)

    async def _check_target(self, address: Address) -> None:
        check_address(address)
        if isinstance(address, QueueAddress):
            await self.find_target(address.name)
            exchange, key = b"", address.name
        else:
            exchange, key = address.name, address.key or b""
            if exchange:
                passive = methods.ExchangeDeclare(exchange, b"", passive=True).encode()
                await self._ask(passive, methods.ExchangeDeclareOk.KEY)
        judgement = self.judged(exchange, key, properties.EMPTY)
        close = None if judgement is None else await judgement
        # Which topics the messages have, their subjects say.
        fixed = isinstance(address, QueueAddress) or address.key is not None
        if close is not None and (fixed or b"to topic" not in close.reply_text):
            raise ChannelClosed(close)

    def origin(
        self, address: Address | None, *, dynamic: bool, filters: dict[str, Any] | None
    ) -> Awaitable[BrokerOrigin | StreamOrigin]:
        """See :class:`~dtx.server.amqp10.nodes.Nodes`.

        Whether the client may read a queue, the broker says when there is credit: whatever asked it before would take
        a message, or be an error in its log. A stream is read from the attach on.
        """
        return self._origin(None if dynamic else address, filters)

    async def _origin(self, address: Address | None, filters: dict[str, Any] | None) -> BrokerOrigin | StreamOrigin:
        made = shown = None
        is_stream = False
        in_place: dict[str, Any] = {}
        if address is not None:
            check_address(address)
        try:
            if isinstance(address, QueueAddress):
                queue = address.name
                await self._find_queue(queue)
                is_stream = await self._is_stream(queue)
            else:
                queue = made = await self._new_queue()
                if isinstance(address, ExchangeAddress):
                    in_place = await self._subscribe(queue, address, filters)
                else:
                    shown = of_queue(queue)
            channel = await OwnChannel(self.upstream).open()
            taking = TakingChannel(self.upstream, channel.number, self._max_kept, self.home.budget, queue, self)
            await taking.start_tx()
            if is_stream:
                return await self._stream_origin(taking, queue, filters)
        except (AmqpError, XaError, ChannelClosed, UpstreamLost) as error:
            if made is not None:
                self.drop_queue(made)
            if isinstance(error, ChannelClosed):
                raise broker_error(error.close) from error
            if isinstance(error, UpstreamLost):
                raise broker_gone(error) from error
            raise
        return BrokerOrigin(self, taking, queue, shown, made=made is not None, filters=in_place)

    async def _stream_origin(self, taking: TakingChannel, queue: bytes, filters: dict[str, Any] | None) -> StreamOrigin:
        offset, in_place = stream_offset(filters)
        origin = StreamOrigin(self, taking, queue, in_place, offset)
        self._opening.add(origin)
        try:
            await origin.open()
        except ChannelClosed:
            self._streams.pop(queue, None)  # it may be another kind of queue by now
            raise
        finally:
            self._opening.discard(origin)
        return origin

    async def _is_stream(self, queue: bytes) -> bool:
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

    async def _refuses_for_want_of_prefetch(self, queue: bytes) -> bool:
        impossible = methods.BasicConsume(queue, b"type", arguments=tables.entry(OFFSET, b"S", b"next")).encode()
        try:
            await self._ask(impossible, methods.BasicConsumeOk.KEY)
        except ChannelClosed as closed:
            if closed.close.reply_code == ReplyCode.ACCESS_REFUSED:
                raise  # then it does not matter
            failed = closed.close.reply_code == ReplyCode.PRECONDITION_FAILED
            return failed and OFFSET not in closed.close.reply_text
        return True

    async def _subscribe(
        self, queue: bytes, address: ExchangeAddress, filters: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Bind the queue of a link to an exchange; the filters that are in place.

        It does not delete itself: a link without credit has no consumer, and its messages are to wait.
        """
        found = subscription(address, filters, await self._kind(address))
        await self._ask(
            methods.QueueBind(queue, address.name, found.key, arguments=found.arguments).encode(),
            methods.QueueBindOk.KEY,
        )
        return found.filters

    async def _kind(self, address: ExchangeAddress) -> str | None:
        """The type of an exchange; ``None`` where it does not matter, or the broker does not tell.

        Raises:
            XaError: 403, 404.
        """
        known = known_kind(address.name)
        if known is not None:
            return known
        passive = methods.ExchangeDeclare(address.name, b"", passive=True).encode()
        await self._ask(passive, methods.ExchangeDeclareOk.KEY)
        if address.key is not None:
            return None
        who = self.home.who
        try:
            facts = await self.store.queries.exchange(who.vhost, self._user, address.name)
        except XaError as error:
            if error.code is ReplyCode.NOT_IMPLEMENTED:  # no management API
                return None
            raise
        return facts.type.decode("utf-8", "replace") or None

    async def _new_queue(self) -> bytes:
        """The queue of a dynamic node: it is the connection's own, and goes with it at the latest."""
        channel = await OwnChannel(self.upstream).open()
        _, payload, _ = await channel.call(
            methods.QueueDeclare(b"", exclusive=True).encode(), methods.QueueDeclareOk.KEY
        )
        await channel.close()
        queue = methods.QueueDeclareOk.decode(payload).queue
        self.upstream.exclusive.add(queue)
        return queue

    def drop_queue(self, queue: bytes) -> None:
        """The link of a dynamic node is gone."""
        self.upstream.exclusive.discard(queue)
        self.home.manager.spawn(self._drop_queue(queue))

    async def _drop_queue(self, queue: bytes) -> None:
        try:
            await self._ask(methods.QueueDelete(queue).encode(), methods.QueueDeleteOk.KEY)
        except (ChannelClosed, UpstreamLost, XaError) as error:
            _log.debug("queue not deleted", connection=self.home.id, queue=queue, reason=str(error))

    async def _ask(self, payload: bytes, answer: int) -> None:
        channel = await OwnChannel(self.upstream).open()
        await channel.call(payload, answer)
        await channel.close()

    def knows(self, queue: bytes) -> bool:
        """Whether *queue* was there a moment ago."""
        return self._known.get(queue, 0.0) > asyncio.get_running_loop().time()

    async def _find_queue(self, queue: bytes) -> None:
        await self._ask(methods.QueueDeclare(queue, passive=True).encode(), methods.QueueDeclareOk.KEY)

    async def find_target(self, queue: bytes) -> None:
        """Refuse a queue that is not there; anybody may publish to another connection's own.

        Raises:
            AmqpError: the broker's words.
            XaError: 506, no channel is free to ask.
        """
        if self.knows(queue):
            return
        try:
            await self._find_queue(queue)
        except ChannelClosed as closed:
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

    # -- pace

    def touch(self, origin: Reader) -> None:
        """Something has changed for a link: it is looked at when the client has said all that it said at once."""
        self._touched[origin] = None
        self.home.soon()

    def flush(self) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Nodes`."""
        touched, self._touched = self._touched, {}
        for origin in touched:
            origin.flush()

    def pause(self) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Nodes`."""
        if self._running:
            self.upstream.pause_reading(self)

    def go_on(self) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Nodes`."""
        if self._running:
            self.upstream.resume_reading(self)

    # -- the keeper of its channels

    def held_lost(self, branch: object, reason: str) -> None:
        """See :class:`~dtx.store.rabbitmq.taking.Keeper`."""
        cast("Working", branch).doom(f"deliveries that it consumed went back to the broker: {reason}")

    def taking_ended(self) -> None:
        """See :class:`~dtx.store.rabbitmq.taking.Keeper`."""
        self._go_if_done()

    def taking_rests(self) -> None:
        """See :class:`~dtx.store.rabbitmq.taking.Keeper`."""
        self._go_if_done()

    def hold_client(self, reason: object) -> None:
        """See :class:`~dtx.store.rabbitmq.taking.Keeper`."""
        self.home.hold(reason)

    def release_client(self, reason: object) -> None:
        """See :class:`~dtx.store.rabbitmq.taking.Keeper`."""
        self.home.release(reason)

    def close_publishing(self, channel: ConfirmChannel) -> None:
        """A link from the client is gone."""
        channel.close(self._go_if_done)

    # -- the end

    def leave(self, then: Callable[[], None] | None) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Nodes`."""
        self.flush()
        self._left = then
        self._go_if_done()

    def end(self, then: Callable[[], None]) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Nodes`: branches may still need the connection to the broker."""
        self._ended = then
        upstream = self._upstream
        if upstream is not None:
            if self._running:
                upstream.resume_reading(self)
            else:
                upstream.end("the client left during the handshake")
        self._go_if_done()

    def _go_if_done(self) -> None:
        """Whoever waits for what is under way goes on when it is through."""
        upstream = self._upstream
        handlers = [] if upstream is None or upstream.is_lost else list(upstream.handlers.values())
        takings = [each for each in handlers if isinstance(each, TakingChannel)]
        if any(isinstance(each, ConfirmChannel) for each in handlers) or not all(each.rests for each in takings):
            return
        left, self._left = self._left, None
        if left is not None:
            left()
        if self._ended is None or takings:
            return
        if upstream is None or upstream.is_lost:
            self._ended()
        elif not self._said_goodbye:
            self._said_goodbye = True
            upstream.close()

    def abort(self) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Nodes`."""
        if self._upstream is not None:
            self._upstream.abort("dtx ends, and the branches that have not voted with it")

    def upstream_lost(self, reason: str) -> None:
        """The connection to the broker is gone, and what was held on it."""
        for origin in self._opening:
            origin.upstream_lost(reason)
        if self._running:
            self._running = False
            self.home.fail(broker_gone(reason))
        self._go_if_done()
