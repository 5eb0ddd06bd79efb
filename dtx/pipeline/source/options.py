"""Parses the options of ``format("dtx")``; errors say which values are allowed."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from dtx.pipeline.source.columns import Readable, readable
from dtx.pipeline.source.server import SourceError, Waits

_SCHEMES: Final = ("postgresql://", "postgres://", "postgresql+psycopg://")
_KNOWN: Final = {
    name.lower(): name
    for name in (
        "url", "name", "sources", "table", "path", "partitions", "rowsPerPartition", "connectTimeout",
        "statementTimeout", "stallTimeout", "retries", "maxRowsPerBatch", "unavailable", "sweepInterval",
        "pollInterval", "timeline", "startingOffsets",
    )
}  # fmt: skip
_MOST_SOURCES: Final = 10_000
"""Limit of databases of one read, since a read begins with the snapshots of all of them."""
_Default = TypeVar("_Default", int, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one read or stream.

    Args:
        sources: URL of each database, by its configured name.
        table: the table to read.
        partitions: number of partitions for each database; ``None``: by its size.
        rows: approximate number of rows of one partition, if *partitions* is ``None``.
        waits: limits of time for a database.
        batch_rows: approximate limit of rows of one micro-batch and database; ``None``: no limit.
        wait_for_away: streaming: a database that is away keeps its place and does not stop the others.
        sweep: streaming: seconds between two reads of past days.
        poll: streaming: seconds between two reads if nothing is new.
        any_timeline: streaming: continue after a fail-over, in which commits may have been lost.
        latest: streaming: begin with lines that come later, without the existing ones.
    """

    sources: Mapping[str, str]
    table: Readable
    partitions: int | None
    rows: int
    waits: Waits
    batch_rows: int | None
    wait_for_away: bool
    sweep: int
    poll: int
    any_timeline: bool
    latest: bool


def parse(given: Mapping[str, str]) -> Options:
    """Parse options; Spark may change the case of their names."""
    named = {name.lower(): text for name, text in given.items()}
    default = Waits()
    unknown = sorted(set(named) - set(_KNOWN))
    if unknown:
        raise SourceError(f"unknown option {unknown[0]!r}: there are {', '.join(_KNOWN.values())}")
    return Options(
        sources=_sources(named),
        table=readable(named.get("table") or named.get("path") or "journal"),
        partitions=_number(named, "partitions", None, least=1),
        rows=_number(named, "rowsPerPartition", 1_000_000, least=1),
        waits=Waits(
            connect=_number(named, "connectTimeout", default.connect, least=2),
            statement=_number(named, "statementTimeout", default.statement, least=0),
            stall=_number(named, "stallTimeout", default.stall, least=1),
            retries=_number(named, "retries", default.retries, least=0),
        ),
        batch_rows=_number(named, "maxRowsPerBatch", None, least=1),
        wait_for_away=_word(named, "unavailable", "fail", "wait") == "wait",
        sweep=_number(named, "sweepInterval", 3_600, least=0),
        poll=_number(named, "pollInterval", 1, least=0),
        any_timeline=_word(named, "timeline", "same", "any") == "any",
        latest=_word(named, "startingOffsets", "earliest", "latest") == "latest",
    )


def _sources(named: Mapping[str, str]) -> dict[str, str]:
    if ("url" in named) == ("sources" in named):
        raise SourceError(
            "set one of the options: url with postgresql://…, or sources with a JSON object of name and url"
        )
    if "url" in named:
        found: object = {named.get("name") or "dtx": named["url"]}
    else:
        try:
            found = json.loads(named["sources"])
        except ValueError:
            found = None
    if not isinstance(found, dict) or not found or len(found) > _MOST_SOURCES:
        raise SourceError('option sources is not a JSON object like {"bank-a": "postgresql://…"}')
    for name, url in found.items():
        if not name or not isinstance(url, str) or not url.startswith(_SCHEMES):
            raise SourceError(f"the url of source {name!r} does not start with postgresql://")
    return {name: url.replace("postgresql+psycopg://", "postgresql://", 1) for name, url in found.items()}


def _number(named: Mapping[str, str], name: str, default: _Default, *, least: int) -> int | _Default:
    text = named.get(name.lower())
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) < least:
        raise SourceError(f"option {name} is {text[:40]!r}, not a whole number from {least} to 999999999")
    return int(text)


def _word(named: Mapping[str, str], name: str, *words: str) -> str:
    text = named.get(name.lower(), words[0])
    if text not in words:
        raise SourceError(f"option {name} is {text[:40]!r}, not one of {', '.join(words)}")
    return text
