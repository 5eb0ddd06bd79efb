"""What is over leaves: the journal by partitions, archive and trail by rows.

The journal has a partition for each day (UTC), made ahead, dropped when nobody wants it any more.
"""

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Final

import psycopg
from psycopg import sql

from dtx.log.api import LogUnavailable
from dtx.log.connecting import Dsn
from dtx.log.engine import connected
from dtx.telemetry import get_logger

AHEAD_DAYS: Final = 7
"""Partitions made ahead: a dtx that cannot make any for a week still writes into partitions of its own."""
_LOCK_KEY: Final = 0x6474_780A
_LOCK_TIMEOUT: Final = "250ms"
# Dropping a partition locks the whole journal: behind a long reader it gives up at once and comes again in an hour, for
# every write would wait behind it.

_MOVE: Final = """
WITH moved AS (DELETE FROM dtx.journal_default WHERE at >= {from_} AND at < {to} RETURNING *)
INSERT INTO {name} SELECT * FROM moved
"""

_AT_ONCE: Final = 1_000
"""Rows deleted in one transaction: others never wait for long, whatever the first purge finds."""
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

log = get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """How long a resource manager keeps what is over, days; ``None`` is for ever.

    Args:
        journal: lines of the journal, and with them the outcome memory; at least 1.
        archive: messages that nobody got, of branches that were forgotten.
        audit: lines of the trail of operators.
    """

    journal: int = 30
    archive: int | None = None
    audit: int | None = None


def partition_name(day: date) -> str:
    """The name of the partition of *day*."""
    return f"journal_{day:%Y%m%d}"


def maintain(dsn: Dsn, now: datetime | None = None) -> None:
    """Make the journal's partitions of the coming days, drop those that no resource manager keeps; purge the rest.

    Every resource manager states in its lease for how many days it keeps the journal: the longest counts. Archive and
    trail are kept for as long as the lease of their own resource manager says, for ever where it says nothing.

    Args:
        dsn: the database.
        now: default the present, by the clock that all share: a dtx whose own is wrong must not drop anybody's journal.

    Raises:
        LogUnavailable: no connection, or the database refused.
    """
    try:
        with connected(dsn, autocommit=True) as connection:
            connection.execute(f"SET lock_timeout = '{_LOCK_TIMEOUT}'")
            row = connection.execute("SELECT pg_try_advisory_lock(%s)", [_LOCK_KEY]).fetchone()
            if row is None or not row[0]:
                return  # somebody else is at it
            today = (now or _now(connection)).date()
            _make(connection, today)
            _drop(connection, today)
            for statement in (_PURGE_ARCHIVE, _PURGE_AUDIT):
                _purge(connection, statement, now)
    except (psycopg.Error, OSError) as error:
        raise LogUnavailable(dsn.explain(error)) from None


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
                # What the default partition holds of that day moves, else the new partition would be refused.
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
