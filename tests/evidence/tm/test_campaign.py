"""The transaction manager for Python at length: programs that use it are killed again and again."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pytest

from tests.evidence.tm.campaign import play, preforker
from tests.support.broker import MODES, Mode
from tests.support.rabbitmq import RabbitNode
from tests.support.tm import World, two_phase_server

_A_MINUTE = 1_000
"""Number of transactions, on two processors."""


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Mode:
    """Alongside a broker, or standalone."""
    return cast("Mode", request.param)


@pytest.fixture
def world(mode: Mode, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """Start two databases and two dtx."""
    with ExitStack() as stack:
        node: RabbitNode | None = request.getfixturevalue("rabbitmq") if mode == "alongside" else None
        yield stack.enter_context(World(stack.enter_context(two_phase_server()), tmp_path, node))


def test_programs_that_die_leave_the_resources_in_agreement(
    world: World, mode: Mode, minutes: float, figures: Callable[..., None]
) -> None:
    """Guarantees: "nothing is lost"; "exactly once when … clients … die"."""
    with preforker() as copies:
        tally = play(copies, world, max(250, int(minutes / 2 * _A_MINUTE)), seed=11)
    told = {"transactions": tally.begun, "programs": tally.programs, "deaths": tally.deaths.total()}
    figures(**{f"{mode} {name}": count for name, count in (told | {"in doubt": tally.in_doubt}).items()})
    assert tally.wrong == []
    assert tally.deaths.total() > 0
