"""The upstream channel (T), in tx mode, on which a selected channel consumes.

Acknowledgements outside a branch are committed at once. Those within a branch are held, and taken in one unit when the
branch is prepared.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final, Protocol
from uuid import UUID

from dtx.log.records import Unit
from dtx.store.api import UnitOutcome
from dtx.store.rabbitmq import messages, send_queue
from dtx.store.rabbitmq.consumed_queues import ConsumedQueue, ConsumedQueues
from dtx.store.rabbitmq.copies import Copy, CopyRegister
from dtx.store.rabbitmq.copy_filter import CopyFilter
from dtx.store.rabbitmq.delivery_limit import Replacer
from dtx.store.rabbitmq.identity import hold_lock
from dtx.store.rabbitmq.send_queue import ClientReading, SendQueue, SettleMethod, UnsentSettlement
from dtx.store.rabbitmq.upstream import Upstream, UpstreamLost
from dtx.store.work import Budget, Delivery
from dtx.telemetry import get_logger
from dtx.wire.amqp09 import content, methods
from dtx.wire.amqp09.codec import Method
from dtx.wire.amqp09.frames import BODY, HEADER, method_frame
from dtx.wire.amqp09.methods import METHODS, ChannelClose, Settle
from dtx.xa.codes import ReplyCode, XaError

_log = get_logger(part="consume channel")
REPLY_TO: Final = b"amq.rabbitmq.reply-to"
"""The pseudo-queue of direct replies: they come to the channel that published the request."""
_DECODED_CLASSES: Final = frozenset(
    row.KEY >> 16 for row in (methods.BasicDeliver, methods.QueueDeclare, ChannelClose, methods.TxSelect)
)
"""Classes of the broker's methods that this channel decodes."""
REVOKED: Final = "the broker has cancelled its consumer, and may deliver the message again"
"""Why a delivery can be settled in no branch."""


class ConsumeOwner(Protocol):
    """The client's channel."""

    def forward(self, buffer: bytes, start: int, end: int) -> None:
        """Forward a frame to the client."""

    def upstream_closed(self, close: ChannelClose) -> None:
        """The broker closed an upstream channel, for an error of the client or of its own."""

    def upstream_close_ok(self) -> None:
        """The broker has confirmed the close that the client requested."""


class Keeper(ClientReading, Protocol):
    """The client connection that a :class:`ConsumeChannel` belongs to."""

    def held_lost(self, branch: object, reason: str) -> None:
        """Deliveries that *branch* holds went back to the broker with their channel."""

    def consume_channel_ended(self) -> None:
        """A consume channel has ended."""

    def consume_channel_idle(self) -> None:
        """A consume channel whose client channel is gone only holds deliveries for branches."""


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
        self.frame: Final = self.filter.frame
        """Handles a frame from the broker."""
        self.upstream = upstream
        self.number = number
        self.owner: ConsumeOwner | None = None
        self.on_message: Callable[[Delivery, bytes], None] | None = None
        """Called with each delivery and its whole body, also if it is too large to be kept."""
        self._keeper = keeper
        self._kept: Final = Budget(max_kept, "", budget)
        self._open: dict[int, Delivery] = {}
        self._sorted = True
        """Whether the tags in ``_open`` ascend."""
        self._held: dict[int, _Held] = {}
        self._replacer = replacer
        self._revokes = revokes
        self._sending: Final = SendQueue(upstream, number, keeper, self._free, self._taken)
        self._selecting: asyncio.Future[None] | None = None
        self._queues = queues
        self._delivery: Delivery | None = None
        """The delivery whose content has not all come; ``None`` if the content that comes is ignored."""
        self._left = 0
        """Bytes of its body that are missing."""
        self._fits = False
        """Whether its content is kept."""
        self._body = bytearray()
        self._whole: asyncio.Future[bytes] | None = None
        self._lock_asked = False
        self._stray = False
        """Whether the current message is one that was published to the lock. It is not for the client."""
        upstream.handlers[number] = self

    # -- requests of the client

    @property
    def lock(self) -> str:
        """Name of the lock of the connection; empty without one."""
        return self.upstream.lock

    @property
    def end_reason(self) -> str | None:
        """Why the channel has ended; ``None`` before that."""
        return self._sending.end_reason

    @property
    def holds(self) -> bool:
        """Whether deliveries are held for branches."""
        return bool(self._held) or self._sending.is_taking

    @property
    def unsettled(self) -> int:
        """The number of unsettled deliveries, including those that branches hold."""
        return len(self._open) + len(self._held)

    @property
    def only_holds(self) -> bool:
        """Whether it only holds deliveries for branches."""
        return self.holds and self._sending.is_idle

    def request(self, key: int, payload: bytes) -> None:
        """Forward a method of the client, and note what it consumes or declares; *key* is its class and method."""
        self._queues.requested(key, payload)
        self._sending.send(method_frame(self.number, payload))

    @property
    def gets_replies(self) -> bool:
        """Whether the client consumes direct replies on this channel."""
        return any(consumed.queue == REPLY_TO for consumed in self._queues.consumers.values())

    def publish(self, frames: bytes) -> None:
        """Publish one message outside a branch; *frames* are whole frames for this channel."""
        self._sending.send(frames, dirty=True)

    async def start_tx(self) -> None:
        """Put the channel in tx mode.

        Raises:
            UpstreamLost: the channel or the connection is gone.
        """
        self._selecting = asyncio.get_running_loop().create_future()
        if self.lock:
            self._hold_lock()
        self._sending.send(methods.TxSelect().frame(self.number))
        await self._selecting

    def _hold_lock(self) -> None:
        """Consume from the lock of the connection. No unit is sent before the broker has confirmed that.

        The lock is declared on another channel. Here it would become the queue of methods that name no queue.
        """
        self._lock_asked = True
        self._sending.send(hold_lock(self.number, self.lock))

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
            raise XaError(ReplyCode.PRECONDITION_FAILED, f"unknown delivery tag {tag}")
        return list(takewhile(lambda each: each.tag <= tag, self._in_order())) if settle.multiple else [delivery]

    def _in_order(self) -> Iterable[Delivery]:
        if not self._sorted:
            self._open, self._sorted = {tag: self._open[tag] for tag in sorted(self._open)}, True
        return self._open.values()

    def incoming(self, settle: Settle) -> "asyncio.Future[bytes] | None":
        """A future for the content of a delivery that *settle* means; ``None`` if all contents have arrived.

        The client already has basic.deliver. RabbitMQ lets it settle the delivery from then on. The future gets empty
        bytes when the content is complete, or the channel ends.
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

        *multiple* means that *deliveries* are all unsettled ones up to the last of them.
        """
        self._settle(deliveries, send_queue.ACK, multiple=multiple)

    def nack(self, deliveries: Sequence[Delivery], *, requeue: bool, multiple: bool = False) -> None:
        """Reject deliveries; this is committed at once. *multiple* is as for :meth:`ack`."""
        self._settle(deliveries, send_queue.NACK[requeue], multiple=multiple)

    def reject(self, deliveries: Sequence[Delivery], *, requeue: bool) -> None:
        """As :meth:`nack`. Quorum queues of RabbitMQ 4.3 count it for their delivery limit, and do not count nack."""
        self._settle(deliveries, send_queue.REJECT[requeue], multiple=False)

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
        """Undo :meth:`hold`: the delivery is unsettled again, and nothing is sent. Returns whether it was held."""
        held = self._held.pop(delivery.tag, None)
        if held is None:
            return False
        self._open[delivery.tag] = held.delivery
        self._sorted = False
        return True

    def reject_held(self, delivery: Delivery, *, requeue: bool, rejects: bool) -> bool:
        """Reject a held delivery, which has no contents, by basic.reject or basic.nack. Returns whether it was held."""
        is_held = delivery.tag in self._held
        if is_held:
            self._settle([delivery], (send_queue.REJECT if rejects else send_queue.NACK)[requeue], multiple=False)
        return is_held

    def then(self, act: Callable[[], None]) -> None:
        """Call *act* when everything sent so far is committed. It is never called if the channel ends before."""
        self._sending.then(act)

    def _settle(self, deliveries: Sequence[Delivery], method: SettleMethod, *, multiple: bool) -> None:
        if not deliveries or self._sending.end_reason is not None:
            return
        # for the broker, held deliveries are unsettled too, and those that dtx itself settles
        multiple = multiple and not self._held and not self.filter.owns
        if multiple and len(deliveries) == len(self._open):
            self._open.clear()
        else:
            deliveries = self._forget(deliveries)
        copies: Sequence[Copy] = ()
        if self.filter.is_busy:
            copies = self.filter.to_record(
                (delivery.tag for delivery in deliveries), is_final=method not in send_queue.RETURNS
            )
        if not multiple and not copies and self._sending.join(deliveries, method):
            return
        settlement = UnsentSettlement(list(deliveries), method, multiple, waits=bool(copies))
        if copies:
            self.filter.spawn(self._record(copies, settlement))
        self._sending.settle(settlement)

    async def _record(self, copies: Sequence[Copy], settlement: UnsentSettlement) -> None:
        if await self.filter.record(copies):
            settlement.waits = False
            self._sending.flush()

    def _forget(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Remove *deliveries* from the unsettled ones. Returns those that were unsettled."""
        return [
            delivery
            for delivery in deliveries
            if self._open.pop(delivery.tag, None) is not None or self._held.pop(delivery.tag, None) is not None
        ]

    def _taken(self, deliveries: Sequence[Delivery]) -> None:
        self._free(self._forget(deliveries))

    def _free(self, deliveries: Sequence[Delivery]) -> None:
        freed = sum(delivery.size for delivery in deliveries if delivery.body is not None)
        if freed:
            self._kept.charge(-freed)

    # -- requests of branches

    def release(self, deliveries: Sequence[Delivery]) -> None:
        """Give held deliveries back. Deliveries that were taken, or lost with the channel, are skipped."""
        found = [self._held.get(delivery.tag) for delivery in deliveries]
        held = [each for each in found if each is not None and each.branch is not None]  # others are being returned
        back = [each.delivery for each in held if each.released is None]
        if self._replacer is not None and self._replacer.may_be_near(back):
            for delivery in back:
                self._held[delivery.tag].branch = None
            self.filter.spawn(self._replace_or_return(self._replacer, back))
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
        """Acknowledge held *deliveries* in one *unit*, which is logged already. It may have a receipt.

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
        self._sending.take(deliveries, receipt, done)
        return done

    # -- from the broker

    def subscription(self, delivery: methods.BasicDeliver | methods.BasicGetOk) -> ConsumedQueue | None:
        """See :class:`FilteredChannel`."""
        return None if self.owner is None else self._queues.of(delivery)  # without an owner, it goes back

    def settle_copy(self, tag: int, *, requeue: bool) -> None:
        """See :class:`FilteredChannel`."""
        method = send_queue.NACK[True] if requeue else send_queue.ACK
        self._sending.send(method(self.number, tag, False), dirty=True)

    def get_again(self, tag: int, queue: bytes, *, no_ack: bool) -> None:  # noqa: ARG002
        """See :class:`FilteredChannel`."""
        self._sending.send(methods.BasicGet(queue, no_ack).frame(self.number))

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
                self._sending.committed()
                self._close_if_idle()
                if self.owner is None and self.only_holds:
                    self._keeper.consume_channel_idle()
                return False
            case methods.TxSelectOk() if self._selecting is not None:
                self._selecting.set_result(None)
                self._selecting = None
                return False
            case methods.BasicConsumeOk(consumer_tag=tag) if tag == self.lock.encode():
                self._sending.has_lock = True
                self._sending.flush()
                return False
            case methods.BasicConsumeOk() if self.owner is None:  # the client has gone before its consumer began
                self._queues.answered(method)
                self._cancel_all()
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
        self._lose([held for held in self._held.values() if held.delivery.queue == queue], REVOKED)

    def _lose(self, lost: Iterable[_Held], reason: str) -> None:
        """Report each branch that has *lost* deliveries."""
        for branch in {id(held.branch): held.branch for held in lost if held.branch is not None}.values():
            self._keeper.held_lost(branch, reason)

    def _deliver(self, message: methods.BasicDeliver | methods.BasicGetOk) -> bool:
        """Begin a message. Returns whether it is for the client."""
        consumed = self._queues.of(message)
        self._delivery = None
        if isinstance(message, methods.BasicGetOk):
            self._queues.answered(message)
        elif message.consumer_tag == self.lock.encode():
            self._stray = True
            return False
        elif consumed is None:
            _log.warning("delivery for an unknown consumer", consumer=message.consumer_tag)
        if consumed is not None and consumed.no_ack:
            return True
        queue = b"" if consumed is None else consumed.queue
        self._body = bytearray()
        self._delivery = Delivery(
            holder=self,
            tag=message.delivery_tag,
            queue=queue,
            exchange=message.exchange,
            routing_key=message.routing_key,
            redelivered=message.redelivered,
            exclusive=queue in self.upstream.exclusive,
        )
        return True

    def _add_content(self, key: int, payload: bytes) -> None:
        delivery = self._delivery
        if delivery is None:
            return
        if key == HEADER:
            _, self._left, properties = content.header(payload)
            delivery.stream = messages.from_stream(properties)
            size = self._left + len(properties)
            self._fits = self._kept.has_room(size)
            if self._fits:
                delivery.size = size  # from the header on, because the body may take long to arrive
                self._kept.charge(size)
            if self._fits or self.on_message is not None:
                delivery.properties = properties
        else:
            self._left -= len(payload)
            if self._fits or self.on_message is not None:
                self._body += payload
        if self._left <= 0:
            self._delivery = None
            body, self._body = bytes(self._body), bytearray()
            if self._fits:
                delivery.body = body
            self._open[delivery.tag] = delivery
            if self.owner is None:
                self._give_back([delivery])
            elif self.on_message is not None:
                self.on_message(delivery, body)
            self._is_whole()

    # -- the end

    def close(self, code: int = 200, text: bytes = b"closed by the client") -> None:
        """Send channel.close after everything that must be committed; the owner is told when it is confirmed."""
        self._sending.send(methods.ChannelClose(code, text).frame(self.number), last=True)

    def detach(self) -> None:
        """The client's channel is gone: requeue all deliveries except those that branches hold.

        The channel is closed when no branch holds deliveries.
        """
        self.owner = None
        if self.end_reason is not None:
            return
        self._cancel_all()
        self.recover()
        self._close_if_idle()

    def _cancel_all(self) -> None:
        for tag in self._queues.cancel_all():
            self._sending.send(methods.BasicCancel(tag, no_wait=True).frame(self.number))

    def _close_if_idle(self) -> None:
        if self.owner is None and not self._held and self._sending.is_idle:
            self.close(200, b"done")

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
        in_doubt = self._sending.is_taking and not known
        self._end(f"the broker closed it: {close.reply_code}", UnitOutcome.NEVER if known else None)
        if owner is not None:
            owner.upstream_closed(close)
        if in_doubt:
            self.upstream.abort("the outcome of a unit can be read only after its connection has ended")

    def lost(self, reason: str) -> None:
        """The connection is gone."""
        self._end(reason, None)

    def _end(self, reason: str, unit_outcome: UnitOutcome | None) -> None:
        self.filter.end()
        if self._selecting is not None:
            self._selecting.set_exception(UpstreamLost(reason))
            self._selecting = None
        self._sending.end(reason, unit_outcome)
        self._is_whole()
        self._open.clear()
        lost, self._held = self._held.values(), {}
        for held in lost:
            held.delivery.revoked = True  # it is in its queue again: no copy of it may be published
        self._kept.charge(-self._kept.used)
        self._lose(lost, reason)
        self._keeper.consume_channel_ended()
