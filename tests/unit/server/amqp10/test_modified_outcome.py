"""The effect of the outcome *modified* on a message in the store."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtx.server.amqp10.mapping import Content, from_basic, modified, to_basic
from dtx.wire.amqp09 import properties as basic
from dtx.wire.amqp09 import tables
from dtx.wire.amqp09.properties import Property
from dtx.wire.amqp10 import message
from dtx.wire.amqp10.message import Header, Message, Properties
from dtx.wire.amqp10.performatives import Modified
from dtx.wire.amqp10.values import Int, Long, Symbol

_BODY = message.data(b"body")
FAILED = Modified(delivery_failed=True)


def stored(annotations: dict[str, Any] | None = None, properties: Properties | None = None) -> Content:
    """A message as a sender of AMQP 1.0 made it."""
    bare = message.bare(properties or Properties(), {"app": "mine"}, _BODY)
    return to_basic(message.read(message.head(Header(durable=True), None, annotations or {}) + bare))


def seen(raw: bytes, content: Content, *, redelivered: bool = True) -> Message:
    """The message as the next receiver of AMQP 1.0 gets it."""
    return message.read(from_basic(Content(raw, content.body), b"", b"q", redelivered=redelivered))


def annotations(found: Message) -> dict[str, Any]:
    """Annotations without dtx's own."""
    own = ("x-exchange", "x-routing-key", "x-delivery-count")
    return {key: value for key, value in found.message_annotations.items() if key not in own}


def test_each_failed_delivery_counts() -> None:
    """3.4.5: "any messages modified MUST have their delivery-count incremented"."""
    content = stored({"x-opt-a": "kept"}, Properties(message_id="m"))
    raw = modified(content.properties, FAILED, redelivered=False)
    assert seen(raw, content).header.delivery_count == 1
    raw = modified(raw, FAILED, redelivered=True)
    found = seen(raw, content)
    assert (found.header.delivery_count, found.header.first_acquirer, found.header.durable) == (2, False, True)
    assert (annotations(found), found.properties.message_id) == ({"x-opt-a": "kept"}, "m")
    assert bytes(found.bare) == bytes(seen(content.properties, content).bare)


def test_a_delivery_count_in_a_message_is_ignored() -> None:
    """3.2.1: "on first delivery, the value is zero"; a dead letter was counted in another queue."""
    content = stored()
    raw = modified(modified(content.properties, FAILED, redelivered=False), FAILED, redelivered=True)
    assert seen(raw, content, redelivered=False).header.delivery_count == 0
    raw = modified(raw, FAILED, redelivered=False)
    assert seen(raw, content).header.delivery_count == 1


def test_without_a_broker_dtx_counts_itself() -> None:
    content = stored({"x-delivery-count": 7})
    assert seen(content.properties, content).header.delivery_count == 0
    change = Modified(
        message_annotations={"x-delivery-count": 7, "x-exchange": "x", "x-amqp-1.0-body": b"", "x-a": "b"}
    )
    raw = modified(stored().properties, change, redelivered=False)
    found = seen(raw, content)
    assert (found.header.delivery_count, found.message_annotations["x-exchange"]) == (0, "")
    assert annotations(found) == {"x-a": "b"}


@pytest.mark.parametrize("value", [b"\x00" * 8, (-1).to_bytes(8, "big", signed=True), b"\x7f" + b"\xff" * 7])
def test_a_header_that_counts_nonsense_breaks_nothing(value: bytes) -> None:
    raw = basic.build({Property.HEADERS: tables.entry(b"x-delivery-count", b"l", value)})
    found = seen(raw, Content(raw, b"body"))
    assert found.header.delivery_count in (0, 2**32 - 1)
    assert seen(modified(raw, FAILED, redelivered=True), Content(raw, b"")).header.delivery_count > 0
    text = basic.build({Property.HEADERS: tables.entry(b"x-delivery-count", b"S", b"many")})
    assert seen(text, Content(text, b"body")).header.delivery_count == 0


def test_annotations_are_combined_and_those_of_the_outcome_take_precedence() -> None:
    content = stored({"x-opt-a": "old", "x-opt-b": "b", "plain": ["a"]})
    change = Modified(message_annotations={"x-opt-a": "new", "x-opt-c": {"why": ["late"]}, "other": Symbol("s")})
    raw = modified(content.properties, change, redelivered=False)
    found = seen(raw, content)
    assert annotations(found) == {
        "x-opt-a": "new", "x-opt-b": "b", "plain": ["a"], "x-opt-c": {"why": ["late"]}, "other": Symbol("s"),
    }  # fmt: skip
    assert found.header.delivery_count == 0
    again = modified(raw, Modified(message_annotations={"x-opt-c": Long(3), "x-opt-a": ["7"]}), redelivered=True)
    assert annotations(seen(again, content)) == {
        "x-opt-a": ["7"], "x-opt-b": "b", "plain": ["a"], "x-opt-c": Long(3), "other": Symbol("s"),
    }  # fmt: skip
    # A reader of AMQP 0-9 finds the values that it has types for, and no old ones.
    headers = {entry.key: entry.value for entry in basic.read(again).headers}
    assert (b"x-opt-a" in headers, headers[b"x-opt-c"][-1]) == (False, 3)


def test_a_message_of_amqp_0_9_is_annotated_too() -> None:
    raw = basic.build(
        {Property.MESSAGE_ID: b"m", Property.HEADERS: tables.entry(b"n", b"I", b"\x00\x00\x00\x07")},
    )
    changed = modified(raw, Modified(message_annotations={"x-opt-why": "late", "odd": {}}), redelivered=False)
    found = seen(changed, Content(raw, b"octets"))
    assert annotations(found) == {"x-opt-why": "late", "odd": {}}
    assert (found.properties.message_id, found.application_properties) == ("m", {"n": Int(7)})
    assert [bytes(octets) for octets in found.data or ()] == [b"octets"]


def test_annotations_that_are_too_much_leave_those_of_the_message() -> None:
    content = stored({"x-opt-a": "kept"})
    change = Modified(delivery_failed=True, message_annotations={"x-opt-a": "x" * 60_000})
    found = seen(modified(content.properties, change, redelivered=False), content)
    assert (annotations(found), found.header.delivery_count) == ({"x-opt-a": "kept"}, 1)


def test_foreign_bytes_in_that_header_are_no_annotations() -> None:
    raw = basic.build({Property.HEADERS: tables.entry(b"x-amqp-1.0-message-annotations", b"x", b"\x00\xff")})
    found = seen(modified(raw, Modified(message_annotations={"x-a": "b"}), redelivered=False), Content(raw, b""))
    assert annotations(found) == {"x-a": "b"}


_values = st.none() | st.booleans() | st.text(max_size=20) | st.lists(st.text(max_size=5), max_size=3)
_maps = st.dictionaries(st.sampled_from(["x-opt-a", "x-b", "c", "x-d", "e" * 300, "x-" + "f" * 300]), _values)


@settings(deadline=None)
@given(_maps, st.lists(_maps, max_size=4))
def test_changes_add_up(first: dict[str, Any], changes: list[dict[str, Any]]) -> None:
    content = stored(first)
    raw, expected = content.properties, dict(first)
    for change in changes:
        raw = modified(raw, Modified(message_annotations=change), redelivered=False)
        expected |= change
    assert annotations(seen(raw, content)) == expected
