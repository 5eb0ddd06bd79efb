"""The queue that each consumer, and each basic.get, of one channel reads.

A method without a queue name means the queue that the channel declared last, also before the broker has answered. For a
queue that is declared without a name, the broker's answer has the name. The connection's exclusive queues are noted
here too: they are known from the same methods.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

from dtx.store.rabbitmq.upstream import ExclusiveQueues
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.codec import Method
from dtx.wire.amqp09.errors import WireError

_REQUESTS: Final = {
    row.KEY: row
    for row in (methods.BasicConsume, methods.BasicCancel, methods.BasicGet, methods.QueueDeclare, methods.QueueDelete)
}
_MAX_FORMER: Final = 64
"""Cancelled consumers that one channel remembers; deliveries that the broker has already sent come soon."""


@dataclass(slots=True, eq=False)
class ConsumedQueue:
    """What a delivery belongs to."""

    queue: bytes
    """Empty while the broker has not sent its name."""
    no_ack: bool
    is_deleted: bool = False
    """Whether the client deletes the queue on this channel: no consumer gets its messages again."""


class ConsumedQueues:
    """The queues that one channel consumes from.

    Args:
        exclusive: the exclusive queues of the connection.
        last: the queue that the channel declared last.
    """

    def __init__(self, exclusive: ExclusiveQueues, last: bytes = b"") -> None:
        self.consumers: dict[bytes, ConsumedQueue] = {}
        self.consuming: deque[ConsumedQueue] = deque()
        """For each basic.consume that is not answered."""
        self.getting: deque[ConsumedQueue] = deque()
        """For each basic.get that is not answered."""
        self._former: dict[bytes, ConsumedQueue] = {}
        """The consumers that were cancelled last: RabbitMQ 3.10 may deliver after basic.cancel-ok."""
        self._exclusive = exclusive
        self._last = last
        self._nameless: list[ConsumedQueue] | None = None
        """What reads the last queue, while the broker has not sent its name yet."""
        self._declaring: deque[tuple[bool, list[ConsumedQueue] | None]] = deque()
        """For each queue.declare that is not answered: whether it makes an exclusive queue, and the same as above."""

    def of(self, delivery: methods.BasicDeliver | methods.BasicGetOk) -> ConsumedQueue | None:
        """What a delivery belongs to; ``None`` if that is not known."""
        if isinstance(delivery, methods.BasicGetOk):
            return self.getting[0] if self.getting else None
        return self.of_consumer(delivery.consumer_tag)

    def of_consumer(self, tag: bytes) -> ConsumedQueue | None:
        """What a consumer reads, or has read."""
        return self.consumers.get(tag) or self._former.get(tag)

    def cancel_all(self) -> list[bytes]:
        """Note that dtx cancels all consumers; they get deliveries until the broker has read it. Returns their tags."""
        tags = list(self.consumers)
        self._former |= self.consumers
        self.consumers.clear()
        return tags

    # -- from the client

    def requested(self, key: int, payload: bytes) -> ConsumedQueue | None:
        """Note a method of the client; returns what it reads, if it is a basic.consume or basic.get without errors."""
        try:
            method = _REQUESTS[key].decode(payload) if key in _REQUESTS else None
        except WireError:
            return None
        consumed: ConsumedQueue | None = None
        match method:
            case methods.BasicConsume():
                consumed = self._consumed(method.queue, method.no_ack)
                if method.no_wait:
                    self.consumers[method.consumer_tag] = consumed
                else:
                    self.consuming.append(consumed)
            case methods.BasicCancel(consumer_tag=tag, no_wait=True):
                self._cancelled(tag)
            case methods.BasicGet():
                consumed = self._consumed(method.queue, method.no_ack)
                self.getting.append(consumed)
            case methods.QueueDeclare():
                self._declare(method)
            case methods.QueueDelete():
                queue = method.queue or self._last
                self._exclusive.discard(queue)
                for each in (*self.consumers.values(), *self.consuming):
                    each.is_deleted |= each.queue == queue
            case _:
                pass
        return consumed

    def _consumed(self, queue: bytes, no_ack: bool) -> ConsumedQueue:
        consumed = ConsumedQueue(queue or self._last, no_ack)
        if not queue and self._nameless is not None:
            self._nameless.append(consumed)
        return consumed

    def _declare(self, declare: methods.QueueDeclare) -> None:
        makes_exclusive = declare.exclusive and not declare.passive
        if not makes_exclusive and not declare.passive:
            self._exclusive.discard(declare.queue)
        self._last = declare.queue
        self._nameless = None if declare.queue or declare.no_wait else []
        if not declare.no_wait:
            self._declaring.append((makes_exclusive, self._nameless))

    # -- from the broker

    def answered(self, method: Method) -> None:
        """Note a method of the broker."""
        match method:
            case methods.BasicConsumeOk(consumer_tag=tag) if self.consuming:
                self.consumers[tag] = self.consuming.popleft()
            case methods.BasicCancelOk(consumer_tag=tag) | methods.BasicCancel(consumer_tag=tag):
                self._cancelled(tag)
            case methods.BasicGetOk() | methods.BasicGetEmpty() if self.getting:
                self.getting.popleft()
            case methods.QueueDeclareOk(queue=name) if self._declaring:
                self._declared(name, *self._declaring.popleft())
            case _:
                pass

    def _cancelled(self, tag: bytes) -> None:
        consumed = self.consumers.pop(tag, None)
        if consumed is not None:
            self._former[tag] = consumed
            if len(self._former) > _MAX_FORMER:
                del self._former[next(iter(self._former))]

    def _declared(self, name: bytes, makes_exclusive: bool, nameless: list[ConsumedQueue] | None) -> None:
        if makes_exclusive:
            self._exclusive.add(name)
        for consumed in nameless or ():
            consumed.queue = name
        if nameless is not None and nameless is self._nameless:
            self._last, self._nameless = name, None
