"""Links to clients: messages from queues and streams of a broker.

Theory of operation. Messages from a queue come as far as the client's credit goes, and never farther. AMQP 0-9-1 has a
prefetch, which is how many deliveries of a consumer may be unacknowledged, and not how many may come: an
acknowledgement makes room for one more, though the client may not want one. So there is an account of the *room*, what
the consumer may still be sent, and it is never more than the credit of the link. Where an acknowledgement would make it
more, the consumer is cancelled before; where it has become little, it is cancelled, too, and another one begins, with a
prefetch that the credit allows. With a large credit that is half of it, so that a client that settles first and grants
credit afterwards needs no new consumer each time. A prefetch that can be changed (that of a whole channel) is none that
quorum queues take. What one read of the client brings is weighed together: mostly it settles deliveries and grants as
many new ones. A link that is drained has no consumer; its messages are asked for, one by one (basic.get), until there
is none.

Reading a stream takes nothing from it, but where one has read to is known to the reader alone. So there is one consumer
for as long as the link is attached, from its attach on: what comes without credit waits here, and is acknowledged when
it has been sent, which to a stream means no more than that there is room for another. Where there is no memory for a
message, the consumer goes, and another one begins at that message's offset later. A stream does not know basic.get, nor
that anything is given back: for both the broker ends the whole connection. So nothing is, and a drain ends when nothing
has come for a moment. The client's attach is answered when the broker has taken the consumer: what it refuses is
refused there and then.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any, Final, cast

from dtx.server.alongside.amqp10.upstream import STREAM_OFFSET, BrokerAccess, broker_error
from dtx.server.amqp10.mapping import Content
from dtx.server.amqp10.nodes import Handed, Receiver, Working
from dtx.server.amqp10.values import to_field
from dtx.store.rabbitmq import capture
from dtx.store.rabbitmq.consume_channel import ConsumeChannel
from dtx.store.rabbitmq.upstream import UpstreamChannelClosed, UpstreamLost
from dtx.store.work import Decided, Delivery, HeldWork
from dtx.telemetry import get_logger
from dtx.wire.amqp09 import methods, properties, tables
from dtx.wire.amqp09.errors import WireError
from dtx.wire.amqp09.methods import ChannelClose
from dtx.wire.amqp09.tables import Entry
from dtx.wire.amqp10.errors import AmqpError, Condition
from dtx.wire.amqp10.performatives import Modified, Outcome
from dtx.wire.amqp10.values import Value
from dtx.xa.codes import ReplyCode, XaError

_METHOD: Final = 1
"""Type of a frame."""


class Reader(ABC):
    """The channel of one link; its consumers have numbers, so that none is taken for the one before.

    Args:
        broker: of the connection.
        taking: a channel of its own, in tx mode.
        queue: name.
        kind: what it is called when it is gone.
    """

    def __init__(self, broker: BrokerAccess, taking: ConsumeChannel, queue: bytes, kind: str) -> None:
        self._broker = broker
        self._taking = taking
        self._queue = queue
        self._kind = kind
        self._receiver: Receiver
        self._consumer = 0
        """Number of the present consumer, or the last one."""
        self._awaits_consumer = False
        """The broker has not answered that there is one."""
        self._ends_consumer = False
        """It is to be cancelled when it has."""
        taking.owner = self
        taking.on_message = self._arrived

    def begin(self, receiver: Receiver) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Origin`."""
        self._receiver = receiver

    def _touch(self) -> None:
        """Something has changed: :meth:`flush` follows."""
        self._broker.touch(self)

    @abstractmethod
    def flush(self) -> None:
        """What the client and the broker have said in one read, all together."""

    @abstractmethod
    def _arrived(self, delivery: Delivery, body: bytes) -> None:
        """A message has come."""

    # -- the consumer

    def _begin_consumer(self, prefetch: int, arguments: bytes = b"") -> None:
        self._consumer += 1
        self._awaits_consumer = True
        self._taking.request(methods.BasicQos.KEY, methods.BasicQos(0, prefetch).encode())
        self._taking.request(
            methods.BasicConsume.KEY,
            methods.BasicConsume(self._queue, b"%d" % self._consumer, arguments=arguments).encode(),
        )

    def _end_consumer(self) -> None:
        """RabbitMQ 3.10 ends the whole connection (541) where cancel comes before it has answered consume."""
        if self._awaits_consumer:
            self._ends_consumer = True
            return
        self._ends_consumer = False
        self._taking.request(methods.BasicCancel.KEY, methods.BasicCancel(b"%d" % self._consumer).encode())

    def _is_present(self, payload: bytes) -> bool:
        """Whether an answer of the broker is about the present consumer."""
        return methods.BasicConsumeOk.decode(payload).consumer_tag == b"%d" % self._consumer

    def _detach(self) -> None:
        """Leave the channel to itself: it goes when nothing is held on it any more. Its consumer goes before."""
        if not self._ends_consumer:
            self._taking.detach()

    # -- the channel, as its owner

    def forward(self, buffer: bytes, start: int, end: int) -> None:
        """See :class:`~dtx.store.rabbitmq.consume_channel.ConsumeOwner`: the broker's answers."""
        if buffer[start] != _METHOD:
            return
        key = int.from_bytes(buffer[start + 7 : start + 11], "big")
        if key == methods.BasicConsumeOk.KEY:
            self._awaits_consumer = False
            if self._ends_consumer:
                self._end_consumer()
                if self._is_closed:
                    self._detach()
        if self._is_closed:
            return
        if key == methods.BasicCancel.KEY:
            self._deleted()
        else:
            self._answered(key, buffer[start + 7 : end - 1])

    @property
    @abstractmethod
    def _is_closed(self) -> bool:
        """Whether the link is gone."""

    @abstractmethod
    def _answered(self, key: int, payload: bytes) -> None:
        """The broker has answered a request."""

    def upstream_closed(self, close: ChannelClose) -> None:
        """See :class:`~dtx.store.rabbitmq.consume_channel.ConsumeOwner`."""
        if close.reply_code == ReplyCode.NOT_FOUND:  # it was there when the link was attached
            self._deleted()
        else:
            self._fail(broker_error(close))

    def upstream_close_ok(self) -> None:  # noqa: B027 - nothing is left to do
        """See :class:`~dtx.store.rabbitmq.consume_channel.ConsumeOwner`: it is closed without an owner."""

    def _deleted(self) -> None:
        name = self._queue.decode("utf-8", "replace")
        self._fail(AmqpError(Condition.RESOURCE_DELETED, f"{self._kind} '{name}' was deleted"))

    def _fail(self, error: AmqpError) -> None:
        """End the link."""
        self._receiver.fail(error)


_log = get_logger(part="connection")

_SMALL: Final = 16
"""A credit up to which the prefetch is all of it."""
_MAX_PREFETCH: Final = 500
"""Messages that may be on their way to one link: they are in memory until the client's session takes them."""
_GETS: Final = 16
"""Messages that are asked for at once while a link is drained."""
_NONE: Final = -1
"""The number of no consumer: what was got."""


_Act = Callable[[Sequence[Delivery]], None]


def _prefetch(credit: int) -> int:
    """Of a consumer for a link with so much credit."""
    return min(credit if credit <= _SMALL else credit // 2, _MAX_PREFETCH)


class _QueuePhase(Enum):
    """What is asked of the broker."""

    IDLE = auto()
    CONSUMING = auto()
    CANCELLING = auto()
    """Messages may still come of the consumer."""
    GETTING = auto()
    CLOSED = auto()


class BrokerOrigin(Reader):
    """A queue as the source of one link.

    Args:
        broker: of the connection.
        taking: a channel of its own, in tx mode.
        queue: name.
        shown: see :class:`~dtx.server.amqp10.nodes.Origin`.
        made: whether the queue goes with the link.
        filters: see :class:`~dtx.server.amqp10.nodes.Origin`.
    """

    transactional = True

    def __init__(
        self,
        broker: BrokerAccess,
        taking: ConsumeChannel,
        queue: bytes,
        shown: str | None,
        *,
        made: bool,
        filters: dict[str, Any],
    ) -> None:
        super().__init__(broker, taking, queue, "queue")
        self.shown = shown
        self.filters = filters
        self._made = made
        self._phase = _QueuePhase.IDLE
        self._room = 0
        """Messages that it may still be sent, as far as is known here."""
        self._from: dict[int, int] = {}
        """By delivery tag, the consumer that an unsettled one came from."""
        self._ahead: deque[tuple[Delivery, Handed]] = deque()
        """Messages that the client cannot be sent at present."""
        self._gets = 0
        self._empty = False
        self._drain_asked = False
        self._freed = 0
        """Deliveries of the consumer that are about to be settled: each makes room for another."""
        self._ack: _Act = taking.ack
        self._drop: _Act = partial(taking.nack, requeue=False)
        self._return: _Act = partial(taking.nack, requeue=True)
        self._to_do: list[tuple[_Act, list[Delivery]]] = []
        """Settlements of one kind that follow each other are one: the channel cuts what is long into parts."""

    # -- credit

    def follow(self) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Origin`."""
        self._drain_asked = self._receiver.draining
        self._touch()

    def resume(self) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Origin`."""
        self._drain_asked = self._receiver.draining
        self._touch()

    @property
    def _takes(self) -> bool:
        return self._receiver.credit > 0 and not self._receiver.full

    def flush(self) -> None:
        """What the client has said in one read, all together."""
        if self._phase is _QueuePhase.CLOSED:
            return
        while self._ahead and self._takes:
            self._receiver.deliver(*self._ahead.popleft())
        wanted = self._receiver.credit - len(self._ahead)
        freed, self._freed = self._freed, 0
        if self._phase is _QueuePhase.CONSUMING:
            self._room += freed
            if self._room > wanted or self._receiver.draining or self._is_scarce(wanted):
                self._cancel()
        self._do()
        if self._receiver.credit <= 0 and self._ahead:
            back = [delivery for delivery, _ in self._ahead]
            self._ahead.clear()
            self._taking.nack(back, requeue=True)
        self._next()

    def _is_scarce(self, wanted: int) -> bool:
        return wanted > 0 and (self._room == 0 or self._room < _prefetch(wanted) // 4)

    def _do(self) -> None:
        to_do, self._to_do = self._to_do, []
        for act, deliveries in to_do:
            act(deliveries)

    def _next(self) -> None:
        """Ask the broker for what the client wants, where nothing else is under way."""
        receiver = self._receiver
        wanted = receiver.credit - len(self._ahead)
        if self._phase is _QueuePhase.GETTING:
            while receiver.draining and not self._empty and self._gets < min(wanted, _GETS) and not receiver.full:
                self._gets += 1
                self._taking.request(methods.BasicGet.KEY, methods.BasicGet(self._queue).encode())
            if self._gets == 0 and not (receiver.draining and wanted > 0 and not self._empty):
                self._phase = _QueuePhase.IDLE
        if self._phase is not _QueuePhase.IDLE:
            return
        if receiver.draining:
            if not self._drain_asked or self._ahead:
                return
            if wanted <= 0 or self._empty:
                self._empty = self._drain_asked = False
                receiver.drained()
            elif not receiver.full:
                self._phase = _QueuePhase.GETTING
                self._next()
        else:
            self._empty = False
            if wanted > 0 and not receiver.full:
                self._consume(_prefetch(wanted))

    def _consume(self, prefetch: int) -> None:
        self._phase = _QueuePhase.CONSUMING
        self._room = prefetch
        self._begin_consumer(prefetch)

    def _cancel(self) -> None:
        self._phase = _QueuePhase.CANCELLING
        self._end_consumer()

    # -- messages

    def _arrived(self, delivery: Delivery, body: bytes) -> None:
        if self._phase is _QueuePhase.CLOSED:  # its consumer is about to go
            self._taking.nack((delivery,), requeue=True)
            return
        if self._phase is _QueuePhase.GETTING:
            self._gets -= 1
            self._from[delivery.tag] = _NONE
        else:
            self._room -= 1
            self._from[delivery.tag] = self._consumer
        handed = Handed(
            Content(delivery.properties, body), delivery.exchange, delivery.routing_key, delivery.redelivered
        )
        if not self._ahead and self._takes:
            self._receiver.deliver(delivery, handed)
        elif delivery.body is not None:
            self._ahead.append((delivery, handed))
        else:  # there is no memory for it, and the rest of the prefetch would be no smaller
            if self._phase is _QueuePhase.CONSUMING:
                self._cancel()
            self.requeue((delivery,))
        self._touch()

    # -- the channel, as its owner

    @property
    def _is_closed(self) -> bool:
        return self._phase is _QueuePhase.CLOSED

    def _answered(self, key: int, payload: bytes) -> None:
        if key == methods.BasicGetEmpty.KEY:
            self._gets -= 1
            self._empty = True
            self._touch()
        elif key == methods.BasicCancelOk.KEY:
            if self._is_present(payload):
                self._phase = _QueuePhase.IDLE
                self._room = 0
            self._touch()

    # -- outcomes

    def accept(self, taken: Sequence[object]) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Origin`."""
        self._settle(taken, self._ack)

    def reject(self, taken: Sequence[object]) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Origin`."""
        self._settle(taken, self._drop)

    def requeue(self, taken: Sequence[object]) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Origin`."""
        self._settle(taken, self._return)

    def modify(self, taken: Sequence[object], outcome: Modified) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Origin`: AMQP 0-9-1 has no way to tell a broker of changes."""
        (self.reject if outcome.undeliverable_here else self.requeue)(taken)

    def _settle(self, taken: Sequence[object], act: _Act) -> None:
        deliveries = cast("Sequence[Delivery]", taken)
        for delivery in deliveries:
            self._freed += self._from.pop(delivery.tag, _NONE) == self._consumer
        if self._to_do and self._to_do[-1][0] is act:
            self._to_do[-1][1].extend(deliveries)
        else:
            self._later(act, list(deliveries))

    def _later(self, act: _Act, deliveries: list[Delivery]) -> None:
        if self._phase is _QueuePhase.CLOSED:
            act(deliveries)
        else:
            self._to_do.append((act, deliveries))
            self._touch()

    def then(self, act: Callable[[], None]) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Origin`."""
        self._later(lambda _: self._taking.then(act), [])

    # -- branches

    def keep(self, taken: object, work: Working, held: HeldWork, released: Callable[[], None]) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Origin`."""
        delivery = cast("Delivery", taken)
        capture.check_consume(self._broker.lane, delivery)
        if not held.fits(delivery.size, charged=True):
            raise XaError(ReplyCode.RESOURCE_ERROR, held.excess(delivery.size))
        number = self._give_up(delivery)
        self._taking.hold((delivery,), work, partial(self._released, delivery, number, released))
        held.add_consume(delivery)

    def postpone(
        self,
        taken: object,
        work: Working,
        held: HeldWork,
        decided: Decided,
        outcome: Outcome,  # noqa: ARG002 - the broker is told when it is decided
    ) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Origin`: only the broker knows its dead letter exchanges."""
        delivery = cast("Delivery", taken)
        capture.check_settle(delivery)
        if not held.fits(0):
            raise XaError(ReplyCode.RESOURCE_ERROR, held.excess(0))
        number = self._give_up(delivery)
        self._taking.hold((delivery,), work)
        held.add_outcome(partial(self._decided, delivery, number, decided))

    def _give_up(self, delivery: Delivery) -> int:
        """A branch has it; the number of its consumer.

        It is settled when the branch is prepared, or ends, and makes room then: before that, the consumer must have
        gone.
        """
        number = self._from.pop(delivery.tag, _NONE)
        self._freed += number == self._consumer
        self._touch()
        return number

    def _decided(self, delivery: Delivery, number: int, decided: Decided, committed: bool) -> None:
        if self._taking.unhold(delivery):
            self._released(delivery, number, partial(decided, committed))
        elif committed:
            _log.warning("an outcome is lost with its channel: the message is in its queue", queue=self._queue)

    def _released(self, delivery: Delivery, number: int, released: Callable[[], None]) -> None:
        if number == self._consumer:
            self._freed -= 1
        self._from[delivery.tag] = number
        released()
        self._touch()

    # -- the end

    def close(self, taken: Sequence[object]) -> None:  # noqa: ARG002 - it is what the channel gives back
        """See :class:`~dtx.server.amqp10.nodes.Origin`."""
        if self._phase is _QueuePhase.CONSUMING:
            self._cancel()  # or what returns to the queue would come again
        self._phase = _QueuePhase.CLOSED
        self._do()
        self._ahead.clear()
        self._from.clear()
        self._detach()
        if self._made:
            self._broker.drop_queue(self._queue)


_NEXT: Final = (b"S", b"next")
"""What a broker takes for the offset where none is said."""
_PREFETCH: Final = 100
"""Messages that may wait here for the credit of one link, or be on their way."""
_QUIET: Final = 0.25
"""Seconds without a message after which a drained link has had all that there is."""


class _StreamPhase(Enum):
    """Of the link."""

    OPENING = auto()
    """The broker has not answered, or the client has not been answered yet."""
    OPEN = auto()
    CLOSED = auto()


class StreamOrigin(Reader):
    """A stream as the source of one link.

    Args:
        broker: of the connection.
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
        self, broker: BrokerAccess, taking: ConsumeChannel, queue: bytes, filters: dict[str, Any], offset: Value
    ) -> None:
        super().__init__(broker, taking, queue, "stream")
        self.filters = filters
        self._offset = offset
        self._ahead: deque[tuple[Delivery, Handed]] = deque()
        self._reading = False
        self._lost = False
        """There was no memory: what comes of the present consumer comes again, of the next."""
        self._phase = _StreamPhase.OPENING
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
        self._phase = _StreamPhase.OPEN
        if self._failure is not None:
            self._broker.home.soon(partial(receiver.fail, self._failure))
        self._touch()

    def _consume(self) -> None:
        self._reading = True
        self._lost = False
        field = None if self._offset is None else to_field(self._offset)  # a time may be too far away to be said
        self._begin_consumer(_PREFETCH, tables.entry(STREAM_OFFSET, *(field or _NEXT)))

    # -- credit

    def follow(self) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Origin`."""
        self._touch()

    def resume(self) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Origin`."""
        self._touch()

    def flush(self) -> None:
        """Send what there is credit for, and what it makes room for may come."""
        if self._phase is not _StreamPhase.OPEN:
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

    def _arrived(self, delivery: Delivery, _body: bytes) -> None:
        if self._lost or self._phase is _StreamPhase.CLOSED:
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
        return self._phase is _StreamPhase.CLOSED

    def _answered(self, key: int, payload: bytes) -> None:
        if key == methods.BasicConsumeOk.KEY:
            if not self._taken.done():
                self._taken.set_result(None)
        elif key == methods.BasicCancelOk.KEY:
            self._reading = not self._is_present(payload)
            self._touch()

    def _fail(self, error: AmqpError) -> None:
        if self._phase is _StreamPhase.OPENING:
            self._failure = error
        else:
            super()._fail(error)

    def upstream_closed(self, close: ChannelClose) -> None:
        """See :class:`~dtx.store.rabbitmq.consume_channel.ConsumeOwner`."""
        if not self._taken.done():
            self._taken.set_exception(UpstreamChannelClosed(close))
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
        self._phase = _StreamPhase.CLOSED
        self._stop_waiting()
        self._taking.ack([delivery for delivery, _ in self._ahead])
        self._ahead.clear()
        self._taking.detach()


def _offset(delivery: Delivery) -> Value:
    """Where a message is in its stream."""
    entry: Entry | None = properties.read(delivery.properties).header(STREAM_OFFSET)
    return None if entry is None else int.from_bytes(entry.value, "big")
