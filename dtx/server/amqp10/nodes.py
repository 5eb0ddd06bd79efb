"""What a connection of AMQP 1.0 asks of whoever has the messages: users, virtual hosts, and the nodes of links.

Protocol and messages meet here. On this side are sessions, links, deliveries and transactions; on the other side queues
and exchanges, in dtx itself (:mod:`dtx.server.standalone.nodes`) or in a broker behind it
(:mod:`dtx.server.alongside.amqp10.nodes`). What a side cannot say at once it says with an awaitable, and the connection
handles nothing more until it is done.
"""

from asyncio import Future
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from dtx.manager import TransactionManager, Who
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
    """*error* with the condition that the client is told."""
    if isinstance(error, AmqpError):
        return error
    if isinstance(error, WireError):
        return AmqpError(Condition.INVALID_FIELD, str(error))
    return AmqpError(_CONDITIONS[error.code], error.reason)


def rolled_back(flag: XaFlag) -> AmqpError:
    """Why a discharge did not commit: an answer of the manager that begins with ``rb``."""
    if flag is XaFlag.RBTIMEOUT:
        return AmqpError(Condition.TIMEOUT, "the transaction took too long and is rolled back")
    return AmqpError(Condition.ROLLBACK, "the transaction is rolled back")


DEFAULT_VHOST: Final = "/"
_VHOST: Final = "vhost:"


def named_vhost(hostname: str | None) -> str | None:
    """The virtual host that *hostname* names, with ``vhost:`` before it, as in RabbitMQ; ``None`` where it does not."""
    return hostname.removeprefix(_VHOST) if hostname is not None and hostname.startswith(_VHOST) else None


class Handed(NamedTuple):
    """A message that an origin hands out.

    Args:
        content: of the message.
        exchange: that it was published to, and
        routing_key: with what key.
        redelivered: it may have been handed out before.
    """

    content: Content
    exchange: bytes
    routing_key: bytes
    redelivered: bool


class Home(Protocol):
    """The connection, as its nodes see it."""

    id: int
    manager: TransactionManager
    budget: Budget
    who: Who
    slices: Slices

    def hold_client(self, reason: object) -> None:
        """Read no more from the client until *reason* is released."""

    def release_client(self, reason: object) -> None:
        """*reason* does not hold any more."""

    def soon(self, work: Callable[[], None] | None = None) -> None:
        """Flush at the end of this turn of the loop, behind *work*."""

    def fail(self, error: AmqpError) -> None:
        """The connection cannot go on. Idempotent."""


class NodeSender(Protocol):
    """A link from a client, as its destination sees it."""

    def answer(self, deliveries: Sequence[int], outcome: Outcome) -> None:
        """Tell the client what became of messages, by their delivery ids."""

    def reject(self, delivery: int | None, error: AmqpError) -> None:
        """A message cannot be taken: tell the client, or end the link where it does not want to hear of messages."""

    def fail(self, error: AmqpError) -> None:
        """End the link. Idempotent."""


class Destination(Protocol):
    """The node that a link from a client leads to."""

    @property
    def shown(self) -> str | None:
        """The address of a node that was made for the link; ``None``: the client's own."""

    def begin(self, sender: NodeSender) -> None:
        """The link is there."""

    def address(self, address: Address, subject: str | None, content: Content) -> HeldPublish:
        """Address a message.

        Args:
            address: of the node.
            subject: of the message: the routing key where the address has none.
            content: of the message.

        Raises:
            AmqpError, WireError, XaError: it cannot be taken.
        """

    def send(self, delivery: int | None, message: HeldPublish) -> None:
        """Put *message*; the sender hears what becomes of it as *delivery*, of ``None`` nothing."""

    def judge(self, message: HeldPublish) -> Outcome | Future[AmqpError | None]:
        """What a transaction may do with *message*: hold it (accepted), or leave it out.

        A future says later whether it has to be left out, and why; it is cancelled where nobody will know. Until then
        the message is held.

        Raises:
            XaError: it cannot be taken.
        """

    def close(self) -> None:
        """The link is gone; what has come is on its way."""


def kills(outcome: Outcome) -> bool:
    """Whether *outcome* makes a dead letter of a message, or drops it."""
    return isinstance(outcome, Rejected) or (isinstance(outcome, Modified) and outcome.undeliverable_here)


class Working(Protocol):
    """A transaction, as the origin of a message that it retires sees it."""

    def publish(self, message: HeldPublish) -> None:
        """Hold a message, unless the transaction is rolled back already.

        Raises:
            XaError: 506, it is too much for the transaction, which is rolled back.
        """

    def wait_for(self, reason: Future[Any]) -> None:
        """What belongs to it is not known yet: nothing is decided before *reason* is done."""

    def doom(self, reason: str) -> None:
        """Part of its work is lost: it can only be rolled back."""


class Receiver(Protocol):
    """A link to a client, as its origin sees it."""

    @property
    def credit(self) -> int:
        """Messages that may be sent."""

    @property
    def draining(self) -> bool:
        """Whether the rest of the credit is to be given back when there is no message."""

    @property
    def full(self) -> bool:
        """Nothing can be sent at present; the origin hears of the end of that (:meth:`Origin.resume`)."""

    def deliver(self, taken: object, message: Handed) -> None:
        """Send a message; *taken* is what its origin calls it."""

    def drained(self) -> None:
        """There is no message: the rest of the credit goes back."""

    def fail(self, error: AmqpError) -> None:
        """End the link. Idempotent."""


class Origin(Protocol):
    """The node that a link to a client comes from. Messages that it has handed out are its *taken* ones."""

    @property
    def shown(self) -> str | None:
        """The address of a node that was made for the link; ``None``: the client's own."""

    @property
    def filters(self) -> dict[str, Any]:
        """Those that are in place."""

    @property
    def transactional(self) -> bool:
        """Whether a transaction can decide what becomes of its messages."""

    def begin(self, receiver: Receiver) -> None:
        """The link is there; messages come as far as its credit goes.

        Raises:
            XaError: not from that queue.
        """

    def follow(self) -> None:
        """The client has said how much it takes."""

    def resume(self) -> None:
        """There may be room for messages again."""

    def accept(self, taken: Sequence[object]) -> None:
        """They are consumed."""

    def reject(self, taken: Sequence[object]) -> None:
        """They are to be dropped, or to become dead letters."""

    def requeue(self, taken: Sequence[object]) -> None:
        """They return to the queue."""

    def modify(self, taken: Sequence[object], outcome: Modified) -> None:
        """They return to the queue, or are rejected where they are undeliverable here; changed, as far as that goes."""

    def then(self, act: Callable[[], None]) -> None:
        """Call *act* when what was said of messages so far is durable; never, where that has failed."""

    def keep(self, taken: object, work: Working, held: HeldWork, released: Callable[[], None]) -> None:
        """Consume a message in a branch.

        Args:
            taken: the message.
            work: of whom; it hears when the message is lost to it.
            held: what the branch holds.
            released: called when the branch is rolled back before it has voted: then the message is taken as before.

        Raises:
            XaError: it cannot be, and the branch with it cannot commit; nothing has changed.
        """

    def postpone(self, taken: object, work: Working, held: HeldWork, decided: Decided, outcome: Outcome) -> None:
        """Let what becomes of a message, other than that it is consumed, wait for the end of a branch.

        Args:
            taken: the message.
            work: of whom; it hears when the message is lost to it.
            held: what the branch holds.
            decided: called when the branch has ended: then the message is taken as before. Where a branch that has
                committed has done by itself what was to be done, it is not called for that.
            outcome: what becomes of it where the branch commits.

        Raises:
            XaError: it cannot be, and the branch with it cannot commit; nothing has changed.
        """

    def close(self, taken: Sequence[object]) -> None:
        """The link is gone: what is still *taken* returns, what branches keep stays theirs."""


class Nodes(Protocol):
    """Whoever has the messages, for one connection."""

    mechanisms: tuple[str, ...]
    """Ways to log in that are offered."""

    async def log_in(self, login: Login | None, transport: ClientTransport) -> SaslCode:
        """Let the client in, or not.

        Args:
            login: who it says that it is; ``None`` where that made no sense.
            transport: its socket.
        """

    def enter(self, hostname: str | None) -> Who | Awaitable[Who]:
        """Enter the virtual host that *hostname* means, after the login.

        Returns:
            Who the client is.

        Raises:
            AmqpError: there is none, or not for that user.
        """

    def barred(self) -> str | None:
        """Why the client may not stay; ``None`` while it may."""

    def coordinate(self) -> Awaitable[None] | None:
        """Transactions are about to begin; ``None``: they may.

        Raises:
            XaError: they cannot.
        """

    def destination(self, address: Address | None, *, dynamic: bool) -> Destination | Awaitable[Destination]:
        """The node for a link from the client.

        Args:
            address: of the node; ``None``: each message says where it goes.
            dynamic: make a node, which is the connection's own.

        Raises:
            AmqpError, XaError: there is none, or the client may not.
        """

    def origin(
        self, address: Address | None, *, dynamic: bool, filters: dict[str, Any] | None
    ) -> Origin | Awaitable[Origin]:
        """The node for a link to the client; as :meth:`destination`, *address* is there unless it is dynamic.

        A link from an exchange has a queue of its own, which is bound as its address, or one of the *filters*, says.
        """

    def refusal(self, entry: BranchRuntime) -> str | None:
        """Why a branch, whose work is complete, cannot commit; ``None`` where nothing is known against it."""

    def flush(self) -> None:
        """What has come in so far is on its way."""

    def leave(self, then: Callable[[], None] | None) -> None:
        """The client sends no more; all links are closed. Calls *then* when what it has sent is done."""

    def end(self, then: Callable[[], None]) -> None:
        """The client is gone. Calls *then* when nothing is left. Idempotent."""

    def abort(self) -> None:
        """The service ends, and the branches that have not voted with it."""

    def pause(self) -> None:
        """The client's socket takes no more."""

    def go_on(self) -> None:
        """It takes data again."""
