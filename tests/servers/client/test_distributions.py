"""The distributions dtx and dtx-client, each installed from its wheel in a clean environment, and used."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.support.client import connected
from tests.support.service import DtxService

ROOT = Path(__file__).parents[3]
SERVER_ONLY = {"alembic", "fastapi", "psycopg", "sqlalchemy", "uvicorn", "uvloop"}
PROGRAM = """
import sys
from dtx.client.tm import DtxResource, TransactionManager

url, log = sys.argv[1:]
with TransactionManager(node="shop", log=log, resources=[DtxResource("queue", url)]) as tm:
    with tm.transaction() as tx:
        channel = tx.enlist("queue")
        channel.basic_publish("", "payments", b"30 to Bob")
print("committed")
"""


class Environment:
    """A clean virtual environment with one distribution.

    Args:
        directory: for the environment.
        project: the directory of the distribution.
    """

    def __init__(self, directory: Path, project: Path) -> None:
        self.python = directory / "bin/python"
        venv.create(directory, with_pip=True, symlinks=True)
        wheels = directory / "wheels"
        self.run("-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(wheels), str(project))
        (self.wheel,) = wheels.iterdir()
        self.run("-m", "pip", "install", "--quiet", str(self.wheel))
        self.packages = directory / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"

    def run(self, *words: str) -> str:
        """Run its Python outside of the project; return the output."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DTX_"))}
        done = subprocess.run(
            [self.python, *words],
            cwd=self.python.parent,
            env=environment | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def distributions(self) -> set[str]:
        """The names of its distributions."""
        return {each["name"].lower() for each in json.loads(self.run("-m", "pip", "list", "--format", "json"))}

    def megabytes(self) -> float:
        """The size of its packages, without pip."""
        tools = [path for name in ("pip*", "setuptools*") for path in self.packages.glob(name)]
        files = [path for path in self.packages.rglob("*") if path.is_file() and not {*path.parents} & {*tools}]
        return sum(path.stat().st_size for path in files) / 1e6


class InstalledDtx(DtxService):
    """A dtx of another environment.

    Args:
        python: of the environment.
        database: URL.
    """

    def __init__(self, python: Path, database: str) -> None:
        super().__init__(database=database, env={"PYTHONPATH": ""})
        self._python = python

    def command(self) -> list[str]:
        """See :class:`DtxService`."""
        _, _, _, *words = super().command()
        return [str(self._python.with_name("dtx")), *words]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with dtx-client."""
    return Environment(tmp_path_factory.mktemp("client"), ROOT / "deploy/client")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with dtx."""
    return Environment(tmp_path_factory.mktemp("full"), ROOT)


def test_both_distributions_work_together(
    client: Environment, full: Environment, postgres_url: str, tmp_path: Path
) -> None:
    with InstalledDtx(full.python, postgres_url) as service, connected(service.url()) as connection:
        channel = connection.channel()
        channel.queue_declare("payments", durable=True)
        assert client.run("-c", PROGRAM, service.url(), str(tmp_path / "tm.db")) == "committed\n"
        assert channel.basic_get("payments", auto_ack=True)[2] == b"30 to Bob"


def test_the_client_installs_nothing_of_the_server(client: Environment, full: Environment) -> None:
    assert client.distributions() & SERVER_ONLY == set()
    assert full.distributions() >= SERVER_ONLY
    print(f"dtx-client {client.megabytes():.0f} MB, dtx {full.megabytes():.0f} MB")
    assert client.megabytes() < full.megabytes() / 5


def test_a_log_in_postgresql_asks_for_psycopg(client: Environment) -> None:
    attempt = """
from dtx.client.tm import LogFailed, open_log
try:
    open_log("postgresql://127.0.0.1/none")
except LogFailed as error:
    print(error)
"""
    assert "needs psycopg" in client.run("-c", attempt)


def test_both_distributions_have_one_version(client: Environment, full: Environment) -> None:
    versions = {each.wheel.name.split("-")[1] for each in (client, full)}
    assert len(versions) == 1
