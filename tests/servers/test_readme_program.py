"""The first program of the README, unchanged except for the address."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from tests.support.broker import MODES, Broker, Mode, StandaloneBroker
from tests.support.rabbitmq import RabbitNode
from tests.support.service import DtxService

README = Path(__file__).parents[2] / "README.md"
ADDRESS = "amqp://guest:guest@127.0.0.1:5673/"


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Mode:
    """The mode of dtx."""
    return cast("Mode", request.param)


@pytest.fixture
def service(mode: Mode, request: pytest.FixtureRequest, postgres_url: str) -> Iterator[DtxService]:
    """A service as the reader starts it."""
    broker = request.getfixturevalue("rabbitmq").url() if mode == "alongside" else None
    with DtxService(broker=broker, database=postgres_url) as running:
        yield running


def test_the_first_program_commits_a_message_that_a_restart_keeps(
    mode: Mode, request: pytest.FixtureRequest, service: DtxService
) -> None:
    """README: "The same program works in front of a RabbitMQ"."""
    broker: Broker = (
        cast("RabbitNode", request.getfixturevalue("rabbitmq")) if mode == "alongside" else StandaloneBroker(service)
    )
    program, *_ = re.findall(r"^```python\n(.+?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert ADDRESS in program
    done = subprocess.run(
        [sys.executable, "-c", program.replace(ADDRESS, service.url())],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    ((body, properties, _),) = broker.take_all("payments")
    assert (body, properties.delivery_mode) == (b"30 to Bob", 2)
    with broker.channel() as channel:
        channel.queue_delete("payments")
