"""The way from the broker to the client: frames are passed on as slices of what was read.

What a socket returns is as a rule copied twice before it is sent on: out of the event loop's own buffer, and once more
to join the frame that it begins within. Half of what a 64 KB message costs dtx apart from the system's calls is that.
So sockets of the proxy are read into a scratch buffer, right behind room for the frame that is not complete yet, and
what passes unseen is sent from there.

All connections share the scratch buffer, because one read is dealt with before the next begins. It may not be written
to while somebody still has to send from it; Python knows that (a bytearray that is exported cannot be resized), and
then another one takes its place. Whatever is kept is copied: no frame handler ever sees the scratch buffer.
"""

import asyncio
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Final, cast

from dtx.server.alongside.channel import ChannelOwner
from dtx.store.rabbitmq.upstream import Upstream
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.codec import Sender
from dtx.wire.amqp09.frames import HEARTBEAT, Frame, FrameSplitter
from dtx.wire.amqp09.settings import MOST_AT_ONCE

ROOM: Final = 1 << 20
"""Octets that one read takes at most: the larger it is, the less often the processes wake each other."""
_ROOM_BEHIND: Final = 1 << 18
"""The same while the other side does not keep up: more would only wait in memory."""
_LARGE: Final = 1 << 16
"""Octets that are worth it. Less is copied out, so that a few of them, unsent, never hold a whole scratch buffer."""


class Scratch:
    """A buffer that nobody sends from."""

    def __init__(self) -> None:
        self._buffer = bytearray(ROOM)

    def take(self) -> bytearray:
        """The buffer, or a fresh one when something of it is still to be sent; valid for one read."""
        try:
            self._buffer.pop()
            self._buffer.append(0)
        except BufferError:
            self._buffer = bytearray(ROOM)
        return self._buffer


SCRATCH: Final = Scratch()


class Reading:
    """What is read from one socket.

    Args:
        splitter: of that direction.
    """

    __slots__ = ("_behind", "_buffer", "_offset", "_splitter")

    def __init__(self, splitter: FrameSplitter) -> None:
        self._splitter = splitter
        self._buffer = bytearray()
        self._offset = 0
        self._behind = False

    def room(self, *, behind: bool) -> memoryview:
        """Where to read to.

        Args:
            behind: the other side has not taken yet what it was sent: what is read now is copied, so that one
                connection holds no more than one scratch buffer.
        """
        pending = self._splitter.pending
        self._buffer = SCRATCH.take()
        self._offset = pending if pending <= ROOM // 2 else 0
        self._behind = behind
        return memoryview(self._buffer)[self._offset : self._offset + _ROOM_BEHIND if behind else ROOM]

    def copy(self, count: int) -> bytes:
        """What was read there, while an earlier read is not dealt with."""
        return bytes(memoryview(self._buffer)[self._offset : self._offset + count])

    def take(self, count: int) -> tuple[bytes, list[Frame]]:
        """Take what was read there.

        Args:
            count: octets.

        Returns:
            A buffer and the complete frames in it. Where that is the scratch buffer, it is a bytearray (called bytes
            because all may look at it and nobody may write to it) and valid until the next read only.

        Raises:
            FrameError: see :meth:`FrameSplitter.feed`.
        """
        buffer, offset = self._buffer, self._offset
        pending = self._splitter.pending
        # The start of a frame moves only in front of at least as much: each octet once, however slowly it comes.
        if count < _LARGE or count < pending or offset != pending or self._behind:
            return self._splitter.feed(self.copy(count))
        return cast("bytes", buffer), self._splitter.feed_behind(buffer, offset + count)


def kept(buffer: bytes, frames: Sequence[Frame]) -> bytes:
    """*buffer*, as far as there are *frames* in it, for those who keep parts of it."""
    return buffer if type(buffer) is bytes else bytes(memoryview(buffer)[: frames[-1][3]])


_TO_CLIENT: Final = methods.watched(Sender.SERVER)
"""Methods of the broker that do not pass unseen."""
_AT_ONCE: Final = 0.001
"""Seconds for which frames are handed on before others may have their turn."""
_END: Final = itemgetter(3)


class ProxyUpstream(Upstream, asyncio.BufferedProtocol):
    """The client's connection to the broker.

    Args:
        owner: the client.
        unopened: tells how many channels it may still open.
        lost: told the reason when the connection is gone.
    """

    def __init__(self, owner: ChannelOwner, unopened: Callable[[], int], lost: Callable[[str], None]) -> None:
        super().__init__()
        self._owner = owner
        self._unopened = unopened
        self._lost = lost
        self._splitter = FrameSplitter(0, MOST_AT_ONCE)
        self._reading = Reading(self._splitter)

    def agreed(self, limits: methods.ConnectionTuneOk) -> None:
        """Client and broker have come to terms."""
        self.engine.adopt(limits)
        self._splitter.max_frame = limits.frame_max
        self.start_heartbeats()

    @property
    def kept_free(self) -> int:
        """See :class:`Upstream`: what the client was granted is there when it opens a channel."""
        return self._unopened()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """Where to read to."""
        return self._reading.room(behind=self._owner.client_is_behind)

    def buffer_updated(self, nbytes: int) -> None:
        """Octets from the broker."""
        if self._slices.busy:  # TLS has some more
            self.run(self._handle(partial(self._splitter.feed, self._reading.copy(nbytes))))
        else:
            self.run(self._handle(partial(self._reading.take, nbytes)))

    def _handle(self, split: Callable[[], tuple[bytes, list[Frame]]]) -> Iterator[None]:
        self.engine.excuse()
        buffer, frames = split()
        while frames:
            yield from self._frames(buffer, frames)
            yield
            buffer, frames = self._splitter.more()

    def _frames(self, buffer: bytes, frames: Sequence[Frame]) -> Iterator[None]:
        """Hand frames on, and keep dtx's own answers out of the midst of a message."""
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
        """Pass on what has no handler, as slices.

        Yields:
            After long work, a buffer with all *frames*, and where those that are not handed on begin.
        """
        until = time.monotonic() + _AT_ONCE
        handlers = self.handlers
        owner = self._owner
        begin = end_of_run = frames[0][2]
        for key, channel, start, end in frames:
            if channel not in handlers and key not in _TO_CLIENT:
                end_of_run = end
                continue
            if end_of_run > begin:
                owner.pass_to_client(buffer, begin, end_of_run)
            begin = end_of_run = end
            handler = handlers.get(channel) or owner.channels.get(channel)
            if handler is not None:
                buffer = kept(buffer, frames)
                handler.frame(key, buffer, start, end)
                if time.monotonic() >= until:
                    yield buffer, end
                    until = time.monotonic() + _AT_ONCE
        if end_of_run > begin:
            owner.pass_to_client(buffer, begin, end_of_run)

    def pause_writing(self) -> None:
        """The broker is slow: so is the client, from now on."""
        self._owner.hold_client(self)

    def resume_writing(self) -> None:
        """The broker has caught up."""
        self._owner.release_client(self)

    def on_lost(self, reason: str) -> None:
        """See :class:`Upstream`."""
        self._lost(reason)


class ChannelZero:
    """The connection class, as the broker speaks it.

    Args:
        said: is told the frames, with class << 16 | method.
    """

    def __init__(self, said: Callable[[int, bytes], None]) -> None:
        self._said = said

    def frame(self, key: int, buffer: bytes, start: int, end: int) -> None:
        """A frame of the broker on channel 0."""
        if key != HEARTBEAT:
            self._said(key, buffer[start:end])

    def lost(self, reason: str) -> None:
        """The session hears of it from the connection."""
