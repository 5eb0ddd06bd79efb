"""One service of each mode for clients that break the protocol. It must keep running, so tests share it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import cast

import pytest

from tests.support.broker import MODES, Broker, Mode, StandaloneBroker
from tests.support.postgres import PostgresServer
from tests.support.rabbitmq import RabbitNode
from tests.support.service import DtxService

StartService = Callable[..., DtxService]


@pytest.fixture(scope="package", params=MODES)
def mode(request: pytest.FixtureRequest) -> Mode:
    """The mode: dtx in front of a broker, or dtx alone."""
    return cast("Mode", request.param)


@pytest.fixture(scope="package")
def make_service(mode: Mode, request: pytest.FixtureRequest, postgres: PostgresServer) -> Callable[..., DtxService]:
    """Makes services with further options; they are not started yet."""

    def make(database: str, *options: str) -> DtxService:
        if mode == "standalone":
            return DtxService(database=database, options=options)
        node: RabbitNode = request.getfixturevalue("shared_rabbitmq")
        options = ("--management", node.management_url, *options)
        return DtxService(broker=node.url(), database=database, options=options)

    return make


@pytest.fixture(scope="package")
def service(make_service: StartService, postgres: PostgresServer) -> Iterator[DtxService]:
    """The service that all tests of a mode share."""
    database = postgres.create_database()
    with make_service(database) as running:
        yield running
    postgres.drop_database(database)


@pytest.fixture
def start_service(make_service: StartService, postgres: PostgresServer) -> Iterator[StartService]:
    """Starts services for one test."""
    with ExitStack() as stack:

        def start(*options: str) -> DtxService:
            database = postgres.create_database()
            stack.callback(postgres.drop_database, database)
            return stack.enter_context(make_service(database, *options))

        yield start


@pytest.fixture
def broker(mode: Mode, service: DtxService, request: pytest.FixtureRequest) -> Broker:
    """Where the service stores its messages."""
    if mode == "standalone":
        return StandaloneBroker(service)
    return cast("RabbitNode", request.getfixturevalue("rabbitmq"))
