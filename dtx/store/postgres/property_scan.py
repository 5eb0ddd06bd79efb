"""The properties of a message that the store reads: persistence, priority, expiration, and the headers CC and BCC.

The fixed fields are needed for each published message, so :func:`traits` walks the bytes itself.
:mod:`dtx.wire.amqp09.properties` is for everything else. The layout is that of AMQP 0-9-1, 4.2.6.1 and 1.8.3: sixteen
flags, then the fields that are present.
"""

from typing import Final, NamedTuple

from dtx.log.changes import MessageFlag, StoredMessage
from dtx.store.postgres.arguments import integer, kind_name
from dtx.wire.amqp09 import properties, tables
from dtx.wire.amqp09.errors import WireError
from dtx.xa.codes import ReplyCode, XaError

_CONTENT_TYPE: Final = 0x8000
_CONTENT_ENCODING: Final = 0x4000
_HEADERS: Final = 0x2000
_DELIVERY_MODE: Final = 0x1000
_PRIORITY: Final = 0x0800
_CORRELATION_ID: Final = 0x0400
_REPLY_TO: Final = 0x0200
_EXPIRATION: Final = 0x0100
_WANTED: Final = _DELIVERY_MODE | _PRIORITY | _EXPIRATION
_PERSISTENT: Final = 2


class Traits(NamedTuple):
    """The properties of a message that queues need.

    Args:
        persistent: whether it survives a restart.
        priority: 0 if it has none.
        expiration: milliseconds as decimal digits, or ``None``.
    """

    persistent: bool
    priority: int
    expiration: bytes | None


_NONE: Final = Traits(False, 0, None)
_PLAIN: Final = Traits(True, 0, None)


@properties.remembered
def traits(raw: bytes) -> Traits:
    """The traits of a message with these properties, which were checked on arrival.

    Args:
        raw: content header from the property flags on.
    """
    flags = raw[0] << 8 | raw[1] if raw else 0
    if not flags & _WANTED:
        return _NONE
    at = 2
    if flags & _CONTENT_TYPE:
        at += 1 + raw[at]
    if flags & _CONTENT_ENCODING:
        at += 1 + raw[at]
    if flags & _HEADERS:
        at += 4 + int.from_bytes(raw[at : at + 4])
    persistent = False
    if flags & _DELIVERY_MODE:
        persistent = raw[at] == _PERSISTENT
        at += 1
    if not flags & (_PRIORITY | _EXPIRATION):
        return _PLAIN if persistent else _NONE
    priority = 0
    if flags & _PRIORITY:
        priority = raw[at]
        at += 1
    expiration = None
    if flags & _EXPIRATION:
        if flags & _CORRELATION_ID:
            at += 1 + raw[at]
        if flags & _REPLY_TO:
            at += 1 + raw[at]
        expiration = raw[at + 1 : at + 1 + raw[at]]
    return Traits(persistent, priority, expiration)


def expiry(expiration: bytes | None, message_ttl: int | None, now: float) -> float | None:
    """When a message expires that is put into a queue now: "the lower value between the two will be chosen".

    Args:
        expiration: the property, milliseconds in decimal digits.
        message_ttl: x-message-ttl of the queue, in milliseconds.
        now: seconds since the epoch.

    Returns:
        Seconds since the epoch; ``None`` if it does not expire.
    """
    times = [int(expiration)] if expiration is not None else []
    if message_ttl is not None:
        times.append(message_ttl)
    return now + min(times) / 1000 if times else None


CC: Final = b"CC"
BCC: Final = b"BCC"
_BLIND: Final = int(MessageFlag.BLIND)


def sender_selected(raw: bytes) -> tuple[tuple[bytes, ...], bytes]:
    """The further routing keys of a message, from its headers CC and BCC; and its properties for consumers.

    Both headers are arrays of strings; other items are ignored. Consumers get CC, and never BCC ("the BCC key and value
    will be removed from the message prior to delivery", RabbitMQ, Sender-selected Distribution).

    Args:
        raw: properties as received.

    Returns:
        The keys, in order; and the properties without BCC, which are *raw* itself if it has none.

    Raises:
        XaError: 406 when one of the headers is no array.
        WireError: 502 when the properties are malformed.
    """
    if CC not in raw:  # true for nearly every message, and fast; "BCC" contains "CC"
        return (), raw
    found = {entry.key: entry for entry in reversed(properties.read(raw).headers) if entry.key in (CC, BCC)}
    keys: list[bytes] = []
    hidden = False
    for name in (CC, BCC):
        entry = found.get(name)  # the first entry of a repeated name counts
        if entry is None:
            continue
        if entry.kind != b"A":
            reason = f"header {name.decode()} must be an array of routing keys, not {kind_name(entry)}"
            raise XaError(ReplyCode.PRECONDITION_FAILED, f"invalid message: {reason}")
        hidden = hidden or name == BCC
        keys += (item.value for item in tables.items(entry.value) if item.kind == b"S")
    return tuple(keys), without_bcc(raw) if hidden else raw


def without_bcc(raw: bytes) -> bytes:
    """Properties without BCC."""
    return properties.remove_headers(raw, (BCC,))


def visible(message: StoredMessage) -> StoredMessage:
    """*message* as consumers get it, without BCC."""
    if message.flags & _BLIND:
        return message._replace(properties=without_bcc(message.properties))
    return message


def counted(message: StoredMessage, returns: int) -> StoredMessage:
    """*message* with the header that says how often it was delivered without success, as quorum queues send it.

    AMQP 1.0 has stored what receivers reported, also before a restart: the greater number counts.
    """
    raw = message.properties
    try:
        found = properties.read(raw).headers
        stored = next((entry for entry in found if entry.key == properties.DELIVERY_COUNT), None)
        count = max(returns, 0 if stored is None else integer(stored) or 0)
        header = {properties.DELIVERY_COUNT: (b"l", count.to_bytes(8, "big"))}
        return message._replace(properties=properties.set_headers(raw, header))
    except (WireError, OverflowError):  # too many headers, as after a dead letter with very many; or a forged count
        return message
