"""Builds the XA switch and a C program that drives it, and makes calls in that program."""

import atexit
import contextlib
import functools
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

import pytest

from dtx.client import Xid
from tests.support.debian import install
from tests.support.processes import Child, end, short_directory, spawn

ROOT: Final = Path(__file__).parents[4]
SWITCH: Final = ROOT / "dtx/client/xa_switch"
_HERE: Final = Path(__file__).parent

NO_FLAGS: Final = "0"
JOIN, RESUME, MIGRATE, NO_WAIT, ASYNC = "200000", "8000000", "100000", "10000000", "80000000"
SUCCESS, FAIL, SUSPEND, ONE_PHASE = "4000000", "20000000", "2000000", "40000000"
START_SCAN, END_SCAN, SCAN = "1000000", "800000", "1800000"
XA_OK, XA_RDONLY, XA_HEURMIX, XA_HEURRB, XA_HEURCOM, XA_NOMIGRATE = 0, 3, 5, 6, 7, 9
XA_RBROLLBACK, XA_RBTIMEOUT = 100, 106
XAER_ASYNC, XAER_RMERR, XAER_NOTA, XAER_INVAL, XAER_PROTO = -2, -3, -4, -5, -6
XAER_RMFAIL, XAER_DUPID, XAER_OUTSIDE = -7, -8, -9
DTX_EMPTY, DTX_TRUNCATED = 1, 2
RM: Final = 3
"""The resource manager id that :meth:`Driver.open` gives."""


class Driver:
    """``driver.c`` in its own process. Use as a context manager.

    Args:
        getter: the symbol that gives the switch.
        how: ``local`` or ``global``: how it loads the object.
        env: further environment variables.
    """

    def __init__(
        self, getter: str = "lixa_get_xa_switch", how: str = "local", env: Mapping[str, str] | None = None
    ) -> None:
        self._words = [getter, how]
        self._env = dict(env or {})
        self._stack = contextlib.ExitStack()
        self._heard: list[tuple[str, int, str]] = []
        self.errors = ""
        """Its output on stderr, set when it has ended."""

    def __enter__(self) -> Self:
        directory = built()
        self._log = self._stack.enter_context(short_directory("driver")) / "stderr"
        reading, writing = os.pipe()
        self._answers = self._stack.enter_context(os.fdopen(reading, encoding="utf-8", errors="replace"))
        input_, told = os.pipe()
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("COVERAGE_", "DTX_", "PYTHON"))
        }
        command = [str(directory / "driver"), str(directory / "libdtx_xa_switch.so"), *self._words]
        try:
            with self._log.open("wb") as errors:
                self.process: Child = spawn(
                    command, output=writing, input_=input_, errors=errors.fileno(), env=kept | self._env, cwd=directory
                )
        finally:
            os.close(writing)
            os.close(input_)
        self._told = self._stack.enter_context(os.fdopen(told, "w", encoding="utf-8", buffering=1))
        self._stack.callback(end, self.process)
        self.ready = self._answers.readline().strip()
        assert self.ready.startswith("ready 0 "), self._log.read_text()
        return self

    def __exit__(self, *_: object) -> None:
        end(self.process)
        self.errors = self._log.read_text(errors="replace")
        with contextlib.suppress(BrokenPipeError):
            self._stack.close()

    def tell(self, thread: str, *words: object) -> None:
        """Make a call in a thread without waiting for the answer."""
        self._told.write(" ".join(map(str, (thread, *words))) + "\n")

    def hear(self, thread: str) -> tuple[int, str]:
        """The next answer of a thread: code and values."""
        while True:
            for position, (name, code, values) in enumerate(self._heard):
                if name == thread:
                    del self._heard[position]
                    return code, values
            line = self._answers.readline()
            if not line:
                raise AssertionError(f"the driver ended: {self.process.wait(10)}, {self._log.read_text()}")
            name, _, rest = line.rstrip("\n").partition(" ")
            code_, _, values = rest.partition(" ")
            self._heard.append((name, int(code_), values))

    def say(self, thread: str, *words: object) -> tuple[int, str]:
        """Make a call in a thread; returns code and values."""
        self.tell(thread, *words)
        return self.hear(thread)

    def code(self, thread: str, *words: object) -> int:
        """Make a call in a thread; returns the code."""
        return self.say(thread, *words)[0]

    def __call__(self, thread: str, *words: object) -> str:
        """Make a call that must succeed; returns the values."""
        code, values = self.say(thread, *words)
        assert code == XA_OK, f"{words}: {code}, {self.reason(thread)}"
        return values

    def reason(self, thread: str) -> str:
        """The reason for the code of a thread's last call."""
        return self.say(thread, "reason")[1]

    # -- frequent calls ------------------------------------------------------------------------------------------------

    def open(self, thread: str, url: str, rmid: int = RM) -> None:
        """``xa_open``."""
        self(thread, "open", rmid, NO_FLAGS, f"url={url}")

    def call(self, thread: str, call: str, xid: Xid | str, flags: str = NO_FLAGS) -> int:
        """Make a call that names a branch; returns the code."""
        return self.code(thread, call, xid, RM, flags)

    def published(self, thread: str, xid: Xid, queue: str, body: str = "x") -> None:
        """Make an idle branch with a message."""
        self(thread, "start", xid, RM, NO_FLAGS)
        self(thread, "publish", "-", queue, body)
        self(thread, "end", xid, RM, SUCCESS)

    def recovered(self, thread: str, count: int = 100, flags: str = SCAN) -> list[str]:
        """``xa_recover``: the xids."""
        code, values = self.say(thread, "recover", count, RM, flags)
        assert code >= 0, f"{code} {self.reason(thread)}"
        found = values.split()
        assert len(found) == code
        return found


@functools.cache
def built() -> Path:
    """The directory with this run's switch and driver.

    As root on Debian, installs missing packages first. Skips the test with a reason if something is still missing.
    """
    if shutil.which("gcc") is None:
        install("gcc", "gcc")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        install("python3-dev", "python3-dev")
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    directory = stack.enter_context(short_directory("xa"))
    made = subprocess.run(
        [sys.executable, "-m", "dtx.client.xa_switch.build", "--into", str(directory)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    if made.returncode != 0:
        assert "the XA switch needs" in made.stderr, made.stderr
        pytest.skip(made.stderr.strip())
    assert not made.stderr, made.stderr  # warnings
    subprocess.run(
        [
            *("gcc", "-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-I{directory}"),
            *("-o", str(directory / "driver"), str(_HERE / "driver.c"), "-ldl", "-lpthread"),
        ],
        check=True,
    )
    return directory
