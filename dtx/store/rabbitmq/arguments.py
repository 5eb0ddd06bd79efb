"""Arguments of exchanges and bindings, from the field tables of clients and from the JSON of the management API.

JSON loses the widths of numbers. Bytes that are not UTF-8 come as base64 behind a fixed text. So both are converted to
one form and compared by value.
"""

import base64
import struct
from binascii import Error as Base64Error
from typing import Any, Final

from dtx.store.postgres.arguments import value
from dtx.wire.amqp09 import tables
from dtx.wire.amqp09.tables import Entry

Plain = tuple[str, object]
"""A value with its class, so that no boolean equals a number."""

_NOT_UTF_8: Final = "Not UTF-8, base64 is: "
_LONGEST: Final = 1 << 63
_VOID: Final = b"undefined"
"""A void in the API."""


def octets(text: str) -> bytes:
    """The bytes that a string of the API stands for."""
    if text.startswith(_NOT_UTF_8):
        try:
            return base64.b64decode(text.removeprefix(_NOT_UTF_8), validate=True)
        except (Base64Error, ValueError):
            pass  # a text of a client that begins like that
    return text.encode()


def from_table(table: bytes) -> dict[bytes, Plain]:
    """The values of a field table; the first value of a repeated name counts.

    Raises:
        WireError: 502, it is malformed.
    """
    found: dict[bytes, Plain] = {}
    for entry in tables.entries(table):
        found.setdefault(entry.key, _from_entry(entry))
    return found


def _from_entry(entry: Entry) -> Plain:
    match entry.kind:
        case b"t":
            return "boolean", entry.value != b"\x00"
        case b"F":
            return "table", from_table(entry.value)
        case b"A":
            return "array", [_from_entry(item) for item in tables.items(entry.value)]
        case b"V":
            return "octets", _VOID
        case _:
            found = value(entry)
            if isinstance(found, tuple):
                return "other", found
            return ("octets" if isinstance(found, bytes) else "number"), found


def from_json(found: dict[str, Any]) -> dict[bytes, Plain]:
    """The values of an object of the API."""
    return {octets(key): _from_value(item) for key, item in found.items()}


def _from_value(found: Any) -> Plain:
    if isinstance(found, bool):
        return "boolean", found
    if isinstance(found, int | float):
        return "number", found
    if isinstance(found, dict):
        return "table", from_json(found)
    if isinstance(found, list):
        return "array", [_from_value(item) for item in found]
    return "octets", _VOID if found is None else octets(str(found))


def to_table(found: dict[str, Any]) -> bytes:
    """An object of the API as a field table, without its length; whole numbers have 64 bits.

    Raises:
        WireError: a name is longer than a table allows.
    """
    return b"".join(tables.entry(octets(key), *_to_entry(item)) for key, item in found.items())


def _to_entry(found: Any) -> tuple[bytes, bytes]:
    if isinstance(found, bool):
        return b"t", bytes((found,))
    if isinstance(found, int) and -_LONGEST <= found < _LONGEST:
        return b"l", struct.pack(">q", found)
    if isinstance(found, int | float):
        return b"d", struct.pack(">d", found)
    if isinstance(found, dict):
        return b"F", to_table(found)
    if isinstance(found, list):
        # Values of an array are entries without names.
        return b"A", b"".join(tables.entry(b"", *_to_entry(item))[1:] for item in found)
    if found is None:
        return b"V", b""
    return b"S", octets(str(found))
