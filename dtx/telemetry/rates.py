"""Rates of counters, from two samples that the server takes at a fixed interval: no request changes them."""

from collections.abc import Iterable
from itertools import repeat
from typing import Final

RATE_SECONDS: Final = 5.0
"""Seconds between two samples: the interval of RabbitMQ's statistics."""


class RateSample:
    """Counters that began at 0: their numbers at the last sample, and their rates between the last two."""

    __slots__ = ("_numbers", "_rates")

    def __init__(self) -> None:
        self._numbers: tuple[int, ...] = ()
        self._rates: tuple[float, ...] = ()  # empty while nothing changes, because most of many queues are idle

    def take(self, numbers: tuple[int, ...], passed: float) -> None:
        """Take a sample.

        Args:
            numbers: of events so far.
            passed: seconds since the last sample.
        """
        before = self._numbers or (0,) * len(numbers)
        if numbers != before:
            self._rates = tuple([(new - old) / passed for new, old in zip(numbers, before, strict=True)])
            self._numbers = numbers
        elif self._rates:
            self._rates = ()

    def details(self, words: Iterable[str]) -> dict[str, dict[str, float]]:
        """The events per second, as RabbitMQ's API has them; 0 before the first sample.

        Args:
            words: for the numbers.
        """
        rates = self._rates or repeat(0.0)
        return {f"{word}_details": {"rate": rate} for word, rate in zip(words, rates, strict=False)}
