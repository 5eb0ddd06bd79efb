"""Runs of pytest in a process of its own, and their results by test."""

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.etree import ElementTree as ET

ROOT: Final = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one test.

    Args:
        file: relative to the repository.
        name: with parameters.
        outcome: passed, failed, skipped, or "differs as listed" for an expected failure.
    """

    file: str
    name: str
    outcome: str

    @property
    def id(self) -> str:
        """The id of the test, without parameters."""
        return f"{self.file}::{self.name.partition('[')[0]}"


def run(report: Path, tests: Iterable[str], *options: str) -> list[Result]:
    """Run tests.

    Args:
        report: a file to write.
        tests: files, folders or ids.
        options: further options of pytest.

    Raises:
        RuntimeError: no test ran; the message has the output.
    """
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--quiet", "--junitxml", str(report), *options, *tests],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    results = list(_read(report)) if report.exists() else []
    if not results:
        raise RuntimeError(f"no test ran: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    if done.returncode:
        print(done.stdout[-6000:])
    return results


def _read(report: Path) -> Iterator[Result]:
    for case in ET.parse(report).iter("testcase"):
        file = f"{case.get('classname', '').replace('.', '/')}.py"
        yield Result(file, case.get("name", ""), _outcome(case))


def _outcome(case: ET.Element) -> str:
    skipped = case.find("skipped")
    if skipped is not None:
        return "differs as listed" if skipped.get("type") == "pytest.xfail" else "skipped"
    return "passed" if case.find("failure") is None and case.find("error") is None else "failed"
