"""The ready messages of a queue: only their positions, in the queue's order.

A position costs eight bytes, so a queue can keep a million positions. New positions come at the end. A position that is
given back returns to its place (RabbitMQ: "requeued messages are placed in their original position"). That place is
nearly always the front. Only a position that belongs between two ready ones goes into a heap.
"""

from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush, merge, nsmallest
from itertools import islice
from math import inf
from typing import Final

from dtx.store.postgres.arguments import Overflow, QueueArguments

_CHUNK: Final = 4096
"""Positions in one chunk of a line: at most so many are moved when one is taken out of the middle."""
_FRONT: Final = 64
"""Places added at once at the front: positions that are given back come one by one, from the last on."""


class ReadyLine:
    """Positions in ascending order: added and taken at both ends, in arrays of 64 bit integers."""

    __slots__ = ("_chunks", "_head", "_length", "_tail", "last")

    def __init__(self) -> None:
        self._length = 0
        self.last = -1
        """The greatest position. It is -1 where there is none, so that no position is less."""
        # The first chunk begins at _head; the last is _tail, and it may be the first.
        self._head = 0
        self._tail: array[int] = array("q")
        self._chunks = [self._tail]

    def __len__(self) -> int:
        return self._length

    def append(self, position: int) -> None:
        """Add a position that is greater than all others."""
        tail = self._tail
        if len(tail) >= _CHUNK:
            tail = self._tail = array("q")
            self._chunks.append(tail)
        tail.append(position)
        self.last = position
        self._length += 1

    def extend(self, positions: "array[int]") -> None:
        """Add many positions, which are in order and greater than all others."""
        if positions:
            chunks = self._chunks
            chunks += (positions[start : start + _CHUNK] for start in range(0, len(positions), _CHUNK))
            if not self._length:
                del chunks[0]
                self._head = 0
            self._tail = chunks[-1]
            self.last = positions[-1]
            self._length += len(positions)

    def appendleft(self, position: int) -> None:
        """Add a position that is less than all others."""
        if not self._length:
            self.append(position)
            return
        if not self._head:
            self._chunks.insert(0, array("q", bytes(8 * _FRONT)))
            self._head = _FRONT
        self._head -= 1
        self._chunks[0][self._head] = position
        self._length += 1

    def first(self) -> int:
        """The least position.

        Raises:
            IndexError: there is none.
        """
        return self._chunks[0][self._head]

    def popleft(self) -> int:
        """Remove and return the least position.

        Raises:
            IndexError: there is none.
        """
        chunk = self._chunks[0]
        position = chunk[self._head]
        self._head += 1
        self._length -= 1
        if self._head == len(chunk):
            self._head = 0
            if self._length:
                del self._chunks[0]
            else:
                del chunk[:]  # the only one
                self.last = -1
        return position

    def remove(self, position: int) -> bool:
        """Remove *position*, wherever it is. Returns whether it was here."""
        at = bisect_left(self._chunks, position, key=_greatest) if self._length else len(self._chunks)
        if at == len(self._chunks):
            return False
        chunk = self._chunks[at]
        start = 0 if at else self._head
        place = bisect_left(chunk, position, start)
        if chunk[place] != position:
            return False
        if place == start and not at:
            self.popleft()
            return True
        del chunk[place]
        self._length -= 1
        if not chunk:
            del self._chunks[at]
        if position == self.last:
            self._tail = self._chunks[-1]
            self.last = self._tail[-1]
        return True

    def clear(self) -> None:
        """Remove all positions."""
        self._length = self._head = 0
        self.last = -1
        self._tail = array("q")
        self._chunks = [self._tail]

    def head(self, count: int) -> "array[int]":
        """The first *count* positions, in order."""
        found = self._chunks[0][self._head : self._head + count]
        for chunk in islice(self._chunks, 1, None):
            if len(found) >= count:
                break
            found += chunk[: count - len(found)]
        return found

    def all(self) -> "array[int]":
        """All positions, in order."""
        return self.head(self._length)


def _greatest(chunk: Sequence[int]) -> int:
    return chunk[-1]


class Ready:
    """Positions, least first."""

    __slots__ = ("_between", "_line")

    def __init__(self) -> None:
        self._line = ReadyLine()
        self._between: list[int] = []

    def __len__(self) -> int:
        return len(self._line) + len(self._between)

    def append(self, position: int, priority: int = 0) -> None:  # noqa: ARG002 - for queues with priorities
        """Add a position. It is nearly always the greatest; those of a branch that commits late are less."""
        line = self._line
        if position < line.last:
            heappush(self._between, position)
        else:
            line.append(position)

    def put_back(self, position: int) -> None:
        """Add a position that was here before."""
        line = self._line
        if not line or position < line.first():
            line.appendleft(position)
        else:
            heappush(self._between, position)

    def restore(self, positions: "array[int]", priorities: Mapping[int, int]) -> None:  # noqa: ARG002 - see append
        """Add many positions, which are in order and greater than all others."""
        self._line.extend(positions)

    def head(self) -> int | None:
        """The least position, or ``None``."""
        line, between = self._line, self._between
        if between and (not line or between[0] < line.first()):
            return between[0]
        return line.first() if line else None

    def oldest(self) -> int | None:
        """The least position of all, or ``None``."""
        return self.head()

    def pop(self) -> int:
        """Remove and return the least position.

        Raises:
            IndexError: there is none.
        """
        between = self._between
        if between and (not self._line or between[0] < self._line.first()):
            return heappop(between)
        return self._line.popleft()

    def discard(self, position: int) -> bool:
        """Remove *position*, wherever it is. Returns whether it was here."""
        if self._line.remove(position):
            return True
        if position not in self._between:
            return False
        self._between.remove(position)
        heapify(self._between)
        return True

    def first(self, count: int) -> list[int]:
        """The first *count* positions, in order."""
        line = self._line.head(count)
        return list(islice(merge(nsmallest(count, self._between), line), count)) if self._between else list(line)

    def drain(self) -> "array[int]":
        """Remove all positions. Returns them in order."""
        positions = self._line.all()
        if self._between:
            positions = array("q", merge(sorted(self._between), positions))
        self._line.clear()
        self._between.clear()
        return positions

    def remember(self, position: int, priority: int) -> None:
        """Note that a position that is not here now may be put back."""

    def forget(self, position: int) -> None:
        """Note that a position will not be put back."""


class PriorityReady(Ready):
    """Positions by priority, the highest first, and least first within one.

    Args:
        highest: x-max-priority; a higher priority counts as this one (RabbitMQ: "treated as if they were published with
            the maximum priority").
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
        """Add a position, as the base class does. The position keeps its priority until :meth:`forget`."""
        self.remember(position, priority)
        self._levels[min(priority, self._highest)].append(position)

    def put_back(self, position: int) -> None:
        """Add a position that was here before, with its priority."""
        self._levels[self._priorities.get(position, 0)].put_back(position)

    def restore(self, positions: "array[int]", priorities: Mapping[int, int]) -> None:
        """Add many positions, as the base class does. *priorities* has the positions that have a priority."""
        for position in positions:
            self.append(position, priorities.get(position, 0))

    def _first_level(self) -> Ready | None:
        return next((level for level in reversed(self._levels) if level), None)

    def head(self) -> int | None:
        """The least position of the highest priority that waits."""
        level = self._first_level()
        return None if level is None else level.head()

    def oldest(self) -> int | None:
        """As :meth:`Ready.oldest`: of whatever priority."""
        return min((head for level in self._levels if (head := level.head()) is not None), default=None)

    def pop(self) -> int:
        """Remove and return :meth:`head`."""
        level = self._first_level()
        if level is None:
            raise IndexError("nothing is ready")
        return level.pop()

    def discard(self, position: int) -> bool:
        """As :meth:`Ready.discard`."""
        return self._levels[self._priorities.get(position, 0)].discard(position)

    def first(self, count: int) -> list[int]:
        """The first *count* positions, in the order of dispatch."""
        found: list[int] = []
        for level in reversed(self._levels):
            found += level.first(count - len(found))
        return found

    def drain(self) -> "array[int]":
        """Remove all positions. Returns them in the order of dispatch."""
        positions = array("q")
        for level in reversed(self._levels):
            positions += level.drain()
        return positions

    def remember(self, position: int, priority: int) -> None:
        """Keep the priority of a position."""
        if priority:
            self._priorities[position] = min(priority, self._highest)

    def forget(self, position: int) -> None:
        """Forget the priority of a position."""
        self._priorities.pop(position, None)


NEVER: Final = inf


class QueueLimits:
    """The bounds of one queue, and the details of its messages that the bounds need. Most queues need none.

    Args:
        arguments: of the queue's declaration.
    """

    __slots__ = (
        "_incoming",
        "_incoming_octets",
        "_max_length",
        "_max_octets",
        "_octets",
        "_sizes",
        "drops",
        "expiries",
    )

    def __init__(self, arguments: QueueArguments) -> None:
        self._max_length = arguments.max_length
        self._max_octets = arguments.max_length_bytes
        bounded = not (arguments.max_length is None and arguments.max_length_bytes is None)
        self.drops = bounded and arguments.overflow is Overflow.DROP_HEAD
        """Whether a full queue drops messages at the head. Otherwise it refuses new messages (reject-publish)."""
        self.expiries: dict[int, float] = {}
        """Expiry times, by position, of all messages that are ready or handed out and that expire."""
        self._sizes: dict[int, int] = {}
        self._octets = 0
        self._incoming = self._incoming_octets = 0

    @property
    def limits_bytes(self) -> bool:
        """Whether the queue has a limit for the bytes of bodies."""
        return self._max_octets is not None

    def restore(self, expiries: Mapping[int, float], octets: Mapping[int, int]) -> None:
        """Add messages that have been ready since before a restart."""
        self.expiries.update(expiries)
        if self.limits_bytes:
            self._sizes.update(octets)
            self._octets += sum(octets.values())

    def note(self, position: int, octets: int, expires_at: float | None) -> None:
        """Add a message that is ready, or handed out, from now on."""
        if expires_at is not None:
            self.expiries[position] = expires_at
        if self._max_octets is not None:
            self._sizes[position] = octets

    def forget(self, position: int) -> None:
        """Remove a message that has left."""
        self.expiries.pop(position, None)
        self._sizes.pop(position, None)

    def ready_added(self, position: int) -> None:
        """Count a message as ready."""
        if self._sizes:
            self._octets += self._sizes[position]

    def ready_removed(self, position: int) -> None:
        """Count a message as no longer ready."""
        if self._sizes:
            self._octets -= self._sizes[position]

    def emptied(self) -> None:
        """Note that no message is ready."""
        self._octets = 0

    def over(self, ready: int) -> bool:
        """Whether the ready messages exceed a limit."""
        return (self._max_length is not None and ready > self._max_length) or (
            self._max_octets is not None and self._octets > self._max_octets
        )

    def admit(self, ready: int, octets: int) -> bool:
        """See QueueIndex.admit."""
        if self.drops:
            return True
        if not self.fits(ready, 1, octets):
            return False
        self._incoming += 1
        self._incoming_octets += octets
        return True

    def fits(self, ready: int, count: int, octets: int) -> bool:
        """See QueueIndex.fits."""
        return not (
            (self._max_length is not None and ready + self._incoming + count > self._max_length)
            or (self._max_octets is not None and self._octets + self._incoming_octets + octets > self._max_octets)
        )

    def withdraw(self, octets: int) -> None:
        """See QueueIndex.withdraw."""
        if not self.drops:
            self._incoming -= 1
            self._incoming_octets -= octets
