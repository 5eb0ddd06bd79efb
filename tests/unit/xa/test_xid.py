"""The Xid in its wire form and its text form."""

import pickle

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dtx.xa.codes import ReplyCode, XaError
from dtx.xa.xid import MAX_BQUAL, MAX_GTRID, MAX_WIRE, Xid

XIDS = st.builds(
    Xid,
    st.integers(0, 0xFFFFFFFF),
    st.binary(min_size=1, max_size=MAX_GTRID),
    st.binary(max_size=MAX_BQUAL),
)
WIDEST = Xid(0xFFFFFFFE, bytes(range(192, 256)), bytes(64))


def refused(data: bytes) -> str:
    with pytest.raises(XaError) as caught:
        Xid.from_wire(data)
    assert caught.value.code is ReplyCode.SYNTAX_ERROR
    return caught.value.reason


def test_the_wire_form_is_format_id_lengths_and_data() -> None:
    """Domain Xid: "format_id long, gtrid_length octet, bqual_length octet, data"."""
    assert Xid(0x01020304, b"abc", b"de").to_wire() == b"\x01\x02\x03\x04\x03\x02abcde"
    assert Xid.from_wire(b"\x01\x02\x03\x04\x03\x02abcde") == Xid(0x01020304, b"abc", b"de")


def test_the_branch_qualifier_may_be_empty() -> None:
    assert Xid.from_wire(b"\x00\x00\x00\x00\x01\x00g") == Xid(0, b"g")


def test_the_widest_xid_takes_134_bytes() -> None:
    """Domain Xid: "the data field is a sequence of octets of at most 128 bytes"."""
    assert len(WIDEST.to_wire()) == MAX_WIRE == 4 + 1 + 1 + 128


@given(XIDS)
@example(WIDEST)
@example(Xid(0, b"\x00", b"\x00" * 64))
@example(Xid(0xFFFFFFFF, b"\x00" * 64, b""))
def test_every_xid_survives_wire_form_and_text(xid: Xid) -> None:
    assert Xid.from_wire(xid.to_wire()) == xid
    assert Xid.parse(str(xid)) == xid
    assert hash(Xid.parse(str(xid))) == hash(xid)


@given(st.binary(max_size=MAX_WIRE + 8))
def test_any_bytes_are_an_xid_or_a_syntax_error(data: bytes) -> None:
    try:
        xid = Xid.from_wire(data)
    except XaError as error:
        assert error.code is ReplyCode.SYNTAX_ERROR  # noqa: PT017 either is right, and nothing else
    else:
        assert xid.to_wire() == data


@pytest.mark.parametrize("length", range(6))
def test_a_head_that_is_cut_short_is_a_syntax_error(length: int) -> None:
    assert refused(WIDEST.to_wire()[:length]) == f"xid of {length} bytes is truncated"


@pytest.mark.parametrize("data", [b"", b"g", b"gbb", b"gb\x00"])
def test_inconsistent_lengths_are_a_syntax_error(data: bytes) -> None:
    """Domain Xid: "The sum of the two lengths must equal the length of the data field"."""
    assert refused(b"\x00\x00\x00\x01\x01\x01" + data) == f"xid declares 1+1 bytes of data and has {len(data)}"


def test_an_empty_gtrid_is_a_syntax_error() -> None:
    assert refused(b"\x00\x00\x00\x01\x00\x01b") == "xid gtrid of 0 bytes, must be 1 to 64"


def test_a_gtrid_of_more_than_64_bytes_is_invalid() -> None:
    assert refused(b"\x00\x00\x00\x01\x41\x00" + b"g" * 65) == "xid gtrid of 65 bytes, must be 1 to 64"


def test_a_bqual_of_more_than_64_bytes_is_invalid() -> None:
    assert refused(b"\x00\x00\x00\x01\x01\x41g" + b"b" * 65) == "xid bqual of 65 bytes, must be at most 64"


@pytest.mark.parametrize("format_id", [-1, 0x1_0000_0000])
def test_a_format_id_beyond_32_bits_is_a_syntax_error(format_id: int) -> None:
    with pytest.raises(XaError, match=f"502: xid format id {format_id} is not an unsigned 32 bit number"):
        Xid(format_id, b"g")


def test_the_text_form_is_format_and_two_parts_in_hexadecimal() -> None:
    assert str(Xid(1, b"gt", b"b")) == "1:6774:62"
    assert Xid.parse("4294967294:00ff:") == Xid(0xFFFFFFFE, b"\x00\xff")


@pytest.mark.parametrize("text", ["", "1", "1:67", "1:67:62:63", "x:67:62", "1:6:62", "1:zz:62", "1::62", "-1:67:62"])
def test_text_that_is_no_xid_is_a_syntax_error(text: str) -> None:
    with pytest.raises(XaError) as caught:
        Xid.parse(text)
    assert caught.value.code is ReplyCode.SYNTAX_ERROR


@given(st.text(max_size=40))
def test_any_text_is_an_xid_or_a_syntax_error(text: str) -> None:
    try:
        Xid.parse(text)
    except XaError as error:
        assert error.code is ReplyCode.SYNTAX_ERROR  # noqa: PT017 either is right, and nothing else


def test_printable_parts_are_shown_as_text_and_others_are_not() -> None:
    assert Xid(1, b"order-7", b"queue").readable == "order-7/queue"
    assert Xid(1, b"order-7").readable == "order-7/"
    assert Xid(1, b"order\x00", b"queue").readable is None
    assert Xid(1, b"order", b"\x7f").readable is None


def test_an_xid_from_a_larger_buffer_keeps_its_own_bytes() -> None:
    xid = Xid.from_wire(memoryview(b"\x00\x00\x00\x01\x01\x01gb"))  # type: ignore[arg-type]
    assert (type(xid.gtrid), type(xid.bqual)) == (bytes, bytes)


def test_an_xid_survives_pickling() -> None:
    assert pickle.loads(pickle.dumps(WIDEST)) == WIDEST
