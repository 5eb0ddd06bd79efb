"""Reading a log from outside, while a dtx writes it."""

import asyncio
import time
from dataclasses import replace

import psycopg
import pytest
from sqlalchemy import text

from dtx.log.api import LogError, LogUnavailable
from dtx.log.pages import BranchFilter, branch_page, history, in_doubt, totals
from dtx.log.reader import Detail, LoggedDecision, LogReader, Messages
from dtx.log.records import Insert, JournalEvent, LogState
from dtx.xa.codes import Heuristic
from dtx.xa.xid import Xid
from tests.servers.log.conftest import OpenLog
from tests.support.branches import (
    a_branch,
    a_commit,
    a_consume,
    a_line,
    a_publish,
    a_unit,
    a_xid,
    an_insert,
)
from tests.support.stored import a_message, puts


async def test_branches_in_doubt_are_listed_oldest_first(open_log: OpenLog, migrated_postgres_url: str) -> None:
    log = await open_log()
    now = time.time()
    old = a_branch(started_at=round(now - 100, 3), owner="alice", consumes=1, state=LogState.TAKING, prepared_at=None)
    new = a_branch(started_at=round(now - 10, 3), vhost="other")
    await log.write(an_insert(new, a_publish(0, exchange=b""), a_publish(1), a_publish(2)))
    await log.write(an_insert(old, a_consume(0, queue=b"q\xff"), a_consume(1, queue=b"a")))
    with LogReader(migrated_postgres_url) as reader:
        first, second = in_doubt(reader)
        assert (first.rm, first.branch, first.queues, first.exchanges) == ("rm", old, (b"a", b"q\xff"), ())
        assert (second.branch, second.queues, second.exchanges) == (new, (), (b"", b"orders"))
        assert 100 <= first.age < 160
        for wanted, expected in (
            (BranchFilter(states=(LogState.TAKING,)), [old]),
            (BranchFilter(owner="alice"), [old]),
            (BranchFilter(vhost="other"), [new]),
            (BranchFilter(older_than=50), [old]),
            (BranchFilter(rm="elsewhere"), []),
            (BranchFilter(rm="rm", owner="guest", states=(LogState.PREPARED,), older_than=5, vhost="other"), [new]),
        ):
            assert [found.branch for found in in_doubt(reader, wanted)] == expected
        assert [found.branch for found in in_doubt(reader, limit=1)] == [old]
        sums = {total.state: total for total in totals(reader)}
        assert sums.keys() == {LogState.TAKING, LogState.PREPARED}
        assert (sums[LogState.TAKING].branches, sums[LogState.TAKING].consumes) == (1, 1)
        assert totals(reader, BranchFilter(owner="nobody")) == []


async def test_a_long_list_is_streamed(open_log: OpenLog, migrated_postgres_url: str) -> None:
    log = await open_log()
    await asyncio.gather(*(log.write(an_insert(a_branch())) for _ in range(2_500)))
    with LogReader(migrated_postgres_url) as reader:
        stream = in_doubt(reader)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert sum(1 for _ in in_doubt(reader)) == 2_500


async def test_one_branch_is_shown_with_everything(open_log: OpenLog, migrated_postgres_url: str) -> None:
    log = await open_log()
    branch = a_branch(units=(a_unit(0),))
    work = (a_publish(0), a_publish(1, body=b"\0\xff"))
    await log.write(an_insert(branch, *work))
    line = a_line(branch, JournalEvent.HEURISTIC, actor="alice", reason="lost", outcome=Heuristic.HAZARD)
    await log.write(a_commit(branch, to=LogState.HEURISTIC, outcome=Heuristic.HAZARD, journal=line, decided_at=None))
    elsewhere = a_branch(xid=branch.xid, vhost="elsewhere")
    await log.write(an_insert(elsewhere))
    with LogReader(migrated_postgres_url) as reader:
        assert reader.show(branch.xid, vhost="/") == [
            Detail(
                rm="rm",
                branch=branch._replace(state=LogState.HEURISTIC, outcome=Heuristic.HAZARD, version=2),
                work=work,
                sizes=tuple(len(item.body) for item in work),
                decision=LoggedDecision(outcome=Heuristic.HAZARD, actor="alice", reason="lost", at=line.at),
            )
        ]
        (sized,) = reader.show(branch.xid, vhost="/", messages=Messages(bodies=False))
        assert sized.work == tuple(replace(item, body=b"") for item in work)
        assert sized.sizes == tuple(len(item.body) for item in work)
        assert [detail.branch.vhost for detail in reader.show(branch.xid)] == ["/", "elsewhere"]
        assert reader.show(branch.xid, rm="another") == []
        assert reader.show(a_xid()) == []
        lines = history(reader, branch.xid, vhost="/", rm="rm")
        assert [found.entry.event for found in lines] == [JournalEvent.PREPARED, JournalEvent.HEURISTIC]
        assert lines[1].entry == line
        assert len(history(reader, branch.xid)) == 3
        assert history(reader, branch.xid, vhost="/", rm="rm", limit=1) == lines[1:]


def positions(reader: LogReader, xid: Xid, limit: int) -> list[list[int]]:
    """The positions of the messages on each page."""
    found: list[list[int]] = []
    cursor: int | None = -1
    while cursor is not None:
        (detail,) = reader.show(xid, messages=Messages(after=cursor, limit=limit, bodies=False))
        found.append([item.position for item in detail.work])
        assert len(detail.sizes) == len(detail.work)
        cursor = detail.cursor
    return found


async def test_messages_are_shown_page_by_page(open_log: OpenLog, migrated_postgres_url: str) -> None:
    log = await open_log()
    brokered, local = a_branch(publishes=4), a_branch(publishes=3, consumes=2)
    await log.write(an_insert(brokered, a_publish(0), a_publish(3), a_publish(7), a_consume(8)))
    messages = [a_message(body=b"%d" % number) for number in range(5)]
    local = local._replace(
        published=tuple(item.slot for item in messages[:3]), consumed=tuple(item.slot for item in messages[3:])
    )
    await log.write(Insert(branch=local, journal=a_line(local), change=puts(*messages)))
    with LogReader(migrated_postgres_url) as reader:
        assert positions(reader, brokered.xid, 2) == [[0, 3], [7, 8]]
        assert positions(reader, brokered.xid, 3) == [[0, 3, 7], [8]]
        assert positions(reader, local.xid, 2) == [[0, 1], [2, 3], [4]]
        assert positions(reader, local.xid, 5) == [[0, 1, 2, 3, 4]]
        (one,) = reader.show(local.xid, messages=Messages(after=2, limit=1))
        assert [item.body for item in one.work] == [b"3"]
    with psycopg.connect(migrated_postgres_url) as connection:
        connection.execute("DELETE FROM dtx.message WHERE position = %s", [messages[2].position])
    with LogReader(migrated_postgres_url) as reader:  # a deleted message leaves a gap; later pages follow
        assert positions(reader, local.xid, 1) == [[0], [1], [], [3], [4]]


async def test_a_branch_with_very_many_messages_is_listed_and_shown(
    open_log: OpenLog, migrated_postgres_url: str
) -> None:
    """The slots in its row are compressed: unpacking them for each message would take quadratic time."""
    log = await open_log()
    branch = a_branch(published=(), consumed=())
    await log.write(Insert(branch=branch, journal=a_line(branch)))
    with psycopg.connect(migrated_postgres_url) as connection:
        connection.execute(
            "UPDATE dtx.branch SET published = (SELECT string_agg(int8send(5) || int8send(n), '' ORDER BY n) "
            "FROM generate_series(1, 100000) n)"
        )
        connection.execute(
            "INSERT INTO dtx.message (queue, position, rm, exchange, routing_key, flags, properties, body) "
            "VALUES (5, 70001, 'rm', 'last', '', 1, '', 'found')"
        )
    with LogReader(migrated_postgres_url, patience=30) as reader:
        (listed,) = branch_page(reader, BranchFilter(rm="rm", exchange=b"last"))
        assert (listed.exchanges, listed.branch.published) == ((b"last",), None)
        (shown,) = reader.show(branch.xid, messages=Messages(after=69_999, limit=10))
        assert [(item.position, item.body) for item in shown.work] == [(70_000, b"found")]
        assert shown.cursor == 70_009


async def test_the_holder_of_the_lease_is_shown(open_log: OpenLog, migrated_postgres_url: str) -> None:
    log = await open_log(holder="here:1", lease_ttl=30.0)
    with LogReader(migrated_postgres_url) as reader:
        (holder,) = reader.leases()
        assert (holder.rm, holder.holder) == ("rm", "here:1")
        assert 0 < holder.remaining <= 30
        await log.close()
        assert reader.leases()[0].remaining == float("-inf")


async def test_people_with_psql_have_a_view(open_log: OpenLog, migrated_postgres_url: str) -> None:
    """A SQL view in_doubt for people with psql."""
    log = await open_log()
    branch = a_branch(started_at=round(time.time() - 5, 3), consumes=1)
    await log.write(an_insert(branch, a_publish(0), a_publish(1, exchange=b"a\xff"), a_consume(2)))
    with psycopg.connect(migrated_postgres_url) as connection:
        cursor = connection.execute("SELECT * FROM dtx.in_doubt")
        assert cursor.description is not None
        row = dict(zip([column.name for column in cursor.description], cursor.fetchone() or (), strict=True))
    assert row["xid"] == str(branch.xid)
    assert (row["rm"], row["vhost"], row["state"], row["owner"]) == ("rm", "/", "prepared", "guest")
    assert (row["publishes"], row["consumes"], row["bytes"], row["stuck"]) == (1, 1, 5, None)
    assert (row["queues"], row["exchanges"]) == (r"incoming\376", r"a\377, orders")
    assert 5 <= row["age"].total_seconds() < 60


def test_missing_tables_and_servers_are_named(postgres_url: str) -> None:
    with LogReader(postgres_url) as reader, pytest.raises(LogError, match="run dtx migrate"):
        totals(reader)
    with LogReader(postgres_url) as reader, pytest.raises(LogError, match="run dtx migrate"):
        list(in_doubt(reader))
    with (
        pytest.raises(LogUnavailable, match=r"cannot read postgresql://127\.0\.0\.1:1/x"),
        LogReader("postgresql://127.0.0.1:1/x"),
    ):
        pass


async def test_the_readers_session_settings_do_not_matter(open_log: OpenLog, migrated_postgres_url: str) -> None:
    log = await open_log()
    branch = a_branch()
    await log.write(an_insert(branch))
    with psycopg.connect(migrated_postgres_url, autocommit=True) as connection:
        for setting in ("DateStyle = 'SQL, DMY'", "TimeZone = 'Asia/Kathmandu'"):
            connection.execute(f"ALTER DATABASE {connection.info.dbname} SET {setting}")
    with LogReader(migrated_postgres_url) as reader:
        assert [found.branch for found in in_doubt(reader)] == [branch]


def test_a_question_that_takes_too_long_is_given_up(migrated_postgres_url: str) -> None:
    with LogReader(migrated_postgres_url, patience=0.05) as reader, pytest.raises(LogUnavailable, match="timeout"):
        reader.rows(text("SELECT pg_sleep(60)"))
    with LogReader(migrated_postgres_url) as reader:
        assert reader.rows(text("SELECT 1")) == [(1,)]
