"""Tests of conformance and transparency against each kind of broker. The result file has one row for each suite."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final
from xml.etree import ElementTree as ET

import pytest

from tests.support.pages import SUITES
from tests.support.rabbitmq import RabbitNode
from tests.support.rabbitmq_install import CLUSTERS, KHEPRI, VERSIONS, is_asked, is_there

ROOT: Final = Path(__file__).parents[3]
_PROCESSES: Final = 2


def outcome(case: ET.Element) -> str:
    """Return the outcome of a test in a JUnit file."""
    skipped = case.find("skipped")
    if skipped is not None:
        return "differs as listed" if skipped.get("type") == "pytest.xfail" else "skipped"
    return "passed" if case.find("failure") is None and case.find("error") is None else "failed"


def suite_of(case: ET.Element) -> str:
    """Return the folder of a test in a JUnit file."""
    path = case.get("classname", "").replace(".", "/")
    return next(folder for folder in SUITES if path.startswith(folder))


def count(report: Path) -> tuple[dict[str, Counter[str]], list[str]]:
    """Return the outcomes by folder, and the tests that failed. Tests without a broker are left out."""
    found: dict[str, Counter[str]] = {folder: Counter() for folder in SUITES}
    failed = []
    for case in ET.parse(report).iter("testcase"):
        name = case.get("name", "")
        if "standalone" in name:
            continue
        result = outcome(case)
        found[suite_of(case)][result] += 1
        if result == "failed":
            failed.append(f"{case.get('classname', '').replace('.', '/')}.py::{name}")
    return found, failed


@pytest.mark.skipif(is_asked(), reason="this part runs all brokers")
@pytest.mark.parametrize("broker", [*VERSIONS, KHEPRI, *CLUSTERS])
def test_conformance_and_transparency(broker: str, tmp_path: Path, figures: Callable[..., None]) -> None:
    """README: "RabbitMQ 3.10 to 4.x"."""
    if not is_there(broker[0]):
        pytest.skip(f"there is no RabbitMQ {broker}: make rabbitmq4")
    report = tmp_path / "report.xml"
    words = ["--rabbitmq", broker, "--numprocesses", str(_PROCESSES), "--junitxml", str(report), "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "tests/contract", "tests/servers/proxy", "tests/servers/branches"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    with RabbitNode(version=broker[0], in_memory=True):
        pass  # so that the result file has its version
    found, failed = count(report)
    for folder, outcomes in found.items():
        figures(**{f"{broker}: {folder}": ", ".join(f"{n} {name}" for name, n in sorted(outcomes.items()))})
    assert failed == [], done.stdout[-3000:]
