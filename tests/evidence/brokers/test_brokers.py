"""Tests of conformance and transparency against each kind of broker. The result file has one row for each suite."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.support import junit
from tests.support.pages import SUITES
from tests.support.rabbitmq import RabbitNode
from tests.support.rabbitmq_install import CLUSTERS, KHEPRI, VERSIONS, is_asked, is_there

_FOLDERS: Final = "tests/contract", "tests/servers/proxy", "tests/servers/branches"


@pytest.mark.skipif(is_asked(), reason="this part runs all brokers")
@pytest.mark.parametrize("broker", [*VERSIONS, KHEPRI, *CLUSTERS])
def test_conformance_and_transparency(broker: str, tmp_path: Path, figures: Callable[..., None]) -> None:
    """README: "RabbitMQ 3.10 to 4.x"."""
    if not is_there(broker[0]):
        pytest.skip(f"there is no RabbitMQ {broker}: make rabbitmq4")
    with RabbitNode(version=broker[0], in_memory=True):
        pass  # so that the result file has its version
    results = junit.run(tmp_path / "report.xml", _FOLDERS, "--rabbitmq", broker, "--numprocesses", "2")
    results = [result for result in results if "standalone" not in result.name]
    outcomes: dict[str, Counter[str]] = {folder: Counter() for folder in SUITES}
    for result in results:
        folder = next(folder for folder in SUITES if result.file.startswith(folder))
        outcomes[folder][result.outcome] += 1
    for folder, counts in outcomes.items():
        figures(**{f"{broker}: {folder}": ", ".join(f"{n} {name}" for name, n in sorted(counts.items()))})
    assert [result for result in results if result.outcome == "failed"] == []
