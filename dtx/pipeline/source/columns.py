"""The tables that can be read, their columns, and filters of them that the databases judge (option ``filters``).

Made of :mod:`dtx.log.tables`. Spark's own push-down into Python sources (seen with 4.3) keeps the filter of the last
query with the DataFrame, and applies it to every other query of the same DataFrame, too:
``df.filter(a).union(df.filter(b))`` has *b* twice. So it is not used. What is given here belongs to one ``load()``, and
Spark may filter further.

Text is compared by octets (``COLLATE "C"``), as Spark does.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final, NamedTuple

import pyarrow as pa
from psycopg import sql
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)
from sqlalchemy import BigInteger, Boolean, Column, DateTime, Integer, LargeBinary, Table, Text, Uuid

from dtx.log import tables
from dtx.pipeline.source.server import SourceError

SOURCE: Final = "source"
"""The column that is in no table: the configured name of the database that the row was read from."""
_ARROW: Final[dict[str, pa.DataType]] = {
    "string": pa.string(),
    "binary": pa.binary(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "bigint": pa.int64(),
    "int": pa.int32(),
    "boolean": pa.bool_(),
}
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
_MOST_VALUES: Final = 10_000
"""Values of one list: a longer one is a table, to be joined."""
Value = str | int | bool | bytes | datetime | None


class Kind(StrEnum):
    """What a column is to PostgreSQL."""

    TEXT = "text"
    BYTES = "bytea"
    TIME = "timestamptz"
    LONG = "bigint"
    INTEGER = "integer"
    BOOLEAN = "boolean"
    UUID = "uuid"
    XID8 = "xid8"


_SPARK: Final[dict[Kind, DataType]] = {
    Kind.TEXT: StringType(),
    Kind.BYTES: BinaryType(),
    Kind.TIME: TimestampType(),
    Kind.LONG: LongType(),
    Kind.INTEGER: IntegerType(),
    Kind.BOOLEAN: BooleanType(),
    Kind.UUID: StringType(),
    Kind.XID8: LongType(),
}
_SENT: Final = {Kind.UUID: "uuid_send({})", Kind.XID8: "xid8send({})"}


@dataclass(frozen=True, slots=True)
class Readable:
    """A table that can be read.

    Args:
        name: in the schema ``dtx``.
        columns: what PostgreSQL calls each, by name.
    """

    name: str
    columns: dict[str, Kind]

    @property
    def schema(self) -> StructType:
        """All columns, with the source as the last."""
        fields = [StructField(name, _SPARK[kind]) for name, kind in self.columns.items()]
        return StructType([*fields, StructField(SOURCE, StringType())])

    def sent(self, names: Sequence[str]) -> str:
        """SQL of a select list: columns as PostgreSQL has least work with, for :mod:`dtx.pipeline.source.reading`.

        Args:
            names: of columns; the source is left out, since the database does not know it.
        """
        found = [f'{_SENT.get(self.columns[name], "{}").format(name)} AS "{name}"' for name in names if name != SOURCE]
        # a schema of the source alone still needs a row for each row
        return ", ".join(found) or 'true AS "nothing"'


def readable(table: str) -> Readable:
    """What is known of *table*.

    Raises:
        SourceError: there is no such table to be read.
    """
    try:
        return TABLES[table]
    except KeyError:
        raise SourceError(f"there is no table {table!r} to be read: {', '.join(sorted(TABLES))}") from None


def chosen(table: Readable, schema: StructType) -> None:
    """Check the columns that somebody asks for.

    Raises:
        SourceError: a column is not there, or is of another type.
    """
    there = {field.name: field.dataType for field in table.schema.fields}
    for field in schema.fields:
        if field.name not in there:
            raise SourceError(f"{table.name} has no column {field.name!r}: {', '.join(there)}")
        if field.dataType != there[field.name]:
            wanted, found = field.dataType.simpleString(), there[field.name].simpleString()
            raise SourceError(f"column {field.name} of {table.name} is {found}, not {wanted}")


def arrow_schema(schema: StructType) -> pa.Schema:
    """The same columns for Arrow, as Spark wants to get them."""
    return pa.schema(
        [pa.field(field.name, _ARROW[field.dataType.simpleString()], field.nullable) for field in schema.fields]
    )


def _kind(column: Column[object]) -> Kind:
    for type_, kind in (
        (BigInteger, Kind.LONG),
        (Integer, Kind.INTEGER),
        (Boolean, Kind.BOOLEAN),
        (DateTime, Kind.TIME),
        (LargeBinary, Kind.BYTES),
        (Uuid, Kind.UUID),
        (Text, Kind.TEXT),
        (tables.Xid8, Kind.XID8),
    ):
        if isinstance(column.type, type_):
            return kind
    raise TypeError(f"column {column} has a type that the pipeline does not read")


def _readable(table: Table) -> Readable:
    return Readable(table.name, {column.name: _kind(column) for column in table.columns})


TABLES: Final = {
    table.name: _readable(table) for table in (tables.journal, tables.branch, tables.work, tables.heuristic_outcome)
}
"""What can be read, by name."""


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


def parse_filters(text: str | None) -> tuple[Filter, ...]:
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
        if not isinstance(value, list) or not 1 <= len(value) <= _MOST_VALUES:
            raise SourceError(f"filter {name} {operator}: a list of 1 to {_MOST_VALUES:,} values is wanted")
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
            return _time_literal(value)
        case _:
            return None


def _bytes(text: str) -> str | None:
    try:
        return f"'\\x{bytes.fromhex(text).hex()}'::bytea"
    except ValueError:
        return None


def _time_literal(text: str) -> str | None:
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
