"""Messages in memory: the ready messages of one queue, and the memory limit for all queues together.

A message that is not in memory is read from the database when its turn comes. So an eviction begins with the messages
that are furthest from their turn: those at the end of the queue that holds the most bytes.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from dtx.log.changes import StoredMessage
from dtx.store.postgres.consumers import DispatchRound

OVERHEAD: Final = 400
"""Bytes that a message costs on top of its content: tuple, bytes objects, dictionary entry (CPython 3.11, 64 bit)."""
SLACK: Final = 8
"""An eviction frees an eighth of the limit, so that not every message of a full cache has to evict one."""


def cost(message: StoredMessage) -> int:
    """Bytes that *message* takes."""
    return OVERHEAD + len(message.body) + len(message.properties)


class CachedBodies:
    """The memory that messages take. A body that several messages share counts once."""

    __slots__ = ("_shared", "used")

    def __init__(self) -> None:
        self.used = 0
        """Bytes that the messages take."""
        self._shared: dict[int, tuple[bytes, int]] = {}
        """By the id of a body: the body, and the number of messages here that share it."""

    def add(self, message: StoredMessage) -> StoredMessage:
        """Keep *message*. Returns it, with the same body object as the other messages that share the body."""
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
        """Stop keeping *message*, which was added before."""
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
    """The bodies of a queue, as the cache sees them."""

    cached: int
    """Bytes that it holds, including all bodies that it shares with other queues."""

    def evict(self, octets: int) -> None:
        """Evict messages that cost *octets* bytes together, or all messages that it can spare."""


class MessageCache(CachedBodies):
    """The bodies in memory, of all queues together.

    Args:
        limit: bytes.
    """

    __slots__ = ("_members", "limit", "trigger")

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.trigger = limit
        """Code that makes :attr:`used` exceed this value calls :meth:`shrink`."""
        self._members: dict[Evictable, None] = {}

    def join(self, member: Evictable) -> None:
        """Add a queue."""
        self._members[member] = None

    def leave(self, member: Evictable) -> None:
        """Remove a queue that was deleted. It no longer holds messages."""
        self._members.pop(member, None)

    def shrink(self) -> None:
        """Evict messages until the limit is met with some slack, as far as the queues can spare messages."""
        slack = self.limit // SLACK
        wanted = self.used - (self.limit - slack)
        for member in sorted(self._members, key=lambda member: -member.cached):
            if wanted <= 0:
                break
            # A shared body is freed when the last queue evicts it. So each queue evicts as much from its own end.
            before = self.used
            member.evict(wanted)
            wanted -= before - self.used
        # Some messages could not be spared: they are about to be delivered. A higher trigger avoids a try per message.
        self.trigger = max(self.limit, self.used + slack)


FETCH_MESSAGES: Final = 256
"""Bodies asked for at once: one round trip to the database reads this many.

It is also the maximum number of messages that a queue pins in memory.
"""


class Bodies:
    """The messages in memory, by position.

    Args:
        cache: the memory limit for all queues together.
        dispatch_round: the consumers of the queue. While one is active, messages read for the head stay in memory.
        getters: clients that have asked for one message. While there is one, these messages stay in memory too.
    """

    __slots__ = ("_asked", "_cache", "_fetched", "_getters", "_kept", "_round", "_sharing", "cached")

    def __init__(self, cache: MessageCache, dispatch_round: DispatchRound, getters: Sequence[object]) -> None:
        self.cached = 0
        self._cache = cache
        self._round = dispatch_round
        self._getters = getters
        self._kept: dict[int, StoredMessage] = {}
        self._fetched: dict[int, StoredMessage] = {}
        self._asked: set[int] = set()
        self._sharing: set[int] = set()
        """Positions of messages here that share their body."""
        cache.join(self)

    def __len__(self) -> int:
        return len(self._kept) + len(self._fetched)

    def find(self, position: int) -> StoredMessage | None:
        """The message at *position*, if it is here."""
        return self._kept.get(position) or self._fetched.get(position)

    def keep(self, message: StoredMessage) -> None:
        """Keep a message that has just come. Its position is greater than the kept ones, or nearly so."""
        self._add(message, self._kept)

    def take(self, position: int) -> StoredMessage | None:
        """Remove the message at *position*, which is no longer ready. Returns it if it is here."""
        message = self._kept.pop(position, None) or self._fetched.pop(position, None)
        if message is None:
            self._asked.discard(position)
        else:
            self._discharge(message)
        return message

    def ask(self, first: Callable[[int], list[int]]) -> list[int]:
        """The positions to read now, if any. They count as asked for until :meth:`arrived`.

        Args:
            first: returns the first positions that are ready, as many as its argument.
        """
        if self._asked:
            return []
        wanted = [position for position in first(FETCH_MESSAGES) if self.find(position) is None]
        self._asked.update(wanted)
        return wanted

    def arrived(self, positions: Iterable[int], messages: Iterable[StoredMessage]) -> None:
        """Take the *messages* that were read of these *positions*, which were asked for."""
        for message in messages:
            # Messages that were purged or have expired meanwhile are skipped.
            if message.position in self._asked:
                self._add(message, self._fetched)
        self._asked.difference_update(positions)

    def clear(self) -> None:
        """Remove all messages: none is ready any more."""
        self._asked.clear()
        for message in [self.find(position) for position in self._sharing]:
            assert message is not None
            self._discharge(message)
        self._cache.used -= self.cached
        self.cached = 0
        self._kept.clear()
        self._fetched.clear()

    def close(self) -> None:
        """Remove all messages, and leave the cache: the queue is gone."""
        self.clear()
        self._cache.leave(self)

    def evict(self, octets: int) -> None:
        """Evict bodies, from the end.

        Bodies that were read for the head are evicted only while the queue has no active consumer and no getter.
        """
        goal = self.cached - octets
        wanted = self._round.active or self._getters
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
