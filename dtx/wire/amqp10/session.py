"""A session: its two windows, its links, and its unsettled deliveries (AMQP 1.0, 2.5, 2.6.12)."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count, islice
from typing import Any, Final

from dtx.wire.amqp10.composite import Composite
from dtx.wire.amqp10.endpoint import (
    CLOSING_STATES,
    DISPOSED_AT_ONCE,
    MAX_NAME,
    SENDING,
    Amqp10State,
    Amqp10Step,
    Begun,
    DeliveryLost,
    Disposed,
    Ended,
    Event,
    Writable,
    serial_add,
    serial_distance,
    step,
)
from dtx.wire.amqp10.errors import Amqp10FrameError, AmqpError, Condition
from dtx.wire.amqp10.link import Carrier, Link, Outgoing
from dtx.wire.amqp10.performatives import (
    NO_LIMIT,
    Attach,
    Begin,
    DeliveryState,
    Detach,
    Disposition,
    End,
    Error,
    Flow,
    Role,
    TransactionalState,
    Transfer,
    bare,
    peer_error,
)

_OUTGOING_WINDOW: Final = 0x7FFF_FFFF
"""The outgoing window that this end announces: unlimited."""


class Session:
    """One end of a session.

    Args:
        connection: its connection.
        channel: the channel of this end.

    Attributes:
        context: for the shell.
        incoming: the link handle of each received delivery that neither end has settled, by delivery id.
        outgoing: the messages that are sent, at least in part, and not settled, by delivery id.
    """

    def __init__(self, connection: Carrier, channel: int) -> None:
        self.connection = connection
        self.channel = channel
        self.remote_channel: int | None = None
        self.state = Amqp10State.UNUSED
        self.incoming: dict[int, int] = {}
        self.outgoing: dict[int, Outgoing] = {}
        self.context: Any = None
        self._links: dict[int, Link] = {}
        self._by_remote: dict[int, Link] = {}
        self._pending: OrderedDict[int, Outgoing] = OrderedDict()
        """The messages that wait for the window, by number. A part of the first message may have been sent."""
        self._numbers = count()
        self._window = connection.settings.window
        self._next_incoming: int | None = None
        self._next_outgoing = 0
        self._next_delivery = 0
        self._remote_window = 0
        self._remote_handle_max = NO_LIMIT

    @property
    def sending(self) -> bool:
        """Whether this end may send more than an end."""
        return self.state in SENDING and self.connection.sending

    def link(self, handle: int) -> Link | None:
        """Return the link with this handle at this end; ``None`` if there is none."""
        return self._links.get(handle)

    # Calls of the shell.

    def begin(self) -> None:
        """Send begin."""
        if self.state in CLOSING_STATES or not self.connection.sending:
            return
        following = step(self.state, Amqp10Step.SEND_OPEN, f"session {self.channel}")
        self.send(
            Begin(
                remote_channel=self.remote_channel,
                next_outgoing_id=self._next_outgoing,
                incoming_window=self._window,
                outgoing_window=_OUTGOING_WINDOW,
                handle_max=self.connection.settings.handle_max,
            )
        )
        self.state = following

    def new_link(self, name: str, role: Role) -> Link:
        """Return a new link, in which this end has *role*. The shell then calls ``attach``.

        Raises:
            AmqpError: resource-limit-exceeded if all handles are in use.
        """
        return self._add(name, role)

    def dispose(
        self,
        role: Role,
        deliveries: Iterable[int],
        state: DeliveryState | None,
        *,
        settled: bool,
        batchable: bool = False,
    ) -> None:
        """Send the state of deliveries to the peer. Deliveries with consecutive ids share a frame.

        Args:
            role: RECEIVER for messages of the peer; for sent messages see :meth:`Link.dispose`.
            deliveries: their delivery ids.
            state: the new state.
            settled: settle and forget them.
            batchable: the peer may delay the frame.
        """
        if not self.sending:
            return
        first = last = None
        for delivery in deliveries:
            if settled:
                self._forget(role, delivery)
            if last is not None and delivery == serial_add(last, 1):
                last = delivery
                continue
            self._dispose(role, first, last, state, settled, batchable)
            first = last = delivery
        self._dispose(role, first, last, state, settled, batchable)

    def _dispose(
        self,
        role: Role,
        first: int | None,
        last: int | None,
        state: DeliveryState | None,
        settled: bool,
        batchable: bool,
    ) -> None:
        if first is None:
            return
        end = last if last != first else None
        disposition = Disposition(role=role, first=first, last=end, settled=settled, state=state, batchable=batchable)
        try:
            self.send(disposition)
        except AmqpError:  # the outcome, which the peer has chosen, is too large for the peer's frames
            self.send(replace(disposition, state=bare(state)))

    def abort(self, number: int) -> bool:
        """Abort a message that has not been sent completely (2.7.5, aborted).

        Args:
            number: the result of :meth:`Link.send`.

        Returns:
            Whether the peer has a part of it. The engine then sends ``aborted`` as soon as the peer's window allows it.
        """
        message = self._pending.get(number)
        if message is None:
            return False
        self.connection.backlog -= len(message.payload)
        message.payload = message.payload[:0]
        message.aborted = True
        message.link.unsettled.pop(number, None)
        if message.delivery_id is not None:
            self.outgoing.pop(message.delivery_id, None)
            return True
        del self._pending[number]
        message.link.queued -= 1
        message.link.credit += 1
        return False

    def end(self, error: Error | None = None) -> None:
        """End the session, or answer the peer's end."""
        if self.state in CLOSING_STATES or not self.connection.sending:
            return
        if self.state in (Amqp10State.OPEN_RECEIVED, Amqp10State.UNANSWERED):
            self.begin()
        following = step(self.state, Amqp10Step.SEND_CLOSE, f"session {self.channel}")
        for link in self._links.values():
            link.miss_partial()
        self.send(End(error=error))
        self.state = following
        self.release()
        if self.state is Amqp10State.CLOSED:
            self.connection.forget(self.channel)

    # Calls of the connection and of links.

    def send(self, performative: Composite) -> None:
        """Send a frame on this session."""
        self.connection.send(self.channel, performative)

    def emit(self, event: Event) -> None:
        """Add an event for the shell."""
        self.connection.emit(event)

    def send_flow(self, **link: Any) -> None:
        """Send flow with the state of the windows and the fields *link* of a link."""
        if self.sending:
            self.send(
                Flow(
                    next_incoming_id=self._next_incoming,
                    incoming_window=self._window,
                    next_outgoing_id=self._next_outgoing,
                    outgoing_window=_OUTGOING_WINDOW,
                    **link,
                )
            )

    def queue(
        self,
        link: Link,
        tag: bytes,
        payload: memoryview,
        settled: bool,
        state: DeliveryState | None,
        message_format: int,
    ) -> int:
        """Send a message as far as the peer's window allows. Return its number."""
        number = next(self._numbers)
        message = self._pending[number] = Outgoing(link, number, tag, payload, settled, state, message_format)
        if not settled:
            link.unsettled[number] = message
        self.connection.backlog += len(payload)
        self._pump()
        return number

    def _pump(self) -> None:
        while self._pending and self._remote_window > 0:
            number, message = next(iter(self._pending.items()))
            if not self._send_transfer(message):
                del self._pending[number]

    def _send_transfer(self, message: Outgoing) -> bool:
        """Send one frame of a message. Return whether a part is left."""
        fields: dict[str, Any] = {"handle": message.link.handle, "state": message.state}
        if message.delivery_id is None:
            # Not sooner: a waiting message may be dropped, and peers end the session for a gap in the ids.
            message.delivery_id = self._next_delivery
            self._next_delivery = serial_add(self._next_delivery, 1)
            if not message.settled:
                self.outgoing[message.delivery_id] = message
            message.link.queued -= 1
            message.link.delivery_count = serial_add(message.link.delivery_count, 1)
            fields |= {
                "delivery_id": message.delivery_id,
                "delivery_tag": message.tag,
                "message_format": message.message_format,
                "settled": message.settled,
            }
        if message.aborted:
            fields["aborted"] = True
        rest = self.connection.send_transfer(self.channel, fields, message.payload)
        self.connection.backlog -= len(message.payload) - len(rest)
        message.payload = rest
        self._next_outgoing = serial_add(self._next_outgoing, 1)
        self._remote_window -= 1
        return len(rest) > 0

    def release_link(self, link: Link) -> None:
        """Forget the deliveries of a link that one end or both ends have detached."""
        link.forget_partial()
        if link.state is not Amqp10State.PIPELINED:  # the peer's attach, which is to come, must find it
            self.connection.release_name(link)
        handle = link.remote_handle
        is_free = link.state not in CLOSING_STATES or link.state is Amqp10State.CLOSED
        if is_free and handle is not None and self._by_remote.get(handle) is link:
            del self._by_remote[handle]
        if link.state is Amqp10State.CLOSED:
            del self._links[link.handle]
        self.connection.effort += len(self.incoming) + len(link.unsettled) + len(self._pending)
        for delivery_id in [key for key, handle in self.incoming.items() if handle == link.handle]:
            del self.incoming[delivery_id]
        for message in link.unsettled.values():
            if message.delivery_id is not None:
                self.outgoing.pop(message.delivery_id, None)
        link.unsettled.clear()
        for number in [number for number, message in self._pending.items() if message.link is link]:
            self.connection.backlog -= len(self._pending.pop(number).payload)

    def release(self) -> None:
        """Forget all links and deliveries, because the session has ended."""
        for link in self._links.values():
            link.forget_partial()
            self.connection.release_name(link)
            link.unsettled.clear()
        self.connection.backlog -= sum(len(message.payload) for message in self._pending.values())
        for known in (self._links, self._by_remote, self.incoming, self.outgoing, self._pending):
            known.clear()

    def fail(self, error: AmqpError) -> None:
        """End the session because of an error of the peer.

        Raises:
            AmqpError: *error*, which must end the connection, because this end has not opened it.
        """
        if not self.connection.sending:
            raise error
        cause = peer_error(error)
        self.end(cause)
        self.emit(Ended(session=self.channel, error=cause, by_peer=False))

    # Frames of the peer.

    def on_begin(self, begin: Begin, channel: int, *, answer: bool) -> None:
        """Handle the peer's begin on its *channel*."""
        self.state = step(self.state, Amqp10Step.RECEIVE_OPEN, f"session {self.channel}")
        self.remote_channel = channel
        self._next_incoming = begin.next_outgoing_id
        self._remote_window = begin.incoming_window
        self._remote_handle_max = begin.handle_max
        self.emit(Begun(session=self.channel, begin=begin, answer=answer))

    def on_end(self, end: End) -> None:
        """Handle the peer's end."""
        reported = self.state in CLOSING_STATES
        self.state = step(self.state, Amqp10Step.RECEIVE_CLOSE, f"session {self.channel}")
        self.release()
        if not reported:
            self.emit(Ended(session=self.channel, error=end.error, by_peer=True))

    def open_window(self) -> None:
        """Extend the incoming window, after all frames of one read have been handled."""
        if self.sending:
            self._window = self.connection.settings.window
            self.send_flow()

    def on_frame(self, performative: Attach | Flow | Transfer | Disposition | Detach, payload: memoryview) -> None:
        """Handle a frame of the session or of a link. An error ends the link or the session.

        Raises:
            AmqpError: the error must end the connection.
        """
        try:
            match performative:
                case Transfer():
                    self._on_transfer(performative, payload)
                case Disposition():
                    self._on_disposition(performative)
                case Flow():
                    self._on_flow(performative)
                case Attach():
                    self._on_attach(performative)
                case _:
                    self._attached(performative.handle).on_detach(performative)
        except Amqp10FrameError:
            raise
        except AmqpError as error:
            self.fail(error)
            if isinstance(performative, Transfer):
                self.report_missed(performative.state)

    def report_missed(self, *states: DeliveryState | None) -> None:
        """Report a transfer with *states* that is lost, because this end has ended its link or the session."""
        for state in states:
            if isinstance(state, TransactionalState):
                self.emit(DeliveryLost(session=self.channel, txn_id=state.txn_id))

    def _attached(self, handle: int) -> Link:
        link = self._by_remote.get(handle)
        if link is None:
            raise AmqpError(Condition.UNATTACHED_HANDLE, f"no link is attached to handle {handle}")
        return link

    def _add(self, name: str, role: Role) -> Link:
        handle = next(number for number in range(len(self._links) + 1) if number not in self._links)
        if handle > self._remote_handle_max:
            raise AmqpError(Condition.RESOURCE_LIMIT_EXCEEDED, "no handle is left for another link")
        link = Link(self, handle, name, role)
        self._links[handle] = self.connection.names[name, role] = link
        return link

    def _on_attach(self, attach: Attach) -> None:
        if attach.handle > self.connection.settings.handle_max:
            raise Amqp10FrameError(f"handle {attach.handle} is above handle-max")
        if attach.handle in self._by_remote:
            raise AmqpError(Condition.HANDLE_IN_USE, f"a link is attached to handle {attach.handle}")
        if len(attach.name) > MAX_NAME:
            raise AmqpError(Condition.INVALID_FIELD, f"the name of a link has more than {MAX_NAME} characters")
        role = attach.role.other
        link = self.connection.names.get((attach.name, role))
        answer = link is not None and link.awaits_attach and self._links.get(link.handle) is link
        if link is not None and not answer:
            # A second attach with its name and role steals the link (2.6.1).
            link.fail(AmqpError(Condition.STOLEN, f"link {attach.name!r} was attached once more"))
        if link is None or not answer:
            if len(self.connection.names) >= self.connection.settings.max_links:
                raise AmqpError(Condition.RESOURCE_LIMIT_EXCEEDED, "the connection has too many links")
            link = self._add(attach.name, role)
        self._by_remote[attach.handle] = link
        try:
            link.on_attach(attach, answer=answer)
        except AmqpError as error:
            link.fail(error)

    def _on_flow(self, flow: Flow) -> None:
        self._next_incoming = flow.next_outgoing_id
        # "next-incoming-id_flow + incoming-window_flow - next-outgoing-id_endpoint" (2.5.6). Before the peer has this
        # end's begin, it counts from the first transfer, which is 0.
        seen = 0 if flow.next_incoming_id is None else flow.next_incoming_id
        self._remote_window = max(0, serial_distance(self._next_outgoing, seen) + flow.incoming_window)
        if self._pending:
            self._pump()
            if not self._pending:
                self.emit(Writable(session=self.channel))
        if flow.handle is None:
            if flow.echo:
                self.send_flow()
            return
        link = self._attached(flow.handle)
        if link.state not in CLOSING_STATES:
            try:
                link.on_flow(flow)
            except AmqpError as error:
                link.fail(error)

    def _on_transfer(self, transfer: Transfer, payload: memoryview) -> None:
        if self._window <= 0:
            raise AmqpError(Condition.WINDOW_VIOLATION, "a transfer beyond the incoming window")
        self._window -= 1
        self._next_incoming = serial_add(self._next_incoming or 0, 1)
        link = self._attached(transfer.handle)
        if link.state in CLOSING_STATES:
            self.report_missed(transfer.state)
        else:
            try:
                link.on_transfer(transfer, payload)
            except AmqpError as error:
                link.fail(error)
                self.report_missed(transfer.state)
        if self._window <= self.connection.settings.window // 2:
            self.connection.due.add(self.open_window)

    def _on_disposition(self, disposition: Disposition) -> None:
        first = disposition.first
        count = 0 if disposition.last is None else serial_distance(first, disposition.last)
        if count < 0:
            raise AmqpError(Condition.INVALID_FIELD, f"a disposition from {first} back to {disposition.last}")
        known: dict[int, Any] = self.incoming if disposition.role is Role.SENDER else self.outgoing
        self.connection.effort += min(count, len(known)) + 1
        wanted: Iterable[int] = list(known)
        if count < len(known):
            wanted = (serial_add(first, offset) for offset in range(count + 1))
        self.connection.run_later(self._disposed(disposition, count, iter(wanted)))

    def _disposed(self, disposition: Disposition, count: int, numbers: Iterator[int]) -> Iterator[None]:
        """Handle a disposition for those of *numbers* that it names and that are known: a limited number per step."""
        role, first = disposition.role.other, disposition.first
        while inspected := tuple(islice(numbers, DISPOSED_AT_ONCE)):
            some = [number for number in inspected if 0 <= serial_distance(first, number) <= count]
            if role is Role.SENDER:
                sent = [message for number in some if (message := self.outgoing.get(number)) is not None]
                deliveries = tuple([(message.link.handle, message.number) for message in sent])
            else:
                deliveries = tuple([(self.incoming[number], number) for number in some if number in self.incoming])
            if disposition.settled:
                for number in some:
                    self._forget(role, number)
            if deliveries:
                self.emit(
                    Disposed(
                        session=self.channel,
                        role=role,
                        deliveries=deliveries,
                        state=disposition.state,
                        settled=disposition.settled,
                    )
                )
            if len(inspected) < DISPOSED_AT_ONCE:
                return
            yield

    def _forget(self, role: Role, delivery_id: int) -> None:
        if role is Role.RECEIVER:
            self.incoming.pop(delivery_id, None)
        elif (message := self.outgoing.pop(delivery_id, None)) is not None:
            message.link.unsettled.pop(message.number, None)
