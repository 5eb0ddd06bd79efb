"""AMQP values out of octets: every type, every width of its encoding (AMQP 1.0, 1.2 and 1.6).

A reader takes the buffer, the place behind the constructor octet, and what may still be read; it returns the value and
the place behind it. Readers look no further than they must, and a buffer goes on behind the frame that is being read:
that a value ends where its frame does is for the caller to see. What a reader stumbles over (the end of the buffer, bad
UTF-8) becomes the one documented error at :func:`reading`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
"""Lists in lists, and so on: deeper than any message that means something, and no stack overflows."""
MAX_VALUES: Final = 65_536
"""Values of one frame or section, each of which costs some hundred octets at most."""
MAX_NOTHING: Final = 1024
"""Values without an octet of their own: an array of ten octets may claim four thousand million nulls."""

Buffer = bytes | bytearray | memoryview


class Room:
    """What may still be read: how deep, and how many values."""

    __slots__ = ("depth", "nothing", "values")

    def __init__(self) -> None:
        self.depth = MAX_DEPTH
        self.values = MAX_VALUES
        self.nothing = MAX_NOTHING

    def enter(self, count: int) -> None:
        """Go down into something that holds *count* values."""
        self.depth -= 1
        self.values -= count
        if self.depth < 0:
            raise malformed(f"values are nested deeper than {MAX_DEPTH}")
        if self.values < 0:
            raise malformed(f"more than {MAX_VALUES} values")

    def leave(self) -> None:
        """Come back up."""
        self.depth += 1


STUMBLES: Final = (IndexError, error, UnicodeDecodeError)
"""What a reader raises beside AmqpError, for octets that end too early or are no text."""


def stumbled(what: str) -> AmqpError:
    """The error for what a reader stumbled over."""
    return malformed(f"{what} is truncated or no text where text must be")


Reader = Callable[[Buffer, int, Room], tuple[Any, int]]


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Whatever octets can do to a reader comes out as AmqpError decode-error."""
    try:
        yield
    except STUMBLES as cause:
        raise stumbled(what) from cause


def read(buffer: Buffer, position: int, end: int) -> tuple[Value, int]:
    """Read one value.

    Args:
        buffer: octets.
        position: of its constructor.
        end: what it must not go beyond.

    Returns:
        The value and the place behind it.

    Raises:
        AmqpError: decode-error.
    """
    with reading("a value"):
        found, position = read_value(buffer, position, Room())
    if position > end:
        raise malformed("a value is longer than what holds it")
    return found, position


def read_value(buffer: Buffer, position: int, room: Room) -> tuple[Any, int]:
    """Any value, from its constructor on."""
    return reader_of(buffer[position])(buffer, position + 1, room)


def reader_of(code: int) -> Reader:
    """What reads the value behind constructor *code*."""
    reader = READERS.get(code)
    if reader is None:
        raise malformed(f"constructor {code:#04x} is not known")
    return reader


def skip(buffer: Buffer, position: int) -> int:
    """The place behind the value at *position*; nothing of it is looked at but its length (1.2: the width of a
    constructor follows from its first digit). It may be behind the end of the buffer.

    Raises:
        AmqpError: decode-error.
        IndexError, struct.error: the buffer ends before the value's length is known; see :func:`reading`.
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
_U8: Final = Struct(">Q")


def constant(value: Any) -> Reader:
    """A reader of a constructor that is all of its value."""

    def reader(_buffer: Buffer, position: int, _room: Room) -> tuple[Value, int]:
        return value, position

    return reader


def fixed(layout: str, made: Callable[[Any], Any]) -> Reader:
    """A reader of a number of fixed width."""
    struct = Struct(layout)
    unpack, size = struct.unpack_from, struct.size

    def reader(buffer: Buffer, position: int, _room: Room) -> tuple[Any, int]:
        return made(unpack(buffer, position)[0]), position + size

    return reader


def _boolean(octet: int) -> bool:
    if octet > 1:
        raise malformed(f"a boolean of {octet}")
    return octet == 1


def _char(number: int) -> Char:
    if number > 0x10FFFF or 0xD800 <= number < 0xE000:
        raise malformed(f"a char of {number:#x}")
    return Char(chr(number))


def symbol(octets: Buffer) -> str:
    """The text of a symbol, which is ASCII."""
    return str(octets, "ascii")


def _string(octets: Buffer) -> str:
    return str(octets, "utf-8")


def variable(wide: bool, made: Callable[[Buffer], Any]) -> Reader:
    """A reader of octets behind their length."""

    def narrow_reader(buffer: Buffer, position: int, _room: Room) -> tuple[Any, int]:
        end = position + 1 + buffer[position]
        if end > len(buffer):
            raise malformed("a value ends behind its frame")
        return made(buffer[position + 1 : end]), end

    def wide_reader(buffer: Buffer, position: int, _room: Room) -> tuple[Any, int]:
        end = position + 4 + _U4.unpack_from(buffer, position)[0]
        if end > len(buffer):
            raise malformed("a value ends behind its frame")
        return made(buffer[position + 4 : end]), end

    return wide_reader if wide else narrow_reader


def header(buffer: Buffer, position: int, wide: bool) -> tuple[int, int, int]:
    """Of a list, map or array behind its constructor: the number of values, where they begin, where they end."""
    if wide:
        (size,), (count,) = _U4.unpack_from(buffer, position), _U4.unpack_from(buffer, position + 4)
        return count, position + 8, position + 4 + size
    return buffer[position + 1], position + 2, position + 1 + buffer[position]


def _list(wide: bool) -> Reader:
    def reader(buffer: Buffer, position: int, room: Room) -> tuple[list[Any], int]:
        count, position, end = header(buffer, position, wide)
        room.enter(count)
        found = []
        for _ in range(count):
            item, position = read_value(buffer, position, room)
            found.append(item)
        room.leave()
        if position != end:
            raise malformed("a list is not as long as it says")
        return found, position

    return reader


def _no_list(_buffer: Buffer, position: int, _room: Room) -> tuple[list[Any], int]:
    return [], position


def _map(wide: bool) -> Reader:
    def reader(buffer: Buffer, position: int, room: Room) -> tuple[dict[Any, Any], int]:
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
            raise malformed("a map is not as long as it says")
        return found, position

    return reader


def _array(wide: bool) -> Reader:
    def reader(buffer: Buffer, position: int, room: Room) -> tuple[Array, int]:
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
                raise malformed(f"more than {MAX_NOTHING} values that take no octets")
        found = []
        for _ in range(count):
            value, position = item(buffer, position, room)
            found.append(value)
        room.leave()
        if position != end:
            raise malformed("an array is not as long as it says")
        return Array(KINDS[code], tuple(found), descriptor), position

    return reader


def _described(buffer: Buffer, position: int, room: Room) -> tuple[Described, int]:
    room.enter(2)
    descriptor, position = read_value(buffer, position, room)
    value, position = read_value(buffer, position, room)
    room.leave()
    return Described(descriptor, value), position


def _uuid(octets: bytes) -> UUID:
    return UUID(bytes=octets)


_TYPES: Final[tuple[tuple[int, type, Reader], ...]] = (
    (0x40, NoneType, constant(None)),
    (0x41, bool, constant(True)),
    (0x42, bool, constant(False)),
    (0x56, bool, fixed(">B", _boolean)),
    (0x50, UByte, fixed(">B", UByte)),
    (0x60, UShort, fixed(">H", UShort)),
    (0x70, UInt, fixed(">I", UInt)),
    (0x52, UInt, fixed(">B", UInt)),
    (0x43, UInt, constant(UInt(0))),
    (0x80, ULong, fixed(">Q", ULong)),
    (0x53, ULong, fixed(">B", ULong)),
    (0x44, ULong, constant(ULong(0))),
    (0x51, Byte, fixed(">b", Byte)),
    (0x61, Short, fixed(">h", Short)),
    (0x71, Int, fixed(">i", Int)),
    (0x54, Int, fixed(">b", Int)),
    (0x81, Long, fixed(">q", Long)),
    (0x55, Long, fixed(">b", Long)),
    (0x72, Float, fixed(">f", Float)),
    (0x82, float, fixed(">d", float)),
    (0x74, Decimal32, fixed(">4s", Decimal32)),
    (0x84, Decimal64, fixed(">8s", Decimal64)),
    (0x94, Decimal128, fixed(">16s", Decimal128)),
    (0x73, Char, fixed(">I", _char)),
    (0x83, Timestamp, fixed(">q", Timestamp)),
    (0x98, UUID, fixed(">16s", _uuid)),
    (0xA0, bytes, variable(False, bytes)),
    (0xB0, bytes, variable(True, bytes)),
    (0xA1, str, variable(False, _string)),
    (0xB1, str, variable(True, _string)),
    (0xA3, Symbol, variable(False, lambda octets: Symbol(symbol(octets)))),
    (0xB3, Symbol, variable(True, lambda octets: Symbol(symbol(octets)))),
    (0x45, list, _no_list),
    (0xC0, list, _list(False)),
    (0xD0, list, _list(True)),
    (0xC1, dict, _map(False)),
    (0xD1, dict, _map(True)),
    (0xE0, Array, _array(False)),
    (0xF0, Array, _array(True)),
)

READERS: Final[dict[int, Reader]] = {code: reader for code, _, reader in _TYPES} | {0: _described}
"""By constructor octet."""
KINDS: Final[dict[int, type]] = {code: kind for code, kind, _ in _TYPES}
"""The Python type of a constructor octet."""
