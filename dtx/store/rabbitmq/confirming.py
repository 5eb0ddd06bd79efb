"""A channel in confirm mode: what became of each message, for who cannot be told of returned ones apart.

RabbitMQ says of a message that no queue took that it was returned, and then that it was confirmed. A return names no
number, so it is matched with what is under way by all that routing and readers can tell apart: exchange, routing key,
body, and the sections of the sender's message that are kept as headers. Two messages that are equal in that are
interchangeable: whichever of them was returned, one is in the queue and one is not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Protocol

from dtx.store.rabbitmq.upstream import Content, Upstream
from dtx.store.work import HeldPublish
from dtx.wire.amqp09 import methods, properties
from dtx.wire.amqp09.frames import BODY, HEADER, body_frames, header_frame
from dtx.wire.amqp09.methods import MANDATORY, ChannelClose

_BASIC: Final = methods.BasicPublish.KEY >> 16
_Identity = tuple[bytes, bytes, int, int, tuple[tuple[bytes, bytes], ...]]


class Fate(Enum):
    """What became of a message."""

    CONFIRMED = auto()
    """It is in its queues, as safe as they keep it."""
    RETURNED = auto()
    """There is no queue for it."""
    REFUSED = auto()
    """A queue did not take it (basic.nack)."""


class Owner(Protocol):
    """Who publishes."""

    def told(self, names: Sequence[object], fate: Fate) -> None:
        """The broker has told what became of messages, by the names that they were given."""

    def closed(self, close: ChannelClose) -> None:
        """The broker has closed the channel: what became of the rest is not known."""


@dataclass(slots=True, eq=False)
class _Underway:
    name: object
    identity: _Identity
    returned: bool = False


class ConfirmChannel:
    """Publishes for one owner.

    Args:
        upstream: the connection to the broker.
        number: of a channel that is open and in confirm mode.
        kept: how the names of headers begin that are the sender's own sections.
        owner: see there.
    """

    def __init__(self, upstream: Upstream, number: int, kept: bytes, owner: Owner) -> None:
        self._upstream = upstream
        self._number = number
        self._kept = kept
        self._owner = owner
        self._sent = 0
        self._underway: dict[int, _Underway] = {}
        self._content: Content | None = None
        self._closing: Callable[[], None] | None = None
        self._open = True
        upstream.handlers[number] = self

    def publish(self, name: object, message: HeldPublish) -> None:
        """Publish a message; *name* is what the owner calls it."""
        if not self._open:
            return
        self._sent += 1
        identity = self._identity(message.exchange, message.routing_key, message.properties, message.body)
        self._underway[self._sent] = _Underway(name, identity)
        number = self._number
        method = methods.BasicPublish(message.exchange, message.routing_key, MANDATORY).frame(number)
        header = header_frame(number, _BASIC, len(message.body), message.properties)
        self._upstream.write(b"".join((method, header, *body_frames(number, message.body, self._upstream.frame_max))))

    def _identity(self, exchange: bytes, routing_key: bytes, raw: bytes, body: bytes | bytearray) -> _Identity:
        headers = properties.read(raw).headers
        kept = tuple(sorted((entry.key, entry.value) for entry in headers if entry.key.startswith(self._kept)))
        return exchange, routing_key, len(body), hash(bytes(body)), kept

    def close(self, then: Callable[[], None]) -> None:
        """Close the channel; *then* is called when the broker has done all that it was sent. Idempotent."""
        if not self._open or self._upstream.is_lost:
            then()
            return
        self._open = False
        self._closing = then
        self._upstream.write(methods.ChannelClose(200, b"done").frame(self._number))

    # -- from the broker

    def frame(self, key: int, buffer: bytes, start: int, end: int) -> None:
        """A frame from the broker."""
        payload = buffer[start + 7 : end - 1]
        if key in (BODY, HEADER):
            if self._content is not None and self._content.add(key, payload):
                message, self._content = self._content, None
                self._returned(message)
        elif key == methods.BasicReturn.KEY:
            self._content = Content(payload)
        elif key in (methods.BasicAck.KEY, methods.BasicNack.KEY):
            taken = key == methods.BasicAck.KEY
            settle = methods.BasicAck.decode(payload) if taken else methods.BasicNack.decode(payload)
            self._confirmed(settle.delivery_tag, multiple=settle.multiple, taken=taken)
        elif key == methods.ChannelClose.KEY:
            if self._open:
                self._upstream.write(methods.ChannelCloseOk().frame(self._number))
                self._end()
                self._owner.closed(methods.ChannelClose.decode(payload))
            else:
                self._upstream.crossed(self._number)
        elif key == methods.ChannelCloseOk.KEY:
            self._end()

    def _returned(self, message: Content) -> None:
        returned = methods.BasicReturn.decode(message.method)
        identity = self._identity(returned.exchange, returned.routing_key, message.properties, message.body)
        for sent in self._underway.values():
            if not sent.returned and sent.identity == identity:
                sent.returned = True
                return
        # Nobody may be told that it was taken, so nobody is told anything.
        self._upstream.abort("the broker returned a message that was not sent")

    def _confirmed(self, tag: int, *, multiple: bool, taken: bool) -> None:
        underway = self._underway
        if not multiple:
            tags = [tag] if tag in underway else []
        elif tag == 0:
            tags = list(underway)
        else:
            tags = []
            for number in underway:  # in their order
                if number > tag:
                    break
                tags.append(number)
        found: dict[Fate, list[object]] = {}
        for number in tags:
            sent = underway.pop(number)
            fate = Fate.RETURNED if sent.returned else Fate.CONFIRMED if taken else Fate.REFUSED
            found.setdefault(fate, []).append(sent.name)
        for fate, names in found.items():
            self._owner.told(names, fate)

    def _end(self) -> None:
        self._open = False
        self._underway.clear()
        self._upstream.free(self._number)
        closing, self._closing = self._closing, None
        if closing is not None:
            closing()

    def lost(self, reason: str) -> None:  # noqa: ARG002 - the connection says so to its client
        """The connection is gone."""
        self._open = False
        self._underway.clear()
        closing, self._closing = self._closing, None
        if closing is not None:
            closing()
