"""The codec and Qpid Proton's, an independent one: each reads what the other writes."""

from typing import Any

import pytest
from hypothesis import assume, given, settings

from dtx.wire.amqp10.codec import encode, read
from dtx.wire.amqp10.values import Array, Described
from tests.unit.wire.amqp10.values import scalars, values

proton = pytest.importorskip("proton", reason="needs python-qpid-proton, which is built by a C compiler")


def _described_twice(value: Any) -> bool:
    """Whether a described value directly contains another. Proton reads it, but writes a list that is too short."""
    match value:
        case Described():
            return isinstance(value.value, Described) or _described_twice(value.value)
        case Array():
            return any(map(_described_twice, value.items))
        case list():
            return any(map(_described_twice, value))
        case dict():
            return any(map(_described_twice, value.values()))
        case _:
            return False


@settings(deadline=None)
@given(values)
def test_proton_and_this_codec_read_each_other(value: Any) -> None:
    assume(not _described_twice(value))
    octets = encode(value)
    data = proton.Data()
    assert data.decode(octets) == len(octets)
    theirs = data.encode()
    assert read(theirs, 0, len(theirs)) == (value, len(theirs))


@settings(deadline=None)
@given(scalars)
def test_each_scalar_means_the_same_to_proton(value: Any) -> None:
    data = proton.Data()
    data.decode(encode(value))
    data.rewind()
    data.next()
    theirs = data.get_object()
    if isinstance(value, bytes):
        size = {proton.Data.DECIMAL32: 4, proton.Data.DECIMAL64: 8}.get(data.type())
        theirs = theirs.to_bytes(size, "big") if size else bytes(theirs)
        assert theirs == bytes(value)
    elif isinstance(value, (int, float)):
        assert float(theirs) == float(value)
    else:
        assert str(theirs) == str(value)
    assert len(data.encode()) == len(encode(value))
