"""Stages for tests of crashes."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.support.crash import Stage
from tests.support.postgres import PostgresServer
from tests.support.rabbitmq import RabbitNode


@pytest.fixture
def stage_with(shared_rabbitmq: RabbitNode, postgres: PostgresServer) -> Iterator[Callable[..., Stage]]:
    """Makes a stage with arguments of its own."""
    with ExitStack() as stack:

        def make(**arguments: Any) -> Stage:
            return stack.enter_context(Stage(shared_rabbitmq, postgres, **arguments))

        yield make


@pytest.fixture
def stage(stage_with: Callable[..., Stage]) -> Stage:
    """A broker, a log, and dtx that believes receipts."""
    return stage_with()


@pytest.fixture(scope="package")
def impatient_rabbitmq() -> Iterator[RabbitNode]:
    """A second broker, which closes the channel of a consumer that has not acknowledged for three or four seconds."""
    with RabbitNode(config={"consumer_timeout": "3000"}) as node:
        node.ctl("eval", "application:set_env(rabbit, channel_tick_interval, 500).")  # how often it looks; else 60 s
        yield node
