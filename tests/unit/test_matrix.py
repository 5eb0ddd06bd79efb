"""The kill matrix is complete: every failpoint has a cell, and README shows every row."""

from pathlib import Path

from dtx.failpoint import Point
from tests.crash.matrix import rotation, table
from tests.crash.matrix.cases import all_rows

README = Path(__file__).parents[2] / "README.md"


def test_every_failpoint_has_a_cell_in_the_short_form_or_a_reason_why_not() -> None:
    """Made, never edited: ``python -m tests.crash.matrix --learn`` plays all cases and writes which reach them."""
    chosen = rotation.read()
    assert set(chosen) | set(rotation.ELSEWHERE) == set(Point)
    assert not set(chosen) & set(rotation.ELSEWHERE)


def test_rows_have_names_of_their_own() -> None:
    names = [row.name for row in all_rows()]
    assert len(set(names)) == len(names)


def test_the_table_in_readme_has_the_rows_that_there_are_and_nothing_was_lost_or_wrong() -> None:
    """Made, never edited: ``make crash ARGS="--readme README.md"`` plays the matrix and brings it up to date."""
    lines = table.shown(README.read_text(encoding="utf-8"))
    assert [line.name for line in lines] == [row.name for row in all_rows()]
    for line, row in zip(lines, all_rows(), strict=True):
        assert line.runs, row.name
        assert (line.lost, line.wrong) == (0, 0), row.name
        assert row.may_repeat or not line.repeated, row.name
