"""The programs of docs/how-to/django and docs/how-to/celery work, unchanged except for addresses and directories."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psycopg
import pytest

from tests.support.postgres import PostgresServer
from tests.support.processes import end, spawn, wait_until
from tests.support.service import ADMIN, DtxService
from tests.support.tm import World

ROOT: Final = Path(__file__).parents[3]
SECONDS: Final = 120


def blocks(page: str) -> list[str]:
    """The Python programs of a page."""
    text = (ROOT / "docs/how-to" / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.+?)^```", text, re.DOTALL | re.MULTILINE)


def python(directory: Path, *words: str, **variables: str) -> str:
    """Run Python in *directory*; return its output."""
    environment = {**os.environ, "PYTHONPATH": f"{directory}:{ROOT}", **variables}
    command = [sys.executable, *words]
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- Django -----------------------------------------------------------------------------------------------------------

SETTINGS: Final = """
SECRET_KEY = "x"
INSTALLED_APPS = ["orders"]
ROOT_URLCONF = "shop.urls"
ALLOWED_HOSTS = ["*"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
"""
URLS: Final = """
from django.urls import path
from orders.views import place
urlpatterns = [path("orders/<item>", place)]
"""
MODELS: Final = """
from django.db import models

class Order(models.Model):
    item = models.TextField()

class Shipment(models.Model):
    order = models.OneToOneField(Order, on_delete=models.CASCADE)
"""
REQUESTS: Final = """
import django
django.setup()
from django.core.management import call_command
from django.test import Client
from orders.models import Order, Shipment
from orders.two_phase import manager

call_command("migrate", "--run-syncdb", verbosity=0)
answer = Client().post("/orders/tea")
print(answer.status_code, answer.json(), Order.objects.values_list("item", flat=True)[0])

def broken(self, *args, **kwargs):
    raise ValueError("no such item")

create, Order.objects.create = Order.objects.create, broken
try:
    Client(raise_request_exception=False).post("/orders/milk")
finally:
    Order.objects.create = create
call_command("ship_orders")
print(Order.objects.count(), Shipment.objects.count(), manager().recover().clean)
manager().close()
"""


@pytest.fixture
def shop(tmp_path: Path, world: World) -> Path:
    """The Django project of the page."""
    pytest.importorskip("django", reason="needs Django")
    for code in blocks("django.md"):
        name = code.partition("\n")[0].removeprefix("# ")
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
    for name, code in (("shop/urls.py", URLS), ("orders/models.py", MODELS)):
        (tmp_path / name).write_text(code)
    settings = tmp_path / "shop/settings.py"
    database = psycopg.conninfo.conninfo_to_dict(world.databases["db1"])
    text = settings.read_text()
    assert '"NAME": "shop", "HOST": "127.0.0.1"' in text
    text = text.replace(
        '"NAME": "shop", "HOST": "127.0.0.1"',
        f'"NAME": "{database["dbname"]}", "HOST": "{database["host"]}", "PORT": "{database["port"]}", '
        f'"USER": "{database["user"]}", "PASSWORD": "{database.get("password", "")}"',
    )
    assert "/var/lib/shop/tm.db" in text
    text = text.replace("/var/lib/shop/tm.db", str(world.log))
    assert "amqp://shop:secret@127.0.0.1:5673/" in text
    settings.write_text(SETTINGS + text.replace("amqp://shop:secret@127.0.0.1:5673/", world.services["q1"].url()))
    for folder in ("shop", "orders", "orders/management", "orders/management/commands"):
        (tmp_path / folder / "__init__.py").touch()
    return tmp_path


def test_a_django_view_sends_and_a_command_receives(shop: Path, world: World) -> None:
    """One order is placed and shipped, and one fails without a trace."""
    with world.channel(world.services["q1"]) as channel:
        channel.queue_declare("shipping", durable=True)
        channel.queue_purge("shipping")
    said = python(shop, "-c", REQUESTS, DJANGO_SETTINGS_MODULE="shop.settings")
    assert said.splitlines() == ["200 {'order': 1} tea", "order 1 is shipped", "1 1 True"]
    assert world.in_doubt() == []
    with world.channel(world.services["q1"]) as channel:
        channel.queue_delete("shipping")


# -- Celery -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def service(server: PostgresServer) -> Iterator[DtxService]:
    """A dtx without a broker, with the user of the page."""
    database = server.create_database()
    with DtxService(database=database, options=ADMIN) as running:
        running.run("vhost", "add", "shop")
        (running.directory / "password").write_text("secret\n")
        with (running.directory / "password").open() as password:
            command = [sys.executable, "-m", "dtx", "user", "add", "celery", "--password-stdin"]
            command += ["--database", database, "--api", running.admin_url]
            token = running.run("token", "add", "test", "--role", "coordinator").stdout.strip()
            environment = {**os.environ, "DTX_TOKEN": token}
            subprocess.run(command, stdin=password, env=environment, check=True, timeout=SECONDS)
        running.run("user", "grant", "celery", "--vhost", "shop", "--all")
        yield running
    server.drop_database(database)


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_celery_runs_tasks_and_sends_one_with_a_row(
    service: DtxService, server: PostgresServer, tmp_path: Path, kind: str
) -> None:
    pytest.importorskip("celery", reason="needs Celery")
    tasks, send, *_ = blocks("celery.md")
    place = f"celery:secret@{service.host}:{service.port}/shop"
    for name, code in (("tasks.py", tasks), ("send.py", send)):
        assert "celery:secret@127.0.0.1:5673/shop" in code
        (tmp_path / name).write_text(code.replace("celery:secret@127.0.0.1:5673/shop", place))
    with (tmp_path / "tasks.py").open("a") as program:
        program.write(f"\napp.conf.task_default_queue_type = {kind!r}\n")
    database = server.create_database()
    output = tmp_path / "worker.log"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "celery", "-A", "tasks", "worker", "--concurrency", "2", "--loglevel", "INFO"]
    with output.open("ab") as log:
        worker = spawn(command, output=log.fileno(), errors=log.fileno(), env=environment, cwd=tmp_path)
    try:
        wait_until(lambda: "ready." in output.read_text(), seconds=SECONDS, what="the worker")
        ask = "from tasks import ship; print(ship.delay(1, 'tea').get(timeout=60))"
        assert python(tmp_path, "-c", ask) == "order 1: tea is shipped\n"
        ask = "from tasks import ship; print(ship.apply_async((2, 'milk'), countdown=2).get(timeout=60))"
        assert python(tmp_path, "-c", ask) == "order 2: milk is shipped\n"
        python(tmp_path, "send.py", database)
        wait_until(lambda: output.read_text().count("'order 1: tea is shipped'") == 2, seconds=SECONDS, what="the task")
    finally:
        end(worker)
    with psycopg.connect(service.database or "") as connection:
        found = connection.execute("SELECT position('quorum' IN encode(arguments, 'escape')) > 0 FROM dtx.queue")
        assert any(each for (each,) in found) is (kind == "quorum")
    with psycopg.connect(database) as connection:
        assert connection.execute("SELECT id, item FROM orders").fetchall() == [(1, "tea")]
    server.drop_database(database)
