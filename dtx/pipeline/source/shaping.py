"""What PostgreSQL sends, as the columns that Spark wants.

A uuid and an xid8 are sent as their octets: to write them as text takes PostgreSQL longer than all of a batch here.
"""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dtx.pipeline.source.columns import SOURCE, Kind, Readable

_UUID_OCTETS: Final = 16
_XID8_OCTETS: Final = 8
_GROUPS: Final = ("8", "4", "4", "4", "12")
"""Digits of a uuid between its hyphens (RFC 9562, section 4)."""
_DIGITS: Final = np.dtype([(f"group{number}", f"V{width}") for number, width in enumerate(_GROUPS)])


def _with_hyphens() -> Iterator[tuple[str, str]]:
    for number, width in enumerate(_GROUPS):
        if number:
            yield f"hyphen{number}", "u1"
        yield f"group{number}", f"V{width}"


_TEXT: Final = np.dtype(list(_with_hyphens()))


def shaped(batch: pa.RecordBatch, table: Readable, target: pa.Schema, source: str) -> pa.RecordBatch:
    """*batch* with exactly the columns that Spark expects.

    Args:
        batch: rows of :meth:`Readable.sent`.
        table: what they are of.
        target: the columns.
        source: the configured name of the database.
    """
    return pa.RecordBatch.from_arrays([_column(batch, table, field, source) for field in target], schema=target)


def _column(batch: pa.RecordBatch, table: Readable, field: pa.Field, source: str) -> pa.Array:
    if field.name == SOURCE:
        return pa.repeat(pa.scalar(source, field.type), batch.num_rows)
    column = batch.column(field.name)
    match table.columns[field.name]:
        case Kind.UUID:
            return _present(column, uuids(_octets(column, _UUID_OCTETS)))
        case Kind.XID8:
            return _present(column, pa.array(_octets(column, _XID8_OCTETS).view(">i8").ravel().astype(np.int64)))
        case _:
            return column.cast(field.type)


def uuids(octets: "np.ndarray[Any, np.dtype[np.uint8]]") -> pa.Array:
    """Uuids as text.

    Args:
        octets: 16 of each, in a row of their own.
    """
    digits = np.frombuffer(octets.tobytes().hex().encode(), _DIGITS)
    text = np.empty(len(digits), _TEXT)
    for name in _TEXT.names or ():
        text[name] = digits[name] if name in (_DIGITS.names or ()) else ord("-")
    ends = np.arange(0, (len(text) + 1) * _TEXT.itemsize, _TEXT.itemsize, dtype=np.int32)
    return pa.StringArray.from_buffers(len(text), pa.py_buffer(ends), pa.py_buffer(text))


def _octets(column: pa.BinaryArray, width: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """The values of a column, of *width* octets each, beside each other; zeros where there is none."""
    whole = column.fill_null(bytes(width)) if column.null_count else column
    _, ends, data = whole.buffers()
    start = int(np.frombuffer(ends, np.int32, count=1, offset=whole.offset * 4)[0])
    return np.frombuffer(data, np.uint8, count=len(whole) * width, offset=start).reshape(len(whole), width)


def _present(column: pa.Array, values: pa.Array) -> pa.Array:
    """*values* where *column* has some."""
    return pc.if_else(column.is_valid(), values, None) if column.null_count else values
