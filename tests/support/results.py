"""Result files of the evidence tier: JSON for each part, with date, commit and machine, and a table at the end."""

import json
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, cast

import pytest

from benchmarks.support.report import machine
from tests.support.rabbitmq import started

FIGURE: Final = "figure"
"""The property of a test report that contains the name of a figure and its value."""


@dataclass(slots=True)
class Part:
    """The result of one folder of the evidence tier."""

    name: str
    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    figures: dict[str, float | str] = field(default_factory=dict)

    def add(self, report: pytest.TestReport) -> None:
        """Add the report of one test. Numbers of one name are summed; of texts the last one is kept."""
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

    def __str__(self) -> str:
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.outcomes.items()))
        figures = (
            f"{name} {value if isinstance(value, str) else f'{value:,}'}" for name, value in self.figures.items()
        )
        return f"{self.name:12} {outcomes}, {self.seconds:,.0f} s: {', '.join(figures) or 'no figures'}"


class Results:
    """Collects the results of a run. A plugin of pytest.

    Only a run of the whole part writes the file of the part. An interrupted run, or a run without some of the tests,
    does not change it.

    Args:
        tier: the folder whose subfolders are the parts.
        directory: the directory of the result files.
        minutes: the duration of parts that have no fixed size.
        rabbitmq: the option ``--rabbitmq``: such a run has files of its own.
    """

    def __init__(self, tier: Path, directory: Path, minutes: float, rabbitmq: str | None = None) -> None:
        self._suffix = f"-rabbitmq-{rabbitmq}" if rabbitmq else ""
        self._tier = tier
        self._directory = directory
        self._minutes = minutes
        self._parts: dict[str, Part] = {}
        self._whole = True

    def pytest_deselected(self) -> None:
        """Note that options exclude tests."""
        self._whole = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the report to its part."""
        path = Path(report.nodeid.partition("::")[0])
        if path.is_relative_to(self._tier):
            name = path.relative_to(self._tier).parts[0]
            self._parts.setdefault(name, Part(name)).add(report)

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
    ) -> None:
        """Print the table and write the files of whole parts."""
        about = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit(config.rootpath, self._directory),
            "machine": machine(),
            "minutes": self._minutes,
        }
        directory = config.rootpath / self._directory
        named = {Path(word).resolve() for word in config.args}
        ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        terminalreporter.section("evidence")
        for part in self._parts.values():
            folder = config.rootpath / self._tier / part.name
            whole = self._whole and ended and bool(named & {folder, folder.parent})
            terminalreporter.write_line(f"{part}{'' if whole else ' (in part: no file)'}")
            if whole:
                result = {"part": part.name, **about, "seconds": round(part.seconds, 1)}
                result |= {"rabbitmq": sorted(started)} if started else {}
                result |= {"outcomes": dict(part.outcomes), "figures": part.figures}
                directory.mkdir(parents=True, exist_ok=True)
                text = json.dumps(result, indent=2, ensure_ascii=False)
                (directory / f"{part.name}{self._suffix}.json").write_text(f"{text}\n", encoding="utf-8")
        terminalreporter.write_line(f"{about['machine']}, commit {about['commit']}, files in {directory}")


def commit(root: Path, results: Path) -> str:
    """The checked-out commit, with ``+`` if files other than *results* differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", ".", f":(exclude){results}")
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + ("+" if changed else "")
