"""The messages of a queue that wait for a consumer: positions in the queue's order, and nothing else.

A position costs a pointer and an int (40 octets): a million of them are kept as easily as ten. New ones come at the
end, and what is given back goes to where it was (RabbitMQ: "requeued messages are placed in their original position"),
which is nearly always the very front; only what belongs between two that wait goes into a heap.
"""

from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush, merge, nsmallest
from itertools import islice


class Ready:
    """Positions, least first."""

    __slots__ = ("_between", "_line")

    def __init__(self) -> None:
        self._line: deque[int] = deque()
        self._between: list[int] = []

    def __len__(self) -> int:
        return len(self._line) + len(self._between)

    def append(self, position: int, priority: int = 0) -> None:  # noqa: ARG002 - for queues with priorities
        """Add one; nearly always the greatest: a branch that commits late has lesser ones."""
        line = self._line
        if line and position < line[-1]:
            heappush(self._between, position)
        else:
            line.append(position)

    def put_back(self, position: int) -> None:
        """Add one that was here before."""
        line = self._line
        if not line or position < line[0]:
            line.appendleft(position)
        else:
            heappush(self._between, position)

    def restore(self, positions: Iterable[int], priorities: Mapping[int, int]) -> None:  # noqa: ARG002 - see append
        """Add many that are in order and greater than all that are here."""
        self._line.extend(positions)

    def head(self) -> int | None:
        """The least, or ``None``."""
        line, between = self._line, self._between
        if between and (not line or between[0] < line[0]):
            return between[0]
        return line[0] if line else None

    def pop(self) -> int:
        """Take the least out.

        Raises:
            IndexError: nothing is here.
        """
        between = self._between
        if between and (not self._line or between[0] < self._line[0]):
            return heappop(between)
        return self._line.popleft()

    def discard(self, position: int) -> bool:
        """Take one out, wherever it is (fast at the head alone); whether it was here."""
        if position == self.head():
            self.pop()
        elif position in self._between:
            self._between.remove(position)
            heapify(self._between)
        else:
            try:
                self._line.remove(position)
            except ValueError:
                return False
        return True

    def first(self, count: int) -> list[int]:
        """The first *count* in order."""
        line = islice(self._line, count)
        return list(islice(merge(nsmallest(count, self._between), line), count)) if self._between else list(line)

    def drain(self) -> "array[int]":
        """Take all out; in order."""
        positions = array("q", merge(sorted(self._between), self._line) if self._between else self._line)
        self._line.clear()
        self._between.clear()
        return positions

    def remember(self, position: int, priority: int) -> None:
        """One that is not here now may be put back."""

    def forget(self, position: int) -> None:
        """It will not come back."""


class PriorityReady(Ready):
    """Positions by priority, the highest first, and least first within one.

    Args:
        highest: x-max-priority; what is above counts as this (RabbitMQ: "treated as if they were published with the
            maximum priority").
    """

    __slots__ = ("_highest", "_levels", "_priorities")

    def __init__(self, highest: int) -> None:
        super().__init__()
        self._highest = highest
        self._levels = [Ready() for _ in range(highest + 1)]
        self._priorities: dict[int, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._levels))

    def append(self, position: int, priority: int = 0) -> None:
        """As of the base; it keeps its priority until :meth:`forget`."""
        self.remember(position, priority)
        self._levels[min(priority, self._highest)].append(position)

    def put_back(self, position: int) -> None:
        """As of the base."""
        self._levels[self._priorities.get(position, 0)].put_back(position)

    def restore(self, positions: Iterable[int], priorities: Mapping[int, int]) -> None:
        """As of the base; *priorities* of those that have one."""
        for position in positions:
            self.append(position, priorities.get(position, 0))

    def _first_level(self) -> Ready | None:
        return next((level for level in reversed(self._levels) if level), None)

    def head(self) -> int | None:
        """The least of the highest priority that waits."""
        level = self._first_level()
        return None if level is None else level.head()

    def pop(self) -> int:
        """Take :meth:`head` out."""
        level = self._first_level()
        if level is None:
            raise IndexError("nothing is ready")
        return level.pop()

    def discard(self, position: int) -> bool:
        """As of the base."""
        return self._levels[self._priorities.get(position, 0)].discard(position)

    def first(self, count: int) -> list[int]:
        """The first *count* in the order of dispatch."""
        found: list[int] = []
        for level in reversed(self._levels):
            found += level.first(count - len(found))
        return found

    def drain(self) -> "array[int]":
        """Take all out; in the order of dispatch."""
        positions = array("q")
        for level in reversed(self._levels):
            positions += level.drain()
        return positions

    def remember(self, position: int, priority: int) -> None:
        """As of the base: its priority."""
        if priority:
            self._priorities[position] = min(priority, self._highest)

    def forget(self, position: int) -> None:
        """As of the base: its priority."""
        self._priorities.pop(position, None)
