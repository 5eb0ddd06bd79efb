"""Reads and writes AMQP values: every type, every width of its encoding (AMQP 1.0, 1.2 and 1.6).

A reader takes the buffer, the position after the constructor octet, and a :class:`CodecRoom`. It returns the value and
the position after it. The buffer continues after the frame that is being read, so the caller must check that a value
ends within its frame. :func:`reading` makes one documented error of the exceptions of readers (end of the buffer, bad
UTF-8). A writer appends a value in its shortest encoding.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from struct import Struct, error
from types import NoneType
from typing import Any, Final
from uuid import UUID

from dtx.wire.amqp10.errors import AmqpError, malformed
from dtx.wire.amqp10.values import (
    SCALARS,
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

MAX_DEPTH: Final = 32
"""The maximum depth of nested values. It is far below the recursion limit of the interpreter."""
MAX_VALUES: Final = 65_536
"""The maximum number of values of one frame or section. Each costs about 100 bytes of memory at most."""
MAX_NOTHING: Final = 1024
"""The maximum number of values that take no bytes. An array of 10 bytes may claim 4 thousand million nulls."""

Buffer = bytes | bytearray | memoryview


class CodecRoom:
    """The remaining limits of one read: the depth and the numbers of values."""

    __slots__ = ("depth", "nothing", "values")

    def __init__(self) -> None:
        self.depth = MAX_DEPTH
        self.values = MAX_VALUES
        self.nothing = MAX_NOTHING

    def enter(self, count: int) -> None:
        """Enter a container with *count* values."""
        self.depth -= 1
        self.values -= count
        if self.depth < 0:
            raise malformed(f"values are nested deeper than {MAX_DEPTH}")
        if self.values < 0:
            raise malformed(f"more than {MAX_VALUES} values")

    def leave(self) -> None:
        """Leave the container."""
        self.depth += 1


READ_ERRORS: Final = (IndexError, error, UnicodeDecodeError)
"""The exceptions of a reader other than AmqpError: for truncated data, and for malformed text."""


def read_error(what: str) -> AmqpError:
    """Return the error for one of :data:`READ_ERRORS`."""
    return malformed(f"{what} is truncated, or has malformed text")


Reader = Callable[[Buffer, int, CodecRoom], tuple[Any, int]]
Writer = Callable[[bytearray, Any], None]


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn the exceptions of a reader into AmqpError decode-error. *what* names the value."""
    try:
        yield
    except READ_ERRORS as cause:
        raise read_error(what) from cause


def read(buffer: Buffer, position: int, end: int) -> tuple[Value, int]:
    """Read one value.

    Args:
        buffer: the bytes.
        position: the position of its constructor.
        end: the position at which it must end at the latest.

    Returns:
        The value and the position after it.

    Raises:
        AmqpError: decode-error.
    """
    with reading("a value"):
        found, position = read_value(buffer, position, CodecRoom())
    if position > end:
        raise malformed("a value is longer than its container")
    return found, position


def read_value(buffer: Buffer, position: int, room: CodecRoom) -> tuple[Any, int]:
    """Read any value from its constructor on."""
    return reader_of(buffer[position])(buffer, position + 1, room)


def reader_of(code: int) -> Reader:
    """Return the reader of the values with constructor *code*."""
    reader = READERS.get(code)
    if reader is None:
        raise malformed(f"constructor {code:#04x} is not known")
    return reader


def skip(buffer: Buffer, position: int) -> int:
    """Return the position after the value at *position*. It may be after the end of the buffer.

    The function reads only the length of the value. The first digit of a constructor determines its width (1.2).

    Raises:
        AmqpError: decode-error.
        IndexError, struct.error: the buffer ends before the length of the value; see :func:`reading`.
    """
    code = buffer[position]
    while code == 0:
        if buffer[position + 1] == 0:
            raise malformed("a descriptor that has a descriptor")
        position = skip(buffer, position + 1)
        code = buffer[position]
    position += 1
    width = code >> 4
    if width >= 0xA:
        if width & 1:
            return position + 4 + int(_U4.unpack_from(buffer, position)[0])
        return position + 1 + buffer[position]
    if width < 4:
        raise malformed(f"constructor {code:#04x} is not known")
    return position + (0, 1, 2, 4, 8, 16)[width - 4]


_U4: Final = Struct(">I")
_WIDE: Final = Struct(">BI")
_COMPOUND: Final = Struct(">BII")
NULL: Final = 0x40


def constant(value: Any) -> Reader:
    """Make a reader for a constructor without data, which stands for *value*."""

    def reader(_buffer: Buffer, position: int, _room: CodecRoom) -> tuple[Value, int]:
        return value, position

    return reader


def number_reader(layout: str, made: Callable[[Any], Any]) -> Reader:
    """Make a reader of a number with the struct format *layout*."""
    struct = Struct(layout)
    unpack, size = struct.unpack_from, struct.size

    def reader(buffer: Buffer, position: int, _room: CodecRoom) -> tuple[Any, int]:
        return made(unpack(buffer, position)[0]), position + size

    return reader


def _boolean(byte: int) -> bool:
    if byte > 1:
        raise malformed(f"a boolean of {byte}")
    return byte == 1


def _char(number: int) -> Char:
    if number > 0x10FFFF or 0xD800 <= number < 0xE000:
        raise malformed(f"a char of {number:#x}")
    return Char(chr(number))


def symbol(octets: Buffer) -> str:
    """Decode the text of a symbol, which is ASCII."""
    return str(octets, "ascii")


def _string(octets: Buffer) -> str:
    return str(octets, "utf-8")


def octets_reader(wide: bool, made: Callable[[Buffer], Any]) -> Reader:
    """Make a reader of bytes after their length, which has four bytes if *wide*, otherwise one."""

    def narrow_reader(buffer: Buffer, position: int, _room: CodecRoom) -> tuple[Any, int]:
        end = position + 1 + buffer[position]
        if end > len(buffer):
            raise malformed("a value is longer than its frame")
        return made(buffer[position + 1 : end]), end

    def wide_reader(buffer: Buffer, position: int, _room: CodecRoom) -> tuple[Any, int]:
        end = position + 4 + _U4.unpack_from(buffer, position)[0]
        if end > len(buffer):
            raise malformed("a value is longer than its frame")
        return made(buffer[position + 4 : end]), end

    return wide_reader if wide else narrow_reader


def header(buffer: Buffer, position: int, wide: bool) -> tuple[int, int, int]:
    """Read the head of a list, map or array after its constructor: the number of values, their start, their end."""
    if wide:
        (size,), (count,) = _U4.unpack_from(buffer, position), _U4.unpack_from(buffer, position + 4)
        return count, position + 8, position + 4 + size
    return buffer[position + 1], position + 2, position + 1 + buffer[position]


def _list(wide: bool) -> Reader:
    def reader(buffer: Buffer, position: int, room: CodecRoom) -> tuple[list[Any], int]:
        count, position, end = header(buffer, position, wide)
        room.enter(count)
        found = []
        for _ in range(count):
            item, position = read_value(buffer, position, room)
            found.append(item)
        room.leave()
        if position != end:
            raise malformed("the size of a list is wrong")
        return found, position

    return reader


def _no_list(_buffer: Buffer, position: int, _room: CodecRoom) -> tuple[list[Any], int]:
    return [], position


def _map(wide: bool) -> Reader:
    def reader(buffer: Buffer, position: int, room: CodecRoom) -> tuple[dict[Any, Any], int]:
        count, position, end = header(buffer, position, wide)
        if count & 1:
            raise malformed("a map with a key that has no value")
        room.enter(count)
        found: dict[Any, Any] = {}
        for _ in range(count // 2):
            key, position = read_value(buffer, position, room)
            if type(key) not in SCALARS:
                raise malformed(f"a map with a key that is a {type(key).__name__.lower()}")
            if key in found:  # "a map in which there exist two identical key values is invalid"
                raise malformed("a map has the same key twice")
            found[key], position = read_value(buffer, position, room)
        room.leave()
        if position != end:
            raise malformed("the size of a map is wrong")
        return found, position

    return reader


def _array(wide: bool) -> Reader:
    def reader(buffer: Buffer, position: int, room: CodecRoom) -> tuple[Array, int]:
        count, position, end = header(buffer, position, wide)
        room.enter(count)
        descriptor = None
        code = buffer[position]
        if code == 0:
            descriptor, position = read_value(buffer, position + 1, room)
            code = buffer[position]
            if code == 0:
                raise malformed("an array whose values have two descriptors")
        item = reader_of(code)
        position += 1
        if code < 0x50:
            room.nothing -= count
            if room.nothing < 0:
                raise malformed(f"more than {MAX_NOTHING} values that take no bytes")
        found = []
        for _ in range(count):
            value, position = item(buffer, position, room)
            found.append(value)
        room.leave()
        if position != end:
            raise malformed("the size of an array is wrong")
        return Array(KINDS[code], tuple(found), descriptor), position

    return reader


def _described(buffer: Buffer, position: int, room: CodecRoom) -> tuple[Described, int]:
    room.enter(2)
    descriptor, position = read_value(buffer, position, room)
    value, position = read_value(buffer, position, room)
    room.leave()
    return Described(descriptor, value), position


def _uuid(octets: bytes) -> UUID:
    return UUID(bytes=octets)


_NUMBERS: Final[tuple[tuple[type, int, str, int | None, int | None], ...]] = (
    (UByte, 0x50, "B", None, None),
    (UShort, 0x60, "H", None, None),
    (UInt, 0x70, "I", 0x52, 0x43),
    (ULong, 0x80, "Q", 0x53, 0x44),
    (Byte, 0x51, "b", None, None),
    (Short, 0x61, "h", None, None),
    (Int, 0x71, "i", 0x54, None),
    (Long, 0x81, "q", 0x55, None),
    (Float, 0x72, "f", None, None),
    (float, 0x82, "d", None, None),
    (Timestamp, 0x83, "q", None, None),
)
"""Type, constructor and layout of its full width, constructors for one byte of data and for 0 without data."""


def _number_readers() -> Iterator[tuple[int, type, Reader]]:
    for kind, code, layout, small, zero in _NUMBERS:
        yield code, kind, number_reader(f">{layout}", kind)
        if small is not None:
            yield small, kind, number_reader(">b" if layout.islower() else ">B", kind)
        if zero is not None:
            yield zero, kind, constant(kind(0))


_TYPES: Final[tuple[tuple[int, type, Reader], ...]] = (
    *_number_readers(),
    (NULL, NoneType, constant(None)),
    (0x41, bool, constant(True)),
    (0x42, bool, constant(False)),
    (0x56, bool, number_reader(">B", _boolean)),
    (0x74, Decimal32, number_reader(">4s", Decimal32)),
    (0x84, Decimal64, number_reader(">8s", Decimal64)),
    (0x94, Decimal128, number_reader(">16s", Decimal128)),
    (0x73, Char, number_reader(">I", _char)),
    (0x98, UUID, number_reader(">16s", _uuid)),
    (0xA0, bytes, octets_reader(False, bytes)),
    (0xB0, bytes, octets_reader(True, bytes)),
    (0xA1, str, octets_reader(False, _string)),
    (0xB1, str, octets_reader(True, _string)),
    (0xA3, Symbol, octets_reader(False, lambda octets: Symbol(symbol(octets)))),
    (0xB3, Symbol, octets_reader(True, lambda octets: Symbol(symbol(octets)))),
    (0x45, list, _no_list),
    (0xC0, list, _list(False)),
    (0xD0, list, _list(True)),
    (0xC1, dict, _map(False)),
    (0xD1, dict, _map(True)),
    (0xE0, Array, _array(False)),
    (0xF0, Array, _array(True)),
)

READERS: Final[dict[int, Reader]] = {code: reader for code, _, reader in _TYPES} | {0: _described}
"""The readers by constructor octet."""
KINDS: Final[dict[int, type]] = {code: kind for code, kind, _ in _TYPES}
"""The Python types by constructor octet."""


# -- writers


def encode(value: Value) -> bytes:
    """Encode *value* with its constructor.

    Raises:
        ValueError: *value* does not fit its type: a ubyte of 256, a symbol that is not ASCII, an array of mixed types.
    """
    out = bytearray()
    write(out, value)
    return bytes(out)


def write(out: bytearray, value: Any) -> None:
    """Append *value*, as :func:`encode` does."""
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
    append_octets(out, 0xA0, octets)


def write_string(out: bytearray, text: str) -> None:
    """Append a string."""
    append_octets(out, 0xA1, text.encode())


def write_symbol(out: bytearray, text: str) -> None:
    """Append a symbol."""
    append_octets(out, 0xA3, text.encode("ascii"))


def append_octets(out: bytearray, code: int, octets: bytes | memoryview) -> None:
    """Append bytes after their length. *code* is the constructor for a length of one byte."""
    size = len(octets)
    if size < 256:
        out.append(code)
        out.append(size)
    else:
        out += _WIDE.pack(code + 0x10, size)
    out += octets


def append_compound(out: bytearray, code: int, count: int, body: bytes | bytearray) -> None:
    """Append a list, map or array. *code* is the constructor for lengths of one byte."""
    size = len(body)
    if size < 255 and count < 256:
        out += bytes((code, size + 1, count))
    else:
        out += _COMPOUND.pack(code + 0x10, size + 4, count)
    out += body


def _number_writer(code: int, layout: str, small: int | None, zero: int | None) -> Writer:
    pack = Struct(">B" + layout).pack
    least, most = (-128, 127) if layout.islower() else (0, 255)

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
            raise ValueError(f"{len(octets)} bytes, must be {size}")
        out.append(code)
        out += octets

    return writer


def _write_char(out: bytearray, text: str) -> None:
    if len(text) != 1:
        raise ValueError("a char is one character")
    out += _WIDE.pack(0x73, ord(text))


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
    append_compound(out, 0xC0, len(items), body)


def write_map(out: bytearray, items: dict[Any, Any]) -> None:
    """Append a map."""
    body = bytearray()
    for key, item in items.items():
        write(body, key)
        write(body, item)
    append_compound(out, 0xC1, 2 * len(items), body)


def write_fields(out: bytearray, items: dict[str, Any]) -> None:
    """Append a map whose keys are symbols."""
    body = bytearray()
    for key, item in items.items():
        write_symbol(body, key)
        write(body, item)
    append_compound(out, 0xC1, 2 * len(items), body)


def _write_described(out: bytearray, value: Described) -> None:
    out.append(0)
    write(out, value.descriptor)
    write(out, value.value)


def write_array(out: bytearray, array: Array) -> None:
    """Append an array: one constructor that is wide enough for all items, then the items without constructors."""
    constructor, items = _items(array)
    body = bytearray()
    if array.descriptor is not None:
        body.append(0)
        write(body, array.descriptor)
    body.append(constructor)
    body += items
    append_compound(out, 0xE0, len(array.items), body)


def _items(array: Array) -> tuple[int, bytes]:
    """Return the constructor of the items of an array, and the items without it."""
    kind = array.kind
    if any(type(item) is not kind for item in array.items):
        raise ValueError(f"an array of {kind.__name__} with an item of another type")
    if kind is NoneType:
        return NULL, b""
    if kind in _FULL:
        code, layout = _FULL[kind]
        pack = Struct(layout).pack
        return code, b"".join(pack(item) for item in array.items)
    if kind in _PLAIN:
        return _PLAIN[kind], b"".join(encode(item)[1:] for item in array.items)
    narrow, wide = _WIDTHS[kind]
    # The two forms of an item differ only in the width of its lengths.
    written = [encode(item) for item in array.items]
    if all(item[0] == narrow for item in written):
        return narrow, b"".join(item[1:] for item in written)
    return wide, b"".join(_widened(item, narrow, kind in _COMPOUNDS) for item in written)


def _widened(item: bytes, narrow: int, counted: bool) -> bytes:
    """Return a value without its constructor, with lengths of four bytes each."""
    if item[0] == 0x45:
        return _U4.pack(4) + _U4.pack(0)
    if item[0] != narrow:
        return item[1:]
    if not counted:
        return _U4.pack(item[1]) + item[2:]
    return _U4.pack(item[1] + 3) + _U4.pack(item[2]) + item[3:]


_FULL: Final[dict[type, tuple[int, str]]] = {
    **{kind: (code, f">{layout}") for kind, code, layout, _, _ in _NUMBERS},
    bool: (0x56, ">?"),
    int: (0x81, ">q"),
}
"""Constructors and layouts of numbers in full width."""

_PLAIN: Final[dict[type, int]] = {Char: 0x73, UUID: 0x98, Decimal32: 0x74, Decimal64: 0x84, Decimal128: 0x94}
"""Constructors of other values of fixed width."""

_WIDTHS: Final[dict[type, tuple[int, int]]] = {
    bytes: (0xA0, 0xB0),
    str: (0xA1, 0xB1),
    Symbol: (0xA3, 0xB3),
    list: (0xC0, 0xD0),
    dict: (0xC1, 0xD1),
    Array: (0xE0, 0xF0),
}
_COMPOUNDS: Final = (list, dict, Array)

_NUMBER_WRITERS: Final = {
    kind: _number_writer(code, layout, small, zero) for kind, code, layout, small, zero in _NUMBERS
}

WRITERS: Final[dict[type, Writer]] = {
    **_NUMBER_WRITERS,
    NoneType: write_null,
    bool: write_boolean,
    UInt: write_uint,
    int: _NUMBER_WRITERS[Long],
    Decimal32: _write_octets(0x74, 4),
    Decimal64: _write_octets(0x84, 8),
    Decimal128: _write_octets(0x94, 16),
    Char: _write_char,
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
"""The writers by Python type."""
