"""Several members on one machine: a supervisor, and the processes that it runs on the same listening ports.

Theory of operation. The processes are forks of the supervisor, which has no threads and no event loop. Each one returns
from :func:`supervise` with its settings, and serves like any other dtx. It binds the shared ports with SO_REUSEPORT, so
the system distributes new connections, and a port of its own for other members. The stdout of a process is a pipe to
the supervisor: its READY line arrives there, and its end closes the pipe. Its log goes to the stderr of all.

Before all processes are READY, the end of one ends all: the cause is a setting, the database or the broker. Afterwards
the supervisor starts it again, with pauses that grow while it dies soon.
"""

import ctypes
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from dtx.config import Address, ConfigError, Settings
from dtx.embedded.launcher import PR_SET_PDEATHSIG
from dtx.server.listener import not_bound
from dtx.server.readiness import STANDBY, notify
from dtx.telemetry import get_logger

_log = get_logger(part="supervisor")
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_LEAST_PAUSE: Final = 0.1
"""Seconds between the end of a process and its next start; each further end makes it longer."""
_MOST_PAUSE: Final = 30.0
_GROWTH: Final = 4
_SOON: Final = 60.0
"""A process that lived this many seconds is started again after the least pause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberProcess:
    """One of several processes.

    Args:
        number: from 1.
        settings: of this process.
        peers: where it listens for other members.
        peers_tls: whether they use TLS there.
    """

    number: int
    settings: Settings
    peers: Address
    peers_tls: bool


class _Worker:
    """A place for a process, which is started again and again.

    Args:
        process: what its processes are.
    """

    def __init__(self, process: MemberProcess) -> None:
        self.process: Final = process
        self.pid: int | None = None
        self.output = -1
        """The descriptor for its stdout."""
        self.text = b""
        """What it has written there."""
        self.begins = 0.0
        """When it was started, or will be."""
        self.pause = 0.0

    @property
    def ready_line(self) -> str | None:
        """Its READY line; ``None`` before it."""
        lines = self.text.decode(errors="replace").splitlines()
        return next((line for line in lines if line.startswith("READY ")), None)


def supervise(settings: Settings) -> MemberProcess | int:
    """Run the processes of *settings* until a signal stops them. Call it without threads and event loops.

    Returns:
        In each of these processes: what it serves. In the supervisor, at the end: the exit code, which is the greatest
        of all processes.

    Raises:
        OSError: an address is in use.
        ConfigError: an address is not of this machine, or there are not enough ports.
    """
    with ExitStack() as stack:
        listen = tuple(_reserve(address, stack) for address in settings.listen)
        processes = [_process(settings, listen, number) for number in range(1, settings.processes + 1)]
        _load()
        return _Supervisor(processes, stack).run()


def _load() -> None:
    """Import what the processes need: they begin sooner, and share its memory, which the collector leaves alone."""
    importlib.import_module("dtx.server.alongside.mode")
    importlib.import_module("dtx.server.operator_service")
    gc.freeze()


def _reserve(address: Address, stack: ExitStack) -> Address:
    """*address* with its port, which belongs to the processes until *stack* ends. Nothing listens there yet."""
    try:
        family, kind, protocol, _, name = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # a dtx that shares this port already may be of another rm
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(name)
            port = probe.getsockname()[1]
        reserved = stack.enter_context(socket.socket(family, kind, protocol))
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind((name[0], port, *name[2:]))
    except OSError as error:
        raise not_bound(address, error) from error
    return Address(address.host, port)


def _process(settings: Settings, listen: tuple[Address, ...], number: int) -> MemberProcess:
    advertise, host = settings.advertise, listen[0].host
    if advertise is None:
        advertise, host = "amqp://127.0.0.1", "127.0.0.1"
    parts = urlsplit(advertise)
    port = _port(parts.port or 0, number)
    if port:
        advertise = f"{parts.scheme}://{parts.netloc.rpartition(':')[0]}:{port}"
    (admin,) = settings.admin_listen
    given = {
        "listen": listen, "advertise": advertise,
        "admin_listen": (Address(admin.host, _port(admin.port, number)),),
    }  # fmt: skip
    return MemberProcess(
        number=number,
        settings=settings.model_copy(update=given),
        peers=Address(host, port),
        peers_tls=parts.scheme == "amqps",
    )


def _port(first: int, number: int) -> int:
    port = first and first + number - 1
    if port > 0xFFFF:
        raise ConfigError(f"process {number} has no port: {first} is too high for so many processes")
    return port


class _Supervisor:
    """Starts processes, and waits for their lines, their ends and for signals.

    Args:
        processes: those to run.
        stack: of the reserved addresses.
    """

    def __init__(self, processes: Sequence[MemberProcess], stack: ExitStack) -> None:
        self._workers = [_Worker(process) for process in processes]
        self._stack = stack
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._wakes, self._woken = socket.socketpair()
        for end in (self._wakes, self._woken):
            stack.enter_context(end).setblocking(False)
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._is_ready = False
        self._is_stopping = False
        self._code = 0

    def run(self) -> MemberProcess | int:
        """See :func:`supervise`."""
        signal.set_wakeup_fd(self._woken.fileno())
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)  # the number arrives at the descriptor
        while not self._is_stopping or self._running:
            for worker in self._workers:
                is_due = worker.pid is None and not self._is_stopping and worker.begins <= time.monotonic()
                if is_due and self._start(worker):
                    return worker.process
            for key, _ in self._selector.select(self._patience()):
                if key.fileobj is self._wakes:
                    for byte in self._wakes.recv(256):
                        self._stop(byte)
                else:
                    self._read(key.data)
        signal.set_wakeup_fd(-1)
        return self._code

    @property
    def _running(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.pid is not None]

    def _patience(self) -> float | None:
        """Seconds until a process is to be started; ``None`` if there is none."""
        waiting = [] if self._is_stopping else [worker.begins for worker in self._workers if worker.pid is None]
        return max(0.0, min(waiting) - time.monotonic()) if waiting else None

    def _start(self, worker: _Worker) -> bool:
        """Start a process; true in it."""
        reading, writing = os.pipe()
        parent, worker.begins = os.getpid(), time.monotonic()
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # the new process must not handle them as the supervisor
        try:
            worker.pid = os.fork()
        except OSError as error:
            os.close(reading)
            os.close(writing)
            self._start_later(worker, str(error))
            return False
        finally:
            if worker.pid != 0:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        if worker.pid == 0:
            _begin_process(parent, writing)
            for descriptor in (reading, *(each.output for each in self._running if each is not worker)):
                os.close(descriptor)
            self._stack.close()
            return True
        os.close(writing)
        worker.output, worker.text = reading, b""
        self._selector.register(reading, selectors.EVENT_READ, worker)
        _log.info("process started", number=worker.process.number, pid=worker.pid)
        return False

    def _read(self, worker: _Worker) -> None:
        """Read the lines of a process; without any, it has ended."""
        data = os.read(worker.output, 4096)
        worker.text += data
        if not data:
            self._ended(worker)
        elif not self._is_ready and all(each.ready_line is not None for each in self._workers):
            self._is_ready = True
            shown = (self._workers[0].ready_line or "").rpartition(" pid=")[0]
            print(f"{shown} pid={os.getpid()}", flush=True)  # noqa: T201 - this is the interface
            notify(f"READY=1\nSTATUS=serving with {len(self._workers)} processes")
        elif not self._is_ready and data.startswith(STANDBY.encode()):
            notify(f"READY=1\nSTATUS=standing by, {data.decode().partition(' ')[2].strip()} is active")

    def _ended(self, worker: _Worker) -> None:
        assert worker.pid is not None
        _, status = os.waitpid(worker.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        reason = f"exit code {code}" if code >= 0 else f"signal {-code}"
        worker.pid = None
        self._selector.unregister(worker.output)
        os.close(worker.output)
        if self._is_ready and not self._is_stopping:
            if time.monotonic() - worker.begins >= _SOON:
                worker.pause = 0.0
            self._start_later(worker, reason)
        elif not self._is_stopping or -code not in _SIGNALS:  # the signal itself ends a process that serves nothing yet
            self._code = max(self._code, code if code >= 0 else 128 - code)  # as shells show it
        if not self._is_ready and not self._is_stopping:
            _log.error("a process has not become ready", number=worker.process.number, reason=reason)
            self._stop(signal.SIGTERM)

    def _start_later(self, worker: _Worker, reason: str) -> None:
        worker.pause = min(_MOST_PAUSE, max(_LEAST_PAUSE, worker.pause * _GROWTH))
        worker.begins = time.monotonic() + worker.pause
        _log.error("process starts again", number=worker.process.number, reason=reason, pause=worker.pause)

    def _stop(self, number: int) -> None:
        """Pass a signal on. The second one ends the processes at once."""
        if not self._is_stopping:
            notify("STOPPING=1")
        self._is_stopping = True
        for worker in self._workers:
            if worker.pid is not None:
                os.kill(worker.pid, number)


def _begin_process(parent: int, output: int) -> None:
    """Leave the state of the supervisor *parent* behind; *output* becomes stdout."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before the request
    os.setsid()  # the terminal's ^C goes only to the supervisor, which passes it on
    os.environ.pop("NOTIFY_SOCKET", None)
    os.dup2(output, 1)
    os.close(output)
    signal.set_wakeup_fd(-1)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
