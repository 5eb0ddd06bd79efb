"""Links from senders: messages for queues and exchanges."""

from asyncio import Future
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from dtx.server.amqp10.addresses import Address, ExchangeAddress, parse
from dtx.server.amqp10.errors import amqp_error
from dtx.server.amqp10.mapping import to_basic
from dtx.server.amqp10.nodes import Destination
from dtx.server.amqp10.work import Work, spoil
from dtx.store.work import HeldPublish
from dtx.wire.amqp09.errors import WireError
from dtx.wire.amqp10 import message as messages
from dtx.wire.amqp10.coordination import Transaction, WorkRefused, provisional
from dtx.wire.amqp10.endpoint import Delivered
from dtx.wire.amqp10.errors import AmqpError, Condition
from dtx.wire.amqp10.link import Link
from dtx.wire.amqp10.performatives import ACCEPTED, Accepted, DeliveryState, Outcome, Rejected, Role, told
from dtx.wire.amqp10.session import Session
from dtx.xa.codes import XaError

if TYPE_CHECKING:
    from dtx.server.amqp10.connection import Connection

CREDIT: Final = 1000
"""Messages that a client may send before it hears of the first."""
_FORMAT: Final = 0
_FATAL: Final = (Condition.NOT_FOUND, Condition.UNAUTHORIZED_ACCESS)
"""What is wrong with a target, and not with one message for it: what comes next would fare no better."""


class Incoming:
    """One link from a client to a node.

    Args:
        connection: of the client.
        session, link: the engine's ends.
        address: of the node; ``None``: each message says where it goes (``to``).
        node: where messages go.
    """

    def __init__(
        self, connection: "Connection", session: Session, link: Link, address: Address | None, node: Destination
    ) -> None:
        self._connection = connection
        self._session = session
        self.place = session.channel, link.handle
        self._link = link
        self._address = address
        self._node = node
        self._open = True
        self._cut_off = False
        """It has been ended here: its client would have heard of what it has sent."""
        node.begin(self)

    # -- messages

    def replenish(self) -> None:
        """The client may send more: something has come, or came to nothing."""
        if self._link.credit <= CREDIT // 2:
            self._link.grant(CREDIT)

    def delivered(self, event: Delivered) -> None:
        """A message has come."""
        self.replenish()
        number = None if event.settled else event.delivery_id
        try:
            transaction = self._connection.coordination.posting(event.session, event.states)
        except WorkRefused as refusal:
            if refusal.terminates is not None:
                self._connection.terminate(refusal.terminates, told(refusal.error))
            self._refuse(number, refusal.error, None)
            return
        try:
            message = self._message(event)
            if transaction is None:
                self._node.send(number, message)
            else:
                self._post(number, transaction, message)
        except (AmqpError, WireError, XaError) as error:
            self._refuse(number, amqp_error(error), transaction)

    def _message(self, event: Delivered) -> HeldPublish:
        """The message, addressed.

        Raises:
            AmqpError, WireError, XaError: it cannot be taken.
        """
        if event.message_format != _FORMAT:
            raise AmqpError(Condition.NOT_IMPLEMENTED, f"message-format {event.message_format} is not known")
        found = messages.read(event.payload)
        address = parse(found.properties.to) if self._address is None else self._address
        return self._node.address(address, found.properties.subject, to_basic(found))

    def _answer(self, number: int | None, state: DeliveryState) -> None:
        if number is not None and self._open:
            self._session.dispose(Role.RECEIVER, (number,), state, settled=True)

    def _refuse(self, number: int | None, error: AmqpError, transaction: Transaction | None) -> None:
        rejected = Rejected(error=told(error))
        if number is not None:
            self._answer(number, rejected if transaction is None else provisional(transaction, rejected))
        elif transaction is None:
            self._connection.detach(self, error)
        else:
            spoil(transaction, self._connection.transactions.work(transaction), error.reason)
        if number is not None and error.condition in _FATAL and not self._varies:
            self._connection.detach(self, error)

    @property
    def _varies(self) -> bool:
        """Whether each message says where it goes, so that the next one may go well."""
        return self._address is None or (isinstance(self._address, ExchangeAddress) and self._address.key is None)

    # -- in a transaction

    def _post(self, number: int | None, transaction: Transaction, message: HeldPublish) -> None:
        work = self._connection.transactions.work(transaction)
        verdict = self._node.judge(message)
        if isinstance(verdict, Future):
            work.publish(message)
            work.wait_for(verdict)
            verdict.add_done_callback(partial(self._judged, number, transaction, work, message))
            return
        if isinstance(verdict, Accepted):
            work.publish(message)
        self._answer(number, provisional(transaction, verdict))

    def _judged(
        self,
        number: int | None,
        transaction: Transaction,
        work: Work,
        message: HeldPublish,
        verdict: Future[AmqpError | None],
    ) -> None:
        if verdict.cancelled():
            work.doom("nobody knows whether one of its messages could be taken")
            return
        error = verdict.result()
        if error is None and number is not None and self._cut_off:
            # "must inform the controller of the presumptive terminal outcome before it can successfully discharge"
            spoil(transaction, work, "a link has ended before its client has heard of a message")
        elif error is None:
            self._answer(number, provisional(transaction, ACCEPTED))
        else:
            work.withdraw(message)
            if number is None or not self._open:  # or who is told?
                spoil(transaction, work, error.reason)
            else:
                self._refuse(number, error, transaction)
        self._connection.pump()

    # -- what becomes of them

    def answer(self, deliveries: Sequence[int], outcome: Outcome) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Sender`."""
        if self._open:
            self._session.dispose(Role.RECEIVER, deliveries, outcome, settled=True)
            self._connection.pump()

    def reject(self, delivery: int | None, error: AmqpError) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Sender`."""
        self._refuse(delivery, error, None)
        self._connection.pump()

    def fail(self, error: AmqpError) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Sender`."""
        self._connection.detach(self, error)

    # -- the end

    def let_go(self, *, by_client: bool = False) -> None:
        """The link is gone: what has come is on its way.

        Args:
            by_client: it is the client that has ended it, and with it what it would have heard on it.
        """
        self._open = False
        self._cut_off = not by_client
        self._node.close()

    def refuse(self, error: AmqpError) -> None:
        """End the link with *error*."""
        self._link.detach(told(error))
