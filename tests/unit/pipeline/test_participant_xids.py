"""Xids from the names that databases give to prepared transactions."""

import base64

import psycopg
from hypothesis import given
from hypothesis import strategies as st

from dtx.pipeline.participants import from_gid, from_recover
from dtx.xa.xid import Xid

parts = st.tuples(
    st.integers(min_value=0, max_value=(1 << 32) - 1), st.binary(min_size=1, max_size=64), st.binary(max_size=64)
)


@given(parts)
def test_a_gid_of_pgjdbc_is_its_xid(given_parts: tuple[int, bytes, bytes]) -> None:
    """RecoveredXid.xidToString: the format id is a Java int, the parts are base64."""
    format_id, gtrid, bqual = given_parts
    signed = format_id - (1 << 32) if format_id >= 1 << 31 else format_id
    gid = f"{signed}_{base64.b64encode(gtrid).decode()}_{base64.b64encode(bqual).decode()}"
    assert from_gid(gid) == Xid(format_id, gtrid, bqual)


def test_a_gid_of_psycopg_is_its_xid() -> None:
    assert from_gid(str(psycopg.Xid.from_parts(7, "transfer-1", "orders"))) == Xid(7, b"transfer-1", b"orders")


@given(st.text(max_size=200))
def test_any_text_is_an_xid_or_none(gid: str) -> None:
    """Parsing does not raise."""
    found = from_gid(gid)
    assert found is None or isinstance(found, Xid)


def test_other_gids_are_no_xids() -> None:
    others = (
        "_sa_0123456789abcdef",
        "1_YQ_Yg==",
        "1_YQ==",
        "99999999999_YQ==_",
        "1__",
        "1_YQ==_Yg==\n",
        "\u0661_YQ==_",
    )
    for gid in others:
        assert from_gid(gid) is None, gid


@given(parts)
def test_recover_agrees_raw_and_converted(given_parts: tuple[int, bytes, bytes]) -> None:
    """MySQL: CONVERT XID shows the bytes in hexadecimal; MariaDB shows them as they are."""
    format_id, gtrid, bqual = given_parts
    xid = Xid(format_id, gtrid, bqual)
    assert from_recover(format_id, len(gtrid), len(bqual), gtrid + bqual) == xid
    converted = b"0x" + (gtrid + bqual).hex().upper().encode()
    assert from_recover(format_id, len(gtrid), len(bqual), converted) == xid


def test_lengths_that_disagree_are_no_xid() -> None:
    assert from_recover(1, 3, 1, b"abc") is None
    assert from_recover(1, 0, 1, b"a") is None
    assert from_recover(1, 1, 1, b"0x61") is None
    assert from_recover(-1, 1, 0, b"a") == Xid(0xFFFFFFFF, b"a", b"")
