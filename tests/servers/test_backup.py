"""``dtx backup`` and ``dtx restore``: what a restored dtx has, and what they refuse."""

import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from pika.exceptions import ProbableAuthenticationError

from dtx.auth.users import AccountEditor
from dtx.cli import run
from dtx.client import XAER_NOTA, Coordinator, XaFlag, XAResource
from dtx.embedded.cluster import choose_account, find_programs, is_ready, launch, run_program
from dtx.embedded.postgres import EmbeddedPostgres, connection_url
from tests.servers.crash.older.write import CASES, READY, Left
from tests.servers.crash.test_older import DUMP
from tests.support.client import connected, new_xid, take_all
from tests.support.crash import PERSISTENT
from tests.support.postgres import PostgresServer
from tests.support.processes import short_directory, wait_until
from tests.support.service import DtxService


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("DTX_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that PostgreSQL's account can enter."""
    with short_directory("backup") as directory:
        yield directory


@pytest.fixture(scope="module")
def saved() -> Iterator[Path]:
    """An embedded PostgreSQL in ``data`` with tables and no branches, and its backup ``dtx.dump``."""
    with short_directory("saved") as directory:
        assert run(["migrate", "--data-dir", str(directory / "data")]) == 0
        assert run(["backup", "--data-dir", str(directory / "data"), str(directory / "dtx.dump")]) == 0
        yield directory


def rows(url: str) -> dict[str, list[str]]:
    """All rows of all tables. The transactions that wrote lines of the journal are another server's after a restore."""
    tables = "SELECT relname FROM pg_class WHERE relnamespace = 'dtx'::regnamespace AND relkind IN ('r', 'p')"
    with psycopg.connect(url) as database:
        names = [name for (name,) in database.execute(tables)]
        found = {name: database.execute(f"SELECT to_jsonb(t) - 'xid8' FROM dtx.{name} t").fetchall() for name in names}
    return {name: sorted(map(str, lines)) for name, lines in found.items()}


def test_a_restore_brings_back_the_moment_of_the_backup(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """docs/operations/backup: branches that ended after the backup are in doubt again, and later ones never began."""
    file = place / "dtx.dump"
    first, second, third = (new_xid() for _ in range(3))
    with DtxService() as service:
        users = AccountEditor(connection_url(service.data_dir), "dtx")
        users.add_user("alice", b"secret of alice")
        users.grant("alice", "/", configure=".*", write=".*", read=".*")
        with connected(service.url("alice", "secret of alice")) as connection:
            channel = connection.channel()
            for queue in ("in", "out"):
                channel.queue_declare(queue, durable=True)
            for body in (b"taken by the branch", b"waits"):
                channel.basic_publish("", "in", body, PERSISTENT)
            for xid in (first, second):
                branch = connection.channel()
                resource = XAResource(branch)
                resource.start(xid)
                if xid == first:
                    method, _, _ = branch.basic_get("in")
                    assert method is not None
                    branch.basic_ack(method.delivery_tag)
                branch.basic_publish("", "out", xid.gtrid, PERSISTENT)
                resource.end(xid)
                resource.prepare(xid)
            assert run(["backup", "--data-dir", str(service.data_dir), str(file)]) == 0
            wrote = capfd.readouterr().out
            assert wrote.startswith(f"wrote {file} (")
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            with Coordinator(connection) as manager:
                assert manager.commit(first) is XaFlag.OK
                branch = connection.channel()
                resource = XAResource(branch)
                resource.start(third)
                branch.basic_publish("", "out", b"after the backup", PERSISTENT)
                resource.end(third)
                resource.prepare(third)
        service.stop()
        shutil.rmtree(service.data_dir)
        assert run(["restore", "--data-dir", str(service.data_dir), str(file)]) == 0
        said = capfd.readouterr().out
        assert ", 2 branches are open" in said
        assert "Decide these branches before clients connect" in said
        service.start()
        with pytest.raises(ProbableAuthenticationError), connected(service.url("alice", "wrong")):
            pass
        with connected(service.url("alice", "secret of alice")) as connection, Coordinator(connection) as manager:
            channel = connection.channel()
            assert sorted(map(str, manager.recover())) == sorted(map(str, (first, second)))
            assert (take_all(channel, "in"), take_all(channel, "out")) == ([b"waits"], [])
            assert manager.commit(first) is XaFlag.OK
            assert manager.rollback(second) is XaFlag.OK
            with pytest.raises(XAER_NOTA):
                manager.commit(third)
            assert (take_all(channel, "in"), take_all(channel, "out")) == ([], [first.gtrid])


def test_a_restore_has_every_row_of_the_backup(place: Path) -> None:
    source, copy, file = place / "source", place / "copy", place / "dtx.dump"
    with DtxService() as service:
        with connected(service.url()) as connection:
            branch = connection.channel()
            branch.queue_declare("q", durable=True)
            branch.basic_publish("", "q", os.urandom(100_000), PERSISTENT)
            resource = XAResource(branch)
            for _ in range(3):
                xid = new_xid()
                resource.start(xid)
                branch.basic_publish("", "q", b"\x00\xff", PERSISTENT)
                resource.end(xid)
                resource.prepare(xid)
        service.stop()
        shutil.move(service.data_dir, source)
    with EmbeddedPostgres(source), psycopg.connect(connection_url(source)) as database:
        database.execute("UPDATE dtx.journal SET xid8 = '123456789012'")  # of a server that has been in use for long
        database.commit()
        assert run(["backup", "--data-dir", str(source), str(file)]) == 0
        expected = rows(connection_url(source))
    assert (len(expected["branch"]), len(expected["journal"])) == (3, 3)
    assert run(["restore", "--data-dir", str(copy), str(file)]) == 0
    assert not (copy / "restoring").exists()
    with EmbeddedPostgres(copy), psycopg.connect(connection_url(copy)) as database:
        assert rows(connection_url(copy)) == expected
        # readers of the journal see the lines of transactions that have ended
        seen = "SELECT count(*) FROM dtx.journal WHERE xid8 < pg_snapshot_xmin(pg_current_snapshot())"
        assert database.execute(seen).fetchone() == (3,)


def test_a_data_directory_with_a_database_is_not_overwritten(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data, password = saved / "data", saved / "data" / "postgres" / "dtx.password"
    before = password.read_text()
    assert run(["restore", "--data-dir", str(data), str(saved / "dtx.dump")]) == 3
    assert f"there is a database in {data}/postgres already" in capfd.readouterr().err
    with EmbeddedPostgres(data):
        assert run(["restore", "--data-dir", str(data), str(saved / "dtx.dump")]) == 3
        assert "another dtx" in capfd.readouterr().err
    assert password.read_text() == before


@pytest.mark.parametrize("damage", ["the end is missing", "no dump"])
def test_a_damaged_backup_leaves_no_database(
    place: Path, saved: Path, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    data, file = place / "data", place / "bad.dump"
    content = (saved / "dtx.dump").read_bytes()
    file.write_bytes(content[:-40] if damage == "the end is missing" else b"this is no dump")
    assert run(["restore", "--data-dir", str(data), str(file)]) == 3
    assert "the restore failed, nothing was changed: " in capfd.readouterr().err
    assert not (data / "postgres").exists()
    assert not (data / "restoring").exists()


def test_a_backup_of_a_newer_dtx_is_refused(place: Path, saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = place / "dtx.dump"
    with EmbeddedPostgres(saved / "data"), psycopg.connect(connection_url(saved / "data"), autocommit=True) as database:
        (now,) = database.execute("SELECT version_num FROM dtx.alembic_version").fetchone() or ("",)
        database.execute("UPDATE dtx.alembic_version SET version_num = '9999'")
        assert run(["backup", "--data-dir", str(saved / "data"), str(file)]) == 0
        database.execute("UPDATE dtx.alembic_version SET version_num = %s", [now])
    assert run(["restore", "--data-dir", str(place / "copy"), str(file)]) == 3
    assert "tables of version 9999 of a newer dtx" in capfd.readouterr().err
    assert not (place / "copy" / "postgres").exists()


def test_a_failed_backup_keeps_the_file_of_before(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = place / "dtx.dump"
    file.write_text("yesterday's")
    assert run(["backup", "--data-dir", str(place / "data"), str(file)]) == 3
    assert "no dtx with an embedded PostgreSQL is running" in capfd.readouterr().err
    assert [path.name for path in place.iterdir()] == ["dtx.dump"]
    assert file.read_text() == "yesterday's"


def test_a_backup_replaces_only_a_regular_file(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pipe = saved / "pipe"
    os.mkfifo(pipe)
    assert run(["backup", "--data-dir", str(saved / "data"), str(pipe)]) == 2
    assert f"{pipe} is no regular file: use - instead, and redirect stdout to it" in capfd.readouterr().err
    assert pipe.is_fifo()


@pytest.mark.parametrize(("command", "tool"), [("backup", "pg_dump or pg_basebackup"), ("restore", "pg_restore")])
def test_a_given_server_is_backed_up_with_its_own_tools(
    command: str, tool: str, postgres: PostgresServer, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("DTX_DATABASE", postgres.url)
    assert run([command, str(tmp_path / "dtx.dump")]) == 2
    assert f"for the server of --database use {tool}" in capfd.readouterr().err
    assert not (tmp_path / "dtx.dump").exists()


@pytest.fixture
def old_programs(left_out: Callable[[str], None]) -> Path | None:
    """The programs of a PostgreSQL of an older major version than the embedded one; ``None`` if there is none."""
    newest = find_programs().major
    found = sorted(path for path in Path("/usr/lib/postgresql").glob("*/bin") if int(path.parent.name) < int(newest))
    if not found:
        left_out("a backup of an older PostgreSQL: there is none (Debian: apt-get install postgresql)")
        return None
    return found[-1]


@pytest.fixture
def old_server(old_programs: Path | None, place: Path) -> Iterator[str | None]:
    """The URL of a server of these programs."""
    if old_programs is None:
        yield None
        return
    old, account = place / "old", choose_account(place)
    old.mkdir(mode=0o700)
    account.give(old)
    run_program(
        [str(old_programs / "initdb"), "-D", str(old / "pg"), "-U", "dtx", "-A", "trust", "-E", "UTF8", "--locale=C"],
        account=account,
        data_dir=old,
    )
    with (old / "log").open("wb") as output:
        process = launch(
            [str(old_programs / "postgres"), "-D", str(old / "pg"), "-k", str(old), "-c", "listen_addresses="],
            account=account,
            data_dir=old,
            parent_death=signal.SIGINT,
            output=output.fileno(),
        )
    try:
        wait_until(lambda: is_ready(old / "pg"), what="the old PostgreSQL")
        yield f"postgresql://dtx@/postgres?host={old}&port=5432"
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate()


def test_an_older_dtx_and_postgresql_move_with_a_backup(
    old_programs: Path | None, old_server: str | None, place: Path
) -> None:
    """docs/operations/upgrade: "A new major version does not read the directory of the old one"."""
    if old_programs is None or old_server is None:
        return
    with psycopg.connect(old_server) as database:
        database.execute(DUMP.read_bytes())
    data = place / "data"
    # as the old `dtx backup` would write it: pg_dump of a newer version may not know what an old server stores
    file = place / "dtx.dump"
    subprocess.run([old_programs / "pg_dump", "--format=custom", f"--file={file}", old_server], check=True)
    assert run(["restore", "--data-dir", str(data), str(file)]) == 0
    kept = [case for case in CASES["standalone"] if case.left is Left.PREPARED and case.host == 0]
    with DtxService(start=False, options=("--journal-retention", "36500d")) as service:
        shutil.move(data, service.data_dir)
        service.start()
        for user in ("guest", "alice"):
            mine = [case for case in kept if case.user == user]
            with connected(service.url(user)) as connection, Coordinator(connection) as manager:
                assert {case.id for case in mine} <= set(manager.recover())
                for case in mine:
                    assert manager.commit(case.id) is XaFlag.OK
                    assert take_all(connection.channel(), case.target) == list(case.publishes)
        with connected(service.url()) as connection:
            assert take_all(connection.channel(), "ready") == list(READY)
