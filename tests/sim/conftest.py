"""Long simulations run without the measurement of coverage, which would make them four times as long."""

from collections.abc import Iterator

import coverage
import pytest


@pytest.fixture
def unmeasured() -> Iterator[None]:
    """No line that runs within the test is counted; shorter simulations and other tests reach the same ones.

    Where several processes run the tests, each has more than one measurement, one behind the other: its own as a
    process that was started by a measured one, and pytest-cov's. The one behind goes on when the other is stopped.
    """
    stopped: list[coverage.Coverage] = []
    while (measurement := coverage.Coverage.current()) is not None:
        measurement.stop()
        stopped.append(measurement)
    try:
        yield
    finally:
        for measurement in reversed(stopped):
            measurement.start()
