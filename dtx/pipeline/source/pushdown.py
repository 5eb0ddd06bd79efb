"""Filters that the databases judge, given with the read: option ``filters``. Pure.

Spark's own push-down into Python sources (seen with 4.3) keeps the filter of the last query with the DataFrame, and
applies it to every other query of the same DataFrame, too: ``df.filter(a).union(df.filter(b))`` has *b* twice. So it
is not used. What is given here belongs to one ``load()``, and Spark may filter further.

Text is compared by octets (``COLLATE "C"``), as Spark does.
"""

import json
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Final, NamedTuple

from psycopg import sql

from dtx.pipeline.source.columns import SOURCE, Kind, Readable
from dtx.pipeline.source.errors import SourceError

_UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)
_ORDER: Final = frozenset({">", ">=", "<", "<="})
_LISTS: Final = frozenset({"in", "not in"})
_NULLS: Final = {"is null": "IS NULL", "is not null": "IS NOT NULL"}
_WITHIN: Final[dict[str, Callable[[str, str], str]]] = {
    "starts with": lambda name, literal: f"starts_with({name}, {literal})",
    "ends with": lambda name, literal: f"right({name}, length({literal})) = {literal}",
    "contains": lambda name, literal: f"strpos({name}, {literal}) > 0",
}
OPERATORS: Final = ("=", "!=", ">", ">=", "<", "<=", "in", "not in", "is null", "is not null", *_WITHIN)
_LONG: Final = 1 << 63
_XIDS: Final = 1 << 64
_MOST: Final = 10_000
"""Values of one list: a longer one is a table, to be joined."""

Value = str | int | bool | bytes | datetime | None


class Filter(NamedTuple):
    """One condition of a column.

    Args:
        column: its name.
        operator: one of :data:`OPERATORS`.
        value: to compare with; a list for ``in`` and ``not in``, nothing for ``is null`` and ``is not null``.
    """

    column: str
    operator: str
    value: object = None


def where(*filters: tuple[str, str] | tuple[str, str, Value | Sequence[Value]]) -> str:
    """The value for option ``filters``: all of them hold for each row that is read.

    ``where(("rm", "=", "bank-a"), ("at", ">=", datetime(2026, 11, 1, tzinfo=UTC)), ("outcome", "is not null"))``

    Args:
        filters: column, operator, and value: times with their zone, binary columns as bytes.
    """
    return json.dumps([[_plain(part) for part in given] for given in filters])


def parse(text: str | None) -> tuple[Filter, ...]:
    """Read option ``filters``.

    Raises:
        SourceError: it is not what :func:`where` makes.
    """
    try:
        found = tuple(Filter(*given) for given in json.loads(text or "[]"))
        if any(not isinstance(word, str) for wanted in found for word in wanted[:2]):
            raise TypeError(found)
    except (ValueError, TypeError):
        raise SourceError("option filters is not what where() of dtx.pipeline.source makes") from None
    return found


def keeps(wanted: Filter, source: str) -> bool:
    """Whether a filter of the source's own name is true for *source*.

    Raises:
        SourceError: it is neither ``=`` nor ``!=`` nor ``in`` nor ``not in``.
    """
    match wanted.operator, wanted.value:
        case "=", str() as name:
            return source == name
        case "!=", str() as name:
            return source != name
        case "in", list() as names:
            return source in names
        case "not in", list() as names:
            return source not in names
        case _:
            raise SourceError(f"sources are chosen with =, !=, in or not in, not {wanted.operator!r} {wanted.value!r}")


def condition(table: Readable, wanted: Filter) -> str:
    """A filter as SQL.

    Raises:
        SourceError: there is no such column or operator, or the value is none for that column.
    """
    name, operator, value = wanted
    if name not in table.columns:
        raise SourceError(f"{table.name} has no column {name!r} to filter by: {', '.join([*table.columns, SOURCE])}")
    kind = table.columns[name]
    if operator in _NULLS:
        return f"{name} {_NULLS[operator]}"
    if operator in _LISTS:
        if not isinstance(value, list) or not 1 <= len(value) <= _MOST:
            raise SourceError(f"filter {name} {operator}: a list of 1 to {_MOST:,} values is wanted")
        return f"{name} {operator.upper()} ({', '.join(_literal(name, kind, each) for each in value)})"
    if operator in {"=", "!="}:
        return f"{name} {'=' if operator == '=' else '<>'} {_literal(name, kind, value)}"
    if operator in _ORDER and kind not in {Kind.UUID, Kind.BOOLEAN}:
        return f"{name} {operator} {_literal(name, kind, value)}" + (' COLLATE "C"' if kind is Kind.TEXT else "")
    if operator in _WITHIN and kind is Kind.TEXT:
        return _WITHIN[operator](name, _literal(name, kind, value))
    raise SourceError(f"filter {name} {operator!r}: for {kind.value} there is {', '.join(_operators(kind))}")


def _operators(kind: Kind) -> list[str]:
    without = set() if kind is Kind.TEXT else set(_WITHIN)
    if kind in {Kind.UUID, Kind.BOOLEAN}:
        without |= _ORDER
    return [operator for operator in OPERATORS if operator not in without]


def _literal(name: str, kind: Kind, value: object) -> str:
    found = _found(kind, value)
    if found is None:
        raise SourceError(f"filter {name}: {str(value)[:80]!r} is no value of a {kind.value} column")
    return found


def _found(kind: Kind, value: object) -> str | None:
    match kind, value:
        case Kind.BOOLEAN, bool():
            return str(value).lower()
        case ((Kind.INTEGER | Kind.LONG), int()) if not isinstance(value, bool) and -_LONG <= value < _LONG:
            return f"({value})"
        case Kind.XID8, int() if not isinstance(value, bool) and 0 <= value < _XIDS:
            return f"'{value}'::xid8"
        case Kind.UUID, str() if _UUID.fullmatch(value):
            return f"'{value}'::uuid"
        case Kind.TEXT, str() if "\0" not in value and not any(0xD800 <= ord(letter) < 0xE000 for letter in value):
            return f"{sql.Literal(value).as_string(None).strip()}::text"
        case Kind.BYTES, str():
            return _bytes(value)
        case Kind.TIME, str():
            return _time(value)
        case _:
            return None


def _bytes(text: str) -> str | None:
    try:
        return f"'\\x{bytes.fromhex(text).hex()}'::bytea"
    except ValueError:
        return None


def _time(text: str) -> str | None:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    return None if time.tzinfo is None else f"'{time.isoformat()}'::timestamptz"


def _plain(part: object) -> object:
    if isinstance(part, bytes):
        return part.hex()
    if isinstance(part, datetime):
        return part.isoformat()
    if isinstance(part, list | tuple | set | frozenset):
        return [_plain(each) for each in part]
    return part
