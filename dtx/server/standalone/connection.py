"""A client's connection in standalone mode: the server's end of AMQP 0-9 and 0-9-1.

The engine implements the protocol. The frames of one read are handled in one pass; their publishes and acknowledgements
are one record of the log. The data for the client is joined into one write per turn of the event loop. dtx stops
reading from a client that does not read, or that sends more than the log can take.
"""

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import dtx
from dtx.auth.accounts import Account, LoginRefused
from dtx.config.rules import QuotaResource
from dtx.log.api import LogError
from dtx.manager import Requester
from dtx.server.client_session import ClientTransport
from dtx.server.connection import ClientConnection, Stage
from dtx.server.limits import HEARTBEAT, MAX_FRAME
from dtx.server.standalone.access import Access
from dtx.server.standalone.broker import remove_own
from dtx.server.standalone.channel import StandaloneChannel
from dtx.server.standalone.client import Client, Parts
from dtx.server.standalone.writes import Writes
from dtx.store.slices import SLICE_SECONDS
from dtx.telemetry import get_logger
from dtx.wire.amqp09 import closes, handshake, methods
from dtx.wire.amqp09.codec import Method
from dtx.wire.amqp09.connection import ConnectionEngine
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
    EngineEvent,
    LoginReceived,
    MethodReceived,
    PeerSilent,
    TuneAgreed,
    VhostRequested,
)
from dtx.wire.amqp09.frames import OPENING_FRAME, Protocol
from dtx.wire.amqp09.settings import EngineSettings, PeerEnd
from dtx.xa.codes import XaError

_log = get_logger(part="connection")

_CLOSE_PATIENCE: Final = 5.0
"""Seconds in which a client must confirm connection.close."""
_REFUSED_PAUSE: Final = 3.0
"""Seconds from a failed login to the end of the socket if the client cannot be told, as in RabbitMQ."""
_RUNNING: Final = Stage.RUNNING
_ON_CHANNEL: Final = (MethodReceived, ContentReceived)
_BEHIND: Final = "frames wait"
"""The reason to stop reading while frames of earlier reads wait."""
_BLOCKED_AFTER: Final = 1.0
"""Seconds of back-pressure by the log before dtx sends connection.blocked."""
_CAPABILITIES: Final = (
    b"publisher_confirms",
    b"exchange_exchange_bindings",
    b"basic.nack",
    b"consumer_cancel_notify",
    b"connection.blocked",
    b"consumer_priorities",
    b"authentication_failure_close",
    b"per_consumer_qos",
    b"direct_reply_to",
    handshake.CAPABILITY,
)
_GREETING: Final = methods.ConnectionStart(
    0,
    9,
    handshake.server_properties(
        {
            b"product": b"dtx",
            b"version": dtx.__version__.encode(),
            b"platform": b"Python",
            b"information": b"Licensed under the Apache License 2.0",
        },
        _CAPABILITIES,
    ),
    b" ".join(handshake.PASSED),
    b"en_US",
)


class StandaloneConnection(ClientConnection):
    """One client, from its protocol header to its end.

    Args:
        parts: the objects that all connections share.
        transport: the client's socket.
    """

    def __init__(self, parts: Parts, transport: ClientTransport) -> None:
        super().__init__(parts.manager, transport)
        limits = parts.limits
        self.channels: dict[int, StandaloneChannel] = {}
        self.client: Client
        """Set when the client enters a virtual host, as is *writes*."""
        self.writes: Writes
        self._parts = parts
        self._offer = methods.ConnectionTune(limits.max_channels, limits.frame_max or MAX_FRAME, HEARTBEAT)
        self._engine = ConnectionEngine(
            EngineSettings(
                opening_frame=min(self._offer.frame_max, OPENING_FRAME),
                max_message=limits.max_message_bytes,
                close_overtakes=False,
            ),
            PeerEnd.SERVER,
        )
        self.outbox.source = self._engine.data_to_send
        self._account: Account | None = None
        self._greeted = False
        self._handling = False
        """Whether events of the engine are being handled."""
        self._awaited = False
        """Whether the rest is handled in another turn of the loop."""
        self._blocked_sent = False
        self._blocked_timer: asyncio.TimerHandle | None = None
        self._tick_timer: asyncio.TimerHandle | None = None

    # -- events of the engine

    async def connect(self) -> None:
        """Begin the handshake."""
        if not self._greeted:
            self._greet()

    def _greet(self) -> None:
        self._greeted = True
        self._set_timer(self._parts.limits.handshake_timeout, self._too_slow)
        for _ in self._engine.receive(Protocol.AMQP_0_9_1.value):
            raise AssertionError("a header means nothing else")
        self._engine.greet(_GREETING)
        self.outbox.announce()

    def client_data(self, data: bytes) -> None:
        """Handle bytes from the client."""
        if not self._greeted:
            self._greet()
        if self.outbox.is_slow:
            self._hold_if_it_reads_nothing()
        events = self._engine.receive(data)
        if not self._awaited:
            self._handle(events)

    def _handle_waiting(self) -> None:
        """Handle the frames that waited for a channel."""
        if self._handling or self._awaited:
            return
        if self._engine.behind:
            self._handle(self._engine.events())
        elif self.stage is _RUNNING:
            self.writes.flush()

    def _catch_up(self) -> None:
        self._awaited = False
        if self.stage is not Stage.ENDED:
            self._handle(self._engine.receive(b""))

    def _handle(self, events: Iterable[EngineEvent]) -> None:
        """Handle *events* for at most one slice. The rest is handled in later turns of the event loop."""
        until = time.monotonic() + SLICE_SECONDS
        self._handling = True
        try:
            for event in events:
                if not isinstance(event, _ON_CHANNEL):
                    self._on(event)
                else:
                    channel = self.channels[event.channel]
                    try:
                        channel.receive(event)
                    except XaError as error:
                        channel.order.refuse(error, event.method.KEY)
                    except WireError as error:
                        self.refuse(error, event.method.KEY)
                if time.monotonic() >= until:
                    break
        except WireError as error:
            self.refuse(error)
        except Exception as error:  # noqa: BLE001 - logged; the client gets no details
            _log.exception("connection failed", connection=self.id)
            self.refuse(error)
        self._handling = False
        if self.stage is _RUNNING:
            self.writes.flush()
        engine = self._engine
        if not self.outbox.is_announced and engine.wants_to_send:
            self.outbox.announce()
        if self._holding or engine.is_pressed:
            self._pace()

    def _pace(self) -> None:
        engine, behind = self._engine, self._engine.behind
        if engine.wants_pause:
            self.hold_client(engine)
        else:
            self.release_client(engine)
        if not behind:
            self.release_client(_BEHIND)
        elif not self._awaited:
            self._awaited = True
            self.hold_client(_BEHIND)
            asyncio.get_running_loop().call_soon(self._catch_up)

    def _on(self, event: EngineEvent) -> None:
        match event:
            case ChannelOpened():
                self._open_channel(event.channel)
            case ChannelClosing():
                self._close_channel(self.channels[event.channel])
            case ChannelFailed():
                channel = self.channels[event.channel]
                channel.order.refused(event.error)
                channel.shut_down()
            case ChannelClosed():
                self._forget(self.channels[event.channel])
            case _:
                self._on_connection(event)

    def _on_connection(self, event: EngineEvent) -> None:
        match event:
            case ConnectionClosing():
                self._client_closes()
            case ConnectionFailed():
                _log.info("connection refused", connection=self.id, reason=str(event.error))
                self._close(b"")
            case ConnectionClosed():
                self._end()
            case PeerSilent():
                _log.info("client missed its heartbeats", connection=self.id)
                self.abort()
            case LoginReceived():
                self._receive_login(event.login)
            case TuneAgreed():
                self.agreed = event.tune
                self._tick()
            case VhostRequested():
                self._enter(event.vhost)
            case ConnectionMethodReceived(method=methods.ConnectionUpdateSecret()):
                # As in RabbitMQ, the password is checked only at login. `recheck` ends connections of deleted users.
                self._send(methods.ConnectionUpdateSecretOk())
            case ConnectionMethodReceived():
                raise WireError(HardCode.COMMAND_INVALID, "method is illegal on channel 0")
            case _:
                raise AssertionError(f"unexpected event {event}")

    def _send(self, method: Method) -> None:
        """Send *method* on channel 0."""
        self._engine.send(method.frame(0))
        self.outbox.announce()

    # -- opening

    def _receive_login(self, start_ok: methods.ConnectionStartOk) -> None:
        self.start_ok = replace(start_ok, response=b"")
        try:
            credentials = handshake.credentials(start_ok.mechanism, start_ok.response)
        except handshake.NotOffered as error:
            _log.info("login refused", connection=self.id, reason=str(error))
            self._end()
        else:
            self._login = self.manager.spawn(self._log_in(credentials))

    async def _log_in(self, credentials: handshake.Credentials | None) -> None:
        transport = self._transport
        if transport is None:
            return
        try:
            if credentials is None:
                self._parts.accounts.refused_logins += 1
                _log.info("login refused", connection=self.id, reason="the SASL response names no user")
                raise LoginRefused("the SASL response names no user")
            self._account = await self._parts.accounts.authenticate(
                credentials.user, credentials.password, loopback=transport.is_local, peer=transport.peer
            )
        except LoginRefused as error:
            self._refuse_login(str(error))
        except LogError as error:
            _log.warning("no client can log in", connection=self.id, reason=str(error))
            self.refuse(WireError(HardCode.INTERNAL_ERROR, "the user database is not available"))
        else:
            self._engine.tune(self._offer)
            self.outbox.announce()

    def _refuse_login(self, reason: str) -> None:
        if self.stage is Stage.OPENING:
            self.stage = Stage.CLOSING
            close_sent = self._engine.refuse_login(reason)
            self.outbox.announce()
            self._set_timer(_CLOSE_PATIENCE if close_sent else _REFUSED_PAUSE, self.abort)

    def _enter(self, name: bytes) -> None:
        account = self._account
        assert account is not None, "connection.open is expected after the login only"
        try:
            vhost = name.decode()
        except UnicodeDecodeError:
            raise WireError(HardCode.NOT_ALLOWED, "the name of the vhost is not UTF-8") from None
        if not self._parts.accounts.has_vhost(vhost):
            raise WireError(HardCode.NOT_ALLOWED, f"vhost {vhost} not found")
        if not account.may_enter(vhost):
            raise WireError(HardCode.NOT_ALLOWED, f"access to vhost '{vhost}' refused for user '{account.name}'")
        who = Requester(account.name, vhost)
        try:
            self._admit(who)
        except XaError as error:
            raise WireError(HardCode.NOT_ALLOWED, error.reason) from error
        self.who = who
        if self._transport is None or not self._transport.opened(who):
            raise WireError(HardCode.NOT_ALLOWED, "connection limit reached (--max-connections)")
        self._cancel_timer()
        broker, engine = self._parts.broker, self._engine
        found = broker.virtual_host(vhost)
        self.writes = Writes(vhost, broker, self.budget, self._throttle)
        self.client = Client(
            parts=self._parts,
            connection=self.id,
            who=who,
            vhost=found,
            access=Access(self._parts.accounts, account, found),
            writes=self.writes,
            budget=self.budget,
            frame_max=engine.agreed.frame_max,
            consumer_cancel_notify=b"consumer_cancel_notify" in engine.capabilities,
            outbox=self.outbox,
            slices=self.slices,
            handle_waiting=self._handle_waiting,
            fail=self.refuse,
            wait_for_disk=self._wait_for_disk,
        )
        engine.memory = self.budget
        self.stage = Stage.RUNNING
        engine.open_ok()

    def recheck(self) -> None:
        """Close the connection if its user was deleted or may not enter the vhost any more."""
        if self.stage is Stage.RUNNING:
            account, user, vhost = self.client.account, self.who.user, self.who.vhost
            if not (account.exists and account.may_enter(vhost)):
                reason = f"user '{user}' may not be in vhost '{vhost}' any more"
                self.refuse(WireError(HardCode.CONNECTION_FORCED, reason))

    # -- channels

    def _open_channel(self, number: int) -> None:
        holdings = self.manager.quotas.of(self.who.user, self.who.vhost)
        reason = holdings.excess(QuotaResource.CHANNELS)
        if reason is not None:
            raise WireError(HardCode.NOT_ALLOWED, f"channel refused: {reason}")
        holdings.add(QuotaResource.CHANNELS)
        engine = self._engine.channel(number)
        self.channels[number] = StandaloneChannel(self.client, engine)
        self._parts.metrics.channels.inc()
        engine.open_ok()

    def _close_channel(self, channel: StandaloneChannel) -> None:
        """The client closes a channel. close-ok is sent when its earlier writes are durable."""
        self.writes.flush()
        channel.shut_down()
        self.slices.then(lambda: self.writes.then(lambda: self._confirm_close_of(channel)))

    def _confirm_close_of(self, channel: StandaloneChannel) -> None:
        if channel.engine.state is EndpointState.CLOSE_RECEIVED:
            channel.engine.close_ok()
            self.outbox.announce()
            self._forget(channel)

    def _forget(self, channel: StandaloneChannel) -> None:
        """Remove a channel that is closed on both sides."""
        del self.channels[channel.number]
        self._discount_channel()

    def _discount_channel(self) -> None:
        self._parts.metrics.channels.dec()
        self.manager.quotas.of(self.who.user, self.who.vhost).remove(QuotaResource.CHANNELS)

    # -- pace

    def _reset_heartbeat(self) -> None:
        self._engine.note_received()

    def _tick(self) -> None:
        """Send a heartbeat when it is due, and check that the client sends."""
        if self._holding:
            self._engine.note_received()
        deadline, events = self._engine.tick(now := time.monotonic())
        self.outbox.announce()
        if deadline is not None:
            self._tick_timer = asyncio.get_running_loop().call_later(max(0.0, deadline - now), self._tick)
        for event in events:
            self._on(event)

    def _throttle(self, much: bool) -> None:
        """Stop or resume reading, depending on whether too *much* waits for the log."""
        if much:
            self.hold_client(self.writes)
            self._blocked_timer = asyncio.get_running_loop().call_later(_BLOCKED_AFTER, self._send_blocked)
            return
        if self._blocked_timer is not None:
            self._blocked_timer.cancel()
        self._read_on(self.writes)

    def _send_blocked(self, reason: bytes = b"messages wait to be written") -> None:
        supports_blocked = b"connection.blocked" in self._engine.capabilities
        if supports_blocked and self.stage is Stage.RUNNING and not self._blocked_sent:
            self._blocked_sent = True
            self._send(methods.ConnectionBlocked(reason))

    def _wait_for_disk(self) -> None:
        """Stop reading from a client that publishes while the disk is nearly full, until there is room again.

        As in RabbitMQ, other clients are served as before. They can consume messages, which makes room.
        """
        self.hold_client(self.manager.disk)
        self.manager.disk.wait(self._disk_has_room)
        self._send_blocked(b"low on disk")

    def _disk_has_room(self) -> None:
        self._read_on(self.manager.disk)

    def _read_on(self, reason: object) -> None:
        """Remove *reason*. If no other reason is left, read again and send connection.unblocked."""
        self.release_client(reason)
        if self._blocked_sent and not {self.writes, self.manager.disk} & self._holding:
            self._blocked_sent = False
            self._send(methods.ConnectionUnblocked())

    def _resume(self) -> None:
        for channel in list(self.channels.values()):
            channel.consuming.resume()

    # -- the end

    def _work_failed(self, error: Exception) -> None:
        _log.error("connection failed", connection=self.id, exc_info=error)
        self.refuse(error)

    def refuse(self, error: Exception, key: int = 0) -> None:
        """Send connection.close, unless the connection is closing already.

        Args:
            error: the reason.
            key: class << 16 | method of the client's method; 0 if no method is the reason.
        """
        if self.stage in (Stage.OPENING, Stage.RUNNING):
            _log.info("connection refused", connection=self.id, reason=str(error))
            self.stop(closes.close_frame(error, 0, key))

    def stop(self, frame: bytes) -> None:
        """Close the connection with *frame*, a connection.close. Idempotent."""
        if self.stage not in (Stage.CLOSING, Stage.ENDED):
            self._close(frame)

    def _close(self, frame: bytes) -> None:
        self._leave(Stage.CLOSING)
        self._engine.close(frame)
        self.release_client(self._engine)  # no channel waits any more, and the client's close-ok must be read
        self.outbox.announce()
        self._set_timer(_CLOSE_PATIENCE, self.abort)

    def _client_closes(self) -> None:
        if self.stage is Stage.OPENING:
            self._confirm_close()
        else:
            self._leave(Stage.LEAVING)
            self.after_work(lambda: self.writes.then(self._confirm_close))

    def _confirm_close(self) -> None:
        self._engine.close_ok()
        self._end()

    def _leave(self, stage: Stage) -> None:
        """Write what the client has sent so far, close its channels, and delete its exclusive queues."""
        running = self.stage is Stage.RUNNING
        self.stage = stage
        if running:
            self.writes.flush()
            channels = list(self.channels.values())
            self.channels.clear()
            self.slices.run(self._shut_down_channels(channels))
            remaining = remove_own(self._parts.broker, self.manager, self.client.vhost, self.client)
            self.after_work(lambda: self.slices.run(remaining))
        if stage is Stage.ENDED:
            self._engine.end()

    def _shut_down_channels(self, channels: Sequence[StandaloneChannel]) -> Iterator[None]:
        for channel in channels:
            self._discount_channel()
            try:
                channel.shut_down()
            except Exception:  # noqa: BLE001 - the other channels must still end their associations
                _log.exception("channel failed", connection=self.id, channel=channel.number)
            yield

    def _release_all(self) -> None:
        for timer in (self._tick_timer, self._blocked_timer):
            if timer is not None:
                timer.cancel()
        self.manager.disk.leave(self._disk_has_room)
        self.after_work(super()._release_all)
