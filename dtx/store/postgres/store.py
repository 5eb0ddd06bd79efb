"""The message store of standalone mode: exchanges, queues and messages in the log's own database.

Theory of operation. The log holds all durable data; the store is an index of it. Everything is written first and shown
afterwards. A message becomes visible when its row is committed. It leaves the ready messages of its index when it is
handed out. Its row is removed when it was settled. After a failure in between, the index is made from the database.

No caller waits for a record: a change is submitted, others follow, and the commit of each calls back. All messages have
a row while they wait, also those of queues that do not survive a restart. So no queue is limited by memory. Positions
come from one counter, which is never behind the clock's microseconds. It begins behind no position that was delivered
or stored before: no slot of a row is used twice.
"""

import asyncio
import time
from array import array
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from dtx.log.api import LogConflict, LogError, LogUnavailable, MessageLog
from dtx.log.changes import PRIORITY_SHIFT, Change, Define, QueueContents, Slot, Store, StoredMessage
from dtx.log.records import BranchRecord
from dtx.store.postgres.branches import Hidden, StoredBranches
from dtx.store.postgres.cache import MessageCache
from dtx.store.postgres.consumers import Consumer, QueueDelivery
from dtx.store.postgres.dead_letters import DeadLetters
from dtx.store.postgres.dispatcher import Dispatcher
from dtx.store.postgres.exchanges import Queue, QueueSpec
from dtx.store.postgres.property_scan import traits
from dtx.store.postgres.queue import QueueIndex, Reason
from dtx.store.postgres.recorder import DROPS_AT_ONCE, NO_QUEUE_YET, Recorder, Thing
from dtx.store.postgres.registry import QueueEntry, Registry, by_queue
from dtx.store.postgres.topology import DeletedQueues, VirtualHost
from dtx.store.work import HeldPublish
from dtx.telemetry import get_logger


class Loading:
    """The contents that were loaded, until all branches have reported the messages that they hold.

    Args:
        registry: of queues, all durable ones.
        branches: is told of each message that a branch has published.
    """

    def __init__(self, registry: Registry, branches: StoredBranches) -> None:
        self._registry = registry
        self._branches = branches
        self._contents: Final[dict[int, QueueContents]] = {}
        self._reserved: Final[dict[int, set[int]]] = {}
        self._expiries: Final[dict[int, dict[int, float]]] = {}

    def add(self, contents: QueueContents) -> None:
        """Add the contents of a queue."""
        self._expiries[contents.queue] = dict(contents.expiries)
        self._contents[contents.queue] = replace(contents, expiries=())  # kept in _expiries

    def restore(self, record: BranchRecord) -> None:
        """Restore a branch: hide the messages that it has published, and hold those that it has consumed."""
        for slot in record.published or ():
            self._reserved.setdefault(slot.queue, set()).add(slot.position)
            if slot.queue not in self._contents:
                continue  # the queue has not survived
            priority, octets = self._details(slot)
            expires_at = self._expiries[slot.queue].get(slot.position)
            lifetime = None
            if expires_at is not None:
                # the expiry was written with the vote, as if the message were visible from then on
                voted = record.started_at if record.prepared_at is None else record.prepared_at
                lifetime = max(0.0, expires_at - voted)
            self._branches.restored(slot, Hidden(priority, octets, lifetime))
        for slot in record.consumed or ():
            self._reserved.setdefault(slot.queue, set()).add(slot.position)
            entry = self._registry.find(slot.queue)
            if entry is not None:
                self._hold(entry, slot)

    def _hold(self, entry: QueueEntry, slot: Slot) -> None:
        priority, octets = self._details(slot)
        entry.index.restore_held(
            slot.position,
            priority=priority,
            octets=octets,
            expires_at=self._expiries[slot.queue].get(slot.position),
        )

    def _details(self, slot: Slot) -> tuple[int, int]:
        """Priority and size of the body in bytes of a message; 0 and 0 in a queue that does not need them."""
        contents = self._contents[slot.queue]
        if contents.flags is None or contents.sizes is None:
            return 0, 0
        at = bisect_left(contents.positions, slot.position)
        if at == len(contents.positions) or contents.positions[at] != slot.position:
            return 0, 0  # another program removed it
        return contents.flags[at] >> PRIORITY_SHIFT & 0xFF, contents.sizes[at]

    def finish(self, delivered: Mapping[int, int]) -> "dict[int, array[int]]":
        """Fill the indexes.

        Args:
            delivered: by queue id, the position up to which messages may have been delivered before.

        Returns:
            Positions by queue of messages that do not survive a restart, and that belong to no branch.
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

    def _fill(self, entry: QueueEntry, contents: QueueContents, without: set[int], delivered: int) -> None:
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


CACHE_BYTES: Final = 128 << 20
"""Default of ``--message-cache-bytes``."""
HIDDEN_SHARE: Final = 4
"""The part of the cache (a fourth) that messages of branches that have voted may take."""
REVISED_OCTETS: Final = 8 << 20
"""Bytes of bodies that are read at once for messages whose properties change."""
UPKEEP_SECONDS: Final = 1.0
"""Seconds between two checks for unused queues and for delivered messages."""
JUMP_SECONDS: Final = 1.0
"""Seconds that the clock may gain between two checks: slewing gains less."""

Done = Callable[[LogError | None], None]
Put = tuple[QueueEntry, StoredMessage]

log = get_logger(part="store")


class PostgresStore(StoredBranches):
    """The message store in the log's database; see :class:`dtx.store.api.LocalStore`.

    Args:
        log_: opened before the store, and closed after it.
        cache_bytes: bytes of messages in memory.
        clock: seconds since the epoch.
        steady: seconds of a clock that is never set.
    """

    def __init__(
        self,
        log_: MessageLog,
        *,
        cache_bytes: int = CACHE_BYTES,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(Recorder(log_), Registry(int(clock() * 1_000_000)), clock, limit=cache_bytes // HIDDEN_SHARE)
        self._log = log_
        self._steady = steady
        self._ahead = clock() - steady()
        """Seconds by which *clock* is ahead of *steady*."""
        self._cache = MessageCache(cache_bytes - cache_bytes // HIDDEN_SHARE)
        self._hosts: dict[str, VirtualHost] = {}
        self._delivered: dict[int, int] = {}
        self._loading: Loading | None = None
        self._strays: list[int] = []
        self._upkeep: asyncio.Task[None] | None = None
        self._letters = letters = DeadLetters(log_, self._recorder, self._registry, self._host, clock)
        self._pump = Dispatcher(log_, self._recorder, letters, clock)

    async def open(self) -> None:
        """Load topology and positions; branches come next, by :meth:`restore`.

        Raises:
            LogUnavailable: the database is not reachable.
        """
        found = await self._log.load_definitions()
        names = {row.vhost for row in found.exchanges} | {row.vhost for row in found.queues}
        for name in names | {row.vhost for row in found.bindings}:
            dangling = self._host(name).restore(
                [row for row in found.exchanges if row.vhost == name],
                [row for row in found.queues if row.vhost == name],
                [row for row in found.bindings if row.vhost == name],
            )
            if dangling is not None:
                await self._recorder.define(dangling)
        self._delivered = {row.id: row.delivered for row in found.queues}
        self._loading = loading = Loading(self._registry, self)
        queues = [row.id for row in found.queues]
        detailed = [
            entry.spec.id
            for entry in self._registry.queues.values()
            if entry.spec.settings.max_priority or entry.spec.settings.max_length_bytes is not None
        ]
        last = max(self._delivered.values(), default=0)
        async for contents in self._log.load_queues(queues, detailed=frozenset(detailed)):
            loading.add(contents)
            if contents.positions:
                last = max(last, contents.positions[-1])
        self._registry.position = max(self._registry.position, last)
        self._strays = await self._log.stray_queues(queues)

    def begin(self) -> None:
        """Fill the queues after all branches are restored. Remove messages that a restart does not keep. Idempotent."""
        loading, self._loading = self._loading, None
        if loading is None:
            return
        dropped = loading.finish(self._delivered)
        if dropped or self._strays:
            messages = sum(map(len, dropped.values()))
            log.info("removing messages that a restart does not keep", messages=messages, queues=len(self._strays))
            self._recorder.spawn(self._clear(dropped, self._strays))
        self._upkeep = asyncio.ensure_future(self._keep_up())

    async def close(self) -> None:
        """Write delivery marks and pending changes. Close the dispatcher and the recorder. The log stays open."""
        if self._upkeep is not None:
            self._upkeep.cancel()
            await asyncio.gather(self._upkeep, return_exceptions=True)
            self._mark_delivered()
        self._pump.close()
        await self._recorder.close()

    # -- topology -----------------------------------------------------------------------------------------------------

    def virtual_host(self, name: str) -> VirtualHost:
        """The virtual host of that name. A new name gets an empty one."""
        self.begin()
        return self._host(name)

    def _host(self, name: str) -> VirtualHost:
        host = self._hosts.get(name)
        if host is None:
            host = self._hosts[name] = VirtualHost(name, self._index)
        return host

    def _index(self, spec: QueueSpec) -> QueueIndex:
        index = QueueIndex(spec.id, spec.where, self._pump, self._cache, spec.settings, self._clock(), self.counts)
        self._registry.add(spec, index)
        return index

    def define(self, define: Define | None) -> Awaitable[None]:
        """Make a change of the topology durable, if there is one, in the order of the calls; see the recorder's."""
        return asyncio.sleep(0) if define is None else self._recorder.define(define)

    def defined(self, thing: Thing | None = None) -> Awaitable[None] | None:
        """See :meth:`Recorder.defined`."""
        return self._recorder.defined(thing)

    def close_queues(self, queues: Sequence[Queue]) -> list[Consumer]:
        """Close queues that are deleted. Their messages are removed in the background.

        Returns:
            Their consumers, which the caller must inform.
        """
        consumers: list[Consumer] = []
        for queue in queues:
            consumers += queue.index.close()
            self._pump.forget(queue.index)
            self._registry.queues.pop(queue.spec.id, None)
        if queues:
            self._recorder.spawn(self._clear({}, [queue.spec.id for queue in queues]))
        return consumers

    async def _clear(self, dropped: "Mapping[int, array[int]]", queues: Sequence[int]) -> None:
        """Remove messages by queue and position, and all messages of *queues*, however long it takes."""
        for queue, positions in dropped.items():
            await self._remove(queue, positions)
        if queues:
            await self._recorder.topology_written()  # a restart before it would find the queues, and needs all messages
            await self._recorder.settled()
            async for contents in self._log.load_queues(queues):
                await self._remove(contents.queue, contents.positions)

    async def _remove(self, queue: int, positions: "array[int]") -> None:
        for piece in _pieces(positions):
            await self._recorder.drop_slowly([Slot(queue, position) for position in piece])

    async def purge(self, queue: Queue) -> int:
        """Remove the ready messages. Returns their number when the removal is durable.

        Raises:
            LogError: the removal is not durable, or its outcome is not known. It is completed as soon as the log can.
        """
        positions = queue.index.purge()
        done = 0
        for piece in _pieces(positions):
            try:
                await self._recorder.drop_now([Slot(queue.spec.id, position) for position in piece])
            except LogError:
                self._recorder.spawn(self._finish_purge(queue, positions[done:]))
                raise
            queue.index.purged(piece)
            done += len(piece)
        return done

    async def _finish_purge(self, queue: Queue, positions: "array[int]") -> None:
        for piece in _pieces(positions):
            await self._recorder.drop_slowly([Slot(queue.spec.id, position) for position in piece])
            queue.index.purged(piece)

    # -- messages that change ------------------------------------------------------------------------------------------

    async def revise(
        self, deliveries: Sequence[QueueDelivery], revised: Callable[[QueueDelivery, StoredMessage], bytes]
    ) -> None:
        """Change the properties of messages that are handed out. The next recipient gets them with the new properties.

        Args:
            deliveries: not settled, and they stay so until this returns.
            revised: the new properties of a message.

        Raises:
            LogError: not all are changed, or the outcome is not known.
        """
        wanted = {delivery.slot: delivery for delivery in deliveries}
        while wanted:
            found = await self._log.read_messages(list(wanted), REVISED_OCTETS)
            if not found:
                return  # they were removed with their queue
            revisions = [(slot, revised(wanted[slot], message)) for slot, message in found.items()]
            # After a restart they must count as redelivered: otherwise their count of failed deliveries is ignored.
            delivered = [(slot.queue, slot.position) for slot in found]
            await self._log.write(Store(change=Change(revisions=revisions, delivered=delivered)))
            last = next(reversed(found))
            for slot in list(wanted):
                del wanted[slot]
                if slot == last:
                    break

    # -- messages outside of branches ---------------------------------------------------------------------------------

    def submit(
        self,
        vhost: str,  # noqa: ARG002 - ids of queues are the resource manager's
        publishes: Sequence[HeldPublish],
        acked: Sequence[QueueDelivery],
        done: Done,
        *,
        whole: bool = False,
    ) -> Sequence[int]:
        """Write publishes and acknowledgements in one transaction.

        Args:
            vhost: of the connection.
            publishes: routed; each message is put into those of its queues that are still there.
            acked: settled in their indexes from now on; their messages leave.
            done: called once, when the change is durable, or with the error; not before this returns.
            whole: when a queue refuses one publish, nothing at all happens, and *done* is not called.

        Returns:
            Indexes of the publishes that a full queue refuses. They are put nowhere, or are dead letters of that queue.
        """
        now = self._clock()
        registry = self._registry
        puts: list[Put] = []
        letters: set[int] = set()
        """The positions of dead letters among them."""
        refused: list[int] = []
        unsure = self._recorder.unsure
        if unsure and any(not unsure.isdisjoint(publish.queues) for publish in publishes):
            self._decline(acked, done)
            return ()
        for number, publish in enumerate(publishes):
            entries = [entry for entry in map(registry.queues.get, publish.queues) if entry is not None]
            if registry.some_refuse and not self._admit(entries, len(publish.body)):
                refused.append(number)
                if not whole:
                    found = self._refused_letters(entries, publish, now)
                    letters.update(message.position for _, message in found)
                    puts += found
                continue
            facts = traits(publish.properties)
            shared = registry.share(publish.body, len(entries))
            for entry in entries:
                puts.append((entry, registry.stored(entry, publish, facts, now, shared)))
        if whole and refused:
            self._withdraw(puts)
            return refused
        for delivery in acked:
            delivery.queue.ack(delivery)
        if not puts and not acked:
            asyncio.get_running_loop().call_soon(done, None)
            return refused
        drops = [delivery.slot for delivery in acked]
        written: Done = lambda error: self._written(puts, letters, drops, done, error)  # noqa: E731
        if self._recorder.undefined:
            written = self._recorder.after_definitions({message.queue for _, message in puts}, written)
        self._recorder.submit(Change(puts=[message for _, message in puts], drops=drops), written)
        return refused

    def _refused_letters(self, entries: Sequence[QueueEntry], publish: HeldPublish, now: float) -> list[Put]:
        """The dead letters of a publish that some of *entries* refuse (reject-publish-dlx)."""
        letters: list[Put] = []
        for entry in entries:
            if entry.dead_letters_refused and not entry.index.fits(1, len(publish.body)):
                message = self._registry.stored(entry, publish, traits(publish.properties), now)
                letters += self._letters.address(entry.spec, message, Reason.MAXLEN)
                self.counts.leave(Reason.MAXLEN, 1, dead_letters=True)
        return letters

    async def dead_letters(
        self, deliveries: Sequence[QueueDelivery], revised: Callable[[StoredMessage], bytes]
    ) -> Sequence[HeldPublish | None]:
        """See :meth:`DeadLetters.in_branch`.

        Raises:
            LogError: the messages could not be read.
        """
        return await self._letters.in_branch([delivery.slot for delivery in deliveries], revised)

    def _decline(self, acked: Sequence[QueueDelivery], done: Done) -> None:
        """Refuse a change: the log lacks a queue that is published to, so messages put there could be lost."""
        now = self._clock()
        for delivery in acked:
            delivery.queue.requeue((delivery,), now)
        asyncio.get_running_loop().call_soon(done, LogUnavailable(NO_QUEUE_YET))

    @staticmethod
    def _admit(entries: Sequence[QueueEntry], octets: int) -> bool:
        admitted: list[QueueEntry] = []
        for entry in entries:
            if entry.refuses:
                if not entry.index.admit(octets):
                    for other in admitted:
                        other.index.withdraw(octets)
                    return False
                admitted.append(entry)
        return True

    @staticmethod
    def _withdraw(puts: Iterable[Put]) -> None:
        for entry, message in puts:
            if entry.refuses:
                entry.index.withdraw(len(message.body))

    def _written(
        self, puts: Sequence[Put], letters: Collection[int], drops: Sequence[Slot], done: Done, error: LogError | None
    ) -> None:
        self._withdraw(puts)
        if error is None:
            self._show(puts, letters)
        else:
            log.warning("a change may not have been written", error=str(error), puts=len(puts), drops=len(drops))
            self._recorder.spawn(self._resync(puts, drops, isinstance(error, LogConflict)))
        done(error)

    def _show(self, puts: Iterable[Put], letters: Collection[int] = ()) -> None:
        """Put messages into the indexes of their queues. Those at the positions *letters* do not count as published."""
        now = self._clock()
        dropped: list[Slot] = []
        for entry, message in puts:
            index = entry.index
            if index.closed:
                dropped.append(message.slot)
            else:
                index.put(message, now)
                if message.position not in letters:
                    index.count_publish()
        if dropped:
            self._recorder.drop(dropped)

    async def _resync(self, puts: Sequence[Put], drops: Sequence[Slot], conflict: bool) -> None:
        """Bring the indexes in line with the database after a change whose outcome was not known.

        Acknowledgements without publishes are written again, because the client has settled those messages. Those with
        publishes are one transaction with them, which has not happened if none of the publishes exists.
        """
        existing = await self._recorder.existing([*(message.slot for _, message in puts), *drops])
        there = [put for put in puts if put[1].slot in existing]
        left = [slot for slot in drops if slot in existing]
        if there and not conflict:
            self._show(there)
        elif left and puts:
            await self._restore_settled(left)
            return
        self._recorder.drop(left)

    async def _restore_settled(self, slots: Sequence[Slot]) -> None:
        """Put messages back that were acknowledged in a transaction that did not happen."""
        found = await self._recorder.messages(slots)
        now = self._clock()
        for queue, positions in by_queue(list(found)).items():
            entry = self._registry.find(queue)
            if entry is not None:
                entry.index.restore_settled([found[Slot(queue, position)] for position in positions], now)

    # -- branches -----------------------------------------------------------------------------------------------------

    def restore(self, record: BranchRecord) -> None:
        """See :class:`dtx.store.api.LocalStore`."""
        assert self._loading is not None, "branches are restored before clients come"
        self._loading.restore(record)

    def committed(self, published: Sequence[Slot], consumed: Sequence[Slot]) -> None:
        """See :class:`dtx.store.api.LocalStore`."""
        self.begin()
        super().committed(published, consumed)

    def rolled_back(self, published: Sequence[Slot], consumed: Sequence[Slot]) -> None:
        """See :class:`dtx.store.api.LocalStore`."""
        self.begin()
        super().rolled_back(published, consumed)

    # -- upkeep -------------------------------------------------------------------------------------------------------

    async def _keep_up(self) -> None:
        while True:
            await asyncio.sleep(UPKEEP_SECONDS)
            self._mark_delivered()
            self._notice_a_jump()
            await self._remove_unused()

    def _notice_a_jump(self) -> None:
        """Correct the times of use when the clock was set forward: an unused queue would lose its messages."""
        before = self._steady() + self._ahead
        gained = self._clock() - before
        self._ahead += gained
        if gained > JUMP_SECONDS:
            log.warning("the clock was set forward", seconds=round(gained, 1))
            for entry in self._registry.queues.values():
                entry.index.set_forward(before, gained)

    def _mark_delivered(self) -> None:
        """Record how far durable queues were delivered: messages that a restart hands out again are redelivered.

        The record is up to a second late. A message that was delivered in that time and comes again after a crash is
        not marked as redelivered. AMQP 0-9-1 requires no more: "the server SHOULD try to signal redelivered messages
        when it can".
        """
        touched, self._pump.touched = self._pump.touched, {}
        marks: list[tuple[int, int]] = []
        for index in touched:
            entry = self._registry.find(index.id)
            if entry is not None and entry.spec.durable and index.delivered > self._delivered.get(index.id, 0):
                self._delivered[index.id] = index.delivered
                marks.append((index.id, index.delivered))
        if marks:
            self._recorder.mark(marks)

    async def _remove_unused(self) -> None:
        """Remove queues that were unused for as long as their declaration allows (x-expires)."""
        now = self._clock()
        for entry in [entry for entry in self._registry.queues.values() if entry.spec.settings.expires is not None]:
            until = None if self.awaits(entry.spec.id) else entry.index.unused_until()
            if until is not None and until <= now:
                host = self._host(entry.spec.vhost)
                queue = host.queues.get(entry.spec.name)
                if queue is not None and queue.index is entry.index:
                    log.info("an unused queue is removed", queue=entry.spec.where)
                    await self._remove_queue(host.remove_queue(queue))

    async def _remove_queue(self, deleted: DeletedQueues) -> None:
        self.close_queues(deleted.queues)
        try:
            await self.define(deleted.define)
        except LogError as error:
            log.warning("a queue's removal is not written yet", error=str(error))


def _pieces(positions: "array[int]") -> "Iterable[array[int]]":
    """*positions*, in pieces that one record drops. Other work gets its turn in between."""
    return (positions[start : start + DROPS_AT_ONCE] for start in range(0, len(positions), DROPS_AT_ONCE))
