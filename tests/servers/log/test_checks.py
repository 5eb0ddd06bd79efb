"""Requirements on a PostgreSQL server, and defaults that dtx's sessions override."""

import asyncio
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import psycopg
import pytest

from dtx.db import connections, migrate
from dtx.db.connections import Dsn
from dtx.log.api import LogError, LogUnavailable
from dtx.log.changes import Store
from dtx.log.pages import BranchFilter, totals
from dtx.log.postgres import PostgresTransactionLog
from dtx.log.reader import LogReader
from dtx.log.records import JournalEvent
from tests.servers.log.conftest import OpenLog
from tests.support.branches import (
    a_branch,
    a_completion,
    a_consume,
    a_line,
    a_publish,
    a_unit,
    all_of,
    an_insert,
)
from tests.support.postgres import PostgresServer
from tests.support.processes import end, free_port, short_directory, spawn, wait_until
from tests.support.proxy import Proxy
from tests.support.stored import a_message, puts

PGBOUNCER: Final = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin")


@pytest.fixture
def setting(own_postgres: PostgresServer) -> Iterator[psycopg.Connection]:
    with own_postgres.connection() as connection:
        yield connection


def test_a_server_with_defaults_is_fine(postgres_url: str) -> None:
    found = connections.examine(Dsn(postgres_url))
    assert [check.name for check in found] == [
        "server_version", "fsync", "full_page_writes", "synchronous_commit", "server_encoding", "role", "replication",
        "pooling",
    ]  # fmt: skip
    assert [check.fault or check.advice for check in found] == [None] * 8
    assert found[-1].found == "none"
    connections.require_safe(Dsn(postgres_url))


async def test_a_server_that_loses_commits_is_refused_unless_unsafe(
    own_postgres: PostgresServer, setting: psycopg.Connection
) -> None:
    """synchronous_commit=off or fsync=off on the server is refused at start unless --unsafe is given."""
    dsn = Dsn(own_postgres.url)
    for name in ("fsync", "full_page_writes", "synchronous_commit"):
        setting.execute(f"ALTER SYSTEM SET {name} = off")
        setting.execute("SELECT pg_reload_conf()")
        while next(check for check in connections.examine(dsn) if check.name == name).fault is None:
            pass
        with pytest.raises(LogError, match=f"{name} = off loses prepared branches .* or give --unsafe"):
            await PostgresTransactionLog(own_postgres.url, "rm").open()
        connections.require_safe(dsn, unsafe=True)
        setting.execute(f"ALTER SYSTEM RESET {name}")


@pytest.mark.parametrize("mode", ["transaction", "statement", "session"])
def test_a_pooler_must_leave_us_our_sessions(
    migrated_postgres_url: str, proxy: Callable[[str, int], Proxy], mode: str, left_out: Callable[[str], None]
) -> None:
    """If transactions of a client run in different sessions, its prepared statements and settings are missing."""
    if PGBOUNCER is None:
        left_out("PostgreSQL behind a pooler: install pgbouncer")
        return
    with pooled(migrated_postgres_url, proxy, mode) as url:
        if mode == "session":
            connections.require_safe(Dsn(url))
            assert connections.examine(Dsn(url))[-1].found == "by session"
        else:
            with pytest.raises(LogError, match=r"connect past it, .* \(pooling is by transaction\)"):
                connections.require_safe(Dsn(url), unsafe=True)


@contextmanager
def pooled(url: str, proxy: Callable[[str, int], Proxy], mode: str) -> Iterator[str]:
    """The same database behind pgbouncer."""
    assert PGBOUNCER is not None
    values = psycopg.conninfo.conninfo_to_dict(url)
    server = proxy(str(values["host"]), int(values["port"] or 5432))  # its account cannot reach our socket
    port = free_port()
    with short_directory("pgbouncer") as directory:
        configuration = directory / "pgbouncer.ini"
        configuration.write_text(
            f"[databases]\n* = host=127.0.0.1 port={server.port} user={values['user']} password={values['password']}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n"
            f"pool_mode = {mode}\n"
        )
        configuration.chmod(0o644)
        directory.chmod(0o755)
        account = ["--user=nobody"] if os.geteuid() == 0 else []
        with (directory / "log").open("wb") as log:
            pooler = spawn([PGBOUNCER, *account, configuration], output=log.fileno())
        try:
            wait_until(lambda: _listens(port), what="pgbouncer's start")
            yield f"postgresql://{values['user']}@127.0.0.1:{port}/{values['dbname']}"
        finally:
            end(pooler, signal.SIGTERM)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("DateStyle", "SQL, DMY"),
        ("standard_conforming_strings", "off"),
        ("default_transaction_isolation", "serializable"),
        ("TimeZone", "Asia/Kathmandu"),
        ("bytea_output", "escape"),
        ("extra_float_digits", "-10"),
        ("search_path", "nowhere"),
        ("client_encoding", "LATIN1"),
        ("idle_session_timeout", "200ms"),
    ],
)
async def test_no_default_changes_reads_or_writes(
    open_log: OpenLog, migrated_postgres_url: str, setting: str, value: str
) -> None:
    """Defaults of a database or a role do no harm: dtx's sessions override them or reconnect."""
    with psycopg.connect(migrated_postgres_url, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {connection.info.dbname} SET {setting} = '{value}'")
    await asyncio.to_thread(migrate.upgrade, migrated_postgres_url)
    for _ in range(2):
        await asyncio.to_thread(migrate.maintain, Dsn(migrated_postgres_url))
    log = await open_log()
    branch, ended = a_branch(vhost="/\u20ac", units=(a_unit(),)), a_branch()
    message = a_message(expires_at=1_900_000_000.123457)
    work = (a_publish(0), a_consume(1))
    await asyncio.gather(
        log.write(an_insert(branch, *work)), log.write(an_insert(ended)), log.write(Store(change=puts(message)))
    )
    if setting == "idle_session_timeout":
        await asyncio.sleep(0.5)  # PostgreSQL ends the sessions meanwhile
    end = a_line(ended, JournalEvent.COMMITTED)
    await log.write(a_completion(ended, journal=end))
    assert await all_of(log.load()) == {branch.id: branch}
    assert (await log.lookup(branch.vhost, branch.xid)).branch == branch
    assert await log.read_work(branch.id) == list(work)
    assert (await log.history(None, ended.xid))[-1] == end
    assert await log.read_messages([message.slot]) == {message.slot: message}
    with LogReader(migrated_postgres_url) as reader:
        (total,) = totals(reader, BranchFilter(rm="rm"))
    assert total.branches == 1


def test_another_encoding_is_refused(postgres: PostgresServer, postgres_url: str) -> None:
    name = psycopg.conninfo.conninfo_to_dict(postgres_url)["dbname"]
    with postgres.connection() as connection:
        connection.execute(
            f"CREATE DATABASE {name}_latin TEMPLATE template0 ENCODING LATIN1 LOCALE 'C' LOCALE_PROVIDER libc"
        )
        url = postgres_url.replace(str(name), f"{name}_latin")
        with pytest.raises(LogError, match="UTF8"):
            connections.require_safe(Dsn(url), unsafe=True)
        connection.execute(f"DROP DATABASE {name}_latin WITH (FORCE)")


def test_a_server_that_is_away_is_unavailable() -> None:
    with pytest.raises(LogUnavailable, match=r"cannot connect to postgresql://127\.0\.0\.1:1/x"):
        connections.examine(Dsn("postgresql://127.0.0.1:1/x"))
