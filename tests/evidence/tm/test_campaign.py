"""The transaction manager for Python at length: programs that use it are killed again and again."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.evidence.tm.campaign import nursery, play
from tests.support.broker import MODES, Mode
from tests.support.rabbitmq import RabbitNode
from tests.support.tm import World, two_phase_server

_A_MINUTE = 1_000
"""Transactions, on two processors."""


@pytest.fixture(params=MODES)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """Two databases and two dtx."""
    mode: Mode = request.param
    with ExitStack() as stack:
        node: RabbitNode | None = request.getfixturevalue("rabbitmq") if mode == "alongside" else None
        yield stack.enter_context(World(stack.enter_context(two_phase_server()), tmp_path, node))


def test_programs_that_die_leave_the_resources_in_agreement(
    world: World, minutes: float, figures: Callable[..., None]
) -> None:
    """Guarantees: "nothing is lost"; "exactly once when … clients … die"."""
    with nursery() as copies:
        tally = play(copies, world, max(250, int(minutes / 2 * _A_MINUTE)), seed=11)
    figures(transactions=tally.begun, programs=tally.programs, deaths=tally.deaths.total(), in_doubt=tally.in_doubt)
    assert tally.wrong == []
    assert tally.deaths.total() > 0
