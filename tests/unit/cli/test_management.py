"""Commands for objects of a dtx without a broker: their help, their requests, and wrong usage."""

import json
import os
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


def counts(ready: int, unacknowledged: int) -> tuple[int, dict[str, str], bytes]:
    """The answer for a queue with these numbers of messages."""
    found = {"messages_ready": ready, "messages_unacknowledged": unacknowledged, "messages": ready + unacknowledged}
    return 200, {}, json.dumps(found).encode()


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
    server.answer = (200, {}, b'{"messages": 2, "messages_ready": 1, "messages_unacknowledged": 1, "routed": true}')
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


@pytest.mark.parametrize(
    ("words", "ready", "unacknowledged"),
    [(["purge"], 1, 1), (["remove"], 1, 0), (["remove"], 0, 1), (["remove", "--if-empty"], 0, 1)],
)
def test_messages_are_not_removed_without_a_question(
    server: Server, capsys: pytest.CaptureFixture[str], words: list[str], ready: int, unacknowledged: int
) -> None:
    """Without a terminal to ask on, the command is refused."""
    server.answer = counts(ready, unacknowledged)
    assert run(["queue", *words, "q"]) == 2
    assert "stdin is no terminal, so dtx cannot ask: use --yes" in capsys.readouterr().err
    assert [method for method, *_ in server.asked] == ["GET"]


@pytest.mark.parametrize("options", [[], ["--if-empty"], ["--if-empty", "--yes"]])
def test_an_empty_queue_is_removed_without_a_question(server: Server, options: list[str]) -> None:
    """Messages may arrive before it is removed, so it must be empty then."""
    server.answer = counts(0, 0)
    assert run(["queue", "remove", "q", *options]) == 0
    assert server.asked[-1][:2] == ("DELETE", "/api/queues/%2F/q?if-empty=true")


def test_messages_that_arrive_before_the_removal_stay(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.answers = {"GET": counts(0, 0), "DELETE": (400, {}, b'{"reason": "q has messages", "code": "not-empty"}')}
    assert run(["queue", "remove", "q"]) == 1
    error = "dtx: queue q is not empty any more: to remove it with its messages, use --yes\n"
    assert capsys.readouterr().err == error


def test_a_used_queue_has_its_own_reason(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.answers = {
        "GET": counts(0, 0),
        "DELETE": (400, {}, b'{"reason": "queue q in use, not empty", "code": "in-use"}'),
    }
    assert run(["queue", "remove", "q", "--if-unused"]) == 1
    assert capsys.readouterr().err == "dtx: queue q in use, not empty\n"


def test_messages_cannot_be_viewed_again_and_again(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """Each look marks the messages as redelivered."""
    assert run(["queue", "peek", "q", "--watch"]) == 2
    assert "No such option" in capsys.readouterr().err
    server.answer = (200, {}, b"[]")
    assert run(["queue", "peek", "q", "--sort", "bytes"]) == 0


@pytest.mark.parametrize(
    ("words", "row"),
    [
        (["queue", "list"], {"name": "q" * 255, "vhost": "/", "messages": 0}),
        (["exchange", "list"], {"name": "q" * 255, "vhost": "/", "durable": True}),
    ],
)
def test_long_names_in_lists_are_cut_unless_wide(
    server: Server, capsys: pytest.CaptureFixture[str], words: list[str], row: dict[str, object]
) -> None:
    server.answer = (200, {}, json.dumps([row]).encode())
    for form, letters in (("table", 75), ("wide", 255)):
        assert run([*words, "--output", form]) == 0
        assert capsys.readouterr().out.splitlines()[1].count("q") == letters


def test_a_long_product_of_a_client_is_cut(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"name": "c", "connected_at": 0, "client_properties": {"product": "p" * 5000, "version": "v" * 5000}}
    row |= {f"{way}_oct_details": {"rate": 1500.4} for way in ("recv", "send")}
    server.answer = (200, {}, json.dumps([row]).encode())
    assert run(["connection", "list"]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert (line.count("p"), line.count("v"), line.count("1.5 KiB")) == (100, 100, 2)


@pytest.mark.parametrize("kind", ["pipe", "symbolic link", "directory"])
def test_an_export_replaces_only_a_regular_file(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    file, other = tmp_path / "d.json", tmp_path / "other"
    other.write_text("kept")
    {"pipe": os.mkfifo, "symbolic link": lambda path: path.symlink_to(other), "directory": os.mkdir}[kind](file)
    before = file.lstat()
    assert run(["definitions", "export", str(file)]) == 2
    assert f"{file} is no regular file: use - instead, and redirect stdout to it" in capsys.readouterr().err
    assert (file.lstat().st_ino, other.read_text()) == (before.st_ino, "kept")


def test_an_export_is_complete_private_and_durable(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file of before, readable for others, stays until then."""
    synced = list[Path]()
    monkeypatch.setattr("dtx.embedded.cluster.sync_directory", synced.append)
    file = tmp_path / "d.json"
    file.write_text("{}")
    file.chmod(0o644)
    server.answer = (200, {}, b'{"users": []}')
    with monkeypatch.context() as patch:
        patch.setattr("dtx.cli.files.os.fsync", refuse)
        assert run(["definitions", "export", str(file)]) == 1
    assert "d.json cannot be written: disk full" in capsys.readouterr().err
    assert (file.read_text(), synced, list(tmp_path.iterdir())) == ("{}", [], [file])
    assert run(["definitions", "export", str(file)]) == 0
    assert json.loads(file.read_text()) == {"users": []}
    assert (file.stat().st_mode & 0o777, synced) == (0o600, [tmp_path])


def refuse(_: int) -> None:
    raise OSError(28, "disk full")


def test_a_binding_is_removed_by_a_key_of_dots(server: Server) -> None:
    """A client of HTTP would take ``..`` at the end of a path as the directory above."""
    server.answer = (200, {}, b'[{"routing_key": "..", "arguments": {}, "properties_key": ".."}]')
    assert run(["exchange", "unbind", "x", "q", "--key", ".."]) == 0
    assert server.asked[-1][:2] == ("DELETE", "/api/bindings/%2F/e/x/q/q/%2E%2E")


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
