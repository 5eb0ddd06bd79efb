"""The log of decisions in a SQLite file: for processes of one machine."""

import fcntl
import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

from dtx.client.tm.decisions import Batch, Decision, DecisionLog, DecisionRow, now
from dtx.client.tm.errors import HeuristicReport, LogFailed
from dtx.xa.codes import Heuristic

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
_COLUMNS: Final = "gtrid, format_id, node, decision, at, finished, resources, recoveries"


class SqliteLog(DecisionLog):
    """A log in a SQLite file, with ``synchronous=FULL``: a decision is on the disk before a branch is told.

    The file must be on a local disk: SQLite's locks do not work over network file systems. Beside it, a file
    ``….alive`` per living process shows the others who lives.

    Args:
        path: of the file; made where there is none. Its directory must be there.

    Raises:
        LogFailed: it cannot be opened, or is no such log.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path.absolute()
        self._database: sqlite3.Connection | None = None
        self._claims: dict[Path, int] = {}
        with self._transaction():
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
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """One transaction; after any error the connection is not used again."""
        with self._writing:
            try:
                database = self._connect()
                database.execute("BEGIN IMMEDIATE")
                yield database
                database.execute("COMMIT")
            except sqlite3.Error as error:
                self._drop()
                raise LogFailed(f"log of decisions {self._path}: {error}") from error
            except BaseException:
                self._drop()
                raise

    def _drop(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            with suppress(sqlite3.Error):
                database.close()  # rolls back what is open

    def write(self, batch: Batch) -> None:
        """Write *batch*, with one fsync."""
        with self._transaction() as database:
            for entry in batch.entries:
                row = entry.row
                database.execute(
                    "INSERT INTO decision (gtrid, format_id, node, decision, at, resources) VALUES (?, ?, ?, ?, ?, ?)"
                    " ON CONFLICT (gtrid) DO NOTHING",
                    (row.gtrid, row.format_id, row.node, row.decision.value, _text(row.at), json.dumps(row.resources)),
                )
                found = database.execute("SELECT decision FROM decision WHERE gtrid = ?", (row.gtrid,)).fetchone()
                entry.stands = Decision(found[0])
            database.executemany(
                "UPDATE decision SET finished = ? WHERE gtrid = ? AND finished IS NULL",
                [(_text(at), gtrid) for gtrid, at in batch.finished],
            )

    def read(self, gtrid: bytes) -> DecisionRow | None:
        """The decision about a transaction."""
        with self._transaction() as database:
            found = database.execute(f"SELECT {_COLUMNS} FROM decision WHERE gtrid = ?", (gtrid,)).fetchone()  # noqa: S608
        return None if found is None else _row(found)

    def unfinished(self, node: str) -> list[DecisionRow]:
        """Decisions to commit that are not finished."""
        query = (
            f"SELECT {_COLUMNS} FROM decision"  # noqa: S608 - our own names
            " WHERE node = ? AND finished IS NULL AND decision = 'commit' ORDER BY at"
        )
        with self._transaction() as database:
            return [_row(found) for found in database.execute(query, (node,))]

    def take_up(self, gtrid: bytes) -> None:
        """Count that recovery completes it."""
        with self._transaction() as database:
            database.execute("UPDATE decision SET recoveries = recoveries + 1 WHERE gtrid = ?", (gtrid,))

    def prune(self, older: timedelta) -> int:
        """Remove what was finished so long ago."""
        before = _text(now() - older)
        with self._transaction() as database:
            return database.execute(
                "DELETE FROM decision WHERE finished < ? OR (decision = 'rollback' AND at < ?)", (before, before)
            ).rowcount

    def record(self, report: HeuristicReport) -> None:
        """Make a heuristic outcome durable."""
        values = (report.gtrid, report.resource, report.outcome.value, report.decision, report.reason, _text(now()))
        with self._transaction() as database:
            database.execute(
                "INSERT INTO heuristic (gtrid, resource, outcome, decision, reason, at) VALUES (?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (gtrid, resource) DO NOTHING",
                values,
            )

    def forgotten(self, gtrid: bytes, resource: str) -> None:
        """The resource has forgotten it."""
        with self._transaction() as database:
            database.execute(
                "UPDATE heuristic SET forgotten = ? WHERE gtrid = ? AND resource = ? AND forgotten IS NULL",
                (_text(now()), gtrid, resource),
            )

    def heuristics(self, *, unforgotten: bool = False) -> list[tuple[HeuristicReport, datetime, datetime | None]]:
        """Reports, with when they were recorded and forgotten."""
        query = "SELECT gtrid, resource, outcome, decision, reason, at, forgotten FROM heuristic"
        query += " WHERE forgotten IS NULL ORDER BY at" if unforgotten else " ORDER BY at"
        with self._transaction() as database:
            return [(_report(found[:5]), _time(found[5]), _time_or_none(found[6])) for found in database.execute(query)]

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


def _row(found: Any) -> DecisionRow:
    gtrid, format_id, node, decision, at, finished, resources, recoveries = found
    return DecisionRow(
        gtrid=bytes(gtrid),
        format_id=format_id,
        node=node,
        decision=Decision(decision),
        at=_time(at),
        finished=_time_or_none(finished),
        resources=tuple(json.loads(resources)),
        recoveries=recoveries,
    )


def _report(found: Any) -> HeuristicReport:
    gtrid, resource, outcome, decision, reason = found
    return HeuristicReport(
        gtrid=bytes(gtrid), resource=resource, outcome=Heuristic(outcome), decision=decision, reason=reason
    )


def _text(at: datetime) -> str:
    return at.isoformat(timespec="microseconds")


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)


def _time_or_none(text: str | None) -> datetime | None:
    return None if text is None else _time(text)
