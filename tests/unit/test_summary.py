"""The last line of a test run names the tests that did not run, and why."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFTEST = """
import pytest
from tests.support.summary import LEFT_OUT, Exercised

def pytest_configure(config):
    config.pluginmanager.register(Exercised())

@pytest.fixture
def left_out(record_property):
    return lambda note: record_property(LEFT_OUT, note)
"""
TESTS = {
    "unit/test_skipped.py": "import pytest\ndef test_a(): pytest.skip('no moon')\ndef test_b(): pass",
    "unit/test_file.py": "import pytest\npytest.skip('no sun', allow_module_level=True)\ndef test_a(): pass",
    "servers/test_partly.py": "def test_a(left_out): left_out('rain')",
}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A project with two tiers."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests/unit\n")
    for name, text in TESTS.items():
        path = tmp_path / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def last_line(directory: Path, *options: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "xdist", *options]
    env = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("processes", ["0", "2"])
def test_everything_that_was_left_out_is_named(here: Path, processes: str) -> None:
    said = last_line(here, "tests", "-n", processes)
    assert said == "not exercised: 1 test (no moon); 1 file of tests (no sun); rain"


@pytest.mark.parametrize("processes", ["0", "2"])
def test_deselected_tests_are_counted_and_other_tiers_are_named(here: Path, processes: str) -> None:
    said = last_line(here, "-k", "test_b", "--ignore", "tests/unit/test_file.py", "-n", processes)
    assert said == "not exercised: 1 test (deselected by options); servers (make test-servers)"


def test_a_run_of_named_tests_is_not_a_whole_tier(here: Path) -> None:
    said = last_line(here, "tests/unit/test_skipped.py::test_b")
    assert said == "not exercised: everything else of unit (make test); servers (make test-servers)"


def test_a_complete_run_reports_it(here: Path) -> None:
    for name in ("unit/test_skipped.py", "unit/test_file.py"):
        (here / "tests" / name).unlink()
    (here / "tests/servers/test_partly.py").write_text("def test_a(): pass")
    assert last_line(here, "tests") == "everything was exercised"
