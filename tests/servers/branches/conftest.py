"""One dtx in each mode for all tests of a module."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import cast

import pytest

from tests.support.broker import MODES, Mode
from tests.support.crash import Scene, Stage, StandaloneStage
from tests.support.postgres import PostgresServer

MakeScene = Callable[..., Scene]


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> Mode:
    """What stores the messages. The outcomes of branches are the same."""
    return cast("Mode", request.param)


@pytest.fixture(scope="module")
def make_scene(mode: Mode, request: pytest.FixtureRequest, postgres: PostgresServer) -> Iterator[MakeScene]:
    """Starts a dtx with further options, its database, and its virtual host at the broker if it has one."""
    with ExitStack() as stack:

        def make(*options: str) -> Scene:
            if mode == "standalone":
                return stack.enter_context(StandaloneStage(postgres, options=options))
            return stack.enter_context(Stage(request.getfixturevalue("shared_rabbitmq"), postgres, options=options))

        yield make


@pytest.fixture(scope="module")
def stage(make_scene: MakeScene) -> Scene:
    """A dtx, alongside a broker with receipts that it trusts, or without a broker."""
    return make_scene()


@pytest.fixture(autouse=True)
def nothing_left(stage: Scene) -> Iterator[None]:
    """No test leaves a branch or a message to the next."""
    yield
    stage.wait_for_end(seconds=10)
    for queue in stage.queues():
        stage.delete(queue)
