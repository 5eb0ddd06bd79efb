"""The short form of the matrix: each failpoint once, in a case that reaches it; which one is kept in a file.

The file is made by ``python -m tests.evidence.matrix --learn``: of the cases that reach a point that one is taken which
has the fewest points so far, and of those that take their time only where no other one reaches it.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from dtx.failpoint import Point
from tests.evidence.matrix.cases import Condition, Kind, Row, all_rows

FILE: Final = Path(__file__).with_name("rotation.txt")


def candidates() -> tuple[Row, ...]:
    """Rows that the short form takes its cells from."""
    return tuple(row for row in all_rows() if row.condition in (Condition.DTX, Condition.REFUSING))


def choose(reached: Mapping[str, list[str]]) -> dict[Point, Row]:
    """A row for each point.

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
    """Whether a cell of it waits for a lease to run out, for programs of RabbitMQ's, or for dtx to look once more."""
    return row.case.kind in (Kind.TAKEN_OVER, Kind.SEVERED, Kind.MENDED, Kind.DOUBTED)


def _is_open(row: Row) -> bool:
    """Whether the first life ends when something was sent: what the second one reaches depends on what has arrived."""
    return row.case.killed_at is not None and row.case.killed_at.endswith("-sent")


def write(chosen: Mapping[Point, Row]) -> None:
    """Keep it."""
    FILE.write_text("".join(f"{point.label:34} {row.name}\n" for point, row in chosen.items()), encoding="utf-8")


def read() -> dict[Point, Row]:
    """What was kept.

    Raises:
        ValueError, KeyError: a point or a row is not there any more.
    """
    rows = {row.name: row for row in candidates()}
    lines = (line.split(maxsplit=1) for line in FILE.read_text(encoding="utf-8").splitlines())
    return {Point.named(label): rows[name] for label, name in lines}
