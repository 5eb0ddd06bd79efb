"""Links that a client attaches: which node they are for, and whether it may."""

from typing import TYPE_CHECKING, Final

from dtx.server.amqp10.addresses import Address, QueueAddress, of_queue, parse
from dtx.server.amqp10.incoming import CREDIT, Incoming
from dtx.server.amqp10.outgoing import Outgoing
from dtx.server.standalone.declaring import SERVER_NAMED
from dtx.store.postgres.exchanges import Queue
from dtx.store.postgres.permissions import Permission
from dtx.wire.amqp10.coordination import default_outcome
from dtx.wire.amqp10.errors import AmqpError, Condition
from dtx.wire.amqp10.link import Link
from dtx.wire.amqp10.performatives import Attach, SenderSettles
from dtx.wire.amqp10.session import Session
from dtx.wire.amqp10.states import Accepted, Modified, Rejected, Released
from dtx.wire.amqp10.terminus import Coordinator, Source, Target

if TYPE_CHECKING:
    from dtx.server.amqp10.connection import Connection

_OUTCOMES: Final = tuple(kind.layout.symbol for kind in (Accepted, Rejected, Released, Modified))


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


def attach(connection: "Connection", session: Session, link: Link, asked: Attach) -> Control | Incoming | Outgoing:
    """Attach a link, as its client asks.

    Args:
        connection: of the client.
        session: the engine's end, as
        link: is.
        asked: the client's attach.

    Returns:
        The link's shell.

    Raises:
        AmqpError, XaError: it is refused.
    """
    if link.role.value is False:
        return _to_client(connection, session, link, asked)
    if isinstance(asked.target, Coordinator):
        link.attach(source=asked.source, target=Coordinator(capabilities=connection.coordination.advertised))
        control = Control(connection, session, link)
        connection.coordination.control_attached(control.place, asked.source)
        link.grant(CREDIT)
        return control
    return _from_client(connection, session, link, asked)


def _from_client(connection: "Connection", session: Session, link: Link, asked: Attach) -> Incoming:
    target = asked.target
    if not isinstance(target, Target):
        raise AmqpError(Condition.INVALID_FIELD, "a link to nowhere: target has no type that dtx knows")
    address: Address | None = None
    if target.dynamic:
        address = QueueAddress(_new_queue(connection).name)
    elif target.address is not None:
        address = parse(target.address)
    shell = Incoming(connection, session, link, address)
    shown = of_queue(address.name) if target.dynamic and isinstance(address, QueueAddress) else target.address
    link.attach(
        source=asked.source,
        target=Target(address=shown, dynamic=target.dynamic),
        sender_settles=asked.snd_settle_mode,
    )
    link.grant(CREDIT)
    return shell


def _to_client(connection: "Connection", session: Session, link: Link, asked: Attach) -> Outgoing:
    source = asked.source
    if not isinstance(source, Source):
        raise AmqpError(Condition.INVALID_FIELD, "a link from nowhere: source has no type that dtx knows")
    if source.dynamic:
        queue = _new_queue(connection)
    else:
        address = parse(source.address)
        if not isinstance(address, QueueAddress):
            raise AmqpError(Condition.NOT_IMPLEMENTED, "messages come from queues: bind one to the exchange")
        connection.access.demand(Permission.READ, "queue", address.name)
        queue = connection.vhost.find_queue(address.name, connection)
    default = default_outcome(source)
    shell = Outgoing(
        connection,
        session,
        link,
        queue,
        settled=asked.snd_settle_mode is SenderSettles.SETTLED,
        default=default,
        dynamic=source.dynamic,
    )
    shown = Source(
        address=of_queue(queue.name) if source.dynamic else source.address,
        dynamic=source.dynamic,
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
    return shell


def _new_queue(connection: "Connection") -> Queue:
    """The queue of a dynamic node: it is the connection's own, and goes with it at the latest."""
    connection.access.demand(Permission.CONFIGURE, "queue", SERVER_NAMED)
    return connection.vhost.declare_queue(b"", connection, exclusive=True).queue
