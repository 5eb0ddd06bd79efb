"""A PostgreSQL with a standby: commits should wait for it, and a former primary must not serve again."""

import os
import subprocess
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pytest
from psycopg.conninfo import conninfo_to_dict
from structlog.testing import capture_logs

from dtx.db import connections, migrate
from dtx.db.connections import Check, Dsn
from dtx.embedded.cluster import find_programs
from dtx.log.api import LogUnavailable
from dtx.log.postgres import PostgresTransactionLog
from tests.support.branches import a_branch, all_of, an_insert
from tests.support.postgres import PostgresServer
from tests.support.processes import short_directory, wait_until


@pytest.fixture
def standby(own_postgres: PostgresServer) -> Iterator[PostgresServer]:
    """A replica of ``own_postgres``."""
    with short_directory("standby") as place:
        cluster = place / "data" / "postgres"
        cluster.parent.mkdir(mode=0o700)
        program = find_programs().directory / "pg_basebackup"
        words = ("--dbname", own_postgres.url, "--pgdata", str(cluster), "--checkpoint", "fast", "--no-sync")
        subprocess.run([program, *words, "--write-recovery-conf"], check=True, capture_output=True)
        owner = (own_postgres.data_dir / "postgres").stat()
        parent = own_postgres.data_dir.stat()
        os.chown(cluster.parent, parent.st_uid, parent.st_gid)
        cluster.parent.chmod(parent.st_mode & 0o777)
        for path in (cluster, *cluster.rglob("*")):
            os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)
        with PostgresServer("standby", place=place) as server:
            wait_until(lambda: count(own_postgres) == 1, what="the replica")
            yield server


def count(primary: PostgresServer) -> int:
    """How many replicas the primary has."""
    with primary.connection() as connection:
        row = connection.execute("SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'").fetchone()
    assert row is not None
    return int(row[0])


def wait_for_commits(primary: PostgresServer, names: str) -> None:
    """Set ``synchronous_standby_names``."""
    with primary.connection() as connection:
        connection.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'".encode())
        connection.execute("SELECT pg_reload_conf()")


def replication(server: PostgresServer) -> Check:
    (found,) = [check for check in connections.examine(Dsn(server.url)) if check.name == "replication"]
    return found


def both(*servers: PostgresServer) -> str:
    """The URL of several servers."""
    parts: list[dict[str, Any]] = [conninfo_to_dict(server.url) for server in servers]
    hosts = {name: ",".join(str(part[name]) for part in parts) for name in ("host", "port")}
    return f"postgresql:///?{urlencode({**parts[0], **hosts})}"


def test_a_primary_that_does_not_wait_is_reported(own_postgres: PostgresServer, standby: PostgresServer) -> None:
    """A promoted replica would lack votes that were answered."""
    found = replication(own_postgres)
    assert (found.found, found.fault) == ("asynchronous", None)
    assert "prepared branches are lost if one is promoted" in str(found.advice)
    with capture_logs() as logged:
        connections.require_safe(Dsn(own_postgres.url))
    assert [(line["check"], line["found"]) for line in logged] == [("replication", "asynchronous")]
    with own_postgres.connection() as connection:
        connection.execute("CREATE ROLE plain LOGIN PASSWORD 'plain'")
    parts = conninfo_to_dict(own_postgres.url)
    plain = Dsn(f"postgresql:///?{urlencode({**parts, 'user': 'plain', 'password': 'plain'})}")
    assert [check.found for check in connections.examine(plain) if check.name == "replication"] == ["asynchronous"]
    wait_for_commits(own_postgres, "*")
    wait_until(lambda: replication(own_postgres).found == "synchronous", what="the new setting")
    assert replication(own_postgres).advice is None


async def test_a_former_primary_is_refused(own_postgres: PostgresServer, standby: PostgresServer) -> None:
    """It comes back after the promotion of its replica, and accepts writes."""
    wait_for_commits(own_postgres, "*")
    migrate.upgrade(own_postgres.url)
    log = PostgresTransactionLog(both(own_postgres, standby), "rm", lease_ttl=60, retry_window=20, answer_timeout=10)
    await log.open()
    await log.write(an_insert(before := a_branch()))
    own_postgres.stop()
    with standby.connection() as connection:
        connection.execute("SELECT pg_promote()")
    wait_for_commits(standby, "")
    await log.write(an_insert(after := a_branch()))
    assert set(await all_of(log.load())) == {before.id, after.id}

    own_postgres.start()
    wait_for_commits(own_postgres, "")
    standby.stop()
    log._dsn.first = 0
    with pytest.raises(
        LogUnavailable, match="this server is on timeline 1, and another one was promoted to timeline 2"
    ):
        await log.lookup("/", after.xid)
    standby.start()
    log._dsn.first = 0
    await log.write(an_insert(later := a_branch()))
    assert set(await all_of(log.load())) == {before.id, after.id, later.id}
    await log.close()
