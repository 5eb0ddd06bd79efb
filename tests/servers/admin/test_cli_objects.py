"""``dtx queue``, ``exchange``, ``connection`` and ``definitions`` with a dtx that runs."""

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pika
import pytest
import yaml

from dtx.auth.roles import OperatorRole
from dtx.cli import run
from tests.servers.admin.conftest import somebody
from tests.support.crash import Scene, StandaloneStage

Command = Callable[..., str]
ODD = "a/b \u00fc?#.."


def command_of(scene: Scene, role: OperatorRole, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs commands with ``--api`` and a token of *role*; returns stdout, or the error of a command that fails."""
    token = somebody(scene, role).token
    assert token is not None

    def command(*words: str, code: int = 0) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DTX_TOKEN", token)
            patch.setenv("DTX_API", scene.service.admin_url)
            capsys.readouterr()
            found = run(words)
        out, err = capsys.readouterr()
        assert found == code, out + err
        assert bool(err) == bool(code), err
        return err if code else out

    return command


@pytest.fixture
def dtx(alone: StandaloneStage, capsys: pytest.CaptureFixture[str]) -> Command:
    return command_of(alone, OperatorRole.COORDINATOR, capsys)


def rows(lines: str) -> list[Any]:
    return [json.loads(line) for line in lines.splitlines()]


def test_a_queue_is_declared_filled_viewed_purged_and_removed(dtx: Command, tmp_path: Path) -> None:
    assert dtx("queue", "list") == "there are no queues\n"
    dtx("queue", "declare", "orders", "--type", "quorum", "--argument", "x-delivery-limit=5")
    dtx("queue", "declare", "news", "--argument", "x-max-length=10")
    (tmp_path / "body").write_bytes(b"\xff\x00")
    dtx("queue", "publish", "orders", "hello", "--property", "message_id=4711", "--property", "priority=3")
    dtx("queue", "publish", "orders", "--file", str(tmp_path / "body"))
    head, orders, news = dtx("queue", "list", "--sort", "-ready").splitlines()
    assert head.split()[:6] == ["queue", "vhost", "type", "ready", "unacked", "total"]
    assert orders.split()[:7] == ["orders", "/", "quorum", "2", "0", "2", "0"]
    assert news.split()[:4] == ["news", "/", "classic", "0"]
    peeked = dtx("queue", "peek", "orders", "--json")
    assert [(each["payload"], each["payload_encoding"]) for each in rows(peeked)] == [
        ("hello", "string"),
        ("/wA=", "base64"),
    ]
    assert rows(peeked)[0]["properties"] == {"message_id": "4711", "priority": 3, "delivery_mode": 2}
    table = dtx("queue", "peek", "orders", "--count", "1", "--bytes", "2")
    assert table.splitlines()[1].split()[0:4] == ["orders", "5", "B", "yes"]
    assert table.endswith("he\u2026\n")
    assert "not empty" in dtx("queue", "remove", "orders", "--if-empty", code=1)
    dtx("queue", "purge", "orders", "--yes")
    assert dtx("queue", "peek", "orders") == "queue orders has no ready messages\n"
    dtx("queue", "remove", "orders")
    assert dtx("queue", "show", "orders", code=1) == "dtx: no queue 'orders'\n"
    assert [row["name"] for row in rows(dtx("queue", "list", "--json"))] == ["news"]


def test_messages_that_arrive_before_the_removal_stay(dtx: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue that was empty is only removed if it still is."""
    dtx("queue", "declare", "orders")
    dtx("queue", "publish", "orders", "hello")
    with monkeypatch.context() as patch:
        empty = {"messages": 0, "messages_ready": 0, "messages_unacknowledged": 0}
        patch.setattr("dtx.cli.api_client.Remote.get", lambda *_: empty)
        assert "queue orders is not empty any more" in dtx("queue", "remove", "orders", code=1)
    assert [row["payload"] for row in rows(dtx("queue", "peek", "orders", "--json"))] == ["hello"]
    dtx("queue", "remove", "orders", "--yes")


def test_bindings_are_made_shown_and_removed(dtx: Command) -> None:
    dtx("exchange", "declare", "events", "--type", "topic")
    dtx("exchange", "declare", "archive", "--type", "fanout", "--internal", "--transient")
    dtx("queue", "declare", "orders")
    binding = ("exchange", "bind", "events", "orders", "--key", "order.#/%~")
    dtx(*binding)
    dtx(*binding, "--argument", "n=1")
    dtx("exchange", "bind", "events", "archive", "--to-exchange")
    shown = dtx("exchange", "show", "events")
    assert [line.split() for line in shown.split("bindings from it:\n")[1].splitlines()[1:]] == [
        ["events", "exchange", "archive"],
        ["events", "queue", "orders", "order.#/%~"],
        ["events", "queue", "orders", "order.#/%~", '{"n":', "1}"],
    ]
    assert "bindings to it:" in dtx("exchange", "show", "archive")
    dtx("exchange", "unbind", *binding[2:])
    dtx("exchange", "unbind", "events", "archive", "--to-exchange")
    dtx("exchange", "bind", "events", "orders", "--key", "..")
    dtx("exchange", "unbind", "events", "orders", "--key", "..")
    (left,) = yaml.safe_load(dtx("exchange", "show", "events", "--output", "yaml"))["bindings_from_it"]
    assert (left["destination"], left["arguments"]) == ("orders", {"n": 1})
    assert "in use" in dtx("exchange", "remove", "events", "--if-unused", code=1)
    dtx("exchange", "remove", "events")
    names = [line.split()[0] for line in dtx("exchange", "list", "--vhost", "/").splitlines()[1:]]
    assert "archive" in names
    assert "events" not in names


def test_names_may_have_any_characters(dtx: Command) -> None:
    dtx("vhost", "add", ODD)
    for name in (ODD, ".."):
        dtx("queue", "declare", name, "--vhost", ODD)
        assert rows(dtx("queue", "show", name, "--vhost", ODD, "--json"))[0]["vhost"] == ODD
    assert len(dtx("queue", "list", "--vhost", ODD).splitlines()) == 3
    for name in (ODD, ".."):
        dtx("queue", "remove", name, "--vhost", ODD)


def test_a_connection_is_listed_shown_and_closed(dtx: Command, alone: StandaloneStage) -> None:
    client = pika.BlockingConnection(pika.URLParameters(alone.service.url()))
    client.channel().basic_qos(prefetch_count=7)
    (row,) = rows(dtx("connection", "list", "--json"))
    peer = row["name"].partition(" -> ")[0]
    table = dtx("connection", "list", "--vhost", "/").splitlines()[1]
    assert table.split()[:7] == [*row["name"].split(), "guest", "/", "running", "1"]
    assert "Pika Python Client Library" in table
    assert dtx("connection", "show", peer).splitlines()[-1].split()[:2] == ["1", "7"]
    assert dtx("connection", "close", row["name"]) == f"connection {row['name']} is closed\n"
    with pytest.raises(pika.exceptions.ConnectionClosed, match="320"):
        client.process_data_events(time_limit=30)
    assert dtx("connection", "close", peer, code=1) == f"dtx: there is no connection {peer}\n"


def test_definitions_are_exported_and_imported_again(dtx: Command, tmp_path: Path) -> None:
    dtx("queue", "declare", "orders", "--type", "quorum")
    dtx("exchange", "declare", "events", "--type", "topic")
    dtx("exchange", "bind", "events", "orders", "--key", "order.#")
    file = tmp_path / "definitions.json"
    assert dtx("definitions", "export", str(file)) == ""
    assert file.stat().st_mode & 0o777 == 0o600
    dtx("queue", "remove", "orders")
    dtx("exchange", "remove", "events")
    assert dtx("definitions", "import", str(file)) == f"the definitions of {file} are imported\n"
    again = json.loads(dtx("definitions", "export"))
    written = json.loads(file.read_text())
    for document in (again, written):  # the hash of an imported hash is another one
        for user in document["users"]:
            assert user.pop("password_hash")
    assert again == written
    assert "users" not in json.loads(dtx("definitions", "export", "--vhost", "/"))
    written["policies"] = [{"vhost": "/", "name": "ttl", "pattern": ".*", "definition": {"message-ttl": 1000}}]
    written["users"] = [{"name": "pm", "password_hash": "", "tags": "monitoring,policymaker", "limits": {"a": 1}}]
    file.write_text(json.dumps(written))
    said = dtx("definitions", "import", str(file))
    assert said.endswith("without what dtx does not have: 1 policies, tags policymaker of user pm, limits of user pm\n")
    file.write_text('{"queues": [{"name": "q", "vhost": "nowhere"}]}')
    assert "no virtual host 'nowhere'" in dtx("definitions", "import", str(file), code=1)


def test_a_viewer_sees_queues_but_cannot_change_them(
    shared: StandaloneStage, capsys: pytest.CaptureFixture[str]
) -> None:
    viewer = command_of(shared, OperatorRole.VIEWER, capsys)
    assert viewer("queue", "list") == "there are no queues\n"
    assert "this needs a coordinator" in viewer("queue", "declare", "q", code=1)


def test_commands_find_the_active_dtx_by_its_lease(alone: StandaloneStage) -> None:
    assert alone.service.run("queue", "declare", "orders").stdout == "queue orders is declared\n"
    assert alone.service.stop() == 0
    done = alone.service.run("queue", "list", check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "dtx: no dtx is active: start 'dtx serve', or name its API with --api\n"


def test_without_a_dtx_each_way_to_one_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DTX_DATA_DIR", str(tmp_path))
    assert run(["queue", "list"]) == 3
    ways = "start it, or name its --data-dir, or --database; or name its API with --api"
    assert capsys.readouterr().err == f"dtx: no dtx with an embedded PostgreSQL is running on {tmp_path}: {ways}\n"


@pytest.mark.parametrize("scene", ["alongside"], indirect=True)
@pytest.mark.parametrize("words", [("queue", "list"), ("exchange", "remove", "x"), ("definitions", "export")], ids=str)
def test_alongside_a_broker_its_own_tools_are_named(
    scene: Scene, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    said = command_of(scene, OperatorRole.COORDINATOR, capsys)(*words, code=1)
    assert said == "dtx: dtx runs alongside a broker: use the management API of RabbitMQ, by default on port 15672\n"


def test_a_list_is_redrawn_on_a_terminal_until_ctrl_c(shared: StandaloneStage) -> None:
    token = somebody(shared, OperatorRole.VIEWER).token
    environment = os.environ | {"DTX_TOKEN": str(token), "DTX_API": shared.service.admin_url, "TERM": "xterm"}
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "dtx", "exchange", "list", "--watch", "100ms"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets background jobs ignore it
    try:
        process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=environment)
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        os.close(theirs)
        out = b""
        while out.count(b"\x1b[H\x1b[J") < 3:
            out += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert (process.stderr.read(), process.wait(30)) == (b"", 0)
    os.close(ours)
    assert out.count(b"amq.topic") >= 2
