"""``dtx in-doubt``, ``show`` and ``doctor`` for a dtx without a broker, on branches that clients have left."""

import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
import trustme

from dtx.auth.users import AccountEditor
from dtx.cli import run
from dtx.wire.amqp09 import methods, properties
from dtx.wire.amqp09.methods import DtxCommit, DtxEnd, DtxPrepare, DtxRollback, DtxStart
from dtx.wire.amqp09.properties import Property
from dtx.xa.codes import XaFlag
from dtx.xa.xid import Xid
from tests.support.client import new_xid
from tests.support.postgres import PostgresServer
from tests.support.raw import RawClient
from tests.support.service import DtxService

ATTACK = b"\x1b[2Jgone"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("DTX_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "300")


class Command:
    """Runs commands on one database; each must end with *code*."""

    def __init__(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.url = url
        self._capsys = capsys
        self.err = ""

    def __call__(self, *words: str, code: int = 0) -> str:
        self._capsys.readouterr()
        ended = run([*words, "--database", self.url])
        out, self.err = self._capsys.readouterr()
        assert ended == code, out + self.err
        return out

    def objects(self, *words: str, code: int = 0) -> list[Any]:
        return [json.loads(line) for line in self(*words, "--json", code=code).splitlines()]

    def findings(self, *words: str, code: int = 0) -> dict[str, tuple[str, str]]:
        """The checks of doctor that do not pass: name to status and sentence."""
        found = self.objects("doctor", *words, code=code)
        return {each["check"]: (each["status"], each["sentence"]) for each in found if each["status"] != "ok"}


# -- branches ----------------------------------------------------------------------------------------------------------


class Scene:
    """Branches of a service: *published* to two queues of a fanout exchange, *moved* from one queue to another."""

    def __init__(self, service: DtxService) -> None:
        self.url = service.database
        self.published, self.moved, self.over = new_xid(b"p"), new_xid(b"m"), new_xid(b"o")
        self.client = RawClient(service.url()).log_in()
        client = self.client
        client.open(1, select=True)
        client.open(2)
        for queue in (b"orders", b"copies"):
            client.say(2, methods.QueueDeclare(queue, durable=True).encode())
            client.next_method(2)
            client.say(2, methods.QueueBind(queue, b"amq.fanout", b"").encode())
            client.next_method(2)
        client.prepared(1, self.over, queue="orders", body=b"first")
        assert client.ask(2, DtxCommit(xid=self.over)) is XaFlag.OK
        client.ask(1, DtxStart(xid=self.published))
        raw = properties.build({Property.MESSAGE_ID: b"m1"})
        client.publish(1, "key", ATTACK, exchange="amq.fanout", properties=raw)
        self._prepare(self.published)
        client.ask(1, DtxStart(xid=self.moved))
        client.consume_one(1, "orders")
        client.publish(1, "copies", b"second")
        self._prepare(self.moved)

    def _prepare(self, xid: Xid) -> None:
        assert self.client.ask(1, DtxEnd(xid=xid)) is XaFlag.OK
        assert self.client.ask(1, DtxPrepare(xid=xid)) is XaFlag.OK


@pytest.fixture(scope="module")
def scene(postgres: PostgresServer) -> Iterator[Scene]:
    database = postgres.create_database()
    with DtxService(database=database) as service:
        made = Scene(service)
        yield made
        made.client.close()
    postgres.drop_database(database)


@pytest.fixture
def dtx(scene: Scene, capsys: pytest.CaptureFixture[str]) -> Command:
    assert scene.url is not None
    return Command(scene.url, capsys)


def test_in_doubt_lists_queues_of_publishes_and_consumption(dtx: Command, scene: Scene) -> None:
    found = {each["xid"]: each for each in dtx.objects("in-doubt")}
    assert list(found) == [str(scene.published), str(scene.moved)]
    published, moved = found[str(scene.published)], found[str(scene.moved)]
    assert (published["queues"], published["exchanges"]) == ([], ["amq.fanout"])
    assert (moved["queues"], moved["exchanges"]) == (["orders"], [""])
    assert (moved["publishes"], moved["consumes"]) == (1, 1)
    table = dtx("in-doubt").splitlines()
    assert table[0].split()[:5] == ["xid", "vhost", "state", "owner", "age"]
    assert table[2].split()[-3:] == ["orders", "copies", "(default)"]
    assert table[-1] == "2 in doubt: 2 prepared"


def test_the_sql_view_agrees_with_the_command(dtx: Command, scene: Scene) -> None:
    with psycopg.connect(dtx.url) as connection:
        rows = connection.execute("SELECT xid, queues, exchanges FROM dtx.in_doubt ORDER BY started_at").fetchall()
    assert rows == [(str(scene.published), None, "amq.fanout"), (str(scene.moved), "orders", "")]


def test_show_has_the_messages_of_a_branch(dtx: Command, scene: Scene) -> None:
    """A published message is shown once for each queue that receives it."""
    (shown,) = dtx.objects("show", str(scene.published))
    work = shown["in_log"]["work"]
    assert [each["position"] for each in work] == [0, 1]
    assert {each["queue"] for each in work} == {"orders", "copies"}
    for each in work:
        assert (each["kind"], each["exchange"], each["routing_key"], each["bytes"]) == (
            "publish", "amq.fanout", "key", len(ATTACK),
        )  # fmt: skip
    assert work[0]["properties"] == {"message_id": "m1"}
    text = dtx("show", str(scene.published))
    assert "publish to exchange amq.fanout key key into queue orders" in text
    assert "\x1b" not in text
    (moved,) = dtx.objects("show", str(scene.moved))
    assert [(each["kind"], each["queue"], each["preview"]) for each in moved["in_log"]["work"]] == [
        ("publish", "copies", "second"),
        ("consume", "orders", "first"),
    ]
    # the rows contain neither value
    assert (moved["in_log"]["work"][0]["mandatory"], moved["in_log"]["work"][1]["redelivered"]) == (None, None)
    assert "consumed from queue orders" in dtx("show", str(scene.moved))


def test_show_has_the_history_of_ended_branches(dtx: Command, scene: Scene) -> None:
    (shown,) = dtx.objects("show", str(scene.over))
    assert shown["in_log"] is None
    assert [line["event"] for line in shown["history"]] == ["prepared", "committed"]
    assert "nothing is known about 1:77:" in (dtx("show", "1:77:", code=1) + dtx.err)


def test_a_branch_whose_queue_is_gone_is_shown_still(scene: Scene, dtx: Command) -> None:
    client, xid = scene.client, new_xid(b"gone")
    client.say(2, methods.QueueDeclare(b"short-lived", durable=True).encode())
    client.next_method(2)
    client.prepared(1, xid, queue="short-lived")
    client.say(2, methods.QueueDelete(b"short-lived").encode())
    client.next_method(2)
    (shown,) = dtx.objects("show", str(xid))
    assert shown["in_log"]["publishes"] == 1
    dtx("show", str(xid))
    dtx("in-doubt")
    assert client.ask(2, DtxRollback(xid=xid)) is XaFlag.OK


# -- doctor ------------------------------------------------------------------------------------------------------------


def test_doctor_has_nothing_against_a_fresh_dtx(dtx: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert dtx.findings() == {}
    found = {each["check"]: each["sentence"] for each in dtx.objects("doctor")}
    assert found["users"] == "users: 1; virtual hosts: 1"
    assert "durable queues: 2" in found["messages"]
    assert "dtx user passwd guest" in found["users.guest"]
    assert not [name for name in found if name.startswith("broker")]


def test_doctor_before_the_first_start(migrated_postgres_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    dtx = Command(migrated_postgres_url, capsys)
    assert dtx.findings() == {}
    assert "the first start creates user guest" in dtx("doctor")


@pytest.mark.parametrize(
    ("days", "code", "status", "words"),
    [(100, 0, "ok", "are valid until"), (20, 0, "warning", "expires at"), (-1, 1, "failed", "has expired at")],
)
def test_doctor_warns_of_certificates_that_expire(
    dtx: Command, tmp_path: Path, days: int, code: int, status: str, words: str
) -> None:
    now = datetime.now(UTC)
    certificate = trustme.CA().issue_cert("dtx.example", not_before=now - timedelta(9), not_after=now + timedelta(days))
    chain, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.cert_chain_pems[0].write_to_path(str(chain))
    certificate.private_key_pem.write_to_path(str(key))
    checks = dtx.objects("doctor", "--admin-tls-cert", str(chain), "--admin-tls-key", str(key), code=code)
    (found,) = [each for each in checks if each["check"] == "admin_tls_cert"]
    assert (found["status"], words in found["sentence"]) == (status, True), found


def test_doctor_finds_a_file_without_certificates(dtx: Command, tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.touch()
    found = dtx.findings("--admin-tls-cert", str(empty), "--admin-tls-key", str(empty), code=1)
    assert found["admin_tls_cert"] == ("failed", f"{empty} has no PEM certificate")


def test_doctor_warns_of_listeners_that_others_reach(dtx: Command) -> None:
    found = dtx.findings("--listen", "127.0.0.1:5673,0.0.0.0:5674", "--listen", "[::1]:5675")
    assert found.keys() == {"listen", "users", "users.guest"}
    assert all(status == "warning" and "0.0.0.0:5674" in sentence for status, sentence in found.values())
    assert not any("127.0.0.1" in sentence or "::1" in sentence for _, sentence in found.values())
    assert dtx.findings("--listen", "localhost:5673", "--listen", "127.1.2.3:5674") == {}


def test_doctor_warns_of_an_api_without_tls(dtx: Command) -> None:
    remote = ("--admin-listen", "0.0.0.0:15673")
    found = dtx.findings(*remote)
    assert found.keys() == {"admin_listen"}
    assert found["admin_listen"][0] == "warning"
    assert dtx.findings(*remote, "--admin-proxy", "10.0.0.1") == dtx.findings(*remote, "--no-admin") == {}


def test_doctor_looks_at_the_users(migrated_postgres_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    dtx, editor = Command(migrated_postgres_url, capsys), AccountEditor(migrated_postgres_url, "dtx")
    editor.provision()
    editor.set_password("guest", b"changed")
    editor.add_user("alice", b"alice")
    editor.add_user("homeless", b"x")
    editor.grant("alice", "/", read=".*")
    with psycopg.connect(migrated_postgres_url) as connection:
        connection.execute("UPDATE dtx.permission SET write = '(' WHERE account = 'alice'")
    found = dtx.findings("--listen", "0.0.0.0:5673", "--coordinator", "alice,tm", code=1)
    assert {name: status for name, (status, _) in found.items()} == {
        "listen": "warning",
        "users.grants": "warning",
        "users.patterns": "failed",
        "users.coordinator": "warning",
    }
    assert found["users.grants"][1].startswith("homeless may not connect to any virtual host")
    assert "'(' of alice in /" in found["users.patterns"][1]
    assert found["users.coordinator"][1].startswith("--coordinator names tm, but")
    for name in ("alice", "homeless", "guest"):
        editor.remove_user(name)
    assert dtx.findings(code=1)["users"][0] == "failed"


def test_doctor_misses_virtual_hosts_that_have_something(
    migrated_postgres_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    dtx, editor = Command(migrated_postgres_url, capsys), AccountEditor(migrated_postgres_url, "dtx")
    editor.provision()
    with psycopg.connect(migrated_postgres_url) as connection:
        connection.execute(
            """INSERT INTO dtx.queue (id, rm, vhost, name, auto_delete, arguments, delivered)
            VALUES (1, 'dtx', 'shop', 'q', false, '', 0), (2, 'dtx', '/', 'q', false, '', 0),
                   (3, 'other', 'theirs', 'q', false, '', 0)"""
        )
    (found,) = dtx.findings().items()
    assert found[0] == "vhosts"
    assert "queues or branches in shop, but" in found[1][1]
    editor.add_vhost("shop")
    assert dtx.findings() == {}


def test_doctor_reports_leftovers_of_a_standalone_dtx(dtx: Command) -> None:
    found = dtx.findings("--broker", "amqp://127.0.0.1:1/", code=1)
    assert found["broker.reachable"][0] == "failed"
    assert "the messages of 2 branches in doubt are in the database" in found["in-doubt.mode"][1]
