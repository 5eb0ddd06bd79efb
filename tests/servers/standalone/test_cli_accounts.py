"""``dtx user`` and ``dtx vhost`` on a real database: their output and their effect."""

import asyncio
import io
import json
import os
import sys
from pathlib import Path

import click
import pytest

from dtx.auth.accounts import Accounts, LoginRefused
from dtx.auth.users import AccountEditor
from dtx.cli import run
from dtx.embedded.postgres import EmbeddedPostgres
from tests.support.processes import short_directory

SECRET = "s3cret-w0rd"


class Terminal(io.TextIOWrapper):
    """A replacement for stdin."""

    def __init__(self, octets: bytes, *, terminal: bool = False) -> None:
        super().__init__(io.BytesIO(octets))
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


class Dtx:
    """Runs commands on one database."""

    def __init__(self, url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.url = url
        self._capsys = capsys
        self._monkeypatch = monkeypatch
        self.err = ""

    def __call__(self, *words: str, stdin: bytes = b"", code: int = 0) -> str:
        """The output of a command, which must end with *code*."""
        self._monkeypatch.setattr(sys, "stdin", Terminal(stdin))
        self._capsys.readouterr()
        found = run([*words, "--database", self.url])
        out, self.err = self._capsys.readouterr()
        assert found == code, out + self.err
        assert SECRET not in out + self.err
        return out

    def may_log_in(self, user: str, password: bytes) -> bool:
        async def attempt() -> bool:
            accounts = Accounts(self.url, "dtx")
            await accounts.open()
            try:
                await accounts.authenticate(user.encode(), password, loopback=True)
            except LoginRefused:
                return False
            finally:
                await accounts.close()
            return True

        return asyncio.run(attempt())


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("DTX_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def dtx(migrated_postgres_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Dtx:
    return Dtx(migrated_postgres_url, capsys, monkeypatch)


def test_a_user_is_made_granted_listed_and_removed(dtx: Dtx) -> None:
    assert "dtx user grant" in dtx("user", "add", "alice", "--password-stdin", stdin=f"{SECRET}\nmore".encode())
    assert dtx.may_log_in("alice", SECRET.encode())
    dtx("vhost", "add", "shop")
    said = dtx("user", "grant", "alice", "--vhost", "shop", "--write", "^orders$", "--configure", "")
    assert said == "user alice in shop: configure '', write '^orders$', read ''\n"
    assert dtx("user", "grant", "alice", "--all", "--read", "x").endswith("configure '.*', write '.*', read 'x'\n")
    listed = [json.loads(line) for line in dtx("user", "list", "--json").splitlines()]
    assert listed == [
        {
            "name": "alice",
            "tags": [],
            "permissions": [
                {"vhost": "/", "configure": ".*", "write": ".*", "read": "x"},
                {"vhost": "shop", "configure": "", "write": "^orders$", "read": ""},
            ],
            "topic_permissions": [],
        },
        {
            "name": "guest",
            "tags": ["administrator"],
            "permissions": [{"vhost": "/", "configure": ".*", "write": ".*", "read": ".*"}],
            "topic_permissions": [],
        },
    ]
    dtx("user", "grant", "alice", "--vhost", "shop", "--configure", r"^\w+\.x$")
    assert r"'^\w+\.x$'" in dtx("user", "list"), "a pattern is shown as it is given"
    table = dtx("user", "list")
    assert table.splitlines()[0].split() == ["user", "tags", "vhost", "configure", "write", "read"]
    assert "'^orders$'" in table
    assert "argon2" not in table
    assert dtx("user", "revoke", "alice", "--vhost", "shop") == "user alice has no permissions in shop now\n"
    assert dtx("user", "remove", "alice") == "user alice is removed\n"
    assert not dtx.may_log_in("alice", SECRET.encode())


def test_topics_are_granted_listed_and_lifted(dtx: Dtx) -> None:
    grant = ("user", "grant-topic", "guest", "amq.topic")
    said = dtx(*grant, "--write", "^{username}[.]")
    assert said == "user guest in /, topics of exchange amq.topic: write '^{username}[.]', read ''\n"
    assert dtx(*grant, "--read", "^news").endswith("write '^{username}[.]', read '^news'\n")  # --write is unchanged
    dtx("user", "grant-topic", "guest", "events", "--write", "a", "--read", "b")
    (guest,) = [json.loads(line) for line in dtx("user", "list", "--json").splitlines()]
    assert guest["topic_permissions"] == [
        {"vhost": "/", "exchange": "amq.topic", "write": "^{username}[.]", "read": "^news"},
        {"vhost": "/", "exchange": "events", "write": "a", "read": "b"},
    ]
    table = dtx("user", "list")
    assert ["user", "vhost", "topic", "exchange", "write", "read"] in [line.split() for line in table.splitlines()]
    assert "'^{username}[.]'" in table
    assert dtx("user", "revoke-topic", "guest", "events").endswith("again at 1 exchange\n")
    assert dtx("user", "revoke-topic", "guest").endswith("again at 1 exchange\n")
    assert json.loads(dtx("user", "list", "--json"))["topic_permissions"] == []


def test_topics_that_cannot_be_granted_have_a_reason(dtx: Dtx) -> None:
    dtx("user", "grant-topic", "guest", "x", code=2)
    for words, why in (
        (("guest", "x", "--write", "("), "the pattern '(' of --write cannot be used"),
        (("guest", "x", "--read", "{client_id}"), "must be written \\{"),
        (("guest", "x", "--write", "(a|aa)+$"), "matching it can take too long"),
        (("guest", "", "--write", "a"), "the name of the exchange must have 1 to 255 bytes"),
        (("nobody", "x", "--write", "a"), "there is no user 'nobody'"),
        (("guest", "x", "--write", "a", "--vhost", "nowhere"), "there is no virtual host 'nowhere'"),
    ):
        dtx("user", "grant-topic", *words, code=1)
        assert why in dtx.err
    dtx("user", "revoke-topic", "guest", code=1)
    assert "user 'guest' has no topic permissions in virtual host '/'" in dtx.err


def test_tags_are_given_when_the_user_is_made(dtx: Dtx) -> None:
    dtx("user", "add", "op", "--tag", "monitoring", "--tag", "administrator", "--password-stdin", stdin=b"x")
    assert json.loads(dtx("user", "list", "--json").splitlines()[1])["tags"] == ["administrator", "monitoring"]
    dtx("user", "add", "op2", "--tag", "king", "--password-stdin", stdin=b"x", code=2)


def test_tags_are_changed_as_a_whole(dtx: Dtx) -> None:
    def tags() -> list[str]:
        found: list[str] = json.loads(dtx("user", "list", "--json").splitlines()[0])["tags"]
        return found

    assert dtx("user", "tag", "guest", "impersonator", "monitoring") == "tags of user guest: impersonator, monitoring\n"
    assert tags() == ["impersonator", "monitoring"]
    assert dtx("user", "tag", "guest") == "tags of user guest: none\n"
    assert tags() == []
    dtx("user", "tag", "guest", "king", code=2)
    dtx("user", "tag", "nobody", "monitoring", code=1)
    assert "there is no user 'nobody'" in dtx.err


@pytest.mark.parametrize(
    ("typed", "password"),
    [(b"a b \r\n", b"a b "), (b"\xff\xfe\n", b"\xff\xfe"), (b"no end of line", b"no end of line")],
)
def test_a_password_is_the_first_line_of_stdin(dtx: Dtx, typed: bytes, password: bytes) -> None:
    dtx("user", "add", "alice", "--password-stdin", stdin=b"old")
    dtx("user", "passwd", "alice", "--password-stdin", stdin=typed)
    assert dtx.may_log_in("alice", password)
    assert not dtx.may_log_in("alice", b"old")


def test_a_password_is_prompted_for_without_echo(
    dtx: Dtx, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, dict[str, object]]] = []

    def prompt(text: str, **options: object) -> str:
        asked.append((text, options))
        return SECRET

    monkeypatch.setattr(click, "prompt", prompt)
    monkeypatch.setattr(sys, "stdin", Terminal(b"", terminal=True))
    assert run(["user", "add", "alice", "--database", dtx.url]) == 0
    assert SECRET not in "".join(capsys.readouterr())
    assert asked == [("password of alice", {"hide_input": True, "confirmation_prompt": True, "err": True})]
    assert dtx.may_log_in("alice", SECRET.encode())


def test_without_a_terminal_the_password_must_come_from_stdin(dtx: Dtx) -> None:
    dtx("user", "add", "alice", stdin=SECRET.encode(), code=2)
    assert "use --password-stdin" in dtx.err


def test_an_impossible_change_is_one_sentence(dtx: Dtx) -> None:
    for words, expected in (
        (("user", "rm", "nobody"), "there is no user 'nobody'"),
        (("user", "grant", "guest", "--read", "(a|aa)+$"), "can take too long"),
        (("user", "grant", "guest", "--vhost", "shop", "--all"), "there is no virtual host 'shop'"),
        (("vhost", "add", "/"), "exists already"),
        (("vhost", "rm", "x\x1b[2J"), "there is no virtual host"),
    ):
        dtx(*words, code=1)
        assert dtx.err.startswith("dtx: ")
        assert expected in dtx.err
        assert dtx.err.count("\n") == 1
        assert "\x1b" not in dtx.err
    dtx("user", "grant", "guest", code=2)
    assert "no permission was given" in dtx.err
    dtx("user", "add", "alice", "--password-stdin", stdin=b"\n", code=1)
    assert "a password must have 1 to" in dtx.err


def test_vhosts_are_listed(dtx: Dtx) -> None:
    assert dtx("vhost", "list") == "there is no virtual host yet; the first start of dtx without a broker creates /\n"
    assert dtx("user", "list").startswith("there is no user yet")
    assert dtx("vhost", "list", "--json") == ""
    dtx("vhost", "add", "shop")
    assert dtx("vhost", "list") == "/\nshop\n"
    assert dtx("vhost", "list", "--json") == '{"name": "/"}\n{"name": "shop"}\n'
    assert dtx("vhost", "rm", "shop") == "virtual host shop is removed\n"
    assert dtx("vhost", "list") == "/\n"


def test_deleting_the_owner_of_branches_in_doubt_warns(dtx: Dtx, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AccountEditor, "remove_user", lambda *_: 2)
    assert dtx("user", "remove", "alice") == "user alice is removed\n"
    assert "branches in doubt that it has started: 2" in dtx.err


def test_without_tables_the_user_is_sent_to_migrate(
    postgres_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dtx = Dtx(postgres_url, capsys, monkeypatch)
    dtx("user", "list", code=3)
    assert "run 'dtx migrate'" in dtx.err


def test_users_can_be_made_before_the_first_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with short_directory("users") as directory:
        data = directory / "data"
        for start in (False, True):
            embedded = EmbeddedPostgres(data)
            if start:
                embedded.start()
            try:
                monkeypatch.setattr(sys, "stdin", Terminal(b"x\n"))
                assert run(["user", "add", f"user-{start}", "--password-stdin", "--data-dir", str(data)]) == 0
                assert run(["user", "list", "--json", "--data-dir", str(data)]) == 0
            finally:
                embedded.stop()
        names = [json.loads(line)["name"] for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert names == ["guest", "user-False", "guest", "user-False", "user-True"]
