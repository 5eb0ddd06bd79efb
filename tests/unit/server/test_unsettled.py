"""The count of unsettled deliveries on a channel that is passed through, checked against a list of all tags."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtx.server.alongside import unsettled_deliveries
from dtx.server.alongside.unsettled_deliveries import ANSWERS, Tally, UnsettledDeliveries
from dtx.store.rabbitmq.consumed_queues import ConsumedQueues
from dtx.store.rabbitmq.upstream import ExclusiveQueues
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.codec import Sender
from dtx.wire.amqp09.frames import FrameSplitter, method_frame

NUMBER = 1
UPSTREAM = 7
QUEUE = b"queue"
TAG = b"tag"


def answer(key: int, *rest: bytes) -> bytes:
    return key.to_bytes(4, "big") + b"".join(rest)


CONSUME_OK = answer(methods.BasicConsumeOk.KEY, b"\x03tag")
_SETTLE = {"ack": methods.BasicAck, "nack": methods.BasicNack, "reject": methods.BasicReject}
CANCEL_OK = answer(methods.BasicCancelOk.KEY, b"\x03tag")
CANCEL = answer(methods.BasicCancel.KEY, b"\x03tag\x00")
RECOVER_OK = answer(methods.BasicRecoverOk.KEY)
GET_EMPTY = answer(methods.BasicGetEmpty.KEY, b"\x00")


def get_ok(tag: int) -> bytes:
    return answer(methods.BasicGetOk.KEY, tag.to_bytes(8, "big"), bytes(7))


class Watched:
    """One channel as a session watches it."""

    def __init__(self) -> None:
        self.queues = ConsumedQueues(ExclusiveQueues())
        self.tally = Tally(self.queues)
        self.unsettled = UnsettledDeliveries()

    def open(self) -> str | None:
        """The reason why the channel cannot be selected."""
        return self.tally.open

    def ask(self, payload: bytes) -> None:
        """Pass basic.consume or basic.get to the broker."""
        key = int.from_bytes(payload[:4], "big")
        self.tally.asked(self.queues.requested(key, payload), is_get=key == methods.BasicGet.KEY)
        self.unsettled.sort(NUMBER, UPSTREAM, self.tally)

    def hear(self, *payloads: bytes) -> None:
        """Pass what the broker sent in one read."""
        buffer, frames = FrameSplitter().feed(b"".join(method_frame(UPSTREAM, payload) for payload in payloads))
        for key, _, start, end in frames:
            if key in unsettled_deliveries.ANSWERS:
                method = methods.METHODS[key].decode(buffer[start + 7 : end - 1])
                self.tally.answered(method)
                self.queues.answered(method)
        if self.unsettled.by_upstream:
            self.unsettled.from_broker(buffer, frames)

    def settle(self, *payloads: bytes, channel: int = NUMBER) -> None:
        """Pass what the client sent in one read."""
        if self.unsettled.by_number:
            data = b"".join(method_frame(channel, payload) for payload in payloads)
            self.unsettled.from_client(*FrameSplitter().feed(data))

    def consume(self, *, no_ack: bool = False, tag: bytes = TAG) -> None:
        """Start a consumer, and pass its answer."""
        self.ask(methods.BasicConsume(QUEUE, tag, no_ack=no_ack).encode())
        self.hear(answer(methods.BasicConsumeOk.KEY, bytes((len(tag),)), tag))

    def deliver(self, *tags: int) -> None:
        """Pass deliveries in one read."""
        self.hear(*(methods.BasicDeliver(TAG, tag, False, b"", QUEUE).encode() for tag in tags))


@pytest.fixture
def watched() -> Watched:
    return Watched()


Step = tuple[str, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "deliver",
                "get",
                "get without ack",
                "get nothing",
                "ack",
                "nack",
                "reject",
                "ack up to",
                "nack up to",
                "ack all",
                "ack unknown",
                "recover",
            ]
        ),
        st.integers(0, 1 << 16),
    ),
    max_size=40,
)


@given(STEPS)
def test_nothing_is_open_exactly_when_the_tally_reports_it(steps: list[Step]) -> None:
    """basic.ack: "multiple: if zero, and the multiple bit is one, this indicates all outstanding messages"."""
    channel = Watched()
    channel.consume()
    last = 0
    kept: list[int] = []
    for step, number in steps:
        chosen = kept[number % len(kept)] if kept else 0
        match step:
            case "deliver":
                tags = range(last + 1, last + 2 + number % 4)
                last = tags[-1]
                kept += tags
                channel.deliver(*tags)
            case "get" | "get without ack":
                last += 1
                kept += [last] if step == "get" else []
                channel.ask(methods.BasicGet(QUEUE, no_ack=step != "get").encode())
                channel.hear(get_ok(last))
            case "get nothing":
                channel.ask(methods.BasicGet(QUEUE).encode())
                channel.hear(GET_EMPTY)
            case "ack" | "nack" | "reject" if chosen:
                kept.remove(chosen)
                channel.settle(_SETTLE[step](chosen).encode())
            case "ack up to" | "nack up to" if chosen:
                kept = [tag for tag in kept if tag > chosen]
                row = methods.BasicAck if step == "ack up to" else methods.BasicNack
                channel.settle(row(chosen, multiple=True).encode())
            case "ack all":
                kept = []
                channel.settle(methods.BasicAck(0, multiple=True).encode())
            case "ack unknown":
                channel.settle(methods.BasicAck(last + 1).encode(), methods.BasicAck(last + 5, multiple=True).encode())
            case "recover":
                kept = []
                channel.hear(RECOVER_OK)
            case _:
                pass
        assert channel.open() == "that has consumers: cancel them first, and wait for cancel-ok"
    channel.hear(CANCEL_OK)
    assert channel.open() == (f"with {len(kept)} unacknowledged deliveries: settle them first" if kept else None)


def test_an_unanswered_get_may_bring_a_delivery(watched: Watched) -> None:
    watched.ask(methods.BasicGet(QUEUE).encode())
    assert watched.open() == "with a basic.get that is not answered yet"
    watched.hear(GET_EMPTY)
    assert watched.open() is None
    watched.ask(methods.BasicConsume(QUEUE, TAG).encode())
    assert watched.open() is not None
    watched.hear(CONSUME_OK, CANCEL)
    assert watched.open() is None


def test_a_consumer_without_an_answer_is_one(watched: Watched) -> None:
    """no-wait: "the server will not respond to the method"."""
    watched.ask(methods.BasicConsume(QUEUE, TAG, no_wait=True).encode())
    assert watched.open() is not None
    watched.hear(CANCEL_OK)
    assert watched.open() is None


def test_deliveries_without_acknowledgement_are_not_watched(watched: Watched) -> None:
    watched.consume(no_ack=True)
    watched.ask(methods.BasicGet(QUEUE, no_ack=True).encode())
    watched.hear(get_ok(5))
    assert not watched.unsettled.by_number
    watched.hear(CANCEL_OK)
    assert watched.open() is None


@pytest.mark.parametrize("first", [True, False])
def test_both_kinds_of_consumers_on_one_channel_are_not_counted(watched: Watched, first: bool) -> None:
    watched.consume(no_ack=first)
    watched.consume(no_ack=not first, tag=b"other")
    assert not watched.unsettled.by_number
    assert not watched.unsettled.by_upstream
    watched.hear(CANCEL_OK, answer(methods.BasicCancelOk.KEY, b"\x05other"))
    assert watched.open() == "whose deliveries dtx could not track: select the channel before it consumes"


def test_tags_settled_out_of_order_are_remembered_within_limits(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unsettled_deliveries, "_MOST_BEYOND", 3)
    watched.consume()
    watched.deliver(*range(1, 10))
    watched.settle(
        methods.BasicAck(4).encode(),
        methods.BasicAck(3).encode(),
        methods.BasicAck(2).encode(),
        methods.BasicAck(1).encode(),
    )
    watched.hear(CANCEL_OK)
    assert watched.open() == "with 5 unacknowledged deliveries: settle them first"
    watched.settle(*(methods.BasicAck(tag).encode() for tag in range(9, 4, -1)))
    assert watched.open() == "whose deliveries dtx could not track: select the channel before it consumes"


def test_settling_up_to_growing_tags_checks_each_tag_once() -> None:
    """With 9,000 remembered tags, each of 3,000 settlements looked at all of them: one second for one read."""
    seconds = []
    for remembered in ((), range(4_000, 22_000, 2)):
        rounds = []
        for _ in range(3):  # the best one: the garbage collector may run in the others
            channel = Watched()
            channel.consume()
            channel.deliver(22_000)
            channel.settle(*(methods.BasicAck(tag).encode() for tag in remembered))
            began = time.thread_time()
            channel.settle(*(methods.BasicAck(tag, multiple=True).encode() for tag in range(1, 3_001)))
            rounds.append(time.thread_time() - began)
            channel.hear(CANCEL_OK)
            assert channel.open() == f"with {19_000 - len(remembered)} unacknowledged deliveries: settle them first"
        seconds.append(min(rounds))
    assert seconds[1] < 10 * seconds[0]


@pytest.mark.parametrize("key", [methods.BasicConsume.KEY, methods.BasicGet.KEY])
def test_deliveries_that_only_the_broker_can_count_are_ignored(watched: Watched, key: int) -> None:
    watched.ask(answer(key, b"\x00"))
    assert watched.open() is not None


def test_malformed_settlements_settle_nothing(watched: Watched) -> None:
    watched.consume()
    watched.deliver(1)
    watched.settle(
        methods.BasicAck(1).encode() + b"\x00", methods.BasicAck(1).encode()[:-1], methods.BasicQos(0, 1).encode()
    )
    watched.settle(methods.BasicAck(1).encode(), channel=NUMBER + 1)
    watched.hear(CANCEL_OK)
    assert watched.open() is not None


def test_a_recover_settles_only_earlier_deliveries(watched: Watched) -> None:
    """A delivery behind its answer in the same read is a new one."""
    watched.consume()
    watched.deliver(1)
    watched.hear(RECOVER_OK, methods.BasicDeliver(TAG, 2, True, b"", QUEUE).encode())
    watched.hear(CANCEL_OK)
    assert watched.open() == "with 1 unacknowledged deliveries: settle them first"


def test_channels_are_separate() -> None:
    both = UnsettledDeliveries()
    channels = (Watched(), Watched())
    for number, channel in enumerate(channels, 1):
        channel.consume()
        both.sort(number, number, channel.tally)
    frames = (methods.BasicDeliver(TAG, 1, False, b"", QUEUE).frame(2), methods.BasicAck(1).frame(9))
    both.from_broker(*FrameSplitter().feed(b"".join(frames)))
    first, second = both.by_number[1], both.by_number[2]
    for channel in channels:
        channel.hear(CANCEL_OK)
    assert first.open is None
    assert second.open is not None
    both.drop(1, 1, second)
    assert both.by_number[1] is first
    both.drop(2, 2, second)
    assert list(both.by_upstream.values()) == [first]


def test_a_proxy_inspects_every_method_that_the_tally_needs() -> None:
    assert methods.watched(Sender.SERVER) >= ANSWERS
    needed = (methods.BasicConsume, methods.BasicGet, methods.QueueDeclare, methods.QueueDelete)
    assert methods.watched(Sender.CLIENT) >= {row.KEY for row in needed}
