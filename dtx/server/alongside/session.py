"""A client connection and its connection to the broker.

The handshake passes through: who the client is, the broker decides; dtx learns user, vhost and limits on the way. Then
frames of channels that did not select dtx are passed on as slices of what was read.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from enum import Enum
from functools import partial
from typing import Final

from dtx.manager import TransactionManager, Who
from dtx.manager.limits import Resource
from dtx.server.alongside.backlog import Backlog
from dtx.server.alongside.channel import Channel, ChannelOwner, Drain
from dtx.server.alongside.opening import Opening
from dtx.server.alongside.passing import ChannelZero, ProxyUpstream
from dtx.server.alongside.selecting import Selecting
from dtx.server.failpoints import replying
from dtx.server.front import ClientTransport
from dtx.server.limits import MAX_UNSENT, SessionLimits
from dtx.store.rabbitmq.store import RabbitStore
from dtx.store.rabbitmq.taking import TakingChannel
from dtx.store.slices import SLICE_SECONDS, Slices
from dtx.telemetry import Metrics, get_logger
from dtx.wire.amqp09 import closes, methods
from dtx.wire.amqp09.codec import ChannelMode, Sender
from dtx.wire.amqp09.errors import FrameError, HardCode, WireError
from dtx.wire.amqp09.frames import HEARTBEAT, OPENING_FRAME, Frame, FrameSplitter, method_frame
from dtx.wire.amqp09.handshake import NotOffered
from dtx.wire.amqp09.settings import MOST_AT_ONCE
from dtx.xa.codes import XaError

_log = get_logger(part="session")

_TO_BROKER: Final = methods.watched(Sender.CLIENT) | {methods.ExchangeBindOk.KEY}
"""Methods of a client that do not pass unseen."""
_ON_ZERO: Final = frozenset(
    {
        methods.ConnectionBlocked.KEY,
        methods.ConnectionUnblocked.KEY,
        methods.ConnectionUpdateSecret.KEY,
        methods.ConnectionCloseOk.KEY,
    }
)
"""Methods of a client on channel 0 that the broker gets once the connection is open."""
_NO_BROKERS: Final = 101 << 16
"""From here on classes are dtx's, the preview's, or nobody's: the last one that brokers know is 90."""
_CLOSE_PATIENCE: Final = 5.0
"""Seconds that a client has to confirm connection.close."""


class Stage(Enum):
    """Where a connection is in its life."""

    OPENING = "opening"
    RUNNING = "running"
    CUT_OFF = "cut off"
    """The broker is gone, and the client only coordinates: that goes on."""
    CLOSING = "closing"
    """One of the sides has said connection.close."""
    DETACHED = "detached"
    """The client is gone; branches still need the connection to the broker."""


class Session(ChannelOwner):
    """One client, from its protocol header to its end; arguments as of :class:`ProxiedClient`."""

    def __init__(
        self,
        manager: TransactionManager,
        store: RabbitStore,
        metrics: Metrics,
        limits: SessionLimits,
        transport: ClientTransport,
        header: bytes,
    ) -> None:
        super().__init__(manager, store, metrics, limits, transport, header)
        self.channels = {}
        self._plain: set[int] = set()
        """Channels whose frames pass unseen."""
        self._late_opens: deque[tuple[int, bytes]] = deque()
        self.upstream = upstream = ProxyUpstream(self, self._unopened, self.upstream_lost)
        self._agree_with_broker = upstream.agreed
        self.upstream.handlers[0] = ChannelZero(self._broker_said)
        self.stage = Stage.OPENING
        self._opening = Opening(store.broker, limits.max_channels, limits.frame_max)
        self._selecting = Selecting(self)
        self._header = header
        self._splitter = FrameSplitter(min(limits.frame_max or OPENING_FRAME, OPENING_FRAME), MOST_AT_ONCE)
        self._slices = Slices(self.refuse)
        """What was read from the client and is not handled yet."""
        self._slow = False
        self._goodbye: bytes | None = None
        """The client's connection.close, until it is passed on or answered."""
        self._leaving = False
        """The client has said connection.close."""
        self._left = False
        """The broker was told that nobody is left."""

    # -- opening

    async def connect(self) -> None:
        """Reach the broker and begin the handshake; the client hears it when the broker is not there."""
        self._set_timer(self.limits.handshake_timeout, self._too_slow)
        try:
            await self.store.broker.connect(self.upstream)
        except OSError as error:
            _log.warning(
                "broker cannot be reached", connection=self.id, broker=str(self.store.broker), reason=str(error)
            )
            self.upstream.is_lost = True
            self._end_client()
            self._over()
            return
        if self._transport is None:
            self.upstream.end("the client left during the handshake")
        self.upstream.write(self._header)

    def _unopened(self) -> int:
        return self._opening.client.channel_max - len(self.channels)

    def _broker_said(self, key: int, frame: bytes) -> None:
        match key:
            case methods.ConnectionStart.KEY | methods.ConnectionSecure.KEY | methods.ConnectionTune.KEY:
                self.to_client(self._opening.from_broker(key, frame))
            case methods.ConnectionOpenOk.KEY:
                if self.stage is Stage.OPENING and self._opened():  # else the client was refused, and stays so
                    self.to_client(frame)
            case methods.ConnectionClose.KEY:
                self.upstream.write(methods.ConnectionCloseOk().frame(0))
                self.stage = Stage.CLOSING if self.stage is not Stage.DETACHED else self.stage
                self.to_client(frame)
                self._expect_end()
            case methods.ConnectionCloseOk.KEY:
                self.to_client(frame)
                self.upstream.end("closed by the client")
                self._end_client()
            case methods.ConnectionBlocked.KEY | methods.ConnectionUnblocked.KEY:
                self.upstream.blocked = key == methods.ConnectionBlocked.KEY
                self.to_client(frame)
            case _:
                self.to_client(frame)

    def _tuned(self) -> None:
        agreed, client = self._opening.upstream, self._opening.client
        self._agree_with_broker(agreed)
        self.frame_max = self._splitter.max_frame = client.frame_max
        self._pulse.start(client.heartbeat)

    def _opened(self) -> bool:
        self.user = self._opening.user
        who = Who(self.user or "", self._opening.vhost)
        try:
            self._admit(who)
        except XaError as error:
            self.refuse(WireError(HardCode.NOT_ALLOWED, error.reason))
            return False
        self.who = who
        if self._transport is None or not self._transport.opened(who):
            self.refuse(WireError(HardCode.NOT_ALLOWED, "connection limit reached (--max-connections)"))
            return False
        self.stage = Stage.RUNNING
        self._cancel_timer()
        return True

    # -- from the client

    def client_data(self, data: bytes) -> None:
        """Octets from the client."""
        self._pulse.read = True
        if self._slow and self._transport is not None and self._transport.unsent > MAX_UNSENT:
            self.hold_client(self)
        self._slices.run(self._read(data))
        if self._slices.busy:
            self.hold_client(self._slices)
            self._slices.then(lambda: self.release_client(self._slices))

    def _read(self, data: bytes) -> Iterator[None]:
        split = partial(self._splitter.feed, data)
        while True:
            try:
                buffer, frames = split()
            except FrameError as error:
                yield from self._handle(error.buffer, error.frames)
                self.refuse(error)
                return
            if not frames:
                return
            yield from self._handle(buffer, frames)
            yield
            split = partial(self._splitter.more)

    def _handle(self, buffer: bytes, frames: Sequence[Frame]) -> Iterator[None]:
        try:
            yield from self._client_frames(buffer, frames)
        except NotOffered as error:
            _log.info("login refused", connection=self.id, reason=str(error))
            self._end_client()
        except Exception as error:  # noqa: BLE001 - what is no WireError is logged
            self.refuse(error)

    def _client_frames(self, buffer: bytes, frames: Sequence[Frame]) -> Iterator[None]:
        if self.unsettled.by_number:
            self.unsettled.from_client(buffer, frames)
        plain = self._plain
        begin = end_of_run = frames[0][2] if frames else 0
        for key, channel, start, end in frames:
            if channel in plain and key not in _TO_BROKER and key < _NO_BROKERS:
                end_of_run = end
                continue
            if end_of_run > begin:
                self._pass_to_broker(buffer, begin, end_of_run)
            begin = end_of_run = end
            self._client_frame(key, channel, buffer, start, end)
            yield
        if end_of_run > begin:
            self._pass_to_broker(buffer, begin, end_of_run)

    def _pass_to_broker(self, buffer: bytes, start: int, end: int) -> None:
        self.metrics.traffic.to_broker += end - start
        whole = start == 0 and end == len(buffer)
        self.upstream.write(buffer if whole else memoryview(buffer)[start:end])

    def _client_frame(self, key: int, number: int, buffer: bytes, start: int, end: int) -> None:
        if number == 0:
            self._client_said(key, buffer[start:end])
            return
        if self.stage not in (Stage.RUNNING, Stage.CUT_OFF):
            if self.stage is Stage.OPENING:
                raise WireError(HardCode.CHANNEL_ERROR, f"channel {number} before connection.open")
            return
        channel = self.channels.get(number)
        if channel is not None:
            channel.client_frame(key, buffer, start, end)
        elif key == methods.ChannelOpen.KEY:
            self._open_channel(number, buffer[start + 7 : end - 1])
        else:
            raise WireError(HardCode.CHANNEL_ERROR, f"channel {number} is not open")

    def _client_said(self, key: int, frame: bytes) -> None:
        if key == HEARTBEAT:
            return
        if self.stage is Stage.OPENING and key != methods.ConnectionClose.KEY:
            self.upstream.write(self._opening.from_client(key, frame))
            if key == methods.ConnectionTuneOk.KEY:
                self._tuned()
        elif self.stage is Stage.CLOSING:
            if key == methods.ConnectionCloseOk.KEY:
                self._end_client()
            elif key == methods.ConnectionClose.KEY:
                self.to_client(methods.ConnectionCloseOk().frame(0))
        elif key == methods.ConnectionClose.KEY:
            self._client_closes(frame)
        elif key in _ON_ZERO:
            self.upstream.write(frame)
        else:
            raise WireError(HardCode.COMMAND_INVALID, "method on channel 0 that has no place there")

    def _open_channel(self, number: int, payload: bytes) -> None:
        granted = self._opening.client.channel_max
        if number > granted:  # "Usable channel numbers are in the range 1..channel-max"
            raise WireError(HardCode.NOT_ALLOWED, f"channel {number} is above the negotiated channel_max ({granted})")
        reason = self.manager.quotas.excess(self.who.user, self.who.vhost, Resource.CHANNELS)
        if reason is not None:
            raise WireError(HardCode.NOT_ALLOWED, f"channel refused: {reason}")
        try:
            channel = Channel(self, number)
        except XaError as error:
            if self._drains():
                self._late_opens.append((number, payload))  # a number is about to be free
                return
            raise WireError(HardCode.RESOURCE_ERROR, error.reason) from error
        self.channels[number] = channel
        self.metrics.channels.inc()
        self.manager.quotas.add(self.who.user, self.who.vhost, Resource.CHANNELS)
        if self.stage is Stage.CUT_OFF:
            self.to_client(methods.ChannelOpenOk().frame(number))
        else:
            self.upstream.write(method_frame(channel.upstream_number, payload))

    # -- channels

    def drained(self) -> None:
        """An upstream channel number has become free."""
        if self._late_opens and self.stage is Stage.RUNNING:
            try:
                self._open_channel(*self._late_opens.popleft())
            except WireError as error:
                self.refuse(error)
        self._say_goodbye()

    def sort(self, channel: Channel) -> None:
        """A channel has changed: its frames pass unseen, or not any more."""
        if channel.passes:
            self._plain.add(channel.number)
        else:
            self._plain.discard(channel.number)

    def forget(self, channel: Channel) -> None:
        """A channel is closed on both sides."""
        if self.channels.get(channel.number) is channel:
            del self.channels[channel.number]
            self._plain.discard(channel.number)
            self._discount(channel)
        self._end_if_done()

    def _discount(self, channel: Channel) -> None:
        self._unwatch(channel)
        self.metrics.channels.dec()
        self.manager.quotas.remove(self.who.user, self.who.vhost, Resource.CHANNELS)
        if channel.mode is ChannelMode.DTX:
            self.metrics.selected_channels.dec()

    def _unwatch(self, channel: Channel) -> None:
        if channel.tally is not None:
            self.unsettled.drop(channel.number, channel.upstream_number, channel.tally)

    def replay(self, channel: Channel, backlog: Backlog) -> None:
        """Frames that waited behind a call of their channel, until one makes those behind it wait again."""
        until = time.monotonic() + SLICE_SECONDS
        try:
            while backlog:
                current = self.channels.get(channel.number)
                if current is not None and time.monotonic() >= until:
                    current.rest()
                if current is not None and not current.takes(backlog.first):
                    current.wait(backlog)
                    break
                key, frame = backlog.next()
                if current is not None:
                    current.client_frame(key, frame, 0, len(frame))
                elif key == methods.ChannelOpen.KEY:
                    self._open_channel(channel.number, frame[7:-1])
        except Exception as error:  # noqa: BLE001 - what is no WireError is logged
            self.refuse(error)
        current = self.channels.get(channel.number)
        if current is not None:
            self.sort(current)
        self._say_goodbye()

    async def select(self, channel: Channel) -> bytes:
        """dtx-demarcation.select; returns the answering frame.

        Raises:
            XaError: see :meth:`Selecting.select`.
        """
        selected = await self._selecting.select(channel)
        if selected is None:
            return b""
        self._unwatch(channel)
        self.channels[channel.number] = selected
        self.metrics.selected_channels.inc()
        return replying(methods.DtxSelectOk().frame(channel.number))

    def held_lost(self, branch: object, reason: str) -> None:
        """Deliveries that *branch* consumed went back to the broker: it can only be rolled back."""
        self.manager.doom(branch, f"deliveries that it consumed went back to the broker: {reason}")  # type: ignore[arg-type]

    def taking_ended(self) -> None:
        """A T is no more: perhaps nothing keeps the connection any longer."""
        if not self.upstream.is_lost:
            self._say_goodbye()
            self._end_if_done()

    def taking_rests(self) -> None:
        """A T has done what was asked of it, and holds what branches need: the client may go."""
        self._say_goodbye()

    # -- pace

    def client_is_slow(self) -> None:
        """The client takes no more for now: neither does dtx from the broker."""
        self._slow = True
        self.upstream.pause_reading(self)

    def client_has_caught_up(self) -> None:
        """The client takes data again."""
        self._slow = False
        self.release_client(self)
        self.upstream.resume_reading(self)

    # -- the end

    def refuse(self, error: Exception) -> None:
        """The client does not speak the protocol, or dtx has made a mistake, of which it is told no more: close."""
        if not isinstance(error, WireError):
            _log.error("connection failed", connection=self.id, exc_info=error)
            error = WireError(HardCode.INTERNAL_ERROR, "internal error")
        if self.stage in (Stage.CLOSING, Stage.DETACHED):
            return
        _log.info("connection refused", connection=self.id, reason=str(error))
        self.stop(closes.close_frame(error, 0))

    def stop(self, frame: bytes) -> None:
        """End the connection with connection.close; what branches hold is kept for them."""
        if self.stage is Stage.DETACHED:
            if self._takings():
                self.upstream.abort("dtx ends, and the branches that have not voted with it")
            return
        self.stage = Stage.CLOSING
        self.to_client(frame)
        self._let_channels_go()
        self._expect_end()

    def _expect_end(self) -> None:
        self._set_timer(_CLOSE_PATIENCE, self.abort)

    def _client_closes(self, frame: bytes) -> None:
        opening = self.stage is Stage.OPENING
        self.stage = Stage.CLOSING
        self._leaving = True
        if opening:
            self._confirm_close()
        else:
            self._goodbye = frame
            self._say_goodbye()

    def _say_goodbye(self) -> None:
        """The client wants to leave: what it sent before that comes first, and branches keep the connection."""
        if self._goodbye is None or any(channel.waits for channel in self.channels.values()):
            return
        takings = self._takings()
        selected = any(channel.mode is ChannelMode.DTX for channel in self.channels.values())
        if selected or any(taking.holds for taking in takings):
            self._let_channels_go()
            takings = self._takings()
        if not all(taking.rests for taking in takings) or (takings and self._drains()):
            return
        frame, self._goodbye = self._goodbye, None
        if takings or self.upstream.is_lost:
            self._confirm_close()
        else:
            self.upstream.write(frame)  # its answer passes back

    def _confirm_close(self) -> None:
        self.to_client(methods.ConnectionCloseOk().frame(0))
        self._end_client()

    def _takings(self) -> list[TakingChannel]:
        return [handler for handler in self.upstream.handlers.values() if isinstance(handler, TakingChannel)]

    def _drains(self) -> bool:
        """Whether the broker has still to do what was sent on a channel that is being closed."""
        return any(isinstance(handler, Drain) for handler in self.upstream.handlers.values())

    def client_gone(self) -> None:
        """The client's socket is closed."""
        self._transport = self._goodbye = None
        self._slices.then(self._detach)  # what the client has sent comes first

    def _detach(self) -> None:
        if self.stage is not Stage.DETACHED:
            opening = self.stage is Stage.OPENING
            self.stage = Stage.DETACHED
            self._pulse.stop()
            self._cancel_timer()
            self.upstream.resume_reading(self)
            if opening:
                _log.debug("the client left during the handshake", connection=self.id)
                self.upstream.end("the client left during the handshake")
            try:
                self._let_channels_go()
            finally:
                self._end_if_done()

    def _let_channels_go(self) -> None:
        """All of them, also where one raises: what the others are associated with would belong to nobody."""
        channels = list(self.channels.values())
        try:
            with ExitStack() as every:
                for channel in reversed(channels):
                    every.callback(self._let_go, channel)
                self.channels.clear()
                self._plain.clear()
        finally:
            Slices(self.refuse).run(self._lose_branches(channels))

    def _lose_branches(self, channels: Sequence[Channel]) -> Iterator[None]:
        for channel in channels:
            try:
                channel.lose_branches()
            except Exception:  # noqa: BLE001 - logged; what the others are associated with would belong to nobody
                _log.exception("channel failed", connection=self.id, channel=channel.number)
            yield

    def _let_go(self, channel: Channel) -> None:
        self._discount(channel)
        channel.let_go()

    def _end_if_done(self) -> None:
        if self.stage is not Stage.DETACHED:
            return
        if self.upstream.is_lost:
            self._over()
        elif not self._takings() and not self._left:
            # What the client sent is delivered first, however long that takes; heartbeats tell if the broker lives.
            self._left = True
            self._discount_connection()
            self.upstream.write(methods.ConnectionClose(200, b"bye").frame(0))

    def upstream_lost(self, reason: str) -> None:
        """The connection to the broker is gone: associations and held deliveries went with it."""
        self.release_client(self.upstream)
        self.send_late()
        if self._transport is not None and self.stage is Stage.RUNNING:
            _log.warning("connection to the broker lost", connection=self.id, reason=reason)
            if self.channels and all(channel.only_coordinates for channel in self.channels.values()):
                self.stage = Stage.CUT_OFF
                return
            error = WireError(HardCode.CONNECTION_FORCED, f"the connection to the broker is gone: {reason}")
            self.stop(closes.close_frame(error, 0))
        elif self._transport is not None and (self.stage is Stage.OPENING or self._leaving):
            self._end_client()
        if self.stage is Stage.DETACHED:
            self._over()
