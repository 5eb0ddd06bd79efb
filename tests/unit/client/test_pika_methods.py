"""Every method of classes 101 and 105, compared byte by byte."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from pika import amqp_object, frame, spec

from dtx.client import pika_methods as methods
from dtx.client.pika_methods import DtxCoordination, DtxDemarcation
from dtx.wire.amqp09.codec import Fact, Method, packer
from dtx.wire.amqp09.errors import WireError
from dtx.wire.amqp09.methods import (
    DTX_CLASSES,
    METHODS,
    DtxCall,
    DtxCommit,
    DtxCommitOk,
    DtxEnd,
    DtxEndOk,
    DtxForget,
    DtxForgetOk,
    DtxGetTimeout,
    DtxGetTimeoutOk,
    DtxPrepare,
    DtxPrepareOk,
    DtxRecover,
    DtxRecoverOk,
    DtxRollback,
    DtxRollbackOk,
    DtxSelect,
    DtxSelectOk,
    DtxSetTimeout,
    DtxSetTimeoutOk,
    DtxStart,
    DtxStartOk,
    decode_call,
)
from dtx.xa.codes import ReplyCode, XaError, XaFlag
from dtx.xa.xid import Xid
from tests.support.preview import with_ticket

# format_id 0x0000000A, gtrid "gt" (2), bqual "b" (1): nine octets
XID = Xid(10, b"gt", b"b")
WIRE = bytes.fromhex("0000000a 02 01 6774 62")
LONGSTR = "00000009 0000000a 02 01 6774 62"


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A method, its payload in hexadecimal, and its row."""

    method: amqp_object.Method
    payload: str
    row: Method
    ticket: int = 0


EXAMPLES = [
    Example(method=DtxDemarcation.Select(), payload="0065 000a", row=DtxSelect()),
    Example(method=DtxDemarcation.SelectOk(), payload="0065 000b", row=DtxSelectOk()),
    Example(method=DtxDemarcation.Start(0, WIRE), payload=f"0065 0014 0000 {LONGSTR} 00", row=DtxStart(xid=XID)),
    Example(
        method=DtxDemarcation.Start(0, WIRE, join=True),
        payload=f"0065 0014 0000 {LONGSTR} 01",
        row=DtxStart(xid=XID, join=True),
    ),
    Example(
        method=DtxDemarcation.Start(258, WIRE, resume=True),
        payload=f"0065 0014 0102 {LONGSTR} 02",
        row=DtxStart(xid=XID, resume=True),
        ticket=258,
    ),
    Example(
        method=DtxDemarcation.Start(0, WIRE, join=True, resume=True),
        payload=f"0065 0014 0000 {LONGSTR} 03",
        row=DtxStart(xid=XID, join=True, resume=True),
    ),
    Example(method=DtxDemarcation.StartOk(8), payload="0065 0015 0008", row=DtxStartOk(8)),
    Example(method=DtxDemarcation.End(0, WIRE), payload=f"0065 001e 0000 {LONGSTR} 00", row=DtxEnd(xid=XID)),
    Example(
        method=DtxDemarcation.End(0, WIRE, fail=True),
        payload=f"0065 001e 0000 {LONGSTR} 01",
        row=DtxEnd(xid=XID, fail=True),
    ),
    Example(
        method=DtxDemarcation.End(1, WIRE, suspend=True),
        payload=f"0065 001e 0001 {LONGSTR} 02",
        row=DtxEnd(xid=XID, suspend=True),
        ticket=1,
    ),
    Example(method=DtxDemarcation.EndOk(2), payload="0065 001f 0002", row=DtxEndOk(2)),
    Example(method=DtxCoordination.Commit(0, WIRE), payload=f"0069 000a 0000 {LONGSTR} 00", row=DtxCommit(xid=XID)),
    Example(
        method=DtxCoordination.Commit(0, WIRE, one_phase=True),
        payload=f"0069 000a 0000 {LONGSTR} 01",
        row=DtxCommit(xid=XID, one_phase=True),
    ),
    Example(method=DtxCoordination.CommitOk(6), payload="0069 000b 0006", row=DtxCommitOk(6)),
    Example(method=DtxCoordination.Forget(0, WIRE), payload=f"0069 0014 0000 {LONGSTR}", row=DtxForget(xid=XID)),
    Example(method=DtxCoordination.ForgetOk(), payload="0069 0015", row=DtxForgetOk()),
    Example(method=DtxCoordination.GetTimeout(WIRE), payload=f"0069 001e {LONGSTR}", row=DtxGetTimeout(xid=XID)),
    Example(method=DtxCoordination.GetTimeoutOk(3600), payload="0069 001f 00000e10", row=DtxGetTimeoutOk(3600)),
    Example(method=DtxCoordination.Prepare(0, WIRE), payload=f"0069 0028 0000 {LONGSTR}", row=DtxPrepare(xid=XID)),
    Example(method=DtxCoordination.PrepareOk(7), payload="0069 0029 0007", row=DtxPrepareOk(7)),
    Example(
        method=DtxCoordination.Recover(0, startscan=True),
        payload="0069 0032 0000 01 00000000",
        row=DtxRecover(startscan=True, endscan=False),
    ),
    Example(
        method=DtxCoordination.Recover(0, endscan=True),
        payload="0069 0032 0000 00 00000001",
        row=DtxRecover(startscan=False, endscan=True),
    ),
    Example(
        method=DtxCoordination.Recover(5, startscan=True, endscan=True),
        payload="0069 0032 0005 01 00000001",
        row=DtxRecover(startscan=True, endscan=True),
        ticket=5,
    ),
    Example(
        method=DtxCoordination.RecoverOk([WIRE, bytes.fromhex("00000001 01 00 ff")]),
        # table of 28 octets: key of 4, type S, longstr of 18: 9 octets, 7 octets
        payload=f"0069 0033 0000001c 04 78696473 53 00000012 09 {WIRE.hex()} 07 00000001 01 00 ff",
        row=DtxRecoverOk(b"\x04xidsS\x00\x00\x00\x12\x09" + WIRE + b"\x07\x00\x00\x00\x01\x01\x00\xff"),
    ),
    Example(
        method=DtxCoordination.RecoverOk(),
        payload="0069 0033 0000000a 04 78696473 53 00000000",
        row=DtxRecoverOk(b"\x04xidsS\x00\x00\x00\x00"),
    ),
    Example(method=DtxCoordination.Rollback(0, WIRE), payload=f"0069 003c 0000 {LONGSTR}", row=DtxRollback(xid=XID)),
    Example(method=DtxCoordination.RollbackOk(5), payload="0069 003d 0005", row=DtxRollbackOk(5)),
    Example(
        method=DtxCoordination.SetTimeout(0, WIRE, 3600),
        payload=f"0069 0046 0000 {LONGSTR} 00000e10",
        row=DtxSetTimeout(xid=XID, timeout=3600),
    ),
    Example(method=DtxCoordination.SetTimeoutOk(), payload="0069 0047", row=DtxSetTimeoutOk()),
]
each_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: repr(example.method))
each_call = pytest.mark.parametrize(
    "example",
    [example for example in EXAMPLES if isinstance(example.row, DtxCall)],
    ids=lambda example: repr(example.method),
)


def payload_of(example: Example) -> bytes:
    return bytes.fromhex(example.payload)


def test_the_examples_show_every_method() -> None:
    rows = {key for key in METHODS if key >> 16 in DTX_CLASSES}
    assert {example.method.INDEX for example in EXAMPLES} == rows == set(methods.METHODS)


@each_example
def test_a_method_is_written_byte_for_byte(example: Example) -> None:
    payload = payload_of(example)
    framed = bytes.fromhex("01 0007") + len(payload).to_bytes(4, "big") + payload + b"\xce"
    assert frame.Method(7, example.method).marshal() == framed


@each_example
def test_pika_reads_written_methods(example: Example) -> None:
    framed = frame.Method(7, example.method).marshal()
    consumed, decoded = frame.decode_frame(framed)
    assert consumed == len(framed)
    assert decoded.channel_number == 7
    assert type(decoded.method) is type(example.method)
    assert decoded.method == example.method


@each_example
def test_a_truncated_method_is_a_syntax_error_to_the_client(example: Example) -> None:
    """502: "a frame that contained illegal values for one or more fields"."""
    payload = payload_of(example)
    for length in range(4, len(payload)):
        with pytest.raises(WireError) as caught:
            type(example.method)().decode(payload[:length], 4)
        assert caught.value.code == 502


@each_example
def test_a_method_with_extra_bytes_is_a_syntax_error(example: Example) -> None:
    with pytest.raises(WireError, match=r"followed by 1 octet|truncated") as caught:
        type(example.method)().decode(payload_of(example) + b"\x00", 4)
    assert caught.value.code == 502


@each_call
def test_the_server_reads_methods_of_clients(example: Example) -> None:
    assert decode_call(payload_of(example)) == example.row


@each_example
def test_a_row_is_read_and_written_byte_for_byte(example: Example) -> None:
    payload = payload_of(example)
    assert type(example.row).decode(payload) == example.row
    assert with_ticket(example.row, example.ticket) == payload
    assert example.row.KEY == example.method.INDEX
    assert bool(example.row.FACTS & Fact.TICKET) == hasattr(example.method, "ticket")


@pytest.mark.parametrize(
    ("pack", "of_pika"),
    [
        (packer(DtxStartOk), DtxDemarcation.StartOk),
        (packer(DtxEndOk), DtxDemarcation.EndOk),
        (packer(DtxCommitOk), DtxCoordination.CommitOk),
        (packer(DtxPrepareOk), DtxCoordination.PrepareOk),
        (packer(DtxRollbackOk), DtxCoordination.RollbackOk),
    ],
)
@pytest.mark.parametrize("flag", XaFlag)
def test_an_answer_with_flags_is_made_without_an_object_too(
    pack: Callable[[int, int], bytes], of_pika: type[amqp_object.Method], flag: XaFlag
) -> None:
    assert pack(513, flag) == frame.Method(513, of_pika(flag)).marshal()


@each_call
def test_a_truncated_call_is_a_channel_exception(example: Example) -> None:
    payload = payload_of(example)
    for length in range(4, len(payload)):
        with pytest.raises(XaError, match="truncated or too long") as caught:
            decode_call(payload[:length])
        assert caught.value.code is ReplyCode.SYNTAX_ERROR


@each_call
def test_a_call_with_something_after_it_is_a_channel_exception(example: Example) -> None:
    with pytest.raises(XaError, match="truncated or too long") as caught:
        decode_call(payload_of(example) + b"\x00")
    assert caught.value.code is ReplyCode.SYNTAX_ERROR


def test_an_xid_with_inconsistent_lengths_is_a_syntax_error() -> None:
    """Domain Xid: "The sum of the two lengths must equal the length of the data field"."""
    with pytest.raises(XaError, match="xid declares 3") as caught:
        decode_call(bytes.fromhex("0069 0028 0000 00000009 0000000a 03 01 6774 62"))
    assert caught.value.code is ReplyCode.SYNTAX_ERROR


def test_an_empty_xid_is_a_syntax_error() -> None:
    with pytest.raises(XaError, match="xid of 0 bytes is truncated"):
        decode_call(bytes.fromhex("0069 0028 0000 00000000"))


def test_endscan_is_a_long_and_any_nonzero_sets_it() -> None:
    """The XML: name = "endscan" domain = "long"."""
    call = decode_call(bytes.fromhex("0069 0032 0000 01 80000000"))
    assert isinstance(call, DtxRecover)
    assert call.startscan
    assert call.endscan


def test_endscan_as_a_bit_beside_startscan_is_refused() -> None:
    with pytest.raises(XaError, match=r"dtx-coordination\.recover of 7 bytes"):
        decode_call(bytes.fromhex("0069 0032 0000 03"))


def test_get_timeout_has_no_ticket() -> None:
    with pytest.raises(XaError, match=r"dtx-coordination\.get-timeout"):
        decode_call(bytes.fromhex(f"0069 001e 0000 {LONGSTR}"))


def test_bits_without_a_meaning_are_ignored() -> None:
    assert decode_call(bytes.fromhex(f"0065 0014 0000 {LONGSTR} fc")) == DtxStart(xid=XID)


def test_the_longest_xid_passes() -> None:
    xid = Xid(0xFFFFFFFE, bytes(64), bytes(range(64)))
    assert decode_call(DtxPrepare(xid=xid).encode()) == DtxPrepare(xid=xid)


@pytest.mark.parametrize(
    "answer", sorted({type(example.row) for example in EXAMPLES if not isinstance(example.row, DtxCall)}, key=str)
)
def test_an_answer_sent_by_a_client_is_invalid(answer: type[Method]) -> None:
    """503: "The client sent an invalid sequence of frames"."""
    with pytest.raises(XaError, match=f"{answer.NAME} is sent by servers only") as caught:
        decode_call(answer.HEAD)
    assert caught.value.code is ReplyCode.COMMAND_INVALID


def test_a_method_unknown_to_the_classes_is_not_implemented() -> None:
    with pytest.raises(XaError, match="class 101 has no method 99") as caught:
        decode_call(bytes.fromhex("0065 0063"))
    assert caught.value.code is ReplyCode.NOT_IMPLEMENTED


def test_registering_again_changes_nothing() -> None:
    before = dict(spec.methods)
    methods.register()
    assert spec.methods == before
    assert spec.methods[0x00690032] is DtxCoordination.Recover


@pytest.mark.parametrize("method", methods.METHODS.values(), ids=lambda method: method.NAME)
def test_a_request_of_a_client_waits_for_its_answer(method: type[amqp_object.Method]) -> None:
    """Every request has a response of the same name with -ok."""
    if method.NAME.endswith("Ok"):
        assert not method.synchronous
    else:
        assert method.synchronous
        assert f"{method.NAME}Ok" == methods.METHODS[method.INDEX + 1].NAME


def test_recover_ok_gives_xids_as_values() -> None:
    assert DtxCoordination.RecoverOk([WIRE]).decoded() == [XID]


def test_a_malformed_xid_in_recover_ok_is_a_syntax_error() -> None:
    with pytest.raises(XaError, match="502"):
        DtxCoordination.RecoverOk([b"\x00"]).decoded()


def test_recover_ok_from_another_server_may_hold_more_than_xids() -> None:
    payload = bytes.fromhex(f"0000001e 01 6b 56 04 78696473 78 0000000a 09 {WIRE.hex()} 04 6d6f7265 62 ff")
    assert DtxCoordination.RecoverOk().decode(payload).xids == [WIRE]


def test_recover_ok_with_xids_of_another_type_is_invalid() -> None:
    with pytest.raises(WireError, match="xids of type b't'"):
        DtxCoordination.RecoverOk().decode(bytes.fromhex("00000007 04 78696473 74 01"))


def test_recover_ok_with_a_truncated_xid_is_a_syntax_error() -> None:
    with pytest.raises(WireError, match="short string is truncated"):
        DtxCoordination.RecoverOk().decode(bytes.fromhex("0000000c 04 78696473 53 00000002 09 00"))
