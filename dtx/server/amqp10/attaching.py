"""Links that a client attaches: which node they are for, and whether it may."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from dtx.server.amqp10.addresses import Address, ExchangeAddress, parse
from dtx.server.amqp10.incoming import CREDIT, Incoming
from dtx.server.amqp10.nodes import Destination, Origin
from dtx.server.amqp10.outgoing import Outgoing
from dtx.server.amqp10.subscribing import COPY, MOVE, check_terminus
from dtx.wire.amqp10.coordination import default_outcome
from dtx.wire.amqp10.errors import AmqpError, Condition
from dtx.wire.amqp10.link import Link
from dtx.wire.amqp10.performatives import (
    Accepted,
    Attach,
    Coordinator,
    ExpiryPolicy,
    Modified,
    Rejected,
    Released,
    SenderSettles,
    Source,
    Target,
)
from dtx.wire.amqp10.session import Session

if TYPE_CHECKING:
    from dtx.server.amqp10.connection import Connection

_OUTCOMES: Final = tuple(kind.layout.symbol for kind in (Accepted, Rejected, Released, Modified))
_Node = TypeVar("_Node")


class Control:
    """A link to the coordinator.

    Args:
        connection: of the client.
        session, link: the engine's ends.
    """

    def __init__(self, connection: "Connection", session: Session, link: Link) -> None:
        self.place = session.channel, link.handle
        self.link = link
        self._connection = connection

    def replenish(self) -> None:
        """The client may ask for more."""
        if self.link.credit <= CREDIT // 2:
            self.link.grant(CREDIT)

    def let_go(self) -> None:
        """The link is gone, and its transactions with it."""
        self._connection.transactions.lose(self._connection.coordination.control_closed(self.place))


Shell = Control | Incoming | Outgoing


def attach(connection: "Connection", session: Session, link: Link, asked: Attach) -> Shell | Awaitable[Shell]:
    """Attach a link, as its client asks.

    Args:
        connection: of the client.
        session: the engine's end, as
        link: is.
        asked: the client's attach.

    Returns:
        The link's shell; where its node is known later only, what will be it, and raises the same.

    Raises:
        AmqpError, XaError: it is refused.
    """
    if link.role.value is False:
        return _to_client(connection, session, link, asked)
    if isinstance(asked.target, Coordinator):
        if asked.unsettled:
            raise AmqpError(Condition.NOT_ALLOWED, "links to the coordinator cannot be resumed")
        return _with(connection.nodes.coordinate(), lambda _: _control(connection, session, link, asked))
    return _from_client(connection, session, link, asked)


def _with(node: _Node | Awaitable[_Node], then: Callable[[_Node], Shell]) -> Shell | Awaitable[Shell]:
    return _later(node, then) if isinstance(node, Awaitable) else then(node)


async def _later(node: Awaitable[_Node], then: Callable[[_Node], Shell]) -> Shell:
    return then(await node)


def _control(connection: "Connection", session: Session, link: Link, asked: Attach) -> Control:
    link.attach(source=asked.source, target=Coordinator(capabilities=connection.coordination.advertised))
    control = Control(connection, session, link)
    connection.coordination.control_attached(control.place, asked.source)
    link.grant(CREDIT)
    return control


def _from_client(connection: "Connection", session: Session, link: Link, asked: Attach) -> Shell | Awaitable[Shell]:
    target = asked.target
    if not isinstance(target, Target):
        raise AmqpError(Condition.INVALID_FIELD, "a link to nowhere: target has no type that dtx knows")
    address = None if target.dynamic or target.address is None else parse(target.address)
    node = connection.nodes.destination(address, dynamic=target.dynamic)
    return _with(node, partial(_incoming, connection, session, link, asked, target))


def _incoming(
    connection: "Connection", session: Session, link: Link, asked: Attach, target: Target, node: Destination
) -> Incoming:
    shown = node.shown or target.address
    address: Address | None = None if shown is None else parse(shown)
    shell = Incoming(connection, session, link, address, node)
    try:
        link.attach(
            source=asked.source,
            target=Target(address=shown, dynamic=target.dynamic),
            sender_settles=asked.snd_settle_mode,
        )
    except AmqpError:  # it does not fit the client's frames
        shell.let_go()
        raise
    link.grant(CREDIT)
    return shell


def _to_client(connection: "Connection", session: Session, link: Link, asked: Attach) -> Shell | Awaitable[Shell]:
    source = asked.source
    if not isinstance(source, Source):
        raise AmqpError(Condition.INVALID_FIELD, "a link from nowhere: source has no type that dtx knows")
    address = None if source.dynamic else parse(source.address)
    subscribes = isinstance(address, ExchangeAddress)
    check_terminus(source, exchange=subscribes)
    node = connection.nodes.origin(address, dynamic=source.dynamic, filters=source.filter)
    # What has come from an exchange goes with the link (3.5.6); a queue keeps it whatever becomes of links.
    policy = ExpiryPolicy.LINK_DETACH if subscribes else ExpiryPolicy.SESSION_END
    return _with(node, partial(_outgoing, connection, session, link, asked, source, policy))


def _outgoing(
    connection: "Connection",
    session: Session,
    link: Link,
    asked: Attach,
    source: Source,
    policy: ExpiryPolicy,
    node: Origin,
) -> Outgoing:
    default = default_outcome(source)
    mode = None if source.distribution_mode is None else COPY if policy is ExpiryPolicy.LINK_DETACH else MOVE
    settled = asked.snd_settle_mode is SenderSettles.SETTLED
    shell = Outgoing(connection, session, link, node, settled=settled, default=default)
    shown = Source(
        address=node.shown or source.address,
        expiry_policy=policy,
        dynamic=source.dynamic,
        distribution_mode=mode,
        filter=node.filters or None,
        default_outcome=default,
        outcomes=_OUTCOMES,
    )
    try:
        link.attach(
            source=shown,
            target=asked.target,
            sender_settles=asked.snd_settle_mode,
            receiver_settles=asked.rcv_settle_mode,
        )
    except AmqpError:  # it does not fit the client's frames
        shell.let_go()
        raise
    if link.credit:  # it came before the answer
        node.follow()
    return shell
