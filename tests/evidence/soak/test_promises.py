"""Standalone mode, kill -9 at random moments, repeatedly: every guarantee to a client is kept."""

import logging
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable

import psycopg
import pytest

from tests.support.client import connected
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.proxy import Proxy
from tests.support.rabbitmq_install import is_asked
from tests.support.service import DtxService
from tests.support.soak import Brancher, Eater, Ledger, Mover, Order, Publisher, Worker, declare, drain, insist

FAULTS = {"kill dtx": 8, "cut": 6, "kill PostgreSQL": 4, "kill both": 2, "stop dtx": 2}
"""Faults and their relative frequencies; "stop dtx" is a normal stop."""


def harm(fault: str, service: DtxService, postgres: PostgresServer, proxy: Proxy) -> None:
    """Cause a fault; if dtx has ended, start it again."""
    match fault:
        case "cut":
            proxy.cut()
        case "kill PostgreSQL":
            postgres.kill9()
        case "kill dtx" | "kill both":
            service.kill9()
            if fault == "kill both":
                postgres.kill9()
            start(service, postgres)
        case _:
            postgres.wait_ready()
            assert service.stop() == 0
            start(service, postgres)


def start(service: DtxService, postgres: PostgresServer) -> None:
    """Start dtx, which needs a running database at its start."""
    postgres.wait_ready()
    service.start()


def check_order(bodies: list[bytes], ledger: Ledger) -> None:
    """Check that the remaining messages of a queue, to which only publishers publish, are in their order."""
    order = Order(ledger)
    for body in bodies:
        order.see(body)


@pytest.mark.skipif(is_asked(), reason="this run is about a broker")
def test_every_promise_is_kept(
    own_postgres: PostgresServer, caplog: pytest.LogCaptureFixture, minutes: float, figures: Callable[..., None]
) -> None:
    """Guarantees: "prepared means durable", "nothing is lost", "exactly once", "never 404 in doubt"."""
    caplog.set_level(logging.CRITICAL, "pika")  # it logs each lost connection with many lines
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    database = own_postgres.create_migrated_database()
    ledger = Ledger()
    done: Counter[str] = Counter()
    with (
        DtxService(database=database, options=("--lease-ttl", "2")) as service,
        Proxy("127.0.0.1", service.port) as proxy,
    ):
        declare(service.url(), "a", "b", "c")
        url = service.url().replace(f":{service.port}/", f":{proxy.port}/")
        branchers = [Brancher(f"brancher{n}", url, ledger, chance.getrandbits(32)) for n in range(2)]
        kinds: list[tuple[type[Worker], str]] = [(Publisher, "p"), (Publisher, "q"), (Mover, "mover"), (Eater, "eater")]
        workers = [*branchers, *(kind(name, url, ledger, chance.getrandbits(32)) for kind, name in kinds)]
        for worker in workers:
            worker.start()
        try:
            end = time.monotonic() + minutes * 60 / 4
            while time.monotonic() < end and not ledger.faults:
                ledger.wait_for(chance.randrange(20, 400), chance.uniform(0.5, 5.0))
                (fault,) = chance.choices(list(FAULTS), list(FAULTS.values()))
                harm(fault, service, own_postgres, proxy)
                done[fault] += 1
        finally:
            for worker in workers:
                worker.stop.set()
            for worker in workers:
                worker.join(60)
        assert not [worker.name for worker in workers if worker.is_alive()]
        harm("kill both", service, own_postgres, proxy)
        for brancher in branchers:
            insist(lambda who=brancher: resolve(who))  # type: ignore[misc]
        in_queues = {queue: drain(service.url(), queue) for queue in ("a", "b", "c")}
        print(f"{dict(done)}; {ledger.figures()}; left { ({queue: len(found) for queue, found in in_queues.items()}) }")
        figures(faults_between_promises=done.total())
        check_order(in_queues["a"], ledger)
        assert ledger.audit(Counter(body for bodies in in_queues.values() for body in bodies)) == []
        wait_until(lambda: not rows(database), what="the deletion of all consumed messages")


def resolve(brancher: Brancher) -> None:
    """Complete the remaining branches."""
    with connected(brancher.url) as connection:
        brancher.resolve(connection, every=True)
    assert not brancher.open


def rows(database: str) -> int:
    """Return the number of messages and branches in PostgreSQL."""
    with psycopg.connect(database) as connection:
        row = connection.execute(
            "SELECT (SELECT count(*) FROM dtx.message) + (SELECT count(*) FROM dtx.branch)"
        ).fetchone()
    assert row is not None
    return int(row[0])
