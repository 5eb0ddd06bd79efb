"""PostgreSQL or one of its sessions stops (SIGSTOP) for longer than the lease, or dies: one dtx serves afterwards."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator

import psycopg
import pytest

from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.standby_pair import FENCED, LEASE, Crowd, Pair


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server for these tests only; each test leaves it running."""
    with PostgresServer("own") as server:
        yield server


@pytest.fixture
def pair(server: PostgresServer, pair_with: Callable[..., Pair]) -> Pair:
    """An active dtx and a standby on that server."""
    return pair_with(server=server)


@contextlib.contextmanager
def stopped(pair: Pair, role: str) -> Iterator[None]:
    """Stop the server process of one session of the active dtx, and resume it at exit."""
    query = """
        SELECT pid FROM pg_stat_activity a JOIN dtx.lease l ON a.application_name = 'dtx ' || %s || ' ' || l.instance
        WHERE a.datname = current_database()
    """
    with psycopg.connect(pair.scene.database) as connection:
        ((pid,),) = connection.execute(query, [role]).fetchall()
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def expiry(pair: Pair) -> float:
    """When the lease runs out, by the database's clock."""
    with psycopg.connect(pair.scene.database) as connection:
        row = connection.execute("SELECT extract(epoch FROM expires_at) FROM dtx.lease").fetchone()
    assert row is not None
    return float(row[0])


def test_a_session_that_hangs_costs_the_active_one_nothing(pair: Pair) -> None:
    """The renewal hangs; dtx renews on another connection before the lease runs out."""
    with Crowd(pair) as crowd:
        crowd.wait_for(20)
        epoch = pair.epoch()
        until = expiry(pair) + 2 * LEASE
        with stopped(pair, "lease"):
            wait_until(lambda: expiry(pair) > until, what="renewals, twice as long as the lease lives")
            crowd.wait_for(10)
        assert pair.epoch() == epoch
        crowd.settle()
    assert pair.active.running
    assert not pair.standby.ready_line


def complete(pair: Pair, crowd: Crowd, more: int) -> None:
    """Wait until *more* further branches are completed, by the dtx that is then active."""
    goal = crowd.done + more

    def enough() -> bool:
        if pair.standby.ready_line and pair.serving is not pair.standby:
            pair.go_on_with(pair.standby)
        return crowd.done >= goal

    wait_until(enough, seconds=90, what=f"{more} more branches")


def go_on(pair: Pair, crowd: Crowd) -> None:
    """Check that one dtx serves: after a takeover the former active dtx is fenced and ends."""
    complete(pair, crowd, 20)
    if pair.serving is pair.standby:
        assert pair.active.wait() == FENCED
    else:
        assert pair.active.running
    crowd.settle()


def test_a_writer_that_hangs_in_a_transaction_loses_nothing(pair: Pair) -> None:
    """Its transaction may still commit, so a dtx that takes the lease waits for it."""
    with Crowd(pair) as crowd:
        crowd.wait_for(20)
        until = expiry(pair)
        with stopped(pair, "writer"):
            wait_until(lambda: time.time() > until + 1, what="the end of the lease")  # one clock for both
        go_on(pair, crowd)


def test_a_server_paused_longer_than_the_lease_loses_nothing(pair: Pair, server: PostgresServer) -> None:
    """One of the two serves afterwards. The active dtx may renew a lease that ran out if no other dtx has taken it."""
    with Crowd(pair) as crowd:
        crowd.wait_for(20)
        server.pause()
        try:
            waiting = b"the lease could not be renewed"
            pair.scene.wait_for(lambda: waiting in pair.active.log_path.read_bytes(), "a renewal that failed")
        finally:
            server.resume()
        go_on(pair, crowd)


def test_a_server_that_is_killed_loses_nothing(pair: Pair, server: PostgresServer) -> None:
    with Crowd(pair) as crowd:
        for _ in range(2):
            complete(pair, crowd, 15)  # dtx may lose the lease if the server restarts slowly
            server.kill9()
            server.wait_ready()
        go_on(pair, crowd)
