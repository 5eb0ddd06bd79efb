"""The frame splitter of AMQP 1.0: any chunking, no copies, every limit."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtx.wire.amqp10.endpoint import AMQP, EMPTY_FRAME, SASL, Amqp10FrameSplitter, frame, head
from dtx.wire.amqp10.errors import Amqp10FrameError, Condition

BIG = frame(AMQP, 7, bytes(9000))
STREAM = frame(SASL, 0, b"abc") + EMPTY_FRAME + frame(AMQP, 65535, b"") + BIG + head(1, 2) + b"xy"
WHOLE = [(SASL, 0, b"abc"), (AMQP, 0, b""), (AMQP, 65535, b""), (AMQP, 7, bytes(9000)), (AMQP, 1, b"xy")]


def collect(splitter: Amqp10FrameSplitter, chunks: list[bytes]) -> list[tuple[int, int, bytes]]:
    found = []
    for chunk in chunks:
        buffer, frames = splitter.feed(chunk)
        found += [(kind, channel, buffer[start:end]) for kind, channel, start, end in frames]
    return found


def test_a_chunk_of_whole_frames_is_returned_itself() -> None:
    buffer, frames = Amqp10FrameSplitter(16_384).feed(STREAM)
    assert buffer is STREAM
    assert len(frames) == 5


@settings(deadline=None)
@given(st.lists(st.integers(0, len(STREAM)), max_size=40))
def test_any_chunking_gives_the_same_frames(places: list[int]) -> None:
    places = sorted(places)
    splitter = Amqp10FrameSplitter(16_384)
    chunks = [STREAM[start:end] for start, end in zip([0, *places], [*places, len(STREAM)], strict=True)]
    assert collect(splitter, chunks) == WHOLE
    assert splitter.pending == 0


def test_one_byte_at_a_time() -> None:
    splitter = Amqp10FrameSplitter(16_384)
    assert collect(splitter, [bytes((octet,)) for octet in STREAM]) == WHOLE


def test_an_extended_header_is_skipped() -> None:
    """2.3.1: "an extension point defined for future expansion". AMQP frames do not use it."""
    octets = bytes.fromhex("0000000e 03 00 0001") + b"exte" + b"ab"
    assert collect(Amqp10FrameSplitter(512), [octets]) == [(AMQP, 1, b"ab")]


@pytest.mark.parametrize(
    ("octets", "words"),
    [
        ("00000007 02 00 0000", "frame of 7 bytes with a data offset of 2"),
        ("00000000 02 00 0000", "frame of 0 bytes"),
        ("00000008 01 00 0000", "data offset of 1"),
        ("0000000b 03 00 0000", "data offset of 3"),
        ("00000201 02 00 0000", "frame of 513 bytes, max-frame-size is 512"),
        ("ffffffff 02 00 0000", "max-frame-size is 512"),
        ("00000008 02 02 0000", "unknown type 2"),
    ],
)
def test_a_bad_header_is_reported_after_the_frames_before(octets: str, words: str) -> None:
    with pytest.raises(Amqp10FrameError, match=words) as caught:
        Amqp10FrameSplitter(512).feed(frame(AMQP, 3, b"ok") + bytes.fromhex(octets))
    assert caught.value.condition is Condition.FRAMING_ERROR
    ((kind, channel, start, end),) = caught.value.frames
    assert (kind, channel, caught.value.buffer[start:end]) == (AMQP, 3, b"ok")


def test_a_frame_of_just_the_largest_size_passes() -> None:
    assert collect(Amqp10FrameSplitter(512), [frame(AMQP, 0, bytes(504))]) == [(AMQP, 0, bytes(504))]


def test_no_more_than_one_frame_is_held() -> None:
    splitter = Amqp10FrameSplitter(1 << 20)
    splitter.feed(head(0, (1 << 20) - 8) + bytes(5000))
    for _ in range(100):
        splitter.feed(bytes(5000))
        splitter.feed(b"x")
    assert splitter.pending == 8 + 5000 * 101 + 100
