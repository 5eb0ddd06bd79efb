"""Calls to a broker over a :class:`RawClient`, one function for each method."""

from typing import Any, Final

from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.frames import method_frame
from tests.support.processes import wait_until
from tests.support.raw import ConnectionEnded, RawClient, message

FILLING: Final = 100
"""The channel of :func:`fill`."""


def ask(client: RawClient, channel: int, payload: bytes, answer: int) -> bytes:
    """Send a method, and return its answer."""
    client.say(channel, payload)
    return client.read_method(channel, answer)


def declare(client: RawClient, name: bytes = b"", *, channel: int = 1, **options: Any) -> methods.QueueDeclareOk:
    """Send queue.declare; return the answer."""
    return methods.QueueDeclareOk.decode(
        ask(client, channel, methods.QueueDeclare(name, **options).encode(), methods.QueueDeclareOk.KEY)
    )


def publish(client: RawClient, queue: bytes, *bodies: bytes, channel: int = 1, **options: Any) -> None:
    """Publish through the default exchange."""
    frames = [message(channel, queue, body, **options) for body in bodies]
    client.send_raw(b"".join(frames))


def fill(client: RawClient, queue: bytes, *bodies: bytes) -> None:
    """Publish, and wait until the queue has them.

    RabbitMQ may answer with the number of messages before it has handled earlier publishes, and channels are
    independent: only confirms show that a message has arrived.
    """
    client.open(FILLING)
    ask(client, FILLING, methods.ConfirmSelect().encode(), methods.ConfirmSelectOk.KEY)
    publish(client, queue, *bodies, channel=FILLING)
    confirmed(client, len(bodies), FILLING)
    client.close_channel(FILLING)


def confirmed(client: RawClient, count: int, channel: int = 1) -> int:
    """Wait for the confirms of *count* publishes; return the number of frames."""
    frames, seen = 0, 0
    while seen < count:
        settle = methods.BasicAck.decode(client.read_method(channel, methods.BasicAck.KEY))
        seen = settle.delivery_tag if settle.multiple else seen + 1
        frames += 1
    return frames


def next_delivery(client: RawClient, channel: int = 1) -> tuple[methods.BasicDeliver, bytes]:
    """The next delivery and its body."""
    method = methods.BasicDeliver.decode(client.read_method(channel, methods.BasicDeliver.KEY))
    return method, client.read_content(channel)


def get(
    client: RawClient, queue: bytes, channel: int = 1, *, no_ack: bool = False
) -> tuple[methods.BasicGetOk, bytes] | None:
    """Send basic.get; return method and body, ``None`` if the queue is empty."""
    client.say(channel, methods.BasicGet(queue, no_ack).encode())
    payload = client.read_method(channel, methods.BasicGetOk.KEY, methods.BasicGetEmpty.KEY)
    if payload[:4] == methods.BasicGetEmpty.HEAD:
        return None
    return methods.BasicGetOk.decode(payload), client.read_content(channel)


def bodies(client: RawClient, queue: bytes) -> list[bytes]:
    """Take all ready messages out of *queue*; return the bodies."""
    found = []
    while (got := get(client, queue, no_ack=True)) is not None:
        found.append(got[1])
    return found


def returned(client: RawClient, queue: bytes, count: int) -> None:
    """Wait until the messages of a closed channel are back: RabbitMQ 4 may answer the close earlier."""
    wait_until(lambda: declare(client, queue, passive=True).message_count == count, what="the messages")


def code_of_end(client: RawClient, *payloads: bytes, channel: int = 1) -> int:
    """Send methods that end the connection; return the reply code."""
    return code_after(client, b"".join(method_frame(channel, payload) for payload in payloads))


def code_after(client: RawClient, frames: bytes) -> int:
    """Send frames that end the connection; return the reply code."""
    client.send_raw(frames)
    try:
        while True:
            client.read()
    except ConnectionEnded as end:
        return int(str(end)[:3])


def consume(client: RawClient, queue: bytes, tag: bytes = b"tag", *, channel: int = 1, **options: Any) -> None:
    """Send basic.consume and wait for its answer."""
    ask(client, channel, methods.BasicConsume(queue, tag, **options).encode(), methods.BasicConsumeOk.KEY)
