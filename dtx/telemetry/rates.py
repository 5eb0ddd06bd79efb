"""Rates of counters, as averages between two requests."""

from collections.abc import Sequence
from typing import Final

RATE_SECONDS: Final = 5.0
"""Least time over which a rate is an average: the interval of RabbitMQ's statistics."""


class RateSample:
    """Earlier numbers, for rates."""

    __slots__ = ("_at", "_numbers", "_rates")

    def __init__(self) -> None:
        self._at = float("-inf")
        self._numbers: Sequence[int] = ()
        self._rates: Sequence[float] = ()

    def rates(self, numbers: Sequence[int], now: float) -> Sequence[float]:
        """The events per second since the last call that is :data:`RATE_SECONDS` older; 0 for the first call.

        Args:
            numbers: of events so far.
            now: seconds.
        """
        passed = now - self._at
        if passed >= RATE_SECONDS:
            before = self._numbers or numbers
            self._rates = tuple([(new - old) / passed for new, old in zip(numbers, before, strict=True)])
            self._at, self._numbers = now, numbers
        return self._rates
