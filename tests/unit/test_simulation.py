"""Short simulations of dtx. ``make evidence PARTS=sim`` runs as many steps as the time permits."""

import pytest

from tests.evidence.sim.__main__ import report
from tests.evidence.sim.short import Run, runs


@pytest.mark.parametrize("run", runs(), ids=lambda run: f"seed {run.seed}, {run.shape}")
def test_every_promise_holds_in_a_short_run(run: Run) -> None:
    """Both modes, with and without broker failures. The guarantees define what must hold."""
    result = run.play()
    assert not result.failed, report(result)
