"""Members: several active dtx of one resource manager, without coverage, because tests kill them."""

from collections.abc import Iterator

import pytest

from tests.support.crash import Stage
from tests.support.postgres import PostgresServer
from tests.support.processes import unmeasured
from tests.support.rabbitmq import RabbitNode


@pytest.fixture(scope="module", autouse=True)
def unmeasured_processes() -> Iterator[None]:
    """Start all processes of these tests without coverage."""
    with unmeasured():
        yield


@pytest.fixture
def stage(shared_rabbitmq: RabbitNode, postgres: PostgresServer) -> Iterator[Stage]:
    """A broker, a log, and the first member; it has the service ``stage.service``."""
    with Stage(shared_rabbitmq, postgres, options=("--advertise", "amqp://127.0.0.1")) as stage:
        yield stage
