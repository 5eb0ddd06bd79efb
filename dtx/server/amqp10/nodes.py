"""The interface between an AMQP 1.0 connection and the messages: users, virtual hosts, and the nodes of links.

The connection has sessions, links, deliveries and transactions. The other side has queues and exchanges, in dtx itself
(:mod:`dtx.server.standalone.nodes`) or in a broker behind it (:mod:`dtx.server.alongside.amqp10.nodes`). A method that
cannot answer at once returns an awaitable, and the connection handles nothing more until that is done.
"""

from asyncio import Future
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol, assert_never

from dtx.manager import BranchManager, Requester
from dtx.manager.branch_runtime import BranchRuntime
from dtx.server.amqp10.addresses import Address
from dtx.server.amqp10.mapping import Content
from dtx.server.client_session import ClientTransport
from dtx.store.slices import Slices
from dtx.store.work import Budget, Decided, HeldPublish, HeldWork
from dtx.wire.amqp09.errors import WireError
from dtx.wire.amqp10.errors import AmqpError, Condition
from dtx.wire.amqp10.performatives import Login, Modified, Outcome, Rejected, SaslCode
from dtx.xa.codes import ReplyCode, XaError, XaFlag

_CONDITIONS: Final = {
    ReplyCode.ACCESS_REFUSED: Condition.UNAUTHORIZED_ACCESS,
    ReplyCode.NOT_FOUND: Condition.NOT_FOUND,
    ReplyCode.RESOURCE_LOCKED: Condition.RESOURCE_LOCKED,
    ReplyCode.PRECONDITION_FAILED: Condition.PRECONDITION_FAILED,
    ReplyCode.SYNTAX_ERROR: Condition.INVALID_FIELD,
    ReplyCode.COMMAND_INVALID: Condition.ILLEGAL_STATE,
    ReplyCode.RESOURCE_ERROR: Condition.RESOURCE_LIMIT_EXCEEDED,
    ReplyCode.NOT_ALLOWED: Condition.NOT_ALLOWED,
    ReplyCode.NOT_IMPLEMENTED: Condition.NOT_IMPLEMENTED,
    ReplyCode.INTERNAL_ERROR: Condition.INTERNAL_ERROR,
}


def amqp_error(error: XaError | WireError | AmqpError) -> AmqpError:
    """Convert *error* to the error that the client gets."""
    if isinstance(error, AmqpError):
        return error
    if isinstance(error, WireError):
        return AmqpError(Condition.INVALID_FIELD, str(error))
    return AmqpError(_CONDITIONS[error.code], error.reason)


def rolled_back(flag: XaFlag) -> AmqpError:
    """The error of a discharge that did not commit, by the manager's flag, which begins with ``rb``."""
    if flag is XaFlag.RBTIMEOUT:
        return AmqpError(Condition.TIMEOUT, "the transaction took too long and is rolled back")
    return AmqpError(Condition.ROLLBACK, "the transaction is rolled back")


def failure_of(answer: XaFlag) -> AmqpError | None:
    """The error of a discharge whose branch was committed in one phase with *answer*; ``None``: it succeeded."""
    match answer:
        case XaFlag.OK | XaFlag.RDONLY | XaFlag.HEURCOM:
            return None
        case XaFlag.RBROLLBACK | XaFlag.RBTIMEOUT | XaFlag.HEURRB:
            return rolled_back(answer)
        case XaFlag.HEURMIX | XaFlag.HEURHAZ:
            reason = "an operator ended the transaction: a part of it may be committed"
            return AmqpError(Condition.INTERNAL_ERROR, reason)
        case _:
            assert_never(answer)


DEFAULT_VHOST: Final = "/"
_VHOST: Final = "vhost:"


def named_vhost(hostname: str | None) -> str | None:
    """The virtual host in *hostname* after the prefix ``vhost:``, as in RabbitMQ; ``None`` without that prefix."""
    return hostname.removeprefix(_VHOST) if hostname is not None and hostname.startswith(_VHOST) else None


class Handed(NamedTuple):
    """A message that an origin hands out.

    Args:
        content: the message.
        exchange: the exchange of its publish.
        routing_key: the key of its publish.
        redelivered: it may have been handed out before.
    """

    content: Content
    exchange: bytes
    routing_key: bytes
    redelivered: bool


class Home(Protocol):
    """The connection, as its nodes see it."""

    id: int
    manager: BranchManager
    budget: Budget
    who: Requester
    slices: Slices

    def hold_client(self, reason: object) -> None:
        """Read no more from the client until *reason* is released."""

    def release_client(self, reason: object) -> None:
        """Remove *reason*; read again if no other is left."""

    def flush_soon(self, work: Callable[[], None] | None = None) -> None:
        """Flush at the end of this turn of the loop, after *work*."""

    def fail(self, error: AmqpError) -> None:
        """Close the connection with *error*. Idempotent."""


class NodeSender(Protocol):
    """A link from a client, as its destination sees it."""

    def answer(self, deliveries: Sequence[int], outcome: Outcome) -> None:
        """Send the *outcome* of messages, by their delivery ids."""

    def reject(self, delivery: int | None, error: AmqpError) -> None:
        """Reject a message; if it was sent settled (``None``), end the link."""

    def fail(self, error: AmqpError) -> None:
        """End the link. Idempotent."""


class Destination(Protocol):
    """The target node of a link from a client."""

    @property
    def shown(self) -> str | None:
        """The address of a node that was made for the link; ``None``: the address that the client sent."""

    @property
    def limit(self) -> int | None:
        """The largest message in bytes that the node takes; ``None`` for the limit of the connection."""

    def begin(self, sender: NodeSender) -> None:
        """Set the link, which gets the outcomes."""

    def address(self, address: Address, subject: str | None, content: Content) -> HeldPublish:
        """Address a message.

        Args:
            address: the address of the node.
            subject: the subject of the message: the routing key if the address has none.
            content: the message.

        Raises:
            AmqpError, WireError, XaError: the message is refused.
        """

    def send(self, delivery: int | None, message: HeldPublish) -> None:
        """Publish *message*. The sender gets the outcome of *delivery*; ``None``: no outcome."""

    def validate(self, message: HeldPublish) -> Outcome | Future[AmqpError | None]:
        """Decide whether a transaction holds *message* (accepted), or leaves it out.

        A future has the error later if the message must be left out. It is cancelled if the result stays unknown. Until
        then the message is held.

        Raises:
            XaError: the message is refused.
        """

    def close(self) -> None:
        """The link is closed. Messages that were sent are still published."""


def discards(outcome: Outcome) -> bool:
    """Whether *outcome* makes a dead letter of a message, or drops it."""
    return isinstance(outcome, Rejected) or (isinstance(outcome, Modified) and outcome.undeliverable_here)


class Working(Protocol):
    """A transaction, as the origin of its retired messages sees it."""

    def publish(self, message: HeldPublish) -> None:
        """Hold a message, unless the transaction is rolled back already.

        Raises:
            XaError: 506, the transaction exceeds its limits and is rolled back.
        """

    def wait_for(self, reason: Future[Any]) -> None:
        """Do not end the transaction before *reason* is done, because its work is not complete yet."""

    def doom(self, reason: str) -> None:
        """Mark it rollback-only, because a part of its work is lost."""


class Receiver(Protocol):
    """A link to a client, as its origin sees it."""

    @property
    def credit(self) -> int:
        """The number of messages that may be sent."""

    @property
    def draining(self) -> bool:
        """Whether the rest of the credit must be returned when there is no message."""

    @property
    def full(self) -> bool:
        """Whether nothing can be sent now. When that ends, :meth:`Origin.resume` is called."""

    def deliver(self, taken: object, message: Handed) -> None:
        """Send a message; *taken* is the origin's object for it."""

    def drained(self) -> None:
        """Return the rest of the credit, because there is no message."""

    def fail(self, error: AmqpError) -> None:
        """End the link. Idempotent."""


class Origin(Protocol):
    """The source node of a link to a client. Its *taken* messages are those that it has handed out."""

    @property
    def shown(self) -> str | None:
        """The address of a node that was made for the link; ``None``: the address that the client sent."""

    @property
    def filters(self) -> dict[str, Any]:
        """The filters in place."""

    @property
    def transactional(self) -> bool:
        """Whether transactions can hold its messages and their outcomes."""

    def begin(self, receiver: Receiver) -> None:
        """Set the link, and send it messages within its credit.

        Raises:
            XaError: the queue refuses the consumer.
        """

    def follow(self) -> None:
        """The client has changed the credit or the drain of the link."""

    def resume(self) -> None:
        """The link may have room for messages again."""

    def accept(self, taken: Sequence[object]) -> None:
        """Consume messages."""

    def reject(self, taken: Sequence[object]) -> None:
        """Drop messages, or make them dead letters."""

    def requeue(self, taken: Sequence[object]) -> None:
        """Return messages to the queue."""

    def modify(self, taken: Sequence[object], outcome: Modified) -> None:
        """Change messages as far as possible, then requeue them, or reject them if they are undeliverable here."""

    def then(self, act: Callable[[], None]) -> None:
        """Call *act* when all earlier outcomes are durable; if they failed, end the link with an error instead."""

    def keep(self, taken: object, work: Working, held: HeldWork, released: Callable[[], None]) -> None:
        """Consume a message in a branch.

        Args:
            taken: the message.
            work: the transaction; it is doomed if it loses the message.
            held: the work of the branch.
            released: called if the branch is rolled back before it has voted; then the message is taken as before.

        Raises:
            XaError: the branch cannot consume the message, and must not commit; nothing has changed.
        """

    def postpone(self, taken: object, work: Working, held: HeldWork, decided: Decided, outcome: Outcome) -> None:
        """Delay the outcome of a message, other than accepted, to the end of a branch.

        Args:
            taken: the message.
            work: the transaction; it is doomed if it loses the message.
            held: the work of the branch.
            decided: called when the branch has ended; then the message is taken as before. Not called if the commit of
                the branch has applied the outcome itself.
            outcome: the outcome of the message if the branch commits.

        Raises:
            XaError: the branch cannot hold the message, and must not commit; nothing has changed.
        """

    def close(self, taken: Sequence[object]) -> None:
        """The link is closed: return *taken* messages. Branches keep the messages that they hold."""


class Nodes(Protocol):
    """Users, virtual hosts and nodes, for one connection."""

    mechanisms: tuple[str, ...]
    """The SASL mechanisms that are offered."""

    async def log_in(self, login: Login | None, transport: ClientTransport) -> SaslCode:
        """Check a login.

        Args:
            login: the client's response; ``None`` if it was malformed.
            transport: the client's socket.
        """

    def enter(self, hostname: str | None) -> Requester | Awaitable[Requester]:
        """Enter the virtual host that *hostname* means, after the login.

        Returns:
            User and virtual host.

        Raises:
            AmqpError: the virtual host does not exist, or the user may not enter it.
        """

    def ban_reason(self) -> str | None:
        """The reason why the client may not stay connected; ``None`` if it may."""

    def coordinate(self) -> Awaitable[None] | None:
        """Prepare for transactions; ``None`` if they may begin at once.

        Raises:
            XaError: transactions are not possible.
        """

    def destination(self, address: Address | None, *, dynamic: bool) -> Destination | Awaitable[Destination]:
        """The node for a link from the client.

        Args:
            address: the address of the node; ``None`` if each message names it.
            dynamic: make a node, which is exclusive to the connection.

        Raises:
            AmqpError, XaError: the node does not exist, or the client may not use it.
        """

    def origin(
        self, address: Address | None, *, dynamic: bool, filters: dict[str, Any] | None
    ) -> Origin | Awaitable[Origin]:
        """The node for a link to the client, as :meth:`destination`. *address* is ``None`` only if it is dynamic.

        A link from an exchange has its own queue, which is bound by the address or by one of the *filters*.
        """

    def refusal(self, entry: BranchRuntime) -> str | None:
        """The reason why a branch with complete work cannot commit; ``None`` if none is known."""

    def flush(self) -> None:
        """Write all publishes and outcomes so far."""

    def leave(self, then: Callable[[], None] | None) -> None:
        """End the client's use; all links are closed. Call *then* when its writes are complete."""

    def end(self, then: Callable[[], None]) -> None:
        """Release everything, because the client is gone. Call *then* afterwards. Idempotent."""

    def abort(self) -> None:
        """The service ends, and with it the branches that have not voted."""

    def pause(self) -> None:
        """The client's socket accepts no more data."""

    def resume(self) -> None:
        """The client's socket accepts data again."""
