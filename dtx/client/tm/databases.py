"""Opens logs of decisions. The one in a SQLite file is here; it is for processes of one machine."""

import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Final

from dtx.client.tm.decisions import DecisionLog, Statements
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
        try:
            from dtx.client.tm.postgres_log import PostgresLog
        except ImportError as error:
            raise LogFailed(f"a log in PostgreSQL needs psycopg ({error}): pip install 'psycopg[binary]'") from error
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
