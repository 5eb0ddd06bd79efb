"""Messages and topology of the in-memory twin of the log."""

from array import array
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

from dtx.log.api import LogConflict
from dtx.log.changes import (
    BindingRow,
    Change,
    Define,
    Definitions,
    ExchangeKey,
    ExchangeRow,
    MessageFlag,
    QueueContents,
    QueueRow,
    Slot,
    StoredMessage,
)


class MemoryMessages:
    """The messages and topology of :class:`tests.support.memory_log.MemoryDatabase`, with their resource managers."""

    def __init__(self) -> None:
        self.messages: Final[dict[Slot, tuple[str, StoredMessage]]] = {}
        self._exchanges: Final[dict[tuple[str, ExchangeKey], ExchangeRow]] = {}
        self._queues: Final[dict[int, tuple[str, QueueRow]]] = {}
        self._bindings: Final[dict[tuple[str, BindingRow], None]] = {}

    def check(self, change: Change | None) -> None:
        """Check that :meth:`apply` can make *change*.

        Raises:
            LogConflict: a slot is occupied or invalid.
        """
        puts = [put.slot for put in change.puts] if change is not None else []
        if len(set(puts)) != len(puts) or any(slot in self.messages for slot in puts):
            raise LogConflict("a slot is taken")
        if any(slot.queue <= 0 or slot.position < 0 for slot in puts):
            raise LogConflict("a slot is negative")

    def apply(self, rm: str, change: Change) -> None:
        """Put, then set expiries and properties, then drop, then set the marks of deliveries."""
        for put in change.puts:
            self.messages[put.slot] = rm, put._replace(expires_at=_rounded(put.expires_at))
        for slot, expires_at in change.expiries:
            if self._has(rm, slot):
                self.messages[slot] = rm, self.messages[slot][1]._replace(expires_at=_rounded(expires_at))
        for slot, revised in change.revisions:
            if self._has(rm, slot):
                self.messages[slot] = rm, self.messages[slot][1]._replace(properties=revised)
        for slot in change.drops:
            if self._has(rm, slot):
                del self.messages[slot]
        for queue, position in change.delivered:
            found = self._queues.get(queue)
            if found is not None and found[0] == rm and found[1].delivered < position:
                self._queues[queue] = rm, replace(found[1], delivered=position)

    def _has(self, rm: str, slot: Slot) -> bool:
        return slot in self.messages and self.messages[slot][0] == rm

    def define(self, rm: str, record: Define) -> None:
        """Change the topology of *rm*.

        Raises:
            LogConflict: another queue has the name.
        """
        left = {id_: row for id_, row in self._queues.items() if not (row[0] == rm and id_ in record.removed_queues)}
        names = {(owner, row.vhost, row.name): id_ for id_, (owner, row) in left.items()}
        if any(names.setdefault((rm, row.vhost, row.name), row.id) != row.id for row in record.queues):
            raise LogConflict("another queue has this name")
        for binding in record.removed_bindings:
            self._bindings.pop((rm, binding), None)
        for queue in self._queues.keys() - left.keys():
            del self._queues[queue]
        for key in record.removed_exchanges:
            self._exchanges.pop((rm, key), None)
        for exchange in record.exchanges:
            self._exchanges[rm, exchange.key] = exchange
        for row in record.queues:
            self._queues.setdefault(row.id, (rm, row))
        for binding in record.bindings:
            self._bindings[rm, binding] = None

    def definitions(self, rm: str) -> Definitions:
        """All durable topology of *rm*."""
        return Definitions(
            exchanges=tuple(row for (owner, _), row in sorted(self._exchanges.items()) if owner == rm),
            queues=tuple(row for _, (owner, row) in sorted(self._queues.items()) if owner == rm),
            bindings=tuple(row for owner, row in sorted(self._bindings) if owner == rm),
        )

    def name(self, queue: int) -> bytes | None:
        """The name of a queue; ``None`` if it is deleted or not durable."""
        found = self._queues.get(queue)
        return None if found is None else found[1].name

    def contents(self, queue: int, *, detailed: bool) -> QueueContents:
        """The stored messages of *queue*."""
        rows = [self.messages[slot][1] for slot in sorted(self.messages) if slot.queue == queue]
        return QueueContents(
            queue=queue,
            positions=array("q", [row.position for row in rows]),
            transient=array("q", [row.position for row in rows if not row.flags & MessageFlag.PERSISTENT]),
            expiries=[(row.position, row.expires_at) for row in rows if row.expires_at is not None],
            flags=array("i", [row.flags for row in rows]) if detailed else None,
            sizes=array("i", [len(row.body) for row in rows]) if detailed else None,
        )

    def read(self, slots: Sequence[Slot], octets: int | None) -> dict[Slot, StoredMessage]:
        """The messages in *slots* that exist, until their bodies have *octets* bytes."""
        found: dict[Slot, StoredMessage] = {}
        left = octets
        for slot in slots:
            if slot in self.messages and (left is None or left > 0):
                message = found[slot] = self.messages[slot][1]
                left = None if left is None else left - len(message.body)
        return found

    def strays(self, rm: str, known: Collection[int]) -> list[int]:
        """Queues of *rm* that have messages and are not in *known*."""
        return sorted({slot.queue for slot, (owner, _) in self.messages.items() if owner == rm} - set(known))


def _rounded(at: float | None) -> float | None:
    """PostgreSQL keeps microseconds."""
    return None if at is None else round(at * 1_000_000) / 1_000_000
