"""The hosts of ``--broker``: which one dtx tries, and how long it waits for a silent one."""

import asyncio
import socket

import pytest

from dtx.store.rabbitmq.service import Broker
from dtx.store.rabbitmq.upstream import Upstream


@pytest.mark.parametrize(
    ("hosts", "asked", "heartbeat"), [("one", 10, 10), ("one,two", 10, 4), ("one,two", 2, 2), ("one", 2, 2)]
)
def test_a_silent_node_of_several_is_given_up_earlier(hosts: str, asked: int, heartbeat: int) -> None:
    """After two heartbeats without a byte, the connection is lost."""
    assert Broker.from_url(f"amqp://guest:guest@{hosts}/", heartbeat=asked).heartbeat == heartbeat


async def test_the_host_that_failed_last_is_tried_last() -> None:
    """One of its clients found out that it hangs: the next ones connect to another node."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        ports = one.getsockname()[1], two.getsockname()[1]
        broker = Broker.from_url(f"amqp://guest:guest@127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}/")
        chosen = []
        for _ in range(3):
            protocol = Upstream()
            host = await broker.connect(protocol)
            protocol.abort("test")
            broker.failed(host)
            chosen.append(host.port)
            await asyncio.sleep(0)
    assert chosen == [ports[0], ports[1], ports[0]]
