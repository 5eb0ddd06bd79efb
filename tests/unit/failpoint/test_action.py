"""Actions at failpoints. A process that is not armed does nothing at them."""

import ast
import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import dtx
from dtx import failpoint
from dtx.failpoint import DIED, Point
from dtx.failpoint.__main__ import main
from dtx.failpoint.action import Action, FailpointTarget, point_handler
from tests.support.processes import wait_until

HERE, THERE = Point.ANSWER_BEFORE, Point.ANSWER_AFTER
PROGRAM = """
import atexit, sys
from pathlib import Path
from dtx import failpoint
from dtx.failpoint import Point
from dtx.failpoint.action import Action, FailpointTarget, point_handler
trace, action, said = sys.argv[1:]
atexit.register(lambda: print("cleaned up", flush=True))
target = FailpointTarget(point=Point.ANSWER_AFTER, number=2, action=Action(action))
failpoint.arm(point_handler(target, Path(trace)))
for _ in range(3):
    failpoint.at(Point.ANSWER_BEFORE)
    print("between", flush=True)
    failpoint.at(Point.ANSWER_AFTER)
"""
"""Reaches two points three times, and acts when it reaches the second point the second time."""


@pytest.fixture
def disarmed() -> Iterator[None]:
    """Disarm what a test armed in this process."""
    before = failpoint.armed, failpoint._reached
    yield
    failpoint.armed, failpoint._reached = before


def _start(trace: Path, action: Action) -> "subprocess.Popen[str]":
    words = [sys.executable, "-c", PROGRAM, str(trace), action, ""]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_nothing_happens_in_a_process_that_is_not_armed() -> None:
    assert not failpoint.armed
    for point in Point:
        failpoint.at(point)


def test_nothing_but_the_program_for_tests_arms_a_process() -> None:
    """No setting and no environment variable calls ``arm``."""
    package = Path(dtx.__file__).parent
    arming = []
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) else set()
            module = node.module if isinstance(node, ast.ImportFrom) else None
            calls = isinstance(node, ast.Attribute) and node.attr == "arm"
            if calls or "arm" in names or module in ("dtx.failpoint.action", "dtx.failpoint.__main__"):
                arming.append(path.relative_to(package).as_posix())
    assert set(arming) == {"failpoint/__main__.py"}
    texts = "".join(path.read_text() for path in (package / "failpoint").glob("*.py"))
    assert "os.environ" not in texts
    assert "getenv" not in texts
    assert all(parameter.envvar is None for parameter in main.params)


def test_a_process_dies_at_its_point_at_once(tmp_path: Path) -> None:
    """os._exit runs no cleanup and flushes nothing."""
    process = _start(tmp_path / "trace", Action.DIE)
    said, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (DIED, "")
    assert said.splitlines() == ["between", "between"]
    assert (tmp_path / "trace").read_text().split() == [HERE.label, THERE.label] * 2


def test_a_process_stops_at_its_point_and_can_be_continued(tmp_path: Path) -> None:
    process = _start(tmp_path / "trace", Action.STOP)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert (tmp_path / "trace").read_text().split() == [HERE.label, THERE.label] * 2
    process.send_signal(signal.SIGCONT)
    said, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, f"FAILPOINT {THERE.label}\n")
    assert said.splitlines() == ["between"] * 3 + ["cleaned up"]


def test_a_process_holds_still_until_its_file_is_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "held"
    reached = point_handler(FailpointTarget(point=HERE, action=Action.HOLD, file=file), None)
    thread = threading.Thread(target=reached, args=(HERE,))
    thread.start()
    wait_until(file.exists, what="the file that says where it holds")
    assert file.read_text() == HERE.label
    assert thread.is_alive()
    file.unlink()
    thread.join(30)
    assert not thread.is_alive()
    reached(HERE)  # it acts only once
    assert not file.exists()
    assert capsys.readouterr().err == f"FAILPOINT {HERE.label}\n"


def test_a_trace_has_the_reached_points_in_order(tmp_path: Path, disarmed: None) -> None:
    failpoint.arm(point_handler(None, tmp_path / "trace"))
    assert failpoint.armed
    for point in (THERE, HERE, THERE):
        failpoint.at(point)
    assert (tmp_path / "trace").read_text().split() == [THERE.label, HERE.label, THERE.label]


async def test_a_point_after_a_write_follows_the_turns_writes(disarmed: None) -> None:
    """Standalone mode joins answers and writes them at the end of a turn."""
    events: list[object] = []
    done = asyncio.Event()

    def reached(point: Point) -> None:
        events.append(point)
        done.set()

    failpoint.arm(reached)
    failpoint.when_written(HERE)
    asyncio.get_running_loop().call_soon(events.append, "written")
    await asyncio.wait_for(done.wait(), 30)
    assert events == ["written", HERE]


@pytest.mark.parametrize("text", ["answer-before", "ANSWER_BEFORE", str(HERE.number), "answer-before#1"])
def test_a_point_is_named_by_name_or_number(text: str) -> None:
    assert FailpointTarget.read(text, Action.DIE, None) == FailpointTarget(point=HERE)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--at", "nowhere", "--do", "die", "--", "serve"], "no failpoint is called 'nowhere'"),
        (["--at", "answer-before#0", "--do", "die", "--", "serve"], "for the first time at #1"),
        (["--at", "answer-before#x", "--do", "die", "--", "serve"], "invalid literal"),
        (["--at", "answer-before", "--", "serve"], "--at needs --do"),
        (["--at", "answer-before", "--do", "hold", "--", "serve"], "--do hold needs --hold-file"),
        ([], "a command of dtx is missing"),
    ],
)
def test_a_meaningless_target_is_refused(words: list[str], said: str) -> None:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert said in result.output
    assert not failpoint.armed


def test_the_list_has_every_point_with_number_and_text() -> None:
    result = CliRunner().invoke(main, ["--list"])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert [line.split(maxsplit=2) for line in lines] == [
        [str(point.number), point.label, point.sentence] for point in Point
    ]
