"""What bounds a queue: times at which its messages expire, and how much may be ready."""

from collections.abc import Mapping
from math import inf
from typing import Final

from dtx.store.postgres.arguments import Overflow, QueueArguments

NEVER: Final = inf


class Limits:
    """The bounds of one queue, and what of its messages matters for them: nothing at all in most queues.

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
        """It gives way at the head; otherwise a full queue refuses what comes (reject-publish)."""
        self.expiries: dict[int, float] = {}
        """Of all that is ready or handed out and expires: when."""
        self._sizes: dict[int, int] = {}
        self._octets = 0
        self._incoming = self._incoming_octets = 0

    @property
    def weighs(self) -> bool:
        """Whether the octets of bodies matter."""
        return self._max_octets is not None

    def restore(self, expiries: Mapping[int, float], octets: Mapping[int, int]) -> None:
        """Messages that are ready since before a restart."""
        self.expiries.update(expiries)
        if self.weighs:
            self._sizes.update(octets)
            self._octets += sum(octets.values())

    def note(self, position: int, octets: int, expires_at: float | None) -> None:
        """A message that is ready, or handed out, from now on."""
        if expires_at is not None:
            self.expiries[position] = expires_at
        if self._max_octets is not None:
            self._sizes[position] = octets

    def forget(self, position: int) -> None:
        """A message left."""
        self.expiries.pop(position, None)
        self._sizes.pop(position, None)

    def came(self, position: int) -> None:
        """It is ready."""
        if self._sizes:
            self._octets += self._sizes[position]

    def went(self, position: int) -> None:
        """It is ready no more."""
        if self._sizes:
            self._octets -= self._sizes[position]

    def emptied(self) -> None:
        """Nothing is ready."""
        self._octets = 0

    def over(self, ready: int) -> bool:
        """Whether more is ready than may be."""
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
