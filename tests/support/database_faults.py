"""Faults of PostgreSQL: a locked table, a refused record, a commit that does not return."""

import contextlib
import secrets
import threading
from collections.abc import Iterator
from typing import LiteralString, Self

import psycopg
from psycopg import sql

from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until

DISK_FULL = "53100"
_PROBE = "dtx-test-probe"
_WAITING = """
SELECT count(*) FROM pg_locks l JOIN pg_class c ON c.oid = l.relation JOIN pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_inherits i ON i.inhrelid = c.oid
WHERE NOT l.granted AND n.nspname = 'dtx' AND (c.relname = %(table)s OR i.inhparent = to_regclass('dtx.' || %(table)s))
AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""


class Lock:
    """Locks a table of the log against writes; reads are possible. Use as a context manager.

    Args:
        url: of the database.
        table: its name, in the schema of dtx.
    """

    def __init__(self, url: str, table: str) -> None:
        self._url = url
        self._table = table
        self._connection = psycopg.connect(url)
        self._connection.execute(
            sql.SQL("LOCK TABLE {} IN SHARE ROW EXCLUSIVE MODE").format(sql.Identifier("dtx", table))
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the lock. Idempotent, also if the server has died."""
        with contextlib.suppress(psycopg.Error):
            self._connection.close()

    @property
    def felt(self) -> bool:
        """Whether a writer waits for the table."""
        with psycopg.connect(self._url) as connection:
            row = connection.execute(_WAITING, {"table": self._table}).fetchone()
        return row is not None and row[0] > 0

    def wait_felt(self) -> None:
        """Wait until a writer waits for the table."""
        wait_until(lambda: self.felt, what=f"a writer that waits for dtx.{self._table}")


@contextlib.contextmanager
def refusing(url: str, table: str, event: str = "INSERT", when: str = "") -> Iterator[None]:
    """Refuse writes to a table, with the error of a full disk.

    Args:
        url: of the database.
        table: its name, in the schema of dtx.
        event: INSERT, UPDATE or DELETE.
        when: an SQL condition on the row.
    """
    name = f"refuse_{secrets.token_hex(4)}"
    condition = f"WHEN ({when})" if when else ""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN RAISE 'could not extend file: No space left on device' USING ERRCODE = '{DISK_FULL}'; END $$"
        )
        connection.execute(
            f"CREATE TRIGGER {name} BEFORE {event} ON dtx.{table} FOR EACH ROW {condition} EXECUTE FUNCTION {name}()"
        )
    try:
        yield
    finally:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f"DROP FUNCTION {name} CASCADE")


@contextlib.contextmanager
def commits_that_do_not_return(server: PostgresServer) -> Iterator[None]:
    """Commits become durable but do not return: PostgreSQL waits for a replica that does not exist.

    If *server* is killed in this state, it has the commits after its restart and does not wait any more.
    """
    with server.connection() as connection:
        connection.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
        connection.execute("SELECT pg_reload_conf()")
        wait_until(lambda: _value(server, "SHOW synchronous_standby_names") == "nobody", what="the new setting")
        connection.execute("ALTER SYSTEM RESET synchronous_standby_names")  # takes effect at the next start or reload
    threading.Thread(target=_probe, args=(server.url,), daemon=True).start()
    wait_until(lambda: _waiting(server, _PROBE), what="a server whose commits do not return")
    try:
        yield
    finally:
        server.wait_ready()
        with server.connection() as connection:
            connection.execute("SELECT pg_reload_conf()")


def _probe(url: str) -> None:
    """Commit until a commit does not return."""
    with contextlib.suppress(psycopg.Error), psycopg.connect(url, application_name=_PROBE, autocommit=True) as probe:
        for _ in range(10_000):
            probe.execute("SELECT pg_logical_emit_message(true, 'test', 'probe')")


def wait_committed(server: PostgresServer) -> None:
    """Wait until a commit of dtx does not return."""
    wait_until(lambda: _waiting(server, "dtx writer%"), what="a commit that does not return")


def waits(server: PostgresServer, application: str) -> bool:
    """Whether a session with an application name like *application* (a LIKE pattern) waits for a lock."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name LIKE %s"
    return bool(_value(server, query, application))


def _waiting(server: PostgresServer, application: str) -> bool:
    query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND application_name LIKE %s"
    return bool(_value(server, query, application))


def _value(server: PostgresServer, query: LiteralString, *parameters: str) -> object:
    with server.connection() as connection:
        row = connection.execute(query, parameters).fetchone()
    return None if row is None else row[0]
