"""What the outcome *modified* makes of a message that the store keeps (AMQP 1.0, 3.4.5)."""

from typing import Any, Final

from dtx.server.amqp10.mapping import (
    ANNOTATIONS,
    DELIVERY_COUNT,
    MAX_HEAD,
    annotated,
    deliveries_in_vain,
    is_annotation,
    is_ours,
)
from dtx.wire.amqp09 import properties
from dtx.wire.amqp09.tables import Entry
from dtx.wire.amqp10 import message
from dtx.wire.amqp10.errors import AmqpError
from dtx.wire.amqp10.message import Header
from dtx.wire.amqp10.performatives import Modified

_MAX_OCTETS: Final = 2 * MAX_HEAD
"""Of a message's properties that may grow by annotations: what a sender may give it, kept twice."""


def modified(raw: bytes, outcome: Modified, *, redelivered: bool) -> bytes:
    """The properties of a message behind *outcome*.

    "The value in this field associated with that key replaces the one in the existing headers": annotations are
    replaced, one by one. Where all of them together are too much, those of the message stay as they were.

    Args:
        raw: its properties.
        outcome: of its delivery.
        redelivered: whether that was not the first one, so that its count of deliveries in vain is its own.

    Raises:
        WireError: 502, they are malformed.
    """
    headers: dict[bytes, Entry] = {}
    for entry in properties.read(raw).headers:
        headers.setdefault(entry.key, entry)
    if outcome.delivery_failed:
        count = (deliveries_in_vain(headers) if redelivered else 0) + 1
        raw = properties.set_headers(raw, {DELIVERY_COUNT: (b"l", count.to_bytes(8, "big"))})
    if not outcome.message_annotations:
        return raw
    revised = _annotate(raw, headers, outcome.message_annotations)
    return revised if len(revised) <= _MAX_OCTETS else raw


def _annotate(raw: bytes, headers: dict[bytes, Entry], new: dict[str, Any]) -> bytes:
    new = {name: value for name, value in new.items() if not is_ours(name.encode())}
    shown = annotated(new)
    # What AMQP 0-9 has no type for is in the section alone; what a header said of it before is not true any more.
    stale = [key for key in map(str.encode, new) if is_annotation(key) and key in headers and key not in shown]
    section = message.head(Header(), None, _said(headers) | new)
    return properties.set_headers(properties.remove_headers(raw, stale), shown | {ANNOTATIONS: (b"x", section)})


def _said(headers: dict[bytes, Entry]) -> dict[str, Any]:
    """The annotations that a message has."""
    entry = headers.get(ANNOTATIONS)
    if entry is None or entry.kind != b"x":
        return {}
    try:
        return message.read(entry.value + message.data(b"")).message_annotations
    except AmqpError:  # somebody else's octets
        return {}
