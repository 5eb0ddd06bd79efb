"""A run of the evidence tier writes one file for each part."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFTEST = """
from pathlib import Path
from tests.support.results import FIGURE, Results

def pytest_configure(config):
    config.pluginmanager.register(Results(Path("tests/evidence"), Path("results"), 2.5))
"""
TESTS = """
import pytest
from tests.support.results import FIGURE

@pytest.mark.parametrize("runs", [3, 4])
def test_rain(runs, request):
    request.node.user_properties += [(FIGURE, ("runs", runs)), (FIGURE, ("kind", "rain"))]

def test_snow(): assert not "snow"
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A project whose evidence tier has one part."""
    part = tmp_path / "tests/evidence/weather"
    part.mkdir(parents=True)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (part / "test_it.py").write_text(TESTS)
    return tmp_path


def run(directory: Path, *words: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    env = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, check=False).stdout


def test_a_whole_part_leaves_a_file_and_a_row(here: Path) -> None:
    shown = run(here, "tests/evidence/weather")
    assert "weather      1 failed, 2 passed, 0 s: runs 7, kind rain\n" in shown
    result = json.loads((here / "results/weather.json").read_text())
    assert result["figures"] == {"runs": 7, "kind": "rain"}
    assert result["outcomes"] == {"passed": 2, "failed": 1}
    assert result["minutes"] == 2.5
    assert {"date", "commit", "machine", "seconds", "part"} <= set(result)


@pytest.mark.parametrize("words", [("tests/evidence", "-k", "rain"), ("tests/evidence/weather/test_it.py",)])
def test_a_run_of_some_tests_leaves_no_file(here: Path, words: tuple[str, ...]) -> None:
    assert "runs 7, kind rain (in part: no file)" in run(here, *words)
    assert not (here / "results").exists()
