"""Long runs of many processes: coverage is what other tests measure."""

from collections.abc import Iterator

import pytest

from tests.support.processes import unmeasured


@pytest.fixture(autouse=True)
def unmeasured_processes() -> Iterator[None]:
    """Whatever is started within these tests."""
    with unmeasured():
        yield
