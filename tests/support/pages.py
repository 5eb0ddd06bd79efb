"""Blocks of the documentation that are generated: from the code, and from the result files of ``make evidence``.

``python -m tests.support.pages`` writes all of them. A test compares them with the code.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from prometheus_client import Metric

from dtx.admin.api import api
from dtx.config.settings import Settings, group_of
from dtx.pipeline.verdicts import RULES
from dtx.telemetry import Metrics
from tests.support.diagram import answers_table, state_diagram

DOCS: Final = Path(__file__).parents[2] / "docs"
_UNITS: Final = ((1 << 20, "MiB"), (1 << 10, "KiB"))
_SIZES: Final = ("_bytes", "frame_max")
_DURATIONS: Final = ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s"))
_SECONDS: Final = ("_after", "_timeout", "_retention", "_ttl", "_deadline", "_heartbeat")
_INTRODUCTION: Final = """\
Dark states are in the log. An operation that does not change the state has no arrow; the table below has its answer.
The text in brackets says what the branch holds (`local`: messages of standalone mode), or that it has no other channel.

Some events do not come from a client:

- `taken`, `not-taken`, `taken-in-part`: the result of taking the consumed messages from the broker.
- `applied`, `put-back`: phase two is complete.
- `timeout`, `channel-lost`, `doom` (a failure before the vote), `expire` (the end of `--tombstone-ttl`).
- Orders of operators: `heuristic-commit`, `heuristic-rollback`, and `discard` or `discard-last` for messages that phase
  two cannot publish."""
_LEGEND: Final = """\
- Flags are written without their `xa-`. `heur…` is the recorded outcome. A number is the reply code of a channel
  exception.
- Demarcation is answered so if the channel's association is the one that the operation requires. Otherwise the answer
  is 503.
- Prepare, commit, rollback and forget get 503 while a channel is associated or suspended.
- 541 is possible in every state: the log or the broker has failed, and the outcome is not known yet."""


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


def states_and_answers() -> str:
    """The transition table as a diagram and as a table of answers."""
    return f"{_INTRODUCTION}\n\n```mermaid\n{state_diagram()}\n```\n\n{_LEGEND}\n\n{answers_table()}"


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
    """Every metric of dtx's own, by name; what the process itself has (``process_…``) is left out."""
    found = [family for family in Metrics().registry.collect() if family.name.startswith("dtx_")]
    return sorted(found, key=lambda family: family.name)


def series(family: Metric) -> set[str]:
    """The names under which the numbers of *family* can be asked for."""
    match family.type:
        case "counter":
            return {f"{family.name}_total"}
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
        name = f"{family.name}_total" if family.type == "counter" else family.name
        by = ", ".join(f"`{label}`" for label in labels(family))
        lines.append(f"| `{name}` | {family.type} | {by} | {family.documentation} |")
    return "\n".join(lines)


def verdicts_table() -> str:
    """The rules of the pipeline, in their order."""
    return "\n".join(
        ["| verdict | when |", "| --- | --- |", *(f"| `{rule.verdict}` | {rule.sentence} |" for rule in RULES)]
    )


def routes_table() -> str:
    """Every route of the operators' HTTP API."""
    lines = ["| request | |", "| --- | --- |"]
    context: Any = SimpleNamespace()
    for path, methods in api(context).openapi()["paths"].items():
        for method, route in methods.items():
            sentence, _, _ = route.get("description", route["summary"]).partition("\n\n")
            lines.append(f"| `{method.upper()} {path}` | {' '.join(sentence.split())} |")
    return "\n".join(lines)


def results_table() -> str:
    """The last result of each part of ``make evidence``, and the machines that they were made on."""
    results = [json.loads(path.read_text()) for path in sorted((DOCS / "evidence").glob("*.json"))]
    lines = ["| part | date | commit | minutes | figures |", "| --- | --- | --- | --- | --- |"]
    for result in results:
        figures = ", ".join(f"{name} {_number(value)}" for name, value in result["figures"].items())
        minutes = round(result["seconds"] / 60)
        lines.append(f"| {result['part']} | {result['date'][:10]} | {result['commit']} | {minutes} | {figures} |")
    machines = sorted({result["machine"] for result in results})
    return "\n".join([*lines, "", f"Machines: {'; '.join(machines)}."])


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)


BLOCKS: Final[dict[str, tuple[str, Callable[[], str]]]] = {
    "state-diagram": ("reference/states.md", states_and_answers),
    "settings": ("reference/settings.md", settings_table),
    "metrics": ("reference/metrics.md", metrics_table),
    "verdicts": ("reference/verdicts.md", verdicts_table),
    "http-api": ("reference/http-api.md", routes_table),
    "results": ("evidence/index.md", results_table),
}
"""By the name of their markers: the page, and what makes the block."""


if __name__ == "__main__":
    for block, (page, content) in BLOCKS.items():
        file = DOCS / page
        file.write_text(embed(file.read_text(encoding="utf-8"), block, content()), encoding="utf-8")
