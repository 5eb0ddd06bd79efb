"""The order of what is sent on a channel in tx mode: tx.commit and channel.close, and what must wait."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from dtx.store.api import UnitOutcome
from dtx.store.rabbitmq.send_queue import ACK, NACK, SendQueue, UnsentSettlement
from dtx.store.work import Delivery
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.frames import FrameSplitter

COMMIT = "tx.commit"
QOS = methods.BasicQos(0, 7).frame(1)


class Stand:
    """A queue, the connection that it writes to, and the client."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        """Methods, with the tag of settlements."""
        self.is_held = False
        self.freed: list[int] = []
        """Tags of deliveries whose settlement was sent."""
        self.taken: list[int] = []
        """Tags of deliveries that a unit has taken."""
        stand: Any = self
        self.queue = SendQueue(stand, 1, stand, self._settled, self._taken)

    def write(self, data: bytes) -> None:
        """Note frames."""
        buffer, frames = FrameSplitter(0).feed(data)
        for key, _, start, end in frames:
            method = methods.METHODS[key].decode(buffer[start + 7 : end - 1])
            self.sent.append(f"{method.NAME} {tag}" if (tag := getattr(method, "delivery_tag", 0)) else method.NAME)

    def write_steps(self, *steps: tuple[Sequence[bytes], object]) -> None:
        """Note frames."""
        self.write(b"".join(frame for frames, _ in steps for frame in frames))

    def hold_client(self, _: object) -> None:
        """See :class:`ClientReading`."""
        self.is_held = True

    def release_client(self, _: object) -> None:
        """See :class:`ClientReading`."""
        self.is_held = False

    def _settled(self, deliveries: Sequence[Delivery]) -> None:
        self.freed += [each.tag for each in deliveries]

    def _taken(self, deliveries: Sequence[Delivery]) -> None:
        self.taken += [each.tag for each in deliveries]

    def settle(self, *tags: int, waits: bool = False, method: Any = ACK) -> UnsentSettlement:
        """Settle deliveries."""
        settlement = UnsentSettlement([a_delivery(tag) for tag in tags], method, multiple=False, waits=waits)
        self.queue.settle(settlement)
        return settlement

    def take(self, tag: int) -> "asyncio.Future[UnitOutcome | None]":
        """Take a delivery in a unit."""
        done: asyncio.Future[UnitOutcome | None] = asyncio.get_running_loop().create_future()
        self.queue.take([a_delivery(tag)], b"", done)
        return done

    def commit(self) -> list[str]:
        """The broker answers tx.commit; returns what was sent before."""
        sent, self.sent = self.sent, []
        self.queue.committed()
        return sent


def a_delivery(tag: int) -> Delivery:
    holder: Any = None
    return Delivery(holder, tag, b"q", b"", b"q", redelivered=False)


@pytest.fixture
def stand() -> Stand:
    return Stand()


def test_nothing_passes_a_settlement_that_waits_for_the_log(stand: Stand) -> None:
    settlement = stand.settle(1, waits=True)
    stand.settle(2, method=NACK[True])
    stand.queue.send(QOS)
    assert (stand.sent, stand.freed) == ([], [])
    settlement.waits = False
    stand.queue.flush()
    assert stand.sent == ["basic.ack 1", "basic.nack 2", "basic.qos", COMMIT]
    assert stand.freed == [1, 2]


def test_everything_before_a_waiting_settlement_is_sent(stand: Stand) -> None:
    stand.settle(1)
    stand.settle(2)
    stand.settle(3, waits=True)
    assert stand.commit() == ["basic.ack 1", COMMIT]
    assert stand.commit() == ["basic.ack 2", COMMIT]
    assert stand.sent == []


def test_nothing_follows_a_close_and_it_follows_a_commit(stand: Stand) -> None:
    """RabbitMQ closes the connection for a later frame, also for tx.commit in the same write."""
    stand.settle(1)
    stand.settle(2)
    stand.queue.send(methods.ChannelClose(200, b"").frame(1), last=True)
    stand.queue.send(QOS)
    assert stand.commit() == ["basic.ack 1", COMMIT]
    assert stand.commit() == ["basic.ack 2", COMMIT]
    assert stand.sent == ["channel.close"]
    assert stand.queue.end_reason is not None


async def test_a_unit_waits_for_the_lock_and_commits_alone(stand: Stand) -> None:
    done = stand.take(1)
    stand.settle(2)
    assert stand.sent == []
    stand.queue.has_lock = True
    stand.queue.flush()
    assert (stand.commit(), stand.taken) == (["basic.ack 1", COMMIT], [1])
    assert await done is UnitOutcome.HAPPENED
    assert stand.sent == ["basic.ack 2", COMMIT]


@pytest.mark.parametrize("outcome", [UnitOutcome.NEVER, None])
async def test_the_end_decides_only_the_unit_that_was_sent(stand: Stand, outcome: UnitOutcome | None) -> None:
    stand.queue.has_lock = True
    sent, waits = stand.take(1), stand.take(2)
    stand.queue.end("the connection is lost", outcome)
    assert (await sent, await waits) == (outcome, UnitOutcome.NEVER)
    assert stand.taken == []


def test_only_settlements_of_the_same_kind_are_joined(stand: Stand) -> None:
    stand.settle(1)
    several = UnsentSettlement([a_delivery(2), a_delivery(3)], ACK, multiple=True)
    stand.queue.settle(several)
    assert not stand.queue.join([a_delivery(5)], ACK)
    stand.settle(6)
    assert not stand.queue.join([a_delivery(7)], NACK[True])
    assert stand.queue.join([a_delivery(7)], ACK)
    stand.commit()
    assert stand.sent == ["basic.ack 3", "basic.ack 6", "basic.ack 7", COMMIT]


def test_calls_follow_the_commit_of_everything_before_them(stand: Stand) -> None:
    called: list[int] = []
    stand.queue.then(lambda: called.append(1))
    assert called == [1]
    stand.settle(1)
    stand.queue.then(lambda: called.append(2))
    assert called == [1]
    stand.commit()
    assert called == [1, 2]
    assert stand.queue.is_idle


def test_a_client_is_not_read_while_too_much_waits(stand: Stand) -> None:
    stand.settle(1)
    for _ in range(2):
        assert not stand.is_held
        stand.queue.send(QOS * (600_000 // len(QOS)))
    assert stand.is_held
    stand.commit()
    assert not stand.is_held
