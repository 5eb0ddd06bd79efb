"""README shows what the code says: states, answers, settings and metrics."""

from pathlib import Path

from dtx.config import table
from dtx.telemetry import table as metrics
from dtx.xa.diagram import embed

README = Path(__file__).parents[2] / "README.md"


def test_the_state_diagram_and_the_answers_in_readme_are_those_of_the_table() -> None:
    """Generated, never edited: ``python -m dtx.xa.diagram`` prints what stands between the markers."""
    text = README.read_text(encoding="utf-8")
    assert text == embed(text), "put the output of `python -m dtx.xa.diagram` between README's state-diagram markers"


def test_the_settings_in_readme_are_those_that_there_are() -> None:
    """Generated, never edited: ``python -m dtx.config.table README.md`` brings it up to date."""
    text = README.read_text(encoding="utf-8")
    assert text == table.embed(text), "run `python -m dtx.config.table README.md`"


def test_the_metrics_in_readme_are_those_that_there_are() -> None:
    """Generated, never edited: ``python -m dtx.telemetry.table README.md`` brings it up to date."""
    text = README.read_text(encoding="utf-8")
    assert text == metrics.embed(text), "run `python -m dtx.telemetry.table README.md`"
