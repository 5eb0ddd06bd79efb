"""The channel that takes deliveries for branches, without a broker behind it."""

from types import SimpleNamespace
from typing import Any

import pytest

from dtx.store.rabbitmq.taking import TakingChannel
from dtx.wire.amqp09 import content, keys, requests
from dtx.wire.amqp09.frames import HEADER, FrameSplitter, header_frame, method_frame
from dtx.wire.amqp09.properties import EMPTY
from dtx.wire.amqp09.tables import put_short


class Upstream:
    """A connection that keeps what was written to it; it has memory for all."""

    lock = ""
    used = 0

    def __init__(self) -> None:
        self.handlers: dict[int, Any] = {}
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Methods, without their frames."""
        buffer, frames = FrameSplitter(0).feed(bytes(data))
        self.written += [buffer[start + 7 : end - 1] for _, _, start, end in frames]

    def has_room(self, octets: int) -> bool:
        return True


def delivery(consumer: bytes, tag: int) -> list[tuple[int, bytes]]:
    """A message without a body, as frames with their keys."""
    method = requests.deliver(consumer, tag, redelivered=False, exchange=b"", routing_key=b"q")
    return [(keys.BASIC_DELIVER, method_frame(1, method)), (HEADER, header_frame(1, 60, 0, EMPTY))]


@pytest.mark.parametrize("no_ack", [False, True], ids=["with acknowledgements", "without"])
def test_what_still_comes_for_a_client_that_has_left_is_given_back_unless_it_needs_no_acknowledgement(
    no_ack: bool,
) -> None:
    """The broker closes a channel on which something is refused that it has forgotten; a branch holds others there."""
    upstream: Any = Upstream()
    taking = TakingChannel(upstream, 1, 1000, upstream, b"other", upstream)
    taking.owner = SimpleNamespace(forward=lambda *_: None)

    def say(*frames: tuple[int, bytes]) -> None:
        for key, frame in frames:
            taking.frame(key, frame, 0, len(frame))

    taking.request(keys.BASIC_CONSUME, requests.consume(b"q", b"held"))
    taking.request(keys.BASIC_CONSUME, requests.consume(b"q", b"late", no_ack=no_ack))
    for tag in (b"held", b"late"):
        payload = keys.BASIC_CONSUME_OK.to_bytes(4, "big") + put_short(tag)
        say((keys.BASIC_CONSUME_OK, method_frame(1, payload)))
    say(*delivery(b"held", 1))
    taking.hold(taking.select(content.ack(requests.ack(1))), "a branch")
    taking.detach()
    upstream.written.clear()
    say(*delivery(b"late", 2))
    assert [payload for payload in upstream.written if payload[:4] == keys.BASIC_NACK.to_bytes(4, "big")] == (
        [] if no_ack else [requests.nack(2, requeue=True)]
    )
