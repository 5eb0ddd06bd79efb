"""Child processes of tests, which end with the test run, even if it is killed."""

import contextlib
import itertools
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from dtx.embedded import launcher

# Linux sends the parent-death signal when the forking *thread* ends, so one long-lived thread forks all children.
_spawner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="spawner")

_WORKERS = 8
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
_NOT_EPHEMERAL = range(20_000 + _WORKER, 32_768, _WORKERS)
_PORTS = itertools.cycle(random.SystemRandom().sample(_NOT_EPHEMERAL, len(_NOT_EPHEMERAL)))

_LONGEST_PAUSE = 0.1
_MEMORY = Path("/dev/shm")
_ROOM = 8 << 30
"""The free memory, in bytes, that the servers of one test run may need."""
_logs: dict[str, Path] = {}


def spawn(
    command: Sequence[str | Path],
    *,
    output: int,
    errors: int = subprocess.STDOUT,
    input_: int = subprocess.DEVNULL,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start *command* in a new session; it is killed when the test run ends."""
    program = shutil.which(str(command[0])) or str(command[0])
    become = [sys.executable, "-I", "-S", launcher.__file__, "-1", "-1", str(int(signal.SIGKILL))]
    return _spawner.submit(
        subprocess.Popen[bytes],
        [*become, str(os.getpid()), program, *map(str, command[1:])],
        stdin=input_,
        stdout=output,
        stderr=errors,
        env=env,
        cwd=cwd,
    ).result()


class Child(Protocol):
    """A process that the tests started, for example a ``subprocess.Popen``."""

    pid: int

    def poll(self) -> int | None:
        """Its exit status; ``None`` while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; return the exit status."""

    def send_signal(self, sig: int) -> None:
        """Send it a signal, unless it has ended."""


def end(process: Child, first: signal.Signals = signal.SIGTERM, seconds: float = 30.0) -> int:
    """End a process that the tests started: with *first*, after *seconds* with SIGKILL. A stopped one is continued."""
    for signal_number in (first, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(signal_number)
            if signal_number is not signal.SIGKILL:
                process.send_signal(signal.SIGCONT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
    return process.wait(10)


def free_port() -> int:
    """A free TCP port of the loopback interface.

    It is below the ephemeral ports (from 32768 on), which the system assigns to outgoing connections: one of them could
    be in use when the server binds it, or binds it again after a restart. Each test process has ports of its own, and
    takes them in turn: the server of another test may be down for a moment.
    """
    for port in _PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("the ports never end")


def resident(pid: int) -> int:
    """The resident memory of a process, in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def wait_until(condition: Callable[[], object], *, seconds: float = 30.0, what: str = "the condition") -> None:
    """Wait until *condition* holds, for events of other processes that send no notification.

    Raises:
        TimeoutError: it did not hold within *seconds*.
    """
    deadline = time.monotonic() + seconds
    pause = 0.01
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come true within {seconds:g} s")
        time.sleep(pause)
        pause = min(pause * 1.3, _LONGEST_PAUSE)  # many conditions query a server, some on a new connection


@contextlib.contextmanager
def short_directory(name: str, *, in_memory: bool = False) -> Iterator[Path]:
    """A directory with a short path that other accounts may enter; removed afterwards.

    The directories of pytest are too deep for a Unix socket, and closed to the account of PostgreSQL under root.

    Args:
        name: a part of the name of the directory.
        in_memory: use a file system in memory, if there is one with room; tests kill processes, not the machine.
    """
    place = _MEMORY if in_memory and _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _ROOM else None
    directory = Path(tempfile.mkdtemp(prefix=f"dtx-{name}-", dir=place))
    directory.chmod(0o711)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def show_on_failure(name: str, path: Path) -> None:
    """Print the end of *path* with every test that fails from now on, until ``forget_log``."""
    _logs[name] = path


def forget_log(name: str) -> None:
    """Do not print the log *name* any more."""
    _logs.pop(name, None)


def log_tails(limit: int = 6000) -> Iterator[tuple[str, str]]:
    """Name and last bytes of every registered log."""
    for name, path in list(_logs.items()):
        with contextlib.suppress(OSError):
            yield name, path.read_bytes()[-limit:].decode(errors="replace")


@contextlib.contextmanager
def unmeasured() -> Iterator[None]:
    """Start processes within this block without measuring coverage, which slows them down."""
    measured = {name: value for name, value in os.environ.items() if name.startswith("COVERAGE_")}
    for name in measured:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(measured)
