"""The bodies of one queue's ready messages: those kept since they came, and those read for the messages at the head."""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from dtx.log.changes import StoredMessage
from dtx.store.postgres.cache import MessageCache, cost
from dtx.store.postgres.consumers import Round
from dtx.store.postgres.host import Getter

FETCH_MESSAGES: Final = 256
"""Bodies asked for at once: one round trip to the database for each so many; what a queue pins in memory at most."""


class Bodies:
    """The messages in memory, by position.

    Args:
        cache: what may be in memory, of all queues together.
        turns: the consumers of the queue, and
        getters: those who have asked for one message: while there are any, what was read for the head stays.
    """

    __slots__ = ("_asked", "_cache", "_fetched", "_getters", "_kept", "_sharing", "_turns", "cached")

    def __init__(self, cache: MessageCache, turns: Round, getters: Sequence[Getter]) -> None:
        self.cached = 0
        self._cache = cache
        self._turns = turns
        self._getters = getters
        self._kept: dict[int, StoredMessage] = {}
        self._fetched: dict[int, StoredMessage] = {}
        self._asked: set[int] = set()
        self._sharing: set[int] = set()
        """Positions of those here that share their body."""
        cache.join(self)

    def __len__(self) -> int:
        return len(self._kept) + len(self._fetched)

    def find(self, position: int) -> StoredMessage | None:
        """The message at *position*, if it is here."""
        return self._kept.get(position) or self._fetched.get(position)

    def keep(self, message: StoredMessage) -> None:
        """A message that has just come; it is greater than those kept so far, or nearly so."""
        self._add(message, self._kept)

    def take(self, position: int) -> StoredMessage | None:
        """The message at *position* is not ready any more; returns it if it is here."""
        message = self._kept.pop(position, None) or self._fetched.pop(position, None)
        if message is None:
            self._asked.discard(position)
        else:
            self._discharge(message)
        return message

    def ask(self, first: Callable[[int], list[int]]) -> list[int]:
        """What is to be read now, if anything: it is asked for until :meth:`arrived`.

        Args:
            first: the first so many of what is ready.
        """
        if self._asked:
            return []
        wanted = [position for position in first(FETCH_MESSAGES) if self.find(position) is None]
        self._asked.update(wanted)
        return wanted

    def arrived(self, positions: Iterable[int], messages: Iterable[StoredMessage]) -> None:
        """These *positions* were asked for, and *messages* are what was read of them."""
        for message in messages:
            # Not those that were purged or have expired meanwhile.
            if message.position in self._asked:
                self._add(message, self._fetched)
        self._asked.difference_update(positions)

    def clear(self) -> None:
        """Nothing is ready any more."""
        self._asked.clear()
        for message in [self.find(position) for position in self._sharing]:
            assert message is not None
            self._discharge(message)
        self._cache.used -= self.cached
        self.cached = 0
        self._kept.clear()
        self._fetched.clear()

    def close(self) -> None:
        """The queue is gone."""
        self.clear()
        self._cache.leave(self)

    def evict(self, octets: int) -> None:
        """Let bodies go: from the end; those that were read for the head only while nobody wants them."""
        goal = self.cached - octets
        wanted = self._turns.active or self._getters
        for messages in (self._kept,) if wanted else (self._kept, self._fetched):
            while messages and self.cached > goal:
                self._discharge(messages.popitem()[1])

    def _add(self, message: StoredMessage, to: dict[int, StoredMessage]) -> None:
        cache = self._cache
        octets = cost(message)
        self.cached += octets
        if message.shared is None:
            cache.used += octets
        else:
            message = cache.add(message)
            self._sharing.add(message.position)
        to[message.position] = message
        if cache.used > cache.trigger:
            cache.shrink()

    def _discharge(self, message: StoredMessage) -> None:
        octets = cost(message)
        self.cached -= octets
        if message.shared is None:
            self._cache.used -= octets
        else:
            self._cache.remove(message)
            self._sharing.discard(message.position)
