"""AMQP values as Python values that keep their AMQP type (AMQP 1.0, 1.6).

| AMQP | Python |
|---|---|
| null, boolean | ``None``, ``bool`` |
| ubyte … ulong, byte … long, timestamp | :class:`UByte` … :class:`Long`, :class:`Timestamp`: an ``int`` with its type |
| float, double | :class:`Float`, ``float`` |
| decimal32, decimal64, decimal128 | :class:`Decimal32` …: their bytes, which dtx passes on |
| char, symbol | :class:`Char`, :class:`Symbol`: a ``str`` with its type |
| uuid, binary, string | ``uuid.UUID``, ``bytes``, ``str`` |
| list, map, array | ``list``, ``dict``, :class:`Array` |
| described | :class:`Described` |

Two values are equal only when their types are: a map may hold both the key ``uint 1`` and the key ``long 1``.
"""

from dataclasses import dataclass
from types import NoneType
from typing import Any, Final, TypeAlias
from uuid import UUID


class UByte(int):
    """0 to 255."""

    __slots__ = ()


class UShort(int):
    """0 to 2^16 - 1."""

    __slots__ = ()


class UInt(int):
    """0 to 2^32 - 1."""

    __slots__ = ()


class ULong(int):
    """0 to 2^64 - 1."""

    __slots__ = ()


class Byte(int):
    """-2^7 to 2^7 - 1."""

    __slots__ = ()


class Short(int):
    """-2^15 to 2^15 - 1."""

    __slots__ = ()


class Int(int):
    """-2^31 to 2^31 - 1."""

    __slots__ = ()


class Long(int):
    """-2^63 to 2^63 - 1."""

    __slots__ = ()


class Timestamp(int):
    """Milliseconds since 1970-01-01T00:00:00Z, signed 64 bit."""

    __slots__ = ()


class Float(float):
    """A binary32."""

    __slots__ = ()


class Decimal32(bytes):
    """Four bytes, IEEE 754-2008 decimal32 in its binary integer encoding."""

    __slots__ = ()


class Decimal64(bytes):
    """Eight bytes."""

    __slots__ = ()


class Decimal128(bytes):
    """Sixteen bytes."""

    __slots__ = ()


class Char(str):
    """One Unicode character."""

    __slots__ = ()


class Symbol(str):
    """A name of a constrained domain, ASCII."""

    __slots__ = ()


_TYPED: Final = (
    UByte, UShort, UInt, ULong, Byte, Short, Int, Long, Timestamp,
    Float, Decimal32, Decimal64, Decimal128, Char, Symbol,
)  # fmt: skip


def _distinguish_types() -> None:
    """Let values of the classes above be equal only to values of the same class. The hash includes the class."""
    for cls in _TYPED:
        (base,) = cls.__bases__

        def equal(self: object, other: object, base: Any = base) -> bool:
            return type(other) is type(self) and bool(base.__eq__(self, other))

        def unequal(self: object, other: object, base: Any = base) -> bool:
            return type(other) is not type(self) or not base.__eq__(self, other)

        def hashed(self: object, base: Any = base, cls: type = cls) -> int:
            return hash((cls, base.__hash__(self)))

        cls.__eq__ = equal  # type: ignore[method-assign]
        cls.__ne__ = unequal  # type: ignore[method-assign]
        cls.__hash__ = hashed  # type: ignore[method-assign]


_distinguish_types()


@dataclass(frozen=True, slots=True)
class Described:
    """A value with a descriptor that has no class of its own here.

    Args:
        descriptor: usually a ULong or a Symbol.
        value: the described value.
    """

    descriptor: "Value"
    value: "Value"


@dataclass(frozen=True, slots=True)
class Array:
    """Values of one type.

    Args:
        kind: their Python type, as in the table above; ``type(None)`` for null.
        items: the values, without descriptor.
        descriptor: the descriptor of each of them, if any.
    """

    kind: type
    items: tuple["Value", ...]
    descriptor: "Value" = None


Value: TypeAlias = (
    bool | int | float | str | bytes | UUID | list["Value"] | dict["Value", "Value"] | Described | Array | None
)
"""All values that the codec reads and writes. A plain ``int`` is written as a long."""

SCALARS: Final[frozenset[type]] = frozenset((NoneType, bool, int, float, str, bytes, UUID, *_TYPED))
"""The types that dtx accepts as keys of a map."""
