"""rhea, a client for Node.js. It does not support transactions, so programs send the frames themselves."""

import json
import secrets
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
from pika.adapters.blocking_connection import BlockingChannel

from tests.support.broker import Mode
from tests.support.client import take_all
from tests.support.npm import RHEA, SECONDS, with_package
from tests.support.service import DtxService

PROGRAMS: Final = Path(__file__).parent / "rhea"


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the programs and rhea. Without Node.js or npm's registry, the tests are skipped."""
    directory = with_package(RHEA, tmp_path_factory.mktemp("rhea"))
    return Path(shutil.copytree(PROGRAMS, directory, dirs_exist_ok=True))


def said(programs: Path, name: str, service: DtxService, *words: str) -> Any:
    """Run a program, and return its output."""
    command = ["node", str(programs / name), service.host, str(service.port), *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_rhea_posts_and_retires_in_transactions(
    service: DtxService, channel: BlockingChannel, queue: str, programs: Path
) -> None:
    """Declare, discharge with and without fail, unknown-id; posting; retirement, unsettled and settled."""
    assert said(programs, "transact.js", service, queue) == {
        "posted": ["in the transaction"] * 2,
        "committed": "accepted",
        "failed": "accepted",
        "bodies": ["kept 1", "kept 2"],
        "consumed": "accepted",
        "returned": "accepted",
        "unknown": "rejected: amqp:transaction:unknown-id",
    }
    # The returned message is as rhea wrote it: a value that is text.
    assert take_all(channel, queue) == [b"kept 2"]


def test_rhea_closes_a_link_while_messages_wait_for_its_window(
    service: DtxService, channel: BlockingChannel, programs: Path
) -> None:
    """Three receivers. rhea closes the connection if a delivery-id does not follow the last one."""
    queues = [f"rhea-{secrets.token_hex(6)}" for _ in range(3)]
    for queue in queues:
        channel.queue_declare(queue)
        for _ in range(1500):
            channel.basic_publish("", queue, b"x")
    assert said(programs, "windows.js", service, *queues) == [1500, 1500]
    for queue in queues:
        channel.queue_delete(queue)


def test_rhea_subscribes_to_an_exchange(
    mode: Mode, service: DtxService, channel: BlockingChannel, programs: Path
) -> None:
    """Filters in place, a message that matches, *modified*, and a durable subscription, which is refused."""
    exchange = f"rhea-{secrets.token_hex(6)}"
    channel.exchange_declare(exchange, "topic")
    found = said(programs, "subscribe.js", service, exchange)
    channel.exchange_delete(exchange)
    # A broker does not receive the content of modified.
    again = ["yes", False, 1, "late"] if mode == "standalone" else ["yes", False, 0, None]
    assert found == {
        "filters": ["pattern"],
        "first": ["yes", True, 0],
        "second": again,
        "durable": "amqp:not-implemented",
    }
