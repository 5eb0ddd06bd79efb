"""Counts of what has happened to messages since the start, in the words of RabbitMQ's ``message_stats``.

Only the thread of the event loop counts: ``counts.publish += 1``. Each event is counted once, at its queue. A request
makes the sums. A queue that is deleted adds its counts to those of the broker, so no sum ever decreases.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Self

RATE_SECONDS: Final = 5.0
"""Least time over which a rate is an average: the interval of RabbitMQ's statistics."""


class RateSample:
    """Earlier numbers, for rates."""

    __slots__ = ("_at", "_numbers", "_rates")

    def __init__(self) -> None:
        self._at = float("-inf")
        self._numbers: Sequence[int] = ()
        self._rates: Sequence[float] = ()

    def rates(self, numbers: Sequence[int], now: float) -> Sequence[float]:
        """The events per second since the last call that is :data:`RATE_SECONDS` older; 0 for the first call.

        Args:
            numbers: of events so far.
            now: seconds.
        """
        passed = now - self._at
        if passed >= RATE_SECONDS:
            before = self._numbers or numbers
            self._rates = tuple([(new - old) / passed for new, old in zip(numbers, before, strict=True)])
            self._at, self._numbers = now, numbers
        return self._rates


@dataclass(slots=True)
class MessageCounts:
    """The events of one queue, or of several together."""

    publish: int = 0
    """Messages that clients have published to it, dead letters not included."""
    deliver: int = 0
    """Deliveries to consumers that must be acknowledged."""
    deliver_no_ack: int = 0
    """Deliveries to consumers without acknowledgement."""
    get: int = 0
    """Messages for basic.get that must be acknowledged."""
    get_no_ack: int = 0
    """Messages for basic.get without acknowledgement."""
    get_empty: int = 0
    """Answers to basic.get without a message."""
    redeliver: int = 0
    """Deliveries of messages that may have been delivered before."""
    ack: int = 0
    """Acknowledged messages, and messages that committed branches have consumed."""
    sample: RateSample = field(default_factory=RateSample, compare=False)

    @property
    def deliver_get(self) -> int:
        """All deliveries."""
        return self.deliver + self.deliver_no_ack + self.get + self.get_no_ack

    def numbers(self) -> dict[str, int]:
        """The numbers by RabbitMQ's words."""
        return {
            "publish": self.publish,
            "deliver": self.deliver,
            "deliver_no_ack": self.deliver_no_ack,
            "get": self.get,
            "get_no_ack": self.get_no_ack,
            "get_empty": self.get_empty,
            "deliver_get": self.deliver_get,
            "redeliver": self.redeliver,
            "ack": self.ack,
        }

    def add(self, other: "MessageCounts") -> Self:
        """Add the events of *other*. Returns this."""
        self.publish += other.publish
        self.deliver += other.deliver
        self.deliver_no_ack += other.deliver_no_ack
        self.get += other.get
        self.get_no_ack += other.get_no_ack
        self.get_empty += other.get_empty
        self.redeliver += other.redeliver
        self.ack += other.ack
        return self


@dataclass(slots=True)
class BrokerCounts(MessageCounts):
    """The events of deleted queues, and those that concern no queue or are counted for all queues together."""

    received: int = 0
    """Messages from publishers."""
    return_unroutable: int = 0
    """Messages for no queue that returned to their publishers."""
    drop_unroutable: int = 0
    """Messages for no queue that were dropped."""
    left: dict[tuple[str, bool], int] = field(default_factory=dict)
    """Messages that left their queue without an acknowledgement: by reason, and whether they became dead letters."""

    def leave(self, reason: str, count: int, *, dead_letters: bool) -> None:
        """Count messages that leave their queue without an acknowledgement."""
        key = reason, dead_letters
        self.left[key] = self.left.get(key, 0) + count

    def numbers(self) -> dict[str, int]:
        """The numbers by RabbitMQ's words; for a broker, each publish counts, and not each queue that has taken it."""
        unroutable = {"return_unroutable": self.return_unroutable, "drop_unroutable": self.drop_unroutable}
        return super(BrokerCounts, self).numbers() | {"publish": self.received} | unroutable
