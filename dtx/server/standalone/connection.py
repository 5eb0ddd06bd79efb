"""A client's connection where dtx itself keeps the messages: the server's side of AMQP 0-9 and 0-9-1.

Frames of one read are handled in one pass; what they publish and acknowledge is one record of the log. What is sent to
the client is joined for each turn of the event loop. A client that does not read, or sends more than the log can take,
is not read from until that has changed.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from dtx.auth.accounts import Account, Accounts, LoginRefused
from dtx.auth.permissions import Permission
from dtx.log.api import LogError
from dtx.manager import TransactionManager, Who
from dtx.manager.limits import Resource
from dtx.server.connection import ClientConnection, Stage
from dtx.server.front import ClientTransport
from dtx.server.limits import ConnectionLimits
from dtx.server.standalone.access import Access
from dtx.server.standalone.broker import Broker
from dtx.server.standalone.channel import Channel
from dtx.server.standalone.closing import close_queues, remove, remove_own
from dtx.server.standalone.direct import DirectReplies
from dtx.server.standalone.opening import Opening
from dtx.server.standalone.writes import Writes
from dtx.store.postgres.exchanges import Queue
from dtx.store.postgres.topology import Gone, VirtualHost
from dtx.store.rabbitmq.pulse import Pulse
from dtx.store.slices import SLICE_SECONDS
from dtx.telemetry import Metrics, get_logger
from dtx.wire.amqp09 import closes, methods
from dtx.wire.amqp09.errors import FrameError, HardCode, WireError
from dtx.wire.amqp09.frames import HEARTBEAT, HEARTBEAT_FRAME, Frame, FrameSplitter
from dtx.wire.amqp09.handshake import Credentials, NotOffered
from dtx.xa.codes import ReplyCode, XaError

_log = get_logger(part="connection")

_CLOSE_PATIENCE: Final = 5.0
"""Seconds that a client has to confirm connection.close."""
_REFUSED_PAUSE: Final = 3.0
"""Seconds before a login that failed is cut off where the client cannot be told, as RabbitMQ has it."""
_BEHIND: Final = "frames wait"
"""Why nothing is read while frames that were read have not been looked at."""
_BLOCKED_AFTER: Final = 1.0
"""Seconds that a client is not read from, for want of writing, before it is told so (connection.blocked)."""
_CLOSE_OK: Final = methods.ConnectionCloseOk().frame(0)
_OPEN_OK: Final = methods.ConnectionOpenOk().frame(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What all connections share."""

    manager: TransactionManager
    broker: Broker
    accounts: Accounts
    metrics: Metrics
    limits: ConnectionLimits
    direct: DirectReplies = field(default_factory=DirectReplies)


class _Rest(NamedTuple):
    """Frames of one read, and what is behind them that is none."""

    buffer: bytes
    frames: Iterator[Frame]
    failure: FrameError | None


class Connection(ClientConnection):
    """One client, from its protocol header to its end.

    Args:
        parts: see there.
        transport: the client's socket.
    """

    def __init__(self, parts: Parts, transport: ClientTransport) -> None:
        super().__init__(parts.manager, transport)
        self.broker = parts.broker
        self.accounts = parts.accounts
        self.metrics = parts.metrics
        self.limits = parts.limits
        self.direct = parts.direct
        self.channels: dict[int, Channel] = {}
        self.vhost: VirtualHost
        """Known when the client has opened it, as *access* and *writes* are."""
        self.access: Access
        self.writes: Writes
        self._account: Account | None = None
        self._opening = Opening(parts.limits)
        self._pulse = Pulse(lambda: self.outbox.send(HEARTBEAT_FRAME), self._client_is_dead)
        self._splitter = FrameSplitter(self._opening.max_frame)
        self._rest: _Rest | None = None
        """Frames that were read and not looked at."""
        self._unread = b""
        """What has come since."""
        self._greeted = False
        self._leaving = False
        """The client has said connection.close: nothing that it sends counts any more."""
        self._told_blocked = False
        self._blocked_timer: asyncio.TimerHandle | None = None

    # -- opening

    async def connect(self) -> None:
        """Begin the handshake."""
        self._greet()

    def _greet(self) -> None:
        if not self._greeted:
            self._greeted = True
            self._set_timer(self.limits.handshake_timeout, self._too_slow)
            self.outbox.send(self._opening.greeting())

    def _handshake(self, key: int, payload: bytes) -> None:
        self._opening.expect(key)
        if key == methods.ConnectionStartOk.KEY:
            try:
                credentials = self._opening.start_ok(payload)
            except NotOffered as error:
                _log.info("login refused", connection=self.id, reason=str(error))
                self._end()
                return
            self._login = self.manager.spawn(self._log_in(credentials))
        elif key == methods.ConnectionTuneOk.KEY:
            self._opening.tune_ok(payload)
            self._splitter.max_frame = self._opening.agreed.frame_max
            self._pulse.start(self._opening.agreed.heartbeat)
        else:
            self._enter(self._opening.open(payload))

    async def _log_in(self, credentials: Credentials | None) -> None:
        transport = self._transport
        if transport is None:
            return
        try:
            if credentials is None:
                _log.info("login refused", connection=self.id, reason="the SASL response names nobody")
                raise LoginRefused("the SASL response names nobody")
            self._account = await self.accounts.authenticate(
                credentials.user, credentials.password, loopback=transport.is_local, peer=transport.peer
            )
        except LoginRefused as error:
            self._refuse_login(str(error))
        except LogError as error:
            _log.warning("nobody can log in", connection=self.id, reason=str(error))
            self.refuse(WireError(HardCode.INTERNAL_ERROR, "the database that has the users is away"))
        else:
            if self.stage is Stage.OPENING:
                self.outbox.send(self._opening.tune())

    def _refuse_login(self, reason: str) -> None:
        if self.stage is not Stage.OPENING:
            return
        if self._opening.hears_of_failed_login:
            text = closes.describe(ReplyCode.ACCESS_REFUSED, reason)
            self.stop(closes.connection_close(ReplyCode.ACCESS_REFUSED, text, methods.ConnectionStartOk.KEY))
        else:
            # "the server MUST … close the socket" without telling why (AMQP 0-9-1, 2.2.4)
            self.stage = Stage.CLOSING
            self._set_timer(_REFUSED_PAUSE, self.abort)

    def _enter(self, vhost: str) -> None:
        account = self._account
        assert account is not None, "connection.open is expected after the login only"
        if not self.accounts.has_vhost(vhost):
            raise WireError(HardCode.NOT_ALLOWED, f"vhost {vhost} not found")
        if not account.may_enter(vhost):
            raise WireError(HardCode.NOT_ALLOWED, f"access to vhost '{vhost}' refused for user '{account.name}'")
        who = Who(account.name, vhost)
        try:
            self._admit(who)
        except XaError as error:
            raise WireError(HardCode.NOT_ALLOWED, error.reason) from error
        self.who = who
        if self._transport is None or not self._transport.opened(who):
            raise WireError(HardCode.NOT_ALLOWED, "connection limit reached (--max-connections)")
        self._cancel_timer()
        self.vhost = self.broker.virtual_host(vhost)
        self.access = Access(self.accounts, account, self.vhost)
        self.writes = Writes(vhost, self.broker, self.budget, self._throttle)
        self.stage = Stage.RUNNING
        self.outbox.send(_OPEN_OK)

    @property
    def frame_max(self) -> int:
        """Agreed with the client, octets."""
        return self._opening.agreed.frame_max

    @property
    def account(self) -> Account:
        """Who has logged in."""
        assert self._account is not None, "channels are opened after the login only"
        return self._account

    @property
    def tells_of_cancelled_consumers(self) -> bool:
        """Whether the client wants basic.cancel when a queue goes."""
        return self._opening.hears_of_cancelled_consumers

    def recheck(self) -> None:
        """Users or vhosts have changed: somebody who is gone does not stay connected."""
        if self.stage is Stage.RUNNING and not (self.account.exists and self.account.may_enter(self.who.vhost)):
            user, vhost = self.who.user, self.who.vhost
            self.refuse(WireError(HardCode.CONNECTION_FORCED, f"user '{user}' may not be in vhost '{vhost}' any more"))

    def demand(self, permission: Permission, kind: str, name: bytes) -> None:
        """See :meth:`Access.demand`."""
        self.access.demand(permission, kind, name)

    def demand_topic(self, permission: Permission, exchange: bytes, key: bytes) -> None:
        """See :meth:`Access.demand_topic`."""
        self.access.demand_topic(permission, exchange, key)

    # -- queues that go

    def close_queues(self, queues: Sequence[Queue]) -> None:
        """Queues are gone from the topology: so are their messages, and their consumers hear of it."""
        close_queues(self.broker, queues)

    def remove(self, gone: Gone) -> None:
        """The same for queues that go by themselves, so nobody waits until that is durable."""
        remove(self.broker, self.manager, gone)

    # -- from the client

    def client_data(self, data: bytes) -> None:
        """Octets from the client."""
        self._greet()
        self._pulse.read = True
        self._hold_if_it_reads_nothing()
        self._unread += data
        if self._rest is None:
            self._read()

    def _read(self) -> None:
        data, self._unread = self._unread, b""
        try:
            buffer, frames = self._splitter.feed(data)
        except FrameError as error:
            self._handle(_Rest(error.buffer, iter(error.frames), error))
        else:
            self._handle(_Rest(buffer, iter(frames), None))

    def _handle(self, rest: "_Rest") -> None:
        """Look at frames, in several turns of the event loop where they are much work."""
        self._rest = None
        try:
            if not self._frames(rest.buffer, rest.frames):
                self._rest = rest
            elif rest.failure is not None:
                self.refuse(rest.failure)
        except WireError as error:
            self.refuse(error)
        except Exception as error:  # noqa: BLE001 - logged; the client is told no more than that
            _log.exception("connection failed", connection=self.id)
            self.refuse(error)
        self.flush()
        if self._rest is not None:
            self.hold(_BEHIND)
            asyncio.get_running_loop().call_soon(self._catch_up)

    def _catch_up(self) -> None:
        if self.stage is Stage.ENDED:
            return
        if self._rest is not None:
            self._handle(self._rest)
        if self._rest is None and self._unread:
            self._read()
        if self._rest is None:
            self.release(_BEHIND)

    def flush(self) -> None:
        """Frames were handled: what they brought goes to the log; a client that wants to leave may go."""
        if self.stage is Stage.RUNNING:
            self.writes.flush()
            if self._leaving and not any(channel.waits for channel in self.channels.values()):
                self._leave(Stage.LEAVING)
                self.behind_all(lambda: self.writes.then(self._confirm_close))

    def _frames(self, buffer: bytes, frames: Iterator[Frame]) -> bool:
        """Handle *frames* as far as a slice goes; whether that was all."""
        channels = self.channels
        clock = time.monotonic
        until = clock() + SLICE_SECONDS
        for key, number, start, end in frames:
            if self._leaving:
                break
            if number:
                channel = channels.get(number)
                if channel is not None:
                    channel.frame(key, buffer, start, end)
                else:
                    self._on_no_channel(key, number)
            elif key != HEARTBEAT:
                self._on_zero(key, buffer[start + 7 : end - 1])
            if clock() >= until:
                return False
        return True

    def _on_no_channel(self, key: int, number: int) -> None:
        if self.stage is Stage.OPENING:
            raise WireError(HardCode.CHANNEL_ERROR, f"channel {number} before connection.open")
        if self.stage is not Stage.RUNNING:
            return
        if key != methods.ChannelOpen.KEY:
            raise WireError(HardCode.CHANNEL_ERROR, f"channel {number} is not open")
        if number > self._opening.agreed.channel_max:
            granted = self._opening.agreed.channel_max
            raise WireError(HardCode.NOT_ALLOWED, f"channel {number} is above the negotiated channel_max ({granted})")
        quotas = self.manager.quotas
        reason = quotas.excess(self.who.user, self.who.vhost, Resource.CHANNELS)
        if reason is not None:
            raise WireError(HardCode.NOT_ALLOWED, f"channel refused: {reason}")
        quotas.add(self.who.user, self.who.vhost, Resource.CHANNELS)
        self.channels[number] = Channel(self, number)
        self.metrics.channels.inc()
        self.outbox.send(methods.ChannelOpenOk().frame(number))

    def _on_zero(self, key: int, payload: bytes) -> None:
        if key == methods.ConnectionClose.KEY and self.stage in (Stage.OPENING, Stage.RUNNING):
            self._client_closes()
        elif key == methods.ConnectionClose.KEY:
            self.outbox.send(_CLOSE_OK)
        elif self.stage is Stage.CLOSING:
            if key == methods.ConnectionCloseOk.KEY:
                self._end()
        elif self.stage is Stage.OPENING:
            self._handshake(key, payload)
        elif self.stage is Stage.RUNNING and key == methods.ConnectionUpdateSecret.KEY:
            # As RabbitMQ: a password is judged at the login alone, and a user who is gone or may not stay is cut off.
            methods.ConnectionUpdateSecret.decode(payload)
            self.outbox.send(methods.ConnectionUpdateSecretOk().frame(0))
        elif self.stage is Stage.RUNNING:
            raise WireError(HardCode.COMMAND_INVALID, "method on channel 0 that has no place there")

    def forget(self, channel: Channel) -> None:
        """A channel is closed on both sides."""
        if self.channels.get(channel.number) is channel:
            del self.channels[channel.number]
            self._discount_channel()

    # -- pace

    def _reads(self, reads: bool) -> None:
        self._pulse.paused = not reads
        if reads:
            self._pulse.read = True

    def _throttle(self, much: bool) -> None:
        """More is on its way to the log than may be, or not any more."""
        if much:
            self.hold(self.writes)
            self._blocked_timer = asyncio.get_running_loop().call_later(_BLOCKED_AFTER, self._say_blocked)
            return
        if self._blocked_timer is not None:
            self._blocked_timer.cancel()
        self._go_on(self.writes)

    def _say_blocked(self, reason: bytes = b"messages wait to be written") -> None:
        if self._opening.hears_of_blocking and self.stage is Stage.RUNNING and not self._told_blocked:
            self._told_blocked = True
            self.outbox.send(methods.ConnectionBlocked(reason).frame(0))

    def wait_for_disk(self) -> None:
        """The client publishes, and the disk is nearly full: it is read from when there is room again.

        As with RabbitMQ, a client that does not publish is served as before: so what makes room, or ends, can go on.
        """
        self.hold(self.manager.disk)
        self.manager.disk.wait(self._disk_has_room)
        self._say_blocked(b"low on disk")

    def _disk_has_room(self) -> None:
        self._go_on(self.manager.disk)

    def _go_on(self, reason: object) -> None:
        """*reason* does not hold any more: the client is read from, and hears so, if nothing else holds."""
        self.release(reason)
        if self._told_blocked and not {self.writes, self.manager.disk} & self._holding:
            self._told_blocked = False
            self.outbox.send(methods.ConnectionUnblocked().frame(0))

    def _resume(self) -> None:
        for channel in list(self.channels.values()):
            channel.consuming.resume()

    def _wrote(self) -> None:
        self._pulse.wrote = True

    def _client_is_dead(self) -> None:
        _log.info("client missed its heartbeats", connection=self.id)
        self.abort()

    # -- the end

    def _work_failed(self, error: Exception) -> None:
        _log.error("connection failed", connection=self.id, exc_info=error)
        self.refuse(error)

    def refuse(self, error: Exception, key: int = 0) -> None:
        """The connection cannot go on: connection.close.

        Args:
            error: what went wrong.
            key: class << 16 | method of what the client sent; 0 where it is no method.
        """
        if self.stage in (Stage.OPENING, Stage.RUNNING):
            _log.info("connection refused", connection=self.id, reason=str(error))
            self.stop(closes.close_frame(error, 0, key))

    def stop(self, frame: bytes) -> None:
        """End the connection with *frame*, a connection.close. Idempotent."""
        if self.stage in (Stage.CLOSING, Stage.ENDED):
            return
        self._leave(Stage.CLOSING)
        self.outbox.send(frame)
        self._set_timer(_CLOSE_PATIENCE, self.abort)

    def _leave(self, stage: Stage) -> None:
        """Nothing more is done for the client; what it sent so far is on its way."""
        running = self.stage is Stage.RUNNING
        self.stage = stage
        if not running:
            return
        self.writes.flush()
        channels = list(self.channels.values())
        self.channels.clear()
        self.slices.run(self._let_go(channels))
        self.behind_all(lambda: self.slices.run(remove_own(self.broker, self.manager, self.vhost, self)))

    @property
    def is_over(self) -> bool:
        """Whether nothing more is done for the client: its channels have returned what they have, or are about to."""
        return self.stage is not Stage.RUNNING

    def _discount_channel(self) -> None:
        self.metrics.channels.dec()
        self.manager.quotas.remove(self.who.user, self.who.vhost, Resource.CHANNELS)

    def _let_go(self, channels: Sequence[Channel]) -> Iterator[None]:
        for channel in channels:
            self._discount_channel()
            try:
                channel.let_go()
            except Exception:  # noqa: BLE001 - what the others are associated with would belong to nobody
                _log.exception("channel failed", connection=self.id, channel=channel.number)
            yield

    def _client_closes(self) -> None:
        self._leaving = True
        if self.stage is Stage.OPENING:
            self._confirm_close()
        else:
            self.flush()

    def _confirm_close(self) -> None:
        self.outbox.send(_CLOSE_OK)
        self._end()

    def _gone(self) -> None:
        self._splitter = FrameSplitter()  # what the client had begun to say goes at once, not with the next garbage
        self._pulse.stop()
        if self._blocked_timer is not None:
            self._blocked_timer.cancel()
        self.manager.disk.leave(self._disk_has_room)
        self.behind_all(super()._gone)

    def now(self) -> float:
        """Seconds since the epoch, as the queues count."""
        return time.time()
