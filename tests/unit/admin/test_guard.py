"""The guard of the operators' API: the host names that it accepts."""

import asyncio
import socket

import pytest
from starlette.types import Message, Receive, Scope, Send

from dtx.admin.server import Guard


def status_of(host: str | None, *, names: tuple[str, ...] = (), path: str = "/dtx/v1/status") -> int:
    """Status of the answer to a request with that host header."""
    said: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        said.append(message)

    async def answers(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    headers = [] if host is None else [(b"host", host.encode())]
    scope = {"type": "http", "method": "GET", "path": path, "headers": headers, "query_string": b""}
    asyncio.run(Guard(answers, names)(scope, receive, send))
    status: int = said[0]["status"]
    return status


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "127.0.0.1:15673", "10.1.2.3:80", "[::1]", "[::1]:15673", "[fe80::1]:1", "localhost",
        "localhost:15673", "LocalHost.:1", "localhost:", socket.gethostname(), f"{socket.gethostname().upper()}:15673",
        "dtx.example", "DTX.example.:443", "other",
    ],
)  # fmt: skip
def test_names_of_this_server_are_answered(host: str) -> None:
    assert status_of(host, names=("dtx.example", "Other.")) == 200


@pytest.mark.parametrize(
    "host",
    [
        None, "", ":15673", "evil.example", "evil.example:15673", "localhost.evil.example", "dtx.example.evil.example",
        "127.0.0.1.evil.example:15673", "[::1", "[evil]", "127.0.0.1:x", "localhost@evil.example", "*", "dtx.example..",
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/dtx/v1/status", "/console/", "/metrics"])
def test_other_names_are_not(host: str | None, path: str) -> None:
    assert status_of(host, names=("dtx.example",), path=path) == 421


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_liveness_requests_may_use_any_host_name(path: str) -> None:
    assert status_of("balancer", path=path) == 200
    assert status_of(None, path=path) == 200
