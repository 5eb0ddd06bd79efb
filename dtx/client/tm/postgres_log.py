"""The log of decisions in PostgreSQL, for several machines."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from hashlib import sha256
from typing import Any, ClassVar, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict

from dtx.client.tm.decisions import DecisionLog, Statements, repeat_once
from dtx.client.tm.errors import LogFailed

_POSTGRES: Final = """
SELECT pg_advisory_xact_lock(7240001);
CREATE SCHEMA IF NOT EXISTS dtx_tm;
CREATE TABLE IF NOT EXISTS dtx_tm.decision (
    gtrid      bytea PRIMARY KEY,
    format_id  bigint NOT NULL,
    node       text NOT NULL,
    decision   text NOT NULL CHECK (decision IN ('commit', 'rollback')),
    at         timestamptz NOT NULL,
    finished   timestamptz,
    resources  jsonb NOT NULL,
    recoveries integer NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS decision_unfinished ON dtx_tm.decision (node) WHERE finished IS NULL;
CREATE TABLE IF NOT EXISTS dtx_tm.heuristic (
    gtrid     bytea NOT NULL,
    resource  text NOT NULL,
    outcome   text NOT NULL CHECK (outcome IN ('committed', 'rolled-back', 'mixed', 'hazard')),
    decision  text NOT NULL CHECK (decision IN ('commit', 'rollback')),
    reason    text NOT NULL,
    at        timestamptz NOT NULL,
    forgotten timestamptz,
    PRIMARY KEY (gtrid, resource)
);
"""


class PostgresLog(DecisionLog):
    """A log in the schema ``dtx_tm`` of a PostgreSQL database. It uses one connection, and replaces a lost one.

    Do not use it through a pooler that shares sessions between transactions (PgBouncer's transaction mode): a lock of
    the session shows that the process is alive.

    Args:
        url: URL of the database. The schema is created if it is missing.

    Raises:
        LogFailed: the database cannot be used, or its commits are not durable (``fsync=off``).
    """

    failure: ClassVar[type[Exception]] = psycopg.Error

    def __init__(self, url: str) -> None:
        super().__init__("in PostgreSQL")
        try:
            conninfo_to_dict(url)
        except psycopg.Error:  # its text may have the password
            raise LogFailed("the URL of the log is not one that PostgreSQL's client library can parse") from None
        self._url = url
        self._claims: set[int] = set()
        with self._session() as database:
            # checked first: a user with access to the schema may not be allowed to create it
            found = database.execute("SELECT to_regclass('dtx_tm.heuristic')").fetchone()
            if found == (None,):
                database.execute(_POSTGRES)

    def __repr__(self) -> str:
        return "PostgresLog(…)"  # the URL may have a password

    def _connect(self) -> Any:
        if self._database is not None and not self._database.closed:
            return self._database
        database = psycopg.connect(self._url, application_name="dtx tm", connect_timeout=10)
        try:
            database.autocommit = True
            # the defaults of the server or role may differ
            database.execute("SET synchronous_commit = on; SET default_transaction_isolation = 'read committed'")
            found = database.execute("SHOW fsync").fetchone()
            if found != ("on",):
                raise LogFailed("PostgreSQL runs with fsync=off: decisions would not survive a crash of its machine")
            for key in self._claims:
                database.execute("SELECT pg_try_advisory_lock(%s)", (key,))
        except BaseException:
            database.close()
            raise
        self._database = database
        return database

    @contextmanager
    def _session(self) -> Iterator[psycopg.Connection]:
        """Return the connection, in a transaction."""
        with self._guarded() as database, database.transaction():
            yield database

    @contextmanager
    def transaction(self) -> Iterator[Statements]:
        """A transaction. It costs one flush of PostgreSQL's log; statements without rows need no round trip."""
        with self._session() as database, database.pipeline() as pipeline:
            yield Statements(database, tables="dtx_tm.", placeholder="%s", sync=pipeline.sync)

    def lost(self, error: LogFailed) -> bool:
        """Return whether the server has closed the connection, or could not be reached."""
        return isinstance(error.__cause__, psycopg.OperationalError)

    def when(self, at: datetime) -> datetime:
        """Return *at* unchanged."""
        return at

    def claim(self, node: str, process: str) -> None:
        """Take an advisory lock of the session."""
        key = _key(node, process)
        self._claims.add(key)
        with self._session() as database:
            database.execute("SELECT pg_try_advisory_lock(%s)", (key,))

    @repeat_once
    def alive(self, node: str, process: str) -> bool:
        """Return whether a process holds that lock."""
        key = _key(node, process)
        if key in self._claims:
            return True
        with self._session() as database:
            return database.execute("SELECT pg_try_advisory_xact_lock(%s)", (key,)).fetchone() == (False,)

    def close(self) -> None:
        """Write the waiting entries, and release the claims."""
        try:
            self.flush()
        finally:
            self._claims.clear()
            with self._writing:
                self._drop()


def _key(node: str, process: str) -> int:
    return int.from_bytes(sha256(f"dtx.tm/{node}/{process}".encode()).digest()[:8], "big", signed=True)
