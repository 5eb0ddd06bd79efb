"""The nodes of AMQP 1.0 in a broker behind dtx; see :mod:`dtx.server.amqp10.nodes`.

Each client has a connection to the broker with its own user and password, so the broker checks its permissions. A link
to a client has a channel in tx mode, as a selected channel has for consuming. A link from a client has a channel in
confirm mode. The work of a transaction is handled like the work of any branch.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, cast

from dtx.manager import Requester
from dtx.manager.branch_runtime import BranchRuntime
from dtx.server.alongside.amqp10.destination import BrokerDestination
from dtx.server.alongside.amqp10.origins import BrokerOrigin, StreamOrigin
from dtx.server.alongside.amqp10.upstream import BrokerAccess, ClientUpstream, broker_error, broker_lost, check_address
from dtx.server.alongside.lock import declare_lock
from dtx.server.amqp10.addresses import Address, ExchangeAddress, QueueAddress, of_queue, stream_offset
from dtx.server.amqp10.nodes import DEFAULT_VHOST, Home, Working, named_vhost
from dtx.server.client_session import ClientTransport
from dtx.store.rabbitmq.confirm_channel import ConfirmChannel
from dtx.store.rabbitmq.consume_channel import ConsumeChannel
from dtx.store.rabbitmq.consumed_queues import ConsumedQueues
from dtx.store.rabbitmq.service import BrokerLoginRefused
from dtx.store.rabbitmq.store import RabbitStore
from dtx.store.rabbitmq.upstream import OwnChannel, UpstreamChannelClosed, UpstreamLost
from dtx.store.rabbitmq.validation import Validator
from dtx.telemetry import Metrics, get_logger
from dtx.wire.amqp09 import handshake, methods
from dtx.wire.amqp09.channel import Passing
from dtx.wire.amqp09.handshake import Credentials
from dtx.wire.amqp10.errors import AmqpError, Condition
from dtx.wire.amqp10.performatives import PLAIN, Login, SaslCode
from dtx.xa.codes import ReplyCode, XaError

_log = get_logger(part="connection")

_MAX_NAME: Final = 255
"""Maximum bytes of a name in AMQP 0-9-1."""
_CONNECTION_PATIENCE: Final = 5.0
"""Seconds that a control link waits for the commit connection of its virtual host."""

_LIMIT_PATIENCE: Final = 1.0
"""Seconds that a link to the broker waits for the commit connection, which knows the largest message."""


class BrokerNodes:
    """The nodes of one client connection in a virtual host of the broker.

    Args:
        store: of the broker.
        metrics: of the service.
        max_kept: maximum bytes of contents that are kept for the unsettled deliveries of one link.
        home: the client's connection.
    """

    mechanisms: tuple[str, ...] = (PLAIN,)

    def __init__(self, store: RabbitStore, metrics: Metrics, max_kept: int, home: Home) -> None:
        self.home = home
        self.store = store
        self._upstream: ClientUpstream | None = None
        self._metrics = metrics
        self._broker: BrokerAccess
        """Set when the virtual host is open."""
        self._max_kept = max_kept
        self._user: str | None = None
        self._may_work = False
        """The login has a user name that the broker has authenticated."""
        self._opening: set[StreamOrigin] = set()
        self._running = False
        self._left: Callable[[], None] | None = None
        self._ended: Callable[[], None] | None = None
        self._close_sent = False

    # -- login

    async def log_in(self, login: Login | None, transport: ClientTransport) -> SaslCode:
        """See :class:`Nodes`: the broker checks the credentials."""
        if not isinstance(login, Credentials):
            return SaslCode.AUTH
        try:
            user, password = login.user.decode(), login.password.decode()
        except UnicodeDecodeError:
            return SaslCode.AUTH
        broker = replace(self.store.broker, user=user, password=password)
        self._upstream = upstream = ClientUpstream(
            broker, f"dtx, for AMQP 1.0 from {transport.peer}", self.home, self._upstream_lost
        )
        try:
            await upstream.authenticate()
        except BrokerLoginRefused as error:
            _log.info("login refused", connection=self.home.id, user=user, reason=str(error))
            return SaslCode.AUTH
        except (OSError, UpstreamLost) as error:
            _log.warning("broker cannot be reached", connection=self.home.id, broker=str(broker), reason=str(error))
            return SaslCode.SYS_TEMP
        self._user = user
        response = handshake.plain(login.user, login.password)
        self._may_work = handshake.user_name(handshake.PLAIN, response) is not None
        return SaslCode.OK

    def enter(self, hostname: str | None) -> Awaitable[Requester]:
        """See :class:`Nodes`: ``vhost:`` and the name, as in RabbitMQ."""
        name = named_vhost(hostname)
        return self._enter(DEFAULT_VHOST if name is None else name)

    async def _enter(self, vhost: str) -> Requester:
        user = self._user
        assert user is not None, "open is taken after the login only"
        if len(vhost.encode()) > _MAX_NAME:
            raise AmqpError(Condition.NOT_FOUND, f"vhost {vhost} not found")
        try:
            await self.upstream.open(vhost)
            side = await OwnChannel(self.upstream).open(methods.TxSelect())
        except BrokerLoginRefused as error:
            missing = "not found" in str(error)
            raise AmqpError(Condition.NOT_FOUND if missing else Condition.UNAUTHORIZED_ACCESS, str(error)) from error
        except (OSError, UpstreamLost, UpstreamChannelClosed) as error:
            raise broker_lost(error) from error
        validator = Validator(self.upstream, side.engine)
        self._broker = BrokerAccess(self.store, self._metrics, self.home, self.upstream, validator)
        self._running = True
        return Requester(user, vhost)

    def ban_reason(self) -> str | None:
        """See :class:`Nodes`: always ``None``, because the broker ends such a connection."""
        return None

    @property
    def upstream(self) -> ClientUpstream:
        """The connection to the broker; exists after the login."""
        assert self._upstream is not None, "nothing is done before the login"
        return self._upstream

    # -- transactions

    def coordinate(self) -> Awaitable[None] | None:
        """See :class:`Nodes`: has the same requirements as a select."""
        if not self._may_work:
            raise XaError(ReplyCode.ACCESS_REFUSED, "transactions need a login with a user name, not with a token")
        return None if self.upstream.lock else self._declare_lock()

    async def _declare_lock(self) -> None:
        await self._broker.commit_connection.ready(_CONNECTION_PATIENCE)
        try:
            side = await declare_lock(self.upstream, self.store, self.home.who, "a transaction")
            await side.close()
        except UpstreamLost as error:
            raise broker_lost(error) from error

    def refusal(self, entry: BranchRuntime) -> str | None:  # noqa: ARG002 - only the broker knows
        """See :class:`Nodes`: always ``None``."""
        return None

    # -- nodes

    def destination(self, address: Address | None, *, dynamic: bool) -> Awaitable[BrokerDestination]:
        """See :class:`Nodes`."""
        return self._destination(address, dynamic)

    async def _destination(self, address: Address | None, dynamic: bool) -> BrokerDestination:
        made = None
        try:
            if dynamic:
                made = await self._broker.new_queue()
                address = QueueAddress(made)
            if address is not None:
                await self._broker.check_target(address)
            channel = await OwnChannel(self.upstream).open(methods.ConfirmSelect())
            with suppress(XaError):  # the broker itself checks the size of what is in no branch
                await self._broker.commit_connection.ready(_LIMIT_PATIENCE)
        except UpstreamChannelClosed as closed:
            raise broker_error(closed.close) from closed
        except UpstreamLost as error:
            raise broker_lost(error) from error
        shown = None if made is None else of_queue(made)
        return BrokerDestination(self._broker, channel, shown, made, self._end_if_done)

    def origin(
        self, address: Address | None, *, dynamic: bool, filters: dict[str, Any] | None
    ) -> Awaitable[BrokerOrigin | StreamOrigin]:
        """See :class:`Nodes`.

        The broker checks the read permission on a queue when there is credit. An earlier check would take a message or
        cause an error in the broker's log. A stream is read from the attach on.
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
                await self._broker.find_queue(queue)
                is_stream = await self._broker.is_stream(queue)
            else:
                queue = made = await self._broker.new_queue()
                if isinstance(address, ExchangeAddress):
                    in_place = await self._broker.subscribe(queue, address, filters)
                else:
                    shown = of_queue(queue)
            channel = await OwnChannel(self.upstream).open()
            channel.engine.pass_frames(Passing.SINGLY)
            taking = ConsumeChannel(
                self.upstream,
                channel.number,
                self._max_kept,
                self.home.budget,
                ConsumedQueues(self.upstream.exclusive, queue),
                self,
                copies=self.store.copies,
                vhost=self._broker.commit_connection.vhost,
                revokes=self._broker.commit_connection.revokes,
            )
            await taking.start_tx()
            if is_stream:
                return await self._stream_origin(taking, queue, filters)
        except (AmqpError, XaError, UpstreamChannelClosed, UpstreamLost) as error:
            if made is not None:
                self._broker.drop_queue(made)
            if isinstance(error, UpstreamChannelClosed):
                raise broker_error(error.close) from error
            if isinstance(error, UpstreamLost):
                raise broker_lost(error) from error
            raise
        return BrokerOrigin(self._broker, taking, queue, shown, made=made is not None, filters=in_place)

    async def _stream_origin(
        self, taking: ConsumeChannel, queue: bytes, filters: dict[str, Any] | None
    ) -> StreamOrigin:
        offset, in_place = stream_offset(filters)
        origin = StreamOrigin(self._broker, taking, queue, in_place, offset)
        self._opening.add(origin)
        try:
            await origin.open()
        except UpstreamChannelClosed:
            self._broker.forget_type(queue)  # the name may belong to another kind of queue now
            raise
        finally:
            self._opening.discard(origin)
        return origin

    # -- flow control

    def flush(self) -> None:
        """See :class:`Nodes`."""
        self._broker.flush()

    def pause(self) -> None:
        """See :class:`Nodes`."""
        if self._running:
            self.upstream.pause_reading(self)

    def resume(self) -> None:
        """See :class:`Nodes`."""
        if self._running:
            self.upstream.resume_reading(self)

    # -- the owner of its channels

    def held_lost(self, branch: object, reason: str) -> None:
        """See :class:`Keeper`."""
        cast("Working", branch).doom(f"deliveries that it consumed went back to the broker: {reason}")

    def consume_channel_ended(self) -> None:
        """See :class:`Keeper`."""
        self._end_if_done()

    def consume_channel_idle(self) -> None:
        """See :class:`Keeper`."""
        self._end_if_done()

    def hold_client(self, reason: object) -> None:
        """See :class:`Keeper`."""
        self.home.hold_client(reason)

    def release_client(self, reason: object) -> None:
        """See :class:`Keeper`."""
        self.home.release_client(reason)

    # -- the end

    def leave(self, then: Callable[[], None] | None) -> None:
        """See :class:`Nodes`."""
        self.flush()
        self._left = then
        self._end_if_done()

    def end(self, then: Callable[[], None]) -> None:
        """See :class:`Nodes`: branches may keep the connection to the broker open."""
        self._ended = then
        upstream = self._upstream
        if upstream is not None:
            if self._running:
                upstream.resume_reading(self)
            else:
                upstream.end("the client left during the handshake")
        self._end_if_done()

    def _end_if_done(self) -> None:
        """Run the pending calls of :meth:`leave` and :meth:`end` when the channels have finished their work."""
        upstream = self._upstream
        handlers = [] if upstream is None or upstream.is_lost else list(upstream.handlers.values())
        takings = [each for each in handlers if isinstance(each, ConsumeChannel)]
        if any(isinstance(each, ConfirmChannel) for each in handlers) or not all(each.only_holds for each in takings):
            return
        left, self._left = self._left, None
        if left is not None:
            left()
        if self._ended is None or takings:
            return
        if upstream is None or upstream.is_lost:
            self._ended()
        elif not self._close_sent:
            self._close_sent = True
            upstream.close()

    def abort(self) -> None:
        """See :class:`Nodes`."""
        if self._upstream is not None:
            self._upstream.abort("dtx ended the connection")

    def _upstream_lost(self, reason: str) -> None:
        """End the client's connection, because the connection to the broker is lost."""
        for origin in self._opening:
            origin.upstream_lost(reason)
        if self._running:
            self._running = False
            self.home.fail(broker_lost(reason))
        self._end_if_done()
