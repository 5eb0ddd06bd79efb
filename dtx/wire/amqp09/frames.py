"""The stream of frames. This module cuts it into frames without reading their content, and makes frames.

A frame is type octet, channel short, payload size long, payload, and the octet 0xCE (AMQP 0-9-1, 4.2.3). The splitter
works on the buffer that the socket returned. It returns the position of each frame in that buffer, so that a forwarded
body is never copied. A frame that spans several reads is kept as pieces. The pieces are joined once, when the frame is
complete.

Where brokers are less strict than the text, this module is, too, because clients are written for brokers. A frame may
exceed the negotiated size by its own eight bytes ("off-by 1 or 8 are typical", RabbitMQ's reader).
"""

from enum import Enum
from itertools import repeat
from struct import Struct
from typing import Final

from dtx.wire.amqp09.errors import FrameError, HardCode

METHOD: Final = 1
HEADER: Final = 2
BODY: Final = 3
HEARTBEAT: Final = 8
OVERHEAD: Final = 8
"""Bytes of a frame that are not payload."""
MIN_FRAME: Final = 4096
"""frame-min-size: the size in bytes that each peer may send before tune."""
OPENING_FRAME: Final = 131_072
"""The largest frame in bytes that a server accepts before tune. start-ok may contain a long token.

Most clients agree on this size later. Every socket may hold this much before its login, so the limit is not larger.
"""

HEARTBEAT_FRAME: Final = b"\x08\x00\x00\x00\x00\x00\x00\xce"

FRAME_END: Final = 0xCE
_END: Final = b"\xce"
_HEAD: Final = Struct(">BHI")
_HEAD_KEY: Final = Struct(">BHII")
_CHANNEL: Final = Struct(">H")
_CONTENT: Final = Struct(">BHIHHQ")
_CONTENT_KINDS: Final = frozenset((HEADER, BODY))
_SMALL: Final = 4096
_UNLIMITED: Final = 1 << 32

Frame = tuple[int, int, int, int]
"""Key, channel, start, end: a frame in a buffer, from its type octet to the position after its 0xCE.

The key of a method frame is class << 16 | method. The key of any other frame is its type: :data:`HEADER`, :data:`BODY`
or :data:`HEARTBEAT`.
"""

_Buffer = bytes | bytearray


class Protocol(Enum):
    """The protocol that the first eight bytes of a connection request."""

    AMQP_0_9_1 = b"AMQP\x00\x00\x09\x01"
    AMQP_0_9 = b"AMQP\x01\x01\x00\x09"
    AMQP_1_0 = b"AMQP\x00\x01\x00\x00"
    AMQP_1_0_TLS = b"AMQP\x02\x01\x00\x00"
    AMQP_1_0_SASL = b"AMQP\x03\x01\x00\x00"
    DTX_MEMBER = b"DTXM\x00\x00\x01\x00"
    UNKNOWN = b""


def protocol_header(data: bytes) -> Protocol | None:
    """Return the protocol that *data*, the start of a stream, requests.

    Returns:
        ``None`` if fewer than eight bytes are there and match a known header; ``UNKNOWN`` if no known header matches.
    """
    start = data[:8]
    for protocol in Protocol:
        if protocol.value and protocol.value.startswith(start):
            return protocol if len(start) == 8 else None
    return Protocol.UNKNOWN


class FrameSplitter:
    """Cuts a stream of bytes into frames. Each direction of a connection has one splitter.

    Args:
        max_frame: the negotiated frame-max in bytes; 0 for none.
        most: the maximum number of frames that are cut at once, see :meth:`more`.
    """

    __slots__ = ("_have", "_max_payload", "_most", "_need", "_parts", "_uncut")

    def __init__(self, max_frame: int = MIN_FRAME, most: int = _UNLIMITED) -> None:
        self._most = most
        self._uncut: tuple[bytes, int] | None = None
        """A buffer with more frames, and the position of their start."""
        self._parts: list[bytes | bytearray] = []
        self._have = 0
        self._need = 0
        self.max_frame = max_frame

    @property
    def max_frame(self) -> int:
        """The largest frame in bytes. A new value, set at any time, applies to frames whose header arrives later."""
        return 0 if self._max_payload == _UNLIMITED else self._max_payload

    @max_frame.setter
    def max_frame(self, octets: int) -> None:
        self._max_payload = octets or _UNLIMITED

    @property
    def pending(self) -> int:
        """The number of bytes held of an incomplete frame, at most one frame."""
        return self._have

    def feed(self, chunk: bytes) -> tuple[bytes, list[Frame]]:
        """Process data from the peer.

        Args:
            chunk: any number of bytes.

        Returns:
            A buffer and the complete frames in it, or the first of them (see :meth:`more`); *chunk* itself when it
            starts with a frame.

        Raises:
            FrameError: 501 for a bad frame end, type, size or heartbeat, 502 for a method frame without a method. The
                stream cannot be read any further; the error carries the frames before the bad one.
        """
        if self._parts:
            self._keep(chunk)
            if self._have < self._need:
                return b"", []
            chunk = b"".join(self._parts)
            self._parts.clear()
        return chunk, self._split(chunk, 0, len(chunk))

    @property
    def has_more(self) -> bool:
        """Whether :meth:`more` has frames or an error."""
        return self._uncut is not None

    def more(self) -> tuple[bytes, list[Frame]]:
        """Return the next frames of the last data. Call this until the list is empty, before the next :meth:`feed`.

        Raises:
            FrameError: as for :meth:`feed`.
        """
        if self._uncut is None:
            return b"", []
        (buffer, start), self._uncut = self._uncut, None
        return buffer, self._split(buffer, start, len(buffer))

    def feed_behind(self, buffer: bytearray, end: int) -> list[Frame]:
        """Process data that was read into a buffer after free space for the incomplete frame.

        The incomplete frame is copied into that space. Nothing else is copied.

        Args:
            buffer: its first :attr:`pending` bytes are the free space. An incomplete frame at its end is copied out.
            end: the position after the last byte that was read.

        Returns:
            The complete frames in *buffer*, or the first of them (see :meth:`more`, whose buffer is another one).

        Raises:
            FrameError: as for :meth:`feed`; its buffer is a copy.
        """
        with memoryview(buffer) as view:
            position = 0
            for part in self._parts:
                view[position : position + len(part)] = part
                position += len(part)
        self._parts.clear()
        return self._split(buffer, 0, end)

    def _keep(self, chunk: bytes) -> None:
        """Add to the pieces of the incomplete frame. Small pieces share one object: each object costs 50 bytes."""
        self._have += len(chunk)
        last = self._parts[-1]
        if type(last) is bytearray and len(chunk) < _SMALL:
            last += chunk
        else:
            self._parts.append(bytearray(chunk) if len(chunk) < _SMALL else chunk)

    def _split(self, buffer: _Buffer, position: int, length: int) -> list[Frame]:
        frames: list[Frame] = []
        max_payload = self._max_payload
        # The header is read together with the four bytes after it: they may be the class and method.
        last = length - _HEAD_KEY.size
        for _ in repeat(None, self._most):
            if position > last:
                break
            kind, channel, size, key = _HEAD_KEY.unpack_from(buffer, position)
            end = position + size + OVERHEAD
            if end > length or size > max_payload or buffer[end - 1] != FRAME_END:
                break
            if kind == METHOD:
                if size < 4:
                    break
                frames.append((key, channel, position, end))
            elif kind in _CONTENT_KINDS:
                frames.append((kind, channel, position, end))
            else:
                break
            position = end
        else:
            self._leave(buffer, position, length)
            return frames
        if position < length:
            self._rest(buffer, position, length, frames)
        else:
            self._have = self._need = 0
        return frames

    def _leave(self, buffer: _Buffer, position: int, length: int) -> None:
        if type(buffer) is bytes:
            self._uncut = buffer, position
        else:
            self._uncut = bytes(memoryview(buffer)[position:length]), 0

    def _rest(self, buffer: _Buffer, position: int, length: int, frames: list[Frame]) -> None:
        """Process the frames that the loop leaves: short, bad and incomplete frames, and heartbeats."""
        need = _HEAD.size
        while length - position >= _HEAD.size:
            if len(frames) >= self._most:
                self._leave(buffer, position, length)
                return
            kind, channel, size = _HEAD.unpack_from(buffer, position)
            end = position + size + OVERHEAD
            problem = self._problem(kind, channel, size)
            if problem is None and end <= length and buffer[end - 1] != FRAME_END:
                problem = HardCode.FRAME_ERROR, f"frame ends with {buffer[end - 1]:#04x}, must be {FRAME_END:#04x}"
            if problem is not None:
                raise FrameError(*problem, bytes(buffer[:length]), frames)
            if end > length:
                need = size + OVERHEAD
                break
            key = int.from_bytes(buffer[position + 7 : position + 11], "big") if kind == METHOD else kind
            frames.append((key, channel, position, end))
            position = end
        self._have = length - position
        self._need = need
        if self._have:
            rest = memoryview(buffer)[position:length]
            self._parts.append(bytearray(rest) if self._have < _SMALL else bytes(rest))

    def _problem(self, kind: int, channel: int, size: int) -> tuple[HardCode, str] | None:
        if kind not in (METHOD, HEADER, BODY, HEARTBEAT):
            return HardCode.FRAME_ERROR, f"frame of unknown type {kind}"
        if size > self._max_payload:
            return HardCode.FRAME_ERROR, f"{size} bytes in a frame, frame-max is {self._max_payload}"
        if kind == METHOD and size < 4:
            return HardCode.SYNTAX_ERROR, f"method frame of {size} bytes has no method"
        # "A peer that receives an invalid heartbeat frame MUST raise a connection exception with reply code 501"
        if kind == HEARTBEAT and (channel or size):
            return HardCode.FRAME_ERROR, f"heartbeat of {size} bytes on channel {channel}"
        return None


def method_frame(channel: int, payload: bytes) -> bytes:
    """Make a whole method frame. *payload* starts with class and method."""
    return _HEAD.pack(METHOD, channel, len(payload)) + payload + _END


def header_frame(channel: int, class_id: int, body_size: int, properties: bytes) -> bytes:
    """Make a whole content header frame.

    Args:
        channel: the number of the channel.
        class_id: 60, basic.
        body_size: the size of the body in bytes.
        properties: the bytes from the property flags on.
    """
    head = _CONTENT.pack(HEADER, channel, 12 + len(properties), class_id, 0, body_size)
    return head + properties + _END


def with_channel(frame: bytes, channel: int) -> bytes:
    """Return a copy of a whole frame for another channel."""
    return frame[:1] + _CHANNEL.pack(channel) + frame[3:]
