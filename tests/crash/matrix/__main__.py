"""``python -m tests.crash.matrix``: the whole kill matrix, with its table. Hours, or less with ``--only``."""

import argparse
import sys
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import structlog

from tests.crash.matrix.cases import Condition, Mode, Row, all_rows
from tests.crash.matrix.cells import MOST, Cell, learn, play
from tests.crash.matrix.stages import MatrixStage, Servers
from tests.crash.matrix.table import Figures, embed


class Run:
    """Plays rows and says how it goes.

    Args:
        figures: where the results go.
        most: how often one point is tried in a row.
        until: monotonic time after which no cell is begun.
    """

    def __init__(self, figures: Figures, most: int, until: float) -> None:
        self._figures = figures
        self._most = most
        self._until = until
        self._played = 0
        self._spent = 0.0

    @property
    def over(self) -> bool:
        """Whether its time is up."""
        return time.monotonic() > self._until

    def stage(self, servers: Servers, mode: Mode, condition: Condition, rows: list[Row]) -> None:
        """All rows that share a stage."""
        with MatrixStage(condition, mode, servers) as stage:
            starts = True
            for position, row in enumerate(rows):
                if self.over:
                    return
                trace = learn(stage, row)
                if trace.verdict.wrong or trace.verdict.lost:
                    say(f"{row.name}: WRONG without any death: {trace.verdict}")
                self._figures.learned(row, (*trace.start, *trace.rest))
                most = self._most if condition is Condition.DTX else 1
                cells = trace.cells(start=starts or row.case.killed_at is not None, most=most)
                starts = False
                self._row(stage, row, cells, f"{position + 1}/{len(rows)}")
            for fault in stage.finish_bystanders():
                say(f"{mode}, {condition}: WRONG: {fault}")

    def _row(self, stage: MatrixStage, row: Row, cells: list[Cell], where: str) -> None:
        left = [cell for cell in cells if not self._figures.has(row, cell)]
        for number, cell in enumerate(left):
            if self.over:
                return
            result = play(stage, row, cell)
            self._figures.add(row, cell, result)
            self._played += 1
            self._spent += result.seconds
            if result.verdict.wrong or result.verdict.lost or not result.reached:
                verdict = result.verdict if result.reached else f"not reached; {result.verdict}"
                say(f"    {row.name} at {cell.at}: {verdict}")
            if number % 20 == 19:
                eta = self._spent / self._played * (len(left) - number - 1)
                say(f"    {number + 1}/{len(left)} cells of {row.name}, {eta:.0f} s to go")
        say(f"{self._figures.line(row)} row {where}, {self._spent / max(1, self._played):.1f} s a cell")


def say(text: str) -> None:
    """Print at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _stages(rows: list[Row]) -> Iterator[tuple[Mode, Condition, list[Row]]]:
    for (mode, condition), found in groupby(rows, key=lambda row: (row.case.mode, row.condition)):
        yield mode, condition, list(found)


def main() -> int:
    """Run what is asked for; 1 where a promise was broken."""
    parser = argparse.ArgumentParser(prog="make crash", description=__doc__)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--results", type=Path, help="keep results there, and go on where an earlier run stopped")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no cell after so many seconds")
    parser.add_argument("--most", type=int, default=MOST, help="how often a point is tried that a case reaches often")
    parser.add_argument("--readme", type=Path, help="bring the table in this file up to date")
    parser.add_argument("--list", action="store_true", help="print the names of the rows and end")
    words = parser.parse_args()
    rows = [row for row in all_rows() if words.only in row.name and not row.case.kind.operator]
    if words.list:
        say("\n".join(row.name for row in rows))
        return 0
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    figures = Figures(words.results)
    if words.seconds:
        run = Run(figures, words.most, time.monotonic() + words.seconds)
        with Servers() as servers:
            for mode, condition, found in _stages(rows):
                if not run.over:
                    run.stage(servers, mode, condition, found)
    say(figures.table(rows))
    if not words.only:
        say(f"points that no case reaches: {', '.join(point.label for point in figures.unreached()) or 'none'}")
    for cell, faults in figures.faults().items():
        say(f"WRONG: {cell}: {'; '.join(faults)}")
    if words.readme is not None:
        words.readme.write_text(embed(words.readme.read_text(encoding="utf-8"), figures), encoding="utf-8")
    return int(bool(figures.faults()))


if __name__ == "__main__":
    sys.exit(main())
