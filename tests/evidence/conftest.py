"""Evidence: long runs, whose figures are in the documentation. Each folder is a part with one result file.

``make evidence`` runs all parts, ``make evidence PARTS="sim soak" MINUTES=60`` two of them for an hour each.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.processes import unmeasured
from tests.support.results import FIGURE, Results


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of ``make evidence``."""
    parser.addoption("--minutes", type=float, default=10.0, help="duration of each part that has no fixed size (10)")
    parser.addoption("--results", type=Path, default=Path("docs/evidence"), help="folder of the result files")


def pytest_configure(config: pytest.Config) -> None:
    """Collect figures."""
    directory = config.getoption("--results", Path("docs/evidence"))
    tier = Path(__file__).parent.relative_to(config.rootpath)
    minutes, rabbitmq = config.getoption("--minutes", 10.0), config.getoption("rabbitmq")
    config.pluginmanager.register(Results(tier, directory, minutes, rabbitmq))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Set the time limit of each test: twice its minutes and half an hour more, at least one hour."""
    seconds = max(3600.0, config.getoption("--minutes", 10.0) * 120 + 1800)
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(seconds))


@pytest.fixture(scope="session")
def minutes(pytestconfig: pytest.Config) -> float:
    """Return the duration of a part without a fixed size."""
    return float(pytestconfig.getoption("--minutes", 10.0))


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return a function that adds figures to the result file: ``figures(seeds=12)``. Tests of one part are added up."""

    def note(**values: float | str) -> None:
        request.node.user_properties += [(FIGURE, (name.replace("_", " "), value)) for name, value in values.items()]

    return note


@pytest.fixture(scope="session", autouse=True)
def unmeasured_processes() -> Iterator[None]:
    """Run processes without measurement of coverage: the servers tier measures it."""
    with unmeasured():
        yield
