"""The objects of MassTransit's receive endpoints with quorum queues, in standalone mode and RabbitMQ.

Names, flags and arguments are those that MassTransit.RabbitMqTransport declares: see its BrokerTopologyBuilder,
RabbitMqQueueConfigurator (``SetQuorumQueue``), and the settings of error, dead letter and delay.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.compat import long
from pika.exceptions import ConnectionClosedByBroker

from tests.support.dialogue import Dialogue, Got, unique

QUORUM: Final[dict[str, Any]] = {"x-queue-type": "quorum"}
SENT: Final[dict[str, Any]] = {
    "content_type": "application/vnd.masstransit+json", "delivery_mode": 2, "message_id": "b1c0", "headers": {"n": 1},
}  # fmt: skip
"""Properties of a message."""


class Endpoint:
    """A receive endpoint: a queue and an exchange of one name, and the exchange of a type of messages.

    Args:
        channel: that declares them.
        arguments: of the queue.
        temporary: whether it ends with its service.
    """

    def __init__(self, channel: BlockingChannel, arguments: dict[str, Any], *, temporary: bool = False) -> None:
        self.channel = channel
        self.arguments = arguments
        self.temporary = temporary
        self.name = unique()
        self.message = f"Shop.Contracts:{self.name}"
        self._queues: list[str] = []
        self._exchanges: list[str] = []

    def declare(self) -> None:
        """Declare what the service declares at each start: queues, exchanges, then bindings."""
        self._queue(self.name)
        self._exchange(self.name)
        self._exchange(self.message, durable=True)
        self.channel.queue_bind(self.name, self.name, "", arguments={})
        self.channel.exchange_bind(self.name, self.message, "", arguments={})

    def _queue(self, name: str) -> None:
        durable = not self.temporary or self.arguments.items() >= QUORUM.items()
        self.channel.queue_declare(name, durable=durable, exclusive=not durable, arguments=self.arguments)
        self._queues.append(name)

    def _exchange(self, name: str, *, durable: bool = False) -> None:
        durable = durable or not self.temporary
        self.channel.exchange_declare(name, "fanout", durable=durable, auto_delete=not durable, arguments={})
        self._exchanges.append(name)

    def move(self, got: Got, kind: str) -> None:
        """Move a message to the error or skipped queue, which has the arguments of the endpoint."""
        there = f"{self.name}_{kind}"
        self._queue(there)
        self._exchange(there)
        self.channel.queue_bind(there, there, "", arguments={})
        got.properties.headers["MT-Reason"] = "fault"
        self.channel.basic_publish(there, got.method.routing_key, got.body.encode(), got.properties, mandatory=True)
        self.channel.basic_ack(got.method.delivery_tag)

    def remove(self, channel: BlockingChannel) -> None:
        """Delete all of it."""
        for name in self._queues:
            channel.queue_delete(name)
        for name in self._exchanges:
            channel.exchange_delete(name)


@pytest.fixture
def endpoint(talk: Dialogue) -> Iterator[Callable[..., Endpoint]]:
    """Makes endpoints, whose channel waits for confirms; they are deleted with the test."""
    made: list[Endpoint] = []

    def make(**more: Any) -> Endpoint:
        channel = talk.another()
        channel.confirm_delivery()
        temporary = more.pop("temporary", False)
        table = {"x-" + name.replace("_", "-"): value for name, value in more.items()}
        made.append(Endpoint(channel, table, temporary=temporary))
        made[-1].declare()
        made[-1].declare()
        return made[-1]

    yield make
    for each in made:
        each.remove(talk.another())


def consumed(talk: Dialogue, of: Endpoint, **arguments: Any) -> list[Got]:
    """Consume as an endpoint does; returns the list of its messages."""
    found: list[Got] = []
    of.channel.basic_qos(prefetch_count=16)
    talk.collect(found, of.name, channel=of.channel, arguments=arguments)
    return found


def came(talk: Dialogue, found: list[Got]) -> Got:
    """The next message of the list."""
    talk.until(lambda: bool(found), "a message")
    return found.pop(0)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"quorum_initial_group_size": 3},
        {"single_active_consumer": True},
        {"delivery_limit": 5, "consumer_timeout": long(3_600_000)},
    ],
    ids=lambda more: " ".join(more) or "as set by SetQuorumQueue",
)
def test_a_quorum_endpoint_consumes_and_moves_faulty_messages(
    talk: Dialogue, endpoint: Callable[..., Endpoint], more: dict[str, Any]
) -> None:
    of = endpoint(queue_type="quorum", **more)
    found = consumed(talk, of)
    for body in ("good", "faulty", "unknown"):
        of.channel.basic_publish(of.message, "", body.encode(), pika.BasicProperties(**SENT), mandatory=True)
    of.channel.basic_ack(came(talk, found).method.delivery_tag)
    faulty = came(talk, found)
    of.channel.basic_nack(faulty.method.delivery_tag, requeue=True)  # a channel that fails
    skipped = came(talk, found)
    again = came(talk, found)
    assert (again.body, again.method.redelivered, again.headers["x-delivery-count"]) == ("faulty", True, 1)
    of.move(again, "error")
    of.move(skipped, "skipped")
    for kind, body in (("error", "faulty"), ("skipped", "unknown")):
        (moved,) = talk.receive(f"{of.name}_{kind}")
        assert (moved.body, moved.headers["MT-Reason"], moved.headers["n"]) == (body, "fault", 1)
        assert moved.properties.content_type == SENT["content_type"]
    assert talk.count(of.name) == 0


def test_dead_letters_of_a_quorum_endpoint_reach_their_queue(talk: Dialogue, endpoint: Callable[..., Endpoint]) -> None:
    """``BindDeadLetterQueue``: a durable fanout exchange and a classic queue."""
    letters = endpoint()
    of = endpoint(queue_type="quorum", delivery_limit=1, dead_letter_exchange=letters.name)
    found = consumed(talk, of)
    of.channel.basic_publish(of.name, "", b"1", pika.BasicProperties(**SENT), mandatory=True)
    for _ in range(2):
        of.channel.basic_nack(came(talk, found).method.delivery_tag, requeue=True)
    (letter,) = talk.receive(letters.name)
    assert (letter.body, letter.deaths[0]["reason"]) == ("1", "delivery_limit")


@pytest.mark.parametrize("kind", [{}, {"queue_type": "quorum"}], ids=["classic", "quorum"])
def test_a_temporary_endpoint_gets_messages_of_the_bus(
    talk: Dialogue, endpoint: Callable[..., Endpoint], kind: dict[str, Any]
) -> None:
    """The bus has a queue with x-expires. Quorum queues are always durable, and not exclusive."""
    of = endpoint(**kind, expires=long(60_000), temporary=True)
    found = consumed(talk, of, **{"x-priority": 1})
    of.channel.basic_publish(of.message, "", b"1", pika.BasicProperties(**SENT), mandatory=True)
    assert came(talk, found).body == "1"


def test_a_request_is_answered_through_the_direct_reply_queue(
    talk: Dialogue, endpoint: Callable[..., Endpoint]
) -> None:
    of = endpoint(queue_type="quorum")
    found, answers = consumed(talk, of), list[Got]()
    client = talk.another()
    talk.collect(answers, "amq.rabbitmq.reply-to", channel=client, auto_ack=True)
    properties = pika.BasicProperties(**SENT, reply_to="amq.rabbitmq.reply-to", expiration="30000")
    client.basic_publish(of.message, "", b"request", properties)
    request = came(talk, found)
    of.channel.basic_publish("", request.properties.reply_to, b"answer", pika.BasicProperties(**SENT))
    of.channel.basic_ack(request.method.delivery_tag)
    assert came(talk, answers).body == "answer"


def test_a_delay_exchange_needs_the_plugin_of_rabbitmq(either_url: str) -> None:
    """``UseDelayedMessageScheduler`` needs rabbitmq_delayed_message_exchange, which dtx does not have either."""
    with Dialogue(either_url) as talk, pytest.raises(ConnectionClosedByBroker) as refused:
        talk.channel.exchange_declare("orders_delay", "x-delayed-message", arguments={"x-delayed-type": "fanout"})
    assert refused.value.reply_code == 503
    assert "unknown exchange type 'x-delayed-message'" in refused.value.reply_text
