"""AMQP values for Hypothesis: every type, and nested values."""

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from dtx.wire.amqp10.values import (
    Array,
    Byte,
    Char,
    Decimal32,
    Decimal64,
    Decimal128,
    Described,
    Float,
    Int,
    Long,
    Short,
    Symbol,
    Timestamp,
    UByte,
    UInt,
    ULong,
    UShort,
)


def _integers(made: Callable[[int], Any], bits: int, signed: bool) -> st.SearchStrategy[Any]:
    least, most = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return st.one_of(st.integers(least, most), st.integers(max(least, -200), min(most, 300))).map(made)


ascii_text = st.text(st.characters(max_codepoint=127), max_size=300)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
by_type: dict[type, st.SearchStrategy[Any]] = {
    type(None): st.none(),
    bool: st.booleans(),
    UByte: _integers(UByte, 8, False),
    UShort: _integers(UShort, 16, False),
    UInt: _integers(UInt, 32, False),
    ULong: _integers(ULong, 64, False),
    Byte: _integers(Byte, 8, True),
    Short: _integers(Short, 16, True),
    Int: _integers(Int, 32, True),
    Long: _integers(Long, 64, True),
    Timestamp: _integers(Timestamp, 64, True),
    Float: st.floats(width=32, allow_nan=False).map(Float),
    float: st.floats(allow_nan=False),
    Decimal32: st.binary(min_size=4, max_size=4).map(Decimal32),
    Decimal64: st.binary(min_size=8, max_size=8).map(Decimal64),
    Decimal128: st.binary(min_size=16, max_size=16).map(Decimal128),
    Char: st.characters(exclude_categories=["Cs"]).map(Char),
    bytes: st.binary(max_size=300),
    str: texts,
    Symbol: ascii_text.map(Symbol),
}
scalars = st.one_of(st.uuids(), *by_type.values())
descriptors = st.one_of(by_type[ULong], by_type[Symbol])


@st.composite
def arrays(draw: st.DrawFn, kinds: st.SearchStrategy[type] | None = None) -> Array:
    kind = draw(kinds or st.sampled_from(list(by_type)))
    return Array(kind, tuple(draw(st.lists(by_type[kind], max_size=5))), draw(st.none() | descriptors))


def _more(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=5),
        st.dictionaries(scalars, inner, max_size=5),
        st.builds(Described, descriptors, inner),
        st.lists(st.lists(inner, max_size=3), max_size=3).map(lambda items: Array(list, tuple(items))),
        st.lists(st.dictionaries(scalars, inner, max_size=3), max_size=3).map(lambda items: Array(dict, tuple(items))),
        st.lists(arrays(), max_size=3).map(lambda items: Array(Array, tuple(items))),
    )


values = st.recursive(scalars | arrays(), _more, max_leaves=20)
