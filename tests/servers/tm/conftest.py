"""One world in either mode for all tests of the transaction manager."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.broker import MODES, Mode
from tests.support.postgres import PostgresServer
from tests.support.rabbitmq import RabbitNode
from tests.support.tm import World, two_phase_server


@pytest.fixture(scope="package")
def server() -> Iterator[PostgresServer]:
    """A PostgreSQL server that has prepared transactions."""
    with two_phase_server() as running:
        yield running


@pytest.fixture(scope="package", params=MODES)
def mode(request: pytest.FixtureRequest) -> Mode:
    """Where both dtx have their messages."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="package")
def standing_world(
    mode: Mode, server: PostgresServer, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[World]:
    """What ``world`` empties."""
    directory: Path = tmp_path_factory.mktemp("tm")
    node: RabbitNode | None = request.getfixturevalue("shared_rabbitmq") if mode == "alongside" else None
    with World(server, directory, node) as world:
        yield world


@pytest.fixture
def world(standing_world: World, mode: Mode, request: pytest.FixtureRequest) -> World:
    """Empty tables, empty queues, nothing in doubt, no log."""
    if mode == "alongside":
        request.getfixturevalue("rabbitmq")  # mended
    standing_world.clear()
    return standing_world
