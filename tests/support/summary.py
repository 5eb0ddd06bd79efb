"""The last line of a test run: what was not exercised, and why."""

from collections import Counter

import pytest


class Exercised:
    """Counts what a run left out."""

    def __init__(self) -> None:
        self._reasons: Counter[str] = Counter()
        self._notes: list[str] = []

    def left_out(self, note: str) -> None:
        """Say that something was not exercised although its test ran."""
        if note not in self._notes:
            self._notes.append(note)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count tests that were skipped, with their reason."""
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._reasons[reason.removeprefix("Skipped: ")] += 1

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """Count tests that options left out."""
        self._reasons["deselected by options"] += len(items)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """Say it, after everything else."""
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None or config.option.collectonly:
            return
        chosen = config.args_source is pytest.Config.ArgsSource.ARGS
        parts = [f"{count} test{'s' * (count > 1)} ({reason})" for reason, count in self._reasons.items()]
        parts += self._notes
        if chosen:
            parts.append("everything but what was named")
        said = f"not exercised: {'; '.join(parts)}" if parts else "everything was exercised"
        reporter.write_line(said)
