"""The messages of branches: published ones are hidden until the commit, consumed ones are held until the end."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from dtx import failpoint
from dtx.failpoint import Point
from dtx.log.changes import Change, Slot, StoredMessage
from dtx.store.api import Plan
from dtx.store.postgres.cache import CachedBodies
from dtx.store.postgres.message_counts import BrokerCounts
from dtx.store.postgres.property_scan import expiry, traits, without_bcc
from dtx.store.postgres.recorder import Recorder
from dtx.store.postgres.registry import QueueEntry, Registry, by_queue
from dtx.store.work import HeldPublish, HeldWork
from dtx.xa.codes import ReplyCode, XaError


class Hidden(NamedTuple):
    """The details that a queue needs of a message that a branch has put, and whose body is not in memory.

    Args:
        priority: of the message.
        octets: size of its body in bytes.
        lifetime: seconds from the commit on; ``None`` if it does not expire.
        expires_at: seconds since the epoch, once the commit is on its way.
    """

    priority: int = 0
    octets: int = 0
    lifetime: float | None = None
    expires_at: float | None = None


_PLAIN: Final = Hidden()


class StoredBranches:
    """The messages of branches: the part of :class:`dtx.store.api.LocalStore` for votes and ends of branches.

    Most branches commit soon after their vote. So the messages that they have put stay in memory until then: the latest
    ones, up to a limit. The queue reads the bodies of other messages when their turn comes.

    Args:
        recorder: of changes.
        registry: of queues.
        clock: seconds since the epoch.
        limit: bytes of messages in memory.
    """

    def __init__(self, recorder: Recorder, registry: Registry, clock: Callable[[], float], limit: int) -> None:
        self._recorder = recorder
        self._registry = registry
        self._clock = clock
        self._limit = limit
        self.counts = BrokerCounts()
        """What concerns no queue, or queues that are deleted."""
        self._contents = CachedBodies()
        self._hidden: OrderedDict[Slot, StoredMessage] = OrderedDict()
        self._stored: dict[Slot, Hidden] = {}
        # For queues with x-expires: positions of messages of branches that have voted. Such a queue does not expire.
        self._expected_messages: dict[int, set[int]] = {}

    def awaits(self, queue: int) -> bool:
        """Whether a branch that has voted has messages for *queue*: then the queue must not expire."""
        return queue in self._expected_messages

    def _expect_message(self, slot: Slot) -> None:
        self._expected_messages.setdefault(slot.queue, set()).add(slot.position)

    def _settle(self, published: Sequence[Slot], now: float) -> None:
        """Drop the promises of a branch that has ended."""
        for slot in published if self._expected_messages else ():
            positions = self._expected_messages.get(slot.queue)
            if positions is None:
                continue
            positions.discard(slot.position)
            if not positions:
                del self._expected_messages[slot.queue]
                entry = self._registry.find(slot.queue)
                if entry is not None:
                    entry.index.touch(now)

    def restored(self, slot: Slot, hidden: Hidden) -> None:
        """Note the details of a message that a voted branch has put."""
        entry = self._registry.find(slot.queue)
        if entry is not None and entry.spec.settings.expires is not None:
            self._expect_message(slot)
        if hidden != _PLAIN:
            self._stored[slot] = hidden

    def defined_for(self, work: HeldWork) -> Awaitable[None] | None:
        """See :class:`dtx.store.api.LocalStore`."""
        if not self._recorder.undefined:
            return None
        publishes = (item for item in work.items if isinstance(item, HeldPublish))
        future = self._recorder.defined_queues([queue for publish in publishes for queue in publish.queues])
        return None if future is None else asyncio.shield(future)

    def refusal(self, work: HeldWork) -> str | None:
        """Why a queue would refuse the messages that *work* publishes to it; ``None`` if none refuses."""
        if not self._registry.some_refuse:
            return None
        wanted: dict[QueueEntry, tuple[int, int]] = {}
        for item in work.items:
            if isinstance(item, HeldPublish):
                for entry in map(self._registry.find, item.queues):
                    if entry is not None and entry.refuses:
                        count, octets = wanted.get(entry, (0, 0))
                        wanted[entry] = count + 1, octets + len(item.body)
        for entry, (count, octets) in wanted.items():
            if not entry.index.fits(count, octets):
                return f"{entry.spec.where} is full (reject-publish)"
        return None

    def plan(self, vhost: str, work: HeldWork) -> Plan:  # noqa: ARG002 - ids of queues are the resource manager's
        """See :class:`dtx.store.api.LocalStore`.

        Raises:
            XaError: 541, the log does not have a queue yet that was declared while the database was away.
        """
        now = self._clock()
        registry = self._registry
        unsure = self._recorder.unsure
        puts: list[StoredMessage] = []
        consumed: list[Slot] = []
        unroutable: list[HeldPublish] = []
        for item in work.items:
            if not isinstance(item, HeldPublish):
                assert item.slot is not None, "a delivery of standalone mode names its slot"
                consumed.append(item.slot)
                continue
            found = [entry for entry in map(registry.find, item.queues) if entry is not None]
            if not found:
                unroutable.append(_shown(item))
                continue
            facts = traits(item.properties)
            shared = registry.share(item.body, len(found))
            for entry in found:
                if entry.spec.id in unsure:
                    raise XaError(ReplyCode.INTERNAL_ERROR, f"the database does not have {entry.spec.where} yet")
                puts.append(registry.stored(entry, item, facts, now, shared))
        published = tuple([message.slot for message in puts])
        self._keep(published, puts)
        return Plan(
            change=Change(puts=puts),
            published=published,
            consumed=tuple(consumed),
            unroutable=tuple(unroutable),
        )

    def _keep(self, published: Sequence[Slot], puts: Sequence[StoredMessage]) -> None:
        hidden, contents = self._hidden, self._contents
        if self._registry.some_expire:
            self._expect_in_expiring_queues(published)
        for slot, message in zip(published, puts, strict=True):
            hidden[slot] = contents.add(message)
            while contents.used > self._limit:
                self._evict(hidden.popitem(last=False)[1])

    def _expect_in_expiring_queues(self, published: Sequence[Slot]) -> None:
        found = map(self._registry.find, {slot.queue for slot in published})
        expiring = {entry.spec.id for entry in found if entry is not None and entry.spec.settings.expires is not None}
        for slot in published:
            if slot.queue in expiring:
                self._expect_message(slot)

    def _evict(self, message: StoredMessage) -> None:
        self._contents.remove(message)
        entry = self._registry.find(message.queue)
        if entry is None:
            return
        settings = entry.spec.settings
        lifetime = expiry(traits(message.properties).expiration, settings.message_ttl, 0.0)
        octets = 0 if settings.max_length_bytes is None else len(message.body)
        # If the commit is under way, this is when the message expires. Otherwise the commit sets it.
        self.restored(message.slot, Hidden(message.priority, octets, lifetime, message.expires_at))

    def _take(self, slot: Slot) -> StoredMessage | None:
        message = self._hidden.pop(slot, None)
        if message is not None:
            self._contents.remove(message)
        return message

    def committing(self, published: Sequence[Slot], consumed: Sequence[Slot]) -> Change:
        """See :class:`dtx.store.api.LocalStore`: a message begins to expire when it can be seen."""
        now = self._clock()
        expiries: list[tuple[Slot, float]] = []
        for slot in published:
            message = self._hidden.get(slot)
            if message is not None:
                if message.expires_at is not None:
                    renewed = self._renewed(message, now)
                    self._hidden[slot] = renewed
                    assert renewed.expires_at is not None
                    expiries.append((slot, renewed.expires_at))
            elif slot in self._stored:
                stored = self._stored[slot]
                if stored.lifetime is not None:
                    expires_at = now + stored.lifetime
                    self._stored[slot] = stored._replace(expires_at=expires_at)
                    expiries.append((slot, expires_at))
        deleted = [slot for slot in published if slot.queue not in self._registry.queues]
        return Change(drops=[*consumed, *deleted], expiries=expiries)

    def _renewed(self, message: StoredMessage, now: float) -> StoredMessage:
        entry = self._registry.find(message.queue)
        ttl = None if entry is None else entry.spec.settings.message_ttl
        at = expiry(traits(message.properties).expiration, ttl, now)
        return message if at is None else message._replace(expires_at=at)

    def rolling_back(self, published: Sequence[Slot], consumed: Sequence[Slot]) -> Change:  # noqa: ARG002
        """See :class:`dtx.store.api.LocalStore`."""
        return Change(drops=published)

    def committed(self, published: Sequence[Slot], consumed: Sequence[Slot]) -> None:
        """See :class:`dtx.store.api.LocalStore`."""
        if failpoint.armed:
            failpoint.at(Point.SHOWN_BEFORE)
        for queue, positions in by_queue(consumed).items():
            entry = self._registry.find(queue)
            if entry is not None:
                entry.index.commit(positions)
        now = self._clock()
        self._settle(published, now)
        for slot in published:
            stored = self._stored.pop(slot, _PLAIN)
            message = self._take(slot)
            entry = self._registry.find(slot.queue)
            if entry is None:  # the queue was deleted, perhaps during the write
                self._recorder.drop([slot])
                continue
            entry.index.count_publish()
            if message is None:
                entry.index.reveal(
                    slot.position, now, priority=stored.priority, octets=stored.octets, expires_at=stored.expires_at
                )
            else:
                entry.index.put(message, now)
        if failpoint.armed:
            failpoint.at(Point.SHOWN_AFTER)

    def dropped(self) -> None:
        """See :class:`dtx.store.api.LocalStore`."""
        self.counts.drop_unroutable += 1

    def rolled_back(self, published: Sequence[Slot], consumed: Sequence[Slot]) -> None:
        """See :class:`dtx.store.api.LocalStore`."""
        if failpoint.armed:
            failpoint.at(Point.RETURNED_BEFORE)
        now = self._clock()
        self._settle(published, now)
        for slot in published:
            self._stored.pop(slot, None)
            self._take(slot)
        for queue, positions in by_queue(consumed).items():
            entry = self._registry.find(queue)
            if entry is not None:
                entry.index.rollback(positions, now)
        if failpoint.armed:
            failpoint.at(Point.RETURNED_AFTER)


def _shown(publish: HeldPublish) -> HeldPublish:
    """*publish* as it is returned to its publisher, without BCC."""
    if publish.blind:
        return replace(publish, properties=without_bcc(publish.properties), blind=False)
    return publish
