"""A queue's index with a store that keeps rows in a dictionary, and channels that record their deliveries."""

from collections.abc import Iterable

from dtx.log.changes import PRIORITY_SHIFT, StoredMessage
from dtx.store.postgres.arguments import QueueArguments
from dtx.store.postgres.cache import MessageCache
from dtx.store.postgres.consumers import Consumer, Credit, QueueDelivery
from dtx.store.postgres.message_counts import BrokerCounts
from dtx.store.postgres.queue import Letter, QueueIndex, Reason

QUEUE = 7
NOW = 1_000.0
PLENTY = 1 << 30


def message(
    position: int,
    *,
    priority: int = 0,
    expires_at: float | None = None,
    properties: bytes = b"\x00\x00",
    body: bytes | None = None,
) -> StoredMessage:
    text = b"%d" % position if body is None else body
    return StoredMessage(QUEUE, position, b"", b"q", 1 | priority << PRIORITY_SHIFT, properties, text, expires_at)


class Channel:
    """A sink that records the deliveries of its consumers, in order."""

    def __init__(self) -> None:
        self.full = False
        self.deliveries: list[QueueDelivery] = []
        self.messages: list[StoredMessage] = []
        self.tags: list[bytes] = []

    def deliver(self, consumer: Consumer, delivery: QueueDelivery, message: StoredMessage) -> None:
        assert delivery.position == message.position
        self.tags.append(consumer.tag)
        self.deliveries.append(delivery)
        self.messages.append(message)

    @property
    def positions(self) -> list[int]:
        return [message.position for message in self.messages]

    def taken(self) -> list[QueueDelivery]:
        """The deliveries since the last call."""
        found, self.deliveries = self.deliveries, []
        self.messages.clear()
        self.tags.clear()
        return found


class Get:
    """A basic.get."""

    def __init__(self, *, no_ack: bool = False) -> None:
        self.no_ack = no_ack
        self.answers: list[tuple[QueueDelivery | None, int]] = []

    def got(self, found: tuple[QueueDelivery, StoredMessage] | None, remaining: int) -> None:
        self.answers.append((None if found is None else found[0], remaining))

    @property
    def delivery(self) -> QueueDelivery:
        """The message of the only answer."""
        ((delivery, _),) = self.answers
        assert delivery is not None
        return delivery


class Rig:
    """The store. ``run`` handles all requests. ``rows`` is the content of the database.

    Args:
        arguments: arguments of the queue.
        cache: bytes for bodies; with 0 each body is read when it is delivered.
        batch: maximum number of rows of one read.
        now: seconds since the epoch.
        total: as of the index.
    """

    def __init__(
        self,
        arguments: QueueArguments | None = None,
        *,
        cache: int = PLENTY,
        batch: int = 1000,
        now: float = NOW,
        total: BrokerCounts | None = None,
    ) -> None:
        self.now = now
        self.cache = MessageCache(cache)
        self.rows: dict[int, StoredMessage] = {}
        self.scheduled = False
        self.fetches: list[list[int]] = []
        self.dropped: list[int] = []
        self.letters: list[tuple[int, Reason]] = []
        self.wake: float | None = None
        self.batch = batch
        self.queue = QueueIndex(
            QUEUE, "queue 'q' in vhost '/'", self, self.cache, arguments or QueueArguments(), self.now, total
        )

    # -- Host

    def schedule(self, queue: QueueIndex) -> None:
        assert queue is self.queue
        self.scheduled = True

    def handed_out(self, queue: QueueIndex) -> None:
        assert queue is self.queue

    def fetch(self, queue: QueueIndex, positions: list[int]) -> None:
        assert queue is self.queue
        assert positions
        self.fetches.append(positions)

    def drop(self, queue: QueueIndex, positions: list[int]) -> None:
        assert queue is self.queue
        self.dropped += positions
        self.remove(positions)

    def dead_letter(self, queue: QueueIndex, letters: list[Letter], reason: Reason) -> None:
        assert queue is self.queue
        for position, found in letters:
            assert found is None or found.position == position
            self.letters.append((position, reason))
        self.remove(position for position, _ in letters)

    # -- actions of tests

    def remove(self, positions: Iterable[int]) -> None:
        for position in positions:
            del self.rows[position]

    def put(self, *positions: int, **more: object) -> None:
        """Publish messages whose rows are committed."""
        for position in positions:
            self.put_message(message(position, **more))  # type: ignore[arg-type]

    def put_message(self, new: StoredMessage) -> None:
        self.rows[new.position] = new
        self.queue.put(new, self.now)

    def dispatch(self) -> None:
        self.scheduled = False
        self.wake = self.queue.dispatch(self.now)

    def answer(self) -> None:
        """Answer the oldest read."""
        positions = self.fetches.pop(0)
        there = [position for position in positions if position in self.rows]
        self.queue.arrived(positions, [self.rows[position] for position in there[: self.batch]])

    def run(self) -> None:
        """Run until there are no requests left."""
        for _ in range(10_000):
            if self.scheduled:
                self.dispatch()
            elif self.fetches:
                self.answer()
            else:
                return
        raise AssertionError("the queue never becomes idle")

    def at(self, now: float) -> None:
        """Set the clock, and run the queue's timer."""
        self.now = now
        if self.wake is not None and self.wake <= now:
            self.dispatch()
        self.run()

    def consumer(
        self,
        channel: Channel,
        tag: bytes = b"c",
        *,
        prefetch: int = 0,
        shared: Credit | None = None,
        no_ack: bool = False,
        exclusive: bool = False,
        priority: int = 0,
    ) -> Consumer:
        """Add a consumer, and run."""
        new = Consumer(
            tag,
            channel,
            no_ack=no_ack,
            exclusive=exclusive,
            priority=priority,
            credit=Credit(prefetch),
            shared=shared,
        )
        self.queue.consume(new)
        self.run()
        return new

    def ack(self, *deliveries: QueueDelivery) -> None:
        for delivery in deliveries:
            self.queue.ack(delivery)
        self.remove(delivery.position for delivery in deliveries)
        self.run()

    def get(self, *, no_ack: bool = False) -> Get:
        getter = Get(no_ack=no_ack)
        self.queue.get(getter, self.now)
        self.run()
        return getter

    def drained(self) -> list[int]:
        """All ready messages, in the order in which a consumer gets them. They are settled afterwards."""
        channel = Channel()
        consumer = self.consumer(channel, no_ack=True)
        self.queue.cancel(consumer, self.now)
        return channel.positions
