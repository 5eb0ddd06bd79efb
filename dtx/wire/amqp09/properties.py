"""The properties of a message, read and changed without taking them apart.

The raw form is a content header from its property flags on: sixteen flags, then each property whose flag is set, in
order (AMQP 0-9-1, 4.2.6.1). An edit replaces the octets of what it changes and leaves all others as they came, so that
what a program put into a message comes out of it.
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
"""No properties at all."""
TRANSIENT: Final = 1
PERSISTENT: Final = 2

_FLAGS: Final = Struct(">H")
_ROUTING: Final = (b"CC", b"BCC")


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
"""Bytes of properties that are remembered."""
_UNDEFINED: Final = 0b11


@dataclass(frozen=True, slots=True)
class BasicProperties:
    """A view of raw properties.

    Args:
        raw: the property flags and what follows them.
        spans: by bit, where each property that is there starts and ends in *raw*, its length included.
    """

    raw: bytes
    spans: dict[int, tuple[int, int]]

    def value(self, which: Property) -> bytes | None:
        """A property's octets without their length, or ``None`` when it is not there."""
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
        """Who the message says it is from."""
        return self.value(Property.USER_ID)

    @property
    def expiration(self) -> bytes | None:
        """Time to live in milliseconds, in decimal digits."""
        return self.value(Property.EXPIRATION)

    @property
    def reply_to(self) -> bytes | None:
        """Where answers go."""
        return self.value(Property.REPLY_TO)

    @property
    def message_id(self) -> bytes | None:
        """The application's name for the message."""
        return self.value(Property.MESSAGE_ID)

    @property
    def correlation_id(self) -> bytes | None:
        """The application's name for what the message answers."""
        return self.value(Property.CORRELATION_ID)

    @property
    def headers(self) -> list[Entry]:
        """The entries of the headers table, in order; none when there is no table.

        Raises:
            WireError: 502 when the table is malformed.
        """
        table = self.value(Property.HEADERS)
        return tables.entries(table) if table else []

    def header(self, key: bytes) -> Entry | None:
        """The first entry of that name, or ``None``. Raises as :attr:`headers`."""
        return next((entry for entry in self.headers if entry.key == key), None)


@lru_cache(maxsize=256)
def _present(flags: int) -> tuple[int, ...]:
    """The bits that are set, in the order of the properties; programs use a handful of combinations."""
    return tuple(bit for bit in range(15, 1, -1) if flags >> bit & 1)


def remembered(find: Callable[[bytes], _T]) -> Callable[[bytes], _T]:
    """*find* of raw properties, which remembers what it finds in short ones: most are those of the message before."""
    known = lru_cache(maxsize=256)(find)

    @wraps(find)
    def found(raw: bytes) -> _T:
        return known(raw) if len(raw) <= _SHORT else find(raw)

    return found


@remembered
def read(raw: bytes) -> BasicProperties:
    """Find the properties in *raw*. The headers table is measured, and parsed when it is asked for.

    Raises:
        WireError: 502 when *raw* is truncated, has flags that class basic does not define, or goes on after the last.
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
        raise syntax_error(f"{length - position} octets after the last property")
    return BasicProperties(raw, spans)


def _put(view: BasicProperties, which: Property, encoded: bytes | None) -> bytes:
    """The octets of *view* with those of one property replaced, added or (``None``) taken away."""
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
        value: its octets without their length; for the headers the entries of the table.

    Raises:
        WireError: 502 when *raw* is malformed, or *value* does not fit the property.
    """
    return _put(read(raw), which, _encoded(which, value))


def _encoded(which: Property, value: bytes) -> bytes:
    """A property with its length."""
    if which is Property.HEADERS:
        return tables.put_long(value)
    size = _OCTETS.get(which.value)
    if size is None:
        return tables.put_short(value)
    if len(value) != size:
        raise syntax_error(f"property {which.name.lower().replace('_', '-')} of {len(value)} octets")
    return value


def without(raw: bytes, which: Property) -> bytes:
    """Take a property away. Raises WireError 502 when *raw* is malformed."""
    return _put(read(raw), which, None)


def build(values: Mapping[Property, bytes], headers: Mapping[bytes, bytes] | None = None) -> bytes:
    """Properties from nothing.

    Args:
        values: octets without their length, by property; for the headers the entries of the table.
        headers: entries of type S of the headers table, instead.

    Raises:
        WireError: 502 when a value does not fit its property.
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
    """Whether the headers table has an entry of that name; what is nested in the others may be anything.

    Raises:
        WireError: 502 when *raw* is malformed.
    """
    table = read(raw).value(Property.HEADERS)
    return table is not None and tables.has(table, key)


def set_header(raw: bytes, key: bytes, value: bytes, kind: bytes = b"S") -> bytes:
    """Set an entry of the headers table: the first of that name is replaced in its place, others of that name go.

    Args:
        raw: properties; the table is added when there is none.
        key: name of the entry, at most 255 octets.
        value: as in :class:`~dtx.wire.amqp09.tables.Entry`.
        kind: type letter.

    Raises:
        WireError: 502 when *raw* is malformed.
    """
    return set_headers(raw, {key: (kind, value)})


def set_headers(raw: bytes, values: Mapping[bytes, tuple[bytes, bytes]]) -> bytes:
    """Set several entries of the headers table at once; as :func:`set_header`, *values* being type letter and value."""
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
    """Give entries of the headers table other names; their values and places stay.

    An entry that already has the new name of one that is there is dropped: the renamed one takes its place.

    Args:
        raw: properties.
        names: new names by old ones.

    Raises:
        WireError: 502 when *raw* is malformed.
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
    """Take the entries with these names out of the headers table; the table stays, even when nothing is left in it.

    Raises:
        WireError: 502 when *raw* is malformed.
    """
    gone = frozenset(keys)
    view = read(raw)
    found = view.headers
    kept = [entry.raw for entry in found if entry.key not in gone]
    if len(kept) == len(found):
        return raw
    return _put_headers(view, kept)


def checked(raw: bytes) -> bytes:
    """What a broker judges before it takes a message: user-id, expiration, and the headers CC and BCC.

    Returns:
        Equal octets for properties that a broker judges equally; a key for a cache, not to be parsed.

    Raises:
        WireError: 502 when *raw* is malformed, its headers included.
    """
    view = read(raw)
    if _HEADERS not in view.spans and view.user_id is None and view.expiration is None:
        return b""
    parts = [entry.raw for entry in view.headers if entry.key in _ROUTING]
    for which in (Property.USER_ID, Property.EXPIRATION):
        value = view.value(which)
        parts.append(b"\x00" if value is None else b"\x01" + tables.put_short(value))
    return b"".join(parts)
