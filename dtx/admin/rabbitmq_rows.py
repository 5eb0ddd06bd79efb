"""The objects of standalone mode as rows of RabbitMQ's management API: its names, for the facts that dtx has."""

import hashlib
import os
import resource
import socket
import time
from base64 import urlsafe_b64encode
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from itertools import chain
from pathlib import Path
from typing import Final, Protocol, TypeVar, cast
from urllib.parse import quote_plus

import dtx
from dtx.admin.api_context import Active, ApiContext, Arrived, BrokerChannel, BrokerClient, OwnBroker
from dtx.admin.identity import Identity
from dtx.admin.message_properties import table_to_json
from dtx.admin.problems import Problem
from dtx.admin.rabbitmq_lists import Row
from dtx.admin.rabbitmq_metrics import BrokerTotals
from dtx.admin.safe_text import exact_name
from dtx.auth.users import Snapshot, User
from dtx.log.changes import BindingRow, DestinationKind
from dtx.store.postgres.consumers import Consumer
from dtx.store.postgres.exchanges import Exchange, Queue
from dtx.store.postgres.matchers import ExchangeType
from dtx.store.postgres.message_counts import MessageCounts
from dtx.store.postgres.topology import VirtualHost
from dtx.store.slices import in_slices
from dtx.wire.amqp09.handshake import PASSED

COMPATIBLE: Final = "3.10.8"
"""The version of RabbitMQ whose management API this is."""
_STARTED: Final = time.time()
_T = TypeVar("_T")
Client = tuple[BrokerClient, Arrived]


class _PlacedSink(Protocol):
    @property
    def place(self) -> tuple[int, int]:
        """Numbers of the connection and the channel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a request can see.

    Args:
        who: the operator.
        context: of all routes.
        active: the parts of the active dtx.
        broker: the broker.
        users: the users of clients, and the virtual hosts.
    """

    who: Identity
    context: ApiContext
    active: Active
    broker: OwnBroker
    users: Snapshot

    @property
    def node(self) -> str:
        """The name of this dtx as a node."""
        return f"{self.context.rm}@{socket.gethostname()}"

    def vhost(self, name: str) -> VirtualHost:
        """A virtual host.

        Raises:
            Problem: 404, there is none.
        """
        if name not in self.users.vhosts:
            raise not_found("virtual host", name)
        return self.broker.virtual_host(name)

    def vhosts(self, name: str | None = None) -> list[VirtualHost]:
        """The virtual host *name*, or all."""
        if name is not None:
            return [self.vhost(name)]
        return [self.broker.virtual_host(each) for each in sorted(self.users.vhosts)]

    # -- objects

    def queues(self, vhost: str | None = None) -> Iterator[Queue]:
        """All queues."""
        return chain.from_iterable(list(host.queues.values()) for host in self.vhosts(vhost))

    def queue(self, vhost: str, name: str) -> Queue:
        """A queue. Raises Problem 404."""
        return _required(self.vhost(vhost).queues.get(name.encode()), "queue", name)

    def exchanges(self, vhost: str | None = None) -> Iterator[Exchange]:
        """All exchanges."""
        return chain.from_iterable(list(host.exchanges.values()) for host in self.vhosts(vhost))

    def exchange(self, vhost: str, name: str) -> Exchange:
        """An exchange. Raises Problem 404."""
        return _required(self.vhost(vhost).exchanges.get(exchange_key(name)), "exchange", name)

    def bindings(self, vhost: str | None = None) -> Iterator[BindingRow | None]:
        """All bindings, those of the default exchange included. ``None`` as in :class:`Listed`."""
        for host in self.vhosts(vhost):
            yield from (_default_binding(host.name, name) for name in list(host.queues))
            for exchange in list(host.exchanges.values()):
                yield from list(exchange.bindings)
                yield None

    def bindings_from(self, vhost: str, source: str) -> Iterable[BindingRow]:
        """The bindings with a source. Raises Problem 404."""
        found = self.exchange(vhost, source)
        if not found.name:
            return (_default_binding(vhost, name) for name in list(self.vhost(vhost).queues))
        return list(found.bindings)

    def bindings_to(self, vhost: str, kind: DestinationKind, name: str) -> list[BindingRow]:
        """The bindings with a destination. Raises Problem 404."""
        if kind is DestinationKind.EXCHANGE:
            return list(self.exchange(vhost, name).into)
        found = self.queue(vhost, name)
        return [_default_binding(vhost, found.name), *found.into]

    def bindings_between(self, vhost: str, source: str, kind: DestinationKind, name: str) -> list[BindingRow]:
        """The bindings from an exchange to a destination. Raises Problem 404."""
        start = self.exchange(vhost, source).name
        return [binding for binding in self.bindings_to(vhost, kind, name) if binding.source == start]

    def binding(self, vhost: str, source: str, kind: DestinationKind, name: str, props: str) -> BindingRow:
        """The binding with a *properties_key*. Raises Problem 404."""
        found = self.bindings_between(vhost, source, kind, name)
        return _required(next((each for each in found if properties_key(each) == props), None), "binding", props)

    def clients(self, vhost: str | None = None) -> list[Client]:
        """The clients that have entered a virtual host."""
        found = cast("Iterable[Client]", self.active.connections().items())
        return [(client, at) for client, at in found if client.who.vhost and vhost in (None, client.who.vhost)]

    def client(self, name: str) -> Client:
        """The client whose connection has that name. Raises Problem 404."""
        found = next((pair for pair in self.clients() if connection_name(pair[1]) == name), None)
        return _required(found, "connection", name)

    def channels(self, clients: Iterable[Client]) -> Iterator[tuple[Client, int, BrokerChannel]]:
        """The channels of clients."""
        for client in clients:
            for number, channel in list(client[0].channels.items()):
                yield client, number, cast("BrokerChannel", channel)

    def channel(self, name: str) -> tuple[Client, int, BrokerChannel]:
        """The channel of that name, ``connection (number)``. Raises Problem 404."""
        connection, _, number = name.rpartition(" (")
        found = (each for each in self.channels([self.client(connection)]) if f"{each[1]})" == number)
        return _required(next(found, None), "channel", name)

    def consumers(
        self, queues: Iterable[Queue], vhost: str | None = None
    ) -> Iterator[tuple[Queue, Consumer, Client | None] | None]:
        """The consumers of *queues*, with their queues and clients. ``None`` as in :class:`Listed`."""
        clients = {client[0].id: client for client in self.clients(vhost)}
        for queue in queues:
            for consumer in queue.index.all_consumers():
                yield queue, consumer, clients.get(cast("_PlacedSink", consumer.sink).place[0])
            yield None

    def user(self, name: str) -> User:
        """A user. Raises Problem 404."""
        return _required(self.users.users.get(name), "user", name)

    def permissions(self) -> Iterator[Row]:
        """The permissions of all users."""
        for user in self.users.users.values():
            yield from permissions_of(user)

    def topic_permissions(self) -> Iterator[Row]:
        """The topic permissions of all users."""
        for user in self.users.users.values():
            yield from topic_permissions_of(user)

    # -- rows that need the view

    def queue_row(self, queue: Queue) -> Row:
        """A queue."""
        spec, index = queue.spec, queue.index
        consumers = index.all_consumers() if index.consumers else ()
        exclusive = next((each for each in consumers if each.exclusive), None)
        oldest = index.oldest
        return {
            "name": exact_name(spec.name),
            "vhost": spec.vhost,
            "durable": spec.durable,
            "auto_delete": spec.auto_delete,
            "exclusive": spec.exclusive,
            "arguments": table_to_json(spec.arguments),
            "type": "quorum" if spec.settings.counts else "classic",
            "state": "running",
            "node": self.node,
            "messages": index.ready + index.unacked,
            "messages_ready": index.ready,
            "messages_unacknowledged": index.unacked,
            "oldest_ready_age": None if oldest is None else round(max(0.0, time.time() - oldest), 3),
            "consumers": index.consumers,
            "message_stats": _message_stats(index.counts),
            "exclusive_consumer_tag": None if exclusive is None else exact_name(exclusive.tag),
            "policy": None,
            "operator_policy": None,
            "effective_policy_definition": {},
        }

    def one_queue(self, queue: Queue) -> Row:
        """A queue with its consumers."""
        found = self.consumers([queue], queue.spec.vhost)
        return self.queue_row(queue) | {"consumer_details": [self.consumer_row(each) for each in found if each]}

    def connection_row(self, pair: Client) -> Row:
        """A client's connection."""
        return {"node": self.node} | connection_row(pair)

    def channel_row(self, found: tuple[Client, int, BrokerChannel]) -> Row:
        """A channel."""
        (client, at), number, channel = found
        mode = channel.mode.value
        each, all_together = channel.prefetch
        return {
            "name": f"{connection_name(at)} ({number})",
            "number": number,
            "node": self.node,
            "connection_details": _peer(at),
            "user": client.who.user,
            "user_who_performed_action": client.who.user,
            "vhost": client.who.vhost,
            "state": "running",
            "confirm": mode == "confirm",
            "transactional": mode == "tx",
            "consumer_count": channel.consumers,
            "messages_unacknowledged": channel.unacked,
            "prefetch_count": each,
            "global_prefetch_count": all_together,
        }

    def consumer_row(self, found: tuple[Queue, Consumer, Client | None]) -> Row:
        """A consumer."""
        queue, consumer, client = found
        number = cast("_PlacedSink", consumer.sink).place[1]
        details: Row = {}
        if client is not None:
            peer = _peer(client[1])
            details = peer | {
                "name": f"{peer['name']} ({number})",
                "connection_name": peer["name"],
                "number": number,
                "user": client[0].who.user,
                "node": self.node,
            }
        return {
            "consumer_tag": exact_name(consumer.tag),
            "queue": {"name": exact_name(queue.name), "vhost": queue.spec.vhost},
            "channel_details": details,
            "ack_required": not consumer.no_ack,
            "exclusive": consumer.exclusive,
            "prefetch_count": consumer.credit.limit,
            "active": queue.index.is_active(consumer),
            "activity_status": "up" if queue.index.is_active(consumer) else "single_active",
            "arguments": {"x-priority": consumer.priority} if consumer.priority else {},
        }

    async def one_vhost(self, name: str) -> Row:
        """A virtual host."""
        host = self.vhost(name)
        return {
            "name": host.name,
            "description": "",
            "tags": [],
            "metadata": {"description": "", "tags": []},
            "tracing": False,
            "cluster_state": {self.node: "running"},
            **_queue_totals(await self._count_queues(name)),
        }

    async def _count_queues(self, vhost: str | None = None) -> BrokerTotals:
        """The numbers of queues, consumers and messages."""
        found = BrokerTotals()
        async for queue in in_slices(self.queues(vhost)):
            found.queues += 1
            found.ready += queue.index.ready
            found.unacked += queue.index.unacked
            found.consumers += queue.index.consumers
        return found

    async def totals(self) -> BrokerTotals:
        """The numbers of all objects and messages."""
        found = await self._count_queues()
        clients, disk, accounts = self.clients(), self.active.manager.disk, self.context.gate.accounts
        found.node, found.cluster = self.node, self.context.rm
        found.connections = len(clients)
        found.channels = sum(len(client.channels) for client, _ in clients)
        found.exchanges = sum(len(host.exchanges) for host in self.vhosts())
        found.disk_free, found.disk_limit, found.alarms = disk.free, disk.limit, self.alarms()
        found.logins = self.broker.accounts.logins + accounts.logins
        found.refused_logins = self.broker.accounts.refused_logins + accounts.refused_logins
        found.counts = self.broker.counts
        return found

    def alarms(self) -> list[str]:
        """The resources because of which clients that publish wait: disk and memory."""
        manager = self.active.manager
        raised = {"disk": manager.disk.raised, "memory": not manager.budget.has_room(0)}
        return [name for name, is_raised in raised.items() if is_raised]

    async def overview(self) -> Row:
        """The overview."""
        found = await self.totals()
        return {
            "management_version": COMPATIBLE,
            "rabbitmq_version": COMPATIBLE,
            "product_name": "dtx",
            "product_version": dtx.__version__,
            "cluster_name": self.context.rm,
            "node": self.node,
            "rates_mode": "basic",
            "disable_stats": False,
            "enable_queue_totals": False,
            "exchange_types": _EXCHANGE_TYPES,
            "message_stats": _message_stats(found.counts),
            "queue_totals": _queue_totals(found),
            "object_totals": {
                "channels": found.channels,
                "connections": found.connections,
                "consumers": found.consumers,
                "exchanges": found.exchanges,
                "queues": found.queues,
            },
            "listeners": self.listeners(),
            "contexts": [],
        }

    def listeners(self) -> list[Row]:
        """The addresses for clients and operators."""
        return [
            {"node": self.node, "protocol": protocol, "ip_address": host, "port": port}
            for host, port, protocol in self.active.addresses
        ]

    def expiring(self, until: datetime) -> Iterator[Row]:
        """The listeners with certificates that expire before *until*, with the times at which they do."""
        for host, port, protocol in self.active.addresses:
            row: Row = {"node": self.node, "protocol": protocol, "interface": host, "port": port}
            soon = False
            for kind, (path, ends) in self.context.certificates.get(protocol, {}).items():
                found = [f"{end:%Y-%m-%d %H:%M:%S}" for end in ends if end < until]
                row |= {kind: path, f"{kind}_expires_on": found}
                soon = soon or bool(found)
            if soon:
                yield row

    def node_row(self, name: str) -> Row:
        """This dtx as a node."""
        manager = self.active.manager
        most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return {
            "name": name,
            "type": "disc",
            "running": True,
            "partitions": [],
            "os_pid": str(os.getpid()),
            "uptime": round((time.time() - _STARTED) * 1000),
            "processors": os.cpu_count(),
            "mem_used": resident(),
            "mem_alarm": "memory" in self.alarms(),
            "disk_free": manager.disk.free,
            "disk_free_limit": manager.disk.limit,
            "disk_free_alarm": manager.disk.raised,
            "fd_used": _open_files(),
            "fd_total": most_files,
            "sockets_used": len(self.active.connections()),
            "exchange_types": _EXCHANGE_TYPES,
            "auth_mechanisms": [
                {"name": exact_name(each), "description": "SASL mechanism", "enabled": True} for each in PASSED
            ],
            "applications": [{"name": "dtx", "description": "dtx", "version": dtx.__version__}],
            "rates_mode": "basic",
        }


_EXCHANGE_TYPES: Final = [
    {"name": str(kind), "description": f"AMQP {kind} exchange, as per the AMQP specification", "enabled": True}
    for kind in ExchangeType
]


def _message_stats(counts: MessageCounts) -> Row:
    numbers = counts.numbers()
    return numbers | counts.sample.details(numbers)


def _queue_totals(found: BrokerTotals) -> dict[str, int]:
    return {
        "messages": found.ready + found.unacked,
        "messages_ready": found.ready,
        "messages_unacknowledged": found.unacked,
    }


def resident() -> int | None:
    """The memory of this process in bytes; ``None`` where it is not known."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return None


def _open_files() -> int | None:
    try:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())
    except OSError:
        return None


def not_found(kind: str, name: str) -> Problem:
    """The problem for an object that does not exist."""
    return Problem(HTTPStatus.NOT_FOUND, f"no {kind} '{name}'")


def _required(found: _T | None, kind: str, name: str) -> _T:
    if found is None:
        raise not_found(kind, name)
    return found


def exchange_key(name: str) -> bytes:
    """The bytes of the name of an exchange in a path; the default exchange has the name ``amq.default`` there."""
    return b"" if name == "amq.default" else name.encode()


def exchange_row(exchange: Exchange) -> Row:
    """An exchange."""
    return {
        "name": exact_name(exchange.name),
        "vhost": exchange.vhost,
        "type": str(exchange.kind),
        "durable": exchange.durable,
        "auto_delete": exchange.auto_delete,
        "internal": exchange.internal,
        "arguments": table_to_json(exchange.arguments),
    }


def _default_binding(vhost: str, queue: bytes) -> BindingRow:
    return BindingRow(vhost, b"", DestinationKind.QUEUE, queue, queue)


def properties_key(binding: BindingRow) -> str:
    """A name of a binding among those with its source and destination: routing key, ``~`` and a hash of arguments."""
    key = quote_plus(binding.routing_key, safe="").replace("~", "%7E")
    if not binding.arguments:
        return key or "~"
    return f"{key}~{urlsafe_b64encode(hashlib.sha256(binding.arguments).digest()[:6]).decode()}"


def binding_row(binding: BindingRow) -> Row:
    """A binding."""
    return {
        "source": exact_name(binding.source),
        "vhost": binding.vhost,
        "destination": exact_name(binding.destination),
        "destination_type": str(binding.destination_kind),
        "routing_key": exact_name(binding.routing_key),
        "arguments": table_to_json(binding.arguments),
        "properties_key": properties_key(binding),
    }


def connection_name(at: Arrived) -> str:
    """The name of a connection: both addresses."""
    return f"{at.address} -> {at.local}"


def _parts(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port or 0)


def _peer(at: Arrived) -> Row:
    host, port = _parts(at.address)
    return {"name": connection_name(at), "peer_host": host, "peer_port": port}


def connection_details(at: Arrived) -> Row:
    """The addresses of a connection."""
    host, port = _parts(at.local)
    return _peer(at) | {"host": host, "port": port}


def connection_row(pair: Client) -> Row:
    """A client's connection."""
    client, at = pair
    start, agreed = client.start_ok, client.agreed
    traffic = dict(zip(("recv_oct", "send_oct"), at.traffic(), strict=True))
    return connection_details(at) | {
        "type": "network",
        "user": client.who.user,
        "vhost": client.who.vhost,
        "user_who_performed_action": client.who.user,
        "protocol": at.protocol,
        "ssl": at.tls,
        "state": client.stage.value,
        "connected_at": round(at.since * 1000),
        "channels": len(client.channels),
        "auth_mechanism": None if start is None else exact_name(start.mechanism),
        "client_properties": {} if start is None else table_to_json(start.client_properties),
        "channel_max": None if agreed is None else agreed.channel_max,
        "frame_max": None if agreed is None else agreed.frame_max,
        "timeout": None if agreed is None else agreed.heartbeat,
        **traffic,
        **at.sample.details(traffic),
    }


def user_row(user: User) -> Row:
    """A user, without the hash of its password."""
    return {"name": user.name, "tags": sorted(user.tags), "limits": {}}


def permissions_of(user: User) -> Iterator[Row]:
    """The permissions of a user."""
    for vhost, granted in user.grants.items():
        yield {"user": user.name, "vhost": vhost} | granted._asdict()


def topic_permissions_of(user: User) -> Iterator[Row]:
    """The topic permissions of a user."""
    for (vhost, exchange), granted in user.topics.items():
        yield {"user": user.name, "vhost": vhost, "exchange": exchange} | granted._asdict()
