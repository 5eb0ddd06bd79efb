"""Tables on the terminal, and the few statistics that they show."""

import os
import platform
from collections.abc import Sequence
from statistics import median


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that *percent* of all do not exceed; *values* in any order, not empty."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def milliseconds(values: Sequence[float], percent: float) -> str:
    """A percentile of seconds, as milliseconds; a dash where there are none."""
    return f"{percentile(values, percent) * 1e3:.2f}" if values else "-"


class Table:
    """A table whose rows are printed as they come, since each takes its time.

    Args:
        first: head of the first column, and how wide it is.
        heads: of the others.
    """

    def __init__(self, first: tuple[str, int], heads: Sequence[str]) -> None:
        self._widths = [max(len(head), 7) for head in heads]
        self._first = first[1]
        self.row(first[0], heads)
        print("-" * (self._first + sum(self._widths) + 2 * len(heads)), flush=True)

    def row(self, first: str, cells: Sequence[str]) -> None:
        """Print one row."""
        others = (cell.rjust(width) for cell, width in zip(cells, self._widths, strict=True))
        print("  ".join((first.ljust(self._first), *others)), flush=True)


def spread(values: Sequence[float]) -> str:
    """Median, least and greatest."""
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def machine() -> str:
    """What this was measured on."""
    usable = len(os.sched_getaffinity(0))
    return f"{usable} processors shared by everything, {platform.machine()}, Python {platform.python_version()}"
