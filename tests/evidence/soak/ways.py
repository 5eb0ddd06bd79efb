"""The ways of a coin into a queue: each leads into only one queue, through another type of exchange."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from tests.support.client import connected


@dataclass(frozen=True, slots=True)
class Way:
    """An exchange, and the routing to a queue.

    Args:
        exchange: its name.
        kind: its type.
        pattern: of routing keys; ``{}`` stands for the queue.
        named: the queue is named in a header.
        leads_to: another exchange, bound to this one; otherwise the queues are bound to it.
    """

    exchange: str
    kind: str
    pattern: str
    named: bool = False
    leads_to: str | None = None

    def key(self, queue: str) -> str:
        """Return the routing key of a message for *queue*."""
        return self.pattern.format(queue)

    def headers(self, queue: str) -> dict[str, str] | None:
        """Return the headers of a message for *queue*, and the arguments of its binding."""
        return {"till": queue} if self.named else None


STRAIGHT: Final = Way("", "direct", "{}")
_TOPIC: Final = Way("soak.topic", "topic", "money.{}.coin")
_MADE: Final = (
    Way("soak.direct", "direct", "to {}"),
    _TOPIC,
    Way("soak.headers", "headers", "", named=True),
    Way("soak.entrance", "fanout", _TOPIC.pattern, leads_to=_TOPIC.exchange),
)
WAYS: Final = (STRAIGHT, *_MADE)


def open_ways(url: str, queues: Iterable[str]) -> None:
    """Declare the exchanges, and bind *queues*, which exist."""
    with connected(url) as connection:
        channel = connection.channel()
        for way in _MADE:
            channel.exchange_declare(way.exchange, way.kind, durable=True)
            if way.leads_to is not None:
                channel.exchange_bind(way.leads_to, way.exchange)
                continue
            for queue in queues:
                channel.queue_bind(queue, way.exchange, way.key(queue), way.headers(queue))
