"""The log of decisions in a SQLite file: for processes of one machine."""

import fcntl
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from dtx.client.tm.errors import LogFailed
from dtx.client.tm.relational import RelationalLog, Statements

_BUSY: Final = 30.0
"""Seconds to wait for another process that writes: each holds the file for one fsync."""
_SCHEMA: Final = """
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


class _Open:
    """An open transaction."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def rows(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a query."""
        return self._database.execute(statement, values).fetchall()

    def change(self, statement: str, values: Sequence[Any] = ()) -> int:
        """Run a statement."""
        return self._database.execute(statement, values).rowcount

    def each(self, statement: str, values: Sequence[Sequence[Any]]) -> None:
        """Run it with each row of values."""
        self._database.executemany(statement, values)


class SqliteLog(RelationalLog):
    """A log in a SQLite file, with ``synchronous=FULL``: a decision is on the disk before a branch is told.

    The file must be on a local disk: SQLite's locks do not work over network file systems. Beside it, a file
    ``….alive`` per living process shows the others who lives.

    Args:
        path: of the file; made where there is none. Its directory must be there.

    Raises:
        LogFailed: it cannot be opened, or is no such log.
    """

    tables = ""
    placeholder = "?"

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path.absolute()
        self._database: sqlite3.Connection | None = None
        self._claims: dict[Path, int] = {}
        with self.transaction():
            pass

    def __repr__(self) -> str:
        return f"SqliteLog({str(self._path)!r})"

    def _connect(self) -> sqlite3.Connection:
        if self._database is not None:
            return self._database
        if not self._path.parent.is_dir():
            raise LogFailed(f"the directory of the log of decisions is not there: {self._path.parent}")
        new = not self._path.exists()
        database = sqlite3.connect(self._path, timeout=_BUSY, isolation_level=None, check_same_thread=False)
        try:
            database.execute("PRAGMA journal_mode=WAL").fetchone()
            database.execute("PRAGMA synchronous=FULL")
            if database.execute("PRAGMA synchronous").fetchone() != (2,):
                raise LogFailed(f"SQLite does not take synchronous=FULL for {self._path}")
            database.executescript(_SCHEMA)
        except BaseException:
            database.close()
            raise
        if new:  # the file's name must survive as its content does
            directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        self._database = database
        return database

    @contextmanager
    def transaction(self) -> Iterator[Statements]:
        """One transaction: one fsync."""
        with self._writing:
            try:
                database = self._connect()
                database.execute("BEGIN IMMEDIATE")
                yield _Open(database)
                database.execute("COMMIT")
            except sqlite3.Error as error:
                self._drop()
                raise LogFailed(f"log of decisions {self._path}: {error}") from error
            except BaseException:
                self._drop()
                raise

    def lost(self, error: LogFailed) -> bool:  # noqa: ARG002 - a file is no connection that is lost
        """Never."""
        return False

    def when(self, at: datetime) -> str:
        """ISO 8601."""
        return at.isoformat(timespec="microseconds")

    def time(self, found: str) -> datetime:
        """The same backwards."""
        return datetime.fromisoformat(found)

    def _drop(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            with suppress(sqlite3.Error):
                database.close()  # rolls back what is open

    def claim(self, node: str, process: str) -> None:
        """Hold a lock on a file that has the name of the process; the system lets go of it when the process ends."""
        path = self._claim_path(node, process)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise LogFailed(f"cannot lock {path}: {error.strerror}") from error
        self._claims[path] = descriptor

    def alive(self, node: str, process: str) -> bool:
        """Whether somebody holds that lock."""
        path = self._claim_path(node, process)
        if path in self._claims:
            return True
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise LogFailed(f"cannot look at {path}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        else:
            path.unlink(missing_ok=True)  # no process takes a dead one's name
            return False
        finally:
            os.close(descriptor)

    def _claim_path(self, node: str, process: str) -> Path:
        return self._path.with_name(f"{self._path.name}-{node}.{process}.alive")

    def close(self) -> None:
        """Write what waits, and let go of the claim."""
        try:
            self.flush()
        finally:
            with self._writing:
                self._drop()
            claims, self._claims = self._claims, {}
            for path, descriptor in claims.items():
                path.unlink(missing_ok=True)
                os.close(descriptor)
