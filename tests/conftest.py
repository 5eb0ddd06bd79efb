"""Fixtures for all tests: real PostgreSQL, real RabbitMQ, the real service."""

import gc
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

import pytest
import trustme
from hypothesis import settings
from pika.adapters.blocking_connection import BlockingConnection
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

from tests.support import rabbitmq_install
from tests.support.broker import Broker
from tests.support.browser import Browser
from tests.support.client import connected, fresh_queue
from tests.support.postgres import PostgresServer
from tests.support.processes import log_tails, short_directory
from tests.support.proxy import Proxy
from tests.support.rabbitmq import RabbitNode
from tests.support.rabbitmq_install import CLUSTERS, KHEPRI, OPTION, VERSIONS
from tests.support.rabbitmq_versions import CLUSTER_DIFFERENCES, DIFFERENCES
from tests.support.service import DtxService
from tests.support.summary import LEFT_OUT, Exercised


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--rabbitmq 4``."""
    parser.addoption("--rabbitmq", choices=[*VERSIONS, KHEPRI, *CLUSTERS], help="the RabbitMQ of the tests")


def pytest_configure(config: pytest.Config) -> None:
    """Register the summary of tests that did not run; turn off the deadlines of Hypothesis."""
    if config.getoption("rabbitmq"):
        os.environ[OPTION] = config.getoption("rabbitmq")
    config.pluginmanager.register(Exercised(), "dtx-exercised")
    settings.register_profile("dtx", deadline=None)  # a slow machine is not a failure
    settings.load_profile("dtx")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """If several processes share the files, mix them and begin with the longest computations.

    Tests that wait for servers use little processor time. A long computation that begins last would keep one process
    busy at the end. Tests in DIFFERENCES, where RabbitMQ 4 or a cluster differs, must fail against it.
    """
    differences = DIFFERENCES if rabbitmq_install.chosen() == "4" else {}
    if rabbitmq_install.chosen_cluster():
        differences = differences | CLUSTER_DIFFERENCES
    for item in items:
        if item.nodeid in differences:
            item.add_marker(pytest.mark.xfail(reason=differences[item.nodeid], strict=True))
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: (not _computes(item.path), crc32(item.path.name.encode()), item.path))


def _computes(path: Path) -> bool:
    return "pipeline" in path.parts or path.name == "test_simulation.py"


class ByFile(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """One process runs all tests of a file; one process runs all files that need Spark, which starts slowly."""

    def _split_scope(self, nodeid: str) -> str:
        return "pipeline" if "/pipeline/" in nodeid else str(super()._split_scope(nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    """Assign files to processes, in the order of ``pytest_collection_modifyitems``."""
    config.option.loadscopereorder = False
    return ByFile(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Freeze the collected tests, so that garbage collections do not scan thousands of them again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the logs of the servers to every failure."""
    report = yield
    if report.failed:
        report.sections += [(f"log of {name}", text) for name, text in log_tails()]
    return report


@pytest.fixture
def left_out(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Records a sentence about a part that a test could not exercise."""
    return partial(record_property, LEFT_OUT)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """The shared PostgreSQL server; tests that kill a server use ``own_postgres``."""
    with PostgresServer(in_memory=True) as server:
        yield server


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> Iterator[str]:
    """The URL of a fresh, empty database."""
    url = postgres.create_database()
    yield url
    postgres.drop_database(url)


@pytest.fixture
def migrated_postgres_url(postgres: PostgresServer) -> Iterator[str]:
    """The URL of a fresh database with the log's tables."""
    url = postgres.create_migrated_database()
    yield url
    postgres.drop_database(url)


def _is_evidence(request: pytest.FixtureRequest) -> bool:
    """Whether the test is in the evidence tier, where servers use the disk, as users do."""
    return "evidence" in request.path.parts


@pytest.fixture
def own_postgres(request: pytest.FixtureRequest) -> Iterator[PostgresServer]:
    """A PostgreSQL server for one test, which may kill, stop and pause it."""
    with PostgresServer("own", in_memory=not _is_evidence(request)) as server:
        yield server


@pytest.fixture(scope="session")
def shared_rabbitmq() -> Iterator[RabbitNode]:
    """The node behind ``rabbitmq``."""
    with ExitStack() as stack:
        node = stack.enter_context(RabbitNode(in_memory=True))
        for _ in range(2 if rabbitmq_install.chosen_cluster() else 0):
            stack.enter_context(RabbitNode(in_memory=True, joins=node))
        yield node


@pytest.fixture
def rabbitmq(shared_rabbitmq: RabbitNode) -> RabbitNode:
    """The shared RabbitMQ node, running. A test may kill it: it is repaired before the next test."""
    shared_rabbitmq.mend()
    return shared_rabbitmq


@pytest.fixture
def own_rabbitmq(request: pytest.FixtureRequest) -> Iterator[RabbitNode]:
    """A RabbitMQ node for one test."""
    with RabbitNode(in_memory=not _is_evidence(request)) as node:
        yield node


@pytest.fixture(scope="session")
def needs_rabbitmq4() -> None:
    """Skip tests of RabbitMQ 4 if it is not installed: the installation takes longer than a test may."""
    if not rabbitmq_install.is_there("4"):
        pytest.skip("there is no RabbitMQ 4: make rabbitmq4")


@pytest.fixture
def vhost(rabbitmq: RabbitNode) -> Iterator[str]:
    """A fresh virtual host of the shared node that guest may use."""
    name = rabbitmq.add_vhost()
    yield name
    rabbitmq.mend()
    rabbitmq.delete_vhost(name)


@pytest.fixture(scope="session")
def certificates() -> Iterator[Path]:
    """A directory with ``ca.pem``, and ``server`` and ``client`` certificates (``.pem``, ``.key``) for 127.0.0.1."""
    authority = trustme.CA()
    with short_directory("tls") as directory:
        authority.cert_pem.write_to_path(directory / "ca.pem")
        for name in ("server", "client"):
            certificate = authority.issue_cert("127.0.0.1", "localhost", common_name=name)
            certificate.private_key_pem.write_to_path(directory / f"{name}.key")
            for position, part in enumerate(certificate.cert_chain_pems):
                part.write_to_path(directory / f"{name}.pem", append=position > 0)
        yield directory


class ServiceFactory(Protocol):
    """Starts services that end with the test."""

    def __call__(self, *options: str, broker: str | None = ..., database: str | None = ..., **more: Any) -> DtxService:
        """Start a service with further options; see ``DtxService``."""


@pytest.fixture
def dtx_service(request: pytest.FixtureRequest) -> Iterator[ServiceFactory]:
    """Starts ``dtx serve``: ``dtx_service("--default-timeout", "5")``.

    Without *broker* it uses the shared node. Without *database* it uses a fresh database of the shared PostgreSQL, with
    the tables of the log; with ``database="embedded"`` it uses the embedded server of dtx.
    """
    with ExitStack() as stack:

        def start(*options: str, broker: str | None = None, database: str | None = None, **more: Any) -> DtxService:
            if broker is None:
                broker = request.getfixturevalue("rabbitmq").url()
            if database is None:
                postgres = request.getfixturevalue("postgres")
                database = postgres.create_migrated_database()
                stack.callback(postgres.drop_database, database)
            elif database == "embedded":
                database = None
            return stack.enter_context(DtxService(broker=broker, database=database, options=options, **more))

        yield start


@pytest.fixture
def proxy() -> Iterator[Callable[[str, int], Proxy]]:
    """Starts a :class:`Proxy` in front of host and port."""
    with ExitStack() as stack:

        def start(host: str, port: int) -> Proxy:
            return stack.enter_context(Proxy(host, port))

        yield start


@pytest.fixture
def queue(broker: Broker) -> Iterator[str]:
    """A fresh durable queue, declared directly at the broker. Each folder has its own ``broker``."""
    with fresh_queue(broker) as name:
        yield name


@pytest.fixture
def through(service: DtxService, broker: Broker) -> Iterator[BlockingConnection]:
    """A connection to the service."""
    with connected(service.url()) as open_connection:
        yield open_connection


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """The browser that the tests of a module share; tests use ``browser``.

    It ends with the module: while its event loop runs, tests that are coroutines cannot run.
    """
    with Browser() as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """The browser without open windows."""
    yield chromium
    chromium.leave()
