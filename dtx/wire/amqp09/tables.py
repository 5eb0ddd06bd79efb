"""Field tables (AMQP 0-9-1, 4.2.5.5): the start and end of each entry, checked to the last byte.

The type letters are those that brokers use. They differ from the grammar of the standard (``s`` is a 16 bit integer,
``l`` is signed). Values are not decoded, so that unchanged entries are passed on as they came.
"""

import re
import struct
from math import isfinite
from typing import Final, NamedTuple

from dtx.wire.amqp09.errors import syntax_error

MAX_DEPTH: Final = 64
"""The maximum depth of nested tables and arrays. It is far below the recursion limit of the interpreter."""
MAX_ENTRIES: Final = 4_096
"""The maximum number of entries of a table or values of an array. As many values may be nested in them.

A value may take only one byte. A walk over this number of values blocks all clients for about 5 ms, and a message needs
several walks.
"""
MAX_SHORT: Final = 255
"""The maximum size of a short string in bytes: its length is one byte."""

_LONG: Final = struct.Struct(">I")
_FIXED: Final = {
    ord(letter): size
    for letters, size in (("V", 0), ("tbB", 1), ("suU", 2), ("Iif", 4), ("D", 5), ("lLdT", 8))
    for letter in letters
}
_STRING: Final = frozenset(b"Sx")
_TABLE: Final = ord("F")
_NESTING: Final = frozenset(b"FA")
_FLOATS: Final = {ord("d"): struct.Struct(">d"), ord("f"): struct.Struct(">f")}
_UNREADABLE: Final = re.compile(rb"U|d[\x7f\xff][\xf0-\xff]|f[\x7f\xff][\x80-\xff]")
"""Type letter and first bytes of values that RabbitMQ cannot read. Strings may contain them, too."""


class Entry(NamedTuple):
    """One entry of a table.

    Args:
        key: the name.
        kind: the type letter, for example ``b"S"``.
        value: the bytes of the value. For S, x, F and A the length before them is left out.
        raw: the whole entry: name, letter and value as they came.
    """

    key: bytes
    kind: bytes
    value: bytes
    raw: bytes


def _measure(data: bytes, position: int, end: int) -> tuple[int, int]:
    """Return the start (after its length, if any) and the end of the value whose type letter is at *position*."""
    kind = data[position]
    position += 1
    size = _FIXED.get(kind)
    if size is None:
        if end - position < 4:
            raise syntax_error("field table value is truncated")
        (size,) = _LONG.unpack_from(data, position)
        position += 4
    stop: int = position + size
    if stop > end:
        raise syntax_error("field table value is truncated")
    return position, stop


def _skip(data: bytes, position: int, end: int, depth: int, left: list[int]) -> int:
    """Return the end of the value whose type letter is at *position*. Check its nested values: *left* at most."""
    kind = data[position]
    position, stop = _measure(data, position, end)
    if kind in _FIXED or kind in _STRING:
        return stop
    if kind not in _NESTING:
        raise syntax_error(f"field table value of unknown type {kind:#04x}")
    if depth >= MAX_DEPTH:
        raise syntax_error(f"field table is nested deeper than {MAX_DEPTH}")
    while position < stop:
        left[0] -= 1
        if left[0] < 0:
            raise syntax_error(f"field table has more than {MAX_ENTRIES} nested values")
        if kind == _TABLE:
            position = _skip_key(data, position, stop)
        position = _skip(data, position, stop, depth + 1, left)
    return stop


def _skip_key(data: bytes, position: int, end: int) -> int:
    """Return the end of the name at *position*. At least a type letter must follow."""
    position += 1 + data[position]
    if position >= end:
        raise syntax_error("field table name is truncated")
    return position


def entries(data: bytes) -> list[Entry]:
    """Return the entries of a table in their order, repeated names included.

    Args:
        data: the table after its length.

    Raises:
        WireError: 502 if the table is malformed or exceeds :data:`MAX_DEPTH` or :data:`MAX_ENTRIES`.
    """
    found: list[Entry] = []
    position, end = 0, len(data)
    left = [MAX_ENTRIES]
    while position < end:
        start = position
        letter = _skip_key(data, position, end)
        position = _skip(data, letter, end, 0, left)
        value = letter + (1 if data[letter] in _FIXED else 5)
        found.append(
            Entry(data[start + 1 : letter], data[letter : letter + 1], data[value:position], data[start:position])
        )
        if len(found) > MAX_ENTRIES:
            raise syntax_error(f"field table has more than {MAX_ENTRIES} entries")
    return found


def has(data: bytes, key: bytes) -> bool:
    """Return whether a table has an entry named *key*. The function does not check nested values.

    Args:
        data: the table after its length.
        key: the name.

    Raises:
        WireError: 502 if the table is malformed before that entry.
    """
    position, end = 0, len(data)
    while position < end:
        letter = _skip_key(data, position, end)
        if data[position + 1 : letter] == key:
            return True
        _, position = _measure(data, letter, end)
    return False


def is_readable(data: bytes) -> bool:
    """Whether RabbitMQ can read a table: it ends the connection for NaN, infinite numbers and the type letter U.

    Raises:
        WireError: 502 if the table contains such bytes and is malformed or exceeds a limit of :func:`entries`.
    """
    if _UNREADABLE.search(data) is None:
        return True
    entries(data)
    position, nested = 0, [(_TABLE, len(data))]
    while nested:
        within, end = nested[-1]
        if position == end:
            nested.pop()
            continue
        if within == _TABLE:
            position = _skip_key(data, position, end)
        kind = data[position]
        position, stop = _measure(data, position, end)
        if kind in _NESTING:
            nested.append((kind, stop))
            continue
        if kind == ord("U") or (kind in _FLOATS and not isfinite(*_FLOATS[kind].unpack_from(data, position))):
            return False
        position = stop
    return True


def items(data: bytes) -> list[Entry]:
    """Return the values of an array in their order. Their names are empty, and *raw* is type letter and value.

    Args:
        data: the array after its length.

    Raises:
        WireError: 502 if the array is malformed or exceeds :data:`MAX_DEPTH` or :data:`MAX_ENTRIES`.
    """
    found: list[Entry] = []
    letter, end = 0, len(data)
    left = [MAX_ENTRIES]
    while letter < end:
        position = _skip(data, letter, end, 0, left)
        value = letter + (1 if data[letter] in _FIXED else 5)
        found.append(Entry(b"", data[letter : letter + 1], data[value:position], data[letter:position]))
        if len(found) > MAX_ENTRIES:
            raise syntax_error(f"field array has more than {MAX_ENTRIES} values")
        letter = position
    return found


def short_string(data: bytes, position: int) -> tuple[bytes, int]:
    """Return the shortstr at *position* and the position of its end.

    Raises:
        WireError: 502 if it is truncated.
    """
    if position >= len(data):
        raise syntax_error("short string is truncated")
    stop = position + 1 + data[position]
    if stop > len(data):
        raise syntax_error("short string is truncated")
    return data[position + 1 : stop], stop


def put_long(value: bytes) -> bytes:
    """Encode a longstr, or a table from its entries: the length, then *value*."""
    return _LONG.pack(len(value)) + value


def put_short(value: bytes) -> bytes:
    """Encode *value* as a shortstr.

    Raises:
        WireError: 502 if *value* is longer than 255 bytes.
    """
    if len(value) > MAX_SHORT:
        raise syntax_error(f"short string of {len(value)} bytes")
    return bytes((len(value),)) + value


def entry(key: bytes, kind: bytes, value: bytes) -> bytes:
    """Encode a whole entry; *value* as in :class:`Entry`. Raise WireError 502 for a *key* of more than 255 bytes."""
    return put_short(key) + kind + (value if kind[0] in _FIXED else put_long(value))
