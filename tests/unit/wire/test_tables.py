"""Field tables: every type that brokers know, and every malformed form."""

import struct
from datetime import UTC, datetime
from decimal import Decimal

import pytest
from pika import data as pika_data

from dtx.wire.amqp09 import tables
from dtx.wire.amqp09.errors import WireError

VALUES = {
    b"V": b"",
    b"t": b"\x01",
    b"b": b"\xff",
    b"B": b"\xff",
    b"s": b"\xff\xfe",
    b"u": b"\xff\xfe",
    b"U": b"\xff\xfe",
    b"I": bytes(4),
    b"i": bytes(4),
    b"f": bytes(4),
    b"D": b"\x02\x00\x00\x01\x00",
    b"l": bytes(8),
    b"L": bytes(8),
    b"d": bytes(8),
    b"T": bytes(8),
    b"S": b"text",
    b"x": b"\x00\xff",
    b"F": b"\x01aV",
    b"A": b"VV",
}


@pytest.mark.parametrize("kind", VALUES)
def test_a_value_of_every_type_is_found(kind: bytes) -> None:
    raw = tables.entry(b"key", kind, VALUES[kind])
    other = tables.entry(b"other", b"t", b"\x00")
    assert tables.entries(raw + other) == [
        (b"key", kind, VALUES[kind], raw),
        (b"other", b"t", b"\x00", other),
    ]


@pytest.mark.parametrize("kind", VALUES)
def test_a_truncated_value_of_every_type_is_a_syntax_error(kind: bytes) -> None:
    raw = tables.entry(b"key", kind, VALUES[kind])
    for length in range(1, len(raw)):
        with pytest.raises(WireError, match="truncated"):
            tables.entries(raw[:length])


@pytest.mark.parametrize("kind", VALUES)
def test_a_value_of_every_type_may_be_nested(kind: bytes) -> None:
    inner = kind + tables.entry(b"", kind, VALUES[kind])[2:]
    table = tables.entry(b"in", b"F", tables.entry(b"deeper", b"A", inner + inner))
    assert [entry.value for entry in tables.entries(table)] == [table[8:]]


def test_tables_written_by_pika_are_read() -> None:
    pieces: list[bytes] = []
    values = {
        "text": "é",
        "octets": b"\xff",
        "yes": True,
        "number": 2**40,
        "small": -1,
        "money": Decimal("1.25"),
        "when": datetime(2020, 1, 1, tzinfo=UTC),
        "table": {"list": [1, [2, {"x": None}]]},
        "nothing": None,
    }
    pika_data.encode_table(pieces, values)
    found = tables.entries(b"".join(pieces)[4:])
    assert [entry.key.decode() for entry in found] == list(values)
    assert b"".join(entry.raw for entry in found) == b"".join(pieces)[4:]


def test_a_name_may_come_twice() -> None:
    raw = tables.entry(b"a", b"t", b"\x00") + tables.entry(b"a", b"t", b"\x01")
    assert [entry.value for entry in tables.entries(raw)] == [b"\x00", b"\x01"]


def test_a_value_of_unknown_type_is_a_syntax_error() -> None:
    with pytest.raises(WireError, match="unknown type 0x7a") as caught:
        tables.entries(b"\x01az\x00\x00\x00\x00")
    assert caught.value.code == 502


def nested(depth: int) -> bytes:
    value = b""
    for _ in range(depth - 1):
        value = tables.entry(b"", b"A", value)[1:]
    return tables.entry(b"k", b"A", value)


def test_tables_may_be_nested_to_a_limit() -> None:
    assert len(tables.entries(nested(tables.MAX_DEPTH))) == 1
    with pytest.raises(WireError, match=f"nested deeper than {tables.MAX_DEPTH}"):
        tables.entries(nested(tables.MAX_DEPTH + 1))


def test_deeply_nested_arrays_are_refused_before_the_stack_overflows() -> None:
    with pytest.raises(WireError, match="nested deeper"):
        tables.entries(nested(20_000))


def test_a_table_may_have_entries_to_a_limit() -> None:
    entry = tables.entry(b"", b"V", b"")
    assert len(tables.entries(entry * tables.MAX_ENTRIES)) == tables.MAX_ENTRIES
    with pytest.raises(WireError, match=f"more than {tables.MAX_ENTRIES} entries"):
        tables.entries(entry * (tables.MAX_ENTRIES + 1))


def test_a_nested_value_must_end_where_its_table_does() -> None:
    """The inner string is one byte longer than the array around it."""
    with pytest.raises(WireError, match="truncated"):
        tables.entries(bytes.fromhex("01 61 41 00000006 53 00000002 78 79"))


@pytest.mark.parametrize("kind", VALUES)
def test_the_values_of_an_array_are_found(kind: bytes) -> None:
    raw = tables.entry(b"", kind, VALUES[kind])[1:]
    assert tables.items(raw + b"t\x00" + raw) == [
        (b"", kind, VALUES[kind], raw),
        (b"", b"t", b"\x00", b"t\x00"),
        (b"", kind, VALUES[kind], raw),
    ]


def test_a_truncated_array_is_a_syntax_error() -> None:
    with pytest.raises(WireError, match="truncated"):
        tables.items(b"t\x00S\x00\x00\x00\x02x")


def test_an_array_may_have_values_to_a_limit() -> None:
    assert len(tables.items(b"V" * tables.MAX_ENTRIES)) == tables.MAX_ENTRIES
    with pytest.raises(WireError, match=f"more than {tables.MAX_ENTRIES} values"):
        tables.items(b"V" * (tables.MAX_ENTRIES + 1))


@pytest.mark.parametrize("kind", [b"A", b"F"])
def test_a_nested_table_has_few_values(kind: bytes) -> None:
    """All clients wait while nested values are read, at any depth."""
    one = b"\x00V" if kind == b"F" else b"V"
    half = tables.entry(b"", kind, one * (tables.MAX_ENTRIES // 2))
    assert len(tables.entries(half * 2)) == 2
    assert len(tables.items(half[1:] * 2)) == 2
    for find, more in ((tables.entries, half * 2), (tables.items, half[1:] * 2)):
        with pytest.raises(WireError, match=f"more than {tables.MAX_ENTRIES} nested values"):
            find(more + tables.entry(b"", kind, one)[find is tables.items :])


def test_values_that_rabbitmq_cannot_read_are_found() -> None:
    """Its parser has no type U, and none of its patterns takes a number that is not finite."""
    double, single = struct.pack(">d", float("-inf")), struct.pack(">f", float("nan"))
    bad = [(b"U", VALUES[b"U"]), (b"d", double), (b"f", single)]
    for kind, value in bad:
        for raw in (
            tables.entry(b"x", kind, value),
            tables.entry(b"x", b"A", b"V" + kind + value),
            tables.entry(b"x", b"F", tables.entry(b"y", kind, value) + tables.entry(b"z", b"t", b"\1")),
        ):
            assert not tables.is_readable(tables.entry(b"before", b"A", b"VV") + raw)
    good = b"".join(tables.entry(b"dU" + kind, kind, value) for kind, value in VALUES.items() if kind != b"U")
    text = tables.entry(b"x", b"S", b"U" + b"d" + double + b"f" + single)
    assert tables.is_readable(tables.entry(b"x", b"S", b"plain"))
    assert tables.is_readable(good + text + tables.entry(b"y", b"d", struct.pack(">d", 1.7e308)))
    with pytest.raises(WireError):
        tables.is_readable(text[:-1])
