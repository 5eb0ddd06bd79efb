"""Finds second copies among the deliveries of one upstream channel.

Theory of operation. The frames of a channel come here first. While no message was sent more than once, all of them pass
at once, and a delivery of a branch that has not ended is tracked: its settlement may have to be recorded. Otherwise a
delivery waits for its header. If that names a message that was sent more than once, the whole delivery waits, and the
register decides. The channel never sees a suppressed delivery. dtx settles such a delivery itself: it is *owned*. The
broker must not settle it again, with a settlement of the client that means all deliveries up to a tag.

If another copy is unsettled at a consumer, the delivery waits at dtx without its content. It goes back to its queue
when that copy is settled or returned, when the client settles all deliveries up to a greater tag, or after ten minutes.
Then it comes again, with a new tag: it is never delivered late, because the client may have settled its tag without
knowing it. After ten minutes it is delivered, because the other consumer may wait for it.

With several members, the others are asked first. Meanwhile all later frames of the channel wait, so their order stays.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from itertools import takewhile
from typing import Final, Protocol, assert_never

from dtx.store.rabbitmq import messages
from dtx.store.rabbitmq.consumed_queues import ConsumedQueue
from dtx.store.rabbitmq.copies import Copy, CopyPlace, CopyRegister, CopyVerdict, Key, key_of
from dtx.telemetry import get_logger
from dtx.wire.amqp09 import content, methods
from dtx.wire.amqp09.frames import BODY, HEADER

_log = get_logger(part="copies")
_DELIVERIES: Final = (methods.BasicDeliver.KEY, methods.BasicGetOk.KEY)
_CONTENT: Final = (HEADER, BODY)
_METHOD: Final = 7 + 4
"""Bytes before the arguments in a method frame."""
_MOST_HELD: Final = 16 << 20
"""Bytes that are held, of one message or of the frames behind it: RabbitMQ's default message limit since 4.0."""
_HOLD: Final = 600.0
"""Seconds that a copy waits for the settlement of another one: a third of RabbitMQ's default consumer timeout."""
_MOST_LATE: Final = 10_000
"""Settlements of one channel that wait for the log although the client has the deliveries; more are not recorded."""
_HOLD_IN_DOUBT: Final = 60.0
"""Seconds that it waits if only another member can have it, and does not answer."""
_ASK_AGAIN: Final = 1.0
"""Seconds after which the other members are asked again about a copy that waits."""

Frames = list[tuple[int, bytes]]
"""Keys and frames."""


def is_redelivered(key: int, buffer: bytes, start: int) -> bool:
    """Whether a frame of basic.deliver or basic.get-ok says that the message was delivered before."""
    at = start + _METHOD
    if key == methods.BasicDeliver.KEY:
        at += 1 + buffer[at]  # the consumer tag
    return bool(buffer[at + 8] & 1)


class FilteredChannel(Protocol):
    """The channel behind a filter."""

    def subscription(self, delivery: methods.BasicDeliver | methods.BasicGetOk) -> ConsumedQueue | None:
        """What a delivery belongs to; ``None`` if that is not known. Then, and without a queue, it is delivered."""

    def accept(self, key: int, buffer: bytes, start: int, end: int) -> None:
        """Handle a frame that has passed the filter."""

    def settle_copy(self, tag: int, *, requeue: bool) -> None:
        """Acknowledge a delivery that the channel has not seen, or with *requeue* return it to its queue."""

    def get_again(self, tag: int, queue: bytes, *, no_ack: bool) -> None:
        """Get the next message in place of the one with *tag*, which the client must not see."""

    def may_replace(self, *, is_got: bool) -> bool:
        """Whether dtx may settle a delivery itself, and with *is_got* get another message in its place."""

    def abandon(self, reason: str) -> None:
        """End the connection to the broker, which gets all unsettled deliveries back."""


class _Ownership(Enum):
    SUPPRESSED = auto()
    WAITING = auto()


@dataclass(slots=True)
class _Candidate:
    """A delivery of a message that may have another copy."""

    copy: Copy
    delivery: methods.BasicDeliver | methods.BasicGetOk
    no_ack: bool
    properties: bytes
    digest: messages.Digest
    is_undecided: bool
    """The register must decide when it is whole."""

    @property
    def is_early(self) -> bool:
        """Whether it counts as delivered before it is whole: its first frames have passed."""
        return not self.is_undecided and not self.no_ack


@dataclass(slots=True)
class _Arriving:
    """A delivery whose frames have not all come."""

    method: int
    payload: bytes
    held: Frames = field(default_factory=list)
    """Frames that have not passed yet."""
    left: int = 0
    """Bytes of the body that are missing."""
    candidate: _Candidate | None = None
    comes_again: bool = False
    """There are other members, and the message was delivered before: a branch of theirs may have it."""
    subscription: ConsumedQueue | None = None
    """Of basic.get."""

    @property
    def channel(self) -> int:
        """The channel number of its frames, which are held."""
        return int.from_bytes(self.held[0][1][1:3], "big")


class CopyFilter:
    """The filter of one channel.

    Args:
        register: of all channels.
        vhost: of the connection.
        source: the channel.
    """

    def __init__(self, register: CopyRegister, vhost: str, source: FilteredChannel) -> None:
        self.register = register
        self.has_ended = False
        self.tracked: dict[int, Copy] = {}
        """Delivered copies that are not settled, by delivery tag."""
        self._vhost = vhost
        self._source = source
        self._arriving: _Arriving | None = None
        self._behind: Frames | None = None
        """The frames that came while the other members are asked about a delivery; ``None`` while they are not."""
        self._size_behind = 0
        self._asking: asyncio.Timeout | None = None
        self._owned: dict[int, _Ownership] = {}
        self._waiting: dict[int, _Candidate] = {}
        """Deliveries that wait, by delivery tag: the other members are asked about them again."""
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_busy(self) -> bool:
        """Whether settlements of the client concern the filter."""
        if self.tracked or self._owned or self._behind is not None:
            return True
        return self._arriving is not None and self._arriving.candidate is not None

    @property
    def owns(self) -> bool:
        """Whether dtx must settle deliveries that the channel has not seen."""
        return bool(self._owned)

    # -- from the broker

    def frame(self, key: int, buffer: bytes, start: int, end: int) -> None:
        """Handle a frame of the broker: it passes now, later, or never."""
        if self.has_ended:
            pass
        elif self._behind is not None:
            self._behind.append((key, buffer[start:end]))
            self._size_behind += end - start
            if self._size_behind > _MOST_HELD and self._asking is not None and not self._asking.expired():
                self._asking.reschedule(asyncio.get_running_loop().time())
            return
        elif key in _CONTENT:
            if self._arriving is not None and self._is_content_held(self._arriving, key, buffer, start, end):
                return
        else:
            self._finish()
            if key in _DELIVERIES:
                self._arriving = arriving = _Arriving(key, buffer[start + 7 : end - 1])
                if key == methods.BasicGetOk.KEY:  # the channel forgets what it belongs to when it passes
                    arriving.subscription = self._source.subscription(methods.BasicGetOk.decode(arriving.payload))
                arriving.comes_again = self.register.is_shared and is_redelivered(key, buffer, start)
                if self.register.may_concern:
                    arriving.held.append((key, buffer[start:end]))
                    self.register.holding.add(self)
                    return
        self._source.accept(key, buffer, start, end)

    def _is_content_held(self, arriving: _Arriving, key: int, buffer: bytes, start: int, end: int) -> bool:
        """Add a frame to the delivery. Returns whether the frame must not pass now."""
        self._add_content(arriving, key, buffer[start + 7 : end - 1])
        candidate = arriving.candidate
        is_whole = arriving.left <= 0
        if candidate is not None and candidate.is_undecided:
            arriving.held.append((key, buffer[start:end]))
            if is_whole:
                self._arriving = None
                candidate.copy.digest = candidate.digest.value
                if self.register.members is None or not self._may_replace(candidate):
                    self.register.holding.discard(self)
                    again = candidate.delivery.redelivered
                    verdict = self.register.verdict(candidate.copy, candidate.properties, redelivered=again)
                    self._act(arriving, candidate, verdict)
                else:
                    self._behind, self._size_behind = [], 0
                    if not candidate.no_ack:
                        self._owned[candidate.delivery.delivery_tag] = _Ownership.WAITING
                    self.spawn(self._ask(arriving, candidate))
            return True
        if arriving.held:
            self._pass(arriving)
        if is_whole or candidate is None:
            self._finish()
        if is_whole and candidate is not None:
            self._track(candidate)
        return False

    def _finish(self) -> None:
        """Forget the delivery that arrives; the frames of it that were held pass."""
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            self.register.holding.discard(self)
            self._pass(arriving)

    def _pass(self, arriving: _Arriving) -> None:
        held, arriving.held = arriving.held, []
        for key, frame in held:
            self._source.accept(key, frame, 0, len(frame))

    def _add_content(self, arriving: _Arriving, key: int, payload: bytes) -> None:
        if key == HEADER:
            _, arriving.left, properties = content.header(payload)
            message = key_of(properties)
            if message is not None and (arriving.comes_again or self.register.concerns(message)):
                arriving.candidate = self._examine(arriving, message, properties)
                if arriving.candidate is not None:
                    self.register.holding.add(self)  # so that the rest of it comes here
                    if arriving.candidate.is_early:  # another copy must not come before the rest of this one
                        self.register.delivered(arriving.candidate.copy)
        else:
            arriving.left -= len(payload)
            if arriving.candidate is not None:
                arriving.candidate.digest.update(payload)

    def _examine(self, arriving: _Arriving, key: Key, properties: bytes) -> _Candidate | None:
        row = methods.BasicDeliver if arriving.method == methods.BasicDeliver.KEY else methods.BasicGetOk
        delivery = row.decode(arriving.payload)
        subscription = arriving.subscription
        if isinstance(delivery, methods.BasicDeliver):
            subscription = self._source.subscription(delivery)
        if subscription is None or not subscription.queue:
            return None
        place = CopyPlace(key, self._vhost, subscription.queue)
        return _Candidate(
            copy=Copy(place, messages.attempt_of(properties), None, self),
            delivery=delivery,
            no_ack=subscription.no_ack,
            properties=properties,
            digest=messages.Digest(delivery.exchange, delivery.routing_key),
            is_undecided=bool(arriving.held)
            and arriving.left <= _MOST_HELD
            and (arriving.comes_again or self.register.may_be_repeated(key)),
        )

    def _track(self, candidate: _Candidate) -> None:
        """Track a delivery whose last frame is about to pass."""
        copy = candidate.copy
        copy.digest = candidate.digest.value
        if candidate.no_ack:
            self.settle_at_once(copy)
        else:
            if not candidate.is_early:
                self.register.delivered(copy)
            self.tracked[candidate.delivery.delivery_tag] = copy

    def settle_at_once(self, copy: Copy) -> None:
        """Settle a copy whose settlement cannot wait for the log: a crash before the record repeats it."""
        if self.register.add_settled(copy) and len(self._tasks) < _MOST_LATE:
            copy.is_pinned = True
            self.register.delivered(copy)
            self.spawn(self._record_late(copy))

    async def _record_late(self, copy: Copy) -> None:
        try:
            await self.register.settle_unacknowledged(copy)
        except Exception as error:  # noqa: BLE001 - in doubt, the other copy is delivered
            _log.warning("a settlement could not be recorded", reason=str(error))

    async def _ask(self, arriving: _Arriving, candidate: _Candidate) -> None:
        """Ask the other members about a delivery, then act on it and on the frames that came after it."""
        # From the decision to its effect there is no pause: other members ask about this copy, too.
        verdict = CopyVerdict.WAIT
        with suppress(TimeoutError):
            async with asyncio.timeout(None) as self._asking:
                verdict = await self._decision(candidate)
        self._asking = None
        if self.has_ended:
            return
        behind, self._behind = self._behind or [], None
        self.register.holding.discard(self)
        if candidate.no_ack or self._owned.pop(candidate.delivery.delivery_tag, None) is not None:
            self._act(arriving, candidate, verdict)
        elif isinstance(candidate.delivery, methods.BasicGetOk):  # it was returned meanwhile
            self._get_again(candidate)
        for key, frame in behind:
            self.frame(key, frame, 0, len(frame))

    async def _decision(self, candidate: _Candidate) -> CopyVerdict:
        again = candidate.delivery.redelivered
        return await self.register.decide(candidate.copy, candidate.properties, redelivered=again)

    async def _ask_again(self) -> None:
        """Ask the other members, about one delivery after the other, as long as any waits."""
        while self._waiting:
            await asyncio.sleep(_ASK_AGAIN)
            for tag, candidate in list(self._waiting.items()):
                if self.register.is_deaf:
                    break
                if tag in self._owned and await self._decision(candidate) is not CopyVerdict.WAIT:
                    self.register.end_wait(candidate.copy.place)
                if tag not in self._owned:
                    self._waiting.pop(tag, None)
                await asyncio.sleep(0)

    def _act(self, arriving: _Arriving, candidate: _Candidate, verdict: CopyVerdict) -> None:
        copy, delivery = candidate.copy, candidate.delivery
        if not self._may_replace(candidate) or (verdict is CopyVerdict.WAIT and candidate.no_ack):
            verdict = CopyVerdict.DELIVER
        match verdict:
            case CopyVerdict.DELIVER:
                self._track(candidate)
                self._pass(arriving)
            case CopyVerdict.SUPPRESS:
                if not candidate.no_ack:
                    self._owned[delivery.delivery_tag] = _Ownership.SUPPRESSED
                body = b"".join([frame[7:-1] for key, frame in arriving.held if key == BODY])
                self.spawn(self._suppress(candidate, body))
            case CopyVerdict.WAIT:
                self._owned[delivery.delivery_tag] = _Ownership.WAITING
                hold = _HOLD if self.register.may_be_repeated(copy.place.key) else _HOLD_IN_DOUBT
                self.register.wait(copy, hold, partial(self._settle_owned, delivery.delivery_tag, requeue=True))
                if self.register.members is not None:
                    self._waiting[delivery.delivery_tag] = candidate
                    if len(self._waiting) == 1:
                        self.spawn(self._ask_again())
            case _ as never:
                assert_never(never)
        if verdict is CopyVerdict.DELIVER or not isinstance(delivery, methods.BasicGetOk):
            return
        if verdict is CopyVerdict.WAIT and self.register.is_fenced:  # all that is in the queue would wait here
            key, frame = methods.BasicGetEmpty.KEY, methods.BasicGetEmpty().frame(arriving.channel)
            self._source.accept(key, frame, 0, len(frame))
        else:
            self._get_again(candidate)

    def _may_replace(self, candidate: _Candidate) -> bool:
        return self._source.may_replace(is_got=isinstance(candidate.delivery, methods.BasicGetOk))

    def _get_again(self, candidate: _Candidate) -> None:
        tag, queue = candidate.delivery.delivery_tag, candidate.copy.place.queue
        self._source.get_again(tag, queue, no_ack=candidate.no_ack)

    async def _suppress(self, candidate: _Candidate, body: bytes) -> None:
        delivery = candidate.delivery
        try:
            await self.register.suppress(
                candidate.copy, candidate.properties, body, delivery.exchange, delivery.routing_key
            )
        except Exception as error:  # noqa: BLE001 - the broker gets it back
            self._source.abandon(f"a suppressed message could not be recorded: {error}")
            return
        self._settle_owned(delivery.delivery_tag, requeue=False)

    def _settle_owned(self, tag: int, *, requeue: bool) -> None:
        if self._owned.pop(tag, None) is not None and not self.has_ended:
            self._source.settle_copy(tag, requeue=requeue)

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Run *work* as a task."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("deliveries are lost to their channel", exc_info=error)
            self._source.abandon("internal error")

    # -- from the client

    def settle_up_to(self, tag: int) -> None:
        """Settle owned deliveries before a settlement of all deliveries up to *tag*; 0: of all."""
        for owned in list(takewhile(lambda each: not tag or each <= tag, self._owned)):
            self._settle_owned(owned, requeue=self._owned[owned] is _Ownership.WAITING)

    def drop_arriving(self, tag: int, *, multiple: bool) -> None:
        """Track no delivery that the client settles before its content has arrived; *tag* 0 means all."""
        arriving = self._arriving
        candidate = None if arriving is None else arriving.candidate
        if arriving is None or candidate is None or candidate.is_undecided:
            return
        current = candidate.delivery.delivery_tag
        if current == tag or (multiple and (not tag or current < tag)):
            self._drop_candidate(arriving)

    def _drop_candidate(self, arriving: _Arriving) -> None:
        candidate, arriving.candidate = arriving.candidate, None
        if candidate is not None and candidate.is_early:
            self.register.release((candidate.copy,))

    def settled(self, tags: Iterable[int]) -> list[Copy]:
        """The tracked copies with *tags*, which the client settles for good; they are tracked no longer."""
        return [copy for tag in tags if (copy := self.tracked.pop(tag, None)) is not None]

    def pin(self, tags: Iterable[int]) -> dict[int, Copy]:
        """The tracked copies with *tags*, which a branch takes: they are tracked no longer."""
        pinned = {tag: copy for tag in tags if (copy := self.tracked.pop(tag, None)) is not None}
        for copy in pinned.values():
            copy.is_pinned = True
        return pinned

    def unpin(self, copies: dict[int, Copy]) -> None:
        """Undo :meth:`pin`, because the branch has not taken *copies*."""
        for copy in copies.values():
            copy.is_pinned = False
        self.tracked.update(copies)
        if self.has_ended:
            self.recovered()

    def to_record(self, tags: Iterable[int], *, is_final: bool) -> Sequence[Copy]:
        """Note that the client settles deliveries, for good or to return them. Returns the copies to record first."""
        copies = self.settled(tags)
        if is_final and self.register.must_record(copies):
            return copies
        self.register.release(copies)
        return ()

    async def record(self, copies: Sequence[Copy]) -> bool:
        """Record that *copies* are settled. Returns whether the broker may get that; otherwise, the connection ends."""
        try:
            await self.register.settle(copies)
        except Exception as error:  # noqa: BLE001 - the broker gets the deliveries back
            self._source.abandon(f"a settlement could not be recorded: {error}")
            return False
        return True

    def returned(self, tags: Iterable[int]) -> None:
        """The deliveries with *tags* go back to their queues."""
        self.register.release(self.settled(tags))

    def recovered(self) -> None:
        """All unsettled deliveries of the channel go back to their queues, owned ones included."""
        self._owned.clear()
        self.returned(list(self.tracked))

    def end(self) -> Frames:
        """The channel has ended. Returns the frames of the broker that will not pass."""
        self.has_ended = True
        self.register.holding.discard(self)
        self._waiting.clear()
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            self._drop_candidate(arriving)
        self.recovered()
        behind, self._behind = self._behind or [], None
        return behind
