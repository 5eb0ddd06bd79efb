"""All settings as a markdown table for README.

``python -m dtx.config.table README.md`` brings it up to date; a test keeps the two equal.
"""

import sys
from pathlib import Path
from typing import Final

from dtx.config.settings import Settings, group_of

BEGIN: Final = "<!-- settings -->"
END: Final = "<!-- /settings -->"
_UNITS: Final = ((1 << 20, "MiB"), (1 << 10, "KiB"))
_SIZES: Final = ("_bytes", "frame_max")
_DURATIONS: Final = ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s"))
_SECONDS: Final = ("_after", "_timeout", "_retention", "_ttl", "_deadline", "_heartbeat")


def block() -> str:
    """The table with its markers."""
    lines = [BEGIN, "", "| flag | default | |", "| --- | --- | --- |"]
    group = ""
    for name, field in Settings.model_fields.items():
        if (heading := group_of(name)) != group:
            group = heading
            lines.append(f"| **{group}** | | |")
        lines.append(f"| `--{name.replace('_', '-')}` | {_default(name, field.get_default())} | {field.description} |")
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


if __name__ == "__main__":
    if sys.argv[1:]:
        readme = Path(sys.argv[1])
        readme.write_text(embed(readme.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(block())  # noqa: T201 - this is what it is for
