"""The unwritten publishes and acknowledgements of one connection: those of one read become one record.

They wait until all frames of a read are handled, for all channels of the connection. Then they go to the log as one
record. When it is committed, confirms are sent, and callbacks that waited for it are called.
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
"""Bytes that an unwritten message takes in addition to its content, approximately."""


class Publisher(Protocol):
    """The recipient of answers to publishes: a channel or a link."""

    def written(self, number: int, error: LogError | None) -> None:
        """The publish *number* is durable, or may not be."""

    def refused(self, number: int) -> None:
        """A full queue refuses the publish *number*."""

    def send_confirms(self) -> None:
        """Send the answers: all publishes of a record have been reported."""


class Writes:
    """The writes of one connection.

    Args:
        vhost: the virtual host of the connection.
        broker: the store.
        budget: the memory limit of the user and the virtual host.
        throttle: called when too much is unwritten (True), and when that has ended (False).
    """

    __slots__ = (
        "_acked",
        "_broker",
        "_budget",
        "_failed",
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
        """Numbers of the records that are being written, in order."""
        self._waiting: deque[tuple[int, Callable[[], None], Callable[[], None]]] = deque()
        self._failed: set[int] = set()
        """Numbers of records that may not be durable, until the callbacks that wait for them are called."""

    # -- input

    def publish(self, publisher: Publisher, number: int, message: HeldPublish) -> None:
        """Add a publish that at least one queue takes; *publisher* gets the answer for *number*."""
        self._publishes.append(message)
        self._publishers.append((publisher, number))
        self._octets += _cost(message)

    def ack(self, deliveries: Sequence[QueueDelivery]) -> None:
        """Add acknowledged deliveries."""
        self._acked += deliveries

    def flush(self) -> None:
        """Write all publishes and acknowledgements so far as one record."""
        if not self._publishes and not self._acked:
            return
        publishes, self._publishes = self._publishes, []
        publishers, self._publishers = self._publishers, []
        acked, self._acked = self._acked, []
        octets, self._octets = self._octets, 0
        refused: Sequence[int] = ()

        def done(error: LogError | None) -> None:
            self._end(number, octets, error)
            unwritten = frozenset(refused)
            for index, (publisher, name) in enumerate(publishers):
                if index not in unwritten:
                    publisher.written(name, error)
            for publisher in dict.fromkeys(publisher for publisher, _ in publishers):
                publisher.send_confirms()
            self._run_waiting()

        number = self._begin(octets)
        refused = self._broker.submit(self._vhost, publishes, acked, done)
        for index in refused:
            publisher, name = publishers[index]
            publisher.refused(name)

    def write_separately(self, publishes: Sequence[HeldPublish], acked: Sequence[QueueDelivery], done: Done) -> bool:
        """Write these as a separate record, after all earlier ones: tx.commit.

        Returns:
            False if a queue refuses a publish: then nothing is written, and *done* is not called.
        """
        self.flush()
        octets = sum(map(_cost, publishes))

        def written(error: LogError | None) -> None:
            self._end(number, octets, error)
            done(error)
            self._run_waiting()

        number = self._begin(octets)
        if self._broker.submit(self._vhost, publishes, acked, written, whole=True):
            self._end(number, octets)
            self._run_waiting()
            return False
        return True

    # -- completion

    def then(self, act: Callable[[], None], failed: Callable[[], None] | None = None) -> None:
        """Call *act* when all earlier writes are durable or have failed; at once if there are none.

        Args:
            act: the callback.
            failed: called instead of *act* if the last record before this call has failed.
        """
        self.flush()
        if self._open:
            self._waiting.append((self._submitted, act, failed or act))
        else:
            act()

    @property
    def idle(self) -> bool:
        """Whether there is no write that is not complete."""
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

    def _end(self, number: int, octets: int, error: LogError | None = None) -> None:
        del self._open[number]
        if error is not None and self._waiting:
            self._failed.add(number)
        self._underway -= octets
        self._budget.charge(-octets)

    def _run_waiting(self) -> None:
        oldest = next(iter(self._open), self._submitted + 1)
        waiting = self._waiting
        while waiting and waiting[0][0] < oldest:
            number, act, failed = waiting.popleft()
            (failed if number in self._failed else act)()
        if self._failed:
            self._failed = {number for number in self._failed if waiting and number >= waiting[0][0]}
        # With no record left the throttle ends, even if the budget is full: nothing else would end it.
        if self._throttled and (not self._open or (self._underway <= MAX_UNWRITTEN // 2 and self._budget.has_room(0))):
            self._throttled = False
            self._throttle(False)


def _cost(message: HeldPublish) -> int:
    return message.size + _MESSAGE
