"""Direct reply-to: replies go from the replying channel to the requesting channel, without a queue.

As in RabbitMQ, a client consumes from the pseudo-queue ``amq.rabbitmq.reply-to`` and publishes requests with that name
as reply-to. The recipient of a request sees the address of the client's channel instead. It publishes the reply to the
default exchange, with that address as key. Replies are never stored. A reply to a closed channel is dropped.
"""

from secrets import token_urlsafe
from typing import Final, Protocol

from dtx.store.work import HeldPublish

REPLY_TO: Final = b"amq.rabbitmq.reply-to"
_PREFIX: Final = REPLY_TO + b"."
_RANDOM: Final = 18
"""Random bytes in an address. Clients cannot guess it, and each client that knows it may reply."""


class Asker(Protocol):
    """A channel that waits for replies."""

    def reply(self, message: HeldPublish) -> None:
        """Deliver a reply."""


def is_address(exchange: bytes, routing_key: bytes) -> bool:
    """Whether a message with this exchange and key is a direct reply."""
    return not exchange and routing_key.startswith(_PREFIX)


class DirectReplies:
    """The channels that wait for replies, of all connections."""

    __slots__ = ("_askers",)

    def __init__(self) -> None:
        self._askers: dict[tuple[str, bytes], Asker] = {}

    def wait(self, vhost: str, asker: Asker) -> bytes:
        """Register *asker*, and return the address for its replies."""
        address = _PREFIX + token_urlsafe(_RANDOM).encode()
        self._askers[vhost, address] = asker
        return address

    def leave(self, vhost: str, address: bytes) -> None:
        """Remove the channel that waits at *address*. Idempotent."""
        self._askers.pop((vhost, address), None)

    def exists(self, vhost: str, name: bytes) -> bool:
        """Whether *name* is the pseudo-queue or the address of a channel that waits."""
        return name == REPLY_TO or (vhost, name) in self._askers

    def deliver(self, vhost: str, message: HeldPublish) -> bool:
        """Deliver *message* if it is a reply to a channel that waits. Returns whether it is."""
        asker = None if message.exchange else self._askers.get((vhost, message.routing_key))
        if asker is not None:
            asker.reply(message)
        return asker is not None
