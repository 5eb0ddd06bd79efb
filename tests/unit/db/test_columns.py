"""PostgreSQL's binary arrays, checked with psycopg's loaders."""

from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.adapt import Transformer
from psycopg.pq import Format

from dtx.db import columns

INT4 = st.integers(-(2**31), 2**31 - 1)
INT8 = st.integers(-(2**63), 2**63 - 1)
ELEMENTS = {2951: 2950, 1009: 25, 1001: 17, 1007: 23, 1016: 20, 1000: 16}
"""Element types by array type."""
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"))


def loaded(oid: int, data: bytes) -> Any:
    return Transformer().get_loader(oid, Format.BINARY).load(data)


@pytest.mark.parametrize(
    ("encode", "oid", "values"),
    [
        (columns.uuids, 2951, st.uuids()),
        (columns.texts, 1009, TEXT),
        (columns.optional_texts, 1009, st.none() | TEXT),
        (columns.bytes_, 1001, st.binary()),
        (columns.optional_bytes, 1001, st.none() | st.binary()),
        (columns.int4s, 1007, INT4),
        (columns.optional_int4s, 1007, st.none() | INT4),
        (columns.int8s, 1016, INT8),
        (columns.booleans, 1000, st.booleans()),
    ],
    ids=["uuids", "texts", "optional_texts", "bytes", "optional_bytes", "int4s", "optional_int4s", "int8s", "booleans"],
)
def test_a_column_reads_back_as_it_was(encode: columns.Encoder, oid: int, values: st.SearchStrategy[Any]) -> None:
    @given(st.lists(values, min_size=1, max_size=20))
    def check(column: list[Any]) -> None:
        assert loaded(oid, encode.array(column)) == column
        # a single row is sent as a scalar parameter
        cell = encode.cell(column[0])
        assert cell == (
            None if encode.array(column[:1])[20:24] == b"\xff\xff\xff\xff" else encode.array(column[:1])[24:]
        )
        assert cell is None or [loaded(ELEMENTS[oid], cell)] == column[:1]

    check()


@given(st.lists(st.none() | st.floats(0, 4e9), min_size=1, max_size=20))
def test_times_are_kept_to_the_microsecond(column: list[float | None]) -> None:
    for value, read in zip(column, loaded(1185, columns.times.array(column)), strict=True):
        assert columns.times.cell(value) == (None if value is None else columns.times.array([value])[24:])
        if value is None:
            assert read is None
        else:
            assert abs(read.timestamp() - value) <= 1e-6


@given(st.integers(0, 4 * 10**15))
def test_a_stored_time_reads_back_equal(microseconds: int) -> None:
    at = microseconds / 1_000_000
    assert columns.seconds_of(columns.times.array([at])[-8:]) == at


@given(st.lists(st.uuids(), min_size=1, max_size=5))
def test_raw_uuids_are_uuids(column: list[UUID]) -> None:
    assert columns.raw_uuids.array([value.bytes for value in column]) == columns.uuids.array(column)


@given(st.text())
def test_any_words_for_people_can_be_stored(text: str) -> None:
    """A broker's reason can hold any characters. Those that PostgreSQL cannot store are escaped."""
    (stored,) = loaded(1009, columns.optional_texts.array([text]))
    assert "\0" not in stored
    if "\0" not in text and not any(0xD800 <= ord(char) < 0xE000 for char in text):
        assert stored == text


def test_an_identifier_that_is_no_utf_8_is_refused() -> None:
    with pytest.raises(UnicodeEncodeError):
        columns.texts.array(["\udcff"])


@given(INT8)
def test_a_scalar_is_eight_bytes(value: int) -> None:
    assert loaded(20, columns.int8(value)) == value
