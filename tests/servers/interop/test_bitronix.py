"""Bitronix, another transaction manager, with PostgreSQL's JDBC driver and dtx in one transaction.

It is halted at every step of two-phase commit, with either resource first, and recovers when it starts again.
"""

import contextlib
import itertools
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from tests.servers.interop.java_programs import Java
from tests.support.broker import Broker, Mode
from tests.support.client import bodies as bodies_of
from tests.support.crash import Stage
from tests.support.postgres import PostgresServer
from tests.support.processes import end, spawn
from tests.support.proxy import Proxy
from tests.support.rabbitmq import RabbitNode
from tests.support.service import DtxService

HALTED = 86
BEFORE_DTX, BEHIND_DTX = "0", "2"
POINTS = "prepare-before", "prepare-after", "commit-before", "recovery-commit-after", "commit-after"


@pytest.fixture(scope="module")
def orders() -> Iterator[PostgresServer]:
    """PostgreSQL with prepared transactions, and a table of orders."""
    with PostgresServer("orders") as server:
        server.configure(max_prepared_transactions=10)
        with server.connection() as connection:
            connection.execute("CREATE TABLE orders (name text PRIMARY KEY)")
        yield server


@contextlib.contextmanager
def jdbc(database: str) -> Iterator[tuple[str, str, str]]:
    """URL, user and password of a database for JDBC, which has no Unix sockets."""
    facts = conninfo_to_dict(database)
    with Proxy(str(facts["host"]), int(facts["port"] or 0)) as tcp:
        url = f"jdbc:postgresql://127.0.0.1:{tcp.port}/{facts['dbname']}"
        yield url, str(facts["user"]), str(facts["password"])


def run_transfer(java: Java, directory: Path, url: str, *words: str) -> int:
    """Run ``Transfer.java`` with a journal in *directory* and dtx at *url*; return its exit status."""
    with tempfile.TemporaryFile() as said:
        process = spawn(java.command("Transfer", str(directory), url, *words), output=said.fileno())
        try:
            status = process.wait(100)
        except subprocess.TimeoutExpired:
            status = -1
        end(process)
        said.seek(0)
        print(words, status, said.read().decode())
    return status


@pytest.fixture
def transfer(
    java: Java, service: DtxService, orders: PostgresServer, queue: str, tmp_path: Path
) -> Iterator[Callable[..., int]]:
    """Runs ``Transfer.java`` with further arguments; returns its exit status."""
    with jdbc(orders.url) as where:
        yield lambda *words: run_transfer(java, tmp_path, service.url(), *where, queue, *words)


@pytest.mark.timeout(400)
def test_both_resources_agree_wherever_the_program_is_halted(
    mode: Mode,
    transfer: Callable[..., int],
    service: DtxService,
    orders: PostgresServer,
    bodies: Callable[[], list[str]],
) -> None:
    """Presumed abort: a transaction is committed if its decision was in the manager's journal, else rolled back."""
    with orders.connection() as connection:
        connection.execute("TRUNCATE orders")
    positions = (BEFORE_DTX, BEHIND_DTX) if mode == "standalone" else (BEFORE_DTX,)
    expected = {"last"}
    for position, point in itertools.product(positions, POINTS):
        assert transfer(f"{position}-{point}", position, point) == HALTED
        if point.startswith("commit"):
            expected.add(f"{position}-{point}")
    assert transfer("last") == 0
    with orders.connection() as connection:
        rows = {name for (name,) in connection.execute("SELECT name FROM orders")}
        assert connection.execute("SELECT count(*) FROM pg_prepared_xacts").fetchone() == (0,)
    assert rows == expected
    assert sorted(bodies()) == sorted(expected)
    assert service.run("in-doubt", "--json").stdout.strip() in {"", "[]"}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("dies", [False, True], ids=["both-live", "one-is-killed"])
def test_bitronix_recovers_through_another_member(
    java: Java,
    orders: PostgresServer,
    shared_rabbitmq: RabbitNode,
    postgres: PostgresServer,
    tmp_path: Path,
    dies: bool,
) -> None:
    """Each run works through one of two members, and first recovers what the run before left at the other one."""
    with orders.connection() as connection:
        connection.execute("TRUNCATE orders")
    members = Stage(shared_rabbitmq, postgres, options=("--advertise", "amqp://127.0.0.1"))
    with jdbc(orders.url) as where, members as stage:
        queue = stage.declare("orders")
        services = itertools.cycle((stage.service, stage.another_service()))
        expected = {"last"}
        for point in POINTS:
            service = next(services)
            url = service.url(vhost=stage.vhost)
            assert run_transfer(java, tmp_path, url, *where, queue, point, BEFORE_DTX, point) == HALTED
            if point.startswith("commit"):
                expected.add(point)
            if dies:
                service.kill9()
                service.start()
        url = next(services).url(vhost=stage.vhost)
        assert run_transfer(java, tmp_path, url, *where, queue, "last") == 0
        with orders.connection() as connection:
            rows = {name for (name,) in connection.execute("SELECT name FROM orders")}
            assert connection.execute("SELECT count(*) FROM pg_prepared_xacts").fetchone() == (0,)
        assert rows == expected
        assert sorted(stage.bodies(queue)) == sorted(order.encode() for order in expected)
        assert stage.states() == {}


def test_the_example_places_orders(
    java: Java, service: DtxService, broker: Broker, orders: PostgresServer, tmp_path: Path
) -> None:
    """``examples/java/OrderBitronix.java``, twice: the second run finds the journal of the first."""
    database = orders.create_database()
    with jdbc(database) as where:
        for number in (1, 2):
            command = java.command("OrderBitronix", str(tmp_path), service.url(), *where)
            ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
            assert ended.returncode == 0, ended.stderr
            assert f"order {number} is placed" in ended.stdout
    with orders.connection(database) as connection:
        assert connection.execute("SELECT id, item FROM orders ORDER BY id").fetchall() == [(1, "tea"), (2, "tea")]
        assert connection.execute("SELECT count(*) FROM pg_prepared_xacts").fetchone() == (0,)
    orders.drop_database(database)
    assert bodies_of(broker, "shipping") == [b"1", b"2"]
    with broker.channel() as channel:
        channel.queue_delete("shipping")
    assert service.run("in-doubt", "--json").stdout.strip() in {"", "[]"}
