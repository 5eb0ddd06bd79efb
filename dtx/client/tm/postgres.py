"""The log of decisions in PostgreSQL: for processes of one node on several machines, or without a disk of their own."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from functools import wraps
from hashlib import sha256
from typing import Any, Final, ParamSpec, TypeVar

import psycopg

from dtx.client.tm.decisions import Batch, Decision, DecisionLog, DecisionRow, now
from dtx.client.tm.errors import HeuristicReport, LogFailed
from dtx.xa.codes import Heuristic

_P = ParamSpec("_P")
_R = TypeVar("_R")
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
_COLUMNS: Final = "gtrid, format_id, node, decision, at, finished, resources, recoveries"


def _twice(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Once more on a new connection where the connection was lost: PostgreSQL may have restarted since the last call.

    Nothing here does harm when it is done twice: a decision that came in the first time is found, and stands.
    """

    @wraps(method)
    def retried(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(*args, **kwargs)
        except LogFailed as error:
            if not isinstance(error.__cause__, psycopg.OperationalError):
                raise
        return method(*args, **kwargs)

    return retried


class PostgresLog(DecisionLog):
    """A log in the schema ``dtx_tm`` of a PostgreSQL database, over one connection that is made again when it is lost.

    Not through a pooler that shares sessions between transactions (PgBouncer's transaction mode): a lock of the session
    shows that the process lives.

    Args:
        url: of the database; the schema is made where there is none.

    Raises:
        LogFailed: it cannot be used, or the server does not write to disk what it commits (``fsync=off``).
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._database: psycopg.Connection | None = None
        self._claims: set[int] = set()
        with self._transaction() as database:
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
    def _transaction(self) -> Iterator[psycopg.Connection]:
        """One transaction; after any error the connection is not used again."""
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

    def _drop(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            with suppress(psycopg.Error):
                database.close()

    @_twice
    def write(self, batch: Batch) -> None:
        """Write *batch*, with one flush of PostgreSQL's log."""
        # In the order of their keys, so that two processes never wait for each other.
        entries = sorted(batch.entries, key=lambda entry: entry.row.gtrid)
        with self._transaction() as database, database.pipeline(), database.cursor() as cursor:
            for entry in entries:
                row = entry.row
                cursor.execute(
                    "INSERT INTO dtx_tm.decision (gtrid, format_id, node, decision, at, resources)"
                    " VALUES (%s, %s, %s, %s, %s, %s) ON CONFLICT (gtrid) DO NOTHING",
                    (row.gtrid, row.format_id, row.node, row.decision.value, row.at, json.dumps(row.resources)),
                )
            cursor.executemany(
                "UPDATE dtx_tm.decision SET finished = %s WHERE gtrid = %s AND finished IS NULL",
                [(at, gtrid) for gtrid, at in sorted(batch.finished)],
            )
            # A statement of its own: it sees a row of somebody else that the insert had to wait for.
            cursor.execute(
                "SELECT gtrid, decision FROM dtx_tm.decision WHERE gtrid = ANY(%s)",
                ([entry.row.gtrid for entry in entries],),
            )
            stands = {bytes(gtrid): Decision(decision) for gtrid, decision in cursor.fetchall()}
        for entry in entries:  # only now is it durable
            entry.stands = stands[entry.row.gtrid]

    @_twice
    def read(self, gtrid: bytes) -> DecisionRow | None:
        """The decision about a transaction."""
        with self._transaction() as database:
            found = database.execute(
                f"SELECT {_COLUMNS} FROM dtx_tm.decision WHERE gtrid = %s",  # noqa: S608 - our own names
                (gtrid,),
            ).fetchone()
        return None if found is None else _row(found)

    @_twice
    def unfinished(self, node: str) -> list[DecisionRow]:
        """Decisions to commit that are not finished."""
        query = (
            f"SELECT {_COLUMNS} FROM dtx_tm.decision"  # noqa: S608 - our own names
            " WHERE node = %s AND finished IS NULL AND decision = 'commit' ORDER BY at"
        )
        with self._transaction() as database:
            return [_row(found) for found in database.execute(query, (node,)).fetchall()]

    @_twice
    def take_up(self, gtrid: bytes) -> None:
        """Count that recovery completes it."""
        with self._transaction() as database:
            database.execute("UPDATE dtx_tm.decision SET recoveries = recoveries + 1 WHERE gtrid = %s", (gtrid,))

    @_twice
    def prune(self, older: timedelta) -> int:
        """Remove what was finished so long ago."""
        before = now() - older
        with self._transaction() as database:
            return database.execute(
                "DELETE FROM dtx_tm.decision WHERE finished < %s OR (decision = 'rollback' AND at < %s)",
                (before, before),
            ).rowcount

    @_twice
    def record(self, report: HeuristicReport) -> None:
        """Make a heuristic outcome durable."""
        values = (report.gtrid, report.resource, report.outcome.value, report.decision, report.reason, now())
        with self._transaction() as database:
            database.execute(
                "INSERT INTO dtx_tm.heuristic (gtrid, resource, outcome, decision, reason, at)"
                " VALUES (%s, %s, %s, %s, %s, %s) ON CONFLICT (gtrid, resource) DO NOTHING",
                values,
            )

    @_twice
    def forgotten(self, gtrid: bytes, resource: str) -> None:
        """The resource has forgotten it."""
        with self._transaction() as database:
            database.execute(
                "UPDATE dtx_tm.heuristic SET forgotten = %s WHERE gtrid = %s AND resource = %s AND forgotten IS NULL",
                (now(), gtrid, resource),
            )

    @_twice
    def heuristics(self, *, unforgotten: bool = False) -> list[tuple[HeuristicReport, datetime, datetime | None]]:
        """Reports, with when they were recorded and forgotten."""
        query = "SELECT gtrid, resource, outcome, decision, reason, at, forgotten FROM dtx_tm.heuristic"
        query += " WHERE forgotten IS NULL ORDER BY at" if unforgotten else " ORDER BY at"
        with self._transaction() as database:
            return [(_report(found[:5]), found[5], found[6]) for found in database.execute(query).fetchall()]

    def claim(self, node: str, process: str) -> None:
        """Hold an advisory lock of the session."""
        key = _key(node, process)
        self._claims.add(key)
        with self._transaction() as database:
            database.execute("SELECT pg_try_advisory_lock(%s)", (key,))

    @_twice
    def alive(self, node: str, process: str) -> bool:
        """Whether somebody holds that lock."""
        key = _key(node, process)
        if key in self._claims:
            return True
        with self._transaction() as database:
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


def _row(found: Any) -> DecisionRow:
    gtrid, format_id, node, decision, at, finished, resources, recoveries = found
    return DecisionRow(
        gtrid=bytes(gtrid),
        format_id=format_id,
        node=node,
        decision=Decision(decision),
        at=at,
        finished=finished,
        resources=tuple(resources),
        recoveries=recoveries,
    )


def _report(found: Any) -> HeuristicReport:
    gtrid, resource, outcome, decision, reason = found
    return HeuristicReport(
        gtrid=bytes(gtrid), resource=resource, outcome=Heuristic(outcome), decision=decision, reason=reason
    )
