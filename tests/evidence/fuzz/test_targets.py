"""Coverage-guided fuzzing of all input from a peer, starting with the corpus."""

from collections.abc import Callable

import pytest

from tests.evidence.fuzz.campaign import run
from tests.evidence.fuzz.targets import TARGETS

pytest.importorskip("atheris", reason="atheris has wheels for Linux on x86-64 alone: pip install 'dtx[fuzz]'")


@pytest.mark.parametrize("target", TARGETS)
def test_no_input_breaks_a_target(target: str, minutes: float, figures: Callable[..., None]) -> None:
    """Every parser answers or refuses. It raises only documented errors, and its memory is bounded."""
    inputs = run(target, max(5, int(minutes * 60 / len(TARGETS))), keep=False)
    assert inputs is not None, "a target failed: its input is printed above"
    figures(inputs=inputs)
