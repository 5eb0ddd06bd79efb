"""The queues of all virtual hosts by id, and the form in which a message is stored in a queue."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import Final

from dtx.log.changes import PRIORITY_SHIFT, SHARED_BYTES, MessageFlag, Slot, StoredMessage
from dtx.store.postgres.arguments import Overflow
from dtx.store.postgres.exchanges import QueueSpec
from dtx.store.postgres.property_scan import Traits, expiry, without_bcc
from dtx.store.postgres.queue import QueueIndex
from dtx.store.work import HeldPublish

_PERSISTENT: Final = int(MessageFlag.PERSISTENT)
_BLIND: Final = int(MessageFlag.BLIND)


@dataclass(frozen=True, slots=True, eq=False)
class QueueEntry:
    """One queue.

    Args:
        spec: its declaration.
        index: its messages and consumers.
        refuses: whether it refuses messages when it is full.
        expires: whether it has a TTL for all its messages.
        keeps_blind: whether its dead letters are routed by all keys of the message, including those of BCC.
    """

    spec: QueueSpec
    index: QueueIndex
    refuses: bool
    expires: bool
    keeps_blind: bool

    @property
    def dead_letters_refused(self) -> bool:
        """Whether messages that it refuses become dead letters."""
        settings = self.spec.settings
        return settings.overflow is Overflow.REJECT_PUBLISH_DLX and settings.dead_letter_exchange is not None


class Registry:
    """The queues of all virtual hosts, and the counter that orders their messages.

    The counter is never behind the microseconds of the clock, so that a position tells when its message came.

    Args:
        position: start of the counter.
    """

    def __init__(self, position: int = 0) -> None:
        self.queues: Final[dict[int, QueueEntry]] = {}
        self.find: Final = self.queues.get
        """Returns the queue with an id, or ``None`` if it was deleted."""
        self.some_refuse = False
        """Whether there has been a queue that refuses messages."""
        self.some_expire = False
        """Whether there has been a queue that is deleted when it is unused (x-expires)."""
        self.position = position
        self._bodies = count(secrets.randbits(62))

    def add(self, spec: QueueSpec, index: QueueIndex) -> None:
        """Add a queue."""
        settings = spec.settings
        refuses = settings.overflow is not Overflow.DROP_HEAD
        keeps_blind = settings.dead_letter_exchange is not None and settings.dead_letter_routing_key is None
        self.some_refuse = self.some_refuse or refuses
        self.some_expire = self.some_expire or settings.expires is not None
        self.queues[spec.id] = QueueEntry(spec, index, refuses, settings.message_ttl is not None, keeps_blind)

    def share(self, body: bytes, queues: int) -> int | None:
        """A new id for *body* if as many *queues* are to share it; ``None`` if each gets a copy."""
        return next(self._bodies) if queues > 1 and len(body) >= SHARED_BYTES else None

    def stored(
        self, entry: QueueEntry, publish: HeldPublish, traits: Traits, now: float, shared: int | None = None
    ) -> StoredMessage:
        """A message in a new slot of a queue.

        Args:
            entry: the queue.
            publish: the message; its queues do not matter.
            traits: of its properties.
            now: seconds since the epoch, from which its lifetime counts.
            shared: see :meth:`share`.
        """
        self.position = max(self.position + 1, int(now * 1_000_000))
        properties = publish.properties
        flags = _PERSISTENT if traits.persistent else 0
        if publish.blind:
            if entry.keeps_blind:
                flags |= _BLIND
            else:
                properties = without_bcc(properties)
        settings = entry.spec.settings
        if traits.priority and settings.max_priority:
            flags |= traits.priority << PRIORITY_SHIFT
        expires_at = None
        if entry.expires or traits.expiration is not None:
            expires_at = expiry(traits.expiration, settings.message_ttl, now)
        return StoredMessage(
            entry.spec.id,
            self.position,
            publish.exchange,
            publish.routing_key,
            flags,
            properties,
            publish.body,
            expires_at,
            shared,
        )


def by_queue(slots: Iterable[Slot]) -> dict[int, list[int]]:
    """The positions of *slots*, by queue id."""
    found: dict[int, list[int]] = {}
    for queue, position in slots:
        found.setdefault(queue, []).append(position)
    return found
