"""Conversion of single values between AMQP 1.0 and the field tables of AMQP 0-9.

Types that both protocols have are kept. Other values get the nearest type that holds them, or are dropped (``None``).
"""

import struct
from collections.abc import Callable
from decimal import Decimal
from math import isfinite
from typing import Final
from uuid import UUID

from dtx.wire.amqp09 import tables
from dtx.wire.amqp09.tables import Entry
from dtx.wire.amqp10.values import (
    Byte,
    Char,
    Float,
    Int,
    Long,
    Short,
    Symbol,
    Timestamp,
    UByte,
    UInt,
    ULong,
    UShort,
    Value,
)

Field = tuple[bytes, bytes]
"""Type letter and encoded value, as in :class:`~dtx.wire.amqp09.tables.Entry`."""

_NUMBERS: Final[dict[type, tuple[bytes, struct.Struct]]] = {
    UByte: (b"B", struct.Struct(">B")),
    Byte: (b"b", struct.Struct(">b")),
    UShort: (b"u", struct.Struct(">H")),
    Short: (b"s", struct.Struct(">h")),
    UInt: (b"i", struct.Struct(">I")),
    Int: (b"I", struct.Struct(">i")),
    Long: (b"l", struct.Struct(">q")),
    int: (b"l", struct.Struct(">q")),
    Float: (b"f", struct.Struct(">f")),
    float: (b"d", struct.Struct(">d")),
}
_READ: Final[dict[bytes, tuple[type, struct.Struct]]] = {
    letter: (kind, layout) for kind, (letter, layout) in _NUMBERS.items() if kind is not int
} | {b"U": (Short, struct.Struct(">h")), b"L": (Long, struct.Struct(">q"))}
_MAX_LONG: Final = 2**63 - 1
_THOUSAND: Final = 1000
_MAX_SECONDS: Final = 253_402_300_799
"""The end of the year 9999: most readers of AMQP 0-9 cannot represent later times."""


def to_field(value: Value) -> Field | None:
    """Convert *value*, of AMQP 1.0, to a field.

    Returns:
        ``None`` for decimals, lists, maps, ulongs of 2**63 and more, and times before 1970 or after the year 9999. Also
        for floats that are not finite: for these RabbitMQ closes the whole connection (541).
    """
    kind = type(value)
    if isinstance(value, float) and not isfinite(value):
        return None
    if kind in _NUMBERS:
        letter, layout = _NUMBERS[kind]
        return letter, layout.pack(value)
    if isinstance(value, bool):
        return b"t", b"\x01" if value else b"\x00"
    if value is None:
        return b"V", b""
    if kind in (str, Symbol, Char):
        return b"S", str(value).encode()
    if kind is bytes:
        assert isinstance(value, bytes)
        return b"x", value
    if isinstance(value, UUID):
        return b"S", str(value).encode()
    if isinstance(value, ULong) and value <= _MAX_LONG:
        return b"l", int(value).to_bytes(8, "big")
    if isinstance(value, Timestamp) and 0 <= value <= _MAX_SECONDS * _THOUSAND:
        return b"T", (int(value) // _THOUSAND).to_bytes(8, "big")
    return None


def from_field(entry: Entry) -> Value:
    """Convert *entry*, of AMQP 0-9, to a value.

    Raises:
        WireError: 502, a table or array in it is malformed.
    """
    kind, octets = entry.kind, entry.value
    number = _READ.get(kind)
    if number is not None:
        made, layout = number
        found: Value = made(layout.unpack(octets)[0])
        return found
    return _OTHERS[kind](octets)


def _text(octets: bytes) -> Value:
    try:
        return octets.decode()
    except UnicodeDecodeError:
        return octets


def milliseconds(octets: bytes) -> Timestamp:
    """Convert a timestamp of AMQP 0-9, eight octets of seconds."""
    return Timestamp(min(int.from_bytes(octets, "big") * _THOUSAND, _MAX_LONG))


def _decimal(octets: bytes) -> Value:
    return str(Decimal(int.from_bytes(octets[1:], "big", signed=True)).scaleb(-octets[0]))


def _table(octets: bytes) -> Value:
    found: dict[Value, Value] = {}
    for entry in tables.entries(octets):
        found.setdefault(_text(entry.key), from_field(entry))
    return found


def _array(octets: bytes) -> Value:
    return [from_field(item) for item in tables.items(octets)]


_OTHERS: Final[dict[bytes, Callable[[bytes], Value]]] = {
    b"t": lambda octets: octets != b"\x00",
    b"S": _text,
    b"x": bytes,
    b"T": milliseconds,
    b"D": _decimal,
    b"V": lambda _: None,
    b"F": _table,
    b"A": _array,
}


def is_simple(entry: Entry) -> bool:
    """Whether the value may be an application property: "only simple types" (3.2.5)."""
    return entry.kind not in (b"F", b"A")
