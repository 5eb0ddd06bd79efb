"""Deliveries to channels without select: the order of what the broker gets, and what dtx may not send."""

import asyncio
from collections.abc import Coroutine
from typing import Any
from uuid import UUID

import pytest

from dtx.log.records import LogWrite, Replay
from dtx.server.alongside.plain_deliveries import ConsumingChannels, PlainDeliveries
from dtx.store.rabbitmq import messages
from dtx.store.rabbitmq.consumed_queues import ConsumedQueues
from dtx.store.rabbitmq.copies import CopyRegister
from dtx.store.rabbitmq.upstream import ExclusiveQueues
from dtx.wire.amqp09 import content, methods
from dtx.wire.amqp09.codec import ChannelMode, Method
from dtx.wire.amqp09.frames import BODY, HEADER, FrameSplitter, header_frame
from dtx.wire.amqp09.properties import EMPTY
from tests.support.branches import a_publish

BRANCH = UUID("0190a5b0-0000-7000-8000-000000000001")
QOS = methods.BasicQos(0, 7)


class Stand:
    """One channel with a consumer of the queue ``q``, between a client and a broker."""

    def __init__(self) -> None:
        self.mode = ChannelMode.PLAIN
        self.written = asyncio.Event()
        self.register = CopyRegister(self._write, lambda: True)
        self.register.begin(BRANCH)
        self.sent: list[str] = []
        """What the broker has got."""
        self.seen: list[int] = []
        """Keys of the frames that the client has got."""
        self.abandoned = ""
        self.finished = 0
        self.settled_tags: list[int] = []
        self.channels = ConsumingChannels(self.register, self._spawn, lambda _: None, self._finish)
        queues = ConsumedQueues(ExclusiveQueues())
        queues.requested(methods.BasicConsume.KEY, methods.BasicConsume(b"q", b"c", no_wait=True).encode())
        self.deliveries = PlainDeliveries(self.channels, "/", 1, queues, self)
        self.channels.by_number[1] = self.deliveries
        self._tasks: list[asyncio.Task[None]] = []

    async def _write(self, _: LogWrite) -> None:
        await self.written.wait()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    def _finish(self, _: object) -> None:
        self.finished += 1

    def accept(self, key: int, buffer: bytes, start: int, end: int) -> None:
        """See :class:`ChannelSide`."""
        assert buffer[start:end]
        self.seen.append(key)
        if key == methods.TxCommitOk.KEY:
            self.deliveries.transaction_ended()

    def to_upstream(self, frame: bytes) -> None:
        """See :class:`ChannelSide`."""
        buffer, frames = FrameSplitter(0).feed(frame)
        for key, _, start, end in frames:
            name = {HEADER: "header", BODY: "body"}.get(key)
            self.sent.append(name or str(methods.METHODS[key].decode(buffer[start + 7 : end - 1])))

    def settled_by_dtx(self, tag: int) -> None:
        """See :class:`ChannelSide`."""
        self.settled_tags.append(tag)

    def abandon(self, reason: str) -> None:
        """See :class:`ChannelSide`."""
        self.abandoned = reason

    def client(self, method: Method) -> None:
        """The client sends a method."""
        frame = method.frame(1)
        self.channels.from_client(frame, [(method.KEY, 1, 0, len(frame))])
        self.deliveries.pass_on(method.KEY, frame)

    def client_content(self, key: int, frame: bytes) -> None:
        """The client sends a frame of a content."""
        self.channels.from_client(frame, [(key, 1, 0, len(frame))])
        self.deliveries.pass_on(key, frame)

    def deliver(self, tag: int, attempt: int = 1) -> None:
        """The broker delivers a copy of the message of the branch."""
        row = a_publish(exchange=b"", routing_key=b"q", properties=EMPTY, body=b"body")
        (published,) = messages.commit_frames(1, 0, BRANCH, [row], attempt)
        buffer, frames = FrameSplitter(0).feed(published)
        raw = content.header(buffer[frames[1][2] + 7 : frames[1][3] - 1]).properties
        deliver = methods.BasicDeliver(b"c", tag, redelivered=False, exchange=b"", routing_key=b"q").frame(1)
        buffer, frames = FrameSplitter(0).feed(content.message(deliver, 1, raw, b"body", 0))
        for key, _, start, end in frames:
            self.deliveries.filter.frame(key, buffer, start, end)

    async def replay(self) -> None:
        """The message is sent again."""
        digest = messages.digest_of(b"", b"q", b"body")
        await self.register.replay(BRANCH, [Replay(position=0, exchange=b"", routing_key=b"q", digest=digest)])

    async def until_idle(self) -> None:
        """Let tasks run."""
        for _ in range(20):
            await asyncio.sleep(0)


@pytest.fixture
async def stand() -> Stand:
    """A channel; the log answers when ``written`` is set."""
    return Stand()


async def test_frames_behind_a_settlement_wait_with_it(stand: Stand) -> None:
    stand.deliver(1)
    stand.client(methods.BasicAck(1))
    stand.client(QOS)
    assert (stand.sent, stand.channels.is_recording) == ([], True)
    stand.written.set()
    await asyncio.sleep(0.1)
    assert stand.sent == [str(methods.BasicAck(1)), str(QOS)]
    assert (stand.channels.is_recording, stand.finished) == (False, 1)


async def test_a_settlement_of_an_ended_branch_passes_at_once(stand: Stand) -> None:
    stand.deliver(1)
    stand.register.end(BRANCH)
    stand.client(methods.BasicAck(1))
    assert stand.sent == [str(methods.BasicAck(1))]


async def test_tag_zero_settles_nothing_that_came_later(stand: Stand) -> None:
    """If it waited, the broker would settle deliveries that the client had not seen when it sent it."""
    stand.deliver(1)
    stand.client(methods.BasicAck(1))
    stand.client(methods.BasicAck(0, multiple=True))
    assert stand.sent == [str(methods.BasicAck(1)), str(methods.BasicAck(0, multiple=True))]
    assert not stand.deliveries.may_replace(is_got=False)
    assert not stand.channels.is_recording
    stand.written.set()
    await stand.until_idle()


async def test_own_frames_come_between_contents_and_transactions(stand: Stand) -> None:
    stand.client_content(methods.BasicPublish.KEY, methods.BasicPublish(b"", b"other").frame(1))
    stand.deliveries.settle_copy(5, requeue=True)
    stand.client_content(HEADER, header_frame(1, 60, 3, EMPTY))
    assert str(methods.BasicNack(5, requeue=True)) not in stand.sent
    stand.client_content(BODY, b"\x03\x00\x01\x00\x00\x00\x03abc\xce")
    assert stand.sent[-1] == str(methods.BasicNack(5, multiple=False, requeue=True))
    stand.client(methods.TxCommit())
    stand.deliveries.settle_copy(6, requeue=False)
    assert stand.sent[-1] == str(methods.TxCommit())
    answer = methods.TxCommitOk().frame(1)
    stand.deliveries.filter.frame(methods.TxCommitOk.KEY, answer, 0, len(answer))
    assert stand.sent[-1] == str(methods.BasicAck(6))
    assert stand.settled_tags == [5, 6]


async def test_nothing_of_dtx_follows_a_close(stand: Stand) -> None:
    """RabbitMQ would answer a frame on a closed channel with 504, and end the connection."""
    stand.deliver(1)
    await stand.replay()
    stand.deliver(2, attempt=2)
    stand.deliveries.then(stand.deliveries.close)
    stand.deliveries.settle_copy(2, requeue=True)
    stand.deliveries.get_again(2, b"q", no_ack=False)
    assert stand.sent == []


async def test_a_close_of_the_broker_leaves_no_content_torn(stand: Stand) -> None:
    """The broker ignores what comes then, but a body without its header would end the connection (505)."""
    stand.deliver(1)
    stand.client(methods.BasicAck(1))
    stand.client_content(methods.BasicPublish.KEY, methods.BasicPublish(b"", b"other").frame(1))
    stand.client_content(HEADER, header_frame(1, 60, 3, EMPTY))
    stand.deliveries.drop()
    assert stand.sent[1:] == [str(methods.BasicPublish(b"", b"other")), "header"]
    assert not stand.channels.is_recording
    stand.written.set()
    await stand.until_idle()


async def test_an_unexpected_error_ends_the_connection_to_the_broker(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(_: object) -> None:
        raise ValueError("a mistake")

    monkeypatch.setattr(stand.register, "settle", fails)
    stand.deliver(1)
    stand.client(methods.BasicAck(1))
    await stand.until_idle()
    assert "a mistake" in stand.abandoned
    assert not stand.channels.is_recording
