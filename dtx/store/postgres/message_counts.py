"""Counts of what has happened to messages since the start, in the words of RabbitMQ's ``message_stats``.

Only the thread of the event loop counts: ``counts.publish += 1``. Each event of a queue is counted at the queue, and
at the broker, whose counts stay when a queue is deleted.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from dtx.telemetry.rates import RateSample


@dataclass(slots=True)
class MessageCounts:
    """The events of one queue."""

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


@dataclass(slots=True)
class BrokerCounts(MessageCounts):
    """The events of all queues together, deleted ones included, and those that concern no queue."""

    received: int = 0
    """Messages from publishers."""
    return_unroutable: int = 0
    """Messages for no queue that returned to their publishers."""
    drop_unroutable: int = 0
    """Messages for no queue that were dropped."""
    left: dict[tuple[str, bool], int] = field(default_factory=dict)
    """Messages that left their queue without an acknowledgement: by reason, and whether they became dead letters."""

    changed: dict[int, MessageCounts] = field(default_factory=dict, compare=False)
    """Those of queues that changed since the last sample, by the queue's id. Most of many queues are idle."""
    changed_before: dict[int, MessageCounts] = field(default_factory=dict, compare=False)

    def leave(self, reason: str, count: int, *, dead_letters: bool) -> None:
        """Count messages that leave their queue without an acknowledgement."""
        key = reason, dead_letters
        self.left[key] = self.left.get(key, 0) + count

    def numbers(self) -> dict[str, int]:
        """The numbers by RabbitMQ's words; for a broker, each publish counts, and not each queue that has taken it."""
        unroutable = {"return_unroutable": self.return_unroutable, "drop_unroutable": self.drop_unroutable}
        return super(BrokerCounts, self).numbers() | {"publish": self.received} | unroutable

    def take_sample(self, passed: float) -> Iterator[None]:
        """Compute the rates: of these, and of queues whose counts changed since the last sample, or before it.

        Args:
            passed: seconds since the last sample.
        """
        changed, self.changed = self.changed, {}
        for counts in (self, *(self.changed_before | changed).values()):
            counts.sample.take(tuple(counts.numbers().values()), passed)
            yield
        self.changed_before = changed
