"""Events that end dtx before it serves, and their exit codes."""

import asyncio
import os
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from dtx.config import Settings
from dtx.server import memory, service
from dtx.telemetry import Metrics


@pytest.mark.parametrize(
    ("happens", "code"),
    [
        (lambda stop: stop.lease_lost(), 5),
        (lambda stop: stop.log_failed(), 1),
        (lambda _: os.kill(os.getpid(), signal.SIGTERM), 0),
    ],
    ids=["another dtx takes the lease", "the log fails", "a signal"],
)
async def test_an_interrupted_start_names_the_cause(
    monkeypatch: pytest.MonkeyPatch, happens: Callable[[Any], None], code: int
) -> None:
    """A supervisor restarts dtx after a failure, so a lost lease must not look like a requested stop."""

    async def start(_settings: Any, _process: Any, _stack: Any, stop: Any) -> None:
        happens(stop)
        await asyncio.sleep(60)

    monkeypatch.setattr(service, "_start", start)
    monkeypatch.setattr(service, "_raise_open_files", lambda _: None)
    assert await service.serve(Settings()) == code


async def test_a_start_warns_of_addresses_without_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(_settings: Any, _process: Any, _stack: Any, stop: Any) -> None:
        stop.log_failed()
        await asyncio.sleep(60)

    monkeypatch.setattr(service, "_start", start)
    monkeypatch.setattr(service, "_raise_open_files", lambda _: None)
    settings = Settings.load({"listen": "127.0.0.1:1,0.0.0.0:2", "admin_listen": "0.0.0.0:3"})
    with capture_logs() as lines:
        await service.serve(settings)
    warned = {line["setting"]: line["event"] for line in lines if line["log_level"] == "warning"}
    assert warned == settings.unencrypted()
    assert warned.keys() == {"listen", "admin_listen"}


async def test_a_start_lets_glibc_give_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before dtx verifies or hashes a password, which takes 19 MiB each time."""
    done: list[str] = []

    async def start(_settings: Any, _process: Any, _stack: Any, stop: Any) -> None:
        done.append("start")
        stop.log_failed()
        await asyncio.sleep(60)

    monkeypatch.setattr(service, "_start", start)
    monkeypatch.setattr(service, "_raise_open_files", lambda _: None)
    monkeypatch.setattr(memory, "give_back_large_blocks", lambda: done.append("give back"))
    await service.serve(Settings())
    assert done == ["give back", "start"]


async def test_the_lag_of_the_event_loop_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timer that comes 0.3 seconds late is a lag of 0.3 seconds."""
    times = iter((10.0, 10.3, 20.0, 20.002))
    monkeypatch.setattr(service, "_LAG_PERIOD", 0.0)
    monkeypatch.setattr(service, "time", SimpleNamespace(monotonic=lambda: next(times)))
    metrics = Metrics()
    with pytest.raises(RuntimeError):  # there are no more times
        await service._measure_lag(metrics)
    text = metrics.render().decode()
    assert 'dtx_event_loop_lag_seconds_bucket{le="0.0025"} 1.0' in text
    assert 'dtx_event_loop_lag_seconds_bucket{le="0.25"} 1.0' in text
    assert 'dtx_event_loop_lag_seconds_bucket{le="0.5"} 2.0' in text
