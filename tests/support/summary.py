"""The last line of a test run: what was not exercised, and why."""

from collections import Counter
from typing import Any

import pytest

LEFT_OUT = "left out"
"""Name of the property of a test's report that says what the test could not exercise, though it ran."""


class Exercised:
    """Counts what a run left out; where several processes run the tests, in the one that has their reports."""

    def __init__(self) -> None:
        self._reasons: Counter[str] = Counter()
        self._deselected = 0
        self._notes: dict[str, None] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count tests that were skipped, with their reason, and what others say that they left out."""
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._reasons[reason.removeprefix("Skipped: ")] += 1
        self._notes.update((str(note), None) for name, note in report.user_properties if name == LEFT_OUT)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """Count tests that options left out."""
        self._deselected += len(items)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """In one of several processes: tell the one that has the reports. Each of them has seen all tests."""
        output: dict[str, int] | None = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["deselected"] = self._deselected

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """One of several processes has ended."""
        self._deselected = max(self._deselected, getattr(node, "workeroutput", {}).get("deselected", 0))

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """Say it, after everything else."""
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None or config.option.collectonly:
            return
        chosen = config.args_source is pytest.Config.ArgsSource.ARGS
        parts = [f"{count} test{'s' * (count > 1)} ({reason})" for reason, count in self._reasons.items()]
        if self._deselected:
            parts.append(f"{self._deselected} test{'s' * (self._deselected > 1)} (deselected by options)")
        parts += self._notes
        if chosen:
            parts.append("everything but what was named")
        said = f"not exercised: {'; '.join(parts)}" if parts else "everything was exercised"
        reporter.write_line(said)
