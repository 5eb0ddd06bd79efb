"""Octets on the wire that a client library would hide."""

import struct

import pytest

from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.frames import header_frame, method_frame
from dtx.wire.amqp09.methods import DtxGetTimeout, DtxPrepare, DtxRollback, DtxStart
from dtx.xa.codes import XaFlag
from dtx.xa.xid import Xid
from tests.support.broker import Mode, only_standalone
from tests.support.client import new_xid
from tests.support.raw import ConnectionEnded, RawClient


def method(class_id: int, method_id: int, arguments: bytes = b"") -> bytes:
    return struct.pack(">HH", class_id, method_id) + arguments


def longstr(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def test_a_whole_branch_byte_for_byte(mode: Mode, raw: RawClient, queue: str) -> None:
    """The fields in the order of the XML: ticket (short), xid (longstr), bits; every flags field is a short.

    In alongside mode, with a broker without tickets, any ticket is accepted.
    """
    ticket = b"\xff\xff" if mode == "alongside" else b"\x00\x00"
    wire = struct.pack(">IBB", 0xFFFFFFFE, 64, 64) + bytes(range(64)) + bytes(64)
    xid = longstr(wire)
    raw.open(7)
    dialogue = [
        (method(101, 10), method(101, 11)),
        (method(101, 20, b"\x00\x00" + xid + b"\x00"), method(101, 21, b"\x00\x08")),
        (method(101, 30, b"\x00\x00" + xid + b"\x02"), method(101, 31, b"\x00\x08")),
        (method(101, 20, b"\x00\x00" + xid + b"\x02"), method(101, 21, b"\x00\x08")),
        (method(101, 30, b"\x00\x00" + xid + b"\x00"), method(101, 31, b"\x00\x08")),
        (method(101, 20, b"\x00\x00" + xid + b"\x01"), method(101, 21, b"\x00\x08")),
        (methods.BasicPublish(b"", queue.encode()).encode(), b""),
        (method(101, 30, b"\x00\x00" + xid + b"\x00"), method(101, 31, b"\x00\x08")),
        (method(105, 70, b"\x00\x00" + xid + b"\x00\x00\x00\x11"), method(105, 71)),
        (method(105, 30, xid), method(105, 31, b"\x00\x00\x00\x11")),  # get-timeout has no ticket
        (method(105, 40, ticket + xid), method(105, 41, b"\x00\x08")),
        (method(105, 10, b"\x00\x00" + xid + b"\x00"), method(105, 11, b"\x00\x08")),
    ]
    for sent, expected in dialogue:
        raw.say(7, sent)
        if expected:
            assert raw.next_method(7) == expected
        else:
            raw.send_raw(struct.pack(">BHIHHQHB", 2, 7, 14, 60, 0, 0, 0, 0xCE))


def test_endscan_is_a_long(raw: RawClient, queue: str, xid: Xid) -> None:
    """Endscan has domain "long"; startscan is a bit in its own octet."""
    raw.prepared(1, xid, queue=queue)
    raw.say(2, method(105, 50, b"\x00\x00" + b"\x01" + b"\x00\x00\x00\x01"))
    answer = raw.read_method(2, 105 << 16 | 51)
    assert xid.to_wire() in answer
    # an octet with two bits, as if endscan were one, is a truncated recover
    refusal = raw.refusal_of(2, method(105, 50, b"\x00\x00" + b"\x03"))
    assert (refusal.code, refusal.class_id, refusal.method_id) == (502, 105, 50)
    raw.ask(2, DtxRollback(xid=xid))


def test_recover_ok_is_a_table_with_one_long_string(raw: RawClient, queue: str) -> None:
    """Recover-ok: xids has domain "table"; key ``xids``, type ``S``, each xid with its length octet before it."""
    first = raw.prepared(1, Xid(1, new_xid().gtrid, b"\x00\xff"), queue=queue)
    second = raw.prepared(1, Xid(0xFFFFFFFF, new_xid().gtrid), queue=queue)
    raw.say(2, method(105, 50, b"\x00\x00" + b"\x01" + b"\x00\x00\x00\x01"))
    answer = raw.read_method(2, 105 << 16 | 51)
    (table,) = struct.unpack_from(">I", answer, 4)
    assert len(answer) == 8 + table
    assert answer[8:14] == b"\x04xidsS"
    for xid in (first, second):
        wire = xid.to_wire()
        assert bytes((len(wire),)) + wire in answer
        raw.ask(2, DtxRollback(xid=xid))


WIRE = struct.pack(">IBB", 1, 2, 2) + b"gtbq"


@pytest.mark.parametrize(
    ("class_id", "method_id", "arguments"),
    [
        (101, 10, b"\x00"),
        (101, 20, b""),
        (101, 20, b"\x00\x00" + longstr(WIRE)),
        (101, 20, b"\x00\x00" + longstr(WIRE[:-1]) + b"\x00"),
        (101, 20, b"\x00\x00" + longstr(WIRE + b"x") + b"\x00"),
        (101, 20, b"\x00\x00" + longstr(b"") + b"\x00"),
        (101, 20, b"\x00\x00" + longstr(struct.pack(">IBB", 1, 0, 1) + b"b") + b"\x00"),
        (101, 20, b"\x00\x00" + longstr(struct.pack(">IBB", 1, 65, 0) + bytes(65)) + b"\x00"),
        (101, 20, b"\x00\x00" + longstr(struct.pack(">IBB", 1, 1, 65) + bytes(66)) + b"\x00"),
        (101, 30, b"\x00\x00" + struct.pack(">I", 0xFFFFFFFF) + WIRE + b"\x00"),
        (105, 10, b"\x00\x00" + longstr(WIRE) + b"\x00\x00"),
        (105, 30, b"\x00\x00" + longstr(WIRE)),
        (105, 40, b"\x00\x00" + longstr(WIRE) + b"\x00"),
        (105, 50, b"\x00\x00"),
        (105, 70, b"\x00\x00" + longstr(WIRE) + b"\x00\x00\x00"),
    ],
)
def test_malformed_arguments_are_a_syntax_error_of_the_channel(
    raw: RawClient, class_id: int, method_id: int, arguments: bytes
) -> None:
    """Xid, rule implementation: "The sum of the two lengths must equal the length of the data field"."""
    refusal = raw.refusal_of(1, method(class_id, method_id, arguments))
    assert (refusal.code, refusal.class_id, refusal.method_id) == (502, class_id, method_id)


def test_methods_of_the_server_and_unknown_ones_are_refused(raw: RawClient) -> None:
    """The XML has "chassis name = client" for each ...-ok."""
    assert raw.refusal_of(1, method(101, 11)).code == 503
    assert raw.refusal_of(1, method(105, 51)).code == 503
    assert raw.refusal_of(1, method(101, 99)).code == 540
    assert raw.refusal_of(1, method(105, 99)).code == 540


def test_calls_in_one_packet_are_answered_in_order(raw: RawClient, xid: Xid) -> None:
    """Each call on a channel waits for the previous one, also if the frames arrive byte by byte."""
    raw.open(9)
    wire = longstr(xid.to_wire())
    payloads = [
        method(101, 10),
        method(101, 20, b"\x00\x00" + wire + b"\x00"),
        method(101, 30, b"\x00\x00" + wire + b"\x00"),
        method(105, 30, wire),
        method(105, 40, b"\x00\x00" + wire),
    ]
    data = b"".join(method_frame(9, payload) for payload in payloads)
    for position in range(len(data)):
        raw.send_raw(data[position : position + 1])
    answers = [raw.next_method(9)[:4] for _ in payloads]
    assert answers == [(int.from_bytes(payload[:4], "big") + 1).to_bytes(4, "big") for payload in payloads]


def test_frames_behind_a_refused_call_are_discarded(raw: RawClient, queue: str, xid: Xid) -> None:
    """AMQP 0-9-1, channel.close: "After sending this method, any received methods except Close and Close-OK MUST be
    discarded".
    """
    wire = longstr(xid.to_wire())
    refusal = raw.refusal_of(
        1,
        method(105, 10, b"\x00\x00" + wire + b"\x00"),
        method(101, 20, b"\x00\x00" + wire + b"\x00"),
        methods.BasicGet(queue.encode()).encode(),
    )
    assert refusal.code == 404
    assert raw.refusal(2, DtxGetTimeout(xid=xid)).code == 404


def test_a_content_of_another_class_ends_the_connection(raw: RawClient, queue: str, xid: Xid) -> None:
    """4.2.6.1: "The class-id MUST match the method frame class id". The text says 501; RabbitMQ answers 505."""
    raw.ask(1, DtxStart(xid=xid))
    raw.say(1, methods.BasicPublish(b"", queue.encode()).encode())
    raw.send_raw(header_frame(1, 70, 0, b"\x00\x00"))
    with pytest.raises(ConnectionEnded, match="505 UNEXPECTED_FRAME"):
        raw.next_method(1)


@pytest.mark.parametrize("within", [True, False], ids=["in a branch", "outside of one"])
@pytest.mark.parametrize("header", [b"", header_frame(1, 60, 3, b"\x00\x00")], ids=["no header yet", "no body yet"])
@pytest.mark.parametrize(
    "payload",
    [
        methods.ChannelClose(200, b"bye").encode(),
        methods.ChannelOpen().encode(),
        methods.BasicGet(b"q").encode(),
        method(101, 10),
    ],
    ids=["close", "open", "get", "select"],
)
def test_a_method_within_a_content_ends_the_connection(
    raw: RawClient, queue: str, xid: Xid, within: bool, header: bytes, payload: bytes
) -> None:
    """2.3.5.2: "The content body frames of one channel are not intermixed with its methods"."""
    if within:
        raw.ask(1, DtxStart(xid=xid))
    raw.send_raw(methods.BasicPublish(b"", queue.encode()).frame(1) + header + method_frame(1, payload))
    with pytest.raises(ConnectionEnded, match="505 UNEXPECTED_FRAME"):
        raw.next_method(1)


@only_standalone
def test_a_malformed_consume_behind_a_publish_ends_the_connection(raw: RawClient, queue: str) -> None:
    """The consume waits until the publish is durable; then the connection is closed."""
    name = queue.encode()
    content = header_frame(1, 60, 0, b"\x00\x00")
    consume = methods.BasicConsume(name, b"", arguments=b"\x05short").frame(1)
    raw.send_raw(methods.BasicPublish(b"", name).frame(1) + content + consume)
    with pytest.raises(ConnectionEnded, match="502 SYNTAX_ERROR"):
        raw.next_method(1)


def test_both_sides_close_the_channel_at_once(raw: RawClient, xid: Xid) -> None:
    """Channel.close of the client crosses that of the server: both are confirmed, and the number is free again."""
    raw.say(1, method(105, 40, b"\x00\x00" + longstr(xid.to_wire())), methods.ChannelClose(200, b"").encode())
    seen = {raw.next_method(1)[:4]}
    while methods.ChannelCloseOk().encode() not in seen:
        seen.add(raw.next_method(1)[:4])
    if methods.ChannelClose.HEAD in seen:
        raw.say(1, methods.ChannelCloseOk().encode())
    raw.open(1, select=True)
    raw.ask(1, DtxStart(xid=xid))
    assert raw.ask(2, DtxGetTimeout(xid=xid)) == 60
    raw.close_channel(1)
    assert raw.ask(2, DtxPrepare(xid=xid)) is XaFlag.RBROLLBACK
