"""Topology and routing: standalone mode and RabbitMQ give the same answers to the same calls."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.exceptions import ChannelClosedByBroker, ConnectionClosedByBroker, UnroutableError

from dtx.log.changes import DestinationKind, StoredMessage
from dtx.store.postgres.property_scan import sender_selected
from dtx.wire.amqp09 import properties
from dtx.wire.amqp09.errors import WireError
from dtx.wire.amqp09.properties import Property
from dtx.xa.codes import XaError
from tests.support.rabbitmq import RabbitNode
from tests.support.rules import ACCEPTED, HEADERS, REFUSED
from tests.support.topology import table, virtual_host

CONNECTIONS: Final = 2
CONNECTION_CODE: Final = 1000
"""Added to the code of an error that closes the connection."""

Answer = int | frozenset[str]
"""0 or the code of the error; for a publish also the queues that got the message."""


@dataclass(frozen=True)
class Call:
    """A method of pika's channel, by connection *who*; or ``publish``, ``disconnect``."""

    who: int
    method: str
    arguments: dict[str, Any]


class Broker:
    """RabbitMQ, through pika."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connections: list[BlockingConnection] = [self._connect() for _ in range(CONNECTIONS)]
        self._channels: list[BlockingChannel | None] = [None] * CONNECTIONS

    def _connect(self) -> BlockingConnection:
        return BlockingConnection(pika.URLParameters(self._url))

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    def _channel(self, who: int) -> BlockingChannel:
        channel = self._channels[who]
        if channel is None or not channel.is_open:
            channel = self._channels[who] = self._connections[who].channel()
            channel.confirm_delivery()
        return channel

    def call(self, call: Call) -> Answer:
        try:
            if call.method == "disconnect":
                self._connections[call.who].close()
                self._connections[call.who] = self._connect()
            elif call.method == "publish":
                return self._publish(self._channel(call.who), **call.arguments)
            else:
                getattr(self._channel(call.who), call.method)(**call.arguments)
        except ChannelClosedByBroker as error:
            return int(error.reply_code)
        except ConnectionClosedByBroker as error:
            self._connections[call.who] = self._connect()
            return CONNECTION_CODE + int(error.reply_code)
        return 0

    def _publish(
        self, channel: BlockingChannel, exchange: str, key: str, headers: Any, queues: dict[str, int]
    ) -> Answer:
        try:
            channel.basic_publish(exchange, key, b"", pika.BasicProperties(headers=headers), mandatory=True)
        except UnroutableError:
            return frozenset()
        # purge counts the messages and empties the queue for the next publish
        return frozenset(
            name for name, owner in queues.items() if self._channel(owner).queue_purge(name).method.message_count
        )


class Model:
    """The virtual host of standalone mode."""

    def __init__(self) -> None:
        self.vhost = virtual_host()
        self._owners = [object() for _ in range(CONNECTIONS)]

    @property
    def queues(self) -> dict[str, int]:
        """For each queue name, the number of a connection that may use the queue."""
        return {
            name.decode(): 0 if queue.owner is None else self._owners.index(queue.owner)
            for name, queue in self.vhost.queues.items()
        }

    def call(self, call: Call) -> Answer:
        owner = self._owners[call.who]
        try:
            if call.method == "disconnect":
                self.vhost.disconnected(owner)
            elif call.method == "publish":
                return self._publish(**call.arguments)
            else:
                getattr(self, call.method)(owner, **call.arguments)
        except XaError as error:
            return error.code
        except WireError as error:
            self.vhost.disconnected(owner)
            return CONNECTION_CODE + error.code
        return 0

    def _publish(self, exchange: str, key: str, headers: Any, queues: dict[str, int]) -> Answer:
        self.vhost.publishable(exchange.encode())
        more, raw = sender_selected(b"".join(pika.BasicProperties(headers=headers).encode()))
        found = properties.read(raw).value(Property.HEADERS) or b""
        routed = self.vhost.route(exchange.encode(), key.encode(), found, more)
        return frozenset(queue.name.decode() for queue in routed)

    def exchange_declare(
        self, _: object, exchange: str, exchange_type: str = "direct", passive: bool = False, **words: Any
    ) -> None:
        if passive:
            self.vhost.find_exchange(exchange.encode())
        else:
            arguments = table(words.pop("arguments", None))
            self.vhost.declare_exchange(exchange.encode(), exchange_type.encode(), arguments=arguments, **words)

    def exchange_delete(self, _: object, exchange: str, if_unused: bool = False) -> None:
        self.vhost.delete_exchange(exchange.encode(), if_unused=if_unused)

    def exchange_bind(self, owner: object, destination: str, source: str, **words: Any) -> None:
        self._bind(self.vhost.bind, DestinationKind.EXCHANGE, owner, destination, source, **words)

    def exchange_unbind(self, owner: object, destination: str, source: str, **words: Any) -> None:
        self._bind(self.vhost.unbind, DestinationKind.EXCHANGE, owner, destination, source, **words)

    def queue_bind(self, owner: object, queue: str, exchange: str, **words: Any) -> None:
        self._bind(self.vhost.bind, DestinationKind.QUEUE, owner, queue, exchange, **words)

    def queue_unbind(self, owner: object, queue: str, exchange: str, **words: Any) -> None:
        self._bind(self.vhost.unbind, DestinationKind.QUEUE, owner, queue, exchange, **words)

    def _bind(
        self,
        operation: Callable[..., object],
        kind: DestinationKind,
        owner: object,
        destination: str,
        source: str,
        routing_key: str = "",
        arguments: Any = None,
    ) -> None:
        operation(source.encode(), kind, destination.encode(), routing_key.encode(), table(arguments), owner)

    def queue_declare(self, owner: object, queue: str, passive: bool = False, **words: Any) -> None:
        if passive:
            self.vhost.find_queue(queue.encode(), owner)
        else:
            arguments = table(words.pop("arguments", None))
            self.vhost.declare_queue(queue.encode(), owner, arguments=arguments, **words)

    def queue_delete(self, owner: object, queue: str, **words: Any) -> None:
        self.vhost.delete_queue(queue.encode(), owner, **words)

    def queue_purge(self, owner: object, queue: str) -> None:
        self.vhost.find_queue(queue.encode(), owner)

    def basic_publish(self, _: object, exchange: str, routing_key: str, body: bytes) -> None:
        for queue in self.vhost.route(exchange.encode(), routing_key.encode()):
            queue.index.put(StoredMessage(queue.spec.id, 1, b"", b"", 0, properties.EMPTY, body), 0.0)


class Twins:
    """RabbitMQ and the model, which get the same calls."""

    def __init__(self, broker: Broker, model: Model) -> None:
        self.broker = broker
        self.model = model

    def ask(self, method: str, who: int = 0, **arguments: Any) -> Answer:
        """Make the call on both, compare the answers and return them."""
        call = Call(who, method, arguments)
        expected = self.broker.call(call)
        assert self.model.call(call) == expected, call
        return expected

    def publish(self, exchange: str, key: str, headers: Any = None) -> Answer:
        """Publish on both; return the queues that get the message."""
        return self.ask("publish", exchange=exchange, key=key, headers=headers, queues=self.model.queues)


@pytest.fixture
def twins(rabbitmq: RabbitNode, vhost: str) -> Iterator[Twins]:
    """A fresh virtual host in RabbitMQ and in the model."""
    broker = Broker(rabbitmq.url(vhost=vhost))
    yield Twins(broker, Model())
    broker.close()


def test_exchanges_are_declared_and_deleted_alike(twins: Twins) -> None:
    declare, delete = "exchange_declare", "exchange_delete"
    assert twins.ask(declare, exchange="x", exchange_type="nope") == CONNECTION_CODE + 503
    assert twins.ask(declare, exchange="x", exchange_type="") == CONNECTION_CODE + 503
    for name in ("", "amq.mine", "amq.direct", "amq.match", "mine", "x" * 255):
        twins.ask(declare, exchange=name, passive=True)
        for kind in ("direct", "headers"):
            twins.ask(declare, exchange=name, exchange_type=kind)
            twins.ask(declare, exchange=name, exchange_type=kind, durable=True)
            twins.ask(declare, exchange=name, exchange_type=kind, auto_delete=True)
            twins.ask(declare, exchange=name, exchange_type=kind, internal=True)
            twins.ask(declare, exchange=name, exchange_type=kind, arguments={"mine": 1})
            twins.ask(declare, exchange=name, exchange_type=kind, arguments={"alternate-exchange": "o"})
        twins.ask(delete, exchange=name)
        twins.ask(delete, exchange=name)
    for value in ("o", "p", 5, None):
        for other in ("o", "p", 5, None):
            twins.ask(declare, exchange="a", exchange_type="fanout", arguments={"alternate-exchange": value})
            twins.ask(declare, exchange="a", exchange_type="fanout", arguments={"alternate-exchange": other})
            twins.ask(declare, exchange="a", exchange_type="fanout")
            twins.ask(delete, exchange="a")


@pytest.mark.parametrize("arguments", [*ACCEPTED, *REFUSED, *({"x-queue-mode": each} for each in ("lazy", "foo", 1))])
def test_arguments_of_queues_are_judged_alike(twins: Twins, arguments: dict[str, Any]) -> None:
    first = twins.ask("queue_declare", queue="q", durable=True, arguments=arguments)
    assert first == (406 if arguments in REFUSED else 0)
    for other in (arguments, {}, {"x-max-length": 7}, {"x-overflow": "reject-publish"}, {"mine": 1}):
        twins.ask("queue_declare", queue="q", durable=True, arguments=other)


def test_exclusive_queues_are_locked_alike(twins: Twins) -> None:
    twins.ask("queue_declare", queue="mine", exclusive=True)
    twins.ask("queue_declare", queue="all")
    twins.ask("queue_bind", queue="mine", exchange="amq.direct", routing_key="k")
    for queue in ("mine", "all", "none", "amq.none"):
        for who in (0, 1):
            for passive in (True, False):
                twins.ask("queue_declare", who, queue=queue, passive=passive)
            twins.ask("queue_declare", who, queue=queue, exclusive=True)
            twins.ask("queue_declare", who, queue=queue, exclusive=True, durable=True)
            twins.ask("queue_bind", who, queue=queue, exchange="amq.direct", routing_key="l")
            twins.ask("queue_unbind", 1, queue=queue, exchange="amq.direct", routing_key="not bound")
            twins.ask("queue_unbind", 1, queue=queue, exchange="amq.direct", routing_key="k")
            twins.ask("queue_purge", who, queue=queue)
    twins.ask("queue_delete", 1, queue="mine")
    twins.ask("disconnect")
    for queue in ("mine", "all"):
        twins.ask("queue_declare", 1, queue=queue, passive=True)


def test_bindings_are_judged_alike(twins: Twins) -> None:
    twins.ask("queue_declare", queue="q")
    twins.ask("exchange_declare", exchange="x", exchange_type="headers")
    things = ("", "amq.fanout", "x", "none")
    for verb in ("bind", "unbind", "bind", "unbind"):
        for source in things:
            for queue in ("q", "none"):
                twins.ask(f"queue_{verb}", queue=queue, exchange=source, routing_key="k")
            for destination in things:
                twins.ask(f"exchange_{verb}", destination=destination, source=source, routing_key="k")
    for word in ("some", 1, "all", "any", "all-with-x", "any-with-x"):
        twins.ask("queue_bind", queue="q", exchange="x", arguments={"x-match": word})
        twins.ask("queue_bind", queue="q", exchange="amq.fanout", arguments={"x-match": word})


def test_queues_in_use_are_kept_alike(twins: Twins) -> None:
    twins.ask("queue_declare", queue="q")
    twins.ask("basic_publish", exchange="", routing_key="q", body=b"")
    assert twins.ask("queue_delete", queue="q", if_empty=True) == 406
    assert twins.ask("queue_delete", queue="q", if_unused=True) == 0
    assert twins.ask("queue_delete", queue="q", if_empty=True) == 0


@pytest.mark.parametrize(("wanted", "headers", "expected"), HEADERS)
def test_headers_match_alike(twins: Twins, wanted: dict[str, Any], headers: dict[str, Any], expected: bool) -> None:
    twins.ask("queue_declare", queue="q")
    twins.ask("queue_bind", queue="q", exchange="amq.headers", arguments=wanted)
    assert twins.publish("amq.headers", "", headers) == (frozenset({"q"}) if expected else frozenset())


def test_topics_match_alike(twins: Twins) -> None:
    patterns = [
        "",
        "*",
        "#",
        "#.#",
        "*.*",
        "a.*",
        "a.#",
        "#.a",
        "*.a",
        "a.#.b",
        "a.*.b",
        ".",
        "*.#",
        "a.",
        "#.#.a",
        ".#",
    ]
    for pattern in patterns:
        twins.ask("queue_declare", queue=f"q {pattern}")
        twins.ask("queue_bind", queue=f"q {pattern}", exchange="amq.topic", routing_key=pattern)
    for key in ["", "a", "a.", ".", "..", "a.b", ".a", "a..b", "a.c.d.b", "b", "*", "#", "a.#", "a.*"]:
        assert twins.publish("amq.topic", key)


@pytest.mark.parametrize(
    "headers",
    [
        {"CC": ["b"]},
        {"BCC": ["b", "c"]},
        {"CC": ["b"], "BCC": ["c", "b", "none"]},
        {"CC": []},
        {"CC": ["b", 5, b"c", ["c"]]},
        {"CC": "b"},
        {"BCC": 5},
        {"cc": ["b"]},
    ],
)
def test_further_keys_count_alike(twins: Twins, headers: dict[str, Any]) -> None:
    for queue in ("a", "b", "c"):
        twins.ask("queue_declare", queue=queue)
        twins.ask("queue_bind", queue=queue, exchange="amq.topic", routing_key=queue)
        twins.ask("queue_bind", queue=queue, exchange="amq.direct", routing_key=queue)
    for exchange in ("", "amq.direct", "amq.topic", "amq.headers"):
        twins.publish(exchange, "a", headers)


def test_alternate_exchanges_count_alike(twins: Twins) -> None:
    """Also an alternate exchange that is the exchange itself, the default exchange, or reached through a binding."""
    for name, to in (("one", "two"), ("two", "one"), ("self", "self"), ("default", ""), ("last", "amq.fanout")):
        arguments = {"alternate-exchange": to}
        twins.ask("exchange_declare", exchange=name, exchange_type="direct", arguments=arguments)
    twins.ask("exchange_declare", exchange="inner", exchange_type="fanout", internal=True)
    for queue in ("k", "all"):
        twins.ask("queue_declare", queue=queue)
    twins.ask("queue_bind", queue="all", exchange="amq.fanout")
    twins.ask("exchange_bind", destination="last", source="amq.direct", routing_key="k")
    twins.ask("exchange_bind", destination="inner", source="amq.topic", routing_key="#")
    for exchange in ("one", "two", "self", "default", "last", "amq.direct", "amq.topic", "inner", "none"):
        twins.publish(exchange, "k")


def a_call(chance: random.Random) -> tuple[str, dict[str, Any]]:
    """A random call; there are few names, so that calls concern the same objects."""
    queue, exchange = chance.choice("abc"), chance.choice(["x", "y", "z", "amq.direct", "amq.topic"])
    key = chance.choice(["", "k", "k.l", "#", "*.l"])

    def flags(*names: str) -> dict[str, Any]:
        return {name: chance.random() < 0.3 for name in names}

    match chance.randrange(10):
        case 0 | 1:
            kind = chance.choice(["direct", "fanout", "topic", "headers"])
            arguments = chance.choice([{}, {}, {"alternate-exchange": chance.choice("xyz")}])
            words = flags("durable", "auto_delete")
            return "exchange_declare", {"exchange": exchange, "exchange_type": kind, "arguments": arguments, **words}
        case 2:
            return "exchange_delete", {"exchange": exchange, **flags("if_unused")}
        case 3 | 4:
            return "queue_declare", {"queue": queue, **flags("durable", "exclusive", "auto_delete")}
        case 5:
            return "queue_delete", {"queue": queue}
        case 6 | 7:
            return "queue_bind", {"queue": queue, "exchange": exchange, "routing_key": key}
        case 8:
            verb = chance.choice(["exchange_bind", "exchange_bind", "exchange_unbind"])
            return verb, {"destination": chance.choice("xyz"), "source": exchange, "routing_key": key}
        case _:
            verb = chance.choice(["queue_unbind", "queue_unbind", "disconnect"])
            return verb, {} if verb == "disconnect" else {"queue": queue, "exchange": exchange, "routing_key": key}


@pytest.mark.parametrize("seed", [*range(3), None])
def test_any_sequence_of_calls_is_answered_alike(twins: Twins, seed: int | None) -> None:
    """After each call both route a message to the same queues."""
    chosen = random.SystemRandom().randrange(10**6) if seed is None else seed
    print(f"seed {chosen}")
    chance = random.Random(chosen)
    for _ in range(300):
        method, arguments = a_call(chance)
        twins.ask(method, chance.randrange(CONNECTIONS), **arguments)
        twins.publish(chance.choice(["x", "y", "z", "amq.direct", "amq.topic"]), chance.choice(["", "k", "k.l"]))
