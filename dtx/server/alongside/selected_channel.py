"""A selected channel: the distributed transactional context.

It has two upstream channels: T in tx mode for consuming, and P for publishes outside a branch. Between start and end,
dtx holds publishes and settlements for the branch. Outside a branch they are not transactional.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, get_args

from dtx.log.records import WorkRow
from dtx.manager.branch_runtime import BranchRuntime
from dtx.server.alongside import queries
from dtx.server.alongside.channel import ClosingChannel, ProxyChannel, ProxyPhase
from dtx.server.alongside.channel_barrier import ChannelBarrier, depends_on_publishes
from dtx.server.demarcation import DemarcationHandler
from dtx.server.failpoints import around_reply
from dtx.server.limits import MAX_UNSETTLED
from dtx.store.rabbitmq.capture import check_consume, check_publish, check_settle, check_size
from dtx.store.rabbitmq.commit_connection import CommitConnection
from dtx.store.rabbitmq.consume_channel import REPLY_TO, ConsumeChannel
from dtx.store.rabbitmq.upstream import words
from dtx.store.rabbitmq.validation import Validator
from dtx.store.work import Delivery, HeldPublish, HeldWork
from dtx.telemetry import get_logger
from dtx.wire.amqp09 import content, methods, properties
from dtx.wire.amqp09.channel import Passing
from dtx.wire.amqp09.codec import ChannelMode, Method
from dtx.wire.amqp09.content import BASIC
from dtx.wire.amqp09.endpoint import EndpointState
from dtx.wire.amqp09.events import (
    ChannelClosed,
    ChannelClosing,
    ChannelEvent,
    ChannelFailed,
    ContentReceived,
    ContentStarted,
    FramePassed,
    MethodReceived,
)
from dtx.wire.amqp09.frames import HEADER, header_frame, method_frame, with_channel
from dtx.wire.amqp09.methods import MANDATORY, BasicPublish, ChannelClose, Settle
from dtx.xa.codes import ReplyCode, XaError
from dtx.xa.model import Association, State

_log = get_logger(part="channel")
_OWN: Final = frozenset((*get_args(methods.DtxCall), *get_args(queries.Query)))
"""Methods that must not reach the broker."""
_ALL: Final = methods.BasicNack(0, multiple=True)


class _PublishChannel:
    """P: the upstream channel for publishes outside a branch; the broker returns unroutable messages on it."""

    def __init__(self, owner: "SelectedChannel") -> None:
        self._owner = owner

    def frame(self, key: int, buffer: bytes, start: int, end: int) -> None:
        if key == methods.ChannelClose.KEY:
            self._owner.publish_channel_closed(methods.ChannelClose.decode(buffer[start + 7 : end - 1]))
        elif not self._owner.published.received(buffer, start):
            self._owner.session.to_client(with_channel(buffer[start:end], self._owner.number))

    def lost(self, reason: str) -> None:
        """The session tells the client."""


class SelectedChannel(ProxyChannel):
    """A client's channel after dtx-demarcation.select.

    Args:
        before: the channel that this one replaces.
        taking: T, in tx mode.
        publishing: upstream number of P, which is open.
        validator: lets the broker check publishes in branches.
    """

    mode = ChannelMode.DTX

    def __init__(self, before: ProxyChannel, taking: ConsumeChannel, publishing: int, validator: Validator) -> None:
        super().__init__(before.session, before.engine, before.upstream_number)
        self.coordination = before.coordination
        self.preview = before.preview
        # A selected channel sees every command; before, dtx saw every command while the channel was unused.
        self.preview.counting |= not before.used
        self.used = True
        self.engine.become(ChannelMode.DTX)
        self.engine.announces = True
        self._taking = taking
        self._validator = validator
        self._publishing = publishing
        self._publishes = True
        """Whether P may be used."""
        self._torn = False
        """Whether a content on P is incomplete: RabbitMQ ends the connection (505) for a method inside a content."""
        self._when_whole: Callable[[], object] | None = None
        """Called when the content on P is complete."""
        self._demarcation = DemarcationHandler(self.session.manager, self.session.metrics, self.number, self)
        self._branch: BranchRuntime | None = None
        """The branch of the incoming content; ``None`` for a content outside a branch."""
        self._validations: set[asyncio.Future[ChannelClose | None]] = set()
        self._waited = False
        """Whether the next settlement has already waited for an incoming delivery."""
        self.published = ChannelBarrier(lambda payload: self.session.upstream.write(method_frame(publishing, payload)))
        """Barrier for P."""
        self._asked = ChannelBarrier(lambda payload: taking.request(methods.ChannelFlow.KEY, payload))
        """Barrier for T."""
        taking.owner = self
        self.session.upstream.handlers[publishing] = _PublishChannel(self)

    @property
    def associations(self) -> Iterable[tuple[BranchRuntime, Association]]:
        """See :class:`ProxyChannel`."""
        return self._demarcation.associations

    @property
    def only_coordinates(self) -> bool:
        """Always false: without the broker, its consumers and deliveries are lost."""
        return False

    # -- from the client

    def _sort(self) -> None:
        """Let the engine decode all frames and assemble contents."""
        self.engine.pass_frames(Passing.NOT)

    def receive(self, event: ChannelEvent | ChannelFailed | FramePassed) -> None:
        """See :class:`ProxyChannel`."""
        match event:
            case MethodReceived() | ContentStarted() | ContentReceived():
                try:
                    self._receive(event)
                except XaError as error:
                    self.refuse(error, event.method.KEY)
            case FramePassed():
                self._pass_body(event)
            case ChannelClosing():
                self._closes()
            case ChannelFailed():
                self._refuse(b"")
            case ChannelClosed():
                self.session.forget(self)
            case _:
                pass

    def _receive(self, event: MethodReceived | ContentStarted | ContentReceived) -> None:
        if isinstance(event, ContentReceived):
            self._complete(event.method, event.properties, event.body)
            return
        method = event.method
        self.preview.commands += queries.is_command(method.KEY)
        if isinstance(event, ContentStarted):
            self._start(event)
        elif type(method) not in _OWN:
            self._do(method)
        elif isinstance(method, methods.DtxCall):
            self._execute(method)
        elif isinstance(method, queries.Query):
            self._ask(method, event.ticket)

    def _do(self, method: Method) -> None:
        """Handle a method that has no content and is not a dtx method."""
        match method:
            case methods.BasicAck():
                if not self._waits_until_whole(method, method):
                    self._ack(method)
            case methods.BasicNack() | methods.BasicReject():
                if not self._waits_until_whole(method, method):
                    self._nack(method)
            case methods.BasicRecover(requeue=True) | methods.BasicRecoverAsync(requeue=True):
                if self._waits_until_whole(_ALL, method):
                    return
                self._taking.recover()
                if isinstance(method, methods.BasicRecover):
                    self.session.to_client(methods.BasicRecoverOk().frame(self.number))
            case _ if depends_on_publishes(method.KEY) and not self.published.passed:
                self._wait_for(self.published.wait(), method)
            case _:
                self._asked.sent(method.KEY)
                self._taking.request(method.KEY, method.encode())

    def _waits_until_whole(self, settle: Settle, method: Method) -> bool:
        """Whether *method* must wait for the incoming delivery, which it settles; it waits for one delivery only."""
        whole = None if self._waited else self._taking.incoming(settle)
        self._waited = whole is not None
        if whole is not None:
            self._wait_for(whole, method)
        return self._waited

    def _wait_for(self, done: Awaitable[bytes], method: Method, header: bytes = b"") -> None:
        """Put *method* back until *done*, with its content and all later frames, to keep their order."""
        self.preview.commands -= queries.is_command(method.KEY)  # it is counted again later
        self._begin(done, method.KEY)
        if header:
            self.engine.put_back(HEADER, header)
        self.engine.put_back(method.KEY, method.frame(self.number))

    def forward(self, buffer: bytes, start: int, end: int) -> None:
        """Pass a frame of T on to the client; enforces :data:`MAX_UNSETTLED`."""
        if self._asked.received(buffer, start):
            return
        super().forward(buffer, start, end)
        if self._taking.unsettled > MAX_UNSETTLED:
            reason = f"more than {MAX_UNSETTLED} deliveries are not settled: consume with a prefetch (basic.qos)"
            self.refuse_as(ChannelClose(ReplyCode.RESOURCE_ERROR, reason.encode(), 0))

    async def executed(self) -> bool:
        """See :class:`ProxyChannel`: waits for T and P."""
        if self.phase is not ProxyPhase.OPEN:
            return False  # it was closed before this coroutine ran
        waits = [self._asked.wait()]
        if not self.published.passed:
            waits.append(self.published.wait())
        await asyncio.gather(*waits)
        return self.is_open()

    # -- publish

    def _start(self, started: ContentStarted) -> None:
        """Check a publish by its header, before its body takes memory; outside a branch, it goes to P."""
        branch = self._branch = self._demarcation.branch
        if branch is not None:
            self._admit(branch, started)
        elif not self._asked.passed:
            self._start_behind(self._asked, started)
        elif not self._publishes:
            return
        elif not (self._taking.gets_replies and _wants_reply(started.properties)):
            self._pass_publish(started)
        elif not self.published.passed:
            self._start_behind(self.published, started)
        else:
            check_size(self._commit_connection, started.size)
            if not self.session.budget.has_room(started.size):
                reason = f"no memory for the message: {self.session.budget.excess(started.size)}"
                raise XaError(ReplyCode.RESOURCE_ERROR, reason)
            self._take(started)

    def _start_behind(self, fence: ChannelBarrier, started: ContentStarted) -> None:
        header = header_frame(self.number, BASIC, started.size, started.properties)
        self._wait_for(fence.wait(), started.method, header)

    def _pass_publish(self, started: ContentStarted) -> None:
        self.published.sent(started.method.KEY)
        self.engine.pass_content()
        header = header_frame(self._publishing, BASIC, started.size, started.properties)
        self.session.upstream.write(started.method.frame(self._publishing) + header)
        self._torn = self.engine.passes_content

    def _pass_body(self, part: FramePassed) -> None:
        self.session.upstream.write(with_channel(part.buffer[part.start : part.end], self._publishing))
        self._torn = self.engine.passes_content
        if not self._torn and self._when_whole is not None:
            self._when_whole()

    def _end_publishing(self, end: Callable[[], object]) -> None:
        """Call *end*, which closes P, when the content on P is complete; never, if the client has gone before."""
        self._publishes = False
        if self._torn:
            self._when_whole = end
        else:
            end()

    def _admit(self, entry: BranchRuntime, started: ContentStarted) -> None:
        check_size(self._commit_connection, started.size)
        work = entry.work
        if work is None or entry.branch.state is not State.ACTIVE:
            return  # it can only be rolled back, so its publishes are dropped
        if not work.fits(started.size):
            self._overflow(entry, work.excess(started.size))
        publish = _publish(started.method)
        check_publish(
            self._commit_connection,
            self.session.store.broker.user,
            publish.exchange,
            publish.routing_key,
            started.properties,
        )
        self._take(started)

    def _take(self, started: ContentStarted) -> None:
        if started.size:
            self.engine.take_content()
        else:
            self._complete(started.method, started.properties, b"")

    def _complete(self, method: Method, raw: bytes, body: bytes) -> None:
        branch, self._branch = self._branch, None
        if branch is not None:
            self._hold(branch, _publish(method), raw, body)
        else:
            self._request(_publish(method), raw, body)

    @property
    def _commit_connection(self) -> CommitConnection:
        return self.session.store.commit_connection(self.session.who.vhost)

    def _overflow(self, entry: BranchRuntime, reason: str) -> None:
        self.session.manager.doom(entry, reason)
        raise XaError(ReplyCode.RESOURCE_ERROR, f"{reason}; the branch is rolled back (xid {entry.xid})")

    def _request(self, publish: BasicPublish, raw: bytes, body: bytes) -> None:
        """Publish a request for direct replies on T: they go to the publishing channel, and T has their consumer."""
        number = self.upstream_number
        self._asked.sent(publish.KEY)  # later publishes wait until T has handled it
        self._taking.publish(content.message(publish.frame(number), number, raw, body, self.session.frame_max))

    def _hold(self, entry: BranchRuntime, publish: BasicPublish, raw: bytes, body: bytes) -> None:
        work = entry.work
        if work is None or entry.branch.state is not State.ACTIVE:
            return  # it can only be rolled back, so its publishes are dropped
        validation, metrics = self._validator.validate(publish, raw), self.session.metrics
        (metrics.validation_hits if validation is None else metrics.validation_misses).inc()
        if validation is not None:
            self._validations.add(validation)
            validation.add_done_callback(self._validated)
        mandatory = bool(publish.flags & MANDATORY)
        origin = self if mandatory else None
        work.add_publish(HeldPublish(publish.exchange, publish.routing_key, mandatory, raw, body, origin))

    def returned(self, work: WorkRow, code: int, text: bytes) -> None:
        """Send basic.return: a mandatory message was unroutable when its branch was committed."""
        if self.phase is not ProxyPhase.OPEN:
            return
        method = methods.BasicReturn(code, text, work.exchange, work.routing_key).frame(self.number)
        frame_max = self.session.frame_max
        self.session.to_client(content.message(method, self.number, work.properties, work.body, frame_max))

    def _validated(self, validation: asyncio.Future[ChannelClose | None]) -> None:
        self._validations.discard(validation)
        if not validation.cancelled() and (close := validation.result()) is not None:
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

    def _consume_in(self, entry: BranchRuntime, work: HeldWork, deliveries: Sequence[Delivery]) -> Iterator[None]:
        """Consume all *deliveries* in the branch, or none: all are checked first."""
        size = 0
        for count, delivery in enumerate(deliveries, 1):
            size += delivery.size
            self._consumable(entry, delivery, count, size)
            yield
        if self._works_for(entry, work):
            self._taking.hold(deliveries, entry)
            for delivery in deliveries:
                work.add_consume(delivery)

    def _works_for(self, entry: BranchRuntime, work: HeldWork) -> bool:
        """Whether channel, association and branch are unchanged since the checks began."""
        return self.phase is ProxyPhase.OPEN and self._demarcation.branch is entry and entry.work is work

    def _consumable(self, entry: BranchRuntime, delivery: Delivery, count: int, size: int) -> None:
        """Check that the branch may consume *delivery*, the last of *count* with *size* bytes together.

        A 506 also rolls the branch back.
        """
        try:
            check_consume(self._commit_connection, delivery)
        except XaError as error:
            if error.code is ReplyCode.RESOURCE_ERROR:
                self._overflow(entry, error.reason)
            raise
        work = entry.work
        if work is not None and not work.fits(size, count, charged=True) and entry.branch.state is State.ACTIVE:
            self._overflow(entry, work.excess(size, count))

    def _nack(self, settle: methods.BasicNack | methods.BasicReject) -> None:
        """Reject deliveries: at once outside a branch, else when the branch has ended, so that a rollback undoes it."""
        deliveries = self._taking.select(settle)
        entry = self._demarcation.branch
        work = None if entry is None else entry.work
        if entry is None or work is None:
            if isinstance(settle, methods.BasicReject):
                self._taking.reject(deliveries, requeue=settle.requeue)
            else:
                self._taking.nack(deliveries, requeue=settle.requeue, multiple=settle.multiple)
            return
        self._run(self._reject_in(entry, work, deliveries, settle), methods.BasicNack.KEY)

    def _reject_in(
        self,
        entry: BranchRuntime,
        work: HeldWork,
        deliveries: Sequence[Delivery],
        settle: methods.BasicNack | methods.BasicReject,
    ) -> Iterator[None]:
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
            work.add_outcome(partial(self._rejected, delivery, settle))

    def _rejected(self, delivery: Delivery, settle: methods.BasicNack | methods.BasicReject, committed: bool) -> None:
        """Settle *delivery* as the client did, or requeue it after a rollback: the branch has ended."""
        rejects = committed and isinstance(settle, methods.BasicReject)
        requeue = settle.requeue or not committed
        if not self._taking.reject_held(delivery, requeue=requeue, rejects=rejects) and not requeue:
            _log.warning("reject lost with its channel, the message is in its queue again", queue=delivery.queue)

    # -- demarcation

    def select(self) -> None:
        """Answer a repeated select: "must use this method at least once"."""
        self.session.to_client(around_reply(methods.DtxSelectOk().frame(self.number)))

    def demarcate(self, call: methods.DtxStart | methods.DtxEnd) -> None:
        """Run start or end.

        Raises:
            XaError: as :meth:`DemarcationHandler.run`.
        """
        who = self.session.who
        if isinstance(call, methods.DtxEnd) and self._validations and self._demarcation.branch is not None:
            self._begin(self._end_when_validated(call), call.KEY)
        elif (frame := self._demarcation.run(call, who)) is not None:
            self.session.to_client(frame)
        else:
            self._begin(self._demarcation.run_later(call, who, self.is_open), call.KEY)

    async def _end_when_validated(self, call: methods.DtxEnd) -> bytes:
        while self._validations:
            await asyncio.wait(set(self._validations))
            await asyncio.sleep(0)  # the callbacks that read the results run first
        return await self._demarcation.run_later(call, self.session.who, self.is_open)

    # -- the end

    def _closes(self) -> None:
        """Close the channel for the client, after the requests on T."""
        if self._taking.holds and not self._asked.passed:  # T stays open, so no close-ok shows that they are handled
            self.session.manager.spawn(self._close_behind(self._asked.wait()))
        else:
            self._close()

    async def _close_behind(self, done: Awaitable[bytes]) -> None:
        await done
        if self.phase is ProxyPhase.OPEN:
            self._close()

    def _close(self) -> None:
        self._stop_work()
        self.end_associations()
        self._leave(ProxyPhase.CLOSING)
        if self._taking.holds:  # T stays open for the branches
            self._taking.detach()
            then = self.upstream_close_ok
        elif self._taking.end_reason is not None:  # the broker has closed T while an answer was pending
            then = self.upstream_close_ok
        else:
            then = self._taking.close
        if self._publishes:
            self._end_publishing(lambda: ClosingChannel(self.session, self._publishing, then))
        else:
            then()

    def upstream_close_ok(self) -> None:
        """Confirm the client's close, because T is closed or detached."""
        self.engine.close_ok()
        self.session.flush()
        self.session.forget(self)

    def upstream_closed(self, close: ChannelClose) -> None:
        """Handle the broker's close of T."""
        if self.phase is ProxyPhase.CLOSING:  # the client has closed the channel, too
            self.upstream_close_ok()
        else:
            self.refuse_as(close)

    def publish_channel_closed(self, close: ChannelClose) -> None:
        """Handle the broker's close of P."""
        self._end_publishing(self._confirm_publish_closed)
        self.refuse_as(close)

    def _confirm_publish_closed(self) -> None:
        self.session.upstream.write(methods.ChannelCloseOk().frame(self._publishing))
        self.session.upstream.free(self._publishing)

    def _refuse(self, frame: bytes) -> None:
        if self.phase is not ProxyPhase.OPEN:
            return
        self._stop_work()
        self.end_associations()
        self.engine.close(frame)  # no effect if the client or the engine has closed it
        self.session.flush()
        self._leave(ProxyPhase.REFUSED)
        self.close_upstream()
        if self.engine.state is EndpointState.CLOSE_RECEIVED:
            self.upstream_close_ok()

    def close_upstream(self) -> None:
        """Close P, and close T when no branch needs it."""
        if self._publishes and not self.session.upstream.is_lost:
            self._end_publishing(lambda: ClosingChannel(self.session, self._publishing))
        self._taking.detach()

    def shut_down(self) -> None:
        """See :class:`ProxyChannel`."""
        self._stop_work()
        if self.phase is not ProxyPhase.REFUSED:
            self.close_upstream()
        if self.phase is ProxyPhase.OPEN:
            self.phase = ProxyPhase.ENDED

    def _stop_work(self) -> None:
        self._branch = None
        self.published.drop()  # a closed channel gives no answer, so waiting calls would never end
        self._asked.drop()

    def end_associations(self) -> None:
        """See :class:`ProxyChannel`. Associations end with the channel; idle branches stay."""
        self._demarcation.lose()


def _publish(method: Method) -> BasicPublish:
    assert isinstance(method, BasicPublish), "clients send no other content"
    return method


def _wants_reply(raw: bytes) -> bool:
    """Whether a message with these properties asks for a direct reply."""
    return REPLY_TO in raw and properties.read(raw).reply_to == REPLY_TO
