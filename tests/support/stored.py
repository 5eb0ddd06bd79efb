"""Messages and topology to write into a log."""

from itertools import count
from typing import Any

from dtx.log.changes import BindingRow, Change, DestinationKind, ExchangeRow, QueueRow, StoredMessage

QUEUE = 2**62 - 5
"""A queue id near the maximum."""
_positions = count(1)


def a_message(**changes: Any) -> StoredMessage:
    """A persistent message in a new slot."""
    values: dict[str, Any] = {
        "queue": QUEUE,
        "position": next(_positions),
        "exchange": b"orders",
        "routing_key": b"key\x00\xff",
        "flags": 1,
        "properties": b"\x10\x00\x02",
        "body": b"hello",
    }
    return StoredMessage(**(values | changes))


def puts(*messages: StoredMessage) -> Change:
    """A change that puts *messages*."""
    return Change(puts=messages)


def drops(*messages: StoredMessage) -> Change:
    """A change that drops *messages*."""
    return Change(drops=[message.slot for message in messages])


def an_exchange(**changes: Any) -> ExchangeRow:
    """A durable topic exchange."""
    values: dict[str, Any] = {"vhost": "/", "name": b"orders\xff", "type": "topic"}
    return ExchangeRow(**(values | changes))


def a_queue(**changes: Any) -> QueueRow:
    """A durable queue."""
    values: dict[str, Any] = {"vhost": "/", "id": QUEUE, "name": b"incoming\xfe"}
    return QueueRow(**(values | changes))


def a_binding(**changes: Any) -> BindingRow:
    """A binding of the exchange to the queue."""
    values: dict[str, Any] = {
        "vhost": "/",
        "source": b"orders\xff",
        "destination_kind": DestinationKind.QUEUE,
        "destination": b"incoming\xfe",
        "routing_key": b"#",
    }
    return BindingRow(**(values | changes))
