"""PostgreSQL's binary arrays, a column at a time: the parameters of set-based statements.

A group of writes becomes one array for each column, ``unnest``-ed by the statement. psycopg's own adapters take three
times as long for it: at 80 cells for a branch that would be half of what the log needs for a branch in all. Format:
header (dimensions, has-null flag, element type, length, lower bound), then each element as length and octets, length -1
for null.
"""

from collections.abc import Callable, Iterable, Sequence
from struct import Struct
from typing import Any, Final

from dtx.log.changes import Slot

_HEADER: Final = Struct(">iiIii")
_LENGTH: Final = Struct(">i").pack
_NULL: Final = _LENGTH(-1)
_UUID_LENGTH: Final = _LENGTH(16)
_INT4: Final = Struct(">ii").pack
_INT8: Final = Struct(">iq").pack
_SLOTS: Final = Struct(">qq")
_SLOT: Final = _SLOTS.pack
_TRUE: Final = _LENGTH(1) + b"\x01"
_FALSE: Final = _LENGTH(1) + b"\x00"
_FIRST: Final = _HEADER.size + 4
"""Where the first element of an array begins, behind its length."""
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


def element(array: bytes) -> bytes | None:
    """The only element of *array*, as a parameter of its own: null is ``None``."""
    return None if array[_HEADER.size : _FIRST] == _NULL else array[_FIRST:]


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
    return _array(25, len(values), [_NULL if value is None else _prose(value) for value in values])


def _prose(value: str) -> bytes:
    data = value.replace("\0", "\\x00").encode("utf-8", "backslashreplace")
    return _LENGTH(len(data)) + data


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
