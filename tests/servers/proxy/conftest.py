"""One node and one service for all tests of the proxy that do not stop them."""

from collections.abc import Iterator
from typing import cast

import pytest
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection

from tests.servers.proxy.channels import fill, select
from tests.support.broker import Broker
from tests.support.client import connected
from tests.support.postgres import PostgresServer
from tests.support.rabbitmq import RabbitNode
from tests.support.service import DtxService


@pytest.fixture(scope="package")
def service(shared_rabbitmq: RabbitNode, postgres: PostgresServer) -> Iterator[DtxService]:
    """A service in front of the shared node."""
    database = postgres.create_database()
    options = ("--management", shared_rabbitmq.management_url)
    with DtxService(broker=shared_rabbitmq.url(), database=database, options=options) as running:
        yield running
    postgres.drop_database(database)


@pytest.fixture(params=["direct", "through dtx"])
def url(request: pytest.FixtureRequest, rabbitmq: RabbitNode) -> str:
    """The URL of the broker or of dtx: both must behave the same."""
    if request.param == "direct":
        return rabbitmq.url()
    return cast("DtxService", request.getfixturevalue("service")).url()


@pytest.fixture
def connection(url: str) -> Iterator[BlockingConnection]:
    """A connection to ``url``."""
    with connected(url) as open_connection:
        yield open_connection


@pytest.fixture
def channel(connection: BlockingConnection) -> BlockingChannel:
    """A channel of ``connection``."""
    return connection.channel()


@pytest.fixture
def broker(rabbitmq: RabbitNode) -> Broker:
    """The broker behind the service."""
    return rabbitmq


@pytest.fixture
def selected(through: BlockingConnection) -> BlockingChannel:
    return select(through)


@pytest.fixture
def filled(rabbitmq: RabbitNode, queue: str) -> str:
    """A queue with the messages 1 to 6."""
    fill(rabbitmq, queue, 6)
    return queue
