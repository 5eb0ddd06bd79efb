"""Fixtures for the tests of the server's parts."""

import pytest

from dtx.server.amqp10 import connection
from dtx.store import slices


@pytest.fixture
def one_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data of a client is handled before the call returns, however busy the machine is."""
    for module in (slices, connection):
        monkeypatch.setattr(module, "SLICE_SECONDS", 60.0)
