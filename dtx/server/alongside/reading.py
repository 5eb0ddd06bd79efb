"""Reading in place: the octets of large messages go from one socket to the other without a copy in between.

What a socket returns is as a rule copied twice before it is sent on: out of the event loop's own buffer, and once more
to join the frame that it begins within. Half of what a 64 KB message costs dtx apart from the system's calls is that.
So sockets of the proxy are read into a scratch buffer, right behind room for the frame that is not complete yet, and
what passes unseen is sent from there.

All connections share the scratch buffer, because one read is dealt with before the next begins. It may not be written
to while somebody still has to send from it; Python knows that (a bytearray that is exported cannot be resized), and
then another one takes its place. Whatever is kept is copied: no frame handler ever sees the scratch buffer.
"""

from collections.abc import Sequence
from typing import Final, cast

from dtx.wire.amqp09.frames import Frame, FrameSplitter

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
