"""The broker of the simulation: queues, and what happens to them when a node dies.

As little of RabbitMQ as dtx relies on, and all of that: AMQP transactions that are applied at one moment and answered
later, transient messages that a restart forgets, consumers as locks, units that are applied although their
connection has ended, queues that refuse, alarms. What it is relied on for is compared with the real RabbitMQ in
``test_simulated_broker.py``.
"""

import asyncio
from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from dtx.store.rabbitmq.management import Management, ManagementError
from tests.evidence.sim.network import Network
from tests.evidence.sim.scheduler import Process, SimLoop

if TYPE_CHECKING:
    from tests.evidence.sim.broker_session import BrokerChannel, BrokerConnection

HOST: Final = "broker"
PORT: Final = 5672
LATE: Final = 3.0
"""Seconds after the end of a connection up to which its channels may still apply a unit: they end by themselves."""


@dataclass(slots=True, eq=False)
class Message:
    """A message in one queue."""

    order: int
    exchange: bytes
    routing_key: bytes
    properties: bytes
    body: bytes
    persistent: bool
    redelivered: bool = False

    def __lt__(self, other: "Message") -> bool:
        return self.order < other.order


@dataclass(slots=True, eq=False)
class Consumer:
    """Who gets what comes."""

    channel: "BrokerChannel"
    tag: bytes
    no_ack: bool
    exclusive: bool


@dataclass(slots=True, eq=False)
class Queue:
    """A classic queue."""

    name: bytes
    durable: bool
    owner: "BrokerConnection | None" = None
    auto_delete: bool = False
    limit: int | None = None
    """It refuses publishes beyond so many messages."""
    ready: list[Message] = field(default_factory=list)
    consumers: list[Consumer] = field(default_factory=list)

    def give_back(self, message: Message) -> None:
        """To its place."""
        message.redelivered = True
        insort(self.ready, message)


@dataclass(slots=True)
class Unsynced:
    """What a node that dies now may have forgotten: answered to nobody yet."""

    published: list[tuple[Queue, Message]]
    acked: list[tuple[Queue, Message]]


@dataclass(slots=True)
class SimBroker:
    """One node.

    Args:
        loop: the scheduler.
        network: where clients come from.
    """

    loop: SimLoop
    network: Network
    queues: dict[bytes, Queue] = field(default_factory=dict)
    exchanges: dict[str, str] = field(default_factory=dict)
    """The alternate exchange of each one that was declared."""
    connections: "dict[BrokerConnection, None]" = field(default_factory=dict)
    leaving: "dict[BrokerChannel, None]" = field(default_factory=dict)
    """Channels of connections that have ended, which still have what they were given."""
    process: Process = field(init=False)
    running: bool = False
    alarm: bool = False
    restarts: int = 0
    refusals: int = 0
    """Units that were refused in part."""
    unsynced: list[Unsynced] = field(default_factory=list)
    forgets_acks: bool = False
    """A node that dies may forget what was acked, and answered, a moment before, as RabbitMQ's classic queues do."""
    recent: list[tuple[float, Queue, Message]] = field(default_factory=list)
    orders: int = 0
    on_apply: Callable[["BrokerConnection", int], None] | None = None

    def start(self) -> None:
        """Begin to listen."""
        from tests.evidence.sim.broker_session import BrokerConnection

        self.process = Process(self.loop, HOST)
        self.running = True
        self.process.context.run(self.network.listen, lambda: BrokerConnection(self), HOST, PORT, True)

    def crash(self) -> None:
        """Kill -9 of the node: what is transient is gone, what was not synced may be."""
        if not self.running:
            return
        self.running = False
        self.restarts += 1
        random = self.loop.random
        self.process.kill()
        self.network.died(self.process)
        for unit in self.unsynced:
            for queue, message in unit.published:
                if random.random() < 0.5 and message in queue.ready:
                    queue.ready.remove(message)
            for queue, message in unit.acked:
                if random.random() < 0.5:
                    queue.give_back(message)
        self.unsynced.clear()
        for connection in self.connections:
            for channel in connection.channels.values():
                channel.give_all_back()
        for channel in list(self.leaving):
            channel.give_all_back()
        self.connections.clear()
        if self.forgets_acks:
            for at, queue, message in self.recent:
                if at > self.loop.now - 0.05 and random.random() < 0.2:
                    queue.give_back(message)
        self.recent.clear()
        self.queues = {name: queue for name, queue in self.queues.items() if queue.durable and queue.owner is None}
        for queue in self.queues.values():
            queue.consumers.clear()
            queue.ready = [message for message in queue.ready if message.persistent]

    # -- queues

    def enqueue(
        self, queue: Queue, exchange: bytes, routing_key: bytes, properties: bytes, body: bytes, persistent: bool
    ) -> Message | None:
        """A message comes in; ``None`` when the queue refuses it."""
        if queue.limit is not None and len(queue.ready) >= queue.limit:
            return None
        self.orders += 1
        message = Message(self.orders, exchange, routing_key, properties, body, persistent)
        queue.ready.append(message)
        return message

    def feed(self, queues: Iterable[Queue]) -> None:
        """Deliver what waits to whoever consumes."""
        for queue in queues:
            while queue.ready and queue.consumers:
                for _ in queue.consumers:
                    consumer = queue.consumers.pop(0)
                    queue.consumers.append(consumer)
                    if consumer.channel.has_room:
                        consumer.channel.deliver(queue, consumer, queue.ready.pop(0))
                        break
                else:
                    break

    def forgotten(self, queue: Queue, message: Message) -> None:
        """*message* was acked."""
        if self.forgets_acks:
            self.recent.append((self.loop.now, queue, message))
            del self.recent[:-50]

    def set_alarm(self, on: bool) -> None:
        """A memory alarm begins, or ends."""
        self.alarm = on
        if not on:
            for connection in list(self.connections):
                connection.unblock()


class SimManagement(Management):
    """The management API: the real judgement of receipts, on what the simulated broker would answer."""

    broker: SimBroker

    async def get(self, path: str) -> Any:
        """The answer to ``GET /api/…``.

        Raises:
            ManagementError: the node is down, or has no such thing.
        """
        broker = self.broker
        await asyncio.sleep(broker.network.delay())
        if not broker.running:
            raise ManagementError("the management API cannot be asked: connection refused")
        what, _, rest = path.partition("?")[0].partition("/")
        parts = rest.split("/")
        if what == "nodes":
            return [{"name": "sim", "running": True}]
        if what in {"policies", "operator-policies"}:
            return []
        assert what == "queues", path
        if len(parts) == 2:
            if unquote(parts[1]).encode() not in broker.queues:
                raise ManagementError("404 Object Not Found", 404)
            return {"name": unquote(parts[1])}
        return [_facts(queue) for queue in broker.queues.values()]


def _facts(queue: Queue) -> dict[str, Any]:
    limits = {"x-overflow": "reject-publish", "x-max-length": queue.limit} if queue.limit is not None else {}
    return {"name": queue.name.decode(), "type": "classic", "arguments": limits, "effective_policy_definition": {}}
