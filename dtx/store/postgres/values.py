"""Values of field tables, as RabbitMQ compares them: by value, whatever the width of their type.

A table stays octets (see :mod:`dtx.wire.amqp09.tables`); here is what topology and routing ask of one.
"""

import struct
from typing import Final

from dtx.wire.amqp09 import tables
from dtx.wire.amqp09.tables import Entry

Value = int | float | bytes | tuple[bytes, bytes]
"""A number, octets, or (for what equals nothing of another type) the type letter with the octets."""

_NUMBERS: Final = {
    letter: struct.Struct(f">{code}")
    for letter, code in (
        (b"b", "b"),
        (b"B", "B"),
        (b"s", "h"),
        (b"U", "h"),
        (b"u", "H"),
        (b"I", "i"),
        (b"i", "I"),
        (b"l", "q"),
        (b"L", "q"),
        (b"T", "Q"),
        (b"f", "f"),
        (b"d", "d"),
    )
}
_INTEGERS: Final = frozenset((b"b", b"B", b"s", b"U", b"u", b"I", b"i", b"l", b"L"))
_STRINGS: Final = frozenset((b"S", b"x"))
_NAMES: Final = {
    b"b": "byte",
    b"B": "unsignedbyte",
    b"s": "short",
    b"U": "short",
    b"u": "unsignedshort",
    b"I": "signedint",
    b"i": "unsignedint",
    b"l": "long",
    b"L": "long",
    b"T": "timestamp",
    b"f": "float",
    b"d": "double",
    b"D": "decimal",
    b"S": "longstr",
    b"x": "binary",
    b"t": "bool",
    b"F": "table",
    b"A": "array",
    b"V": "void",
}


def value(entry: Entry) -> Value:
    """What *entry* holds: equal for 1 as octet and 1 as 64 bit number, never for a number and a boolean."""
    number = _NUMBERS.get(entry.kind)
    if number is not None:
        (found,) = number.unpack(entry.value)
        return float(found) if isinstance(found, float) else int(found)
    if entry.kind in _STRINGS:
        return entry.value
    return entry.kind, entry.value


def integer(entry: Entry) -> int | None:
    """The number in *entry*, or ``None`` when it holds something else (a time is no number, nor is a boolean)."""
    found = value(entry) if entry.kind in _INTEGERS else None
    return found if isinstance(found, int) else None


def kind_name(entry: Entry) -> str:
    """The type's name in RabbitMQ's texts, for example ``longstr``."""
    return _NAMES[entry.kind]


def text(name: bytes) -> str:
    """A name for people; what is no UTF-8 is replaced."""
    return name.decode("utf-8", "replace")


def show(entry: Entry) -> str:
    """The value as RabbitMQ's texts write it."""
    found = value(entry)
    if isinstance(found, bytes):
        return text(found)
    if isinstance(found, tuple):
        return str(found[1] != b"\x00").lower() if entry.kind == b"t" else kind_name(entry)
    return str(found)


def same(one: Entry, other: Entry) -> bool:
    """Whether two arguments are equivalent: types of one class (all integers are), and equal values."""
    if value(one) != value(other):
        return False
    return one.kind == other.kind or {one.kind, other.kind} <= _INTEGERS or {one.kind, other.kind} == {b"f", b"d"}


def first_of_each(table: bytes) -> dict[bytes, Entry]:
    """The entries by name; of a repeated name the first counts. Raises WireError 502 when *table* is malformed."""
    found: dict[bytes, Entry] = {}
    for entry in tables.entries(table):
        found.setdefault(entry.key, entry)
    return found


def in_order(table: bytes) -> bytes:
    """*table* sorted by name, so that equal bindings are equal octets. Raises WireError 502 when it is malformed."""
    if not table:
        return table
    return b"".join(entry.raw for entry in sorted(tables.entries(table), key=lambda entry: entry.key))
