"""A client's channel that did not select distributed transactions.

Its frames are passed on unseen; what a proxy must know of them (open, close, modes) and the dtx methods, which no
broker may ever see, come through here. dtx-coordination needs no select, so any channel can coordinate.
"""

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator
from enum import Enum
from typing import Final

from dtx.manager.branch_runtime import BranchRuntime
from dtx.manager.scan import Scan
from dtx.server.alongside import queries
from dtx.server.alongside.channel_barrier import ChannelBarrier
from dtx.server.alongside.client import ProxiedClient
from dtx.server.alongside.queries import Preview
from dtx.server.alongside.unsettled_deliveries import ANSWERS, Tally
from dtx.server.coordination import CoordinationHandler
from dtx.store.rabbitmq.consume_channel import ConsumeChannel, Keeper
from dtx.store.rabbitmq.upstream import Declares
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
    """Where a channel is in its life."""

    OPEN = "open"
    CLOSING = "closing"
    """The client asked to close; the broker has not confirmed."""
    CLOSED_BY_BROKER = "closed by the broker"
    """The broker closed it; the client has not confirmed."""
    REFUSED = "refused"
    """dtx closed it; the client has not confirmed, and all it sends before that is discarded."""
    GONE = "gone"
    """Its connection ends: nothing is said on it any more."""


class ChannelOwner(ProxiedClient, Keeper):
    """The connection, as its channels see it."""

    channels: "dict[int, ProxyChannel]"
    """By number."""

    @abstractmethod
    def select(self, channel: "ProxyChannel") -> Awaitable[bytes]:
        """dtx-demarcation.select; returns the answering frame.

        Raises:
            XaError: see :meth:`Selecting.select`.
        """

    @abstractmethod
    def go_on(self) -> None:
        """A channel may go on with what waited."""

    @abstractmethod
    def forget(self, channel: "ProxyChannel") -> None:
        """A channel is closed on both sides."""

    @abstractmethod
    def drained(self) -> None:
        """An upstream channel number has become free."""


class Drain:
    """An upstream channel that is being closed: what still comes is of no interest.

    Args:
        done: called when it is closed.
    """

    def __init__(self, session: ChannelOwner, number: int, done: Callable[[], None] | None = None) -> None:
        self._session = session
        self._upstream = session.upstream
        self._number = number
        self._done = done
        self._upstream.handlers[number] = self
        self._upstream.write(methods.ChannelClose(200, b"closed by dtx").frame(number))

    def frame(self, key: int, buffer: bytes, start: int, end: int) -> None:  # noqa: ARG002
        """A frame from the broker."""
        if key == methods.ChannelClose.KEY:
            self._upstream.crossed(self._number)
        elif key == methods.ChannelCloseOk.KEY:
            self._upstream.free(self._number)
            if self._done is not None:
                self._done()
            self._session.drained()

    def lost(self, reason: str) -> None:
        """The connection is gone, and the channel with it."""


class ProxyChannel:
    """One channel of a client.

    Args:
        session: the connection.
        engine: the channel, as the client knows it.
        upstream_number: as the broker knows it; reserved when not given.

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
        """Whether it was ever used for anything but dtx-coordination."""
        self.preview = Preview(session, number)
        self._fence: ChannelBarrier | None = None
        self.coordinated = False
        self.tally: Tally | None = None
        """What it has consumed, since it began to."""
        self.last_queue = b""
        self._declares = Declares(session.upstream.exclusive)
        self.coordination: CoordinationHandler | None = None
        """Made at the first call of dtx-coordination."""
        self._coordinates = False
        """A call of dtx-coordination runs: it goes on without the channel, and the client hears what it has decided."""
        self._refused_as: ChannelClose | None = None
        """The broker's words for the end of the channel, while an answer comes first."""
        self._sort()
        if reserved and self.upstream_number != number:
            session.upstream.handlers[self.upstream_number] = self

    # -- what operators see

    @property
    def place(self) -> tuple[int, int]:
        """Numbers of connection and channel."""
        return self.session.id, self.number

    @property
    def ties(self) -> Iterable[tuple[BranchRuntime, Association]]:
        """Branches that it is associated or suspended with."""
        return ()

    @property
    def scan(self) -> Scan | None:
        """The recovery scan that is open on it."""
        return None if self.coordination is None else self.coordination.scan

    # -- frames

    @property
    def only_coordinates(self) -> bool:
        """Whether the channel needs no broker: it has coordinated, and done nothing else."""
        return self.coordinated and not self.used

    def _sort(self) -> None:
        """Let its frames pass unseen, or not any more; its first one never does."""
        is_open, mapped = self.phase is ProxyPhase.OPEN, self.upstream_number != self.number
        unseen = self.used and is_open and not mapped and not self.preview.counting
        self.engine.pass_frames(Passing.JOINED if unseen else Passing.SINGLY)

    def _leave(self, phase: ProxyPhase, frame: bytes = b"") -> None:
        """The channel is open no more: nothing waits for a call, though that may go on."""
        self.phase = phase
        self._sort()
        if frame:
            self.session.to_client(frame)
        self.engine.release()
        self.session.go_on()

    def receive(self, event: ChannelEvent | ChannelFailed | FramePassed) -> None:
        """What the client has sent, and does not pass unseen.

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
        """A frame on a channel that is not open any more."""
        if key == methods.ChannelCloseOk.KEY:
            if self.phase is ProxyPhase.CLOSED_BY_BROKER:
                self._to_broker(buffer, start, end)
                self.session.upstream.free(self.upstream_number)
            self.session.forget(self)
        elif self.phase is ProxyPhase.CLOSED_BY_BROKER and key in _CONTENT:
            # The broker drops it; close-ok in the midst of a content would end the connection (505).
            self._to_broker(buffer, start, end)
        elif key == methods.ChannelClose.KEY and self.phase is not ProxyPhase.CLOSING:
            # Both sides closed at once: each confirms the other's close (AMQP 0-9-1, 1.5.2.5).
            self.session.to_client(methods.ChannelCloseOk().frame(self.number))

    def _work(self, key: int, buffer: bytes, start: int, end: int) -> None:
        """A frame for the broker."""
        self.need_broker()
        match key:
            case methods.ConfirmSelect.KEY:
                self.mode = ChannelMode.CONFIRM
            case methods.TxSelect.KEY:
                self.mode = ChannelMode.TX
            case methods.BasicConsume.KEY | methods.BasicGet.KEY:
                self._consume(key, buffer[start + 7 : end - 1])
            case methods.QueueDeclare.KEY:
                self._note_queue(buffer[start + 7 : end - 1])
            case methods.QueueDelete.KEY:
                self._declares.deleted(buffer[start + 7 : end - 1], self.last_queue)
            case methods.ChannelFlow.KEY:
                self._fenced().sent(key)
            case _:
                pass
        self._to_broker(buffer, start, end)

    def need_broker(self) -> None:
        """Something is about to be asked of the broker.

        Raises:
            WireError: it is away.
        """
        if self.session.upstream.is_lost:
            raise WireError(HardCode.CONNECTION_FORCED, "the broker is away, only dtx-coordination goes on")
        if not self.used:
            self.used = True
            self._sort()

    def _consume(self, key: int, payload: bytes) -> None:
        self.tally = self.tally or Tally()
        self.tally.asked(key, payload)
        self.session.unsettled.sort(self.number, self.upstream_number, self.tally)

    def _note_queue(self, payload: bytes) -> None:
        if len(payload) > 6:
            self.last_queue = payload[7 : 7 + payload[6]] or self.last_queue
            self._declares.asked(payload)

    def _to_broker(self, buffer: bytes, start: int, end: int) -> None:
        frame = buffer[start:end]
        number = self.upstream_number
        self.session.upstream.write(frame if number == self.number else with_channel(frame, number))

    def frame(self, key: int, buffer: bytes, start: int, end: int) -> None:
        """A frame from the broker (as the handler of a mapped channel, or because it does not pass unseen)."""
        if key == methods.ChannelClose.KEY:
            if self.phase is ProxyPhase.CLOSING:
                self.session.upstream.crossed(self.upstream_number)
                return
            self._drop_fence()
            self._leave(ProxyPhase.CLOSED_BY_BROKER, with_channel(buffer[start:end], self.number))
            return
        if key == methods.ChannelCloseOk.KEY:
            self._drop_fence()
            self.session.upstream.free(self.upstream_number)
            self.session.forget(self)
        elif key == methods.QueueDeclareOk.KEY:
            self.last_queue = methods.QueueDeclareOk.decode(buffer[start + 7 : end - 1]).queue
            self._declares.answered(self.last_queue)
        elif key == methods.ChannelFlowOk.KEY and self._fence is not None and self._fence.received(buffer, start):
            return
        elif key in ANSWERS and self.tally is not None:
            self.tally.answered(key, buffer[start + 7 : end - 1])
        self.forward(buffer, start, end)

    def forward(self, buffer: bytes, start: int, end: int) -> None:
        """Pass a frame on to the client."""
        frame = buffer[start:end]
        if frame[0] == METHOD and frame.startswith(methods.AccessRequestOk.HEAD, 7):
            self.preview.ticket = methods.ticket(frame[7:-1])
        self.session.to_client(frame if self.upstream_number == self.number else with_channel(frame, self.number))

    def lost(self, reason: str) -> None:
        """The connection to the broker is gone; the session says so to the client."""

    def close(self, payload: bytes) -> None:
        """The client closes the channel."""
        if self.session.upstream.is_lost:
            self.session.to_client(methods.ChannelCloseOk().frame(self.number))
            self.session.forget(self)
            return
        self._leave(ProxyPhase.CLOSING)
        handler = self.session.upstream.handlers.get(self.upstream_number)
        if isinstance(handler, ConsumeChannel):  # it was being selected
            handler.close()
        else:
            self.session.upstream.write(method_frame(self.upstream_number, payload))

    def upstream_closed(self, close: ChannelClose) -> None:
        """The broker closed the channel while it was being selected: nothing may be sent on it any more."""
        if self.phase is ProxyPhase.CLOSING:
            self.upstream_close_ok()
        elif self.phase is ProxyPhase.OPEN:
            self._leave(ProxyPhase.REFUSED, close.frame(self.number))

    def upstream_close_ok(self) -> None:
        """The broker has confirmed a close while the channel was being selected."""
        self.session.to_client(methods.ChannelCloseOk().frame(self.number))
        self.session.forget(self)

    def let_go(self) -> None:
        """The client or its connection is gone: nothing may be delivered to it any more."""
        self._drop_fence()
        handler = self.session.upstream.handlers.get(self.upstream_number, self)
        if self.phase is ProxyPhase.OPEN:
            if handler is self and not self.session.upstream.is_lost:
                self.close_upstream()
            self.phase = ProxyPhase.GONE

    def lose_branches(self) -> None:
        """Behind :meth:`let_go`: the channel works for no branch any more."""

    # -- dtx methods

    def _execute(self, call: methods.DtxCall) -> None:
        """Run a dtx method.

        Raises:
            XaError: the channel cannot go on.
            WireError: nor can the connection.
        """
        match call:
            case methods.DtxStart() | methods.DtxEnd():
                self.demarcate(call)
            case methods.DtxSelect():
                self.select()
            case _:
                self._coordinate(call)

    def select(self) -> None:
        """dtx-demarcation.select: the session makes another channel of this one."""
        self._begin(self.session.select(self), methods.DtxSelect.KEY)

    def demarcate(self, call: methods.DtxStart | methods.DtxEnd) -> None:
        """Start and end need a select before ("The client must use this method at least once")."""
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
        """A method of the preview that no broker may see; raises as :meth:`_execute`."""
        if isinstance(query, methods.ExchangeQuery | methods.BindingQuery):
            self.need_broker()
        answer = self.preview.answer(query, ticket, self.executed, used=self.used)
        if answer is not None:
            self._begin(answer, query.KEY)

    async def executed(self) -> bool:
        """Wait until the broker has done what it was sent on the channel, or that is no more; whether it is open."""
        if self.used and self.phase is ProxyPhase.OPEN:  # it may have been closed before its turn came
            await self._fenced().wait()
        return self.phase is ProxyPhase.OPEN

    def _fenced(self) -> ChannelBarrier:
        if self._fence is None:
            upstream, number = self.session.upstream, self.upstream_number
            self._fence = ChannelBarrier(lambda payload: upstream.write(method_frame(number, payload)))
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
        """Do *work* in slices, the first one at once; later frames of the channel wait.

        Raises:
            XaError: as *work* does in its first slice; later, the channel is refused.
        """
        if not advance(work):
            self._begin(_finished(work), key)

    async def _finish_after(self, work: Awaitable[bytes], key: int) -> None:
        try:
            frame = await work
        except XaError as error:
            self._finish(error=error, key=key)
        except Exception:  # noqa: BLE001 - logged; the client is told no more than that
            _log.exception("call failed", method=f"{key >> 16}.{key & 0xFFFF}", connection=self.session.id)
            self._finish(error=XaError(ReplyCode.INTERNAL_ERROR, "internal error"), key=key)
        else:
            self._finish(frame)

    def _finish(self, frame: bytes = b"", *, error: XaError | None = None, key: int = 0) -> None:
        """The running call is answered: go on with what waited behind it."""
        self._coordinates = False
        if self.phase is ProxyPhase.OPEN:
            if error is not None:
                self.refuse(error, key)
            else:
                self.session.to_client(frame)
            if self._refused_as is not None:
                self.refuse_as(self._refused_as)
        self.engine.release()
        self.session.go_on()

    # -- the end by an exception

    def refuse(self, error: XaError, key: int = 0) -> None:
        """Close the channel with an exception; the connection lives on."""
        self._refuse(closes.close_frame(error, self.number, key))

    def refuse_as(self, close: ChannelClose) -> None:
        """Close the channel with the broker's own words, behind the answer to a call of dtx-coordination.

        The broker may refuse what dtx itself sends for that call: its client has to hear how the branch ended.
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
        """Close what the channel has at the broker."""
        Drain(self.session, self.upstream_number)


async def _finished(work: Iterator[None]) -> bytes:
    """The rest of *work*, in later turns; there is nothing to answer."""
    await asyncio.sleep(0)
    await finish(work)
    return b""
