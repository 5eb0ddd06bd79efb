"""The web pages in use by an operator, with a picture of every step beside the result files."""

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.browser import Browser
from tests.support.crash import Stage, StandaloneStage
from tests.support.postgres import PostgresServer
from tests.support.service import ADMIN
from tests.support.tour import Tour


@pytest.fixture
def pictures(pytestconfig: pytest.Config) -> Path:
    """Return the empty folder of the pictures."""
    results: Path = pytestconfig.getoption("--results")
    directory = pytestconfig.rootpath / results / "walkthrough"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def test_the_whole_tour_without_a_broker(
    postgres: PostgresServer, browser: Browser, pictures: Path, figures: Callable[..., None]
) -> None:
    """An orphan is found, inspected, rolled back after a dry run, and forgotten; a race; a viewer; many; no secrets."""
    with StandaloneStage(postgres, options=ADMIN) as stage:
        tour = Tour(stage, browser, pictures, print)
        tour.populate()
        tour.orphan_is_decided()
        tour.two_race()
        tour.viewer_is_refused()
        tour.many_are_decided()
        tour.everything_else()
        tour.secrets_are_nowhere()
    figures(pictures=len(list(pictures.glob("*.png"))))


def test_an_orphan_is_decided_alongside_a_broker(
    request: pytest.FixtureRequest, postgres: PostgresServer, browser: Browser
) -> None:
    with ExitStack() as stack:
        stage = stack.enter_context(Stage(request.getfixturevalue("shared_rabbitmq"), postgres, options=ADMIN))
        tour = Tour(stage, browser)
        tour.populate()
        tour.orphan_is_decided()
        carla = tour.visitor("carla")
        connections = carla.page.locator("#live-commit-connections")
        assert "working" in connections.inner_text()
        assert stage.vhost in connections.inner_text()
        tour.secrets_are_nowhere()
