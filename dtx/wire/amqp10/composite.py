"""Composite types (AMQP 1.0, 1.4). Each is declared once as a class, and read and written as its declaration says.

A field has a :class:`Kind`. It is mandatory unless it has a default or may be null. Numbers and symbols are plain
``int`` and ``str`` values: the declaration knows their AMQP type. On the wire a composite is a described list. Null
means the default, and trailing nulls are left out. A field for several values may hold one value without an array.
"""

from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields
from dataclasses import field as dataclass_field
from enum import Enum
from operator import attrgetter
from typing import Any, ClassVar, Final, NamedTuple, TypeVar, dataclass_transform

from dtx.wire.amqp10 import codec
from dtx.wire.amqp10.codec import NULL, Buffer, CodecRoom, Reader, Writer
from dtx.wire.amqp10.errors import AmqpError, Condition, malformed
from dtx.wire.amqp10.values import Array, Described, Symbol, Timestamp, UByte, ULong, UShort, Value

T = TypeVar("T")


class Kind(NamedTuple):
    """The type of a field.

    Args:
        name: the name of the AMQP type.
        readers: the readers by constructor octet; no other constructor is accepted.
        write: appends a value.
    """

    name: str
    readers: dict[int, Reader]
    write: Writer


def _as(name: str, codes: Iterable[int], write: Writer) -> Kind:
    """Make a kind with the readers of the codec."""
    return Kind(name, {code: codec.READERS[code] for code in codes}, write)


def _u1(buffer: Buffer, position: int, _room: CodecRoom) -> tuple[int, int]:
    return buffer[position], position + 1


def _zero(_buffer: Buffer, position: int, _room: CodecRoom) -> tuple[int, int]:
    return 0, position


def _keyed(code: int, cls: type[str]) -> Reader:
    """Make a reader of a map whose keys must all be of type *cls*. The keys become plain ``str``."""
    read_map = codec.READERS[code]

    def reader(buffer: Buffer, position: int, room: CodecRoom) -> tuple[dict[str, Any], int]:
        found, position = read_map(buffer, position, room)
        if any(type(key) is not cls for key in found):
            raise malformed(f"a map with a key that is no {'symbol' if cls is Symbol else 'string'}")
        return {str.__str__(key): value for key, value in found.items()}, position

    return reader


BOOLEAN: Final = _as("boolean", (0x41, 0x42, 0x56), codec.write_boolean)
UBYTE: Final = Kind("ubyte", {0x50: _u1}, codec.WRITERS[UByte])
USHORT: Final = Kind("ushort", {0x60: codec.number_reader(">H", int)}, codec.WRITERS[UShort])
UINT: Final = Kind("uint", {0x52: _u1, 0x43: _zero, 0x70: codec.number_reader(">I", int)}, codec.write_uint)
ULONG: Final = Kind("ulong", {0x53: _u1, 0x44: _zero, 0x80: codec.number_reader(">Q", int)}, codec.WRITERS[ULong])
TIMESTAMP: Final = Kind("timestamp", {0x83: codec.number_reader(">q", int)}, codec.WRITERS[Timestamp])
BINARY: Final = _as("binary", (0xA0, 0xB0), codec.write_binary)
STRING: Final = _as("string", (0xA1, 0xB1), codec.write_string)
SYMBOL: Final = Kind(
    "symbol", {code: codec.octets_reader(code == 0xB3, codec.symbol) for code in (0xA3, 0xB3)}, codec.write_symbol
)
FIELDS: Final = Kind("fields", {0xC1: _keyed(0xC1, Symbol), 0xD1: _keyed(0xD1, Symbol)}, codec.write_fields)
NAMED: Final = Kind("map of strings", {0xC1: _keyed(0xC1, str), 0xD1: _keyed(0xD1, str)}, codec.write_map)
MAP: Final = _as("map", (0xC1, 0xD1), codec.write_map)
ANY: Final = _as("*", [code for code in codec.READERS if code != NULL], codec.write)


def choice(kind: Kind, enum: type[Enum]) -> Kind:
    """Make the kind of a restricted type: a *kind* that accepts only the values of *enum*."""
    members = {member.value: member for member in enum}

    def reader_of(code: int, inner: Reader) -> Reader:
        if code < 0x50 and kind.readers is BOOLEAN.readers:  # the constructor is the value
            return codec.constant(members[code == 0x41])

        def reader(buffer: Buffer, position: int, room: CodecRoom) -> tuple[Enum, int]:
            found, position = inner(buffer, position, room)
            member = members.get(found)
            if member is None:
                raise AmqpError(Condition.INVALID_FIELD, f"{enum.__name__} has no value {found!r}")
            return member, position

        return reader

    def write(out: bytearray, value: Enum) -> None:
        kind.write(out, value.value)

    return Kind(kind.name, {code: reader_of(code, reader) for code, reader in kind.readers.items()}, write)


def several(kind: Kind) -> Kind:
    """Make the kind of a ``multiple`` field: a tuple of *kind*; on the wire one value or an array."""

    def one(inner: Reader) -> Reader:
        def reader(buffer: Buffer, position: int, room: CodecRoom) -> tuple[tuple[Any, ...], int]:
            found, position = inner(buffer, position, room)
            return (found,), position

        return reader

    def array(code: int) -> Reader:
        def reader(buffer: Buffer, position: int, room: CodecRoom) -> tuple[tuple[Any, ...], int]:
            found, position = codec.READERS[code](buffer, position, room)
            if found.items and found.kind is not Symbol:
                raise malformed(f"an array of something else than {kind.name}")
            return tuple(map(str.__str__, found.items)), position

        return reader

    def write(out: bytearray, values: tuple[str, ...]) -> None:
        if len(values) == 1:
            kind.write(out, values[0])
        else:
            codec.write_array(out, Array(Symbol, tuple(map(Symbol, values))))

    readers = {code: one(reader) for code, reader in kind.readers.items()}
    return Kind(f"{kind.name} multiple", readers | {0xE0: array(0xE0), 0xF0: array(0xF0)}, write)


SYMBOLS: Final = several(SYMBOL)


class Layout:
    """Reads and writes a composite type.

    Args:
        cls: its class.
        code: the numeric descriptor.
        symbol: the symbolic descriptor.
    """

    __slots__ = ("_names", "_only", "_prefix", "_readers", "_required", "_values", "_writers", "cls", "code", "symbol")

    def __init__(self, cls: type, code: int, symbol: str) -> None:
        self.cls, self.code, self.symbol = cls, code, symbol
        declared = fields(cls)
        kinds: list[Kind] = [field.metadata["kind"] for field in declared]
        self._names = [(field.name.replace("_", "-"), kind.name) for field, kind in zip(declared, kinds, strict=True)]
        nulls = [field.metadata["null"] for field in declared]
        self._readers = [(kind.readers, null) for kind, null in zip(kinds, nulls, strict=True)]
        self._writers = [(kind.write, null) for kind, null in zip(kinds, nulls, strict=True)]
        self._required = [null is MISSING for null in nulls]
        names = [field.name for field in declared]
        self._values: Callable[[Any], Iterable[Any]]
        if len(names) > 1:
            self._values = attrgetter(*names)
        else:
            self._values = lambda value: [getattr(value, name) for name in names]
        self._prefix = b"\x00" + codec.encode(ULong(code))
        self._only = None if names else cls()  # a type without fields has one value

    @property
    def name(self) -> str:
        """The name in the spec, for example ``transfer``."""
        return self.symbol.split(":")[1]

    def read(self, buffer: Buffer, position: int, room: CodecRoom) -> tuple[Any, int]:
        """Read the list after the descriptor, from its constructor at *position* on."""
        code = buffer[position]
        if code == 0x45 and self._only is not None:
            return self._only, position + 1
        if code == 0xC0:
            end = position + 2 + buffer[position + 1]
            count = buffer[position + 2]
            position += 3
        elif code in (0x45, 0xD0):
            count, position, end = codec.header(buffer, position + 1, True) if code == 0xD0 else (0, position + 1, 0)
            end = end or position
        else:
            raise malformed(f"{self.name} is described, but no list")
        if count > len(self._readers):
            raise malformed(f"{self.name} has {len(self._readers)} fields, not {count}")
        room.enter(count)
        values: list[Any] = []
        append = values.append
        for readers, null in self._readers[:count]:
            code = buffer[position]
            position += 1
            if code == NULL:
                if null is MISSING:
                    raise malformed(f"{self.name} without its {self._names[len(values)][0]}")
                append(null)
                continue
            reader = readers.get(code)
            if reader is _u1:  # saves a call on the hot path
                append(buffer[position])
                position += 1
            elif reader is None:
                name, kind = self._names[len(values)]
                raise malformed(f"{name} of {self.name} is no {kind}")
            else:
                found, position = reader(buffer, position, room)
                append(found)
        room.leave()
        if position != end:
            raise malformed(f"the size of {self.name} is wrong")
        if True in self._required[count:]:
            raise malformed(f"{self.name} without its {self._names[self._required.index(True, count)][0]}")
        return self.cls(*values), position

    def write(self, out: bytearray, value: object) -> None:
        """Append *value* with its descriptor."""
        if self._only is not None:
            out += self._prefix + b"\x45"
            return
        body = bytearray()
        count = nulls = 0
        for found, (write, null) in zip(self._values(value), self._writers, strict=True):
            if found is null or (null is not None and found == null):
                nulls += 1
                continue
            if nulls:
                body += _NULL * nulls
                count += nulls
                nulls = 0
            write(body, found)
            count += 1
        out += self._prefix
        if count:
            codec.append_compound(out, 0xC0, count, body)
        else:
            out.append(0x45)


_NULL: Final = bytes((NULL,))
_BY_CODE: Final[dict[int, Layout]] = {}
_BY_SYMBOL: Final[dict[str, Layout]] = {}


class Composite:
    """The base class of all composite types."""

    __slots__ = ()
    layout: ClassVar[Layout]


C = TypeVar("C", bound=Composite)


def field(kind: Kind, *, default: Any = MISSING, nullable: bool = False) -> Any:
    """Declare a field of a composite type.

    Args:
        kind: the type of its values.
        default: the meaning of null; without a default the field is mandatory.
        nullable: null means ``None``; for a field without a default before a mandatory field.
    """
    return dataclass_field(default=default, metadata={"kind": kind, "null": None if nullable else default})


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def composite(code: int, symbol: str) -> Callable[[type[T]], type[T]]:
    """Declare a composite type with its numeric and its symbolic descriptor. The fields are in the order of the spec.

    Values are immutable: the type checker enforces this, and Python does not (see :func:`dtx.xa.value.value`).
    """

    def declare(cls: type[T]) -> type[T]:
        made = dataclass(slots=True, unsafe_hash=True)(cls)
        layout = Layout(made, code, symbol)
        made.layout = layout  # type: ignore[attr-defined]
        _BY_CODE[code] = _BY_SYMBOL[symbol] = layout
        return made

    return declare


def descriptor(buffer: Buffer, position: int, room: CodecRoom) -> tuple[Layout | None, Value, int]:
    """Read a descriptor, numeric or symbolic, at *position*.

    Returns:
        The type that is declared for it, if any; the descriptor; the position after it.
    """
    if buffer[position] == 0x53:
        code = buffer[position + 1]
        return _BY_CODE.get(code), ULong(code), position + 2
    found, position = codec.read_value(buffer, position, room)
    if type(found) is Symbol:
        return _BY_SYMBOL.get(str.__str__(found)), found, position
    return (_BY_CODE.get(int(found)) if type(found) is ULong else None), found, position


def one_of(name: str, classes: Iterable[type[Composite]], *, others: bool = False) -> Kind:
    """Make the kind of a field that holds one of several composite types.

    Args:
        name: the name of what the types provide, for example ``outcome``.
        classes: the types.
        others: whether other described values are accepted; they are read as :class:`Described`.
    """
    taken = frozenset(classes)

    def reader(buffer: Buffer, position: int, room: CodecRoom) -> tuple[Any, int]:
        room.enter(2)
        layout, described_by, position = descriptor(buffer, position, room)
        if layout is not None and layout.cls in taken:
            found, position = layout.read(buffer, position, room)
        elif others:
            value, position = codec.read_value(buffer, position, room)
            found = Described(described_by, value)
        else:
            raise malformed(f"a value that is no {name}")
        room.leave()
        return found, position

    def write(out: bytearray, value: Any) -> None:
        if isinstance(value, Composite):
            value.layout.write(out, value)
        else:
            codec.write(out, value)

    return Kind(name, {0: reader}, write)


def encode(value: Composite) -> bytes:
    """Encode *value* with its descriptor."""
    out = bytearray()
    value.layout.write(out, value)
    return bytes(out)


def read_kind(buffer: Buffer, position: int, kind: Kind, name: str) -> Any:
    """Read a value of *kind* whose descriptor has been read, from its constructor at *position* on.

    Raises:
        AmqpError: decode-error.
    """
    reader = kind.readers.get(buffer[position])
    if reader is None:
        raise malformed(f"{name} is no {kind.name}")
    try:
        found, _ = reader(buffer, position + 1, CodecRoom())
    except codec.READ_ERRORS as cause:
        raise codec.read_error(name) from cause
    return found


def read_list(buffer: Buffer, position: int, cls: type[C]) -> C:
    """Read a composite whose descriptor has been read, from its constructor at *position* on.

    Raises:
        AmqpError: decode-error, invalid-field.
    """
    found: C
    try:
        found, _ = cls.layout.read(buffer, position, CodecRoom())
    except codec.READ_ERRORS as cause:
        raise codec.read_error(cls.layout.name) from cause
    return found


def decode(buffer: Buffer, position: int, end: int, classes: frozenset[type]) -> tuple[Any, int]:
    """Read one of several composite types.

    Args:
        buffer: the bytes.
        position: the position of its descriptor.
        end: the position at which it must end at the latest.
        classes: the expected types.

    Returns:
        The value and the position after it.

    Raises:
        AmqpError: decode-error, invalid-field.
    """
    room = CodecRoom()
    try:
        if buffer[position] != 0:
            raise malformed("a value without a descriptor")
        layout, described_by, position = descriptor(buffer, position + 1, room)
        if layout is None or layout.cls not in classes:
            raise malformed(f"descriptor {described_by!r} is not expected here")
        found, position = layout.read(buffer, position, room)
    except codec.READ_ERRORS as cause:
        raise codec.read_error("a described list") from cause
    if position > end:
        raise malformed(f"{layout.name} is longer than its frame")
    return found, position
