"""The channel that takes deliveries for branches, without a broker behind it."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from functools import reduce
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import pytest

from dtx.log.records import Unit
from dtx.store.api import UnitOutcome
from dtx.store.rabbitmq.capture import check_consume, check_settle
from dtx.store.rabbitmq.consume_channel import ConsumeChannel
from dtx.store.rabbitmq.consumed_queues import ConsumedQueues
from dtx.store.rabbitmq.upstream import ExclusiveQueues
from dtx.store.work import Budget, Delivery
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.frames import HEADER, FrameSplitter, header_frame, method_frame
from dtx.wire.amqp09.properties import EMPTY, Property, build
from dtx.wire.amqp09.tables import MAX_DEPTH, entry, put_short
from dtx.xa.codes import ReplyCode, XaError


class Upstream:
    """A connection that records what is written to it."""

    lock = ""

    def __init__(self) -> None:
        self.handlers: dict[int, Any] = {}
        self.exclusive = ExclusiveQueues()
        self.written: list[bytes] = []
        self.aborted: str | None = None

    def free(self, number: int) -> None:
        """The channel's number can be used again."""

    def abort(self, reason: str) -> None:
        """End the connection at once."""
        self.aborted = reason

    def write_steps(self, *steps: tuple[Iterable[bytes], object]) -> None:
        """Write frames in steps."""
        for frames, _ in steps:
            self.write(b"".join(frames))

    def write(self, data: bytes) -> None:
        """Record methods without their frames."""
        buffer, frames = FrameSplitter(0).feed(bytes(data))
        self.written += [buffer[start + 7 : end - 1] for _, _, start, end in frames]


def delivery(consumer: bytes, tag: int) -> list[tuple[int, bytes]]:
    """A message without a body, as frames with their keys."""
    method = methods.BasicDeliver(consumer, tag, redelivered=False, exchange=b"", routing_key=b"q").encode()
    return [(methods.BasicDeliver.KEY, method_frame(1, method)), (HEADER, header_frame(1, 60, 0, EMPTY))]


@pytest.mark.parametrize("no_ack", [False, True], ids=["with acknowledgements", "without"])
def test_late_deliveries_of_a_lost_client_are_returned(
    no_ack: bool,
) -> None:
    """The broker closes a channel that refuses an unknown delivery, and a branch holds other deliveries there."""
    upstream: Any = Upstream()
    taking = ConsumeChannel(upstream, 1, 1000, Budget(1000), ConsumedQueues(upstream.exclusive), upstream)
    taking.owner = SimpleNamespace(forward=lambda *_: None)

    def say(*frames: tuple[int, bytes]) -> None:
        for key, frame in frames:
            taking.frame(key, frame, 0, len(frame))

    taking.request(methods.BasicConsume.KEY, methods.BasicConsume(b"q", b"held").encode())
    taking.request(methods.BasicConsume.KEY, methods.BasicConsume(b"q", b"late", no_ack=no_ack).encode())
    for tag in (b"held", b"late"):
        payload = methods.BasicConsumeOk.HEAD + put_short(tag)
        say((methods.BasicConsumeOk.KEY, method_frame(1, payload)))
    say(*delivery(b"held", 1))
    taking.hold(taking.select(methods.BasicAck.decode(methods.BasicAck(1).encode())), "a branch")
    taking.detach()
    upstream.written.clear()
    say(*delivery(b"late", 2))
    assert [payload for payload in upstream.written if payload[:4] == methods.BasicNack.HEAD] == (
        [] if no_ack else [methods.BasicNack(2, requeue=True).encode()]
    )


def test_a_consumer_that_begins_after_its_client_is_cancelled() -> None:
    """It would take messages for as long as a branch holds others."""
    upstream: Any = Upstream()
    taking = ConsumeChannel(upstream, 1, 1000, Budget(1000), ConsumedQueues(upstream.exclusive), upstream)
    taking.owner = SimpleNamespace(forward=lambda *_: None)
    taking.request(methods.BasicGet.KEY, methods.BasicGet(b"q").encode())
    taking.request(methods.BasicConsume.KEY, methods.BasicConsume(b"q", b"late").encode())
    for key, frame in (
        (
            methods.BasicGetOk.KEY,
            methods.BasicGetOk(1, redelivered=False, exchange=b"", routing_key=b"q", message_count=0).frame(1),
        ),
        *delivery(b"", 1)[1:],
    ):
        taking.frame(key, frame, 0, len(frame))
    taking.hold(taking.select(methods.BasicAck.decode(methods.BasicAck(1).encode())), "a branch")
    taking.detach()
    upstream.written.clear()
    frame = method_frame(1, methods.BasicConsumeOk.HEAD + put_short(b"late"))
    taking.frame(methods.BasicConsumeOk.KEY, frame, 0, len(frame))
    assert upstream.written == [methods.BasicCancel(b"late", no_wait=True).encode()]


def test_a_consumer_learns_the_name_of_the_last_queue() -> None:
    """A client need not wait for declare-ok. A put-back must not go to the queue that was declared before."""
    upstream: Any = Upstream()
    taking = ConsumeChannel(upstream, 1, 1000, Budget(1000), ConsumedQueues(upstream.exclusive, b"before"), upstream)
    taking.owner = SimpleNamespace(forward=lambda *_: None)

    def say(key: int, payload: bytes) -> None:
        frame = method_frame(1, payload)
        taking.frame(key, frame, 0, len(frame))

    def declared(name: bytes) -> None:
        say(methods.QueueDeclareOk.KEY, methods.QueueDeclareOk.HEAD + put_short(name) + bytes(8))

    def consumed(tag: bytes) -> None:
        say(methods.BasicConsumeOk.KEY, methods.BasicConsumeOk.HEAD + put_short(tag))

    def consume(tag: bytes) -> None:
        taking.request(methods.BasicConsume.KEY, methods.BasicConsume(b"", tag).encode())

    consume(b"a")
    taking.request(methods.QueueDeclare.KEY, methods.QueueDeclare(b"").encode())
    consume(b"b")
    taking.request(methods.QueueDeclare.KEY, methods.QueueDeclare(b"named").encode())
    consume(b"c")
    consumed(b"a")
    declared(b"amq.gen-1")
    consume(b"d")
    consumed(b"b")
    declared(b"named")
    consumed(b"c")
    consumed(b"d")
    consume(b"e")
    consumed(b"e")
    for tag, consumer in enumerate((b"a", b"b", b"c", b"d", b"e"), 1):
        for key, frame in delivery(consumer, tag):
            taking.frame(key, frame, 0, len(frame))
    found = {
        tag: taking.select(methods.BasicAck.decode(methods.BasicAck(tag).encode()))[0].queue for tag in range(1, 6)
    }
    assert found == {1: b"before", 2: b"amq.gen-1", 3: b"named", 4: b"named", 5: b"named"}


DEEP = reduce(lambda inner, _: entry(b"k", b"F", inner), range(MAX_DEPTH + 2), b"")


@pytest.mark.parametrize(
    "raw",
    [build({Property.HEADERS: DEEP}), b"\x00\x01", EMPTY + b"more"],
    ids=["nested too deep", "a flag of no class", "octets behind the last"],
)
def test_an_unreadable_delivery_is_returned_like_others(raw: bytes) -> None:
    """Brokers pass such properties on."""
    upstream: Any = Upstream()
    taking = ConsumeChannel(upstream, 1, 10_000, Budget(10_000), ConsumedQueues(upstream.exclusive), upstream)
    taking.owner = SimpleNamespace(forward=lambda *_: None)
    taking.request(methods.BasicGet.KEY, methods.BasicGet(b"q").encode())
    method = methods.BasicGetOk.HEAD + (7).to_bytes(8, "big") + b"\x00" + put_short(b"") * 2 + bytes(4)
    for key, frame in [(methods.BasicGetOk.KEY, method_frame(1, method)), (HEADER, header_frame(1, 60, 0, raw))]:
        taking.frame(key, frame, 0, len(frame))
    (found,) = taking.select(methods.BasicAck.decode(methods.BasicAck(7).encode()))
    commits: Any = SimpleNamespace(frame_max=1 << 17, may_set_user_id=True, broker=SimpleNamespace(user="guest"))
    with pytest.raises(XaError, match="cannot be put back") as refused:
        check_consume(commits, found)
    assert refused.value.code is ReplyCode.RESOURCE_ERROR
    upstream.written.clear()
    taking.detach()
    assert methods.BasicNack(7, requeue=True).encode() in upstream.written


def consuming(
    max_kept: int, replacer: "Replacer | None" = None, *, revokes: bool = False, budget: Budget | None = None
) -> tuple[Any, ConsumeChannel]:
    """A channel with a consumer that acknowledges, and the connection that it writes to."""
    upstream: Any = Upstream()
    upstream.hold_client = upstream.release_client = lambda _: None
    taking = ConsumeChannel(
        upstream,
        1,
        max_kept,
        budget or Budget(1 << 30),
        ConsumedQueues(upstream.exclusive),
        upstream,
        replacer=replacer,
        revokes=revokes,
    )
    taking.owner = SimpleNamespace(forward=lambda *_: None)
    taking.request(methods.BasicConsume.KEY, methods.BasicConsume(b"q", b"c").encode())
    answer = method_frame(1, methods.BasicConsumeOk.HEAD + put_short(b"c"))
    taking.frame(methods.BasicConsumeOk.KEY, answer, 0, len(answer))
    return upstream, taking


def deliver(taking: ConsumeChannel, tag: int, raw: bytes) -> None:
    """Deliver a message with these properties."""
    (method, _) = delivery(b"c", tag)
    for key, frame in (method, (HEADER, header_frame(1, 60, 0, raw))):
        taking.frame(key, frame, 0, len(frame))


def test_content_beyond_the_limit_is_not_kept_in_part() -> None:
    """--max-kept-bytes: properties are limited only by the frame size."""
    _, taking = consuming(max_kept=1000)
    deliver(taking, 1, build({Property.HEADERS: b"\x01aV" * 1_000}))
    (kept,) = taking.select(methods.BasicAck(1))
    assert (kept.properties, kept.body) == (b"", None)
    with pytest.raises(XaError, match="unsettled deliveries exceed --max-kept-bytes"):
        check_consume(SimpleNamespace(), kept)  # type: ignore[arg-type]


def test_an_ended_channel_returns_the_memory_of_its_contents() -> None:
    budget = Budget(1 << 30)
    upstream, taking = consuming(max_kept=1000, budget=budget)
    upstream.held_lost = upstream.consume_channel_ended = lambda *_: None
    for tag in (1, 2, 3):
        deliver(taking, tag, EMPTY)
    taking.hold(taking.select(methods.BasicAck(1)), "a branch")
    taking.ack(taking.select(methods.BasicAck(2)))
    assert budget.used == 2 * len(EMPTY)
    taking.lost("the connection is lost")
    assert budget.used == 0


def test_thousands_of_headers_do_not_hold_up_a_recover() -> None:
    """Whether a delivery is from a stream is determined at its arrival, not for all deliveries at once."""
    upstream, taking = consuming(max_kept=1 << 30)
    raw = build({Property.HEADERS: b"\x01aV" * 4_000 + entry(b"b", b"S", b"x-stream-offset")})
    for tag in range(1, 201):
        deliver(taking, tag, raw)
    began = time.process_time()
    taking.recover()
    assert time.process_time() - began < 0.05
    assert methods.BasicNack(200, multiple=True).encode() in upstream.written


@pytest.mark.parametrize("held", [True, False])
def test_many_deliveries_are_settled_together_unless_a_branch_has_some(held: bool) -> None:
    """For the broker, deliveries that a branch holds are unsettled, so `multiple` must not include them."""
    upstream, taking = consuming(max_kept=1000)
    for tag in range(1, 6):
        deliver(taking, tag, EMPTY)
    if held:
        taking.hold(taking.select(methods.BasicAck(2)), "a branch")
    upstream.written.clear()
    taking.ack(taking.select(methods.BasicAck(4, multiple=True)), multiple=True)
    acks = [payload for payload in upstream.written if payload[:4] == methods.BasicAck.HEAD]
    assert acks == (
        [methods.BasicAck(tag).encode() for tag in (1, 3, 4)] if held else [methods.BasicAck(4, multiple=True).encode()]
    )
    assert [each.tag for each in taking.select(methods.BasicAck(0, multiple=True))] == [5]


@pytest.mark.parametrize("held", [True, False], ids=["one by one", "with one method for each part"])
def test_thousands_of_deliveries_are_settled_in_parts_in_order(held: bool) -> None:
    """How long the maximum number holds the event loop is measured with a broker."""
    most, parts = 4_096, 3
    count = parts * most - 5
    upstream, taking = consuming(max_kept=1 << 30)
    for tag in range(1, count + 1):
        deliver(taking, tag, EMPTY)
    if held:
        taking.hold(taking.select(methods.BasicAck(7)), "a branch")
    upstream.written.clear()
    taking.ack(taking.select(methods.BasicAck(0, multiple=True)), multiple=True)
    done = list[bool]()
    taking.then(lambda: done.append(True))
    deliver(taking, count + 1, EMPTY)
    assert taking.unsettled == 1 + held
    with pytest.raises(XaError, match="unknown delivery tag 1"):
        taking.select(methods.BasicAck(1))
    commit_ok = methods.TxCommitOk().frame(1)
    settled = set[int]()
    for _ in range(parts):
        assert not done
        *acks, commit = upstream.written
        upstream.written.clear()
        assert commit == methods.TxCommit().encode(), "no method may follow it before commit-ok"
        tags = {int.from_bytes(payload[4:12], "big") for payload in acks}
        assert len(tags) <= most
        settled = settled | tags if held else set(range(1, max(tags) + 1))
        taking.frame(methods.TxCommitOk.KEY, commit_ok, 0, len(commit_ok))
    assert done
    assert upstream.written == []
    assert settled == set(range(1, count + 1)) - ({7} if held else set())


def test_returned_deliveries_of_a_branch_keep_their_tag_order() -> None:
    """Settlements up to a tag, and the last of all tags, depend on the order of unsettled deliveries."""
    upstream, taking = consuming(max_kept=1000)
    for tag in range(1, 6):
        deliver(taking, tag, EMPTY)
    (second,) = taking.select(methods.BasicAck(2))
    taking.hold([second], "a branch")
    assert taking.end_hold(second)
    upstream.written.clear()
    taking.ack(taking.select(methods.BasicAck(3, multiple=True)), multiple=True)
    assert upstream.written[0] == methods.BasicAck(3, multiple=True).encode()
    assert [each.tag for each in taking.select(methods.BasicAck(0, multiple=True))] == [4, 5]


def take(taking: ConsumeChannel, held: list[Delivery], unit: Unit) -> "asyncio.Future[UnitOutcome | None]":
    """The outcome of a unit, on a connection that holds its lock."""
    outcome = taking.take(held, uuid4(), unit, b"receipts")
    locked = method_frame(1, methods.BasicConsumeOk.HEAD + put_short(taking.lock.encode()))
    taking.frame(methods.BasicConsumeOk.KEY, locked, 0, len(locked))
    return outcome


SENT = (methods.BasicAck.KEY, methods.BasicPublish.KEY, methods.TxCommit.KEY)


@pytest.mark.parametrize("receipt", [True, False])
async def test_a_branch_takes_deliveries_with_one_commit_and_receipt(receipt: bool) -> None:
    """Without a receipt, the unit's row says so, and nothing may be published to the queue of receipts."""
    upstream, taking = consuming(max_kept=1000)
    deliver(taking, 1, EMPTY)
    held = taking.select(methods.BasicAck(1))
    taking.hold(held, "a branch")
    upstream.written.clear()
    unit = Unit(number=1, lock="", nonce=uuid4(), receipt=receipt)
    outcome = take(taking, held, unit)
    published = [methods.BasicPublish(b"", b"receipts").encode()] if receipt else []
    sent = [payload for payload in upstream.written if int.from_bytes(payload[:4], "big") in SENT]
    assert sent == [methods.BasicAck(1).encode(), *published, methods.TxCommit().encode()]
    assert not outcome.done()
    commit_ok = methods.TxCommitOk().frame(1)
    taking.frame(methods.TxCommitOk.KEY, commit_ok, 0, len(commit_ok))
    assert await outcome is UnitOutcome.HAPPENED


async def test_a_delivery_unknown_to_the_channel_is_never_taken() -> None:
    """It was returned to its queue. An acknowledgement would take another message or close the channel."""
    upstream, taking = consuming(max_kept=1000)
    deliver(taking, 1, EMPTY)
    (delivery,) = taking.select(methods.BasicAck(1))
    taking.hold([delivery], "a branch")
    taking.release([delivery])
    upstream.written.clear()
    outcome = take(taking, [delivery], Unit(number=1, lock="", nonce=uuid4()))
    assert outcome.done()
    assert outcome.result() is UnitOutcome.NEVER
    assert upstream.written == []


@pytest.mark.parametrize(
    ("failed", "expected"),
    [
        (methods.TxCommit.KEY, None),
        (0, None),
        (methods.BasicAck.KEY, UnitOutcome.NEVER),
        (methods.BasicPublish.KEY, UnitOutcome.NEVER),
    ],
    ids=["tx.commit", "no method", "basic.ack", "basic.publish"],
)
async def test_a_unit_whose_commit_closes_the_channel_is_in_doubt(failed: int, expected: UnitOutcome | None) -> None:
    """The receipt can be looked up only after the connection has ended, so dtx ends it at once."""
    upstream, taking = consuming(max_kept=1000)
    lost = list[object]()
    upstream.held_lost = lambda branch, _reason: lost.append(branch)
    upstream.consume_channel_ended = lambda: None
    taking.owner = SimpleNamespace(forward=lambda *_: None, upstream_closed=lambda _: None)
    deliver(taking, 1, EMPTY)
    held = taking.select(methods.BasicAck(1))
    taking.hold(held, "a branch")
    outcome = take(taking, held, Unit(number=1, lock="", nonce=uuid4()))
    close = methods.ChannelClose(406, b"PRECONDITION_FAILED", failed).frame(1)
    taking.frame(methods.ChannelClose.KEY, close, 0, len(close))
    assert await outcome is expected
    assert (upstream.aborted is not None) == (expected is None)
    assert lost == ["a branch"]


def test_a_message_returned_to_the_lock_queue_stays_the_clients() -> None:
    """Only dtx consumes from the lock queue. Messages that others publish to it are not passed on."""
    upstream, taking = consuming(max_kept=1000)
    upstream.lock = "dtx.lock"
    passed: list[bytes] = []
    taking.owner = cast("Any", SimpleNamespace(forward=lambda buffer, start, end: passed.append(buffer[start:end])))
    header = header_frame(1, 60, 0, EMPTY)
    returned = methods.BasicReturn(312, b"NO_ROUTE", b"", b"gone").frame(1)
    for key, frame in (
        *delivery(b"dtx.lock", 1),
        (methods.BasicReturn.KEY, returned),
        (HEADER, header),
    ):
        taking.frame(key, frame, 0, len(frame))
    assert passed == [returned, header]


class Replacer:
    """Replaces the deliveries with some tags; what it is asked is noted."""

    def __init__(self, *tags: int, fails: bool = False) -> None:
        self.asked: list[list[int]] = []
        self._tags = tags
        self._fails = fails

    def may_be_near(self, deliveries: Sequence[Delivery]) -> bool:
        """Always."""
        return bool(deliveries)

    async def replace(self, deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
        """Those with the tags."""
        self.asked.append([each.tag for each in deliveries])
        if self._fails:
            raise ValueError("not foreseen")
        return [each for each in deliveries if each.tag in self._tags]


@pytest.mark.parametrize(
    ("replacer", "settled"),
    [
        (Replacer(2), [methods.BasicAck(2), methods.BasicNack(1, requeue=True), methods.BasicNack(3, requeue=True)]),
        (Replacer(fails=True), [methods.BasicNack(tag, requeue=True) for tag in (1, 2, 3)]),
    ],
    ids=["one is replaced", "an error"],
)
async def test_deliveries_without_replacement_are_returned_once_in_order(
    replacer: Replacer, settled: list[methods.BasicAck | methods.BasicNack]
) -> None:
    upstream, taking = consuming(1000, replacer)
    for tag in (1, 2, 3):
        deliver(taking, tag, EMPTY)
    held = taking.select(methods.BasicAck(0, multiple=True))
    taking.hold(held, "a branch")
    upstream.written.clear()
    taking.release(held)
    taking.release(held)
    for _ in range(3):
        await asyncio.sleep(0)
    commit = method_frame(1, methods.TxCommitOk.HEAD)
    taking.frame(methods.TxCommitOk.KEY, commit, 0, len(commit))
    assert replacer.asked == [[1, 2, 3]]
    assert [sent for sent in upstream.written if sent != methods.TxCommit().encode()] == [
        each.encode() for each in settled
    ]
    assert not taking.holds


def cancel(taking: ConsumeChannel) -> None:
    """The broker cancels the consumer, and may have taken its deliveries back."""
    frame = methods.BasicCancel(b"c", no_wait=True).frame(1)
    taking.frame(methods.BasicCancel.KEY, frame, 0, len(frame))


@pytest.mark.parametrize(
    ("late", "outcome"), [(False, UnitOutcome.NEVER), (True, UnitOutcome.UNKNOWN)], ids=["before", "during the commit"]
)
async def test_a_unit_skips_deliveries_that_the_broker_took_back(late: bool, outcome: UnitOutcome) -> None:
    """RabbitMQ 4.3 ignores the acknowledgements, and answers commit-ok."""
    upstream, taking = consuming(1000, revokes=True)
    upstream.held_lost = lambda *_: None
    taking._sending.has_lock = True
    deliver(taking, 1, EMPTY)
    held = taking.select(methods.BasicAck(1))
    taking.hold(held, "a branch")
    upstream.written.clear()
    if not late:
        cancel(taking)
    done = taking.take(held, uuid4(), Unit(number=1, lock="l", nonce=uuid4(), receipt=False), b"")
    if late:
        cancel(taking)
        commit = methods.TxCommitOk().frame(1)
        taking.frame(methods.TxCommitOk.KEY, commit, 0, len(commit))
    assert await done is outcome
    assert (methods.BasicAck(1).encode() in upstream.written) is late


async def test_no_delivery_of_an_ended_channel_is_copied() -> None:
    """The broker has returned it: the queue would have both."""
    upstream, taking = consuming(1000, Replacer())
    upstream.held_lost = upstream.consume_channel_ended = lambda *_: None
    deliver(taking, 1, EMPTY)
    held = taking.select(methods.BasicAck(1))
    taking.hold(held, "a branch")
    taking.release(held)
    taking.lost("the connection is lost")
    assert [delivery.revoked for delivery in held] == [True]


@pytest.mark.parametrize("revokes", [True, False], ids=["4.3", "before"])
@pytest.mark.parametrize("deletes", [True, False], ids=["its client deletes the queue", "the broker cancels"])
def test_no_branch_takes_deliveries_the_broker_took_back(revokes: bool, deletes: bool) -> None:
    """Before RabbitMQ 4.3, and where the client itself deletes the queue, a cancelled consumer changes nothing."""
    upstream, taking = consuming(1000, revokes=revokes)
    doomed: list[object] = []
    upstream.held_lost = lambda branch, _: doomed.append(branch)
    deliver(taking, 1, EMPTY)
    deliver(taking, 2, EMPTY)
    taking.hold(taking.select(methods.BasicAck(1)), "a branch")
    if deletes:
        taking.request(methods.QueueDelete.KEY, methods.QueueDelete(b"q").encode())
    cancel(taking)
    (other,) = taking.select(methods.BasicAck(2))
    if revokes and not deletes:
        assert doomed == ["a branch"]
        with pytest.raises(XaError, match="may deliver the message again"):
            check_settle(other)
    else:
        assert not doomed
        check_settle(other)
