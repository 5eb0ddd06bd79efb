"""Java programs and both modes of dtx, for tests with other transaction managers."""

from collections.abc import Callable, Iterator

import pytest

from tests.servers.interop.java_programs import Java, Program, compiled
from tests.support.broker import MODES, Broker, Mode, StandaloneBroker
from tests.support.client import bodies as taken
from tests.support.client import fresh_queue
from tests.support.postgres import PostgresServer
from tests.support.rabbitmq import RabbitNode
from tests.support.service import ADMIN, DtxService


@pytest.fixture(scope="session")
def java() -> Iterator[Java]:
    """The compiled adapter and programs."""
    with compiled() as programs:
        yield programs


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> Mode:
    """The modes, one after the other."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def service(mode: Mode, postgres: PostgresServer, request: pytest.FixtureRequest) -> Iterator[DtxService]:
    """The service of a module. A test that kills it starts it again."""
    database = postgres.create_migrated_database()
    node = request.getfixturevalue("shared_rabbitmq").url() if mode == "alongside" else None
    with DtxService(broker=node, database=database, options=ADMIN) as running:
        yield running
    postgres.drop_database(database)


@pytest.fixture
def broker(mode: Mode, service: DtxService, request: pytest.FixtureRequest) -> Broker:
    """Where the service stores its messages."""
    if mode == "alongside":
        node: RabbitNode = request.getfixturevalue("rabbitmq")
        return node
    return StandaloneBroker(service)


@pytest.fixture(scope="module")
def program(java: Java, service: DtxService) -> Iterator[Program]:
    """A program with two connections, a and b."""
    with Program(java, a=service.url(), b=service.url()) as running:
        yield running


@pytest.fixture
def queue(broker: Broker) -> Iterator[str]:
    """A fresh durable queue."""
    with fresh_queue(broker) as name:
        yield name


@pytest.fixture
def bodies(broker: Broker, queue: str) -> Callable[[], list[str]]:
    """Takes all messages from ``queue``."""
    return lambda: [body.decode() for body in taken(broker, queue)]
