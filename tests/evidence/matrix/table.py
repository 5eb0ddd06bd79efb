"""The table of the matrix: the results of all cells are kept in a file, printed, and shown in the documentation."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from dtx.failpoint import Point
from tests.evidence.matrix.cases import Row, all_rows
from tests.evidence.matrix.cells import Cell, Result
from tests.support import pages

NAME: Final = "kill-matrix"
"""Name of the table's markers in the page."""
HEAD: Final = "| case | runs | lost | repeated | wrong |\n| --- | ---: | ---: | ---: | ---: |\n"


class Figures:
    """The results of the cells so far, by row, in a file, so that a later run can continue.

    Args:
        path: of the file; ``None``: no file.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._cells: dict[str, dict[str, dict[str, Any]]] = {}
        self._reached: dict[str, list[str]] = {}
        self._plans: dict[str, list[str]] = {}
        if path is not None and path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            self._cells, self._reached, self._plans = kept["cells"], kept["reached"], kept.get("plans", {})

    @property
    def reached(self) -> Mapping[str, list[str]]:
        """The labels of the points that a row reaches, by its name."""
        return self._reached

    def learned(self, row: Row, points: Iterable[Point], cells: Iterable[Cell]) -> None:
        """Store the points that *row* reaches, and its cells."""
        self._reached[row.name] = sorted({point.label for point in points})
        self._plans[row.name] = [cell.at for cell in cells]
        self._save()

    def plan(self, row: Row) -> list[Cell] | None:
        """Return the cells of *row* if they are known."""
        plan = self._plans.get(row.name)
        return None if plan is None else [Cell.read(at) for at in plan]

    def add(self, row: Row, cell: Cell, result: Result) -> None:
        """Add the result of a cell."""
        verdict = result.verdict
        self._cells.setdefault(row.name, {})[cell.at] = {
            "reached": result.reached,
            "lost": verdict.lost,
            "repeated": verdict.repeated,
            "wrong": verdict.wrong,
            "broken": verdict.broken(may_repeat=row.may_repeat),
            "seconds": round(result.seconds, 2),
        }
        self._save()

    def has(self, row: Row, cell: Cell) -> bool:
        """Whether the cell has been played."""
        return cell.at in self._cells.get(row.name, {})

    def _save(self) -> None:
        if self._path is not None:
            text = json.dumps({"reached": self._reached, "plans": self._plans, "cells": self._cells}, indent=1)
            unfinished = self._path.with_name(f"{self._path.name}~")
            unfinished.write_text(text, encoding="utf-8")
            unfinished.rename(self._path)

    def line(self, row: Row) -> str:
        """Return the line of *row* in the table."""
        cells = [cell for cell in self._cells.get(row.name, {}).values() if cell["reached"]]
        sums = [sum(cell["lost"] for cell in cells), sum(cell["repeated"] for cell in cells)]
        wrong = sum(bool(cell["wrong"]) for cell in cells)
        return f"| {row.name} | {len(cells)} | {sums[0]} | {sums[1]} | {wrong} |"

    def table(self, rows: Iterable[Row], known: Mapping[str, "Line"] | None = None, *, add: bool = False) -> str:
        """Return the table.

        Args:
            rows: the rows to show.
            known: lines of earlier runs by name, for rows without results.
            add: add the results to those of the earlier runs.
        """
        lines = []
        for row in rows:
            earlier = (known or {}).get(row.name)
            if earlier is None or (row.name in self._cells and not add):
                lines.append(self.line(row))
            else:
                lines.append(str(earlier.plus(Line.of(self.line(row)))))
        totals = [sum(int(line.split("|")[column]) for line in lines) for column in range(2, 6)]
        return HEAD + "".join(f"{line}\n" for line in (*lines, f"| all | {' | '.join(map(str, totals))} |"))

    def totals(self, rows: Iterable[Row]) -> "Line":
        """Return the sums over *rows*."""
        lines = [Line.of(self.line(row)) for row in rows]
        return Line("all", *(sum(column) for column in zip(*(line[1:] for line in lines), strict=True)))

    def unreached(self) -> list[Point]:
        """Return the points that no case reaches."""
        reached = {label for labels in self._reached.values() for label in labels}
        return [point for point in Point if point.label not in reached]

    def faults(self) -> Mapping[str, list[str]]:
        """Return the broken guarantees by cell."""
        return {
            f"{row} at {at}": cell["broken"]
            for row, cells in self._cells.items()
            for at, cell in cells.items()
            if cell["broken"]
        }


def embed(text: str, figures: Figures, *, add: bool = False) -> str:
    """Return the page *text* with a new table; rows without results keep their line.

    Args:
        text: the old page.
        figures: the results.
        add: add the results to the numbers in the page.

    Raises:
        ValueError: the markers are not in *text*.
    """
    known = {line.name: line for line in shown(text)}
    return pages.embed(text, NAME, figures.table(all_rows(), known, add=add).rstrip("\n"))


class Line(NamedTuple):
    """A row of the table."""

    name: str
    runs: int
    lost: int
    repeated: int
    wrong: int

    @classmethod
    def of(cls, text: str) -> "Line":
        """Parse a row of the table."""
        name, *numbers = (cell.strip() for cell in text.strip("|").split("|"))
        return cls(name, *map(int, numbers))

    def plus(self, other: "Line") -> "Line":
        """Return the sum of both rows."""
        return Line(self.name, *(int(one) + int(two) for one, two in zip(self[1:], other[1:], strict=True)))

    def __str__(self) -> str:
        return f"| {' | '.join(map(str, self))} |"


def shown(text: str) -> list[Line]:
    """Return the rows in the page *text*, without the sum."""
    block = text.partition(f"<!-- {NAME} -->")[2].partition(f"<!-- /{NAME} -->")[0]
    return [Line.of(line) for line in [line for line in block.splitlines() if "|" in line][2:-1]]
