"""Deliveries to channels without select: second copies are kept from consumers, as on selected channels.

The frames of such channels pass without inspection. So this module follows only what it needs: the queue of each
consumer, and whether the client is inside a content or ends a transaction. dtx may not send a frame of its own there.
"""

from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any, Final, Protocol

from dtx.store.rabbitmq.consumed_queues import ConsumedQueue, ConsumedQueues
from dtx.store.rabbitmq.copies import Copy, CopyRegister, key_of
from dtx.store.rabbitmq.copy_filter import CopyFilter, is_redelivered
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.codec import ChannelMode
from dtx.wire.amqp09.frames import BODY, HEADER, OVERHEAD, Frame

DELIVERIES: Final = frozenset((methods.BasicDeliver.KEY, methods.BasicGetOk.KEY))
TRANSACTION_ENDED: Final = frozenset((methods.TxCommitOk.KEY, methods.TxRollbackOk.KEY))
_ENDS: Final = frozenset((methods.TxCommit.KEY, methods.TxRollback.KEY))
_NOTED: Final = frozenset((methods.BasicPublish.KEY, HEADER, BODY, methods.BasicAck.KEY, methods.BasicNack.KEY)) | _ENDS
_SETTLEMENTS: Final = {row.KEY: row for row in (methods.BasicAck, methods.BasicNack, methods.BasicReject)}
_RECOVERS: Final = frozenset((methods.BasicRecover.KEY, methods.BasicRecoverAsync.KEY))
_SETTLING: Final = _RECOVERS | _SETTLEMENTS.keys()
_MOST_WAITING: Final = 1 << 20
"""Bytes that wait on one channel before dtx stops reading from the client."""
_HEADER_START: Final = 7 + 12
"""Bytes before the property flags in a header frame."""


class ChannelSide(Protocol):
    """The channel, as used by its deliveries."""

    @property
    def mode(self) -> ChannelMode:
        """The mode of the channel. In TX, what dtx settles would wait for the commit of the client."""

    def accept(self, key: int, buffer: bytes, start: int, end: int) -> None:
        """Handle a frame that has passed the filter."""

    def to_upstream(self, frame: bytes) -> None:
        """Send a frame to the broker now."""

    def settled_by_dtx(self, tag: int) -> None:
        """Note that dtx has settled a delivery which the client has not seen."""

    def abandon(self, reason: str) -> None:
        """End the connection to the broker."""


@dataclass(slots=True, eq=False)
class _Outgoing:
    """Something to do on the channel, after everything before it."""

    act: Callable[[], None]
    waits: bool
    """The log must have a settlement first."""


class PlainDeliveries:
    """The deliveries of one channel without select that may have other copies.

    Args:
        channels: of the connection.
        vhost: of the connection.
        number: of the channel at the broker.
        queues: that it consumes from.
        side: the channel.
    """

    def __init__(
        self, channels: "ConsumingChannels", vhost: str, number: int, queues: ConsumedQueues, side: ChannelSide
    ) -> None:
        self.filter: Final = CopyFilter(channels.register, vhost, self)
        self._channels = channels
        self._number = number
        self._side = side
        self._queues = queues
        self._missing = 0
        """Bytes that are missing of the content that the client publishes; 1 while its header is missing."""
        self._ends_transaction = False
        """The client has sent tx.commit or tx.rollback, and the broker has not answered."""
        self._own: list[bytes] = []
        """Frames of dtx that wait for the end of that."""
        self._outgoing: deque[_Outgoing] = deque()
        self._waiting = 0
        """Bytes in it."""
        self._is_closing = False
        """The broker gets channel.close, or has sent it: dtx may send no frame of its own."""
        self._settles_all = False
        """The client has settled all its deliveries with tag 0: that may mean deliveries that it has not seen yet."""

    @property
    def is_busy(self) -> bool:
        """Whether the frames of the client must pass one by one."""
        return self.filter.is_busy or bool(self._own or self._outgoing)

    # -- from the client

    def sent(self, key: int, buffer: bytes, start: int, end: int) -> None:
        """Note a frame that the client sends, one of those that decide when dtx may send its own."""
        if key == BODY:
            self._missing -= end - start - OVERHEAD
        elif key == HEADER:
            self._missing = int.from_bytes(buffer[start + 11 : start + 19], "big")
        elif key in _ENDS:
            self._ends_transaction = True
        elif key == methods.BasicPublish.KEY:
            self._missing = 1
        elif end - start == methods.SETTLE_FRAME:
            self._settles_all |= bool(buffer[start + 19] & 1) and not any(buffer[start + 11 : start + 19])

    def pass_on(self, key: int, frame: bytes) -> None:
        """Send a frame of the client to the broker. A settlement waits until the log has it, and all after it wait."""
        copies: Sequence[Copy] = ()
        if key in _SETTLING and self.is_busy:
            copies = self._settle(key, frame[7:-1])
        self.then(partial(self._side.to_upstream, frame), copies, len(frame))
        self._send_own()

    def then(self, act: Callable[[], None], copies: Sequence[Copy] = (), size: int = 0) -> None:
        """Call *act*, which sends *size* bytes, after all before it, and when the log has that *copies* are settled."""
        if not copies and not self._outgoing:
            act()
            return
        outgoing = _Outgoing(act, waits=bool(copies))
        self._outgoing.append(outgoing)
        self._waiting += size
        self._channels.begin(self)
        if self._waiting > _MOST_WAITING:
            self._channels.hold(self)
        if copies:
            self._channels.spawn(self._record(copies, outgoing))

    async def _record(self, copies: Sequence[Copy], outgoing: _Outgoing) -> None:
        if not await self.filter.record(copies):
            self.drop()
        outgoing.waits = False
        while self._outgoing and not self._outgoing[0].waits:
            self._outgoing.popleft().act()
        self._send_own()
        if not self._outgoing:
            self._waiting = 0
            self._channels.finish(self)

    def _settle(self, key: int, payload: bytes) -> Sequence[Copy]:
        """Note a settlement of the client; returns the copies that the log must have first."""
        if key in _RECOVERS:
            self.filter.recovered()
            return ()
        settlement = _SETTLEMENTS[key].decode(payload)
        tag = settlement.delivery_tag
        tags: Sequence[int] = (tag,)
        self.filter.drop_arriving(tag, multiple=settlement.multiple)
        if settlement.multiple:
            self.filter.settle_up_to(tag)
            tags = list(takewhile(lambda each: not tag or each <= tag, self.filter.tracked))
        is_final = isinstance(settlement, methods.BasicAck) or not settlement.requeue
        if tag or not settlement.multiple:
            return self.filter.to_record(tags, is_final=is_final)
        # Tag 0 means what was delivered when the broker reads it. If it waited, it would settle deliveries that the
        # client had not seen when it sent it. So all that waits is sent, and the log has the settlement later.
        for copy in self.filter.tracked.values() if is_final else ():
            self.filter.settle_at_once(copy)
        self._send_waiting()
        self.filter.returned(tags)
        return ()

    def _send_waiting(self) -> None:
        outgoing, self._outgoing = self._outgoing, deque()
        for each in outgoing:
            each.act()
        if outgoing:
            self._waiting = 0
            self._channels.finish(self)

    def close(self) -> None:
        """The broker gets channel.close next: it has the unsettled deliveries again, and dtx sends nothing more."""
        self._is_closing = True
        self._own.clear()
        for key, frame in self.filter.end():
            if key == methods.ChannelClose.KEY:  # both have closed it, and the broker waits for an answer
                self._side.accept(key, frame, 0, len(frame))

    def _send_own(self) -> None:
        """Send the frames of dtx, if the client is inside neither a content nor the end of a transaction."""
        if self._own and self._missing <= 0 and not self._ends_transaction:
            own, self._own = self._own, []
            self.then(partial(self._send_now, b"".join(own)))

    def _send_now(self, frame: bytes) -> None:
        if not self._is_closing:
            self._side.to_upstream(frame)

    def drop(self) -> None:
        """The broker has closed the channel: it ignores all that waits, but a content must be whole."""
        self.close()
        self._send_waiting()

    # -- from the broker

    def transaction_ended(self) -> None:
        """Note tx.commit-ok or tx.rollback-ok, which has passed the filter."""
        self._ends_transaction = False
        self._send_own()

    def subscription(self, delivery: methods.BasicDeliver | methods.BasicGetOk) -> ConsumedQueue | None:
        """See :class:`FilteredChannel`."""
        return self._queues.of(delivery)

    def accept(self, key: int, buffer: bytes, start: int, end: int) -> None:
        """See :class:`FilteredChannel`."""
        self._side.accept(key, buffer, start, end)

    def settle_copy(self, tag: int, *, requeue: bool) -> None:
        """See :class:`FilteredChannel`."""
        if self._is_closing:
            return
        method = methods.BasicNack(tag, False, True) if requeue else methods.BasicAck(tag)
        self._own.append(method.frame(self._number))
        self._send_own()
        self._side.settled_by_dtx(tag)

    def get_again(self, tag: int, queue: bytes, *, no_ack: bool) -> None:
        """See :class:`FilteredChannel`."""
        if self._is_closing:
            return
        if no_ack:
            self._side.settled_by_dtx(tag)
        self._own.append(methods.BasicGet(queue, no_ack).frame(self._number))
        self._send_own()

    def may_replace(self, *, is_got: bool) -> bool:
        """See :class:`FilteredChannel`."""
        if self._settles_all or self._side.mode is ChannelMode.TX:
            return False
        return not is_got or len(self._queues.getting) == 1  # with several, the answers would be interchanged

    def abandon(self, reason: str) -> None:
        """See :class:`FilteredChannel`."""
        self._side.abandon(reason)


class ConsumingChannels:
    """The channels without select of one connection that have consumed.

    Args:
        register: of the copies.
        spawn: runs a task.
        hold: stops reading from the client; called with a reason.
        finished: undoes *hold*, and continues what waits for :attr:`is_recording`.
    """

    def __init__(
        self,
        register: CopyRegister,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        hold: Callable[[object], None],
        finished: Callable[[object], None],
    ) -> None:
        self.register = register
        self.spawn = spawn
        self.hold = hold
        self.by_number: dict[int, PlainDeliveries] = {}
        self._finished = finished
        self._recording: set[PlainDeliveries] = set()

    @property
    def is_recording(self) -> bool:
        """Whether frames wait until the log has a settlement."""
        return bool(self._recording)

    def begin(self, deliveries: PlainDeliveries) -> None:
        """Note that frames of a channel wait."""
        self._recording.add(deliveries)

    def finish(self, deliveries: PlainDeliveries) -> None:
        """Undo :meth:`begin`."""
        self._recording.discard(deliveries)
        self._finished(deliveries)

    def from_client(self, buffer: bytes, frames: Sequence[Frame]) -> None:
        """Note frames of the client that pass."""
        found = self.by_number
        for key, number, start, end in frames:
            if key in _NOTED and number in found:
                found[number].sent(key, buffer, start, end)

    def concerns(self, buffer: bytes, frames: Sequence[Frame]) -> bool:
        """Whether *frames* of the broker have a delivery that must be inspected."""
        register = self.register
        holding = register.holding  # of other connections, too: their clients may be slow
        if register.filters or (holding and any(each.filter in holding for each in self.by_number.values())):
            return True
        if not register.may_concern:
            return False
        is_shared = register.is_shared
        for key, _, start, end in frames:
            if is_shared and key in DELIVERIES and is_redelivered(key, buffer, start):
                return True
            if key == HEADER:
                message = key_of(bytes(memoryview(buffer)[start + _HEADER_START : end - 1]))
                if message is not None and register.concerns(message):
                    return True
        return False
