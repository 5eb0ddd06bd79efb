"""Links to clients from a stream of a broker.

Theory of operation. Reading a stream takes nothing from it, but where one has read to is known to the reader alone. So
there is one consumer for as long as the link is attached, from its attach on: what comes without credit waits here, and
is acknowledged when it has been sent, which to a stream means no more than that there is room for another. Where there
is no memory for a message, the consumer goes, and another one begins at that message's offset later. A stream does not
know basic.get, nor that anything is given back: for both the broker ends the whole connection. So nothing is, and a
drain ends when nothing has come for a moment.

The client's attach is answered when the broker has taken the consumer: what it refuses is refused there and then.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from dtx.server.alongside.amqp10.reader import Reader
from dtx.server.amqp10.mapping import Content
from dtx.server.amqp10.nodes import Handed, Receiver, Working
from dtx.server.amqp10.values import to_field
from dtx.store.rabbitmq import capture
from dtx.store.rabbitmq.taking import TakingChannel
from dtx.store.rabbitmq.upstream import ChannelClosed, UpstreamLost
from dtx.store.rabbitmq.upstream import Content as Incoming
from dtx.store.work import Decided, Delivery, HeldWork
from dtx.wire.amqp09 import methods, properties, tables
from dtx.wire.amqp09.errors import WireError
from dtx.wire.amqp09.methods import ChannelClose
from dtx.wire.amqp09.tables import Entry
from dtx.wire.amqp10.errors import AmqpError, Condition
from dtx.wire.amqp10.performatives import Modified, Outcome
from dtx.wire.amqp10.values import Value

if TYPE_CHECKING:
    from dtx.server.alongside.amqp10.nodes import BrokerNodes

OFFSET: Final = b"x-stream-offset"
"""Argument of a consumer, and header of what it gets."""
_NEXT: Final = (b"S", b"next")
"""What a broker takes for the offset where none is said."""
_PREFETCH: Final = 100
"""Messages that may wait here for the credit of one link, or be on their way."""
_QUIET: Final = 0.25
"""Seconds without a message after which a drained link has had all that there is."""


class Phase(Enum):
    """Of the link."""

    OPENING = auto()
    """The broker has not answered, or the client has not been answered yet."""
    OPEN = auto()
    CLOSED = auto()


class StreamOrigin(Reader):
    """A stream as the source of one link.

    Args:
        nodes: of the connection.
        taking: a channel of its own.
        queue: name.
        filters: see :class:`~dtx.server.amqp10.nodes.Origin`.
        offset: where reading begins, as a consumer of AMQP 0-9-1 says it; ``None``: with what comes next. It is always
            said: a queue that has the name of a stream by now refuses a consumer with an offset, where an
            acknowledgement would mean that its message is consumed.
    """

    shown = None
    transactional = False

    def __init__(
        self, nodes: "BrokerNodes", taking: TakingChannel, queue: bytes, filters: dict[str, Any], offset: Value
    ) -> None:
        super().__init__(nodes, taking, queue, "stream")
        self.filters = filters
        self._offset = offset
        self._ahead: deque[tuple[Delivery, Handed]] = deque()
        self._reading = False
        self._lost = False
        """There was no memory: what comes of the present consumer comes again, of the next."""
        self._phase = Phase.OPENING
        self._taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the broker has taken the first consumer, or refused it."""
        self._failure: AmqpError | None = None
        """What has become of it before the link was there."""
        self._quiet: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        """Begin to read, before the link is there.

        Raises:
            ChannelClosed: the broker refuses it.
            UpstreamLost: the connection to the broker is gone.
        """
        self._consume()
        await self._taken

    def begin(self, receiver: Receiver) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Origin`."""
        super().begin(receiver)
        self._phase = Phase.OPEN
        if self._failure is not None:
            self._nodes.home.soon(partial(receiver.fail, self._failure))
        self._touch()

    def _consume(self) -> None:
        self._reading = True
        self._lost = False
        field = None if self._offset is None else to_field(self._offset)  # a time may be too far away to be said
        self._begin_consumer(_PREFETCH, tables.entry(OFFSET, *(field or _NEXT)))

    # -- credit

    def follow(self) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Origin`."""
        self._touch()

    def resume(self) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Origin`."""
        self._touch()

    def flush(self) -> None:
        """Send what there is credit for, and what it makes room for may come."""
        if self._phase is not Phase.OPEN:
            return
        receiver = self._receiver
        sent: list[Delivery] = []
        while self._ahead and receiver.credit > 0 and not receiver.full:
            delivery, handed = self._ahead.popleft()
            sent.append(delivery)
            receiver.deliver(delivery, handed)
        self._taking.ack(sent)
        if not self._reading and not self._ahead:
            self._consume()
        if not receiver.draining:
            self._stop_waiting()
        elif receiver.credit <= 0:
            self._drained()
        elif not self._ahead and self._quiet is None:
            self._quiet = asyncio.get_running_loop().call_later(_QUIET, self._drained)

    def _drained(self) -> None:
        self._stop_waiting()
        if self._receiver.draining and not self._ahead:
            self._receiver.drained()

    def _stop_waiting(self) -> None:
        if self._quiet is not None:
            self._quiet.cancel()
            self._quiet = None

    # -- messages

    def _arrived(self, delivery: Delivery, _message: Incoming) -> None:
        if self._lost or self._phase is Phase.CLOSED:
            self._taking.ack((delivery,))
            return
        if delivery.body is None:
            self._lost = True
            self._taking.ack((delivery,))
            self._end_consumer()
            try:
                self._offset = _offset(delivery)
            except WireError as error:
                self._fail(AmqpError(Condition.DECODE_ERROR, f"a message of the stream cannot be read: {error}"))
            return
        found = Content(delivery.properties, delivery.body)
        self._ahead.append((delivery, Handed(found, delivery.exchange, delivery.routing_key, delivery.redelivered)))
        self._stop_waiting()
        self._touch()

    # -- the channel, as its owner

    @property
    def _is_closed(self) -> bool:
        return self._phase is Phase.CLOSED

    def _answered(self, key: int, payload: bytes) -> None:
        if key == methods.BasicConsumeOk.KEY:
            if not self._taken.done():
                self._taken.set_result(None)
        elif key == methods.BasicCancelOk.KEY:
            self._reading = not self._is_present(payload)
            self._touch()

    def _fail(self, error: AmqpError) -> None:
        if self._phase is Phase.OPENING:
            self._failure = error
        else:
            super()._fail(error)

    def upstream_closed(self, close: ChannelClose) -> None:
        """See :class:`~dtx.store.rabbitmq.taking.Owner`."""
        if not self._taken.done():
            self._taken.set_exception(ChannelClosed(close))
        else:
            super().upstream_closed(close)

    def upstream_lost(self, reason: str) -> None:
        """The connection to the broker is gone, while this waits for it."""
        if not self._taken.done():
            self._taken.set_exception(UpstreamLost(reason))

    # -- outcomes: none of them means anything to a stream

    def accept(self, taken: Sequence[object]) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Origin`."""

    def reject(self, taken: Sequence[object]) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Origin`: a stream has no dead letters."""

    def requeue(self, taken: Sequence[object]) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Origin`: they are in the stream as before."""

    def modify(self, taken: Sequence[object], outcome: Modified) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Origin`."""

    def then(self, act: Callable[[], None]) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Origin`."""
        act()

    def keep(
        self,
        taken: object,
        work: Working,  # noqa: ARG002 - it is refused
        held: HeldWork,  # noqa: ARG002
        released: Callable[[], None],  # noqa: ARG002
    ) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Origin`."""
        capture.check_settle(cast("Delivery", taken))

    def postpone(
        self,
        taken: object,
        work: Working,  # noqa: ARG002 - it is refused
        held: HeldWork,  # noqa: ARG002
        decided: Decided,  # noqa: ARG002
        outcome: Outcome,  # noqa: ARG002
    ) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Origin`."""
        capture.check_settle(cast("Delivery", taken))

    # -- the end

    def close(self, taken: Sequence[object]) -> None:  # noqa: ARG002 - nothing of a stream is taken
        """See :class:`~dtx.server.amqp10.nodes.Origin`."""
        self._phase = Phase.CLOSED
        self._stop_waiting()
        self._taking.ack([delivery for delivery, _ in self._ahead])
        self._ahead.clear()
        self._taking.detach()


def _offset(delivery: Delivery) -> Value:
    """Where a message is in its stream."""
    entry: Entry | None = properties.read(delivery.properties).header(OFFSET)
    return None if entry is None else int.from_bytes(entry.value, "big")
