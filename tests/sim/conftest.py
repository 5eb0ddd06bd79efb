"""Long simulations run without the measurement of coverage, which would make them four times as long."""

from collections.abc import Iterator

import coverage
import pytest


@pytest.fixture
def unmeasured() -> Iterator[None]:
    """No line that runs within the test is counted; shorter simulations and other tests reach the same ones."""
    measurement = coverage.Coverage.current()
    if measurement is None:
        yield
        return
    measurement.stop()
    try:
        yield
    finally:
        measurement.start()
