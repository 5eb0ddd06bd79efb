"""Contents: what follows a method that carries a message, a header frame and body frames."""

from struct import Struct
from typing import Final, NamedTuple

from dtx.wire.amqp09.errors import syntax_error
from dtx.wire.amqp09.frames import BODY, FRAME_END, HEADER, OVERHEAD

_HEADER: Final = Struct(">HHQ")
_HEADER_FRAME: Final = Struct(">BHIHHQ")
_BODY_FRAME: Final = Struct(">BBHI")
BASIC: Final = 60
_END: Final = b"\xce"


class ContentHeader(NamedTuple):
    """A content header. ``properties`` from the property flags on."""

    class_id: int
    body_size: int
    properties: bytes


def header(payload: bytes) -> ContentHeader:
    """Read the payload of a content header frame.

    Raises:
        WireError: 502 when not even the property flags are there; the properties are not looked at.
    """
    if len(payload) < _HEADER.size + 2:
        raise syntax_error("content header is truncated or too long")
    class_id, _, body_size = _HEADER.unpack_from(payload)
    return ContentHeader._make((class_id, body_size, payload[_HEADER.size :]))


def message(method: bytes, channel: int, properties: bytes, body: bytes, frame_max: int) -> bytes:
    """A message: the frame of its method, and those of its content behind it, put together once.

    Args:
        method: basic.deliver, get-ok or return, a whole frame.
        channel: number.
        properties: from the property flags on.
        body: octets.
        frame_max: agreed with the peer, octets; 0 for none.
    """
    size = len(body)
    head = _HEADER_FRAME.pack(HEADER, channel, 12 + len(properties), BASIC, 0, size)
    if not size:
        return b"".join((method, head, properties, _END))
    if not frame_max or size <= frame_max - OVERHEAD:
        return b"".join((method, head, properties, _BODY_FRAME.pack(FRAME_END, BODY, channel, size), body, _END))
    room, whole = frame_max - OVERHEAD, memoryview(body)
    parts: list[bytes | memoryview] = [method, head, properties]
    for start in range(0, size, room):
        part = whole[start : start + room]
        parts += (_BODY_FRAME.pack(FRAME_END, BODY, channel, len(part)), part)
    return b"".join((*parts, _END))
