"""Columns of tables, and encoders of their values as parameters of set-based statements.

A group of writes becomes one binary array for each column, which the statement expands with ``unnest``. psycopg's
adapters take three times as long. For the 80 cells of a branch, this is half of the log's time for that branch.

Format of an array: header (dimensions, has-null flag, element type, length, lower bound), then each element as length
and bytes, length -1 for null.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, repeat
from operator import attrgetter
from struct import Struct
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    Uuid,
    text,
)

SCHEMA: Final = "dtx"
metadata: Final = MetaData(schema=SCHEMA)


def word(name: str, *, nullable: bool = False) -> Column[str]:
    """A text column for identifiers. Byte order makes index comparisons cheap, which every write needs."""
    return Column(name, Text(collation="C"), nullable=nullable)


def prose(name: str, *, nullable: bool = False, comment: str | None = None) -> Column[str]:
    """A column for texts that people read."""
    return Column(name, Text, nullable=nullable, comment=comment)


def octets(name: str, *, nullable: bool = False) -> Column[bytes]:
    """A ``bytea`` column: names, keys, properties and bodies are bytes on the wire."""
    return Column(name, LargeBinary, nullable=nullable)


def moment(name: str, *, nullable: bool = False, now: bool = False) -> Column[object]:
    """A ``timestamptz`` column; with *now* the database's time is the default."""
    return Column(name, DateTime(timezone=True), nullable=nullable, server_default=text("now()") if now else None)


def one_of(column: str, words: Iterable[StrEnum]) -> str:
    """The SQL condition that *column* has one of *words*."""
    return f"{column} IN ({', '.join(repr(str(word)) for word in words)})"


_HEADER: Final = Struct(">iiIii")
_LENGTH: Final = Struct(">i").pack
_NULL: Final = _LENGTH(-1)
_ONE_INT4: Final = Struct(">i").pack
_ONE_INT8: Final = Struct(">q").pack
_UUID_LENGTH: Final = _LENGTH(16)
_INT4: Final = Struct(">ii").pack
_INT8: Final = Struct(">iq").pack
_TRUE: Final = _LENGTH(1) + b"\x01"
_FALSE: Final = _LENGTH(1) + b"\x00"
_EPOCH: Final = 946_684_800_000_000
"""2000-01-01 in microseconds since 1970: the zero of PostgreSQL's timestamps."""


def seconds_of(data: bytes) -> float:
    """A binary ``timestamptz`` as seconds since 1970: the nearest float, so that a stored value is read back equal."""
    return seconds_from(int.from_bytes(data, signed=True))


def seconds_from(number: int) -> float:
    """As :func:`seconds_of`, from PostgreSQL's number: microseconds since 2000."""
    return (number + _EPOCH) / 1_000_000


def int8(value: int) -> bytes:
    """One ``bigint`` parameter."""
    return value.to_bytes(8, signed=True)


@dataclass(frozen=True, slots=True, eq=False)
class Encoder:
    """Encodes values as parameters.

    Args:
        type: SQL type of one value.
        array: encodes the values of a column as one parameter.
        cell: encodes one value as a parameter; ``None`` is null.
    """

    type: str
    array: Callable[[Sequence[Any]], bytes]
    cell: Callable[[Any], bytes | None]


def _array(oid: int, count: int, cells: Iterable[bytes]) -> bytes:
    return _HEADER.pack(1, 0, oid, count, 1) + b"".join(cells)


def _texts(values: Sequence[str]) -> bytes:
    if len(values) > 1 and values.count(values[0]) == len(values):  # vhosts, owners and states are nearly always equal
        data = values[0].encode()
        return _array(25, len(values), (_LENGTH(len(data)) + data,) * len(values))
    return _array(25, len(values), [_LENGTH(len(data := value.encode())) + data for value in values])


def _optional_texts(values: Sequence[str | None]) -> bytes:
    return _array(
        25, len(values), [_NULL if value is None else _LENGTH(len(data := _prose(value))) + data for value in values]
    )


def _prose(value: str) -> bytes:
    return value.replace("\0", "\\x00").encode("utf-8", "backslashreplace")


def _optional_bytes(values: Sequence[bytes | None]) -> bytes:
    return _array(17, len(values), [_NULL if value is None else _LENGTH(len(value)) + value for value in values])


def _optional_int4s(values: Sequence[int | None]) -> bytes:
    return _array(23, len(values), [_NULL if value is None else _INT4(4, value) for value in values])


def _times(values: Sequence[float | None]) -> bytes:
    return _array(
        1184,
        len(values),
        [_NULL if value is None else _INT8(8, round(value * 1_000_000) - _EPOCH) for value in values],
    )


def _lengths(values: Sequence[bytes]) -> Iterable[bytes]:
    return map(_LENGTH, map(len, values))


def _same(value: bytes) -> bytes:
    return value


uuids: Final = Encoder(
    "uuid",
    lambda values: _array(2950, len(values), [_UUID_LENGTH + value.int.to_bytes(16) for value in values]),
    attrgetter("bytes"),
)
raw_uuids: Final = Encoder("uuid", lambda values: _array(2950, len(values), map(_UUID_LENGTH.__add__, values)), _same)
"""Values of 16 bytes each."""
texts: Final = Encoder("text", _texts, str.encode)
"""Identifiers: a value that is not UTF-8, or contains NUL, raises an error here or in PostgreSQL."""
optional_texts: Final = Encoder("text", _optional_texts, lambda value: None if value is None else _prose(value))
"""Texts from any source, for people: characters that PostgreSQL cannot store are escaped."""
bytes_: Final = Encoder(
    "bytea",
    # one join: bodies are copied once
    lambda values: _array(17, len(values), chain.from_iterable(zip(_lengths(values), values, strict=True))),
    _same,
)
optional_bytes: Final = Encoder("bytea", _optional_bytes, _same)
int4s: Final = Encoder("integer", lambda values: _array(23, len(values), map(_INT4, repeat(4), values)), _ONE_INT4)
optional_int4s: Final = Encoder("integer", _optional_int4s, lambda value: None if value is None else _ONE_INT4(value))
int8s: Final = Encoder("bigint", lambda values: _array(20, len(values), map(_INT8, repeat(8), values)), _ONE_INT8)
booleans: Final = Encoder(
    "boolean",
    lambda values: _array(16, len(values), map((_FALSE, _TRUE).__getitem__, values)),
    (b"\x00", b"\x01").__getitem__,
)
times: Final = Encoder(
    "timestamptz", _times, lambda value: None if value is None else _ONE_INT8(round(value * 1_000_000) - _EPOCH)
)
"""Seconds since 1970."""


class Field(NamedTuple):
    """A column that a statement writes or compares.

    Args:
        name: of the column.
        attribute: of the record that has the value; empty if the value has another source.
        encoder: of its values.
    """

    name: str
    attribute: str
    encoder: Encoder


_ENCODERS: Final[Mapping[tuple[type, bool], Encoder]] = {
    (Uuid, False): uuids,
    (Text, False): texts,
    (Text, True): optional_texts,
    (LargeBinary, False): bytes_,
    (LargeBinary, True): optional_bytes,
    (Integer, False): int4s,
    (Integer, True): optional_int4s,
    (BigInteger, False): int8s,
    (Boolean, False): booleans,
    (DateTime, False): times,
    (DateTime, True): times,
}
"""By type, and whether the column is nullable or has texts for people."""


def fields_of(
    table: Table,
    *,
    without: Collection[str] = (),
    attributes: Mapping[str, str] = MappingProxyType({}),
    encoders: Mapping[str, Encoder] = MappingProxyType({}),
) -> tuple[Field, ...]:
    """The columns of *table* in their order, without the name of the resource manager.

    Args:
        table: the table.
        without: names of columns to leave out.
        attributes: by column, attributes of records whose name differs from that of the column.
        encoders: by column, encoders that are not those of the column's type.
    """

    def encoder(column: Column[Any]) -> Encoder:
        loose = bool(column.nullable) or (isinstance(column.type, Text) and column.type.collation is None)
        return encoders.get(column.name) or _ENCODERS[type(column.type), loose]

    # SQLAlchemy's names are a subclass of str, which makes attribute access half as fast
    named = [(str(column.name), column) for column in table.c if column.name not in {"rm", *without}]
    return tuple(Field(name, attributes.get(name, name), encoder(column)) for name, column in named)


def values_of(fields: Sequence[Field]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that returns the values of *fields* of a record."""
    return attrgetter(*(field.attribute for field in fields))
