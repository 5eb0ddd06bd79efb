"""The sections of a message (AMQP 1.0, 3.2). The sections around the body are decoded; the body stays a slice."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NamedTuple

from dtx.wire.amqp10 import codec
from dtx.wire.amqp10 import composite as composites
from dtx.wire.amqp10.codec import CodecRoom
from dtx.wire.amqp10.composite import (
    BINARY,
    BOOLEAN,
    FIELDS,
    NAMED,
    STRING,
    SYMBOL,
    TIMESTAMP,
    UBYTE,
    UINT,
    Composite,
    Kind,
    composite,
    descriptor,
    encode,
    field,
)
from dtx.wire.amqp10.errors import malformed
from dtx.wire.amqp10.values import Symbol, ULong, Value

MAX_SECTIONS: Final = 4096
"""The maximum number of sections of a message. A body may be any number of data sections, and each costs a slice."""

_MESSAGE_ID: Final = Kind(
    "message-id",
    {code: codec.READERS[code] for code in (0x44, 0x53, 0x80, 0x98, 0xA0, 0xB0, 0xA1, 0xB1)},
    codec.write,
)


class Section(IntEnum):
    """The numeric descriptors of the sections, in the order of the sections."""

    HEADER = 0x70
    DELIVERY_ANNOTATIONS = 0x71
    MESSAGE_ANNOTATIONS = 0x72
    PROPERTIES = 0x73
    APPLICATION_PROPERTIES = 0x74
    DATA = 0x75
    SEQUENCE = 0x76
    VALUE = 0x77
    FOOTER = 0x78


_SYMBOLS: Final = {
    "amqp:header:list": Section.HEADER,
    "amqp:delivery-annotations:map": Section.DELIVERY_ANNOTATIONS,
    "amqp:message-annotations:map": Section.MESSAGE_ANNOTATIONS,
    "amqp:properties:list": Section.PROPERTIES,
    "amqp:application-properties:map": Section.APPLICATION_PROPERTIES,
    "amqp:data:binary": Section.DATA,
    "amqp:amqp-sequence:list": Section.SEQUENCE,
    "amqp:amqp-value:*": Section.VALUE,
    "amqp:footer:map": Section.FOOTER,
}
_SMALL_ULONG: Final = 0x53
_REPEATED: Final = (Section.DATA, Section.SEQUENCE)
_CODES: Final = {section.value: section for section in Section}


@composite(0x70, "amqp:header:list")
class Header(Composite):
    """The header section; ttl in milliseconds."""

    durable: bool = field(BOOLEAN, default=False)
    priority: int = field(UBYTE, default=4)
    ttl: int | None = field(UINT, default=None)
    first_acquirer: bool = field(BOOLEAN, default=False)
    delivery_count: int = field(UINT, default=0)


@composite(0x73, "amqp:properties:list")
class Properties(Composite):
    """The immutable properties; times in milliseconds since 1970. A message id is a ULong, UUID, bytes or str."""

    message_id: Value = field(_MESSAGE_ID, default=None)
    user_id: bytes | None = field(BINARY, default=None)
    to: str | None = field(STRING, default=None)
    subject: str | None = field(STRING, default=None)
    reply_to: str | None = field(STRING, default=None)
    correlation_id: Value = field(_MESSAGE_ID, default=None)
    content_type: str | None = field(SYMBOL, default=None)
    content_encoding: str | None = field(SYMBOL, default=None)
    absolute_expiry_time: int | None = field(TIMESTAMP, default=None)
    creation_time: int | None = field(TIMESTAMP, default=None)
    group_id: str | None = field(STRING, default=None)
    group_sequence: int | None = field(UINT, default=None)
    reply_to_group_id: str | None = field(STRING, default=None)


class Part(NamedTuple):
    """The positions of a section in the message: of its descriptor, of the constructor of its value, of its end."""

    section: Section
    start: int
    value: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message whose body is not decoded.

    Args:
        header, properties: these sections; an absent section has its default values.
        delivery_annotations, message_annotations, footer: values by symbol (reserved ulongs are refused).
        application_properties: values by name.
        parts: all sections.
        body: the sections of the body, all of one kind.
        bare: the bare message, which no intermediary may change: properties to body.
        payload: the whole message.
    """

    header: Header
    delivery_annotations: dict[str, Any]
    message_annotations: dict[str, Any]
    properties: Properties
    application_properties: dict[str, Any]
    parts: tuple[Part, ...]
    body: tuple[Part, ...]
    footer: dict[str, Any]
    bare: memoryview
    payload: memoryview

    @property
    def data(self) -> tuple[memoryview, ...] | None:
        """The bytes of a body of data sections, as slices; ``None`` for any other body."""
        if self.body[0].section is not Section.DATA:
            return None
        heads = {0xA0: 2, 0xB0: 5}
        return tuple(self.payload[part.value + heads[self.payload[part.value]] : part.end] for part in self.body)

    @property
    def value(self) -> Value:
        """The value of an amqp-value body.

        Raises:
            AmqpError: decode-error if the body is of another kind or malformed.
        """
        part = self.body[0]
        if part.section is not Section.VALUE:
            raise malformed(f"a body of {_name(part.section)}, must be a value")
        return codec.read(self.payload, part.value, part.end)[0]


def split(view: memoryview) -> list[Part]:
    """Cut a message into its sections without decoding them.

    Raises:
        AmqpError: decode-error; also if sections are repeated, in the wrong order, or more than :data:`MAX_SECTIONS`.
    """
    parts: list[Part] = []
    start = 0
    length = len(view)
    before = None
    try:
        while start < length:
            section, value = _section(view, start)
            end = codec.skip(view, value)
            if end > length:
                raise malformed(f"{_name(section)} is longer than the message")
            if before is not None and not _follows(before, section):
                raise malformed(f"{_name(section)} after {_name(before)}")
            parts.append(Part(section, start, value, end))
            if len(parts) > MAX_SECTIONS:
                raise malformed(f"more than {MAX_SECTIONS} sections")
            before, start = section, end
    except codec.READ_ERRORS as cause:
        raise codec.read_error("a message") from cause
    return parts


def _name(section: Section) -> str:
    return section.name.lower().replace("_", "-")


def _section(view: memoryview, position: int) -> tuple[Section, int]:
    """Return the section that begins at *position*, and the position of its value."""
    if view[position] != 0:
        raise malformed("a section without a descriptor")
    section = None
    if view[position + 1] == _SMALL_ULONG and (section := _CODES.get(view[position + 2])) is not None:
        return section, position + 3  # the usual encoding
    _, described_by, position = descriptor(view, position + 1, CodecRoom())
    if type(described_by) is ULong:
        section = _CODES.get(int(described_by))
    elif type(described_by) is Symbol:
        section = _SYMBOLS.get(str.__str__(described_by))
    if section is None:
        raise malformed(f"{described_by!r} is no section of a message")
    return section, position


def _follows(before: Section, section: Section) -> bool:
    """Return whether *section* may follow *before*. The order is fixed, and all sections of a body are of one kind."""
    if before is section:
        return section in _REPEATED
    if before >= Section.DATA:
        return section is Section.FOOTER
    return section > before


def body(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Return the sections of the body.

    Raises:
        AmqpError: decode-error if there is no body.
    """
    found = tuple([part for part in parts if Section.DATA <= part.section <= Section.VALUE])
    if not found:
        raise malformed("a message without a body")
    return found


def read(payload: bytes | memoryview) -> Message:
    """Read a message.

    Raises:
        AmqpError: decode-error; also for a message without a body.
    """
    view = memoryview(payload)
    parts = split(view)
    bodies = body(parts)
    if bodies[0].section is Section.DATA and any(view[part.value] not in BINARY.readers for part in bodies):
        raise malformed("a data section that is no binary")
    header, properties = _NO_HEADER, _NO_PROPERTIES
    maps: dict[Section, dict[str, Any]] = {}
    for part in parts:
        section = part.section
        if section is Section.HEADER:
            header = composites.read_list(view, part.value, Header)
        elif section is Section.PROPERTIES:
            properties = composites.read_list(view, part.value, Properties)
        elif section in _MAPS:
            maps[section] = composites.read_kind(view, part.value, _MAPS[section], _name(section))
    return Message(
        header=header,
        delivery_annotations=maps.get(Section.DELIVERY_ANNOTATIONS, {}),
        message_annotations=maps.get(Section.MESSAGE_ANNOTATIONS, {}),
        properties=properties,
        application_properties=maps.get(Section.APPLICATION_PROPERTIES, {}),
        parts=tuple(parts),
        body=bodies,
        footer=maps.get(Section.FOOTER, {}),
        bare=view[next(part.start for part in parts if part.section >= Section.PROPERTIES) : bodies[-1].end],
        payload=view,
    )


_NO_HEADER: Final = Header()
_NO_PROPERTIES: Final = Properties()
_MAPS: Final = {
    Section.DELIVERY_ANNOTATIONS: FIELDS,
    Section.MESSAGE_ANNOTATIONS: FIELDS,
    Section.APPLICATION_PROPERTIES: NAMED,
    Section.FOOTER: FIELDS,
}
"""The sections that are maps, with the kinds of their keys."""


def _map(section: Section, found: dict[str, Any], kind: Kind) -> bytes:
    """Encode a section that is a map; nothing for an empty map."""
    if not found:
        return b""
    out = bytearray((0x00, 0x53, section))
    kind.write(out, found)
    return bytes(out)


def head(
    header: Header,
    delivery_annotations: dict[str, Any] | None = None,
    message_annotations: dict[str, Any] | None = None,
) -> bytes:
    """Encode the sections before the bare message. A section with default values only is left out."""
    return b"".join(
        (
            encode(header) if header != Header() else b"",
            _map(Section.DELIVERY_ANNOTATIONS, delivery_annotations or {}, FIELDS),
            _map(Section.MESSAGE_ANNOTATIONS, message_annotations or {}, FIELDS),
        )
    )


def bare(properties: Properties, application_properties: dict[str, Any], body: bytes) -> bytes:
    """Encode a bare message. *body* is whole sections, for example of :func:`data`."""
    named = _map(Section.APPLICATION_PROPERTIES, application_properties, NAMED)
    return b"".join((encode(properties) if properties != Properties() else b"", named, body))


def data(octets: bytes | memoryview) -> bytes:
    """Encode a data section."""
    out = bytearray((0x00, 0x53, Section.DATA))
    codec.write_binary(out, octets)
    return bytes(out)


def value(found: Value | Composite) -> bytes:
    """Encode an amqp-value section."""
    out = b"\x00\x53\x77"
    return out + (encode(found) if isinstance(found, Composite) else codec.encode(found))
