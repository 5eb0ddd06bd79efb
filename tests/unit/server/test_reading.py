"""The scratch buffer for reads from sockets: no data is lost, and no data in use is overwritten."""

import random

import pytest

from dtx.server.alongside import pass_through
from dtx.server.alongside.pass_through import ROOM, Reading, Scratch, kept
from dtx.wire.amqp09.errors import FrameError
from dtx.wire.amqp09.frames import BODY, FrameSplitter
from tests.support.raw import body_frames

SIZE = 65_536


class Socket:
    """A source of bytes.

    Args:
        data: all bytes.
        frame_max: the negotiated frame size.
    """

    def __init__(self, data: bytes, frame_max: int = 131_072) -> None:
        self.splitter = FrameSplitter(frame_max)
        self.reading = Reading(self.splitter)
        self._data = memoryview(data)

    def read(self, most: int = ROOM, *, behind: bool = False) -> tuple[bytes, list[tuple[int, int, int, int]]]:
        """One read of at most *most* bytes."""
        room = self.reading.room(behind=behind)
        count = min(most, len(room), len(self._data))
        room[:count] = self._data[:count]
        self._data = self._data[count:]
        del room
        return self.reading.take(count)

    @property
    def more(self) -> bool:
        """Whether bytes are left."""
        return bool(self._data)


def bodies(count: int, size: int = SIZE) -> list[bytes]:
    """Frames with different contents."""
    return [body_frames(7, bytes([number % 251]) * size, 0)[0] for number in range(count)]


def in_place(buffer: object) -> bool:
    """Whether it is a scratch buffer."""
    return isinstance(buffer, bytearray)


@pytest.fixture(autouse=True)
def _own_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_through, "SCRATCH", Scratch())


@pytest.mark.parametrize("seed", range(8))
def test_any_split_of_reads_gives_the_same_frames(seed: int) -> None:
    dice = random.Random(seed)
    sent = [frame for size in (10, 5000, SIZE, 100_000, 120_000) for frame in bodies(20, size)]
    dice.shuffle(sent)
    socket = Socket(b"".join(sent))
    found = []
    while socket.more:
        most = dice.choice((1, 300, 70_000, 256_000, ROOM))
        buffer, frames = socket.read(most, behind=dice.random() < 0.2)
        found += [bytes(buffer[start:end]) for _, _, start, end in frames]
    assert found == sent
    assert socket.splitter.pending == 0


def test_large_reads_are_split_in_place_small_ones_copied() -> None:
    socket = Socket(b"".join(bodies(20)))
    buffer, frames = socket.read()
    assert in_place(buffer)
    assert len(frames) == ROOM // (SIZE + 8)
    buffer, frames = socket.read(1000)
    assert not in_place(buffer)
    assert len(frames) == 1


def test_pending_output_is_not_overwritten() -> None:
    """With a slow peer, the event loop keeps a view until its socket takes the rest."""
    sent = bodies(32)
    socket = Socket(b"".join(sent))
    buffer, frames = socket.read()
    unsent = memoryview(buffer)[: frames[-1][3]]
    copy = bytes(unsent)
    again, _ = socket.read()
    assert again is not buffer
    assert unsent == copy == b"".join(sent[: len(frames)])


def test_all_connections_share_one_scratch_buffer_while_nothing_waits() -> None:
    first, second = Socket(b"".join(bodies(15))), Socket(b"".join(bodies(15)))
    assert first.read()[0] is second.read()[0] is first.reading.room(behind=False).obj


def test_with_a_slow_peer_reads_are_small_and_separate() -> None:
    socket = Socket(b"".join(bodies(20)))
    buffer, frames = socket.read(behind=True)
    assert not in_place(buffer)
    assert len(buffer) == ROOM // 4
    assert len(frames) == 3


def test_a_slow_frame_is_not_copied_repeatedly() -> None:
    """Pieces shorter than the data already there are kept as pieces, and joined once."""
    (large,) = body_frames(7, bytes(range(256)) * 12_000, 0)
    socket = Socket(large + large, frame_max=0)
    found: list[bytes] = []
    while socket.more:
        before = socket.splitter.pending
        buffer, frames = socket.read(100_000)
        assert before <= 100_000 or not in_place(buffer)
        found += [bytes(buffer[start:end]) for _, _, start, end in frames]
    assert found == [large, large]


def test_a_frame_larger_than_the_scratch_buffer_is_put_together() -> None:
    large = bodies(3, 3 * ROOM + 5)
    socket = Socket(b"".join(large), frame_max=0)
    found: list[bytes] = []
    while socket.more:
        buffer, frames = socket.read()
        found += [bytes(buffer[start:end]) for _, _, start, end in frames]
    assert found == large


def test_the_frames_before_a_malformed_one_survive_the_next_read() -> None:
    sent = bodies(4)
    socket = Socket(b"".join(sent) + b"\x09" + bytes(10_000))
    with pytest.raises(FrameError, match="unknown type 9") as caught:
        socket.read()
    Socket(bytes(ROOM)).reading.room(behind=False)[:] = bytes(ROOM)
    error = caught.value
    assert [error.buffer[start:end] for _, _, start, end in error.frames] == sent


def test_parts_of_a_buffer_are_kept_as_copies() -> None:
    socket = Socket(b"".join(bodies(4)))
    buffer, frames = socket.read()
    copy = kept(buffer, frames)
    assert not in_place(copy)
    assert copy == b"".join(bodies(4))
    assert kept(copy, frames) is copy
    assert {key for key, *_ in frames} == {BODY}
