"""The command line: arguments, output and exit codes."""

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from pika.exceptions import AMQPConnectionError

from dtx import __version__
from dtx.auth.roles import Tag
from dtx.cli import dtx, options, run
from dtx.cli.database import migrate
from dtx.cli.errors import CommandError, Exit, explain, fail
from dtx.cli.options import SettingOption
from dtx.cli.serve import serve
from dtx.config import ConfigError, Settings
from dtx.config.settings import group_of
from dtx.embedded.postgres import EmbeddedPostgresError
from dtx.log.api import LeaseLost, LogUnavailable
from dtx.log.records import LogState

COMMANDS = (
    "serve", "migrate", "user", "vhost", "branches", "show", "commit", "rollback", "forget",
    "retry", "redirect", "discard", "export", "bulk", "audit", "token", "doctor", "completion", "queue", "exchange",
    "connection", "definitions",
)  # fmt: skip
FORMER = ("in-doubt", "users", "vhosts", "tokens")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("DTX_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"dtx {__version__}\n"


@pytest.mark.parametrize("words", [[], *([command] for command in COMMANDS + FORMER)], ids=str)
def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert run([*words, "--help"]) == 0
    assert capsys.readouterr().out.startswith("Usage: dtx")


def _commands(command: click.Command, *names: str) -> Iterator[tuple[click.Command, str]]:
    if not isinstance(command, click.Group):
        yield command, " ".join(names)
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        assert inner is not None
        yield from _commands(inner, *names, name)


def test_the_help_of_every_command_has_an_example() -> None:
    """The pipeline has them in its guide."""
    missing = [
        name
        for command, name in _commands(dtx, "dtx")
        if not re.search(rf"^  {name}\b", command.epilog or "", re.MULTILINE)
    ]
    assert [name for name in missing if not name.startswith("dtx pipeline")] == []


@pytest.mark.parametrize("group", ["user", "vhost"])
def test_the_former_name_of_remove_works_but_is_hidden(capsys: pytest.CaptureFixture[str], group: str) -> None:
    run([group, "--help"])
    out = capsys.readouterr().out
    assert "  remove " in out
    assert "  rm " not in out
    assert run([group, "rm", "--help"]) == 0


@pytest.mark.parametrize("command", ["add", "tag"])
def test_every_tag_of_a_user_is_explained(capsys: pytest.CaptureFixture[str], command: str) -> None:
    run(["user", command, "--help"])
    said = capsys.readouterr().out.replace("administrator|monitoring|impersonator|operator", "")
    assert all(re.search(rf"\b{tag}(:|  )", said) for tag in Tag), said


def test_the_words_of_options_are_those_of_the_tables() -> None:
    """Commands parse a command line without importing the tables, so the names are repeated."""
    assert list(options.STATES) == [str(state) for state in LogState]


def test_the_help_lists_commands_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    run(["--help"])
    out = capsys.readouterr().out
    assert all(f"  {command} " in out for command in COMMANDS)
    assert not any(f"  {command} " in out for command in FORMER)
    documented = {int(code) for code in re.findall(r"^ +(\d+) ", out, re.MULTILINE)} | {143}
    assert documented == set(Exit)


def test_every_setting_is_a_documented_flag_of_serve(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Settings by flags, environment DTX_* and a TOML file."""
    run(["serve", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    for name, field in Settings.model_fields.items():
        assert f"--{name.replace('_', '-')}" in out
        assert f"[DTX_{name.upper()}" in out
        assert group_of(name)
        assert field.description
        assert field.description.split(":")[0].split(";")[0] in out
    assert "default: 64MiB]" in out
    assert "default: 127.0.0.1:5673]" in out


def test_a_flag_that_asks_for_a_file_is_a_path() -> None:
    """A metavar FILE means that the value is a path to a file."""
    metavars = {option.name: option.metavar for option in serve.params if isinstance(option, SettingOption)}
    files = {name.removeprefix("setting_") for name, metavar in metavars.items() if metavar == "FILE"}
    paths = {name for name, field in Settings.model_fields.items() if "Path" in str(field.annotation)}
    assert files == paths - {"data_dir"}


def test_settings_are_listed_under_the_heading_of_their_group(capsys: pytest.CaptureFixture[str]) -> None:
    run(["serve", "--help"])
    out = capsys.readouterr().out
    headings = [line[:-1] for line in out.splitlines() if re.fullmatch(r"[A-Z][a-z]+:", line)]
    assert headings == ["Options", *dict.fromkeys(group_of(name) for name in Settings.model_fields)]


def test_a_command_takes_only_the_flags_that_concern_it() -> None:
    settings = {option.name for option in migrate.params if isinstance(option, SettingOption)}
    assert settings == {"setting_database", "setting_data_dir", "setting_rm"}
    flags = [option for option in serve.params if isinstance(option, SettingOption)]
    assert len([flag for flag in flags if not flag.hidden]) == len(Settings.model_fields)
    assert [flag.opts for flag in flags if flag.hidden] == [["--lanes"]]


@pytest.mark.parametrize(
    "words",
    [
        ["nonsense"],
        ["serve", "--lisen", "x"],
        ["show"],
        ["in-doubt", "--state", "x"],
        ["in-doubt", "--older-than", "x"],
    ],
)
def test_wrong_usage_is_exit_code_2(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert run(words) == 2
    assert "Error:" in capsys.readouterr().err


def test_flags_reach_the_settings_and_wrong_ones_are_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run(["serve", "--frame-max", "1"]) == 2
    assert capsys.readouterr().err == "dtx: --frame-max: 1 bytes is neither 0 nor between 4KiB and 2MiB\n"
    assert run(["in-doubt", "--config", str(tmp_path / "absent.toml")]) == 2
    assert "there is no configuration file" in capsys.readouterr().err
    monkeypatch.setenv("DTX_BROKR", "x")
    assert run(["doctor"]) == 2
    assert "did you mean DTX_BROKER?" in capsys.readouterr().err


def test_tls_files_are_checked_before_the_start(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    broker = ["serve", "--broker", "amqps://127.0.0.1"]
    for words, expected in (
        (["--tls-cert", "/absent", "--tls-key", str(broken)], "tls_cert: /absent is not a file that can be read"),
        (["--tls-cert", str(broken), "--tls-key", str(broken)], "are not a PEM certificate and its unencrypted key"),
        (["--broker-ca", str(broken)], "broker_ca: "),
    ):
        assert run([*broker, *words]) == 2
        assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), Exit.USAGE),
        (click.BadParameter("x"), Exit.USAGE),
        (LogUnavailable("x"), Exit.DATABASE),
        (EmbeddedPostgresError("x"), Exit.DATABASE),
        (LeaseLost("x"), Exit.LEASE_LOST),
        (AMQPConnectionError("x"), Exit.BROKER),
        (OSError(errno.EADDRINUSE, "Address already in use"), Exit.ADDRESS_IN_USE),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), Exit.FAILED),
        (KeyboardInterrupt(), Exit.INTERRUPTED),
        (RuntimeError("x"), Exit.FAILED),
        (CommandError(Exit.BROKER, "x"), Exit.BROKER),
        (ExceptionGroup("tasks", [ExceptionGroup("more", [LeaseLost("x")])]), Exit.LEASE_LOST),
    ],
    ids=repr,
)
def test_every_kind_of_error_has_its_exit_code(error: BaseException, code: Exit) -> None:
    assert explain(error)[0] is code
    assert explain(error)[1]


def test_an_error_is_one_line_without_traceback_or_password(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError("cannot reach amqp://u:s3cret-word@h/\nat all")
    assert fail(error) == 1
    assert capsys.readouterr().err == "dtx: cannot reach amqp://u:***@h/ at all (DTX_DEBUG=1 shows where)\n"
    monkeypatch.setenv("DTX_DEBUG", "1")
    try:
        raise error
    except RuntimeError as raised:
        fail(raised)
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "s3cret-word" not in err


def test_an_error_without_words_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    fail(ValueError())
    assert capsys.readouterr().err.startswith("dtx: ValueError")
