"""Commands for objects of a dtx without a broker: their help, their requests, and wrong usage."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from dtx.cli import dtx, run
from tests.unit.cli.test_api import Server, serving

GROUPS = ("queue", "exchange", "connection", "definitions")


def commands() -> list[tuple[str, str]]:
    root = click.Context(dtx)
    groups = {name: dtx.get_command(root, name) for name in GROUPS}
    return [(name, each) for name, group in groups.items() if isinstance(group, click.Group) for each in group.commands]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("DTX_TOKEN", "secret")
    with serving() as found:
        monkeypatch.setenv("DTX_API", found.url)
        yield found


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_the_examples_of_a_command_are_commands(words: tuple[str, str], tmp_path: Path) -> None:
    root = click.Context(dtx)
    group = dtx.get_command(root, words[0])
    assert isinstance(group, click.Group)
    command = group.commands[words[1]]
    lines = [line.strip() for line in (command.epilog or "").splitlines() if line.startswith("  dtx ")]
    assert lines
    for name in ("backup.json", "order.json"):
        (tmp_path / name).touch()
    for line in lines:
        given = shlex.split(line.split(" | ")[0].split(" < ")[0].split(" > ")[0])
        assert given[:3] == ["dtx", *words]
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path)
            command.make_context(words[1], given[3:], parent=click.Context(group, parent=root)).close()


@pytest.mark.parametrize(
    ("words", "request_line", "body"),
    [
        (
            ["queue", "declare", "a/b", "--type", "quorum", "--argument", "x-delivery-limit=5", "--argument", "x=y"],
            "PUT /api/queues/%2F/a%2Fb",
            {
                "durable": True,
                "auto_delete": False,
                "arguments": {"x-queue-type": "quorum", "x-delivery-limit": 5, "x": "y"},
            },
        ),
        (
            [
                "exchange",
                "declare",
                "x",
                "--vhost",
                "v",
                "--type",
                "topic",
                "--transient",
                "--auto-delete",
                "--internal",
            ],
            "PUT /api/exchanges/v/x",
            {"durable": False, "auto_delete": True, "internal": True, "type": "topic", "arguments": {}},
        ),
        (
            ["exchange", "bind", "x", "y", "--to-exchange", "--key", "k.#", "--argument", "n=1"],
            "POST /api/bindings/%2F/e/x/e/y",
            {"routing_key": "k.#", "arguments": {"n": 1}},
        ),
        (["exchange", "remove", "..", "--if-unused"], "DELETE /api/exchanges/%2F/%2E%2E?if-unused=true", None),
        (["queue", "purge", "q", "--yes"], "DELETE /api/queues/%2F/q/contents", None),
        (["queue", "remove", "q", "--yes"], "DELETE /api/queues/%2F/q", None),
        (
            ["queue", "publish", "q", "\u00fc", "--property", "message_id=1", "--property", 'headers={"n": 1}'],
            "POST /api/exchanges/%2F/amq%2Edefault/publish",
            {
                "routing_key": "q",
                "payload": "w7w=",
                "payload_encoding": "base64",
                "properties": {"delivery_mode": 2, "message_id": "1", "headers": {"n": 1}},
            },
        ),
    ],
    ids=lambda given: " ".join(given[:2]) if isinstance(given, list) else None,
)
def test_a_command_sends_its_request(
    server: Server, words: list[str], request_line: str, body: dict[str, object] | None
) -> None:
    server.answer = (200, {}, b'{"messages": 2, "messages_ready": 1, "routed": true}')
    assert run(words) == 0
    method, path, _, sent = server.asked[-1]
    assert f"{method} {path}" == request_line
    assert (json.loads(sent) if sent else None) == body


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["queue", "declare", ""], "a name is empty"),
        (["queue", "publish", "q"], "name the message: BODY, or --file"),
        (["queue", "publish", "q", "x", "--property", "typ=1"], "there is no property typ: "),
        (["queue", "declare", "q", "--argument", "x"], "x must be NAME=VALUE"),
        (["queue", "list", "--watch", "0"], "the shortest time is 100ms"),
        (["definitions", "import", __file__], "test_management.py is no JSON: "),
    ],
)
def test_wrong_usage_of_objects_is_reported(
    server: Server, capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    assert run(words) == 2
    assert reason in capsys.readouterr().err
    assert not server.asked


@pytest.mark.parametrize("action", ["purge", "remove"])
def test_messages_are_not_removed_without_a_question(
    server: Server, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    """Without a terminal to ask on, the command is refused."""
    server.answer = (200, {}, b'{"messages": 2, "messages_ready": 1}')
    assert run(["queue", action, "q"]) == 2
    assert "stdin is no terminal, so dtx cannot ask: use --yes" in capsys.readouterr().err
    assert [method for method, *_ in server.asked] == ["GET"]


def test_an_empty_queue_is_removed_without_a_question(server: Server) -> None:
    server.answer = (200, {}, b'{"messages": 0}')
    assert run(["queue", "remove", "q", "--if-empty"]) == 0
    assert server.asked[-1][:2] == ("DELETE", "/api/queues/%2F/q?if-empty=true")


def test_a_message_for_no_queue_is_reported(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.answer = (200, {}, b'{"routed": false}')
    assert run(["queue", "publish", "q", "x"]) == 1
    assert capsys.readouterr().err == "dtx: no queue has taken the message: there is no queue q\n"


def test_a_missing_binding_is_not_removed(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """A binding has a key and arguments; both must be the same."""
    server.answer = (200, {}, b'[{"routing_key": "k", "arguments": {"n": 1}, "properties_key": "k~x"}]')
    assert run(["exchange", "unbind", "x", "q", "--key", "k"]) == 1
    assert "there is no such binding" in capsys.readouterr().err
    assert run(["exchange", "unbind", "x", "q", "--key", "k", "--argument", "n=1"]) == 0
    assert server.asked[-1][:2] == ("DELETE", "/api/bindings/%2F/e/x/q/q/k~x")
