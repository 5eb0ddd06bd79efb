"""A client's connection, and its connection to the broker.

The handshake passes through: the broker authenticates the client, and dtx reads user, virtual host and limits. After
the handshake, frames of channels without select are passed on as slices of the data that was read.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from enum import Enum
from typing import Final

from dtx.config.rules import QuotaResource
from dtx.config.values import Address
from dtx.manager import BranchManager, Requester
from dtx.server.alongside.broker_handshake import BrokerHandshake
from dtx.server.alongside.channel import ChannelOwner, ClosingChannel, ProxyChannel
from dtx.server.alongside.channel_selection import ChannelSelection
from dtx.server.alongside.pass_through import ChannelZero, ProxyUpstream
from dtx.server.client_session import ClientTransport
from dtx.server.failpoints import around_reply
from dtx.server.limits import MAX_UNSENT, SessionLimits
from dtx.store.rabbitmq.consume_channel import ConsumeChannel
from dtx.store.rabbitmq.store import RabbitStore
from dtx.store.slices import Slices
from dtx.telemetry import Metrics, get_logger
from dtx.wire.amqp09 import closes, methods
from dtx.wire.amqp09.channel import ChannelEngine, Passing
from dtx.wire.amqp09.codec import ChannelMode
from dtx.wire.amqp09.endpoint import EndpointState
from dtx.wire.amqp09.errors import HardCode, WireError
from dtx.wire.amqp09.events import (
    ChannelClosed,
    ChannelClosing,
    ChannelFailed,
    ChannelOpened,
    ConnectionClosed,
    ConnectionClosing,
    ConnectionFailed,
    ConnectionMethodReceived,
    ContentReceived,
    ContentStarted,
    EngineEvent,
    FramePassed,
    FramesPassed,
    MethodReceived,
)
from dtx.wire.amqp09.frames import with_channel
from dtx.wire.amqp09.handshake import NotOffered
from dtx.xa.codes import XaError

_log = get_logger(part="session")

_ON_CHANNEL: Final = (MethodReceived, ContentStarted, ContentReceived)
_STRIDE: Final = 0.001
"""Seconds of work before the client's turn may end."""
_CLOSE_PATIENCE: Final = 5.0
"""Seconds that a client has to confirm connection.close."""


class ProxyStage(Enum):
    """The state of a connection, for operators."""

    OPENING = "opening"
    RUNNING = "running"
    CUT_OFF = "cut off"
    """The connection to the broker is lost; the client only uses dtx-coordination, which still works."""
    CLOSING = "closing"
    """One side has sent close."""
    DETACHED = "detached"
    """The client has gone; branches still need the connection to the broker."""


class ProxySession(ChannelOwner):
    """One client connection, from its protocol header to its end. Arguments: see :class:`ProxiedClient`."""

    def __init__(
        self,
        manager: BranchManager,
        store: RabbitStore,
        metrics: Metrics,
        limits: SessionLimits,
        transport: ClientTransport,
        header: bytes,
    ) -> None:
        super().__init__(manager, store, metrics, limits, transport, header)
        self.channels = {}
        self._late_opens: deque[ChannelEngine] = deque()
        """Channels that wait for a free upstream channel number."""
        self.upstream = upstream = ProxyUpstream(self, self._unopened, self.upstream_lost)
        self._agree_with_broker = upstream.agreed
        self.upstream.handlers[0] = ChannelZero(self._on_broker_frame)
        self._opening = BrokerHandshake(self.engine, store.broker, limits, manager.log.member)
        self._selecting = ChannelSelection(self)
        self._host: Address | None = None
        """The node of the broker that it is connected to."""
        self._slices = Slices(self.refuse)
        """Data of the client that is not yet handled."""
        self._slow = False
        self._pending_close: methods.ConnectionClose | None = None
        """The client's connection.close, until it is passed on or answered."""
        self._detached = False
        """The client has gone; branches may still need the connection to the broker."""
        self._left = False
        """connection.close was sent to the broker after the client had gone."""

    @property
    def stage(self) -> ProxyStage:
        """See :class:`ProxyStage`."""
        if self._detached:
            return ProxyStage.DETACHED
        match self.engine.state:
            case EndpointState.OPENING:
                return ProxyStage.OPENING
            case EndpointState.OPEN:
                return ProxyStage.CUT_OFF if self.upstream.is_lost else ProxyStage.RUNNING
            case _:
                return ProxyStage.CLOSING

    # -- opening

    async def connect(self) -> None:
        """Connect to the broker and start the handshake; closes the client's socket if the broker does not answer."""
        self._set_timer(self.limits.handshake_timeout, self._too_slow)
        try:
            self._host = await self.store.broker.connect(self.upstream)
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
        self.upstream.write(self.engine.protocol.value)
        broker = self.store.broker
        if len(broker.hosts) > 1:
            asyncio.get_running_loop().call_later(broker.connect_timeout, self._give_up_node, self._host)

    def _give_up_node(self, host: Address) -> None:
        """End the connection if the node hangs, although its system accepts connections: the client tries again."""
        if not self._opening.begun and not self.upstream.is_lost:
            self.store.broker.failed(host)
            self.abort()

    def _unopened(self) -> int:
        return self.engine.agreed.channel_max - len(self.channels)

    def _on_broker_frame(self, key: int, frame: bytes) -> None:
        match key:
            case methods.ConnectionStart.KEY | methods.ConnectionSecure.KEY | methods.ConnectionTune.KEY:
                self._opening.from_broker(key, frame[7:-1])
            case methods.ConnectionOpenOk.KEY:
                if self.engine.state is EndpointState.OPENING and self._opened():  # otherwise the client was refused
                    self.engine.open_ok()
            case methods.ConnectionClose.KEY:
                self.upstream.write(methods.ConnectionCloseOk().frame(0))
                if self.engine.state is EndpointState.CLOSE_RECEIVED:
                    self._confirm_close()
                else:
                    self.engine.close(frame)
                    self._expect_end()
            case methods.ConnectionCloseOk.KEY:
                self.engine.close_ok()
                self.flush()
                self.upstream.end("closed by the client")
                self._end_client()
            case methods.ConnectionBlocked.KEY | methods.ConnectionUnblocked.KEY:
                self.upstream.blocked = key == methods.ConnectionBlocked.KEY
                self.engine.send(frame)
            case _:
                self.engine.send(frame)
        self.flush()

    def _on_handshake(self, event: EngineEvent) -> None:
        """Pass the client's next step of the handshake on to the broker."""
        method = self._opening.from_client(event)
        self.upstream.write(method.frame(0))
        if isinstance(method, methods.ConnectionTuneOk):
            self._agree_with_broker(method)
            self._tick()

    def _opened(self) -> bool:
        self.user = self._opening.user
        who = Requester(self.user or "", self._opening.vhost)
        try:
            self._admit(who)
        except XaError as error:
            self.refuse(WireError(HardCode.NOT_ALLOWED, error.reason))
            return False
        self.who = who
        self.engine.memory = self.budget
        if self._transport is None or not self._transport.opened(who):
            self.refuse(WireError(HardCode.NOT_ALLOWED, "connection limit reached (--max-connections)"))
            return False
        self._cancel_timer()
        return True

    # -- from the client

    def client_data(self, data: bytes) -> None:
        """See :class:`ClientSession`."""
        if self._slow and self._transport is not None and self._transport.unsent > MAX_UNSENT:
            self.hold_client(self)
        self._run(self.engine.receive(data))

    def handle_waiting(self) -> None:
        """See :class:`ChannelOwner`."""
        if self.engine.behind and not self._slices.busy:
            self._run(self.engine.events())

    def _run(self, events: Iterator[EngineEvent]) -> None:
        if not self._slices.run(self._handle(events)):
            self.hold_client(self._slices)
            self._slices.then(lambda: self.release_client(self._slices))

    def _handle(self, events: Iterator[EngineEvent]) -> Iterator[None]:
        engine = self.engine
        while True:
            until = time.monotonic() + _STRIDE
            try:
                for event in events:
                    if isinstance(event, FramesPassed):
                        self._pass_to_broker(event)
                    elif isinstance(event, FramePassed):
                        self._receive(event)
                    elif isinstance(event, _ON_CHANNEL):
                        self.channels[event.channel].receive(event)
                    else:
                        self._on(event)
                    if engine.wants_to_send:
                        self.flush()  # at once, because the next frames of the broker may begin a message
                    if time.monotonic() >= until:
                        yield
                        until = time.monotonic() + _STRIDE
            except NotOffered as error:
                _log.info("login refused", connection=self.id, reason=str(error))
                self._end_client()
            except Exception as error:  # noqa: BLE001 - refuse() logs all but WireError
                self.refuse(error)
            if engine.wants_to_send:
                self.flush()
            if engine.wants_pause:
                self.hold_client(engine)
            elif self._holding:
                self.release_client(engine)
            if not engine.behind:
                return
            yield
            events = engine.receive(b"")

    def _pass_to_broker(self, event: FramesPassed) -> None:
        buffer, start, end = event.buffer, event.start, event.end
        if self.unsettled.by_number:
            self.unsettled.from_client(buffer, event.frames)
        if self.consuming.by_number:
            self.consuming.from_client(buffer, event.frames)
        self.metrics.traffic.to_broker += end - start
        whole = start == 0 and end == len(buffer)
        self.upstream.write(buffer if whole else memoryview(buffer)[start:end])

    def _receive(self, event: FramePassed) -> None:
        number = event.channel
        if self.unsettled.by_number:
            self.unsettled.from_client(event.buffer, ((event.key, number, event.start, event.end),))
        if self.consuming.by_number:
            self.consuming.from_client(event.buffer, ((event.key, number, event.start, event.end),))
        channel = self.channels.get(number)
        if channel is not None:
            channel.receive(event)
        else:  # it has waited for an upstream channel number
            self._open_channel(number)

    def _on(self, event: EngineEvent) -> None:
        match event:
            case ChannelClosing() | ChannelClosed() | ChannelFailed():
                self.channels[event.channel].receive(event)
            case ChannelOpened(number):
                self._open_channel(number)
            case ConnectionMethodReceived(method):
                self.upstream.write(method.frame(0))
            case ConnectionClosing(close):
                self._client_closes(close)
            case ConnectionFailed(error):
                _log.info("connection refused", connection=self.id, reason=str(error))
                self.stop(b"")
            case ConnectionClosed():
                self._end_client()
            case _:
                self._on_handshake(event)

    def _open_channel(self, number: int) -> None:
        holdings = self.manager.quotas.of(self.who.user, self.who.vhost)
        reason = holdings.excess(QuotaResource.CHANNELS)
        if reason is not None:
            raise WireError(HardCode.NOT_ALLOWED, f"channel refused: {reason}")
        engine, frame = self.engine.channel(number), methods.ChannelOpen().frame(number)
        try:
            channel = ProxyChannel(self, engine)
        except XaError as error:
            if not self._drains():
                raise WireError(HardCode.RESOURCE_ERROR, error.reason) from error
            self._late_opens.append(engine)  # a number will be free soon
            engine.pass_frames(Passing.SINGLY)
            engine.hold()
            engine.put_back(methods.ChannelOpen.KEY, frame)
            return
        self.channels[number] = channel
        self.metrics.channels.inc()
        holdings.add(QuotaResource.CHANNELS)
        if self.upstream.is_lost:
            engine.open_ok()
        else:
            self.upstream.write(with_channel(frame, channel.upstream_number))

    # -- channels

    def drained(self) -> None:
        """See :class:`ChannelOwner`."""
        if self._late_opens:
            self._late_opens.popleft().release()
            self.handle_waiting()
        self._answer_close()

    def forget(self, channel: ProxyChannel) -> None:
        """See :class:`ChannelOwner`."""
        if self.channels.get(channel.number) is channel:
            del self.channels[channel.number]
            channel.engine.end()
            self._discount(channel)
        self._end_if_done()

    def _discount(self, channel: ProxyChannel) -> None:
        self._unwatch(channel)
        self.metrics.channels.dec()
        self.manager.quotas.of(self.who.user, self.who.vhost).remove(QuotaResource.CHANNELS)
        if channel.mode is ChannelMode.DTX:
            self.metrics.selected_channels.dec()

    def _unwatch(self, channel: ProxyChannel) -> None:
        if channel.tally is not None:
            self.unsettled.drop(channel.number, channel.upstream_number, channel.tally)
        channel.end_deliveries()

    async def select(self, channel: ProxyChannel) -> bytes:
        """See :class:`ChannelOwner`."""
        selected = await self._selecting.select(channel)
        if selected is None:
            return b""
        self._unwatch(channel)
        self.channels[channel.number] = selected
        self.metrics.selected_channels.inc()
        return around_reply(methods.DtxSelectOk().frame(channel.number))

    def held_lost(self, branch: object, reason: str) -> None:
        """See :class:`Keeper`: *branch* can only be rolled back."""
        self.manager.doom(branch, f"deliveries that it consumed went back to the broker: {reason}")  # type: ignore[arg-type]

    def consume_channel_ended(self) -> None:
        """See :class:`Keeper`: the connection may be able to end."""
        if not self.upstream.is_lost:
            self._answer_close()
            self._end_if_done()

    def consume_channel_idle(self) -> None:
        """See :class:`Keeper`: the client's close may be answered."""
        self._answer_close()

    def recorded(self, deliveries: object) -> None:
        """See :class:`ProxiedClient`."""
        self.release_client(deliveries)
        if not self.upstream.is_lost:
            self._answer_close()
            self._end_if_done()

    # -- flow control

    def client_is_slow(self) -> None:
        """Stop reading from the broker, because the client is slow."""
        self._slow = True
        self.upstream.pause_reading(self)

    def client_has_caught_up(self) -> None:
        """Read from the broker again."""
        self._slow = False
        self.release_client(self)
        self.upstream.resume_reading(self)

    # -- the end

    def refuse(self, error: Exception) -> None:
        """Close the connection after a protocol error, or after an unexpected exception, which is logged."""
        if not isinstance(error, WireError):
            _log.error("connection failed", connection=self.id, exc_info=error)
            error = WireError(HardCode.INTERNAL_ERROR, "internal error")
        if self.engine.state in (EndpointState.OPENING, EndpointState.OPEN):
            _log.info("connection refused", connection=self.id, reason=str(error))
            self.stop(closes.close_frame(error, 0))

    def stop(self, frame: bytes) -> None:
        """End the connection with *frame*, a connection.close; branches keep their deliveries.

        If the client has gone, this aborts the connection to the broker, and branches that have not voted lose them.
        """
        if self._detached:
            if self._takings():
                self.upstream.abort("dtx ended the connection")
            return
        self.engine.close(frame)
        self.flush()
        self._release_channels()
        self._expect_end()

    def _expect_end(self) -> None:
        self.release_client(self.engine)  # no channel waits any more, and the client's close-ok must be read
        self._set_timer(_CLOSE_PATIENCE, self.abort)

    def _client_closes(self, close: methods.ConnectionClose) -> None:
        if self._admitted is None:
            self._confirm_close()
        else:
            self._pending_close = close
            self._answer_close()

    def _answer_close(self) -> None:
        """Answer the client's close, or pass it on, as soon as upstream channels allow that."""
        if self._pending_close is None:
            return
        takings = self._takings()
        selected = any(channel.mode is ChannelMode.DTX for channel in self.channels.values())
        if selected or any(taking.holds for taking in takings):
            self._release_channels()
            takings = self._takings()
        rests = all(taking.only_holds for taking in takings) and not self.consuming.is_recording
        if not rests or (takings and self._drains()):
            return
        close, self._pending_close = self._pending_close, None
        if takings or self.upstream.is_lost:
            self._confirm_close()
        else:
            self.upstream.write(close.frame(0))  # the broker's close-ok is passed on to the client

    def _confirm_close(self) -> None:
        self.engine.close_ok()
        self.flush()
        self._end_client()

    def _takings(self) -> list[ConsumeChannel]:
        return [handler for handler in self.upstream.handlers.values() if isinstance(handler, ConsumeChannel)]

    def _drains(self) -> bool:
        """Whether the broker has not yet confirmed the close of an upstream channel."""
        return any(isinstance(handler, ClosingChannel) for handler in self.upstream.handlers.values())

    def client_disconnected(self) -> None:
        """See :class:`ClientSession`."""
        self._transport = self._pending_close = None
        self._slices.then(self._detach)  # after everything that the client has sent

    def _detach(self) -> None:
        if not self._detached:
            self._detached = True
            opening = self.engine.state is EndpointState.OPENING
            self.engine.end()
            if self._beat is not None:
                self._beat.cancel()
            self._cancel_timer()
            self.upstream.resume_reading(self)
            if opening:
                _log.debug("the client left during the handshake", connection=self.id)
                self.upstream.end("the client left during the handshake")
            try:
                self._release_channels()
            finally:
                self._end_if_done()

    def _release_channels(self) -> None:
        """Release all channels, even if one raises: otherwise the associations of the others would never end."""
        channels = list(self.channels.values())
        try:
            with ExitStack() as every:
                for channel in reversed(channels):
                    every.callback(self._release_channel, channel)
                self.channels.clear()
        finally:
            Slices(self.refuse).run(self._lose_branches(channels))

    def _lose_branches(self, channels: Sequence[ProxyChannel]) -> Iterator[None]:
        for channel in channels:
            try:
                channel.end_associations()
            except Exception:  # noqa: BLE001 - logged; the associations of the other channels must end
                _log.exception("channel failed", connection=self.id, channel=channel.number)
            yield

    def _release_channel(self, channel: ProxyChannel) -> None:
        self._discount(channel)
        channel.shut_down()

    def _end_if_done(self) -> None:
        if not self._detached:
            return
        if self.upstream.is_lost:
            self._over()
        elif not self._takings() and not self._left and not self.consuming.is_recording:
            # The broker first handles what the client sent. That has no time limit; heartbeats detect a dead broker.
            self._left = True
            self._discount_connection()
            self.upstream.write(methods.ConnectionClose(200, b"bye").frame(0))

    def upstream_lost(self, reason: str) -> None:
        """Handle the loss of the connection to the broker: close the client, unless it only uses dtx-coordination."""
        self.release_client(self.upstream)
        self.send_late()
        if self._transport is not None and self.engine.state is EndpointState.OPEN:
            _log.warning("connection to the broker lost", connection=self.id, reason=reason)
            if self._host is not None:
                self.store.broker.failed(self._host)
            if self.channels and all(channel.only_coordinates for channel in self.channels.values()):
                return
            error = WireError(HardCode.CONNECTION_FORCED, f"the connection to the broker is gone: {reason}")
            self.stop(closes.close_frame(error, 0))
        elif self.engine.state in (EndpointState.OPENING, EndpointState.CLOSE_RECEIVED):
            self._end_client()
        if self._detached:
            self._over()
