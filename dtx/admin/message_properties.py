"""Message properties and field tables as plain values: for people, and as in the JSON of RabbitMQ's management API.

Properties that cannot be decoded are shown to people as hex.
"""

import math
import reprlib
import struct
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, Final

from dtx.admin.safe_text import cut, exact_name, iso_time, name_text, preview
from dtx.wire.amqp09 import properties, tables
from dtx.wire.amqp09.errors import WireError, syntax_error
from dtx.wire.amqp09.properties import Property

MOST_FLAT: Final = 200
"""Pairs of :func:`flat`."""
_MOST_CHARACTERS: Final = 1000
"""Characters of a name or value in a pair."""
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


_FIXED: Final = {
    letter.encode(): size
    for letters, size in (("V", 0), ("tbB", 1), ("suU", 2), ("Iif", 4), ("D", 5), ("lLdT", 8))
    for letter in letters
}
_PLAIN: Final[dict[bytes, Callable[[bytes], object]]] = {
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
}


class _Decoder:
    """Decodes properties and tables.

    Args:
        text: for texts.
        time: for times.
    """

    def __init__(self, text: Callable[[bytes], str], time: Callable[[bytes], object]) -> None:
        self._text = text
        self._time = time
        self._values: dict[bytes, Callable[[bytes], object]] = {
            **_PLAIN,
            b"T": time,
            b"S": text,
            b"x": text,
            b"F": self.table,
            b"A": lambda value: list(self._array(value)),
        }

    def properties(self, raw: bytes) -> dict[str, object]:
        """The properties that are set, by name. Raises WireError 502 if they are malformed."""
        found = properties.read(raw)
        return {
            which.name.lower(): self._property(which, found.value(which) or b"")
            for which in Property
            if which in found.spans
        }

    def _property(self, which: Property, value: bytes) -> object:
        if which in _NUMBERS:
            return value[0]
        if which is Property.TIMESTAMP:
            return self._time(value)
        return self.table(value) if which is Property.HEADERS else self._text(value)

    def table(self, data: bytes) -> dict[str, object]:
        """The entries of a table. Raises WireError 502 if it is malformed."""
        return {self._text(entry.key): self._values[entry.kind](entry.value) for entry in tables.entries(data)}

    def _array(self, data: bytes) -> Iterator[object]:
        """The elements of an array that :func:`tables.entries` has checked completely."""
        position = 0
        while position < len(data):
            kind = data[position : position + 1]
            position += 1
            size = _FIXED.get(kind)
            if size is None:
                size = int.from_bytes(data[position : position + 4], "big")
                position += 4
            yield self._values[kind](data[position : position + size])
            position += size


_PEOPLE: Final = _Decoder(name_text, _time)
_JSON: Final = _Decoder(exact_name, lambda value: int.from_bytes(value, "big"))
properties_to_json: Final = _JSON.properties
table_to_json: Final = _JSON.table


def decode_properties(raw: bytes) -> dict[str, object]:
    """The properties that are set, by name; malformed properties as ``{"undecodable": preview}``. Never raises."""
    try:
        return _PEOPLE.properties(raw)
    except WireError:
        return {"undecodable": preview(raw)}


def flat(values: Mapping[str, object], most: int = MOST_FLAT, longest: int = _MOST_CHARACTERS) -> list[tuple[str, str]]:
    """Properties or arguments for people, as pairs of name and value. Names within tables have their path before them.

    Args:
        values: from a decoder of this module.
        most: pairs at most; a last one reports that there are more.
        longest: characters at which a name or value is cut.
    """
    found = [(cut(name, longest), cut(value, longest)) for name, value in islice(_pairs("", values), most + 1)]
    return found if len(found) <= most else [*found[:most], ("…", "there are more: the API has all")]


def _pairs(name: str, value: object) -> Iterator[tuple[str, str]]:
    match value:
        case Mapping():
            for key, inner in value.items():
                yield from _pairs(f"{name}.{key}" if name else key, inner)
        case list():
            for index, inner in enumerate(value):
                yield from _pairs(f"{name}[{index}]", inner)
        case _:
            yield name, str(value)


def table_from_json(values: Mapping[str, Any]) -> bytes:
    """A table without its length, with the types that RabbitMQ's management API chooses.

    Raises:
        WireError: 502 if a name is too long, a number does not fit 64 bits, or the table exceeds
            :data:`~dtx.wire.amqp09.tables.MAX_DEPTH` or, nested values included,
            :data:`~dtx.wire.amqp09.tables.MAX_ENTRIES`.
    """
    level: list[Any] = [values]
    count = depth = 0
    while level:
        count += sum(map(len, level))
        if depth > tables.MAX_DEPTH or count > tables.MAX_ENTRIES:
            raise syntax_error(f"field table has over {tables.MAX_ENTRIES} values or {tables.MAX_DEPTH} levels")
        inner = chain.from_iterable(each if isinstance(each, list) else each.values() for each in level)
        level = [each for each in inner if isinstance(each, dict | list)]
        depth += 1
    return _table(values)


def _table(values: Mapping[str, Any]) -> bytes:
    return b"".join(tables.entry(name.encode("utf-8", "replace"), *_encoded(value)) for name, value in values.items())


def _encoded(value: object) -> tuple[bytes, bytes]:
    """Type letter and value."""
    match value:
        case None:
            return b"V", b""
        case bool():
            return b"t", bytes([value])
        case int() if -(1 << 63) <= value < 1 << 63:
            return b"l", struct.pack(">q", value)
        case float():
            return b"d", struct.pack(">d", value)
        case str():
            return b"S", value.encode("utf-8", "replace")
        case dict():
            return b"F", _table(value)
        case list():
            return b"A", b"".join(_element(*_encoded(each)) for each in value)
        case _:
            raise syntax_error(f"{reprlib.repr(value):.50} does not fit a field table")


def _element(kind: bytes, value: bytes) -> bytes:
    return kind + (value if kind in _FIXED else tables.put_long(value))


def properties_from_json(values: Mapping[str, Any]) -> bytes:
    """Raw properties. Unknown names are ignored, as in RabbitMQ.

    Raises:
        WireError: 502 if a value does not fit its property.
    """
    return properties.build(
        {
            which: _property_value(which, values[which.name.lower()])
            for which in Property
            if which.name.lower() in values
        }
    )


def _property_value(which: Property, value: object) -> bytes:
    size = 8 if which is Property.TIMESTAMP else 1
    match value:
        case dict() if which is Property.HEADERS:
            return table_from_json(value)
        case int() if which in (*_NUMBERS, Property.TIMESTAMP) and 0 <= value < 1 << 8 * size:
            return value.to_bytes(size, "big")
        case str() if which not in (*_NUMBERS, Property.TIMESTAMP, Property.HEADERS):
            return value.encode("utf-8", "replace")
        case _:
            raise syntax_error(f"{reprlib.repr(value):.50} does not fit the property {which.name.lower()}")
