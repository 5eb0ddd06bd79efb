"""What standalone mode stores: messages, and what they are routed by.

A message has one row for each queue that it is routed to; a body that is not short is stored once, and these rows share
it. A row is inserted and deleted, and nothing in between on any hot path. It may be there and yet be seen by nobody:
while a branch in the log names its slot as *published*.
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
        position: from one counter of the resource manager that only grows, so it orders each queue, and no slot is
            ever used twice.
    """

    queue: int
    position: int


_SLOTS: Final = Struct(">qq")
_pack_slot: Final = _SLOTS.pack


def pack_slots(slots: Sequence[Slot]) -> bytes:
    """Slots as ``branch`` keeps them: queue and position, 64 bits each."""
    return b"".join([_pack_slot(queue, position) for queue, position in slots])


def unpack_slots(data: bytes | None) -> tuple[Slot, ...] | None:
    """What :func:`pack_slots` made; null is ``None``."""
    return None if data is None else tuple(map(Slot._make, _SLOTS.iter_unpack(data)))


MARK_BYTES: Final = 4
"""Of four billion names two have the same mark, and finding one of them costs a close look."""


@lru_cache(maxsize=4096)
def mark(name: bytes) -> bytes:
    """The mark of a name: a few bytes in a branch's row, by which a look for one name passes over branches without it.

    The names themselves are beside the messages, and a look into those of a hundred thousand branches takes seconds. A
    mark that is found is looked at closely; one that is not found proves that the name is not there. It is stored, so
    it never changes.
    """
    return sha256(name).digest()[:MARK_BYTES]


def marks(names: Iterable[bytes]) -> bytes:
    """The marks of all *names*, each once."""
    return b"".join(map(mark, dict.fromkeys(names)))


class MessageFlag(IntFlag):
    """Bits of :attr:`StoredMessage.flags`. Bits 8 to 15 are the priority, in queues that have priorities."""

    PERSISTENT = 1
    BLIND = 2
    """The properties have BCC, which is for a dead letter's routing; nobody gets to see it."""


PRIORITY_SHIFT: Final = 8
"""``flags >> PRIORITY_SHIFT & 0xFF`` is the message's priority."""


SHARED_BYTES: Final = 2048
"""A body of so many bytes is stored once for all queues of a message. Copies of a shorter one cost less than the row of
their own that a shared one has, and the count of its uses."""
ROW_BYTES: Final = 256
"""Of a message's names and columns, about."""


_SLOT_BYTES: Final = 64
"""Of a slot, with the log that PostgreSQL writes for a deletion."""


class StoredMessage(NamedTuple):
    """One row of ``message``, with its body: a tuple, since the hot path makes one for each message.

    Args:
        queue, position: its slot.
        exchange, routing_key: as published.
        flags: see :class:`MessageFlag`; a message that is not persistent does not survive a restart.
        properties: content header from the property flags on, as received.
        body: the message body.
        expires_at: seconds since the epoch, or ``None``.
        shared: the id of a body that messages in several queues share, or ``None``. All of them enter by one
            :class:`Change`, and all have the body.
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
        """Where it is."""
        return Slot(self.queue, self.position)

    @property
    def priority(self) -> int:
        """See :class:`MessageFlag`."""
        return self.flags >> PRIORITY_SHIFT & 0xFF


@value
class Change:
    """Of messages, in the transaction of the record that carries it. Puts come before drops.

    Args:
        puts: messages that enter; a slot that is taken refuses the record (LogConflict).
        drops: messages that leave; one that is gone already is no error.
        expiries: messages that get another time to expire (seconds since the epoch).
        revisions: messages that get other properties; one that is gone already is no error.
        delivered: by queue id, the position up to which messages may have been delivered before; it only grows.
    """

    puts: Sequence[StoredMessage] = ()
    drops: Sequence[Slot] = ()
    expiries: Sequence[tuple[Slot, float]] = ()
    revisions: Sequence[tuple[Slot, bytes]] = ()
    delivered: Sequence[tuple[int, int]] = ()

    @property
    def size(self) -> int:
        """Octets of the messages that enter, and the work of others in terms of that, about."""
        octets = (len(self.drops) + len(self.expiries)) * _SLOT_BYTES
        last: int | None = None
        for put in self.puts:
            octets += len(put.properties) + ROW_BYTES
            if put.shared is None or put.shared != last:  # those that share a body follow each other
                octets += len(put.body)
            last = put.shared
        for _, revised in self.revisions:
            octets += len(revised) + ROW_BYTES
        return octets


@value
class Store:
    """Publishes, acknowledgements and ``tx.commit`` outside of branches: all of *change* or nothing."""

    change: Change
    journal: ClassVar[None] = None


class DestinationKind(StrEnum):
    """What a binding leads to."""

    QUEUE = "queue"
    EXCHANGE = "exchange"


class ExchangeKey(NamedTuple):
    """Names a durable exchange."""

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
        """What names it."""
        return ExchangeKey(self.vhost, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRow:
    """A durable queue; *delivered* is set by :attr:`Change.delivered` alone and only read here."""

    vhost: str
    id: int
    name: bytes
    auto_delete: bool = False
    arguments: bytes = b""
    delivered: int = 0


class BindingRow(NamedTuple):
    """A binding between durable things; all of it together names it."""

    vhost: str
    source: bytes
    destination_kind: DestinationKind
    destination: bytes
    routing_key: bytes
    arguments: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Define:
    """Durable topology comes and goes, in one transaction: what goes leaves before what comes.

    All of it may be written again without harm. The messages of a queue that goes are removed later, in pieces.

    Args:
        exchanges, queues, bindings: they are there afterwards, whether they were before or not.
        exchanges_gone, queues_gone, bindings_gone: they are not; a queue is named by its id.
    """

    exchanges: Sequence[ExchangeRow] = ()
    exchanges_gone: Sequence[ExchangeKey] = ()
    queues: Sequence[QueueRow] = ()
    queues_gone: Sequence[int] = ()
    bindings: Sequence[BindingRow] = ()
    bindings_gone: Sequence[BindingRow] = ()
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
    """What a start learns of one queue without reading a single body.

    Args:
        queue: its id.
        positions: of all its messages, in order; signed 64 bits.
        transient: positions of those that a restart drops.
        expiries: position and time, of those that expire.
        flags, sizes: of the message at each of *positions*, where asked for: flags and octets of the body.
    """

    queue: int
    positions: "array[int]"
    transient: "array[int]"
    expiries: Sequence[tuple[int, float]] = ()
    flags: "array[int] | None" = None
    sizes: "array[int] | None" = None
