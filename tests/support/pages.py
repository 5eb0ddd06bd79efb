"""Blocks of the documentation that are generated: from the code, and from the result files of ``make evidence``.

``python -m tests.support.pages`` writes all of them. A test compares them with the code.
"""

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

from prometheus_client import Metric
from sqlalchemy.dialects import postgresql

from dtx.admin import rabbitmq_metrics
from dtx.admin.problems import STATUS
from dtx.admin.rabbitmq_metrics import BrokerTotals
from dtx.client.errors import raised_by_reply_code
from dtx.config.settings import Settings, group_of
from dtx.log.tables import in_doubt
from dtx.pipeline.verdicts import RULES
from dtx.server.amqp10.nodes import amqp_error
from dtx.telemetry import Metrics
from dtx.xa.codes import ReplyCode, XaError
from tests.support import delta_tables
from tests.support.diagram import answers_table, state_diagram
from tests.support.errors import Code, Source
from tests.support.http_api import Reference, document
from tests.support.rabbitmq_versions import CLUSTER_DIFFERENCES, DIFFERENCES
from tests.support.scenarios import SCENARIOS

DOCS: Final = Path(__file__).parents[2] / "docs"
SUITES: Final = {
    "tests/contract/protocol": "conformance: branches over AMQP 0-9",
    "tests/contract/amqp10": "conformance: branches over AMQP 1.0",
    "tests/contract": "answers and messages as those of the broker",
    "tests/servers/proxy": "connections through dtx as direct ones",
    "tests/servers/branches": "branches with many clients",
}
"""Folders of tests in the table of brokers, the more special ones first, and what they prove."""
_ROOMS: Final = ("admin", "manager", "server", "store", "wire", "xa")
"""Packages that make errors for clients and operators."""
_UNITS: Final = ((1 << 20, "MiB"), (1 << 10, "KiB"))
_SIZES: Final = ("_bytes", "frame_max")
_DURATIONS: Final = ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s"))
_SECONDS: Final = ("_after", "_timeout", "_retention", "_ttl", "_deadline", "_heartbeat", "_window")


def embed(text: str, name: str, content: str) -> str:
    """*text* with *content* in the place of what is between the two markers called *name*.

    Raises:
        ValueError: the markers are not in *text*.
    """
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"no block between {begin} and {end}")
    return f"{before}{begin}\n\n{content}\n\n{end}{after}"


def settings_table() -> str:
    """Every setting, by group, with its default."""
    lines = ["| flag | default | |", "| --- | --- | --- |"]
    group = ""
    for name, field in Settings.model_fields.items():
        if (heading := group_of(name)) != group:
            group = heading
            lines.append(f"| **{group}** | | |")
        lines.append(f"| `--{name.replace('_', '-')}` | {_default(name, field.get_default())} | {field.description} |")
    return "\n".join(lines)


def _default(name: str, value: object) -> str:
    match value:
        case None | ():
            return "none"
        case tuple():
            return ", ".join(f"`{item}`" for item in value)
        case bool():
            return "on" if value else "off"
        case int() | float() if name.endswith(_SECONDS):
            return f"`{_scaled(value, _DURATIONS)}`"
        case int() if name.endswith(_SIZES):
            return f"`{_scaled(value, _UNITS)}`"
        case _:
            return f"`{value}`"


def _scaled(value: float, units: tuple[tuple[int, str], ...]) -> str:
    return next(
        (f"{value / size:g}{unit}" for size, unit in units if value >= size and value % size == 0), f"{value:g}"
    )


def families() -> list[Metric]:
    """Every metric but those of each queue, by name; what the process itself has (``process_…``) is left out."""
    found = [family for family in Metrics().registry.collect() if family.name.startswith("dtx_")]
    found += rabbitmq_metrics.families(BrokerTotals())
    return sorted(found, key=lambda family: family.name)


def series(family: Metric) -> set[str]:
    """The names under which the numbers of *family* can be asked for."""
    match family.type:
        case "counter":
            return {f"{family.name}_total"}
        case "info":
            return {f"{family.name}_info"}
        case "histogram":
            return {f"{family.name}{suffix}" for suffix in ("_bucket", "_count", "_sum")}
        case _:
            return {family.name}


def labels(family: Metric) -> list[str]:
    """What the numbers of *family* are told apart by."""
    named = {name for sample in family.samples for name in sample.labels} | set(getattr(family, "_labelnames", ()))
    return sorted(named - {"le"})


def metrics_table() -> str:
    """Every metric, by name."""
    lines = ["| metric | kind | by | |", "| --- | --- | --- | --- |"]
    for family in families():
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        by = ", ".join(f"`{label}`" for label in labels(family))
        lines.append(f"| `{name}` | {family.type} | {by} | {family.documentation} |")
    return "\n".join(lines)


def verdicts_table() -> str:
    """The rules of the pipeline, in their order."""
    return "\n".join(
        [
            "| verdict | when |",
            "| --- | --- |",
            *(f"| `{verdict}` | {sentence} |" for verdict, sentence in RULES.items()),
        ]
    )


def codes_table() -> str:
    """What each reply code of an :class:`~dtx.xa.codes.XaError` is elsewhere."""
    lines = ["| code | name | client of dtx | AMQP 1.0 | HTTP |", "| --- | --- | --- | --- | --- |"]
    for code in ReplyCode:
        raised = {raised_by_reply_code(call, code) for call in ("prepare", "commit")}
        client = ", ".join(f"`{each.__name__}` ({each.code})" for each in sorted(raised, key=lambda each: -each.code))
        condition = amqp_error(XaError(code, "")).condition
        lines.append(f"| {code.value} | {code.name} | {client} | `{condition}` | {STATUS[code].value} |")
    return "\n".join(lines)


def view_table() -> str:
    """The columns of the view for people with psql."""
    lines = ["| column | type | |", "| --- | --- | --- |"]
    for column in in_doubt.columns:
        kind = column.type.compile(postgresql.dialect()).lower()  # type: ignore[no-untyped-call]
        lines.append(f"| `{column.name}` | {kind} | {column.doc} |")
    return "\n".join(lines)


@cache
def _errors() -> dict[str, dict[Code, list[str]]]:
    source = DOCS.parent / "dtx"
    files = [path for room in _ROOMS for path in sorted((source / room).rglob("*.py"))]
    return Source({str(path): path.read_text(encoding="utf-8") for path in files}).errors()


def _texts_table(texts: list[str]) -> str:
    return "\n".join(["| text |", "| --- |", *(f"| `{text}` |" for text in texts)])


_ELSEWHERE: Final = {"brokers": "see [brokers](#brokers)", "scenarios": "see [Scenarios](scenarios.md)"}
"""Results with tables of their own."""


def results_table() -> str:
    """The last result of each part of ``make evidence``, and the machines that they were made on."""
    results = [json.loads(path.read_text()) for path in sorted((DOCS / "evidence").glob("*.json"))]
    lines = ["| part | date | commit | minutes | figures |", "| --- | --- | --- | --- | --- |"]
    for result in results:
        figures = ", ".join(f"{name} {_number(value)}" for name, value in result["figures"].items())
        figures = _ELSEWHERE.get(result["part"], figures)
        minutes = round(result["seconds"] / 60)
        broker = f" alongside RabbitMQ {', '.join(result['rabbitmq'])}" if "rabbitmq" in result else ""
        lines.append(
            f"| {result['part']}{broker} | {result['date'][:10]} | {result['commit']} | {minutes} | {figures} |"
        )
    machines = sorted({result["machine"] for result in results})
    return "\n".join([*lines, "", f"Machines: {'; '.join(machines)}."])


_SPEED: Final = DOCS / "evidence" / "speed"
_EARLIER: Final = json.loads((_SPEED / "earlier.json").read_text(encoding="utf-8"))
"""Tables of runs before the benchmarks wrote result files; they were copied by hand, with the date of the copy."""


def _earlier_table(name: str) -> str:
    table = _EARLIER["tables"][name]
    return f"{_markdown(table['head'], table['rows'])}\n\nRecorded on {table['date']}."


def speed_runs() -> str:
    """The result files of the benchmarks, and the machines that they were made on."""
    results = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(_SPEED.glob("*.json"))]
    runs = [result for result in results if "benchmark" in result]
    lines: list[str] = [] if runs else ["No benchmark has written a result file yet.", ""]
    for result in runs:
        command = " ".join([result["benchmark"], *result["arguments"]])
        lines += [f"### {command}", "", f"{result['date'][:10]}, commit {result['commit']}:", ""]
        for table in result["tables"]:
            lines += [_markdown(table["head"], table["rows"]), ""]
    machines = sorted({result["machine"] for result in results})
    return "\n".join([*lines, f"Machines: {'; '.join(machines)}."])


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    cells = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def brokers_table() -> str:
    """The results of the part ``brokers``: a row for each suite, a column for each broker, and all differences."""
    result = _result("brokers")
    cells = {tuple(name.split(": ")): value for name, value in result["figures"].items()}
    brokers = list(dict.fromkeys(broker for broker, _ in cells))
    versions = {version[0]: version for version in result["rabbitmq"]}
    heads = [f"{versions[broker[0]]}{broker[1:].replace('-', ', ')}" for broker in brokers]
    rows = [
        [f"{meaning} (`{folder}`)", *(cells[broker, folder] for broker in brokers)]
        for folder, meaning in SUITES.items()
    ]
    reasons = [f"- {reason}." for reason in dict.fromkeys([*DIFFERENCES.values(), *CLUSTER_DIFFERENCES.values()])]
    return "\n".join([_markdown(["tests", *heads], rows), "", *reasons])


def scenarios_table() -> str:
    """Every scenario, with its tests and their last results."""
    results = _result("scenarios")["figures"]
    versions = list(dict.fromkeys(name.partition(": ")[0] for name in results))
    rows = []
    for each in SCENARIOS:
        tests = [f"`{test.rpartition('/')[2]}`" for test in each.tests]
        parts = [f"[`{part}`](index.md#{part})" for part in each.parts]
        cells = [results.get(f"{version}: {each.name}", "") for version in versions]
        rows.append([each.name, each.text, each.never, "<br>".join(tests) or "none yet", *cells, ", ".join(parts)])
    head = ["", "what happens", "must not happen", "tests", *(f"with {version}" for version in versions), "parts"]
    return _markdown(head, rows)


def _result(part: str) -> dict[str, Any]:
    path = DOCS / f"evidence/{part}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"figures": {}, "rabbitmq": []}
    return found


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)


BLOCKS: Final[dict[str, tuple[str, Callable[[], str]]]] = {
    "state-diagram": ("reference/states.svg", state_diagram),
    "answers": ("reference/states.md", answers_table),
    "settings": ("reference/settings.md", settings_table),
    "metrics": ("reference/metrics.md", metrics_table),
    "verdicts": ("reference/verdicts.md", verdicts_table),
    "lake": ("reference/pipeline-tables.md", delta_tables.lake_table),
    "verdict-columns": ("reference/pipeline-tables.md", delta_tables.verdict_table),
    "evidence": ("reference/pipeline-tables.md", delta_tables.evidence_table),
    "history": ("reference/pipeline-tables.md", delta_tables.history_table),
    "routes": ("reference/http-api.md", lambda: Reference(document()).routes()),
    "objects": ("reference/http-api.md", lambda: Reference(document()).objects()),
    "brokers": ("evidence/index.md", brokers_table),
    "scenarios": ("evidence/scenarios.md", scenarios_table),
    "results": ("evidence/index.md", results_table),
    "speed-runs": ("evidence/speed.md", speed_runs),
    **{f"speed-{name}": ("evidence/speed.md", partial(_earlier_table, name)) for name in _EARLIER["tables"]},
    "in_doubt": ("reference/sql.md", view_table),
    "error-codes": ("reference/errors.md", codes_table),
    **{
        f"{kind}.{code.name}": ("reference/errors.md", partial(_texts_table, texts))
        for kind, codes in _errors().items()
        for code, texts in codes.items()
    },
}
"""By the name of their markers: the page, and what makes the block."""


if __name__ == "__main__":
    for block, (page, content) in BLOCKS.items():
        file = DOCS / page
        file.write_text(embed(file.read_text(encoding="utf-8"), block, content()), encoding="utf-8")
