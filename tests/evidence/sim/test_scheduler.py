"""The guarantees of the scheduler and the network of the simulation."""

import asyncio
from random import Random

import pytest

from tests.evidence.sim.network import Network
from tests.evidence.sim.scheduler import Process, SimLoop, Stuck, scheduler


def run(loop: SimLoop, seconds: float = 100.0) -> None:
    end = loop.now + seconds
    loop.call_at(end, lambda: None)
    loop.run(lambda: loop.now >= end)


def test_tasks_of_one_process_run_in_order() -> None:
    for seed in range(20):
        seen: list[tuple[str, int]] = []
        with scheduler(Random(seed)) as loop:
            for name in ("a", "b"):
                process = Process(loop, name)
                for number in range(5):
                    loop.call_soon(seen.append, (name, number), context=process.context)
            run(loop)
        assert [number for name, number in seen if name == "a"] == list(range(5))
        assert [number for name, number in seen if name == "b"] == list(range(5))


def test_which_process_runs_next_is_drawn() -> None:
    orders = set()
    for seed in range(30):
        seen: list[str] = []
        with scheduler(Random(seed)) as loop:
            for name in ("a", "b", "c"):
                loop.call_soon(seen.append, name, context=Process(loop, name).context)
            run(loop)
        orders.add("".join(seen))
    assert len(orders) == 6


def test_no_task_of_a_dead_process_runs_not_even_cleanup() -> None:
    seen: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            seen.append("tidied up")

    with scheduler(Random(1)) as loop:
        process = Process(loop, "a")
        process.spawn(work())
        loop.in_world(1, process.kill)
        run(loop)
        assert not seen


def test_a_stopped_process_goes_on_where_it_was() -> None:
    seen: list[float] = []

    async def work(loop: SimLoop) -> None:
        for _ in range(5):
            await asyncio.sleep(1)
            seen.append(loop.now - 100)

    with scheduler(Random(1)) as loop:
        process = Process(loop, "a")
        process.spawn(work(loop))
        loop.in_world(2.5, process.pause)
        loop.in_world(50, process.resume)
        run(loop)
    assert len(seen) == 5
    assert seen[1] < 2.5
    assert 50 <= seen[2] < 51


def test_time_passes_while_idle_and_ends_without_timers() -> None:
    with scheduler(Random(1)) as loop:
        loop.in_world(3600, lambda: None)
        with pytest.raises(Stuck):
            loop.run(lambda: False)
        assert loop.now >= 3700


class Peer(asyncio.Protocol):
    """A protocol that collects received bytes."""

    def __init__(self) -> None:
        self.data = b""
        self.lost = False
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True


def connected(loop: SimLoop) -> tuple[Network, Process, Process, Peer, Peer]:
    network = Network(loop)
    server, client = Process(loop, "server"), Process(loop, "client")
    far, near = Peer(), Peer()
    server.context.run(network.listen, lambda: far, "server", 1, True)
    client.spawn(network.connect(lambda: near, "server", 1))
    run(loop)
    return network, server, client, far, near


def test_bytes_arrive_in_order_in_random_pieces() -> None:
    with scheduler(Random(1)) as loop:
        _, _, _, far, near = connected(loop)
        assert near.transport is not None
        sent = [bytes((number,)) * 100 for number in range(50)]
        for piece in sent:
            near.transport.write(piece)
        near.transport.close()
        run(loop)
        assert far.data == b"".join(sent)
        assert far.lost
        assert near.lost


def test_bytes_of_a_dead_process_arrive() -> None:
    with scheduler(Random(1)) as loop:
        network, _, client, far, near = connected(loop)
        assert near.transport is not None
        near.transport.write(b"last words")
        client.kill()
        network.died(client)
        run(loop)
        assert far.data == b"last words"
        assert far.lost
        assert not near.lost


def test_a_partition_holds_everything_back_until_it_is_healed() -> None:
    with scheduler(Random(1)) as loop:
        network, _, _, far, near = connected(loop)
        assert near.transport is not None
        network.partition("client", "server")
        near.transport.write(b"held")
        run(loop)
        before = far.data
        network.heal()
        run(loop)
        assert (before, far.data) == (b"", b"held")
