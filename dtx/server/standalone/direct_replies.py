"""Direct reply-to: replies go from the channel that answers to the channel that asked, without a queue.

As RabbitMQ has it: a client consumes from the pseudo-queue ``amq.rabbitmq.reply-to``, asks with that name as reply-to,
and whoever gets the question sees an address that stands for the client's channel. Replies are published to the default
exchange with that address as key. They are never stored, so a reply to somebody who is gone is dropped.
"""

from secrets import token_urlsafe
from typing import Final, Protocol

from dtx.store.work import HeldPublish

REPLY_TO: Final = b"amq.rabbitmq.reply-to"
_PREFIX: Final = REPLY_TO + b"."
_RANDOM: Final = 18
"""Octets of an address that nobody can guess: to know it is to be allowed to reply."""


class Asker(Protocol):
    """A channel that waits for replies."""

    def reply(self, message: HeldPublish) -> None:
        """One has come."""


def is_address(exchange: bytes, routing_key: bytes) -> bool:
    """Whether a message published so is a direct reply."""
    return not exchange and routing_key.startswith(_PREFIX)


class DirectReplies:
    """Who waits for replies, on all connections."""

    __slots__ = ("_askers",)

    def __init__(self) -> None:
        self._askers: dict[tuple[str, bytes], Asker] = {}

    def wait(self, vhost: str, asker: Asker) -> bytes:
        """*asker* waits for replies from now on; the address for them."""
        address = _PREFIX + token_urlsafe(_RANDOM).encode()
        self._askers[vhost, address] = asker
        return address

    def leave(self, vhost: str, address: bytes) -> None:
        """Nobody waits at *address* any more."""
        self._askers.pop((vhost, address), None)

    def exists(self, vhost: str, name: bytes) -> bool:
        """Whether *name*, declared as a queue, is the pseudo-queue or the address of somebody who waits."""
        return name == REPLY_TO or (vhost, name) in self._askers

    def deliver(self, vhost: str, message: HeldPublish) -> None:
        """Hand a message to whom it is addressed, if it is to somebody who waits."""
        if not message.exchange:
            asker = self._askers.get((vhost, message.routing_key))
            if asker is not None:
                asker.reply(message)
