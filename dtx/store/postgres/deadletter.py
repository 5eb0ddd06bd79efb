"""Dead letters: what becomes of a message that expires, overflows its queue or is rejected, as RabbitMQ writes it.

The header ``x-death`` is an array with one table for each queue and reason, the latest first; a message that dies in
the same way again raises the count of its table, whose other fields stay those of the first time. ``x-first-death-*``
stay what they were. The expiration goes, so that the message does not expire again (it is kept in ``x-death``).
RabbitMQ, "Dead Letter Exchanges".
"""

from enum import StrEnum
from typing import Final, NamedTuple

from dtx.store.postgres.copies import BCC, CC
from dtx.wire.amqp09 import properties, tables
from dtx.wire.amqp09.properties import Property
from dtx.wire.amqp09.tables import Entry

X_DEATH: Final = b"x-death"
_FIRST: Final = b"x-first-death-"
_COUNT: Final = b"count"
_QUEUE: Final = b"queue"
_REASON: Final = b"reason"
_MAX_COUNT: Final = 2**63 - 1


class Reason(StrEnum):
    """Why a message left its queue without being acknowledged."""

    REJECTED = "rejected"
    EXPIRED = "expired"
    MAXLEN = "maxlen"


class Death(NamedTuple):
    """How a message died.

    Args:
        queue: the name of the queue that it was in.
        reason: why.
        exchange, routing_key: as it was published to that queue.
        at: seconds since the epoch.
    """

    queue: bytes
    reason: Reason
    exchange: bytes
    routing_key: bytes
    at: float


def expiry(expiration: bytes | None, message_ttl: int | None, now: float) -> float | None:
    """When a message expires that is put into a queue now: "the lower value between the two will be chosen".

    Args:
        expiration: the property, in milliseconds; decimal digits.
        message_ttl: x-message-ttl of the queue, in milliseconds.
        now: seconds since the epoch.
    """
    times = [int(expiration)] if expiration is not None else []
    if message_ttl is not None:
        times.append(message_ttl)
    return now + min(times) / 1000 if times else None


def dead_letter(raw: bytes, death: Death, *, new_key: bool) -> bytes:
    """The properties of a message that goes to the dead letter exchange.

    Args:
        raw: its properties.
        death: how it died.
        new_key: the queue has x-dead-letter-routing-key: the message goes by that alone, without its CC and BCC.

    Raises:
        WireError: 502 when *raw* is malformed.
    """
    view = properties.read(raw)
    headers = {entry.key: entry for entry in reversed(view.headers)}
    values: dict[bytes, tuple[bytes, bytes]] = {}
    found = headers.get(X_DEATH)
    if found is None:
        values |= {
            _FIRST + name: (b"S", value)
            for name, value in (
                (b"reason", death.reason.value.encode()),
                (b"queue", death.queue),
                (b"exchange", death.exchange),
            )
        }
    values[X_DEATH] = b"A", _deaths(found, death, _keys(headers.get(CC), death.routing_key), view.expiration)
    raw = properties.set_headers(raw, values)
    if new_key:
        raw = properties.remove_headers(raw, (CC, BCC))
    return properties.without(raw, Property.EXPIRATION)


def would_cycle(raw: bytes, queue: bytes) -> bool:
    """Whether a message has come round to *queue* all by itself: it was there before and nobody rejected it since.

    RabbitMQ drops such a message. It is not asked of one that has just been rejected.

    Args:
        raw: properties with the latest death.
        queue: the name of a queue that it would be routed to.

    Raises:
        WireError: 502 when *raw* is malformed.
    """
    found = properties.read(raw).header(X_DEATH)
    if found is None or found.kind != b"A":
        return False
    for item in tables.items(found.value):
        # What is no table has been put there by a client, and so the round was not automatic.
        if item.kind != b"F" or _said(item, _REASON) == Reason.REJECTED.value.encode():
            return False
        if _said(item, _QUEUE) == queue:
            return True
    return False


def _deaths(found: Entry | None, death: Death, keys: list[bytes], expiration: bytes | None) -> bytes:
    """The array, with *death* first. What a client put in place of an array is replaced, as RabbitMQ does."""
    others: list[bytes] = []
    same: Entry | None = None
    for item in tables.items(found.value) if found is not None and found.kind == b"A" else ():
        if item.kind != b"F" or (_said(item, _QUEUE), _said(item, _REASON)) != (death.queue, death.reason.encode()):
            others.append(item.raw)
        else:
            same = same or item
    table = _first_time(death, keys, expiration) if same is None else _once_more(same)
    return b"".join((b"F", tables.put_long(table), *others))


def _first_time(death: Death, keys: list[bytes], expiration: bytes | None) -> bytes:
    table = [
        tables.entry(_COUNT, b"l", (1).to_bytes(8, "big")),
        tables.entry(_REASON, b"S", death.reason.value.encode()),
        tables.entry(_QUEUE, b"S", death.queue),
        tables.entry(b"time", b"T", int(death.at).to_bytes(8, "big")),
        tables.entry(b"exchange", b"S", death.exchange),
        tables.entry(b"routing-keys", b"A", b"".join(b"S" + tables.put_long(key) for key in keys)),
    ]
    if expiration is not None:
        table.append(tables.entry(b"original-expiration", b"S", expiration))
    return b"".join(table)


def _once_more(item: Entry) -> bytes:
    """The table of a death that happens again."""
    entries = tables.entries(item.value)
    count = next((entry.value for entry in entries if entry.key == _COUNT and entry.kind == b"l"), bytes(8))
    times = min(int.from_bytes(count, "big", signed=True) + 1, _MAX_COUNT)
    rest = (entry.raw for entry in entries if entry.key != _COUNT)
    return b"".join((tables.entry(_COUNT, b"l", times.to_bytes(8, "big", signed=True)), *rest))


def _said(item: Entry, key: bytes) -> bytes | None:
    """The string *key* of a table in x-death."""
    return next((entry.value for entry in tables.entries(item.value) if entry.key == key and entry.kind == b"S"), None)


def _keys(copies: Entry | None, routing_key: bytes) -> list[bytes]:
    """The routing keys of a message, those of CC included."""
    if copies is None or copies.kind != b"A":
        return [routing_key]
    return [routing_key, *(item.value for item in tables.items(copies.value) if item.kind == b"S")]
