"""One service for the tests of the protocol, which leave it alive."""

from collections.abc import Iterator

import pytest

from dtx.xa.xid import Xid
from tests.support.client import fresh_queue, new_xid
from tests.support.postgres import PostgresServer
from tests.support.rabbitmq import RabbitNode
from tests.support.raw import RawClient
from tests.support.service import DtxService

DEFAULT_TIMEOUT = 60
MAX_TIMEOUT = 3600
COORDINATOR = "the tm"


@pytest.fixture(scope="package")
def service(shared_rabbitmq: RabbitNode, postgres: PostgresServer) -> Iterator[DtxService]:
    """The service."""
    database = postgres.create_database()
    options = ["--management", shared_rabbitmq.management_url, "--coordinator", COORDINATOR]
    options += ["--default-timeout", str(DEFAULT_TIMEOUT), "--max-timeout", str(MAX_TIMEOUT)]
    options += ["--max-branch-messages", "20", "--max-branch-bytes", "64KiB", "--max-message-bytes", "32KiB"]
    options += ["--max-kept-bytes", "256KiB"]
    with DtxService(broker=shared_rabbitmq.url(), database=database, options=tuple(options)) as running:
        yield running
    postgres.drop_database(database)


@pytest.fixture
def queue(rabbitmq: RabbitNode) -> Iterator[str]:
    """A fresh durable queue."""
    with fresh_queue(rabbitmq) as name:
        yield name


@pytest.fixture
def raw(service: DtxService, rabbitmq: RabbitNode) -> Iterator[RawClient]:
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
