"""The consumers of a queue: the order of their turns, and the number of messages each may have unacknowledged.

A consumer that can take nothing (no credit, a slow socket) leaves the round. :meth:`Credit.release` brings it back, or
its sink does by :meth:`Consumer.resume`. So a turn costs the same with one consumer or thousands.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from operator import attrgetter
from typing import Final, Protocol

from dtx.log.changes import Slot, StoredMessage
from dtx.store.postgres.arguments import QueueArguments
from dtx.xa.codes import ReplyCode, XaError

UNLIMITED: Final = 0
"""A prefetch of zero means "no specific limit" (AMQP 0-9-1, basic.qos)."""
PASSED_AT_ONCE: Final = 1000
"""Consumers without credit or room that leave the round in one step at most: a millisecond or two."""
RETURN_MESSAGES: Final = 250
"""Messages that :func:`return_slowly` gives back in one step, half a millisecond or more."""


class DeliveryState(Enum):
    """The state of a message that was handed out."""

    UNACKED = "unacked"
    HELD = "held"
    SETTLED = "settled"


class SourceQueue(Protocol):
    """The index of a queue, as the recipients of its messages see it."""

    id: int
    name: str
    arguments: QueueArguments

    def ack(self, delivery: "QueueDelivery") -> None:
        """Settle it. The caller drops its slot, in its record. Raises ValueError unless it is unacknowledged."""

    def hold(self, delivery: "QueueDelivery") -> None:
        """Hide a delivery that was acknowledged within a branch until the branch ends. Raises as :meth:`ack`."""

    def end_hold(self, delivery: "QueueDelivery") -> None:
        """Undo :meth:`hold`: it is unacknowledged again. Raises KeyError unless it is held."""

    def requeue(self, deliveries: Iterable["QueueDelivery"], now: float, *, limited: bool = False) -> None:
        """Make them ready again, each in its old place. Raises as :meth:`ack`.

        With *limited*, those that have returned more often than the delivery limit leave the queue.
        """

    def reject(self, deliveries: Iterable["QueueDelivery"]) -> None:
        """Send them to the dead letter exchange, or drop them if there is none. Raises as :meth:`ack`."""

    def rollback(self, positions: Iterable[int], now: float) -> None:
        """Give back messages of a rolled back branch, as :meth:`requeue`. Raises KeyError unless all are held."""

    def suspend(self) -> None:
        """Hand out nothing until :meth:`proceed` was called as often as this method."""

    def proceed(self, now: float) -> None:
        """Undo one call of :meth:`suspend`."""

    def resume(self, consumer: "Consumer") -> None:
        """See :meth:`Consumer.resume`."""


class QueueDelivery:
    """A message that was handed out.

    Args:
        queue: its queue.
        position: its place in the queue.
        redelivered: whether it may have been handed out before.
        consumer: the consumer that got it; ``None`` for basic.get, and for messages held since before a restart.
        returns: how often it has returned to its queue since the last restart.
    """

    __slots__ = ("consumer", "position", "queue", "redelivered", "returns", "state")

    def __init__(
        self, queue: SourceQueue, position: int, redelivered: bool, consumer: "Consumer | None", returns: int = 0
    ) -> None:
        self.queue = queue
        self.position = position
        self.redelivered = redelivered
        self.consumer = consumer
        self.returns = returns
        self.state = DeliveryState.UNACKED

    @property
    def slot(self) -> Slot:
        """Where the message is stored."""
        return Slot(self.queue.id, self.position)


def all_in(state: DeliveryState, deliveries: Iterable[QueueDelivery]) -> list[QueueDelivery]:
    """*deliveries*, each once. All of them are in *state*; otherwise ValueError is raised, and none is changed."""
    each = list(dict.fromkeys(deliveries))
    for delivery in each:
        if delivery.state is not state:
            raise wrong_state(delivery)
    return each


def wrong_state(delivery: QueueDelivery) -> ValueError:
    """The error for a *delivery* that is not in the state that it must be in."""
    return ValueError(f"delivery {delivery.position} of {delivery.queue.name} is {delivery.state.value}")


class Sink(Protocol):
    """The channel (or connection) of consumers."""

    @property
    def full(self) -> bool:
        """Whether it accepts no message now. When it does again, it calls :meth:`Consumer.resume` of its consumers."""

    def deliver(self, consumer: "Consumer", delivery: QueueDelivery, message: StoredMessage) -> None:
        """Send a message. Must not call the index of the queue, and must not raise."""


class Getter(Protocol):
    """One basic.get."""

    @property
    def no_ack(self) -> bool:
        """Whether the message is settled when it is sent."""

    def got(self, found: tuple[QueueDelivery, StoredMessage] | None, remaining: int) -> None:
        """The answer: get-ok, or get-empty. Must not call the index, and must not raise, as :meth:`Sink.deliver`.

        Args:
            found: the message, if there is one.
            remaining: ready messages after it.
        """


class Credit:
    """The number of deliveries that may be unacknowledged, of one consumer or of all consumers of a channel.

    Args:
        limit: prefetch count; :data:`UNLIMITED` for no limit.
    """

    __slots__ = ("_waiting", "limit", "used")

    def __init__(self, limit: int = UNLIMITED) -> None:
        self.limit = limit
        self.used = 0
        self._waiting: dict[Consumer, None] = {}

    def await_release(self, consumer: "Consumer") -> None:
        """Bring *consumer* back into the round when there is credit."""
        self._waiting[consumer] = None

    def leave(self, consumer: "Consumer") -> None:
        """Remove *consumer* from the consumers that wait for credit."""
        self._waiting.pop(consumer, None)

    def release(self) -> None:
        """Return the credit of one settled delivery."""
        self.used -= 1
        if self._waiting:
            self._wake()

    def change(self, limit: int) -> None:
        """Set another prefetch count."""
        self.limit = limit
        self._wake()

    def _wake(self) -> None:
        if not self.limit or self.used < self.limit:
            waiting, self._waiting = self._waiting, {}
            for consumer in waiting:
                consumer.resume()


class Consumer:
    """One basic.consume.

    Args:
        tag: its name on its channel.
        sink: where its messages go.
        no_ack: whether its messages are settled when they are sent.
        exclusive: whether it must be the only consumer.
        priority: x-priority; consumers with a higher one are served first as long as they have credit.
        credit: its own prefetch.
        shared: the prefetch of its channel.
    """

    __slots__ = ("credit", "exclusive", "no_ack", "priority", "queue", "shared", "sink", "tag", "waiting")

    def __init__(
        self,
        tag: bytes,
        sink: Sink,
        *,
        no_ack: bool = False,
        exclusive: bool = False,
        priority: int = 0,
        credit: Credit | None = None,
        shared: Credit | None = None,
    ) -> None:
        self.tag = tag
        self.sink = sink
        self.no_ack = no_ack
        self.exclusive = exclusive
        self.priority = priority
        self.credit = credit or Credit()
        self.shared = shared or Credit()
        self.queue: SourceQueue | None = None
        """The queue while it consumes, else ``None``."""
        self.waiting = False
        """Whether it is out of the round."""

    def resume(self) -> None:
        """Rejoin the round, because there may be credit, or room in the sink. Idempotent."""
        if self.waiting and self.queue is not None:
            self.queue.resume(self)

    def leave(self) -> None:
        """Stop consuming."""
        self.queue = None
        self.credit.leave(self)
        self.shared.leave(self)

    def charge(self) -> Credit | None:
        """Use up credit for one delivery.

        As in RabbitMQ, deliveries without acknowledgement use up no credit, but they wait for that of their channel.

        Returns:
            ``None``; or the credit that is exhausted, and then nothing is used up.
        """
        credit, shared = self.credit, self.shared
        if credit.limit and credit.used >= credit.limit and not self.no_ack:
            return credit
        if shared.limit and shared.used >= shared.limit:
            return shared
        if self.no_ack:
            return None
        credit.used += 1
        shared.used += 1
        return None

    def released(self) -> None:
        """Return the credit of one of its deliveries, which is settled."""
        self.credit.release()
        self.shared.release()


class _Lines:
    """Consumers by priority, the highest first, and in order within one. No operation visits all of them."""

    __slots__ = ("_lines", "_priorities")

    def __init__(self) -> None:
        self._lines: dict[int, OrderedDict[Consumer, None]] = {}  # a plain dict finds its first one slowly
        self._priorities: list[int] = []  # negated, in order

    def append(self, consumer: Consumer) -> None:
        """Add *consumer* as the last of its priority."""
        line = self._lines.get(consumer.priority)
        if line is None:
            line = self._lines[consumer.priority] = OrderedDict()
            insort(self._priorities, -consumer.priority)
        line[consumer] = None

    def first(self) -> Consumer | None:
        """The first consumer of the highest priority."""
        return next(iter(self._lines[-self._priorities[0]])) if self._priorities else None

    def rotate(self, consumer: Consumer) -> None:
        """Move *consumer* to the end of its priority."""
        self._lines[consumer.priority].move_to_end(consumer)

    def remove(self, consumer: Consumer) -> None:
        """Remove *consumer*, which must be here."""
        line = self._lines[consumer.priority]
        del line[consumer]
        if not line:  # priorities come from clients' arguments: unused ones must not pile up
            del self._lines[consumer.priority]
            del self._priorities[bisect_left(self._priorities, -consumer.priority)]


class DispatchRound:
    """Consumers in turn, by priority.

    Args:
        single: only one of them takes part; the others wait for its end (x-single-active-consumer).
    """

    __slots__ = ("_all", "_exclusive", "_lines", "_single", "_sole", "_successors", "active")

    def __init__(self, *, single: bool = False) -> None:
        self.active = 0
        """The number of consumers in the round."""
        self._single = single
        self._sole: Consumer | None = None
        """The single active consumer."""
        self._successors = _Lines()
        """The consumers that wait for its end, by priority, then in order of arrival."""
        self._all: dict[Consumer, None] = {}
        self._exclusive = False
        """Whether there is an exclusive consumer, which is the only one."""
        self._lines = _Lines()

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, consumer: object) -> bool:
        return consumer in self._all

    def all(self) -> list[Consumer]:
        """All consumers, in order of arrival."""
        return list(self._all)

    def is_sole(self, consumer: Consumer) -> bool:
        """Whether *consumer* takes part, and does not wait for the end of another one."""
        return not self._single or consumer is self._sole

    def add(self, consumer: Consumer, name: str) -> None:
        """Add *consumer*.

        Args:
            consumer: in no queue yet.
            name: of the queue, for people.

        Raises:
            XaError: 403 when there is an exclusive consumer, or *consumer* is exclusive and there is any other (AMQP
                0-9-1, basic.consume: access-refused). Also if the queue has a single active consumer, as in RabbitMQ.
        """
        if (consumer.exclusive and (self._single or self._all)) or self._exclusive:
            raise XaError(ReplyCode.ACCESS_REFUSED, f"{name} in exclusive use")
        self._all[consumer] = None
        self._exclusive = consumer.exclusive
        consumer.waiting = True
        if self._single and self._sole is None:
            self._sole = consumer
        elif self._single:
            self._successors.append(consumer)
        self.resume(consumer)

    def remove(self, consumer: Consumer) -> None:
        """Remove *consumer*, which stops consuming."""
        del self._all[consumer]
        self._exclusive = False
        consumer.leave()
        if not consumer.waiting:
            self._lines.remove(consumer)
            self.active -= 1
        if self._sole is consumer:
            self._sole = self._successors.first()
            if self._sole is not None:
                self._successors.remove(self._sole)
                self.resume(self._sole)
        elif self._single:
            self._successors.remove(consumer)

    def resume(self, consumer: Consumer) -> None:
        """Put *consumer* at the end of the round again, unless another one is the single active consumer."""
        if self._single and consumer is not self._sole:
            return
        consumer.waiting = False
        self.active += 1
        self._lines.append(consumer)

    def next(self) -> Consumer | None:
        """The consumer that gets the next message. Its credit is already charged.

        Returns:
            ``None`` when no consumer can take one. Also ``None`` after :data:`PASSED_AT_ONCE` consumers that could not:
            then some are still :attr:`active`, and the caller must ask again later.
        """
        passed = 0
        while passed < PASSED_AT_ONCE and (consumer := self._lines.first()) is not None:
            if not consumer.sink.full:
                spent = consumer.charge()
                if spent is None:
                    self._lines.rotate(consumer)
                    return consumer
                spent.await_release(consumer)
            self._lines.remove(consumer)
            self.active -= 1
            consumer.waiting = True
            passed += 1
        return None


def return_slowly(
    deliveries: Sequence[QueueDelivery], clock: Callable[[], float], *, limited: bool = False
) -> Iterator[None]:
    """Requeue as :meth:`SourceQueue.requeue`, in steps, for any queues.

    A queue hands out nothing before all its messages are back.

    Args:
        deliveries: unacknowledged, in order.
        clock: seconds since the epoch.
        limited: as for :meth:`SourceQueue.requeue`.

    Returns:
        The steps. From the first one on, nothing is handed out. Before the second one, nothing is given back.
    """
    queues = dict.fromkeys(map(attrgetter("queue"), deliveries))
    for queue in queues:
        queue.suspend()
    try:
        yield
        # From the last on, so that each position is the least of all ready ones: the cheap case.
        for end in range(len(deliveries), 0, -RETURN_MESSAGES):
            groups: dict[SourceQueue, list[QueueDelivery]] = {}
            for delivery in deliveries[max(0, end - RETURN_MESSAGES) : end]:
                groups.setdefault(delivery.queue, []).append(delivery)
            for queue, group in groups.items():
                queue.requeue(group, clock(), limited=limited)
            yield
    finally:
        for queue in queues:
            queue.proceed(clock())
