"""Evidence: long runs, whose figures the documentation shows. Each folder is a part, and leaves one result file.

``make evidence`` runs all parts, ``make evidence PARTS="sim soak" MINUTES=60`` two of them for an hour each.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.processes import unmeasured
from tests.support.results import FIGURE, Results


def pytest_addoption(parser: pytest.Parser) -> None:
    """What ``make evidence`` passes on."""
    parser.addoption("--minutes", type=float, default=10.0, help="duration of each part that has no fixed size (10)")
    parser.addoption("--results", type=Path, default=Path("docs/evidence"), help="folder of the result files")


def pytest_configure(config: pytest.Config) -> None:
    """Collect figures."""
    directory = config.getoption("--results", Path("docs/evidence"))
    tier = Path(__file__).parent.relative_to(config.rootpath)
    config.pluginmanager.register(Results(tier, directory, config.getoption("--minutes", 10.0)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test may take twice its minutes, and half an hour for everything around them, but always an hour."""
    seconds = max(3600.0, config.getoption("--minutes", 10.0) * 120 + 1800)
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(seconds))


@pytest.fixture(scope="session")
def minutes(pytestconfig: pytest.Config) -> float:
    """How long a part takes that has no fixed size."""
    return float(pytestconfig.getoption("--minutes", 10.0))


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Call it with figures for the result file: ``figures(seeds=12)``. Tests of one part add theirs up."""

    def note(**values: float | str) -> None:
        request.node.user_properties += [(FIGURE, (name.replace("_", " "), value)) for name, value in values.items()]

    return note


@pytest.fixture(scope="session", autouse=True)
def unmeasured_processes() -> Iterator[None]:
    """Processes run without measurement of coverage: the servers tier measures it."""
    with unmeasured():
        yield
