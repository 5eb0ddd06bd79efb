"""The metrics of standalone mode have RabbitMQ's names and numbers: the same work is done at a real RabbitMQ."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ProbableAuthenticationError
from prometheus_client.parser import text_string_to_metric_families

from dtx.client import XaFlag
from dtx.telemetry.rates import RATE_SECONDS
from dtx.wire.amqp10.performatives import ACCEPTED, Role
from tests.servers.amqp10.raw import Raw
from tests.support.client import connected
from tests.support.crash import StandaloneStage, work
from tests.support.loop_watch import WatchedService, not_held
from tests.support.operator import Operator
from tests.support.postgres import PostgresServer
from tests.support.processes import free_port, wait_until
from tests.support.rabbitmq import RabbitNode
from tests.support.service import ADMIN

DETAILED: Final = "/metrics/detailed?family=queue_coarse_metrics&family=queue_consumer_count"
HOST_DEPENDENT: Final = {
    "rabbitmq_auth_attempts_total",
    "rabbitmq_auth_attempts_succeeded_total",
    "rabbitmq_disk_space_available_bytes",
    "rabbitmq_disk_space_available_limit_bytes",
}
"""Requests to the API are logins, too; the disks are not the same."""
PERSISTENT: Final = pika.BasicProperties(delivery_mode=2)


def numbers(page: bytes, prefix: str = "rabbitmq_") -> dict[str, float]:
    """The sums of all series with the same name."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            if sample.name.startswith(prefix):
                found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


@dataclass(frozen=True)
class Pair:
    """RabbitMQ and dtx after the same work, whose connections are open."""

    theirs: Operator
    """Its metrics."""
    statistics: Operator
    """Its management API."""
    ours: Operator

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """RabbitMQ updates its numbers every five seconds."""
        wait_until(condition, what="the numbers of RabbitMQ")


def _take(channel: BlockingChannel, queue: str, count: int) -> list[int]:
    """The tags of *count* deliveries of a consumer that stays."""
    tags: list[int] = []
    channel.basic_consume(queue, lambda _channel, method, *_: tags.append(method.delivery_tag))
    while len(tags) < count:
        channel.connection.process_data_events(1)
    return tags


def _exercise(url: str, stack: ExitStack) -> None:
    """Messages of each kind."""
    channel = stack.enter_context(connected(url)).channel()
    channel.confirm_delivery()
    grave = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "grave"}
    channel.queue_declare("grave", durable=True)
    channel.queue_declare("work", durable=True, arguments={**grave, "x-max-length": 8})
    channel.queue_declare("lossy", durable=True, arguments={"x-message-ttl": 0})
    for number in range(10):  # two are beyond the length
        channel.basic_publish("", "work", b"%d" % number, PERSISTENT)
    channel.basic_publish("", "lossy", b"", PERSISTENT)
    channel.basic_publish("", "nowhere", b"", PERSISTENT)
    with pytest.raises(pika.exceptions.UnroutableError):
        channel.basic_publish("", "nowhere", b"", PERSISTENT, mandatory=True)
    assert channel.basic_get("lossy")[0] is None
    channel.basic_ack(channel.basic_get("work")[0].delivery_tag)
    assert channel.basic_get("work", auto_ack=True)[0]
    channel.basic_qos(prefetch_count=4)
    first, second, third, _ = _take(channel, "work", 4)
    channel.basic_ack(first)
    channel.basic_reject(second, requeue=False)
    channel.basic_nack(third, requeue=True)
    channel.connection.process_data_events(1)
    with pytest.raises(ProbableAuthenticationError):
        pika.BlockingConnection(pika.URLParameters(url.replace("guest:guest", "guest:wrong")))


@pytest.fixture(scope="module")
def pair(postgres: PostgresServer) -> Iterator[Pair]:
    with ExitStack() as stack:
        port = free_port()
        config = {"prometheus.tcp.ip": "127.0.0.1", "prometheus.tcp.port": str(port)}
        node = stack.enter_context(RabbitNode(in_memory=True, config=config, plugins=("rabbitmq_prometheus",)))
        dtx = stack.enter_context(StandaloneStage(postgres, options=ADMIN))
        for url in (node.url(), dtx.service.url()):
            _exercise(url, stack)
        yield Pair(Operator(f"http://127.0.0.1:{port}"), Operator(node.management_url), Operator(dtx.service.admin_url))


def test_each_number_is_that_of_rabbitmq(pair: Pair) -> None:
    ours = numbers(pair.ours.get("/metrics"))
    assert len(ours) > 25
    theirs: dict[str, float] = {}

    def agree() -> bool:
        theirs.update(numbers(pair.theirs.get("/metrics")))
        return all(theirs.get(name) == value for name, value in ours.items() if name not in HOST_DEPENDENT)

    try:
        pair.wait_for(agree)
    finally:
        different = {name: (value, theirs.get(name)) for name, value in ours.items() if theirs.get(name) != value}
        assert set(different) <= HOST_DEPENDENT, different
    assert set(ours) <= set(theirs), "they are names of RabbitMQ"


def test_each_queue_has_the_series_of_rabbitmq(pair: Pair) -> None:
    def series(asked: Operator) -> dict[tuple[str, str, str], float]:
        return {
            (sample.name, sample.labels["vhost"], sample.labels["queue"]): sample.value
            for family in text_string_to_metric_families(asked.get(DETAILED).decode())
            for sample in family.samples
            if "queue" in sample.labels and "reductions" not in sample.name
        }

    ours = series(pair.ours)
    assert len(ours) == 3 * 4
    pair.wait_for(lambda: series(pair.theirs) == ours)


def test_statistics_of_queues_are_those_of_rabbitmq(pair: Pair) -> None:
    """RabbitMQ leaves out those that are 0."""
    words = ("publish", "deliver", "get", "get_no_ack", "get_empty", "deliver_get", "redeliver", "ack")

    def of(asked: Operator, path: str) -> dict[str, Any]:
        row = asked.get(path).get("message_stats", {})
        return {word: row.get(word, 0) for word in (*words, "return_unroutable", "drop_unroutable")}

    for path in ("/api/queues/%2F/work", "/api/queues/%2F/grave", "/api/queues/%2F/lossy", "/api/overview"):
        pair.wait_for(lambda path=path: of(pair.statistics, path) == of(pair.ours, path))  # type: ignore[misc]
    assert of(pair.ours, "/api/queues/%2F/work")["publish"] == 10


def test_details_without_a_family_or_of_other_hosts_are_empty(pair: Pair) -> None:
    assert pair.ours.get("/metrics/detailed") == b""
    assert pair.ours.get("/metrics/detailed?family=nothing") == b""
    empty = pair.ours.get(f"{DETAILED}&vhost=elsewhere").decode()
    assert all(line.startswith("#") for line in empty.splitlines())
    with_deliveries = pair.ours.get("/metrics/detailed?family=queue_delivery_metrics&vhost=/").decode()
    assert 'rabbitmq_detailed_queue_messages_acked_total{vhost="/",queue="work"} 2\n' in with_deliveries


def test_names_of_queues_are_escaped_as_labels(alone: StandaloneStage) -> None:
    name = 'a"b\\c'
    with alone.connected() as connection:
        connection.channel().queue_declare(name)
    text = Operator(alone.service.admin_url).get(DETAILED).decode()
    found = {sample.labels["queue"] for family in text_string_to_metric_families(text) for sample in family.samples}
    assert found == {name}


@dataclass(frozen=True)
class Reader:
    """An operator that reads rates."""

    boss: Operator

    def publishes(self, path: str = "/api/queues/%2F/q") -> float:
        """Messages per second to the queue *q*, or to all."""
        rate: float = self.boss.get(path)["message_stats"]["publish_details"]["rate"]
        return rate

    def octets(self) -> float:
        """Bytes per second from the first client."""
        rate: float = self.boss.get("/api/connections")[0]["recv_oct_details"]["rate"]
        return rate


def _publish_steadily(connection: pika.BlockingConnection, seconds: float) -> float:
    """Publish to *q*. Returns the messages per second."""
    channel, count, start = connection.channel(), 0, time.monotonic()
    while (passed := time.monotonic() - start) < seconds:
        channel.basic_publish("", "q", bytes(1000))
        count += 1
        connection.sleep(0.1)
    return count / passed


def test_the_first_request_has_the_rate_of_now(alone: StandaloneStage) -> None:
    """The server samples at an interval of its own; requests change nothing."""
    alone.declare("q")
    one, other = Reader(Operator(alone.service.admin_url)), Reader(Operator(alone.service.admin_url))
    with alone.connected() as connection:
        expected = pytest.approx(_publish_steadily(connection, 2 * RATE_SECONDS + 1), rel=0.2)
        assert one.publishes() == expected
        assert other.publishes() == expected
        assert one.publishes("/api/overview") == expected
        assert 1000 * one.publishes() < one.octets() < 1200 * one.publishes()
        stopped = time.monotonic()
        wait_until(lambda: one.publishes() == one.publishes("/api/overview") == one.octets() == 0, what="no rate")
        assert time.monotonic() - stopped < 2 * RATE_SECONDS + 1
        assert other.publishes() == 0


def test_a_queue_that_is_made_again_has_no_negative_rate(alone: StandaloneStage) -> None:
    alone.declare("q")
    reader = Reader(Operator(alone.service.admin_url))
    alone.fill("q", *[b""] * 50)
    wait_until(lambda: reader.publishes() > 0, what="the rate")
    alone.delete("q")
    alone.declare("q")
    assert reader.publishes() == 0
    alone.fill("q", b"1")
    seen = [0.0]

    def has_rate() -> bool:
        seen.append(reader.publishes())
        return seen[-1] != 0

    wait_until(has_rate, what="the rate of the new queue")
    assert seen[-1] == pytest.approx(1 / RATE_SECONDS, rel=0.2)
    assert reader.publishes("/api/overview") >= 0


def test_bytes_of_a_connection_are_counted_in_both_directions(alone: StandaloneStage) -> None:
    boss = Operator(alone.service.admin_url)
    alone.declare("q")
    with alone.connected() as connection:
        channel = connection.channel()

        def octets() -> tuple[int, int]:
            (row,) = boss.get("/api/connections")
            return row["recv_oct"], row["send_oct"]

        before = octets()
        assert min(before) > 0
        channel.basic_publish("", "q", bytes(100_000))
        assert channel.basic_get("q", auto_ack=True)[2] == bytes(100_000)
        for grown in (after - former for after, former in zip(octets(), before, strict=True)):
            assert 100_000 < grown < 101_000


def test_metrics_of_many_queues_do_not_hold_the_event_loop(postgres: PostgresServer) -> None:
    database = postgres.create_database()
    queues = [{"name": f"queue-{number:05}", "vhost": "/", "durable": True} for number in range(30_000)]
    with WatchedService(database=database, options=ADMIN) as dtx:
        boss = Operator(dtx.admin_url)
        assert boss.ask("POST", "/api/definitions", {"queues": queues}).status == 204
        with not_held(dtx):
            assert numbers(boss.get("/metrics"))["rabbitmq_queues"] == 30_000
            assert boss.get(DETAILED).count(b"\n") == 4 * (30_000 + 2)
    postgres.drop_database(database)


def moved(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """The counters of messages that have changed, by the last part of their names."""
    prefix = "rabbitmq_global_messages_"
    changed = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    return {name.removeprefix(prefix): number for name, number in changed.items() if name.startswith(prefix)}


def test_messages_of_a_branch_count_when_it_commits(alone: StandaloneStage) -> None:
    boss = Operator(alone.service.admin_url)
    alone.declare("q")
    alone.fill("q", b"1")
    start = numbers(boss.get("/metrics"))
    with alone.connected() as connection:
        published = {"q": [b"2", b"3"], "nowhere": [b"4"]}
        xa, xid = work(connection.channel(), publish=published, consume={"q": 1})
        assert xa.prepare(xid) is XaFlag.OK
        voted = numbers(boss.get("/metrics"))
        assert moved(start, voted) == {"received_total": 3, "delivered_total": 1, "delivered_get_manual_ack_total": 1}
        xa.commit(xid)
    committed = moved(voted, numbers(boss.get("/metrics")))
    assert committed == {"routed_total": 2, "acknowledged_total": 1, "unroutable_dropped_total": 1}


def test_messages_of_amqp_1_0_are_counted(alone: StandaloneStage) -> None:
    boss = Operator(alone.service.admin_url)
    alone.declare("q")
    start = numbers(boss.get("/metrics"))
    with Raw(alone.service) as raw:
        session = raw.opened().begin()
        for address in ("/queues/q", "/exchanges/amq.direct/nowhere"):
            raw.outcome(session, raw.post(raw.sender(session, address, address), b"1"))
        raw.receiver(session, "/queues/q")
        session.dispose(Role.RECEIVER, [raw.take().delivery_id], ACCEPTED, settled=True)
        raw.close()
    assert moved(start, numbers(boss.get("/metrics"))) == {
        "received_total": 2,
        "routed_total": 1,
        "unroutable_returned_total": 1,
        "delivered_total": 1,
        "delivered_consume_manual_ack_total": 1,
        "acknowledged_total": 1,
    }
