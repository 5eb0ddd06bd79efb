"""One active dtx for each resource manager, fenced by its epoch."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from uuid import uuid4

import psycopg
import pytest

from dtx.log.api import LeaseHeld, LeaseLost, LogError
from dtx.log.postgres import PostgresTransactionLog
from dtx.log.statements import bind_group
from tests.servers.log.conftest import OpenLog
from tests.support.branches import a_branch, a_xid, all_of, an_insert
from tests.support.postgres import PostgresServer

TAKE_OVER = "UPDATE dtx.lease SET epoch = epoch + 1, instance = %s, holder = 'successor', expires_at = 'infinity'"


async def stop_renewing(log: PostgresTransactionLog) -> None:
    """Stop the renewal of the lease, as in a paused process."""
    lease = log._lease
    assert lease is not None
    assert lease._renewal is not None
    lease._renewal.cancel()


async def test_a_standby_takes_over_when_a_holder_stops_renewing(open_log: OpenLog) -> None:
    first = await open_log(lease_ttl=1.0)
    await first.write(an_insert(a_branch()))
    await stop_renewing(first)
    second = await open_log(lease_ttl=1.0)
    assert second.lease_valid
    assert not first.lease_valid
    late = a_branch()
    with pytest.raises(LeaseLost):
        await first.write(an_insert(late))
    assert late.id not in await all_of(second.load())


async def test_a_log_keeps_its_id_each_dtx_its_own(open_log: OpenLog, migrated_postgres_url: str) -> None:
    first = await open_log()
    await first.close()
    second = await open_log()
    other = PostgresTransactionLog(migrated_postgres_url, "another")
    await other.open()
    assert first.id == second.id != other.id
    assert first.instance != second.instance
    await other.close()


async def test_the_loser_is_notified_once(open_log: OpenLog, migrated_postgres_url: str) -> None:
    told: list[str] = []
    lost = asyncio.Event()

    def tell() -> None:
        told.append("lost")
        lost.set()

    log = await open_log(lease_ttl=0.6, on_lease_lost=tell)
    with psycopg.connect(migrated_postgres_url) as connection:
        connection.execute(TAKE_OVER, [uuid4()])
    await asyncio.wait_for(lost.wait(), 5)
    with pytest.raises(LeaseLost):
        await log.write(an_insert(a_branch()))
    with pytest.raises(LeaseLost):
        await log.lookup("/", a_xid())
    assert told == ["lost"]


async def test_a_commit_begun_before_the_lease_was_lost_writes_nothing(
    open_log: OpenLog, migrated_postgres_url: str
) -> None:
    """Every write proves its epoch by SELECT … FOR SHARE on the row (a plain EXISTS lets a stale commit through)."""
    log = await open_log()
    branch = a_branch()
    with psycopg.connect(migrated_postgres_url) as successor:
        successor.execute(TAKE_OVER, [uuid4()])
        write = asyncio.create_task(log.write(an_insert(branch)))
        await lock_is_waited_for(migrated_postgres_url)
        successor.commit()
        with pytest.raises(LeaseLost):
            await write
        assert successor.execute("SELECT count(*) FROM dtx.branch").fetchone() == (0,)
        assert successor.execute("SELECT count(*) FROM dtx.journal").fetchone() == (0,)


async def test_a_commit_that_proved_its_epoch_is_visible_to_successors(
    open_log: OpenLog, migrated_postgres_url: str
) -> None:
    """The successor raises the epoch before it loads."""
    first = await open_log(lease_ttl=1.0)
    branch = a_branch()
    with psycopg.connect(migrated_postgres_url) as other:
        other.execute("LOCK TABLE dtx.work IN ACCESS EXCLUSIVE MODE")  # after the proof of the lease
        write = asyncio.create_task(first.write(an_insert(branch)))
        await lock_is_waited_for(migrated_postgres_url)
        await stop_renewing(first)
        taking = asyncio.create_task(open_log(lease_ttl=1.0))
        await lock_is_waited_for(migrated_postgres_url, sessions=2)
        other.commit()
    await write
    second = await taking
    assert branch.id in await all_of(second.load())


async def test_a_holder_stopped_within_a_group_is_not_waited_for(open_log: OpenLog, migrated_postgres_url: str) -> None:
    """Its session has proved the lease and waits for the rest: its lock could outlive the lease by hours."""
    first = await open_log(lease_ttl=1.0)
    await stop_renewing(first)
    await send_half_a_group(first)
    second = await asyncio.wait_for(open_log(lease_ttl=1.0), 20)
    assert second.lease_valid
    with pytest.raises(LeaseLost):
        await first.write(an_insert(a_branch()))
    assert await all_of(second.load()) == {}


async def test_a_holder_within_a_long_group_keeps_its_lease(open_log: OpenLog, migrated_postgres_url: str) -> None:
    """However long a group takes, a standby does not end its session while the lease is renewed."""
    first = await open_log(lease_ttl=60.0)
    with psycopg.connect(migrated_postgres_url, autocommit=True) as connection:
        pid = await send_half_a_group(first)
        with pytest.raises(LeaseHeld, match="has the lease"):
            await PostgresTransactionLog(migrated_postgres_url, "rm").open(wait=False)
        assert connection.execute("SELECT pid FROM pg_stat_activity WHERE pid = %s", [pid]).fetchone() == (pid,)
        with pytest.raises(psycopg.errors.LockNotAvailable):
            connection.execute("SELECT FROM dtx.lease FOR UPDATE NOWAIT")


async def send_half_a_group(log: PostgresTransactionLog) -> int:
    """Send only the proof of the lease, like a process that is stopped while it sends a group.

    Returns:
        The pid of the session, which waits for the rest.
    """
    assert log._writer is not None
    session = log._writer._session
    assert session is not None
    statement, parameters = bind_group(b"rm", log.epoch, [])[0]
    session._pgconn.send_query_prepared(statement.name, parameters, [1] * len(parameters), 1)
    assert session._pgconn.flush() == 0
    async with await psycopg.AsyncConnection.connect(session._dsn.conninfo, autocommit=True) as connection:
        while True:
            cursor = await connection.execute(
                "SELECT wait_event FROM pg_stat_activity WHERE pid = %s AND state = 'active'", [session.backend_pid]
            )
            if await cursor.fetchone() == ("ClientRead",):
                return session.backend_pid
            await asyncio.sleep(0.01)


async def lock_is_waited_for(url: str, sessions: int = 1) -> None:
    """Return when that many sessions of dtx wait for a lock."""
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        while True:
            cursor = await connection.execute(
                "SELECT count(*) FROM pg_stat_activity "
                "WHERE datname = current_database() AND application_name LIKE 'dtx %' AND wait_event_type = 'Lock'"
            )
            if await cursor.fetchone() == (sessions,):
                return
            await asyncio.sleep(0.01)


async def test_a_clean_close_hands_over_at_once(open_log: OpenLog) -> None:
    first = await open_log(lease_ttl=60.0)
    standby = asyncio.create_task(open_log(lease_ttl=60.0))
    await first.close()
    assert (await asyncio.wait_for(standby, 5)).lease_valid


async def test_an_expired_lease_that_is_free_is_renewed(open_log: OpenLog) -> None:
    log = await open_log(lease_ttl=0.5)
    await stop_renewing(log)
    lease = log._lease
    assert lease is not None
    while log.lease_valid:
        await asyncio.sleep(0.05)
    with pytest.raises(LeaseLost):
        await log.lookup("/", a_xid())
    await log.write(an_insert(a_branch()))
    await lease.renew()
    assert lease.valid
    await log.lookup("/", a_xid())


async def test_a_lease_survives_its_session(open_log: OpenLog, migrated_postgres_url: str) -> None:
    log = await open_log(lease_ttl=1.5)
    with psycopg.connect(migrated_postgres_url, autocommit=True) as connection:
        connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'dtx %'")
        before = connection.execute("SELECT expires_at FROM dtx.lease").fetchone()
        while connection.execute("SELECT expires_at FROM dtx.lease").fetchone() == before:
            await asyncio.sleep(0.05)
    assert log.lease_valid
    await log.write(an_insert(a_branch()))


async def test_a_hanging_renewal_is_abandoned_in_time_for_another(
    open_log: OpenLog, migrated_postgres_url: str
) -> None:
    """A stopped process of PostgreSQL or a connection that the network has dropped does not cost the lease."""
    log = await open_log(lease_ttl=3.0)
    lease = log._lease
    assert lease is not None
    assert lease._connection is not None
    backend = lease._connection.info.backend_pid
    os.kill(backend, signal.SIGSTOP)
    try:
        with psycopg.connect(migrated_postgres_url, autocommit=True) as connection:
            stopped_at = connection.execute("SELECT expires_at FROM dtx.lease").fetchone()
            while connection.execute("SELECT expires_at FROM dtx.lease").fetchone() == stopped_at:
                assert log.lease_valid
                await asyncio.sleep(0.02)
    finally:
        os.kill(backend, signal.SIGCONT)
    await log.write(an_insert(a_branch()))
    assert not lease.lost.is_set()


async def test_a_standby_whose_connection_hangs_takes_over_with_another(
    open_log: OpenLog, migrated_postgres_url: str
) -> None:
    active = await open_log(lease_ttl=2.0)
    standby = asyncio.create_task(open_log(lease_ttl=2.0))
    with psycopg.connect(migrated_postgres_url, autocommit=True) as connection:
        sessions: list[tuple[int]] = []
        while len(sessions) < 2:
            sessions = connection.execute(
                "SELECT pid FROM pg_stat_activity WHERE datname = current_database() "
                "AND application_name LIKE 'dtx lease %' ORDER BY backend_start"
            ).fetchall()
            await asyncio.sleep(0.02)
    (backend,) = sessions[1]
    os.kill(backend, signal.SIGSTOP)
    try:
        await active.close()
        assert (await asyncio.wait_for(standby, 30)).lease_valid
    finally:
        os.kill(backend, signal.SIGCONT)


async def test_epochs_only_grow(open_log: OpenLog, migrated_postgres_url: str) -> None:
    epochs = []
    for _ in range(3):
        log = await open_log()
        with psycopg.connect(migrated_postgres_url) as connection:
            row = connection.execute("SELECT epoch FROM dtx.lease WHERE rm = 'rm'").fetchone()
        assert row is not None
        epochs.append(row[0])
        await log.close()
    assert epochs == sorted(set(epochs))


HOLD = """
import asyncio, sys
from dtx.log.postgres import PostgresTransactionLog
from dtx.log.statements import bind_group

async def hold():
    await PostgresTransactionLog(sys.argv[1], "rm", lease_ttl=3600.0).open()
    print("held", flush=True)
    await asyncio.Event().wait()

asyncio.run(hold())
"""


async def test_a_successor_on_the_machine_ignores_a_dead_holder(open_log: OpenLog, migrated_postgres_url: str) -> None:
    """Restart: serving within seconds of kill -9, not after the lease's time."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, migrated_postgres_url], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as holder:
        assert holder.stdout is not None
        while b"held" not in await asyncio.to_thread(holder.stdout.readline):
            pass
        holder.send_signal(signal.SIGSTOP)
        opening = asyncio.create_task(open_log(lease_ttl=3600.0))
        done, _ = await asyncio.wait([opening], timeout=1.0)
        assert not done, "a stopped process may continue at any moment"
        holder.kill()
        assert (await asyncio.wait_for(opening, 5)).lease_valid


async def test_an_epoch_that_was_bumped_for_us_is_no_loss(open_log: OpenLog, migrated_postgres_url: str) -> None:
    log = await open_log()
    with psycopg.connect(migrated_postgres_url) as connection:
        connection.execute("UPDATE dtx.lease SET epoch = epoch + 5")
    await asyncio.gather(*(log.write(an_insert(a_branch())) for _ in range(5)))
    assert len(await all_of(log.load())) == 5


async def test_a_lease_lost_while_disconnected_ends_all_writes(open_log: OpenLog, migrated_postgres_url: str) -> None:
    lost = asyncio.Event()
    log = await open_log(lease_ttl=60.0, on_lease_lost=lost.set)
    with psycopg.connect(migrated_postgres_url) as connection:
        connection.execute(TAKE_OVER, [uuid4()])
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'dtx writer%'"
        )
    results = await asyncio.gather(*(log.write(an_insert(a_branch())) for _ in range(5)), return_exceptions=True)
    assert [type(result) for result in results] == [LeaseLost] * 5
    await asyncio.wait_for(lost.wait(), 5)
    with pytest.raises(LeaseLost):
        await log.write(an_insert(a_branch()))


async def test_a_database_user_without_rights_is_named(migrated_postgres_url: str, postgres: PostgresServer) -> None:
    with postgres.connection(migrated_postgres_url) as connection:
        connection.execute("DROP ROLE IF EXISTS nobody_at_all")
        connection.execute("CREATE ROLE nobody_at_all LOGIN PASSWORD 'x'")
        url = re.sub("//[^@]*@", "//nobody_at_all:x@", migrated_postgres_url)
        with pytest.raises(LogError, match="the database user may not use the log: permission denied"):
            await PostgresTransactionLog(url, "rm").open()
        connection.execute("DROP ROLE nobody_at_all")
