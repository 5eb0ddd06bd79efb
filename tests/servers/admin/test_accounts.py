"""Users and virtual hosts at the operators' API, and at the command line, which has the same rules."""

import io
import json
import sys
from base64 import b64encode
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from dtx.auth.operators import OperatorLog
from dtx.cli import run
from tests.support.client import connected
from tests.support.crash import StandaloneStage
from tests.support.operator import Operator
from tests.support.postgres import PostgresServer
from tests.support.service import ADMIN

SECRET = "s3cret-w0rd"


@pytest.fixture(scope="module")
def dtx(postgres: PostgresServer) -> Iterator[StandaloneStage]:
    """A dtx without a broker, for all tests of this module."""
    with StandaloneStage(postgres, options=ADMIN) as stage:
        yield stage


@pytest.fixture
def boss(dtx: StandaloneStage) -> Operator:
    """The user guest, who has the tag administrator."""
    return Operator(dtx.service.admin_url)


def change(boss: Operator, what: str, **form: object) -> object:
    """Make a change that must succeed, and return the answer."""
    answer = boss.ask("POST", f"/dtx/v1/{what}", form)
    assert answer.status in {200, 201}, answer
    return answer.body


def test_a_user_is_made_granted_changed_and_removed(dtx: StandaloneStage, boss: Operator) -> None:
    change(boss, "vhosts", name="shop", reason="a new one")
    made = boss.ask("POST", "/dtx/v1/users", {"name": "alice", "password": SECRET, "reason": "ticket 1"})
    assert (made.status, made.body) == (201, {"name": "alice"})
    change(boss, "users/grant", name="alice", configure=".*", write="^amq[.]default$")
    now = change(boss, "users/grant", name="alice", read="x")
    assert now == {"vhost": "/", "configure": ".*", "write": "^amq[.]default$", "read": "x"}
    change(boss, "users/tags", name="alice", tags=["operator", "monitoring"])
    topic = {"vhost": "/", "exchange": "amq.topic", "write": "^a", "read": ""}
    assert change(boss, "users/grant-topic", name="alice", exchange="amq.topic", write="^a") == topic
    listed = {user["name"]: user for user in boss.get("/dtx/v1/users")}
    assert listed["alice"] == {
        "name": "alice",
        "tags": ["monitoring", "operator"],
        "permissions": [now],
        "topic_permissions": [topic],
    }
    assert boss.get("/dtx/v1/vhosts") == [{"name": "/"}, {"name": "shop"}]
    with connected(dtx.service.url("alice", SECRET)) as connection:
        assert connection.is_open
    assert Operator(boss.url, "alice", SECRET).ask("GET", "/dtx/v1/status").status == 200
    odd = b"\xff:\xfe"
    change(boss, "users/password", name="alice", password=b64encode(odd).decode(), encoding="base64")
    assert Operator(boss.url, "alice", SECRET).ask("GET", "/dtx/v1/status").status == 401
    assert change(boss, "users/revoke-topic", name="alice") == {"name": "alice", "exchanges": 1}
    change(boss, "users/revoke", name="alice")
    assert change(boss, "users/remove", name="alice", reason="left us") == {"name": "alice", "branches": 0}
    change(boss, "vhosts/remove", name="shop")
    lines = OperatorLog(dtx.database, "dtx").audit_lines()[::-1]
    assert [line.action for line in lines] == [
        "make-vhost", "make-user", "grant", "grant", "set-tags", "grant-topic", "set-password", "sign-in",
        "revoke-topic", "revoke", "remove-user", "remove-vhost",
    ]  # fmt: skip
    assert [(line.subject, line.reason, line.result) for line in lines[:2]] == [
        ("shop", "a new one", "made"),
        ("alice", "ticket 1", "made"),
    ]
    assert {(line.actor, line.role, line.address) for line in lines} == {
        ("guest", "coordinator", "127.0.0.1"),
        ("alice", "none", "127.0.0.1"),  # the refused sign-in
    }
    assert json.loads(lines[3].detail) == {"vhost": "/", "read": "x"}
    written = "".join(line.detail for line in lines) + dtx.service.log_path.read_text()
    assert SECRET not in written
    assert b64encode(odd).decode() not in written


@pytest.mark.parametrize(
    ("what", "form", "status", "said"),
    [
        ("users", {"name": "guest", "password": "x"}, 409, "user 'guest' exists already"),
        ("users", {"name": "", "password": "x"}, 409, "the name of the user must have 1 to 255 bytes"),
        ("users", {"name": "x", "password": ""}, 409, "a password must have 1 to 1024 bytes"),
        ("users", {"name": "x", "password": SECRET, "encoding": "base64"}, 422, "the password is not base64"),
        ("users", {"name": "x", "password": SECRET, "tags": ["king"]}, 422, "tags.0"),
        ("users", {"name": "x", "password": [SECRET]}, 422, "password"),
        ("users/password", {"name": "nobody", "password": "x"}, 409, "there is no user 'nobody'"),
        ("users/grant", {"name": "guest", "read": "("}, 409, "the pattern '(' of --read cannot be used"),
        ("users/grant", {"name": "guest", "vhost": "x", "read": ""}, 409, "there is no virtual host 'x'"),
        ("users/revoke", {"name": "guest", "vhost": "x"}, 409, "has no permissions in virtual host 'x'"),
        ("vhosts", {"name": "/"}, 409, "virtual host '/' exists already"),
        ("vhosts/remove", {"name": "x"}, 409, "there is no virtual host 'x'"),
        ("users", {"name": "x", "password": "x", "admin": True}, 422, "admin"),
    ],
)
def test_an_impossible_change_is_a_problem(
    boss: Operator, what: str, form: dict[str, object], status: int, said: str
) -> None:
    answer = boss.ask("POST", f"/dtx/v1/{what}", form)
    assert (answer.status, answer.headers["content-type"]) == (status, "application/problem+json"), answer
    assert said in answer.body["detail"]
    assert SECRET not in json.dumps(answer.body)


class Person:
    """A user of the command line on the machine of a dtx."""

    def __init__(
        self, dtx: StandaloneStage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self._where = ["--database", dtx.database, "--admin-listen", urlsplit(dtx.service.admin_url).netloc]
        self._capsys = capsys
        self._monkeypatch = monkeypatch
        self.err = ""

    def __call__(self, *words: str, code: int = 0, typed: str = "") -> str:
        """Run a command, which must end with *code*, and return its output."""
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed.encode())))
        self._capsys.readouterr()
        ended = run([*words, *self._where])
        out, self.err = self._capsys.readouterr()
        assert ended == code, out + self.err
        return out


def test_the_command_line_prefers_the_api_to_the_database(
    postgres: PostgresServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with StandaloneStage(postgres, options=ADMIN) as dtx:
        trail, person = OperatorLog(dtx.database, "dtx"), Person(dtx, capsys, monkeypatch)
        person("user", "add", "alice", "--password-stdin", "--reason", "ticket 2", typed=SECRET)
        asked = trail.audit_lines()[0]
        assert (asked.action, asked.subject, asked.reason, asked.address) == (
            "make-user", "alice", "ticket 2", "127.0.0.1",
        )  # fmt: skip
        assert asked.actor.startswith("token:")
        assert "at the command line" in asked.actor
        assert trail.tokens() == []
        dtx.service.kill9()
        secret = person("token", "add", "vera", "--role", "viewer", "--reason", "ticket 3").strip()
        assert trail.find_token(secret) is not None
        person("vhost", "add", "shop")
        person("user", "grant", "alice", "--vhost", "shop", "--all")
        assert [(line.action, line.subject, line.address) for line in trail.audit_lines()[2::-1]] == [
            ("make-token", "vera", "command line"),
            ("make-vhost", "shop", "command line"),
            ("grant", "alice", "command line"),
        ]


def test_during_a_lease_only_its_holder_changes_accounts(
    postgres: PostgresServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dtx may have no API, or one that this machine cannot reach."""
    with StandaloneStage(postgres) as silent:
        silent.service.admin_url = "http://127.0.0.1:1"
        person = Person(silent, capsys, monkeypatch)
        for words in (
            ("user", "tag", "guest"),
            ("user", "rm", "guest"),
            ("vhost", "add", "shop"),
            ("token", "add", "vera", "--role", "viewer"),
            ("token", "remove", "vera"),
        ):
            assert person(*words, code=1) == ""
            assert person.err.count("\n") == 1
            assert "has the lease of dtx" in person.err
            assert "--no-admin" in person.err
            assert person(words[0], "list")
        assert OperatorLog(silent.database, "dtx").audit_lines() == []
