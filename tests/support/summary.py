"""The last line of a test run: what was not exercised and why, and what was played in its short form only."""

from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

LEFT_OUT = "left out"
"""Name of the property of a test's report that says what the test could not exercise, though it ran."""
SHORT_FORM = "short form"
"""The same, where it is a long run's short form: what there was of it, and the make target that plays more.

Tests say it by the marker ``short_form("a minute of this and that (make that)")``; ``unless=True`` where this is the
long form itself.
"""


class Exercised:
    """Counts what a run left out; where several processes run the tests, in the one that has their reports."""

    def __init__(self) -> None:
        self._reasons: Counter[str] = Counter()
        self._deselected = 0
        self._files: Counter[str] = Counter()
        self._notes: dict[str, None] = {}
        self._short: dict[str, None] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Where a test runs: note of what it is the short form."""
        report = yield
        if call.when == "call" and not report.skipped:
            report.user_properties += [
                (SHORT_FORM, marker.args[0])
                for marker in item.iter_markers("short_form")
                if not marker.kwargs.get("unless")
            ]
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Count files that were skipped as a whole: nobody knows how many tests are in them."""
        if report.skipped:
            self._files[_reason(report)] += 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count tests that were skipped, with their reason, and what others say that they left out."""
        if report.skipped and not hasattr(report, "wasxfail"):
            self._reasons[_reason(report)] += 1
        self._notes.update((str(note), None) for name, note in report.user_properties if name == LEFT_OUT)
        self._short.update((str(note), None) for name, note in report.user_properties if name == SHORT_FORM)

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
        parts += [f"{count} file{'s' * (count > 1)} of tests ({reason})" for reason, count in self._files.items()]
        if self._deselected:
            parts.append(f"{self._deselected} test{'s' * (self._deselected > 1)} (deselected by options)")
        parts += self._notes
        if chosen:
            parts.append("everything but what was named")
        said = f"not exercised: {'; '.join(parts)}" if parts else "everything was exercised"
        if self._short:
            said += f". In short form only: {'; '.join(sorted(self._short))}"
        reporter.write_line(said)


def _reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return reason.removeprefix("Skipped: ")
