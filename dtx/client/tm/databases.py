"""Logs of decisions in a SQLite file, for processes of one machine, and in PostgreSQL, for several machines."""

import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict

from dtx.client.tm.decisions import DecisionLog, Statements, repeat_once
from dtx.client.tm.errors import LogFailed

_BUSY: Final = 30.0
"""Seconds to wait for the lock of another process that writes; each holds it for one fsync."""
_AGAIN: Final = 0.01
"""Seconds until the next try where SQLite itself does not wait."""
_SQLITE: Final = """
CREATE TABLE IF NOT EXISTS decision (
    gtrid      BLOB PRIMARY KEY,
    format_id  INTEGER NOT NULL,
    node       TEXT NOT NULL,
    decision   TEXT NOT NULL CHECK (decision IN ('commit', 'rollback')),
    at         TEXT NOT NULL,
    finished   TEXT,
    resources  TEXT NOT NULL,
    recoveries INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS decision_unfinished ON decision (node) WHERE finished IS NULL;
CREATE TABLE IF NOT EXISTS heuristic (
    gtrid     BLOB NOT NULL,
    resource  TEXT NOT NULL,
    outcome   TEXT NOT NULL CHECK (outcome IN ('committed', 'rolled-back', 'mixed', 'hazard')),
    decision  TEXT NOT NULL CHECK (decision IN ('commit', 'rollback')),
    reason    TEXT NOT NULL,
    at        TEXT NOT NULL,
    forgotten TEXT,
    PRIMARY KEY (gtrid, resource)
) WITHOUT ROWID;
"""
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


def open_log(where: str | Path | DecisionLog) -> DecisionLog:
    """Open a log.

    Args:
        where: ``postgresql://…``, ``sqlite:///path`` or the path of a SQLite file; or a log, which is returned.

    Raises:
        LogFailed: it cannot be opened.
    """
    if isinstance(where, DecisionLog):
        return where
    text = str(where)
    if text.startswith(("postgresql://", "postgres://")):
        return PostgresLog(text)
    return SqliteLog(Path(text.removeprefix("sqlite://")) if text.startswith("sqlite:///") else Path(text))


class SqliteLog(DecisionLog):
    """A log in a SQLite file, with ``synchronous=FULL``: a decision is on disk before any branch gets it.

    The file must be on a local disk: SQLite's locks do not work over network file systems. Beside it, a file
    ``….alive`` per living process shows the other processes which processes are alive.

    Args:
        path: path of the file, which is created if it is missing. Its directory must exist.

    Raises:
        LogFailed: the file cannot be opened, or is not such a log.
    """

    failure: ClassVar[type[Exception]] = sqlite3.Error

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        super().__init__(str(self._path))
        self._claims: dict[Path, int] = {}
        with self.transaction():
            pass

    def __repr__(self) -> str:
        return f"SqliteLog({str(self._path)!r})"

    def _connect(self) -> Any:
        if self._database is not None:
            return self._database
        if not self._path.parent.is_dir():
            raise LogFailed(f"the directory of the log of decisions does not exist: {self._path.parent}")
        new = not self._path.exists()
        database = sqlite3.connect(self._path, timeout=_BUSY, isolation_level=None, check_same_thread=False)
        try:
            self._write_ahead(database)
            database.execute("PRAGMA synchronous=FULL")
            if database.execute("PRAGMA synchronous").fetchone() != (2,):
                raise LogFailed(f"SQLite does not accept synchronous=FULL for {self._path}")
            database.executescript(_SQLITE)
        except BaseException:
            database.close()
            raise
        if new:  # the directory entry of the file must be durable, too
            directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        self._database = database
        return database

    def _write_ahead(self, database: sqlite3.Connection) -> None:
        """Choose the journal mode. SQLite does not wait here, though another process may open or close the file."""
        until = time.monotonic() + _BUSY
        while True:
            try:
                database.execute("PRAGMA journal_mode=WAL").fetchone()
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= until:
                    raise
                time.sleep(_AGAIN)
            else:
                return

    @contextmanager
    def transaction(self) -> Iterator[Statements]:
        """A transaction, which costs one fsync."""
        with self._guarded() as database:
            database.execute("BEGIN IMMEDIATE")
            yield Statements(database, tables="", placeholder="?")
            database.execute("COMMIT")

    def when(self, at: datetime) -> str:
        """Return *at* as ISO 8601."""
        return at.isoformat(timespec="microseconds")

    def claim(self, node: str, process: str) -> None:
        """Lock a file with the name of the process. The system releases the lock when the process ends."""
        path = self._claim_path(node, process)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise LogFailed(f"cannot lock {path}: {error.strerror}") from error
        self._claims[path] = descriptor

    def alive(self, node: str, process: str) -> bool:
        """Return whether a process holds that lock."""
        path = self._claim_path(node, process)
        if path in self._claims:
            return True
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise LogFailed(f"cannot open {path}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        else:
            path.unlink(missing_ok=True)  # names of processes are random, so no other process uses this one
            return False
        finally:
            os.close(descriptor)

    def _claim_path(self, node: str, process: str) -> Path:
        return self._path.with_name(f"{self._path.name}-{node}.{process}.alive")

    def close(self) -> None:
        """Write the waiting entries, and release the claims."""
        try:
            self.flush()
        finally:
            with self._writing:
                self._drop()
            claims, self._claims = self._claims, {}
            for path, descriptor in claims.items():
                path.unlink(missing_ok=True)
                os.close(descriptor)


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
