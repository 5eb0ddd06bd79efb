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


class Evictable(Protocol):
    """A queue's index, as the cache sees it."""

    cached: int
    """Octets that it holds."""

    def evict(self, octets: int) -> None:
        """Let go of messages that cost *octets* together, or of all that it can spare."""


class MessageCache:
    """The bodies in memory, of all queues together.

    Args:
        limit: octets.
    """

    __slots__ = ("_members", "limit", "trigger", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.trigger = limit
        """Who makes :attr:`used` go beyond this calls :meth:`shrink`."""
        self.used = 0
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
            before = member.cached
            member.evict(wanted)
            wanted -= before - member.cached
        # What could not be spared (it is about to be delivered) is not asked for again by each message that comes.
        self.trigger = max(self.limit, self.used + slack)
