"""The progress that a long run shows."""

import io
import threading
import time

import pytest
from rich.console import Console

from dtx.pipeline import progress as module
from dtx.pipeline.progress import Progress, StageProgress

ERASED = "\r\x1b[1A\x1b[2K"
"""The sequence that moves the cursor up a line and erases it."""


def test_a_line_has_step_progress_and_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    progress = Progress(None, "archive", console=Console(file=io.StringIO()))
    progress.note("3 of 5 databases", 1_234_567)
    assert progress.line(1000.0, StageProgress(1, 0, 40)) == (
        "archive · 3 of 5 databases · 1,234,567 rows · 1 stage, 0 of 40 tasks · 0:00 elapsed"
    )
    # ten tasks took one minute, so thirty take three minutes
    assert progress.line(1060.0, StageProgress(1, 10, 40)).endswith(
        "10 of 40 tasks · 1:00 elapsed · about 3:00 for this stage"
    )
    assert progress.line(8000.0, StageProgress(0, 0, 0)).endswith("rows · 1:56:40 elapsed")


def test_a_terminal_has_one_line_that_disappears() -> None:
    output = io.StringIO()
    asked = threading.Event()
    with Progress(None, "report", console=Console(file=output, force_terminal=True), every=0.001) as progress:
        original = progress.line

        def line(now: float, work: StageProgress) -> str:
            asked.set()
            return original(now, work)

        progress.line = line  # type: ignore[method-assign]
        assert asked.wait(60)
        progress.print_line("one database is away")
    shown = output.getvalue()
    assert "report · 0:00 elapsed" in shown
    assert "one database is away\n" in shown
    assert shown.endswith(ERASED)


def test_a_session_without_progress_stops_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()

    def look() -> StageProgress:
        asked.set()
        raise ConnectionError("gone")

    monkeypatch.setattr(module, "_watch_stages", lambda _: (look, lambda: None))
    output = io.StringIO()
    with Progress(None, "report", console=Console(file=output), every=0.001):
        assert asked.wait(60)
    assert output.getvalue() == ""
