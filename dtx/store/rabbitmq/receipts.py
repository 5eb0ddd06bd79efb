"""Receipts: how dtx learns, after a crash, whether a unit happened.

Theory of operation. A unit publishes, in its own AMQP transaction, a transient message with a nonce that the log has
too. A dtx that finds a logged unit without an outcome waits until the unit's lock is free: then the unit cannot happen
any more. Then it looks for the nonce. The receipt queues are durable, but receipts are not: a restart of the broker
loses them. Each queue also has a *marker*, another transient message. A queue without its marker has lost receipts.

Receipts are never consumed one by one. Units leave theirs in the queue of the current generation. When the log has the
outcome of all units of a past generation, its queue is purged.

Each dtx has its own receipt queues, and no other dtx purges them. Its successor reads the queues of the units that it
inherits, and deletes these queues when the log has all outcomes.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final
from uuid import UUID, uuid4

from dtx import failpoint
from dtx.failpoint import Point
from dtx.log.records import Unit
from dtx.store.rabbitmq import messages
from dtx.store.rabbitmq.identity import CLASSIC, GENERATIONS, BrokerIdentity, consumers_of, receipt_queues, stem_of
from dtx.store.rabbitmq.upstream import OwnChannel, Upstream, UpstreamChannelClosed
from dtx.wire.amqp09 import methods, tables
from dtx.wire.amqp09.events import ContentReceived

_KEEP_SCANS: Final = 64
"""Locks whose receipts stay in memory; each is one dead connection."""
_IN_USE: Final = 403
"""Reply code of a consume on a queue that has an exclusive consumer."""
_RETRY: Final = 0.25
"""Seconds before a queue in exclusive use is tried again."""
_MARKER: Final = b"marker:"
_UNUSED: Final = 7 * 24 * 3600 * 1000
"""Milliseconds after which the broker deletes receipt queues that no dtx has declared."""
_ARGUMENTS: Final = CLASSIC + tables.entry(b"x-expires", b"I", _UNUSED.to_bytes(4, "big"))


@dataclass(frozen=True, slots=True)
class ReceiptScan:
    """The contents of all receipt queues at one time.

    Args:
        nonces: of the receipts.
        markers: those that were in every queue. A queue loses its marker before its receipts, if the broker restarts,
            the queue is deleted or crashes, or a policy drops the oldest messages.
    """

    nonces: frozenset[UUID] = frozenset()
    markers: frozenset[str] = frozenset()


class Receipts:
    """The receipts of one vhost.

    Args:
        identity: of this dtx; names the queues.
    """

    def __init__(self, identity: BrokerIdentity) -> None:
        self._stem: Final = identity.stem
        self.queues: Final = receipt_queues(self._stem)
        self.incarnation: str | None = None
        self._proposed: str | None = None
        """A marker that may be in the queues, and that no unit relies on yet."""
        self._current = 0
        self._pending = [0] * GENERATIONS
        self._used = [False] * GENERATIONS
        self._generation: dict[UUID, int] = {}
        # Units of predecessors, by the stem of their queues. An older version named its queues by the rm alone.
        self._inherited: dict[str, set[UUID]] = {identity.rm: set()}
        self._scanning = asyncio.Lock()
        self._scans: OrderedDict[str, ReceiptScan] = OrderedDict()

    @property
    def open(self) -> int:
        """The number of receipts of this dtx, sent or about to be, for units whose outcome the log does not have."""
        return len(self._generation)

    @property
    def needed(self) -> bool:
        """Whether the log lacks the outcome of a unit that has left a receipt here, or may have left one."""
        return bool(self._generation) or any(self._inherited.values())

    # -- life of a receipt

    def use(self, unit: Unit) -> bytes:
        """The queue for the receipt of *unit*, which is about to be sent."""
        generation = self._current
        if unit.nonce not in self._generation:
            self._generation[unit.nonce] = generation
            self._pending[generation] += 1
            self._used[generation] = True
        return self.queues[self._generation[unit.nonce]]

    def logged(self, unit: Unit) -> None:
        """The log has the outcome of *unit*."""
        generation = self._generation.pop(unit.nonce, None)
        if generation is not None:
            self._pending[generation] -= 1
        elif unit.lock:
            self._inherited.get(stem_of(unit.lock), set()).discard(unit.nonce)

    def expect(self, unit: Unit) -> None:
        """A predecessor may have sent *unit*: its receipt queues stay until the log has the outcome."""
        if unit.lock and (stem := stem_of(unit.lock)) != self._stem:
            self._inherited.setdefault(stem, set()).add(unit.nonce)

    @property
    def watched(self) -> list[bytes]:
        """All receipt queues that may be needed: those of this dtx and the inherited ones."""
        return [*self.queues, *(queue for stem in self._inherited for queue in receipt_queues(stem))]

    async def switch_generation(self, channel: OwnChannel) -> None:
        """Begin a new generation if one is free. Purge those that no unit needs, and delete inherited queues likewise.

        Raises:
            UpstreamChannelClosed, UpstreamLost.
        """
        for stem in [stem for stem, units in self._inherited.items() if not units]:
            async with self._scanning:
                try:
                    deleting = await OwnChannel(channel.upstream).open()
                    for queue in receipt_queues(stem):
                        await deleting.call(methods.QueueDelete(queue))
                    await deleting.close()
                except UpstreamChannelClosed as closed:
                    if closed.close.reply_code not in (403, 404):
                        continue
                    # dtx may not delete them, or their node is down: the broker deletes them unused
            del self._inherited[stem]
        if self._used[self._current]:  # else one unit that hangs would keep the receipts of all later ones
            free = (generation for generation, used in enumerate(self._used) if not used)
            self._current = next(free, self._current)
        for generation, queue in enumerate(self.queues):
            if generation != self._current and self._used[generation] and not self._pending[generation]:
                async with self._scanning:
                    drained = await self._drain(queue, channel.upstream)
                self._used[generation] = not drained

    async def _drain(self, queue: bytes, upstream: Upstream) -> bool:
        """Purge *queue*, and leave its marker in it. Returns whether that could be done now.

        A queue without its marker means lost receipts. So the marker is consumed and not acknowledged: the purge does
        not remove it, and it returns to the queue when the channel ends. Until then a scan would miss it. The scan may
        be that of a later connection of this dtx or of a successor, before the broker has ended this connection. So the
        queue is consumed exclusively meanwhile, as for a scan.
        """
        assert self.incarnation is not None, "a commit connection that turns has recognised its broker"
        failpoint.at(Point.DRAIN_BEFORE)
        first: list[ContentReceived] = []
        channel = await self._consume_alone(queue, upstream, first.append, prefetch=1)
        if channel is None:
            return False
        for _ in range(2):  # the broker's channel may answer the first one before it sends a delivery that it has
            await channel.declare(methods.QueueDeclare(queue, passive=True))
        number, marker = channel.number, _marker(self.incarnation)
        frames = methods.QueuePurge(queue).frame(number)
        if not first or first[0].body != marker:
            # The marker is behind receipts of a predecessor, or is lost. One write: dtx cannot die between its parts.
            if first and isinstance(first[0].method, methods.BasicDeliver):
                frames += methods.BasicAck(first[0].method.delivery_tag).frame(number)
            frames += messages.receipt(number, queue, marker)
        await channel.send_raw(frames, methods.QueuePurgeOk)
        failpoint.at(Point.DRAIN_PURGED)
        await channel.close()
        failpoint.at(Point.DRAIN_AFTER)
        return True

    # -- asking the broker

    async def declare(self, channel: OwnChannel) -> None:
        """Declare the queues: durable and classic, so that only a restart of the broker loses transient messages.

        For existing queues, the broker counts this as use: it does not delete them as unused.

        Raises:
            UpstreamChannelClosed: the user of dtx lacks the permission, or a queue of that name is different.
            UpstreamLost.
        """
        for queue in self.queues:
            await channel.declare(methods.QueueDeclare(queue, durable=True, arguments=_ARGUMENTS))

    async def renew_inherited(self, upstream: Upstream) -> None:
        """Declare the queues of predecessors whose units have no outcome: the broker counts that as use.

        They are read only when the predecessor's lock is free, which may take longer than the broker keeps unused
        queues.
        """
        for stem in [stem for stem, units in self._inherited.items() if units]:
            for queue in receipt_queues(stem):
                with suppress(UpstreamChannelClosed):  # refused: the scan of the queue will report it
                    await consumers_of(queue, upstream)

    async def delete(self, channel: OwnChannel) -> None:
        """Delete the queues of this dtx, unless a receipt in them may still be needed.

        Raises:
            UpstreamChannelClosed, UpstreamLost.
        """
        if not self._generation:
            for queue in self.queues:
                await channel.call(methods.QueueDelete(queue))

    async def find_or_set_marker(self, upstream: Upstream) -> None:
        """Find the marker that is in every queue. Without one, set a new marker: receipts may have been lost before.

        Raises:
            UpstreamChannelClosed, UpstreamLost.
        """
        async with self._scanning:
            markers = (await self._scan(self.queues, upstream)).markers
            if markers:
                self.incarnation = min(markers)
                return
            # The transaction of an earlier attempt may still be under way: two markers must not differ.
            incarnation = self._proposed = self._proposed or str(uuid4())
            failpoint.at(Point.MARKER_BEFORE)
            channel = await OwnChannel(upstream).open(methods.TxSelect())
            frames = [messages.receipt(channel.number, queue, _marker(incarnation)) for queue in self.queues]
            commit = (methods.TxCommit().frame(channel.number),)
            await channel.send_steps(((frames, Point.MARKER_WRITTEN), (commit, Point.MARKER_SENT)), methods.TxCommitOk)
            failpoint.at(Point.MARKER_AFTER)
            await channel.close()
            self.incarnation, self._proposed = incarnation, None

    async def left_by(self, lock: str, upstream: Upstream) -> ReceiptScan:
        """All receipts of the dtx that made *lock*, which the caller has seen free. They are read once for each lock.

        Raises:
            UpstreamChannelClosed, UpstreamLost.
        """
        queues = receipt_queues(stem_of(lock))
        async with self._scanning:
            if lock == upstream.lock:
                return await self._scan(queues, upstream)  # our own: more receipts may come
            known = self._scans.get(lock)
            if known is None:
                try:
                    known = await self._scan(queues, upstream)
                except UpstreamChannelClosed as closed:
                    if closed.close.reply_code != 404 or queues == self.queues:
                        raise
                    known = ReceiptScan()  # a queue of the predecessor is gone, and its marker with it
                self._scans[lock] = known
                while len(self._scans) > _KEEP_SCANS:
                    self._scans.popitem(last=False)
            return known

    async def _scan(self, queues: Iterable[bytes], upstream: Upstream) -> ReceiptScan:
        """Read all receipts and leave them in their queues.

        The scan would miss a receipt that another process is reading: a unit that happened would seem not to have
        happened. So all queues are consumed exclusively. The scan waits for any other reader, such as a stalled
        predecessor.
        """
        nonces: set[UUID] = set()
        markers: list[set[str]] = []

        def note(message: ContentReceived) -> None:
            body = message.body
            nonce = messages.nonce_of(body)
            if nonce is not None:
                nonces.add(nonce)
            elif body.startswith(_MARKER):
                markers[-1].add(body.removeprefix(_MARKER).decode("ascii", "replace"))

        for queue in queues:
            markers.append(set())
            while True:
                channel = await self._consume_alone(queue, upstream, note)
                if channel is not None:
                    break
                await asyncio.sleep(_RETRY)
            waiting = -1
            try:
                while waiting:
                    # A message that is there when the consumer begins is delivered before the answer, or is counted.
                    waiting = (await channel.declare(methods.QueueDeclare(queue, passive=True))).message_count
                await channel.close()  # the messages return to their places
            except asyncio.CancelledError:
                channel.abandon()  # its consumer would keep all others out
                raise
        return ReceiptScan(frozenset(nonces), frozenset(set.intersection(*markers)))

    async def _consume_alone(
        self, queue: bytes, upstream: Upstream, note: Callable[[ContentReceived], None], prefetch: int = 0
    ) -> OwnChannel | None:
        """A channel that consumes *queue* exclusively; ``None`` while another channel does."""
        channel = await OwnChannel(upstream).open()
        channel.on_delivery = note
        try:
            if prefetch:
                await channel.call(methods.BasicQos(0, prefetch))
            await channel.call(methods.BasicConsume(queue, b"", exclusive=True))
        except UpstreamChannelClosed as closed:
            if closed.close.reply_code != _IN_USE:
                raise
            return None
        except asyncio.CancelledError:
            channel.abandon()
            raise
        return channel


def _marker(incarnation: str) -> bytes:
    return _MARKER + incarnation.encode()
