"""The command line of the pipeline: its help, and the errors that it reports before Spark starts."""

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import pyarrow as pa
import pytest
from click.testing import CliRunner
from deltalake import DeltaTable, write_deltalake

from dtx.cli.errors import Exit, explain
from dtx.cli.pipeline import _size, pipeline
from dtx.pipeline.lake import SCHEMA
from dtx.pipeline.quarantine import Quarantined
from dtx.pipeline.reconcile import PublishingFailed


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*words: str) -> tuple[int, str]:
    """The exit code and the output. Errors have the text that the program prints."""
    result = CliRunner().invoke(pipeline, list(words))
    if result.exception is None or isinstance(result.exception, SystemExit):
        return result.exit_code, result.output
    code, sentence = explain(result.exception)
    return int(code), sentence


@pytest.mark.parametrize("command", sorted(pipeline.commands))
def test_every_command_explains_itself_and_its_exit_codes(command: str) -> None:
    code, said = call(command, "--help")
    assert code == Exit.OK
    assert command == "example" or "3    finished, but some sources were not read" in said
    assert "\\b" not in said


class Recorded:
    """The steps of a run, which do nothing."""

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_a_run_that_has_not_read_everything_ends_with_3(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "pipeline.toml").write_text('lake = "l"\nresults = "r"\n')
    unread: list[Quarantined] = []
    monkeypatch.setattr("dtx.pipeline.steps.Steps", type("Read", (Recorded,), {"report": lambda *_: unread}))
    runner = CliRunner()
    assert runner.invoke(pipeline, ["report"], standalone_mode=False).return_value == Exit.OK
    unread += [Quarantined(source=f"bank-{number}", item="journal", reason="gone", count=None) for number in range(52)]
    found = runner.invoke(pipeline, ["report"], standalone_mode=False)
    assert found.return_value == 3
    *lines, last = found.output.splitlines()
    assert lines == [f"not read: bank-{number}: journal: gone" for number in range(50)]
    assert last == "not read: 2 more, see the report"


def test_a_report_is_made_of_unpublished_verdicts(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code is that of the error."""
    made = []

    class Run(Recorded):
        def archive(self, _: tuple[str, ...]) -> list[Quarantined]:
            return []

        def reconcile(self, **_: bool) -> list[Quarantined]:
            raise PublishingFailed("the database is away")

        def report(self, to: Path | None) -> list[Quarantined]:
            made.append(to)
            return []

    monkeypatch.setattr("dtx.pipeline.steps.Steps", Run)
    (here / "pipeline.toml").write_text('lake = "lake"\nresults = "results"\n')
    assert call("run") == (Exit.FAILED, "the database is away")
    assert made == [None]


def test_the_example_can_be_used_as_it_is(here: Path) -> None:
    code, said = call("example")
    (here / "pipeline.toml").write_text(said)
    assert code == Exit.OK
    code, said = call("retain", "--keep", "400d")
    assert code == Exit.USAGE
    assert "environment variable" in said


def test_without_a_fleet_a_sentence_names_the_remedy(here: Path) -> None:
    code, said = call("archive")
    assert code == Exit.USAGE
    assert "there is no pipeline.toml: dtx pipeline example > pipeline.toml" in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("report", "--master", "local[1]", "--remote", "sc://h"), "--master and --remote exclude each other"),
        (("report", "--memory", "much"), "is not a size"),
        (("report", "--set", "colour=blue"), "is not spark.NAME=VALUE"),
        (("archive", "--interval", "soon"), "is not a duration"),
        (("retain", "--keep", "99999999d"), "--keep reaches back too far"),
    ],
)
def test_wrong_options_are_reported_immediately(here: Path, words: tuple[str, ...], sentence: str) -> None:
    code, said = call(*words)
    assert code == Exit.USAGE
    assert sentence in said


@pytest.mark.parametrize(("text", "size"), [("2g", 2 << 30), ("512M", 512 << 20), ("2GiB", 2 << 30), ("1GB", 10**9)])
def test_memory_is_accepted_in_sparks_units_and_others(text: str, size: int) -> None:
    assert _size(None, None, text) == size  # type: ignore[arg-type]


def test_old_lines_are_removed_after_a_yes_alone(here: Path) -> None:
    (here / "pipeline.toml").write_text('lake = "lake"\nresults = "results"\n')
    years = {"2020-01": datetime(2020, 1, 1, tzinfo=UTC), "2999-01": datetime(2999, 1, 1, tzinfo=UTC)}
    rows = [{"at": at, "month": month, "batch": 1} for month, at in years.items()]
    write_deltalake(here / "lake", pa.Table.from_pylist(rows, SCHEMA), partition_by=["month"])
    assert call("retain", "--keep", "1d")[1].startswith("would remove 1 lines of journals, from before ")
    assert DeltaTable(here / "lake").count() == 2
    assert call("retain", "--keep", "1d", "--yes")[1].startswith("removed 1 lines of journals, from before ")
    assert DeltaTable(here / "lake").to_pyarrow_table(columns=["month"])["month"].to_pylist() == ["2999-01"]


def test_a_directory_that_is_no_lake_is_reported(here: Path) -> None:
    (here / "pipeline.toml").write_text('lake = "nothing"\nresults = "results"\n')
    code, said = call("retain", "--keep", "1d", "--yes")
    assert (code, said.endswith("is no lake: dtx pipeline archive makes one")) == (Exit.FAILED, True)
    code, said = call("migrate-lake")
    assert (code, said.endswith("is no lake of an older dtx: there is nothing to migrate")) == (Exit.FAILED, True)


_WITHOUT = """
import sys
for name in ("adbc_driver_manager", "deltalake", "grpc", "matplotlib", "numpy", "pandas", "pyarrow", "pyspark"):
    sys.modules[name] = None
from dtx.cli import run
sys.exit(run(["pipeline", *sys.argv[1:]]))
"""


@pytest.mark.parametrize(
    "words",
    [
        ("run",),
        ("archive",),
        ("reconcile",),
        ("report",),
        ("migrate-lake",),
        ("retain", "--keep", "1d"),
    ],
    ids=lambda words: words[0],
)
def test_without_the_extra_each_command_names_the_package(here: Path, words: tuple[str, ...]) -> None:
    (here / "pipeline.toml").write_text('lake = "lake"\nresults = "results"\n')
    command = [sys.executable, "-c", _WITHOUT, *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == Exit.FAILED
    assert done.stderr.startswith("dtx: the pipeline needs ")
    assert "pip install 'dtx[pipeline]'" in done.stderr
