"""What a connection tells of: a closed union.

Sessions are named by the channel and links by the handle that this end uses for them.
"""

from dataclasses import field

from dtx.wire.amqp10.performatives import Attach, Begin, Flow, Open, Role
from dtx.wire.amqp10.states import DeliveryState, Error
from dtx.xa.value import value


@value
class LoginAsked:
    """The client has chosen a mechanism of those offered. Nothing more is looked at before it is answered, with
    ``login`` or ``refuse_login``.

    Args:
        mechanism: name.
        response: holds the password; see :mod:`dtx.wire.amqp10.sasl`.
        hostname: the virtual host, where the client says it already.
    """

    mechanism: str
    response: bytes = field(repr=False)
    hostname: str | None


@value
class Opened:
    """The peer's open has come; a server answers with ``open``, or refuses with ``close``."""

    open: Open


@value
class Begun:
    """The peer's begin has come; unless it is an answer, it is answered with the session's ``begin``."""

    session: int
    begin: Begin
    answer: bool


@value
class Attached:
    """The peer's attach has come; unless it is an answer, it is answered with the link's ``attach`` or ``refuse``."""

    session: int
    link: int
    attach: Attach
    answer: bool


@value
class Flowed:
    """The peer has said something about a link; the link has its new credit. What echo asks for has been sent, but by a
    sender whose flow has properties: what they mean belongs into the answer, so the shell sends that.

    Args:
        session, link: which.
        flow: as it came, with its properties.
    """

    session: int
    link: int
    flow: Flow


@value
class Writable:
    """All that waited for the peer's window has been sent."""

    session: int


@value
class Delivered:
    """A whole message has come.

    Args:
        session, link: where.
        delivery_id: of the session.
        tag: the sender's name of the delivery.
        message_format: 0 for the sections of AMQP.
        payload: all of it; a slice of what was read where it came in one frame: who keeps it, copies it.
        settled: whether the sender has settled it.
        states: what its frames said of its state, each once, in their order; more than one is a peer's mistake.
    """

    session: int
    link: int
    delivery_id: int
    tag: bytes
    message_format: int
    payload: memoryview
    settled: bool
    states: tuple[DeliveryState, ...]


@value
class Dropped:
    """A delivery took credit and came to nothing: the sender has aborted it, or resumed one that nobody has here."""

    session: int
    link: int
    delivery_id: int


@value
class Missed:
    """A transfer, or the part of one that had come, names a transaction and came to nothing: this end has ended its
    link or its session, so that nobody hears what becomes of it.

    Args:
        session: where.
        txn_id: the transaction.
    """

    session: int
    txn_id: bytes


@value
class Disposed:
    """The peer has a state for deliveries.

    Args:
        session: where.
        role: ours: SENDER for messages that were sent from here.
        deliveries: link, and delivery id (SENDER: number, see ``Link.send``), of each that is known and unsettled.
        state: the new one, if any.
        settled: whether the peer has settled them; then they are forgotten here.
    """

    session: int
    role: Role
    deliveries: tuple[tuple[int, int], ...]
    state: DeliveryState | None
    settled: bool


@value
class Detached:
    """A link is over; where the peer has begun it, it is answered with the link's ``detach``.

    Args:
        session, link: which.
        error: what for.
        closed: false: the peer would like to come back to it.
        by_peer: whether the peer has detached, or this end because of an error.
    """

    session: int
    link: int
    error: Error | None
    closed: bool
    by_peer: bool


@value
class Ended:
    """A session is over, with all its links; where the peer has begun it, it is answered with the session's ``end``."""

    session: int
    error: Error | None
    by_peer: bool


@value
class Closed:
    """The connection is over, with all its sessions; where the peer has begun it, it is answered with ``close``."""

    error: Error | None
    by_peer: bool


Event = (
    LoginAsked
    | Opened
    | Begun
    | Attached
    | Flowed
    | Writable
    | Delivered
    | Dropped
    | Missed
    | Disposed
    | Detached
    | Ended
    | Closed
)
