"""One database: connections that end by themselves, what it is, and a moment of it. For planning, by psycopg.

Nothing here keeps a transaction open: each look is a statement of its own.
"""

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from dtx.pipeline.source.errors import SourceAway, SourceError, passes, sentence
from dtx.pipeline.source.options import Waits
from dtx.pipeline.source.snapshot import Snapshot

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
# A standby's snapshots list nobody who is under way: only what lies below xmin is known to have ended there.
_SNAPSHOT: Final = """
SELECT CASE WHEN pg_is_in_recovery() THEN pg_snapshot_xmin(s) || ':' || pg_snapshot_xmin(s) || ':' ELSE s::text END,
    CASE WHEN pg_is_in_recovery() THEN NULL ELSE pg_current_wal_insert_lsn()::text END
FROM (SELECT pg_current_snapshot() AS s) now
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which history a snapshot belongs to: in another one its numbers mean something else.

    Args:
        system: of the PostgreSQL cluster and the database in it; a restored dump is another one.
        timeline: changes with a fail-over and a recovery to a point in time.
    """

    system: str
    timeline: int


def conninfo(url: str, waits: Waits, *, statement: int | None = None) -> str:
    """How to connect, for libpq.

    Args:
        url: of the database.
        waits: limits.
        statement: seconds for a statement; default as *waits* says.

    Raises:
        SourceError: libpq does not understand the URL.
    """
    seconds = waits.statement if statement is None else statement
    try:
        given = conninfo_to_dict(url)
        options = (
            f"{given.get('options') or ''} -c statement_timeout={seconds * 1000} -c default_transaction_read_only=on "
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
        raise SourceError(f"not a url of a database: {sentence(error)}") from None


class Server:
    """A connection to one database, for questions; closed by :meth:`close`.

    Args:
        name: the configured name of the source.
        url: of the database.
        waits: limits.

    Raises:
        SourceAway: no connection.
        SourceError: libpq does not understand the URL, or the database refuses.
    """

    def __init__(self, name: str, url: str, waits: Waits) -> None:
        self.name = name
        self.standby = False
        """Whether the last snapshot was that of a standby, which may lag behind what others have seen."""
        with explained(name):
            self._connection = psycopg.connect(conninfo(url, waits, statement=waits.stall), autocommit=True)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        """What *statement* answers; its parts are our own names and literals.

        Raises:
            SourceAway, SourceError: it was not answered.
        """
        with explained(self.name):
            return self._connection.execute(statement).fetchall()

    def identity(self) -> Identity:
        """Which database this is.

        Raises:
            SourceError: it has no journal, or one of a newer dtx.
        """
        system, timeline, oid, journal, versioned = self.rows(_WHAT)[0]
        if not journal:
            raise SourceError(f"{self.name}: there is no journal of dtx here, or its schema may not be used")
        if versioned:
            found = self.rows("SELECT max(version_num) FROM dtx.alembic_version")[0][0]
            newest = _newest_revision()
            if found is not None and str(found) > newest:
                raise SourceError(
                    f"{self.name}: the journal is that of a newer dtx (revision {found}, this one knows up to "
                    f"{newest}): update dtx here first"
                )
        return Identity(system=f"{system}/{oid}", timeline=int(timeline))

    def snapshot(self) -> Snapshot:
        """What has ended by now, for good.

        PostgreSQL forgets at a crash that numbers were given to transactions whose records it had not written to disk,
        and gives them once more. So a snapshot counts when everything is on disk that was recorded before it.

        Raises:
            SourceAway: the server did not write its records to disk in time, or does not answer.
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
        return Snapshot.parse(text)

    def lines(self) -> int | None:
        """How many lines the journal has, ``None`` where that cannot be said: there is none, or it may not be read."""
        try:
            return int(self.rows("SELECT count(*) FROM dtx.journal")[0][0])
        except SourceError:
            return None

    def _flush(self) -> None:
        """Have the records written to disk by a commit of our own that leaves nothing behind but itself."""
        with explained(self.name), self._connection.transaction():
            self._connection.execute("SET TRANSACTION READ WRITE")
            self._connection.execute("SET LOCAL synchronous_commit = local")
            self._connection.execute("SELECT pg_logical_emit_message(true, 'dtx', '')")


@contextmanager
def connected(name: str, url: str, waits: Waits) -> Iterator[Server]:
    """A :class:`Server` for a while."""
    server = Server(name, url, waits)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Errors of psycopg as ours."""
    try:
        yield
    except (psycopg.Error, OSError) as error:
        state = getattr(error, "sqlstate", None)
        refused = SourceAway if passes(state) else SourceError
        raise refused(f"{name}: {sentence(error)}") from None


@functools.cache
def _newest_revision() -> str:
    """The newest revision that this dtx has a migration for.

    Raises:
        SourceError: the migrations are missing from this installation.
    """
    package = Path(str(files("dtx")))
    for place in (package / "migrations", package.parent / "migrations"):
        found = [path.name.partition("_")[0] for path in (place / "versions").glob("[0-9]*_*.py")]
        if found:
            return max(found)
    raise SourceError("the migrations are missing from this installation")
