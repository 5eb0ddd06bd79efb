"""What one connection has on its way into the store: what one read brings is one record, and is answered together.

Publishes and acknowledgements of all channels of a connection wait until all frames of a read are handled; then they
go to the log as one record. Its commit answers them: confirms are sent, and whoever waited for what had been sent
before goes on.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from dtx.log.api import LogError
from dtx.server.limits import MAX_UNWRITTEN
from dtx.server.standalone.broker import Done, StandaloneServer
from dtx.store.postgres.consumers import QueueDelivery
from dtx.store.work import Budget, HeldPublish

_MESSAGE: Final = 512
"""Octets that a message on its way costs beside its content, about."""


class Publisher(Protocol):
    """A channel, as it hears of what it has published."""

    def written(self, number: int, error: LogError | None) -> None:
        """The publish *number* is durable, or may not be."""

    def refused(self, number: int) -> None:
        """A queue does not take the publish *number*."""

    def say_confirms(self) -> None:
        """All that is known at present was told."""


class Writes:
    """The writes of one connection.

    Args:
        vhost: of the connection.
        broker: gets them.
        budget: memory of all connections together.
        throttle: told when what is on its way becomes too much, and when it is not any more.
    """

    __slots__ = (
        "_acked",
        "_broker",
        "_budget",
        "_octets",
        "_open",
        "_publishers",
        "_publishes",
        "_submitted",
        "_throttle",
        "_throttled",
        "_underway",
        "_vhost",
        "_waiting",
    )

    def __init__(self, vhost: str, broker: StandaloneServer, budget: Budget, throttle: Callable[[bool], None]) -> None:
        self._vhost = vhost
        self._broker = broker
        self._budget = budget
        self._throttle = throttle
        self._throttled = False
        self._publishes: list[HeldPublish] = []
        self._publishers: list[tuple[Publisher, int]] = []
        self._acked: list[QueueDelivery] = []
        self._octets = 0
        self._underway = 0
        self._submitted = 0
        self._open: dict[int, None] = {}
        """Numbers of the records that are under way, in order."""
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()

    # -- what comes in

    def publish(self, publisher: Publisher, number: int, message: HeldPublish) -> None:
        """A message that at least one queue takes; *number* is what its channel calls it."""
        self._publishes.append(message)
        self._publishers.append((publisher, number))
        self._octets += _cost(message)

    def ack(self, deliveries: Sequence[QueueDelivery]) -> None:
        """Deliveries that are acknowledged."""
        self._acked += deliveries

    def flush(self) -> None:
        """All that has come in is one record from here on."""
        if not self._publishes and not self._acked:
            return
        publishes, self._publishes = self._publishes, []
        publishers, self._publishers = self._publishers, []
        acked, self._acked = self._acked, []
        octets, self._octets = self._octets, 0
        refused: Sequence[int] = ()

        def done(error: LogError | None) -> None:
            self._end(number, octets)
            gone = frozenset(refused)
            for index, (publisher, name) in enumerate(publishers):
                if index not in gone:
                    publisher.written(name, error)
            for publisher in dict.fromkeys(publisher for publisher, _ in publishers):
                publisher.say_confirms()
            self._go_on()

        number = self._begin(octets)
        refused = self._broker.submit(self._vhost, publishes, acked, done)
        for index in refused:
            publisher, name = publishers[index]
            publisher.refused(name)

    def apart(self, publishes: Sequence[HeldPublish], acked: Sequence[QueueDelivery], done: Done) -> bool:
        """Write these as a record of their own, behind all that has come in: tx.commit.

        Returns:
            False when a queue refuses one of them: then nothing is written, and *done* is not called.
        """
        self.flush()
        octets = sum(map(_cost, publishes))

        def written(error: LogError | None) -> None:
            self._end(number, octets)
            done(error)
            self._go_on()

        number = self._begin(octets)
        if self._broker.submit(self._vhost, publishes, acked, written, whole=True):
            self._end(number, octets)
            self._go_on()
            return False
        return True

    # -- what comes of it

    def then(self, act: Callable[[], None]) -> None:
        """Call *act* when all that has come in is durable, or has failed; at once where nothing is under way."""
        self.flush()
        if self._open:
            self._waiting.append((self._submitted, act))
        else:
            act()

    @property
    def idle(self) -> bool:
        """Whether nothing has come in that is not durable."""
        return not (self._open or self._publishes or self._acked)

    def _begin(self, octets: int) -> int:
        self._submitted += 1
        self._open[self._submitted] = None
        self._underway += octets
        self._budget.charge(octets)
        if not self._throttled and (self._underway > MAX_UNWRITTEN or not self._budget.has_room(0)):
            self._throttled = True
            self._throttle(True)
        return self._submitted

    def _end(self, number: int, octets: int) -> None:
        del self._open[number]
        self._underway -= octets
        self._budget.charge(-octets)

    def _go_on(self) -> None:
        oldest = next(iter(self._open), self._submitted + 1)
        waiting = self._waiting
        while waiting and waiting[0][0] < oldest:
            waiting.popleft()[1]()
        # An empty way ends the throttle whatever others hold: nothing else would tell when to go on.
        if self._throttled and (not self._open or (self._underway <= MAX_UNWRITTEN // 2 and self._budget.has_room(0))):
            self._throttled = False
            self._throttle(False)


def _cost(message: HeldPublish) -> int:
    return message.size + _MESSAGE
