"""Message properties as plain values for people and JSON. Properties that cannot be decoded are shown as hex."""

import math
import struct
from collections.abc import Callable, Iterator
from typing import Final

from dtx.admin.safe_text import iso_time, name_text, preview
from dtx.wire.amqp09 import properties, tables
from dtx.wire.amqp09.errors import WireError
from dtx.wire.amqp09.properties import Property

_NUMBERS: Final = (Property.DELIVERY_MODE, Property.PRIORITY)


def _integer(form: str) -> Callable[[bytes], object]:
    return lambda value: struct.unpack(form, value)[0]


def _real(form: str) -> Callable[[bytes], object]:
    def decode(value: bytes) -> object:
        (number,) = struct.unpack(form, value)
        # JSON has no NaN and no infinity.
        return number if math.isfinite(number) else str(number)

    return decode


def _decimal(value: bytes) -> object:
    scale, digits = struct.unpack(">Bi", value)
    return f"{digits}e-{scale}" if scale else str(digits)


def _time(value: bytes) -> object:
    seconds = int.from_bytes(value, "big")
    try:
        return iso_time(seconds)
    except (ValueError, OverflowError, OSError):
        return seconds


def decode_properties(raw: bytes) -> dict[str, object]:
    """The properties that are set, by name; malformed properties as ``{"undecodable": preview}``. Never raises."""
    try:
        found = properties.read(raw)
        return {
            which.name.lower(): _property(which, found.value(which) or b"")
            for which in Property
            if which in found.spans
        }
    except WireError:
        return {"undecodable": preview(raw)}


def _property(which: Property, value: bytes) -> object:
    if which in _NUMBERS:
        return value[0]
    if which is Property.TIMESTAMP:
        return _time(value)
    return _table(value) if which is Property.HEADERS else name_text(value)


def _table(data: bytes) -> dict[str, object]:
    return {name_text(entry.key): _DECODERS[entry.kind](entry.value) for entry in tables.entries(data)}


def _array(data: bytes) -> Iterator[object]:
    """The elements of an array that :func:`tables.entries` has checked completely."""
    position = 0
    while position < len(data):
        kind = data[position : position + 1]
        position += 1
        size = _FIXED.get(kind)
        if size is None:
            size = int.from_bytes(data[position : position + 4], "big")
            position += 4
        yield _DECODERS[kind](data[position : position + size])
        position += size


_FIXED: Final = {
    letter.encode(): size
    for letters, size in (("V", 0), ("tbB", 1), ("suU", 2), ("Iif", 4), ("D", 5), ("lLdT", 8))
    for letter in letters
}
_DECODERS: Final[dict[bytes, Callable[[bytes], object]]] = {
    b"V": lambda _: None,
    b"t": lambda value: value != b"\0",
    b"b": _integer(">b"),
    b"B": _integer(">B"),
    b"s": _integer(">h"),
    b"U": _integer(">h"),
    b"u": _integer(">H"),
    b"I": _integer(">i"),
    b"i": _integer(">I"),
    b"l": _integer(">q"),
    b"L": _integer(">q"),
    b"f": _real(">f"),
    b"d": _real(">d"),
    b"D": _decimal,
    b"T": _time,
    b"S": name_text,
    b"x": name_text,
    b"F": _table,
    b"A": lambda value: list(_array(value)),
}
