"""Messages in memory: those of one queue that are ready, and how much those of all queues may take.

What is not here is read from the database when its turn comes. So what is let go first is what is furthest from its
turn: the end of the queue that holds most.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from dtx.log.changes import StoredMessage
from dtx.store.postgres.consumers import DispatchRound

OVERHEAD: Final = 400
"""Octets that a message costs beside its content: tuple, bytes objects, dictionary entry (CPython 3.11, 64 bit)."""
SLACK: Final = 8
"""An eviction frees an eighth of the limit, so that not every message of a full cache has to evict one."""


def cost(message: StoredMessage) -> int:
    """Octets that *message* takes."""
    return OVERHEAD + len(message.body) + len(message.properties)


class CachedBodies:
    """What messages take in memory; a body that several of them share counts once."""

    __slots__ = ("_shared", "used")

    def __init__(self) -> None:
        self.used = 0
        """Octets."""
        self._shared: dict[int, tuple[bytes, int]] = {}
        """By the id of a body: that body, and how many messages here have it."""

    def add(self, message: StoredMessage) -> StoredMessage:
        """*message* is kept; returns it, with the very body that others have which share it."""
        octets = cost(message)
        if message.shared is not None:
            body, uses = self._shared.get(message.shared, (message.body, 0))
            self._shared[message.shared] = body, uses + 1
            if uses:
                octets -= len(body)
                message = message._replace(body=body)
        self.used += octets
        return message

    def remove(self, message: StoredMessage) -> None:
        """*message*, which was added, is kept no more."""
        octets = cost(message)
        if message.shared is not None:
            body, uses = self._shared[message.shared]
            if uses > 1:
                self._shared[message.shared] = body, uses - 1
                octets -= len(body)
            else:
                del self._shared[message.shared]
        self.used -= octets


class Evictable(Protocol):
    """A queue's index, as the cache sees it."""

    cached: int
    """Octets that it holds, with all bodies that it shares with others."""

    def evict(self, octets: int) -> None:
        """Let go of messages that cost *octets* together, or of all that it can spare."""


class MessageCache(CachedBodies):
    """The bodies in memory, of all queues together.

    Args:
        limit: octets.
    """

    __slots__ = ("_members", "limit", "trigger")

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.trigger = limit
        """Who makes :attr:`used` go beyond this calls :meth:`shrink`."""
        self._members: dict[Evictable, None] = {}

    def join(self, member: Evictable) -> None:
        """A queue is there."""
        self._members[member] = None

    def leave(self, member: Evictable) -> None:
        """A queue is gone; it holds nothing any more."""
        self._members.pop(member, None)

    def shrink(self) -> None:
        """Come back below the limit, as far as the queues can spare what they hold."""
        slack = self.limit // SLACK
        wanted = self.used - (self.limit - slack)
        for member in sorted(self._members, key=lambda member: -member.cached):
            if wanted <= 0:
                break
            # A body that is shared is free when the last queue lets it go: so each gives up as much of its own end.
            before = self.used
            member.evict(wanted)
            wanted -= before - self.used
        # What could not be spared (it is about to be delivered) is not asked for again by each message that comes.
        self.trigger = max(self.limit, self.used + slack)


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

    def __init__(self, cache: MessageCache, turns: DispatchRound, getters: Sequence[object]) -> None:
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
