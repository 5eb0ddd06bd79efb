"""The properties of a message: functions that read and change the raw form without decoding all of it.

The raw form is a content header from its property flags on: sixteen flags, then each property whose flag is set, in
order (AMQP 0-9-1, 4.2.6.1). An edit replaces the bytes of one property only. All other bytes leave dtx as a program put
them into the message.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache, wraps
from struct import Struct
from typing import Final, TypeVar

from dtx.wire.amqp09 import tables
from dtx.wire.amqp09.errors import syntax_error
from dtx.wire.amqp09.tables import Entry

_T = TypeVar("_T")

EMPTY: Final = b"\x00\x00"
"""The raw form of no properties."""
TRANSIENT: Final = 1
PERSISTENT: Final = 2

_FLAGS: Final = Struct(">H")
_ROUTING: Final = (b"CC", b"BCC")
DELIVERY_COUNT: Final = b"x-delivery-count"
"""The header for the number of deliveries without success."""


class Property(IntEnum):
    """The properties of class basic; the value is the bit in the flags."""

    CONTENT_TYPE = 15
    CONTENT_ENCODING = 14
    HEADERS = 13
    DELIVERY_MODE = 12
    PRIORITY = 11
    CORRELATION_ID = 10
    REPLY_TO = 9
    EXPIRATION = 8
    MESSAGE_ID = 7
    TIMESTAMP = 6
    TYPE = 5
    USER_ID = 4
    APP_ID = 3
    CLUSTER_ID = 2


_OCTETS: Final = {12: 1, 11: 1, 6: 8}
_HEADERS: Final = 13
_SHORT: Final = 64
"""The maximum size in bytes of raw properties whose results are cached."""
_UNDEFINED: Final = 0b11


@dataclass(frozen=True, slots=True)
class BasicProperties:
    """A view of raw properties.

    Args:
        raw: the property flags and what follows them.
        spans: start and end in *raw* of each property that is present, its length included, by bit.
    """

    raw: bytes
    spans: dict[int, tuple[int, int]]

    def value(self, which: Property) -> bytes | None:
        """Return the bytes of a property without their length, or ``None`` if it is absent."""
        span = self.spans.get(which)
        if span is None:
            return None
        start, end = span
        if which is Property.HEADERS:
            start += 4
        elif which not in _OCTETS:
            start += 1
        return self.raw[start:end]

    def _number(self, which: Property) -> int | None:
        value = self.value(which)
        return None if value is None else int.from_bytes(value, "big")

    @property
    def delivery_mode(self) -> int | None:
        """1 transient, 2 persistent."""
        return self._number(Property.DELIVERY_MODE)

    @property
    def priority(self) -> int | None:
        """0 to 255."""
        return self._number(Property.PRIORITY)

    @property
    def timestamp(self) -> int | None:
        """Seconds since the epoch."""
        return self._number(Property.TIMESTAMP)

    @property
    def user_id(self) -> bytes | None:
        """The sender that the message claims."""
        return self.value(Property.USER_ID)

    @property
    def expiration(self) -> bytes | None:
        """Time to live in milliseconds, in decimal digits."""
        return self.value(Property.EXPIRATION)

    @property
    def reply_to(self) -> bytes | None:
        """The address for answers."""
        return self.value(Property.REPLY_TO)

    @property
    def message_id(self) -> bytes | None:
        """The application's name for the message."""
        return self.value(Property.MESSAGE_ID)

    @property
    def correlation_id(self) -> bytes | None:
        """The application's name for the message that this one answers."""
        return self.value(Property.CORRELATION_ID)

    @property
    def headers(self) -> list[Entry]:
        """The entries of the headers table, in order; none if there is no table.

        Raises:
            WireError: 502 if the table is malformed or exceeds a limit of ``tables.entries``.
        """
        table = self.value(Property.HEADERS)
        return tables.entries(table) if table else []

    def header(self, key: bytes) -> Entry | None:
        """Return the first header of that name, or ``None``. The errors are those of :attr:`headers`."""
        return next((entry for entry in self.headers if entry.key == key), None)


@lru_cache(maxsize=256)
def _present(flags: int) -> tuple[int, ...]:
    """Return the bits that are set, in the order of the properties. Programs use few combinations, hence the cache."""
    return tuple(bit for bit in range(15, 1, -1) if flags >> bit & 1)


def remembered(find: Callable[[bytes], _T]) -> Callable[[bytes], _T]:
    """Cache the results of *find* for short raw properties. Consecutive messages often have the same properties."""
    known = lru_cache(maxsize=256)(find)

    @wraps(find)
    def found(raw: bytes) -> _T:
        return known(raw) if len(raw) <= _SHORT else find(raw)

    return found


@remembered
def read(raw: bytes) -> BasicProperties:
    """Find the properties in *raw*. The headers table is parsed only when it is read.

    Raises:
        WireError: 502 if *raw* is truncated, has flags that class basic does not define, or has bytes after the last
            property.
    """
    if len(raw) < _FLAGS.size:
        raise syntax_error("property flags are truncated")
    (flags,) = _FLAGS.unpack_from(raw)
    if flags & _UNDEFINED:
        raise syntax_error(f"property flags {flags:#06x} are not of class basic")
    spans: dict[int, tuple[int, int]] = {}
    position, length = _FLAGS.size, len(raw)
    for bit in _present(flags):
        start = position
        if bit in _OCTETS:
            position += _OCTETS[bit]
        elif bit == _HEADERS:
            position += 4 + int.from_bytes(raw[position : position + 4], "big")
        else:
            position += 1 + (raw[position] if position < length else 0)
        if position > length:
            raise syntax_error(f"property {Property(bit).name.lower().replace('_', '-')} is truncated")
        spans[bit] = start, position
    if position != length:
        raise syntax_error(f"{length - position} bytes after the last property")
    return BasicProperties(raw, spans)


def _put(view: BasicProperties, which: Property, encoded: bytes | None) -> bytes:
    """Return the raw form of *view* with one property replaced, added or (``None``) removed."""
    raw, bit = view.raw, which.value
    (flags,) = _FLAGS.unpack_from(raw)
    if bit in view.spans:
        start, end = view.spans[bit]
    else:
        start = end = max((end for other, (_, end) in view.spans.items() if other > bit), default=_FLAGS.size)
    flags = flags & ~(1 << bit) if encoded is None else flags | 1 << bit
    return _FLAGS.pack(flags) + raw[_FLAGS.size : start] + (encoded or b"") + raw[end:]


def _put_headers(view: BasicProperties, parts: Iterable[bytes]) -> bytes:
    return _put(view, Property.HEADERS, tables.put_long(b"".join(parts)))


def put(raw: bytes, which: Property, value: bytes) -> bytes:
    """Set a property.

    Args:
        raw: properties.
        which: the property.
        value: its bytes without their length; for the headers the entries of the table.

    Raises:
        WireError: 502 if *raw* is malformed, or *value* does not fit the property.
    """
    return _put(read(raw), which, _encoded(which, value))


def _encoded(which: Property, value: bytes) -> bytes:
    """Encode a property with its length."""
    if which is Property.HEADERS:
        return tables.put_long(value)
    size = _OCTETS.get(which.value)
    if size is None:
        return tables.put_short(value)
    if len(value) != size:
        raise syntax_error(f"property {which.name.lower().replace('_', '-')} of {len(value)} bytes")
    return value


def without(raw: bytes, which: Property) -> bytes:
    """Remove a property.

    Raises:
        WireError: 502 if *raw* is malformed.
    """
    return _put(read(raw), which, None)


def build(values: Mapping[Property, bytes], headers: Mapping[bytes, bytes] | None = None) -> bytes:
    """Make raw properties.

    Args:
        values: bytes without their length, by property; for the headers the entries of the table.
        headers: values of type S, by name. If there are any, they replace the headers in *values*.

    Raises:
        WireError: 502 if a value does not fit its property.
    """
    if headers:
        table = b"".join(tables.entry(key, b"S", value) for key, value in headers.items())
        values = {**values, Property.HEADERS: table}
    flags = 0
    parts: list[bytes] = []
    for which in sorted(values, reverse=True):
        flags |= 1 << which
        parts.append(_encoded(which, values[which]))
    return _FLAGS.pack(flags) + b"".join(parts)


def has_header(raw: bytes, key: bytes) -> bool:
    """Return whether the headers table has an entry of that name. The function does not check nested values.

    Raises:
        WireError: 502 if *raw* is malformed.
    """
    table = read(raw).value(Property.HEADERS)
    return table is not None and tables.has(table, key)


def set_header(raw: bytes, key: bytes, value: bytes, kind: bytes = b"S") -> bytes:
    """Set an entry of the headers table. Replace the first entry of that name in its place, and remove the others.

    Args:
        raw: properties; the table is added if there is none.
        key: the name of the entry, at most 255 bytes.
        value: as in :class:`~dtx.wire.amqp09.tables.Entry`.
        kind: the type letter.

    Raises:
        WireError: 502 if *raw* is malformed, or *key* is too long.
    """
    return set_headers(raw, {key: (kind, value)})


def set_headers(raw: bytes, values: Mapping[bytes, tuple[bytes, bytes]]) -> bytes:
    """Set several entries of the headers table as :func:`set_header` does; *values* are type letter and value."""
    waiting = dict(values)
    parts: list[bytes] = []
    view = read(raw)
    for entry in view.headers:
        if entry.key not in values:
            parts.append(entry.raw)
        elif entry.key in waiting:
            parts.append(tables.entry(entry.key, *waiting.pop(entry.key)))
    parts += (tables.entry(key, *value) for key, value in waiting.items())
    return _put_headers(view, parts)


def rename_headers(raw: bytes, names: Mapping[bytes, bytes]) -> bytes:
    """Rename entries of the headers table. Their values and their places in the table stay.

    An entry whose name is the new name of another entry is removed.

    Args:
        raw: properties.
        names: new names by old names.

    Raises:
        WireError: 502 if *raw* is malformed, or a new name is longer than 255 bytes.
    """
    view = read(raw)
    found = view.headers
    taken = {names[entry.key] for entry in found if entry.key in names}
    if not taken:
        return raw
    kept = (entry for entry in found if entry.key in names or entry.key not in taken)
    return _put_headers(
        view,
        (
            tables.put_short(names[entry.key]) + entry.raw[1 + len(entry.key) :] if entry.key in names else entry.raw
            for entry in kept
        ),
    )


def remove_headers(raw: bytes, keys: Iterable[bytes]) -> bytes:
    """Remove the entries with these names from the headers table. The table stays, even if it is empty then.

    Raises:
        WireError: 502 if *raw* is malformed.
    """
    removed = frozenset(keys)
    view = read(raw)
    found = view.headers
    kept = [entry.raw for entry in found if entry.key not in removed]
    if len(kept) == len(found):
        return raw
    return _put_headers(view, kept)


def checked(raw: bytes) -> bytes:
    """Return the properties that a broker checks before it accepts a message.

    These are user-id, expiration, and the headers CC and BCC.

    Returns:
        A key for a cache, not to be parsed. It is equal for messages whose checks have the same result.

    Raises:
        WireError: 502 if *raw* is malformed, its headers included.
    """
    view = read(raw)
    if _HEADERS not in view.spans and view.user_id is None and view.expiration is None:
        return b""
    parts = [entry.raw for entry in view.headers if entry.key in _ROUTING]
    for which in (Property.USER_ID, Property.EXPIRATION):
        value = view.value(which)
        parts.append(b"\x00" if value is None else b"\x01" + tables.put_short(value))
    return b"".join(parts)
