"""The frame splitter: any chunking, no copies, every limit."""

import pytest
from pika import frame, spec

from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.errors import FrameError
from dtx.wire.amqp09.frames import (
    BODY,
    HEADER,
    HEARTBEAT,
    HEARTBEAT_FRAME,
    Frame,
    FrameSplitter,
    Protocol,
    header_frame,
    method_frame,
    protocol_header,
    with_channel,
)
from tests.support.raw import body_frames

PUBLISH = method_frame(1, bytes.fromhex("003c0028 0000 01 65 01 6b 00"))
CONTENT = header_frame(1, 60, 3, b"\x00\x00")
(SMALL_BODY,) = body_frames(1, b"abc", 4096)
STREAM = PUBLISH + CONTENT + SMALL_BODY + HEARTBEAT_FRAME + method_frame(2, bytes.fromhex("005a0014"))
KEYS = [methods.BasicPublish.KEY, HEADER, BODY, HEARTBEAT, methods.TxCommit.KEY]


def collect(splitter: FrameSplitter, chunks: list[bytes]) -> list[tuple[int, int, bytes]]:
    found = []
    for chunk in chunks:
        buffer, frames = splitter.feed(chunk)
        found += [(key, channel, buffer[start:end]) for key, channel, start, end in frames]
    return found


WHOLE = collect(FrameSplitter(), [STREAM])


def test_a_chunk_of_whole_frames_is_returned_itself() -> None:
    buffer, frames = FrameSplitter().feed(STREAM)
    assert buffer is STREAM
    assert [key for key, *_ in frames] == KEYS
    assert [channel for _, channel, *_ in frames] == [1, 1, 1, 0, 2]


def test_frames_are_contiguous_from_type_to_frame_end() -> None:
    _, frames = FrameSplitter().feed(STREAM)
    ends = [end for *_, end in frames]
    assert [start for *_, start, _ in frames] == [0, *ends[:-1]]
    assert ends[-1] == len(STREAM)


@pytest.mark.parametrize("size", range(1, len(STREAM) + 1))
def test_any_chunking_gives_the_same_frames(size: int) -> None:
    splitter = FrameSplitter()
    chunks = [STREAM[start : start + size] for start in range(0, len(STREAM), size)]
    assert collect(splitter, chunks) == WHOLE
    assert splitter.pending == 0


def test_an_incomplete_frame_is_kept() -> None:
    splitter = FrameSplitter()
    buffer, frames = splitter.feed(PUBLISH + CONTENT[:9])
    assert [key for key, *_ in frames] == [methods.BasicPublish.KEY]
    assert splitter.pending == 9
    assert buffer[frames[0][2] : frames[0][3]] == PUBLISH
    assert collect(splitter, [b"", CONTENT[9:]]) == [(HEADER, 1, CONTENT)]


def test_a_large_frame_in_pieces_is_joined() -> None:
    (large,) = body_frames(4, bytes(range(256)) * 400, 0)
    for step in (1, 4095, 4096, 50_000):
        pieces = [large[:10_000], large[10_000:10_001]]
        pieces += [large[start : start + step] for start in range(10_001, len(large), step)]
        assert collect(FrameSplitter(131_072), pieces) == [(BODY, 4, large)]


def test_a_large_frame_in_single_bytes_costs_its_length() -> None:
    """A frame that spans several reads is joined once."""
    (large,) = body_frames(4, bytes(130_000), 0)
    splitter = FrameSplitter(131_072)
    assert collect(splitter, [large[start : start + 1] for start in range(len(large))]) == [(BODY, 4, large)]


def test_bodies_of_one_and_no_byte_are_frames() -> None:
    empty = bytes.fromhex("03 0001 00000000 ce")
    one = bytes.fromhex("03 0001 00000001 ce ce")
    assert collect(FrameSplitter(), [empty + one + empty]) == [(BODY, 1, empty), (BODY, 1, one), (BODY, 1, empty)]


def test_a_short_method_frame_at_the_end_is_a_frame() -> None:
    tail = bytes.fromhex("01 0002 00000004 005a0014 ce")
    assert collect(FrameSplitter(), [HEARTBEAT_FRAME + tail]) == [
        (HEARTBEAT, 0, HEARTBEAT_FRAME),
        (methods.TxCommit.KEY, 2, tail),
    ]


@pytest.mark.parametrize("size", range(1, len(STREAM) + 1))
def test_a_read_into_reserved_space_gives_the_same_frames(size: int) -> None:
    splitter = FrameSplitter()
    found = []
    for place in range(0, len(STREAM), size):
        chunk = STREAM[place : place + size]
        buffer = bytearray(b"?" * splitter.pending + chunk + b"more room")
        frames = splitter.feed_behind(buffer, splitter.pending + len(chunk))
        found += [(key, channel, bytes(buffer[start:end])) for key, channel, start, end in frames]
        buffer[:] = bytes(len(buffer))  # incomplete frames were copied
    assert found == WHOLE
    assert splitter.pending == 0


@pytest.mark.parametrize("most", range(1, len(KEYS) + 2))
@pytest.mark.parametrize("size", range(1, len(STREAM) + 1))
@pytest.mark.parametrize("in_place", [False, True])
def test_frames_split_a_few_at_a_time_are_the_same(most: int, size: int, in_place: bool) -> None:
    splitter = FrameSplitter(most=most)
    found = []
    for place in range(0, len(STREAM), size):
        chunk = STREAM[place : place + size]
        if in_place:
            scratch = bytearray(b"?" * splitter.pending + chunk + b"more room")
            frames = splitter.feed_behind(scratch, splitter.pending + len(chunk))
            buffer = bytes(scratch)
            scratch[:] = bytes(len(scratch))
        else:
            buffer, frames = splitter.feed(chunk)
        while frames:
            assert len(frames) <= most
            found += [(key, channel, buffer[start:end]) for key, channel, start, end in frames]
            buffer, frames = splitter.more()
    assert found == WHOLE
    assert splitter.pending == 0


def test_pieces_and_reads_behind_them_make_one_frame() -> None:
    (large,) = body_frames(4, bytes(range(256)) * 400, 0)
    splitter = FrameSplitter(131_072)
    assert collect(splitter, [large[:5000], large[5000:5010]]) == []
    buffer = bytearray(5010) + large[5010:] + PUBLISH
    assert splitter.feed_behind(buffer, len(buffer)) == [
        (BODY, 4, 0, len(large)),
        (methods.BasicPublish.KEY, 1, len(large), len(buffer)),
    ]
    assert buffer == large + PUBLISH


BAD = [
    ("09 0001 00000004 00000000 ce", 501, "frame of unknown type 9"),
    ("00 0001 00000000 ce", 501, "frame of unknown type 0"),
    ("01 0001 00000004 00000000 cf", 501, "frame ends with 0xcf, must be 0xce"),
    ("03 0001 00000000 00", 501, "frame ends with 0x00, must be 0xce"),
    ("03 0001 00001001", 501, "4097 bytes in a frame, frame-max is 4096"),
    ("03 0001 ffffffff", 501, "4294967295 bytes in a frame"),
    ("01 0001 00000003 000000 ce", 502, "method frame of 3 bytes has no method"),
    ("01 0001 00000003 000000 ce 00000000", 502, "method frame of 3 bytes has no method"),
    ("08 0001 00000000 ce", 501, "heartbeat of 0 bytes on channel 1"),
    ("08 0000 00000001 00 ce", 501, "heartbeat of 1 bytes on channel 0"),
]


@pytest.mark.parametrize(("data", "code", "reason"), BAD)
@pytest.mark.parametrize("split", [False, True])
def test_a_malformed_frame_is_refused(data: str, code: int, reason: str, split: bool) -> None:
    """501: "The sender sent a malformed frame that the recipient could not decode"."""
    octets = bytes.fromhex(data)
    chunks = [octets[start : start + 1] for start in range(len(octets))] if split else [octets]
    with pytest.raises(FrameError, match=reason) as caught:
        collect(FrameSplitter(4096), chunks)
    assert caught.value.code == code
    assert caught.value.frames == []


@pytest.mark.parametrize(("data", "code", "reason"), BAD)
def test_the_frames_before_a_malformed_one_are_not_lost(data: str, code: int, reason: str) -> None:
    with pytest.raises(FrameError, match=reason) as caught:
        FrameSplitter(4096).feed(STREAM + bytes.fromhex(data))
    error = caught.value
    assert [(key, channel, error.buffer[start:end]) for key, channel, start, end in error.frames] == WHOLE
    assert error.code == code


def test_a_frame_may_exceed_frame_max_by_its_own_overhead() -> None:
    """RabbitMQ: "off-by 1 or 8 are typical"."""
    (largest,) = body_frames(1, bytes(4096), 0)
    assert collect(FrameSplitter(4096), [largest]) == [(BODY, 1, largest)]


def test_frame_max_may_be_raised_after_tune() -> None:
    splitter = FrameSplitter()
    assert splitter.max_frame == 4096
    splitter.max_frame = 131_072
    assert splitter.max_frame == 131_072
    (large,) = body_frames(1, bytes(100_000), 131_072)
    assert collect(splitter, [large]) == [(BODY, 1, large)]


def test_a_frame_max_of_zero_is_no_limit() -> None:
    splitter = FrameSplitter(0)
    assert splitter.max_frame == 0
    assert splitter.feed(bytes.fromhex("03 0001 ffffffff")) == (bytes.fromhex("03 0001 ffffffff"), [])


@pytest.mark.parametrize("protocol", [protocol for protocol in Protocol if protocol.value])
def test_a_protocol_header_is_known_after_its_last_byte(protocol: Protocol) -> None:
    for length in range(8):
        assert protocol_header(protocol.value[:length]) is None
    assert protocol_header(protocol.value) is protocol
    assert protocol_header(protocol.value + b"more") is protocol


@pytest.mark.parametrize("data", [b"G", b"AMQX", b"AMQP\x00\x01\x00\x01", b"AMQP\x01\x01\x00\x0a", b"\x16\x03\x01"])
def test_any_other_start_of_a_stream_is_unknown_at_once(data: bytes) -> None:
    assert protocol_header(data) is Protocol.UNKNOWN


def test_frames_are_built_as_pika_builds_them() -> None:
    properties = spec.BasicProperties(delivery_mode=2)
    assert frame.Header(1, 3, spec.BasicProperties()).marshal() == CONTENT
    assert header_frame(9, 60, 2**40, b"\x10\x00\x02") == frame.Header(9, 2**40, properties).marshal()
    assert frame.Body(1, b"abc").marshal() == SMALL_BODY
    assert frame.Heartbeat().marshal() == HEARTBEAT_FRAME
    assert method_frame(2, bytes.fromhex("005a0014")) == frame.Method(2, spec.Tx.Commit()).marshal()


@pytest.mark.parametrize(("size", "count"), [(0, 0), (1, 1), (4088, 1), (4089, 2), (8176, 2), (8177, 3)])
def test_a_body_is_cut_to_frame_max(size: int, count: int) -> None:
    body = bytes(index % 251 for index in range(size))
    frames = body_frames(1, body, 4096)
    assert len(frames) == count
    assert all(len(part) <= 4096 for part in frames)
    assert b"".join(part[7:-1] for part in frames) == body


def test_a_body_without_a_frame_max_is_one_frame() -> None:
    assert [len(part) for part in body_frames(1, bytes(1_000_000), 0)] == [1_000_008]


def test_a_frame_is_readdressed() -> None:
    assert with_channel(SMALL_BODY, 513) == frame.Body(513, b"abc").marshal()


def test_the_parts_of_a_frame_are_those_specified() -> None:
    found: Frame = FrameSplitter().feed(HEARTBEAT_FRAME)[1][0]
    assert found == (HEARTBEAT, 0, 0, 8)
