"""The last line of a test run: the tests that did not run, and the reasons."""

from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest

LEFT_OUT: Final = "left out"
"""The property of a test report with a sentence about a part that the test could not exercise."""
TIERS: Final = {
    "tests/unit": "unit (make test)",
    "tests/contract": "contract (make test)",
    "tests/servers": "servers (make test-servers)",
    "tests/evidence": "evidence (make evidence)",
}
"""Folder of a tier, and how to run it."""


class Exercised:
    """Collects what a run leaves out. With several processes, the process that gets the reports prints it."""

    def __init__(self) -> None:
        self._reasons: Counter[str] = Counter()
        self._deselected = 0
        self._files: Counter[str] = Counter()
        self._notes: dict[str, None] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Count files that were skipped as a whole; their number of tests is unknown."""
        if report.skipped:
            self._files[_reason(report)] += 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count skipped tests with their reasons, and keep the notes of other tests."""
        if report.skipped and not hasattr(report, "wasxfail"):
            self._reasons[_reason(report)] += 1
        self._notes.update((str(note), None) for name, note in report.user_properties if name == LEFT_OUT)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """Count tests that options exclude."""
        self._deselected += len(items)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """In one of several processes, send the number to the process that prints. Each process collects all tests."""
        output: dict[str, int] | None = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["deselected"] = self._deselected

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take the number of a process that has ended."""
        self._deselected = max(self._deselected, getattr(node, "workeroutput", {}).get("deselected", 0))

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """Print the line, after everything else."""
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None or config.option.collectonly:
            return
        parts = [f"{count} test{'s' * (count > 1)} ({reason})" for reason, count in self._reasons.items()]
        parts += [f"{count} file{'s' * (count > 1)} of tests ({reason})" for reason, count in self._files.items()]
        if self._deselected:
            parts.append(f"{self._deselected} test{'s' * (self._deselected > 1)} (deselected by options)")
        parts += [*self._notes, *_not_run(config)]
        reporter.write_line(f"not exercised: {'; '.join(parts)}" if parts else "everything was exercised")


def _not_run(config: pytest.Config) -> list[str]:
    """The tiers that the run did not select."""
    named = [Path(config.invocation_params.dir, word.partition("::")[0]).resolve() for word in config.args]
    tiers = {config.rootpath / folder: name for folder, name in TIERS.items() if (config.rootpath / folder).is_dir()}
    left = []
    for folder, name in tiers.items():
        parts = [path for path in folder.iterdir() if path.is_dir() and any(path.rglob("test_*.py"))]
        if any(folder.is_relative_to(path) for path in named) or (parts and set(parts) <= set(named)):
            continue
        some = any(path.is_relative_to(folder) for path in named)
        left.append(f"everything else of {name}" if some else name)
    return left


def _reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return reason.removeprefix("Skipped: ")
