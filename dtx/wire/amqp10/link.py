"""A link: its credit and its unfinished deliveries (AMQP 1.0, 2.6).

Calls on a closed link or session send nothing: the peer knows of the end already.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from dtx.wire.amqp10.composite import Composite, encode
from dtx.wire.amqp10.endpoint import (
    AMQP,
    CLOSING_STATES,
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
    peer_error,
)
from dtx.wire.amqp10.values import Described


class LinkSession(Protocol):
    """The part of a session that its links use."""

    connection: "Carrier"
    channel: int
    incoming: dict[int, int]

    @property
    def sending(self) -> bool:
        """Whether this end may send more than an end."""

    def send(self, performative: Composite) -> None:
        """Send a frame on this session."""

    def send_flow(self, **link: Any) -> None:
        """Send flow with the state of the windows and the fields *link* of a link."""

    def emit(self, event: Event) -> None:
        """Add an event for the shell."""

    def report_missed(self, *states: DeliveryState | None) -> None:
        """Report a transfer with *states* that is lost, because this end has ended its link or the session."""

    def fail(self, error: AmqpError) -> None:
        """End the session because of an error of the peer."""

    def queue(
        self,
        link: "Link",
        tag: bytes,
        payload: memoryview,
        settled: bool,
        state: DeliveryState | None,
        message_format: int,
    ) -> int:
        """Send a message as far as the peer's window allows. Return its number."""

    def dispose(self, role: Role, deliveries: Iterable[int], state: DeliveryState | None, *, settled: bool) -> None:
        """Send the state of deliveries to the peer."""

    def release_link(self, link: "Link") -> None:
        """Forget the deliveries of a link that one end or both ends have detached."""


class Partial:
    """An incoming delivery that is incomplete."""

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
    """A message that waits, is being sent, or is sent and not settled."""

    __slots__ = ("aborted", "delivery_id", "link", "message_format", "number", "payload", "settled", "state", "tag")

    def __init__(
        self, link: "Link", number: int, tag: bytes, payload: memoryview, settled: bool, state: DeliveryState | None,
        message_format: int,
    ) -> None:  # fmt: skip
        self.link = link
        self.number = number
        self.delivery_id: int | None = None
        """Its delivery id, once its first frame is sent."""
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
        handle: the handle of this end.
        name: its name, unique among the links of one role between two containers.
        role: the role of this end.

    Attributes:
        context: for the shell.
        credit: the number of deliveries that the sender may still send.
        queued: the number of deliveries that wait for the session's window.
        delivery_count: the delivery-count, a serial number.
        drain: whether the receiver has asked for a drain of the credit.
        limit: the largest message in bytes that the peer may send; not larger than that of the connection.
        max_message_size: the limit of the peer in bytes; ``None`` or 0 for no limit.
        properties: for a sender: the properties of its flows.
        unsettled: the messages that wait or are sent, and are not settled, by number.
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
        "limit",
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
        self.limit = session.connection.settings.max_message_size
        self.max_message_size: int | None = None
        self.partial: Partial | None = None
        self.properties: dict[str, Any] | None = None
        self.queued = 0
        self.unsettled: dict[int, Outgoing] = {}
        self.context: Any = None
        self._remote_closed = True
        self._echo = False
        self._drained = False
        """This end has reported to the peer that the credit of its last flow is used up."""

    @property
    def awaits_attach(self) -> bool:
        """Whether the peer has not yet answered the attach of this end."""
        return self.state in (Amqp10State.OPEN_SENT, Amqp10State.PIPELINED)

    # Calls of the shell.

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
        """Send attach.

        Links are never recovered. The attach has no unsettled map, so that the peer knows that no delivery of an
        earlier link is left (2.6.13).

        Args:
            source: the actual source; for a client, the requested one.
            target: the same.
            sender_settles: the mode of the link.
            receiver_settles: the mode of the link.
            offered_capabilities: of the link.
            properties: of the link.

        Raises:
            AmqpError: frame-size-too-small if attach does not fit the peer's frames. The link must then be refused.
        """
        if self.state in CLOSING_STATES or not self._session.sending:
            return
        following = step(self.state, Amqp10Step.SEND_OPEN, f"link {self.name!r}")
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
                max_message_size=self.limit if self.role is Role.RECEIVER else None,
                offered_capabilities=offered_capabilities,
                properties=properties,
            )
        )
        self.state = following
        if self._echo:
            self.flow()

    def refuse(self, error: Error) -> None:
        """Answer an attach with an attach without source and target, and a detach with *error* (2.6.3).

        If the attach does not fit the peer's frames because of the name of the link, the session ends.
        """
        try:
            self.detach(error)
        except AmqpError as cause:
            self._session.fail(cause)

    def grant(self, credit: int, *, drain: bool = False, properties: dict[str, Any] | None = None) -> None:
        """Let the peer send *credit* deliveries from now on; with *drain*, at once or not at all. Receivers only."""
        self.credit = credit
        self.drain = drain
        self.flow(properties=properties)

    def flow(
        self, *, available: int | None = None, echo: bool = False, properties: dict[str, Any] | None = None
    ) -> None:
        """Send flow with the state of the link.

        Args:
            available: for a sender: the number of messages that it could send with enough credit.
            echo: ask the peer for its state.
            properties: the properties of the flow; by default :attr:`properties`.
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
        """Send a message. It takes one credit, waits for the session's window, and is cut into frames. Senders only.

        Args:
            tag: at most 32 bytes, unique among the unsettled deliveries of the link.
            payload: the sections.
            settled: whether it is sent settled.
            state: the state in each of its frames, for example its transaction.
            message_format: 0 for the sections of AMQP.

        Returns:
            The number of the message in :class:`~dtx.wire.amqp10.endpoint.Disposed` and for :meth:`dispose`. The
            message gets its delivery-id with its first frame. ``None`` if the link is not open.

        Raises:
            AmqpError: transfer-limit-exceeded without credit, message-size-exceeded above the peer's limit.
        """
        if self.state is not Amqp10State.OPEN or not self._session.sending:
            return None
        if self.credit <= 0:
            raise AmqpError(Condition.TRANSFER_LIMIT_EXCEEDED, f"link {self.name!r} has no credit")
        if self.max_message_size and len(payload) > self.max_message_size:
            raise AmqpError(
                Condition.MESSAGE_SIZE_EXCEEDED, f"{len(payload)} bytes, the peer accepts {self.max_message_size}"
            )
        self.credit -= 1
        self.queued += 1
        return self._session.queue(self, tag, memoryview(payload), settled, state, message_format)

    def dispose(self, numbers: Iterable[int], state: DeliveryState) -> None:
        """Settle sent messages, and send their outcome to the peer. Senders only.

        Args:
            numbers: the numbers of the messages. Messages that are settled, or not sent even in part, are skipped.
            state: the outcome.
        """
        sent = [message.delivery_id for number in numbers if (message := self.unsettled.get(number)) is not None]
        known = [delivery_id for delivery_id in sent if delivery_id is not None]
        self._session.dispose(Role.SENDER, known, state, settled=True)

    def drained(self) -> None:
        """Use up the remaining credit of a sender that has nothing more to send (2.6.7).

        While messages wait for the window, this does nothing: call it again after ``Writable``. It sends one flow at
        most for each flow of the peer: the peer would take a second one as the answer to its next drain.
        """
        if self.queued or self._drained:
            return
        self._drained = True
        self.delivery_count = serial_add(self.delivery_count, self.credit)
        self.credit = 0
        self.flow(available=0)

    def detach(self, error: Error | None = None) -> None:
        """Close the link, or answer the peer's detach.

        Raises:
            AmqpError: frame-size-too-small if attach, which must go first, does not fit the peer's frames.
        """
        if self.state in CLOSING_STATES or not self._session.sending:
            return
        if self.state in (Amqp10State.OPEN_RECEIVED, Amqp10State.UNANSWERED):
            self.attach(source=None, target=None)
        following = step(self.state, Amqp10Step.SEND_CLOSE, f"link {self.name!r}")
        self.miss_partial()
        closed = error is not None or self._remote_closed
        self._session.send(Detach(handle=self.handle, closed=closed, error=error))
        self.state = following
        self._session.release_link(self)

    # Frames of the peer.

    def on_attach(self, attach: Attach, *, answer: bool) -> None:
        """Handle the peer's attach."""
        self.state = step(self.state, Amqp10Step.RECEIVE_OPEN, f"link {self.name!r}")
        self.remote_handle = attach.handle
        if self.role is Role.RECEIVER:
            if attach.initial_delivery_count is None:
                raise AmqpError(Condition.INVALID_FIELD, "a sender's attach without its initial-delivery-count")
            self.delivery_count = attach.initial_delivery_count
        self.max_message_size = attach.max_message_size
        self._session.emit(Attached(session=self._session.channel, link=self.handle, attach=attach, answer=answer))

    def on_flow(self, flow: Flow) -> None:
        """Handle the peer's flow."""
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
            self._echo = self.state is Amqp10State.OPEN_RECEIVED  # the answer waits for this end's attach
            if self.role is Role.RECEIVER or not flow.properties:
                self.flow()
        self._session.emit(Flowed(session=self._session.channel, link=self.handle, flow=flow))

    def on_transfer(self, transfer: Transfer, payload: memoryview) -> None:
        """Handle a frame of a delivery."""
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
        if size > self.limit:
            raise AmqpError(Condition.MESSAGE_SIZE_EXCEEDED, f"a message of more than {self.limit} bytes")
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
            self._emit_dropped(partial)
            return
        if not partial.settled:
            self._session.incoming[partial.delivery_id] = self.handle
        self._session.emit(
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
        identity, tag = transfer.delivery_id, transfer.delivery_tag
        if identity is None or tag is None or len(tag) > MAX_TAG:
            raise AmqpError(Condition.INVALID_FIELD, "a delivery needs an id, and a tag of at most 32 bytes")
        if identity in self._session.incoming:
            raise AmqpError(Condition.INVALID_FIELD, f"delivery id {identity} is in use by an unsettled delivery")
        if self.credit <= 0:
            raise AmqpError(Condition.TRANSFER_LIMIT_EXCEEDED, f"no credit on link {self.name!r}")
        self.credit -= 1
        self.delivery_count = serial_add(self.delivery_count, 1)
        return Partial(identity, tag, transfer.message_format or 0, transfer.resume)

    def _drop(self, partial: Partial) -> None:
        self.forget_partial()
        self._emit_dropped(partial)

    def _emit_dropped(self, partial: Partial) -> None:
        """Report an aborted or resumed delivery: "the receiver MUST ignore resumed deliveries that are not in its local
        unsettled map" (2.7.5), and there is no such map.
        """
        self._session.emit(Dropped(session=self._session.channel, link=self.handle, delivery_id=partial.delivery_id))

    def forget_partial(self) -> None:
        """Release the memory of the incomplete delivery, because it is complete or lost."""
        if self.partial is not None:
            self._session.connection.hold(-len(self.partial.octets))
            self._session.connection.unmark_partial(self)
            self.partial = None

    def miss_partial(self) -> None:
        """Report the incomplete delivery as lost, because this end ends the link or the session."""
        if self.partial is not None:
            self._session.report_missed(*self.partial.states)

    def on_detach(self, detach: Detach) -> None:
        """Handle the peer's detach."""
        reported = self.state in CLOSING_STATES
        self.state = step(self.state, Amqp10Step.RECEIVE_CLOSE, f"link {self.name!r}")
        self._remote_closed = detach.closed
        self._session.release_link(self)
        if not reported:
            self._emit_detached(detach.error, detach.closed, by_peer=True)

    def fail(self, error: AmqpError) -> None:
        """End the link because of an error of the peer.

        Raises:
            AmqpError: *error*, which must end the session, because this end has not begun it.
        """
        if not self._session.sending:
            raise error
        cause = peer_error(error)
        self.detach(cause)
        self._emit_detached(cause, closed=True, by_peer=False)

    def _emit_detached(self, error: Error | None, closed: bool, *, by_peer: bool) -> None:
        self._session.emit(
            Detached(session=self._session.channel, link=self.handle, error=error, closed=closed, by_peer=by_peer)
        )


class Carrier(ABC):
    """The part of a connection that its sessions and links use: the data for the peer, and the common counters.

    Args:
        settings: the settings and limits of this end.

    Attributes:
        names: the attached links by name and role of this end.
        due: calls that extend the windows of the sessions whose window is half used.
        unfinished: the size in bytes of incomplete incoming messages.
        backlog: the size in bytes of the messages of all sessions that wait for the peer's windows.
        effort: the effort since the last data was taken; see :data:`~dtx.wire.amqp10.endpoint.MAX_EFFORT`.
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
        """The rest of the work for the last frame."""
        self._partial: dict[bytes, set[Link]] = {}
        """Links with an incomplete delivery of a transaction, by transaction id."""
        self._remote_frame = MIN_MAX_FRAME

    @property
    def sending(self) -> bool:
        """Whether this end may send more than a close."""
        return self.state in SENDING

    def is_partial(self, txn_id: bytes) -> bool:
        """Return whether a delivery of this transaction is incomplete."""
        return txn_id in self._partial

    @abstractmethod
    def forget(self, channel: int) -> None:
        """Forget the session of that channel. Both ends have ended it."""

    def emit(self, event: Event) -> None:
        """Add an event for the shell."""
        self._events.append(event)

    def release_name(self, link: Link) -> None:
        """Free the name of a link, unless another link has it now."""
        if self.names.get((link.name, link.role)) is link:
            del self.names[link.name, link.role]

    def hold(self, octets: int) -> None:
        """Add to the size of incomplete messages; negative *octets* reduce it.

        Raises:
            AmqpError: resource-limit-exceeded.
        """
        if octets > 0 and self.unfinished + octets > self.settings.max_partial:
            raise AmqpError(
                Condition.RESOURCE_LIMIT_EXCEEDED,
                f"unfinished messages of more than {self.settings.max_partial} bytes",
            )
        self.unfinished += octets

    def mark_partial(self, link: Link) -> None:
        """Record the transactions of the incomplete delivery of *link*, after each of its frames. Idempotent."""
        for txn_id in _transactions(link):
            self._partial.setdefault(txn_id, set()).add(link)

    def unmark_partial(self, link: Link) -> None:
        """Undo :meth:`mark_partial`. Idempotent."""
        if not self._partial:
            return  # the usual case: most messages come in one frame
        for txn_id in _transactions(link):
            links = self._partial.get(txn_id)
            if links is not None:
                links.discard(link)
                if not links:
                    del self._partial[txn_id]

    def send(self, channel: int, performative: Composite) -> None:
        """Send a frame.

        Raises:
            AmqpError: frame-size-too-small if the frame is larger than the peer accepts.
        """
        body = encode(performative)
        if HEAD + len(body) > self._remote_frame:
            name = performative.layout.name
            raise AmqpError(Condition.FRAME_SIZE_TOO_SMALL, f"{name} of {HEAD + len(body)} bytes")
        self._out.append(frame(AMQP, channel, body))

    def send_transfer(self, channel: int, fields: dict[str, Any], payload: memoryview) -> memoryview:
        """Send the part of *payload* that fits one frame. Return the rest. *fields* are those of the transfer."""
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

    def run_later(self, work: Iterator[None]) -> None:
        """Run *work* of one frame in steps: one step now, the others in later turns, before the next frame.

        Args:
            work: it must not raise.
        """
        self._work = work
        self._run_step()

    def _run_step(self) -> None:
        if self._work is not None and next(self._work, self) is self:
            self._work = None


def _transactions(link: Link) -> list[bytes]:
    """Return the ids of the transactions that the frames of an incomplete delivery have named so far."""
    states = () if link.partial is None else link.partial.states
    return [state.txn_id for state in states if isinstance(state, TransactionalState)]
