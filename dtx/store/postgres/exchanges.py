"""The exchanges, queues and bindings of a virtual host, as a graph in memory.

This module does not check whether a client may do an operation. :class:`Changes` collects the changes of durable
objects, for the log.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from dtx.log.changes import BindingRow, Define, DestinationKind, ExchangeKey, ExchangeRow, QueueRow
from dtx.store.postgres.arguments import QueueArguments, text
from dtx.store.postgres.matchers import ExchangeType, Matcher, matcher
from dtx.store.postgres.queue import QueueIndex

Owner = object
"""The connection that an exclusive queue belongs to; only its identity counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSpec:
    """The declaration of a queue.

    Args:
        vhost: its virtual host.
        id: 62 random bits; see :class:`~dtx.log.changes.Slot`.
        name: its name.
        durable: whether it survives a restart; never for an exclusive queue.
        exclusive: whether it belongs to one connection, and is deleted with it.
        auto_delete: whether it is deleted with its last consumer.
        arguments: as on the wire, without the length.
        settings: the checked arguments.
    """

    vhost: str
    id: int
    name: bytes
    durable: bool = False
    exclusive: bool = False
    auto_delete: bool = False
    arguments: bytes = b""
    settings: QueueArguments

    @property
    def where(self) -> str:
        """A text for people, as in RabbitMQ: ``queue 'q' in vhost '/'``."""
        return describe("queue", self.name, self.vhost)

    @property
    def row(self) -> QueueRow:
        """The row of a durable queue in the log."""
        return QueueRow(
            vhost=self.vhost, id=self.id, name=self.name, auto_delete=self.auto_delete, arguments=self.arguments
        )


class Queue:
    """A queue.

    Args:
        spec: its declaration.
        index: its messages and consumers.
        owner: the only connection that may use it; ``None`` if all may.
    """

    __slots__ = ("index", "into", "owner", "spec")

    def __init__(self, spec: QueueSpec, index: QueueIndex, owner: Owner | None = None) -> None:
        self.spec = spec
        self.index = index
        self.owner = owner
        self.into: dict[BindingRow, Exchange] = {}
        """The bindings with this destination, and their sources."""

    @property
    def name(self) -> bytes:
        """See :class:`QueueSpec`."""
        return self.spec.name

    @property
    def durable(self) -> bool:
        """See :class:`QueueSpec`."""
        return self.spec.durable

    def __repr__(self) -> str:
        return f"<{self.spec.where}>"


class Exchange:
    """An exchange.

    Args:
        vhost: its virtual host.
        name: its name.
        kind: its type.
        durable: whether it survives a restart.
        auto_delete: whether it is deleted with the last binding of which it is the source.
        internal: whether clients may not publish to it.
        arguments: as on the wire, without the length.
        alternate: the exchange that gets messages which match no binding; it need not exist.
    """

    __slots__ = (
        "alternate",
        "arguments",
        "auto_delete",
        "bindings",
        "durable",
        "internal",
        "into",
        "kind",
        "matcher",
        "name",
        "vhost",
    )

    def __init__(
        self,
        vhost: str,
        name: bytes,
        kind: ExchangeType,
        *,
        durable: bool = False,
        auto_delete: bool = False,
        internal: bool = False,
        arguments: bytes = b"",
        alternate: bytes | None = None,
    ) -> None:
        self.vhost = vhost
        self.name = name
        self.kind = kind
        self.durable = durable
        self.auto_delete = auto_delete
        self.internal = internal
        self.arguments = arguments
        self.alternate = alternate
        self.matcher: Matcher[Destination] = matcher(kind)
        self.bindings: dict[BindingRow, Destination] = {}
        """The bindings with this source, and their destinations."""
        self.into: dict[BindingRow, Exchange] = {}
        """The bindings with this destination, and their sources."""

    @property
    def where(self) -> str:
        """A text for people, as in RabbitMQ: ``exchange 'x' in vhost '/'``."""
        return describe("exchange", self.name, self.vhost)

    @property
    def key(self) -> ExchangeKey:
        """Its key in the log."""
        return ExchangeKey(self.vhost, self.name)

    @property
    def row(self) -> ExchangeRow:
        """The row of a durable exchange in the log."""
        return ExchangeRow(
            vhost=self.vhost,
            name=self.name,
            type=self.kind,
            auto_delete=self.auto_delete,
            internal=self.internal,
            arguments=self.arguments,
        )

    def __repr__(self) -> str:
        return f"<{self.where}>"


Destination = Queue | Exchange


def describe(kind: str, name: bytes, vhost: str) -> str:
    """A text for people, as in RabbitMQ: ``exchange 'x' in vhost '/'``."""
    return f"{kind} '{text(name)}' in vhost '{vhost}'"


MAX_ROUTES: Final = 100_000
"""Results of :meth:`Graph.route` that are kept, about 30 MB: clients choose routing keys, so their number has no limit.
With one more, all are dropped; a route is computed again in microseconds."""

_PREDEFINED: Final = (
    (b"", ExchangeType.DIRECT),
    (b"amq.direct", ExchangeType.DIRECT),
    (b"amq.fanout", ExchangeType.FANOUT),
    (b"amq.topic", ExchangeType.TOPIC),
    (b"amq.headers", ExchangeType.HEADERS),
    (b"amq.match", ExchangeType.HEADERS),
)


@dataclass(slots=True)
class Changes:
    """Durable objects that one operation adds and removes."""

    exchanges: list[ExchangeRow] = field(default_factory=list)
    removed_exchanges: list[ExchangeKey] = field(default_factory=list)
    queues: list[QueueRow] = field(default_factory=list)
    removed_queues: list[int] = field(default_factory=list)
    bindings: list[BindingRow] = field(default_factory=list)
    removed_bindings: list[BindingRow] = field(default_factory=list)

    def define(self) -> Define | None:
        """The change for the log; ``None`` if there is none."""
        found = {name: tuple(getattr(self, name)) for name in self.__slots__}
        return Define(**found) if any(found.values()) else None


class Graph:
    """Exchanges, queues and bindings of one virtual host.

    Args:
        name: of the virtual host.
        index: makes the index of a new queue.
    """

    def __init__(self, name: str, index: Callable[[QueueSpec], QueueIndex]) -> None:
        self.name = name
        self.queues: dict[bytes, Queue] = {}
        """By name; read-only for other classes."""
        self.exchanges = {key: Exchange(name, key, kind, durable=True) for key, kind in _PREDEFINED}
        """By name; read-only for other classes."""
        self._index = index
        self._owned: dict[Owner, dict[Queue, None]] = {}
        self._routes: dict[tuple[bytes, bytes], tuple[Queue, ...]] = {}

    def route(
        self, exchange: bytes, routing_key: bytes, headers: bytes = b"", more: tuple[bytes, ...] = ()
    ) -> tuple[Queue, ...]:
        """The queues that a message goes to, each once.

        Args:
            exchange: name of the exchange; if there is none, no queue is found (see ``VirtualHost.publishable``).
            routing_key: of the message.
            headers: its headers table, without the length.
            more: further keys, see :func:`~dtx.store.postgres.property_scan.sender_selected`.

        Raises:
            WireError: 502 when an exchange reads headers, and they are malformed.
        """
        if more:
            return self._route_all(exchange, (routing_key, *more), headers)
        if not exchange:
            queue = self.queues.get(routing_key)
            return () if queue is None else (queue,)
        found = self._routes.get((exchange, routing_key))
        return self._look_up(exchange, routing_key, headers) if found is None else found

    def _look_up(self, exchange: bytes, routing_key: bytes, headers: bytes) -> tuple[Queue, ...]:
        """Compute a route, and keep it if it does not depend on headers."""
        start = self.exchanges.get(exchange)
        if start is None:
            return ()
        found, by_keys = _walk(start, (routing_key,), headers, self.exchanges)
        if by_keys:
            if len(self._routes) >= MAX_ROUTES:
                self._routes.clear()
            self._routes[exchange, routing_key] = found
        return found

    def _route_all(self, exchange: bytes, keys: tuple[bytes, ...], headers: bytes) -> tuple[Queue, ...]:
        if not exchange:
            found = (self.queues.get(key) for key in dict.fromkeys(keys))
            return tuple(queue for queue in found if queue is not None)
        start = self.exchanges.get(exchange)
        return () if start is None else _walk(start, keys, headers, self.exchanges)[0]

    def destination(self, kind: DestinationKind, name: bytes) -> Destination | None:
        """The queue or exchange of that name, if there is one."""
        return self.queues.get(name) if kind is DestinationKind.QUEUE else self.exchanges.get(name)

    def _add_exchange(self, exchange: Exchange) -> None:
        self.exchanges[exchange.name] = exchange
        self._routes.clear()

    def _add_queue(self, spec: QueueSpec, owner: Owner | None) -> Queue:
        queue = self.queues[spec.name] = Queue(spec, self._index(spec), owner)
        if owner is not None:
            self._owned.setdefault(owner, {})[queue] = None
        return queue

    def _link(self, binding: BindingRow, source: Exchange, destination: Destination) -> None:
        source.matcher.add(binding, destination)
        source.bindings[binding] = destination
        destination.into[binding] = source
        self._routes.clear()

    def _unlink(
        self, binding: BindingRow, source: Exchange, destination: Destination, unused: list[Exchange], changes: Changes
    ) -> None:
        """Remove a binding. Its source is added to *unused* if it is an auto-delete exchange without bindings now."""
        source.matcher.remove(binding)
        del source.bindings[binding]
        del destination.into[binding]
        self._routes.clear()
        if source.durable and destination.durable:
            changes.removed_bindings.append(binding)
        if source.auto_delete and not source.bindings:
            unused.append(source)

    def _drop_exchanges(self, waiting: list[Exchange], changes: Changes) -> None:
        """Remove exchanges, and auto-delete exchanges that have no bindings then.

        A list instead of recursion: clients can make chains of any length.
        """
        while waiting:
            exchange = waiting.pop()
            if self.exchanges.get(exchange.name) is not exchange:
                continue
            del self.exchanges[exchange.name]
            self._routes.clear()
            if exchange.durable:
                changes.removed_exchanges.append(exchange.key)
            for binding, destination in list(exchange.bindings.items()):
                self._unlink(binding, exchange, destination, waiting, changes)
            for binding, source in list(exchange.into.items()):
                self._unlink(binding, source, exchange, waiting, changes)

    def _drop_queue(self, queue: Queue, changes: Changes) -> None:
        """Remove a queue with its bindings, and auto-delete exchanges that have no bindings then."""
        del self.queues[queue.name]
        if queue.owner is not None:
            owned = self._owned[queue.owner]
            del owned[queue]
            if not owned:
                del self._owned[queue.owner]
        if queue.durable:
            changes.removed_queues.append(queue.spec.id)
        unused: list[Exchange] = []
        for binding, source in list(queue.into.items()):
            self._unlink(binding, source, queue, unused, changes)
        self._drop_exchanges(unused, changes)


def _walk(
    start: Exchange, keys: Sequence[bytes], headers: bytes, exchanges: Mapping[bytes, Exchange]
) -> tuple[tuple[Queue, ...], bool]:
    """Follow the bindings from *start*. Each exchange is visited once, so bindings may form cycles.

    Args:
        start: the exchange that the message was published to.
        keys: its routing keys.
        headers: its headers table, without the length.
        exchanges: by name, to find alternate exchanges.

    Returns:
        The queues, each once; and whether only the keys matter: no visited exchange reads headers.

    Raises:
        WireError: 502 when an exchange reads headers, and they are malformed.
    """
    found: dict[Queue, None] = {}
    seen = {start}
    waiting = [start]
    by_keys = True
    while waiting:
        exchange = waiting.pop()
        by_keys = by_keys and exchange.kind is not ExchangeType.HEADERS
        matched = False
        for destination in exchange.matcher.match(keys, headers):
            matched = True
            if isinstance(destination, Queue):
                found[destination] = None
            elif destination not in seen:
                seen.add(destination)
                waiting.append(destination)
        if not matched and exchange.alternate is not None:
            alternate = exchanges.get(exchange.alternate)
            if alternate is not None and alternate not in seen:
                seen.add(alternate)
                waiting.append(alternate)
    return tuple(found), by_keys
