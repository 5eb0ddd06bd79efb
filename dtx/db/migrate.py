"""Migrations of the tables, applied at start or by hand with ``dtx migrate``; and removal of old data.

The journal has a partition for each day (UTC). Partitions are made ahead, and dropped after the retention time. Old
rows of archive, audit log and copies are deleted.
"""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from importlib.resources import files
from pathlib import Path
from typing import Final

import psycopg
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from psycopg import sql
from sqlalchemy import Connection, text
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from dtx.db.columns import SCHEMA
from dtx.db.connections import Dsn, LogError, LogUnavailable, connected, engine
from dtx.telemetry import get_logger

_LOCK_KEY: Final = 0x6474_7809
"""Key of the advisory lock that lets one migration run at a time in a database: "dtx" and a number."""
_LOCK_SECONDS: Final = 300
_LOCK_PAUSE: Final = 0.05
_GENTLE: Final = 100
"""Of so many attempts to lock the tables, only the last one waits long enough to disturb others."""
_TABLES: Final = f"""
SELECT string_agg(oid::regclass::text, ', ' ORDER BY oid) FROM pg_class
WHERE relnamespace = '{SCHEMA}'::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition
"""

AHEAD_DAYS: Final = 7
"""Partitions made ahead: they last for a week in which dtx cannot make any."""
_UPKEEP_KEY: Final = 0x6474_780A
_LOCK_TIMEOUT: Final = "250ms"
# Dropping a partition locks the whole journal, and behind a long reader all writes would wait. So the attempt ends
# soon, and the next one is an hour later.

_MOVE: Final = """
WITH moved AS (DELETE FROM dtx.journal_default WHERE at >= {from_} AND at < {to} RETURNING *)
INSERT INTO {name} SELECT * FROM moved
"""

_AT_ONCE: Final = 1_000
"""Rows deleted in one transaction: other writers never wait for long, even during the first purge."""
_PURGE_ARCHIVE: Final = """
DELETE FROM dtx.archive WHERE (branch_id, position) IN (
    SELECT a.branch_id, a.position FROM dtx.lease l
    CROSS JOIN LATERAL (SELECT branch_id, position FROM dtx.archive WHERE rm = l.rm
        AND at < coalesce(%(now)s, clock_timestamp()) - l.archive_days * interval '1 day'
        ORDER BY at LIMIT %(most)s) a)
"""
_PURGE_AUDIT: Final = """
DELETE FROM dtx.audit WHERE id IN (
    SELECT a.id FROM dtx.audit a JOIN dtx.lease l ON l.rm = a.rm
    WHERE a.at < coalesce(%(now)s, clock_timestamp()) - l.audit_days * interval '1 day' ORDER BY a.id LIMIT %(most)s)
"""
_PURGE_REPLAYS: Final = """
DELETE FROM dtx.replay WHERE (branch_id, position) IN (
    SELECT a.branch_id, a.position FROM dtx.lease l
    CROSS JOIN LATERAL (SELECT r.branch_id, r.position FROM dtx.replay r WHERE r.rm = l.rm
        AND r.at < coalesce(%(now)s, clock_timestamp()) - l.duplicate_days * interval '1 day'
        AND NOT EXISTS (SELECT FROM dtx.branch b WHERE b.id = r.branch_id)
        ORDER BY r.at LIMIT %(most)s) a)
"""
_PURGE_SETTLEMENTS: Final = """
DELETE FROM dtx.settlement WHERE (branch_id, position, vhost, queue) IN (
    SELECT a.branch_id, a.position, a.vhost, a.queue FROM dtx.lease l
    CROSS JOIN LATERAL (SELECT s.branch_id, s.position, s.vhost, s.queue FROM dtx.settlement s WHERE s.rm = l.rm
        AND s.at < coalesce(%(now)s, clock_timestamp())
            - CASE s.attempt WHEN 2147483647 THEN l.duplicate_days * interval '1 day' ELSE interval '1 hour' END
        AND NOT EXISTS (SELECT FROM dtx.replay r WHERE r.branch_id = s.branch_id AND r.position = s.position)
        AND NOT EXISTS (SELECT FROM dtx.branch b WHERE b.id = s.branch_id)
        ORDER BY s.at LIMIT %(most)s) a)
"""
# A settlement matters as long as its message may be sent again, or was. So it has no window of its own: one that is
# older than the last replay must not be deleted before it. The last attempt is that of a message that was moved.
_PURGE_DUPLICATES: Final = """
DELETE FROM dtx.duplicate WHERE (branch_id, position, vhost, queue, attempt) IN (
    SELECT a.* FROM dtx.lease l
    CROSS JOIN LATERAL (SELECT d.branch_id, d.position, d.vhost, d.queue, d.attempt FROM dtx.duplicate d
        WHERE d.rm = l.rm AND d.at < coalesce(%(now)s, clock_timestamp()) - l.duplicate_days * interval '1 day'
        ORDER BY d.at LIMIT %(most)s) a)
"""
_PURGES: Final = {
    "archive": _PURGE_ARCHIVE,
    "audit": _PURGE_AUDIT,
    "replay": _PURGE_REPLAYS,
    "settlement": _PURGE_SETTLEMENTS,
    "duplicate": _PURGE_DUPLICATES,
}
"""By table, in their order."""

log = get_logger()


def script_location() -> Path:
    """The directory of the migrations: inside the package when installed, beside it in a checkout.

    Raises:
        LogError: there is none.
    """
    package = Path(str(files("dtx")))
    for place in (package / "migrations", package.parent / "migrations"):
        if (place / "env.py").is_file():
            return place
    raise LogError("the migrations are missing from this installation")


def known_revisions() -> list[str]:
    """The versions of the tables that this dtx knows, the newest first."""
    return [script.revision for script in ScriptDirectory(str(script_location())).walk_revisions()]


def upgrade(url: str, revision: str = "head") -> str | None:
    """Upgrade the tables to *revision*, and make the journal's next partitions.

    Several processes may call this at once: the first one migrates, the others wait for it.

    Args:
        url: of the database.
        revision: for example ``0014``.

    Returns:
        The new revision.

    Raises:
        LogUnavailable: no connection, or the database refused.
        LogError: the database is newer than this dtx, or there is no such revision.
    """
    dsn = Dsn(url)
    with _migrating(dsn) as (connection, config):
        if _current(connection) not in {None, known_revisions()[0] if revision == "head" else revision}:
            _lock_tables(connection, dsn)
        command.upgrade(config, revision)
        connection.commit()
        found = _current(connection)
    if found is not None:
        maintain(dsn)
    return found


def downgrade(url: str, revision: str) -> str | None:
    """Downgrade the tables to *revision*; ``base`` removes them with all their data.

    Returns:
        The new revision; ``None`` for ``base``.

    Raises:
        LogUnavailable, LogError: see :func:`upgrade`.
    """
    with _migrating(Dsn(url)) as (connection, config):
        command.downgrade(config, revision)
        connection.commit()
        return _current(connection)


def current(url: str) -> str | None:
    """The revision of the database, or ``None`` if there are no tables.

    Raises:
        LogUnavailable: no connection.
    """
    dsn = Dsn(url)
    with _explained(dsn), engine(dsn).connect() as connection:
        return _current(connection)


def _current(connection: Connection) -> str | None:
    return MigrationContext.configure(connection, opts={"version_table_schema": SCHEMA}).get_current_revision()


@contextmanager
def _migrating(dsn: Dsn) -> Iterator[tuple[Connection, Config]]:
    config = Config()
    config.set_main_option("script_location", str(script_location()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    with _explained(dsn), engine(dsn).connect() as connection:
        config.attributes["connection"] = connection
        connection.execute(text(f"SET lock_timeout = '{_LOCK_SECONDS}s'"))
        connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": _LOCK_KEY})
        here, known = _current(connection), known_revisions()
        if here is not None and here not in known:
            raise LogError(
                f"the tables in {dsn.shown} are at version {here} of a newer dtx, this one knows {known[0]}: "
                "start a dtx of that version, or run its 'dtx migrate down'"
            )
        connection.commit()
        yield connection, config


def _lock_tables(connection: Connection, dsn: Dsn) -> None:
    """Lock all tables before the first migration, at an instant at which no transaction uses them.

    A dtx may serve on them. A migration that locks one table after the other would deadlock with its writes. And a lock
    that waits behind a backup would stop the writes, and the renewal of the lease with them.

    Raises:
        LogUnavailable: there was no such instant.
    """
    deadline = time.monotonic() + _LOCK_SECONDS
    tables = connection.scalar(text(_TABLES))
    for attempt in itertools.count(1):
        # For a lock of autovacuum, PostgreSQL ends it after its deadlock_timeout of one second.
        connection.execute(text(f"SET LOCAL lock_timeout = '{20 if attempt % _GENTLE else 1500}ms'"))
        try:
            connection.execute(text(f"LOCK TABLE {tables}"))
        except OperationalError as error:
            connection.rollback()
            if not isinstance(error.orig, psycopg.errors.LockNotAvailable | psycopg.errors.DeadlockDetected):
                raise
            if time.monotonic() > deadline:
                raise LogUnavailable(
                    f"the tables in {dsn.shown} are in use for {_LOCK_SECONDS} s: wait for backups and reports to end"
                ) from None
            time.sleep(_LOCK_PAUSE)
        else:
            connection.execute(text(f"SET LOCAL lock_timeout = '{_LOCK_SECONDS}s'"))
            return


@contextmanager
def _explained(dsn: Dsn) -> Iterator[None]:
    try:
        yield
    except SQLAlchemyError as error:
        cause = getattr(error, "orig", None) or error
        raise LogUnavailable(f"{dsn.shown}: {dsn.explain(cause)}{_advice(cause)}") from None
    except (psycopg.Error, OSError) as error:
        raise LogUnavailable(f"{dsn.shown}: {dsn.explain(error)}") from None
    except CommandError as error:
        raise LogError(f"the tables in {dsn.shown} cannot be migrated by this dtx: {dsn.explain(error)}") from None


def _advice(cause: BaseException) -> str:
    """The remedy as a part of a sentence, if one is known."""
    match cause:
        case psycopg.errors.InsufficientPrivilege():
            # the user that creates the tables owns them, and the daily partitions of the journal
            return "; dtx needs a user of its own there that may create a schema: grant CREATE on the database to it"
        case psycopg.OperationalError(sqlstate=None):
            return "; start PostgreSQL, or correct the database URL"
        case _:
            return ""


def partition_name(day: date) -> str:
    """The name of the partition of *day*."""
    return f"journal_{day:%Y%m%d}"


def maintain(dsn: Dsn, now: datetime | None = None) -> None:
    """Make the journal's partitions of the coming days, drop old ones, and purge archive, audit log and copies.

    Every resource manager has in its lease the days for which it keeps the journal; the longest counts. Archive,
    audit log and copies are kept for the days in the lease of their own resource manager, for ever if it has none.
    Replays and settlements of a branch in the log are always kept.

    Args:
        dsn: the database.
        now: ``None`` for the database's clock: with a wrong clock of its own, a dtx would drop journals of others.

    Raises:
        LogUnavailable: no connection, or the database refused.
    """
    try:
        with connected(dsn, autocommit=True) as connection:
            connection.execute(f"SET lock_timeout = '{_LOCK_TIMEOUT}'")
            row = connection.execute("SELECT pg_try_advisory_lock(%s)", [_UPKEEP_KEY]).fetchone()
            if row is None or not row[0]:
                return  # another process does it
            today = (now or _now(connection)).date()
            _make(connection, today)
            _drop(connection, today)
            for table, statement in _PURGES.items():
                if _exists(connection, table):
                    _purge(connection, statement, now)
    except (psycopg.Error, OSError) as error:
        raise LogUnavailable(dsn.explain(error)) from None


def _exists(connection: psycopg.Connection, table: str) -> bool:
    """Whether *table* is there: an upgrade may end at an earlier revision."""
    row = connection.execute("SELECT to_regclass(%s)", [f"{SCHEMA}.{table}"]).fetchone()
    return row is not None and row[0] is not None


def _purge(connection: psycopg.Connection, statement: str, now: datetime | None) -> None:
    while connection.execute(statement, {"now": now, "most": _AT_ONCE}).rowcount > 0:
        pass


def _now(connection: psycopg.Connection) -> datetime:
    row = connection.execute("SELECT clock_timestamp()").fetchone()
    assert row is not None
    found: datetime = row[0]
    return found.astimezone(UTC)


def _partitions(connection: psycopg.Connection) -> dict[str, date]:
    rows = connection.execute(
        "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid "
        "WHERE i.inhparent = 'dtx.journal'::regclass AND c.relname ~ '^journal_[0-9]{8}$'"
    ).fetchall()
    return {name: datetime.strptime(name, "journal_%Y%m%d").replace(tzinfo=UTC).date() for (name,) in rows}


def _make(connection: psycopg.Connection, today: date) -> None:
    existing = _partitions(connection)
    for offset in range(-1, AHEAD_DAYS + 1):
        day = today + timedelta(days=offset)
        name = partition_name(day)
        if name in existing:
            continue
        values = {
            "name": sql.Identifier("dtx", name),
            "from_": sql.Literal(f"{day} 00:00:00+00"),
            "to": sql.Literal(f"{day + timedelta(days=1)} 00:00:00+00"),
        }
        try:
            with connection.transaction():
                # Rows of that day in the default partition are moved: otherwise PostgreSQL refuses the new partition.
                for statement in (
                    "CREATE TABLE {name} (LIKE dtx.journal INCLUDING DEFAULTS INCLUDING CONSTRAINTS)",
                    _MOVE,
                    "ALTER TABLE dtx.journal ATTACH PARTITION {name} FOR VALUES FROM ({from_}) TO ({to})",
                ):
                    connection.execute(sql.SQL(statement).format(**values))
        except psycopg.errors.LockNotAvailable:
            log.info("the journal is being read, its partitions are made later", partition=name)
            return


def _drop(connection: psycopg.Connection, today: date) -> None:
    row = connection.execute("SELECT max(retention_days) FROM dtx.lease").fetchone()
    if row is None or row[0] is None:
        return
    oldest = today - timedelta(days=int(row[0]))
    try:
        for name, day in sorted(_partitions(connection).items()):
            if day < oldest:
                connection.execute(sql.SQL("DROP TABLE {}").format(sql.Identifier("dtx", name)))
                log.info("a partition of the journal was dropped", partition=name)
        connection.execute(
            "DELETE FROM dtx.journal_default WHERE at < %s", [datetime.combine(oldest, datetime.min.time(), UTC)]
        )
    except psycopg.errors.LockNotAvailable:
        log.info("the journal is being read, old partitions are dropped later")
