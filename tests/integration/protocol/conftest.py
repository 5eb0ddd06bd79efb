"""One service of each mode for the tests of the protocol, which leave it alive."""

from collections.abc import Iterator
from typing import cast

import pytest

from dtx.xa.xid import Xid
from tests.support.broker import MODES, Broker, Mode, StandaloneBroker
from tests.support.client import new_xid
from tests.support.postgres import PostgresServer
from tests.support.rabbitmq import RabbitNode
from tests.support.raw import RawClient
from tests.support.service import DtxService

DEFAULT_TIMEOUT = 60
MAX_TIMEOUT = 3600
COORDINATOR = "the tm"


@pytest.fixture(scope="package", params=MODES)
def mode(request: pytest.FixtureRequest) -> Mode:
    """What the rules are tested in: they are the same, whatever keeps the messages."""
    return cast("Mode", request.param)


@pytest.fixture(scope="package")
def service(mode: Mode, request: pytest.FixtureRequest, postgres: PostgresServer) -> Iterator[DtxService]:
    """The service."""
    node: RabbitNode | None = request.getfixturevalue("shared_rabbitmq") if mode == "alongside" else None
    database = postgres.create_database()
    options = [] if node is None else ["--management", node.management_url, "--max-kept-bytes", "256KiB"]
    options += ["--coordinator", COORDINATOR]
    options += ["--default-timeout", str(DEFAULT_TIMEOUT), "--max-timeout", str(MAX_TIMEOUT)]
    options += ["--max-branch-messages", "20", "--max-branch-bytes", "64KiB", "--max-message-bytes", "32KiB"]
    broker = None if node is None else node.url()
    with DtxService(broker=broker, database=database, options=tuple(options)) as running:
        yield running
    postgres.drop_database(database)


@pytest.fixture(scope="package")
def shared_broker(mode: Mode, service: DtxService, request: pytest.FixtureRequest) -> Broker:
    """Where the service has its messages."""
    if mode == "alongside":
        return cast("RabbitNode", request.getfixturevalue("shared_rabbitmq"))
    return StandaloneBroker(service)


@pytest.fixture
def broker(shared_broker: Broker) -> Broker:
    """The same, mended."""
    shared_broker.mend()
    return shared_broker


@pytest.fixture
def vhost(broker: Broker) -> Iterator[str]:
    """A fresh virtual host, which guest may use."""
    name = broker.add_vhost()
    yield name
    broker.delete_vhost(name)


@pytest.fixture
def raw(service: DtxService, broker: Broker) -> Iterator[RawClient]:
    """A connection with channel 1 selected, channel 2 not, and channel 3 selected."""
    with RawClient(service.url()) as client:
        client.open(1, select=True)
        client.open(2)
        client.open(3, select=True)
        yield client


@pytest.fixture
def xid() -> Xid:
    """An xid that nobody has used."""
    return new_xid()
