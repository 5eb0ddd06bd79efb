"""One world for each mode, shared by all tests of the transaction manager."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.broker import MODES, Mode
from tests.support.postgres import PostgresServer
from tests.support.rabbitmq import RabbitNode
from tests.support.tm import World, two_phase_server


@pytest.fixture(scope="package")
def server() -> Iterator[PostgresServer]:
    """A PostgreSQL server with prepared transactions enabled."""
    with two_phase_server() as running:
        yield running


@pytest.fixture(scope="package", params=MODES)
def mode(request: pytest.FixtureRequest) -> Mode:
    """The mode in which both dtx run."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="package")
def standing_world(
    mode: Mode, server: PostgresServer, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[World]:
    """The shared world, which ``world`` empties before each test."""
    directory: Path = tmp_path_factory.mktemp("tm")
    node: RabbitNode | None = request.getfixturevalue("shared_rabbitmq") if mode == "alongside" else None
    with World(server, directory, node) as world:
        yield world


@pytest.fixture
def world(standing_world: World, mode: Mode, request: pytest.FixtureRequest) -> World:
    """Empty tables, empty queues, nothing in doubt, no log."""
    if mode == "alongside":
        request.getfixturevalue("rabbitmq")  # repaired after the test before
    standing_world.clear()
    return standing_world
