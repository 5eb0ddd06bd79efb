"""Limits of handshakes, places for coordinators, and log lines about connections."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from dtx.manager import Requester
from dtx.server import listener as module
from dtx.server.connection import Stage
from dtx.server.listener import AcceptedConnection, Listener
from dtx.telemetry import Metrics
from dtx.wire.amqp09.frames import Protocol

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Session:
    """A session that is logged in by its first byte, as *ordinary* client or as *coordinator*."""

    def __init__(self, transport: AcceptedConnection, header: bytes) -> None:
        self.id = 7
        self.who = Requester("", "")
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.stage = Stage.RUNNING
        self.channels: dict[int, Any] = {}
        self.transport = transport

    async def connect(self) -> None: ...

    def client_data(self, data: bytes) -> None:
        self.who = Requester("coordinator" if data == b"c" else "ordinary", "/")
        self.transport.write(b"y" if self.transport.opened(self.who) else b"n")

    def client_is_slow(self) -> None: ...

    def client_has_caught_up(self) -> None: ...

    def client_disconnected(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def abort(self) -> None: ...

    def stop(self, frame: bytes) -> None: ...


class Port:
    """A listener with small limits."""

    def __init__(self) -> None:
        self.listener = Listener(
            max_connections=4,
            max_handshakes=2,
            coordinators=frozenset({"coordinator"}),
            header_timeout=60.0,
            metrics=Metrics(),
        )
        self.clients: list[Stream] = []

    async def connect(self, address: str = "127.0.0.1") -> Stream:
        reader, writer = await asyncio.open_connection(*self.address, local_addr=(address, 0))
        writer.write(Protocol.AMQP_0_9_1.value)
        self.clients.append((reader, writer))
        return reader, writer

    async def log_in(self, *, coordinator: bool = False, address: str = "127.0.0.1") -> bytes:
        stream = await self.connect(address)
        stream[1].write(b"c" if coordinator else b"o")
        return await answer(stream)

    async def open(self) -> None:
        self.address = await self.listener.bind("127.0.0.1", 0, None)
        await self.listener.accept(Session)

    async def close(self) -> None:
        for _, writer in self.clients:
            writer.close()
        self.listener.stop_accepting()
        await self.listener.close(b"", 1)


async def answer(stream: Stream) -> bytes:
    """The byte that confirms the login, or nothing if the socket was closed."""
    try:
        return await asyncio.wait_for(stream[0].read(1), 20)
    except ConnectionResetError:
        return b""


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Port]:
    monkeypatch.setattr(module, "_RESERVED", 2)
    made = Port()
    await made.open()
    yield made
    await made.close()


async def test_one_address_has_a_limit_of_handshakes(port: Port) -> None:
    for _ in range(2):
        await port.connect()
    assert await answer(await port.connect()) == b""
    assert await port.log_in(address="127.0.0.2") == b"y"


async def test_an_old_handshake_makes_room_for_a_new_client(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GRACE", 0.0)
    first, second = await port.connect(), await port.connect()
    assert await port.log_in() == b"y"
    assert await answer(first) == b""
    second[1].write(b"o")
    assert await answer(second) == b"y"


async def test_the_address_with_most_handshakes_makes_room(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GRACE", 0.0)
    lonely = await port.connect("127.0.0.9")
    await port.connect("127.0.0.8")
    crowd = [await port.connect(address) for address in ("127.0.0.2", "127.0.0.2", "127.0.0.3", "127.0.0.3")]
    assert await port.log_in(address="127.0.0.5") == b"y", "all six places were taken by handshakes"
    lonely[1].write(b"o")
    assert await answer(lonely) == b"y"
    assert await answer(crowd[0]) == b""


async def test_the_last_places_are_the_coordinators(port: Port) -> None:
    assert [await port.log_in() for _ in range(4)] == [b"y"] * 4
    assert await port.log_in() == b"n"
    port.clients[-1][1].close()
    assert await port.log_in(coordinator=True) == b"y"


async def test_a_client_that_is_in_never_makes_room(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GRACE", 0.0)
    assert [await port.log_in(coordinator=True) for _ in range(6)] == [b"y"] * 6
    assert await answer(await port.connect()) == b""


async def test_the_log_names_address_and_close_of_connections(port: Port) -> None:
    with capture_logs() as lines:
        assert await port.log_in() == b"y"
        host, number = port.clients[0][1].get_extra_info("sockname")
        port.clients[0][1].close()
        async with asyncio.timeout(20):
            while not any(line["event"] == "connection closed" for line in lines):
                await asyncio.sleep(0)
    told = {
        "connection": 7,
        "peer": f"{host}:{number}",
        "protocol": "AMQP 0-9-1",
        "tls": False,
        "user": "ordinary",
        "vhost": "/",
        "log_level": "info",
    }
    wanted = [{**told, "event": "connection opened"}, {**told, "event": "connection closed"}]
    assert [{key: line[key] for key in wanted[0]} for line in lines if line["event"].startswith("conn")] == wanted


async def test_the_log_names_the_address_of_a_handshake_that_ended(port: Port) -> None:
    with capture_logs() as lines:
        _, writer = await port.connect()
        host, number = writer.get_extra_info("sockname")
        async with asyncio.timeout(20):
            while not port.listener.sessions:
                await asyncio.sleep(0)
            writer.close()
            while not lines:
                await asyncio.sleep(0)
    (line,) = lines
    assert (line["event"], line["peer"]) == ("connection closed in its handshake", f"{host}:{number}")
