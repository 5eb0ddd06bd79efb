"""``python -m tests.evidence.matrix``: the whole kill matrix with its table, in hours, or less with ``--only``."""

import argparse
import sys
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import structlog

from tests.evidence.matrix import rotation
from tests.evidence.matrix.cases import Condition, Mode, Row, all_rows
from tests.evidence.matrix.cells import MOST, Cell, learn, play
from tests.evidence.matrix.stages import MatrixStage, Servers
from tests.evidence.matrix.table import Figures, embed


class Run:
    """Plays rows, and prints progress.

    Args:
        figures: for the results.
        most: limit of cells for one point in a row.
        until: monotonic time after which no cell is started.
        every: play only every *every*-th cell of a row.
        learn: only find the points that the cases reach.
    """

    def __init__(self, figures: Figures, most: int, until: float, *, every: int = 1, learn: bool = False) -> None:
        self._every = every
        self._learn = learn
        self._figures = figures
        self._most = most
        self._until = until
        self.wrong: list[str] = []
        """Broken guarantees that belong to no cell."""
        self._played = 0
        self._spent = 0.0

    @property
    def over(self) -> bool:
        """Whether the time has ended."""
        return time.monotonic() > self._until

    def stage(self, servers: Servers, mode: Mode, condition: Condition, rows: list[Row]) -> None:
        """Play all rows of one stage."""
        with MatrixStage(condition, mode, servers) as stage:
            starts = True
            for position, row in enumerate(rows):
                if self.over:
                    return
                cells = self._figures.plan(row)
                if cells is None or self._learn:
                    cells = self._learn_row(stage, row, starts=starts)
                starts = False
                if not self._learn:
                    first = position % min(self._every, len(cells) or 1)
                    self._row(stage, row, cells[first :: self._every], f"{position + 1}/{len(rows)}")
            for fault in stage.finish_bystanders():
                self._wrong(f"{mode}, {condition}: {fault}")

    def _wrong(self, sentence: str) -> None:
        say(f"WRONG: {sentence}")
        self.wrong.append(sentence)

    def _learn_row(self, stage: MatrixStage, row: Row, *, starts: bool) -> list[Cell]:
        trace = learn(stage, row)
        if broken := trace.verdict.broken(may_repeat=row.may_repeat):
            self._wrong(f"{row.name} without any further death: {broken}")
        most = self._most if row.condition is Condition.DTX else 1
        cells = trace.cells(start=starts or row.case.killed_at is not None, most=most)
        self._figures.learned(row, (*trace.start, *trace.rest), cells)
        if self._learn:
            say(f"{row.name}: {len(cells)} cells")
        return cells

    def _row(self, stage: MatrixStage, row: Row, cells: list[Cell], where: str) -> None:
        left = [cell for cell in cells if not self._figures.has(row, cell)]
        for number, cell in enumerate(left):
            if self.over:
                return
            result = play(stage, row, cell)
            self._figures.add(row, cell, result)
            self._played += 1
            self._spent += result.seconds
            broken = result.verdict.broken(may_repeat=row.may_repeat)
            if broken or not result.reached:
                say(f"    {row.name} at {cell.at}: {'; '.join(broken) or 'not reached'}")
            if number % 20 == 19:
                eta = self._spent / self._played * (len(left) - number - 1)
                say(f"    {number + 1}/{len(left)} cells of {row.name}, {eta:.0f} s to go")
        say(f"{self._figures.line(row)} row {where}, {self._spent / max(1, self._played):.1f} s a cell")


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _stages(rows: list[Row]) -> Iterator[tuple[Mode, Condition, list[Row]]]:
    for (mode, condition), found in groupby(rows, key=lambda row: (row.case.mode, row.condition)):
        yield mode, condition, list(found)


def play_rows(
    figures: Figures,
    rows: list[Row],
    most: int = MOST,
    seconds: float = float("inf"),
    *,
    every: int = 1,
    learn: bool = False,
) -> list[str]:
    """Play *rows* on new servers. See :class:`Run`; after *seconds* no further cell is started.

    Returns:
        Broken guarantees that belong to no cell.
    """
    run = Run(figures, most, time.monotonic() + seconds, every=every, learn=learn)
    with Servers() as servers:
        for mode, condition, found in _stages(rows):
            if not run.over:
                run.stage(servers, mode, condition, found)
    return run.wrong


def main() -> int:
    """Run the command; return 1 if a guarantee was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.evidence.matrix", description=__doc__)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--results", type=Path, help="file for results; a later run continues with them")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no cell after this time")
    parser.add_argument("--most", type=int, default=MOST, help="limit of cells for one point in a row")
    parser.add_argument("--every", type=int, default=1, help="play only every Nth cell of a row")
    parser.add_argument("--page", type=Path, help="update the table in this file")
    parser.add_argument("--add", action="store_true", help="add to the numbers in this file instead")
    parser.add_argument("--learn", action="store_true", help="kill nothing; choose the cases of the short form")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    words = parser.parse_args()
    every = rotation.candidates() if words.learn else all_rows()
    rows = [row for row in every if words.only in row.name]
    if words.list:
        say("\n".join(row.name for row in rows))
        return 0
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    figures = Figures(words.results)
    wrong: list[str] = []
    if words.seconds:
        wrong = play_rows(figures, rows, words.most, words.seconds, every=words.every, learn=words.learn)
    if words.learn:
        rotation.write(rotation.choose(figures.reached))
        say(f"points that no case reaches: {', '.join(point.label for point in figures.unreached()) or 'none'}")
        return 0
    say(figures.table(rows))
    for cell, faults in figures.faults().items():
        say(f"WRONG: {cell}: {'; '.join(faults)}")
    if words.page is not None:
        words.page.write_text(embed(words.page.read_text(encoding="utf-8"), figures, add=words.add), encoding="utf-8")
    return int(bool(wrong or figures.faults()))


if __name__ == "__main__":
    sys.exit(main())
