"""A start: what the log has of queues becomes their indexes, without reading a body."""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from dtx.log.changes import PRIORITY_SHIFT, QueueContents, Slot
from dtx.log.records import BranchRecord
from dtx.store.postgres.branches import Branches, Hidden
from dtx.store.postgres.registry import Entry, Registry


class Loading:
    """What was loaded, until all branches have said what they hold.

    Args:
        registry: of queues, all durable ones.
        branches: hears of messages that expire after their branch has committed.
    """

    def __init__(self, registry: Registry, branches: Branches) -> None:
        self._registry = registry
        self._branches = branches
        self._contents: Final[dict[int, QueueContents]] = {}
        self._reserved: Final[dict[int, set[int]]] = {}
        self._expiries: Final[dict[int, dict[int, float]]] = {}

    def add(self, contents: QueueContents) -> None:
        """What a queue has."""
        self._expiries[contents.queue] = dict(contents.expiries)
        self._contents[contents.queue] = replace(contents, expiries=())  # once is enough

    def restore(self, record: BranchRecord) -> None:
        """A branch: what it has published is hidden, what it has consumed is held."""
        for slot in record.published or ():
            self._reserved.setdefault(slot.queue, set()).add(slot.position)
            if slot.queue not in self._contents:
                continue  # the queue has not survived
            priority, octets = self._details(slot)
            expires_at = self._expiries[slot.queue].get(slot.position)
            lifetime = None
            if expires_at is not None:
                # it was written with the vote, as if it could be seen from then on
                voted = record.started_at if record.prepared_at is None else record.prepared_at
                lifetime = max(0.0, expires_at - voted)
            self._branches.restored(slot, Hidden(priority, octets, lifetime))
        for slot in record.consumed or ():
            self._reserved.setdefault(slot.queue, set()).add(slot.position)
            entry = self._registry.find(slot.queue)
            if entry is not None:
                self._hold(entry, slot)

    def _hold(self, entry: Entry, slot: Slot) -> None:
        priority, octets = self._details(slot)
        entry.index.restore_held(
            slot.position,
            priority=priority,
            octets=octets,
            expires_at=self._expiries[slot.queue].get(slot.position),
        )

    def _details(self, slot: Slot) -> tuple[int, int]:
        """Priority and octets of a message, in a queue that wants to know."""
        contents = self._contents[slot.queue]
        if contents.flags is None or contents.sizes is None:
            return 0, 0
        at = bisect_left(contents.positions, slot.position)
        if at == len(contents.positions) or contents.positions[at] != slot.position:
            return 0, 0  # somebody removed it behind our back
        return contents.flags[at] >> PRIORITY_SHIFT & 0xFF, contents.sizes[at]

    def finish(self, delivered: Mapping[int, int]) -> "dict[int, array[int]]":
        """Fill the indexes.

        Args:
            delivered: by queue id, up to where messages may have been delivered before.

        Returns:
            Positions by queue of messages that do not survive a restart, and that no branch is concerned with.
        """
        dropped: dict[int, array[int]] = {}
        for queue, contents in self._contents.items():
            entry = self._registry.find(queue)
            if entry is None:
                continue
            reserved = self._reserved.get(queue, set())
            transient = array("q", [position for position in contents.transient if position not in reserved])
            if transient:
                dropped[queue] = transient
            self._fill(entry, contents, reserved.union(transient), delivered.get(queue, 0))
        self._contents.clear()
        return dropped

    def _fill(self, entry: Entry, contents: QueueContents, without: set[int], delivered: int) -> None:
        positions = contents.positions
        expiries = self._expiries.pop(contents.queue)
        octets: dict[int, int] = {}
        priorities: dict[int, int] = {}
        if contents.flags is not None and contents.sizes is not None:
            octets = dict(zip(positions, contents.sizes, strict=True))
            priorities = {
                position: flags >> PRIORITY_SHIFT & 0xFF
                for position, flags in zip(positions, contents.flags, strict=True)
                if flags >> PRIORITY_SHIFT & 0xFF
            }
        if without:
            positions = array("q", [position for position in positions if position not in without])
            for table in (expiries, octets, priorities):
                _remove(table, without)
        entry.index.restore(positions, delivered=delivered, expiries=expiries, octets=octets, priorities=priorities)


def _remove(table: "dict[int, int] | dict[int, float]", keys: Iterable[int]) -> None:
    for key in keys:
        table.pop(key, None)
