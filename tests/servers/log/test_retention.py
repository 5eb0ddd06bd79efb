"""The journal's partitions are made ahead and dropped after retention, without waiting for other sessions."""

import asyncio
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, Self
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

from dtx.db import migrate
from dtx.db.connections import Dsn
from dtx.log.api import LogUnavailable
from dtx.log.lease import Keep
from dtx.log.records import JournalEvent, LogState, NoteWrite, SettlementsWrite
from tests.servers.log.conftest import OpenLog
from tests.support.branches import (
    a_branch,
    a_commit,
    a_completion,
    a_line,
    a_replay,
    a_settlement,
    a_xid,
    an_insert,
)

LEASE = "INSERT INTO dtx.lease VALUES (%s, 1, 'somebody', NULL, %s, now(), now(), %s)"


def partitions(url: str) -> list[str]:
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            "SELECT relname FROM pg_class WHERE relispartition AND relkind = 'r' AND relname LIKE 'journal%'"
        ).fetchall()
    return sorted(name for (name,) in rows if name != "journal_default")


def wanted(url: str, **retention_days: int) -> None:
    with psycopg.connect(url) as connection:
        for rm, days in retention_days.items():
            connection.execute(LEASE, [rm, uuid4(), days])


async def maintained(url: str, name: str, lines: int, now: datetime | None = None) -> None:
    """Maintain the journal until *name* has that many lines; a call does nothing while an open log maintains it."""
    async with asyncio.timeout(30):
        while True:
            migrate.maintain(Dsn(url), now)
            with psycopg.connect(url) as connection:
                row = connection.execute("SELECT to_regclass(%s)", [f"dtx.{name}"]).fetchone()
                if row and row[0] and connection.execute(f"SELECT count(*) FROM dtx.{name}").fetchone() == (lines,):
                    return
            await asyncio.sleep(0.05)


def test_partitions_are_made_for_a_week_ahead(migrated_postgres_url: str) -> None:
    now = datetime(2031, 12, 30, 23, 59, tzinfo=UTC)
    migrate.maintain(Dsn(migrated_postgres_url), now)
    made = partitions(migrated_postgres_url)
    assert [migrate.partition_name(now.date() + timedelta(days=offset)) for offset in range(-1, 8)] == made[-9:]
    migrate.maintain(Dsn(migrated_postgres_url), now)
    assert partitions(migrated_postgres_url) == made


def test_a_dtx_with_a_wrong_clock_drops_no_kept_partition(
    migrated_postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The age of the journal is measured by the database's clock, which all dtx share."""

    class AheadOfTime(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return super().now(tz) + timedelta(days=400)

    wanted(migrated_postgres_url, mine=30)
    migrate.maintain(Dsn(migrated_postgres_url))
    made = partitions(migrated_postgres_url)
    monkeypatch.setattr(migrate, "datetime", AheadOfTime)
    migrate.maintain(Dsn(migrated_postgres_url))
    assert partitions(migrated_postgres_url) == made


@pytest.mark.parametrize("zone", ["Pacific/Kiritimati", "Etc/GMT+12"], ids=["14 h ahead", "12 h behind"])
def test_days_begin_at_midnight_utc_in_every_time_zone(migrated_postgres_url: str, zone: str) -> None:
    with psycopg.connect(migrated_postgres_url, autocommit=True) as connection:
        name = sql.Identifier(connection.info.dbname)
        connection.execute(sql.SQL("ALTER DATABASE {} SET timezone = {}").format(name, zone))
    wanted(migrated_postgres_url, mine=1)
    days = {datetime.now(UTC).date()}
    migrate.maintain(Dsn(migrated_postgres_url))
    days.add(datetime.now(UTC).date())
    made = partitions(migrated_postgres_url)
    expected = [(day - timedelta(days=1), day + timedelta(days=migrate.AHEAD_DAYS)) for day in days]
    assert (made[0], made[-1]) in [tuple(map(migrate.partition_name, ends)) for ends in expected]


def test_partitions_are_dropped_after_every_retention_period(migrated_postgres_url: str) -> None:
    """Every resource manager sets how long it keeps the journal: the longest time counts."""
    first = datetime(2031, 1, 1, 12, tzinfo=UTC)
    dsn = Dsn(migrated_postgres_url)
    with psycopg.connect(migrated_postgres_url) as connection:
        for day in partitions(migrated_postgres_url):
            connection.execute(f"DROP TABLE dtx.{day}")
    migrate.maintain(dsn, first)
    wanted(migrated_postgres_url, short=2, long=10)
    migrate.maintain(dsn, first + timedelta(days=9))
    assert partitions(migrated_postgres_url)[0] == "journal_20301231"
    migrate.maintain(dsn, first + timedelta(days=13))
    assert partitions(migrated_postgres_url)[0] == "journal_20310104"


async def test_lines_in_the_default_partition_move_to_their_day(open_log: OpenLog, migrated_postgres_url: str) -> None:
    log = await open_log(keep=Keep(journal=36_500))
    branch = a_branch()
    day = datetime(2041, 5, 5, tzinfo=UTC)
    for offset in (0.0, 86_399.999999, 86_400.0):
        await log.write(NoteWrite(journal=a_line(branch, JournalEvent.COMMITTED, at=day.timestamp() + offset)))
    before = await log.history(None, branch.xid)
    await maintained(migrated_postgres_url, "journal_20410506", 1, day)
    assert await log.history(None, branch.xid) == before
    with psycopg.connect(migrated_postgres_url) as connection:
        for name, lines in (("journal_20410505", 2), ("journal_20410506", 1), ("journal_default", 0)):
            assert connection.execute(f"SELECT count(*) FROM dtx.{name}").fetchone() == (lines,)


async def test_expired_lines_leave_the_default_partition(open_log: OpenLog, migrated_postgres_url: str) -> None:
    log = await open_log(keep=Keep(journal=5))
    branch = a_branch()
    await log.write(NoteWrite(journal=a_line(branch, JournalEvent.COMMITTED, at=1.0)))
    await maintained(migrated_postgres_url, "journal_default", 0)
    assert await log.history(None, branch.xid) == []


@pytest.mark.parametrize("now", [datetime(2035, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)])
def test_a_long_reader_is_not_waited_for(migrated_postgres_url: str, now: datetime) -> None:
    wanted(migrated_postgres_url, rm=1)
    before = partitions(migrated_postgres_url)
    with psycopg.connect(migrated_postgres_url) as reader:
        reader.execute("SELECT count(*) FROM dtx.journal")
        migrate.maintain(Dsn(migrated_postgres_url), now)
    assert partitions(migrated_postgres_url) == before


def test_two_at_once_do_not_wait_for_each_other(migrated_postgres_url: str) -> None:
    with psycopg.connect(migrated_postgres_url) as other:
        other.execute("SELECT pg_advisory_lock(%s)", [migrate._UPKEEP_KEY])
        before = partitions(migrated_postgres_url)
        migrate.maintain(Dsn(migrated_postgres_url), datetime(2035, 1, 1, tzinfo=UTC))
    assert partitions(migrated_postgres_url) == before


def test_a_database_that_is_away_is_unavailable() -> None:
    with pytest.raises(LogUnavailable):
        migrate.maintain(Dsn("postgresql://127.0.0.1:1/nowhere"))


async def test_readers_have_a_safe_offset(open_log: OpenLog, migrated_postgres_url: str) -> None:
    """The xid8 column has the default pg_current_xact_id(), so that readers can take a safe offset."""
    log = await open_log()
    rows: list[Any] = []
    for _ in range(2):
        await log.write(NoteWrite(journal=a_line(a_branch(xid=a_xid()))))
    async with asyncio.timeout(30):
        while [safe for _, safe in rows] != [True, True]:  # until other transactions on the server have ended
            await asyncio.sleep(0.05)
            with psycopg.connect(migrated_postgres_url) as connection:
                rows = connection.execute(
                    "SELECT xid8::text::bigint, xid8 < pg_snapshot_xmin(pg_current_snapshot()) "
                    "FROM dtx.journal ORDER BY at"
                ).fetchall()
    assert rows[0][0] < rows[1][0]


OLD = """
INSERT INTO dtx.archive (branch_id, position, rm, vhost, format_id, gtrid, bqual, owner, kind, exchange, routing_key,
    properties, body, fate, at)
SELECT gen_random_uuid(), 0, %(rm)s, '/', 1, 'g', 'b', 'guest', 'publish', 'e', 'k', '', '', 'dropped',
    clock_timestamp() - n * interval '12 hours' FROM generate_series(1, 3000) n;
"""
OLD_TRAIL = """
INSERT INTO dtx.audit (at, rm, actor, role, address, action, subject, reason, detail)
SELECT clock_timestamp() - n * interval '12 hours', %(rm)s, 'olga', 'operator', '', 'commit', 'x', 'y', '{}'
FROM generate_series(1, 3000) n
"""


def kept(url: str) -> dict[str, tuple[int, int]]:
    """How many archived messages and audit records each resource manager has."""
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            "SELECT rm, (SELECT count(*) FROM dtx.archive a WHERE a.rm = l.rm), "
            "(SELECT count(*) FROM dtx.audit a WHERE a.rm = l.rm) FROM dtx.lease l"
        ).fetchall()
    return {rm: (archived, audited) for rm, archived, audited in rows}


def test_archive_and_audit_log_follow_their_own_retention(migrated_postgres_url: str) -> None:
    wanted(migrated_postgres_url, brief=30, other=30, ever=30)
    with psycopg.connect(migrated_postgres_url) as connection:
        connection.execute("UPDATE dtx.lease SET archive_days = 10, audit_days = 100 WHERE rm = 'brief'")
        connection.execute("UPDATE dtx.lease SET archive_days = 100, audit_days = 10 WHERE rm = 'other'")
        for rm in ("brief", "other", "ever"):
            connection.execute(OLD, {"rm": rm})
            connection.execute(OLD_TRAIL, {"rm": rm})
    migrate.maintain(Dsn(migrated_postgres_url))
    assert kept(migrated_postgres_url) == {"brief": (19, 199), "other": (199, 19), "ever": (3000, 3000)}


COPIES = """
INSERT INTO dtx.replay SELECT gen_random_uuid(), 0, %(rm)s, '/', 'e', 'k', 'd', clock_timestamp() - n * interval '1 day'
    FROM generate_series(0.5, 20) n;
INSERT INTO dtx.settlement SELECT branch_id, 0, '/', 'q', rm, 1, 'd', clock_timestamp() - interval '30 days'
    FROM dtx.replay WHERE rm = %(rm)s;
INSERT INTO dtx.settlement SELECT gen_random_uuid(), 0, '/', 'q', %(rm)s, 1, 'd',
    clock_timestamp() - n * interval '1 minute' FROM generate_series(10, 20000, 10) n;
INSERT INTO dtx.settlement SELECT gen_random_uuid(), 0, '/', 'q', %(rm)s, 2147483647, 'd', at
    FROM dtx.replay WHERE rm = %(rm)s;
INSERT INTO dtx.duplicate SELECT branch_id, 0, '/', 'q', 2, rm, 'e', 'k', '', '', at FROM dtx.replay WHERE rm = %(rm)s;
"""


def copies(url: str) -> dict[str, tuple[int, int, int]]:
    """How many replays, settlements and duplicates each resource manager has."""
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            "SELECT rm, (SELECT count(*) FROM dtx.replay c WHERE c.rm = l.rm), (SELECT count(*) FROM dtx.settlement c "
            "WHERE c.rm = l.rm), (SELECT count(*) FROM dtx.duplicate c WHERE c.rm = l.rm) FROM dtx.lease l"
        ).fetchall()
    return {rm: (replays, settlements, duplicates) for rm, replays, settlements, duplicates in rows}


async def purged(url: str, expected: tuple[int, int, int], now: datetime | None = None) -> None:
    """Maintain until ``rm`` has these copies; a call does nothing while a log that was open still maintains."""
    async with asyncio.timeout(30):
        while True:
            migrate.maintain(Dsn(url), now)
            if copies(url) == {"rm": expected}:
                return
            await asyncio.sleep(0.05)


def test_copies_are_kept_for_their_window(migrated_postgres_url: str) -> None:
    """Settlements are kept as long as the replay of their message; of moved ones for the window; others an hour."""
    wanted(migrated_postgres_url, brief=30, ever=30)
    with psycopg.connect(migrated_postgres_url) as connection:
        connection.execute("UPDATE dtx.lease SET duplicate_days = 7 WHERE rm = 'brief'")
        for rm in ("brief", "ever"):
            for statement in COPIES.split(";")[:-1]:
                connection.execute(statement.encode(), {"rm": rm})
    assert copies(migrated_postgres_url) == dict.fromkeys(("brief", "ever"), (20, 2040, 20))
    migrate.maintain(Dsn(migrated_postgres_url))
    assert copies(migrated_postgres_url) == {"brief": (7, 7 + 5 + 7, 7), "ever": (20, 20 + 5 + 20, 20)}


async def test_copies_of_a_branch_in_the_log_are_kept(open_log: OpenLog, migrated_postgres_url: str) -> None:
    """A branch may be stuck for longer than the window, and is sent again after that."""
    log = await open_log(keep=Keep(duplicates=1))
    stuck, ended = a_branch(), a_branch()
    for branch in (stuck, ended):
        await log.write(an_insert(branch))
        await log.write(a_commit(branch, replays=(a_replay(),)))
        await log.write(SettlementsWrite(settlements=(a_settlement(branch), a_settlement(branch, 1))))
    await log.write(a_completion(ended, expect=LogState.COMMITTING, version=2))
    await log.close()
    later = datetime.now(UTC) + timedelta(days=2)
    await purged(migrated_postgres_url, (1, 2, 0), later)
    log = await open_log(keep=Keep(duplicates=1))
    await log.write(a_completion(stuck, expect=LogState.COMMITTING, version=2))
    await log.close()
    await purged(migrated_postgres_url, (0, 0, 0), later)


async def test_a_replay_is_kept_from_its_last_time_on(open_log: OpenLog, migrated_postgres_url: str) -> None:
    log = await open_log(keep=Keep(duplicates=2))
    again, once = a_branch(), a_branch()
    for branch in (again, once):
        await log.write(an_insert(branch))
        await log.write(a_commit(branch, replays=(a_replay(),)))
    with psycopg.connect(migrated_postgres_url) as connection:
        connection.execute("UPDATE dtx.replay SET at = at - interval '10 days'")
    await log.write(a_commit(again, expect=LogState.COMMITTING, version=2, replays=(a_replay(),)))
    for branch, version in ((again, 3), (once, 2)):
        await log.write(a_completion(branch, expect=LogState.COMMITTING, version=version))
    await log.close()
    await purged(migrated_postgres_url, (1, 0, 0))
    with psycopg.connect(migrated_postgres_url) as connection:
        assert connection.execute("SELECT branch_id FROM dtx.replay").fetchall() == [(again.id,)]


async def test_the_lease_holds_the_retention_of_archive_and_audit(
    open_log: OpenLog, migrated_postgres_url: str
) -> None:
    for keep, expected in (
        (Keep(journal=7, archive=8, audit=9, duplicates=10), (7, 8, 9, 10)),
        (Keep(), (30, None, None, None)),
    ):
        log = await open_log(keep=keep)
        with psycopg.connect(migrated_postgres_url) as connection:
            said = connection.execute(
                "SELECT retention_days, archive_days, audit_days, duplicate_days FROM dtx.lease"
            ).fetchone()
        assert said == expected
        await log.close()
