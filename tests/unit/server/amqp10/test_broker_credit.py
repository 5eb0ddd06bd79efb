"""The credit of a link with a broker that knows only prefetch counts: it is never exceeded, and is used in the end."""

from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtx.server.alongside.amqp10.origins import BrokerOrigin
from dtx.server.amqp10.nodes import Handed
from dtx.store.work import Delivery
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.frames import method_frame
from dtx.wire.amqp09.properties import EMPTY
from dtx.wire.amqp09.tables import put_short


class Broker:
    """The channel and the queue behind it. Each step delivers a message or handles the oldest request.

    Args:
        messages: number of ready messages.
    """

    def __init__(self, messages: int) -> None:
        self.ready = messages
        self.owner: Any = None
        self.on_message: Any = None
        self._asked: deque[tuple[int, bytes]] = deque()
        self._tag = 0
        self._prefetch = 0
        self._consumer: bytes | None = None
        self.consumers = 0
        """Number of consumers so far."""
        self._room = 0
        self._of: dict[int, bytes | None] = {}

    # -- what the origin asks

    def request(self, key: int, payload: bytes) -> None:
        early = key == methods.BasicCancel.KEY and any(asked == methods.BasicConsume.KEY for asked, _ in self._asked)
        assert not early, "RabbitMQ 3.10 ends the connection on a cancel before consume-ok"
        self._asked.append((key, payload))

    def ack(self, deliveries: Any) -> None:
        self._asked += [(methods.BasicAck.KEY, delivery.tag.to_bytes(8, "big")) for delivery in deliveries]

    def nack(self, deliveries: Any, *, requeue: bool) -> None:
        assert requeue
        self._asked += [(methods.BasicNack.KEY, delivery.tag.to_bytes(8, "big")) for delivery in deliveries]

    def reject(self, deliveries: Any, *, requeue: bool) -> None:
        assert requeue
        self._asked += [(methods.BasicReject.KEY, delivery.tag.to_bytes(8, "big")) for delivery in deliveries]

    def detach(self) -> None:
        self._consumer = None

    # -- what it does

    @property
    def has_work(self) -> bool:
        return bool(self._asked) or (self._consumer is not None and self._room > 0 and self.ready > 0)

    def step(self, *, deliver: bool) -> None:
        """Deliver a message, or handle a request."""
        if deliver and self._consumer is not None and self._room > 0 and self.ready > 0:
            self._room -= 1
            self._send(self._consumer)
        elif self._asked:
            self._do(*self._asked.popleft())
        elif not deliver:
            self.step(deliver=True)

    def _do(self, key: int, payload: bytes) -> None:
        match key:
            case methods.BasicQos.KEY:
                self._prefetch = methods.BasicQos.decode(payload).prefetch_count
                assert self._prefetch > 0, "0 means no limit"
            case methods.BasicConsume.KEY:
                assert self._consumer is None, "two consumers"
                self._consumer = methods.BasicConsume.decode(payload).consumer_tag
                self.consumers += 1
                self._room = self._prefetch
                self._say(methods.BasicConsumeOk.HEAD + put_short(self._consumer))
            case methods.BasicCancel.KEY:
                tag = methods.BasicCancel.decode(payload).consumer_tag
                assert tag == self._consumer
                self._consumer = None
                self._say(methods.BasicCancelOk.HEAD + put_short(tag))
            case methods.BasicGet.KEY:
                if self.ready:
                    self._send(None)
                else:
                    self._say(methods.BasicGetEmpty.HEAD + b"\x00")
            case _:
                of = self._of.pop(int.from_bytes(payload, "big"))
                self._room += of is not None and of == self._consumer
                self.ready += key in (methods.BasicNack.KEY, methods.BasicReject.KEY)

    def _send(self, consumer: bytes | None) -> None:
        self.ready -= 1
        self._tag += 1
        self._of[self._tag] = consumer
        delivery = Delivery(self.owner, self._tag, b"q", b"", b"q", False, EMPTY, b"x", 1)
        self.on_message(delivery, b"")

    def _say(self, payload: bytes) -> None:
        frame = method_frame(1, payload)
        self.owner.forward(frame, 0, len(frame))


class Client:
    """The link, its connection and its client."""

    def __init__(self, messages: int) -> None:
        self.broker = Broker(messages)
        self.credit = 0
        self.draining = False
        self.full = False
        self.got: list[object] = []
        self.drains = 0
        self._dirty = False
        taking: Any = self.broker
        nodes: Any = self
        self.origin = BrokerOrigin(nodes, taking, b"q", None, made=False, filters={})
        self.origin.begin(self)

    def touch(self, origin: BrokerOrigin) -> None:
        self._dirty = True

    def flush(self) -> None:
        while self._dirty:
            self._dirty = False
            self.origin.flush()

    def deliver(self, taken: object, message: Handed) -> None:
        assert self.credit > 0, "more than the credit"
        assert not self.full
        self.credit -= 1
        self.got.append(taken)

    def drained(self) -> None:
        self.drains += 1
        self.credit = 0

    def fail(self, error: Exception) -> None:
        raise error

    def flow(self, credit: int, *, drain: bool = False) -> None:
        """The client sends its credit."""
        self.credit, self.draining = credit, drain
        self.origin.follow()

    def settle(self, count: int) -> None:
        """The client accepts its oldest deliveries."""
        done, self.got = self.got[:count], self.got[count:]
        if done:
            self.origin.accept(done)

    def rest(self) -> None:
        """Run until nothing more happens."""
        self.flush()
        while self.broker.has_work:
            self.broker.step(deliver=True)
            self.flush()


@pytest.mark.parametrize("credit", [1, 2, 10, 16, 17, 100, 1000])
def test_all_credit_is_used_and_no_more(credit: int) -> None:
    client = Client(2000)
    client.flow(credit)
    client.rest()
    assert (len(client.got), client.credit, client.broker.ready) == (credit, 0, 2000 - credit)
    client.settle(credit)
    client.rest()
    assert client.broker.ready == 2000 - credit


def test_an_earlier_settlement_and_a_later_credit_keep_the_consumer() -> None:
    client = Client(10_000)
    client.flow(200)
    client.rest()
    client.settle(200)
    client.flow(200)
    client.flush()
    before = client.broker.consumers
    for _ in range(20):
        for _ in range(50):
            client.broker.step(deliver=True)
            client.flush()
        client.settle(len(client.got))
        client.flush()
        client.flow(200)
        client.flush()
    assert client.broker.consumers - before <= 1


def test_a_drain_delivers_messages_then_returns_the_credit() -> None:
    client = Client(3)
    client.flow(10, drain=True)
    client.rest()
    assert (len(client.got), client.credit, client.drains) == (3, 0, 1)
    client.flow(2, drain=True)
    client.rest()
    assert client.drains == 2
    client.broker.ready = 5
    client.flow(4)
    client.rest()
    assert len(client.got) == 7


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("flow"), st.integers(0, 60)),
        st.tuples(st.just("drain"), st.integers(0, 60)),
        st.tuples(st.just("settle"), st.integers(1, 40)),
        st.tuples(st.just("release"), st.integers(1, 3)),
        st.tuples(st.just("broker"), st.integers(0, 30)),
        st.tuples(st.just("full"), st.integers(0, 1)),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=200)
@given(steps=_STEPS, eager=st.booleans())
def test_credit_is_kept_and_used_in_any_order(steps: list[tuple[str, int]], eager: bool) -> None:
    """Deliveries never exceed the credit (:meth:`Client.deliver`). In the end no usable credit is left."""
    client = Client(500)
    for what, number in steps:
        match what:
            case "flow" | "drain":
                client.flow(number, drain=what == "drain")
            case "settle":
                client.settle(number)
            case "release":
                given_back, client.got = client.got[:number], client.got[number:]
                if given_back:
                    client.origin.requeue(given_back)
            case "full":
                client.full = bool(number)
                if not client.full:
                    client.origin.resume()
            case _:
                for _ in range(number):
                    client.broker.step(deliver=eager)
                    client.flush()
        client.flush()
    client.full = False
    client.origin.resume()
    client.flow(7)
    client.rest()
    assert client.credit == 0 or client.broker.ready == 0
    total = client.broker.ready
    client.origin.requeue(client.got)
    client.rest()
    assert client.broker.ready >= total


_GRANTS = st.lists(
    st.tuples(st.sampled_from(("grant", "settle", "both", "broker")), st.integers(0, 40)), min_size=1, max_size=60
)


@settings(deadline=None, max_examples=200)
@given(steps=_GRANTS, eager=st.booleans())
def test_no_message_without_credit_leaves_the_queue(steps: list[tuple[str, int]], eager: bool) -> None:
    """Messages that waited here for credit would be kept from others, and return marked as redelivered."""
    client, settled = Client(500), 0
    for what, number in steps:
        if what in ("settle", "both"):
            settled += len(client.got[:number])
            client.settle(number)
        if what in ("grant", "both"):
            client.flow(client.credit + number)
        client.flush()
        if what == "broker":
            for _ in range(number):
                client.broker.step(deliver=eager)
                client.flush()
                assert client.broker.ready + len(client.got) + settled == 500
    client.rest()
    assert client.broker.ready + len(client.got) + settled == 500
    assert client.credit == 0 or client.broker.ready == 0
