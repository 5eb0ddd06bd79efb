"""All metrics as a markdown table for README.

``python -m dtx.telemetry.table README.md`` brings it up to date; a test keeps the two equal.
"""

import sys
from pathlib import Path
from typing import Final

from prometheus_client import Metric

from dtx.telemetry.metrics import Metrics

BEGIN: Final = "<!-- metrics -->"
END: Final = "<!-- /metrics -->"


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


def block() -> str:
    """The table with its markers."""
    lines = [BEGIN, "", "| metric | kind | by | |", "| --- | --- | --- | --- |"]
    for family in families():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        by = ", ".join(f"`{label}`" for label in labels(family))
        lines.append(f"| `{name}` | {family.type} | {by} | {family.documentation} |")
    return "\n".join((*lines, "", END))


def embed(text: str) -> str:
    """*text* with its block brought up to date.

    Raises:
        ValueError: the markers are not in *text*.
    """
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"no block between {BEGIN} and {END}")
    return before + block() + after


if __name__ == "__main__":
    if sys.argv[1:]:
        readme = Path(sys.argv[1])
        readme.write_text(embed(readme.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(block())  # noqa: T201 - this is what it is for
