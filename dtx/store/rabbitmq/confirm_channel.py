"""A channel in confirm mode: one outcome for each message, for clients that get no separate return.

For a message that no queue took, RabbitMQ sends basic.return and then basic.ack. A return has no number. So it is
matched with an unconfirmed message by all that routing and consumers can tell apart: exchange, routing key, body, and
the sections of the sender's message that are kept as headers. Two messages that are equal in these are interchangeable:
whichever of them was returned, one is in the queue and one is not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import takewhile
from typing import Protocol

from dtx.store.rabbitmq.upstream import EventHandler, Upstream
from dtx.store.work import HeldPublish
from dtx.wire.amqp09 import methods, properties
from dtx.wire.amqp09.channel import ChannelEngine
from dtx.wire.amqp09.codec import ChannelMode
from dtx.wire.amqp09.events import ChannelClosed, ChannelClosing, ChannelEvent, ContentReceived, MethodReceived
from dtx.wire.amqp09.methods import MANDATORY, ChannelClose

_Identity = tuple[bytes, bytes, int, int, tuple[tuple[bytes, bytes], ...]]


class MessageFate(Enum):
    """The outcome of a published message."""

    CONFIRMED = auto()
    """It is in its queues, with the durability that they give."""
    RETURNED = auto()
    """There is no queue for it."""
    REFUSED = auto()
    """A queue did not take it (basic.nack)."""


class ConfirmOwner(Protocol):
    """The owner of the channel, which publishes on it."""

    def reported(self, names: Sequence[object], fate: MessageFate) -> None:
        """The broker has reported the outcome of the messages that were published with these *names*."""

    def closed(self, close: ChannelClose) -> None:
        """The broker has closed the channel: the outcome of the other messages is not known."""


@dataclass(slots=True, eq=False)
class _Underway:
    name: object
    identity: _Identity
    returned: bool = False


class ConfirmChannel(EventHandler):
    """Publishes for one owner.

    Args:
        upstream: the connection to the broker.
        engine: of a channel that is open and in confirm mode.
        kept: prefix of the names of headers that hold the sender's sections.
        owner: is told the outcomes.
    """

    def __init__(self, upstream: Upstream, engine: ChannelEngine, kept: bytes, owner: ConfirmOwner) -> None:
        super().__init__(upstream, engine)
        engine.become(ChannelMode.CONFIRM)
        self._kept = kept
        self._owner = owner
        self._underway: dict[int, _Underway] = {}
        self._closing: Callable[[], None] | None = None
        self._open = True

    def publish(self, name: object, message: HeldPublish) -> None:
        """Publish a message, unless the channel is closed. The owner gets its outcome by *name*."""
        if not self._open:
            return
        identity = self._identity(message.exchange, message.routing_key, message.properties, message.body)
        method = methods.BasicPublish(message.exchange, message.routing_key, MANDATORY).frame(self.number)
        number = self.engine.send_content(method, message.properties, message.body)
        self._underway[number] = _Underway(name, identity)
        self.upstream.flush()

    def _identity(self, exchange: bytes, routing_key: bytes, raw: bytes, body: bytes | bytearray) -> _Identity:
        headers = properties.read(raw).headers
        kept = tuple(sorted((entry.key, entry.value) for entry in headers if entry.key.startswith(self._kept)))
        return exchange, routing_key, len(body), hash(bytes(body)), kept

    def close(self, then: Callable[[], None]) -> None:
        """Close the channel. Idempotent.

        Args:
            then: called when the broker has done all that was sent to it.
        """
        if not self._open or self.upstream.is_lost:
            then()
            return
        self._open = False
        self._closing = then
        self.engine.close(ChannelClose(200, b"done").frame(self.number))
        self.upstream.flush()

    # -- from the broker

    def event(self, event: ChannelEvent) -> None:
        """Handle an event of the channel."""
        match event:
            case ContentReceived(method=methods.BasicReturn() as returned):
                self._returned(returned, event)
            case MethodReceived(method=(methods.BasicAck() | methods.BasicNack()) as confirm):
                self._confirmed(confirm)
            case ChannelClosing():
                self._end()
                self._owner.closed(event.close)
            case ChannelClosed():
                self._end()
            case _:
                pass

    def _returned(self, returned: methods.BasicReturn, message: ContentReceived) -> None:
        identity = self._identity(returned.exchange, returned.routing_key, message.properties, message.body)
        for sent in self._underway.values():
            if not sent.returned and sent.identity == identity:
                sent.returned = True
                return
        # It is not known which message was returned, so no publisher may be told that its message was taken.
        self.upstream.abort("the broker returned a message that was not sent")

    def _confirmed(self, confirm: methods.BasicAck | methods.BasicNack) -> None:
        underway, tag = self._underway, confirm.delivery_tag
        taken = isinstance(confirm, methods.BasicAck)
        if confirm.multiple:
            tags = list(takewhile(lambda number: number <= tag or not tag, underway))  # the numbers ascend
        else:
            tags = [tag] if tag in underway else []
        found: dict[MessageFate, list[object]] = {}
        for number in tags:
            sent = underway.pop(number)
            fate = MessageFate.RETURNED if sent.returned else MessageFate.CONFIRMED if taken else MessageFate.REFUSED
            found.setdefault(fate, []).append(sent.name)
        for fate, names in found.items():
            self._owner.reported(names, fate)

    def _end(self) -> None:
        self._open = False
        self._underway.clear()
        self.upstream.free(self.number)
        closing, self._closing = self._closing, None
        if closing is not None:
            closing()

    def lost(self, reason: str) -> None:  # noqa: ARG002 - the connection tells its client
        """The connection is gone."""
        self._end()
