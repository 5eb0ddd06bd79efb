"""What the store looks at in a message's properties: a few fixed fields, found without reading the others.

It is asked for each message that is published, so it walks the octets itself; :mod:`dtx.wire.amqp09.properties` is for
everything else. The layout is that of AMQP 0-9-1, 4.2.6.1 and 1.8.3: sixteen flags, then the fields that are present.
"""

from typing import Final, NamedTuple

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
    """What a queue wants to know of a message.

    Args:
        persistent: it survives a restart.
        priority: 0 where it has none.
        expiration: milliseconds as decimal digits, or ``None``.
    """

    persistent: bool
    priority: int
    expiration: bytes | None


_NONE: Final = Traits(False, 0, None)
_PLAIN: Final = Traits(True, 0, None)


def traits(raw: bytes) -> Traits:
    """The traits of a message with these properties, which have been checked when they came in.

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
