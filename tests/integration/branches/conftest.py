"""One dtx beside one broker for all tests of a module; none of them ends it."""

from collections.abc import Iterator

import pytest

from tests.support.crash import Stage
from tests.support.postgres import PostgresServer
from tests.support.rabbitmq import RabbitNode


@pytest.fixture(scope="module")
def stage(shared_rabbitmq: RabbitNode, postgres: PostgresServer) -> Iterator[Stage]:
    """A broker, a log, and dtx that believes receipts."""
    with Stage(shared_rabbitmq, postgres) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_left(stage: Stage) -> Iterator[None]:
    """No test leaves a branch or a message to the next."""
    yield
    stage.wait_for_end(seconds=10)
    for queue in stage.queues():
        stage.delete(queue)
