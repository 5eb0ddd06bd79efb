"""Several processes that share a run: which of them runs which file, and when."""

import subprocess
import sys
from pathlib import Path

from tests.support.schedule import order

ROOT = Path(__file__).parents[2]
NAMES = [Path(f"/here/tests/unit/test_{number}.py") for number in range(20)]
SLOW = set(NAMES[::5])
SIMULATION = Path("/here/tests/sim/test_simulation.py")
SPARK = [Path(f"/here/tests/{tier}/pipeline/test_spark.py") for tier in ("integration", "unit")]


def test_long_computations_begin_at_once_and_every_file_once() -> None:
    files = order([*NAMES, *SPARK, SIMULATION], SLOW | {SIMULATION})
    assert files[0] == SIMULATION
    assert set(files[1:3]) == set(SPARK)
    assert sorted(files) == sorted([*NAMES, *SPARK, SIMULATION])


def test_the_order_does_not_depend_on_what_was_found_first() -> None:
    assert order(NAMES, SLOW) == order(reversed(NAMES), SLOW)
    assert order(NAMES, SLOW) != NAMES


def test_slow_files_are_spread_over_the_first_part() -> None:
    files = order(NAMES, SLOW)
    places = [index for index, path in enumerate(files) if path in SLOW]
    assert places[-1] < 0.7 * len(files)
    assert places[-1] - places[0] > len(SLOW)


def test_all_may_be_slow_or_none() -> None:
    assert sorted(order(NAMES, set())) == sorted(order(NAMES, set(NAMES))) == sorted(NAMES)
    assert order([], set()) == []


def test_what_needs_spark_is_run_by_one_process(tmp_path: Path) -> None:
    """And other files by others, one file by one process."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text(
        "from tests.support.schedule import ByFile\n"
        "def pytest_xdist_make_scheduler(config, log):\n"
        "    return ByFile(config, log)\n"
    )
    body = (
        "import pytest\nfrom pathlib import Path\n"
        "@pytest.mark.parametrize('number', range(3))\n"
        "def test_it(worker_id, number):\n"
        f"    with Path({str(tmp_path)!r}, 'told').open('a') as told:\n"
        "        told.write(f'{Path(__file__).parent.name} {Path(__file__).name} {worker_id}\\n')\n"
    )
    for directory in ("a/pipeline", "b/pipeline", "c"):
        (tmp_path / directory).mkdir(parents=True)
        for number in range(3):
            (tmp_path / directory / f"test_{directory[0]}{number}.py").write_text(body)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "xdist",
            "-n",
            "2",
            "--dist",
            "loadfile",
        ],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    told = [line.split() for line in (tmp_path / "told").read_text().splitlines()]
    assert len(told) == 27
    assert len({worker for where, _, worker in told if where == "pipeline"}) == 1
    by_file = {(name, worker) for _, name, worker in told}
    assert len(by_file) == 9
    assert len({worker for _, worker in by_file}) == 2
