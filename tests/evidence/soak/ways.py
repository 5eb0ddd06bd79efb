"""The ways by which a coin comes into a queue: each leads into one queue alone, by an exchange of another kind."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from tests.support.client import connected


@dataclass(frozen=True, slots=True)
class Way:
    """An exchange, and what has to be said there for a queue.

    Args:
        exchange: its name.
        kind: its type.
        pattern: of routing keys; ``{}`` stands for the queue.
        named: the queue is named in a header.
        leads_to: another exchange, to which it hands everything on; else the queues are bound to it.
    """

    exchange: str
    kind: str
    pattern: str
    named: bool = False
    leads_to: str | None = None

    def key(self, queue: str) -> str:
        """The routing key of a message for *queue*."""
        return self.pattern.format(queue)

    def headers(self, queue: str) -> dict[str, str] | None:
        """The headers of a message for *queue*, and the arguments of its binding."""
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
    """Declare the exchanges, and bind *queues*, which are there."""
    with connected(url) as connection:
        channel = connection.channel()
        for way in _MADE:
            channel.exchange_declare(way.exchange, way.kind, durable=True)
            if way.leads_to is not None:
                channel.exchange_bind(way.leads_to, way.exchange)
                continue
            for queue in queues:
                channel.queue_bind(queue, way.exchange, way.key(queue), way.headers(queue))
