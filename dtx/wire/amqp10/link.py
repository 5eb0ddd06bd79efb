"""A link: its credit, and the deliveries that are on their way over it (AMQP 1.0, 2.6).

What is said on a link or session that is closed goes nowhere: the peer has been told of the end already.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from dtx.wire.amqp10.composite import Composite, encode
from dtx.wire.amqp10.endpoint import (
    AMQP,
    DEAF,
    HEAD,
    MAX_TAG,
    MIN_MAX_FRAME,
    SENDING,
    Amqp10State,
    Amqp10Step,
    Attached,
    Delivered,
    Detached,
    Dropped,
    EndpointSettings,
    Event,
    Flowed,
    frame,
    head,
    serial_add,
    serial_distance,
    step,
)
from dtx.wire.amqp10.errors import AmqpError, Condition
from dtx.wire.amqp10.performatives import (
    Attach,
    Coordinator,
    DeliveryState,
    Detach,
    Error,
    Flow,
    ReceiverSettles,
    Role,
    SenderSettles,
    Source,
    Target,
    TransactionalState,
    Transfer,
    told,
)
from dtx.wire.amqp10.values import Described


class LinkSession(Protocol):
    """The session, as its links see it."""

    connection: "Carrier"
    channel: int
    incoming: dict[int, int]

    @property
    def sending(self) -> bool:
        """Whether more than an end may be sent."""

    def send(self, performative: Composite) -> None:
        """Send a frame on this session."""

    def send_flow(self, **link: Any) -> None:
        """Send the state of the windows, and of a link."""

    def tell(self, event: Event) -> None:
        """Tell the shell."""

    def miss(self, *states: DeliveryState | None) -> None:
        """A transfer of these states comes to nothing, because this end has ended its link or this session."""

    def fail(self, error: AmqpError) -> None:
        """End the session because of the peer's mistake."""

    def queue(
        self,
        link: "Link",
        tag: bytes,
        payload: memoryview,
        settled: bool,
        state: DeliveryState | None,
        message_format: int,
    ) -> int:
        """Send a message as far as the window lets it; its number."""

    def dispose(self, role: Role, deliveries: Iterable[int], state: DeliveryState | None, *, settled: bool) -> None:
        """Tell the peer the state of deliveries."""

    def release_link(self, link: "Link") -> None:
        """Forget what belongs to a link that is detached, from one end or from both."""


class Partial:
    """A delivery whose end has not come."""

    __slots__ = ("delivery_id", "message_format", "octets", "resumed", "settled", "states", "tag")

    def __init__(self, delivery_id: int, tag: bytes, message_format: int, resumed: bool) -> None:
        self.delivery_id = delivery_id
        self.tag = tag
        self.message_format = message_format
        self.resumed = resumed
        self.octets = bytearray()
        self.states: tuple[DeliveryState, ...] = ()
        self.settled = False


class Outgoing:
    """A message that is being sent, or was sent and is not settled."""

    __slots__ = ("aborted", "delivery_id", "link", "message_format", "number", "payload", "settled", "state", "tag")

    def __init__(
        self, link: "Link", number: int, tag: bytes, payload: memoryview, settled: bool, state: DeliveryState | None,
        message_format: int,
    ) -> None:  # fmt: skip
        self.link = link
        self.number = number
        self.delivery_id: int | None = None
        """What the peer calls it, once its first frame is sent."""
        self.tag = tag
        self.payload = payload
        self.settled = settled
        self.state = state
        self.message_format = message_format
        self.aborted = False


class Link:
    """One end of a link.

    Args:
        session: its session.
        handle: ours.
        name: unique among the links of one role between two containers.
        role: ours.

    Attributes:
        context: whatever the shell keeps of it.
        credit: deliveries that may still be sent; of a receiver: by the peer.
        queued: deliveries that wait for the session's window.
        delivery_count: deliveries so far, a serial number.
        drain: whether unused credit is to be given back.
        max_message_size: the peer's, octets; ``None`` for no limit.
        properties: of a sender: those that its flows have.
        unsettled: what was sent, or waits for that, and is not settled, by its number.
    """

    __slots__ = (
        "_drained",
        "_echo",
        "_remote_closed",
        "_session",
        "context",
        "credit",
        "delivery_count",
        "drain",
        "handle",
        "max_message_size",
        "name",
        "partial",
        "properties",
        "queued",
        "remote_handle",
        "role",
        "state",
        "unsettled",
    )

    def __init__(self, session: LinkSession, handle: int, name: str, role: Role) -> None:
        self._session = session
        self.handle = handle
        self.remote_handle: int | None = None
        self.name = name
        self.role = role
        self.state = Amqp10State.UNUSED
        self.credit = 0
        self.delivery_count = 0
        self.drain = False
        self.max_message_size: int | None = None
        self.partial: Partial | None = None
        self.properties: dict[str, Any] | None = None
        self.queued = 0
        self.unsettled: dict[int, Outgoing] = {}
        self.context: Any = None
        self._remote_closed = True
        self._echo = False
        self._drained = False
        """The peer has heard that nothing is left of the credit of its last flow."""

    @property
    def awaits_attach(self) -> bool:
        """Whether the peer's attach is the answer to ours."""
        return self.state in (Amqp10State.OPEN_SENT, Amqp10State.PIPELINED)

    # What the shell says.

    def attach(
        self,
        *,
        source: Source | Described | None,
        target: Target | Coordinator | Described | None,
        sender_settles: SenderSettles = SenderSettles.MIXED,
        receiver_settles: ReceiverSettles = ReceiverSettles.FIRST,
        offered_capabilities: tuple[str, ...] = (),
        properties: dict[str, Any] | None = None,
    ) -> None:
        """Send our attach.

        Links are never recovered: it has no unsettled map, so that the peer knows that nothing of a former one is left
        (2.6.13).

        Args:
            source: as it really is; for a client, as it wants it.
            target: the same.
            sender_settles: the mode that is used.
            receiver_settles: the mode that is used.
            offered_capabilities: of the link.
            properties: of the link.

        Raises:
            AmqpError: frame-size-too-small: it does not fit the peer's frames; then the link is to be refused.
        """
        if self.state in DEAF or not self._session.sending:
            return
        following = step(self.state, Amqp10Step.SEND_OPEN, f"link {self.name!r}")
        limit = self._session.connection.settings.max_message_size
        self._session.send(
            Attach(
                name=self.name,
                handle=self.handle,
                role=self.role,
                snd_settle_mode=sender_settles,
                rcv_settle_mode=receiver_settles,
                source=source,
                target=target,
                initial_delivery_count=self.delivery_count if self.role is Role.SENDER else None,
                max_message_size=limit if self.role is Role.RECEIVER else None,
                offered_capabilities=offered_capabilities,
                properties=properties,
            )
        )
        self.state = following
        if self._echo:
            self.flow()

    def refuse(self, error: Error) -> None:
        """Answer an attach with one that has neither source nor target, and a detach with *error* (2.6.3).

        Where not even that fits the peer's frames, because of the name of the link, its session ends.
        """
        try:
            self.detach(error)
        except AmqpError as cause:
            self._session.fail(cause)

    def grant(self, credit: int, *, drain: bool = False, properties: dict[str, Any] | None = None) -> None:
        """Of a receiver: let the peer send *credit* deliveries from now on; with *drain*, at once or not at all."""
        self.credit = credit
        self.drain = drain
        self.flow(properties=properties)

    def flow(
        self, *, available: int | None = None, echo: bool = False, properties: dict[str, Any] | None = None
    ) -> None:
        """Tell the peer the state of the link.

        Args:
            available: of a sender: messages that could be sent, if there were credit.
            echo: ask the peer for its own.
            properties: of the link; those that it has already where they are not given.
        """
        if self.state not in SENDING:
            return
        self._session.send_flow(
            handle=self.handle,
            # The receiver does not know the sender's count before it has its attach (2.7.4).
            delivery_count=None
            if self.role is Role.RECEIVER and self.state is Amqp10State.OPEN_SENT
            else self.delivery_count,
            link_credit=self.credit + self.queued,
            available=available,
            drain=self.drain,
            echo=echo,
            properties=properties or self.properties,
        )

    def send(
        self,
        tag: bytes,
        payload: bytes | memoryview,
        *,
        settled: bool = False,
        state: DeliveryState | None = None,
        message_format: int = 0,
    ) -> int | None:
        """Of a sender: send a message; it takes one credit, waits for the session's window, and is cut into frames.

        Args:
            tag: at most 32 octets, unique among the unsettled ones of the link.
            payload: sections.
            settled: nothing more will be said of it.
            state: for example the transaction that it belongs to, which each of its frames names.
            message_format: 0 for the sections of AMQP.

        Returns:
            Its number, by which :class:`~dtx.wire.amqp10.endpoint.Disposed` and :meth:`dispose` name it; its
            delivery-id is given when its first frame leaves. ``None`` where the link is closed.

        Raises:
            AmqpError: transfer-limit-exceeded without credit, message-size-exceeded beyond the peer's limit.
        """
        if self.state is not Amqp10State.OPEN or not self._session.sending:
            return None
        if self.credit <= 0:
            raise AmqpError(Condition.TRANSFER_LIMIT_EXCEEDED, f"link {self.name!r} has no credit")
        if self.max_message_size and len(payload) > self.max_message_size:
            raise AmqpError(
                Condition.MESSAGE_SIZE_EXCEEDED, f"{len(payload)} octets, the peer takes {self.max_message_size}"
            )
        self.credit -= 1
        self.queued += 1
        return self._session.queue(self, tag, memoryview(payload), settled, state, message_format)

    def dispose(self, numbers: Iterable[int], state: DeliveryState) -> None:
        """Of a sender: settle messages, and tell the peer their state.

        Args:
            numbers: of messages that were sent, at least in part; those that are settled already are passed over.
            state: the outcome.
        """
        sent = [message.delivery_id for number in numbers if (message := self.unsettled.get(number)) is not None]
        known = [delivery_id for delivery_id in sent if delivery_id is not None]
        self._session.dispose(Role.SENDER, known, state, settled=True)

    def drained(self) -> None:
        """Of a sender: there is nothing more to send; what is left of the credit is used up (2.6.7).

        While messages wait for the window it does nothing: it is to be said again when that is open (``Writable``).
        It is told once for each flow of the peer, which would take the next one for the answer to its next drain.
        """
        if self.queued or self._drained:
            return
        self._drained = True
        self.delivery_count = serial_add(self.delivery_count, self.credit)
        self.credit = 0
        self.flow(available=0)

    def detach(self, error: Error | None = None) -> None:
        """Close the link, or answer the peer's detach."""
        if self.state in DEAF or not self._session.sending:
            return
        if self.state in (Amqp10State.OPEN_RECEIVED, Amqp10State.UNANSWERED):
            self.attach(source=None, target=None)
        following = step(self.state, Amqp10Step.SEND_CLOSE, f"link {self.name!r}")
        self.miss_partial()
        closed = error is not None or self._remote_closed
        self._session.send(Detach(handle=self.handle, closed=closed, error=error))
        self.state = following
        self._session.release_link(self)

    # What the peer says.

    def on_attach(self, attach: Attach, *, answer: bool) -> None:
        """The peer's attach."""
        self.state = step(self.state, Amqp10Step.RECEIVE_OPEN, f"link {self.name!r}")
        self.remote_handle = attach.handle
        if self.role is Role.RECEIVER:
            if attach.initial_delivery_count is None:
                raise AmqpError(Condition.INVALID_FIELD, "a sender's attach without its initial-delivery-count")
            self.delivery_count = attach.initial_delivery_count
        self.max_message_size = attach.max_message_size
        self._session.tell(Attached(session=self._session.channel, link=self.handle, attach=attach, answer=answer))

    def on_flow(self, flow: Flow) -> None:
        """The peer's state of the link."""
        if self.role is Role.SENDER:
            # "link-credit_snd := delivery-count_rcv + link-credit_rcv - delivery-count_snd" (2.6.7)
            ahead = 0 if flow.delivery_count is None else serial_distance(self.delivery_count, flow.delivery_count)
            if flow.link_credit is not None:
                self.credit = max(0, ahead + flow.link_credit - self.queued)
            self.drain = flow.drain
            self._drained = False
        elif flow.delivery_count is not None:
            used = serial_distance(self.delivery_count, flow.delivery_count)
            if used < 0 or used > self.credit:
                raise AmqpError(
                    Condition.NOT_ALLOWED, f"a delivery-count that is {used} ahead, credit is {self.credit}"
                )
            self.delivery_count = flow.delivery_count
            self.credit -= used
        if flow.echo:
            self._echo = self.state is Amqp10State.OPEN_RECEIVED  # then the answer waits for our attach
            if self.role is Role.RECEIVER or not flow.properties:
                self.flow()
        self._session.tell(Flowed(session=self._session.channel, link=self.handle, flow=flow))

    def on_transfer(self, transfer: Transfer, payload: memoryview) -> None:
        """A frame of a delivery."""
        if self.role is Role.SENDER:
            raise AmqpError(Condition.NOT_ALLOWED, f"a transfer to the sender of link {self.name!r}")
        partial = self.partial or self._first(transfer)
        if transfer.delivery_id not in (None, partial.delivery_id) or transfer.delivery_tag not in (None, partial.tag):
            raise AmqpError(Condition.NOT_ALLOWED, f"delivery {partial.delivery_id} is not complete")
        self.partial = partial
        if transfer.aborted:
            self._drop(partial)
            return
        size = len(partial.octets) + len(payload)
        limit = self._session.connection.settings.max_message_size
        if size > limit:
            raise AmqpError(Condition.MESSAGE_SIZE_EXCEEDED, f"a message of more than {limit} octets")
        if transfer.state is not None and transfer.state not in partial.states and len(partial.states) < 2:
            partial.states += (transfer.state,)
        partial.settled = partial.settled or bool(transfer.settled)
        if transfer.more:
            self._session.connection.hold(len(payload))
            partial.octets += payload
            self._session.connection.mark_partial(self)
            return
        self.forget_partial()
        if partial.octets:
            partial.octets += payload
            payload = memoryview(partial.octets)
        if partial.resumed:
            self._tell_dropped(partial)
            return
        if not partial.settled:
            self._session.incoming[partial.delivery_id] = self.handle
        self._session.tell(
            Delivered(
                session=self._session.channel,
                link=self.handle,
                delivery_id=partial.delivery_id,
                tag=partial.tag,
                message_format=partial.message_format,
                payload=payload,
                settled=partial.settled,
                states=partial.states,
            )
        )

    def _first(self, transfer: Transfer) -> Partial:
        """The first frame of a delivery."""
        identity, tag = transfer.delivery_id, transfer.delivery_tag
        if identity is None or tag is None or len(tag) > MAX_TAG:
            raise AmqpError(Condition.INVALID_FIELD, "a delivery needs an id, and a tag of at most 32 octets")
        if identity in self._session.incoming:
            raise AmqpError(Condition.INVALID_FIELD, f"delivery {identity} is unsettled, its id cannot be another's")
        if self.credit <= 0:
            raise AmqpError(Condition.TRANSFER_LIMIT_EXCEEDED, f"no credit on link {self.name!r}")
        self.credit -= 1
        self.delivery_count = serial_add(self.delivery_count, 1)
        return Partial(identity, tag, transfer.message_format or 0, transfer.resume)

    def _drop(self, partial: Partial) -> None:
        self.forget_partial()
        self._tell_dropped(partial)

    def _tell_dropped(self, partial: Partial) -> None:
        """Aborted, or resumed: "the receiver MUST ignore resumed deliveries that are not in its local unsettled map"
        (2.7.5), and it has none.
        """
        self._session.tell(Dropped(session=self._session.channel, link=self.handle, delivery_id=partial.delivery_id))

    def forget_partial(self) -> None:
        """Give back what an unfinished delivery holds: it is unfinished no more, or comes to nothing."""
        if self.partial is not None:
            self._session.connection.hold(-len(self.partial.octets))
            self._session.connection.unmark_partial(self)
            self.partial = None

    def miss_partial(self) -> None:
        """What has come of an unfinished delivery comes to nothing, because of this end."""
        if self.partial is not None:
            self._session.miss(*self.partial.states)

    def on_detach(self, detach: Detach) -> None:
        """The peer's detach."""
        told_already = self.state in DEAF
        self.state = step(self.state, Amqp10Step.RECEIVE_CLOSE, f"link {self.name!r}")
        self._remote_closed = detach.closed
        self._session.release_link(self)
        if not told_already:
            self._tell_detached(detach.error, detach.closed, by_peer=True)

    def fail(self, error: AmqpError) -> None:
        """End the link because of the peer's mistake; the session, where that has not been begun from here."""
        if not self._session.sending:
            raise error
        cause = told(error)
        self.detach(cause)
        self._tell_detached(cause, closed=True, by_peer=False)

    def _tell_detached(self, error: Error | None, closed: bool, *, by_peer: bool) -> None:
        self._session.tell(
            Detached(session=self._session.channel, link=self.handle, error=error, closed=closed, by_peer=by_peer)
        )


class Carrier(ABC):
    """The connection, as its sessions and links use it: what goes to the peer, and what is counted of all of them.

    Args:
        settings: what this end allows and says.

    Attributes:
        names: the links that are attached, by name and our role.
        due: opens the windows of the sessions whose window is half used.
        unfinished: octets of messages of which the end has not come.
        backlog: octets of messages that wait for the peer's windows, all sessions together.
        effort: deliveries and links that were looked at since the last octets were taken, and frames, which are more.
    """

    def __init__(self, settings: EndpointSettings) -> None:
        self.settings = settings
        self.state = Amqp10State.UNUSED
        self.names: dict[tuple[str, Role], Link] = {}
        self.due: set[Callable[[], None]] = set()
        self.unfinished = 0
        self.backlog = 0
        self.effort = 0
        self._events: list[Event] = []
        self._out: list[bytes | memoryview] = []
        self._work: Iterator[None] | None = None
        """What is left of the frame that was looked at last."""
        self._partial: dict[bytes, set[Link]] = {}
        """Links of which a delivery has come in part that belongs to a transaction, by the id of that."""
        self._remote_frame = MIN_MAX_FRAME

    @property
    def sending(self) -> bool:
        """Whether more than a close may be sent."""
        return self.state in SENDING

    def is_partial(self, txn_id: bytes) -> bool:
        """Whether a delivery has come in part that belongs to this transaction."""
        return txn_id in self._partial

    @abstractmethod
    def forget(self, channel: int) -> None:
        """The session of that channel has been ended from both ends."""

    def tell(self, event: Event) -> None:
        """Tell the shell."""
        self._events.append(event)

    def release_name(self, link: Link) -> None:
        """The name of a link is free, unless another link has it by now."""
        if self.names.get((link.name, link.role)) is link:
            del self.names[link.name, link.role]

    def hold(self, octets: int) -> None:
        """Hold so many more octets of unfinished messages.

        Raises:
            AmqpError: resource-limit-exceeded.
        """
        if octets > 0 and self.unfinished + octets > self.settings.max_partial:
            raise AmqpError(
                Condition.RESOURCE_LIMIT_EXCEEDED,
                f"unfinished messages of more than {self.settings.max_partial} octets",
            )
        self.unfinished += octets

    def mark_partial(self, link: Link) -> None:
        """What has come on *link* is a part; more of it, or of its states, may have come before. Idempotent."""
        for txn_id in _transactions(link):
            self._partial.setdefault(txn_id, set()).add(link)

    def unmark_partial(self, link: Link) -> None:
        """That part is one no more. Idempotent."""
        if not self._partial:
            return  # as for nearly all messages, which come in one frame
        for txn_id in _transactions(link):
            links = self._partial.get(txn_id)
            if links is not None:
                links.discard(link)
                if not links:
                    del self._partial[txn_id]

    def send(self, channel: int, performative: Composite) -> None:
        """Send a frame.

        Raises:
            AmqpError: frame-size-too-small: it is larger than what the peer takes.
        """
        body = encode(performative)
        if HEAD + len(body) > self._remote_frame:
            name = performative.layout.name
            raise AmqpError(Condition.FRAME_SIZE_TOO_SMALL, f"{name} of {HEAD + len(body)} octets")
        self._out.append(frame(AMQP, channel, body))

    def send_transfer(self, channel: int, fields: dict[str, Any], payload: memoryview) -> memoryview:
        """Send as much of a message as one frame takes.

        Returns:
            The rest.
        """
        body = encode(Transfer(**fields))
        room = self._remote_frame - HEAD - len(body)
        if len(payload) > room:
            body = encode(Transfer(more=True, **fields))
            room = self._remote_frame - HEAD - len(body)
        part = payload[:room]
        self._out.append(head(channel, len(body) + len(part)) + body)
        if part:
            self._out.append(part)
        return payload[len(part) :]

    def go_on_later(self, work: Iterator[None]) -> None:
        """What is left of *work*, of a frame that means much of it, comes before the next frame, others' turns between.

        Args:
            work: raises nothing.
        """
        self._work = work
        self._go_on()

    def _go_on(self) -> None:
        if self._work is not None and next(self._work, self) is self:
            self._work = None


def _transactions(link: Link) -> list[bytes]:
    """Those that the frames of an unfinished delivery have named so far."""
    states = () if link.partial is None else link.partial.states
    return [state.txn_id for state in states if isinstance(state, TransactionalState)]
