"""The data path from the broker to the client: frames are passed on as slices of the read buffer.

Usually, data from a socket is copied twice before it is sent on: out of the event loop's buffer, and to complete an
unfinished frame. For a 64 KB message, these copies take half of the CPU time of dtx outside of system calls. So the
proxy reads into a scratch buffer, after free space for the unfinished frame, and sends from that buffer.

All connections share the scratch buffer, because each read is handled before the next one begins. The buffer must not
be written to while unsent slices of it exist. Python detects that, because a bytearray with exports cannot be resized.
Then a new buffer replaces it. Data that is kept must be copied: no frame handler ever gets the scratch buffer.
"""

import asyncio
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Final, cast

from dtx.server.alongside.channel import ChannelOwner
from dtx.server.alongside.plain_deliveries import DELIVERIES
from dtx.store.rabbitmq.upstream import Upstream
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.codec import Sender
from dtx.wire.amqp09.frames import HEARTBEAT, Frame, FrameSplitter
from dtx.wire.amqp09.settings import MOST_AT_ONCE

ROOM: Final = 1 << 20
"""Maximum bytes of one read: with larger reads, the processes wake each other less often."""
_ROOM_BEHIND: Final = 1 << 18
"""The same while the client is slow: more bytes would only wait in memory."""
_LARGE: Final = 1 << 16
"""Minimum bytes of a read that is sent from the scratch buffer. Fewer bytes are copied: a few unsent bytes must not
keep a whole scratch buffer."""


class Scratch:
    """A read buffer that is replaced while slices of it are unsent."""

    def __init__(self) -> None:
        self._buffer = bytearray(ROOM)

    def take(self) -> bytearray:
        """The buffer, or a new one if slices of it are unsent; valid for one read."""
        try:
            self._buffer.pop()
            self._buffer.append(0)
        except BufferError:
            self._buffer = bytearray(ROOM)
        return self._buffer


SCRATCH: Final = Scratch()


class Reading:
    """Reads frames from one socket.

    Args:
        splitter: of this direction of the connection.
    """

    __slots__ = ("_behind", "_buffer", "_offset", "_splitter")

    def __init__(self, splitter: FrameSplitter) -> None:
        self._splitter = splitter
        self._buffer = bytearray()
        self._offset = 0
        self._behind = False

    def room(self, *, behind: bool) -> memoryview:
        """The memory for the next read.

        Args:
            behind: the client has unsent data. Then the read is copied, so that one connection keeps at most one
                scratch buffer.
        """
        pending = self._splitter.pending
        self._buffer = SCRATCH.take()
        self._offset = pending if pending <= ROOM // 2 else 0
        self._behind = behind
        return memoryview(self._buffer)[self._offset : self._offset + _ROOM_BEHIND if behind else ROOM]

    def copy(self, count: int) -> bytes:
        """A copy of the *count* bytes that were read, for use while an earlier read is not handled."""
        return bytes(memoryview(self._buffer)[self._offset : self._offset + count])

    def take(self, count: int) -> tuple[bytes, list[Frame]]:
        """Cut the data that was read into frames.

        Args:
            count: bytes that were read.

        Returns:
            A buffer and the complete frames in it. The scratch buffer is a bytearray, typed as bytes because it must
            not be changed. It is valid until the next read.

        Raises:
            FrameError: see :meth:`FrameSplitter.feed`.
        """
        buffer, offset = self._buffer, self._offset
        pending = self._splitter.pending
        # The start of a frame is copied only for a read of at least its size: so each byte is copied at most once.
        if count < _LARGE or count < pending or offset != pending or self._behind:
            return self._splitter.feed(self.copy(count))
        return cast("bytes", buffer), self._splitter.feed_behind(buffer, offset + count)


def kept(buffer: bytes, frames: Sequence[Frame]) -> bytes:
    """*buffer* up to the end of *frames* as bytes, so that parts of it may be kept."""
    return buffer if type(buffer) is bytes else bytes(memoryview(buffer)[: frames[-1][3]])


_TO_CLIENT: Final = methods.watched(Sender.SERVER)
"""Methods of the broker that dtx must inspect."""
_AT_ONCE: Final = 0.001
"""Seconds of work on frames before other clients get a turn."""
_END: Final = itemgetter(3)


class ProxyUpstream(Upstream, asyncio.BufferedProtocol):
    """The client's connection to the broker.

    Args:
        owner: the client.
        unopened: returns the number of channels that the client may still open.
        lost: called with the reason when the connection is lost.
    """

    def __init__(self, owner: ChannelOwner, unopened: Callable[[], int], lost: Callable[[str], None]) -> None:
        super().__init__()
        self._owner = owner
        self._unopened = unopened
        self._lost = lost
        self._splitter = FrameSplitter(0, MOST_AT_ONCE)
        self._reading = Reading(self._splitter)

    def agreed(self, limits: methods.ConnectionTuneOk) -> None:
        """Apply the limits of connection.tune-ok, which client and broker have agreed on."""
        self.engine.adopt(limits)
        self._splitter.max_frame = limits.frame_max
        self.start_heartbeats()

    @property
    def kept_free(self) -> int:
        """See :class:`Upstream`: the channels that the client may still open."""
        return self._unopened()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """See :class:`asyncio.BufferedProtocol`."""
        return self._reading.room(behind=self._owner.client_is_behind)

    def buffer_updated(self, nbytes: int) -> None:
        """See :class:`asyncio.BufferedProtocol`."""
        if self._slices.busy:  # after a pause, TLS may still have data
            self.run(self._handle(partial(self._splitter.feed, self._reading.copy(nbytes))))
        else:
            self.run(self._handle(partial(self._reading.take, nbytes)))

    def _handle(self, split: Callable[[], tuple[bytes, list[Frame]]]) -> Iterator[None]:
        self.engine.note_received()
        buffer, frames = split()
        while frames:
            yield from self._frames(buffer, frames)
            yield
            buffer, frames = self._splitter.more()

    def _frames(self, buffer: bytes, frames: Sequence[Frame]) -> Iterator[None]:
        """Pass frames on, and keep dtx's own frames out of messages."""
        owner, unsettled = self._owner, self._owner.unsettled
        passing = self._pass_on(buffer, frames)
        begin = 0
        while begin < len(frames):
            owner.passing = True
            try:
                buffer, end = next(passing, (buffer, frames[-1][3]))
            finally:
                owner.passing = False
            passed = frames[begin : bisect_right(frames, end, key=_END)]
            begin += len(passed)
            if unsettled.by_upstream:
                unsettled.from_broker(buffer, passed)
            owner.passed(buffer, passed)
            yield

    def _pass_on(self, buffer: bytes, frames: Sequence[Frame]) -> Iterator[tuple[bytes, int]]:
        """Pass frames to their handlers, and frames without a handler to the client as slices.

        Yields:
            After long work, a buffer with all *frames*, and the position of the first frame that is not passed on.
        """
        until = time.monotonic() + _AT_ONCE
        handlers = self.handlers
        owner = self._owner
        begin = end_of_run = frames[0][2]
        consuming = owner.consuming.by_number
        concerned = bool(consuming) and owner.consuming.concerns(buffer, frames)
        last = frames[-1][3] if consuming and frames[-1][0] in DELIVERIES else -1
        """The end of a last frame whose message may have to be inspected: its header has not come."""
        for key, channel, start, end in frames:
            inspected = channel in consuming and (concerned or end == last)
            if channel not in handlers and key not in _TO_CLIENT and not inspected:
                end_of_run = end
                continue
            if end_of_run > begin:
                owner.pass_to_client(buffer, begin, end_of_run)
            begin = end_of_run = end
            handler = handlers.get(channel) or owner.channels.get(channel)
            if handler is not None:
                buffer = kept(buffer, frames)
                handler.frame(key, buffer, start, end)
                concerned |= key in DELIVERIES and channel in consuming  # if it is held, its content must be held, too
                if time.monotonic() >= until:
                    yield buffer, end
                    until = time.monotonic() + _AT_ONCE
        if end_of_run > begin:
            owner.pass_to_client(buffer, begin, end_of_run)

    def pause_writing(self) -> None:
        """Stop reading from the client, because the broker is slow."""
        self._owner.hold_client(self)

    def resume_writing(self) -> None:
        """Read from the client again."""
        self._owner.release_client(self)

    def on_lost(self, reason: str) -> None:
        """See :class:`Upstream`."""
        self._lost(reason)


class ChannelZero:
    """Handles channel 0 of the connection to the broker.

    Args:
        handle: called with class << 16 | method, and the frame.
    """

    def __init__(self, handle: Callable[[int, bytes], None]) -> None:
        self._handle = handle

    def frame(self, key: int, buffer: bytes, start: int, end: int) -> None:
        """See :class:`Handler`."""
        if key != HEARTBEAT:
            self._handle(key, buffer[start:end])

    def lost(self, reason: str) -> None:
        """See :class:`Handler`: :class:`ProxyUpstream` tells the session."""
