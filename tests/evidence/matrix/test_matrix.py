"""The kill matrix at length: at least one cell of every row, and as many as the time allows."""

from collections.abc import Callable
from pathlib import Path

from tests.evidence.matrix.__main__ import play_rows
from tests.evidence.matrix.cases import all_rows
from tests.evidence.matrix.table import Figures
from tests.support.rabbitmq_install import is_asked

_ALL_MINUTES = 240.0
"""Duration of all cells on two processors."""


def test_every_promise_holds_whichever_process_dies_at_whichever_point(
    minutes: float, figures: Callable[..., None], tmp_path: Path
) -> None:
    """Guarantees: "exactly once when dtx, PostgreSQL, clients or the network die"; "nothing is lost"."""
    found = Figures(tmp_path / "results.json")
    rows = [row for row in all_rows() if row.case.mode == "alongside" or not is_asked()]
    wrong = play_rows(found, rows, every=max(1, round(_ALL_MINUTES / minutes)))
    totals = found.totals(rows)
    figures(cells=totals.runs, lost=totals.lost, repeated_where_allowed=totals.repeated, wrong=totals.wrong)
    assert (found.faults(), wrong) == ({}, [])
    assert totals.runs > 0
