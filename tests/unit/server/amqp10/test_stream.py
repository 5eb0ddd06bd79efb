"""Events on a link from a stream at moments that a real broker does not produce on demand."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from dtx.server.alongside.amqp10.origins import StreamOrigin
from dtx.server.alongside.amqp10.upstream import STREAM_OFFSET
from dtx.server.amqp10.nodes import Handed
from dtx.store.rabbitmq.upstream import UpstreamChannelClosed, UpstreamLost
from dtx.store.work import Delivery
from dtx.wire.amqp09 import methods, properties, tables
from dtx.wire.amqp09.frames import method_frame
from dtx.wire.amqp09.methods import ChannelClose
from dtx.wire.amqp09.properties import Property
from dtx.wire.amqp09.tables import put_short
from dtx.wire.amqp10.errors import AmqpError, Condition
from dtx.wire.amqp10.values import Timestamp, Value

GONE = ChannelClose(404, b"no stream", 0)
REFUSED = ChannelClose(403, b"no", 0)


class Channel:
    """The broker's side, which does nothing on its own."""

    def __init__(self) -> None:
        self.owner: Any = None
        self.on_message: Any = None
        self.asked: list[int] = []
        self.payloads: list[bytes] = []
        self.acked: list[Delivery] = []

    def request(self, key: int, payload: bytes) -> None:
        self.asked.append(key)
        self.payloads.append(payload)

    def ack(self, deliveries: list[Delivery]) -> None:
        self.acked += deliveries

    def say(self, key: int, tag: bytes) -> None:
        """Answer a request."""
        frame = method_frame(1, key.to_bytes(4, "big") + put_short(tag))
        self.owner.forward(frame, 0, len(frame))

    def send(self, tag: int, body: bytes | None, raw: bytes = properties.EMPTY) -> None:
        """Send a message. ``None`` as body means that there was no memory for it."""
        self.on_message(Delivery(self.owner, tag, b"s", b"", b"s", False, raw, body, 1), b"")


class World:
    """A link, its connection, and the channel behind it."""

    credit = 10
    draining = full = False

    def __init__(self, offset: Value = None) -> None:
        self.home: Any = self
        self.channel = Channel()
        self.got: list[bytes] = []
        self.failed: list[AmqpError] = []
        taking: Any = self.channel
        nodes: Any = self
        self.origin = StreamOrigin(nodes, taking, b"s", {}, offset)

    async def opened(self) -> None:
        """The broker has accepted the consumer, and the link is not attached yet."""
        opening = asyncio.create_task(self.origin.open())
        await asyncio.sleep(0)
        self.channel.say(methods.BasicConsumeOk.KEY, b"1")
        await opening

    def touch(self, origin: StreamOrigin) -> None:
        origin.flush()

    def flush_soon(self, work: Callable[[], None]) -> None:
        work()

    def deliver(self, taken: object, message: Handed) -> None:
        self.got.append(message.content.body)

    def drained(self) -> None:
        raise AssertionError("nobody drains")

    def fail(self, error: AmqpError) -> None:
        self.failed.append(error)


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (lambda origin: origin.upstream_closed(REFUSED), UpstreamChannelClosed),
        (lambda origin: origin.upstream_lost("a plug was pulled"), UpstreamLost),
    ],
)
async def test_an_end_before_the_brokers_answer_refuses_the_attach(
    event: Callable[[StreamOrigin], None], error: type[Exception]
) -> None:
    world = World()
    opening = asyncio.create_task(world.origin.open())
    await asyncio.sleep(0)
    event(world.origin)
    with pytest.raises(error):
        await opening


@pytest.mark.parametrize(
    ("event", "condition"),
    [
        (lambda world: world.channel.say(methods.BasicCancel.KEY, b"1"), Condition.RESOURCE_DELETED),
        (lambda world: world.origin.upstream_closed(GONE), Condition.RESOURCE_DELETED),
        (lambda world: world.origin.upstream_closed(REFUSED), Condition.UNAUTHORIZED_ACCESS),
        (lambda world: world.origin.upstream_lost("that is said elsewhere"), None),
    ],
)
async def test_an_end_before_the_link_exists_ends_it_then(
    event: Callable[[World], None], condition: Condition | None
) -> None:
    world = World()
    await world.opened()
    event(world)
    assert world.failed == []
    world.origin.begin(world)
    assert [error.condition for error in world.failed] == ([] if condition is None else [condition])


@pytest.mark.parametrize("offset", [None, Timestamp((1 << 63) - 1)], ids=["none", "a-time-that-cannot-be-said"])
async def test_a_stream_reader_without_a_start_has_an_offset(offset: Value) -> None:
    """Only a stream accepts it: a queue of the same name would remove each message at its acknowledgement."""
    world = World(offset)
    await world.opened()
    assert world.channel.asked[-1] == methods.BasicConsume.KEY
    assert world.channel.payloads[-1].endswith(tables.entry(STREAM_OFFSET, b"S", b"next"))


async def test_messages_that_come_before_the_link_wait_for_it() -> None:
    world = World()
    await world.opened()
    world.channel.send(1, b"one")
    assert world.got == []
    world.origin.begin(world)
    assert (world.got, [delivery.tag for delivery in world.channel.acked]) == ([b"one"], [1])


async def test_without_memory_a_message_comes_again_of_the_next_consumer() -> None:
    world = World()
    await world.opened()
    world.origin.begin(world)
    raw = properties.build({Property.HEADERS: tables.entry(STREAM_OFFSET, b"l", (7).to_bytes(8, "big"))})
    world.channel.send(1, None, raw)
    world.channel.send(2, b"it comes again, too")
    assert world.channel.asked[-1] == methods.BasicCancel.KEY
    world.channel.say(methods.BasicCancelOk.KEY, b"1")
    assert world.channel.asked[-2:] == [methods.BasicQos.KEY, methods.BasicConsume.KEY]
    world.channel.send(3, b"again", raw)
    assert (world.got, world.failed) == ([b"again"], [])


async def test_an_unreadable_position_in_a_stream_ends_the_link() -> None:
    """The position to resume from is unknown, and no message may be skipped."""
    world = World()
    await world.opened()
    world.origin.begin(world)
    world.channel.send(1, None, b"\x20\x00\x00\x00\x00\x01\xff")
    assert [error.condition for error in world.failed] == [Condition.DECODE_ERROR]
