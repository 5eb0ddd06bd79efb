"""The demo, as ``make demo`` runs it."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.processes import free_port
from tests.support.rabbitmq import RabbitNode

ROOT = Path(__file__).parents[2]


def run_demo(broker: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "examples.demo"],
        cwd=ROOT,
        env={**os.environ, "BROKER": broker},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        stdin=subprocess.DEVNULL,
    )


def test_both_sides_agree_although_dtx_is_killed(rabbitmq: RabbitNode) -> None:
    done = run_demo(rabbitmq.url())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "alice  70   on the way       []   bob  30" in done.stdout
    assert done.stdout.count("decided, so it is committed") == 2
    assert done.stdout.count("never decided, so it is rolled back") == 2
    assert "dtx-demo" not in rabbitmq.ctl("list_queues", "name")


def test_both_sides_agree_without_a_broker() -> None:
    done = run_demo()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "alice  70   on the way       []   bob  30" in done.stdout
    assert done.stdout.count("decided, so it is committed") == 2
    assert done.stdout.count("never decided, so it is rolled back") == 2


def test_a_missing_broker_is_one_sentence_with_a_remedy() -> None:
    done = run_demo(f"amqp://guest:secret-word@127.0.0.1:{free_port()}/")
    assert done.returncode == 1
    assert done.stderr.startswith("demo: no RabbitMQ answers at 127.0.0.1:")
    assert done.stderr.count("\n") == 1
    assert "secret-word" not in done.stdout + done.stderr
