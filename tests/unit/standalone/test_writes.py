"""Writes of one connection that the store has not finished."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import pytest

from dtx.log.api import LogError, LogUnavailable
from dtx.log.changes import ROW_BYTES, SHARED_BYTES, Define, StoredMessage
from dtx.server.limits import MAX_FAN_OUT, check_fan_out
from dtx.server.standalone.broker import Done
from dtx.server.standalone.writes import Writes
from dtx.store.postgres.consumers import Consumer, QueueDelivery
from dtx.store.postgres.exchanges import Queue
from dtx.store.postgres.message_counts import BrokerCounts
from dtx.store.postgres.recorder import Thing
from dtx.store.postgres.topology import VirtualHost
from dtx.store.work import Budget, HeldPublish, HeldWork
from dtx.xa.codes import ReplyCode, XaError


class Recording:
    """A broker that records what it gets. The test decides when it is durable."""

    def __init__(self) -> None:
        self.counts = BrokerCounts()
        self.records: list[tuple[list[bytes], list[Any], Done]] = []
        self.refuses: set[bytes] = set()

    def submit(
        self,
        vhost: str,
        publishes: Sequence[HeldPublish],
        acked: Sequence[QueueDelivery],
        done: Done,
        *,
        whole: bool = False,
    ) -> Sequence[int]:
        assert vhost == "/"
        refused = [index for index, message in enumerate(publishes) if message.body in self.refuses]
        if not (whole and refused):
            self.records.append(([message.body for message in publishes], list(acked), done))
        return refused

    def virtual_host(self, name: str) -> VirtualHost:
        raise AssertionError

    async def dead_letters(
        self, deliveries: Sequence[QueueDelivery], revised: Callable[[StoredMessage], bytes]
    ) -> Sequence[HeldPublish | None]:
        raise AssertionError

    def refusal(self, work: HeldWork) -> str | None:
        raise AssertionError

    async def revise(
        self, deliveries: Sequence[QueueDelivery], revised: Callable[[QueueDelivery, StoredMessage], bytes]
    ) -> None:
        raise AssertionError

    def define(self, define: Define) -> Awaitable[None]:
        raise AssertionError

    def defined(self, thing: Thing | None = None) -> Awaitable[None] | None:
        raise AssertionError

    def close_queues(self, queues: Sequence[Queue]) -> list[Consumer]:
        raise AssertionError

    async def purge(self, queue: Queue) -> int:
        raise AssertionError


class Listening:
    """A channel that records the results of its publishes."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def written(self, number: int, error: LogError | None) -> None:
        self.heard.append((number, error))

    def refused(self, number: int) -> None:
        self.heard.append((number, "refused"))

    def send_confirms(self) -> None:
        self.heard.append("told")


class Rig:
    def __init__(self, limit: int = 1 << 40) -> None:
        self.broker = Recording()
        self.budget = Budget(limit)
        self.throttled: list[bool] = []
        self.writes = Writes("/", self.broker, self.budget, self.throttled.append)
        self.channel = Listening()

    def publish(self, number: int, body: bytes = b"body") -> None:
        self.writes.publish(self.channel, number, HeldPublish(b"", b"q", False, b"\x00\x00", body, queues=(1,)))


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.mark.parametrize(("body", "copies"), [(SHARED_BYTES - 1, 3), (SHARED_BYTES, 1)])
def test_a_publish_costs_its_written_bytes(body: int, copies: int) -> None:
    """Long bodies are written once. Rows and properties are written for each queue."""
    message = HeldPublish(b"", b"q", False, b"\x00\x00", bytes(body), queues=(1, 2, 3))
    assert message.size == body * copies + 3 * 2 + 2 * ROW_BYTES
    rig = Rig()
    rig.writes.publish(rig.channel, 1, message)
    rig.writes.flush()
    assert message.size <= rig.budget.used < message.size + 1000


def test_a_fan_out_has_a_limit() -> None:
    large = bytes(100 << 10)
    most = MAX_FAN_OUT // (len(large) + ROW_BYTES)
    check_fan_out(HeldPublish(b"x", b"q", False, b"", bytes(16 << 20), queues=tuple(range(10_000))))
    check_fan_out(HeldPublish(b"x", b"q", False, large, b"", queues=tuple(range(most))))
    with pytest.raises(XaError) as caught:
        check_fan_out(HeldPublish(b"x", b"q", False, large, b"", queues=tuple(range(most + 2))))
    assert caught.value.code is ReplyCode.RESOURCE_ERROR


def test_one_read_makes_one_record(rig: Rig) -> None:
    delivery: Any = object()
    rig.publish(1, b"a")
    rig.writes.ack([delivery])
    rig.publish(2, b"b")
    rig.writes.flush()
    rig.writes.flush()
    assert [(bodies, acked) for bodies, acked, _ in rig.broker.records] == [([b"a", b"b"], [delivery])]


def test_publishers_are_notified_of_the_commit_and_its_end(rig: Rig) -> None:
    rig.publish(1)
    rig.publish(2)
    rig.writes.flush()
    assert rig.channel.heard == []
    rig.broker.records[0][2](None)
    assert rig.channel.heard == [(1, None), (2, None), "told"]


def test_publishers_are_notified_of_an_unknown_outcome(rig: Rig) -> None:
    error = LogUnavailable("the database is away")
    rig.publish(1)
    rig.writes.flush()
    rig.broker.records[0][2](error)
    assert rig.channel.heard == [(1, error), "told"]


def test_messages_refused_by_full_queues_are_not_recorded(rig: Rig) -> None:
    rig.broker.refuses.add(b"b")
    for number, body in enumerate((b"a", b"b", b"c"), 1):
        rig.publish(number, body)
    rig.writes.flush()
    rig.broker.records[0][2](None)
    assert rig.channel.heard == [(2, "refused"), (1, None), (3, None), "told"]


def test_a_waiter_continues_after_earlier_frames(rig: Rig) -> None:
    order: list[str] = []
    rig.publish(1)
    rig.writes.then(lambda: order.append("first"))
    rig.publish(2)
    rig.writes.flush()
    rig.writes.then(lambda: order.append("second"))
    first, second = (done for _, _, done in rig.broker.records)
    second(None)
    assert order == []
    first(None)
    assert order == ["first", "second"]


def test_a_waiter_gets_only_its_own_records_failure(rig: Rig) -> None:
    order: list[str] = []
    for number in (1, 2, 3):
        rig.publish(number)
        rig.writes.then(partial(order.append, f"done {number}"), partial(order.append, f"failed {number}"))
    first, second, third = (done for _, _, done in rig.broker.records)
    second(LogUnavailable("the database is away"))
    first(None)
    third(None)
    assert order == ["done 1", "failed 2", "done 3"]


def test_with_nothing_under_way_no_caller_waits(rig: Rig) -> None:
    order: list[str] = []
    assert rig.writes.idle
    rig.writes.then(lambda: order.append("at once"))
    assert order == ["at once"]


def test_a_transaction_is_a_separate_record_in_order(rig: Rig) -> None:
    heard: list[LogError | None] = []
    rig.publish(1, b"a")
    assert rig.writes.write_separately(
        [HeldPublish(b"", b"q", False, b"\x00\x00", b"t", queues=(1,))], [], heard.append
    )
    assert [bodies for bodies, _, _ in rig.broker.records] == [[b"a"], [b"t"]]
    rig.broker.records[1][2](None)
    assert heard == [None]


def test_a_transaction_that_a_queue_refuses_leaves_nothing_behind(rig: Rig) -> None:
    rig.broker.refuses.add(b"t")
    heard: list[LogError | None] = []
    message = HeldPublish(b"", b"q", False, b"\x00\x00", b"t", queues=(1,))
    assert not rig.writes.write_separately([message], [], heard.append)
    assert (heard, rig.budget.used, rig.writes.idle) == ([], 0, True)


def test_too_many_pending_writes_pause_the_client(rig: Rig) -> None:
    for number in range(4):
        rig.publish(number, bytes(5 << 20))
        rig.writes.flush()
    assert rig.throttled == [True]
    rig.broker.records[0][2](None)
    rig.broker.records[1][2](None)
    assert rig.throttled == [True]
    rig.broker.records[2][2](None)
    assert rig.throttled == [True, False]
    rig.broker.records[3][2](None)
    assert rig.budget.used == 0


def test_memory_used_by_others_does_not_pause_a_client_forever() -> None:
    rig = Rig(limit=1000)
    rig.budget.used = 1000
    rig.publish(1)
    rig.writes.flush()
    assert rig.throttled == [True]
    rig.broker.records[0][2](None)
    assert rig.throttled == [True, False]
