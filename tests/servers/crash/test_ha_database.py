"""PostgreSQL stands still (SIGSTOP), in part or as a whole, for longer than the lease: one dtx serves afterwards."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator

import psycopg
import pytest

from tests.support.heirs import FENCED, LEASE, Crowd, Pair
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server that only these tests need; each leaves it running."""
    with PostgresServer("own") as server:
        yield server


@pytest.fixture
def pair(server: PostgresServer, pair_with: Callable[..., Pair]) -> Pair:
    """An active dtx and a standby on that server."""
    return pair_with(server=server)


@contextlib.contextmanager
def stopped(pair: Pair, role: str) -> Iterator[None]:
    """The server process of one session of the active dtx stands still."""
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
    """The renewal hangs, and is made on another connection before the lease runs out."""
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
    """Wait until so many more branches were completed, by the dtx that is active now."""
    goal = crowd.done + more

    def enough() -> bool:
        if pair.standby.ready_line and pair.serving is not pair.standby:
            pair.go_on_with(pair.standby)
        return crowd.done >= goal

    wait_until(enough, seconds=90, what=f"{more} more branches")


def go_on(pair: Pair, crowd: Crowd) -> None:
    """One dtx serves now. A standby that has taken over has done so alone."""
    complete(pair, crowd, 20)
    if pair.serving is pair.standby:
        assert pair.active.wait() == FENCED
    else:
        assert pair.active.running
    crowd.settle()


def test_a_writer_that_hangs_in_a_transaction_loses_nothing(pair: Pair) -> None:
    """Nobody can know what it will still do: who takes the lease waits for it, and so does everybody else."""
    with Crowd(pair) as crowd:
        crowd.wait_for(20)
        until = expiry(pair)
        with stopped(pair, "writer"):
            wait_until(lambda: time.time() > until + 1, what="the end of the lease")  # one machine has one clock
        go_on(pair, crowd)


def test_a_server_that_stands_still_longer_than_the_lease_loses_nothing(pair: Pair, server: PostgresServer) -> None:
    """One of the two goes on: the active one may renew late what nobody took."""
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
            complete(pair, crowd, 15)  # a server that is slow to come back may have cost the lease
            server.kill9()
            server.wait_ready()
        go_on(pair, crowd)
