"""The operators' port with clients that send nothing, send slowly or do not read. A test application runs behind it."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.types import Receive, Scope, Send

from dtx.admin import server
from dtx.admin.server import AdminServer, Guard

HEAD = b"GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\n"
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Port:
    """The port with an application that answers at once, except for ``/late``."""

    def __init__(self, *proxies: str, **options: Any) -> None:
        self.admin = AdminServer("127.0.0.1", 0, proxies=proxies, **options)
        self.may_end = asyncio.Event()
        self.begun = asyncio.Semaphore(0)
        self._stack = AsyncExitStack()
        self.admin._serve(Guard(self._answer))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun.release()
        if scope["path"] == "/late":
            await self.may_end.wait()
        while (await receive()).get("more_body"):
            pass
        body = b"x" * (64 << 20 if scope["path"] == "/long" else 1)
        if scope["path"] == "/who":
            body = f"{scope['scheme']} {scope['client'][0]}".encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for begin in range(0, len(body), 1 << 20):
            more = begin + (1 << 20) < len(body)
            await send({"type": "http.response.body", "body": body[begin : begin + (1 << 20)], "more_body": more})

    async def connect(self, tls: ssl.SSLContext | None = None) -> Stream:
        host, port = self.admin.url.partition("://")[2].split(":")
        while True:
            try:
                stream = await asyncio.open_connection(host, int(port), ssl=tls)
            except ConnectionRefusedError:
                await asyncio.sleep(0)
                continue
            self._stack.callback(stream[1].close)
            return stream

    async def get(self, path: bytes) -> int:
        return await status_of(await self.connect(), HEAD % path + b"\r\n")

    async def close(self) -> None:
        self.may_end.set()
        await self._stack.aclose()
        await self.admin.close()


async def status_of(stream: Stream, request: bytes) -> int:
    reader, writer = stream
    writer.write(request)
    return int((await reader.readline()).split()[1])


async def end_of(stream: Stream) -> bytes:
    """The bytes that arrive until the server closes."""
    try:
        return await asyncio.wait_for(stream[0].read(), 20)
    except ConnectionResetError:
        return b""


@pytest.fixture
async def port() -> AsyncIterator[Port]:
    made = Port()
    yield made
    await made.close()


@pytest.mark.parametrize("sent", [b"", HEAD % b"/", HEAD % b"/" + b"Content-Length: 5\r\n\r\nhalf"])
async def test_slow_sockets_leave_the_health_reachable(
    port: Port, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_MOST_OF_ADDRESS", 10)
    slow = [await port.connect() for _ in range(40)]
    for _, writer in slow:
        writer.write(sent)
    assert await port.get(b"/healthz") == 200
    assert await port.get(b"/") == 200
    assert await end_of(slow[0]) == b"", "the oldest one is closed"


@pytest.fixture
async def tls_port(certificates: Path) -> AsyncIterator[Port]:
    made = Port(certificate=certificates / "server.pem", key=certificates / "server.key")
    yield made
    await made.close()


async def test_sockets_that_begin_no_tls_leave_the_health_reachable(
    tls_port: Port, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow sockets count from the accept, not from the end of the handshake as in asyncio's TLS servers."""
    monkeypatch.setattr(server, "_MOST_OF_ADDRESS", 10)
    slow = [await tls_port.connect() for _ in range(40)]
    trusting = ssl.create_default_context(cafile=certificates / "ca.pem")
    assert await status_of(await tls_port.connect(trusting), HEAD % b"/" + b"\r\n") == 200
    assert [await end_of(one) for one in slow[:30]] == [b""] * 30, "the oldest ones are closed"
    assert await status_of(await tls_port.connect(trusting), HEAD % b"/" + b"\r\n") == 200


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request timeout is 0.2 s for a port that is made after this fixture."""
    monkeypatch.setattr(server, "_REQUEST_SECONDS", 0.2)


@pytest.mark.usefixtures("hasty")
async def test_a_tls_handshake_ends_in_time(tls_port: Port) -> None:
    assert await end_of(await tls_port.connect()) == b""


async def test_a_tls_handshake_ends_when_dtx_does(tls_port: Port) -> None:
    slow = await tls_port.connect()
    await tls_port.close()
    assert await end_of(slow) == b""


async def test_all_addresses_together_have_a_limit(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MOST_CONNECTIONS", 2)
    first, second = await port.connect(), await port.connect()
    assert await status_of(second, HEAD % b"/" + b"\r\n") == 200
    assert await port.get(b"/") == 200
    assert await end_of(first) == b""


@pytest.mark.parametrize("sent", [b"", HEAD % b"/", HEAD % b"/" + b"Content-Length: 5\r\n\r\nhalf"])
async def test_an_unfinished_request_is_closed_in_time(
    port: Port, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_REQUEST_SECONDS", 0.2)
    slow = await port.connect()
    slow[1].write(sent)
    assert await end_of(slow) == b""


async def test_an_idle_connection_is_closed_in_time(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_REQUEST_SECONDS", 0.2)
    idle = await port.connect()
    assert await status_of(idle, HEAD % b"/" + b"\r\n") == 200
    idle[1].write(HEAD % b"/")  # a part of the next request does not restart the timeout
    assert (await end_of(idle)).endswith(b"x\r\n0\r\n\r\n")


async def test_a_long_answer_is_not_cut(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_REQUEST_SECONDS", 0.05)
    waiting = asyncio.create_task(port.get(b"/late"))
    await port.begun.acquire()
    asyncio.get_running_loop().call_later(0.2, port.may_end.set)
    assert await waiting == 200


async def test_a_client_that_does_not_read_is_closed(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_STALL_SECONDS", 0.2)
    slow = await port.connect()
    cast("asyncio.Transport", slow[1].transport).pause_reading()
    slow[1].write(HEAD % b"/long" + b"\r\n")
    await port.begun.acquire()
    running = port.admin._server
    assert running is not None
    async with asyncio.timeout(20):
        while running.server_state.connections:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(("pause", "complete"), [(0.02, False), (0, True)])
async def test_a_client_that_reads_too_slowly_is_closed(
    port: Port, pause: float, complete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it never stops: 5 MB a second are more than a MiB, the longest part of the answer, in each 0.4 s."""
    monkeypatch.setattr(server, "_STALL_SECONDS", 0.4)
    monkeypatch.setattr(server, "_SLOWEST", 20_000_000)
    port.admin._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
    reader, writer = await port.connect()
    writer.write(HEAD % b"/long" + b"\r\n")
    received = 0
    with contextlib.suppress(ConnectionResetError):
        while received < 64 << 20 and (part := await reader.read(100_000)):
            received += len(part)
            await asyncio.sleep(pause)
    assert (received >= 64 << 20) is complete


async def test_health_and_metrics_are_answered_beside_many_requests(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MOST_REQUESTS", 2)
    late = [asyncio.create_task(port.get(b"/late")) for _ in range(2)]
    for _ in late:
        await port.begun.acquire()
    assert await port.get(b"/") == 503
    assert [await port.get(path) for path in (b"/healthz", b"/readyz", b"/metrics")] == [200] * 3
    port.may_end.set()
    assert await asyncio.gather(*late) == [200, 200]
    assert await port.get(b"/") == 200


@pytest.mark.parametrize(
    ("proxies", "seen", "demands_tls"),
    [
        ((), b"http 127.0.0.1", False),
        (("10.0.0.0/8",), b"http 127.0.0.1", False),
        (("127.0.0.0/8",), b"https 10.9.8.7", True),
    ],
)
async def test_only_a_trusted_proxy_sets_client_address_and_scheme(
    proxies: tuple[str, ...], seen: bytes, demands_tls: bool
) -> None:
    port = Port(*proxies)
    try:
        reader, writer = await port.connect()
        proxied = b"X-Forwarded-Proto: https\r\nX-Forwarded-For: 127.0.0.1, 10.9.8.7\r\nConnection: close\r\n\r\n"
        writer.write(HEAD % b"/who" + proxied)
        answer = await reader.read()
    finally:
        await port.close()
    assert seen in answer
    assert (b"strict-transport-security: max-age=31536000" in answer) is demands_tls
