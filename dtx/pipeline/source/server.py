"""A connection to one database by psycopg, with limits of time, for its identity, its snapshot and short queries.

No transaction stays open, which would stop PostgreSQL's vacuum: lines of the journal name their transactions, and the
numbers of a snapshot select the lines. Errors name the database, and never its password.
"""

import functools
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, NamedTuple

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from dtx.config.values import redact
from dtx.pipeline.quarantine import Quarantined, first_line
from dtx.pipeline.source.snapshot import SourceSnapshot

_CONNECTION: Final = ("08", "53", "57P")
"""SQLSTATE classes of lost connections, of a server without free resources, and of one that is starting or stopping."""
_RETRIED: Final = frozenset({"40001", "40P01", "55P03", "25006"})
"""Serialization failure (also a query that a standby has cancelled), deadlock, lock timeout, read-only transaction."""
_MOST_LETTERS: Final = 500
_KEEPALIVE: Final = {"keepalives": 1, "keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}
_FLUSH_SECONDS: Final = 2.0
_FLUSH_PAUSE: Final = 0.02
_WHAT: Final = """
SELECT (SELECT system_identifier::text FROM pg_control_system()),
    CASE WHEN pg_is_in_recovery() THEN (SELECT timeline_id FROM pg_control_checkpoint())
         ELSE ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::bigint END,
    (SELECT oid::bigint FROM pg_database WHERE datname = current_database()),
    to_regclass('dtx.journal') IS NOT NULL,
    to_regclass('dtx.alembic_version') IS NOT NULL
"""
# A standby's snapshots do not list active transactions: only those below xmin are known to have ended.
_SNAPSHOT: Final = """
SELECT CASE WHEN pg_is_in_recovery() THEN pg_snapshot_xmin(s) || ':' || pg_snapshot_xmin(s) || ':' ELSE s::text END,
    CASE WHEN pg_is_in_recovery() THEN NULL ELSE pg_current_wal_insert_lsn()::text END
FROM (SELECT pg_current_snapshot() AS s) now
"""
AT_ONCE: Final = 16
"""Databases that are read at the same time: one that is away must not delay hundreds of others."""


class SourceError(Exception):
    """A database, or a part of it, could not be read."""


class SourceAway(SourceError):
    """The database does not answer now; a later attempt may succeed."""


def sentence(error: BaseException) -> str:
    """Return the first line of a driver's error, without passwords, of at most 500 characters."""
    text = redact(first_line(error).strip().rstrip("."))
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}…"


def without_name(name: str, error: SourceError | str) -> str:
    """Return the message of an error about the database *name*, without the name that it begins with."""
    return str(error).removeprefix(f"{name}: ")


def passes(sqlstate: str | None) -> bool:
    """Return whether an error with this SQLSTATE may pass; ``None``: the connection was lost."""
    return sqlstate is None or sqlstate in _RETRIED or sqlstate.startswith(_CONNECTION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Limits of time for a database.

    Args:
        connect: seconds for connecting.
        statement: seconds for the statement of one part, as the server counts them; 0: no limit.
        stall: seconds without a row.
        retries: how often the read of a part starts again before its first row; after that Spark repeats the task.
    """

    connect: int = 10
    statement: int = 1_800
    stall: int = 120
    retries: int = 3


class SourceIdentity(NamedTuple):
    """The identity of a database and its history; a snapshot has no meaning in another one."""

    system: str
    """Identifier of the PostgreSQL cluster, and the oid of the database; a restored dump has another one."""
    timeline: int
    """It changes with a fail-over and a recovery to a point in time."""


def conninfo(url: str, waits: Waits, *, statement: int) -> str:
    """Return the connection string for libpq; *statement* is the limit for a statement in seconds, 0 for no limit."""
    try:
        given = conninfo_to_dict(url)
        options = (
            f"{given.get('options') or ''} -c statement_timeout={statement * 1000} -c default_transaction_read_only=on "
            "-c timezone=UTC -c client_encoding=UTF8 -c bytea_output=hex"
        )
        ours: dict[str, Any] = {
            "connect_timeout": given.get("connect_timeout", waits.connect),
            "application_name": given.get("application_name", "dtx pipeline"),
            "options": options.strip(),
            **{name: given.get(name, value) for name, value in _KEEPALIVE.items()},
        }
        return make_conninfo(url, **ours)
    except psycopg.Error as error:
        raise SourceError(f"not the url of a database: {sentence(error)}") from None


class Server:
    """A connection to one database for short queries; its errors are :class:`SourceError` and :class:`SourceAway`."""

    def __init__(self, name: str, url: str, waits: Waits) -> None:
        self.name = name
        self.standby = False
        """Whether the last snapshot was that of a standby, which may lag behind lines that were read elsewhere."""
        with explained(name):
            self.connection = psycopg.connect(conninfo(url, waits, statement=waits.stall), autocommit=True)

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        """Return the rows of *statement*, which must contain only trusted names and literals."""
        with explained(self.name):
            return self.connection.execute(statement).fetchall()

    def identity(self) -> SourceIdentity:
        """Return the identity of the database; refuse it if it has no journal, or one of a newer dtx."""
        system, timeline, oid, journal, versioned = self.rows(_WHAT)[0]
        if not journal:
            raise SourceError(f"{self.name}: there is no journal of dtx here, or no privilege to use its schema")
        if versioned:
            found = self.rows("SELECT max(version_num) FROM dtx.alembic_version")[0][0]
            newest = _newest_revision()
            if found is not None and str(found) > newest:
                raise SourceError(
                    f"{self.name}: the journal is that of a newer dtx (revision {found}, this dtx reads up to "
                    f"{newest}): update this dtx first"
                )
        return SourceIdentity(system=f"{system}/{oid}", timeline=int(timeline))

    def snapshot(self) -> SourceSnapshot:
        """Return the set of ended transactions, which a crash of the server cannot change.

        After a crash, PostgreSQL may give numbers again to new transactions if the WAL records of the earlier ones were
        not on disk. So this waits until all WAL records before the snapshot are on disk.
        """
        text, recorded = self.rows(_SNAPSHOT)[0]
        self.standby = recorded is None
        if recorded is not None:
            ends = time.monotonic() + _FLUSH_SECONDS
            while not self.rows(f"SELECT pg_current_wal_flush_lsn() >= '{recorded}'::pg_lsn")[0][0]:
                if time.monotonic() > ends:
                    self._flush()
                    break
                time.sleep(_FLUSH_PAUSE)
        return SourceSnapshot.parse(text)

    def _flush(self) -> None:
        """Force the WAL to disk with a commit of a logical message, which changes no table."""
        with explained(self.name), self.connection.transaction():
            self.connection.execute("SET TRANSACTION READ WRITE")
            self.connection.execute("SET LOCAL synchronous_commit = local")
            self.connection.execute("SELECT pg_logical_emit_message(true, 'dtx', '')")


@contextmanager
def connected(name: str, url: str, waits: Waits) -> Iterator[Server]:
    """Open a :class:`Server` for the block, and close it."""
    server = Server(name, url, waits)
    with closing(server.connection):
        yield server


def failed(where: str, error: BaseException) -> SourceError:
    """Return the error to raise for one of a driver or of the system."""
    kind = SourceAway if passes(getattr(error, "sqlstate", None)) else SourceError
    return kind(f"{where}: {sentence(error)}")


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Raise errors of psycopg and the system as :class:`SourceError` or :class:`SourceAway`."""
    try:
        yield
    except (psycopg.Error, OSError) as error:
        raise failed(name, error) from None


@functools.cache
def _newest_revision() -> str:
    """Return the newest revision that this dtx has a migration for."""
    package = Path(str(files("dtx")))
    for place in (package / "migrations", package.parent / "migrations"):
        found = [path.name.partition("_")[0] for path in (place / "versions").glob("[0-9]*_*.py")]
        if found:
            return max(found)
    raise SourceError("the migrations are missing from this installation")


def reachable(sources: Mapping[str, str], *, waits: Waits = Waits()) -> tuple[dict[str, str], list[Quarantined]]:
    """Return the databases that answer and have a journal that this dtx can read, and records of the others.

    *sources* has the URL of each database, by its configured name.
    """
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(lambda name: _check(name, sources[name], waits), sources))
    wrong = [one for one in found if one is not None]
    away = {one.source for one in wrong}
    return {name: url for name, url in sources.items() if name not in away}, wrong


def _check(name: str, url: str, waits: Waits) -> Quarantined | None:
    count: int | None = None
    try:
        with connected(name, url, waits) as server:
            try:
                server.identity()
            except SourceAway:
                raise
            except SourceError:
                with suppress(SourceError):
                    count = int(server.rows("SELECT count(*) FROM dtx.journal")[0][0])
                raise
    except SourceAway as error:
        return Quarantined(
            source=name, item="database", reason=f"it does not answer: {without_name(name, error)}", count=None
        )
    except SourceError as error:
        return Quarantined(source=name, item="journal", reason=without_name(name, error), count=count, whole=True)
    return None
