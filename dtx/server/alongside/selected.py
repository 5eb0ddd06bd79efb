"""A selected channel: the distributed transactional context.

It has two upstream channels, T in tx mode for what is consumed and P for what is published outside a branch. Between
start and end, publishes and settlements are captured instead of passed on; outside they are not transactional.
"""

import asyncio
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final

from dtx.log.records import Work
from dtx.manager.entry import Entry
from dtx.server.alongside import queries
from dtx.server.alongside.channel import Channel, Drain, Phase
from dtx.server.alongside.order import Fence, depends_on_publishes
from dtx.server.demarcation import Demarcation
from dtx.server.failpoints import replying
from dtx.server.limits import MAX_UNSETTLED
from dtx.store.rabbitmq.capture import check_consume, check_publish, check_settle
from dtx.store.rabbitmq.lane import Lane
from dtx.store.rabbitmq.taking import REPLY_TO, TakingChannel
from dtx.store.rabbitmq.upstream import words
from dtx.store.rabbitmq.validation import Validator
from dtx.store.work import Delivery, HeldPublish, HeldWork
from dtx.telemetry import get_logger
from dtx.wire.amqp09 import content, methods, properties
from dtx.wire.amqp09.codec import ChannelMode
from dtx.wire.amqp09.errors import HardCode, WireError
from dtx.wire.amqp09.frames import BODY, HEADER, method_frame, with_channel
from dtx.wire.amqp09.methods import MANDATORY, BasicPublish, ChannelClose, Settle
from dtx.xa.codes import ReplyCode, XaError
from dtx.xa.model import Association, State

_log = get_logger(part="channel")
_BASIC: Final = methods.BasicReturn.KEY >> 16
_SETTLE: Final[dict[int, type[Settle]]] = {
    each.KEY: each for each in (methods.BasicAck, methods.BasicNack, methods.BasicReject)
}
_ALL: Final = methods.BasicNack(0, multiple=True)


def _requeues(recover: bytes) -> bool:
    return methods.BasicRecover.decode(recover).requeue


class _Capture:
    """A publish whose content is still coming in.

    Args:
        publish: the method.
        entry: the branch that it is part of; ``None`` outside of one, when it may want direct replies.
    """

    __slots__ = ("charged", "entry", "left", "parts", "publish", "raw")

    def __init__(self, publish: BasicPublish, entry: Entry | None) -> None:
        self.publish = publish
        self.entry = entry
        self.raw = b""
        self.left = -1
        self.parts: list[bytes] = []
        self.charged = 0


class _PublishChannel:
    """P: publishes outside a branch go here, returned messages come back."""

    def __init__(self, owner: "SelectedChannel", number: int) -> None:
        self._owner = owner
        self._number = number

    def frame(self, key: int, buffer: bytes, start: int, end: int) -> None:
        if key == methods.ChannelClose.KEY:
            upstream = self._owner.session.upstream
            upstream.write(methods.ChannelCloseOk().frame(self._number))
            upstream.free(self._number)
            self._owner.publish_channel_closed(methods.ChannelClose.decode(buffer[start + 7 : end - 1]))
        elif not self._owner.published.received(buffer, start):
            self._owner.session.to_client(with_channel(buffer[start:end], self._owner.number))

    def lost(self, reason: str) -> None:
        """The session says so to the client."""


class SelectedChannel(Channel):
    """A client's channel after dtx-demarcation.select.

    Args:
        before: the channel that it was.
        taking: T, in tx mode.
        publishing: number of P, open.
        validator: has the broker judge what is published in branches.
    """

    mode = ChannelMode.DTX

    def __init__(self, before: Channel, taking: TakingChannel, publishing: int, validator: Validator) -> None:
        super().__init__(before.session, before.engine, before.upstream_number)
        self.coordination = before.coordination
        self.preview = before.preview
        # From here on it sees every command; before, it did as long as nothing was for the broker.
        self.preview.counting |= not before.used
        self.used = True
        self._taking = taking
        self._validator = validator
        self._publishing: int | None = publishing
        self._demarcation = Demarcation(self.session.manager, self.session.metrics, self.number, self)
        self._capture: _Capture | None = None
        self._passing = 0
        """Octets of a content to P that are still to come; -1 while its header is."""
        self._judgements: set[asyncio.Future[ChannelClose | None]] = set()
        self._waited = False
        """Whether the next settlement has waited for the delivery that was coming in."""
        self.published = Fence(lambda payload: self.session.upstream.write(method_frame(publishing, payload)))
        """What was published outside a branch."""
        self._asked = Fence(lambda payload: taking.request(methods.ChannelFlow.KEY, payload))
        """What T was asked for."""
        taking.owner = self
        self.session.upstream.handlers[publishing] = _PublishChannel(self, publishing)

    @property
    def ties(self) -> Iterable[tuple[Entry, Association]]:
        """See :class:`Channel`."""
        return self._demarcation.ties

    @property
    def passes(self) -> bool:
        """Never: its frames are looked at, one by one."""
        return False

    @property
    def only_coordinates(self) -> bool:
        """Never: its consumers and deliveries are gone with the broker, and the client has to hear of it."""
        return False

    # -- frames from the client

    def client_frame(self, key: int, buffer: bytes, start: int, end: int) -> None:
        """See :class:`Channel`; a content that has begun must be whole before any method.

        Raises:
            WireError: the connection cannot go on.
        """
        if key > BODY and self.phase is Phase.OPEN and (self._capture is not None or self._passing):
            raise WireError(HardCode.UNEXPECTED_FRAME, f"method frame in the midst of content on channel {self.number}")
        super().client_frame(key, buffer, start, end)

    def work(self, key: int, buffer: bytes, start: int, end: int) -> None:
        """A frame that is no dtx method.

        Raises:
            WireError: the connection cannot go on.
        """
        try:
            self._work(key, buffer, start, end)
        except XaError as error:
            self.refuse(error, key if key > BODY else methods.BasicPublish.KEY)

    def _work(self, key: int, buffer: bytes, start: int, end: int) -> None:
        if key in (HEADER, BODY):
            self._content(key, buffer, start, end)
            return
        payload = buffer[start + 7 : end - 1]
        match key:
            case methods.BasicPublish.KEY:
                if self._demarcation.branch is not None:
                    self._capture = _Capture(methods.BasicPublish.decode(payload), self._demarcation.branch)
                elif not self._asked.passed:
                    self._wait_for(self._asked.wait(), key, buffer[start:end])
                elif self._publishing is not None and self._taking.gets_replies:
                    # its header tells which way it goes
                    self._capture = _Capture(methods.BasicPublish.decode(payload), None)
                else:
                    self._pass_publish(payload)
            case methods.BasicAck.KEY | methods.BasicNack.KEY | methods.BasicReject.KEY:
                settle = _SETTLE[key].decode(payload)
                if self._waits_until_whole(settle, key, buffer[start:end]):
                    return
                if isinstance(settle, methods.BasicAck):
                    self._ack(settle)
                else:
                    self._nack(settle)
            case methods.BasicRecover.KEY | methods.BasicRecoverAsync.KEY if _requeues(payload):
                if self._waits_until_whole(_ALL, key, buffer[start:end]):
                    return
                self._taking.recover()
                if key == methods.BasicRecover.KEY:
                    self.session.to_client(methods.BasicRecoverOk().frame(self.number))
            case methods.ConfirmSelect.KEY | methods.TxSelect.KEY | methods.TxCommit.KEY | methods.TxRollback.KEY:
                raise XaError(
                    ReplyCode.PRECONDITION_FAILED,
                    "this channel is selected for distributed transactions; open another one for tx or confirm",
                )
            case _ if depends_on_publishes(key) and not self.published.passed:
                self._wait_for(self.published.wait(), key, buffer[start:end])
            case _:
                self._asked.sent(key)
                self._taking.request(key, payload)

    def _waits_until_whole(self, settle: Settle, key: int, frame: bytes) -> bool:
        """Whether *frame* settles a delivery that is coming in; it does not wait for those that begin meanwhile."""
        whole = None if self._waited else self._taking.incoming(settle)
        self._waited = whole is not None
        if whole is not None:
            self._wait_for(whole, key, frame)
        return self._waited

    def _wait_for(self, done: Awaitable[bytes], key: int, frame: bytes) -> None:
        """Do first what was sent first: *frame* and what follows it wait."""
        self.preview.commands -= queries.is_command(key)  # it is counted again when it has its turn
        self._begin(done, key)
        self.engine.put_back(key, frame)

    def forward(self, buffer: bytes, start: int, end: int) -> None:
        """Pass a frame of T on to the client."""
        if self._asked.received(buffer, start):
            return
        super().forward(buffer, start, end)
        if self._taking.unsettled > MAX_UNSETTLED:
            reason = f"more than {MAX_UNSETTLED} deliveries are not settled: consume with a prefetch (basic.qos)"
            self.refuse_as(ChannelClose(ReplyCode.RESOURCE_ERROR, reason.encode(), 0))

    async def executed(self) -> bool:
        """See :class:`Channel`: the broker has done what it was sent on T and P."""
        if self.phase is not Phase.OPEN:
            return False  # it was closed before its turn came
        waits = [self._asked.wait()]
        if not self.published.passed:
            waits.append(self.published.wait())
        await asyncio.gather(*waits)
        return self.is_open()

    # -- publish

    def _pass_publish(self, payload: bytes) -> None:
        if self._publishing is not None:
            self.published.sent(methods.BasicPublish.KEY)
            self._passing = -1
            self.session.upstream.write(method_frame(self._publishing, payload))

    def _content(self, key: int, buffer: bytes, start: int, end: int) -> None:
        capture = self._capture
        if capture is not None and capture.entry is None and key == HEADER:
            method, header = capture.publish.encode(), buffer[start:end]
            if not _wants_reply(header):
                self._end_capture()
                self._pass_publish(method)
            elif not self.published.passed:
                self._end_capture()
                self.engine.put_back(key, header)
                self._wait_for(self.published.wait(), methods.BasicPublish.KEY, method_frame(self.number, method))
                return
        if self._capture is not None:
            self._captured(self._capture, key, buffer[start + 7 : end - 1])
        elif self._passing and (key == HEADER) == (self._passing < 0):
            if key == HEADER:
                self._passing = content.header(buffer[start + 7 : end - 1]).body_size
            else:
                self._passing = max(0, self._passing - (end - start - 8))
            if self._publishing is not None:
                self.session.upstream.write(with_channel(buffer[start:end], self._publishing))
        else:
            raise WireError(HardCode.UNEXPECTED_FRAME, f"content without a publish on channel {self.number}")

    def _captured(self, capture: _Capture, key: int, payload: bytes) -> None:
        if (key == HEADER) != (capture.left < 0):
            raise WireError(HardCode.UNEXPECTED_FRAME, f"content frames out of order on channel {self.number}")
        if key == HEADER:
            header = content.header(payload)
            if header.class_id != _BASIC:
                raise WireError(
                    HardCode.UNEXPECTED_FRAME,
                    f"expected content header for class {_BASIC}, got one for class {header.class_id} instead",
                )
            capture.left, capture.raw = header.body_size, header.properties
            self._admit(capture, header.body_size)
        else:
            capture.left -= len(payload)
            if capture.left < 0:
                raise WireError(HardCode.FRAME_ERROR, f"more content than announced on channel {self.number}")
            if capture.charged:  # else its branch is lost, and nobody will ever have it
                capture.parts.append(payload)
        if capture.left == 0:
            self._end_capture()
            if capture.entry is not None:
                self._hold(capture, capture.entry)
            else:
                self._request(capture)

    def _end_capture(self) -> None:
        """No content is coming in any more: what was set aside for it is free, or about to be charged to the branch."""
        if self._capture is not None:
            self.session.budget.charge(-self._capture.charged)
            self._capture = None

    def _admit(self, capture: _Capture, size: int) -> None:
        """Judge a publish by its header, before its body fills the memory."""
        limits = self.session.limits
        if size > limits.max_message_bytes:
            raise XaError(
                ReplyCode.PRECONDITION_FAILED,
                f"message size {size} is larger than configured max size {limits.max_message_bytes}",
            )
        entry, budget = capture.entry, self.session.budget
        if entry is None:
            if not budget.has_room(size):
                raise XaError(ReplyCode.RESOURCE_ERROR, f"no memory for the message: {budget.excess(size)}")
            capture.charged = size
            budget.charge(size)
            return
        work = entry.work
        if work is None or entry.branch.state is not State.ACTIVE:
            return
        if not work.fits(size):
            self._overflow(entry, work.excess(size))
        capture.charged = size
        budget.charge(size)
        target, store = capture.publish, self.session.store
        check_publish(self._lane, store.broker.user, target.exchange, target.routing_key, capture.raw)

    @property
    def _lane(self) -> Lane:
        return self.session.store.lane(self.session.who.vhost)

    def _overflow(self, entry: Entry, reason: str) -> None:
        self.session.manager.doom(entry, reason)
        raise XaError(ReplyCode.RESOURCE_ERROR, f"{reason}; the branch is rolled back (xid {entry.xid})")

    def _request(self, capture: _Capture) -> None:
        """Publish on T: the broker sends direct replies to the channel that asked, and T has their consumer."""
        number, body = self.upstream_number, b"".join(capture.parts)
        self._asked.sent(methods.BasicPublish.KEY)  # what is published next waits until T has done it
        method = capture.publish.frame(number)
        self._taking.publish(content.message(method, number, capture.raw, body, self.session.frame_max))

    def _hold(self, capture: _Capture, entry: Entry) -> None:
        work = entry.work
        if work is None or entry.branch.state is not State.ACTIVE:
            return  # it can only be rolled back: what is published in it is gone already
        publish = capture.publish
        judgement, metrics = self._validator.judge(publish, capture.raw), self.session.metrics
        (metrics.validation_hits if judgement is None else metrics.validation_misses).inc()
        if judgement is not None:
            self._judgements.add(judgement)
            judgement.add_done_callback(self._judged)
        parts = capture.parts
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        mandatory = bool(publish.flags & MANDATORY)
        origin = self if mandatory else None
        work.add_publish(HeldPublish(publish.exchange, publish.routing_key, mandatory, capture.raw, body, origin))

    def returned(self, work: Work, code: int, text: bytes) -> None:
        """A mandatory message could not be routed when its branch was committed: basic.return."""
        if self.phase is not Phase.OPEN:
            return
        method = methods.BasicReturn(code, text, work.exchange, work.routing_key).frame(self.number)
        frame_max = self.session.frame_max
        self.session.to_client(content.message(method, self.number, work.properties, work.body, frame_max))

    def _judged(self, judgement: asyncio.Future[ChannelClose | None]) -> None:
        self._judgements.discard(judgement)
        if not judgement.cancelled() and (close := judgement.result()) is not None:
            _log.info("publish refused", connection=self.session.id, channel=self.number, reason=words(close))
            self.refuse_as(close)

    # -- acknowledge

    def _ack(self, settle: methods.BasicAck) -> None:
        deliveries = self._taking.select(settle)
        entry = self._demarcation.branch
        if entry is None:
            self._taking.ack(deliveries, multiple=settle.multiple)
            return
        if entry.work is not None:
            self._run(self._consume_in(entry, entry.work, deliveries), methods.BasicAck.KEY)

    def _consume_in(self, entry: Entry, work: HeldWork, deliveries: Sequence[Delivery]) -> Iterator[None]:
        """All of them or none: each is looked at first."""
        size = 0
        for count, delivery in enumerate(deliveries, 1):
            size += delivery.size
            self._consumable(entry, delivery, count, size)
            yield
        if self._works_for(entry, work):
            self._taking.hold(deliveries, entry)
            for delivery in deliveries:
                work.add_consume(delivery)

    def _works_for(self, entry: Entry, work: HeldWork) -> bool:
        """Whether nothing has ended the branch, or the channel, while deliveries were looked at."""
        return self.phase is Phase.OPEN and self._demarcation.branch is entry and entry.work is work

    def _consumable(self, entry: Entry, delivery: Delivery, count: int, size: int) -> None:
        """Whether *delivery* may be consumed in the branch, as the last of *count* with *size* octets together."""
        try:
            check_consume(self._lane, delivery)
        except XaError as error:
            if error.code is ReplyCode.RESOURCE_ERROR:
                self._overflow(entry, error.reason)
            raise
        work = entry.work
        if work is not None and not work.fits(size, count, charged=True) and entry.branch.state is State.ACTIVE:
            self._overflow(entry, work.excess(size, count))

    def _nack(self, settle: methods.BasicNack | methods.BasicReject) -> None:
        """Reject deliveries: in a branch when that has ended, so that a rollback undoes it like everything else."""
        deliveries = self._taking.select(settle)
        entry = self._demarcation.branch
        work = None if entry is None else entry.work
        if entry is None or work is None:
            self._taking.nack(deliveries, requeue=settle.requeue, multiple=settle.multiple)
            return
        self._run(self._reject_in(entry, work, deliveries, settle.requeue), methods.BasicNack.KEY)

    def _reject_in(self, entry: Entry, work: HeldWork, deliveries: Sequence[Delivery], requeue: bool) -> Iterator[None]:
        for delivery in deliveries:
            check_settle(delivery)
            yield
        if not self._works_for(entry, work):
            return
        if not work.fits(0, len(deliveries)) and entry.branch.state is State.ACTIVE:
            self._overflow(entry, work.excess(0, len(deliveries)))
        self._taking.drop_contents(deliveries)
        self._taking.hold(deliveries, entry)
        for delivery in deliveries:
            work.add_outcome(partial(self._rejected, delivery, requeue))

    def _rejected(self, delivery: Delivery, requeue: bool, committed: bool) -> None:
        """The branch that rejected *delivery* has ended."""
        if not self._taking.nack_held(delivery, requeue=requeue or not committed) and committed and not requeue:
            _log.warning("a reject is lost with its channel: the message is in its queue", queue=delivery.queue)

    # -- demarcation

    def select(self, key: int) -> None:  # noqa: ARG002
        """Selected already: "must use this method at least once"."""
        self.session.to_client(replying(methods.DtxSelectOk().frame(self.number)))

    def demarcate(self, call: methods.DtxStart | methods.DtxEnd, key: int) -> None:
        """Start and end.

        Raises:
            XaError: as the table of the core says.
        """
        who = self.session.who
        if isinstance(call, methods.DtxEnd) and self._judgements and self._demarcation.branch is not None:
            self._begin(self._end_when_judged(call), key)
        elif (frame := self._demarcation.run(call, who)) is not None:
            self.session.to_client(frame)
        else:
            self._begin(self._demarcation.run_later(call, who, self.is_open), key)

    async def _end_when_judged(self, call: methods.DtxEnd) -> bytes:
        while self._judgements:
            await asyncio.wait(set(self._judgements))
            await asyncio.sleep(0)  # the callbacks that read the judgements come first
        return await self._demarcation.run_later(call, self.session.who, self.is_open)

    # -- the end

    def close(self, payload: bytes) -> None:
        """The client closes the channel: what was sent on P first comes first."""
        if self._taking.holds and not self._asked.passed:  # T stays, so its close cannot show that it has done it all
            self._wait_for(self._asked.wait(), methods.ChannelClose.KEY, method_frame(self.number, payload))
            return
        self._stop_work()
        self.lose_branches()
        self._leave(Phase.CLOSING)
        if self._taking.holds:  # T stays, for the branches
            self._taking.detach()
            then = self.upstream_close_ok
        elif self._taking.gone is not None:  # the broker has closed it, and an answer was to come before that was said
            then = self.upstream_close_ok
        else:
            then = self._taking.close
        number, self._publishing = self._publishing, None
        if number is None:
            then()
        else:
            Drain(self.session, number, then)

    def upstream_close_ok(self) -> None:
        """T is closed: so is the channel."""
        self.session.to_client(methods.ChannelCloseOk().frame(self.number))
        self.session.forget(self)

    def upstream_closed(self, close: ChannelClose) -> None:
        """The broker closed T."""
        if self.phase is Phase.CLOSING:  # as the client asked for
            self.upstream_close_ok()
        else:
            self.refuse_as(close)

    def publish_channel_closed(self, close: ChannelClose) -> None:
        """The broker closed P."""
        self._publishing = None
        self.refuse_as(close)

    def _refuse(self, frame: bytes) -> None:
        self._stop_work()
        self.lose_branches()
        super()._refuse(frame)

    def close_upstream(self) -> None:
        """Let T go when branches need it no more, close P."""
        number, self._publishing = self._publishing, None
        if number is not None and not self.session.upstream.is_lost:
            Drain(self.session, number)
        self._taking.detach()

    def let_go(self) -> None:
        """The client or its connection is gone."""
        self._stop_work()
        if self.phase is not Phase.REFUSED:
            self.close_upstream()
        if self.phase is Phase.OPEN:
            self.phase = Phase.GONE

    def _stop_work(self) -> None:
        self._end_capture()
        self._passing = 0
        self.published.drop()  # or what waits for an answer of a closed channel would wait for ever
        self._asked.drop()

    def lose_branches(self) -> None:
        """See :class:`Channel`. Associations die with the channel; idle branches do not."""
        self._demarcation.lose()


def _wants_reply(frame: bytes) -> bool:
    """Whether a header frame asks for a direct reply."""
    return REPLY_TO in frame and properties.read(content.header(frame[7:-1]).properties).reply_to == REPLY_TO
