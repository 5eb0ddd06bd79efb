"""Links from clients: messages for exchanges of a broker.

The broker checks each message on the side channel before dtx publishes or holds it, as for a branch of AMQP 0-9. So dtx
can reject a single message that the broker refuses. A refused publish would close the channel and lose the other
messages on it. The validator remembers good results, so most messages need no question.
"""

from asyncio import CancelledError, Future, get_running_loop
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, cast

from dtx.server.alongside.amqp10.upstream import BrokerAccess, broker_error, check_address
from dtx.server.amqp10.addresses import Address, route
from dtx.server.amqp10.mapping import KEPT, Content
from dtx.server.amqp10.nodes import NodeSender, amqp_error
from dtx.store.rabbitmq import capture
from dtx.store.rabbitmq.confirm_channel import ConfirmChannel, MessageFate
from dtx.store.rabbitmq.upstream import OwnChannel
from dtx.store.rabbitmq.validation import Validation
from dtx.store.work import HeldPublish
from dtx.wire.amqp09.methods import ChannelClose
from dtx.wire.amqp10.errors import AmqpError, Condition
from dtx.wire.amqp10.performatives import ACCEPTED, RELEASED, Outcome
from dtx.xa.codes import XaError

_MAX_WAITING: Final = 1 << 20
"""Bytes of messages that wait to be checked; above it, dtx stops reading from the client."""
_OVERHEAD: Final = 1 << 10
"""Bytes that a waiting message counts in addition to its properties and body. This bounds the number of waiting
messages, because all of them may be published in one turn of the event loop.
"""
_FRAME: Final = 64
"""Maximum bytes of a header frame in addition to its properties."""


class _Waiting(NamedTuple):
    delivery: int | None
    message: HeldPublish
    validation: Validation | None

    @property
    def size(self) -> int:
        """Bytes that count against :data:`_MAX_WAITING`."""
        return _OVERHEAD + len(self.message.properties) + len(self.message.body)


class _Name(NamedTuple):
    """Identifies a message on the confirm channel."""

    delivery: int | None
    queue: bytes | None
    """The target queue of a message for the default exchange."""


class BrokerDestination:
    """Publishes the messages of one link from a client.

    Args:
        broker: of the connection.
        channel: open and in confirm mode.
        shown: see :class:`Destination`.
        made: the queue that is deleted with the link.
        on_closed: called when the link is closed and none of its messages is in progress.
    """

    def __init__(
        self,
        broker: BrokerAccess,
        channel: OwnChannel,
        shown: str | None,
        made: bytes | None,
        on_closed: Callable[[], None],
    ) -> None:
        self.shown = shown
        self._broker = broker
        self._on_closed = on_closed
        self._made = made
        self._sender: NodeSender
        self._line: deque[_Waiting] = deque()
        self._size = 0
        self._closing = False
        self._channel = ConfirmChannel(broker.upstream, channel.engine, KEPT, self)

    @property
    def limit(self) -> int:
        """See :class:`Destination`."""
        return self._broker.commit_connection.max_message_bytes

    def begin(self, sender: NodeSender) -> None:
        """See :class:`Destination`."""
        self._sender = sender

    def address(self, address: Address, subject: str | None, content: Content) -> HeldPublish:
        """See :class:`Destination`; the broker checks the message later."""
        if len(content.properties) + _FRAME > self._broker.upstream.engine.agreed.frame_max:
            raise AmqpError(
                Condition.MESSAGE_SIZE_EXCEEDED, f"the message has {len(content.properties)} bytes outside its body"
            )
        check_address(address)
        exchange, key = route(address, subject)
        return HeldPublish(exchange, key, False, content.properties, content.body)

    # -- outside of transactions

    def send(self, delivery: int | None, message: HeldPublish) -> None:
        """See :class:`Destination`."""
        validation = self._broker.validate(message.exchange, message.routing_key, message.properties)
        if validation is None and not self._line:
            self._publish(delivery, message)
            return
        waiting = _Waiting(delivery, message, validation)
        self._line.append(waiting)
        self._size += waiting.size
        if self._size > _MAX_WAITING:
            self._broker.home.hold_client(self)
        if validation is not None:
            validation.add_done_callback(self._send_checked)

    def _send_checked(self, _: object) -> None:
        """Publish or reject the checked messages in order."""
        line = self._line
        while line and (line[0].validation is None or line[0].validation.done()):
            first = line.popleft()
            delivery, message, validation = first
            self._size -= first.size
            if validation is None or (not validation.cancelled() and validation.result() is None):
                self._publish(delivery, message)
            elif not validation.cancelled():
                self._sender.reject(delivery, broker_error(cast("ChannelClose", validation.result())))
        if self._size <= _MAX_WAITING:
            self._broker.home.release_client(self)
        if self._closing and not line:
            self._close()

    def _publish(self, delivery: int | None, message: HeldPublish) -> None:
        queue = None if message.exchange else message.routing_key
        self._channel.publish(_Name(delivery, queue), message)

    def reported(self, names: Sequence[object], fate: MessageFate) -> None:
        """See :class:`ConfirmOwner`."""
        found = cast("Sequence[_Name]", names)
        if fate is MessageFate.RETURNED:
            for name in found:
                self._returned(name)
            return
        if fate is MessageFate.CONFIRMED:
            deliveries = [name.delivery for name in found if name.delivery is not None]
            if deliveries:
                self._sender.answer(deliveries, ACCEPTED)
            return
        error = AmqpError(Condition.RESOURCE_LIMIT_EXCEEDED, "a queue refused the message (reject-publish)")
        for name in found:
            if name.delivery is not None:
                self._sender.reject(name.delivery, error)

    def _returned(self, name: _Name) -> None:
        if name.queue is not None:
            self._sender.reject(name.delivery, self._broker.no_queue(name.queue))
        elif name.delivery is not None:
            self._sender.answer((name.delivery,), RELEASED)

    def closed(self, close: ChannelClose) -> None:
        """See :class:`ConfirmOwner`."""
        self._sender.fail(broker_error(close))

    # -- in transactions

    def validate(self, message: HeldPublish) -> Outcome | Future[AmqpError | None]:
        """See :class:`Destination`."""
        broker = self._broker
        capture.check_size(broker.commit_connection, len(message.body))
        capture.check_publish(
            broker.commit_connection,
            broker.store.broker.user,
            message.exchange,
            message.routing_key,
            message.properties,
        )
        validation = broker.validate(message.exchange, message.routing_key, message.properties)
        known = bool(message.exchange) or broker.knows(message.routing_key)
        if validation is None and known:
            return ACCEPTED
        result: Future[AmqpError | None] = get_running_loop().create_future()
        broker.home.manager.spawn(self._validate(message, validation, known, result))
        return result

    async def _validate(
        self, message: HeldPublish, validation: Validation | None, known: bool, result: Future[AmqpError | None]
    ) -> None:
        try:
            close = None if validation is None else await validation
            if close is not None:
                raise broker_error(close)
            if not known:
                await self._broker.find_target(message.routing_key)
        except (AmqpError, XaError) as error:
            result.set_result(amqp_error(error))
        except CancelledError:  # the connection is lost
            result.cancel()
            raise
        else:
            result.set_result(None)

    # -- the end

    def close(self) -> None:
        """See :class:`Destination`."""
        self._closing = True
        if not self._line:
            self._close()

    def _close(self) -> None:
        self._channel.close(self._on_closed)
        made, self._made = self._made, None
        if made is not None:
            self._broker.drop_queue(made)
