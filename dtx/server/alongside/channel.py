"""A client's channel without select.

Most of its frames pass without inspection. This module handles methods that the proxy must know (open, close, modes),
and dtx methods, which must not reach the broker. dtx-coordination needs no select.
"""

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator
from enum import Enum
from functools import partial
from typing import Final

from dtx.manager.branch_runtime import BranchRuntime
from dtx.manager.scan import Scan
from dtx.server.alongside import queries
from dtx.server.alongside.channel_barrier import ChannelBarrier
from dtx.server.alongside.client import ProxiedClient
from dtx.server.alongside.plain_deliveries import TRANSACTION_ENDED, PlainDeliveries
from dtx.server.alongside.queries import Preview
from dtx.server.alongside.unsettled_deliveries import ANSWERS, Tally
from dtx.server.coordination import CoordinationHandler
from dtx.store.rabbitmq.consume_channel import ConsumeChannel, Keeper
from dtx.store.rabbitmq.consumed_queues import ConsumedQueues
from dtx.store.slices import advance, finish
from dtx.telemetry import get_logger
from dtx.wire.amqp09 import closes, methods
from dtx.wire.amqp09.channel import ChannelEngine, Passing
from dtx.wire.amqp09.codec import ChannelMode
from dtx.wire.amqp09.errors import HardCode, WireError
from dtx.wire.amqp09.events import ChannelEvent, ChannelFailed, FramePassed
from dtx.wire.amqp09.frames import BODY, HEADER, METHOD, method_frame, with_channel
from dtx.wire.amqp09.methods import ChannelClose
from dtx.xa.codes import ReplyCode, XaError
from dtx.xa.model import Association

_log = get_logger(part="channel")
_CONTENT: Final = (methods.BasicPublish.KEY, HEADER, BODY)


class ProxyPhase(Enum):
    """The state of a channel."""

    OPEN = "open"
    CLOSING = "closing"
    """The client sent close; the broker has not confirmed it."""
    CLOSED_BY_BROKER = "closed by the broker"
    """The broker sent close; the client has not confirmed it."""
    REFUSED = "refused"
    """dtx sent close; dtx discards all frames of the client until it confirms."""
    ENDED = "ended"
    """The connection ends; nothing more is sent on the channel."""


class ChannelOwner(ProxiedClient, Keeper):
    """The connection, as used by its channels."""

    channels: "dict[int, ProxyChannel]"
    """Open channels by number."""

    @abstractmethod
    def select(self, channel: "ProxyChannel") -> Awaitable[bytes]:
        """Run dtx-demarcation.select; returns the answering frame.

        Raises:
            XaError: see :meth:`ChannelSelection.select`.
        """

    @abstractmethod
    def handle_waiting(self) -> None:
        """Handle frames that waited for a call of their channel."""

    @abstractmethod
    def forget(self, channel: "ProxyChannel") -> None:
        """Remove a channel that is closed on both sides."""

    @abstractmethod
    def drained(self) -> None:
        """Use an upstream channel number that has become free."""


class ClosingChannel:
    """Closes an upstream channel and discards its remaining frames.

    Args:
        done: called when the channel is closed.
        defer: calls its argument when everything of the client has been sent on the channel; ``None``: that is now.
    """

    def __init__(
        self,
        session: ChannelOwner,
        number: int,
        done: Callable[[], None] | None = None,
        defer: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self._session = session
        self._upstream = session.upstream
        self._number = number
        self._done = done
        self._upstream.handlers[number] = self
        self._is_closing = False
        if defer is None:
            self._close()
        else:
            defer(self._close)

    def _close(self) -> None:
        if self._upstream.handlers.get(self._number) is self and not self._upstream.is_lost and not self._is_closing:
            self._is_closing = True
            self._upstream.write(methods.ChannelClose(200, b"closed by dtx").frame(self._number))

    def frame(self, key: int, buffer: bytes, start: int, end: int) -> None:  # noqa: ARG002
        """See :class:`Handler`."""
        if key == methods.ChannelClose.KEY and self._is_closing:
            self._upstream.note_crossed_close(self._number)
        elif key == methods.ChannelClose.KEY:  # the close of dtx still waits: the broker ignores all before it
            self._is_closing = True
            self._finish()
            self._upstream.write(methods.ChannelCloseOk().frame(self._number))
            self._upstream.free(self._number)
            self._session.drained()
        elif key == methods.ChannelCloseOk.KEY:
            self._upstream.free(self._number)
            self._finish()
            self._session.drained()

    def _finish(self) -> None:
        if self._done is not None:
            self._done()

    def lost(self, reason: str) -> None:
        """See :class:`Handler`."""


class ProxyChannel:
    """One channel of a client.

    Args:
        session: the connection.
        engine: of the channel on the client's side.
        upstream_number: channel number at the broker; ``None`` reserves one.

    Raises:
        XaError: 506, no upstream channel is free.
    """

    mode = ChannelMode.PLAIN

    def __init__(self, session: ChannelOwner, engine: ChannelEngine, upstream_number: int | None = None) -> None:
        self.session = session
        self.engine = engine
        self.number = number = engine.number
        self.phase = ProxyPhase.OPEN
        reserved = upstream_number is None
        self.upstream_number = session.upstream.allocate(number) if upstream_number is None else upstream_number
        self.used = False
        """Whether the channel was ever used for anything except dtx-coordination."""
        self.preview = Preview(session, number)
        self._fence: ChannelBarrier | None = None
        self.coordinated = False
        self.tally: Tally | None = None
        """Its unsettled deliveries; ``None`` before the first basic.consume or basic.get."""
        self.deliveries: PlainDeliveries | None = None
        """As :attr:`tally`."""
        self._queues: ConsumedQueues | None = None
        self.coordination: CoordinationHandler | None = None
        """Created by the first call of dtx-coordination."""
        self._coordinates = False
        """A call of dtx-coordination runs. It continues without the channel, so its answer comes before a close."""
        self._refused_as: ChannelClose | None = None
        """The broker's close, while the answer of a running call must be sent first."""
        self._sort()
        if reserved and self.upstream_number != number:
            session.upstream.handlers[self.upstream_number] = self

    # -- for operators

    @property
    def place(self) -> tuple[int, int]:
        """Numbers of connection and channel."""
        return self.session.id, self.number

    @property
    def associations(self) -> Iterable[tuple[BranchRuntime, Association]]:
        """Branches that the channel is associated or suspended with."""
        return ()

    @property
    def scan(self) -> Scan | None:
        """The open recovery scan, or ``None``."""
        return None if self.coordination is None else self.coordination.scan

    # -- frames

    @property
    def only_coordinates(self) -> bool:
        """Whether the channel needs no broker: it was used for dtx-coordination only."""
        return self.coordinated and not self.used

    def _sort(self) -> None:
        """Choose whether frames pass without inspection. They do not while the channel is unused."""
        is_open, mapped = self.phase is ProxyPhase.OPEN, self.upstream_number != self.number
        busy = self.deliveries is not None and self.deliveries.is_busy
        unseen = self.used and is_open and not mapped and not self.preview.counting and not busy
        self.engine.pass_frames(Passing.JOINED if unseen else Passing.SINGLY)

    def _leave(self, phase: ProxyPhase, frame: bytes = b"") -> None:
        """Leave the open state: frames no longer wait for a running call, though the call may continue."""
        self.phase = phase
        self._sort()
        if frame:
            self.session.to_client(frame)
        self.engine.release()
        self.session.handle_waiting()

    def receive(self, event: ChannelEvent | ChannelFailed | FramePassed) -> None:
        """Handle a frame of the client that does not pass without inspection.

        Raises:
            WireError: the connection cannot go on.
        """
        assert isinstance(event, FramePassed), "no selected channel"
        key, buffer, start, end = event.key, event.buffer, event.start, event.end
        if self.phase is not ProxyPhase.OPEN:
            self._late(key, buffer, start, end)
            return
        self.preview.commands += queries.is_command(key)
        try:
            if key >> 16 in methods.DTX_CLASSES:
                self._execute(methods.decode_call(buffer[start + 7 : end - 1]))
            elif queries.is_query(key, buffer, start, end):
                self._ask(*queries.decode(key, buffer[start + 7 : end - 1]))
            elif key == methods.ChannelOpen.KEY:
                raise WireError(HardCode.CHANNEL_ERROR, f"channel {self.number} is open already")
            elif key == methods.ChannelClose.KEY:
                self.close(buffer[start + 7 : end - 1])
            else:
                self._work(key, buffer, start, end)
        except XaError as error:
            self.refuse(error, key)

    def _late(self, key: int, buffer: bytes, start: int, end: int) -> None:
        """Handle a frame on a channel that is no longer open."""
        if key == methods.ChannelCloseOk.KEY:
            if self.phase is ProxyPhase.CLOSED_BY_BROKER:
                self._to_broker(buffer, start, end)
                self.session.upstream.free(self.upstream_number)
            self.session.forget(self)
        elif self.phase is ProxyPhase.CLOSED_BY_BROKER and key in _CONTENT:
            # The broker drops it; close-ok inside a content would end the connection (505).
            self._to_broker(buffer, start, end)
        elif key == methods.ChannelClose.KEY and self.phase is not ProxyPhase.CLOSING:
            # Both sides have sent close: each confirms the close of the other (AMQP 0-9-1, 1.5.2.5).
            self.session.to_client(methods.ChannelCloseOk().frame(self.number))

    def _work(self, key: int, buffer: bytes, start: int, end: int) -> None:
        """Send a frame of the client to the broker."""
        self.need_broker()
        match key:
            case methods.ConfirmSelect.KEY:
                self.mode = ChannelMode.CONFIRM
            case methods.TxSelect.KEY:
                if self.deliveries is not None:
                    self.deliveries.filter.settle_up_to(0)  # later, that would wait for a commit of the client
                self.mode = ChannelMode.TX
            case methods.BasicConsume.KEY | methods.BasicGet.KEY:
                self._consume(key, buffer[start + 7 : end - 1])
            case methods.QueueDeclare.KEY | methods.QueueDelete.KEY:
                self.queues.requested(key, buffer[start + 7 : end - 1])
            case methods.ChannelFlow.KEY:
                self._fenced().sent(key)
            case _:
                pass
        if self.deliveries is None:
            self._to_broker(buffer, start, end)
        else:
            self.deliveries.pass_on(key, buffer[start:end])
            self._sort()

    def need_broker(self) -> None:
        """Note that the channel is about to use the broker.

        Raises:
            WireError: 320, the connection to the broker is lost.
        """
        if self.session.upstream.is_lost:
            raise WireError(HardCode.CONNECTION_FORCED, "the broker is not reachable, only dtx-coordination works")
        if not self.used:
            self.used = True
            self._sort()

    @property
    def queues(self) -> ConsumedQueues:
        """The queues that it consumes from."""
        if self._queues is None:
            self._queues = ConsumedQueues(self.session.upstream.exclusive)
        return self._queues

    def _consume(self, key: int, payload: bytes) -> None:
        queues = self.queues
        self.tally = self.tally or Tally(queues)
        self.tally.asked(queues.requested(key, payload), is_get=key == methods.BasicGet.KEY)
        self.session.unsettled.sort(self.number, self.upstream_number, self.tally)
        if self.deliveries is None:
            session = self.session
            self.deliveries = PlainDeliveries(session.consuming, session.who.vhost, self.upstream_number, queues, self)
            session.consuming.by_number[self.number] = self.deliveries

    def to_upstream(self, frame: bytes) -> None:
        """See :class:`ChannelSide`."""
        if not self.session.upstream.is_lost:
            self._to_broker(frame, 0, len(frame))

    def settled_by_dtx(self, tag: int) -> None:
        """See :class:`ChannelSide`."""
        if self.tally is not None:
            self.tally.delivered(tag)
            self.tally.settled(tag, 0)

    def abandon(self, reason: str) -> None:
        """See :class:`ChannelSide`."""
        self.session.upstream.abort(reason)

    def end_deliveries(self) -> None:
        """The channel gets no more deliveries, and the broker has the unsettled ones again."""
        if self.deliveries is not None:
            self.deliveries.filter.end()
            if self.session.consuming.by_number.get(self.number) is self.deliveries:
                del self.session.consuming.by_number[self.number]

    def _to_broker(self, buffer: bytes, start: int, end: int) -> None:
        frame = buffer[start:end]
        number = self.upstream_number
        self.session.upstream.write(frame if number == self.number else with_channel(frame, number))

    def frame(self, key: int, buffer: bytes, start: int, end: int) -> None:
        """See :class:`Handler`; also called for frames that the proxy must inspect."""
        if self.deliveries is None:
            self.accept(key, buffer, start, end)
            return
        was_busy = self.deliveries.is_busy
        self.deliveries.filter.frame(key, buffer, start, end)
        if self.deliveries.is_busy is not was_busy:
            self._sort()

    def accept(self, key: int, buffer: bytes, start: int, end: int) -> None:
        """See :class:`ChannelSide`."""
        if key == methods.ChannelClose.KEY:
            if self.phase is not ProxyPhase.OPEN:  # dtx has closed it, and this close was held
                self.session.upstream.note_crossed_close(self.upstream_number)
                return
            self._drop_fence()
            if self.deliveries is not None:
                self.deliveries.drop()
            self._leave(ProxyPhase.CLOSED_BY_BROKER, with_channel(buffer[start:end], self.number))
            return
        if key == methods.ChannelCloseOk.KEY:
            self._drop_fence()
            self.session.upstream.free(self.upstream_number)
            self.session.forget(self)
        elif key == methods.ChannelFlowOk.KEY and self._fence is not None and self._fence.received(buffer, start):
            return
        elif key in ANSWERS and self._queues is not None:
            method = methods.METHODS[key].decode(buffer[start + 7 : end - 1])
            if self.tally is not None:
                self.tally.answered(method)
            self._queues.answered(method)
        elif key in TRANSACTION_ENDED and self.deliveries is not None:
            self.deliveries.transaction_ended()
        self.forward(buffer, start, end)

    def forward(self, buffer: bytes, start: int, end: int) -> None:
        """Pass a frame of the broker on to the client."""
        frame = buffer[start:end]
        if frame[0] == METHOD and frame.startswith(methods.AccessRequestOk.HEAD, 7):
            self.preview.ticket = methods.ticket(frame[7:-1])
        is_same = self.upstream_number == self.number
        self.session.forward_to_client(frame if is_same else with_channel(frame, self.number))

    def lost(self, reason: str) -> None:
        """See :class:`Handler`: the session tells the client."""

    def close(self, payload: bytes) -> None:
        """Close the channel for the client; *payload* is its channel.close."""
        if self.session.upstream.is_lost:
            self.session.to_client(methods.ChannelCloseOk().frame(self.number))
            self.session.forget(self)
            return
        self._leave(ProxyPhase.CLOSING)
        handler = self.session.upstream.handlers.get(self.upstream_number)
        if isinstance(handler, ConsumeChannel):  # a select is running
            handler.close()
        else:
            self._after_settlements(partial(self._send_method, payload))
            if self.deliveries is not None:
                self.deliveries.then(self.deliveries.close)

    def _send_method(self, payload: bytes) -> None:
        if self.phase in (ProxyPhase.OPEN, ProxyPhase.CLOSING) and not self.session.upstream.is_lost:
            self.session.upstream.write(method_frame(self.upstream_number, payload))

    def _after_settlements(self, act: Callable[[], None]) -> None:
        """Call *act* when the broker has everything that the client has sent on the channel."""
        if self.deliveries is None:
            act()
        else:
            self.deliveries.then(act)

    def upstream_closed(self, close: ChannelClose) -> None:
        """Handle the broker's close during a select; nothing more is sent on the channel."""
        if self.phase is ProxyPhase.CLOSING:
            self.upstream_close_ok()
        elif self.phase is ProxyPhase.OPEN:
            self._leave(ProxyPhase.REFUSED, close.frame(self.number))

    def upstream_close_ok(self) -> None:
        """Handle the broker's close-ok during a select."""
        self.session.to_client(methods.ChannelCloseOk().frame(self.number))
        self.session.forget(self)

    def shut_down(self) -> None:
        """Release the channel after the client or its connection has gone; nothing more is delivered to the client."""
        self._drop_fence()
        handler = self.session.upstream.handlers.get(self.upstream_number, self)
        if self.phase is ProxyPhase.OPEN:
            if handler is self and not self.session.upstream.is_lost:
                self.close_upstream()
            self.phase = ProxyPhase.ENDED

    def end_associations(self) -> None:
        """End all associations of the channel; called after :meth:`shut_down`."""

    # -- dtx methods

    def _execute(self, call: methods.DtxCall) -> None:
        """Run a dtx method.

        Raises:
            XaError: the channel cannot go on.
            WireError: the connection cannot go on.
        """
        match call:
            case methods.DtxStart() | methods.DtxEnd():
                self.demarcate(call)
            case methods.DtxSelect():
                self.select()
            case _:
                self._coordinate(call)

    def select(self) -> None:
        """Run dtx-demarcation.select: the session replaces this channel by a selected one."""
        self._begin(self._select(), methods.DtxSelect.KEY)

    async def _select(self) -> bytes:
        if self.deliveries is not None:
            self.deliveries.filter.settle_up_to(0)  # nothing settles later what the client has not seen
        sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._after_settlements(partial(sent.set_result, None))
        await sent
        return await self.session.select(self)

    def demarcate(self, call: methods.DtxStart | methods.DtxEnd) -> None:
        """Refuse start and end without select ("The client must use this method at least once")."""
        raise XaError(
            ReplyCode.COMMAND_INVALID,
            f"{call.NAME} on a channel without dtx-demarcation.select (xid {call.xid})",
        )

    def _coordinate(self, call: methods.CoordinationCall) -> None:
        if not isinstance(call, (methods.DtxGetTimeout, methods.DtxSetTimeout)):
            self.coordinated = True
        session = self.session
        if self.coordination is None:
            self.coordination = CoordinationHandler(session.manager, session.metrics, self.number, session.id)
        self._coordinates = True
        self.engine.hold()
        self.coordination.run(call, session.who, session.frame_max, lambda answer: self._answered(answer, call.KEY))

    def _answered(self, answer: bytes | XaError, key: int) -> None:
        if isinstance(answer, XaError):
            self._finish(error=answer, key=key)
        else:
            self._finish(answer)

    # -- queries

    def _ask(self, query: queries.Query, ticket: int) -> None:
        """Answer a method of the preview that must not reach the broker; raises as :meth:`_execute`."""
        if isinstance(query, methods.ExchangeQuery | methods.BindingQuery):
            self.need_broker()
        answer = self.preview.answer(query, ticket, self.executed, used=self.used)
        if answer is not None:
            self._begin(answer, query.KEY)

    async def executed(self) -> bool:
        """Wait until the broker has handled all frames of the channel, or the channel is closed.

        Returns:
            Whether the channel is open.
        """
        if self.used and self.phase is ProxyPhase.OPEN:  # it may have been closed before this coroutine ran
            await self._fenced().wait()
        return self.phase is ProxyPhase.OPEN

    def _fenced(self) -> ChannelBarrier:
        if self._fence is None:
            self._fence = ChannelBarrier(lambda payload: self._after_settlements(partial(self._send_method, payload)))
        return self._fence

    def _drop_fence(self) -> None:
        if self._fence is not None:
            self._fence.drop()

    def is_open(self) -> bool:
        """Whether neither side has closed the channel."""
        return self.phase is ProxyPhase.OPEN

    # -- one call at a time

    def _begin(self, work: Awaitable[bytes], key: int) -> None:
        """Run *work*, which returns the answering frame, while later frames of the channel wait."""
        self.engine.hold()
        self.session.manager.spawn(self._finish_after(work, key))

    def _run(self, work: Iterator[None], key: int) -> None:
        """Run *work* in slices, the first one at once; later frames of the channel wait.

        Raises:
            XaError: from the first slice of *work*; an error of a later slice closes the channel.
        """
        if not advance(work):
            self._begin(_finished(work), key)

    async def _finish_after(self, work: Awaitable[bytes], key: int) -> None:
        try:
            frame = await work
        except XaError as error:
            self._finish(error=error, key=key)
        except Exception:  # noqa: BLE001 - logged; the client gets "internal error" only
            _log.exception("call failed", method=f"{key >> 16}.{key & 0xFFFF}", connection=self.session.id)
            self._finish(error=XaError(ReplyCode.INTERNAL_ERROR, "internal error"), key=key)
        else:
            self._finish(frame)

    def _finish(self, frame: bytes = b"", *, error: XaError | None = None, key: int = 0) -> None:
        """Answer the running call, and handle the frames that waited for it."""
        self._coordinates = False
        if self.phase is ProxyPhase.OPEN:
            if error is not None:
                self.refuse(error, key)
            else:
                self.session.to_client(frame)
            if self._refused_as is not None:
                self.refuse_as(self._refused_as)
        self.engine.release()
        self.session.handle_waiting()

    # -- the end by an exception

    def refuse(self, error: XaError, key: int = 0) -> None:
        """Close the channel with an exception; the connection stays open."""
        self._refuse(closes.close_frame(error, self.number, key))

    def refuse_as(self, close: ChannelClose) -> None:
        """Close the channel with the broker's reason, after the answer of a running dtx-coordination call.

        The broker may refuse a frame that dtx sent for that call, and the client must get the outcome of its branch.
        """
        if self._coordinates:
            self._refused_as = self._refused_as or close
            return
        self._refuse(close.frame(self.number))

    def _refuse(self, frame: bytes) -> None:
        if self.phase is not ProxyPhase.OPEN:
            return
        self._drop_fence()
        self._leave(ProxyPhase.REFUSED, frame)
        self.close_upstream()

    def close_upstream(self) -> None:
        """Close the channel at the broker."""
        if self.deliveries is None:
            ClosingChannel(self.session, self.upstream_number)
            return
        ClosingChannel(self.session, self.upstream_number, self.deliveries.drop, self._after_settlements)
        self.deliveries.then(self.deliveries.close)


async def _finished(work: Iterator[None]) -> bytes:
    """Run the rest of *work* in later turns of the event loop; returns no frame."""
    await asyncio.sleep(0)
    await finish(work)
    return b""
