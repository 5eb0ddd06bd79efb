"""The nodes of AMQP 1.0 in standalone mode; see :mod:`dtx.server.amqp10.nodes`."""

import asyncio
import time
from asyncio import Future
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

from dtx.auth.accounts import Account, LoginRefused
from dtx.auth.permissions import Permission
from dtx.log.api import LogError
from dtx.log.changes import DestinationKind, Slot, StoredMessage
from dtx.manager import Requester
from dtx.manager.branch_runtime import BranchRuntime
from dtx.server.amqp10.addresses import Address, ExchangeAddress, QueueAddress, of_queue, route, subscription
from dtx.server.amqp10.mapping import Content, modified
from dtx.server.amqp10.nodes import DEFAULT_VHOST, Handed, Home, NodeSender, Receiver, Working, discards, named_vhost
from dtx.server.client_session import ClientTransport
from dtx.server.limits import check_fan_out
from dtx.server.standalone.access import Access
from dtx.server.standalone.broker import remove, remove_own
from dtx.server.standalone.client import Parts
from dtx.server.standalone.declarations import SERVER_NAMED
from dtx.server.standalone.distributed_context import HeldDelivery
from dtx.server.standalone.writes import Writes
from dtx.store.postgres.consumers import Consumer, Credit, QueueDelivery, return_slowly
from dtx.store.postgres.exchanges import Queue, describe
from dtx.store.postgres.property_scan import sender_selected
from dtx.store.postgres.topology import DeletedQueues, VirtualHost
from dtx.store.work import Decided, HeldPublish, HeldWork
from dtx.store.work import Delivery as Held
from dtx.telemetry import get_logger
from dtx.wire.amqp09 import properties
from dtx.wire.amqp09.errors import WireError
from dtx.wire.amqp09.handshake import Credentials
from dtx.wire.amqp09.properties import Property
from dtx.wire.amqp10.errors import AmqpError, Condition
from dtx.wire.amqp10.performatives import (
    ACCEPTED,
    ANONYMOUS,
    EXTERNAL,
    PLAIN,
    RELEASED,
    Anonymous,
    External,
    Login,
    Modified,
    Outcome,
    SaslCode,
)
from dtx.xa.codes import ReplyCode, XaError

_log = get_logger(part="connection")

_MAX_KEY: Final = 255
"""Bytes of a routing key: the limit of AMQP 0-9."""
_SETTLED: Final = -1
"""The number of a message whose sender needs no answer."""


class StandaloneNodes:
    """Users, queues and exchanges for one connection.

    Args:
        parts: the objects that all connections share.
        home: the connection.
    """

    def __init__(self, parts: Parts, home: Home) -> None:
        self.home = home
        self.broker = parts.broker
        self.direct = parts.direct
        self.vhost: VirtualHost
        """Set when the client enters it, as are *access* and *writes*."""
        self.access: Access
        self.writes: Writes
        self._accounts = parts.accounts
        self._tls_login = parts.limits.tls_login
        self._anonymous_user = parts.limits.anonymous_user
        offered = ((EXTERNAL, self._tls_login), (PLAIN, True), (ANONYMOUS, self._anonymous_user is not None))
        self.mechanisms = tuple(name for name, does in offered if does)
        self._account: Account | None = None
        self._running = False

    # -- login

    async def log_in(self, login: Login | None, transport: ClientTransport) -> SaslCode:
        """See :class:`Nodes`."""
        loopback, peer = transport.is_local, transport.peer
        try:
            match login:
                case Credentials():
                    found = self._accounts.authenticate(login.user, login.password, loopback=loopback, peer=peer)
                    self._account = await found
                case Anonymous() if self._anonymous_user is not None:
                    self._account = await self._accounts.admit(self._anonymous_user, loopback=loopback, peer=peer)
                case External() if self._tls_login:
                    name = transport.certificate_name
                    if name is None or login.user not in (None, name.encode()):
                        self._accounts.refused_logins += 1
                        _log.warning(
                            "login refused", user=login.user, peer=peer, reason="certificate does not name this user"
                        )
                        return SaslCode.AUTH
                    self._account = await self._accounts.admit(name, loopback=loopback, peer=peer)
                case _:
                    return SaslCode.AUTH
        except LoginRefused:
            return SaslCode.AUTH  # logged by the accounts
        except LogError as error:
            _log.warning("no client can log in", connection=self.home.id, reason=str(error))
            return SaslCode.SYS_TEMP
        return SaslCode.OK

    def enter(self, hostname: str | None) -> Requester:
        """See :class:`Nodes`."""
        account, accounts = self._account, self._accounts
        assert account is not None, "open is handled only after the login"
        name = named_vhost(hostname)
        if name is None:  # most clients send the name of a host
            name = hostname if hostname and accounts.has_vhost(hostname) else DEFAULT_VHOST
        if not accounts.has_vhost(name):
            raise AmqpError(Condition.NOT_FOUND, f"vhost {name} not found")
        if not account.may_enter(name):
            reason = f"access to vhost '{name}' refused for user '{account.name}'"
            raise AmqpError(Condition.UNAUTHORIZED_ACCESS, reason)
        self.vhost = self.broker.virtual_host(name)
        self.access = Access(accounts, account, self.vhost)
        budget = self.home.manager.quotas.of(account.name, name).budget
        self.writes = Writes(name, self.broker, budget, self._throttle)
        self._running = True
        return Requester(account.name, name)

    def _throttle(self, much: bool) -> None:
        """Stop or resume reading, depending on whether too *much* waits for the log."""
        if much:
            self.home.hold_client(self.writes)
        else:
            self.home.release_client(self.writes)

    def wait_for_disk(self) -> None:
        """Stop reading from the client, which publishes, until the disk has room again."""
        self.home.hold_client(self.home.manager.disk)
        self.home.manager.disk.wait(self._disk_has_room)

    def _disk_has_room(self) -> None:
        self.home.release_client(self.home.manager.disk)

    def ban_reason(self) -> str | None:
        """See :class:`Nodes`."""
        account = self._account
        if account is None or not self._running:
            return None
        user, vhost = account.name, self.vhost.name
        if account.exists and account.may_enter(vhost):
            return None
        return f"user '{user}' may not be in vhost '{vhost}' any more"

    # -- nodes

    def coordinate(self) -> None:
        """See :class:`Nodes`."""

    def destination(self, address: Address | None, *, dynamic: bool) -> "Publications":
        """See :class:`Nodes`."""
        shown = None
        if dynamic:
            name = self._new_queue().name
            address, shown = QueueAddress(name), of_queue(name)
        if address is not None:
            self.target(address, None)
        return Publications(self, shown)

    def origin(self, address: Address | None, *, dynamic: bool, filters: dict[str, Any] | None) -> "QueueOrigin":
        """See :class:`Nodes`."""
        if dynamic or address is None:
            queue = self._new_queue()
            return QueueOrigin(self, queue, shown=of_queue(queue.name), made=True)
        if isinstance(address, ExchangeAddress):
            return self._subscribe(address, filters)
        self.access.require(Permission.READ, "queue", address.name)
        return QueueOrigin(self, self.vhost.find_queue(address.name, self))

    def _subscribe(self, address: ExchangeAddress, filters: dict[str, Any] | None) -> "QueueOrigin":
        """Bind a queue of the link to an exchange. It needs the same permissions as in AMQP 0-9."""
        access = self.access
        for permission in (Permission.CONFIGURE, Permission.WRITE, Permission.READ):
            access.require(permission, "queue", SERVER_NAMED)
        access.require(Permission.READ, "exchange", address.name)
        found = subscription(address, filters, self.vhost.find_exchange(address.name).kind)
        access.require_topic(Permission.READ, address.name, found.key)
        queue = self._new_queue()
        try:
            self.vhost.bind(address.name, DestinationKind.QUEUE, queue.name, found.key, found.arguments, self)
        except (XaError, WireError):  # the exchange refuses the arguments
            self.remove(self.vhost.remove_queue(queue))
            raise
        return QueueOrigin(self, queue, made=True, filters=found.filters)

    def _new_queue(self) -> Queue:
        """The queue of a dynamic node. It is exclusive, and is deleted with the connection at the latest."""
        self.access.require(Permission.CONFIGURE, "queue", SERVER_NAMED)
        return self.vhost.declare_queue(b"", self, exclusive=True).queue

    def target(self, address: Address, subject: str | None) -> tuple[bytes, bytes]:
        """Exchange and routing key of *address*.

        Raises:
            AmqpError: invalid-field, the subject is too long for a routing key.
            XaError: 403, the client may not publish there; 404, it does not exist.
        """
        exchange, key = route(address, subject)
        if isinstance(address, QueueAddress) and key not in self.vhost.queues:
            raise XaError(ReplyCode.NOT_FOUND, f"no {describe('queue', key, self.vhost.name)}")
        if len(key) > _MAX_KEY:
            raise AmqpError(Condition.INVALID_FIELD, f"a subject of {len(key)} bytes is too long for a routing key")
        self.access.require(Permission.WRITE, "exchange", exchange)
        self.vhost.publishable(exchange)
        return exchange, key

    def refusal(self, entry: BranchRuntime) -> str | None:
        """See :class:`Nodes`: the reason is a full queue that refuses messages."""
        return None if entry.work is None else self.broker.refusal(entry.work)

    def now(self) -> float:
        """Seconds since the epoch; the clock that the queues use."""
        return time.time()

    def remove(self, deleted: DeletedQueues) -> None:
        """See :func:`~dtx.server.standalone.broker.remove`."""
        remove(self.broker, self.home.manager, deleted)

    # -- pace and end

    def flush(self) -> None:
        """See :class:`Nodes`: the writes become one record of the log."""
        self.writes.flush()

    def leave(self, then: Callable[[], None] | None) -> None:
        """See :class:`Nodes`."""
        self._running = False
        self.writes.flush()
        self.home.slices.run(remove_own(self.broker, self.home.manager, self.vhost, self))
        if then is not None:
            self.home.slices.then(lambda: self.writes.then(then))

    def end(self, then: Callable[[], None]) -> None:
        """See :class:`Nodes`."""
        self.home.manager.disk.leave(self._disk_has_room)
        then()

    def abort(self) -> None:
        """See :class:`Nodes`."""

    def pause(self) -> None:
        """See :class:`Nodes`: the links check for room themselves."""

    def resume(self) -> None:
        """See :class:`Nodes`."""


class Publications:
    """The publishes of one link from a client. It is the publisher to :class:`Writes`.

    Args:
        nodes: the nodes of the connection.
        shown: see :class:`Destination`.
    """

    limit = None

    def __init__(self, nodes: StandaloneNodes, shown: str | None) -> None:
        self.shown = shown
        self._nodes = nodes
        self._sender: NodeSender
        self._accepted: list[int] = []

    def begin(self, sender: NodeSender) -> None:
        """See :class:`Destination`."""
        self._sender = sender

    def address(self, address: Address, subject: str | None, content: Content) -> HeldPublish:
        """See :class:`Destination`."""
        nodes = self._nodes
        exchange, key = nodes.target(address, subject)
        nodes.access.require_topic(Permission.WRITE, exchange, key)
        view = properties.read(content.properties)
        nodes.access.check_properties(view)
        more, _ = sender_selected(content.properties)
        queues = nodes.vhost.route(exchange, key, view.value(Property.HEADERS) or b"", more)
        message = HeldPublish(
            exchange, key, False, content.properties, content.body, None, tuple(queue.spec.id for queue in queues)
        )
        check_fan_out(message)
        nodes.broker.counts.received += 1
        if nodes.home.manager.disk.raised:
            nodes.wait_for_disk()
        return message

    def send(self, delivery: int | None, message: HeldPublish) -> None:
        """See :class:`Destination`."""
        if message.queues:
            self._nodes.writes.publish(self, _SETTLED if delivery is None else delivery, message)
            return
        is_reply = self._nodes.direct.deliver(self._nodes.vhost.name, message)
        counts = self._nodes.broker.counts
        if delivery is not None:
            counts.return_unroutable += 1
            self._sender.answer((delivery,), RELEASED)
        elif not is_reply:
            counts.drop_unroutable += 1

    def validate(self, message: HeldPublish) -> Outcome | Future[AmqpError | None]:
        """See :class:`Destination`: messages for no queue are left out."""
        if message.queues:
            return ACCEPTED
        self._nodes.broker.counts.return_unroutable += 1
        return RELEASED

    def close(self) -> None:
        """See :class:`Destination`."""

    # -- answers of the writes

    def written(self, number: int, error: LogError | None) -> None:
        """The message *number* is durable, or may not be."""
        if error is not None:
            self._sender.fail(AmqpError(Condition.INTERNAL_ERROR, "the database failed"))
        elif number != _SETTLED:
            self._accepted.append(number)

    def refused(self, number: int) -> None:
        """A full queue refuses the message *number*."""
        if number != _SETTLED:
            self._sender.reject(
                number, AmqpError(Condition.RESOURCE_LIMIT_EXCEEDED, "a queue is full (reject-publish)")
            )

    def send_confirms(self) -> None:
        """Answer the messages that are known to be durable."""
        accepted, self._accepted = self._accepted, []
        if accepted:
            self._sender.answer(accepted, ACCEPTED)


@dataclass(slots=True, eq=False)
class KeptDelivery(HeldDelivery):
    """A delivery that a transaction has retired.

    Args:
        taken: the delivery in the index of its queue.
        released: see :meth:`Origin.keep`.
    """

    taken: QueueDelivery | None = None
    released: Callable[[], None] | None = None


class LinkCredit(Credit):
    """The credit of a link: a number of deliveries. Settling one returns no credit (2.6.7)."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(1)
        self.used = 1  # a limit of 0 would mean no limit

    def release(self) -> None:
        """Do nothing: a settled delivery returns no credit."""

    def grant(self, credit: int) -> None:
        """Allow *credit* deliveries from now on."""
        self.change(self.used + credit)


Rejection = tuple[QueueDelivery, Working, Outcome]
"""A message that a transaction rejects."""


class QueueOrigin:
    """A queue as the source of one link.

    Args:
        nodes: the nodes of the connection.
        queue: the source of the messages.
        shown: see :class:`Origin`.
        made: the queue was made for the link, and is deleted with it.
        filters: see :class:`Origin`.
    """

    lock = ""
    transactional = True

    def __init__(
        self,
        nodes: StandaloneNodes,
        queue: Queue,
        *,
        shown: str | None = None,
        made: bool = False,
        filters: dict[str, Any] | None = None,
    ) -> None:
        self.shown = shown
        self.filters = filters or {}
        self._nodes = nodes
        self._queue = queue
        self._made = made
        self._receiver: Receiver
        self._credit = LinkCredit()
        self._consumer = Consumer(b"", self, credit=self._credit)
        self._getting = False
        self._open = True
        self._rejected: list[Rejection] = []
        """Those whose dead letters are not published yet."""
        self._dead_letter_task: Future[None]
        """Done when they are published; set by the first rejection."""
        self._modifying = 0
        """Changes of messages that are not durable yet; the callbacks below wait for them."""
        self._modified: list[Callable[[], None]] = []

    def begin(self, receiver: Receiver) -> None:
        """See :class:`Origin`."""
        self._receiver = receiver
        self._queue.index.consume(self._consumer)

    # -- a sink

    @property
    def place(self) -> tuple[int, int]:
        """The number of the connection, and 0: see :attr:`Amqp10Connection.channels`."""
        return self._nodes.home.id, 0

    @property
    def full(self) -> bool:
        """Whether nothing can be delivered now."""
        return self._receiver.full

    def deliver(self, consumer: Consumer, delivery: QueueDelivery, message: StoredMessage) -> None:  # noqa: ARG002
        """Pass the message to the link."""
        content = Content(message.properties, message.body)
        handed = Handed(content, message.exchange, message.routing_key, delivery.redelivered)
        self._receiver.deliver(delivery, handed)

    def cancelled(self, consumer: Consumer) -> None:  # noqa: ARG002 - there is one
        """End the link, because the queue was deleted."""
        self._receiver.fail(AmqpError(Condition.RESOURCE_DELETED, f"{self._queue.spec.where} was deleted"))

    # -- credit

    def follow(self) -> None:
        """See :class:`Origin`."""
        self._follow()
        self._drain()

    def _follow(self) -> None:
        """Give the link's credit to the consumer; none during a drain, which uses get."""
        self._credit.grant(0 if self._receiver.draining else self._receiver.credit)

    def resume(self) -> None:
        """See :class:`Origin`."""
        if self._receiver.draining:
            self._drain()
        else:
            self._consumer.resume()

    def _drain(self) -> None:
        """Send the ready messages one by one, then return the rest of the credit (2.6.7)."""
        receiver = self._receiver
        if not self._open or self._getting or not receiver.draining:
            return
        if receiver.credit <= 0 or self._queue.index.closed:
            receiver.drained()
        elif not receiver.full:
            self._getting = True
            self._queue.index.get(self, self._nodes.now())

    no_ack = False

    def got(self, found: tuple[QueueDelivery, StoredMessage] | None, remaining: int) -> None:  # noqa: ARG002
        """Continue a drain with a message or none. The next step calls the index, so it runs in another turn."""
        self._getting = False
        if found is not None:
            self.deliver(self._consumer, *found)
            self._follow()  # the client may have ended the drain meanwhile, and the credit has changed
            asyncio.get_running_loop().call_soon(self._drain)
        elif self._receiver.draining:
            self._receiver.drained()

    # -- outcomes

    def accept(self, taken: Sequence[object]) -> None:
        """See :class:`Origin`."""
        self._nodes.writes.ack(cast("Sequence[QueueDelivery]", taken))
        self._nodes.home.flush_soon()

    def reject(self, taken: Sequence[object]) -> None:
        """See :class:`Origin`."""
        self._queue.index.reject(cast("Sequence[QueueDelivery]", taken))

    def requeue(self, taken: Sequence[object]) -> None:
        """See :class:`Origin`."""
        self._nodes.home.slices.run(self._returning(taken))

    def _returning(self, taken: Sequence[object]) -> Iterator[None]:
        """Return *taken* messages, in steps. The queue hands out nothing until they have returned."""
        returning = return_slowly(cast("Sequence[QueueDelivery]", taken), self._nodes.now)
        next(returning)
        return returning

    def modify(self, taken: Sequence[object], outcome: Modified) -> None:
        """See :class:`Origin`: they return when the change is durable."""
        self._modifying += 1
        self._nodes.home.manager.spawn(self._modify(cast("Sequence[QueueDelivery]", taken), outcome))

    async def _modify(self, deliveries: Sequence[QueueDelivery], outcome: Modified) -> None:
        def revised(delivery: QueueDelivery, message: StoredMessage) -> bytes:
            try:
                return modified(message.properties, outcome, redelivered=delivery.redelivered)
            except WireError as error:  # the database was changed by other means
                where = self._queue.spec.where
                _log.warning("a malformed message returns as it is", queue=where, reason=str(error))
                return message.properties

        try:
            await self._nodes.broker.revise(deliveries, revised)
        except LogError as error:
            _log.warning("modified messages may return as they were", queue=self._queue.spec.where, reason=str(error))
        (self.reject if outcome.undeliverable_here else self.requeue)(deliveries)
        self._modifying -= 1
        if not self._modifying:
            acts, self._modified = self._modified, []
            for act in acts:
                self.then(act)

    def then(self, act: Callable[[], None]) -> None:
        """See :class:`Origin`."""
        self._nodes.writes.then(partial(self._after_changes, act), self._outcome_lost)

    def _after_changes(self, act: Callable[[], None]) -> None:
        if self._modifying:
            self._modified.append(act)
        else:
            act()

    def _outcome_lost(self) -> None:
        reason = f"the outcome of messages of {self._queue.spec.where} may not be durable: the log failed"
        self._receiver.fail(AmqpError(Condition.INTERNAL_ERROR, reason))

    # -- branches

    def keep(self, taken: object, work: Working, held: HeldWork, released: Callable[[], None]) -> None:  # noqa: ARG002
        """See :class:`Origin`."""
        delivery = cast("QueueDelivery", taken)
        if not held.fits(0):
            raise XaError(ReplyCode.RESOURCE_ERROR, held.excess(0))
        index = delivery.queue
        index.hold(delivery)
        slot, redelivered = delivery.slot, delivery.redelivered
        held.add_consume(
            KeptDelivery(self, 0, b"", b"", b"", redelivered, b"", None, 0, slot, index, delivery, released)
        )

    def postpone(self, taken: object, work: Working, held: HeldWork, decided: Decided, outcome: Outcome) -> None:
        """See :class:`Origin`: the branch consumes a rejected message, and publishes its dead letter."""
        delivery = cast("QueueDelivery", taken)
        if not discards(outcome):
            if not held.fits(0):
                raise XaError(ReplyCode.RESOURCE_ERROR, held.excess(0))
            delivery.queue.hold(delivery)
            held.add_outcome(partial(self._decided, delivery, decided))
            return
        self.keep(delivery, work, held, partial(decided, False))
        if delivery.queue.arguments.dead_letter_exchange is not None:
            if not self._rejected:
                self._dead_letter_task = self._nodes.home.manager.spawn(self._publish_dead_letters())
            self._rejected.append((delivery, work, outcome))
            work.wait_for(self._dead_letter_task)

    @staticmethod
    def _decided(delivery: QueueDelivery, decided: Decided, committed: bool) -> None:
        delivery.queue.end_hold(delivery)
        decided(committed)

    async def _publish_dead_letters(self) -> None:
        """Publish the dead letters of rejected messages in their transactions, or doom these."""
        reason = "the rejected messages could not be read"
        try:
            while self._rejected:
                await self._publish_some()
        except LogError as error:
            reason = f"{reason}: {error}"
        finally:
            for _, work, _ in self._rejected:
                work.doom(reason)
            self._rejected.clear()

    async def _publish_some(self) -> None:
        rejected: dict[Slot, Rejection] = {}
        for rejection in self._rejected:
            if rejection[0].slot in rejected:
                break  # another transaction rejects it again after a rollback: that is another dead letter
            rejected[rejection[0].slot] = rejection

        def revised(message: StoredMessage) -> bytes:
            delivery, _, outcome = rejected[message.slot]
            if not isinstance(outcome, Modified):
                return message.properties
            return modified(message.properties, outcome, redelivered=delivery.redelivered)

        letters = await self._nodes.broker.dead_letters([delivery for delivery, _, _ in rejected.values()], revised)
        for (_, work, _), letter in zip(rejected.values(), letters, strict=False):
            if letter is not None:
                with suppress(XaError):  # the transaction is doomed already
                    work.publish(letter)
        del self._rejected[: len(letters)]

    def release(self, deliveries: Sequence[Held]) -> None:
        """Undo the consumption of deliveries, because the branch is rolled back before it voted."""
        for kept in cast("Sequence[KeptDelivery]", deliveries):
            assert kept.taken is not None
            assert kept.released is not None
            kept.taken.queue.end_hold(kept.taken)
            kept.released()

    # -- the end

    def close(self, taken: Sequence[object]) -> None:
        """See :class:`Origin`."""
        self._open = False
        nodes, index = self._nodes, self._queue.index
        if self._getting:
            index.cancel_get(self)
        returning = self._returning(taken)
        was_last = index.cancel(self._consumer, nodes.now())
        nodes.home.slices.run(returning)
        if self._made or (was_last and self._queue.spec.auto_delete):
            nodes.remove(nodes.vhost.remove_queue(self._queue))
