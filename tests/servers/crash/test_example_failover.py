"""The failover example: every number arrives exactly once although the active dtx and the program are killed."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dtx.client import Coordinator
from examples.failover import FORMAT_ID
from tests.support.client import connected
from tests.support.crash import Scene, Stage, StandaloneStage
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.rabbitmq import RabbitNode
from tests.support.standby_pair import Pair

COUNT = 24
PROGRAM = Path(__file__).parents[3] / "examples/failover.py"


class Example:
    """The example program and its output.

    Args:
        pair: the program gets the addresses of both dtx.
        directory: where it keeps its decisions.
    """

    def __init__(self, pair: Pair, directory: Path) -> None:
        vhost = pair.scene.vhost
        urls = [service.url(vhost=vhost) for service in (pair.active, pair.standby)]
        words = ["--decisions", str(directory / "decisions"), "--count", str(COUNT), *urls]
        self.said: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *words],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=directory,
            env={name: value for name, value in os.environ.items() if not name.startswith("DTX_")},
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self.said.append(line)

    def wait_until_sent(self, number: int) -> None:
        """Wait for *number* or a later one: the program prints no line for a number that recovery commits."""
        later = {f"sent {each}\n" for each in range(number, COUNT + 1)}
        wait_until(
            lambda: not later.isdisjoint(self.said) or self._process.poll() is not None, what=f"{number}", seconds=60
        )
        assert not later.isdisjoint(self.said), self.said

    def kill9(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(10)
        self._reader.join(10)

    def end(self) -> int:
        try:
            status = self._process.wait(90)
        except subprocess.TimeoutExpired:
            self.kill9()
            raise AssertionError(self.said) from None
        self._reader.join(10)
        return status


@pytest.fixture(params=["standalone", "alongside"])
def scene(request: pytest.FixtureRequest, postgres: PostgresServer) -> Scene:
    if request.param == "standalone":
        return StandaloneStage(postgres)
    node: RabbitNode = request.getfixturevalue("rabbitmq")
    return Stage(node, postgres)


def test_every_number_arrives_once_despite_killed_dtx_and_program(
    scene: Stage | StandaloneStage, tmp_path: Path
) -> None:
    with scene:
        pair = Pair(scene)
        example = Example(pair, tmp_path)
        example.wait_until_sent(8)
        pair.active.kill9()
        pair.succeed()
        example.wait_until_sent(12)
        example.kill9()
        second = Example(pair, tmp_path)
        assert second.end() == 0, second.said
        assert f"connected to 127.0.0.1:{pair.standby.port}\n" in second.said
        assert sorted(map(int, scene.bodies("numbers"))) == list(range(1, COUNT + 1))
        with connected(pair.standby.url(vhost=scene.vhost)) as connection, Coordinator(connection) as coordinator:
            assert [xid for xid in coordinator.recover() if xid.format_id == FORMAT_ID] == []
