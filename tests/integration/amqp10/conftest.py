"""One dtx in each mode for clients of AMQP 1.0, which leave it alive."""

import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import pytest
from pika.adapters.blocking_connection import BlockingChannel

from tests.support.broker import MODES, Mode
from tests.support.client import connected
from tests.support.postgres import PostgresServer
from tests.support.rabbitmq import RabbitNode
from tests.support.service import DtxService

if TYPE_CHECKING:
    from tests.integration.amqp10.client import Client


@pytest.fixture(scope="package", params=MODES)
def mode(request: pytest.FixtureRequest) -> Mode:
    """What keeps the messages: clients see no difference, but where a test says so."""
    return cast("Mode", request.param)


@pytest.fixture(scope="package")
def service(mode: Mode, request: pytest.FixtureRequest, postgres: PostgresServer) -> Iterator[DtxService]:
    """The service."""
    node: RabbitNode | None = request.getfixturevalue("shared_rabbitmq") if mode == "alongside" else None
    database = postgres.create_database()
    options = () if node is None else ("--management", node.management_url)
    with DtxService(broker=None if node is None else node.url(), database=database, options=options) as running:
        yield running
    postgres.drop_database(database)


@pytest.fixture(scope="package")
def small(postgres: PostgresServer) -> Iterator[DtxService]:
    """One without a broker whose branches hold little; its users and its tables may be changed."""
    database = postgres.create_database()
    with DtxService(database=database, options=("--max-branch-messages", "2")) as running:
        yield running
    postgres.drop_database(database)


@pytest.fixture
def client(service: DtxService) -> "Iterator[Client]":
    """A connection with AMQP 1.0."""
    from tests.integration.amqp10.client import Client  # where there is Proton

    with Client(service) as open_client:
        yield open_client


@pytest.fixture
def channel(service: DtxService) -> Iterator[BlockingChannel]:
    """A channel with AMQP 0-9-1."""
    with connected(service.url()) as connection:
        yield connection.channel()


@pytest.fixture
def queue(channel: BlockingChannel) -> Iterator[str]:
    """A fresh durable queue."""
    name = f"amqp10-{secrets.token_hex(6)}"
    channel.queue_declare(name, durable=True)
    yield name
    channel.connection.channel().queue_delete(name)
