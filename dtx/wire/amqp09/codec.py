"""Compiles the wire codec of a method of AMQP 0-9 from the annotations of its class.

The payload of a method is class and method (two shorts), then the arguments (AMQP 0-9-1, 4.2.4 and 4.2.5). Consecutive
bits share an octet; the first is bit 0. Names and strings stay bytes. A table is its bytes without the length; the
codec does not parse it. The codec runs for every message, so it is source text that is compiled once for each class.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from enum import Flag, StrEnum, auto
from functools import partial
from struct import Struct
from struct import error as struct_error
from typing import (
    Annotated,
    Any,
    ClassVar,
    Concatenate,
    Final,
    ParamSpec,
    Self,
    TypeVar,
    dataclass_transform,
    get_args,
    get_type_hints,
)

from dtx.wire.amqp09.errors import WireError, syntax_error
from dtx.wire.amqp09.frames import FRAME_END, METHOD
from dtx.wire.amqp09.tables import put_short
from dtx.xa.codes import ReplyCode, XaError
from dtx.xa.xid import Xid, read_xid

Bit = Annotated[bool, "bit"]
Octet = Annotated[int, "B"]
Short = Annotated[int, "H"]
Long = Annotated[int, "I"]
LongLong = Annotated[int, "Q"]
ShortString = Annotated[bytes, "short"]
LongString = Annotated[bytes, "long"]
Table = Annotated[bytes, "long"]
"""The entries of a table, without the length before them."""
XidField = Annotated[Xid, "xid"]
"""A long string: the wire form of an xid."""


class Sender(Flag):
    """The peers that send a method."""

    CLIENT = auto()
    SERVER = auto()
    BOTH = CLIENT | SERVER


class ChannelMode(StrEnum):
    """The mode of a channel: which ``select`` method the client has called on it."""

    PLAIN = "plain"
    CONFIRM = "confirm"
    TX = "tx"
    DTX = "dtx"


class Fact(Flag):
    """Further properties of a method."""

    NONE = 0
    CONTENT = auto()
    """A content header frame follows."""
    SOFT = auto()
    """An error in it closes the channel, not the connection."""
    LOCAL = auto()
    """It is never sent to a broker, because no broker knows it."""
    WATCHED = auto()
    """A proxy reads it, in the directions in which it is sent, even where it passes other frames unread."""
    TICKET = auto()
    """Its first argument is an access ticket, which 0-9-1 calls reserved. It is no field, and is written as 0."""
    UNCOUNTED = auto()
    """execution.complete does not count it as a command."""


ANY_MODE: Final = frozenset(ChannelMode)

TICKET: Final = "access ticket"
"""The name of the ticket in :attr:`Method.WIRE`. No field has this name."""
_STRINGS: Final = frozenset(("short", "long", "xid"))
_LONG: Final = Struct(">I")


class Method:
    """A method of AMQP 0-9. Each method is a class that :func:`method` decorates."""

    __slots__ = ()

    KEY: ClassVar[int]
    """Class << 16 | method: the key of its frames, see ``frames.Frame``."""
    HEAD: ClassVar[bytes]
    """The same as the first four bytes of a payload."""
    NAME: ClassVar[str]
    """The name in the XML of the spec, for example ``basic.get-ok``."""
    SENT_BY: ClassVar[Sender]
    MODES: ClassVar[frozenset[ChannelMode]]
    """Modes of a channel in which it is allowed."""
    ANSWER: "ClassVar[type[Method] | None]"
    """The method that answers it. The answer to ``basic.get`` may also be ``basic.get-empty``."""
    FACTS: ClassVar[Fact]
    WIRE: ClassVar[tuple[tuple[str, str], ...]]
    """Names and kinds of the arguments in their order, the ticket included."""
    _pack: ClassVar[Callable[..., bytes]]

    @classmethod
    def decode(cls, payload: bytes) -> Self:
        """Read the payload of a method frame. It starts with class and method.

        Raises:
            WireError: 502 if the arguments are truncated or followed by further bytes.
            XaError: the same for a method that is ``SOFT``; also if its xid is malformed.
        """
        raise NotImplementedError

    def frame(self, channel: int) -> bytes:
        """Make a whole method frame.

        Raises:
            WireError: 502 for a short string longer than 255 bytes.
        """
        raise NotImplementedError

    def encode(self) -> bytes:
        """Return the payload that :meth:`decode` reads. The errors are those of :meth:`frame`."""
        return self.frame(0)[7:-1]


M = TypeVar("M", bound=type[Method])
P = ParamSpec("P")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def method(
    name: str,
    class_id: int,
    method_id: int,
    sent_by: Sender,
    facts: Fact = Fact.NONE,
    *,
    modes: frozenset[ChannelMode] = ANY_MODE,
    answer: type[Method] | None = None,
) -> Callable[[M], M]:
    """Make the decorated class a method. Its annotated fields are the arguments.

    Args:
        name: the name in the XML of the spec.
        class_id: number of the class.
        method_id: number of the method within the class.
        sent_by: the peers that send it.
        facts: see :class:`Fact`.
        modes: the modes of a channel in which it is allowed.
        answer: the method that answers it.
    """

    def make(cls: M) -> M:
        made: Any = dataclass(slots=True, unsafe_hash=True)(cls)
        made.KEY = class_id << 16 | method_id
        made.HEAD = _LONG.pack(made.KEY)
        made.NAME = name
        made.SENT_BY, made.MODES, made.ANSWER, made.FACTS = sent_by, modes, answer, facts
        kinds = get_type_hints(made, include_extras=True)
        ticket = [(TICKET, "H")] if facts & Fact.TICKET else []
        made.WIRE = (*ticket, *((each.name, get_args(kinds[each.name])[1]) for each in fields(made)))
        malformed = _malformed_in_channel if facts & Fact.SOFT else _malformed
        scope = compiled(made.KEY, made.WIRE, made, partial(malformed, name))
        made.decode = staticmethod(scope["decode"])
        made.frame = scope["frame"]
        scope["pack"].__defaults__ = made.__init__.__defaults__
        made._pack = staticmethod(scope["pack"])  # noqa: SLF001 - of its own class
        return made  # type: ignore[no-any-return]

    return make


def packer(cls: Callable[P, Method]) -> Callable[Concatenate[int, P], bytes]:
    """Return a function that makes a whole frame of *cls* without an object, from the channel and the fields."""
    return cls._pack  # type: ignore[attr-defined,no-any-return]  # cls is a class that method() decorates


def compiled(
    key: int,
    wire: Sequence[tuple[str, str]],
    make: Callable[..., object],
    malformed: Callable[[bytes], Exception],
) -> dict[str, Any]:
    """Compile the codec of a method.

    Args:
        key: class << 16 | method.
        wire: see :attr:`Method.WIRE`.
        make: takes the fields; ``decode`` returns its result.
        malformed: takes a payload that is truncated or too long, and returns the error.

    Returns:
        Three functions. ``decode`` takes a payload. ``pack`` makes a frame from a channel and the fields. ``frame``
        makes a frame from an object with the fields, and a channel.
    """
    source = _Source(key, [name for name, _ in wire if name != TICKET], wire)
    scope = {"cls": make, "malformed": malformed, **_SCOPE, **source.structs}
    exec(source.text, scope)  # noqa: S102  # the text comes from annotations only, as with dataclasses
    return scope


def _malformed(name: str, payload: bytes) -> WireError:  # noqa: ARG001 - same signature as _malformed_in_channel
    return syntax_error(f"{name} is truncated or too long")


def _malformed_in_channel(name: str, payload: bytes) -> XaError:
    return XaError(ReplyCode.SYNTAX_ERROR, f"{name} of {len(payload)} bytes is truncated or too long")


def _check_short(*values: bytes) -> None:
    """Raise WireError 502 for strings that are too long for a shortstr."""
    for value in values:
        put_short(value)


_SCOPE: Final = {
    "LONG": _LONG,
    "OCTETS": [bytes((value,)) for value in range(256)],
    "check": _check_short,
    "truncated": (IndexError, struct_error),
    "unfit": (IndexError, struct_error),
    "read_xid": read_xid,
}


class _Source:
    """The source text of ``decode``, ``pack`` and ``frame``.

    Consecutive numbers and bits are a run, and share one ``Struct``. A string ends a run.
    """

    def __init__(self, key: int, names: list[str], wire: Sequence[tuple[str, str]]) -> None:
        self.structs: dict[str, Struct] = {}
        runs: list[list[tuple[str, str]]] = [[]]
        for name, kind in wire:
            if kind in _STRINGS:
                runs += [[(name, kind)], []]
            else:
                runs[-1].append((name, kind))
        pack = self._pack(f"pack({', '.join(('channel', *names))})", key, runs, "")
        self.text = self._decode(names, runs) + pack + self._pack("frame(self, channel)", key, runs, "self.")

    def _struct(self, form: str) -> str:
        name = f"S{len(self.structs)}"
        self.structs[name] = Struct(form)
        return name

    def _decode(self, names: list[str], runs: list[list[tuple[str, str]]]) -> str:
        values: dict[str, str] = {}
        lines: list[str] = []
        at = "4"  # after class and method
        for number, run in enumerate(runs):
            if run and run[0][1] in _STRINGS:
                ((name, kind),) = run
                length = f"payload[{at}]" if kind == "short" else f"LONG.unpack_from(payload, {at})[0]"
                start, end = _after(at, 1 if kind == "short" else 4), f"end{number}"
                lines += [f"{end} = {start} + {length}", f"{name} = payload[{start}:{end}]"]
                values[name] = f"read_xid({name})" if kind == "xid" else name
                at = end
            elif run:
                form, parts = ">", list[str]()
                for name, letter, bits in _octets(run):
                    form += "2x" if name == TICKET else letter
                    if name != TICKET:
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
            f"        raise malformed(payload) from None\n    if {at} != len(payload):\n"
            f"        raise malformed(payload)\n    return cls({', '.join(values[name] for name in names)})\n\n"
        )

    def _pack(self, head: str, key: int, runs: list[list[tuple[str, str]]], owner: str) -> str:
        """Return the text of a function that makes a frame. *owner* is the prefix of the fields: "self." or none."""
        lines: list[str] = []
        form, packed = ">BHII", [str(METHOD), "channel", "{size}", str(key)]
        size = 4
        lengths: list[str] = []
        short: list[str] = []
        pieces: list[str] = []

        def put() -> None:
            """Make one piece of the numbers so far."""
            pieces.append(f"OCTETS[{packed[0]}]" if form == ">B" else f"{self._struct(form)}.pack({', '.join(packed)})")

        for run in runs:
            if run and run[0][1] in _STRINGS:
                ((name, kind),) = run
                lines.append(f"    {name} = {owner}{name}{'.to_wire()' if kind == 'xid' else ''}\n")
                lengths.append(f"len({name})")
                packed.append(f"len({name})")
                form += "B" if kind == "short" else "I"
                size += 1 if kind == "short" else 4
                if kind == "short":
                    short.append(name)
                put()
                form, packed = ">", []
                pieces.append(name)
            else:
                for name, letter, bits in _octets(run):
                    form += letter
                    size += Struct(">" + letter).size
                    shifted = " | ".join(f"{owner}{bit} << {at}" if at else owner + bit for at, bit in enumerate(bits))
                    packed.append("0" if name == TICKET else shifted or owner + name)
        form += "B"
        packed.append(str(FRAME_END))
        put()
        result = ", ".join(pieces).format(size=" + ".join((str(size), *lengths)))
        if not lengths:
            return f"def {head}:\n    return {result}\n\n"
        body = "".join(lines) + f"    try:\n        return b''.join(({result}))\n"
        return f"def {head}:\n{body}    except unfit:\n        check({', '.join(short)})\n        raise\n\n"


def _after(position: str, size: int) -> str:
    return str(int(position) + size) if position.isdigit() else f"{position} + {size}"


def _octets(run: list[tuple[str, str]]) -> list[tuple[str, str, list[str]]]:
    """Return the numbers of a run: name, struct format letter, and the bits that the number consists of, if any."""
    found: list[tuple[str, str, list[str]]] = []
    for name, kind in run:
        if kind != "bit":
            found.append((name, kind, []))
        elif found and found[-1][1] == "B" and found[-1][2]:
            found[-1][2].append(name)
        else:
            found.append((f"{name}_", "B", [name]))
    return found
