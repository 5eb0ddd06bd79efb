"""The last line of a test run says what was not exercised, and what only in short form."""

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


def last_line_of(directory: Path, tests: str, *options: str) -> str:
    (directory / "conftest.py").write_text(CONFTEST)
    (directory / "pytest.ini").write_text("[pytest]\ntestpaths = .\nmarkers = short_form(what)\n")
    (directory / "test_it.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "xdist", *options]
    env = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.splitlines()[-1]


def test_a_full_run_says_so(tmp_path: Path) -> None:
    assert last_line_of(tmp_path, "def test_a(): pass") == "everything was exercised"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import pytest\ndef test_a(): pytest.skip('no moon')", "not exercised: 1 test (no moon)"),
        ("def test_a(left_out): left_out('rain')", "not exercised: rain"),
        (
            "import pytest\npytest.skip('no sun', allow_module_level=True)\ndef test_a(): pass",
            "not exercised: 1 file of tests (no sun)",
        ),
        (
            "import pytest\npytest.importorskip('moonlight')\ndef test_a(): pass",
            "not exercised: 1 file of tests (could not import 'moonlight': No module named 'moonlight')",
        ),
        (
            "import pytest\n@pytest.mark.short_form('a second of rain (make rain)')\ndef test_a(): pass",
            "everything was exercised. In short form only: a second of rain (make rain)",
        ),
        (
            "import pytest\n@pytest.mark.short_form('a second of rain', unless=True)\ndef test_a(): pass",
            "everything was exercised",
        ),
        (
            "import pytest\n@pytest.mark.short_form('a second (make rain)')\ndef test_a(): pytest.skip('no moon')",
            "not exercised: 1 test (no moon)",
        ),
    ],
)
@pytest.mark.parametrize("processes", ["0", "2"])
def test_what_was_left_out_is_said_with_its_reason(tmp_path: Path, body: str, said: str, processes: str) -> None:
    assert last_line_of(tmp_path, body, "-n", processes) == said


@pytest.mark.parametrize("processes", ["0", "2"])
def test_tests_that_options_left_out_are_counted(tmp_path: Path, processes: str) -> None:
    tests = "def test_a(): pass\ndef test_b(): pass\ndef test_c(): pass"
    said = last_line_of(tmp_path, tests, "-k", "test_a", "-n", processes)
    assert said == "not exercised: 2 tests (deselected by options)"


def test_a_run_of_named_tests_is_not_a_full_one(tmp_path: Path) -> None:
    said = last_line_of(tmp_path, "def test_a(): pass\ndef test_b(): pass", "test_it.py::test_a")
    assert said == "not exercised: everything but what was named"
