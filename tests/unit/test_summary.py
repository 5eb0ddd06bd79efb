"""The last line of a test run says what was not exercised."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFTEST = """
import pytest
from tests.support.summary import Exercised

def pytest_configure(config):
    config.exercised = Exercised()
    config.pluginmanager.register(config.exercised)

@pytest.fixture
def left_out(request):
    return request.config.exercised.left_out
"""


def last_line_of(directory: Path, tests: str, *options: str) -> str:
    (directory / "conftest.py").write_text(CONFTEST)
    (directory / "pytest.ini").write_text("[pytest]\ntestpaths = .\n")
    (directory / "test_it.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    env = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.splitlines()[-1]


def test_a_full_run_says_so(tmp_path: Path) -> None:
    assert last_line_of(tmp_path, "def test_a(): pass") == "everything was exercised"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import pytest\ndef test_a(): pytest.skip('no moon')", "not exercised: 1 test (no moon)"),
        ("def test_a(left_out): left_out('rain')", "not exercised: rain"),
    ],
)
def test_what_was_left_out_is_said_with_its_reason(tmp_path: Path, body: str, said: str) -> None:
    assert last_line_of(tmp_path, body) == said


def test_tests_that_options_left_out_are_counted(tmp_path: Path) -> None:
    said = last_line_of(tmp_path, "def test_a(): pass\ndef test_b(): pass\ndef test_c(): pass", "-k", "test_a")
    assert said == "not exercised: 2 tests (deselected by options)"


def test_a_run_of_named_tests_is_not_a_full_one(tmp_path: Path) -> None:
    said = last_line_of(tmp_path, "def test_a(): pass\ndef test_b(): pass", "test_it.py::test_a")
    assert said == "not exercised: everything but what was named"
