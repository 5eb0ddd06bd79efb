"""The broker of the simulation: queues, and the effects of the death of a node.

It has the behaviour of RabbitMQ that dtx relies on, and no more: AMQP transactions that are applied at one moment and
answered later, transient messages that a restart loses, consumers as locks, units that are applied although their
connection has ended, queues that refuse, alarms. ``test_simulated_broker.py`` compares this behaviour with the real
RabbitMQ.
"""

import asyncio
from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from dtx.store.rabbitmq.management import Management, ManagementError
from dtx.wire.amqp09 import properties as basic
from tests.evidence.sim.network import Network
from tests.evidence.sim.scheduler import Process, SimLoop

if TYPE_CHECKING:
    from tests.evidence.sim.broker_session import BrokerChannel, BrokerConnection

HOST: Final = "broker"
PORT: Final = 5672
LATE: Final = 3.0
"""Seconds after the end of a connection in which its channels may still apply a unit; each channel ends separately."""


COPY: Final = b"x-sim-copy"
"""Header with the number of a copy: a message in one queue. dtx keeps it as any other header."""


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
    """A consumer of a queue."""

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
    """Number of ready messages from which on the queue refuses publishes."""
    ready: list[Message] = field(default_factory=list)
    consumers: list[Consumer] = field(default_factory=list)

    def give_back(self, message: Message) -> None:
        """Return a message to its position."""
        message.redelivered = True
        insort(self.ready, message)


@dataclass(slots=True)
class Unsynced:
    """A unit that is not synced or answered yet: a node that dies now may forget it."""

    published: list[tuple[Queue, Message]]
    acked: list[tuple[Queue, Message]]


@dataclass(slots=True)
class SimBroker:
    """One node.

    Args:
        loop: the scheduler.
        network: the network of its clients.
    """

    loop: SimLoop
    network: Network
    queues: dict[bytes, Queue] = field(default_factory=dict)
    exchanges: dict[str, str] = field(default_factory=dict)
    """The alternate exchange of each declared exchange."""
    connections: "dict[BrokerConnection, None]" = field(default_factory=dict)
    leaving: "dict[BrokerChannel, None]" = field(default_factory=dict)
    """Channels of ended connections that still have unacknowledged messages."""
    process: Process = field(init=False)
    running: bool = False
    alarm: bool = False
    restarts: int = 0
    alarms: int = 0
    refusals: int = 0
    """Number of units that were refused in part."""
    unsynced: list[Unsynced] = field(default_factory=list)
    forgets_acks: bool = False
    """A crash may forget acks that were answered shortly before, as classic queues of RabbitMQ do."""
    recent: list[tuple[float, Queue, Message]] = field(default_factory=list)
    orders: int = 0
    numbers_copies: bool = False
    """Each message gets the header :data:`COPY`."""
    numbered: dict[int, bytes] = field(default_factory=dict)
    """By number, the properties with which the copy was published: those of the copy that it puts back have its number.
    """
    on_apply: Callable[["BrokerConnection", int], None] | None = None

    def start(self) -> None:
        """Listen."""
        from tests.evidence.sim.broker_session import BrokerConnection

        self.process = Process(self.loop, HOST)
        self.running = True
        self.process.context.run(self.network.listen, lambda: BrokerConnection(self), HOST, PORT, True)

    def crash(self) -> None:
        """Kill the node with kill -9: transient messages are lost, unsynced ones may be."""
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
        """Append a message; return ``None`` if the queue refuses it."""
        if queue.limit is not None and len(queue.ready) >= queue.limit:
            return None
        self.orders += 1
        if self.numbers_copies and not queue.name.startswith(b"dtx."):
            self.numbered[self.orders] = properties
            properties = basic.set_header(properties, COPY, b"%d" % self.orders)
        message = Message(self.orders, exchange, routing_key, properties, body, persistent)
        queue.ready.append(message)
        return message

    def feed(self, queues: Iterable[Queue]) -> None:
        """Deliver ready messages to the consumers."""
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

    def is_empty(self, names: Iterable[bytes]) -> bool:
        """Whether the queues have no messages, delivered and unsettled ones included."""
        queues = [self.queues[name] for name in names]
        channels = [*self.leaving, *(each for one in self.connections for each in one.channels.values())]
        held = [queue for channel in channels for queue in channel.holds()]
        return not any(queue.ready or queue in held for queue in queues)

    def forgotten(self, queue: Queue, message: Message) -> None:
        """Record an acked message that a crash may return."""
        if self.forgets_acks:
            self.recent.append((self.loop.now, queue, message))
            del self.recent[:-50]

    def set_alarm(self, on: bool) -> None:
        """Set or clear a memory alarm."""
        self.alarm = on
        self.alarms += on
        if not on:
            for connection in list(self.connections):
                connection.unblock()


def copy_number(raw: bytes) -> int:
    """Return the number of the copy with these properties; 0 if it has none."""
    entry = basic.read(raw).header(COPY)
    return 0 if entry is None else int(entry.value)


class SimManagement(Management):
    """The management API: dtx's real judgement of receipts, with the answers of the simulated broker."""

    broker: SimBroker

    async def get(self, path: str) -> Any:
        """Return the answer to ``GET /api/…``.

        Raises:
            ManagementError: the node is down, or has no such object.
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
