"""The programs in ``examples`` work as docs/how-to/python describes them."""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import end, free_port, spawn, wait_until
from tests.support.tm import World

EXAMPLES = Path(__file__).parents[3] / "examples"


def run(world: World, name: str, *, scheme: str = "postgresql://") -> str:
    """Run an example on the first database and the first service; return its output."""
    database = world.databases["db1"].replace("postgresql://", scheme)
    words = [sys.executable, str(EXAMPLES / name), database, world.services["q1"].url(), str(world.log)]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, timeout=100)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def query(world: World, text: str) -> list[Any]:
    """The result of a query on the first database."""
    with world.server.connection(world.databases["db1"]) as connection:
        return connection.execute(text.encode()).fetchall()


@pytest.fixture(autouse=True)
def fresh(world: World) -> None:
    """Remove the tables and the queue of earlier examples."""
    with world.server.connection(world.databases["db1"]) as connection:
        connection.execute("DROP TABLE IF EXISTS orders, shipments")
    with world.channel(world.services["q1"]) as channel:
        channel.queue_delete("shipping")


def shipping(world: World) -> list[str]:
    """Take all messages of the queue shipping."""
    found = []
    with world.channel(world.services["q1"]) as channel:
        while (body := channel.basic_get("shipping", auto_ack=True)[2]) is not None:
            found.append(body.decode())
    return found


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("order_psycopg.py", "postgresql://"),
        ("order_sqlalchemy.py", "postgresql+psycopg://"),
        ("order_zope.py", "postgresql+psycopg://"),
    ],
)
def test_an_order_and_its_message(world: World, name: str, scheme: str) -> None:
    assert "order 1 is placed" in run(world, name, scheme=scheme)
    assert query(world, "SELECT id, item FROM orders") == [(1, "tea")]
    assert shipping(world) == ["1"]
    assert world.in_doubt() == []


def test_a_consumer_ships_each_order_once(world: World) -> None:
    run(world, "order_psycopg.py")
    run(world, "order_psycopg.py")
    assert "2 shipped" in run(world, "consumer_aio.py")
    assert "0 shipped" in run(world, "consumer_aio.py")
    assert query(world, "SELECT number FROM shipments ORDER BY 1") == [(1,), (2,)]
    assert world.in_doubt() == []


def test_an_endpoint_places_orders(world: World) -> None:
    port = free_port()
    environment = {
        **os.environ,
        "DATABASE": world.databases["db1"],
        "AMQP": world.services["q1"].url(),
        "TM_LOG": str(world.log),
    }
    command = [sys.executable, "-m", "uvicorn", "examples.order_fastapi:app", "--port", str(port)]
    with (world.log.parent / "uvicorn.log").open("ab") as log:
        server = spawn(command, output=log.fileno(), errors=log.fileno(), env=environment, cwd=EXAMPLES.parent)
    try:

        def place() -> dict[str, int] | None:
            request = urllib.request.Request(f"http://127.0.0.1:{port}/orders/tea", method="POST")
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return dict(json.load(answer))
            except ConnectionError:
                return None
            except urllib.error.URLError as error:
                if isinstance(error.reason, ConnectionError):
                    return None
                raise

        placed: list[dict[str, int]] = []

        def answered() -> bool:
            placed.extend(filter(None, [place()]))
            return bool(placed)

        wait_until(answered, seconds=90, what="the endpoint")
        assert placed == [{"order": 1}]
    finally:
        end(server)
    assert query(world, "SELECT id, item FROM orders") == [(1, "tea")]
    assert shipping(world) == ["1"]
    assert world.in_doubt() == []
