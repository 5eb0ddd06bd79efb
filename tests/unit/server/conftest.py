"""What tests of the server's parts share."""

import pytest

from dtx.server.amqp10 import connection
from dtx.store import slices


@pytest.fixture
def one_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a client sends is handled when the call returns, however busy the machine is."""
    for module in (slices, connection):
        monkeypatch.setattr(module, "SLICE_SECONDS", 60.0)
