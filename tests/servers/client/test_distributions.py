"""The distributions dtx and dtx-client: installed from their wheels in clean environments, used and removed."""

import json
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

import pytest

import dtx
from tests.support.client import connected
from tests.support.service import DtxService
from tests.support.wheels import CLIENT, SERVER, Environment, build_wheel

pytestmark = pytest.mark.timeout(600)  # pip installs dtx, and is slow where much else runs

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


def distributions(environment: Environment) -> set[str]:
    """The names of the distributions in an environment."""
    return {each["name"].lower() for each in json.loads(environment.pip("list", "--format", "json"))}


def megabytes(environment: Environment) -> float:
    """The size of the packages of an environment, without pip."""
    tools = {path for name in ("pip*", "setuptools*") for path in environment.packages.glob(name)}
    files = [path for path in environment.packages.rglob("*") if path.is_file() and not {*path.parents} & tools]
    return sum(path.stat().st_size for path in files) / 1e6


def contents(wheel: Path, *, metadata: bool = False) -> dict[str, bytes]:
    """The files of a wheel that it installs among the packages, or those about it."""
    with ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if (".dist-info/" in name) is metadata and ".data/" not in name]
        return {name.partition(".dist-info/")[2] if metadata else name: archive.read(name) for name in names}


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


class Wheels(NamedTuple):
    """One of each distribution."""

    client: Path
    server: Path


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    """Both wheels, built here."""
    place = tmp_path_factory.mktemp("wheels")
    return Wheels(build_wheel(CLIENT, place / "client"), build_wheel(SERVER, place / "server"))


@pytest.fixture(scope="module")
def client(wheels: Wheels, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with dtx-client."""
    environment = Environment(tmp_path_factory.mktemp("client"))
    environment.pip("install", "--quiet", wheels.client)
    return environment


@pytest.fixture(scope="module")
def full(wheels: Wheels, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with dtx, and with dtx-client, as dtx depends on it."""
    environment = Environment(tmp_path_factory.mktemp("full"))
    environment.pip("install", "--quiet", *wheels)
    return environment


@pytest.fixture
def both(wheels: Wheels, tmp_path: Path) -> Environment:
    """An environment with both distributions, to remove one; without the packages that only the server needs."""
    environment = Environment(tmp_path / "both")
    environment.pip("install", "--quiet", wheels.client)
    environment.pip("install", "--quiet", "--no-deps", wheels.server)
    return environment


def test_both_distributions_work_together(
    client: Environment, full: Environment, postgres_url: str, tmp_path: Path
) -> None:
    with InstalledDtx(full.python, postgres_url) as service, connected(service.url()) as connection:
        channel = connection.channel()
        channel.queue_declare("payments", durable=True)
        assert client.run("-c", PROGRAM, service.url(), str(tmp_path / "tm.db")) == "committed\n"
        assert channel.basic_get("payments", auto_ack=True)[2] == b"30 to Bob"


def test_the_client_installs_nothing_of_the_server(client: Environment, full: Environment) -> None:
    assert distributions(client) & SERVER_ONLY == set()
    assert distributions(full) >= SERVER_ONLY
    print(f"dtx-client {megabytes(client):.0f} MB, dtx {megabytes(full):.0f} MB")
    assert megabytes(client) < megabytes(full) / 5


def test_a_log_in_postgresql_asks_for_psycopg(client: Environment) -> None:
    attempt = """
from dtx.client.tm import LogFailed, open_log
try:
    open_log("postgresql://127.0.0.1/none")
except LogFailed as error:
    print(error)
"""
    assert "needs psycopg" in client.run("-c", attempt)


def test_each_file_of_the_package_has_one_owner(wheels: Wheels) -> None:
    client, server = contents(wheels.client), contents(wheels.server)
    assert client.keys() & server.keys() == set()
    modules = {str(path.relative_to(SERVER)) for path in (SERVER / "dtx").rglob("*.py")}
    assert modules - (client.keys() | server.keys()) == set()


def test_the_server_depends_on_the_client_of_its_version(wheels: Wheels, full: Environment) -> None:
    about = contents(wheels.server, metadata=True)["METADATA"].decode()
    assert f"\nRequires-Dist: dtx-client=={dtx.__version__}\n" in about
    assert f"\nVersion: {dtx.__version__}\n" in about
    full.pip("check")


def test_removal_of_the_server_keeps_the_client(both: Environment) -> None:
    both.pip("uninstall", "--quiet", "--yes", "dtx")
    both.run("-c", "import dtx.client.tm")
    assert both.start("-c", "import dtx.cli").returncode == 1


def test_removal_of_the_client_is_a_missing_dependency(both: Environment, wheels: Wheels) -> None:
    """Its installation repairs the server."""
    both.pip("uninstall", "--quiet", "--yes", "dtx-client")
    assert (
        f"dtx {dtx.__version__} requires dtx-client, which is not installed." in both.start("-m", "pip", "check").stdout
    )
    both.pip("install", "--quiet", wheels.client)
    both.run("-c", "import dtx.failpoint, dtx.client.tm")
    assert "dtx-client" not in both.start("-m", "pip", "check").stdout


def test_the_sdist_of_the_client_makes_the_same_wheel(full: Environment, wheels: Wheels, tmp_path: Path) -> None:
    full.pip("install", "--quiet", "hatchling")
    script = "import os, sys; from hatchling.build import build_sdist; os.chdir(sys.argv[1]); build_sdist(sys.argv[2])"
    full.run("-c", script, CLIENT, tmp_path)
    (sdist,) = tmp_path.glob("*.tar.gz")
    wheel = build_wheel(sdist, tmp_path / "again")
    for metadata in (False, True):
        assert contents(wheel, metadata=metadata) == contents(wheels.client, metadata=metadata)


def test_both_wheels_have_the_text_of_the_licence(wheels: Wheels) -> None:
    for wheel in wheels:
        assert contents(wheel, metadata=True)["licenses/LICENSE"] == (SERVER / "LICENSE").read_bytes()


def test_a_checkout_installs_without_a_wheel_of_the_client(tmp_path: Path) -> None:
    """``make install`` needs no dtx-client from an index."""
    environment = Environment(tmp_path / "checkout")
    environment.pip("install", "--quiet", "--no-deps", "--editable", SERVER)
    assert "dtx-client" not in environment.start("-m", "pip", "check").stdout
    environment.run("-c", "import dtx.failpoint, dtx.xa")
