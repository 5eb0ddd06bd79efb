"""How much memory the messages of all queues take that wait with their bodies.

What is not here is read from the database when its turn comes. So what is let go first is what is furthest from its
turn: the end of the queue that holds most.
"""

from typing import Final, Protocol

from dtx.log.changes import StoredMessage

OVERHEAD: Final = 400
"""Octets that a message costs beside its content: tuple, bytes objects, dictionary entry (CPython 3.11, 64 bit)."""
SLACK: Final = 8
"""An eviction frees an eighth of the limit, so that not every message of a full cache has to evict one."""


def cost(message: StoredMessage) -> int:
    """Octets that *message* takes."""
    return OVERHEAD + len(message.body) + len(message.properties)


class Contents:
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


class MessageCache(Contents):
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
