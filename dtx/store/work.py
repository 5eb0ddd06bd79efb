"""The work of a branch that has not voted: messages held back in memory, in order of arrival.

Nothing here is durable: a branch that has not been prepared is presumed aborted.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dtx import failpoint
from dtx.failpoint import Point
from dtx.log.changes import ROW_BYTES, SHARED_BYTES, Slot
from dtx.log.records import EXCLUSIVE, WorkKind, WorkRow

Decided = Callable[[bool], None]
"""Called once, when a branch has ended, with whether it has committed."""


class Budget:
    """Memory for messages of branches that have not voted. All clients share it.

    One client may hold as much as its own limits allow. This budget limits all clients together.

    Args:
        limit: bytes.
        full: the text that :meth:`excess` returns when the limit is used up.
        above: other budgets, which are charged with the same bytes.
    """

    __slots__ = ("_charged", "_full", "limit", "used")

    def __init__(self, limit: int, full: str = "", *above: "Budget") -> None:
        self.limit = limit
        self.used = 0
        self._full = full or f"all branches together may hold {limit} bytes (--max-held-bytes)"
        self._charged: tuple[Budget, ...] = (*(each for budget in above for each in budget._charged), self)  # noqa: SLF001

    def charge(self, size: int) -> None:
        """Add *size* bytes to the bytes that are held; a negative *size* subtracts."""
        for budget in self._charged:
            budget.used += size

    def has_room(self, size: int) -> bool:
        """Whether *size* more bytes are within all limits."""
        for budget in self._charged:  # noqa: SIM110 - runs for each message: a generator costs more than the comparison
            if budget.used + size > budget.limit:
                return False
        return True

    def excess(self, size: int) -> str:
        """A text for people: the limit that *size* more bytes exceed."""
        return next((each._full for each in self._charged if each.used + size > each.limit), self._full)  # noqa: SLF001


class Returner(Protocol):
    """The channel that published a message, and is told if the message is returned."""

    def returned(self, work: WorkRow, code: int, text: bytes) -> None:
        """A mandatory message could not be routed when its branch was committed."""


@dataclass(slots=True, eq=False)
class Delivery:
    """A message that was delivered on a selected channel and is not settled.

    Args:
        holder: the channel that has the delivery.
        tag: delivery tag on *holder*.
        queue: its queue.
        body: ``None`` if its content exceeds the limits for kept contents.
        size: bytes charged for its content.
        slot: standalone mode: where the message is stored; the content is not kept here.
        exclusive: alongside: the broker deletes *queue* with the client's connection.
        stream: alongside: it comes from a stream: it can be acknowledged, but not put back.
        revoked: alongside: the broker has cancelled its consumer, and may have taken it back.
    """

    holder: "Holder"
    tag: int
    queue: bytes
    exchange: bytes
    routing_key: bytes
    redelivered: bool
    properties: bytes = b""
    body: bytes | None = None
    size: int = 0
    slot: Slot | None = None
    exclusive: bool = field(default=False, kw_only=True)
    stream: bool = field(default=False, kw_only=True)
    revoked: bool = field(default=False, kw_only=True)

    def to_row(self, position: int, unit: int) -> WorkRow:
        """Its row in the log; *unit* takes it."""
        return WorkRow(
            position=position,
            kind=WorkKind.CONSUME,
            exchange=self.exchange,
            routing_key=self.routing_key,
            queue=self.queue,
            flags=int(self.redelivered) | (EXCLUSIVE if self.exclusive else 0),
            properties=self.properties,
            body=self.body or b"",
            unit=unit,
        )


class Holder(Hashable, Protocol):
    """A channel on which deliveries are held for branches."""

    @property
    def lock(self) -> str:
        """Name of the lock of the upstream connection; empty without one."""

    def release(self, deliveries: Sequence[Delivery]) -> None:
        """Give *deliveries* back to the broker (requeued)."""


@dataclass(slots=True, eq=False)
class HeldPublish:
    """A message that was published within a branch.

    Args:
        origin: is told when no queue takes a mandatory message.
        queues: standalone mode: ids of the queues that it was routed to when it was published. RabbitMQ also routes
            then in tx mode. So an exchange or binding that is deleted later cannot make a prepared branch fail.
        blind: standalone mode: the properties have BCC, which no consumer may see.
    """

    exchange: bytes
    routing_key: bytes
    mandatory: bool
    properties: bytes
    body: bytes
    origin: Returner | None = None
    queues: tuple[int, ...] = ()
    blind: bool = False
    size: int = field(init=False)
    """Bytes that it takes: data that is stored for each queue counts for each queue."""

    def __post_init__(self) -> None:
        octets = len(self.properties)
        body = len(self.body)
        if len(self.queues) > 1:
            each = octets + ROW_BYTES + (body if body < SHARED_BYTES else 0)
            octets += each * (len(self.queues) - 1)
        self.size = octets + body


class HeldWork:
    """The work that one branch holds: publishes, and deliveries that were acknowledged.

    Args:
        limit_bytes: bytes of bodies and properties.
        limit_messages: messages.
        budget: of all branches together.
    """

    __slots__ = (
        "_charged",
        "budget",
        "bytes",
        "consumes",
        "items",
        "limit_bytes",
        "limit_messages",
        "outcomes",
        "publishes",
    )

    def __init__(self, limit_bytes: int, limit_messages: int, budget: Budget) -> None:
        self.budget = budget
        self._charged = 0
        self.items: dict[HeldPublish | Delivery, None] = {}
        """In order. A dictionary, because :meth:`withdraw` must be fast among many."""
        self.outcomes: list[Decided] = []
        """Callbacks of deliveries that are not consumed. The end of the branch decides their outcome."""
        self.publishes = 0
        self.consumes = 0
        self.bytes = 0
        self.limit_bytes = limit_bytes
        self.limit_messages = limit_messages

    @property
    def count(self) -> int:
        """The number of messages that are held."""
        return len(self.items) + len(self.outcomes)

    def fits(self, size: int, count: int = 1, *, charged: bool = False) -> bool:
        """Whether *count* more messages with a total size of *size* bytes may be held.

        Args:
            size: bytes of all of them.
            count: how many.
            charged: whether the budget has them already.
        """
        return (
            len(self.items) + len(self.outcomes) + count <= self.limit_messages
            and self.bytes + size <= self.limit_bytes
            and (charged or self.budget.has_room(size))
        )

    def excess(self, size: int, count: int = 1) -> str:
        """A text for people: the limit that *count* more messages of *size* bytes exceed."""
        if self.fits(size, count, charged=True):
            return self.budget.excess(size)
        return f"limits of a branch exceeded: {self.count + count} messages, {self.bytes + size} bytes"

    def add_publish(self, publish: HeldPublish) -> None:
        """Hold a publish."""
        self.items[publish] = None
        self.publishes += 1
        size = publish.size
        self.bytes += size
        self.budget.charge(size)
        self._charged += size
        if failpoint.armed:
            failpoint.at(Point.HELD_PUBLISH)

    def withdraw(self, publish: HeldPublish) -> None:
        """Remove a held publish. Does nothing if the publish is not held."""
        if publish in self.items:
            del self.items[publish]
            self.publishes -= 1
            size = publish.size
            self.bytes -= size
            self.budget.charge(-size)
            self._charged -= size

    def add_consume(self, delivery: Delivery) -> None:
        """Hold an acknowledged delivery; its content was charged when it was kept."""
        self.items[delivery] = None
        self.consumes += 1
        self.bytes += delivery.size
        if failpoint.armed:
            failpoint.at(Point.HELD_CONSUME)

    def add_outcome(self, decided: Decided) -> None:
        """Call *decided* at the end of the branch, for a delivery that is not consumed.

        The outcome is not logged. After a failure before that end, the message is in its queue again.
        """
        self.outcomes.append(decided)

    def hand_over(self, other: "HeldWork") -> None:
        """Move all work to the branch of *other*, after the work that *other* holds."""
        self.budget.charge(-self._charged)
        other.budget.charge(self._charged)
        other.items |= self.items
        other.outcomes += self.outcomes
        other.publishes += self.publishes
        other.consumes += self.consumes
        other.bytes += self.bytes
        other._charged += self._charged  # noqa: SLF001 - of the same class
        self.items.clear()
        self.outcomes.clear()
        self.publishes = self.consumes = self.bytes = self._charged = 0

    def holders(self) -> dict[Holder, list[Delivery]]:
        """The held deliveries by the channel that holds them, in order."""
        groups: dict[Holder, list[Delivery]] = {}
        for item in self.items:
            if isinstance(item, Delivery):
                groups.setdefault(item.holder, []).append(item)
        return groups

    def discard(self, wanted: Callable[[Delivery], bool] = lambda _: True) -> None:
        """Forget the publishes and give the deliveries that are *wanted* back. Idempotent."""
        for holder, deliveries in self.holders().items():
            back = [delivery for delivery in deliveries if wanted(delivery)]
            if back:
                holder.release(back)
        self.items.clear()
        self.publishes = self.consumes = self.bytes = 0
        self.shut_down()

    def shut_down(self) -> None:
        """Return the memory to the budget: the messages are in the log, or dropped."""
        self.budget.charge(-self._charged)
        self._charged = 0

    def origins(self) -> dict[int, Returner]:
        """By position, the channels that published mandatory messages."""
        return {
            position: item.origin
            for position, item in enumerate(self.items)
            if isinstance(item, HeldPublish) and item.origin is not None
        }

    def to_log(self, units: dict[Holder, int]) -> tuple[WorkRow, ...]:
        """The rows of this work; *units* numbers the holders."""
        rows = []
        for position, item in enumerate(self.items):
            if isinstance(item, HeldPublish):
                rows.append(
                    WorkRow(
                        position=position,
                        kind=WorkKind.PUBLISH,
                        exchange=item.exchange,
                        routing_key=item.routing_key,
                        flags=int(item.mandatory),
                        properties=item.properties,
                        body=item.body,
                    )
                )
            else:
                rows.append(item.to_row(position, units[item.holder]))
        return tuple(rows)
