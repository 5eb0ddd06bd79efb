"""The rows of standalone mode: messages, and the topology that routes them.

A message has one row for each queue that it is routed to. A long body is stored once, and these rows share it. A row is
inserted and deleted; no hot path updates it. A message is invisible while a branch in the log names its slot as
*published*.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntFlag, StrEnum
from functools import lru_cache
from hashlib import sha256
from struct import Struct
from typing import ClassVar, Final, NamedTuple

from dtx.xa.value import value


class Slot(NamedTuple):
    """The place of one message.

    Args:
        queue: the queue's id, random 62 bits, never used again.
        position: from a counter of the resource manager that only grows; it orders each queue. No slot is used twice.
    """

    queue: int
    position: int


_SLOTS: Final = Struct(">qq")
_pack_slot: Final = _SLOTS.pack


def pack_slots(slots: Sequence[Slot]) -> bytes:
    """Slots as the column of ``branch`` stores them: queue and position, 64 bits each."""
    return b"".join([_pack_slot(queue, position) for queue, position in slots])


def unpack_slots(data: bytes | None) -> tuple[Slot, ...] | None:
    """The inverse of :func:`pack_slots`; null is ``None``."""
    return None if data is None else tuple(map(Slot._make, _SLOTS.iter_unpack(data)))


MARK_BYTES: Final = 4
"""Two names have the same mark with a probability of 1 in 2^32; that costs one exact look."""


@lru_cache(maxsize=4096)
def mark(name: bytes) -> bytes:
    """The mark of a name: a few bytes in a branch's row. A search for one name skips branches without its mark.

    The names themselves are stored with the messages, and to search those of 100,000 branches takes seconds. A branch
    with the mark is searched exactly; one without it does not have the name. Marks are stored, so the function must
    never change.
    """
    return sha256(name).digest()[:MARK_BYTES]


def marks(names: Iterable[bytes]) -> bytes:
    """The marks of all *names*, each once."""
    return b"".join(map(mark, dict.fromkeys(names)))


class MessageFlag(IntFlag):
    """Bits of :attr:`StoredMessage.flags`. Bits 8 to 15 are the priority, in queues that have priorities."""

    PERSISTENT = 1
    BLIND = 2
    """The properties have BCC, which routes the dead letter; no client receives it."""


PRIORITY_SHIFT: Final = 8
"""``flags >> PRIORITY_SHIFT & 0xFF`` is the message's priority."""


SHARED_BYTES: Final = 2048
"""A body of this many bytes is stored once for all queues of a message. Copies of a shorter one cost less than a row
of its own and a count of its uses."""
ROW_BYTES: Final = 256
"""Approximate size of a message's names and columns."""


_SLOT_BYTES: Final = 64
"""Approximate size of a slot, with the WAL that PostgreSQL writes for a deletion."""


class StoredMessage(NamedTuple):
    """One row of ``message``, with its body: a tuple, since the hot path makes one for each message.

    Args:
        queue, position: its slot.
        exchange, routing_key: as published.
        flags: see :class:`MessageFlag`; a message that is not persistent does not survive a restart.
        properties: content header from the property flags on, as received.
        body: the message body.
        expires_at: seconds since the epoch, or ``None``.
        shared: the id of a body that messages in several queues share, or ``None``. One :class:`Change` puts all of
            them, and each has the body.
    """

    queue: int
    position: int
    exchange: bytes
    routing_key: bytes
    flags: int
    properties: bytes
    body: bytes
    expires_at: float | None = None
    shared: int | None = None

    @property
    def slot(self) -> Slot:
        """The slot of this message."""
        return Slot(self.queue, self.position)

    @property
    def priority(self) -> int:
        """The priority, in queues that have priorities."""
        return self.flags >> PRIORITY_SHIFT & 0xFF


@value
class Change:
    """Changes of messages, in the transaction of the record that carries them. Puts come before drops.

    Args:
        puts: messages that enter; a slot in use refuses the record (LogConflict).
        drops: messages that leave; one that is already gone is no error.
        expiries: messages that get another expiry time (seconds since the epoch).
        revisions: messages that get other properties; one that is already gone is no error.
        delivered: by queue id, the position up to which messages may have been delivered; it only grows.
    """

    puts: Sequence[StoredMessage] = ()
    drops: Sequence[Slot] = ()
    expiries: Sequence[tuple[Slot, float]] = ()
    revisions: Sequence[tuple[Slot, bytes]] = ()
    delivered: Sequence[tuple[int, int]] = ()

    @property
    def size(self) -> int:
        """Approximate bytes of the messages that enter; other changes count as an equivalent number of bytes."""
        octets = (len(self.drops) + len(self.expiries)) * _SLOT_BYTES
        last: int | None = None
        for put in self.puts:
            octets += len(put.properties) + ROW_BYTES
            if put.shared is None or put.shared != last:  # puts that share a body are adjacent
                octets += len(put.body)
            last = put.shared
        for _, revised in self.revisions:
            octets += len(revised) + ROW_BYTES
        return octets


@value
class Store:
    """Publishes, acknowledgements and ``tx.commit`` outside of branches: all of *change*, or nothing."""

    change: Change
    journal: ClassVar[None] = None


class DestinationKind(StrEnum):
    """The kind of a binding's destination."""

    QUEUE = "queue"
    EXCHANGE = "exchange"


class ExchangeKey(NamedTuple):
    """The name of a durable exchange."""

    vhost: str
    name: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeRow:
    """A durable exchange; *arguments* is its field table as on the wire, without the length."""

    vhost: str
    name: bytes
    type: str
    auto_delete: bool = False
    internal: bool = False
    arguments: bytes = b""

    @property
    def key(self) -> ExchangeKey:
        """The name of this exchange."""
        return ExchangeKey(self.vhost, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRow:
    """A durable queue; *delivered* is written by :attr:`Change.delivered` only."""

    vhost: str
    id: int
    name: bytes
    auto_delete: bool = False
    arguments: bytes = b""
    delivered: int = 0


class BindingRow(NamedTuple):
    """A binding between durable exchanges and queues; all fields together identify it."""

    vhost: str
    source: bytes
    destination_kind: DestinationKind
    destination: bytes
    routing_key: bytes
    arguments: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Define:
    """Changes of durable topology, in one transaction: removals before additions.

    It may be written twice without harm. The messages of a removed queue are deleted later, in pieces.

    Args:
        exchanges, queues, bindings: to add, or to keep when they exist.
        removed_exchanges, removed_queues, removed_bindings: to remove; a queue by its id.
    """

    exchanges: Sequence[ExchangeRow] = ()
    removed_exchanges: Sequence[ExchangeKey] = ()
    queues: Sequence[QueueRow] = ()
    removed_queues: Sequence[int] = ()
    bindings: Sequence[BindingRow] = ()
    removed_bindings: Sequence[BindingRow] = ()
    change: ClassVar[None] = None
    journal: ClassVar[None] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Definitions:
    """All durable topology of a resource manager."""

    exchanges: tuple[ExchangeRow, ...] = ()
    queues: tuple[QueueRow, ...] = ()
    bindings: tuple[BindingRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueContents:
    """The contents of one queue, without bodies, as read at startup.

    Args:
        queue: its id.
        positions: of all its messages, in order; signed 64 bits.
        transient: positions of the messages that a restart drops.
        expiries: position and expiry time of the messages that expire.
        flags, sizes: flags and body bytes of the message at each of *positions*; ``None`` when not asked for.
    """

    queue: int
    positions: "array[int]"
    transient: "array[int]"
    expiries: Sequence[tuple[int, float]] = ()
    flags: "array[int] | None" = None
    sizes: "array[int] | None" = None
