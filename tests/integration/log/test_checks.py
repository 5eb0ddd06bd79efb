"""What a PostgreSQL server must be like."""

from collections.abc import Iterator

import psycopg
import pytest

from dtx.log import checks
from dtx.log.api import LogError, LogUnavailable
from dtx.log.dsn import Dsn
from dtx.log.postgres import PostgresLog
from tests.support.postgres import PostgresServer


@pytest.fixture
def setting(own_postgres: PostgresServer) -> Iterator[psycopg.Connection]:
    with own_postgres.connection() as connection:
        yield connection


def test_a_server_with_defaults_is_fine(postgres_url: str) -> None:
    found = checks.examine(Dsn(postgres_url))
    assert [check.name for check in found] == [
        "server_version", "fsync", "full_page_writes", "synchronous_commit", "server_encoding", "role",
    ]  # fmt: skip
    assert [check.fault for check in found] == [None] * 6
    checks.require_safe(Dsn(postgres_url))


async def test_a_server_that_loses_commits_is_refused_unless_unsafe(
    own_postgres: PostgresServer, setting: psycopg.Connection
) -> None:
    """synchronous_commit=off or fsync=off on the server is refused at start unless --unsafe is given."""
    dsn = Dsn(own_postgres.url)
    for name in ("fsync", "full_page_writes", "synchronous_commit"):
        setting.execute(f"ALTER SYSTEM SET {name} = off")
        setting.execute("SELECT pg_reload_conf()")
        while next(check for check in checks.examine(dsn) if check.name == name).fault is None:
            pass
        with pytest.raises(LogError, match=f"{name} = off loses prepared branches .* or give --unsafe"):
            await PostgresLog(own_postgres.url, "rm").open()
        checks.require_safe(dsn, unsafe=True)
        setting.execute(f"ALTER SYSTEM RESET {name}")


def test_another_encoding_is_refused(postgres: PostgresServer, postgres_url: str) -> None:
    name = psycopg.conninfo.conninfo_to_dict(postgres_url)["dbname"]
    with postgres.connection() as connection:
        connection.execute(
            f"CREATE DATABASE {name}_latin TEMPLATE template0 ENCODING LATIN1 LOCALE 'C' LOCALE_PROVIDER libc"
        )
        url = postgres_url.replace(str(name), f"{name}_latin")
        with pytest.raises(LogError, match="UTF8"):
            checks.require_safe(Dsn(url), unsafe=True)
        connection.execute(f"DROP DATABASE {name}_latin WITH (FORCE)")


def test_a_server_that_is_away_is_unavailable() -> None:
    with pytest.raises(LogUnavailable, match=r"cannot connect to postgresql://127\.0\.0\.1:1/x"):
        checks.examine(Dsn("postgresql://127.0.0.1:1/x"))
