"""Compiles the wire codec of a method of AMQP 0-9 from the annotations of its class.

A method's payload is class and method (two shorts), then the arguments (AMQP 0-9-1, 4.2.4 and 4.2.5): bits that follow
each other share an octet, the first in bit 0. Names and strings stay bytes; a table is its bytes without the length,
not looked into. The codec is source text that is compiled once for each class, since it runs for every message.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from struct import Struct
from struct import error as struct_error
from typing import Annotated, Any, ClassVar, Final, Self, TypeVar, dataclass_transform, get_args, get_type_hints

from dtx.wire.amqp09.errors import WireError, syntax_error
from dtx.wire.amqp09.tables import put_long, put_short

Bit = Annotated[bool, "bit"]
Long = Annotated[int, "I"]
ShortString = Annotated[bytes, "short"]
Table = Annotated[bytes, "long"]
"""Its entries, without the length before them."""

_TICKET: Final = "ticket"
_STRINGS: Final = frozenset(("short", "long"))
_LONG: Final = Struct(">I")


class Method:
    """A method of AMQP 0-9. Each one is a class that :func:`method` makes."""

    __slots__ = ()

    KEY: ClassVar[int]
    """Class << 16 | method, as the frame splitter tells it."""
    NAME: ClassVar[str]
    """As the XML has it, for example ``basic.get-ok``."""

    @classmethod
    def decode(cls, payload: bytes) -> Self:
        """Read the payload of a method frame, class and method first.

        Raises:
            WireError: 502 when the arguments are truncated or something comes after them.
        """
        raise NotImplementedError

    def encode(self) -> bytes:
        """The payload that :meth:`decode` reads.

        Raises:
            WireError: 502 for a short string longer than 255 bytes.
        """
        raise NotImplementedError


M = TypeVar("M", bound=type[Method])


@dataclass_transform(frozen_default=True)
def method(name: str, class_id: int, method_id: int, *, ticket: bool = False) -> Callable[[M], M]:
    """A class decorator: the class is a method with the fields that it annotates.

    Args:
        name: as the XML has it.
        class_id: number of the class.
        method_id: number of the method within it.
        ticket: whether an access ticket comes first; it is written as 0. 0-9-1 calls it reserved.
    """

    def make(cls: M) -> M:
        made: Any = dataclass(slots=True, unsafe_hash=True)(cls)
        made.KEY = class_id << 16 | method_id
        made.NAME = name
        kinds = get_type_hints(made, include_extras=True)
        wire = [(_TICKET, "H")] if ticket else []
        wire += [(each.name, get_args(kinds[each.name])[1]) for each in fields(made)]
        source = _Source(made.KEY, [each.name for each in fields(made)], wire)
        scope = {"cls": made, "malformed": partial(_malformed, name), **_SCOPE, **source.structs}
        exec(source.text, scope)  # noqa: S102  # made of the annotations above, as dataclasses makes __init__
        made.decode = staticmethod(scope["decode"])
        made.encode = scope["encode"]
        return made  # type: ignore[no-any-return]

    return make


def _malformed(name: str) -> WireError:
    return syntax_error(f"{name} is truncated or too long")


_SCOPE: Final = {
    "LONG": _LONG,
    "put_long": put_long,
    "put_short": put_short,
    "truncated": (IndexError, struct_error),
}


class _Source:
    """The text of ``decode`` and ``encode``.

    Numbers and bits that follow each other are one ``Struct``; a string ends such a run.
    """

    def __init__(self, key: int, names: list[str], wire: list[tuple[str, str]]) -> None:
        self.structs: dict[str, Struct] = {}
        runs: list[list[tuple[str, str]]] = [[]]
        for name, kind in wire:
            if kind in _STRINGS:
                runs += [[(name, kind)], []]
            else:
                runs[-1].append((name, kind))
        self.text = self._decode(names, runs) + self._encode(key, runs)

    def _struct(self, form: str) -> str:
        name = f"S{len(self.structs)}"
        self.structs[name] = Struct(form)
        return name

    def _decode(self, names: list[str], runs: list[list[tuple[str, str]]]) -> str:
        values: dict[str, str] = {}
        lines: list[str] = []
        at = "4"  # behind class and method
        for number, run in enumerate(runs):
            if run and run[0][1] in _STRINGS:
                ((name, kind),) = run
                length = f"payload[{at}]" if kind == "short" else f"LONG.unpack_from(payload, {at})[0]"
                start, end = _after(at, 1 if kind == "short" else 4), f"end{number}"
                lines += [f"{end} = {start} + {length}", f"{name} = payload[{start}:{end}]"]
                values[name] = name
                at = end
            elif run:
                form, parts = ">", list[str]()
                for name, letter, bits in _octets(run):
                    form += "2x" if name == _TICKET else letter
                    if name != _TICKET:
                        parts.append(name)
                    for position, bit in enumerate(bits):
                        values[bit] = f"{name} & {1 << position} != 0"
                    if not bits:
                        values[name] = name
                struct = Struct(form)
                if parts:
                    lines.append(f"{', '.join(parts)}, = {self._struct(form)}.unpack_from(payload, {at})")
                at = _after(at, struct.size)
        lines = lines or ["pass"]
        body = "".join(f"        {line}\n" for line in lines)
        return (
            f"def decode(payload):\n    try:\n{body}    except truncated:\n"
            f"        raise malformed() from None\n    if {at} != len(payload):\n"
            f"        raise malformed()\n    return cls({', '.join(values[name] for name in names)})\n\n"
        )

    def _encode(self, key: int, runs: list[list[tuple[str, str]]]) -> str:
        form, packed = ">I", [str(key)]
        pieces: list[str] = []
        for run in runs:
            if run and run[0][1] in _STRINGS:
                ((name, kind),) = run
                if packed:
                    pieces.append(f"{self._struct(form)}.pack({', '.join(packed)})")
                form, packed = ">", []
                pieces.append(f"{'put_short' if kind == 'short' else 'put_long'}(self.{name})")
            else:
                for name, letter, bits in _octets(run):
                    form += letter
                    shifted = " | ".join(f"self.{bit} << {place}" for place, bit in enumerate(bits))
                    packed.append("0" if name == _TICKET else shifted or f"self.{name}")
        if packed:
            pieces.append(f"{self._struct(form)}.pack({', '.join(packed)})")
        return f"def encode(self):\n    return {' + '.join(pieces)}\n"


def _after(position: str, size: int) -> str:
    return str(int(position) + size) if position.isdigit() else f"{position} + {size}"


def _octets(run: list[tuple[str, str]]) -> list[tuple[str, str, list[str]]]:
    """The numbers of a run: name, letter of its form, and the bits that it is made of, if it is."""
    found: list[tuple[str, str, list[str]]] = []
    for name, kind in run:
        if kind != "bit":
            found.append((name, kind, []))
        elif found and found[-1][1] == "B" and found[-1][2]:
            found[-1][2].append(name)
        else:
            found.append((f"{name}_", "B", [name]))
    return found
