"""One server, two databases and two dtx for all tests of the transaction manager that leave them alive."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tm import World, two_phase_server


@pytest.fixture(scope="package")
def standing_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """What ``world`` empties."""
    directory: Path = tmp_path_factory.mktemp("tm")
    with two_phase_server() as server, World(server, directory) as world:
        yield world


@pytest.fixture
def world(standing_world: World) -> World:
    """Empty tables, empty queues, nothing in doubt, no log."""
    standing_world.clear()
    return standing_world
