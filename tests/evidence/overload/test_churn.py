"""Thousands of clients connect and disconnect, several times: dtx reuses its memory."""

import json
from collections.abc import Callable
from typing import Literal

import pytest

from dtx.server.memory import FEW, FREED
from tests.evidence.overload.crowd import Crowd
from tests.evidence.overload.test_overload import KIB, MIB, open_files
from tests.support.postgres import PostgresServer
from tests.support.processes import resident, wait_until
from tests.support.rabbitmq import RabbitNode
from tests.support.service import DtxService

COUNT = 1000
WAVES = 2
MOST = 6 * MIB
"""Limit of the memory that later waves add to that of the first: nearly all of it must be reused."""


@pytest.mark.parametrize("mode", ["alongside", "standalone"])
def test_repeated_connections_take_memory_once(
    mode: Literal["alongside", "standalone"],
    postgres: PostgresServer,
    request: pytest.FixtureRequest,
    figures: Callable[..., None],
) -> None:
    with open_files() as allowed:
        options: tuple[str, ...] = ("--log-level", "debug")
        for limit in ("--max-connections", "--max-handshakes"):  # all come from one address
            options += (limit, str(COUNT + 10))
        count = min(COUNT, (allowed - 500) // 2)
        broker = None
        if mode == "alongside":
            node: RabbitNode = request.getfixturevalue("own_rabbitmq")
            broker, options = node.url(), (*options, "--management", node.management_url)
        database = postgres.create_database()
        with DtxService(broker=broker, database=database, options=options) as service:
            waves = Waves(service)
            used = [waves.one(count) for _ in range(1 + WAVES)]
        postgres.drop_database(database)
    print(f"MiB after each wave of {count}: {', '.join(f'{octets / MIB:.0f}' for octets in used)}")
    figures(**{f"{mode} MiB that later waves add": round((max(used) - used[0]) / MIB, 1)})
    assert max(used) - used[0] <= MOST, f"{(used[-1] - used[0]) / WAVES / count / KIB:.1f} KiB of each client stay"


class Waves:
    """Clients that connect and disconnect.

    Args:
        service: dtx.
    """

    def __init__(self, service: DtxService) -> None:
        self._service = service
        self._left = 0

    def one(self, count: int) -> int:
        """Connect and disconnect *count* clients; return the memory after dtx has freed their state."""
        self._come_and_go(count)
        while self._freed() < self._left:  # some may end after the check, too few for another line of the log
            self._come_and_go(FEW)
        return resident(self._service.pid)

    def _come_and_go(self, count: int) -> None:
        with Crowd(self._service.url(), {"idle": count}, processes=2):
            pass
        self._left += count
        wait_until(lambda: self._left - self._freed() < FEW, seconds=120, what="the release of the connections' memory")

    def _freed(self) -> int:
        """Return the number of connections whose memory dtx has freed so far."""
        lines = self._service.log_path.read_text(errors="replace").splitlines()
        return sum(json.loads(line)["connections"] for line in lines if FREED in line)
