"""The short form of the matrix: each failpoint once, in a case that reaches it; a file has the cases.

``python -m tests.evidence.matrix --learn`` writes the file. For each point it takes the case with the fewest points so
far among those that reach it. It takes slow cases only if no other one reaches the point.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from dtx.failpoint import Point
from tests.evidence.matrix.cases import Condition, Kind, Row, all_rows

_CONDITIONS: Final = (Condition.DTX, Condition.REFUSING, Condition.MEMBERS)
FILE: Final = Path(__file__).with_name("rotation.txt")


def candidates() -> tuple[Row, ...]:
    """Return the rows that the short form may use."""
    return tuple(row for row in all_rows() if row.condition in _CONDITIONS)


def choose(reached: Mapping[str, list[str]]) -> dict[Point, Row]:
    """Choose a row for each point.

    Args:
        reached: the labels of the points that a row reaches, by its name.
    """
    taken: Counter[str] = Counter()
    chosen = {}
    for point in Point:
        rows = [row for row in candidates() if point.label in reached.get(row.name, ())]
        if rows:
            row = min(rows, key=lambda row: (_is_slow(row), _is_open(row), taken[row.name], candidates().index(row)))
            taken[row.name] += 1
            chosen[point] = row
    return chosen


def _is_slow(row: Row) -> bool:
    """Whether a cell waits for the end of a lease, for a RabbitMQ command, or for a repeated check of dtx."""
    return row.case.kind in (Kind.TAKEN_OVER, Kind.SEVERED, Kind.MENDED, Kind.DOUBTED)


def _is_open(row: Row) -> bool:
    """Whether the first process dies just after sending: the points of the second one depend on what has arrived."""
    return row.case.killed_at is not None and row.case.killed_at.endswith("-sent")


def write(chosen: Mapping[Point, Row]) -> None:
    """Write the choice to the file."""
    FILE.write_text("".join(f"{point.label:34} {row.name}\n" for point, row in chosen.items()), encoding="utf-8")


def read() -> dict[Point, Row]:
    """Read the choice from the file.

    Raises:
        ValueError, KeyError: a point or a row no longer exists.
    """
    rows = {row.name: row for row in candidates()}
    lines = (line.split(maxsplit=1) for line in FILE.read_text(encoding="utf-8").splitlines())
    return {Point.named(label): rows[name] for label, name in lines}
