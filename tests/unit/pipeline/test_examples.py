"""The files that start the pipeline or read its results: the names that they use exist.

Stub modules that record their arguments replace Airflow and Dagster. A script named ``dtx`` ends with any exit code.
"""

import ast
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from configparser import ConfigParser
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final, Self

import click
import pytest
import yaml

from dtx.cli.pipeline import NOT_READ, pipeline
from dtx.pipeline.reconcile.state import HISTORY, VERDICTS
from dtx.pipeline.verdicts import PLAIN, Verdict
from tests.support import verdict_tables

ROOT: Final = Path(__file__).parents[3]
EXAMPLES: Final = ROOT / "examples/pipeline"
SYSTEMD: Final = ROOT / "deploy/systemd"
RULES: Final = ROOT / "deploy/prometheus/pipeline.rules.yml"
PASSING: Final = PLAIN | {Verdict.IN_DOUBT, Verdict.NOT_ARCHIVED}
"""The verdicts that need no attention, or none yet."""


class Kept:
    """A stub that records the arguments of its construction."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.words = args, kwargs

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __rshift__(self, other: Self) -> None:
        self.words["next"] = other


class Failure(Exception):
    """A stub of Dagster's class."""

    def __init__(self, description: str, allow_retries: bool) -> None:
        super().__init__(description)
        self.allow_retries = allow_retries


def decorator(*_: Any, **__: Any) -> Callable[[Any], Any]:
    return lambda function: function


@pytest.fixture
def airflow(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that the DAG's file defines, by name."""
    for name in ("airflow", "airflow.providers", "airflow.providers.standard", "airflow.providers.standard.operators"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "airflow.sdk", SimpleNamespace(DAG=Kept))
    monkeypatch.setitem(sys.modules, "airflow.providers.standard.operators.bash", SimpleNamespace(BashOperator=Kept))
    return runpy.run_path(str(EXAMPLES / "airflow_dag.py"))


@pytest.fixture
def dagster(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that Dagster's file defines, by name."""
    names = ("AssetCheckSpec", "RetryPolicy", "MaterializeResult", "AssetCheckResult", "Definitions")
    module = SimpleNamespace(
        **dict.fromkeys((*names, "ScheduleDefinition", "define_asset_job"), Kept),
        asset=decorator,
        asset_check=decorator,
        Failure=Failure,
        AssetCheckSeverity=SimpleNamespace(WARN="WARN"),
    )
    monkeypatch.setitem(sys.modules, "dagster", module)
    return runpy.run_path(str(EXAMPLES / "dagster_jobs.py"))


@pytest.fixture
def ends_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """A function that makes a ``dtx`` with the given exit code, and returns its path."""

    def become(code: int) -> Path:
        program = tmp_path / "bin" / "dtx"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\necho \"$@\" > '{tmp_path}/words'\necho not read >&2\nexit {code}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent), prepend=":")
        return program

    return become


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """A directory with ``lake`` and ``results``."""
    (tmp_path / "results").mkdir()
    verdict_tables.write(tmp_path / "lake", tmp_path / "results", datetime.now(UTC))
    return tmp_path


def check_words(words: list[str]) -> None:
    """Check that ``dtx pipeline run`` accepts these arguments."""
    assert words[:2] == ["pipeline", "run"]
    command = pipeline.commands["run"]
    with click.Context(command) as context:
        command.parse_args(context, words[2:])
    assert str(context.params["fleet_file"]) == "/etc/dtx/pipeline.toml"


def unit(name: str) -> ConfigParser:
    """A systemd unit."""
    parser = ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes=("#", ";"))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((SYSTEMD / name).read_text())
    return parser


@pytest.mark.parametrize("code", [0, 1, 2, 3])
def test_the_dag_distinguishes_unread_sources_from_a_failure(
    code: int, airflow: dict[str, Any], ends_with: Callable[[int], Path], tmp_path: Path
) -> None:
    run, everything_read = airflow["run"].words, airflow["everything_read"].words
    command = run["bash_command"].replace(airflow["DTX"], str(ends_with(code)))
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == (0 if code == NOT_READ else code)
    check_words((tmp_path / "words").read_text().split())
    if done.returncode == 0:
        # Airflow passes on the last line of the output
        last = done.stdout.splitlines()[-1]
        then = everything_read["bash_command"].replace("{{ ti.xcom_pull(task_ids='run') }}", last)
        assert subprocess.run(["bash", "-c", then], check=False).returncode == code
    assert run["retries"] > 0
    assert everything_read["retries"] == 0
    assert run["next"] is airflow["everything_read"]


def test_the_dag_runs_once_a_night_and_catches_nothing_up(airflow: dict[str, Any]) -> None:
    source = ast.parse((EXAMPLES / "airflow_dag.py").read_text())
    call = next(item.context_expr for node in source.body if isinstance(node, ast.With) for item in node.items)
    assert isinstance(call, ast.Call)
    words = {word.arg: word.value.value for word in call.keywords if isinstance(word.value, ast.Constant)}
    assert words == {"schedule": "0 2 * * *", "catchup": False, "max_active_runs": 1}
    assert airflow["run"].words["task_id"] == "run"


@pytest.mark.parametrize("code", [0, 3])
def test_the_asset_exists_and_its_check_lists_unread_sources(
    code: int, dagster: dict[str, Any], ends_with: Callable[[int], Path], tmp_path: Path
) -> None:
    ends_with(code)
    (check,) = dagster["dtx_verdicts"]().words["check_results"]
    check_words((tmp_path / "words").read_text().split())
    assert check.words["check_name"] == "everything_read"
    assert check.words["passed"] is (code == 0)
    assert check.words["severity"] == "WARN"


@pytest.mark.parametrize("code", [1, 2])
def test_a_failed_asset_is_retried_unless_its_options_are_wrong(
    code: int, dagster: dict[str, Any], ends_with: Callable[[int], Path]
) -> None:
    ends_with(code)
    with pytest.raises(Failure) as failed:
        dagster["dtx_verdicts"]()
    assert failed.value.allow_retries is (code == 1)


def test_the_check_of_the_asset_counts_findings_in_the_table(dagster: dict[str, Any], tables: Path) -> None:
    assert set(dagster["PASSING"]) == PASSING
    check = dagster["no_findings"]
    check.__globals__["RESULTS"] = str(tables / "results")
    result = check()
    assert result.words == {"passed": False, "metadata": {"mixed": 1, "orphan": 1}}


def test_the_service_repeats_only_unfinished_commands() -> None:
    service = unit("dtx-pipeline.service")["Service"]
    program, *words = shlex.split(service["ExecStart"])
    assert program.endswith("/dtx")
    check_words(words)
    assert service["Type"] == "oneshot"
    assert service["Restart"] == "on-failure"
    assert service["RestartPreventExitStatus"].split() == ["2", "3"]
    assert "MemoryDenyWriteExecute" not in service


def test_the_timer_makes_up_for_a_night_that_was_missed() -> None:
    assert (SYSTEMD / "dtx-pipeline.service").exists()
    timer = unit("dtx-pipeline.timer")
    assert timer["Timer"]["Persistent"] == "true"
    assert timer["Install"]["WantedBy"] == "timers.target"


def test_systemd_takes_the_units(tmp_path: Path, left_out: Callable[[str], None]) -> None:
    if shutil.which("systemd-analyze") is None:
        left_out("units by systemd's own check: there is no systemd-analyze")
        return
    for path in SYSTEMD.iterdir():
        # it checks that the program exists
        (tmp_path / path.name).write_text(path.read_text().replace("/opt/dtx/bin/dtx", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", *map(str, sorted(tmp_path.iterdir()))],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def dbt() -> Any:
    """The sources and models of the dbt project."""
    return yaml.safe_load((EXAMPLES / "dbt/models/sources.yml").read_text())


def test_dbt_knows_every_column_and_every_verdict() -> None:
    (source,) = dbt()["sources"]
    schemas = {"verdicts": VERDICTS, "history": HISTORY}
    assert [table["name"] for table in source["tables"]] == list(schemas)
    for table in source["tables"]:
        assert table["config"]["meta"]["delta_table_path"] == f"{{{{ env_var('DTX_RESULTS') }}}}/{table['name']}"
        assert [column["name"] for column in table["columns"]] == schemas[table["name"]].names
        for column in table["columns"]:
            assert column["description"]
            for test in column.get("data_tests", ()):
                if test != "not_null":
                    assert test["accepted_values"]["arguments"]["values"] == list(Verdict)


def test_the_dbt_model_selects_verdicts_that_need_attention() -> None:
    (model,) = dbt()["models"]
    text = (EXAMPLES / f"dbt/models/{model['name']}.sql").read_text()
    assert quoted(text, "not in") == PASSING
    selected = set(re.findall(r"^    (\w+),?$", text, re.MULTILINE))
    assert selected
    assert selected <= set(VERDICTS.names)


def quoted(text: str, word: str) -> set[str]:
    """The quoted words in the brackets after *word*."""
    found = re.search(rf"{word} \(([^)]*)\)", text, re.IGNORECASE)
    assert found
    return set(re.findall(r"'([^']+)'", found[1]))


def cells() -> list[str]:
    """The code cells of the notebook."""
    found = json.loads((EXAMPLES / "questions.ipynb").read_text())["cells"]
    code = [cell for cell in found if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)
    return ["".join(cell["source"]) for cell in code]


def test_the_notebook_has_no_outputs_and_uses_existing_verdicts() -> None:
    places, *others = cells()
    assert {line.partition(" = ")[0] for line in places.splitlines()} == {"LAKE", "RESULTS"}
    assert quoted("\n".join(others), "NOT IN") == PASSING


def answers(lake: Path, results: Path) -> Iterator[Any]:
    """The value of the last expression of each cell of the notebook."""
    names: dict[str, Any] = {"LAKE": str(lake), "RESULTS": str(results)}
    for text in cells()[1:]:
        code = ast.parse(text)
        last = code.body.pop() if isinstance(code.body[-1], ast.Expr) else None
        exec(compile(code, "questions.ipynb", "exec"), names)
        if last is not None:
            yield eval(compile(ast.Expression(last.value), "questions.ipynb", "eval"), names)  # type: ignore[attr-defined]


def test_the_notebook_answers_its_questions(tables: Path, left_out: Callable[[str], None]) -> None:
    try:
        import duckdb  # noqa: F401
    except ModuleNotFoundError:
        left_out("the notebook of the pipeline: there is no duckdb (pip install 'dtx[bench]')")
        return
    found = [frame.to_dict("records") for frame in answers(tables / "lake", tables / "results")]
    attention, doubt, changes, stale, latency = found
    assert {(row["xid"], row["verdict"]) for row in attention} == {("1:62", "mixed"), ("1:63", "orphan")}
    assert [(row["owner"], row["transactions"], round(row["age"].total_seconds() / 3600)) for row in doubt] == [
        ("shop", 1, 2)
    ]
    assert [(row["run"], row["was"], row["verdict"]) for row in changes] == [
        (2, "in-doubt", "mixed"),
        (1, "(new)", "in-doubt"),
    ]
    assert [(row["source"], row["unread"]) for row in stale] == [("bank-b", 1), ("bank-a", 0)]
    assert [(row["rm"], row["branches"], row["longest"]) for row in latency] == [("bank-a", 1, 3.0)]


def rules() -> dict[str, str]:
    """The expression of each alert."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


@pytest.mark.parametrize("alert", rules())
def test_an_alert_asks_for_metrics_that_a_run_leaves(alert: str) -> None:
    asked = re.findall(r"\b(dtx_pipeline_\w+)(?:\{(\w+))?", rules()[alert])
    assert asked
    for name, label in asked:
        assert name in verdict_tables.SERIES
        assert label in {"", verdict_tables.SERIES[name]}


def test_every_verdict_that_needs_attention_has_an_alert() -> None:
    new = set(re.findall(r"[\w-]+", rules()["DtxPipelineFindings"].partition('!~"')[2].partition('"')[0]))
    open_ = set(re.findall(r"[\w-]+", rules()["DtxPipelineOpen"].partition('=~"')[2].partition('"')[0]))
    assert open_ == {Verdict.UNFINISHED, Verdict.ORPHAN}
    assert new == PASSING | open_


def test_prometheus_takes_the_rules_of_the_pipeline(left_out: Callable[[str], None]) -> None:
    if shutil.which("promtool") is None:
        left_out("alerts on the pipeline by Prometheus's own check: there is no promtool (Debian: prometheus)")
        return
    for words in (["check", "rules", RULES.name], ["test", "rules", "pipeline.rules.test.yml"]):
        done = subprocess.run(
            ["promtool", *words], cwd=RULES.parent, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
