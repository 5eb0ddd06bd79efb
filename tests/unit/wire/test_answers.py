"""The server's answers are the methods that pika reads."""

import pytest
from pika import frame

from dtx.client.pika_methods import METHODS, DtxCoordination
from dtx.wire.amqp09.answers import MAX_XIDS, empty_ok, flags_ok, get_timeout_ok, recover_ok, split_recover
from dtx.wire.amqp09.calls import DtxMethod
from dtx.xa.codes import XaFlag
from dtx.xa.xid import Xid

FLAGGED = [
    DtxMethod.START_OK,
    DtxMethod.END_OK,
    DtxMethod.COMMIT_OK,
    DtxMethod.PREPARE_OK,
    DtxMethod.ROLLBACK_OK,
]
BARE = [DtxMethod.SELECT_OK, DtxMethod.FORGET_OK, DtxMethod.SET_TIMEOUT_OK]


@pytest.mark.parametrize("flag", XaFlag)
@pytest.mark.parametrize("answer", FLAGGED)
def test_an_answer_with_flags_is_one_whole_frame(answer: DtxMethod, flag: XaFlag) -> None:
    assert flags_ok(513, answer, flag) == frame.Method(513, METHODS[answer](flag)).marshal()


@pytest.mark.parametrize("answer", BARE)
def test_an_answer_without_arguments_is_one_whole_frame(answer: DtxMethod) -> None:
    assert empty_ok(65535, answer) == frame.Method(65535, METHODS[answer]()).marshal()


def test_get_timeout_ok_is_one_whole_frame() -> None:
    assert get_timeout_ok(1, 3600) == bytes.fromhex("01 0001 00000008 0069 001f 00000e10 ce")


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


def test_a_method_is_named_as_in_the_xml() -> None:
    assert DtxMethod.SELECT_OK.wire_name == "dtx-demarcation.select-ok"
    assert DtxMethod.GET_TIMEOUT.wire_name == "dtx-coordination.get-timeout"


def test_a_batch_has_a_largest_number_of_xids() -> None:
    xids = [Xid(7, b"g")] * (MAX_XIDS + 1)
    assert [split_recover(xids, frame_max, 0) for frame_max in (0, 2 << 20)] == [MAX_XIDS, MAX_XIDS]
    assert split_recover(xids, 0, MAX_XIDS) == 1
