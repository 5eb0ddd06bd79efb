"""Requests of operators to the store: those of a client, without a connection.

They have the checks, effects and errors of the AMQP methods, because they take the same way.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeVar

from dtx.auth.accounts import Account
from dtx.auth.permissions import Permission
from dtx.log.api import LogError
from dtx.log.changes import StoredMessage
from dtx.manager import Requester
from dtx.server.limits import MAX_FRAME
from dtx.server.standalone.access import Access
from dtx.server.standalone.client import Parts, VirtualHostUser
from dtx.server.standalone.contexts import Settled, Settlement, give_back
from dtx.server.standalone.declarations import Declarations
from dtx.server.standalone.message_routing import MessageRouting
from dtx.store.postgres.consumers import QueueDelivery
from dtx.store.postgres.topology import VirtualHost
from dtx.store.work import HeldPublish
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.codec import Method
from dtx.wire.amqp09.content import HEADER_OVERHEAD, check_size
from dtx.xa.codes import ReplyCode, XaError

_T = TypeVar("_T")
_PATIENCE: Final = 30.0
"""Seconds for the contents of all messages of one request."""
_LINE_ENDS: Final = re.compile(rb"[\r\n]")
"""Removed from the names that clients declare: an operator would get an object of another name."""
_METHODS: Final[dict[type[Method], Callable[[Declarations, Any], None]]] = {
    methods.ExchangeDeclare: Declarations.exchange_declare,
    methods.ExchangeDelete: Declarations.exchange_delete,
    methods.ExchangeBind: Declarations.bind,
    methods.ExchangeUnbind: Declarations.bind,
    methods.QueueDeclare: Declarations.queue_declare,
    methods.QueueDelete: Declarations.queue_delete,
    methods.QueueBind: Declarations.bind,
    methods.QueueUnbind: Declarations.bind,
    methods.QueuePurge: Declarations.queue_purge,
}


class _RoleAccount(Account):
    """An operator whose role decides, not the permissions of a user."""

    def may(self, vhost: str, permission: Permission, name: bytes) -> bool:  # noqa: ARG002
        """Yes."""
        return True

    def may_use_topic(self, vhost: str, permission: Permission, exchange: bytes, key: bytes) -> bool:  # noqa: ARG002
        """Yes."""
        return True


class OperatorBroker:
    """The broker, for operators.

    Args:
        parts: the objects that all clients share.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.accounts = parts.accounts
        """The users of clients."""
        self.virtual_host: Callable[[str], VirtualHost] = parts.broker.virtual_host
        """Returns the virtual host of a name, which must exist."""
        self.counts = parts.broker.counts
        """What has happened to messages."""

    def user(self, name: str, vhost: str, *, by_role: bool) -> "OperatorRequests":
        """See :class:`~dtx.admin.api_context.OwnBroker`."""
        account = (_RoleAccount if by_role else Account)(self._parts.accounts, name)
        if not by_role and not account.may_enter(vhost):
            raise XaError(ReplyCode.ACCESS_REFUSED, f"access to vhost '{vhost}' refused for user '{name}'")
        return OperatorRequests(self._parts, account, self.virtual_host(vhost))


@dataclass(frozen=True, slots=True)
class Got:
    """A message that was taken from a queue.

    Args:
        message: the message, perhaps without the end of its body.
        size: bytes of the whole body.
        redelivered: whether it may have been delivered before.
        remaining: ready messages after it.
    """

    message: StoredMessage
    size: int
    redelivered: bool
    remaining: int


class OperatorRequests:
    """The requests of one operator in one virtual host.

    Args:
        parts: the objects that all clients share.
        account: the operator.
        vhost: the virtual host.
    """

    def __init__(self, parts: Parts, account: Account, vhost: VirtualHost) -> None:
        self._user = VirtualHostUser(
            parts=parts,
            who=Requester(account.name, vhost.name),
            vhost=vhost,
            access=Access(parts.accounts, account, vhost),
            wait_for_disk=_refuse_for_disk,
        )

    def _check_frame(self, size: int) -> None:
        """Refuse a frame that a client could not send: dtx could not send its contents to a client, either.

        Making the frame of a method refuses names of more than 255 bytes.

        Raises:
            XaError: 406, it has more bytes than frame-max.
        """
        most = self._user.parts.limits.frame_max or MAX_FRAME
        if size > most:
            raise XaError(ReplyCode.PRECONDITION_FAILED, f"a frame of {size} bytes exceeds frame-max, {most} bytes")

    async def request(self, method: Method) -> None:
        """Do what *method* requests, a method of :data:`_METHODS`; done when it is durable.

        Raises:
            XaError, WireError: as for a client.
            LogError: it is not durable, or the outcome is not known.
        """
        self._check_frame(len(method.frame(0)))
        match method:
            case methods.QueueDeclare(queue=name) if not name or _LINE_ENDS.search(name):
                raise XaError(ReplyCode.PRECONDITION_FAILED, "the name of a queue is empty or has line ends")
            case methods.ExchangeDeclare(exchange=name) if _LINE_ENDS.search(name):
                raise XaError(ReplyCode.PRECONDITION_FAILED, "the name of an exchange has line ends")
        order = _Order()
        _METHODS[type(method)](Declarations(self._user, order), method)
        if order.work is not None:
            await order.work

    async def publish(self, method: methods.BasicPublish, properties: bytes, body: bytes) -> bool:
        """Publish a message. Returns whether a queue has taken it, durably.

        Raises:
            XaError, WireError: as for a client; 506 while the disk is nearly full.
            LogError: the outcome is not known.
        """
        self._check_frame(len(method.frame(0)))
        self._check_frame(len(properties) + HEADER_OVERHEAD)
        check_size(len(body), self._user.parts.limits.max_message_bytes)
        routed = _Routed()
        MessageRouting(self._user, routed).publish(method, properties, body, 0, routed)
        message = routed.message
        assert message is not None, "routing passes each message on, or raises"
        if not message.queues:
            if not self._user.parts.direct.deliver(self._user.who.vhost, message):
                self._user.broker.counts.return_unroutable += 1
            return False
        return not await self._submit((message,), ())

    async def _submit(self, publishes: Sequence[HeldPublish], acked: Sequence[QueueDelivery]) -> Sequence[int]:
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(error: LogError | None) -> None:
            if not written.done():
                written.set_result(None) if error is None else written.set_exception(error)

        refused = self._user.broker.submit(self._user.who.vhost, publishes, acked, done)
        await written
        return refused

    async def get(
        self, name: bytes, count: int, how: str, most: int, keep: int, show: Callable[[list[Got]], Awaitable[_T]]
    ) -> _T:
        """Take messages from a queue as basic.get does, then settle all.

        Messages that are not settled return to the queue. That does not count towards its delivery limit.

        Args:
            name: of the queue.
            count: number of messages at most.
            how: a value of :class:`Settlement`.
            most: bytes of bodies and properties at most; the message that exceeds them stays, as do those after it.
            keep: bytes of each body that count and are needed.
            show: makes the answer, before the messages are settled. They are not settled if it raises.

        Raises:
            XaError: as for a client; 406, the first message alone has more than *most* bytes; 541, it takes too long.
            LogError: the settlement is not durable, or its outcome is not known.
        """
        user, settlement = self._user, Settlement(how)
        user.require(Permission.READ, "queue", name)
        index = user.vhost.find_queue(name, user).index
        found: list[Got] = []
        taken: list[QueueDelivery] = []
        settled = 0
        try:
            async with asyncio.timeout(_PATIENCE):
                while len(found) < count:
                    getter = _Getter(taken, user.now)
                    index.get(getter, user.now())
                    try:
                        answer = await getter.answer
                    finally:
                        index.cancel_get(getter)
                    if answer is None:
                        break
                    message, remaining = answer
                    size = len(message.body)
                    most -= min(size, keep) + len(message.properties)
                    if most < 0:
                        break
                    if size > keep:
                        message = message._replace(body=message.body[:keep])
                    found.append(Got(message, size, taken[-1].redelivered, remaining))
                    await asyncio.sleep(0)
                if taken and not found:
                    raise XaError(ReplyCode.PRECONDITION_FAILED, "the message is too long for this API: use truncate")
                shown = await show(found)
            settled = len(found)
            if settled and settlement is Settlement.ACK:
                await self._submit((), taken[:settled])
            elif settlement is Settlement.REJECT:
                give_back(taken[:settled], settlement, user.now())
            else:  # a look must not use up the delivery limit of a queue
                index.requeue(taken[:settled], user.now())
        except TimeoutError:
            raise XaError(ReplyCode.INTERNAL_ERROR, "the contents of a message could not be read in time") from None
        finally:
            index.requeue(taken[settled:], user.now())
        return shown


class _Order:
    """The order of a channel with one method. Its answer frame is not needed."""

    number = 0

    def __init__(self) -> None:
        self.work: Coroutine[Any, Any, bytes] | None = None

    def send(self, frame: bytes) -> None:
        """Nothing: no client waits for the frame."""

    def after_writes(self, act: Callable[[], None], key: int) -> None:  # noqa: ARG002 - see AnswerOrder
        """Call *act*: there are no earlier writes."""
        act()

    def run(self, work: Coroutine[Any, Any, bytes], key: int) -> None:  # noqa: ARG002 - see AnswerOrder
        """Keep *work* for the caller."""
        self.work = work


class _Routed:
    """The context of one publish, which keeps the routed message."""

    outlives_the_connection = False
    message: HeldPublish | None = None

    @property
    def reply_address(self) -> bytes:
        """Operators do not consume."""
        raise XaError(ReplyCode.PRECONDITION_FAILED, "fast reply consumer does not exist")

    def publish(self, message: HeldPublish, number: int) -> None:  # noqa: ARG002 - there are no confirms
        """Keep *message*."""
        self.message = message

    def settle(self, deliveries: Settled, how: Settlement) -> None:
        """Never called: there are no deliveries."""

    def shut_down(self) -> None:
        """Nothing is held."""


class _Getter:
    """One basic.get. If the request has ended before the answer, the message returns to its queue.

    Args:
        taken: gets the delivery at once: the request may end in the turn that has the answer.
        clock: of the queue.
    """

    no_ack = False

    def __init__(self, taken: list[QueueDelivery], clock: Callable[[], float]) -> None:
        self.answer: asyncio.Future[tuple[StoredMessage, int] | None] = asyncio.get_running_loop().create_future()
        self._taken = taken
        self._clock = clock

    def got(self, found: tuple[QueueDelivery, StoredMessage] | None, remaining: int) -> None:
        """The answer; see :class:`~dtx.store.postgres.consumers.Getter`."""
        if found is None:
            if not self.answer.done():
                self.answer.set_result(None)
            return
        delivery, message = found
        if self.answer.done():
            asyncio.get_running_loop().call_soon(lambda: delivery.queue.requeue((delivery,), self._clock()))
        else:
            self._taken.append(delivery)
            self.answer.set_result((message, remaining))


def _refuse_for_disk() -> NoReturn:
    raise XaError(ReplyCode.RESOURCE_ERROR, "low on disk")
