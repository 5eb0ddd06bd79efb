"""The codec of AMQP 1.0: every type, every width, every limit; one error."""

from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtx.wire.amqp10 import codec
from dtx.wire.amqp10.codec import MAX_DEPTH, MAX_NOTHING, MAX_VALUES, encode, read, skip
from dtx.wire.amqp10.errors import AmqpError, Condition
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
from tests.unit.wire.amqp10.values import values

ID = UUID("f81d4fae-7dec-11d0-a765-00a0c91e6bf6")


def decode(octets: bytes) -> Any:
    found, position = read(octets, 0, len(octets))
    assert position == len(octets)
    return found


SHORTEST: list[tuple[Any, str]] = [
    (None, "40"),
    (True, "41"),
    (False, "42"),
    (UByte(255), "50 ff"),
    (UShort(1), "60 0001"),
    (UInt(0), "43"),
    (UInt(255), "52 ff"),
    (UInt(256), "70 00000100"),
    (ULong(0), "44"),
    (ULong(255), "53 ff"),
    (ULong(1 << 63), "80 8000000000000000"),
    (Byte(-1), "51 ff"),
    (Short(-2), "61 fffe"),
    (Int(-128), "54 80"),
    (Int(128), "71 00000080"),
    (Long(127), "55 7f"),
    (Long(-129), "81 ffffffffffffff7f"),
    (Float(1.5), "72 3fc00000"),
    (1.5, "82 3ff8000000000000"),
    (Decimal32(b"abcd"), "74 61626364"),
    (Decimal64(b"abcdefgh"), "84 6162636465666768"),
    (Decimal128(bytes(16)), "94" + 16 * "00"),
    (Char("\U0001f600"), "73 0001f600"),
    (Timestamp(-1), "83 ffffffffffffffff"),
    (ID, "98 f81d4fae7dec11d0a76500a0c91e6bf6"),
    (b"ab", "a0 02 6162"),
    (bytes(256), "b0 00000100" + 256 * "00"),
    ("\u00e9", "a1 02 c3a9"),
    ("x" * 256, "b1 00000100" + 256 * "78"),
    (Symbol("a"), "a3 01 61"),
    (Symbol("a" * 256), "b3 00000100" + 256 * "61"),
    ([], "45"),
    ([True, []], "c0 03 02 41 45"),
    ([bytes(250), None], "c0 fe 02 a0 fa" + 250 * "00" + "40"),
    ([bytes(252)], "c0 ff 01 a0 fc" + 252 * "00"),
    ([bytes(253)], "d0 00000103 00000001 a0 fd" + 253 * "00"),
    ([None] * 256, "d0 00000104 00000100" + 256 * "40"),
    ({}, "c1 01 00"),
    ({"a": UInt(0)}, "c1 05 02 a1 01 61 43"),
    (Described(ULong(0x75), b""), "00 53 75 a0 00"),
    (Described(Symbol("x"), None), "00 a3 01 78 40"),
    (Array(type(None), (None, None)), "e0 02 02 40"),
    (Array(bool, (True, False)), "e0 04 02 56 01 00"),
    (Array(UInt, (UInt(1),)), "e0 06 01 70 00000001"),
    (Array(Symbol, ()), "e0 02 00 a3"),
    (Array(Symbol, (Symbol("a"), Symbol("bc"))), "e0 07 02 a3 01 61 02 6263"),
    (Array(str, ("a", "b" * 256)), "f0 0000010e 00000002 b1 00000001 61 00000100" + 256 * "62"),
    (Array(list, ([None], [])), "e0 13 02 d0 00000005 00000001 40 00000004 00000000"),
    (Array(dict, ({}, {})), "e0 06 02 c1 01 00 01 00"),
    (Array(Array, (Array(bool, ()), Array(bool, ()))), "e0 08 02 e0 02 00 56 02 00 56"),
    (Array(bytes, (b"",), ULong(5)), "e0 06 01 00 53 05 a0 00"),
    (Array(Char, (Char("a"),)), "e0 06 01 73 00000061"),
    (Array(UUID, (ID,)), "e0 12 01 98 f81d4fae7dec11d0a76500a0c91e6bf6"),
    (Array(Decimal32, (Decimal32(b"abcd"),)), "e0 06 01 74 61626364"),
    (Array(Decimal64, (Decimal64(bytes(8)),)), "e0 0a 01 84 0000000000000000"),
    (Array(Decimal128, (Decimal128(bytes(16)),)), "e0 12 01 94" + 16 * "00"),
]


@pytest.mark.parametrize(("value", "octets"), SHORTEST, ids=lambda case: str(case)[:30])
def test_every_type_is_written_in_its_shortest_encoding_and_read(value: Any, octets: str) -> None:
    assert encode(value).hex(" ").replace(" ", "") == octets.replace(" ", "")
    found = decode(bytes.fromhex(octets))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("octets", "value"),
    [
        ("56 01", True),
        ("56 00", False),
        ("52 00", UInt(0)),
        ("70 00000000", UInt(0)),
        ("53 00", ULong(0)),
        ("80 0000000000000001", ULong(1)),
        ("71 ffffffff", Int(-1)),
        ("81 ffffffffffffffff", Long(-1)),
        ("b0 00000001 61", b"a"),
        ("b1 00000001 61", "a"),
        ("b3 00000001 61", Symbol("a")),
        ("c0 01 00", []),
        ("d0 00000005 00000001 40", [None]),
        ("d1 00000006 00000002 40 40", {None: None}),
        ("f0 00000006 00000001 56 01", Array(bool, (True,))),
        ("e0 02 02 45", Array(list, ([], []))),
        ("00 80 0000000000000001 40", Described(ULong(1), None)),
    ],
)
def test_every_width_is_read(octets: str, value: Any) -> None:
    assert decode(bytes.fromhex(octets)) == value


@pytest.mark.parametrize(
    "octets",
    [
        "",
        "56",
        "56 02",
        "70 000000",
        "3f",
        "99",
        "a0 02 61",
        "b0 ffffffff 61",
        "a1 02 c328",
        "a3 01 80",
        "73 00110000",
        "73 0000d800",
        "c0 03 01 40 40",
        "c0 05 01 40",
        "d0 00000004",
        "c1 02 01 40",
        "c1 05 02 45 40",
        "c1 06 02 40 40 40",
        "c1 04 02 40 40 40",
        "c1 05 04 40 41 40 41",
        "e0 01 00",
        "e0 03 01 3f",
        "e0 09 01 56 01",
        "e0 04 01 56 01 01",
        "e0 05 00 00 40 00 40",
        "00",
        "00 40",
    ],
)
def test_a_malformed_value_is_a_decode_error(octets: str) -> None:
    data = bytes.fromhex(octets)
    with pytest.raises(AmqpError) as caught:
        read(data, 0, len(data))
    assert caught.value.condition is Condition.DECODE_ERROR


def test_a_value_must_end_where_its_frame_does() -> None:
    with pytest.raises(AmqpError, match="longer than its container"):
        read(b"\xa0\x02ab", 0, 3)


@pytest.mark.parametrize("head", ["c0 {:02x} 01", "c1 {:02x} 02 40", "e0 {:02x} 01"])
def test_values_may_be_nested_so_deep_and_no_deeper(head: str) -> None:
    def nested(depth: int) -> bytes:
        octets = b"\x40"
        for _ in range(depth):
            octets = bytes.fromhex(head.format(len(octets) + len(bytes.fromhex(head.format(0))) - 2)) + octets
        return octets

    decode(nested(MAX_DEPTH))
    with pytest.raises(AmqpError, match="nested deeper than 32"):
        decode(nested(MAX_DEPTH + 1))


def test_descriptors_of_descriptors_are_as_deep() -> None:
    with pytest.raises(AmqpError, match="nested deeper"):
        decode(bytes(100) + b"\x40" * 101)


def test_an_array_of_nothing_may_not_be_endless() -> None:
    """Ten bytes would make four thousand million values."""
    for constructor in ("40", "41", "42", "43", "44", "45"):
        with pytest.raises(AmqpError, match="more than 65536 values"):
            decode(bytes.fromhex("f0 00000005 ffffffff" + constructor))
    one = bytes.fromhex("f0 00000005") + (MAX_NOTHING // 2).to_bytes(4, "big") + b"\x40"
    assert len(decode(one).items) == MAX_NOTHING // 2
    assert len(decode(encode([None, *[None] * 2000]))) == 2001
    many = b"\xd0" + (4 + 3 * len(one)).to_bytes(4, "big") + b"\x00\x00\x00\x03" + one * 3
    with pytest.raises(AmqpError, match="more than 1024 values that take no bytes"):
        decode(many)


def test_the_number_of_values_is_limited() -> None:
    assert len(decode(encode([None] * MAX_VALUES))) == MAX_VALUES
    with pytest.raises(AmqpError, match="more than 65536 values"):
        decode(encode([None] * (MAX_VALUES + 1)))


@settings(deadline=None)
@given(values)
def test_written_values_are_read(value: Any) -> None:
    octets = encode(value)
    found = decode(octets)
    assert found == value
    assert type(found) is type(value)
    assert skip(octets, 0) == len(octets)


@settings(deadline=None)
@given(values, st.data())
def test_a_truncated_value_is_refused(value: Any, data: st.DataObject) -> None:
    octets = encode(value)
    short = octets[: data.draw(st.integers(0, len(octets) - 1))]
    with pytest.raises(AmqpError):
        read(short, 0, len(short))


def test_types_differ_as_keys_and_by_equality() -> None:
    keys: dict[Any, Any] = {UInt(1): "a", Long(1): "b", "x": "d", Symbol("x"): "e", Char("x"): "f", b"": "g"}
    assert decode(encode(keys)) == keys
    different: list[Any] = [UInt(1), ULong(1), Symbol("x"), "x"]
    assert [one == other for one in different for other in different] == [True, *([False] * 4 + [True]) * 3]
    assert [key for key in (UInt(1), UInt(2)) if key != UInt(1)] == [UInt(2)]
    assert Symbol("x") != "x"


@pytest.mark.parametrize(
    "value",
    [
        UByte(256),
        UInt(1 << 32),
        UInt(-1),
        1 << 63,
        Decimal32(b"abc"),
        Char("ab"),
        Symbol("\u00e9"),
        Array(UInt, (Long(1),)),
        Array(UByte, (UByte(256),)),
        object(),
    ],
)
def test_a_value_that_does_not_fit_its_type_is_refused(value: Any) -> None:
    with pytest.raises(ValueError):
        encode(value)


def test_plain_values_have_default_types() -> None:
    assert decode(encode(5)) == Long(5)
    assert decode(encode(memoryview(b"ab"))) == b"ab"  # type: ignore[arg-type]
    assert decode(encode(Condition.NOT_FOUND)) == Symbol("amqp:not-found")
    assert decode(encode(Array(int, (1, 2)))) == Array(Long, (Long(1), Long(2)))


@pytest.mark.parametrize("octets", ["00 00 40 40 40", "3f", "00 53"])
def test_an_unskippable_value_is_refused(octets: str) -> None:
    data = bytes.fromhex(octets)
    with pytest.raises(AmqpError), codec.reading("it"):
        skip(data, 0)
