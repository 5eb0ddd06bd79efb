"""Lists of RabbitMQ's management API: filter, order, pages and columns.

A list is made in slices, so that no list holds the event loop. Only sort keys are in memory for the whole list. The
rows that are shown are made again while they are sent.
"""

import json
import time
from asyncio import sleep
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import merge
from http import HTTPStatus
from itertools import islice
from typing import Any, Final

import regex
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, Field

from dtx.admin.problems import Problem
from dtx.auth.permissions import MATCH_SECONDS
from dtx.store.slices import SLICE_SECONDS, finish

Row = dict[str, Any]
_SORTED_AT_ONCE: Final = 1000
_PIECE: Final = 64 * 1024
"""Bytes of an answer that are sent at once, about."""


class ColumnsQuery(BaseModel):
    """The query of one object. Unknown keys are ignored, as in RabbitMQ."""

    columns: str = Field(default="", max_length=2000, description="Only these fields: names with commas between them.")


class ListQuery(ColumnsQuery):
    """The query of a list."""

    page: int | None = Field(default=None, ge=1, description="Number of the page, from 1 on; without it, no pages.")
    page_size: int = Field(default=100, ge=1, le=500, description="Rows of a page.")
    name: str = Field(default="", max_length=1000, description="Only rows whose name contains this; only with *page*.")
    use_regex: bool = Field(default=False, description="Whether *name* is a regular expression.")
    sort: str | None = Field(default=None, max_length=200, description="Field to sort by.")
    sort_reverse: bool = Field(default=False, description="Reverse the order.")

    def names(self) -> Callable[[str], bool]:
        """Whether a name is wanted.

        Raises:
            Problem: 400, the pattern is no regular expression.
        """
        if not self.name or self.page is None:
            return lambda _: True
        if not self.use_regex:
            wanted = self.name.lower()
            return lambda name: wanted in name.lower()
        try:
            pattern = regex.compile(self.name, regex.IGNORECASE)
        except regex.error as error:
            raise Problem(HTTPStatus.BAD_REQUEST, f"name is no regular expression: {error}") from None

        def matches(name: str) -> bool:
            try:
                return pattern.search(name, timeout=MATCH_SECONDS) is not None
            except TimeoutError:
                raise Problem(HTTPStatus.BAD_REQUEST, "the regular expression takes too long") from None

        return matches


@dataclass(frozen=True, slots=True)
class Listed:
    """A list.

    Args:
        things: the objects. ``None`` is no object, but gives other work a turn.
        row: makes the row of an object.
        order: the fields to sort by, after that of the query.
    """

    things: Iterable[Any]
    row: Callable[[Any], Row]
    order: tuple[str, ...]


def dotted(row: Row, name: str) -> object:
    """The field *name* of *row*; ``a.b`` is a field of a field."""
    found: object = row
    for word in name.split("."):
        found = found.get(word) if isinstance(found, dict) else None
    return found


def _comparable(value: object) -> tuple[int, Any]:
    match value:
        case None:
            return 0, 0
        case bool() | int() | float():
            return 1, value
        case str():
            return 2, value
        case _:
            return 3, str(value)


def only(row: Row, columns: str) -> Row:
    """*row* with the fields that *columns* names; all of them if it names none."""
    if not columns:
        return row
    found: Row = {}
    for name in columns.split(","):
        value = dotted(row, name)
        if value is not None or name in row:
            place = found
            *path, last = name.split(".")
            for word in path:
                place = place.setdefault(word, {})
            place[last] = value
    return found


@dataclass(frozen=True, slots=True)
class Found:
    """The objects of a list that a query selects.

    Args:
        things: the objects, in order.
        count: their number.
        total: the number of all objects of the list.
    """

    things: Iterator[Any]
    count: int
    total: int

    def pages(self, size: int) -> int:
        """The number of pages with *size* objects; at least one."""
        return max(1, -(-self.count // size))


async def find(listed: Listed, query: ListQuery) -> Found:
    """Select the objects of a list, in the order of the query.

    Raises:
        Problem: 400, the pattern cannot be used.
    """
    order = listed.order if query.sort is None else (query.sort, *listed.order)
    wanted = query.names()
    keyed: list[tuple[list[tuple[int, Any]], int, Any]] = []
    total = 0

    def read() -> Iterator[None]:
        nonlocal total
        for thing in listed.things:
            row = {} if thing is None else listed.row(thing)
            if row and wanted(str(row.get("name", ""))):
                keyed.append(([_comparable(dotted(row, name)) for name in order], total, thing))
            total += bool(row)
            yield

    await finish(read())
    return Found(await _in_order(keyed, reverse=query.sort_reverse), len(keyed), total)


async def rows(listed: Listed, things: Iterator[Any], start: int = 0, end: int | None = None) -> AsyncIterator[Row]:
    """The rows of the objects from *start* to *end*, in slices."""
    until = time.monotonic() + SLICE_SECONDS
    for number, thing in enumerate(islice(things, end)):
        if number >= start:
            yield listed.row(thing)
        if time.monotonic() >= until:
            await sleep(0)
            until = time.monotonic() + SLICE_SECONDS


async def answer(listed: Listed, query: ListQuery) -> Response:
    """The answer with a list, or with one page of it.

    Raises:
        Problem: 400, there is no such page, or the pattern cannot be used.
    """
    found = await find(listed, query)
    if query.page is None:
        return _streamed(rows(listed, found.things), query.columns, b"[", b"]")
    pages = found.pages(query.page_size)
    if query.page > pages:
        raise Problem(
            HTTPStatus.BAD_REQUEST,
            f"page out of range, page: {query.page} page size: {query.page_size}, len: {found.count}",
        )
    start = (query.page - 1) * query.page_size
    numbers = {
        "filtered_count": found.count,
        "item_count": min(query.page_size, found.count - start),
        "page": query.page,
        "page_count": pages,
        "page_size": query.page_size,
        "total_count": found.total,
    }
    head = json.dumps(numbers)[:-1].encode() + b', "items": ['
    shown = rows(listed, found.things, start, start + query.page_size)
    return _streamed(shown, query.columns, head, b"]}")


async def _in_order(keyed: list[tuple[Any, int, Any]], *, reverse: bool) -> Iterator[Any]:
    """The objects in order. Short parts are sorted at once, and merged as they are read."""
    parts: list[list[tuple[Any, int, Any]]] = []
    for start in range(0, len(keyed), _SORTED_AT_ONCE):
        parts.append(sorted(keyed[start : start + _SORTED_AT_ONCE], reverse=reverse))
        await sleep(0)
    return (thing for _, _, thing in merge(*parts, reverse=reverse))


def _streamed(shown: AsyncIterator[Row], columns: str, head: bytes, tail: bytes) -> Response:
    async def pieces() -> AsyncIterator[bytes]:
        piece = bytearray(head)
        comma = b""
        async for row in shown:
            piece += comma + json.dumps(only(row, columns)).encode()
            comma = b","
            if len(piece) >= _PIECE:
                yield bytes(piece)
                piece.clear()
        yield bytes(piece + tail)

    return StreamingResponse(pieces(), media_type="application/json")
