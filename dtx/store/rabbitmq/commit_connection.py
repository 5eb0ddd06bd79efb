"""Commit connections, which do phase two: for each vhost one connection with dtx's own credentials, and channels on it.

A unit is one AMQP transaction of one branch. Only commit-ok completes it, or after a crash a trusted receipt. If the
connection of a unit is lost, only :meth:`CommitConnection.resolve` determines its outcome.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple
from uuid import UUID, uuid4

from dtx import failpoint
from dtx.failpoint import Point
from dtx.log.records import EXCLUSIVE, Duplicate, Unit, WorkKind, WorkRow
from dtx.log.records import Replay as Replayed
from dtx.store.api import Applied, PhaseTwo, Refused, Returned, UnitOutcome, UnitProgress
from dtx.store.rabbitmq import messages
from dtx.store.rabbitmq.copies import CopyRegister
from dtx.store.rabbitmq.delivery_limit import DeliveryLimits, default_limit, publish_copies
from dtx.store.rabbitmq.identity import BrokerIdentity, NameTaken, consumers_of, declare_lock, hold_lock
from dtx.store.rabbitmq.management import Management, ManagementError
from dtx.store.rabbitmq.memory_quota import MemoryQuota, Share
from dtx.store.rabbitmq.message_limit import announced_limit
from dtx.store.rabbitmq.receipts import Receipts, ReceiptScan
from dtx.store.rabbitmq.service import Broker, BrokerLoginRefused, ServiceConnection
from dtx.store.rabbitmq.trust import Replay, Trust
from dtx.store.rabbitmq.upstream import OwnChannel, Step, UpstreamChannelClosed, UpstreamLost, words
from dtx.store.slices import finish
from dtx.store.work import Delivery
from dtx.telemetry import get_logger
from dtx.wire.amqp09 import methods, properties
from dtx.wire.amqp09.errors import HardCode, WireError
from dtx.wire.amqp09.frames import MIN_FRAME
from dtx.xa.codes import ReplyCode, XaError

_log = get_logger(part="commit connection")

_LOCK_POLL: Final = 0.25
"""Seconds between two checks of a lock that is not free; its owner's heartbeat bounds the wait."""
_LOCK_PATIENCE: Final = 15.0
"""Seconds that a unit without a receipt waits for its lock."""
_BACKOFF: Final = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0)
"""Seconds before the next attempt to connect to the broker."""
_IMPATIENT: Final = 0.25
"""The same while a caller waits for the commit connection, at most."""
_GENERATION_SECONDS: Final = 2.0
"""Seconds of one generation of receipts."""
_USE: Final = 3600.0
"""Seconds after which the receipt queues are declared again, so that the broker does not delete them as unused."""
_RETRY_RECEIPTS: Final = 15.0
"""Seconds between two attempts to use the receipt queues of a node that was down."""
_FAREWELL: Final = 2.0
"""Seconds for the deletion of the receipt queues at the end."""
_FIRST_TRUST: Final = 2.0
"""Seconds that a new commit connection waits for the management API: less than a select waits for the connection."""
_TRUST: Final = 60.0
"""Seconds between two checks of the policies that could remove receipts."""
_MOST_BYTES: Final = 16 << 20
"""The default of RabbitMQ's ``max_message_size`` since 4.0."""
_MOST_BYTES_BEFORE_4: Final = 128 << 20
_EMPTY: Final = properties.build({})
_MANAGEMENT_PATIENCE: Final = 5.0
"""Seconds that a request to the management API waits for a commit connection that is down."""
_POISON: Final = 5
"""Connections that are lost while a unit is sent alone: after so many, the unit counts as the cause and is refused."""
_MOST_UNDER_WAY: Final = 256 << 20
"""Bytes of messages in the pending units of all commit connections: four branches of the largest default size.

Each byte takes memory up to three times: as read from the log, in its frame, and in the socket's buffer.
"""
_PUBLISH: Final = methods.BasicPublish.KEY
_GROWTH: Final = 8
"""At most this multiple of the channels is opened while others hang, for example on a queue without a leader."""


class _Direction(NamedTuple):
    """What phase two does with the messages of a branch."""

    kind: WorkKind
    build: Callable[[int, int, UUID, Sequence[WorkRow], int], Iterator[bytes]]
    """The frames of each message."""
    header: bytes
    """Identifies a message that the broker returns."""


_COMMIT: Final = _Direction(WorkKind.PUBLISH, messages.commit_frames, messages.ID)
_PUT_BACK: Final = _Direction(WorkKind.CONSUME, messages.put_back_frames, messages.PUT_BACK)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitSettings:
    """How commit connections work.

    Args:
        identity: of this dtx.
        channels: units at the same time.
        deadline: seconds after which a unit without an answer no longer counts against *channels*.
        max_message_bytes: body of the largest message of a branch; 0: what the broker takes.
        replay: the setting ``--replay``: how to handle units whose outcome is not known.
        management: the management API, to check receipts; ``None`` when there is none.
        found: called with the outcome of each unit whose answer was lost.
        active: whether this dtx is the active one. Otherwise receipts may belong to its successor, and stay untouched.
        finished: whether the log needs no receipt any more; asked when a commit connection is closed.
        copies: the messages that were sent more than once.
        room: memory for the messages of units, shared by all commit connections that have these settings.
    """

    identity: BrokerIdentity
    channels: int = 16
    deadline: float = 30.0
    max_message_bytes: int = 0
    replay: Replay = "auto"
    management: Management | None = None
    active: Callable[[], bool] = lambda: True
    finished: Callable[[], bool] = lambda: True
    found: Callable[[UnitOutcome], None] = lambda _: None
    copies: CopyRegister = field(default_factory=CopyRegister.disabled)
    room: MemoryQuota = field(default_factory=lambda: MemoryQuota(_MOST_UNDER_WAY))


class CommitConnection:
    """Phase two in one vhost.

    Args:
        broker: with dtx's own credentials.
        vhost: name.
        settings: how commit connections work.
        on_end: called when the connection has ended by itself: the broker refuses its vhost, and nothing needs it.
    """

    def __init__(
        self,
        broker: Broker,
        vhost: str,
        settings: CommitSettings,
        on_end: "Callable[[CommitConnection], None]" = lambda _: None,
    ) -> None:
        self._on_end = on_end
        self.broker = broker
        self.vhost = vhost
        self.settings = settings
        self.receipts = Receipts(settings.identity)
        self.frame_max = MIN_FRAME
        """Largest frame in bytes that the broker accepts."""
        self.max_message_bytes = settings.max_message_bytes or _MOST_BYTES
        """Body of the largest message that the broker takes."""
        self.may_set_user_id = False
        """Whether dtx's user may publish messages with another user's user-id."""
        self.problem: str | None = "not connected yet"
        """Why the commit connection is not working; ``None`` when it is."""
        self._announced = 0
        self._connection: ServiceConnection | None = None
        self._control: OwnChannel | None = None
        self._up = asyncio.Event()
        self._waiting = 0
        self._wanted = asyncio.Event()
        self._free: deque[OwnChannel] = deque()
        self._waiters: deque[asyncio.Future[OwnChannel]] = deque()
        self._opened = 0
        self._opening: set[asyncio.Task[None]] = set()
        self._calls = 0
        self._task = asyncio.create_task(self._run(), name=f"dtx-commit-connection-{vhost}")
        self._locks: dict[str, asyncio.Task[None]] = {}
        self._trust = Trust(
            vhost, settings.replay, settings.management, self.receipts, lambda: self._control, len(broker.hosts)
        )
        self._version: tuple[int, ...] = ()
        """Of the broker, when it was last connected."""
        self._delivery_limits = DeliveryLimits(vhost, self.management)
        self._receipts_problem: str | None = "the receipt queues have not been declared"
        """Why no receipt can be left on this connection; ``None`` if one can."""

    # -- connection

    @property
    def blocked(self) -> bool:
        """Whether the broker takes no publishes at the moment (memory or disk alarm)."""
        return self._connection is not None and self._connection.blocked

    @property
    def distrust(self) -> str | None:
        """Why receipts are not trusted; ``None`` when they are."""
        doubts = self._trust.doubts
        return doubts.of_all or self._receipts_problem or doubts.of_publishes

    @property
    def open_receipts(self) -> int:
        """The number of receipts that dtx may still need."""
        return self.receipts.open

    @property
    def channels(self) -> int:
        """The number of open channels: units at the same time."""
        return self._opened

    @property
    def under_way(self) -> int:
        """The number of units that have a channel."""
        return self._opened - len(self._free)

    @property
    def waiting(self) -> int:
        """The number of units that wait for a channel."""
        return sum(not waiter.done() for waiter in self._waiters)

    async def ready(self, seconds: float) -> None:
        """Wait until the commit connection works.

        Raises:
            XaError: 541 with the reason, if it does not work within *seconds*.
        """
        if self._up.is_set():
            return
        self._waiting += 1
        self._wanted.set()
        try:
            async with asyncio.timeout(seconds):
                await self._up.wait()
        except TimeoutError:
            raise XaError(
                ReplyCode.INTERNAL_ERROR, f"dtx cannot work in vhost {self.vhost!r} of the broker: {self.problem}"
            ) from None
        finally:
            self._waiting -= 1

    async def _run(self) -> None:
        failures = 0
        while True:
            connection: ServiceConnection | None = None
            try:
                connection = ServiceConnection(self.broker, f"dtx {self.settings.identity.rm} {self.vhost}")
                await connection.login(self.vhost)
                await self._set_up(connection)
                failures = 0
                _log.info("commit connection ready", vhost=self.vhost, broker=str(self.broker), distrust=self.distrust)
                await self._serve(connection)
            except (OSError, UpstreamLost, BrokerLoginRefused, UpstreamChannelClosed, NameTaken) as error:
                self.problem = str(error) or "the broker does not answer"
                if isinstance(error, BrokerLoginRefused) and error.code == HardCode.NOT_ALLOWED and not self._needed:
                    _log.info(
                        "commit connection ended", vhost=self.vhost, reason=self.problem
                    )  # most likely its vhost was deleted
                    self._on_end(self)
                    return
                if failures < 3 or failures % 20 == 0:
                    _log.warning(
                        "commit connection is down", vhost=self.vhost, broker=str(self.broker), reason=self.problem
                    )
            except Exception as error:  # noqa: BLE001 - logged; if this task ended, all commits would wait for ever
                self.problem = f"the commit connection failed: {type(error).__name__}"
                _log.exception("commit connection failed", vhost=self.vhost)
            finally:
                if connection is not None and connection.host is not None:
                    self.broker.failed(connection.host)
                self._up.clear()
                self._connection = self._control = None
                self._free.clear()
                self._opened = 0
                if connection is not None:
                    connection.abort("dtx reconnects")
            await self._pause(_BACKOFF[min(failures, len(_BACKOFF) - 1)])
            failures += 1

    @property
    def _needed(self) -> bool:
        """Whether anything waits for the commit connection, or needs its receipts."""
        return bool(self._waiting or self._calls or self.receipts.needed)

    async def _pause(self, seconds: float) -> None:
        """Pause for *seconds* before the next attempt, or for less time when a caller waits for the connection."""
        if not self._waiting:
            self._wanted.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._wanted.wait()
        if self._waiting:
            await asyncio.sleep(min(seconds, _IMPATIENT))

    async def _set_up(self, connection: ServiceConnection) -> None:
        control = await OwnChannel(connection).open()
        await self.settings.identity.claim(self.vhost, control)
        lock = self.settings.identity.new_lock()
        failpoint.at(Point.COMMIT_CONNECTION_LOCK_BEFORE)
        await control.declare(declare_lock(lock))
        failpoint.at(Point.COMMIT_CONNECTION_LOCK_AFTER)
        connection.lock = lock
        self.may_set_user_id = await self._may_impersonate(connection)
        self.max_message_bytes = await self._message_limit(connection)
        self._connection = connection
        self._version = connection.version
        self._control = control
        self.frame_max = connection.engine.agreed.frame_max
        await self._trust.refresh(seconds=_FIRST_TRUST)
        await self._open_receipts(connection)
        for _ in range(self.settings.channels):
            await self._open_channel(connection)
        failpoint.at(Point.COMMIT_CONNECTION_READY)
        self.problem = None
        self._up.set()

    async def _open_receipts(self, connection: ServiceConnection) -> None:
        """Declare the receipt queues, and find their marker, if receipts are trusted.

        Nothing is asked otherwise: in a cluster, the node that has these queues may be down or hang.
        """
        if self._trust.doubts.of_all is not None:
            self._receipts_problem = "the receipt queues have not been declared on this connection"
            return
        declaring = await OwnChannel(connection).open()
        try:
            await self.receipts.declare(declaring)
            await self.receipts.find_or_set_marker(connection)
            await declaring.close()
        except UpstreamChannelClosed as closed:
            if closed.close.reply_code != ReplyCode.NOT_FOUND:
                raise
            self._receipts_problem = f"the node of the receipt queues is down: {closed}"
        else:
            self._receipts_problem = None
        await self.receipts.renew_inherited(connection)

    async def _may_impersonate(self, connection: ServiceConnection) -> bool:
        channel = await self._tx_channel(connection)
        stranger = properties.build({properties.Property.USER_ID: b"dtx somebody else"})
        probe = messages.probe(channel.number, b"", connection.lock.encode(), 0, stranger)
        try:
            await channel.send_raw(probe, methods.TxRollbackOk)
        except UpstreamChannelClosed:
            return False
        await channel.close()
        return True

    async def _message_limit(self, connection: ServiceConnection) -> int:
        asked = self.settings.max_message_bytes
        if connection.version < (4,):
            return asked or _MOST_BYTES_BEFORE_4
        host = connection.host or self.broker.hosts[0]
        announced = await announced_limit(self.broker, host, self.vhost, connection.lock.encode())
        if announced:  # nodes of a cluster may differ, and the next connection may be to another one
            self._announced = min(self._announced or announced, announced)
        return min(asked or self._announced, self._announced) if self._announced else asked or _MOST_BYTES

    async def _tx_channel(self, connection: ServiceConnection) -> OwnChannel:
        return await OwnChannel(connection).open(methods.TxSelect())

    async def _open_channel(self, connection: ServiceConnection) -> None:
        channel = await OwnChannel(connection).open()
        mode = methods.TxSelect() if self.leaves_receipts else methods.ConfirmSelect()
        await channel.set_mode(mode, hold_lock(channel.number, connection.lock))
        if connection is self._connection:
            self._opened += 1
        self._give(channel)

    async def _serve(self, connection: ServiceConnection) -> None:
        control = self._control
        assert control is not None
        canary = await self._tx_channel(connection)
        loop = asyncio.get_running_loop()
        declared = loop.time()
        while not connection.is_lost:
            self._probe_alarm(canary)
            with suppress(TimeoutError):
                async with asyncio.timeout(_GENERATION_SECONDS):
                    await asyncio.shield(connection.lost)
            await self._trust.refresh(since=loop.time() - _TRUST)
            if self._trust.doubts.of_all is not None or connection.lost.done():
                continue
            if loop.time() - declared > (_USE if self._receipts_problem is None else _RETRY_RECEIPTS):
                await self._open_receipts(connection)
                declared = loop.time()
            if self.trusts_receipts and self.settings.active():
                await self.receipts.switch_generation(control)
        raise UpstreamLost("the connection to the broker is gone")

    def _probe_alarm(self, canary: OwnChannel) -> None:
        """Publish a message, and roll it back: RabbitMQ reports an alarm only to connections that publish during it.

        RabbitMQ does not read from such a connection until the alarm is over. So dtx detects alarms on its own
        connection: those of clients can still acknowledge, without publishing.
        """
        if canary.closed is None and not canary.busy:
            canary.send_raw(
                messages.probe(canary.number, b"", canary.upstream.lock.encode(), 0, _EMPTY), methods.TxRollbackOk
            )

    async def management(self) -> Management:
        """The management API, after a check that it belongs to this broker.

        Raises:
            ManagementError: there is none, it gives no answer, it belongs to another broker, or the connection is down.
        """
        if self.settings.management is not None:
            try:
                await self.ready(_MANAGEMENT_PATIENCE)
            except XaError as error:
                raise ManagementError(error.reason) from error
        return await self._trust.recognised_management()

    async def close(self) -> None:
        """End the commit connection. If the log needs no receipt any more, delete the receipt queues."""
        connection, control = self._connection, self._control
        if control is not None and self.settings.active() and self.settings.finished():
            with suppress(UpstreamLost, UpstreamChannelClosed, TimeoutError):
                async with asyncio.timeout(_FAREWELL):
                    await self.receipts.delete(control)
        for task in (self._task, *self._locks.values()):
            task.cancel()
        await asyncio.gather(self._task, *self._locks.values(), return_exceptions=True)
        if connection is not None:
            connection.close()

    # -- units

    @property
    def trusts_receipts(self) -> bool:
        """Whether a unit that is made now, and only acknowledges, leaves a receipt.

        It leaves none while receipts are not trusted. Once they are trusted again, dtx could not tell such a receipt
        from a valid one.
        """
        return self._trust.doubts.of_all is None and self._receipts_problem is None

    @property
    def leaves_receipts(self) -> bool:
        """Whether a unit of the commit connection, which publishes, leaves a receipt."""
        return self.distrust is None

    def _doubt(self, unit: Unit) -> str | None:
        """Why a receipt of *unit*, or its absence, proves nothing."""
        doubts = self._trust.doubts
        return doubts.of_all or (None if unit.number else doubts.of_publishes)

    def next_unit(self) -> Unit:
        """The unit that phase two of a branch would use now; without a lock while the commit connection is not ready.

        The connection is ready only when receipts have been checked. A unit without a receipt is applied again if its
        outcome is not known.
        """
        lock = self._connection.lock if self._connection is not None and self._up.is_set() else ""
        return Unit(
            number=0,
            lock=lock,
            nonce=uuid4(),
            incarnation=self.receipts.incarnation,
            receipt=self.leaves_receipts,
        )

    async def resolve(self, unit: Unit) -> UnitOutcome:
        """The outcome of a unit whose answer was lost, or that a predecessor may have sent.

        Waits until the unit's lock is free. Until then, the unit of a stalled predecessor may still be applied.
        """
        self._calls += 1
        try:
            outcome = UnitOutcome.NEVER if not unit.lock else await self._find_out(unit)
        finally:
            self._calls -= 1
        self.settings.found(outcome)
        return outcome

    async def _find_out(self, unit: Unit) -> UnitOutcome:
        while True:
            connection = await self._connected()
            failpoint.at(Point.RESOLVE_BEFORE)
            try:
                is_free = unit.lock == connection.lock or await self._until_free(unit)
                failpoint.at(Point.RESOLVE_FREE)
                found = ReceiptScan()
                if unit.receipt:
                    if self._trust.doubts.of_all is not None:
                        await self._trust.refresh()  # the API may have been away for a moment
                    if self._trust.doubts.of_all is None:
                        found = await self.receipts.left_by(unit.lock, connection)
                        await self._trust.refresh()  # a policy of the last minute may have removed the receipt
                failpoint.at(Point.RESOLVE_READ)
            except UpstreamLost:
                continue
            except XaError:  # all channels of the connection are in use
                await asyncio.sleep(_LOCK_POLL)
                continue
            except UpstreamChannelClosed as closed:
                _log.error("receipts cannot be read", vhost=self.vhost, reason=str(closed))
                return UnitOutcome.UNKNOWN
            doubt = self._doubt(unit)
            if doubt is None and unit.receipt:
                if unit.nonce in found.nonces:
                    return UnitOutcome.HAPPENED
                if is_free and unit.incarnation in found.markers:
                    return UnitOutcome.NEVER
            reason = "the broker has lost receipts"
            if not unit.receipt:
                reason = "it has no receipt: receipts were not trusted, or the broker had an alarm"
            _log.warning(
                "the outcome of a unit cannot be found out",
                vhost=self.vhost,
                lock=unit.lock,
                reason=doubt or reason,
            )
            return UnitOutcome.UNKNOWN

    async def _connected(self) -> ServiceConnection:
        while self._connection is None or self._connection.is_lost or not self._up.is_set():
            # Units learn of a lost connection before the task does: without this, a retrying caller would spin.
            self._up.clear()
            await self._up.wait()
        return self._connection

    async def _until_free(self, unit: Unit) -> bool:
        """Wait until the lock of *unit* is free. Returns whether it is.

        If no receipt can tell its outcome, the wait has a limit: the node of the lock may hang. The outcome is then
        unknown with or without the lock, and what is sent again is recorded before.
        """
        lock = unit.lock
        task = self._locks.get(lock)
        if task is None:
            task = self._locks[lock] = asyncio.create_task(self._watch(lock))
            task.add_done_callback(lambda _: self._locks.pop(lock, None))
        proves = unit.receipt and self._trust.doubts.of_all is None
        try:
            async with asyncio.timeout(None if proves else _LOCK_PATIENCE):
                await asyncio.shield(task)
        except TimeoutError:
            _log.warning("a lock is not free", vhost=self.vhost, lock=lock, seconds=_LOCK_PATIENCE)
            return False
        return True

    async def _watch(self, lock: str) -> None:
        waited = False
        while True:
            connection = await self._connected()
            with suppress(UpstreamLost, XaError):  # lost, or all its channels are in use
                if not await consumers_of(lock.encode(), connection):
                    return
                if not waited:
                    _log.info("waiting for a predecessor's connection to end", vhost=self.vhost, lock=lock)
                    waited = True
            await asyncio.sleep(_LOCK_POLL)

    async def apply(self, phase: PhaseTwo) -> Applied | Refused:
        """See :class:`~dtx.store.api.BrokerStore`."""
        return await self._finish(phase, _COMMIT)

    async def put_back(self, phase: PhaseTwo) -> Applied | Refused:
        """See :class:`~dtx.store.api.BrokerStore`."""
        result = await self._finish(phase, _PUT_BACK)
        if isinstance(result, Refused):
            return result
        unroutable = {returned.position for returned in result.returned}
        reason = ""
        work = await phase.work() if unroutable or result.proved else ()
        if unroutable:
            first = result.returned[0]
            reason = f"{first.code} {first.text.decode('utf-8', 'replace')}"
        elif result.proved:
            missing = await self._missing(dict.fromkeys(item.queue for item in work if item.queue is not None))
            unroutable = {item.position for item in work if item.queue in missing}
            reason = "404 queue is gone"
        # The broker deletes an exclusive queue and its messages with the connection that declared it. No other
        # connection could ever have consumed these messages, so nothing is lost that would exist without dtx.
        dead = {item.position for item in work if item.position in unroutable and (item.flags or 0) & EXCLUSIVE}
        if dead:
            _log.info("messages of exclusive queues that are gone are dropped", branch=phase.branch_id, count=len(dead))
            unroutable -= dead
        if not unroutable:
            return result
        return Refused(
            reason=f"{len(unroutable)} message(s) could not be put back: {reason}",
            settled=tuple(item.position for item in work if item.position not in unroutable),
            partial=phase.repeated,
        )

    async def _missing(self, queues: Iterable[bytes]) -> set[bytes]:
        """The *queues* that do not exist: a receipt does not show which messages the broker returned to a dead dtx.

        So does a queue that dtx may not look at. RabbitMQ 4.2.6 and 4.3.0 demand the configure permission for that. Its
        messages are put back once more by the next rollback: a repetition, and no loss.
        """
        while True:
            connection = await self._connected()
            with suppress(UpstreamLost):
                return {queue for queue in queues if not await self._has(queue, connection)}

    async def _has(self, queue: bytes, connection: ServiceConnection) -> bool:
        try:
            return await consumers_of(queue, connection) is not None
        except UpstreamChannelClosed:
            return False

    async def _sorted(
        self, direction: _Direction, returned: tuple[Returned, ...], work: Sequence[WorkRow]
    ) -> tuple[tuple[Returned, ...], set[int]]:
        """Those of *returned* that the client wants back, and the positions of messages for queues that are down.

        The others have no queue: they are dropped, as the client wishes.
        """
        if not returned or direction is not _COMMIT:
            return returned, set()
        items = {item.position: item for item in work}
        asked = tuple(back for back in returned if (items[back.position].flags or 0) & methods.MANDATORY)
        others = {back.position: items[back.position].routing_key for back in returned if back not in asked}
        while True:
            connection = await self._connected()
            with suppress(UpstreamLost):
                down = {queue for queue in set(others.values()) if await self._is_down(queue, connection)}
                return asked, {position for position, queue in others.items() if queue in down}

    async def _is_down(self, queue: bytes, connection: ServiceConnection) -> bool:
        """Whether the only node of a classic queue is down; RabbitMQ 3.10 says so in the text of its 404."""
        try:
            channel = await OwnChannel(connection).open()
            await channel.declare(methods.QueueDeclare(queue, passive=True))
        except UpstreamChannelClosed as closed:
            return b"is down" in closed.close.reply_text
        except XaError:  # no channel is left: the message is sent again
            return True
        await channel.close()
        return False

    def may_be_near(self, deliveries: Sequence[Delivery]) -> bool:
        """See :class:`~dtx.store.rabbitmq.delivery_limit.Replacer`."""
        limits, default = self._delivery_limits, self._default_limit
        return any(
            limits.is_near(each, default) if limits.is_known(each.queue) else messages.returns(each.properties)
            for each in deliveries
        )

    async def replace(self, deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
        """See :class:`~dtx.store.rabbitmq.delivery_limit.Replacer`. During an alarm, none is replaced."""
        near = await self._delivery_limits.near(deliveries, self._default_limit)
        most = self.max_message_bytes
        near = [each for each in near if each.body is not None and len(each.body) <= most and not each.revoked]
        connection = self._connection
        if not near or connection is None or self.blocked or not self._up.is_set():
            return ()
        # a channel may end, and its deliveries be revoked, before the rows are read
        rows = (each.to_row(position, 0) for position, each in enumerate(near) if not each.revoked)
        return [near[position] for position in await publish_copies(connection, rows)]

    async def restore(self, duplicate: Duplicate) -> None:
        """Publish a suppressed copy to its queue, as a message that was put back.

        Raises:
            XaError: 541, the connection does not work, or the outcome is not known; 406, the queue is gone or refuses
                the message.
        """
        await self.ready(self.settings.deadline)
        if self.blocked:
            raise XaError(ReplyCode.INTERNAL_ERROR, "the broker has an alarm and takes no message now")
        row = WorkRow(
            position=duplicate.position,
            kind=WorkKind.CONSUME,
            exchange=duplicate.exchange,
            routing_key=duplicate.routing_key,
            queue=duplicate.queue,
            properties=duplicate.properties,
            body=duplicate.body,
        )
        connection = self._connection
        assert connection is not None
        try:
            async with asyncio.timeout(self.settings.deadline):
                published = await publish_copies(connection, (row,))
        except TimeoutError:
            published = None
        if published is None or (not published and connection.is_lost):
            raise XaError(ReplyCode.INTERNAL_ERROR, "the broker has not answered: the message may come to its queue")
        if not published:
            queue = duplicate.queue.decode("utf-8", "backslashreplace")
            raise XaError(ReplyCode.PRECONDITION_FAILED, f"queue {queue!r} has not confirmed the message")

    @property
    def revokes(self) -> bool:
        """Whether the broker may take deliveries back when it cancels their consumer."""
        return self._version >= (4, 3)

    @property
    def _default_limit(self) -> int | None:
        return default_limit(self._version)

    async def _finish(self, phase: PhaseTwo, direction: _Direction) -> Applied | Refused:
        self._calls += 1
        try:
            return await self._complete(phase, direction)
        finally:
            self._calls -= 1

    async def _complete(self, phase: PhaseTwo, direction: _Direction) -> Applied | Refused:
        unit = phase.unit
        suspected = False  # its connection was lost once. Units that shared it may be the cause, so it is sent alone
        losses = 0
        progress = phase.progress
        attempt = unit.attempt
        phase.repeated |= attempt > 1
        is_recorded = False  # the log has that the messages are sent again
        while True:
            if progress is UnitProgress.SENT:
                outcome = await self.resolve(unit)
                if outcome is UnitOutcome.HAPPENED:
                    return Applied(proved=True)
                if outcome is UnitOutcome.UNKNOWN:
                    attempt += 1
                    phase.repeated = True
            if losses >= _POISON:
                reason = "the broker ended dtx's connection each time that this was sent"
                return Refused(reason=reason, partial=phase.repeated)
            channel = await self._take_channel()
            share = self.settings.room.share(None if suspected else phase.size)
            try:
                await share.take()
                # not earlier: units that wait for a channel or memory hold no bodies
                work = await phase.work()
                is_new = progress is not UnitProgress.UNSENT or unit.lock != channel.upstream.lock
                again = attempt > 1 and not is_recorded
                if is_new or again or unit.receipt is not channel.is_tx:
                    # The log must have lock and nonce of a unit before it is sent, and what it sends again.
                    unit = phase.unit = replace(self.next_unit(), receipt=channel.is_tx, attempt=attempt)
                    progress = UnitProgress.UNSENT
                    replays: list[Replayed] = []
                    if again:
                        await finish(messages.find_replays(work, direction.kind, replays))
                    await phase.assign(unit, replays)
                    await self.settings.copies.replay(phase.branch_id, replays)
                    is_recorded |= again
            except BaseException:
                share.release()
                self._give(channel)
                raise
            try:
                if channel.closed is not None or unit.lock != channel.upstream.lock or not self._suits(channel):
                    self._give(channel)
                    continue
                refused, returned = await self._send(channel, unit, phase.branch_id, direction, work, share)
                returned, down = await self._sorted(direction, returned, work)
                if not refused and not down:
                    return Applied(returned=returned)
                _at_refusal()
                # A nack is about one queue: others may have taken the message. Only the rest is finished.
                sent = [item.position for item in work if item.kind is direction.kind]
                open_ = {sent[index] for index in refused} | {back.position for back in returned} | down
                why = ": its node is down" if down else ""
                reason = f"a queue did not take {len(refused) + len(down)} of the messages{why}"
                return Refused(reason=reason, settled=tuple(each for each in sent if each not in open_), partial=True)
            except UpstreamLost:
                failpoint.at(Point.UNIT_LOST)
                progress = UnitProgress.SENT
                losses += suspected
                suspected = True
            except UpstreamChannelClosed as closed:
                _at_refusal()
                # In tx mode, a close at a publish discards the whole unit; one at tx.commit ("partial tx completion")
                # does not.
                failed = closed.close.failed
                partly = failed == methods.TxCommit.KEY if channel.is_tx else failed != _PUBLISH or len(work) > 1
                return Refused(reason=words(closed.close), partial=phase.repeated or partly)
            except WireError as error:  # nothing was sent
                reason = f"a message cannot be encoded for AMQP: {error.reason}"
                return Refused(reason=reason, partial=phase.repeated)
            finally:
                work = ()
                share.release()

    async def _send(
        self,
        channel: OwnChannel,
        unit: Unit,
        branch_id: UUID,
        direction: _Direction,
        work: Sequence[WorkRow],
        share: Share,
    ) -> tuple[Sequence[int], tuple[Returned, ...]]:
        """Send the messages of *work*. Returns the indexes of those that a queue refused, and those without a queue.

        A unit without a receipt is published in confirm mode. RabbitMQ (3.10 to 4.3) answers tx.commit with commit-ok
        although a quorum queue has refused a message: the queue is full (reject-publish), or has no leader when the
        channel publishes to it first. The message is lost. A channel keeps what it knows of a queue, so the channel of
        a refused message ends.
        """
        number = channel.number
        upstream = channel.upstream
        frames: list[bytes] = []
        try:
            # Encode all messages before the first one is sent: an error then refuses the unit as a whole.
            built = direction.build(number, upstream.engine.agreed.frame_max, branch_id, work, unit.attempt)
            await finish(map(frames.append, built))
        except BaseException:
            self._give(channel)
            raise
        failpoint.at(Point.UNIT_BEFORE)
        overdue = asyncio.get_running_loop().call_later(self.settings.deadline, self._overdue, channel, share)
        refused: Sequence[int] = ()
        published: Step = (frames, Point.UNIT_PUBLISHED)
        try:
            if unit.receipt:
                body = messages.receipt_body(branch_id, unit)
                receipt = messages.receipt(number, self.receipts.use(unit), body)
                steps = (
                    published,
                    ((receipt,), Point.UNIT_RECEIPTED),
                    ((methods.TxCommit().frame(number),), Point.UNIT_SENT),
                )
                await channel.send_steps(steps, methods.TxCommitOk)
            else:
                refused = await channel.send_confirmed(published)
        except UpstreamChannelClosed:
            self._replace(channel)
            raise
        finally:
            overdue.cancel()
        failpoint.at(Point.UNIT_COMMITTED)
        returned = tuple(_returned(channel, direction.header)) if channel.returned else ()
        if refused:
            self._end(channel)
        else:
            self._give(channel)
        return refused, returned

    # -- channels

    def _suits(self, channel: OwnChannel) -> bool:
        """Whether *channel* has the mode that units have now."""
        return channel.is_tx is self.leaves_receipts

    async def _take_channel(self) -> OwnChannel:
        while True:
            await self._connected()
            while self._free:
                channel = self._free.pop()
                if channel.closed is None and channel.upstream is self._connection and self._suits(channel):
                    return channel
                self._end(channel)
            waiter: asyncio.Future[OwnChannel] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            lost = self._connection.lost if self._connection is not None else None
            try:
                await asyncio.wait([waiter, *([lost] if lost is not None else [])], return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                if not waiter.cancel():
                    self._give(waiter.result())
                raise
            if waiter.done():
                return waiter.result()
            waiter.cancel()

    def _give(self, channel: OwnChannel) -> None:
        if channel.closed is not None or channel.upstream is not self._connection or not self._suits(channel):
            self._end(channel)
            return
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(channel)
                return
        self._free.append(channel)

    def _end(self, channel: OwnChannel) -> None:
        """Open another channel, then close *channel*: the broker deletes the lock with its last holder."""
        ends = channel.closed is None and channel.upstream is self._connection
        self._opened -= ends
        self._replace(channel, ends=ends)

    def _overdue(self, channel: OwnChannel, share: Share) -> None:
        """A unit hangs, for example on a queue without a leader: others get a new channel and its memory."""
        _log.warning("a unit has not been answered in time", vhost=self.vhost, seconds=self.settings.deadline)
        share.release()
        self._replace(channel)

    def _replace(self, channel: OwnChannel, *, ends: bool = False) -> None:
        connection = self._connection
        if connection is None or channel.upstream is not connection or connection.is_lost:
            return
        if channel.closed is not None:
            self._opened -= 1
        if self._opened < self.settings.channels * _GROWTH:
            task = asyncio.get_running_loop().create_task(self._open_another(connection, channel if ends else None))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        elif ends:
            channel.abandon()

    async def _open_another(self, connection: ServiceConnection, former: OwnChannel | None) -> None:
        try:
            await self._open_channel(connection)
        except (UpstreamChannelClosed, UpstreamLost, XaError) as error:
            _log.warning("a channel of the commit connection could not be opened", vhost=self.vhost, reason=str(error))
            if not self._opened:
                connection.abort("no channel of the commit connection is left")  # otherwise commits would wait for ever
        if former is not None:
            former.abandon()


def _at_refusal() -> None:
    failpoint.at(Point.UNIT_REFUSED)


def _returned(channel: OwnChannel, header: bytes) -> list[Returned]:
    messages_back, channel.returned = channel.returned, []
    found = []
    for message in messages_back:
        back, position = message.method, messages.returned_position(message.properties, header)
        if isinstance(back, methods.BasicReturn) and position is not None:
            found.append(Returned(position=position, code=back.reply_code, text=back.reply_text))
    return found
