"""The log of decisions in PostgreSQL: for processes of one node on several machines, or without a disk of their own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from hashlib import sha256
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict

from dtx.client.tm.errors import LogFailed
from dtx.client.tm.relational import RelationalLog, Statements, twice

_SCHEMA: Final = """
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


class _Open:
    """An open transaction. What gives no rows is on its way until something does, or until the transaction ends."""

    def __init__(self, database: psycopg.Connection, pipeline: psycopg.Pipeline) -> None:
        self._database = database
        self._pipeline = pipeline

    def rows(self, statement: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Run a query."""
        return self._database.execute(statement.encode(), values).fetchall()

    def change(self, statement: str, values: Sequence[object] = ()) -> int:
        """Run a statement."""
        cursor = self._database.execute(statement.encode(), values)
        self._pipeline.sync()
        return cursor.rowcount

    def each(self, statement: str, values: Sequence[Sequence[object]]) -> None:
        """Run it with each row of values."""
        if values:
            with self._database.cursor() as cursor:
                cursor.executemany(statement.encode(), values)


class PostgresLog(RelationalLog):
    """A log in the schema ``dtx_tm`` of a PostgreSQL database, over one connection that is made again when it is lost.

    Not through a pooler that shares sessions between transactions (PgBouncer's transaction mode): a lock of the session
    shows that the process lives.

    Args:
        url: of the database; the schema is made where there is none.

    Raises:
        LogFailed: it cannot be used, or the server does not write to disk what it commits (``fsync=off``).
    """

    tables = "dtx_tm."
    placeholder = "%s"

    def __init__(self, url: str) -> None:
        super().__init__()
        try:
            conninfo_to_dict(url)
        except psycopg.Error:  # which repeats the password, if that is what is wrong
            raise LogFailed("the log's URL is not one that PostgreSQL's client library understands") from None
        self._url = url
        self._database: psycopg.Connection | None = None
        self._claims: set[int] = set()
        with self._session() as database:
            # looked at first: who may use the schema may not be allowed to make it
            found = database.execute("SELECT to_regclass('dtx_tm.heuristic')").fetchone()
            if found == (None,):
                database.execute(_SCHEMA)

    def __repr__(self) -> str:
        return "PostgresLog(…)"  # the URL has a password in it

    def _connect(self) -> psycopg.Connection:
        if self._database is not None and not self._database.closed:
            return self._database
        database = psycopg.connect(self._url, application_name="dtx tm", connect_timeout=10)
        try:
            database.autocommit = True
            # a server's or a role's defaults may be otherwise
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
        """The connection in a transaction; after any error it is not used again."""
        with self._writing:
            try:
                database = self._connect()
                with database.transaction():
                    yield database
            except psycopg.Error as error:
                self._drop()
                raise LogFailed(f"log of decisions in PostgreSQL: {error}") from error
            except BaseException:
                self._drop()
                raise

    @contextmanager
    def transaction(self) -> Iterator[Statements]:
        """One transaction: one flush of PostgreSQL's log, and as few round trips as its queries leave."""
        with self._session() as database, database.pipeline() as pipeline:
            yield _Open(database, pipeline)

    def lost(self, error: LogFailed) -> bool:
        """Whether the server ended the connection, or could not be reached."""
        return isinstance(error.__cause__, psycopg.OperationalError)

    def when(self, at: datetime) -> datetime:
        """As it is."""
        return at

    def time(self, found: datetime) -> datetime:
        """As it is."""
        return found

    def _drop(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            with suppress(psycopg.Error):
                database.close()

    def claim(self, node: str, process: str) -> None:
        """Hold an advisory lock of the session."""
        key = _key(node, process)
        self._claims.add(key)
        with self._session() as database:
            database.execute("SELECT pg_try_advisory_lock(%s)", (key,))

    @twice
    def alive(self, node: str, process: str) -> bool:
        """Whether somebody holds that lock."""
        key = _key(node, process)
        if key in self._claims:
            return True
        with self._session() as database:
            return database.execute("SELECT pg_try_advisory_xact_lock(%s)", (key,)).fetchone() == (False,)

    def close(self) -> None:
        """Write what waits, and let go of the claim."""
        try:
            self.flush()
        finally:
            self._claims.clear()
            with self._writing:
                self._drop()


def _key(node: str, process: str) -> int:
    return int.from_bytes(sha256(f"dtx.tm/{node}/{process}".encode()).digest()[:8], "big", signed=True)
