"""basic.publish: the frames of a content put together, judged and routed; then it is the context's."""

from functools import lru_cache
from typing import TYPE_CHECKING, Final

from dtx.auth.permissions import Permission
from dtx.server.limits import demand_fan_out
from dtx.server.standalone.direct import REPLY_TO, is_address
from dtx.store.postgres.property_scan import sender_selected
from dtx.store.work import HeldPublish
from dtx.wire.amqp09 import content, methods, properties
from dtx.wire.amqp09.errors import HardCode, WireError
from dtx.wire.amqp09.methods import IMMEDIATE, MANDATORY, BasicPublish
from dtx.wire.amqp09.properties import Properties, Property
from dtx.xa.codes import ReplyCode, XaError

if TYPE_CHECKING:
    from dtx.server.standalone.channel import Channel

_BASIC: Final = 60
_LOOKED_AT: Final = frozenset((Property.HEADERS, Property.EXPIRATION, Property.USER_ID, Property.REPLY_TO))
_SHORT: Final = 64
"""Octets of properties that are remembered."""
_NOTHING: Final = (BasicPublish(b"", b"", 0), b"")


def _look(raw: bytes) -> tuple[Properties, bool]:
    """A view of properties as received, and whether nothing in them is judged or routed by.

    Raises:
        WireError: 502 when they are malformed.
    """
    view = properties.read(raw)
    return view, _LOOKED_AT.isdisjoint(view.spans)


_known: Final = lru_cache(maxsize=256)(_look)
"""The same of short ones, which mostly are those of the message before: a delivery mode and a content type."""


class Publishing:
    """The content that a channel's client is sending.

    Args:
        channel: whose it is.
    """

    __slots__ = ("_channel", "_charged", "_last", "_left", "_parts", "_publish", "_raw", "_size")

    def __init__(self, channel: "Channel") -> None:
        self._channel = channel
        self._last = _NOTHING
        """The last basic.publish and its octets: most publishers use one target."""
        self._publish: BasicPublish | None = None
        self._raw = b""
        self._size = 0
        self._left = -1
        """Octets of the body that are still to come; -1 while its header is."""
        self._parts: list[bytes] = []
        self._charged = 0

    @property
    def under_way(self) -> bool:
        """Whether a content is expected: then no method may come."""
        return self._publish is not None

    def method(self, payload: bytes) -> None:
        """basic.publish.

        Raises:
            WireError: it is malformed, or comes in the midst of another; 540 for immediate, as RabbitMQ.
        """
        if self._publish is not None:
            raise self._unexpected("method frame in the midst of content")
        publish, octets = self._last
        if octets != payload:
            publish = methods.BasicPublish.decode(payload)
            if publish.flags & IMMEDIATE:
                raise WireError(HardCode.NOT_IMPLEMENTED, "immediate=true")
            self._last = publish, payload
        self._publish = publish
        self._left = -1

    def header(self, payload: bytes) -> None:
        """The content header.

        Raises:
            WireError: it is malformed or not expected.
            XaError: the message may not be published.
        """
        publish = self._publish
        if publish is None or self._left >= 0:
            raise self._unexpected("content header without a publish")
        header = content.header(payload)
        if header.class_id != _BASIC:
            raise self._unexpected(f"content of class {header.class_id}")
        limit = self._channel.connection.limits.max_message_bytes
        if header.body_size > limit:
            raise XaError(
                ReplyCode.PRECONDITION_FAILED,
                f"message size {header.body_size} is larger than configured max size {limit}",
            )
        self._raw = header.properties
        self._left = self._size = header.body_size
        if not header.body_size:
            self._finish(publish, b"")

    def body(self, payload: bytes) -> None:
        """A part of the body.

        Raises:
            WireError: it is not expected, or more than was announced.
            XaError: the message may not be published.
        """
        publish = self._publish
        if publish is None or self._left < 0:
            raise self._unexpected("content body without a header")
        self._left -= len(payload)
        if self._left < 0:
            raise WireError(HardCode.FRAME_ERROR, f"more content than announced on channel {self._channel.number}")
        if not self._left:
            if self._parts:
                self._parts.append(payload)
                payload = b"".join(self._parts)
            self._finish(publish, payload)
        elif payload:
            self._keep(payload)

    def _keep(self, part: bytes) -> None:
        budget = self._channel.connection.budget
        if not budget.has_room(len(part)):
            raise XaError(ReplyCode.RESOURCE_ERROR, f"no memory for the message: {budget.excess(len(part))}")
        budget.charge(len(part))
        self._charged += len(part)
        self._parts.append(part)

    def let_go(self) -> None:
        """Nothing more comes of this content."""
        self._publish = None
        self._raw = b""
        self._left = -1
        if self._charged:
            self._channel.connection.budget.charge(-self._charged)
            self._charged = 0
        self._parts.clear()

    def _unexpected(self, what: str) -> WireError:
        return WireError(HardCode.UNEXPECTED_FRAME, f"{what} on channel {self._channel.number}")

    def _finish(self, publish: BasicPublish, body: bytes) -> None:
        """The content is complete."""
        raw = self._raw
        self.let_go()
        channel = self._channel
        vhost = channel.connection.vhost
        exchange, key, flags = publish.exchange, publish.routing_key, publish.flags
        channel.connection.demand(Permission.WRITE, "exchange", exchange)
        vhost.publishable(exchange)
        channel.connection.demand_topic(Permission.WRITE, exchange, key)
        view, is_plain = _known(raw) if len(raw) <= _SHORT else _look(raw)
        if not is_plain:
            channel.connection.access.judge(view)
        if Property.REPLY_TO in view.spans and view.reply_to == REPLY_TO:
            self._refuse_direct_reply_in_a_branch()
            raw = properties.put(raw, Property.REPLY_TO, channel.consuming.reply_address)
        elif is_address(exchange, key):
            self._refuse_direct_reply_in_a_branch()
        more, seen = ((), raw) if is_plain else sender_selected(raw)
        blind = seen is not raw
        if blind:
            view = properties.read(seen)
        queues = vhost.route(exchange, key, view.value(Property.HEADERS) or b"", more)
        if not queues:
            raw, blind = seen, False
        message = HeldPublish(
            exchange,
            key,
            flags & MANDATORY != 0,
            raw,
            body,
            channel if flags & MANDATORY else None,
            tuple([queue.spec.id for queue in queues]),
            blind,
        )
        demand_fan_out(message)
        if channel.connection.manager.disk.raised:
            channel.connection.wait_for_disk()
        channel.context.publish(message)

    def _refuse_direct_reply_in_a_branch(self) -> None:
        if self._channel.context.outlives_the_connection:
            raise XaError(
                ReplyCode.NOT_IMPLEMENTED,
                "direct reply-to cannot be part of a branch, which outlives its connection: "
                "declare a queue for replies",
            )
