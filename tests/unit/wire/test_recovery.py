"""Lists of xids: the frame of recover-ok, and the number of xids in it."""

import pytest
from pika import frame

from dtx.client.pika_methods import DtxCoordination
from dtx.wire.amqp09 import tables
from dtx.wire.amqp09.errors import WireError
from dtx.wire.amqp09.recovery import MAX_XIDS, read_xids, recover_ok, split_recover, write_xids
from dtx.xa.xid import Xid


@pytest.mark.parametrize("count", [0, 1, 7])
def test_recover_ok_is_one_whole_frame(count: int) -> None:
    xids = [Xid(number, b"g" * (number + 1), b"b" * number) for number in range(count)]
    method = DtxCoordination.RecoverOk([xid.to_wire() for xid in xids])
    assert recover_ok(3, xids) == frame.Method(3, method).marshal()


@pytest.mark.parametrize("frame_max", [4096, 8192, 131072])
@pytest.mark.parametrize("sizes", [(1, 0), (64, 64), (20, 3)])
def test_a_batch_fills_the_frame_and_no_more(frame_max: int, sizes: tuple[int, int]) -> None:
    xids = [Xid(number, bytes(sizes[0]), bytes(sizes[1])) for number in range(20_000)]
    count = split_recover(xids, frame_max, 100)
    assert len(recover_ok(1, xids[100 : 100 + count])) <= frame_max < len(recover_ok(1, xids[100 : 101 + count]))


def test_the_end_of_the_snapshot_ends_the_batch() -> None:
    xids = [Xid(1, b"g")] * 5
    assert split_recover(xids, 4096) == 5
    assert split_recover(xids, 4096, 3) == 2
    assert split_recover(xids, 4096, 5) == 0


def test_without_a_frame_max_everything_fits() -> None:
    assert split_recover([Xid(1, b"g")] * 5000, 0, 1000) == 4000


def test_a_batch_has_a_largest_number_of_xids() -> None:
    xids = [Xid(7, b"g")] * (MAX_XIDS + 1)
    assert [split_recover(xids, frame_max, 0) for frame_max in (0, 2 << 20)] == [MAX_XIDS, MAX_XIDS]
    assert split_recover(xids, 0, MAX_XIDS) == 1


@pytest.mark.parametrize("kind", [b"S", b"x"])
def test_xids_are_read_from_their_entry_alone(kind: bytes) -> None:
    wires = [Xid(1, b"g").to_wire(), Xid(2, b"gg", b"b").to_wire()]
    value = b"".join(bytes((len(wire),)) + wire for wire in wires)
    table = tables.entry(b"other", b"I", b"\x00\x00\x00\x01") + tables.entry(b"xids", kind, value)
    assert read_xids(table) == wires
    assert read_xids(write_xids(wires)) == wires


def test_xids_of_another_type_are_refused() -> None:
    with pytest.raises(WireError, match="has xids of type b'I'") as raised:
        read_xids(tables.entry(b"xids", b"I", b"\x00\x00\x00\x01"))
    assert raised.value.code == 502
