"""The exclusive queues of a connection, by what its channels declare and delete."""

import pytest

from dtx.store.rabbitmq import upstream
from dtx.store.rabbitmq.upstream import ExclusiveDeclarations, ExclusiveQueues
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.tables import put_long, put_short

PASSIVE, EXCLUSIVE, NO_WAIT = 1, 4, 16


def declare(queue: bytes, bits: int) -> bytes:
    return methods.QueueDeclare.HEAD + bytes(2) + put_short(queue) + bytes((bits,)) + put_long(b"")


@pytest.fixture
def queues() -> ExclusiveQueues:
    return ExclusiveQueues()


@pytest.fixture
def channel(queues: ExclusiveQueues) -> ExclusiveDeclarations:
    return ExclusiveDeclarations(queues)


def test_a_queue_is_exclusive_when_the_broker_has_declared_it(
    queues: ExclusiveQueues, channel: ExclusiveDeclarations
) -> None:
    """The broker may refuse the declaration, because the queue belongs to another connection."""
    channel.asked(declare(b"durable", 0))
    channel.asked(declare(b"", EXCLUSIVE))
    channel.answered(b"durable")
    assert b"amq.gen-1" not in queues
    channel.answered(b"amq.gen-1")
    assert b"amq.gen-1" in queues
    assert b"durable" not in queues


@pytest.mark.parametrize("bits", [EXCLUSIVE | PASSIVE, EXCLUSIVE | NO_WAIT, 0, NO_WAIT, PASSIVE])
def test_a_queue_that_may_be_anybodys_is_not_exclusive(
    queues: ExclusiveQueues, channel: ExclusiveDeclarations, bits: int
) -> None:
    """A passive declaration does not show it, and with no-wait the result is unknown."""
    channel.asked(declare(b"q", bits))
    if not bits & NO_WAIT:
        channel.answered(b"q")
    assert b"q" not in queues


@pytest.mark.parametrize("bits", [EXCLUSIVE, PASSIVE])
def test_a_queue_stays_exclusive_when_declared_again(
    queues: ExclusiveQueues, channel: ExclusiveDeclarations, bits: int
) -> None:
    queues.add(b"q")
    channel.asked(declare(b"q", bits))
    channel.answered(b"q")
    assert b"q" in queues


@pytest.mark.parametrize("bits", [0, NO_WAIT])
def test_a_queue_declared_for_all_is_no_longer_exclusive(
    queues: ExclusiveQueues, channel: ExclusiveDeclarations, bits: int
) -> None:
    queues.add(b"q")
    channel.asked(declare(b"q", bits))
    assert b"q" not in queues


def test_a_deleted_queue_is_not_exclusive(queues: ExclusiveQueues, channel: ExclusiveDeclarations) -> None:
    """Another connection may use its name then. A delete without a name means the last queue of the channel."""
    for name in (b"q", b"r", b"s"):
        queues.add(name)
    channel.deleted(methods.QueueDelete(b"q").encode(), b"r")
    channel.deleted(methods.QueueDelete(b"").encode(), b"r")
    assert [name in queues for name in (b"q", b"r", b"s")] == [False, False, True]


def test_a_declaration_that_the_broker_refuses_changes_nothing(
    queues: ExclusiveQueues, channel: ExclusiveDeclarations
) -> None:
    channel.asked(declare(b"q", EXCLUSIVE)[:-1])
    channel.deleted(methods.QueueDelete(b"q").encode()[:-1], b"")
    channel.answered(b"q")
    assert b"q" not in queues


def test_the_oldest_of_too_many_queues_is_forgotten(queues: ExclusiveQueues, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client can declare any number. A put-back to a forgotten one needs an operator, as for a deleted queue."""
    monkeypatch.setattr(upstream, "_MOST_EXCLUSIVE", 2)
    for name in (b"1", b"2", b"3"):
        queues.add(name)
    assert [name in queues for name in (b"1", b"2", b"3")] == [False, True, True]
