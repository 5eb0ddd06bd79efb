"""What ends a dtx before it serves, and with which exit code."""

import asyncio
import os
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from dtx.server import service


@pytest.mark.parametrize(
    ("happens", "code"),
    [
        (lambda stop: stop.lease_lost(), 5),
        (lambda stop: stop.log_failed(), 1),
        (lambda _: os.kill(os.getpid(), signal.SIGTERM), 0),
    ],
    ids=["another dtx takes the lease", "the log fails", "a signal"],
)
async def test_a_start_that_is_cut_short_says_by_what(
    monkeypatch: pytest.MonkeyPatch, happens: Callable[[Any], None], code: int
) -> None:
    """A supervisor that restarts what has failed must not take a lost lease for a stop that was asked for."""

    async def start(_settings: Any, _stack: Any, stop: Any) -> None:
        happens(stop)
        await asyncio.sleep(60)

    monkeypatch.setattr(service, "_start", start)
    monkeypatch.setattr(service, "_raise_open_files", lambda _: None)
    settings: Any = SimpleNamespace()
    assert await service.serve(settings) == code
