"""``dtx tm`` explains a wrong configuration in one sentence."""

from pathlib import Path

import pytest

from dtx.cli import run
from dtx.cli.errors import Exit
from dtx.client.tm import Decision, DecisionRow
from dtx.client.tm.databases import SqliteLog
from dtx.client.tm.decisions import now


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log with an unfinished decision."""
    path = tmp_path / "tm.db"
    with SqliteLog(path) as opened:
        opened.decide(
            DecisionRow(
                gtrid=b"n.p.a.1", format_id=1, node="n", decision=Decision.COMMIT, at=now(), resources=("gone",)
            )
        )
    return path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("node = ", "is not TOML"),
        ('nodes = "n"', "unknown nodes"),
        ("node = 7", "must be strings"),
        ('format_id = "7"', "format_id must be a number"),
        ("resources = 7", "must be strings"),
        ('node = "n"', "name the node and its log"),
        ('node = "a b"\nlog = "LOG"', "node name"),
        ('node = "n"\nlog = "/nowhere/tm.db"', "there is no log of decisions"),
        ('node = "n"\nlog = "LOG"\n[resources]\nq = "http://x"', "must begin with amqp://"),
        ('node = "n"\nlog = "LOG"\n[resources]\n"q/1" = "amqp://x"', "resource name"),
    ],
)
def test_a_wrong_configuration_is_explained(
    tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    config = tmp_path / "tm.toml"
    config.write_text(text.replace("LOG", str(log)))
    assert run(["tm", "recover", "--config", str(config)]) in (Exit.USAGE, Exit.FAILED)
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


SECRET = "s3cr%et"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--log", f"postgresql://n:{SECRET}@127.0.0.1:1/x"), "not one that PostgreSQL"),
        (("--log", f"postgresql+psycopg://n:{SECRET}@127.0.0.1:1/x"), "the path of a SQLite file, or postgresql://"),
        (
            ("--log", "LOG", "--resource", f"q=postgresql://n:{SECRET}@127.0.0.1:1/x"),
            "resource q: its URL is not a valid",
        ),
        (("--log", "LOG", "--resource", f"q=amqp://n:{SECRET}/5@127.0.0.1:1/"), "resource q: its URL is not a valid"),
        (("--log", "LOG", "--resource", f"amqp://n:{SECRET}@127.0.0.1:1/"), "must be NAME=URL"),
    ],
    ids=["log", "log of another kind", "database", "queue", "without a name"],
)
def test_an_invalid_url_is_reported_without_its_password(
    log: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    """Libraries repeat the URL in their errors. Passwords with ``%`` or ``/`` are a common cause of wrong URLs."""
    words = tuple(word.replace("LOG", str(log)) for word in words)
    code = run(["tm", "recover", "--node", "n", *words])
    output = "".join(capsys.readouterr())
    assert "s3cr" not in output
    assert (said in output, code in (Exit.USAGE, Exit.DATABASE)) == (True, True)


def test_a_decision_of_a_resource_that_is_not_named_waits(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--node", "n", "--log", str(log)]
    assert run(["tm", "recover", *words]) == Exit.FAILED
    assert "this transaction manager has no resource gone" in capsys.readouterr().out
    assert run(["tm", "list", *words]) == Exit.OK
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["gtrid", "decision", "at", "resources", "recoveries"]
    assert row.startswith("n.p.a.1  commit")
    assert run(["tm", "heuristics", *words]) == Exit.OK
    assert "no heuristic outcome" in capsys.readouterr().out


def test_the_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tm", "--help"]) == Exit.OK
    assert "[resources]" in capsys.readouterr().out
