"""basic.publish: check and route a complete message, then pass it to the context."""

from typing import Final, Protocol

from dtx.auth.permissions import Permission
from dtx.server.limits import check_fan_out
from dtx.server.standalone.client import VirtualHostUser
from dtx.server.standalone.contexts import Context, PublisherChannel
from dtx.server.standalone.direct_replies import REPLY_TO, is_address
from dtx.store.postgres.property_scan import sender_selected
from dtx.store.work import HeldPublish
from dtx.wire.amqp09 import properties
from dtx.wire.amqp09.errors import HardCode, WireError
from dtx.wire.amqp09.methods import IMMEDIATE, MANDATORY, BasicPublish
from dtx.wire.amqp09.properties import Property
from dtx.xa.codes import ReplyCode, XaError

_INSPECTED: Final = frozenset((Property.HEADERS, Property.EXPIRATION, Property.USER_ID, Property.REPLY_TO))
"""The properties that dtx checks or routes by."""


class ReplyConsumer(Protocol):
    """The consumers of a channel, for the address of direct replies."""

    @property
    def reply_address(self) -> bytes:
        """The address. Raises XaError 406 if there is no consumer of direct replies."""


class MessageRouting:
    """The publishes of one channel.

    Args:
        client: the owner of the channel.
        consuming: the consumers of the channel, for the address of direct replies.
        publisher: the channel that gets returned messages; ``None`` where none is mandatory.
    """

    __slots__ = ("_client", "_consuming", "_counts", "_publisher")

    def __init__(
        self, client: VirtualHostUser, consuming: ReplyConsumer, publisher: PublisherChannel | None = None
    ) -> None:
        self._client = client
        self._consuming = consuming
        self._counts = client.broker.counts
        self._publisher = publisher

    def publish(self, publish: BasicPublish, raw: bytes, body: bytes, number: int, context: Context) -> None:
        """Publish a complete message.

        Args:
            publish: the method.
            raw: the properties, bytes from the property flags on.
            body: bytes.
            number: the number of the publish in confirm mode, else 0.
            context: the context of the channel.

        Raises:
            WireError: the message is malformed; 540 for immediate, as in RabbitMQ.
            XaError: the message may not be published.
        """
        exchange, key, flags = publish.exchange, publish.routing_key, publish.flags
        if flags & IMMEDIATE:
            raise WireError(HardCode.NOT_IMPLEMENTED, "immediate=true")
        client = self._client
        access, vhost = client.access, client.vhost
        access.require(Permission.WRITE, "exchange", exchange)
        vhost.publishable(exchange)
        access.require_topic(Permission.WRITE, exchange, key)
        view = properties.read(raw)
        is_plain = _INSPECTED.isdisjoint(view.spans)
        if not is_plain:
            access.check_properties(view)
        if not is_plain and view.reply_to == REPLY_TO:
            _refuse_direct_reply_in_a_branch(context)
            raw = properties.put(raw, Property.REPLY_TO, self._consuming.reply_address)
        elif is_address(exchange, key):
            _refuse_direct_reply_in_a_branch(context)
        more, seen = ((), raw) if is_plain else sender_selected(raw)
        blind = seen is not raw
        if blind:
            view = properties.read(seen)
        headers = b"" if is_plain else view.value(Property.HEADERS) or b""
        queues = vhost.route(exchange, key, headers, more)
        if not queues:
            raw, blind = seen, False
        mandatory = flags & MANDATORY != 0
        message = HeldPublish(
            exchange,
            key,
            mandatory,
            raw,
            body,
            self._publisher if mandatory else None,
            tuple([queue.spec.id for queue in queues]),
            blind,
        )
        check_fan_out(message)
        if client.manager.disk.raised:
            client.wait_for_disk()
        self._counts.received += 1
        context.publish(message, number)


def _refuse_direct_reply_in_a_branch(context: Context) -> None:
    if context.outlives_the_connection:
        raise XaError(
            ReplyCode.NOT_IMPLEMENTED,
            "direct reply-to cannot be part of a branch, which outlives its connection: declare a queue for replies",
        )
