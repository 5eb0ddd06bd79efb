"""Money moves between RabbitMQ's queues and two databases while everything dies: none is lost."""

from collections.abc import Callable

import pytest

from tests.soak.short import conserved


@pytest.mark.slow
@pytest.mark.short_form("30 s of harm beside a broker (make soak)")
@pytest.mark.timeout(600)
def test_money_is_conserved_while_the_broker_lives_and_never_lost_when_it_dies(
    caplog: pytest.LogCaptureFixture, left_out: Callable[[str], None]
) -> None:
    """Guarantees: "exactly once … with a single-node broker that stays up"; else "repeated (never lost)"."""
    conserved("alongside", caplog, left_out, False, True, each=15)
