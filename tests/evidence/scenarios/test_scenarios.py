"""The tests of all scenarios, against both versions of RabbitMQ."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import junit
from tests.support.rabbitmq import RabbitNode
from tests.support.rabbitmq_install import VERSIONS, is_asked, is_there
from tests.support.scenarios import SCENARIOS


@pytest.mark.skipif(is_asked(), reason="this part runs all versions")
@pytest.mark.parametrize("version", VERSIONS)
def test_scenarios(version: str, tmp_path: Path, figures: Callable[..., None]) -> None:
    """Guarantees: "No fault loses a committed message or a rolled-back consumption"."""
    if not is_there(version):
        pytest.skip(f"there is no RabbitMQ {version}: make rabbitmq4")
    with RabbitNode(version=version, in_memory=True) as node:
        number = node.api("GET", "/api/overview")["rabbitmq_version"]
    tests = list(dict.fromkeys(test for scenario in SCENARIOS for test in scenario.tests))
    results = junit.run(tmp_path / "report.xml", tests, "--rabbitmq", version, "--numprocesses", "2")
    for scenario in SCENARIOS:
        outcomes = [result.outcome for result in results if result.id in scenario.tests]
        bad = sum(outcome not in ("passed", "differs as listed") for outcome in outcomes)
        if outcomes:
            told = f"{bad} of {len(outcomes)} failed" if bad else f"{len(outcomes)} passed"
            figures(**{f"{number}: {scenario.name}": told})
    assert {test for test in tests if test not in {result.id for result in results}} == set()
    assert [result for result in results if result.outcome == "failed"] == []
