"""Deliveries that arrive after the broker's answer to cancel, as RabbitMQ 3.10 can send them."""

from typing import Any

from dtx.store.rabbitmq.consume_channel import ConsumeChannel
from dtx.store.rabbitmq.consumed_queues import ConsumedQueues
from dtx.store.rabbitmq.upstream import ExclusiveQueues
from dtx.store.work import Budget, Delivery
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.frames import BODY, HEADER, method_frame
from dtx.wire.amqp09.properties import EMPTY
from dtx.wire.amqp09.tables import put_short


class Upstream:
    """A connection that discards everything written to it. It has no memory limit."""

    lock = ""

    def __init__(self) -> None:
        self.handlers: dict[int, Any] = {}
        self.exclusive = ExclusiveQueues()

    def write(self, data: bytes) -> None:
        """Discard the data."""


def test_the_queue_of_a_delivery_behind_cancel_ok_is_known() -> None:
    """Otherwise a branch that retires it could not put it back."""
    upstream: Any = Upstream()
    taking = ConsumeChannel(upstream, 1, 1000, Budget(1 << 20), ConsumedQueues(upstream.exclusive), upstream)
    taken: list[Delivery] = []
    taking.on_message = lambda delivery, _: taken.append(delivery)
    taking.owner = type("Owner", (), {"forward": lambda *_: None})()

    def say(key: int, payload: bytes) -> None:
        frame = method_frame(1, key.to_bytes(4, "big") + payload)
        taking.frame(key, frame, 0, len(frame))

    taking.request(methods.BasicConsume.KEY, methods.BasicConsume(b"q", b"7").encode())
    say(methods.BasicConsumeOk.KEY, put_short(b"7"))
    say(methods.BasicCancelOk.KEY, put_short(b"7"))
    say(methods.BasicDeliver.KEY, put_short(b"7") + (1).to_bytes(8, "big") + b"\x00" + put_short(b"") + put_short(b"q"))
    head = b"\x00\x3c\x00\x00" + (1).to_bytes(8, "big") + EMPTY
    for key, octets in ((HEADER, head), (BODY, b"x")):
        frame = b"%c\x00\x01" % key + len(octets).to_bytes(4, "big") + octets + b"\xce"
        taking.frame(key, frame, 0, len(frame))
    assert [(delivery.tag, delivery.queue, delivery.body) for delivery in taken] == [(1, b"q", b"x")]
