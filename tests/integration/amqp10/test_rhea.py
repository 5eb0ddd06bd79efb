"""rhea, the client of Node.js: it knows no transactions, so a program of its own says frame by frame what they need."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest
from pika.adapters.blocking_connection import BlockingChannel

from tests.support.client import take_all
from tests.support.service import DtxService

VERSION: Final = "3.0.5"
PROGRAM: Final = Path(__file__).parent / "rhea" / "transact.js"
SECONDS: Final = 120.0


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, where rhea is installed beside it; without Node.js or npm's registry the test is skipped."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("rhea needs node and npm")
    directory = tmp_path_factory.mktemp("rhea")
    command = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(directory)]
    try:
        subprocess.run([*command, f"rhea@{VERSION}"], check=True, capture_output=True, timeout=SECONDS)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        pytest.skip("rhea cannot be had from npm's registry")
    return Path(shutil.copy(PROGRAM, directory))


def test_rhea_posts_and_retires_in_transactions(
    service: DtxService, channel: BlockingChannel, queue: str, program: Path
) -> None:
    """Declare, discharge with and without fail, unknown-id; posting; retirement, unsettled and settled."""
    command = ["node", str(program), service.host, str(service.port), queue]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "posted": ["in the transaction"] * 2,
        "committed": "accepted",
        "failed": "accepted",
        "bodies": ["kept 1", "kept 2"],
        "consumed": "accepted",
        "returned": "accepted",
        "unknown": "rejected: amqp:transaction:unknown-id",
    }
    # What was given back comes as rhea wrote it: a value that is text.
    assert take_all(channel, queue) == [b"kept 2"]
