"""The stream of frames of AMQP 1.0, cut without looking into them (2.3).

A frame is size (four octets, itself included), data offset (in words of four octets), type, channel, what an extended
header holds, and the body. The splitter works on what the socket returned and tells where in that buffer each body
lies, so that a payload is never copied here; a frame that spans several reads is kept as pieces and joined once.
"""

from struct import Struct
from typing import Final

from dtx.wire.amqp10.errors import FrameError

AMQP: Final = 0
SASL: Final = 1
MIN_MAX_FRAME: Final = 512
"""MIN-MAX-FRAME-SIZE: what either peer must be able to take, and all that may be sent before open says more."""
HEAD: Final = 8
"""Octets of a frame header."""
EMPTY_FRAME: Final = b"\x00\x00\x00\x08\x02\x00\x00\x00"
"""A frame without a body: it only keeps the connection from being idle (2.4.5)."""

_HEAD: Final = Struct(">IBBH")
_SMALL: Final = 4096

Frame = tuple[int, int, int, int]
"""Type, channel, start, end: a body in a buffer."""


class FrameSplitter:
    """Cuts a stream of octets into frames.

    Args:
        max_frame: the max-frame-size that the peer was told, octets.
    """

    __slots__ = ("_have", "_need", "_parts", "max_frame")

    def __init__(self, max_frame: int) -> None:
        self._parts: list[bytes | bytearray] = []
        self._have = 0
        self._need = 0
        self.max_frame = max_frame

    @property
    def pending(self) -> int:
        """Octets of an incomplete frame that are held, at most one frame."""
        return self._have

    def feed(self, chunk: bytes) -> tuple[bytes, list[Frame]]:
        """Take what was read from the peer.

        Args:
            chunk: any number of octets.

        Returns:
            A buffer and the whole frames in it; *chunk* itself when it starts with a frame.

        Raises:
            FrameError: a bad size, data offset or type; it carries the frames before the bad one.
        """
        if self._parts:
            self._keep(chunk)
            if self._have < self._need:
                return b"", []
            chunk = b"".join(self._parts)
            self._parts.clear()
        return chunk, self._split(chunk)

    def _keep(self, chunk: bytes) -> None:
        """Add to the pieces of the incomplete frame; small pieces share one, else each octet could cost fifty."""
        self._have += len(chunk)
        last = self._parts[-1]
        if type(last) is bytearray and len(chunk) < _SMALL:
            last += chunk
        else:
            self._parts.append(bytearray(chunk) if len(chunk) < _SMALL else chunk)

    def _split(self, buffer: bytes) -> list[Frame]:
        frames: list[Frame] = []
        length = len(buffer)
        last = length - HEAD
        position = 0
        need = HEAD
        while position <= last:
            size, offset, kind, channel = _HEAD.unpack_from(buffer, position)
            body = position + 4 * offset
            end = position + size
            if offset < 2 or body > end or size > self.max_frame or kind > SASL:
                raise FrameError(self._problem(size, offset, kind), buffer, frames)
            if end > length:
                need = size
                break
            frames.append((kind, channel, body, end))
            position = end
        self._have = length - position
        self._need = need
        if self._have:
            rest = buffer[position:]
            self._parts.append(bytearray(rest) if self._have < _SMALL else rest)
        return frames

    def _problem(self, size: int, offset: int, kind: int) -> str:
        """What is wrong with a frame header."""
        if kind > SASL:
            return f"frame of unknown type {kind}"
        if size > self.max_frame:
            return f"frame of {size} octets, max-frame-size is {self.max_frame}"
        return f"frame of {size} octets with a data offset of {offset}"


def frame(kind: int, channel: int, body: bytes | bytearray) -> bytes:
    """A whole frame."""
    return _HEAD.pack(HEAD + len(body), 2, kind, channel) + body


def head(channel: int, size: int) -> bytes:
    """The header of an AMQP frame whose body has *size* octets."""
    return _HEAD.pack(HEAD + size, 2, AMQP, channel)
