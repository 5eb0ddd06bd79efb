"""What branches do to messages: hidden until the branch commits, held until it ends. See :class:`LocalStore`."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from dtx.log.api import LeaseLost, LogError, MessageLog
from dtx.log.changes import Change, Slot, StoredMessage
from dtx.store.api import Plan
from dtx.store.postgres.cache import cost
from dtx.store.postgres.deadletter import expiry
from dtx.store.postgres.recording import Recorder
from dtx.store.postgres.registry import Registry, by_queue
from dtx.store.postgres.traits import traits
from dtx.store.work import HeldPublish, HeldWork
from dtx.telemetry import get_logger
from dtx.xa.codes import ReplyCode, XaError

_READ_OCTETS: Final = 8 << 20
_RETRY_SECONDS: Final = 0.5

log = get_logger(part="store")


class Branches:
    """The messages of branches.

    A branch commits soon after its vote, mostly: so what it has put is kept in memory for that moment, the latest
    messages up to a limit, and read from the log otherwise.

    Args:
        log_: open.
        recorder: of changes.
        registry: of queues.
        clock: seconds since the epoch.
        limit: octets of messages in memory.
    """

    def __init__(
        self, log_: MessageLog, recorder: Recorder, registry: Registry, clock: Callable[[], float], limit: int
    ) -> None:
        self._log = log_
        self._recorder = recorder
        self._registry = registry
        self._clock = clock
        self._limit = limit
        self._used = 0
        self._hidden: OrderedDict[Slot, StoredMessage] = OrderedDict()
        self._lifetimes: dict[Slot, float] = {}

    def restored(self, slot: Slot, lifetime: float) -> None:
        """A message of a branch that the log has expires *lifetime* seconds after the branch commits."""
        self._lifetimes[slot] = lifetime

    def plan(self, work: HeldWork) -> Plan:
        """See :class:`dtx.store.api.LocalStore`.

        Raises:
            XaError: 541: the log does not have a queue yet that was declared when the database was away.
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
                unroutable.append(item)
                continue
            facts = traits(item.properties)
            for entry in found:
                if entry.spec.id in unsure:
                    raise XaError(ReplyCode.INTERNAL_ERROR, f"the database does not have {entry.spec.where} yet")
                puts.append(
                    registry.stored(entry, item.exchange, item.routing_key, item.properties, item.body, facts, now)
                )
        for message in puts:
            self._keep(message)
        return Plan(
            change=Change(puts=puts),
            published=tuple([message.slot for message in puts]),
            consumed=tuple(consumed),
            unroutable=tuple(unroutable),
        )

    def _keep(self, message: StoredMessage) -> None:
        hidden = self._hidden
        hidden[message.slot] = message
        self._used += cost(message)
        while self._used > self._limit:
            self._used -= cost(hidden.popitem(last=False)[1])

    def _take(self, slot: Slot) -> StoredMessage | None:
        message = self._hidden.pop(slot, None)
        if message is not None:
            self._used -= cost(message)
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
            elif slot in self._lifetimes:
                expiries.append((slot, now + self._lifetimes[slot]))
        gone = [slot for slot in published if slot.queue not in self._registry.queues]
        return Change(drops=[*consumed, *gone], expiries=expiries)

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
        for queue, positions in by_queue(consumed).items():
            entry = self._registry.find(queue)
            if entry is not None:
                entry.index.commit(positions)
        now = self._clock()
        unread: list[Slot] = []
        for slot in published:
            self._lifetimes.pop(slot, None)
            message = self._take(slot)
            entry = self._registry.find(slot.queue)
            if entry is None:
                continue
            if message is None:
                unread.append(slot)
            else:
                entry.index.put(message, now)
        if unread:
            self._recorder.spawn(self._show(unread))

    async def _show(self, slots: list[Slot]) -> None:
        """Show messages that are in the log alone."""
        while slots:
            try:
                read = await self._log.read_messages(slots, _READ_OCTETS)
            except LeaseLost:
                raise
            except LogError as error:
                log.warning("committed messages could not be read, trying again", error=str(error))
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            now = self._clock()
            for slot, message in read.items():
                entry = self._registry.find(slot.queue)
                if entry is not None:
                    entry.index.put(message, now)
            if not read:
                log.error("committed messages are not in the database any more", count=len(slots))
                return
            slots = slots[slots.index(next(reversed(read))) + 1 :]

    def rolled_back(self, published: Sequence[Slot], consumed: Sequence[Slot]) -> None:
        """See :class:`dtx.store.api.LocalStore`."""
        now = self._clock()
        for slot in published:
            self._lifetimes.pop(slot, None)
            self._take(slot)
        for queue, positions in by_queue(consumed).items():
            entry = self._registry.find(queue)
            if entry is not None:
                entry.index.rollback(positions, now)
