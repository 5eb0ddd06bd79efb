"""One host of a database is silent, like a lost machine: it neither refuses connections nor answers."""

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlencode

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from dtx.db import connections
from dtx.db.connections import Dsn, connect, connected
from dtx.log.api import LogUnavailable
from dtx.log.lease import Lease
from tests.servers.log.conftest import OpenLog
from tests.support.branches import a_branch, all_of, an_insert

END = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE"


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of a host that accepts connections and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def url(migrated_postgres_url: str, silent: int) -> str:
    """The database, with a silent host before it in the list."""
    parts = conninfo_to_dict(migrated_postgres_url)
    hosts = {"host": f"127.0.0.1,{parts['host']}", "port": f"{silent},{parts.get('port', 5432)}"}
    return f"postgresql:///?{urlencode({**parts, **hosts, 'target_session_attrs': 'read-write'})}"


async def test_hosts_and_ports_that_do_not_match_are_refused() -> None:
    with pytest.raises(psycopg.Error, match="3 port"):
        await connect(Dsn("postgresql:///d?host=a,b&port=1,2,3"), {}, timeout=3.0)


async def test_a_silent_host_takes_its_share_of_time_once(url: str) -> None:
    dsn = Dsn(url)
    for least, most in ((1.0, 2.5), (0.0, 0.5)):
        began = time.monotonic()
        async with await connect(dsn, {"statement_timeout": "7s"}, timeout=4.0) as connection:
            assert await (await connection.execute("SHOW statement_timeout")).fetchone() == ("7s",)
        assert least <= time.monotonic() - began < most


async def test_a_log_moves_on_from_a_silent_host(open_log: OpenLog, url: str, migrated_postgres_url: str) -> None:
    """The writer has its retry window to connect, the lease a third of its lifetime."""
    log = await open_log(url=url, lease_ttl=9.0)
    await log.write(an_insert(first := a_branch()))
    log._dsn.first = 0
    with psycopg.connect(migrated_postgres_url) as others:
        others.execute(f"{END} 'dtx %'")
    await log.write(an_insert(second := a_branch()))
    assert {first.id, second.id} <= set(await all_of(log.load()))
    log._dsn.first = 0
    with psycopg.connect(migrated_postgres_url) as others:
        others.execute(f"{END} 'dtx lease %'")
    for _ in range(20):  # longer than the lease lasts without a renewal
        await asyncio.sleep(0.5)
        assert log.lease_valid


async def test_a_standby_gets_to_the_host_that_answers(open_log: OpenLog, url: str) -> None:
    """The standby loses its connection while it waits."""
    active = await open_log(url=url, lease_ttl=2.0)
    standby = Lease(Dsn(url), "rm", "standby", ttl=2.0)
    for _ in range(3):
        standby._dsn.first = 0
        await standby._disconnect()
        with suppress(TimeoutError, LogUnavailable):
            assert (await standby._within(2.0, standby._try()))[0] is None
    waiting = asyncio.create_task(standby.take())
    await active.close()
    assert await asyncio.wait_for(waiting, 10) > 1
    await standby.release()


async def test_a_connection_made_too_late_is_closed(migrated_postgres_url: str) -> None:
    made: list[psycopg.AsyncConnection] = []

    async def one() -> psycopg.AsyncConnection:
        made.append(await connect(Dsn(migrated_postgres_url), {}, timeout=5.0))
        waiting.cancel()
        return made[0]

    waiting = asyncio.create_task(connections._within(5.0, one(), {}))
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.gather(*connections._cancelling)
    assert made[0].closed


async def test_every_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[None] = []

    def second(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(None)
        writer.close()

    server = await asyncio.start_server(second, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    async def two(*_: object, **__: object) -> list[Any]:
        return [(0, 0, 0, "", (address, port)) for address in ("127.0.0.2", "127.0.0.1")]

    with socket.create_server(("127.0.0.2", port)):
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", two)
        dsn = Dsn(f"postgresql://u:secret@bank.example:{port}/d")
        with pytest.raises(psycopg.OperationalError, match=r"^127\.0\.0\.2: no answer within 1 seconds; .*0\.1"):
            await connect(dsn, {}, timeout=3.0)
    assert asked == [None]
    server.close()


def test_repeated_queries_wait_for_a_silent_host_once(url: str) -> None:
    """Pages and commands make a connection for each query."""
    dsn = Dsn(url)
    for least, most in ((2.0, 5.0), (0.0, 0.5)):
        began = time.monotonic()
        with connected(dsn, autocommit=True) as connection:
            assert connection.execute("SHOW DateStyle").fetchone() == ("ISO, MDY",)
        assert least <= time.monotonic() - began < most


async def test_the_error_of_a_single_host_is_reported_unchanged(migrated_postgres_url: str) -> None:
    parts = {**conninfo_to_dict(migrated_postgres_url), "user": "nobody"}
    with pytest.raises(psycopg.OperationalError, match="nobody"):
        await connect(Dsn(f"postgresql:///?{urlencode(parts)}"), {}, timeout=3.0)
