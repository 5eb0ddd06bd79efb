"""Arguments: comparison of field table values as in RabbitMQ, and the checked arguments of queue.declare.

Values are compared by value, whatever the width of their type. A table stays bytes (see
:mod:`dtx.wire.amqp09.tables`). This module has the functions on tables that topology and routing need.

The rules are those of RabbitMQ for classic and quorum queues. A declaration that RabbitMQ refuses is refused with the
same code. Streams are refused with 540.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from dtx.wire.amqp09 import tables
from dtx.wire.amqp09.tables import Entry
from dtx.xa.codes import ReplyCode, XaError

Value = int | float | bytes | tuple[bytes, bytes]
"""A number, bytes, or the type letter with the bytes. The last form never equals a value of another type."""

_NUMBERS: Final = {
    letter: struct.Struct(f">{code}")
    for letter, code in (
        (b"b", "b"),
        (b"B", "B"),
        (b"s", "h"),
        (b"U", "h"),
        (b"u", "H"),
        (b"I", "i"),
        (b"i", "I"),
        (b"l", "q"),
        (b"L", "q"),
        (b"T", "Q"),
        (b"f", "f"),
        (b"d", "d"),
    )
}
_INTEGERS: Final = frozenset((b"b", b"B", b"s", b"U", b"u", b"I", b"i", b"l", b"L"))
_STRINGS: Final = frozenset((b"S", b"x"))
_NAMES: Final = {
    b"b": "byte",
    b"B": "unsignedbyte",
    b"s": "short",
    b"U": "short",
    b"u": "unsignedshort",
    b"I": "signedint",
    b"i": "unsignedint",
    b"l": "long",
    b"L": "long",
    b"T": "timestamp",
    b"f": "float",
    b"d": "double",
    b"D": "decimal",
    b"S": "longstr",
    b"x": "binary",
    b"t": "bool",
    b"F": "table",
    b"A": "array",
    b"V": "void",
}


def value(entry: Entry) -> Value:
    """The value of *entry*: equal for 1 in 8 bits and 1 in 64 bits, never for a number and a boolean."""
    number = _NUMBERS.get(entry.kind)
    if number is not None:
        (found,) = number.unpack(entry.value)
        return float(found) if isinstance(found, float) else int(found)
    if entry.kind in _STRINGS:
        return entry.value
    return entry.kind, entry.value


def integer(entry: Entry) -> int | None:
    """The integer in *entry*, or ``None`` for any other type (timestamps and booleans included)."""
    found = value(entry) if entry.kind in _INTEGERS else None
    return found if isinstance(found, int) else None


def kind_name(entry: Entry) -> str:
    """The name of the type in RabbitMQ's texts, for example ``longstr``."""
    return _NAMES[entry.kind]


def text(name: bytes) -> str:
    """A name for people; bytes that are not UTF-8 are replaced."""
    return name.decode("utf-8", "replace")


def show(entry: Entry) -> str:
    """The value as in RabbitMQ's texts."""
    found = value(entry)
    if isinstance(found, bytes):
        return text(found)
    if isinstance(found, tuple):
        return str(found[1] != b"\x00").lower() if entry.kind == b"t" else kind_name(entry)
    return str(found)


def same(one: Entry, other: Entry) -> bool:
    """Whether two arguments are equivalent: types of one class (all integers are), and equal values."""
    if value(one) != value(other):
        return False
    return one.kind == other.kind or {one.kind, other.kind} <= _INTEGERS or {one.kind, other.kind} == {b"f", b"d"}


def first_of_each(table: bytes) -> dict[bytes, Entry]:
    """The entries by name, the first one of a repeated name. Raises WireError 502 when *table* is malformed."""
    found: dict[bytes, Entry] = {}
    for entry in tables.entries(table):
        found.setdefault(entry.key, entry)
    return found


def in_order(table: bytes) -> bytes:
    """*table* sorted by name, so that equal bindings are equal bytes. Raises WireError 502 when it is malformed."""
    if not table:
        return table
    return b"".join(entry.raw for entry in sorted(tables.entries(table), key=lambda entry: entry.key))


MAX_MILLISECONDS: Final = 10 * 365 * 86_400_000
"""Longest time to live and longest expiry of a queue: ten years, as in RabbitMQ."""
MAX_PRIORITIES: Final = 255
"""Highest ``x-max-priority``: the property is one octet."""

TTL: Final = b"x-message-ttl"
EXPIRES: Final = b"x-expires"
MAX_LENGTH: Final = b"x-max-length"
MAX_BYTES: Final = b"x-max-length-bytes"
OVERFLOW: Final = b"x-overflow"
DEAD_LETTER_EXCHANGE: Final = b"x-dead-letter-exchange"
DEAD_LETTER_KEY: Final = b"x-dead-letter-routing-key"
MAX_PRIORITY: Final = b"x-max-priority"
SINGLE_ACTIVE: Final = b"x-single-active-consumer"
QUEUE_TYPE: Final = b"x-queue-type"
QUEUE_MODE: Final = b"x-queue-mode"
QUEUE_VERSION: Final = b"x-queue-version"
ALTERNATE: Final = b"alternate-exchange"
DELIVERY_LIMIT: Final = b"x-delivery-limit"
_CLASSIC: Final = b"classic"
_QUORUM: Final = b"quorum"


class Overflow(StrEnum):
    """The behaviour of a full queue (x-overflow)."""

    DROP_HEAD = "drop-head"
    REJECT_PUBLISH = "reject-publish"
    REJECT_PUBLISH_DLX = "reject-publish-dlx"
    """As reject-publish, and refused messages become dead letters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueArguments:
    """The arguments of a queue's declaration.

    Args:
        message_ttl: milliseconds that a message may wait; with 0 it expires unless a consumer can take it at once.
        expires: milliseconds without use after which the queue is deleted.
        max_length: limit of ready messages.
        max_length_bytes: limit of the bytes of their bodies.
        overflow: what a full queue does.
        dead_letter_exchange: for messages that expire, overflow or are rejected; ``b""`` is the default exchange.
        dead_letter_routing_key: their routing key there; ``None`` for their own.
        max_priority: highest priority that the queue distinguishes; 0 for none.
        single_active: whether one consumer gets all messages until it ends.
        counts: whether consumers get ``x-delivery-count``: the queue type is quorum. PostgreSQL keeps the messages of
            both types.
        delivery_limit: how often a message may return before it leaves the queue; ``None`` for no limit.
    """

    message_ttl: int | None = None
    expires: int | None = None
    max_length: int | None = None
    max_length_bytes: int | None = None
    overflow: Overflow = Overflow.DROP_HEAD
    dead_letter_exchange: bytes | None = None
    dead_letter_routing_key: bytes | None = None
    max_priority: int = 0
    single_active: bool = False
    counts: bool = False
    delivery_limit: int | None = None


def _failed(reason: str) -> XaError:
    return XaError(ReplyCode.PRECONDITION_FAILED, reason)


def _invalid(key: bytes, where: str, why: str) -> XaError:
    return _failed(f"invalid arg '{text(key)}' for {where}: {why}")


def _number(entry: Entry, where: str, least: int, most: int | None) -> int:
    """The integer in *entry*, within the limits."""
    number = integer(entry)
    if number is None:
        raise _invalid(entry.key, where, f"expected integer, got {kind_name(entry)}")
    if number < least:
        raise _invalid(entry.key, where, f"{number} is less than {least}")
    if most is not None and number > most:
        raise _invalid(entry.key, where, f"{number} is more than {most}")
    return number


def _string(entry: Entry, where: str) -> bytes:
    if entry.kind != b"S":
        raise _invalid(entry.key, where, f"expected longstr, got {kind_name(entry)}")
    return entry.value


def _is_quorum(found: Mapping[bytes, Entry], where: str) -> bool:
    entry = found.get(QUEUE_TYPE)
    kind = _CLASSIC if entry is None else _string(entry, where)
    if kind == b"stream":
        raise XaError(
            ReplyCode.NOT_IMPLEMENTED,
            f"queue type 'stream' for {where}: standalone dtx has no streams, declare a classic or quorum queue",
        )
    if kind not in (_CLASSIC, _QUORUM):
        raise _invalid(QUEUE_TYPE, where, f"unsupported queue type '{text(kind)}'")
    return kind == _QUORUM


def _check_mode(entry: Entry, where: str) -> None:
    mode = _string(entry, where)
    if mode not in (b"default", b"lazy"):
        raise _invalid(entry.key, where, f"unsupported queue mode '{text(mode)}'")


def _check_version(entry: Entry, where: str) -> None:
    _number(entry, where, 1, 2)


def _check_bool(entry: Entry, where: str) -> None:
    if entry.kind != b"t":
        raise _invalid(entry.key, where, f"expected bool, got {kind_name(entry)}")


_CHECKED: Final[Mapping[bytes, Callable[[Entry, str], None]]] = {
    SINGLE_ACTIVE: _check_bool,
    QUEUE_MODE: _check_mode,  # checked, without effect: dtx decides where messages are kept
    QUEUE_VERSION: _check_version,
}
_QUORUM_ONLY: Final = frozenset(
    {
        b"x-max-in-memory-length",
        b"x-max-in-memory-bytes",
        DELIVERY_LIMIT,
        b"x-dead-letter-strategy",
        b"x-quorum-initial-group-size",
        b"x-quorum-target-group-size",
    }
)
"""Those but the limit are without effect: there is one copy, and dead letters are always published at least once."""
_OF_STREAMS: Final = frozenset(
    {b"x-max-age", b"x-initial-cluster-size", b"x-stream-max-segment-size-bytes", b"x-stream-filter-size-bytes"}
)
_LOCATOR: Final = b"x-queue-leader-locator"
_NOT_OF_CLASSIC: Final = _QUORUM_ONLY | _OF_STREAMS | {_LOCATOR}
_NOT_OF_QUORUM: Final = _OF_STREAMS | {MAX_PRIORITY, QUEUE_MODE, QUEUE_VERSION}
_DEFAULTS: Final = {QUEUE_TYPE: first_of_each(tables.entry(QUEUE_TYPE, b"S", _CLASSIC))[QUEUE_TYPE]}
_EQUIVALENT: Final = (
    QUEUE_TYPE,
    EXPIRES,
    TTL,
    DEAD_LETTER_EXCHANGE,
    DEAD_LETTER_KEY,
    MAX_LENGTH,
    MAX_BYTES,
    MAX_PRIORITY,
    OVERFLOW,
    QUEUE_MODE,
    QUEUE_VERSION,
    SINGLE_ACTIVE,
    DELIVERY_LIMIT,
)


def _overflow(entry: Entry, where: str) -> Overflow:
    wanted = _string(entry, where)
    try:
        return Overflow(text(wanted))
    except ValueError:
        raise _invalid(entry.key, where, f"unknown overflow '{text(wanted)}'") from None


def exchange_name(found: Mapping[bytes, Entry], key: bytes, where: str) -> bytes | None:
    """The exchange that the argument *key* names (``alternate-exchange``, ``x-dead-letter-exchange``), if it is there.

    Raises:
        XaError: 406 when it is no string.
    """
    entry = found.get(key)
    if entry is None:
        return None
    if entry.kind != b"S":
        raise _failed(f"invalid type '{kind_name(entry)}' for arg '{text(key)}' in {where}")
    return entry.value


def queue_arguments(table: bytes, where: str) -> QueueArguments:
    """Check and read the arguments of queue.declare.

    Args:
        table: as on the wire, without its length.
        where: the queue, for people: ``queue 'q' in vhost '/'``.

    Raises:
        XaError: 406 for a value that RabbitMQ refuses, 540 for a stream.
        WireError: 502 when *table* is malformed.
    """
    found = first_of_each(table)
    if not found:
        return _NONE
    is_quorum = _is_quorum(found, where)
    dead_letter_exchange = exchange_name(found, DEAD_LETTER_EXCHANGE, where)
    for key, check in _CHECKED.items():
        if key in found:
            check(found[key], where)
    for key in found:
        if key in (_NOT_OF_QUORUM if is_quorum else _NOT_OF_CLASSIC):
            kind = _QUORUM if is_quorum else _CLASSIC
            raise _failed(f"invalid arg '{text(key)}' for {where} of queue type {text(kind)}")

    def number(key: bytes, least: int, most: int | None = None) -> int | None:
        return _number(found[key], where, least, most) if key in found else None

    dead_letter_key = _string(found[DEAD_LETTER_KEY], where) if DEAD_LETTER_KEY in found else None
    if dead_letter_key is not None and dead_letter_exchange is None:
        raise _invalid(DEAD_LETTER_KEY, where, "a routing key but no x-dead-letter-exchange")
    overflow = _overflow(found[OVERFLOW], where) if OVERFLOW in found else Overflow.DROP_HEAD
    if is_quorum and overflow is Overflow.REJECT_PUBLISH_DLX:
        raise _invalid(OVERFLOW, where, f"a quorum queue has no overflow '{overflow}'")
    limit = number(DELIVERY_LIMIT, -1)
    return QueueArguments(
        expires=number(EXPIRES, 1, MAX_MILLISECONDS),
        message_ttl=number(TTL, 0, MAX_MILLISECONDS),
        max_length=number(MAX_LENGTH, 0),
        max_length_bytes=number(MAX_BYTES, 0),
        max_priority=number(MAX_PRIORITY, 0, MAX_PRIORITIES) or 0,
        overflow=overflow,
        dead_letter_exchange=dead_letter_exchange,
        dead_letter_routing_key=dead_letter_key,
        single_active=SINGLE_ACTIVE in found and found[SINGLE_ACTIVE].value != b"\x00",
        counts=is_quorum,
        delivery_limit=limit if limit != -1 else None,
    )


_NONE: Final = QueueArguments()


def check_field(received: object, current: object, argument: str, where: str) -> None:
    """Refuse (406) a declaration whose field *argument* differs from that of the existing object."""
    if received != current:
        was, now = (str(each).lower() if isinstance(each, bool) else str(each) for each in (received, current))
        raise _failed(f"inequivalent arg '{argument}' for {where}: received '{was}' but current is '{now}'")


def _check_argument(key: bytes, received: Entry | None, current: Entry | None, where: str) -> None:
    if received is not None and current is not None:
        if same(received, current):
            return
        reason = f"received '{show(received)}' but current is '{show(current)}'"
    elif received is not None:
        reason = f"received the value '{show(received)}' of type '{kind_name(received)}' but current is none"
    elif current is not None:
        reason = f"received none but current is the value '{show(current)}' of type '{kind_name(current)}'"
    else:
        return
    raise _failed(f"inequivalent arg '{text(key)}' for {where}: {reason}")


def check_equivalent(received: bytes, current: bytes, where: str, keys: tuple[bytes, ...] = _EQUIVALENT) -> None:
    """Refuse arguments that differ from those of the existing object; only *keys* are compared.

    Raises:
        XaError: 406, as in RabbitMQ: ``inequivalent arg 'x-max-length' for queue 'q' in vhost '/': …``.
        WireError: 502 when *received* is malformed.
    """
    new, old = first_of_each(received), first_of_each(current)
    if new or old:
        for key in keys:
            default = _DEFAULTS.get(key)
            _check_argument(key, new.get(key, default), old.get(key, default), where)
