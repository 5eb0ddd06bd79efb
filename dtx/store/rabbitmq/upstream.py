"""A connection to the broker, and channels on it that dtx itself uses.

The connection does not care who authenticated: a client's upstream connection and dtx's own one share all of this.
Channels have handlers; frames of channels without one are the proxy's to pass on.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final, Protocol, TypeVar, cast

from dtx import failpoint
from dtx.failpoint import Point
from dtx.store.rabbitmq.pulse import Pulse
from dtx.store.slices import Slices
from dtx.telemetry import get_logger
from dtx.wire.amqp09 import content, methods
from dtx.wire.amqp09.errors import WireError
from dtx.wire.amqp09.frames import BODY, HEADER, HEARTBEAT, HEARTBEAT_FRAME, Frame, FrameSplitter, method_frame
from dtx.wire.amqp09.methods import ChannelClose
from dtx.xa.codes import ReplyCode, XaError

_log = get_logger(part="upstream")
_Octets = TypeVar("_Octets", bytes, int)
Step = tuple[Sequence[bytes], Point]
"""Whole frames, and the failpoint at which they are sent."""

_MOST_EXCLUSIVE: Final = 10_000
"""Exclusive queues that one connection remembers."""
MOST_UNSENT: Final = 1 << 20
"""Octets that wait to be sent on one socket before whoever writes is stopped: several frames of the usual size."""
MOST_AT_ONCE: Final = 1000
"""Frames that are cut out of what was read before the first of them is handled: a millisecond's work."""


class UpstreamLost(Exception):
    """The connection to the broker is gone; what was under way has an unknown outcome."""


class ChannelClosed(Exception):
    """The broker closed a channel of dtx's own."""

    def __init__(self, close: ChannelClose) -> None:
        super().__init__(close)
        self.close = close

    def __str__(self) -> str:
        return words(self.close)


def words(close: ChannelClose | methods.ConnectionClose) -> str:
    """What the broker said, for people: ``404 NOT_FOUND - no exchange 'x' in vhost '/'``."""
    return f"{close.reply_code} {close.reply_text.decode('utf-8', 'replace')}"


class Handler(Protocol):
    """Whoever owns an upstream channel."""

    def frame(self, key: int, buffer: bytes, start: int, end: int) -> None:
        """A frame came in: ``buffer[start:end]``, whole."""

    def lost(self, reason: str) -> None:
        """The connection is gone."""


class ExclusiveQueues:
    """The queues that one connection has declared exclusive: the broker deletes them with it, messages and all.

    A queue that dtx is not sure about is not among them.
    """

    def __init__(self) -> None:
        self._names: dict[bytes, None] = {}

    def __contains__(self, queue: bytes) -> bool:
        return queue in self._names

    def add(self, queue: bytes) -> None:
        """The broker has declared it."""
        self._names[queue] = None
        if len(self._names) > _MOST_EXCLUSIVE:
            self.discard(next(iter(self._names)))

    def discard(self, queue: bytes) -> None:
        """It is deleted, or may be another one by now."""
        self._names.pop(queue, None)


class Declares:
    """What one channel does to the exclusive queues of its connection.

    Args:
        queues: of the connection.
    """

    def __init__(self, queues: ExclusiveQueues) -> None:
        self._queues = queues
        self._asked: deque[bool] = deque()
        """Of each queue.declare that is not answered: whether it makes an exclusive queue."""

    def asked(self, payload: bytes) -> None:
        """The client sent queue.declare."""
        try:
            declare = methods.QueueDeclare.decode(payload)
        except WireError:
            return  # the broker refuses it
        makes = declare.exclusive and not declare.passive
        if not makes and not declare.passive:
            self._queues.discard(declare.queue)
        if not declare.no_wait:
            self._asked.append(makes)

    def answered(self, queue: bytes) -> None:
        """The broker sent queue.declare-ok."""
        if self._asked and self._asked.popleft():
            self._queues.add(queue)

    def deleted(self, payload: bytes, last_queue: bytes) -> None:
        """The client sent queue.delete; *last_queue* is the one that the channel declared last."""
        with suppress(WireError):
            self._queues.discard(methods.QueueDelete.decode(payload).queue or last_queue)


class Upstream(asyncio.BaseProtocol):
    """One connection to the broker."""

    def __init__(self) -> None:
        self.handlers: dict[int, Handler] = {}
        self.used: set[int] = {0}
        self.splitter = FrameSplitter(0, MOST_AT_ONCE)
        self.frame_max = 0
        self.channel_max = 0xFFFF
        self.blocked = False
        self.lock = ""
        """Name of the exclusive queue that shows, as long as it is there, that this connection may still act."""
        self.exclusive = ExclusiveQueues()
        self.is_lost = False
        self._transport: asyncio.Transport | None = None
        self._slices = Slices(self._failed)
        """What was read and is not handled yet."""
        self._crossed: set[int] = set()
        """Channels that both sides have closed at once: the broker's close is confirmed behind its own close-ok."""
        self._unread_for: set[object] = set()
        """Why nothing is read."""
        self._pulse = Pulse(lambda: self.write(HEARTBEAT_FRAME), lambda: self.abort("the broker missed its heartbeats"))

    # -- asyncio.Protocol, but no subclass of it: to those uvloop hands copies, whatever buffer they offer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is connected."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are not registered as that
        self._transport.set_write_buffer_limits(high=MOST_UNSENT, low=MOST_UNSENT // 4)

    def data_received(self, data: bytes) -> None:
        """Octets from the broker."""
        self._received(self.splitter.feed, data)

    def eof_received(self) -> bool:
        """The broker has closed its side: so does dtx."""
        return False

    def _received(self, split: Callable[[_Octets], tuple[bytes, list[Frame]]], octets: _Octets) -> None:
        """Octets from the broker, which *split* makes frames of; more are read when these are handled."""
        self._pulse.read = True
        self._slices.run(self._handle(split, octets))
        if self._slices.busy:
            self.pause_reading(self._slices)
            self._slices.then(lambda: self.resume_reading(self._slices))

    def _handle(self, split: Callable[[_Octets], tuple[bytes, list[Frame]]], octets: _Octets) -> Iterator[None]:
        buffer, frames = split(octets)
        while frames:
            yield from self.frames(buffer, frames)
            yield
            buffer, frames = self.splitter.more()

    def _failed(self, error: Exception) -> None:
        if isinstance(error, WireError):
            self.abort(f"the broker sent something that is not AMQP 0-9-1: {error}")
        else:
            _log.error("upstream connection failed", exc_info=error)
            self.abort("internal error")

    def frames(self, buffer: bytes, frames: Sequence[Frame]) -> Iterator[None]:
        """Hand frames to their handlers, and yield often."""
        handlers = self.handlers
        for key, channel, start, end in frames:
            handler = handlers.get(channel)
            if handler is not None and key != HEARTBEAT:
                handler.frame(key, buffer, start, end)
                yield

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone: what it has brought comes first."""
        self._transport = None
        self._slices.then(lambda: self._gone(str(exc) if exc else "the broker closed the connection"))

    def _gone(self, reason: str) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        self._pulse.stop()
        handlers = list(self.handlers.values())
        self.handlers.clear()
        for handler in handlers:
            handler.lost(reason)
        self.on_lost(reason)

    def on_lost(self, reason: str) -> None:
        """For subclasses."""

    # -- use

    def write(self, data: bytes | memoryview) -> None:
        """Send whole frames; what is written to a lost connection is gone with it."""
        self._pulse.wrote = True
        if self._transport is not None and not self.is_lost:
            self._transport.write(data)

    def write_steps(self, *steps: Step) -> None:
        """Send whole frames as one, though a failpoint may stand behind each step: a socket may take a part of them."""
        if failpoint.armed:
            for frames, point in steps:
                self.write(b"".join(frames))
                failpoint.at(point)
        else:
            self.write(b"".join([frame for frames, _ in steps for frame in frames]))

    def abort(self, reason: str) -> None:
        """End the connection at once, because of something that should not be."""
        if not self.is_lost:
            _log.info("upstream connection aborted", reason=reason)
        self.end(reason)

    def end(self, reason: str) -> None:
        """End the connection at once, as it is meant to."""
        if self._transport is not None:
            self._transport.abort()
        self._gone(reason)

    def close(self) -> None:
        """End the connection: connection.close, without waiting for the answer."""
        if self._transport is not None and not self.is_lost:
            self.write(methods.ConnectionClose(200, b"bye").frame(0))
            self._transport.close()

    def pause_reading(self, reason: object) -> None:
        """Read no more from the broker until *reason* is resumed: whoever takes its frames is slow."""
        self._unread_for.add(reason)
        if not self._pulse.paused and self._transport is not None:
            self._pulse.paused = True
            self._transport.pause_reading()

    def resume_reading(self, reason: object) -> None:
        """*reason* does not hold any more."""
        self._unread_for.discard(reason)
        if self._pulse.paused and not self._unread_for and self._transport is not None and not self.is_lost:
            self._pulse.paused = False
            self._pulse.read = True
            self._transport.resume_reading()

    def start_heartbeats(self, interval: int) -> None:
        """Send and demand a sign of life every *interval* seconds."""
        self._pulse.start(interval)

    @property
    def kept_free(self) -> int:
        """Channel numbers that dtx does not take for itself: whoever may open more channels finds them free."""
        return 0

    def allocate(self, preferred: int | None = None) -> int:
        """Reserve an upstream channel number, *preferred* if it is free, else the highest free one.

        Args:
            preferred: of a client's channel; ``None`` for a channel of dtx's own.

        Raises:
            XaError: 506, all numbers are in use, or kept free.
        """
        if preferred is not None and preferred not in self.used and preferred <= self.channel_max:
            self.used.add(preferred)
            return preferred
        left = self.channel_max + 1 - len(self.used)  # 0 is always in use
        enough = preferred is not None or left > self.kept_free
        for number in range(self.channel_max, 0, -1):
            if enough and number not in self.used:
                self.used.add(number)
                return number
        raise XaError(
            ReplyCode.RESOURCE_ERROR,
            f"all {self.channel_max} channels of the connection to the broker are in use or promised to its client "
            "(a selected channel needs two, and a connection that selects two more)",
        )

    def crossed(self, number: int) -> None:
        """The broker has closed a channel before it has read dtx's own close, which it still confirms.

        Its close is confirmed when that has come, by :meth:`free`: RabbitMQ ends a channel at close-ok, and with it
        what it has not written yet.
        """
        self._crossed.add(number)

    def free(self, number: int) -> None:
        """Give a channel number back: the channel is closed on both sides."""
        if number in self._crossed:
            self._crossed.discard(number)
            self.write(methods.ChannelCloseOk().frame(number))
        self.handlers.pop(number, None)
        self.used.discard(number)


class Content:
    """A message that comes in: method, header and body frames put together."""

    __slots__ = ("body", "method", "properties", "size")

    def __init__(self, method: bytes) -> None:
        self.method = method
        self.properties = b""
        self.size = -1
        self.body = bytearray()

    def add(self, key: int, payload: bytes) -> bool:
        """Add a frame; returns whether the message is complete."""
        if key == HEADER:
            header = content.header(payload)
            self.size, self.properties = header.body_size, header.properties
        elif key == BODY:
            self.body += payload
        return self.size >= 0 and len(self.body) >= self.size


class OwnChannel:
    """A channel that dtx itself uses: requests are answered in order, so answers are matched by it.

    Args:
        upstream: the connection; a channel number is reserved at once.
    """

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self.number = upstream.allocate()
        self.closed: BaseException | None = None
        self.returned: list[Content] = []
        """Messages that the broker sent back since this was last emptied."""
        self.on_delivery: Callable[[Content], None] | None = None
        """Takes the messages of consumers on this channel."""
        self._waiting: deque[tuple[tuple[int, ...], asyncio.Future[tuple[int, bytes, Content | None]]]] = deque()
        self._content: Content | None = None
        self._closing = False
        upstream.handlers[self.number] = self

    @property
    def busy(self) -> bool:
        """Whether an answer is still to come."""
        return bool(self._waiting)

    async def open(self) -> "OwnChannel":
        """channel.open; returns the channel itself."""
        await self.call(methods.ChannelOpen().encode(), methods.ChannelOpenOk.KEY)
        return self

    def send(self, payload: bytes, *answers: int) -> "asyncio.Future[tuple[int, bytes, Content | None]]":
        """Send a method; the future gets the answer, which is one of *answers*."""
        return self.send_raw(method_frame(self.number, payload), *answers)

    def send_raw(self, frames: bytes, *answers: int) -> "asyncio.Future[tuple[int, bytes, Content | None]]":
        """Send whole frames for this channel; the future gets the answer to the last one.

        The future raises ChannelClosed or UpstreamLost.
        """
        future = self._expect(answers)
        if not future.done():
            self.upstream.write(frames)
        return future

    def send_steps(self, steps: Sequence[Step], *answers: int) -> "asyncio.Future[tuple[int, bytes, Content | None]]":
        """As :meth:`send_raw`, with a failpoint behind each step."""
        future = self._expect(answers)
        if not future.done():
            self.upstream.write_steps(*steps)
        return future

    def _expect(self, answers: tuple[int, ...]) -> "asyncio.Future[tuple[int, bytes, Content | None]]":
        future: asyncio.Future[tuple[int, bytes, Content | None]] = asyncio.get_running_loop().create_future()
        if self.closed is not None or self.upstream.is_lost:
            future.set_exception(self.closed or UpstreamLost("the connection to the broker is gone"))
        else:
            self._waiting.append((answers, future))
        return future

    async def call(self, payload: bytes, *answers: int) -> tuple[int, bytes, Content | None]:
        """Send a method and wait for its answer.

        Returns:
            Key and payload of the answer, and the message that came with it.

        Raises:
            ChannelClosed, UpstreamLost.
        """
        return await self.send(payload, *answers)

    def frame(self, key: int, buffer: bytes, start: int, end: int) -> None:
        """A frame from the broker."""
        payload = buffer[start + 7 : end - 1]
        if key in (HEADER, BODY):
            if self._content is not None and self._content.add(key, payload):
                self._complete(self._content)
        elif key in methods.CONTENT:
            self._content = Content(payload)
        elif key == methods.ChannelClose.KEY:
            if self._closing:
                self.upstream.crossed(self.number)
            else:
                self.upstream.write(methods.ChannelCloseOk().frame(self.number))
                self.upstream.free(self.number)
            self._fail(ChannelClosed(methods.ChannelClose.decode(payload)))
        elif key == methods.BasicCancel.KEY:
            self.upstream.abort("a queue of dtx's own was deleted")
        elif key == methods.ChannelCloseOk.KEY:
            self.upstream.free(self.number)
            self._answer(key, payload, None)
            self._fail(UpstreamLost("the channel was closed"))
        else:
            self._answer(key, payload, None)

    def _complete(self, message: Content) -> None:
        self._content = None
        key = int.from_bytes(message.method[:4], "big")
        if key == methods.BasicReturn.KEY:
            self.returned.append(message)
        elif key == methods.BasicDeliver.KEY:
            if self.on_delivery is not None:
                self.on_delivery(message)
        else:
            self._answer(key, message.method, message)

    def _answer(self, key: int, payload: bytes, message: Content | None) -> None:
        if self._waiting and key in self._waiting[0][0]:
            _, future = self._waiting.popleft()
            if not future.done():
                future.set_result((key, payload, message))

    def _fail(self, error: BaseException) -> None:
        if self.closed is None:
            self.closed = error
        waiting, self._waiting = self._waiting, deque()
        for _, future in waiting:
            if not future.done():
                future.set_exception(error)
                future.exception()  # whoever waits sees it; nobody waiting is no mistake

    def lost(self, reason: str) -> None:
        """The connection is gone."""
        self._fail(UpstreamLost(reason))

    async def close(self) -> None:
        """channel.close; unacknowledged messages go back to their queues."""
        if self.closed is None:
            self._closing = True
            await self.call(methods.ChannelClose(200, b"done").encode(), methods.ChannelCloseOk.KEY)
