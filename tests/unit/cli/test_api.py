"""Commands with ``--api``: the requests that they send, and the messages for unexpected answers."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dtx.cli import run

XID = "1:6774:62"


class _Handler(BaseHTTPRequestHandler):
    """Gives the answer that the server holds."""

    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        server.asked.append((self.command, self.path, dict(self.headers.items()), body))
        status, headers, answer = server.answers.get(self.command, server.answer)
        if status == 0:
            self.close_connection = True
            return
        self.send_response(status)
        if "transfer-encoding" not in headers:
            self.send_header("content-length", str(len(answer)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer)
        self.close_connection = True

    do_GET = do_POST = do_PUT = do_DELETE = _answer  # noqa: N815 - the names of http.server

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class Server(ThreadingHTTPServer):
    """An API with one answer for every request, or for each method. Status 0 closes the connection without one."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, str, dict[str, str], bytes]] = []
        self.answer: tuple[int, dict[str, str], bytes] = (200, {}, b"{}")
        self.answers: dict[str, tuple[int, dict[str, str], bytes]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serving() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("DTX_TOKEN", "secret")
    with serving() as found:
        yield found


def test_token_and_query_are_sent_and_no_proxy_is_used(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    server.answer = (200, {}, json.dumps({"lines": [], "cursor": None}).encode())
    assert run(["audit", "--api", f"{server.url}/", "--actor", "a b"]) == 0
    assert capsys.readouterr().out == "no line matches the filter\n"
    ((method, path, headers, _),) = server.asked
    assert (method, path) == ("GET", "/dtx/v1/audit?limit=50&actor=a+b")
    given = {name.lower(): value for name, value in headers.items()}
    assert (given["authorization"], given["content-type"]) == ("Bearer secret", "application/json")
    assert given["accept-encoding"] == "identity"


def test_an_order_is_sent_as_json_in_ascii(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.answer = (200, {}, b'{"name": "x", "exchanges": 2}')
    assert run(["user", "revoke-topic", "ä/b", "--api", server.url, "--reason", "ü"]) == 0
    ((method, path, _, body),) = server.asked
    assert (method, path) == ("POST", "/dtx/v1/users/revoke-topic")
    assert body.isascii()
    assert json.loads(body) == {"name": "ä/b", "vhost": "/", "exchange": None, "reason": "ü"}
    assert "at 2 exchanges" in capsys.readouterr().out


def test_delete_names_the_object_in_the_path(server: Server) -> None:
    server.answer = (204, {}, b"")
    assert run(["token", "remove", "a/b", "--api", server.url]) == 0
    assert server.asked[0][:2] == ("DELETE", "/dtx/v1/tokens/a%2Fb?reason=")


def test_the_token_goes_to_the_named_address_alone(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as other:
        server.answer = (307, {"location": f"{other.url}/dtx/v1/audit"}, b"")
        assert run(["audit", "--api", server.url]) == 1
        assert not other.asked
    assert "the API answered 307 Temporary Redirect" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((404, b'{"detail": "unknown xid 1:61:"}'), "unknown xid 1:61:"),
        ((404, b'{"error": "Object Not Found", "reason": "no queue \'q\'"}'), "no queue 'q'"),
        ((500, b"oops"), "the API answered 500 Internal Server Error"),
        ((403, b'["detail"]'), "the API answered 403 Forbidden"),
        ((200, b"no JSON"), "the API at {url} does not answer: Expecting value: line 1 column 1 (char 0)"),
        ((0, b""), "the API at {url} does not answer: "),
    ],
)
def test_an_invalid_answer_is_reported_in_one_sentence(
    server: Server, capsys: pytest.CaptureFixture[str], answer: tuple[int, bytes], said: str
) -> None:
    status, body = answer
    server.answer = (status, {}, body)
    assert run(["audit", "--api", server.url]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"dtx: {said.format(url=server.url)}")
    assert error.count("\n") == 1


def test_an_unreachable_api_is_reported_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    assert run(["audit", "--api", url, "--token-file", __file__]) == 1
    said = f"the API at {url} does not answer: [Errno 111] Connection refused. Name the --admin-listen of a dtx"
    assert said in capsys.readouterr().err


def test_an_export_that_breaks_off_leaves_no_half_message(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = b'{"position": 0, "bytes": 5}\n'
    begun = head + b"hello" + head + b"he"
    chunked = {"x-dtx-messages": "2", "transfer-encoding": "chunked"}
    server.answer = (200, chunked, b"%x\r\n%b\r\n" % (len(begun), begun))
    assert run(["export", XID, "--api", server.url, "--to", str(tmp_path / "kept")]) == 1
    assert f"the API at {server.url} does not answer: " in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["000001.body", "000001.json"]
    assert server.asked[0][1] == "/dtx/v1/branches/1%3A6774%3A62/export?vhost=%2F"


def test_an_export_asks_for_the_positions_and_for_the_archive(server: Server, capsysbinary: Any) -> None:
    server.answer = (200, {"x-dtx-messages": "1"}, b'{"position": 3, "bytes": 2}\nhi')
    assert run(["export", XID, "--api", server.url, "--archived", "--position", "3"]) == 0
    assert server.asked[0][1].endswith("/export?vhost=%2F&archived=True&position=3")
    assert capsysbinary.readouterr().out == b'{"position": 3, "bytes": 2, "body": "aGk="}\n'
