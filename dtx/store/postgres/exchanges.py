"""What a virtual host is made of: exchanges, queues, and the bindings between them, as they are in memory."""

from dataclasses import dataclass

from dtx.log.changes import BindingRow, ExchangeKey, ExchangeRow, QueueRow
from dtx.store.postgres.arguments import QueueArguments
from dtx.store.postgres.matching import ExchangeType, Matcher, matcher
from dtx.store.postgres.queue import QueueIndex
from dtx.store.postgres.values import text

Owner = object
"""The connection that an exclusive queue belongs to; only its identity counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSpec:
    """What a queue was declared as.

    Args:
        vhost: where it is.
        id: random 62 bits, never used again; see :class:`~dtx.log.changes.Slot`.
        name: what clients call it.
        durable: it survives a restart, which an exclusive one never does.
        exclusive: it belongs to one connection, and goes with it.
        auto_delete: it goes with its last consumer.
        arguments: as on the wire, without the length.
        settings: what the arguments mean.
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
        """RabbitMQ's words for it: ``queue 'q' in vhost '/'``."""
        return describe("queue", self.name, self.vhost)

    @property
    def row(self) -> QueueRow:
        """What the log keeps of a durable one."""
        return QueueRow(
            vhost=self.vhost, id=self.id, name=self.name, auto_delete=self.auto_delete, arguments=self.arguments
        )


class Queue:
    """A queue.

    Args:
        spec: what it was declared as.
        index: its messages and consumers.
        owner: the only connection that may use it; ``None`` when all may.
    """

    __slots__ = ("index", "into", "owner", "spec")

    def __init__(self, spec: QueueSpec, index: QueueIndex, owner: Owner | None = None) -> None:
        self.spec = spec
        self.index = index
        self.owner = owner
        self.into: dict[BindingRow, Exchange] = {}
        """The bindings that lead here, and where they come from."""

    @property
    def name(self) -> bytes:
        """What clients call it."""
        return self.spec.name

    @property
    def durable(self) -> bool:
        """It survives a restart."""
        return self.spec.durable

    def __repr__(self) -> str:
        return f"<{self.spec.where}>"


class Exchange:
    """An exchange.

    Args:
        vhost: where it is.
        name: what clients call it.
        kind: how it matches.
        durable: it survives a restart.
        auto_delete: it goes with the last binding that leads out of it.
        internal: clients may not publish to it.
        arguments: as on the wire, without the length.
        alternate: the exchange that gets what this one cannot route; it need not exist.
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
        """The bindings that lead out, and where to."""
        self.into: dict[BindingRow, Exchange] = {}
        """The bindings that lead here, and where they come from."""

    @property
    def where(self) -> str:
        """RabbitMQ's words for it: ``exchange 'x' in vhost '/'``."""
        return describe("exchange", self.name, self.vhost)

    @property
    def key(self) -> ExchangeKey:
        """What the log calls it."""
        return ExchangeKey(self.vhost, self.name)

    @property
    def row(self) -> ExchangeRow:
        """What the log keeps of a durable one."""
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
    """A thing in RabbitMQ's words: ``exchange 'x' in vhost '/'``."""
    return f"{kind} '{text(name)}' in vhost '{vhost}'"
