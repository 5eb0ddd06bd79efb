"""Every failpoint has a cell in the kill matrix, and the page of the matrix shows every row."""

from pathlib import Path

import pytest

from dtx.failpoint import Point
from tests.evidence.matrix import rotation, table
from tests.evidence.matrix.audit import Verdict
from tests.evidence.matrix.cases import all_rows
from tests.evidence.matrix.cells import Cell, Result

PAGE = Path(__file__).parents[2] / "docs/evidence/kill-matrix.md"


def test_every_failpoint_has_a_cell_in_the_short_form() -> None:
    """``python -m tests.evidence.matrix --learn`` plays all cases and writes the list. Do not edit it."""
    assert set(rotation.read()) == set(Point)


def test_rows_have_names_of_their_own() -> None:
    names = [row.name for row in all_rows()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("add", "runs", "repeated"), [(False, 1, 2), (True, 6, 3)])
def test_rows_without_a_run_keep_their_line(*, add: bool, runs: int, repeated: int) -> None:
    first, second, *_ = all_rows()
    figures = table.Figures()
    earlier = table.Line(first.name, 3, 0, 0, 0), table.Line(second.name, 5, 0, 1, 0)
    rows = f"{table.HEAD}{earlier[0]}\n{earlier[1]}\n| all | 8 | 0 | 1 | 0 |"
    text = f"before<!-- {table.NAME} -->\n\n{rows}\n\n<!-- /{table.NAME} -->after"
    cell = Cell(Point.READY_AFTER, 1)
    figures.add(second, cell, Result(reached=True, verdict=Verdict(repeated=2), seconds=1.0))
    lines = {line.name: line for line in table.shown(table.embed(text, figures, add=add))}
    assert lines[first.name] == earlier[0]
    assert lines[second.name] == table.Line(second.name, runs, 0, repeated, 0)


def test_the_page_has_all_rows_and_no_failure() -> None:
    """``python -m tests.evidence.matrix --page docs/evidence/kill-matrix.md`` writes it."""
    lines = table.shown(PAGE.read_text(encoding="utf-8"))
    assert [line.name for line in lines] == [row.name for row in all_rows()]
    for line, row in zip(lines, all_rows(), strict=True):
        assert line.runs, row.name
        assert (line.lost, line.wrong) == (0, 0), row.name
        assert row.may_repeat or not line.repeated, row.name
