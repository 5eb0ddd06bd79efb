"""The queues that a channel consumes from, and the exclusive queues of its connection, by what it asks and hears."""

import pytest

from dtx.store.rabbitmq import upstream
from dtx.store.rabbitmq.consumed_queues import ConsumedQueue, ConsumedQueues
from dtx.store.rabbitmq.upstream import ExclusiveQueues
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.tables import put_long, put_short

PASSIVE, EXCLUSIVE, NO_WAIT = 1, 4, 16


class Channel(ConsumedQueues):
    """One channel."""

    def declare(self, queue: bytes, bits: int, *, cut: int = 0) -> None:
        """The client sends queue.declare, without the last *cut* bytes."""
        payload = methods.QueueDeclare.HEAD + bytes(2) + put_short(queue) + bytes((bits,)) + put_long(b"")
        self.requested(methods.QueueDeclare.KEY, payload[: len(payload) - cut])

    def declared(self, queue: bytes) -> None:
        """The broker answers it."""
        self.answered(methods.QueueDeclareOk(queue, 0, 0))

    def delete(self, queue: bytes) -> None:
        """The client sends queue.delete."""
        self.requested(methods.QueueDelete.KEY, methods.QueueDelete(queue).encode())

    def get(self, queue: bytes) -> ConsumedQueue | None:
        """The client sends basic.get."""
        return self.requested(methods.BasicGet.KEY, methods.BasicGet(queue).encode())

    def consume(self, queue: bytes, tag: bytes) -> None:
        """A consumer begins."""
        self.requested(methods.BasicConsume.KEY, methods.BasicConsume(queue, tag).encode())
        self.answered(methods.BasicConsumeOk(tag))


@pytest.fixture
def queues() -> ExclusiveQueues:
    return ExclusiveQueues()


@pytest.fixture
def channel(queues: ExclusiveQueues) -> Channel:
    return Channel(queues)


def test_a_queue_is_exclusive_when_the_broker_has_declared_it(queues: ExclusiveQueues, channel: Channel) -> None:
    """The broker may refuse the declaration, because the queue belongs to another connection."""
    channel.declare(b"durable", 0)
    channel.declare(b"", EXCLUSIVE)
    channel.declared(b"durable")
    assert b"amq.gen-1" not in queues
    channel.declared(b"amq.gen-1")
    assert b"amq.gen-1" in queues
    assert b"durable" not in queues


@pytest.mark.parametrize("bits", [EXCLUSIVE | PASSIVE, EXCLUSIVE | NO_WAIT, 0, NO_WAIT, PASSIVE])
def test_a_queue_that_may_be_anybodys_is_not_exclusive(queues: ExclusiveQueues, channel: Channel, bits: int) -> None:
    """A passive declaration does not show it, and with no-wait the result is unknown."""
    channel.declare(b"q", bits)
    if not bits & NO_WAIT:
        channel.declared(b"q")
    assert b"q" not in queues


@pytest.mark.parametrize("bits", [EXCLUSIVE, PASSIVE])
def test_a_queue_stays_exclusive_when_declared_again(queues: ExclusiveQueues, channel: Channel, bits: int) -> None:
    queues.add(b"q")
    channel.declare(b"q", bits)
    channel.declared(b"q")
    assert b"q" in queues


@pytest.mark.parametrize("bits", [0, NO_WAIT])
def test_a_queue_declared_for_all_is_no_longer_exclusive(queues: ExclusiveQueues, channel: Channel, bits: int) -> None:
    queues.add(b"q")
    channel.declare(b"q", bits)
    assert b"q" not in queues


def test_a_deleted_queue_is_not_exclusive(queues: ExclusiveQueues, channel: Channel) -> None:
    """Another connection may use its name then. A delete without a name means the last queue of the channel."""
    channel.declare(b"r", PASSIVE)
    for name in (b"q", b"r", b"s"):
        queues.add(name)
    channel.delete(b"q")
    channel.delete(b"")
    assert [name in queues for name in (b"q", b"r", b"s")] == [False, False, True]


def test_a_declaration_that_the_broker_refuses_changes_nothing(queues: ExclusiveQueues, channel: Channel) -> None:
    channel.declare(b"q", EXCLUSIVE, cut=1)
    channel.declared(b"q")
    assert b"q" not in queues


def test_the_oldest_of_too_many_queues_is_forgotten(queues: ExclusiveQueues, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client can declare any number. A put-back to a forgotten one needs an operator, as for a deleted queue."""
    monkeypatch.setattr(upstream, "_MOST_EXCLUSIVE", 2)
    for name in (b"1", b"2", b"3"):
        queues.add(name)
    assert [name in queues for name in (b"1", b"2", b"3")] == [False, True, True]


def test_each_queue_without_a_name_gets_that_of_its_answer(channel: Channel) -> None:
    """The answer to an earlier declaration does not change the last queue."""
    channel.declare(b"", 0)
    first = channel.get(b"")
    channel.declare(b"", EXCLUSIVE)
    second = channel.get(b"")
    channel.declared(b"amq.gen-1")
    third = channel.get(b"")
    channel.declared(b"amq.gen-2")
    fourth = channel.get(b"")
    assert [each.queue if each else None for each in (first, second, third, fourth)] == [
        b"amq.gen-1", b"amq.gen-2", b"amq.gen-2", b"amq.gen-2",
    ]  # fmt: skip


def test_a_channel_remembers_only_its_64_last_cancelled_consumers(channel: Channel) -> None:
    for number in range(65):
        channel.consume(b"q%d" % number, b"%d" % number)
        channel.answered(methods.BasicCancel(b"%d" % number))
    assert channel.of_consumer(b"0") is None
    known = [channel.of_consumer(b"%d" % number) for number in range(1, 65)]
    assert [each.queue if each else None for each in known] == [b"q%d" % number for number in range(1, 65)]


def test_a_consumer_cancelled_without_an_answer_is_forgotten(channel: Channel) -> None:
    channel.consume(b"q", b"tag")
    channel.requested(methods.BasicCancel.KEY, methods.BasicCancel(b"tag", no_wait=True).encode())
    assert not channel.consumers
    assert channel.of_consumer(b"tag"), "deliveries that the broker has already sent"


def test_a_deletion_marks_a_consumer_that_is_not_answered(channel: Channel) -> None:
    consumed = channel.requested(methods.BasicConsume.KEY, methods.BasicConsume(b"q", b"tag").encode())
    channel.delete(b"q")
    assert consumed is not None
    assert consumed.is_deleted
