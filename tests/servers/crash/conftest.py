"""Stages for crash tests. Processes run without coverage: a killed process cannot save its data."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, cast

import pytest

from tests.support.broker import MODES, Mode
from tests.support.crash import Scene, Stage, StandaloneStage
from tests.support.postgres import PostgresServer
from tests.support.processes import unmeasured
from tests.support.rabbitmq import RabbitNode
from tests.support.standby_pair import Pair


@pytest.fixture(scope="module", autouse=True)
def unmeasured_processes() -> Iterator[None]:
    """Start all processes of these tests without coverage."""
    with unmeasured():
        yield


@pytest.fixture
def stage_with(shared_rabbitmq: RabbitNode, postgres: PostgresServer) -> Iterator[Callable[..., Stage]]:
    """Makes a stage with the given arguments."""
    with ExitStack() as stack:

        def make(**arguments: Any) -> Stage:
            return stack.enter_context(Stage(shared_rabbitmq, postgres, **arguments))

        yield make


@pytest.fixture
def stage(stage_with: Callable[..., Stage]) -> Stage:
    """A broker, a log, and a dtx that trusts receipts."""
    return stage_with()


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Mode:
    """Where the messages are stored."""
    return cast("Mode", request.param)


@pytest.fixture
def pair_with(mode: Mode, request: pytest.FixtureRequest, postgres: PostgresServer) -> Iterator[Callable[..., Pair]]:
    """Makes an active dtx and a standby, with further options and environment for both, on a PostgreSQL *server*."""
    with ExitStack() as stack:

        def make(*options: str, server: PostgresServer = postgres, env: Mapping[str, str] | None = None) -> Pair:
            scene: Scene
            if mode == "standalone":
                scene = StandaloneStage(server, options=options, env=env)
            else:
                node = request.getfixturevalue("shared_rabbitmq")
                words = ("--upstream-heartbeat", "2", *options)
                scene = Stage(node, server, replay="receipts", options=words, env=env)
            return Pair(stack.enter_context(scene))

        yield make


@pytest.fixture
def pair(pair_with: Callable[..., Pair]) -> Pair:
    """An active dtx and a standby."""
    return pair_with()


@pytest.fixture(scope="package")
def impatient_rabbitmq() -> Iterator[RabbitNode]:
    """A second broker with a consumer time-out of one second. It checks for it only when a test makes it do so."""
    with RabbitNode(config={"consumer_timeout": "1000"}) as node:
        node.ctl("eval", "application:set_env(rabbit, channel_tick_interval, 3600000).")
        yield node
