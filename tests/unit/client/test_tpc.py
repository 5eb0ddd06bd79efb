"""Transaction ids of PEP 249, and the PEP 249 error of each answer."""

import inspect
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtx.client import AsyncXAResource, XAResource, errors, tpc
from dtx.client.tpc import TransactionId
from dtx.xa.xid import Xid


@given(st.integers(0, 2**32 - 1), st.binary(min_size=1, max_size=64), st.binary(max_size=64))
def test_every_xid_survives_the_way_through_text(format_id: int, gtrid: bytes, bqual: bytes) -> None:
    xid = Xid(format_id, gtrid, bqual)
    assert TransactionId.from_xid(xid).to_xid() == xid


def test_a_transaction_id_provides_sequence_behaviour() -> None:
    """PEP 249: "it must provide sequence behaviour, allowing access to the three components"."""
    xid = TransactionId(7, "order-17", "queue")
    assert (xid[0], xid[1], xid[2]) == (7, "order-17", "queue")
    assert (xid.format_id, xid.gtrid, xid.bqual) == tuple(xid)


def test_psycopgs_own_xid_will_do() -> None:
    assert tpc._branch(psycopg.Xid.from_parts(7, "order-17", "queue")) == Xid(7, b"order-17", b"queue")
    assert tpc._branch(Xid(7, b"g")) == Xid(7, b"g")
    with pytest.raises(tpc.ProgrammingError, match="not a transaction id"):
        tpc._branch(psycopg.Xid.from_string("not of xa"))


@pytest.mark.parametrize(
    "xid", ["", "g", "order-17", (), (7, "g"), {}, None, 7, ("7", "g", ""), (7, b"g", ""), (7, "g", None)], ids=repr
)
def test_an_xid_without_three_parts_is_a_programming_error(xid: Any) -> None:
    with pytest.raises(tpc.ProgrammingError, match="not a transaction id"):
        tpc._branch(xid)


@pytest.mark.parametrize(
    "parts",
    [
        (-1, "g", ""),
        (2**32, "g", ""),
        (1, "", ""),
        (1, "é" * 33, ""),
        (1, "g", "b" * 65),
        (1, "\ud800", ""),
        (1, "g", "\udfff"),
    ],
    ids=ascii,
)
def test_parts_out_of_range_are_a_programming_error(parts: tuple[int, str, str]) -> None:
    with pytest.raises(tpc.ProgrammingError):
        TransactionId(*parts).to_xid()


def test_every_refusal_has_an_error_of_pep_249() -> None:
    expected = {
        "XAER_DUPID": tpc.ProgrammingError,
        "XAER_INVAL": tpc.ProgrammingError,
        "XAER_NOTA": tpc.ProgrammingError,
        "XAER_OUTSIDE": tpc.ProgrammingError,
        "XAER_PROTO": tpc.ProgrammingError,
        "PeerIsNotDtx": tpc.NotSupportedError,
    }
    for name, cls in inspect.getmembers(errors, inspect.isclass):
        if issubclass(cls, errors.XAException):
            assert tpc._pep249(cls("refused")) is expected.get(name, tpc.OperationalError)


def test_an_object_other_than_pikas_channel_is_refused() -> None:
    with pytest.raises(TypeError, match="see AsyncXAResource"):
        XAResource(object())
    with pytest.raises(TypeError, match="see XAResource"):
        AsyncXAResource(object())
