"""One service for all tests of the client that do not stop it."""

from collections.abc import Iterator

import pytest
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection

from tests.support.client import connected, fresh_queue
from tests.support.postgres import PostgresServer
from tests.support.rabbitmq import RabbitNode
from tests.support.service import DtxService


@pytest.fixture(scope="package")
def service(shared_rabbitmq: RabbitNode, postgres: PostgresServer) -> Iterator[DtxService]:
    database = postgres.create_database()
    with DtxService(broker=shared_rabbitmq.url(), database=database) as running:
        yield running
    postgres.drop_database(database)


@pytest.fixture
def queue(rabbitmq: RabbitNode) -> Iterator[str]:
    """A fresh durable queue."""
    with fresh_queue(rabbitmq) as name:
        yield name


@pytest.fixture
def connection(service: DtxService, rabbitmq: RabbitNode) -> Iterator[BlockingConnection]:
    """A connection to the service, whose broker is up."""
    with connected(service.url()) as open_connection:
        yield open_connection


@pytest.fixture
def channel(connection: BlockingConnection) -> BlockingChannel:
    """A channel of ``connection``."""
    return connection.channel()
