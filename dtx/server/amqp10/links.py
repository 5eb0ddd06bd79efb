"""Links that a client attaches: to the coordinator, from senders to nodes, from nodes to receivers.

A receiver gets messages within its credit. It may acquire them in a transaction: then each delivery names the
transaction, which decides over the delivery and its outcome together (4.4.3, 4.4.4.3). Nothing is sent in a transaction
that can only be rolled back.
"""

from asyncio import Future
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeVar

from dtx.server.amqp10.addresses import COPY, MOVE, Address, ExchangeAddress, check_terminus, parse
from dtx.server.amqp10.mapping import from_basic, to_basic
from dtx.server.amqp10.nodes import Destination, Handed, Origin, amqp_error, discards
from dtx.server.amqp10.transactions import Retired, TransactionHome, Transactions, TransactionWork, doom_unreported
from dtx.server.connection import Outbox
from dtx.server.limits import MAX_UNACKED
from dtx.store.work import HeldPublish
from dtx.wire.amqp09.errors import WireError
from dtx.wire.amqp10 import message as messages
from dtx.wire.amqp10.coordination import (
    TXN_ID,
    Amqp10Transaction,
    CoordinationEngine,
    WorkRefused,
    default_outcome,
    provisional,
)
from dtx.wire.amqp10.coordination import Work as Kind
from dtx.wire.amqp10.endpoint import Delivered, Flowed
from dtx.wire.amqp10.errors import AmqpError, Condition
from dtx.wire.amqp10.link import Link
from dtx.wire.amqp10.performatives import (
    ACCEPTED,
    RELEASED,
    Accepted,
    Attach,
    Coordinator,
    DeliveryState,
    Error,
    ExpiryPolicy,
    Modified,
    Outcome,
    ReceiverSettles,
    Rejected,
    Released,
    Role,
    SenderSettles,
    Source,
    Target,
    peer_error,
)
from dtx.wire.amqp10.session import Session
from dtx.wire.amqp10.values import Described
from dtx.xa.codes import XaError

CREDIT: Final = 1000
"""Messages that a client may send before the first one is answered."""
_MAX_BACKLOG: Final = 1 << 20
"""Bytes that may wait for the session windows of a client. Beyond it, its links send nothing."""
_SETTLED_AT_ONCE: Final = 500
"""Deliveries that are settled in one step, which takes at most 1 ms."""
_FORMAT: Final = 0
_FATAL: Final = (Condition.NOT_FOUND, Condition.UNAUTHORIZED_ACCESS)
"""Errors of a target, not of one message: later messages would fail too."""
_OUTCOMES: Final = tuple(kind.layout.symbol for kind in (Accepted, Rejected, Released, Modified))
_Node = TypeVar("_Node")


class LinkHome(TransactionHome, Protocol):
    """The connection, as its links see it."""

    coordination: CoordinationEngine
    transactions: Transactions
    outbox: Outbox

    def pump(self) -> None:
        """Move the engine's output to the outbox."""

    def detach(self, shell: "Incoming | OutgoingLink", error: AmqpError) -> None:
        """End a link because of *error*."""

    def terminate(self, control: tuple[int, int], error: Error) -> None:
        """End a control link, and its transactions with it."""


class _Shell:
    """One link.

    Args:
        connection: the connection of the client.
        session, link: the engine's objects.
    """

    def __init__(self, connection: LinkHome, session: Session, link: Link) -> None:
        self._connection = connection
        self.session = session
        self._link = link
        self.place = session.channel, link.handle

    def replenish(self) -> None:
        """Grant credit if half of it is used."""
        if self._link.credit <= CREDIT // 2:
            self._link.grant(CREDIT)

    def detach(self, error: Error) -> None:
        """End the link with *error*."""
        self._link.detach(error)


class Control(_Shell):
    """A link to the coordinator."""

    def shut_down(self) -> None:
        """Lose the transactions of the link, because it is closed."""
        self._connection.transactions.lose(self._connection.coordination.control_closed(self.place))


class Incoming(_Shell):
    """One link from a client to a node.

    Args:
        connection: the connection of the client.
        session, link: the engine's objects.
        address: the address of the node; ``None`` if each message names it (``to``).
        node: the destination of the messages.
    """

    def __init__(
        self, connection: LinkHome, session: Session, link: Link, address: Address | None, node: Destination
    ) -> None:
        super().__init__(connection, session, link)
        self._address = address
        self._node = node
        self._open = True
        self._cut_off = False
        """Whether dtx has ended the link, so the client can get no more outcomes on it."""
        node.begin(self)

    # -- messages

    def delivered(self, event: Delivered) -> None:
        """Handle a message."""
        self.replenish()
        number = None if event.settled else event.delivery_id
        try:
            transaction = self._connection.coordination.posting(event.session, event.states)
        except WorkRefused as refusal:
            if refusal.terminates is not None:
                self._connection.terminate(refusal.terminates, peer_error(refusal.error))
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
        """Read and address a message.

        Raises:
            AmqpError, WireError, XaError: it is refused.
        """
        if event.message_format != _FORMAT:
            raise AmqpError(Condition.NOT_IMPLEMENTED, f"message-format {event.message_format} is not known")
        found = messages.read(event.payload)
        address = parse(found.properties.to) if self._address is None else self._address
        return self._node.address(address, found.properties.subject, to_basic(found))

    def _answer(self, number: int | None, state: DeliveryState) -> None:
        if number is not None and self._open:
            self.session.dispose(Role.RECEIVER, (number,), state, settled=True)

    def _refuse(self, number: int | None, error: AmqpError, transaction: Amqp10Transaction | None) -> None:
        rejected = Rejected(error=peer_error(error))
        if number is not None:
            self._answer(number, rejected if transaction is None else provisional(transaction, rejected))
        elif transaction is None:
            self._connection.detach(self, error)
        else:
            doom_unreported(transaction, self._connection.transactions.work(transaction), error.reason)
        if number is not None and error.condition in _FATAL and not self._varies:
            self._connection.detach(self, error)

    @property
    def _varies(self) -> bool:
        """Whether each message names its destination, so the next one may succeed."""
        return self._address is None or (isinstance(self._address, ExchangeAddress) and self._address.key is None)

    # -- in a transaction

    def _post(self, number: int | None, transaction: Amqp10Transaction, message: HeldPublish) -> None:
        work = self._connection.transactions.work(transaction)
        validation = self._node.validate(message)
        if isinstance(validation, Future):
            work.publish(message)
            work.wait_for(validation)
            validation.add_done_callback(partial(self._validated, number, transaction, work, message))
            return
        if isinstance(validation, Accepted):
            work.publish(message)
        self._answer(number, provisional(transaction, validation))

    def _validated(
        self,
        number: int | None,
        transaction: Amqp10Transaction,
        work: TransactionWork,
        message: HeldPublish,
        validation: Future[AmqpError | None],
    ) -> None:
        if validation.cancelled():
            work.doom("it is not known whether one of its messages could be taken")
            return
        error = validation.result()
        if error is None and number is not None and self._cut_off:
            # "must inform the controller of the presumptive terminal outcome before it can successfully discharge"
            doom_unreported(transaction, work, "a link ended before its client got the outcome of a message")
        elif error is None:
            self._answer(number, provisional(transaction, ACCEPTED))
        else:
            work.withdraw(message)
            if number is None or not self._open:  # no outcome can be sent
                doom_unreported(transaction, work, error.reason)
            else:
                self._refuse(number, error, transaction)
        self._connection.pump()

    # -- outcomes

    def answer(self, deliveries: Sequence[int], outcome: Outcome) -> None:
        """See :class:`~dtx.server.amqp10.nodes.NodeSender`."""
        if self._open:
            self.session.dispose(Role.RECEIVER, deliveries, outcome, settled=True)
            self._connection.pump()

    def reject(self, delivery: int | None, error: AmqpError) -> None:
        """See :class:`~dtx.server.amqp10.nodes.NodeSender`."""
        self._refuse(delivery, error, None)
        self._connection.pump()

    def fail(self, error: AmqpError) -> None:
        """See :class:`~dtx.server.amqp10.nodes.NodeSender`."""
        self._connection.detach(self, error)

    # -- the end

    def shut_down(self, *, by_client: bool = False) -> None:
        """Close the node, because the link is closed. Messages that were received are still published.

        Args:
            by_client: the client has ended the link, and so needs no more outcomes on it.
        """
        self._open = False
        self._cut_off = not by_client
        self._node.close()


class _InWork(NamedTuple):
    """A transaction, and its work."""

    transaction: Amqp10Transaction
    work: TransactionWork


class OutgoingLink(_Shell):
    """One link from a node to a client.

    Args:
        connection: the connection of the client.
        session, link: the engine's objects.
        node: the origin of the messages.
        settled: messages are settled when they are sent.
        default: the outcome of a delivery that is settled without one.

    Raises:
        XaError: the node refuses the link.
    """

    def __init__(
        self, connection: LinkHome, session: Session, link: Link, node: Origin, *, settled: bool, default: Outcome
    ) -> None:
        super().__init__(connection, session, link)
        self.node = node
        self._settled = settled
        self._default = default
        self._sent = 0
        self._open = True
        self.unsettled: dict[int, object] = {}
        """The client's unsettled deliveries: messages by the engine's numbers."""
        self.retired: dict[int, Retired] = {}
        """Deliveries whose outcome belongs to a transaction, and that the client has not settled."""
        self._acquires: _InWork | None = None
        """The transaction in which messages are sent."""
        self._acquired: dict[int, _InWork] = {}
        """The unsettled deliveries that were sent in a transaction."""
        self._returning: list[tuple[int, object, bool]] = []
        """Messages that return to the queue: number, message, and whether the client has settled it."""
        node.begin(self)

    # -- messages

    @property
    def full(self) -> bool:
        """See :class:`~dtx.server.amqp10.nodes.Receiver`."""
        return (
            not self._connection.outbox.has_room
            or self.session.connection.backlog > _MAX_BACKLOG
            or len(self.unsettled) + len(self.retired) >= MAX_UNACKED
            or self._only_rolls_back
        )

    @property
    def _only_rolls_back(self) -> bool:
        """Whether messages would only return, because their transaction can only be rolled back."""
        return self._acquires is not None and not self._acquires.work.is_active

    @property
    def credit(self) -> int:
        """See :class:`~dtx.server.amqp10.nodes.Receiver`."""
        return self._link.credit

    @property
    def draining(self) -> bool:
        """See :class:`~dtx.server.amqp10.nodes.Receiver`."""
        return self._link.drain

    def deliver(self, taken: object, message: Handed) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Receiver`. The node may be at work, so errors are handled later."""
        try:
            payload = from_basic(
                message.content, message.exchange, message.routing_key, redelivered=message.redelivered
            )
        except WireError as malformed:
            reason = f"a message of the node cannot be read: {malformed}"
            self._connection.flush_soon(partial(self._give_up, taken, AmqpError(Condition.DECODE_ERROR, reason)))
            return
        self._sent += 1
        acquires = self._acquires
        state = None if acquires is None else provisional(acquires.transaction, ACCEPTED if self._settled else None)
        try:
            number = self._link.send(self._sent.to_bytes(8, "big"), payload, settled=self._settled, state=state)
        except AmqpError as error:  # larger than the client accepts
            self._connection.flush_soon(partial(self._give_up, taken, error))
            return
        if number is None:
            self._connection.flush_soon(lambda: self.node.requeue((taken,)))
        elif not self._settled:
            self.unsettled[number] = taken
            if acquires is not None:
                self._acquired[number] = acquires
        elif acquires is not None:
            acquires.work.retire(self, number, taken, ACCEPTED, settled=True, kind=Kind.ACQUISITION)
            if self._only_rolls_back:
                self._connection.flush_soon(self._end_drain)
        else:
            self.node.accept((taken,))
        self._connection.pump()

    def _give_up(self, taken: object, error: AmqpError) -> None:
        self.node.requeue((taken,))
        self._connection.detach(self, error)

    def drained(self) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Receiver`."""
        self._link.drained()
        self._connection.pump()

    def resume(self) -> None:
        """Resume the node, if there is room again."""
        if self._open and not self.full:
            self.node.resume()

    def flowed(self, event: Flowed) -> None:
        """Handle a flow of the client.

        Raises:
            AmqpError: unknown-id, it names a transaction that is not live; not-implemented, the node is not
                transactional.
        """
        try:
            named = self._connection.coordination.transaction_of_acquisition(
                self.session.channel, event.flow.properties
            )
        except WorkRefused as refusal:
            raise refusal.error from None
        if named is not None and not self.node.transactional:
            raise AmqpError(Condition.NOT_IMPLEMENTED, "nothing can be acquired in a transaction from a stream")
        if named is not None:
            self._acquires = _InWork(named, self._connection.transactions.work(named))
            self._acquires.work.acquires(self)
            # In dtx's flows too: 4.4, "with which transaction future transfers from that link will be performed".
            self._link.properties = {TXN_ID: named.txn_id}
        if event.flow.echo and event.flow.properties:
            self._link.flow()
        self.node.follow()
        self._end_drain()

    # -- messages that are sent in a transaction

    def _end_drain(self) -> None:
        """End a drain at once if nothing more can be sent before the discharge: the client may wait for its end."""
        if self._open and self._only_rolls_back and self._link.drain:
            self.drained()

    def acquire_no_more(self, work: TransactionWork) -> None:
        """Send no more in a transaction that is being discharged (4.4.3)."""
        if self._acquires is not None and self._acquires.work is work:
            self._acquires = self._link.properties = None
            self._connection.flush_soon(self.resume)

    def discharged(self, work: TransactionWork, *, committed: bool) -> None:
        """A transaction has ended: deliveries of it without an outcome stay the client's, or return to the queue."""
        acquired = self._acquired
        # At once, before the slow part: an outcome that comes now must not be held for the ended transaction.
        numbers = [number for number, one in acquired.items() if one.work is work]
        if len(numbers) == len(acquired):
            acquired.clear()
        else:
            for number in numbers:
                del acquired[number]
        if committed or not numbers:
            return
        if self._open:
            self._returning += [(number, self.unsettled.pop(number), False) for number in numbers]
            self._return()
        else:
            self.node.requeue([self.unsettled.pop(number) for number in numbers])

    def give_back(self, number: int, taken: object, *, settled: bool = False) -> None:
        """Return a message that was sent in a transaction that is rolled back.

        Those of one transaction return together: at its discharge, or at the end of this turn of the loop.
        """
        if not self._open:
            self.node.requeue((taken,))
            return
        if not self._returning:
            self._connection.flush_soon(self._return)
        self._returning.append((number, taken, settled))

    def _return(self) -> None:
        self._connection.slices.run(self._return_slowly())

    def _return_slowly(self) -> Iterator[None]:
        returning, self._returning = self._returning, []
        if not returning:
            return
        has_part = False
        for number, _, _ in returning:
            has_part = self.session.abort(number) or has_part
            yield
        self.node.requeue([taken for _, taken, _ in returning])
        for start in range(0, len(returning), _SETTLED_AT_ONCE):
            some = returning[start : start + _SETTLED_AT_ONCE]
            self.settle([number for number, _, settled in some if not settled], RELEASED)
            yield
        if has_part:
            # "MUST abort … before completing the discharge" (4.4.3), but there is no window for an abort on the link
            reason = "the rest of a delivery was rolled back"
            self._connection.detach(self, AmqpError(Condition.ROLLBACK, reason))
        self._connection.flush_soon()

    # -- outcomes

    def disposed(self, deliveries: Sequence[int], state: DeliveryState | None, *, settled: bool) -> Iterator[None]:
        """Handle a disposition of the client. This is long work, see :class:`~dtx.store.slices.Slices`.

        Args:
            deliveries: the engine's numbers of deliveries of this link.
            state: the state that the client gives them.
            settled: whether the client settles them.

        Raises:
            WorkRefused: the state names a transaction that is not live, or a second transaction.
        """
        coordination, channel = self._connection.coordination, self.session.channel
        transaction, outcome = coordination.transaction_of_disposition(channel, state, None)
        if self._acquired:
            for number in deliveries:
                acquired = self._acquired.get(number)
                coordination.transaction_of_disposition(
                    channel, state, None if acquired is None else acquired.transaction
                )
        was_full = self.full
        if transaction is not None:
            yield from self._retire(transaction, deliveries, outcome, settled=settled)
        else:
            self._finish(deliveries, outcome, settled=settled)
            yield
        if was_full:
            self.resume()

    def _finish(self, deliveries: Sequence[int], outcome: DeliveryState | None, *, settled: bool) -> None:
        final = self._final(outcome)
        for retired in [self.retired[number] for number in deliveries if number in self.retired]:
            if retired.work.has_failed:
                retired.later = retired.later or final
            if settled:
                del self.retired[retired.number]
                retired.settled = True
        if final is None and not settled:
            return
        for number in [number for number in deliveries if number in self._acquired]:
            # settled without an outcome: an outcome would have to name the transaction
            self._hold(self._acquired[number].work, number, self._default, settled=True)
        known = [number for number in deliveries if number in self.unsettled]
        self.apply([self.unsettled.pop(number) for number in known], final or self._default)
        if not settled and known:
            answer = final or self._default
            self.node.then(lambda: self.settle(known, answer))

    def _retire(
        self, transaction: Amqp10Transaction, deliveries: Sequence[int], outcome: DeliveryState | None, *, settled: bool
    ) -> Iterator[None]:
        final = self._final(outcome)
        if final is None and not settled:
            return
        work = self._connection.transactions.work(transaction)
        for number in deliveries:
            other = self.retired.get(number)
            if other is not None and other.work is not work:  # not "a different non discharged transaction" (4.4.2)
                reason = "a delivery has outcomes in two transactions"
                raise WorkRefused(AmqpError(Condition.ROLLBACK, reason), transaction.control)
        for number in deliveries:
            if number in self.unsettled:
                self._hold(work, number, final or self._default, settled=settled)
            elif settled and number in self.retired:
                self.retired.pop(number).settled = True
            yield

    def _hold(self, work: TransactionWork, number: int, outcome: Outcome, *, settled: bool) -> None:
        acquired = self._acquired.pop(number, None) is not None
        kind = Kind.ACQUISITION if acquired else Kind.RETIREMENT
        work.retire(self, number, self.unsettled.pop(number), outcome, settled=settled, kind=kind)

    @staticmethod
    def _final(outcome: DeliveryState | None) -> Outcome | None:
        """*outcome*, if it is terminal and dtx knows it."""
        return outcome if isinstance(outcome, Accepted | Rejected | Released | Modified) else None

    def apply(self, taken: Sequence[object], outcome: Outcome) -> None:
        """Apply *outcome* to *taken* messages."""
        if not taken:
            return
        if isinstance(outcome, Modified) and (outcome.delivery_failed or outcome.message_annotations):
            self.node.modify(taken, outcome)
            return
        if isinstance(outcome, Accepted):
            self.node.accept(taken)
        elif discards(outcome):
            self.node.reject(taken)
        else:
            self.node.requeue(taken)

    def settle(self, deliveries: Sequence[int], outcome: Outcome = ACCEPTED) -> None:
        """Send *outcome* for *deliveries* that the client has not settled."""
        if self._open:
            self._link.dispose(deliveries, outcome)
            self._connection.pump()

    def apply_default(self, taken: object) -> None:
        """Apply the default outcome to a message that the client has settled."""
        self.apply((taken,), self._default)

    @property
    def is_open(self) -> bool:
        """Whether the link is attached."""
        return self._open

    # -- the end

    def shut_down(self) -> None:
        """Close the link. Unsettled messages return to the queue. Idempotent."""
        if not self._open:
            return
        self._open = False
        for retired in self.retired.values():
            retired.settled = True
        self.retired.clear()
        taken = list(self.unsettled.values())
        self.unsettled.clear()
        self._acquired.clear()
        self._acquires = None
        returning, self._returning = self._returning, []
        self.node.close([*taken, *(one for _, one, _ in returning)])

    def fail(self, error: AmqpError) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Receiver`."""
        self._connection.detach(self, error)


Shell = Control | Incoming | OutgoingLink


@dataclass(frozen=True, slots=True)
class Attaching:
    """An attach of a client.

    Args:
        connection: the connection of the client.
        session, link: the engine's objects.
        asked: the client's attach.
    """

    connection: LinkHome
    session: Session
    link: Link
    asked: Attach

    def attach(self) -> Shell | Awaitable[Shell]:
        """Find the node, and answer.

        Returns:
            The link; if its node is not known yet, an awaitable of the link, which raises the same errors.

        Raises:
            AmqpError, XaError: the link is refused.
        """
        if self.link.role is Role.SENDER:
            return self._to_client()
        if isinstance(self.asked.target, Coordinator):
            if self.asked.unsettled:
                raise AmqpError(Condition.NOT_ALLOWED, "links to the coordinator cannot be resumed")
            return _with(self.connection.nodes.coordinate(), self._control)
        return self._from_client()

    def _control(self, _: None) -> Control:
        coordination = self.connection.coordination
        self.link.attach(source=self.asked.source, target=Coordinator(capabilities=coordination.advertised))
        control = Control(self.connection, self.session, self.link)
        coordination.control_attached(control.place, self.asked.source)
        self.link.grant(CREDIT)
        return control

    def _from_client(self) -> Shell | Awaitable[Shell]:
        target = self.asked.target
        if not isinstance(target, Target):
            raise AmqpError(Condition.INVALID_FIELD, "the link has no target of a type that dtx knows")
        address = None if target.dynamic or target.address is None else parse(target.address)
        node = self.connection.nodes.destination(address, dynamic=target.dynamic)
        return _with(node, partial(self._incoming, target))

    def _incoming(self, target: Target, node: Destination) -> Incoming:
        shown = node.shown or target.address
        address = None if shown is None else parse(shown)
        shell = Incoming(self.connection, self.session, self.link, address, node)
        self.link.limit = min(self.link.limit, node.limit or self.link.limit)
        self._answer(shell, self.asked.source, Target(address=shown, dynamic=target.dynamic))
        self.link.grant(CREDIT)
        return shell

    def _to_client(self) -> Shell | Awaitable[Shell]:
        source = self.asked.source
        if not isinstance(source, Source):
            raise AmqpError(Condition.INVALID_FIELD, "the link has no source of a type that dtx knows")
        address = None if source.dynamic else parse(source.address)
        subscribes = isinstance(address, ExchangeAddress)
        check_terminus(source, exchange=subscribes)
        node = self.connection.nodes.origin(address, dynamic=source.dynamic, filters=source.filter)
        return _with(node, partial(self._outgoing, source, subscribes))

    def _outgoing(self, source: Source, subscribes: bool, node: Origin) -> OutgoingLink:
        default = default_outcome(source)
        settled = self.asked.snd_settle_mode is SenderSettles.SETTLED
        shell = OutgoingLink(self.connection, self.session, self.link, node, settled=settled, default=default)
        shown = Source(
            address=node.shown or source.address,
            # Messages from an exchange are deleted with the link (3.5.6); a queue keeps its messages.
            expiry_policy=ExpiryPolicy.LINK_DETACH if subscribes else ExpiryPolicy.SESSION_END,
            dynamic=source.dynamic,
            distribution_mode=None if source.distribution_mode is None else COPY if subscribes else MOVE,
            filter=node.filters or None,
            default_outcome=default,
            outcomes=_OUTCOMES,
        )
        self._answer(shell, shown, self.asked.target)
        if self.link.credit:  # granted before the answer
            node.follow()
        return shell

    def _answer(
        self,
        shell: Incoming | OutgoingLink,
        source: Source | Described | None,
        target: Target | Coordinator | Described | None,
    ) -> None:
        modes = self.asked
        second = modes.rcv_settle_mode if isinstance(shell, OutgoingLink) else ReceiverSettles.FIRST
        try:
            self.link.attach(
                source=source, target=target, sender_settles=modes.snd_settle_mode, receiver_settles=second
            )
        except AmqpError:  # the attach does not fit into the client's frames
            shell.shut_down()
            raise


def _with(node: _Node | Awaitable[_Node], then: Callable[[_Node], Shell]) -> Shell | Awaitable[Shell]:
    return _later(node, then) if isinstance(node, Awaitable) else then(node)


async def _later(node: Awaitable[_Node], then: Callable[[_Node], Shell]) -> Shell:
    return then(await node)
