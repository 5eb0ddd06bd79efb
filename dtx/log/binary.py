"""PostgreSQL's binary arrays, a column at a time: the parameters of set-based statements.

A group of writes becomes one array for each column, ``unnest``-ed by the statement. psycopg's own adapters take three
times as long for it: at 80 cells for a branch that would be half of what the log needs for a branch in all. Format:
header (dimensions, has-null flag, element type, length, lower bound), then each element as length and octets, length -1
for null.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from struct import Struct
from typing import Any, Final

from dtx.log.changes import Slot

_HEADER: Final = Struct(">iiIii")
_LENGTH: Final = Struct(">i").pack
_NULL: Final = _LENGTH(-1)
_ONE_INT4: Final = Struct(">i").pack
_ONE_INT8: Final = Struct(">q").pack
_UUID_LENGTH: Final = _LENGTH(16)
_INT4: Final = Struct(">ii").pack
_INT8: Final = Struct(">iq").pack
_SLOTS: Final = Struct(">qq")
_SLOT: Final = _SLOTS.pack
_TRUE: Final = _LENGTH(1) + b"\x01"
_FALSE: Final = _LENGTH(1) + b"\x00"
_EPOCH: Final = 946_684_800_000_000
"""2000-01-01 in microseconds since 1970: where PostgreSQL's timestamps start."""


def seconds_of(data: bytes) -> float:
    """A binary ``timestamptz`` as seconds since 1970: the nearest float, so that what was stored reads back equal."""
    return seconds_from(int.from_bytes(data, signed=True))


def seconds_from(number: int) -> float:
    """As :func:`seconds_of`, from PostgreSQL's number: microseconds since 2000."""
    return (number + _EPOCH) / 1_000_000


def int8(value: int) -> bytes:
    """One ``bigint`` parameter."""
    return value.to_bytes(8, signed=True)


def pack_slots(slots: Sequence[Slot]) -> bytes:
    """Slots as ``branch`` keeps them: queue and position, 64 bits each."""
    return b"".join([_SLOT(queue, position) for queue, position in slots])


def unpack_slots(data: bytes | None) -> tuple[Slot, ...] | None:
    """What :func:`pack_slots` made; null is ``None``."""
    return None if data is None else tuple(map(Slot._make, _SLOTS.iter_unpack(data)))


def _array(oid: int, count: int, cells: Iterable[bytes]) -> bytes:
    return _HEADER.pack(1, 0, oid, count, 1) + b"".join(cells)


def uuids(values: Sequence[Any]) -> bytes:
    """``uuid[]``."""
    return _array(2950, len(values), [_UUID_LENGTH + value.bytes for value in values])


def raw_uuids(values: Sequence[bytes]) -> bytes:
    """``uuid[]`` of 16 octets each."""
    return _array(2950, len(values), [_UUID_LENGTH + value for value in values])


def texts(values: Sequence[str]) -> bytes:
    """``text[]`` of identifiers: what is not UTF-8, or holds a NUL, is refused by PostgreSQL or here."""
    if len(values) > 1 and values.count(values[0]) == len(values):  # vhosts, owners and states nearly always are equal
        data = values[0].encode()
        return _array(25, len(values), (_LENGTH(len(data)) + data,) * len(values))
    return _array(25, len(values), [_LENGTH(len(data := value.encode())) + data for value in values])


def optional_texts(values: Sequence[str | None]) -> bytes:
    """``text[]`` of words that come from anywhere, for people to read: what PostgreSQL cannot keep is escaped."""
    return _array(
        25, len(values), [_NULL if value is None else _LENGTH(len(data := _prose(value))) + data for value in values]
    )


def _prose(value: str) -> bytes:
    return value.replace("\0", "\\x00").encode("utf-8", "backslashreplace")


def bytes_(values: Sequence[bytes]) -> bytes:
    """``bytea[]``; bodies are copied once."""
    return _array(17, len(values), [part for value in values for part in (_LENGTH(len(value)), value)])


def optional_bytes(values: Sequence[bytes | None]) -> bytes:
    """``bytea[]`` with nulls."""
    return _array(17, len(values), [_NULL if value is None else _LENGTH(len(value)) + value for value in values])


def int4s(values: Sequence[int]) -> bytes:
    """``integer[]``."""
    return _array(23, len(values), [_INT4(4, value) for value in values])


def optional_int4s(values: Sequence[int | None]) -> bytes:
    """``integer[]`` with nulls."""
    return _array(23, len(values), [_NULL if value is None else _INT4(4, value) for value in values])


def int8s(values: Sequence[int]) -> bytes:
    """``bigint[]``."""
    return _array(20, len(values), [_INT8(8, value) for value in values])


def packed_slots(values: Sequence[Sequence[Slot] | None]) -> bytes:
    """``bytea[]`` with nulls, each the slots of one branch."""
    return optional_bytes([None if value is None else pack_slots(value) for value in values])


def booleans(values: Sequence[bool]) -> bytes:
    """``boolean[]``."""
    return _array(16, len(values), [_TRUE if value else _FALSE for value in values])


def times(values: Sequence[float | None]) -> bytes:
    """``timestamptz[]`` with nulls, from seconds since 1970."""
    return _array(
        1184,
        len(values),
        [_NULL if value is None else _INT8(8, round(value * 1_000_000) - _EPOCH) for value in values],
    )


Encoder = Callable[[Sequence[Any]], bytes]
"""From the values of a column to its parameter."""


def _text(value: str) -> bytes:
    return value.encode()


def _optional_text(value: str | None) -> bytes | None:
    return None if value is None else _prose(value)


def _same(value: bytes) -> bytes:
    return value


def _optional_slots(value: Sequence[Slot] | None) -> bytes | None:
    return None if value is None else pack_slots(value)


def _optional_int4(value: int | None) -> bytes | None:
    return None if value is None else _ONE_INT4(value)


def _time(value: float | None) -> bytes | None:
    return None if value is None else _ONE_INT8(round(value * 1_000_000) - _EPOCH)


CELL: Final[dict[Encoder, Callable[[Any], bytes | None]]] = {
    uuids: attrgetter("bytes"),
    raw_uuids: _same,
    texts: _text,
    optional_texts: _optional_text,
    bytes_: _same,
    optional_bytes: _same,
    packed_slots: _optional_slots,
    int4s: _ONE_INT4,
    optional_int4s: _optional_int4,
    int8s: _ONE_INT8,
    booleans: (b"\x00", b"\x01").__getitem__,
    times: _time,
}
"""For each of these the same for a value that is a parameter of its own."""
