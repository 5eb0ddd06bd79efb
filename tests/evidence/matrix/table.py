"""The table of the matrix: the result of each cell, kept in a file, printed, and shown in the documentation."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from dtx.failpoint import Point
from tests.evidence.matrix.cases import Row, all_rows
from tests.evidence.matrix.cells import Cell, Result
from tests.support import pages

NAME: Final = "kill-matrix"
"""Of the markers of the table in the page."""
HEAD: Final = "| case | runs | lost | repeated | wrong |\n| --- | ---: | ---: | ---: | ---: |\n"


class Figures:
    """What came of the cells so far, by row. Kept in a file, so that a long run can go on where it stopped.

    Args:
        path: of the file; ``None`` for none.
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
        """The points that *row* reaches, and the cells that it has."""
        self._reached[row.name] = sorted({point.label for point in points})
        self._plans[row.name] = [cell.at for cell in cells]
        self._save()

    def plan(self, row: Row) -> list[Cell] | None:
        """The cells of *row*, if that has been learned."""
        plan = self._plans.get(row.name)
        return None if plan is None else [Cell.read(at) for at in plan]

    def add(self, row: Row, cell: Cell, result: Result) -> None:
        """One more."""
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
        """Whether it was played already."""
        return cell.at in self._cells.get(row.name, {})

    def _save(self) -> None:
        if self._path is not None:
            text = json.dumps({"reached": self._reached, "plans": self._plans, "cells": self._cells}, indent=1)
            unfinished = self._path.with_name(f"{self._path.name}~")
            unfinished.write_text(text, encoding="utf-8")
            unfinished.rename(self._path)

    def line(self, row: Row) -> str:
        """Its line of the table."""
        cells = [cell for cell in self._cells.get(row.name, {}).values() if cell["reached"]]
        sums = [sum(cell["lost"] for cell in cells), sum(cell["repeated"] for cell in cells)]
        wrong = sum(bool(cell["wrong"]) for cell in cells)
        return f"| {row.name} | {len(cells)} | {sums[0]} | {sums[1]} | {wrong} |"

    def table(self, rows: Iterable[Row], known: Mapping[str, "Line"] | None = None, *, add: bool = False) -> str:
        """For people and the page.

        Args:
            rows: which.
            known: lines of earlier runs, by name, for rows of which nothing was played.
            add: these runs come on top of the earlier ones, which were others.
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
        """The sums over *rows*."""
        lines = [Line.of(self.line(row)) for row in rows]
        return Line("all", *(sum(column) for column in zip(*(line[1:] for line in lines), strict=True)))

    def unreached(self) -> list[Point]:
        """Points that no case reaches."""
        reached = {label for labels in self._reached.values() for label in labels}
        return [point for point in Point if point.label not in reached]

    def faults(self) -> Mapping[str, list[str]]:
        """The promises that were broken, by cell."""
        return {
            f"{row} at {at}": cell["broken"]
            for row, cells in self._cells.items()
            for at, cell in cells.items()
            if cell["broken"]
        }


def embed(text: str, figures: Figures, *, add: bool = False) -> str:
    """*text*, which is the page's, with the table brought up to date; rows that were not played keep their line.

    Args:
        text: as it was.
        figures: of the runs.
        add: to the figures that are there, which are of other runs.

    Raises:
        ValueError: the markers are not in *text*.
    """
    known = {line.name: line for line in shown(text)}
    return pages.embed(text, NAME, figures.table(all_rows(), known, add=add).rstrip("\n"))


class Line(NamedTuple):
    """A row of the table, as it is shown."""

    name: str
    runs: int
    lost: int
    repeated: int
    wrong: int

    @classmethod
    def of(cls, text: str) -> "Line":
        """From a row of the table."""
        name, *numbers = (cell.strip() for cell in text.strip("|").split("|"))
        return cls(name, *map(int, numbers))

    def plus(self, other: "Line") -> "Line":
        """The sum of the runs of both."""
        return Line(self.name, *(int(one) + int(two) for one, two in zip(self[1:], other[1:], strict=True)))

    def __str__(self) -> str:
        return f"| {' | '.join(map(str, self))} |"


def shown(text: str) -> list[Line]:
    """The rows that *text*, which is the page's, has, without the sum."""
    block = text.partition(f"<!-- {NAME} -->")[2].partition(f"<!-- /{NAME} -->")[0]
    return [Line.of(line) for line in [line for line in block.splitlines() if "|" in line][2:-1]]
