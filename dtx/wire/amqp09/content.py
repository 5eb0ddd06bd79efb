"""Contents: the header frame and the body frames that follow a method with a message."""

from struct import Struct
from typing import Final, NamedTuple

from dtx.wire.amqp09.errors import syntax_error
from dtx.wire.amqp09.frames import BODY, FRAME_END, HEADER, OVERHEAD
from dtx.xa.codes import ReplyCode, XaError

_HEADER: Final = Struct(">HHQ")
_HEADER_FRAME: Final = Struct(">BHIHHQ")
_BODY_FRAME: Final = Struct(">BBHI")
BASIC: Final = 60
HEADER_OVERHEAD: Final = OVERHEAD + _HEADER.size
"""Bytes of a header frame in addition to its properties."""
_END: Final = b"\xce"


def check_size(size: int, most: int) -> None:
    """Refuse a body of *size* bytes that is larger than *most*; 0: no limit.

    Raises:
        XaError: 406, with the text of RabbitMQ.
    """
    if size > most > 0:
        raise XaError(ReplyCode.PRECONDITION_FAILED, f"message size {size} is larger than configured max size {most}")


class ContentHeader(NamedTuple):
    """A content header. ``properties`` holds the bytes from the property flags on."""

    class_id: int
    body_size: int
    properties: bytes


def header(payload: bytes) -> ContentHeader:
    """Read the payload of a content header frame.

    Raises:
        WireError: 502 if the property flags are missing. The function does not check the properties.
    """
    if len(payload) < _HEADER.size + 2:
        raise syntax_error("content header is truncated")
    class_id, _, body_size = _HEADER.unpack_from(payload)
    return ContentHeader._make((class_id, body_size, payload[_HEADER.size :]))


def message(method: bytes, channel: int, properties: bytes, body: bytes, frame_max: int) -> bytes:
    """Join the frames of a message: the frame of its method, and the frames of its content.

    Args:
        method: basic.deliver, get-ok or return, a whole frame.
        channel: the number of the channel.
        properties: the bytes from the property flags on.
        body: the body.
        frame_max: the negotiated frame-max in bytes; 0 for none.
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
