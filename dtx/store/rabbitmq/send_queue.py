"""What is sent on one upstream channel in tx mode: frames, settlements, and units of branches, in this order.

RabbitMQ closes the whole *connection* (504) for any frame between tx.commit and commit-ok. So everything waits for
commit-ok. Then all that has come meanwhile is sent at once, up to the next unit. A settlement may wait for the log, and
a unit for the lock of the connection. All behind them waits too.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final, Protocol

from dtx import failpoint
from dtx.failpoint import Point
from dtx.store.api import UnitOutcome
from dtx.store.rabbitmq.upstream import Upstream
from dtx.store.work import Delivery
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.codec import packer

_MAX_WAITING: Final = 1 << 20
"""Bytes that wait; with more, dtx reads nothing from the client."""
_AT_ONCE: Final = 4_096
"""Deliveries that one commit settles outside a branch at most; more wait for its commit-ok."""

SettleMethod = Callable[[int, int, bool], bytes]
"""Makes the frame of a settlement from channel number, delivery tag, and whether it means all up to this tag."""
_nack: Final = packer(methods.BasicNack)
_reject: Final = packer(methods.BasicReject)
ACK: Final[SettleMethod] = packer(methods.BasicAck)
NACK: Final[tuple[SettleMethod, ...]] = (partial(_nack, requeue=False), partial(_nack, requeue=True))
"""The second returns messages to their queues."""
REJECT: Final[tuple[SettleMethod, ...]] = (
    lambda number, tag, _: _reject(number, tag, requeue=False),
    lambda number, tag, _: _reject(number, tag, requeue=True),
)
"""As :data:`NACK`; basic.reject means one delivery."""
RETURNS: Final = (NACK[True], REJECT[True])


class ClientReading(Protocol):
    """The client connection, whose reading can be stopped."""

    def hold_client(self, reason: object) -> None:
        """Read nothing from the client until *reason* is released."""

    def release_client(self, reason: object) -> None:
        """Undo :meth:`hold_client`. Does nothing without it."""


@dataclass(slots=True, eq=False)
class _Frames:
    data: bytes
    dirty: bool = False
    """Needs tx.commit after it."""
    last: bool = False
    """channel.close: nothing may follow in the same write, not even tx.commit."""
    act: Callable[[], None] | None = None
    """Called when it is sent, and committed if it is dirty, with all that came before it."""


@dataclass(slots=True, eq=False)
class UnsentSettlement:
    """Deliveries that are settled outside a branch. Its frames are made when it is sent."""

    dirty: ClassVar[bool] = True
    last: ClassVar[bool] = False
    act: ClassVar[None] = None
    deliveries: list[Delivery]
    method: SettleMethod
    multiple: bool
    """They are all unsettled deliveries up to the last of them."""
    waits: bool = False
    """The log must have it first."""

    def frames(self, number: int) -> bytes:
        """The frames for channel *number*."""
        if self.multiple and len(self.deliveries) > 1:
            return self.method(number, self.deliveries[-1].tag, True)
        return b"".join([self.method(number, delivery.tag, False) for delivery in self.deliveries])


@dataclass(slots=True, eq=False)
class _Unit:
    deliveries: Sequence[Delivery]
    receipt: bytes
    done: "asyncio.Future[UnitOutcome | None]"

    def end(self, outcome: UnitOutcome | None) -> None:
        if not self.done.done():  # the caller may have been cancelled at the end of the service
            self.done.set_result(outcome)


class SendQueue:
    """What waits to be sent on one channel, and what waits for commit-ok.

    Args:
        upstream: the client's connection to the broker.
        number: of the channel.
        client: is not read while too many bytes wait.
        settled: called with deliveries whose settlement is about to be sent.
        taken: called with the deliveries of a unit that is committed.
    """

    def __init__(
        self,
        upstream: Upstream,
        number: int,
        client: ClientReading,
        settled: Callable[[Sequence[Delivery]], None],
        taken: Callable[[Sequence[Delivery]], None],
    ) -> None:
        self.end_reason: str | None = None
        """Why nothing more is sent; ``None`` before that."""
        self.has_lock = False
        """Whether the broker has confirmed that the channel holds the lock. No unit is sent before."""
        self._upstream = upstream
        self._number = number
        self._client = client
        self._settled = settled
        self._taken = taken
        self._commit = methods.TxCommit().frame(number)
        self._queue: deque[_Frames | UnsentSettlement | _Unit] = deque()
        self._waiting = 0
        """Bytes in it."""
        self._committing = False
        self._acts: list[Callable[[], None]] = []
        """Called at the next commit-ok."""
        self._unit: _Unit | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, and the broker has committed all that was sent."""
        return not self._committing and not self._queue

    @property
    def is_taking(self) -> bool:
        """Whether the commit of a unit is not answered."""
        return self._unit is not None

    def send(self, data: bytes, *, dirty: bool = False, last: bool = False) -> None:
        """Send whole frames; *dirty* ones are committed, and the *last* ones close the channel."""
        self._add(_Frames(data, dirty, last), len(data))

    def then(self, act: Callable[[], None]) -> None:
        """Call *act* when everything before it is committed. It is never called if the channel ends before."""
        self._add(_Frames(b"", act=act))

    def settle(self, settlement: UnsentSettlement) -> None:
        """Send a settlement, in parts if it is large. Only its first part waits for the log."""
        if not settlement.deliveries:
            return
        rest = settlement.deliveries[_AT_ONCE:]
        del settlement.deliveries[_AT_ONCE:]
        self._add(settlement, methods.SETTLE_FRAME * len(settlement.deliveries))
        for start in range(0, len(rest), _AT_ONCE):
            part = UnsentSettlement(rest[start : start + _AT_ONCE], settlement.method, settlement.multiple)
            self._add(part, methods.SETTLE_FRAME * len(part.deliveries))

    def join(self, deliveries: Sequence[Delivery], method: SettleMethod) -> bool:
        """Add *deliveries* to the last settlement that waits, if that is of the same kind. Returns whether it was.

        The outcomes of a branch come one by one: 10,000 separate settlements would take long.
        """
        last = self._queue[-1] if self._queue else None
        if (
            not isinstance(last, UnsentSettlement)
            or last.multiple
            or last.method is not method
            or len(last.deliveries) + len(deliveries) > _AT_ONCE
        ):
            return False
        last.deliveries += deliveries
        self._add_waiting(methods.SETTLE_FRAME * len(deliveries))
        return True

    def take(self, deliveries: Sequence[Delivery], receipt: bytes, done: "asyncio.Future[UnitOutcome | None]") -> None:
        """Send a unit: acknowledge *deliveries*, and publish *receipt*. Its outcome becomes the result of *done*."""
        self._add(_Unit(deliveries, receipt, done))

    def _add(self, item: _Frames | UnsentSettlement | _Unit, size: int = 0) -> None:
        if self.end_reason is None:
            self._queue.append(item)
            self.flush()
            if self._queue:
                self._add_waiting(size)

    def _add_waiting(self, size: int) -> None:
        self._waiting += size
        if self._waiting > _MAX_WAITING:
            self._client.hold_client(self)

    def flush(self) -> None:
        """Send what may be sent now."""
        while self._queue and not self._committing and self.end_reason is None:
            first = self._queue[0]
            if isinstance(first, _Unit):
                if not self.has_lock:
                    return
                self._queue.popleft()
                self._send_unit(first)
            elif not self._send_items():
                return
        if not self._queue:
            self._nothing_waits()

    def _send_items(self) -> bool:
        """Send the next items, as many as may go together. Returns whether there were any."""
        frames: list[bytes] = []
        acts: list[Callable[[], None]] = []
        settled, dirty, last = 0, False, False
        while self._queue and not last:
            item = self._queue[0]
            if isinstance(item, UnsentSettlement):
                settled += len(item.deliveries)
                if settled > _AT_ONCE or item.waits:
                    break
                self._settled(item.deliveries)
                data = item.frames(self._number)
            elif isinstance(item, _Unit) or (item.last and frames):
                break
            else:
                data = item.data
            self._queue.popleft()
            frames.append(data)
            dirty |= item.dirty
            last = item.last
            if item.act is not None:
                acts.append(item.act)
        if not frames:
            return False
        if dirty:
            frames.append(self._commit)
            self._committing = True
        if last:
            self.end_reason = "closing"  # nothing may follow: the broker closes the connection for a later frame
        if failpoint.armed and dirty:
            failpoint.at(Point.SETTLE_BEFORE)
        self._upstream.write(b"".join(frames))
        if failpoint.armed and dirty:
            failpoint.at(Point.SETTLE_SENT)
        self._acts = acts
        if not dirty:
            self._act()
        return True

    def _send_unit(self, unit: _Unit) -> None:
        if any(delivery.revoked for delivery in unit.deliveries):
            unit.end(UnitOutcome.NEVER)
            return
        self._unit = unit
        self._committing = True
        acks = [ACK(self._number, delivery.tag, False) for delivery in unit.deliveries]
        failpoint.at(Point.TAKING_BEFORE)
        self._upstream.write_steps(
            (acks, Point.TAKING_ACKED),
            ((unit.receipt,), Point.TAKING_RECEIPTED),
            ((self._commit,), Point.TAKING_SENT),
        )

    def _act(self) -> None:
        acts, self._acts = self._acts, []
        for act in acts:
            act()

    def _nothing_waits(self) -> None:
        if self._waiting:
            self._waiting = 0
            self._client.release_client(self)

    # -- from the broker

    def committed(self) -> None:
        """Handle tx.commit-ok."""
        self._committing = False
        unit, self._unit = self._unit, None
        if failpoint.armed:
            failpoint.at(Point.SETTLE_COMMITTED if unit is None else Point.TAKING_COMMITTED)
        if unit is not None:
            self._taken(unit.deliveries)
            revoked = any(delivery.revoked for delivery in unit.deliveries)  # before the acks arrived, or after them
            unit.end(UnitOutcome.UNKNOWN if revoked else UnitOutcome.HAPPENED)
        self._act()
        self.flush()

    def end(self, reason: str, outcome: UnitOutcome | None) -> None:
        """Send nothing more, because of *reason*; *outcome* is that of a unit whose commit is not answered."""
        self.end_reason = reason
        unit, self._unit = self._unit, None
        if unit is not None:
            unit.end(outcome)
        for item in self._queue:
            if isinstance(item, _Unit):
                item.end(UnitOutcome.NEVER)
        self._queue.clear()
        self._acts.clear()
        self._nothing_waits()
