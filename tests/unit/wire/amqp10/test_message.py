"""Messages: their sections in order, and the body as a slice of the received bytes."""

from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtx.wire.amqp10 import message
from dtx.wire.amqp10.codec import encode
from dtx.wire.amqp10.errors import AmqpError, Condition
from dtx.wire.amqp10.message import Header, Properties, bare, data, head, read, value
from dtx.wire.amqp10.performatives import Declare
from dtx.wire.amqp10.values import Described, Long, Symbol, UInt, ULong

PROPERTIES = Properties(message_id=ULong(5), user_id=b"guest", to="q", correlation_id=UUID(int=1), creation_time=-1)
BODY = data(b"abc") + data(bytes(300))
BARE = bare(PROPERTIES, {"a": UInt(1)}, BODY)
FOOTER = b"\x00\x53\x78" + encode({Symbol("f"): True})
WHOLE = head(Header(durable=True, priority=0), {"d": "1"}, {"x-opt": Long(2)}) + BARE + FOOTER


def octets_of(found: message.Message) -> list[bytes]:
    return [bytes(part) for part in found.data or ()]


def test_every_section_is_read() -> None:
    found = read(WHOLE)
    assert found.header == Header(durable=True, priority=0)
    assert found.delivery_annotations == {"d": "1"}
    assert found.message_annotations == {"x-opt": Long(2)}
    assert found.properties == PROPERTIES
    assert found.application_properties == {"a": UInt(1)}
    assert octets_of(found) == [b"abc", bytes(300)]
    assert found.footer == {"f": True}
    assert found.bare == BARE


def test_a_body_is_a_slice_of_the_received_bytes() -> None:
    received = bytearray(WHOLE)
    (_, long) = read(memoryview(received)).data or ()
    received[WHOLE.index(bytes(300))] = 7
    assert long[0] == 7


def test_absent_sections_have_defaults() -> None:
    found = read(data(b""))
    assert found.header == Header()
    assert found.header.priority == 4
    assert found.properties == Properties()
    assert (found.delivery_annotations, found.message_annotations, found.footer) == ({}, {}, {})
    assert found.application_properties == {}
    assert found.bare == data(b"") == bare(Properties(), {}, data(b""))
    assert octets_of(found) == [b""]
    assert head(Header()) == b""


def test_a_value_is_decoded_when_it_is_asked_for() -> None:
    assert read(value({"a": 1})).value == {"a": Long(1)}
    assert read(value(Declare())).value == Described(ULong(0x31), [])
    assert read(value(None)).data is None
    with pytest.raises(AmqpError, match="a body of data, must be"):
        _ = read(data(b"")).value
    with pytest.raises(AmqpError):
        _ = read(b"\x00\x53\x77\xa1\x01\xff").value


def test_descriptors_may_be_symbolic() -> None:
    sections = {
        "amqp:header:list": [],
        "amqp:delivery-annotations:map": {},
        "amqp:message-annotations:map": {},
        "amqp:properties:list": [],
        "amqp:application-properties:map": {},
        "amqp:amqp-sequence:list": [1],
        "amqp:footer:map": {},
    }
    payload = b"".join(encode(Described(Symbol(name), section)) for name, section in sections.items())  # type: ignore[arg-type]
    found = read(payload)
    assert [part.section for part in message.split(memoryview(payload))] == [
        *list(message.Section)[:5],
        message.Section.SEQUENCE,
        message.Section.FOOTER,
    ]
    assert found.data is None


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"", "without a body"),
        (b"\x00\x53\x70\x45", "without a body"),
        (b"\x40", "without a descriptor"),
        (b"\x00\x53\x79\x40", "no section"),
        (b"\x00\xa3\x01a\x40", "no section"),
        (b"\x00\x40\x40", "no section"),
        (b"\x00", "truncated"),
        (b"\x00\x53\x75\xa0\x05ab", "data is longer than the message"),
        (b"\x00\x53\x75\x3f", "not known"),
        (b"\x00\x53\x75\x40", "no binary"),
        (b"\x00\x53\x70\x40" + BODY, "header is described, but no list"),
        (b"\x00\x53\x71\x45" + BODY, "delivery-annotations is no fields"),
        (b"\x00\x53\x71\xc1\x02\x01\x40" + BODY, "key that has no value"),
        (b"\x00\x53\x71\xc1\x03\x02\x41\x40" + BODY, "no symbol"),
        (b"\x00\x53\x72\x00\x40\xc1\x01\x00" + BODY, "message-annotations is no fields"),
        (b"\x00\x53\x74\xc1\x03\x02\x41\x40" + BODY, "no string"),
        (b"\x00\x53\x70\xc0\x04\x01\x50\x01\x40" + BODY, "durable of header is no boolean"),
        (b"\x00\x53\x73\xc0\x04\x01\xa1\x01\xff" + BODY, "properties is truncated, or"),
        (b"\x00\x53\x74\xc1\x05\x02\xa1\x01\xff\x40" + BODY, "application-properties is truncated, or"),
        (BODY + b"\x00\x53\x70\x45", "header after data"),
        (b"\x00\x53\x70\x45\x00\x53\x70\x45" + BODY, "header after header"),
        (BARE + b"\x00\x53\x74\xc1\x01\x00", "application-properties after data"),
        (BODY + value(None), "value after data"),
        (value(None) + value(None), "value after value"),
        (FOOTER + BODY, "data after footer"),
        (BODY + FOOTER + FOOTER, "footer after footer"),
    ],
)
def test_an_invalid_message_is_a_decode_error(payload: bytes, words: str) -> None:
    with pytest.raises(AmqpError, match=words) as caught:
        read(payload)
    assert caught.value.condition is Condition.DECODE_ERROR


def test_the_number_of_sections_is_limited() -> None:
    one = data(b"")
    read(one * message.MAX_SECTIONS)
    with pytest.raises(AmqpError, match="more than 4096 sections"):
        read(one * (message.MAX_SECTIONS + 1))


@settings(deadline=None)
@given(st.binary(max_size=200), st.integers(0, len(WHOLE)))
def test_any_bytes_are_a_message_or_are_refused(octets: bytes, place: int) -> None:
    for payload in (octets, WHOLE[:place] + octets, WHOLE[:place] + octets + WHOLE[place + len(octets) :]):
        found: Any = None
        try:
            found = read(payload)
        except AmqpError:
            continue
        assert bytes(found.bare) in payload
