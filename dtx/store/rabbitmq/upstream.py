"""A connection to the broker, and channels on it that dtx itself uses.

A client's upstream connection and dtx's own connections share this code. Channels have handlers; the proxy forwards
frames of channels without one. The engine implements the protocol. This module has the socket, its timer, and the
futures of waiting callers.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final, Protocol, cast

from dtx import failpoint
from dtx.failpoint import Point
from dtx.store.slices import Slices
from dtx.telemetry import get_logger
from dtx.wire.amqp09 import events, methods
from dtx.wire.amqp09.channel import ChannelEngine
from dtx.wire.amqp09.codec import ChannelMode, Method
from dtx.wire.amqp09.connection import ConnectionEngine
from dtx.wire.amqp09.errors import WireError
from dtx.wire.amqp09.events import ChannelEvent, ContentReceived, MethodReceived
from dtx.wire.amqp09.methods import ChannelClose
from dtx.wire.amqp09.settings import EngineSettings, PeerEnd
from dtx.xa.codes import ReplyCode, XaError

_log = get_logger(part="upstream")
Step = tuple[Sequence[bytes], Point]
"""Whole frames, and the failpoint at which they are sent."""
Answer = MethodReceived | ContentReceived

_MOST_EXCLUSIVE: Final = 10_000
"""Exclusive queues that one connection remembers."""
MOST_UNSENT: Final = 1 << 20
"""Bytes that wait to be sent on one socket before the writer is stopped: several frames of the usual size."""


class UpstreamLost(Exception):
    """The connection to the broker is lost; the outcome of pending requests is not known."""


class UpstreamChannelClosed(Exception):
    """The broker closed a channel of dtx's own."""

    def __init__(self, close: ChannelClose) -> None:
        super().__init__(close)
        self.close = close

    def __str__(self) -> str:
        return words(self.close)


def words(close: ChannelClose | methods.ConnectionClose) -> str:
    """The text of a close, for people: ``404 NOT_FOUND - no exchange 'x' in vhost '/'``."""
    return f"{close.reply_code} {close.reply_text.decode('utf-8', 'replace')}"


class Handler(Protocol):
    """The owner of an upstream channel."""

    def frame(self, key: int, buffer: bytes, start: int, end: int) -> None:
        """Handle a whole frame: ``buffer[start:end]``."""

    def lost(self, reason: str) -> None:
        """The connection is gone."""


class ExclusiveQueues:
    """The queues that one connection has declared exclusive. The broker deletes them with it, including their messages.

    A queue that may not be exclusive is left out.
    """

    def __init__(self) -> None:
        self._names: dict[bytes, None] = {}

    def __contains__(self, queue: bytes) -> bool:
        return queue in self._names

    def add(self, queue: bytes) -> None:
        """Note a queue that the broker has declared. With too many, the oldest is left out."""
        self._names[queue] = None
        if len(self._names) > _MOST_EXCLUSIVE:
            self.discard(next(iter(self._names)))

    def discard(self, queue: bytes) -> None:
        """Leave out a queue: it was deleted, or another queue may have its name now."""
        self._names.pop(queue, None)


class Upstream(asyncio.BaseProtocol):
    """One connection to the broker."""

    def __init__(self) -> None:
        self.engine = ConnectionEngine(EngineSettings(), PeerEnd.CLIENT)
        self.handlers: dict[int, Handler] = {}
        self.used: set[int] = {0}
        self.blocked = False
        self.lock = ""
        """Name of the queue whose consumers show that this connection may still act; empty without one."""
        self.exclusive = ExclusiveQueues()
        self.is_lost = False
        self._transport: asyncio.Transport | None = None
        self._slices = Slices(self._failed)
        """Bytes that were read and are not handled yet."""
        self._crossed: set[int] = set()
        """Channels that both sides have closed at once: dtx confirms the broker's close after the broker's close-ok."""
        self._unread_for: set[object] = set()
        """The reasons why nothing is read."""
        self._timer: asyncio.TimerHandle | None = None

    # -- asyncio.Protocol, but not a subclass: uvloop gives copies to those, even if they offer a buffer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is connected."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop does not register its transports as such
        self._transport.set_write_buffer_limits(high=MOST_UNSENT, low=MOST_UNSENT // 4)

    def eof_received(self) -> bool:
        """Close the connection: the broker has closed its side."""
        return False

    def run(self, work: Iterator[None]) -> None:
        """Handle bytes that were read, in slices. Reading is paused until that is done."""
        if not self._slices.run(work):
            self.pause_reading(self._slices)
            self._slices.then(lambda: self.resume_reading(self._slices))

    def _failed(self, error: Exception) -> None:
        if isinstance(error, WireError):
            self.abort(f"the broker sent something that is not AMQP 0-9-1: {error}")
        else:
            _log.error("upstream connection failed", exc_info=error)
            self.abort("internal error")

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is closed: handle first what was read, then end."""
        self._transport = None
        self._slices.then(lambda: self._lose(str(exc) if exc else "the broker closed the connection"))

    def _lose(self, reason: str) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        self.engine.end()
        if self._timer is not None:
            self._timer.cancel()
        handlers = list(self.handlers.values())
        self.handlers.clear()
        for handler in handlers:
            handler.lost(reason)
        self.on_lost(reason)

    def on_lost(self, reason: str) -> None:
        """Called when the connection is lost. For subclasses."""

    # -- use

    def write(self, data: bytes | memoryview) -> None:
        """Send whole frames; dropped if the connection is lost."""
        self.engine.send_raw(data)
        self.flush()

    def write_steps(self, *steps: Step) -> None:
        """Send the frames of all *steps* in one write; with armed failpoints, in a write and a failpoint for each."""
        if failpoint.armed:
            for frames, point in steps:
                self.write(b"".join(frames))
                failpoint.at(point)
        else:
            self.write(b"".join([frame for frames, _ in steps for frame in frames]))

    def flush(self) -> None:
        """Send the engine's output."""
        for piece in self.engine.data_to_send():
            if self._transport is not None and not self.is_lost:
                self._transport.write(piece)

    def abort(self, reason: str) -> None:
        """End the connection at once because of a fault, and log *reason*."""
        if not self.is_lost:
            _log.info("upstream connection aborted", reason=reason)
        self.end(reason)

    def end(self, reason: str) -> None:
        """End the connection at once, in normal operation."""
        if self._transport is not None:
            self._transport.abort()
        self._lose(reason)

    def close(self) -> None:
        """End the connection: connection.close, without waiting for the answer."""
        if self._transport is not None and not self.is_lost:
            self.engine.close(methods.ConnectionClose(200, b"bye").frame(0))
            self.flush()
            self._transport.close()

    def pause_reading(self, reason: object) -> None:
        """Read nothing from the broker until *reason* is resumed: the receiver of its frames is slow."""
        self._unread_for.add(reason)
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self, reason: object) -> None:
        """Undo :meth:`pause_reading` for *reason*. Does nothing without it."""
        if reason not in self._unread_for:
            return
        self._unread_for.discard(reason)
        if not self._unread_for and self._transport is not None and not self.is_lost:
            self.engine.note_received()
            self._transport.resume_reading()

    def start_heartbeats(self) -> None:
        """Send heartbeats, and abort the connection if those of the broker are missing."""
        loop = asyncio.get_running_loop()
        if self._unread_for:
            self.engine.note_received()
        at, silent = self.engine.tick(loop.time())
        self.flush()
        if silent:
            self.abort("the broker missed its heartbeats")
        elif at is not None:
            self._timer = loop.call_at(at, self.start_heartbeats)

    @property
    def kept_free(self) -> int:
        """Channel numbers that dtx leaves free for channels that the client may still open."""
        return 0

    def allocate(self, preferred: int | None = None) -> int:
        """Reserve an upstream channel number: *preferred* if it is free, else the highest free one.

        Args:
            preferred: for a client's channel; ``None`` for a channel of dtx's own.

        Raises:
            XaError: 506, all numbers are in use or kept free.
        """
        most = self.engine.agreed.channel_max
        if preferred is not None and preferred not in self.used and preferred <= most:
            self.used.add(preferred)
            return preferred
        left = most + 1 - len(self.used)  # 0 is always in use
        enough = preferred is not None or left > self.kept_free
        for number in range(most, 0, -1):
            if enough and number not in self.used:
                self.used.add(number)
                return number
        raise XaError(
            ReplyCode.RESOURCE_ERROR,
            f"all {most} channels of the connection to the broker are in use or promised to its client "
            "(a selected channel needs two, and a connection that selects two more)",
        )

    def note_crossed_close(self, number: int) -> None:
        """Note that the broker has closed a channel before it has read dtx's own close, which it still confirms.

        After that confirmation, :meth:`free` confirms the broker's close: at close-ok RabbitMQ ends a channel, and
        drops what it has not written yet. For channels of the engine, the engine does this.
        """
        self._crossed.add(number)

    def free(self, number: int) -> None:
        """Release a channel number: the channel is closed on both sides."""
        if number in self._crossed:
            self._crossed.discard(number)
            self.write(methods.ChannelCloseOk().frame(number))
        self.handlers.pop(number, None)
        self.used.discard(number)
        with suppress(KeyError):  # it has already ended in the engine, or was never there
            self.engine.channel(number).end()


class EventHandler(ABC):
    """Owner of a channel whose frames the engine turns into events.

    Args:
        upstream: the connection.
        engine: that of the channel.
    """

    def __init__(self, upstream: Upstream, engine: ChannelEngine) -> None:
        self.upstream = upstream
        self.engine = engine
        self.number = engine.number
        upstream.handlers[engine.number] = self

    def frame(self, key: int, buffer: bytes, start: int, end: int) -> None:
        """Handle a whole frame, on a connection that the proxy splits into frames."""
        event = self.engine.receive(key, buffer, start, end)
        if isinstance(event, ChannelEvent):
            self.event(event)
        self.upstream.flush()

    @abstractmethod
    def event(self, event: ChannelEvent) -> None:
        """Handle an event of the channel."""

    @abstractmethod
    def lost(self, reason: str) -> None:
        """The connection is gone."""


@dataclass(frozen=True, slots=True)
class AllConfirmed:
    """The broker has reported the outcome of all publishes of :meth:`OwnChannel.send_confirmed`.

    Args:
        refused: the indexes of those that it did not take (basic.nack), ascending.
    """

    refused: tuple[int, ...]


class OwnChannel(EventHandler):
    """A channel that dtx itself uses. Requests are answered in order, so answers are matched by order.

    Args:
        upstream: the connection; a channel number is reserved at once.
    """

    def __init__(self, upstream: Upstream) -> None:
        super().__init__(upstream, upstream.engine.open_channel(upstream.allocate()))
        self.closed: BaseException | None = None
        self.returned: list[ContentReceived] = []
        """Messages that the broker has returned since this was last emptied."""
        self.on_delivery: Callable[[ContentReceived], None] | None = None
        """Takes the messages of consumers on this channel."""
        self._waiting: deque[tuple[tuple[type[Method | ChannelEvent | AllConfirmed], ...], asyncio.Future[Any]]] = (
            deque()
        )
        self.is_tx = False
        self._published = 0
        self._unconfirmed: dict[int, None] = {}
        self._refused: list[int] = []

    @property
    def busy(self) -> bool:
        """Whether an answer is still to come."""
        return bool(self._waiting)

    async def open(self, mode: Method | None = None) -> "OwnChannel":
        """Send channel.open and *mode*, which is tx.select or confirm.select. Returns the channel itself.

        Raises:
            UpstreamChannelClosed, UpstreamLost.
        """
        opened = self._expect(events.ChannelOpened)
        self.upstream.flush()
        await opened
        if mode is not None:
            await self.set_mode(mode)
        return self

    async def set_mode(self, mode: Method, before: bytes = b"") -> None:
        """Send the frames *before*, and *mode*: tx.select or confirm.select.

        Raises:
            UpstreamChannelClosed, UpstreamLost.
        """
        assert mode.ANSWER is not None, mode.NAME
        await self.send_raw(before + mode.frame(self.number), mode.ANSWER)
        self.is_tx = isinstance(mode, methods.TxSelect)
        if not self.is_tx:
            self.engine.become(ChannelMode.CONFIRM)

    def send_raw(self, frames: bytes, *answers: type[Method]) -> "asyncio.Future[Answer]":
        """Send whole frames for this channel.

        Returns:
            A future for the answer to the last frame, which is one of *answers*. It raises UpstreamChannelClosed or
            UpstreamLost.
        """
        future = self._expect(*answers)
        if not future.done():
            self.upstream.write(frames)
        return future

    def send_steps(self, steps: Sequence[Step], *answers: type[Method]) -> "asyncio.Future[Answer]":
        """As :meth:`send_raw`, with a failpoint after each step."""
        future = self._expect(*answers)
        if not future.done():
            self.upstream.write_steps(*steps)
        return future

    async def send_confirmed(self, step: tuple[Sequence[bytes], Point | None]) -> tuple[int, ...]:
        """Publish messages on a channel in confirm mode, and wait for the outcome of all. One call at a time.

        Args:
            step: the frames of each message, and the failpoint at which they are sent, if they have one.

        Returns:
            The indexes of the messages that the broker did not take.

        Raises:
            UpstreamChannelClosed, UpstreamLost: the outcome of those without an answer is not known.
        """
        frames, point = step
        if not frames:
            return ()
        first = self._published + 1
        self._published += len(frames)
        self._unconfirmed, self._refused = dict.fromkeys(range(first, self._published + 1)), []
        outcome = self._expect(AllConfirmed)
        if not outcome.done():
            if point is None:
                self.upstream.write(b"".join(frames))
            else:
                self.upstream.write_steps((frames, point))
        refused: AllConfirmed = await outcome
        return tuple(number - first for number in refused.refused)

    def _confirmed(self, confirm: methods.BasicAck | methods.BasicNack) -> None:
        tag, unconfirmed = confirm.delivery_tag, self._unconfirmed
        if confirm.multiple:
            found = list(takewhile(lambda each: each <= tag, unconfirmed))  # the numbers ascend
        else:
            found = [tag] if tag in unconfirmed else []
        for each in found:
            del unconfirmed[each]
        if isinstance(confirm, methods.BasicNack):
            self._refused += found
        if found and not self._unconfirmed:
            self._answer(AllConfirmed(tuple(sorted(self._refused))))

    def _expect(self, *answers: type[Method | ChannelEvent | AllConfirmed]) -> "asyncio.Future[Any]":
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.closed is not None or self.upstream.is_lost:
            future.set_exception(self.closed or UpstreamLost("the connection to the broker is gone"))
        else:
            self._waiting.append((answers, future))
        return future

    async def call(self, request: Method) -> Answer:
        """Send a method and wait for its answer.

        Raises:
            UpstreamChannelClosed, UpstreamLost.
        """
        assert request.ANSWER is not None, request.NAME
        return await self.send_raw(request.frame(self.number), request.ANSWER)

    async def declare(self, declare: methods.QueueDeclare) -> methods.QueueDeclareOk:
        """Send queue.declare, passive or not, and wait for the answer. Raises as :meth:`call`."""
        answer = (await self.call(declare)).method
        assert isinstance(answer, methods.QueueDeclareOk)
        return answer

    def event(self, event: ChannelEvent) -> None:
        """Handle an event of the channel."""
        match event:
            case ContentReceived(method=methods.BasicReturn()):
                self.returned.append(event)
            case ContentReceived(method=methods.BasicDeliver()):
                if self.on_delivery is not None:
                    self.on_delivery(event)
            case MethodReceived(method=methods.BasicCancel()):
                self.upstream.abort("a queue of dtx's own was deleted")
            case MethodReceived(method=(methods.BasicAck() | methods.BasicNack()) as confirm):
                self._confirmed(confirm)
            case ContentReceived() | MethodReceived():
                self._answer(event.method, event)
            case events.ChannelClosing():
                self.upstream.free(self.number)
                self._fail(UpstreamChannelClosed(event.close))
            case events.ChannelClosed():
                self.upstream.free(self.number)
                self._answer(event, event)
                self._fail(UpstreamLost("the channel was closed"))
            case _:
                self._answer(event, event)

    def _answer(self, what: Method | ChannelEvent | AllConfirmed, event: ChannelEvent | None = None) -> None:
        if self._waiting and isinstance(what, self._waiting[0][0]):
            _, future = self._waiting.popleft()
            if not future.done():
                future.set_result(what if event is None else event)

    def _fail(self, error: BaseException) -> None:
        if self.closed is None:
            self.closed = error
        waiting, self._waiting = self._waiting, deque()
        for _, future in waiting:
            if not future.done():
                future.set_exception(error)
                future.exception()  # mark it as read: asyncio logs an error if no caller waits

    def lost(self, reason: str) -> None:
        """The connection is gone."""
        self._fail(UpstreamLost(reason))

    async def close(self) -> None:
        """Send channel.close and wait for the answer. The broker requeues unacknowledged messages.

        Raises:
            UpstreamChannelClosed, UpstreamLost.
        """
        if self.closed is None:
            closed = self._expect(events.ChannelClosed)
            self.abandon()
            await closed

    def abandon(self) -> None:
        """Send channel.close, and do not wait for the answer."""
        if self.closed is None:
            self.engine.close(ChannelClose(200, b"done").frame(self.number))
            self.upstream.flush()
