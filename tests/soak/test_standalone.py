"""Money moves between dtx's own queues and two databases while everything dies: it is conserved, exactly."""

from collections.abc import Callable

import pytest

from tests.soak.short import conserved


@pytest.mark.slow
@pytest.mark.short_form("25 s of harm without a broker (make soak)")
@pytest.mark.timeout(600)
def test_money_is_conserved_whatever_dies(caplog: pytest.LogCaptureFixture, left_out: Callable[[str], None]) -> None:
    """Guarantee: "exactly once when dtx, PostgreSQL, clients or the network die (standalone: always)"."""
    conserved("standalone", caplog, left_out, False, each=25)
