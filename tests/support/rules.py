"""Tables of what RabbitMQ does: unit tests believe them, and tests/contract/test_topology.py asks RabbitMQ."""

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

ACCEPTED: list[dict[str, Any]] = [
    {"x-message-ttl": 0},
    {"x-message-ttl": 2**32},
    {"x-expires": 1000},
    {"x-max-length": 2**62},
    {"x-overflow": "drop-head"},
    {"x-dead-letter-exchange": "not-there"},
    {"x-max-priority": 0},
    {"x-max-priority": 255},
    {"x-queue-mode": "default"},
    {"x-queue-version": 1},
    {"x-unknown": [1, "a"]},
    {"x-ha-policy": "all"},
]
"""Arguments of queue.declare that RabbitMQ takes."""

REFUSED: list[dict[str, Any]] = [
    {"x-message-ttl": -1},
    {"x-message-ttl": "a"},
    {"x-message-ttl": True},
    {"x-message-ttl": 2**40},
    {"x-expires": 0},
    {"x-expires": -1},
    {"x-expires": 2**62},
    {"x-max-length": -1},
    {"x-max-length": "1"},
    {"x-max-length-bytes": -1},
    {"x-overflow": "fold"},
    {"x-overflow": 4},
    {"x-dead-letter-exchange": 4},
    {"x-dead-letter-routing-key": "k"},
    {"x-dead-letter-exchange": "z", "x-dead-letter-routing-key": 1},
    {"x-max-priority": 256},
    {"x-max-priority": -1},
    {"x-max-priority": "1"},
    {"x-queue-type": "unheard-of"},
    {"x-queue-type": 4},
    {"x-single-active-consumer": 1},
    {"x-single-active-consumer": "true"},
    {"x-queue-mode": "foo"},
    {"x-queue-mode": 1},
    {"x-queue-version": 3},
    {"x-queue-version": "1"},
    {"x-max-age": "1h"},
    {"x-delivery-limit": 4},
    {"x-queue-leader-locator": "client-local"},
]
"""Arguments of queue.declare that RabbitMQ refuses with 406."""

HEADERS: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
    ({}, {}, True),
    ({}, {"a": 1}, True),
    ({"x-match": "any"}, {}, False),
    ({"x-match": "any"}, {"a": 1}, False),
    ({"a": 1, "b": 2}, {"b": 2, "c": 3, "a": 1}, True),
    ({"a": 1, "b": 2}, {"a": 1}, False),
    ({"x-match": "all", "a": 1}, {"a": 1}, True),
    ({"x-match": "any", "a": 1, "b": 2}, {"a": 1}, True),
    ({"x-match": "any", "a": 1, "b": 2}, {"a": 2, "b": 1}, False),
    ({"a": 1}, {"a": True}, False),
    ({"a": True}, {"a": True}, True),
    ({"a": True}, {"a": False}, False),
    ({"a": "1"}, {"a": 1}, False),
    ({"a": b"z"}, {"a": "z"}, True),
    ({"a": 2**40}, {"a": 2**40}, True),
    ({"a": None}, {"a": "z"}, True),
    ({"a": None}, {"a": None}, True),
    ({"a": None}, {}, False),
    ({"a": "z"}, {"a": None}, False),
    ({"x-a": 1}, {}, True),
    ({"x-match": "any", "x-a": 1}, {"x-a": 1}, False),
    ({"x-match": "all-with-x", "x-a": 1}, {}, False),
    ({"x-match": "all-with-x", "x-a": 1}, {"x-a": 1}, True),
    ({"x-match": "any-with-x", "x-a": 1}, {"x-a": 1}, True),
    ({"a": {"b": 1}}, {"a": {"b": 1}}, True),
    ({"a": {"b": 1, "c": 2}}, {"a": {"c": 2, "b": 1}}, False),
    ({"a": [1, 2]}, {"a": [1, 2]}, True),
    ({"a": [1]}, {"a": [2**33]}, False),
    ({"a": Decimal(1)}, {"a": Decimal("1.0")}, True),
    ({"a": Decimal(1)}, {"a": 1}, False),
    ({"a": datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)}, {"a": 1}, True),
]
"""Arguments of bindings to a headers exchange, headers of a message, and whether it goes there."""
