"""AMQP values into octets, each in its shortest encoding (AMQP 1.0, 1.6)."""

from collections.abc import Callable
from enum import StrEnum
from struct import Struct, error
from types import NoneType
from typing import Any, Final
from uuid import UUID

from dtx.wire.amqp10.values import (
    Array,
    Byte,
    Char,
    Decimal32,
    Decimal64,
    Decimal128,
    Described,
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

Writer = Callable[[bytearray, Any], None]

_WIDE: Final = Struct(">BI")
_U4: Final = Struct(">I")
_COMPOUND: Final = Struct(">BII")
NULL: Final = 0x40


def encode(value: Value) -> bytes:
    """*value* with its constructor.

    Raises:
        ValueError: it does not fit its type: a ubyte of 256, a symbol that is not ASCII, an array of mixed types.
    """
    out = bytearray()
    write(out, value)
    return bytes(out)


def write(out: bytearray, value: Any) -> None:
    """Append *value*, as :func:`encode`."""
    writer = WRITERS.get(type(value))
    if writer is None:
        if not isinstance(value, StrEnum):
            raise ValueError(f"no AMQP type for a {type(value).__name__}")
        writer = write_symbol
    try:
        writer(out, value)
    except error as cause:
        raise ValueError(f"a {type(value).__name__} that is out of range") from cause


def write_null(out: bytearray, _value: object) -> None:
    """Append null."""
    out.append(NULL)


def write_boolean(out: bytearray, value: bool) -> None:
    """Append a boolean."""
    out.append(0x41 if value else 0x42)


def write_uint(out: bytearray, value: int) -> None:
    """Append a uint."""
    if not value:
        out.append(0x43)
    elif 0 < value < 256:
        out.append(0x52)
        out.append(value)
    else:
        out += _WIDE.pack(0x70, value)


def write_binary(out: bytearray, octets: bytes | memoryview) -> None:
    """Append a binary."""
    variable(out, 0xA0, octets)


def write_string(out: bytearray, text: str) -> None:
    """Append a string."""
    variable(out, 0xA1, text.encode())


def write_symbol(out: bytearray, text: str) -> None:
    """Append a symbol."""
    variable(out, 0xA3, text.encode("ascii"))


def variable(out: bytearray, code: int, octets: bytes | memoryview) -> None:
    """Append octets behind their length; *code* is the constructor of a length of one octet."""
    size = len(octets)
    if size < 256:
        out.append(code)
        out.append(size)
    else:
        out += _WIDE.pack(code + 0x10, size)
    out += octets


def compound(out: bytearray, code: int, count: int, body: bytes | bytearray) -> None:
    """Append a list, map or array; *code* is the constructor of lengths of one octet."""
    size = len(body)
    if size < 255 and count < 256:
        out += bytes((code, size + 1, count))
    else:
        out += _COMPOUND.pack(code + 0x10, size + 4, count)
    out += body


def fixed(code: int, layout: str, small: int | None = None, signed: bool = False, zero: int | None = None) -> Writer:
    """A writer of a number.

    Args:
        code: constructor of the full width.
        layout: of the full width.
        small: constructor of the one octet that a small number takes.
        signed: whether that octet has a sign.
        zero: constructor of nothing but 0.
    """
    pack = Struct(">B" + layout).pack
    least, most = (-128, 127) if signed else (0, 255)

    def writer(out: bytearray, number: Any) -> None:
        if zero is not None and not number:
            out.append(zero)
        elif small is not None and least <= number <= most:
            out += bytes((small, number & 0xFF))
        else:
            out += pack(code, number)

    return writer


def _write_octets(code: int, size: int) -> Writer:
    def writer(out: bytearray, octets: bytes) -> None:
        if len(octets) != size:
            raise ValueError(f"{len(octets)} octets where there must be {size}")
        out.append(code)
        out += octets

    return writer


def _write_char(out: bytearray, text: str) -> None:
    out += _WIDE.pack(0x73, _code_point(text))


def _code_point(text: str) -> int:
    if len(text) != 1:
        raise ValueError("a char is one character")
    return ord(text)


def _write_uuid(out: bytearray, value: UUID) -> None:
    out.append(0x98)
    out += value.bytes


def _write_list(out: bytearray, items: list[Any]) -> None:
    if not items:
        out.append(0x45)
        return
    body = bytearray()
    for item in items:
        write(body, item)
    compound(out, 0xC0, len(items), body)


def write_map(out: bytearray, items: dict[Any, Any]) -> None:
    """Append a map."""
    body = bytearray()
    for key, item in items.items():
        write(body, key)
        write(body, item)
    compound(out, 0xC1, 2 * len(items), body)


def write_fields(out: bytearray, items: dict[str, Any]) -> None:
    """Append a map whose keys are symbols."""
    body = bytearray()
    for key, item in items.items():
        write_symbol(body, key)
        write(body, item)
    compound(out, 0xC1, 2 * len(items), body)


def _write_described(out: bytearray, value: Described) -> None:
    out.append(0)
    write(out, value.descriptor)
    write(out, value.value)


def write_array(out: bytearray, array: Array) -> None:
    """Append an array: one constructor, as wide as its widest item needs, and the items without theirs."""
    constructor, items = _items(array)
    body = bytearray()
    if array.descriptor is not None:
        body.append(0)
        write(body, array.descriptor)
    body.append(constructor)
    body += items
    compound(out, 0xE0, len(array.items), body)


def _items(array: Array) -> tuple[int, bytes]:
    """The constructor of an array's items, and those without it."""
    kind = array.kind
    if any(type(item) is not kind for item in array.items):
        raise ValueError(f"an array of {kind.__name__} holds something else")
    if kind is NoneType:
        return NULL, b""
    if kind in _FULL:
        code, layout = _FULL[kind]
        pack = Struct(layout).pack
        return code, b"".join(pack(item) for item in array.items)
    if kind in _PLAIN:
        code, octets = _PLAIN[kind]
        return code, b"".join(octets(item) for item in array.items)
    narrow, wide = _WIDTHS[kind]
    # What an item is in its longer form follows from its shorter one: only its lengths are written again.
    written = [encode(item) for item in array.items]
    if all(item[0] == narrow for item in written):
        return narrow, b"".join(item[1:] for item in written)
    return wide, b"".join(_widened(item, narrow, kind in _COMPOUNDS) for item in written)


def _widened(item: bytes, narrow: int, counted: bool) -> bytes:
    """A value without its constructor, its lengths of four octets each."""
    if item[0] == 0x45:
        return _U4.pack(4) + _U4.pack(0)
    if item[0] != narrow:
        return item[1:]
    if not counted:
        return _U4.pack(item[1]) + item[2:]
    return _U4.pack(item[1] + 3) + _U4.pack(item[2]) + item[3:]


_FULL: Final[dict[type, tuple[int, str]]] = {
    bool: (0x56, ">?"),
    UByte: (0x50, ">B"),
    UShort: (0x60, ">H"),
    UInt: (0x70, ">I"),
    ULong: (0x80, ">Q"),
    Byte: (0x51, ">b"),
    Short: (0x61, ">h"),
    Int: (0x71, ">i"),
    Long: (0x81, ">q"),
    int: (0x81, ">q"),
    Float: (0x72, ">f"),
    float: (0x82, ">d"),
    Timestamp: (0x83, ">q"),
}
"""Constructor and layout of numbers in full width."""

_PLAIN: Final[dict[type, tuple[int, Callable[[Any], bytes]]]] = {
    Char: (0x73, lambda text: _U4.pack(_code_point(text))),
    UUID: (0x98, lambda value: bytes(value.bytes)),
    Decimal32: (0x74, lambda octets: encode(octets)[1:]),
    Decimal64: (0x84, lambda octets: encode(octets)[1:]),
    Decimal128: (0x94, lambda octets: encode(octets)[1:]),
}
"""Constructor and octets of other values of fixed width."""

_WIDTHS: Final[dict[type, tuple[int, int]]] = {
    bytes: (0xA0, 0xB0),
    str: (0xA1, 0xB1),
    Symbol: (0xA3, 0xB3),
    list: (0xC0, 0xD0),
    dict: (0xC1, 0xD1),
    Array: (0xE0, 0xF0),
}
_COMPOUNDS: Final = (list, dict, Array)

WRITERS: Final[dict[type, Writer]] = {
    NoneType: write_null,
    bool: write_boolean,
    UByte: fixed(0x50, "B"),
    UShort: fixed(0x60, "H"),
    UInt: write_uint,
    ULong: fixed(0x80, "Q", small=0x53, zero=0x44),
    Byte: fixed(0x51, "b"),
    Short: fixed(0x61, "h"),
    Int: fixed(0x71, "i", small=0x54, signed=True),
    Long: fixed(0x81, "q", small=0x55, signed=True),
    int: fixed(0x81, "q", small=0x55, signed=True),
    Float: fixed(0x72, "f"),
    float: fixed(0x82, "d"),
    Decimal32: _write_octets(0x74, 4),
    Decimal64: _write_octets(0x84, 8),
    Decimal128: _write_octets(0x94, 16),
    Char: _write_char,
    Timestamp: fixed(0x83, "q"),
    UUID: _write_uuid,
    bytes: write_binary,
    memoryview: write_binary,
    str: write_string,
    Symbol: write_symbol,
    list: _write_list,
    dict: write_map,
    Described: _write_described,
    Array: write_array,
}
"""By Python type."""
