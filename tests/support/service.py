"""``dtx serve`` as a child process, as users run it."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Self
from urllib.parse import quote, urlsplit

from dtx.config import broker_vhost
from tests.support.prefork import preforker
from tests.support.processes import Child, end, forget_log, free_port, short_directory, show_on_failure, spawn

START_SECONDS = 60.0
_ROOT = Path(__file__).parents[2]
"""The dtx beside these tests is run, also if another one is installed."""
ADMIN = ("--admin-listen", "127.0.0.1:0")
"""Options that enable the operators' API of a service."""


class DtxService:
    """A service that keeps its port and data directory across restarts. Use as a context manager.

    Args:
        broker: the URL of the broker, with the credentials of dtx.
        database: the URL of the database; ``None`` for the embedded server.
        options: further options, e.g. ``("--default-timeout", "5")``; they override the others.
        env: further environment variables.
        start: whether entering the context starts it.
        fresh: whether its processes are started as a user starts them; else they are copies (see ``Preforker``).
    """

    def __init__(
        self,
        *,
        broker: str | None = None,
        database: str | None = None,
        options: tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
        start: bool = True,
        fresh: bool = False,
    ) -> None:
        self.admin_url = ""
        """The URL of the operators' API; empty unless *options* enable it (``*ADMIN``)."""
        self.broker = broker
        self.database = database
        self.options = options
        self.host = "127.0.0.1"
        self.port = free_port()
        self.ready_line = ""
        self._env = dict(env or {})
        if broker is not None and broker_vhost(broker) == "/":
            # Tests share this virtual host, where a name belongs to one log.
            log = secrets.token_hex(4) if database is None else urlsplit(database).path[1:]
            self._env.setdefault("DTX_RM", f"dtx-{log}")
        self._start = start
        # loader and interpreter read their variables before a copy is made
        self._fresh = fresh or any(not name.startswith("DTX_") for name in self._env.keys() - {"PYTHONPATH"})
        self._stack = contextlib.ExitStack()
        self._directory: Path | None = None
        self._process: Child | None = None
        self._name = f"dtx {secrets.token_hex(3)}"

    def __enter__(self) -> Self:
        self._directory = self._stack.enter_context(short_directory("serve"))
        show_on_failure(self._name, self.log_path)
        self._stack.callback(forget_log, self._name)
        self._stack.callback(self._end)
        if self._start:
            try:
                self.start()
            except BaseException:
                self._stack.close()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def directory(self) -> Path:
        """The directory of its data and its log."""
        assert self._directory is not None, "use the service as a context manager"
        return self._directory

    @property
    def data_dir(self) -> Path:
        """Its ``--data-dir``."""
        return self.directory / "data"

    @property
    def log_path(self) -> Path:
        """Its stderr and stdout, across all restarts."""
        return self.directory / "dtx.log"

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def command(self) -> list[str]:
        """The command line."""
        words = [sys.executable, "-m", "dtx", "serve", "--listen", f"{self.host}:{self.port}"]
        words += ["--data-dir", str(self.data_dir)]
        if self.broker is not None:
            words += ["--broker", self.broker]
        if self.database is not None:
            words += ["--database", self.database]
        if "--admin-listen" not in self.options:
            words.append("--no-admin")  # so that services on one machine do not use the same port
        return [*words, *self.options]

    def start(self, *, wait: bool = True) -> None:
        """Start it; with *wait* wait for its READY line.

        Raises:
            RuntimeError: it ended, or was not ready in time; the message has the end of its log.
        """
        assert not self.running, "it runs already"
        reading, writing = os.pipe()
        try:
            with self.log_path.open("ab") as log:
                self._process = self._spawn(writing, log.fileno())
        finally:
            os.close(writing)
        self._ready = threading.Event()
        threading.Thread(target=self._read_output, args=(reading, self._ready), daemon=True).start()
        if wait:
            self.wait_ready()

    def _spawn(self, output: int, errors: int) -> Child:
        return self._begin(self.command(), output=output, errors=errors, env=self._environment())

    def _begin(self, command: list[str], *, output: int, errors: int, env: Mapping[str, str]) -> Child:
        match command:
            case [sys.executable, "-m", module, *words] if not self._fresh:
                path = self._env.get("PYTHONPATH", "")
                return preforker(path).copy(module, words, output=output, errors=errors, env=env, cwd=self.directory)
            case _:
                return spawn(command, output=output, errors=errors, env=env, cwd=self.directory)

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        """Wait for the READY line of the current start."""
        if not self._ready.wait(seconds) or not self.ready_line:
            said = self.log_path.read_bytes()[-4000:].decode(errors="replace")
            with contextlib.suppress(subprocess.TimeoutExpired):  # its output ends shortly before the process
                if self._process is not None:
                    self._process.wait(1)
            status = self._process.poll() if self._process is not None else None
            raise RuntimeError(f"dtx serve did not become ready (exit status {status}):\n{said}")

    def _read_output(self, descriptor: int, ready: threading.Event) -> None:
        self.ready_line = ""
        with open(descriptor, "rb") as output, self.log_path.open("ab") as log:
            for line in output:
                log.write(b"stdout: " + line)
                log.flush()
                if line.startswith(b"READY"):
                    self.ready_line = line.decode().strip()
                    for word in self.ready_line.split():
                        if word.startswith("listen="):
                            host, _, port = word.removeprefix("listen=").partition(",")[0].rpartition(":")
                            self.host, self.port = host, int(port)
                        if word.startswith("admin="):
                            self.admin_url = word.removeprefix("admin=")
                    ready.set()
        ready.set()  # the process ended: do not wait any longer

    def wait(self, seconds: float = 30.0) -> int:
        """Wait for its end; return the exit status (negative: ended by that signal)."""
        assert self._process is not None
        return self._process.wait(seconds)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill9(self) -> None:
        """Kill it and wait for its end."""
        self.signal(signal.SIGKILL)
        self.wait()

    def stop(self) -> int:
        """Send SIGTERM and wait; return the exit status."""
        self.signal(signal.SIGTERM)
        return self.wait(60)

    def pause(self) -> None:
        """Send SIGSTOP: its connections stay open, but it does nothing."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Send SIGCONT."""
        self.signal(signal.SIGCONT)

    def restart(self) -> None:
        """``kill9`` and ``start``."""
        self.kill9()
        self.start()

    def url(self, user: str = "guest", password: str | None = None, vhost: str = "/") -> str:
        """The URL for clients; the password is the user's name unless given."""
        secret = quote(password if password is not None else user, safe="")
        return f"amqp://{quote(user, safe='')}:{secret}@{self.host}:{self.port}/{quote(vhost, safe='')}"

    def run(self, *words: str, check: bool = True, seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run another dtx command on the same data, e.g. ``run("in-doubt", "--json")``."""
        command = [sys.executable, "-m", "dtx", *words, "--data-dir", str(self.data_dir)]
        if self.database is not None:
            command += ["--database", self.database]
        environment = self._environment()
        if self.admin_url:
            environment["DTX_ADMIN_LISTEN"] = urlsplit(self.admin_url).netloc
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            process = self._begin(command, output=output.fileno(), errors=errors.fileno(), env=environment)
            try:
                status = process.wait(seconds)
            finally:
                end(process, signal.SIGKILL)
            for file in (output, errors):
                file.seek(0)
            done = subprocess.CompletedProcess(command, status, output.read().decode(), errors.read().decode())
        if check:
            done.check_returncode()
        return done

    def _environment(self) -> dict[str, str]:
        """The environment without the variables of dtx and PostgreSQL."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("DTX_", "PG"))}
        return {**kept, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(_ROOT), **self._env}

    def _end(self) -> None:
        if self._process is not None:
            end(self._process)
