"""The fates of messages in confirm mode: the messages of a number, and which message was returned."""

from collections.abc import Sequence
from typing import Any

import pytest

from dtx.store.rabbitmq.confirm_channel import ConfirmChannel, MessageFate
from dtx.store.work import HeldPublish
from dtx.wire.amqp09 import methods, properties
from dtx.wire.amqp09.connection import ConnectionEngine
from dtx.wire.amqp09.frames import header_frame, method_frame
from dtx.wire.amqp09.methods import ChannelClose
from dtx.wire.amqp09.properties import Property
from dtx.wire.amqp09.settings import EngineSettings, PeerEnd
from dtx.wire.amqp09.tables import entry
from tests.support.raw import body_frames

CHANNEL = 3


class Broker:
    """The connection to the broker, and the broker's answers on it."""

    is_lost = False

    def __init__(self) -> None:
        self.engine = ConnectionEngine(EngineSettings(), PeerEnd.CLIENT)
        self.engine.adopt(methods.ConnectionTuneOk(100, 4096, 0))
        self.channel = self.engine.open_channel(CHANNEL)
        list(self.engine.receive(methods.ChannelOpenOk().frame(CHANNEL)))
        self.engine.data_to_send()
        self.handlers: dict[int, Any] = {}
        self.sent: list[bytes] = []
        self.freed = self.aborted = False

    def flush(self) -> None:
        self.sent += map(bytes, self.engine.data_to_send())

    def free(self, number: int) -> None:
        del self.handlers[number]
        self.freed = True

    def abort(self, reason: str) -> None:
        self.aborted = True

    def say(self, *frames: bytes) -> None:
        for frame in frames:
            kind = frame[0]
            key = int.from_bytes(frame[7:11], "big") if kind == 1 else kind
            self.handlers[CHANNEL].frame(key, frame, 0, len(frame))

    def confirm(self, tag: int, *, multiple: bool = False, taken: bool = True) -> None:
        settle = (
            methods.BasicAck(tag, multiple).encode()
            if taken
            else methods.BasicNack(tag, multiple, requeue=False).encode()
        )
        self.say(method_frame(CHANNEL, settle))

    def give_back(self, message: HeldPublish) -> None:
        returned = methods.BasicReturn(312, b"NO_ROUTE", message.exchange, message.routing_key).encode()
        header = header_frame(CHANNEL, methods.BasicReturn.KEY >> 16, len(message.body), message.properties)
        self.say(method_frame(CHANNEL, returned), header, *body_frames(CHANNEL, message.body, 0))


class Owner:
    """The publisher of the messages."""

    def __init__(self) -> None:
        self.heard: list[tuple[list[object], MessageFate]] = []
        self.close: ChannelClose | None = None

    def reported(self, names: Sequence[object], fate: MessageFate) -> None:
        self.heard.append((list(names), fate))

    def closed(self, close: ChannelClose) -> None:
        self.close = close


def a_message(body: bytes = b"same", key: bytes = b"k", kept: bytes = b"") -> HeldPublish:
    table = entry(b"x-kept-s", b"x", kept) + entry(b"n", b"S", b"anything")
    return HeldPublish(b"x", key, False, properties.build({Property.HEADERS: table}), body)


@pytest.fixture
def broker() -> Broker:
    return Broker()


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
def channel(broker: Broker, owner: Owner) -> ConfirmChannel:
    upstream: Any = broker
    return ConfirmChannel(upstream, broker.channel, b"x-kept-", owner)


def test_numbers_are_those_of_the_messages_in_their_order(
    channel: ConfirmChannel, broker: Broker, owner: Owner
) -> None:
    for name in range(6):
        channel.publish(name, a_message())
    broker.confirm(2)
    broker.confirm(4, multiple=True)
    broker.confirm(4)  # confirmed already
    broker.confirm(5, taken=False)
    broker.confirm(0, multiple=True)
    assert owner.heard == [
        ([1], MessageFate.CONFIRMED),
        ([0, 2, 3], MessageFate.CONFIRMED),
        ([4], MessageFate.REFUSED),
        ([5], MessageFate.CONFIRMED),
    ]


def test_a_message_is_published_as_mandatory(channel: ConfirmChannel, broker: Broker) -> None:
    """Otherwise a message that no queue took would not be returned."""
    channel.publish("one", a_message())
    publish = methods.BasicPublish.decode(broker.sent[0][7 : 7 + int.from_bytes(broker.sent[0][3:7], "big")])
    assert publish == methods.BasicPublish(b"x", b"k", methods.MANDATORY)


@pytest.mark.parametrize("other", [a_message(b"other"), a_message(key=b"j"), a_message(kept=b"subject")])
def test_returned_messages_are_matched_by_routing_and_visible_properties(
    channel: ConfirmChannel, broker: Broker, owner: Owner, other: HeldPublish
) -> None:
    messages = [a_message(), other, a_message(), other]
    for name, message in enumerate(messages):
        channel.publish(name, message)
    broker.give_back(other)
    broker.give_back(other)
    broker.confirm(4, multiple=True)
    assert owner.heard == [([0, 2], MessageFate.CONFIRMED), ([1, 3], MessageFate.RETURNED)]


def test_additions_of_the_broker_to_returned_messages_are_ignored(
    channel: ConfirmChannel, broker: Broker, owner: Owner
) -> None:
    sent = a_message(kept=b"s")
    channel.publish("one", sent)
    raw = properties.put(properties.set_header(sent.properties, b"x-of-the-broker", b"1"), Property.PRIORITY, b"\x00")
    broker.give_back(HeldPublish(sent.exchange, sent.routing_key, False, raw, sent.body))
    broker.confirm(1)
    assert owner.heard == [(["one"], MessageFate.RETURNED)]


def test_a_return_of_nothing_that_was_sent_ends_the_connection(
    channel: ConfirmChannel, broker: Broker, owner: Owner
) -> None:
    """A message that may be the returned one must not be reported as taken."""
    channel.publish("one", a_message())
    broker.give_back(a_message(b"another"))
    assert broker.aborted
    assert owner.heard == []


def test_the_broker_closes_the_channel(channel: ConfirmChannel, broker: Broker, owner: Owner) -> None:
    channel.publish("one", a_message())
    broker.say(methods.ChannelClose(404, b"no exchange", methods.BasicPublish.KEY).frame(CHANNEL))
    assert owner.close == methods.ChannelClose(404, b"no exchange", methods.BasicPublish.KEY)
    assert broker.freed
    before = len(broker.sent)
    channel.publish("two", a_message())
    assert len(broker.sent) == before
    done: list[bool] = []
    channel.close(lambda: done.append(True))
    assert done == [True]


def test_the_end_waits_for_pending_publishes(channel: ConfirmChannel, broker: Broker, owner: Owner) -> None:
    channel.publish("one", a_message())
    done: list[bool] = []
    channel.close(lambda: done.append(True))
    broker.confirm(1)
    assert (owner.heard, done) == ([(["one"], MessageFate.CONFIRMED)], [])
    broker.say(methods.ChannelCloseOk().frame(CHANNEL))
    assert done == [True]
    assert broker.freed


def test_the_end_comes_with_that_of_the_connection(channel: ConfirmChannel, broker: Broker) -> None:
    done: list[bool] = []
    channel.close(lambda: done.append(True))
    broker.handlers[CHANNEL].lost("gone")
    assert done == [True]
