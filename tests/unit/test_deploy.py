"""The alert rules and the dashboard use metrics that dtx exports, in the formats of Prometheus and Grafana."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from configparser import ConfigParser
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from dtx.cli.errors import Exit
from dtx.config import Settings, parse_duration
from dtx.embedded.postgres import ORDERLY_SECONDS
from dtx.log.records import JournalEvent
from dtx.manager.operators import OperatorAction
from dtx.store.api import UnitOutcome
from dtx.telemetry import metrics
from dtx.xa.codes import Heuristic
from dtx.xa.model import State
from tests.support.pages import families, labels, series

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "dtx.rules.yml"
DASHBOARD = DEPLOY / "grafana" / "dtx.json"
OTHERS = {"up": {"job", "instance"}, "process_resident_memory_bytes": {"job", "instance"}}
"""Series that Prometheus and the process library export."""
FOR_OTHER_DASHBOARDS = {
    "rabbitmq_identity",
    "rabbitmq_alarms_free_disk_space_watermark",
    "rabbitmq_disk_space_available_bytes",
    "rabbitmq_disk_space_available_limit_bytes",
}
"""Names that the dashboards of RabbitMQ use: the numbers are also in ``dtx_disk_…``."""
_SERIES = re.compile(r"\b((?:dtx|process|rabbitmq)_\w+|up)\b(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~?)\s*"([^"]*)"')


def known() -> dict[str, set[str]]:
    """Every series with its labels."""
    found = {name: {*labels(family), "job", "instance", "le"} for family in families() for name in series(family)}
    return found | OTHERS


def values(name: str) -> dict[str, set[str]]:
    """Label values that a series has from the start."""
    found: dict[str, set[str]] = {}
    for family in families():
        if name in series(family):
            for sample in family.samples:
                for label, value in sample.labels.items():
                    found.setdefault(label, set()).add(value)
    return found


def dashboard() -> Any:
    """The dashboard as JSON, as Grafana imports it."""
    return json.loads(DASHBOARD.read_text())


def expressions() -> Iterator[str]:
    """All expressions of the rules and the dashboard."""
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    for panel in dashboard()["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    yield from (note["expr"] for note in dashboard()["annotations"]["list"])


@pytest.mark.parametrize("expression", list(expressions()))
def test_every_series_in_expressions_exists(expression: str) -> None:
    asked = _SERIES.findall(expression)
    assert asked
    for name, matchers in asked:
        assert name in known(), f"{name} is not a metric of dtx"
        for label, how, wanted in _MATCHER.findall(matchers):
            assert label in known()[name], f"{name} has no label {label}"
            there = values(name).get(label)
            if there:
                assert set(wanted.split("|") if how == "=~" else [wanted]) <= there, f"{name} has no {label} {wanted}"


def test_gradual_problems_have_an_alert() -> None:
    """A disk that fills up, and quotas that are nearly used."""
    alerts = {
        rule["alert"]: {name for name, _ in _SERIES.findall(rule["expr"])}
        for group in yaml.safe_load(RULES.read_text())["groups"]
        for rule in group["rules"]
    }
    assert alerts["DtxDiskAlarm"] == {"dtx_disk_alarm"}
    assert alerts["DtxDiskFillsUp"] == {"dtx_disk_free_bytes", "dtx_disk_free_limit_bytes"}
    assert alerts["DtxQuotaNearlyUsed"] == {"dtx_usage", "dtx_quota"}
    assert alerts["DtxMemoryAlarm"] == {"rabbitmq_alarms_memory_used_watermark"}
    assert alerts["DtxConnectionsNearLimit"] == {"dtx_connections", "dtx_connections_limit"}
    assert alerts["DtxQueuesGrow"] == {"rabbitmq_queue_messages_ready"}


def test_expressions_with_metrics_of_rabbitmq_name_the_job() -> None:
    """A RabbitMQ that the same Prometheus reads has metrics with the same names."""
    for expression in expressions():
        for name, matchers in _SERIES.findall(expression):
            assert not name.startswith("rabbitmq_") or "job=" in matchers, expression


def test_every_metric_but_histograms_of_sizes_is_on_the_dashboard() -> None:
    asked = {name for expression in expressions() for name, _ in _SERIES.findall(expression)}
    exported = [family for family in families() if not family.documentation.startswith("Deprecated: ")]
    assert {family.name for family in exported if not series(family) & asked} == FOR_OTHER_DASHBOARDS


def test_labels_have_the_values_that_dtx_knows() -> None:
    """Labels are bounded, and every value exists from the start, so that an increase from 0 to 1 is seen."""
    assert set(metrics.BRANCH_STATES) == {state.value for state in State} - {"unknown"}
    assert set(metrics.EVENTS) == set(JournalEvent)
    assert set(metrics.OUTCOMES) == set(Heuristic)
    assert set(metrics.FINDINGS) == set(UnitOutcome)
    assert set(metrics.OPERATOR_ACTIONS) == set(OperatorAction)


def test_the_dashboard_is_one_that_grafana_loads() -> None:
    """The importer needs a title, a uid, panels with distinct ids and places, and queries with letters."""
    found = dashboard()
    assert (found["title"], found["uid"]) == ("dtx", "dtx-overview")
    assert found["schemaVersion"] >= 36
    assert [variable["name"] for variable in found["templating"]["list"]] == ["datasource", "job"]
    panels = found["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert 0 <= place["x"] <= place["x"] + place["w"] <= 24
        if panel["type"] == "row":
            continue
        assert panel["type"] in {"stat", "timeseries"}
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        letters = [target["refId"] for target in panel["targets"]]
        assert letters == sorted(set(letters))
        assert panel["title"]
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        write_separately = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert write_separately or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]


def promtool(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run promtool, which checks files as Prometheus does."""
    return subprocess.run(["promtool", *words], cwd=cwd, capture_output=True, text=True, check=False, timeout=60)


def test_prometheus_takes_the_rules_and_they_fire_when_they_should(
    tmp_path: Path, left_out: Callable[[str], None]
) -> None:
    if shutil.which("promtool") is None:
        left_out("alert rules by Prometheus's own check: there is no promtool (Debian: apt-get install prometheus)")
        return
    checked = promtool("check", "rules", RULES.name, cwd=RULES.parent)
    assert checked.returncode == 0, checked.stderr
    tested = promtool("test", "rules", "dtx.rules.test.yml", cwd=RULES.parent)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    # Fills in Grafana's variables as Grafana does; then each expression must parse as a recording rule.
    rules = [
        {"record": f"panel:number{number}", "expr": text.replace("$__rate_interval", "5m").replace("$job", "dtx")}
        for number, text in enumerate(expressions())
    ]
    (tmp_path / "panels.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    checked = promtool("check", "rules", "panels.yml", cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr


def service() -> dict[str, str]:
    """The settings of dtx.service."""
    parser = ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes=("#",), strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((DEPLOY / "systemd/dtx.service").read_text())
    return dict(parser["Service"])


def test_the_service_starts_and_stops_as_dtx_expects() -> None:
    """Dtx notifies systemd, stops its PostgreSQL itself, and ends with 2 if the settings are wrong."""
    found = service()
    assert (found["Type"], found["KillMode"]) == ("notify", "mixed")
    assert found["ExecStart"].split()[1:] == ["serve"]
    assert found["RestartPreventExitStatus"] == str(int(Exit.USAGE))
    assert parse_duration(found["TimeoutStopSec"]) >= Settings.model_fields["drain_timeout"].default + ORDERLY_SECONDS


def test_the_service_may_do_little_else(tmp_path: Path, left_out: Callable[[str], None]) -> None:
    if shutil.which("systemd-analyze") is None:
        left_out("the exposure of dtx.service: there is no systemd-analyze")
        return
    (tmp_path / "dtx.service").write_text((DEPLOY / "systemd/dtx.service").read_text())
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(tmp_path / "dtx.service")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
