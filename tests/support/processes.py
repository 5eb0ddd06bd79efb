"""Child processes of tests: they end with the test run, however that ends."""

import contextlib
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

# Linux tells a child of the death of the *thread* that forked it, so all are forked by one that lives as long as we do.
_spawner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="spawner")

_PORTS = random.SystemRandom()
_NOT_EPHEMERAL = range(20_000, 32_768)

_LONGEST_PAUSE = 0.1
_MEMORY = Path("/dev/shm")
_ROOM = 8 << 30
"""Octets that the servers of one test run may well need."""
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
    """Start *command* in a session of its own; it is killed when the test run dies."""
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
    """A process that we started. A ``subprocess.Popen`` is one."""

    pid: int

    def poll(self) -> int | None:
        """Its exit status, if it has ended."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; the exit status."""

    def send_signal(self, sig: int) -> None:
        """Send it a signal, unless it has ended."""


def end(process: Child, first: signal.Signals = signal.SIGTERM, seconds: float = 30.0) -> int:
    """End a process that we started: by *first*, after *seconds* by SIGKILL. A stopped process is continued."""
    for signal_number in (first, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(signal_number)
            if signal_number is not signal.SIGKILL:
                process.send_signal(signal.SIGCONT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
    return process.wait(10)


def free_port() -> int:
    """A TCP port of the loopback interface that nobody has.

    None of those that the system itself gives away (to whoever connects anywhere, from 32768 on): a server that takes
    it a moment later, or comes back to it after a restart, would find it in use now and then.
    """
    while True:
        port = _PORTS.choice(_NOT_EPHEMERAL)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def resident(pid: int) -> int:
    """Memory of a process, octets."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def wait_until(condition: Callable[[], object], *, seconds: float = 30.0, what: str = "the condition") -> None:
    """Wait until *condition* holds: for events of other processes, which cannot tell us.

    Raises:
        TimeoutError: it did not hold within *seconds*.
    """
    deadline = time.monotonic() + seconds
    pause = 0.01
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come true within {seconds:g} s")
        time.sleep(pause)
        pause = min(pause * 1.3, _LONGEST_PAUSE)  # many conditions ask a server, some on a connection of their own


@contextlib.contextmanager
def short_directory(name: str, *, in_memory: bool = False) -> Iterator[Path]:
    """A directory with a short path that other accounts may enter; removed afterwards.

    pytest's own are too deep for a Unix socket, and closed to the account that PostgreSQL runs as under root.

    Args:
        name: for people.
        in_memory: on a file system in memory, if there is one with room: tests kill processes, and no machine.
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
    """Print it no more."""
    _logs.pop(name, None)


def log_tails(limit: int = 6000) -> Iterator[tuple[str, str]]:
    """Name and last bytes of every log that was registered."""
    for name, path in list(_logs.items()):
        with contextlib.suppress(OSError):
            yield name, path.read_bytes()[-limit:].decode(errors="replace")


@contextlib.contextmanager
def unmeasured() -> Iterator[None]:
    """Processes that are started within it are as fast as they are, for nobody measures the coverage of their lines."""
    measured = {name: value for name, value in os.environ.items() if name.startswith("COVERAGE_")}
    for name in measured:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(measured)
