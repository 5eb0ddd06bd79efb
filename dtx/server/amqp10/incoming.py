"""Links from senders: messages for queues and exchanges."""

from typing import TYPE_CHECKING, Final

from dtx.log.api import LogError
from dtx.server.amqp10.addresses import Address, QueueAddress, parse
from dtx.server.amqp10.errors import amqp_error
from dtx.server.amqp10.mapping import to_basic
from dtx.store.postgres.copies import sender_selected
from dtx.store.postgres.exchanges import describe
from dtx.store.postgres.permissions import Permission
from dtx.store.work import HeldPublish
from dtx.wire.amqp09 import properties
from dtx.wire.amqp09.errors import WireError
from dtx.wire.amqp09.properties import Property
from dtx.wire.amqp10 import message as messages
from dtx.wire.amqp10.coordination import Transaction, WorkRefused, provisional
from dtx.wire.amqp10.errors import AmqpError, Condition
from dtx.wire.amqp10.events import Delivered
from dtx.wire.amqp10.link import Link
from dtx.wire.amqp10.performatives import Role
from dtx.wire.amqp10.session import Session
from dtx.wire.amqp10.states import ACCEPTED, RELEASED, DeliveryState, Rejected, told
from dtx.xa.codes import ReplyCode, XaError

if TYPE_CHECKING:
    from dtx.server.amqp10.connection import Connection

CREDIT: Final = 1000
"""Messages that a client may send before it hears of the first."""
_FORMAT: Final = 0


class Incoming:
    """One link from a client to a node.

    Args:
        connection: of the client.
        session, link: the engine's ends.
        address: of the node; ``None``: each message says where it goes (``to``).
    """

    def __init__(self, connection: "Connection", session: Session, link: Link, address: Address | None) -> None:
        self._connection = connection
        self._session = session
        self._link = link
        self._address = address
        self._accepted: list[int] = []
        self._open = True
        if address is not None:
            self._target(address, None)

    def _target(self, address: Address, subject: str | None) -> tuple[bytes, bytes]:
        """Exchange and routing key of *address*.

        Raises:
            XaError: 403, 404.
        """
        connection = self._connection
        if isinstance(address, QueueAddress):
            exchange, key = b"", address.name
            if key not in connection.vhost.queues:
                raise XaError(ReplyCode.NOT_FOUND, f"no {describe('queue', key, connection.vhost.name)}")
        else:
            exchange = address.name
            key = address.key if address.key is not None else (subject or "").encode()
        connection.access.demand(Permission.WRITE, "exchange", exchange)
        connection.vhost.publishable(exchange)
        return exchange, key

    # -- messages

    def replenish(self) -> None:
        """The client may send more: something has come, or came to nothing."""
        if self._link.credit <= CREDIT // 2:
            self._link.grant(CREDIT)

    def delivered(self, event: Delivered) -> None:
        """A message has come."""
        self.replenish()
        try:
            transaction = self._connection.coordination.posting(event.session, event.states)
        except WorkRefused as refusal:
            if refusal.terminates is not None:
                self._connection.terminate(refusal.terminates, told(refusal.error))
            self._refuse(event, refusal.error, None)
            return
        work = None if transaction is None else self._connection.transactions.work(transaction)
        try:
            message = self._message(event)
            if work is not None:
                work.publish(message)
        except (AmqpError, WireError, XaError) as error:
            refused = amqp_error(error)
            if work is not None and transaction is not None and event.settled:
                # "it MUST NOT allow the successful discharge of the associated transaction" (4.4.4.1)
                transaction.doom = AmqpError(Condition.ROLLBACK, refused.reason)
                work.spoil(refused)
            else:
                self._refuse(event, refused, transaction)
            return
        outcome = ACCEPTED if message.queues else RELEASED
        if transaction is not None:
            self._answer(event, provisional(transaction, outcome))
        elif message.queues:
            self._connection.writes.publish(self, -1 if event.settled else event.delivery_id, message)
        else:
            self._connection.direct.deliver(self._connection.vhost.name, message)
            self._answer(event, outcome)

    def _message(self, event: Delivered) -> HeldPublish:
        """The message, judged and routed.

        Raises:
            AmqpError, WireError, XaError: it cannot be taken.
        """
        if event.message_format != _FORMAT:
            raise AmqpError(Condition.NOT_IMPLEMENTED, f"message-format {event.message_format} is not known")
        found = messages.read(event.payload)
        address = parse(found.properties.to) if self._address is None else self._address
        exchange, key = self._target(address, found.properties.subject)
        content = to_basic(found)
        connection = self._connection
        connection.access.demand_topic(Permission.WRITE, exchange, key)
        view = properties.read(content.properties)
        connection.access.judge(view)
        more, _ = sender_selected(content.properties)
        queues = connection.vhost.route(exchange, key, view.value(Property.HEADERS) or b"", more)
        return HeldPublish(
            exchange, key, False, content.properties, content.body, None, tuple(queue.spec.id for queue in queues)
        )

    def _answer(self, event: Delivered, state: DeliveryState) -> None:
        if not event.settled:
            self._session.dispose(Role.RECEIVER, (event.delivery_id,), state, settled=True)

    def _refuse(self, event: Delivered, error: AmqpError, transaction: Transaction | None) -> None:
        if event.settled:
            self._connection.detach(self, error)
            return
        rejected = Rejected(error=told(error))
        self._answer(event, rejected if transaction is None else provisional(transaction, rejected))

    # -- what becomes of them

    def written(self, number: int, error: LogError | None) -> None:
        """A message is durable, or may not be."""
        if error is not None:
            self._connection.detach(self, AmqpError(Condition.INTERNAL_ERROR, "the database failed"))
        elif number >= 0:
            self._accepted.append(number)

    def refused(self, number: int) -> None:
        """A full queue does not take a message."""
        if number >= 0 and self._open:
            error = AmqpError(Condition.RESOURCE_LIMIT_EXCEEDED, "a queue is full (reject-publish)")
            self._session.dispose(Role.RECEIVER, (number,), Rejected(error=told(error)), settled=True)
            self._connection.pump()

    def say_confirms(self) -> None:
        """All that is known at present was told."""
        accepted, self._accepted = self._accepted, []
        if accepted and self._open:
            self._session.dispose(Role.RECEIVER, accepted, ACCEPTED, settled=True)
            self._connection.pump()

    # -- the end

    def let_go(self) -> None:
        """The link is gone: what has come is on its way."""
        self._open = False

    def refuse(self, error: AmqpError) -> None:
        """End the link with *error*."""
        self._link.detach(told(error))
