"""Contents: a header written by pika is read, and pika reads the message that dtx writes."""

import pytest
from pika import amqp_object, frame, spec

from dtx.wire.amqp09 import content, methods
from dtx.wire.amqp09.codec import Method
from dtx.wire.amqp09.errors import WireError

PROPERTIES = b"\x10\x00\x02"
"""delivery-mode 2, starting with the property flags."""


def test_a_content_header_is_read_without_its_properties() -> None:
    octets = frame.Header(1, 2**33, spec.BasicProperties(priority=3)).marshal()[7:-1]
    assert content.header(octets) == (60, 2**33, b"\x08\x00\x03")


@pytest.mark.parametrize("length", range(14))
def test_a_truncated_content_header_is_a_syntax_error(length: int) -> None:
    with pytest.raises(WireError, match="content header"):
        content.header(frame.Header(1, 1, spec.BasicProperties()).marshal()[7:-1][:length])


def frames_of(octets: bytes) -> list[object]:
    """What pika reads: methods, header frames as (size, properties), fragments of the body."""
    found: list[object] = []
    while octets:
        consumed, read = frame.decode_frame(octets)
        assert read.channel_number == 9
        match read:
            case frame.Method():
                found.append(read.method)
            case frame.Header():
                found.append((read.body_size, read.properties))
            case _:
                found.append(read.fragment)
        octets = octets[consumed:]
    return found


PERSISTENT = spec.BasicProperties(delivery_mode=2)


@pytest.mark.parametrize("frame_max", [0, 4096, 131_072])
@pytest.mark.parametrize("size", [0, 1, 4088, 4089, 10_000])
def test_a_delivery_has_method_header_and_body_within_frame_max(size: int, frame_max: int) -> None:
    body = bytes(range(256)) * (size // 256) + bytes(size % 256)
    deliver = methods.BasicDeliver(b"tag", 7, True, b"ex", b"key").frame(9)
    method, header, *fragments = frames_of(content.message(deliver, 9, PROPERTIES, body, frame_max))
    assert method == spec.Basic.Deliver("tag", 7, True, "ex", "key")
    assert header == (size, PERSISTENT)
    assert b"".join(fragments) == body  # type: ignore[arg-type]
    assert all(0 < len(fragment) <= (frame_max or size) - 8 * bool(frame_max) for fragment in fragments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "of_pika"),
    [
        (methods.BasicGetOk(7, False, b"ex", b"key", 12), spec.Basic.GetOk(7, False, "ex", "key", 12)),
        (methods.BasicReturn(312, b"NO_ROUTE", b"ex", b"key"), spec.Basic.Return(312, "NO_ROUTE", "ex", "key")),
    ],
)
def test_a_message_that_is_got_or_comes_back_is_whole(method: Method, of_pika: amqp_object.Method) -> None:
    octets = content.message(method.frame(9), 9, PROPERTIES, b"body", 4096)
    assert frames_of(octets) == [of_pika, (4, PERSISTENT), b"body"]
