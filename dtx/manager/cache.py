"""Messages of prepared branches that are kept in memory, so that a commit soon after need not read them back."""

from collections import OrderedDict

from dtx.manager.entry import Entry


class WorkCache:
    """Bounded by octets; the oldest leave first. What has left is read from the log.

    Args:
        limit: octets of properties and bodies.
    """

    __slots__ = ("_entries", "_limit", "_used")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._entries: OrderedDict[Entry, int] = OrderedDict()

    def keep(self, entry: Entry) -> None:
        """Keep the messages of a prepared branch."""
        rows = entry.cached
        if rows is None or entry in self._entries:
            return
        size = sum(len(work.body) + len(work.properties) + 256 for work in rows)
        self._entries[entry] = size
        self._used += size
        while self._used > self._limit:
            oldest, freed = self._entries.popitem(last=False)
            oldest.cached = None
            self._used -= freed

    def drop(self, entry: Entry) -> None:
        """The branch has ended."""
        self._used -= self._entries.pop(entry, 0)
        entry.cached = None
