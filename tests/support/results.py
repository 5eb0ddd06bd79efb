"""Result files of the evidence tier: JSON for each part, with date, commit and machine, and a table at the end."""

import json
import subprocess
from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, cast

import pytest

from benchmarks.support.report import machine

FIGURE: Final = "figure"
"""Property of a test's report: the name of a figure and its value."""


@dataclass(slots=True)
class Part:
    """The result of one folder of the evidence tier."""

    name: str
    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    figures: dict[str, float | str] = field(default_factory=dict)

    def add(self, report: pytest.TestReport) -> None:
        """Add what one test reports. Numbers of one name are added up, of texts the last one counts."""
        self.seconds += report.duration
        if report.when == "call" or not report.passed:
            self.outcomes[report.outcome] += 1
        if report.when != "teardown":
            return
        for kind, figure in report.user_properties:
            if kind == FIGURE:
                name, value = cast("tuple[str, float | str]", figure)
                earlier = self.figures.get(name, 0)
                if isinstance(earlier, str) or isinstance(value, str):
                    self.figures[name] = value
                else:
                    self.figures[name] = earlier + value


class Results:
    """Collects the results of a run. A plugin of pytest.

    Args:
        tier: the folder whose folders are the parts.
        directory: where the files are written.
    """

    def __init__(self, tier: str, directory: Path) -> None:
        self._tier = tier
        self._directory = directory
        self._parts: dict[str, Part] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the report to its part."""
        if report.nodeid.startswith(self._tier):
            name = report.nodeid.removeprefix(self._tier).split("/")[1]
            self._parts.setdefault(name, Part(name)).add(report)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        """Write the files and print the table."""
        if not self._parts:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        about = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": _commit(config.rootpath),
            "machine": machine(),
        }
        terminalreporter.section("evidence")
        for part in self._parts.values():
            result = about | asdict(part) | {"seconds": round(part.seconds, 1)}
            path = self._directory / f"{part.name}.json"
            path.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(part.outcomes.items()))
            figures = ", ".join(f"{name} {_text(value)}" for name, value in part.figures.items())
            terminalreporter.write_line(f"{part.name:12} {outcomes}, {part.seconds:,.0f} s: {figures or 'no figures'}")
        terminalreporter.write_line(f"{about['machine']}, commit {about['commit']}; files in {self._directory}")


def _text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,}"


def _commit(root: Path) -> str:
    """The commit that is checked out; with ``+`` where files differ from it."""
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
