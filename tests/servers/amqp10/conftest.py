"""One dtx in each mode for clients of AMQP 1.0. No test stops it."""

from collections.abc import Iterator
from typing import cast

import pytest

from tests.support.amqp10 import channel, client, queue
from tests.support.broker import MODES, Mode
from tests.support.postgres import PostgresServer
from tests.support.rabbitmq import RabbitNode
from tests.support.service import DtxService

__all__ = ["channel", "client", "queue"]


@pytest.fixture(scope="package", params=MODES)
def mode(request: pytest.FixtureRequest) -> Mode:
    """What stores the messages. Clients see no difference, except where a test says so."""
    return cast("Mode", request.param)


@pytest.fixture(scope="package")
def service(mode: Mode, request: pytest.FixtureRequest, postgres: PostgresServer) -> Iterator[DtxService]:
    node: RabbitNode | None = request.getfixturevalue("shared_rabbitmq") if mode == "alongside" else None
    database = postgres.create_database()
    options = () if node is None else ("--management", node.management_url)
    with DtxService(broker=None if node is None else node.url(), database=database, options=options) as running:
        yield running
    postgres.drop_database(database)


@pytest.fixture(scope="package")
def small(postgres: PostgresServer) -> Iterator[DtxService]:
    """A dtx without a broker, with two messages a branch at most. Tests may change its users and its tables."""
    database = postgres.create_database()
    with DtxService(database=database, options=("--max-branch-messages", "2")) as running:
        yield running
    postgres.drop_database(database)
