"""The upstream channel (T), in tx mode, on which a selected channel consumes.

Acknowledgements outside a branch are committed at once. Those within a branch are held, and taken in one unit when the
branch is prepared. RabbitMQ closes the whole *connection* (504) for any frame between tx.commit and commit-ok. So
everything that is sent goes through one queue, which waits for commit-ok.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Final, Protocol
from uuid import UUID

from dtx import failpoint
from dtx.failpoint import Point
from dtx.log.records import Unit
from dtx.store.api import UnitOutcome
from dtx.store.rabbitmq import messages
from dtx.store.rabbitmq.consumed_queues import ConsumedQueue, ConsumedQueues
from dtx.store.rabbitmq.copies import Copy, CopyRegister
from dtx.store.rabbitmq.copy_filter import CopyFilter
from dtx.store.rabbitmq.delivery_limit import Replacer
from dtx.store.rabbitmq.identity import hold_lock
from dtx.store.rabbitmq.upstream import Upstream, UpstreamLost
from dtx.store.work import Budget, Delivery
from dtx.telemetry import get_logger
from dtx.wire.amqp09 import content, methods
from dtx.wire.amqp09.codec import Method, packer
from dtx.wire.amqp09.frames import BODY, HEADER, method_frame
from dtx.wire.amqp09.methods import METHODS, ChannelClose, Settle
from dtx.xa.codes import ReplyCode, XaError

_log = get_logger(part="consume channel")
REPLY_TO: Final = b"amq.rabbitmq.reply-to"
"""The pseudo-queue of direct replies: they come to the channel that published the request."""
_MAX_WAITING: Final = 1 << 20
"""Bytes that wait for commit-ok; with more, dtx reads nothing from the client."""
_AT_ONCE: Final = 4_096
"""Deliveries that one commit settles outside a branch at most; more wait for its commit-ok."""


_Settle = Callable[[int, int, bool], bytes]
_ack: Final = packer(methods.BasicAck)
_nack: Final = packer(methods.BasicNack)
_DECODED_CLASSES: Final = frozenset(
    row.KEY >> 16 for row in (methods.BasicDeliver, methods.QueueDeclare, ChannelClose, methods.TxSelect)
)
"""Classes of the broker's methods that this channel decodes."""
_DROP: Final = partial(_nack, requeue=False)
_REQUEUE: Final = partial(_nack, requeue=True)
REVOKED: Final = "the broker has cancelled its consumer, and may deliver the message again"
"""Why a delivery can be settled in no branch."""


def _reject(number: int, tag: int, multiple: bool, *, requeue: bool) -> bytes:  # noqa: ARG001 - reject has no multiple
    return methods.BasicReject(tag, requeue).frame(number)


_REJECT: Final[dict[bool, _Settle]] = {requeue: partial(_reject, requeue=requeue) for requeue in (False, True)}
_RETURNS: Final = (_REQUEUE, _REJECT[True])
"""The settlements that return messages to their queues."""


class ConsumeOwner(Protocol):
    """The client's channel."""

    def forward(self, buffer: bytes, start: int, end: int) -> None:
        """Forward a frame to the client."""

    def upstream_closed(self, close: ChannelClose) -> None:
        """The broker closed an upstream channel, for an error of the client or of its own."""

    def upstream_close_ok(self) -> None:
        """The broker has confirmed the close that the client requested."""


class Keeper(Protocol):
    """The client connection that a :class:`ConsumeChannel` belongs to."""

    def held_lost(self, branch: object, reason: str) -> None:
        """Deliveries that *branch* holds went back to the broker with their channel."""

    def consume_channel_ended(self) -> None:
        """A consume channel has ended."""

    def consume_channel_idle(self) -> None:
        """A consume channel whose client channel is gone only holds deliveries for branches."""

    def hold_client(self, reason: object) -> None:
        """Read nothing from the client until *reason* is released."""

    def release_client(self, reason: object) -> None:
        """Undo :meth:`hold_client`. Does nothing without it."""


@dataclass(slots=True, eq=False)
class _UnitRequest:
    deliveries: Sequence[Delivery]
    receipt: bytes
    done: "asyncio.Future[UnitOutcome | None]"


@dataclass(slots=True, eq=False)
class _Frames:
    data: bytes
    dirty: bool
    """Needs tx.commit after it."""
    last: bool
    """channel.close: nothing may follow in the same write, not even tx.commit."""
    act: Callable[[], None] | None = None
    """Called when it is sent, and committed if it is dirty, with all that came before it."""


@dataclass(slots=True, eq=False)
class _Settlement:
    """Deliveries that are settled outside a branch, or a part of them. Its frames are made when it is sent."""

    deliveries: list[Delivery]
    method: _Settle
    multiple: bool
    """They are all unsettled deliveries up to the last of them."""
    waits: bool = False
    """The log must have it first."""


@dataclass(slots=True, eq=False)
class _Held:
    delivery: Delivery
    branch: object
    """``None`` when its branch has ended, and it is about to be returned."""
    released: Callable[[], None] | None


class ConsumeChannel:
    """The upstream channel on which one selected channel consumes.

    Args:
        upstream: the client's connection to the broker.
        number: of the channel, which is open; :meth:`start_tx` puts it in tx mode.
        max_kept: bytes of message contents that are kept for unsettled deliveries.
        budget: memory that all clients share.
        queues: that the client consumes from on this channel.
        keeper: the client connection.
        copies: the messages that were sent more than once.
        vhost: of the connection.
        replacer: for messages that a rollback returns; ``None``: they are just returned.
        revokes: whether the broker may take deliveries back when it cancels their consumer (RabbitMQ 4.3). Before, it
            cancels consumers of a deleted queue, and their deliveries can be acknowledged.
    """

    def __init__(
        self,
        upstream: Upstream,
        number: int,
        max_kept: int,
        budget: Budget,
        queues: ConsumedQueues,
        keeper: Keeper,
        *,
        copies: CopyRegister | None = None,
        vhost: str = "",
        replacer: Replacer | None = None,
        revokes: bool = False,
    ) -> None:
        self.filter: Final = CopyFilter(copies or CopyRegister.disabled(), vhost, self)
        self.upstream = upstream
        self.number = number
        self.owner: ConsumeOwner | None = None
        self.end_reason: str | None = None
        """Why the channel has ended; ``None`` before that."""
        self.on_message: Callable[[Delivery, bytes], None] | None = None
        """Called with each delivery and its whole body, also if it is too large to be kept."""
        self._max_kept = max_kept
        self._keeper = keeper
        self._kept = 0
        self._budget = budget
        self._open: dict[int, Delivery] = {}
        self._sorted = True
        """Whether the tags in ``_open`` ascend."""
        self._held: dict[int, _Held] = {}
        self._replacer = replacer
        self._revokes = revokes
        self._returning: set[asyncio.Task[None]] = set()
        self._queue: deque[_Frames | _Settlement | _UnitRequest] = deque()
        self._waiting = 0
        self._committing = False
        self._acts: list[Callable[[], None]] = []
        """Called at the next commit-ok."""
        self._selecting: asyncio.Future[None] | None = None
        self._unit: _UnitRequest | None = None
        self._queues = queues
        self._delivery: Delivery | None = None
        self._left: int | None = None
        """Bytes of the current message that are still missing; ``None`` if its content is ignored."""
        self._properties = b""
        self._body = bytearray()
        self._whole: asyncio.Future[bytes] | None = None
        self._skip = False
        self._lock_asked = False
        self._locked = False
        """Whether the broker has confirmed that this channel holds the lock."""
        self._stray = False
        """Whether the current message is one that was published to the lock. It is not for the client."""
        upstream.handlers[number] = self

    # -- requests of the client

    @property
    def lock(self) -> str:
        """Name of the lock of the connection; empty without one."""
        return self.upstream.lock

    @property
    def holds(self) -> bool:
        """Whether deliveries are held for branches."""
        return bool(self._held) or self._unit is not None

    @property
    def unsettled(self) -> int:
        """The number of unsettled deliveries, including those that branches hold."""
        return len(self._open) + len(self._held)

    @property
    def only_holds(self) -> bool:
        """Whether it only holds deliveries for branches."""
        return self.holds and not self._committing and not self._queue

    def request(self, key: int, payload: bytes) -> None:
        """Forward a method of the client, and note consumers, gets and declarations.

        Args:
            key: class and method id.
            payload: of the method frame.
        """
        self._queues.requested(key, payload)
        self._send(method_frame(self.number, payload))

    @property
    def gets_replies(self) -> bool:
        """Whether the client consumes direct replies on this channel."""
        return any(consumed.queue == REPLY_TO for consumed in self._queues.consumers.values())

    def publish(self, frames: bytes) -> None:
        """Publish one message outside a branch; *frames* are whole frames for this channel."""
        self._send(frames, dirty=True)

    async def start_tx(self) -> None:
        """Put the channel in tx mode.

        Raises:
            UpstreamLost: the channel or the connection is gone.
        """
        self._selecting = asyncio.get_running_loop().create_future()
        if self.lock:
            self._hold_lock()
        self._send(methods.TxSelect().frame(self.number))
        await self._selecting

    def _hold_lock(self) -> None:
        """Consume from the lock of the connection. No unit is sent before the broker has confirmed that.

        The lock is declared on another channel. Here it would become the queue of methods that name no queue.
        """
        self._lock_asked = True
        self._send(hold_lock(self.number, self.lock))

    def select(self, settle: Settle) -> list[Delivery]:
        """The deliveries that *settle* means, without those that branches hold.

        Raises:
            XaError: 406, there is no such delivery.
        """
        tag = settle.delivery_tag
        if settle.multiple and not tag:
            return list(self._in_order())
        delivery = self._open.get(tag)
        if delivery is None:  # RabbitMQ refuses that with "multiple" too: the delivery with this tag must exist
            raise _unknown(tag)
        return list(takewhile(lambda each: each.tag <= tag, self._in_order())) if settle.multiple else [delivery]

    def _in_order(self) -> Iterable[Delivery]:
        if not self._sorted:
            self._open, self._sorted = {tag: self._open[tag] for tag in sorted(self._open)}, True
        return self._open.values()

    def incoming(self, settle: Settle) -> "asyncio.Future[bytes] | None":
        """A future for the content of a delivery that *settle* means; ``None`` if all contents have arrived.

        The client already has basic.deliver. RabbitMQ lets it settle the delivery from then on.

        Returns:
            A future that gets empty bytes when the content is complete, or the channel ends.
        """
        delivery, tag = self._delivery, settle.delivery_tag
        if delivery is None or not (tag == delivery.tag or (settle.multiple and not tag)):
            return None
        self._whole = asyncio.get_running_loop().create_future()
        return self._whole

    def _is_whole(self) -> None:
        whole, self._whole = self._whole, None
        if whole is not None and not whole.done():
            whole.set_result(b"")

    def ack(self, deliveries: Sequence[Delivery], *, multiple: bool = False) -> None:
        """Acknowledge outside a branch: "NOT transactional", so it is committed at once.

        Args:
            deliveries: unsettled.
            multiple: they are all unsettled deliveries up to the last of them.
        """
        self._settle(deliveries, _ack, multiple=multiple)

    def nack(self, deliveries: Sequence[Delivery], *, requeue: bool, multiple: bool = False) -> None:
        """Reject deliveries; this is committed at once. *multiple* is as for :meth:`ack`."""
        self._settle(deliveries, _REQUEUE if requeue else _DROP, multiple=multiple)

    def reject(self, deliveries: Sequence[Delivery], *, requeue: bool) -> None:
        """As :meth:`nack`. Quorum queues of RabbitMQ 4.3 count it for their delivery limit, and do not count nack."""
        self._settle(deliveries, _REJECT[requeue], multiple=False)

    def recover(self) -> None:
        """basic.recover: requeue all unsettled deliveries that no branch holds."""
        self._give_back(list(self._in_order()))

    def _give_back(self, deliveries: Sequence[Delivery]) -> None:
        # The broker closes the whole connection (540) for a nack of what a stream delivered.
        back = [delivery for delivery in deliveries if not delivery.stream]
        self.nack(back, requeue=True, multiple=len(back) == len(self._open))

    def hold(self, deliveries: Sequence[Delivery], branch: object, released: Callable[[], None] | None = None) -> None:
        """Settle within *branch*: nothing is sent before the branch is prepared or has ended.

        Args:
            deliveries: unsettled.
            branch: passed to :meth:`Keeper.held_lost` if they are lost.
            released: called for each delivery that a roll-back gives back. Such a delivery is unsettled again, and not
                requeued.
        """
        if not self._lock_asked:  # AMQP 1.0: a connection gets its lock with its first transaction
            self._hold_lock()
        for delivery in deliveries:
            self._held[delivery.tag] = _Held(self._open.pop(delivery.tag), branch, released)

    def drop_contents(self, deliveries: Sequence[Delivery]) -> None:
        """Drop the contents of *deliveries*, which dtx will never publish again."""
        self._free(deliveries)
        for delivery in deliveries:
            delivery.properties, delivery.body, delivery.size = b"", None, 0

    def end_hold(self, delivery: Delivery) -> bool:
        """Undo :meth:`hold`: the delivery is unsettled again, and nothing is sent.

        Returns:
            Whether it was held. It is no longer held if the channel has ended.
        """
        held = self._held.pop(delivery.tag, None)
        if held is None:
            return False
        self._open[delivery.tag] = held.delivery
        self._sorted = False
        return True

    def reject_held(self, delivery: Delivery, *, requeue: bool, rejects: bool) -> bool:
        """Reject a held delivery whose contents were dropped; this is committed at once.

        Args:
            delivery: held.
            requeue: whether it returns to its queue.
            rejects: send basic.reject (see :meth:`reject`), not basic.nack.

        Returns:
            As :meth:`end_hold`.
        """
        if self._held.pop(delivery.tag, None) is None:
            return False
        settle = _REJECT[requeue] if rejects else _REQUEUE if requeue else _DROP
        self._enqueue_settlement([delivery], settle, multiple=False)
        return True

    def then(self, act: Callable[[], None]) -> None:
        """Call *act* when everything sent so far is committed. It is never called if the channel ends before."""
        if self.end_reason is None:
            self._queue.append(_Frames(b"", dirty=False, last=False, act=act))
            self._flush()

    def _settle(self, deliveries: Sequence[Delivery], method: _Settle, *, multiple: bool) -> None:
        if not deliveries or self.end_reason is not None:
            return
        # for the broker, held deliveries are unsettled too, and those that dtx itself settles
        multiple = multiple and not self._held and not self.filter.owns
        if multiple and len(deliveries) == len(self._open):
            self._open.clear()
        else:
            deliveries = self._forget(deliveries)
        self._enqueue_settlement(deliveries, method, multiple=multiple)

    def _enqueue_settlement(self, deliveries: Sequence[Delivery], method: _Settle, *, multiple: bool) -> None:
        copies: Sequence[Copy] = ()
        if self.filter.is_busy:
            copies = self.filter.settled(delivery.tag for delivery in deliveries)
            if method in _RETURNS or not self.filter.register.must_record(copies):
                self.filter.register.release(copies)
                copies = ()
        if not multiple and not copies and self._waits(deliveries, method):
            return
        for start in range(0, len(deliveries), _AT_ONCE):
            part = _Settlement(list(deliveries[start : start + _AT_ONCE]), method, multiple, waits=bool(copies))
            if copies:
                task = asyncio.get_running_loop().create_task(self._record(copies, part))
                self._returning.add(task)
                task.add_done_callback(self._returning.discard)
                copies = ()  # later parts wait behind this one
            self._enqueue(part, methods.SETTLE_FRAME * len(part.deliveries))

    async def _record(self, copies: Sequence[Copy], settlement: _Settlement) -> None:
        """Record that *copies* are settled. Then the broker gets their settlement."""
        try:
            await self.filter.register.settle(copies)
        except Exception as error:  # noqa: BLE001 - the broker gets the deliveries back
            self.upstream.abort(f"a settlement could not be recorded: {error}")
        else:
            settlement.waits = False
            self._flush()

    def _waits(self, deliveries: Sequence[Delivery], method: _Settle) -> bool:
        """Add *deliveries* to the last settlement that waits, if that is of the same kind. Returns whether it was.

        The outcomes of a branch come one by one: 10,000 separate settlements would take long.
        """
        last = self._queue[-1] if self._queue else None
        if (
            not isinstance(last, _Settlement)
            or last.multiple
            or last.method is not method
            or len(last.deliveries) + len(deliveries) > _AT_ONCE
        ):
            return False
        last.deliveries += deliveries
        self._add_waiting(methods.SETTLE_FRAME * len(deliveries))
        return True

    def _settlement(self, deliveries: Sequence[Delivery], method: _Settle, multiple: bool) -> bytes:
        """The frames that settle *deliveries*. Their memory is returned to the budget."""
        self._free(deliveries)
        if multiple and len(deliveries) > 1:
            return method(self.number, deliveries[-1].tag, True)
        return b"".join([method(self.number, delivery.tag, False) for delivery in deliveries])

    def _forget(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Remove *deliveries* from the unsettled ones. Returns those that were unsettled."""
        return [
            delivery
            for delivery in deliveries
            if self._open.pop(delivery.tag, None) is not None or self._held.pop(delivery.tag, None) is not None
        ]

    def _free(self, deliveries: Sequence[Delivery]) -> None:
        freed = sum(delivery.size for delivery in deliveries if delivery.body is not None)
        if freed:
            self._kept -= freed
            self._budget.charge(-freed)

    def _frames(self, settlement: _Settlement) -> _Frames:
        data = self._settlement(settlement.deliveries, settlement.method, settlement.multiple)
        return _Frames(data, dirty=True, last=False)

    # -- requests of branches

    def release(self, deliveries: Sequence[Delivery]) -> None:
        """Give held deliveries back. Deliveries that were taken, or lost with the channel, are skipped."""
        held = [self._held[delivery.tag] for delivery in deliveries if delivery.tag in self._held]
        held = [each for each in held if each.branch is not None]  # others are being returned
        back = [each.delivery for each in held if each.released is None]
        if self._replacer is not None and self._replacer.may_be_near(back):
            for delivery in back:
                self._held[delivery.tag].branch = None
            task = asyncio.get_running_loop().create_task(self._replace_or_return(self._replacer, back))
            self._returning.add(task)
            task.add_done_callback(self._returning.discard)
        else:
            self.nack(back, requeue=True)
        for each in held:
            if each.released is not None and self.end_hold(each.delivery):
                each.released()
        self._close_if_idle()

    async def _replace_or_return(self, replacer: Replacer, deliveries: Sequence[Delivery]) -> None:
        """Return held deliveries in their order. Those that *replacer* has replaced are acknowledged instead."""
        replaced: Sequence[Delivery] = ()
        try:
            replaced = await replacer.replace(deliveries)
        except Exception:  # noqa: BLE001 - logged; the messages must go back
            _log.exception("messages could not be replaced")
        self.ack(replaced)
        done = {delivery.tag for delivery in replaced}
        self.nack([delivery for delivery in deliveries if delivery.tag not in done], requeue=True)
        self._close_if_idle()

    def take(
        self, deliveries: Sequence[Delivery], branch_id: UUID, unit: Unit, receipt_queue: bytes
    ) -> "asyncio.Future[UnitOutcome | None]":
        """Acknowledge held deliveries in one unit.

        Args:
            deliveries: held.
            branch_id: id of the branch.
            unit: logged already.
            receipt_queue: for its receipt, if the unit has one.

        Returns:
            A future: HAPPENED, NEVER, or ``None`` if the connection was lost and only a receipt can prove the outcome.
        """
        done: asyncio.Future[UnitOutcome | None] = asyncio.get_running_loop().create_future()
        if self.end_reason is not None or any(delivery.tag not in self._held for delivery in deliveries):
            done.set_result(UnitOutcome.NEVER)
            return done
        receipt = b""
        if unit.receipt:
            receipt = messages.receipt(self.number, receipt_queue, messages.receipt_body(branch_id, unit))
        self._queue.append(_UnitRequest(deliveries, receipt, done))
        self._flush()
        return done

    # -- the queue of frames

    def _send(self, data: bytes, *, dirty: bool = False, last: bool = False) -> None:
        """Send frames, now or after commit-ok; *dirty* ones are committed."""
        self._enqueue(_Frames(data, dirty, last), len(data))

    def _enqueue(self, item: _Frames | _Settlement, size: int) -> None:
        if self.end_reason is None:
            self._queue.append(item)
            self._flush()
            if self._queue:
                self._add_waiting(size)

    def _add_waiting(self, size: int) -> None:
        self._waiting += size
        if self._waiting > _MAX_WAITING:
            self._keeper.hold_client(self)

    def _send_unit(self, unit: _UnitRequest, commit: bytes) -> None:
        if any(delivery.revoked for delivery in unit.deliveries):
            _resolve(unit.done, UnitOutcome.NEVER)
            return
        self._unit = unit
        acks = [_ack(self.number, delivery.tag) for delivery in unit.deliveries]
        self._committing = True
        failpoint.at(Point.TAKING_BEFORE)
        self.upstream.write_steps(
            (acks, Point.TAKING_ACKED),
            ((unit.receipt,), Point.TAKING_RECEIPTED),
            ((commit,), Point.TAKING_SENT),
        )

    def _flush(self) -> None:
        commit = methods.TxCommit().frame(self.number)
        while self._queue and not self._committing and self.end_reason is None:
            item = self._queue[0]
            if (isinstance(item, _Settlement) and item.waits) or (isinstance(item, _UnitRequest) and not self._locked):
                return
            self._queue.popleft()
            if isinstance(item, _UnitRequest):
                self._send_unit(item, commit)
                continue
            settled = 0
            if isinstance(item, _Settlement):
                settled = len(item.deliveries)
                item = self._frames(item)
            frames, dirty, last = [item.data], item.dirty, item.last
            acts = [item.act]
            while self._queue and not last:
                following = self._queue[0]
                if isinstance(following, _Settlement):
                    settled += len(following.deliveries)
                    if settled > _AT_ONCE or following.waits:
                        break
                    following = self._frames(following)
                elif isinstance(following, _UnitRequest) or following.last:
                    break
                frames.append(following.data)
                acts.append(following.act)
                dirty |= following.dirty
                self._queue.popleft()
            if dirty:
                frames.append(commit)
                self._committing = True
            if last:
                self.end_reason = "closing"  # nothing may follow: the broker closes the connection for a later frame
            if failpoint.armed and dirty:
                failpoint.at(Point.SETTLE_BEFORE)
            self.upstream.write(b"".join(frames))
            if failpoint.armed and dirty:
                failpoint.at(Point.SETTLE_SENT)
            self._acts = [act for act in acts if act is not None]
            if not dirty:
                self._act()
        if not self._queue:
            self._nothing_waits()

    def _act(self) -> None:
        acts, self._acts = self._acts, []
        for act in acts:
            act()

    def _nothing_waits(self) -> None:
        if self._waiting:
            self._waiting = 0
            self._keeper.release_client(self)

    def _committed(self) -> None:
        self._committing = False
        unit, self._unit = self._unit, None
        if failpoint.armed:
            failpoint.at(Point.SETTLE_COMMITTED if unit is None else Point.TAKING_COMMITTED)
        if unit is not None:
            self._free(self._forget(unit.deliveries))
            revoked = any(delivery.revoked for delivery in unit.deliveries)  # before the acks arrived, or after them
            _resolve(unit.done, UnitOutcome.UNKNOWN if revoked else UnitOutcome.HAPPENED)
        self._act()
        self._flush()
        self._close_if_idle()
        if self.owner is None and self.only_holds:
            self._keeper.consume_channel_idle()

    # -- from the broker

    def frame(self, key: int, buffer: bytes, start: int, end: int) -> None:
        """Handle a frame from the broker."""
        self.filter.frame(key, buffer, start, end)

    def subscription(self, delivery: methods.BasicDeliver | methods.BasicGetOk) -> ConsumedQueue | None:
        """See :class:`FilteredChannel`."""
        return None if self.owner is None else self._queues.of(delivery)  # without an owner, it goes back

    def settle_copy(self, tag: int, *, requeue: bool) -> None:
        """See :class:`FilteredChannel`."""
        self._send((_REQUEUE if requeue else _ack)(self.number, tag, False), dirty=True)

    def get_again(self, tag: int, queue: bytes, *, no_ack: bool) -> None:  # noqa: ARG002
        """See :class:`FilteredChannel`."""
        self._send(methods.BasicGet(queue, no_ack).frame(self.number))

    def may_replace(self, *, is_got: bool) -> bool:
        """See :class:`FilteredChannel`."""
        return not is_got or len(self._queues.getting) == 1  # with several, the answers would be interchanged

    def abandon(self, reason: str) -> None:
        """See :class:`FilteredChannel`."""
        self.upstream.abort(reason)

    def accept(self, key: int, buffer: bytes, start: int, end: int) -> None:
        """See :class:`FilteredChannel`."""
        if key in (BODY, HEADER):
            self._add_content(key, buffer[start + 7 : end - 1])
            passes = not self._stray
        else:
            self._stray = False
            passes = key >> 16 not in _DECODED_CLASSES or self._handle_method(
                METHODS[key].decode(buffer[start + 7 : end - 1])
            )
        if passes and self.owner is not None:
            self.owner.forward(buffer, start, end)

    def _handle_method(self, method: Method) -> bool:
        """Handle a method from the broker. Returns whether it is forwarded to the client."""
        match method:
            case methods.BasicDeliver() | methods.BasicGetOk():
                return self._deliver(method)
            case methods.TxCommitOk():
                self._committed()
                return False
            case methods.TxSelectOk() if self._selecting is not None:
                self._selecting.set_result(None)
                self._selecting = None
                return False
            case methods.BasicConsumeOk(consumer_tag=tag) if tag == self.lock.encode():
                self._locked = True
                self._flush()
                return False
            case methods.BasicCancel(consumer_tag=tag):
                if tag == self.lock.encode():
                    # without the lock, a successor would conclude that this connection has ended
                    self.upstream.abort("its lock was deleted")
                elif self._revokes:
                    self._revoke(tag)
                self._queues.answered(method)
            case ChannelClose():
                self._closed(method)
                return False
            case methods.ChannelCloseOk():
                self.upstream.free(self.number)
                owner, self.owner = self.owner, None
                self._end("closed", None)
                if owner is not None:
                    owner.upstream_close_ok()
                return False
            case _:
                self._queues.answered(method)
        return True

    def _revoke(self, tag: bytes) -> None:
        """Let no branch consume the deliveries of a consumer that the broker has cancelled.

        A quorum queue of RabbitMQ 4.3 takes them back at the consumer timeout, gives them to others, and ignores their
        acknowledgements. The channel stays open. The queue goes on delivering to the consumer, and may cancel it again.
        """
        consumed = self._queues.of_consumer(tag)
        if consumed is None or consumed.no_ack or consumed.is_deleted:
            return
        queue = consumed.queue
        for delivery in (*self._open.values(), *(held.delivery for held in self._held.values())):
            delivery.revoked |= delivery.queue == queue
        branches = {id(held.branch): held.branch for held in self._held.values() if held.delivery.queue == queue}
        for branch in branches.values():
            if branch is not None:
                self._keeper.held_lost(branch, REVOKED)

    def _deliver(self, message: methods.BasicDeliver | methods.BasicGetOk) -> bool:
        """Begin a message. Returns whether it is for the client."""
        consumed = self._queues.of(message)
        if isinstance(message, methods.BasicGetOk):
            self._queues.answered(message)
        else:
            self._stray = message.consumer_tag == self.lock.encode()
            if self._stray:
                self._left = self._delivery = None
                return False
            if consumed is None:
                _log.warning("delivery for an unknown consumer", consumer=message.consumer_tag)
        queue, no_ack = (consumed.queue, consumed.no_ack) if consumed is not None else (b"", False)
        self._left, self._properties, self._body = 0, b"", bytearray()
        self._delivery = None
        if not no_ack:
            self._delivery = Delivery(
                holder=self,
                tag=message.delivery_tag,
                queue=queue,
                exchange=message.exchange,
                routing_key=message.routing_key,
                redelivered=message.redelivered,
                properties=b"",
                body=None,
                size=0,
                exclusive=queue in self.upstream.exclusive,
            )
        return True

    def _add_content(self, key: int, payload: bytes) -> None:
        delivery = self._delivery
        if self._left is None:
            return
        if key == HEADER:
            _, self._left, self._properties = content.header(payload)
            size = self._left + len(self._properties)
            fits = self._kept + size <= self._max_kept and self._budget.has_room(size)
            self._skip = delivery is None or not fits
            if delivery is not None and fits:
                delivery.size = size  # from the header on, because the body may take long to arrive
                self._kept += size
                self._budget.charge(size)
        else:
            self._left -= len(payload)
            if not self._skip or self.on_message is not None:
                self._body += payload
        if self._left <= 0:
            self._left = self._delivery = None
            body, self._body = bytes(self._body), bytearray()
            if delivery is not None:
                self._arrived(delivery, body)
            self._is_whole()

    def _arrived(self, delivery: Delivery, body: bytes) -> None:
        delivery.stream = messages.from_stream(self._properties)
        if not self._skip or self.on_message is not None:
            delivery.properties = self._properties
        if not self._skip:
            delivery.body = body
        self._open[delivery.tag] = delivery
        if self.owner is None:
            self._give_back([delivery])
        elif self.on_message is not None:
            self.on_message(delivery, body)

    # -- the end

    def close(self, code: int = 200, text: bytes = b"closed by the client") -> None:
        """Send channel.close after everything that must be committed; the owner is told when it is confirmed."""
        self._send(methods.ChannelClose(code, text).frame(self.number), last=True)

    def detach(self) -> None:
        """The client's channel is gone: requeue all deliveries except those that branches hold.

        The channel is closed when no branch holds deliveries.
        """
        self.owner = None
        if self.end_reason is not None:
            return
        for tag in self._queues.cancel_all():
            self._send(methods.BasicCancel(tag, no_wait=True).frame(self.number))
        self.recover()
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if (
            self.owner is None
            and self.end_reason is None
            and not self._held
            and not self._committing
            and not self._queue
        ):
            self.end_reason = "closing"
            self.upstream.write(methods.ChannelClose(200, b"done").frame(self.number))

    def _closed(self, close: ChannelClose) -> None:
        if self.end_reason is not None:
            self.upstream.note_crossed_close(self.number)
            return
        self.upstream.write(methods.ChannelCloseOk().frame(self.number))
        self.upstream.free(self.number)
        owner = self.owner
        # If the close names tx.commit, the outcome is open. If it names no method (a delivery was not acknowledged in
        # time), it may have come after tx.commit. If it names any other method, the transaction was discarded.
        known = close.failed not in (methods.TxCommit.KEY, 0)
        in_doubt = self._unit is not None and not known
        self._end(f"the broker closed it: {close.reply_code}", UnitOutcome.NEVER if known else None)
        if owner is not None:
            owner.upstream_closed(close)
        if in_doubt:
            self.upstream.abort("the outcome of a unit can be read only after its connection has ended")

    def lost(self, reason: str) -> None:
        """The connection is gone."""
        self._end(reason, None)

    def _end(self, reason: str, unit_outcome: UnitOutcome | None) -> None:
        self.end_reason = reason
        self.filter.end()
        if self._selecting is not None:
            self._selecting.set_exception(UpstreamLost(reason))
            self._selecting = None
        unit, self._unit = self._unit, None
        if unit is not None:
            _resolve(unit.done, unit_outcome)
        for item in self._queue:
            if isinstance(item, _UnitRequest):
                _resolve(item.done, UnitOutcome.NEVER)
        self._queue.clear()
        self._nothing_waits()
        branches = {id(held.branch): held.branch for held in self._held.values() if held.branch is not None}
        self._acts.clear()
        self._is_whole()
        self._open.clear()
        for held in self._held.values():
            held.delivery.revoked = True  # it is in its queue again: no copy of it may be published
        self._held.clear()
        self._budget.charge(-self._kept)
        self._kept = 0
        for branch in branches.values():
            self._keeper.held_lost(branch, reason)
        self._keeper.consume_channel_ended()


def _resolve(done: "asyncio.Future[UnitOutcome | None]", outcome: UnitOutcome | None) -> None:
    if not done.done():  # the caller may have been cancelled at the end of the service
        done.set_result(outcome)


def _unknown(tag: int) -> XaError:
    return XaError(ReplyCode.PRECONDITION_FAILED, f"unknown delivery tag {tag}")
