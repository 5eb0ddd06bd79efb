"""Writes the page and the CSV files of the report."""

import csv
import json
import os
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from dtx.pipeline.reconcile.state import SourcePart, SourceRead
from dtx.pipeline.report import plots
from dtx.pipeline.report.figures import AGES, LISTED, Figures
from dtx.pipeline.verdicts import RULES

PAGE: Final = "report.html"
_EVIDENCE_SHOWN: Final = 50
"""Limit of lines of evidence of one transaction on the page."""
_STALE: Final = timedelta(days=1)
"""Age at which the data of a source are stale, since the pipeline runs every night."""
_UNITS: Final = ((86400, "day"), (3600, "hour"), (60, "minute"))
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
"""Spreadsheets run a cell that begins with one of these as a formula, and names come from clients."""


def write_report(figures: Figures, directory: Path) -> Path:
    """Write the page and the CSV files, each as a whole, and return the path of the page."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, (header, rows) in _tables(figures).items():
        with _replaced(directory / f"{name}.csv") as file:
            writer = csv.writer(file)
            writer.writerow(header)
            writer.writerows([_cell(value) for value in row] for row in rows)
    with _replaced(directory / PAGE) as file:
        file.write(render(figures))
    return directory / PAGE


def render(figures: Figures) -> str:
    """Return the HTML of the page."""
    environment = Environment(
        loader=PackageLoader("dtx.pipeline.report"),
        autoescape=True,  # names and reasons come from clients
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": lambda value: f"{value:,}",
        "time": _time,
        "seconds": plots.seconds,
        "age": lambda value: _words(figures.as_of - value),
        "text": _text,
    }
    script = environment.get_template("filter.js").render()
    heuristics: Counter[str] = Counter()
    for _, what, _, count in figures.heuristics:
        heuristics[what] += count
    drawings = {
        "days": plots.days(figures.days),
        "endings": plots.endings(figures.days),
        "ages": plots.ages(figures.ages, [label for label, _ in AGES]),
        "latency": plots.latency(figures.latency) if figures.latency else "",
        "owners": plots.names("Transactions by owner", {name: count for name, count, _ in figures.owners}),
        "queues": plots.names(
            "Messages in open branches, by queue",
            {f"{place} ({rm}, {kind})": n for rm, kind, place, n in figures.queues or ()},
        ),
        "heuristics": plots.names("Heuristic outcomes", dict(heuristics.most_common()), "special"),
    }
    choices = _choices(figures)
    return environment.get_template("report.html").render(
        figures=figures,
        choices=choices,
        transactions=[_transaction(row, figures, choices) for row in figures.shown],
        sources=sorted(
            ((row, _freshness(row, figures)) for row in figures.sources),
            key=lambda found: (found[0].read_at is not None, found[0].read_at, found[0].source, found[0].part),
        ),
        script=Markup(script),  # noqa: S704 - a file of this package
        script_hash=b64encode(sha256(script.encode()).digest()).decode(),
        plots={name: Markup(drawing) for name, drawing in drawings.items()},  # noqa: S704 - drawn here, names escaped
        rules=RULES.items(),
        colour={str(verdict): colour for colour, verdicts in plots.GROUPS.values() for verdict in verdicts},
        open_count=sum(count for _, _, count in figures.ages),
        wrong=sum(figures.verdicts[verdict] for verdict in plots.GROUPS["went wrong"][1]),
        listed=LISTED,
    )


def _tables(figures: Figures) -> dict[str, tuple[Sequence[str], Iterable[Sequence[Any]]]]:
    transaction = (
        "verdict", "findings", "format_id", "gtrid", "since", "first_at", "last_at", "known_at", "branches", "decision",
        "tm", "rms", "owners", "evidence",
    )  # fmt: skip
    return {
        "verdicts": (("verdict", "transactions"), figures.verdicts.items()),
        "days": (("day", "verdict", "transactions"), figures.days),
        "ages": (("age", "verdict", "transactions"), figures.ages),
        "latency": (("rm", "branches", "p50_seconds", "p95_seconds", "p99_seconds"), figures.latency),
        "heuristics": (("rm", "outcome", "actor", "branches"), figures.heuristics),
        "owners": (("owner", "transactions", "need_attention"), figures.owners),
        "queues": (("rm", "kind", "queue", "messages"), figures.queues or ()),
        "attention": (transaction, ([row[name] for name in transaction] for row in figures.attention)),
        "sources": (("source", "part", "read_at"), (row[:3] for row in figures.sources)),
        "quarantine": (
            ("source", "item", "reason", "count", "sample"),
            ((row.source, row.item, row.reason, row.count, row.sample) for row in figures.quarantine),
        ),
    }


@contextmanager
def _replaced(path: Path) -> Iterator[IO[str]]:
    """Open a file that replaces *path* as a whole."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("w", encoding="utf-8", newline="") as file:
        yield file
    beside.replace(path)


def _cell(value: object) -> object:
    match value:
        case datetime():
            return value.astimezone(UTC).isoformat(timespec="microseconds")
        case list() | tuple():
            return _cell(" ".join(str(part) for part in value))
        case str() if value.startswith(_FORMULA):
            return f"'{value}"
        case float():
            return f"{value:.6f}"
        case _:
            return value


def _time(value: datetime | None) -> str:
    return "" if value is None else value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def _words(age: timedelta) -> str:
    seconds = max(0, int(age.total_seconds()))
    size, name = next((unit for unit in _UNITS if seconds >= unit[0]), (1, "second"))
    return f"{seconds // size:,} {name}{'' if seconds // size == 1 else 's'}"


def _text(octets: str) -> str:
    """Return a part of an xid, given in hexadecimal, as text if it is printable ASCII, else an empty text."""
    text = bytes.fromhex(octets)
    return text.decode("ascii") if text.isascii() and text.decode("ascii").isprintable() else ""


def _freshness(row: SourceRead, figures: Figures) -> str:
    is_cut = row.part is SourcePart.JOURNAL and any(
        each.source == row.source and each.item == row.part and each.is_away for each in figures.quarantine
    )
    if row.read_at is None or row.is_missing or is_cut:
        return "unread"
    return "stale" if figures.as_of - row.read_at > _STALE else "fresh"


def _choices(figures: Figures) -> dict[str, list[str]]:
    """Return the values of the page's filters; there is one age for each limit of :data:`AGES`."""
    lines = [line for row in figures.shown for line in json.loads(row["evidence"])]
    return {
        "verdict": list(dict.fromkeys(row["verdict"] for row in figures.shown)),
        "source": sorted({*figures.databases, *(line["source"] for line in lines)}),
        "owner": sorted({owner for row in figures.shown for owner in row["owners"]}),
        "age": [f"over {_words(limit)}" for _, limit in AGES[:-1]],
    }


def _transaction(row: Mapping[str, Any], figures: Figures, choices: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return a row with its evidence and the indexes of the choices that it matches."""
    lines = json.loads(row["evidence"])
    for line in lines:
        # a line of a journal has an id, an observation in dtx has a source with a journal, a decision has no vhost
        of_dtx = line["vhost"] and (line["id"] is not None or line["source"] in figures.databases)
        line["xid"] = f"{row['format_id']}:{row['gtrid']}:{line['bqual']}" if of_dtx else None
    matching = {"verdict": [row["verdict"]], "source": {line["source"] for line in lines}, "owner": row["owners"]}
    numbers = {name: sorted(choices[name].index(value) for value in values) for name, values in matching.items()}
    begun = row["since"] or row["last_at"] or figures.as_of
    numbers["age"] = [number for number, (_, limit) in enumerate(AGES[:-1]) if figures.as_of - begun >= limit]
    return {**row, "lines": lines[:_EVIDENCE_SHOWN], "line_count": len(lines), "numbers": numbers}
