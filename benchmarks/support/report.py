"""Tables on the terminal, and their statistics."""

import os
import platform
from collections.abc import Sequence
from statistics import median
from typing import Final


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value that *percent* of *values* do not exceed. *values* are in any order, and not empty."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def milliseconds(values: Sequence[float], percent: float) -> str:
    """Return a percentile of seconds as milliseconds; a dash if there are no values."""
    return f"{percentile(values, percent) * 1e3:.2f}" if values else "-"


TABLES: "Final[list[Table]]" = []
"""The tables of this run, for ``python -m benchmarks.record``."""


class Table:
    """A table that prints each row at once.

    Args:
        first: head and width of the first column.
        heads: of the other columns.
    """

    def __init__(self, first: tuple[str, int], heads: Sequence[str]) -> None:
        self._widths = [max(len(head), 7) for head in heads]
        self._first = first[1]
        self.head: Final = [first[0], *map(str.strip, heads)]
        self.rows: Final[list[list[str]]] = []
        TABLES.append(self)
        self._print(first[0], heads)
        print("-" * (self._first + sum(self._widths) + 2 * len(heads)), flush=True)

    def row(self, first: str, cells: Sequence[str]) -> None:
        """Print one row, and keep it for the result file."""
        self.rows.append([first, *cells])
        self._print(first, cells)

    def _print(self, first: str, cells: Sequence[str]) -> None:
        others = (cell.rjust(width) for cell, width in zip(cells, self._widths, strict=True))
        print("  ".join((first.ljust(self._first), *others)), flush=True)


def spread(values: Sequence[float]) -> str:
    """Return median, least and greatest value as text."""
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def machine() -> str:
    """Return a description of this machine."""
    usable = len(os.sched_getaffinity(0))
    return f"{usable} processors shared by everything, {platform.machine()}, Python {platform.python_version()}"
