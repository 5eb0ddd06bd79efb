"""Field tables without decoding them: where each entry starts and ends, checked to the last octet.

AMQP 0-9-1, 4.2.5.5; the type letters are those that brokers really use, which differ from the grammar of the standard
(``s`` is a 16 bit integer, ``l`` is signed). Values stay raw: whatever is not changed is passed on as it came.
"""

import struct
from typing import Final, NamedTuple

from dtx.wire.amqp09.errors import syntax_error

MAX_DEPTH: Final = 64
"""Tables and arrays within each other; deeper than any program needs, far from the interpreter's own limit."""
MAX_ENTRIES: Final = 4_096
"""Entries of one table, or values of an array; as many may be nested in it. A walk takes some 5 ms, in which all
clients wait, and a message needs several: one byte may be a value.
"""
MAX_SHORT: Final = 255
"""Octets of a short string: its length is one octet."""

_LONG: Final = struct.Struct(">I")
_FIXED: Final = {
    ord(letter): size
    for letters, size in (("V", 0), ("tbB", 1), ("suU", 2), ("Iif", 4), ("D", 5), ("lLdT", 8))
    for letter in letters
}
_STRING: Final = frozenset(b"Sx")
_TABLE: Final = ord("F")
_NESTING: Final = frozenset(b"FA")


class Entry(NamedTuple):
    """One entry of a table.

    Args:
        key: the name.
        kind: the type letter, for example ``b"S"``.
        value: the value: for S, x, F and A what comes after its length, for all others the octets themselves.
        raw: the whole entry: name, letter and value as they came.
    """

    key: bytes
    kind: bytes
    value: bytes
    raw: bytes


def _measure(data: bytes, position: int, end: int) -> tuple[int, int]:
    """Where the value after the type letter at *position* starts and ends, its length not counted."""
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
    """Where the value after the type letter at *position* ends; checks what is nested in it: *left* values at most."""
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
    """Where the name at *position* ends; at least the type letter comes after it."""
    position += 1 + data[position]
    if position >= end:
        raise syntax_error("field table name is truncated")
    return position


def entries(data: bytes) -> list[Entry]:
    """The entries of a table, in their order, repeated names included.

    Args:
        data: the table after its length.

    Raises:
        WireError: 502 when it is malformed, nested deeper than :data:`MAX_DEPTH`, longer than :data:`MAX_ENTRIES`, or
            has more than that nested in it.
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
    """Whether a table has an entry of that name. Values are measured only: what is nested in them may be anything.

    Args:
        data: the table after its length.
        key: the name.

    Raises:
        WireError: 502 when it is malformed.
    """
    position, end = 0, len(data)
    while position < end:
        letter = _skip_key(data, position, end)
        if data[position + 1 : letter] == key:
            return True
        _, position = _measure(data, letter, end)
    return False


def items(data: bytes) -> list[Entry]:
    """The values of an array, in their order; their names are empty, and *raw* is type letter and value.

    Args:
        data: the array after its length.

    Raises:
        WireError: 502 when it is malformed, nested deeper than :data:`MAX_DEPTH`, longer than :data:`MAX_ENTRIES`, or
            has more than that nested in it.
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
    """The shortstr at *position*, and where it ends.

    Raises:
        WireError: 502 when it is truncated.
    """
    if position >= len(data):
        raise syntax_error("short string is truncated")
    stop = position + 1 + data[position]
    if stop > len(data):
        raise syntax_error("short string is truncated")
    return data[position + 1 : stop], stop


def put_long(value: bytes) -> bytes:
    """*value* as a longstr; also the length of a table before its entries."""
    return _LONG.pack(len(value)) + value


def put_short(value: bytes) -> bytes:
    """*value* as a shortstr.

    Raises:
        WireError: 502 when it is longer than 255 octets.
    """
    if len(value) > MAX_SHORT:
        raise syntax_error(f"short string of {len(value)} octets")
    return bytes((len(value),)) + value


def entry(key: bytes, kind: bytes, value: bytes) -> bytes:
    """A whole entry; *value* as in :class:`Entry`."""
    return put_short(key) + kind + (value if kind[0] in _FIXED else put_long(value))
