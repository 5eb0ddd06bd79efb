"""``dtx completion`` in the shells that are installed."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from shlex import quote

import pytest

from dtx.cli import run

Complete = Callable[[str], list[str]]
_BASH = """source {script}; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _dtx
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
_ZSH = """compdef() {{ }}; _describe() {{ print -rl -- "${{found[@]}}" }}; _files() {{ }}
source {script}; words=({words}); CURRENT=${{#words}}; _dtx
"""
_FISH = "source {script}; complete -C {line}"


@pytest.fixture(params=["bash", "zsh", "fish"])
def complete(request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Complete:
    """Returns the words that a shell offers for the end of a command line."""
    shell: str = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert run(["completion", shell]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    program = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}[shell]
    options = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]

    def offered(line: str) -> list[str]:
        words = " ".join(map(quote, line.split(" ")))
        text = program.format(script=script, words=words, line=quote(line))
        done = subprocess.run([shell, *options, "-c", text], capture_output=True, text=True, check=True, timeout=60)
        assert done.stderr == ""
        found = [each.split("\t")[0].split(":")[0] for each in done.stdout.splitlines() if each]
        return sorted(word for word in found if word.startswith(line.rpartition(" ")[2]))

    return offered


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("dtx us", ["user"]),
        ("dtx completion ", ["bash", "fish", "zsh"]),
        ("dtx user re", ["remove", "revoke", "revoke-topic"]),
        ("dtx user add --tag m", ["monitoring"]),
        ("dtx user add --tag monitoring --ta", ["--tag"]),
        ("dtx --database x branches --output ", ["json", "table", "wide", "yaml"]),
        ("dtx branches --watch --so", ["--sort"]),
        ("dtx branches --not", ["--not-stuck"]),
        ("dtx in-doubt --js", []),
    ],
)
def test_a_shell_completes_commands_options_and_values(complete: Complete, line: str, expected: list[str]) -> None:
    assert complete(line) == expected


def test_a_shell_completes_every_command(complete: Complete) -> None:
    assert {"serve", "branches", "user", "completion", "pipeline"} < set(complete("dtx "))


def test_an_option_with_a_value_completes_files(complete: Complete) -> None:
    """Without words of its own, a shell completes the names of files."""
    assert not {"--help", "list"} & set(complete("dtx user add --token-file "))
