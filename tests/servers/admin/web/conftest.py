"""Users with browsers and a running dtx."""

from collections.abc import Iterator

import pytest

from tests.support.browser import Browser
from tests.support.crash import StandaloneStage
from tests.support.postgres import PostgresServer
from tests.support.service import ADMIN
from tests.support.tour import Tour


@pytest.fixture(scope="module")
def site(postgres: PostgresServer) -> Iterator[StandaloneStage]:
    """A dtx without a broker, for all tests of a module."""
    with StandaloneStage(postgres, options=ADMIN) as stage:
        yield stage


@pytest.fixture(scope="module")
def people(site: StandaloneStage) -> None:
    """Users of every role."""
    Tour(site, Browser()).populate()


@pytest.fixture
def tour(site: StandaloneStage, people: None, browser: Browser) -> Tour:
    """A tour through its pages."""
    return Tour(site, browser)
