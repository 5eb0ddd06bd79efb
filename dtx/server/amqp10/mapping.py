"""Conversion of messages from AMQP 1.0 to AMQP 0-9, and back.

The store keeps a message as AMQP 0-9 does: properties, headers, a body. The fields of an AMQP 1.0 message are mapped to
these for readers of AMQP 0-9. The bytes of its sections are kept as well, in headers of type ``x``. So readers of AMQP
1.0 get the bare message exactly as it was sent ("the exact encoding of sections of the bare message MUST NOT be
modified", 3.2). Kept sections are used only while they agree with the properties and headers. Changes of these on the
way take precedence, and forged headers have no effect.

| AMQP 1.0 | AMQP 0-9 |
|---|---|
| header: durable, priority (other than 4), ttl | delivery-mode 2, priority, expiration |
| message-id, correlation-id | the same; ulong and uuid as text, binary in hexadecimal digits |
| content-type, content-encoding, user-id | the same |
| creation-time (milliseconds) | timestamp (seconds) |
| subject, group-id | type, app-id |
| reply-to ``/queues/NAME`` | reply-to ``NAME`` |
| application properties | headers |
| message annotations ``x-…`` | headers ``x-…`` |
| data sections; a value that is a string or binary | the body |
| any other body | the body: its sections as they are |

Delivery annotations are for the next node only, which is dtx. It knows none, and drops them (3.2.2).
"""

from typing import Any, Final, NamedTuple

from dtx.server.amqp10 import addresses
from dtx.server.amqp10.values import Field, from_field, is_simple, milliseconds, to_field
from dtx.wire.amqp09 import properties, tables
from dtx.wire.amqp09.properties import Property
from dtx.wire.amqp09.tables import Entry
from dtx.wire.amqp10 import codec, message
from dtx.wire.amqp10.errors import AmqpError, Condition, malformed
from dtx.wire.amqp10.message import Header, Message, Part, Properties, Section
from dtx.wire.amqp10.performatives import Modified
from dtx.wire.amqp10.values import Value

MAX_HEAD: Final = 48 << 10
"""Bytes of a message outside its body. Kept twice, they must fit into one AMQP 0-9 frame, usually of 128 KiB."""

KEPT: Final = b"x-amqp-1.0-"
"""The prefix of headers that keep the original sections of a message."""
_PROPERTIES: Final = KEPT + b"properties"
_NAMED: Final = KEPT + b"app-properties"
ANNOTATIONS: Final = KEPT + b"message-annotations"
_FOOTER: Final = KEPT + b"footer"
_BODY: Final = KEPT + b"body"
_OURS: Final = frozenset((b"x-exchange", b"x-routing-key", properties.DELIVERY_COUNT, b"x-acquired-count"))
"""Annotations that dtx sets itself, as RabbitMQ does."""
_ROUTING: Final = frozenset((b"CC", b"BCC"))
"""Headers that route a message; application properties must not set them."""
_DEFAULT_PRIORITY: Final = 4
_MAX_TTL: Final = 2**32 - 1
_MAX_COUNT: Final = 2**32 - 1
_TEXTS: Final = {0xA0: 2, 0xB0: 5, 0xA1: 2, 0xB1: 5}
"""Constructors of binary and string, and the octets of constructor and size."""
_DATA: Final = b"\x00\x53\x75"
_Table = dict[bytes, Field]


class Content(NamedTuple):
    """A message in the form of AMQP 0-9.

    Args:
        properties: the content header from the property flags on.
        body: bytes.
    """

    properties: bytes
    body: bytes


# -- from AMQP 1.0


def to_basic(found: Message) -> Content:
    """Convert a message of AMQP 1.0 for the store.

    Raises:
        AmqpError: message-size-exceeded, it has more than :data:`MAX_HEAD` bytes outside its body.
    """
    payload = found.payload
    head = len(payload) - found.body[-1].end + found.body[0].start
    if head > MAX_HEAD:
        raise AmqpError(
            Condition.MESSAGE_SIZE_EXCEEDED, f"{head} bytes outside the body of a message, {MAX_HEAD} at most"
        )
    fields = _fields(found.properties)
    _carry(fields, found.header)
    headers = _named(found.application_properties) | annotated(found.message_annotations)
    frame, body = _body(payload, found.body)
    kept: _Table = {}
    for part in found.parts:
        name = _SECTIONS.get(part.section)
        if name is not None:
            kept[name] = (b"x", bytes(payload[part.start : part.end]))
    if found.body[-1].end < len(payload):
        kept[_FOOTER] = (b"x", bytes(payload[found.body[-1].end :]))
    if frame is not None:
        kept[_BODY] = (b"x", frame)
    table = b"".join(tables.entry(name, *field) for name, field in (headers | kept).items())
    if table:
        fields[Property.HEADERS] = table
    return Content(properties.build(fields), body)


_SECTIONS: Final = {
    Section.MESSAGE_ANNOTATIONS: ANNOTATIONS,
    Section.PROPERTIES: _PROPERTIES,
    Section.APPLICATION_PROPERTIES: _NAMED,
}


def _carry(fields: dict[Property, bytes], header: Header) -> None:
    if header.durable:
        fields[Property.DELIVERY_MODE] = bytes((properties.PERSISTENT,))
    if header.priority != _DEFAULT_PRIORITY:
        fields[Property.PRIORITY] = bytes((header.priority,))
    if header.ttl is not None:
        fields[Property.EXPIRATION] = str(header.ttl).encode()


def _fields(section: Properties) -> dict[Property, bytes]:
    """The fields for which AMQP 0-9 has a property."""
    texts = {
        Property.MESSAGE_ID: _identity(section.message_id),
        Property.CORRELATION_ID: _identity(section.correlation_id),
        Property.CONTENT_TYPE: _octets(section.content_type),
        Property.CONTENT_ENCODING: _octets(section.content_encoding),
        Property.TYPE: _octets(section.subject),
        Property.APP_ID: _octets(section.group_id),
        Property.USER_ID: section.user_id,
        Property.REPLY_TO: None if section.reply_to is None else addresses.reply_name(section.reply_to),
    }
    fields = {
        which: octets for which, octets in texts.items() if octets is not None and len(octets) <= tables.MAX_SHORT
    }
    if section.creation_time is not None and section.creation_time >= 0:
        fields[Property.TIMESTAMP] = (section.creation_time // 1000).to_bytes(8, "big")
    return fields


def _octets(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


def _identity(value: Value) -> bytes | None:
    if value is None:
        return None
    return (value.hex() if isinstance(value, bytes) else str(value)).encode()


def _named(named: dict[str, Any]) -> _Table:
    """Application properties as headers."""
    found: _Table = {}
    for name, value in named.items():
        key, field = name.encode(), to_field(value)
        if field is not None and len(key) <= tables.MAX_SHORT and key not in _ROUTING and not is_annotation(key):
            found[key] = field
    return found


def annotated(annotations: dict[str, Any]) -> _Table:
    """Message annotations as headers."""
    found: _Table = {}
    for name, value in annotations.items():
        key, field = name.encode(), to_field(value)
        if field is not None and len(key) <= tables.MAX_SHORT and is_annotation(key) and not is_ours(key):
            found[key] = field
    return found


def is_ours(key: bytes) -> bool:
    """Whether dtx sets this annotation itself, or keeps a section in this header."""
    return key in _OURS or key.startswith(KEPT)


def is_annotation(key: bytes) -> bool:
    """Whether a header of this name is an annotation, not an application property."""
    return key.startswith(b"x-")


def _body(payload: memoryview, parts: tuple[Part, ...]) -> tuple[bytes | None, bytes]:
    """The frame of the body, and the body. ``None``: one data section. Empty: the body is the sections themselves."""
    first = parts[0]
    if first.section is Section.SEQUENCE or payload[first.value] not in _TEXTS:
        return b"", bytes(payload[first.start : parts[-1].end])
    pieces, frames = [], []
    for part in parts:
        start = part.value + _TEXTS[payload[part.value]]
        frames.append(payload[part.start : start])
        pieces.append(payload[start : part.end])
    body, frame = b"".join(pieces), b"".join(frames)
    return (None if frame == _shortest(len(body)) else frame), body


def _shortest(size: int) -> bytes:
    """The octets before the content of a data section that dtx writes."""
    return _DATA + (bytes((0xA0, size)) if size < 256 else b"\xb0" + size.to_bytes(4, "big"))


# -- to AMQP 1.0


class _Kept(NamedTuple):
    """The kept sections of a message, as bytes, and their content.

    Args:
        message: the message that they form.
        properties, named, footer: these sections.
        body: all sections of the body.
    """

    message: Message
    properties: bytes
    named: bytes
    body: bytes
    footer: bytes


def from_basic(content: Content, exchange: bytes, routing_key: bytes, *, redelivered: bool) -> bytes:
    """Convert a stored message for a reader of AMQP 1.0.

    Args:
        content: the stored message.
        exchange: the exchange of its publish; becomes an annotation.
        routing_key: the key of its publish; becomes an annotation.
        redelivered: the message may have been delivered before.

    Raises:
        WireError: 502, its properties are malformed.
    """
    view = properties.read(content.properties)
    headers: dict[bytes, Entry] = {}
    for entry in view.headers:
        headers.setdefault(entry.key, entry)
    kept = _kept(headers, content.body)
    annotations = _annotations(headers, kept.message.message_annotations if kept is not None else {})
    annotations["x-exchange"] = _name(exchange)
    annotations["x-routing-key"] = _name(routing_key)
    return b"".join(
        (
            message.head(_header(view, headers, redelivered=redelivered), None, annotations),
            _properties_section(view, kept),
            _named_section(headers, kept),
            message.data(content.body) if kept is None else kept.body,
            b"" if kept is None else kept.footer,
        )
    )


def _name(octets: bytes) -> Value:
    try:
        return octets.decode()
    except UnicodeDecodeError:
        return octets


def failed_deliveries(headers: dict[bytes, Entry]) -> int:
    """The number of failed deliveries of a message, by its *headers*."""
    found = headers.get(properties.DELIVERY_COUNT)
    count = None if found is None or not is_simple(found) else from_field(found)
    return min(count, _MAX_COUNT) if isinstance(count, int) and not isinstance(count, bool) and count > 0 else 0


def _header(view: properties.BasicProperties, headers: dict[bytes, Entry], *, redelivered: bool) -> Header:
    expiration = view.expiration
    return Header(
        durable=view.delivery_mode == properties.PERSISTENT,
        priority=_DEFAULT_PRIORITY if view.priority is None else view.priority,
        ttl=None if expiration is None else min(int(expiration), _MAX_TTL),
        first_acquirer=not redelivered,
        # Dead letters and republished messages may have the header: "on first delivery, the value is zero" (3.2.1).
        delivery_count=failed_deliveries(headers) if redelivered else 0,
    )


def _kept(headers: dict[bytes, Entry], body: bytes) -> _Kept | None:
    """The kept sections; ``None`` if there are none, or if they do not form a message."""
    raw = {name: headers[name].value for name in _ALL if name in headers and headers[name].kind == b"x"}
    if not raw:
        return None
    pieces = {name: raw.get(name, b"") for name in (ANNOTATIONS, _PROPERTIES, _NAMED, _FOOTER)}
    try:
        sections = _framed(raw[_BODY], body) if _BODY in raw else message.data(body)
        whole = b"".join((pieces[ANNOTATIONS], pieces[_PROPERTIES], pieces[_NAMED], sections, pieces[_FOOTER]))
        parsed = message.read(whole)
        around = [part.section for part in parsed.parts if part not in parsed.body]
    except AmqpError:
        return None
    if around != [section for section, name in _PLACES if pieces[name]]:
        return None
    return _Kept(parsed, pieces[_PROPERTIES], pieces[_NAMED], sections, pieces[_FOOTER])


_PLACES: Final = (*_SECTIONS.items(), (Section.FOOTER, _FOOTER))
_ALL: Final = (*_SECTIONS.values(), _BODY, _FOOTER)


def _framed(frame: bytes, body: bytes) -> bytes:
    """The sections of *body*, by its frame. Without a frame, the body is the sections.

    Raises:
        AmqpError: decode-error, frame and body do not match.
    """
    if not frame:
        return body
    pieces: list[bytes] = []
    start = position = 0
    with codec.reading("the frame of a body"):
        while start < len(frame):
            constructor = codec.skip(frame, start + 1)
            end = constructor + _TEXTS.get(frame[constructor], len(frame))
            size = int.from_bytes(frame[constructor + 1 : end], "big")
            pieces += (frame[start:end], body[position : position + size])
            start, position = end, position + size
    if position != len(body):
        raise malformed("the frame of a body does not match it")
    return b"".join(pieces)


def _properties_section(view: properties.BasicProperties, kept: _Kept | None) -> bytes:
    fields = {which: octets for which in _MAPPED if (octets := view.value(which)) is not None}
    if kept is not None and kept.properties and _fields(kept.message.properties) == fields:
        return kept.properties
    return message.bare(_properties(fields), {}, b"") if fields else b""


_MAPPED: Final = (
    Property.MESSAGE_ID,
    Property.CORRELATION_ID,
    Property.CONTENT_TYPE,
    Property.CONTENT_ENCODING,
    Property.TYPE,
    Property.APP_ID,
    Property.USER_ID,
    Property.REPLY_TO,
    Property.TIMESTAMP,
)


def _properties(fields: dict[Property, bytes]) -> Properties:
    """The properties section for the properties of AMQP 0-9."""
    texts = {which: _name(octets) for which, octets in fields.items() if which is not Property.TIMESTAMP}
    reply_to = fields.get(Property.REPLY_TO)
    seconds = fields.get(Property.TIMESTAMP)
    return Properties(
        message_id=texts.get(Property.MESSAGE_ID),
        user_id=fields.get(Property.USER_ID),
        subject=_text(texts.get(Property.TYPE)),
        reply_to=addresses.of_queue(reply_to) if reply_to else None,
        correlation_id=texts.get(Property.CORRELATION_ID),
        content_type=_symbol(texts.get(Property.CONTENT_TYPE)),
        content_encoding=_symbol(texts.get(Property.CONTENT_ENCODING)),
        creation_time=None if seconds is None else int(milliseconds(seconds)),
        group_id=_text(texts.get(Property.APP_ID)),
    )


def _text(value: Value) -> str | None:
    return value if isinstance(value, str) else None


def _symbol(value: Value) -> str | None:
    return value if isinstance(value, str) and value.isascii() else None


def _named_section(headers: dict[bytes, Entry], kept: _Kept | None) -> bytes:
    plain = {key: entry for key, entry in headers.items() if not is_annotation(key) and is_simple(entry)}
    if kept is not None and kept.named:
        fields = {key: (entry.kind, entry.value) for key, entry in plain.items()}
        if _named(kept.message.application_properties) == fields:
            return kept.named
    named: dict[str, Any] = {}
    for key, entry in plain.items():
        name = _name(key)
        if isinstance(name, str):
            named[name] = from_field(entry)
    return message.bare(Properties(), named, b"")


def _annotations(headers: dict[bytes, Entry], annotations: dict[str, Any]) -> dict[str, Any]:
    """The kept annotations that still agree with the headers, and annotations for all other headers."""
    shown = annotated(annotations)
    found = {name: value for name, value in annotations.items() if _still(headers, name.encode(), shown)}
    for key, entry in headers.items():
        if key.startswith(KEPT) or not key.isascii():
            continue
        name = key.decode()
        if is_annotation(key):
            found.setdefault(name, from_field(entry))
        elif not is_simple(entry):
            found.setdefault(f"x-opt-{name}", from_field(entry))
    return found


def _still(headers: dict[bytes, Entry], key: bytes, shown: _Table) -> bool:
    """Whether the header of an annotation is unchanged, or the annotation has none."""
    if key not in shown:
        return True
    entry = headers.get(key)
    return entry is not None and shown[key] == (entry.kind, entry.value)


_MAX_OCTETS: Final = 2 * MAX_HEAD
"""The limit for properties that annotations are added to: :data:`MAX_HEAD`, kept twice."""


def modified(raw: bytes, outcome: Modified, *, redelivered: bool) -> bytes:
    """The properties of a message after the outcome modified.

    "The value in this field associated with that key replaces the one in the existing headers": annotations are
    replaced one by one. If the result is too large, the annotations stay as they were.

    Args:
        raw: the properties of the message.
        outcome: the outcome of its delivery.
        redelivered: whether it was delivered before; otherwise its count of failed deliveries is ignored.

    Raises:
        WireError: 502, the properties are malformed.
    """
    headers: dict[bytes, Entry] = {}
    for entry in properties.read(raw).headers:
        headers.setdefault(entry.key, entry)
    if outcome.delivery_failed:
        count = (failed_deliveries(headers) if redelivered else 0) + 1
        raw = properties.set_headers(raw, {properties.DELIVERY_COUNT: (b"l", count.to_bytes(8, "big"))})
    if not outcome.message_annotations:
        return raw
    revised = _annotate(raw, headers, outcome.message_annotations)
    return revised if len(revised) <= _MAX_OCTETS else raw


def _annotate(raw: bytes, headers: dict[bytes, Entry], new: dict[str, Any]) -> bytes:
    new = {name: value for name, value in new.items() if not is_ours(name.encode())}
    shown = annotated(new)
    # Values without a type in AMQP 0-9 are only in the section; older headers of these annotations are stale.
    stale = [key for key in map(str.encode, new) if is_annotation(key) and key in headers and key not in shown]
    section = message.head(Header(), None, _kept_annotations(headers) | new)
    return properties.set_headers(properties.remove_headers(raw, stale), shown | {ANNOTATIONS: (b"x", section)})


def _kept_annotations(headers: dict[bytes, Entry]) -> dict[str, Any]:
    """The kept annotations of a message."""
    entry = headers.get(ANNOTATIONS)
    if entry is None or entry.kind != b"x":
        return {}
    try:
        return message.read(entry.value + message.data(b"")).message_annotations
    except AmqpError:  # a forged header
        return {}
