"""Receipts: how dtx learns, after a crash, whether a unit happened.

Theory of operation. A unit publishes, in its own AMQP transaction, a transient message with a nonce that the log knows
too. A dtx that finds a logged unit without an outcome waits until the unit's lock is free (then it cannot happen any
more) and looks for the nonce. The queues are durable but the receipts are not: a broker that restarts forgets them, and
its *marker*, a transient message too, tells that this has happened.

Receipts are never consumed one by one. Units leave theirs in the queue of the current generation; when the log has the
outcome of all units of a past generation, its queue is purged.

Each dtx has receipt queues of its own, which it alone purges. Its successor reads those of the units that it inherits,
and deletes them when the log has all their outcomes.
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
"""Locks whose receipts are remembered; each is one dead connection."""
_IN_USE: Final = 403
"""Reply code of a consume on a queue that has an exclusive consumer."""
_RETRY: Final = 0.25
"""Seconds before a queue in exclusive use is tried again."""
_MARKER: Final = b"marker:"
_UNUSED: Final = 7 * 24 * 3600 * 1000
"""Milliseconds after which the broker deletes receipt queues that no dtx has looked at."""
_ARGUMENTS: Final = CLASSIC + tables.entry(b"x-expires", b"I", _UNUSED.to_bytes(4, "big"))


@dataclass(frozen=True, slots=True)
class ReceiptScan:
    """What lay in all receipt queues at one time.

    Args:
        nonces: of the receipts.
        markers: those that lay in every queue. A queue that lost receipts (the broker restarted, the queue was deleted
            or has crashed, a policy dropped the oldest) has lost its marker before them.
    """

    nonces: frozenset[UUID]
    markers: frozenset[str]


class Receipts:
    """The receipts of one vhost.

    Args:
        identity: whose they are.
    """

    def __init__(self, identity: BrokerIdentity) -> None:
        self._stem: Final = identity.stem
        self.queues: Final = receipt_queues(self._stem)
        self.incarnation: str | None = None
        self._proposed: str | None = None
        """A marker that may lie in the queues, and that no unit relies on yet."""
        self._current = 0
        self._pending = [0] * GENERATIONS
        self._used = [False] * GENERATIONS
        self._generation: dict[UUID, int] = {}
        # Units of dtx that are gone, by the stem of their queues; an older version named its queues by the rm alone.
        self._inherited: dict[str, set[UUID]] = {identity.rm: set()}
        self._scanning = asyncio.Lock()
        self._scans: OrderedDict[str, ReceiptScan] = OrderedDict()

    @property
    def open(self) -> int:
        """How many of this dtx lie in the broker, or are about to, whose units the log does not have yet."""
        return len(self._generation)

    @property
    def needed(self) -> bool:
        """Whether the log lacks the outcome of a unit that left a receipt here, or may have."""
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
        """All receipt queues that may prove something: this dtx's and the inherited ones."""
        return [*self.queues, *(queue for stem in self._inherited for queue in receipt_queues(stem))]

    async def turn(self, channel: OwnChannel) -> None:
        """Begin a new generation if one is free, purge those that no unit needs, delete what needs no heir."""
        for stem in [stem for stem, units in self._inherited.items() if not units]:
            async with self._scanning:
                for queue in receipt_queues(stem):
                    await channel.call(methods.QueueDelete(queue))
            del self._inherited[stem]
        if self._used[self._current]:  # one unit that hangs must not keep the receipts of all later ones
            free = (generation for generation, used in enumerate(self._used) if not used)
            self._current = next(free, self._current)
        for generation, queue in enumerate(self.queues):
            if generation != self._current and self._used[generation] and not self._pending[generation]:
                async with self._scanning:
                    drained = await self._drain(queue, channel.upstream)
                self._used[generation] = not drained

    async def _drain(self, queue: bytes, upstream: Upstream) -> bool:
        """Purge *queue*, and leave its marker in it. Returns whether that could be done now.

        A queue without its marker tells that the broker has forgotten receipts. So the marker is taken out and not
        acknowledged: the purge does not touch it, and a channel that ends gives it back. Until then a scan would miss
        it, also one of a later connection of this dtx, or of a successor, which may be there before the broker has
        ended this one. So the queue is consumed exclusively meanwhile, as for a scan.
        """
        assert self.incarnation is not None, "a lane that turns has recognised its broker"
        failpoint.at(Point.DRAIN_BEFORE)
        first: list[ContentReceived] = []
        channel = await self._consume_alone(queue, upstream, first.append, prefetch=1)
        if channel is None:
            return False
        for _ in range(2):  # the channel of the broker may answer the first one before it passes on what it has got
            await channel.declare(methods.QueueDeclare(queue, passive=True))
        number, marker = channel.number, _marker(self.incarnation)
        frames = methods.QueuePurge(queue).frame(number)
        if not first or first[0].body != marker:
            # It came behind what a predecessor had left, or is gone. One write: dtx cannot die between its parts.
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
        """Make the queues: durable, classic, so that a transient message in them dies with the broker and not before.

        Where they are there, the broker counts that as use: it does not delete them as unused.

        Raises:
            ChannelClosed: dtx's user may not, or a queue of that name is something else.
        """
        for queue in self.queues:
            await channel.declare(methods.QueueDeclare(queue, durable=True, arguments=_ARGUMENTS))

    async def renew_inherited(self, upstream: Upstream) -> None:
        """Ask for the queues of predecessors whose units are open: the broker counts that as use.

        They are read only when the predecessor's lock is free. The broker may keep unused queues for less time than
        that takes.
        """
        for stem in [stem for stem, units in self._inherited.items() if units]:
            for queue in receipt_queues(stem):
                with suppress(UpstreamChannelClosed):  # a refusal: only upkeep, the reader of the queue reports it
                    await consumers_of(queue, upstream)

    async def delete(self, channel: OwnChannel) -> None:
        """Delete the queues of a dtx that ends, unless a receipt in them may still be needed."""
        if not self._generation:
            for queue in self.queues:
                await channel.call(methods.QueueDelete(queue))

    async def recognise(self, upstream: Upstream) -> None:
        """Find the marker that lies in every queue, or set one: then receipts may have been lost before.

        Raises:
            ChannelClosed, UpstreamLost.
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
        """All receipts of the dtx that made *lock*, read once after *lock* was seen free.

        Raises:
            ChannelClosed, UpstreamLost.
        """
        queues = receipt_queues(stem_of(lock))
        async with self._scanning:
            if lock == upstream.lock:
                return await self._scan(queues, upstream)  # our own: what is there now is not the last word
            known = self._scans.get(lock)
            if known is None:
                try:
                    known = await self._scan(queues, upstream)
                except UpstreamChannelClosed as closed:
                    if closed.close.reply_code != 404 or queues == self.queues:
                        raise
                    known = ReceiptScan(
                        frozenset(), frozenset()
                    )  # a queue of the predecessor is gone, and its marker with it
                self._scans[lock] = known
                while len(self._scans) > _KEEP_SCANS:
                    self._scans.popitem(last=False)
            return known

    async def _scan(self, queues: Iterable[bytes], upstream: Upstream) -> ReceiptScan:
        """Look at every receipt and leave them all where they are.

        A receipt that another process is reading would not be seen. Then a unit that happened would be taken for one
        that did not. So all queues are consumed exclusively: the scan waits for any other reader, for example a stalled
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
            while waiting:
                # What is counted after the consumer began has been delivered before the answer, or still waits.
                waiting = (await channel.declare(methods.QueueDeclare(queue, passive=True))).message_count
            await channel.close()  # they go back where they were
        return ReceiptScan(frozenset(nonces), frozenset(set.intersection(*markers)))

    async def _consume_alone(
        self, queue: bytes, upstream: Upstream, note: Callable[[ContentReceived], None], prefetch: int = 0
    ) -> OwnChannel | None:
        """A channel that consumes *queue* exclusively; ``None`` while another one does."""
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
        return channel


def _marker(incarnation: str) -> bytes:
    return _MARKER + incarnation.encode()
