"""Messages of AMQP 1.0 in the store, which keeps them in the form of AMQP 0-9."""

from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtx.server.amqp10.mapping import MAX_HEAD, Content, from_basic, to_basic
from dtx.store.postgres.property_scan import Traits, traits
from dtx.wire.amqp09 import properties as basic
from dtx.wire.amqp09 import tables
from dtx.wire.amqp09.properties import Property
from dtx.wire.amqp10 import codec, message
from dtx.wire.amqp10.errors import AmqpError, Condition
from dtx.wire.amqp10.message import Header, Properties
from dtx.wire.amqp10.values import (
    Byte,
    Char,
    Decimal32,
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
)

_texts = st.text(st.characters(codec="utf-8"), max_size=300)
_symbols = st.text(st.characters(codec="ascii"), max_size=300)
_ids = st.none() | _texts | st.uuids() | st.binary(max_size=300) | st.integers(0, 2**64 - 1).map(ULong)
_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(0, 255).map(UByte),
    st.integers(-128, 127).map(Byte),
    st.integers(0, 2**16 - 1).map(UShort),
    st.integers(-(2**15), 2**15 - 1).map(Short),
    st.integers(0, 2**32 - 1).map(UInt),
    st.integers(-(2**31), 2**31 - 1).map(Int),
    st.integers(0, 2**64 - 1).map(ULong),
    st.integers(-(2**63), 2**63 - 1).map(Long),
    st.floats(width=32, allow_nan=False).map(Float),
    st.floats(allow_nan=False),
    st.integers(-(2**63), 2**63 - 1).map(Timestamp),
    st.binary(min_size=4, max_size=4).map(Decimal32),
    st.characters(codec="utf-8").map(Char),
    st.uuids(),
    st.binary(max_size=40),
    _texts,
    _symbols.map(Symbol),
)
_keys = _texts | st.sampled_from(["CC", "BCC", "x-death", "x-amqp-1.0-body", "x-amqp-1.0-properties", "plain"])
_annotation_keys = st.sampled_from(["x-opt-a", "x-b", "x-death", "x-amqp-1.0-footer", "x-exchange", "other"]) | _symbols
_times = st.none() | st.integers(-(2**63), 2**63 - 1)
_properties = st.builds(
    Properties,
    message_id=_ids,
    user_id=st.none() | st.binary(max_size=300),
    to=st.none() | _texts,
    subject=st.none() | _texts,
    reply_to=st.none() | _texts | st.sampled_from(["/queues/a%20b", "/exchanges/e/k", "plain"]),
    correlation_id=_ids,
    content_type=st.none() | _symbols,
    content_encoding=st.none() | _symbols,
    absolute_expiry_time=_times,
    creation_time=_times,
    group_id=st.none() | _texts,
    group_sequence=st.none() | st.integers(0, 2**32 - 1),
    reply_to_group_id=st.none() | _texts,
)
_headers = st.builds(
    Header,
    durable=st.booleans(),
    priority=st.integers(0, 255),
    ttl=st.none() | st.integers(0, 2**32 - 1),
    first_acquirer=st.booleans(),
    delivery_count=st.integers(0, 2**32 - 1),
)


def _section(code: int, value: Any) -> bytes:
    return bytes((0, 0x53, code)) + codec.encode(value)


def _wide(code: int, octets: bytes, constructor: int = 0xB0) -> bytes:
    """A section in a longer form than needed, with the longer form of its descriptor."""
    return b"\x00\x80" + code.to_bytes(8, "big") + bytes((constructor,)) + len(octets).to_bytes(4, "big") + octets


_bodies = st.one_of(
    st.binary(max_size=600).map(message.data),
    st.lists(st.binary(max_size=300), min_size=1, max_size=4).map(lambda some: b"".join(map(message.data, some))),
    st.binary(max_size=300).map(lambda octets: _wide(0x75, octets)),
    _texts.map(lambda text: _section(0x77, text)),
    _texts.map(lambda text: _wide(0x77, text.encode(), 0xB1)),
    st.binary(max_size=300).map(lambda octets: _section(0x77, octets)),
    _scalars.map(lambda value: _section(0x77, value)),
    st.lists(_scalars, max_size=3).map(lambda some: _section(0x77, some)),
    st.dictionaries(_texts, _scalars, max_size=3).map(lambda some: _section(0x77, some)),
    st.lists(st.lists(_scalars, max_size=2), min_size=1, max_size=3).map(
        lambda some: b"".join(_section(0x76, one) for one in some)
    ),
)


def _through(payload: bytes) -> message.Message:
    content = to_basic(message.read(payload))
    return message.read(from_basic(content, b"logs", b"key", redelivered=False))


@settings(deadline=None)
@given(
    header=_headers,
    annotations=st.dictionaries(_annotation_keys, _scalars | st.lists(_scalars, max_size=2), max_size=4),
    properties=_properties,
    named=st.dictionaries(_keys, _scalars, max_size=4),
    body=_bodies,
    footer=st.dictionaries(_symbols, _scalars, max_size=2),
)
def test_an_amqp_1_0_message_is_returned_unchanged(
    header: Header,
    annotations: dict[str, Any],
    properties: Properties,
    named: dict[str, Any],
    body: bytes,
    footer: dict[str, Any],
) -> None:
    """3.2: "the exact encoding of sections of the bare message MUST NOT be modified"."""
    ending = b"" if not footer else _section(0x78, {Symbol(key): value for key, value in footer.items()})
    payload = message.head(header, {"x-opt-hop": 1}, annotations) + message.bare(properties, named, body) + ending
    sent = message.read(payload)

    got = _through(payload)

    assert bytes(got.bare) == bytes(sent.bare)
    assert bytes(got.payload).endswith(ending)
    assert got.footer == footer
    assert (got.header.durable, got.header.priority, got.header.ttl) == (header.durable, header.priority, header.ttl)
    assert got.delivery_annotations == {}
    kept = {name: value for name, value in annotations.items() if name not in ("x-exchange", "x-routing-key")}
    assert got.message_annotations == {**kept, "x-exchange": "logs", "x-routing-key": "key"}


def test_a_reader_of_amqp_0_9_finds_its_properties() -> None:
    said = Properties(
        message_id=UUID(int=7),
        user_id=b"alice",
        to="/queues/orders",
        subject="order",
        reply_to="/queues/a%20b",
        correlation_id=ULong(9),
        content_type="text/plain",
        content_encoding="gzip",
        creation_time=5999,
        group_id="shop",
    )
    payload = message.head(Header(durable=True, priority=9, ttl=70), None, {"x-opt-hop": Symbol("a")}) + message.bare(
        said, {"count": Int(3), "CC": "elsewhere"}, message.value("hello")
    )

    content = to_basic(message.read(payload))

    assert content.body == b"hello"
    assert traits(content.properties) == Traits(True, 9, b"70")
    view = basic.read(content.properties)
    assert view.message_id == b"00000000-0000-0000-0000-000000000007"
    assert view.correlation_id == b"9"
    assert view.user_id == b"alice"
    assert view.reply_to == b"a b"
    assert view.timestamp == 5
    assert view.value(Property.TYPE) == b"order"
    assert view.value(Property.CONTENT_TYPE) == b"text/plain"
    assert view.value(Property.CONTENT_ENCODING) == b"gzip"
    assert view.value(Property.APP_ID) == b"shop"
    shown = {entry.key: (entry.kind, entry.value) for entry in view.headers if not entry.key.startswith(b"x-amqp-1.0-")}
    assert shown == {b"count": (b"I", b"\0\0\0\3"), b"x-opt-hop": (b"S", b"a")}


def test_a_plain_message_takes_nothing_but_its_body() -> None:
    assert to_basic(message.read(message.data(b"hello"))) == Content(basic.EMPTY, b"hello")


def test_an_amqp_0_9_message_is_readable_as_1_0() -> None:
    table = b"".join(
        (
            tables.entry(b"count", b"I", b"\0\0\0\3"),
            tables.entry(b"nested", b"F", tables.entry(b"a", b"S", b"b")),
            tables.entry(b"x-death", b"A", b"F" + tables.put_long(tables.entry(b"count", b"l", bytes(7) + b"\1"))),
            tables.entry(b"price", b"D", b"\2\0\0\0\x7b"),
        )
    )
    raw = basic.build(
        {
            Property.MESSAGE_ID: b"m",
            Property.REPLY_TO: b"a b",
            Property.DELIVERY_MODE: b"\2",
            Property.EXPIRATION: b"70",
            Property.TIMESTAMP: (5).to_bytes(8, "big"),
            Property.CONTENT_TYPE: b"text/plain",
            Property.CORRELATION_ID: b"\xff",
            Property.HEADERS: table,
        }
    )

    got = message.read(from_basic(Content(raw, b"hello"), b"", b"q", redelivered=True))

    assert got.header == Header(durable=True, ttl=70)
    assert got.properties == Properties(
        message_id="m", correlation_id=b"\xff", reply_to="/queues/a%20b", creation_time=5000, content_type="text/plain"
    )
    assert got.application_properties == {"count": Int(3), "price": "1.23"}
    assert got.message_annotations == {
        "x-exchange": "",
        "x-routing-key": "q",
        "x-opt-nested": {"a": "b"},
        "x-death": [{"count": Long(1)}],
    }
    assert got.data is not None
    assert b"".join(got.data) == b"hello"


@settings(deadline=None)
@given(
    named=st.dictionaries(st.sampled_from(["a", "b", "x-c"]), st.binary(max_size=8), max_size=3),
    kept=st.dictionaries(
        st.sampled_from(["properties", "app-properties", "message-annotations", "footer", "body"]),
        st.binary(max_size=40) | _bodies | st.just(message.bare(Properties(user_id=b"root"), {"a": "b"}, b"")),
    ),
    body=st.binary(max_size=300) | _bodies,
)
def test_invented_sections_are_harmless(named: dict[str, bytes], kept: dict[str, bytes], body: bytes) -> None:
    """With any headers, a reader gets a message with the user-id that the broker has validated."""
    table = b"".join(
        [tables.entry(f"x-amqp-1.0-{name}".encode(), b"x", octets) for name, octets in kept.items()]
        + [tables.entry(name.encode(), b"x", octets) for name, octets in named.items()]
    )
    raw = basic.build({Property.USER_ID: b"guest", Property.HEADERS: table})

    got = message.read(from_basic(Content(raw, body), b"", b"q", redelivered=False))

    assert got.properties.user_id == b"guest"
    assert got.application_properties == {name: octets for name, octets in named.items() if name != "x-c"}


def test_properties_changed_on_the_way_are_used() -> None:
    payload = message.bare(Properties(message_id="old", to="kept"), {"a": "old"}, message.data(b""))
    raw = to_basic(message.read(payload)).properties
    raw = basic.set_header(basic.put(raw, Property.MESSAGE_ID, b"new"), b"a", b"new")

    got = message.read(from_basic(Content(raw, b""), b"", b"q", redelivered=False))

    assert got.properties == Properties(message_id="new")
    assert got.application_properties == {"a": "new"}


def test_too_much_beside_the_body_is_refused() -> None:
    payload = message.bare(Properties(), {"a": "b" * MAX_HEAD}, message.data(b""))
    with pytest.raises(AmqpError, match="outside the body of a message") as refusal:
        to_basic(message.read(payload))
    assert refusal.value.condition is Condition.MESSAGE_SIZE_EXCEEDED
