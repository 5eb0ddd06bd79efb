"""PostgreSQL's values become Spark's: bytes as text and numbers, and nulls as nulls."""

import struct
import uuid
from collections.abc import Callable
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import StructType

from dtx.pipeline.source.batch_reader import shaped
from dtx.pipeline.source.columns import Readable, arrow_schema

TABLE = Readable("journal", {"id": "uuid", "xid8": "xid8", "at": "timestamp", "rm": "string"})
TARGET = arrow_schema(TABLE.schema)
ROW = st.tuples(
    st.none() | st.uuids(),
    st.none() | st.integers(0, (1 << 63) - 1),
    st.none() | st.datetimes(datetime(1900, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC)),  # noqa: DTZ001
    st.none() | st.text(max_size=5),
)
Row = tuple[uuid.UUID | None, int | None, datetime | None, str | None]


def whole(arrays: list[pa.Array], names: list[str]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(arrays, names=names)


def part(arrays: list[pa.Array], names: list[str]) -> pa.RecordBatch:
    """The same rows as a slice of longer arrays, with other rows before and after."""
    longer = [pa.concat_arrays([array, array, array]) for array in arrays]
    return pa.RecordBatch.from_arrays([array.slice(len(array) // 3, len(array) // 3) for array in longer], names=names)


@pytest.mark.parametrize("made", [whole, part])
@given(rows=st.lists(ROW))
def test_bytes_are_converted_to_their_text(
    made: Callable[[list[pa.Array], list[str]], pa.RecordBatch], rows: list[Row]
) -> None:
    sent = made(
        [
            pa.array([None if row[0] is None else row[0].bytes for row in rows], pa.binary()),
            pa.array([None if row[1] is None else struct.pack(">Q", row[1]) for row in rows], pa.binary()),
            pa.array([row[2] for row in rows], pa.timestamp("us", tz="UTC")),
            pa.array([row[3] for row in rows], pa.string()),
        ],
        ["id", "xid8", "at", "rm"],
    )
    found = shaped(sent, TABLE, TARGET, "bank")
    found.validate(full=True)
    assert found.schema.equals(TARGET)
    assert [tuple(row.values()) for row in found.to_pylist()] == [
        (None if row[0] is None else str(row[0]), *row[1:], "bank") for row in rows
    ]


def test_the_source_alone_has_a_row_for_each_row() -> None:
    sent = pa.RecordBatch.from_pydict({"nothing": [True, True]})
    target = arrow_schema(StructType([TABLE.schema["source"]]))
    assert shaped(sent, TABLE, target, "bank").to_pydict() == {"source": ["bank", "bank"]}


def test_no_text_conversion_by_postgresql_is_requested() -> None:
    assert TABLE.sent(["id", "xid8", "rm", "source"]) == 'uuid_send(id) AS "id", xid8send(xid8) AS "xid8", rm AS "rm"'
