"""Processes that are copies of one that has imported dtx: a start takes a third of the time.

Tests start dtx more than a thousand times. A copy runs the same program with the same arguments, but does not load the
modules again. If coverage of a process is measured, its copies are measured too.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, Self

import coverage

from tests.support.processes import end, short_directory, spawn, wait_until

_MODULES: Final = (
    "dtx.cli.branches",
    "dtx.cli.orders",
    "dtx.cli.serve",
    "dtx.failpoint.action",
    "dtx.server.operator_service",
    "dtx.server.service",
    "dtx.server.alongside.mode",
    "dtx.server.standalone.mode",
    "uvloop",
)
_MOST: Final = 1 << 18
"""The size limit of a request (arguments and environment), in bytes."""
_PR_SET_PDEATHSIG: Final = 1


class Copy:
    """A process that the preforker has made, seen from the process that requested it.

    Args:
        connection: the connection to the preforker, which sends the process id and later the exit status.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._status: int | None = None
        self.pid: int = json.loads(connection.recv(64))

    def poll(self) -> int | None:
        """Its exit status (negative: ended by that signal); ``None`` while it runs."""
        return self._hear(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; return the exit status.

        Raises:
            subprocess.TimeoutExpired: it did not end within *timeout* seconds.
        """
        status = self._hear(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return status

    def send_signal(self, sig: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def _hear(self, timeout: float | None) -> int | None:
        if self._status is None:
            ready, _, _ = select.select([self._connection], [], [], timeout)
            if ready:
                said = self._connection.recv(64)
                self._status = json.loads(said) if said else -signal.SIGKILL  # the copies end with the preforker
                self._connection.close()
        return self._status


class Preforker:
    """The process that is copied. Use as a context manager; the copies end with it.

    Args:
        modules: the modules that it imports in addition to dtx.
        path: a directory that comes first on the module path.
    """

    def __init__(self, *modules: str, path: str = "") -> None:
        self._modules = modules
        self._first = path
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._path = self._stack.enter_context(short_directory("preforker")) / "socket"
        command = [sys.executable, "-m", "tests.support.prefork", str(self._path), *self._modules]
        root = Path(__file__).parents[2]
        path = os.pathsep.join(filter(None, (self._first, str(root))))
        process = spawn(command, output=sys.stderr.fileno(), env=os.environ | {"PYTHONPATH": path}, cwd=root)
        self._stack.callback(end, process, signal.SIGKILL)
        wait_until(self._path.exists, seconds=100, what="the preforker")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def copy(
        self, module: str, words: Sequence[str], *, output: int, errors: int, env: Mapping[str, str], cwd: Path
    ) -> Copy:
        """Run ``python -m module words`` in a copy.

        Args:
            module: ``dtx``, ``dtx.failpoint`` or a program that the preforker has imported.
            words: its arguments.
            output: the descriptor for stdout.
            errors: the descriptor for stderr.
            env: its environment.
            cwd: its working directory.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(str(self._path))
        request = {"module": module, "words": list(words), "env": dict(env), "cwd": str(cwd)}
        socket.send_fds(connection, [json.dumps(request).encode()], [output, errors])
        return Copy(connection)


_nurseries: dict[tuple[bool, str], Preforker] = {}


def preforker(path: str = "") -> Preforker:
    """The preforker of this test run; its copies are measured if coverage of new processes is measured now.

    Args:
        path: a directory that comes first on the module path; each path has its own preforker.
    """
    measured = any(name.startswith("COVERAGE_") for name in os.environ)
    if (measured, path) not in _nurseries:
        begun = Preforker(path=path).__enter__()
        atexit.register(begun.__exit__)
        _nurseries[measured, path] = begun
    return _nurseries[measured, path]


def _serve(path: str, *more: str) -> None:
    """Make copies on request, and report their exit statuses."""
    for module in (*_MODULES, *more):
        importlib.import_module(module)
    measuring = coverage.Coverage.current()
    if measuring is not None:
        measuring.save()  # once instead of in each copy
    gc.freeze()  # garbage collection in a copy does not touch shared pages
    children: dict[int, socket.socket] = {}
    wakes, woken = socket.socketpair()
    for end_ in (wakes, woken):
        end_.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    unfinished = Path(f"{path}~")
    listener.bind(str(unfinished))
    listener.listen()
    unfinished.rename(path)
    while True:
        ready, _, _ = select.select([listener, wakes], [], [])
        if wakes in ready:
            wakes.recv(4096)
            _reap(children)
        if listener in ready:
            connection, _ = listener.accept()
            request, descriptors, _, _ = socket.recv_fds(connection, _MOST, 2)
            pid = os.fork()
            if pid == 0:
                _become(json.loads(request), descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            connection.send(json.dumps(pid).encode())
            children[pid] = connection


def _reap(children: dict[int, socket.socket]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        connection = children.pop(pid)
        with contextlib.suppress(OSError):
            connection.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())
        connection.close()


def _become(request: dict[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """Turn this forked process into the requested program."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    for descriptor, standard in zip(descriptors, (1, 2), strict=True):
        os.dup2(descriptor, standard)
    os.closerange(3, 256)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv = [request["module"], *request["words"]]
    status = 1
    try:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            sys.stderr.write(f"{leaving.code}\n")
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter would print it
        traceback.print_exc()
    finally:
        measuring = coverage.Coverage.current()
        if measuring is not None:
            measuring.stop()
            measuring.save()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
