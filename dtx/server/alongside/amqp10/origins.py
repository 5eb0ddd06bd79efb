"""Links to clients: messages from queues and streams of a broker.

Theory of operation, queues. The broker must never send more messages than the client's credit. The prefetch of AMQP
0-9-1 does not guarantee that. It limits the unacknowledged deliveries of a consumer, so each acknowledgement allows one
more delivery, even without credit. So dtx counts the *room*: the number of messages that the broker may still send to
the consumer. The room must not exceed the credit of the link. If an acknowledgement would break that rule, dtx cancels
the consumer first. If the room becomes too small, dtx cancels the consumer, too, and starts a new one with a prefetch
that the credit allows. For a large credit, the prefetch is half of it. Then a client that settles first and grants
credit later does not need a new consumer each time. Quorum queues do not support a prefetch that can be changed (that
of a whole channel). dtx handles all settlements and credit of one read of the client together, because a typical read
settles deliveries and grants the same number. A draining link has no consumer: dtx gets its messages one by one
(basic.get) until the queue is empty.

Theory of operation, streams. Reading removes nothing from a stream, and only the reader knows its position. So one
consumer exists from attach to detach. Messages without credit wait in dtx. dtx acknowledges a message when it is sent
to the client; for a stream, that only makes room for another one. If there is no memory for a message, dtx cancels the
consumer and later starts another one at the offset of that message. For basic.get or a requeue on a stream, the broker
ends the whole connection. So dtx uses neither, and a drain ends when no message has come for a moment. dtx answers the
client's attach after the broker has accepted the consumer, so that a refusal ends the attach.
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
"""Frame type of methods."""


class Reader(ABC):
    """The channel of one link. Its consumers have numbers, which tell answers for different consumers apart.

    Args:
        broker: of the connection.
        taking: the link's own channel, in tx mode.
        queue: name.
        kind: ``queue`` or ``stream``, for error texts.
    """

    def __init__(self, broker: BrokerAccess, taking: ConsumeChannel, queue: bytes, kind: str) -> None:
        self._broker = broker
        self._taking = taking
        self._queue = queue
        self._kind = kind
        self._receiver: Receiver
        self._consumer = 0
        """Number of the current or last consumer."""
        self._awaits_consumer = False
        """The broker has not answered basic.consume."""
        self._ends_consumer = False
        """The consumer must be cancelled when basic.consume-ok comes."""
        taking.owner = self
        taking.on_message = self._arrived

    def begin(self, receiver: Receiver) -> None:
        """See :class:`Origin`."""
        self._receiver = receiver

    def _touch(self) -> None:
        """Schedule :meth:`flush`, because something has changed."""
        self._broker.touch(self)

    @abstractmethod
    def flush(self) -> None:
        """Handle all changes of one read together."""

    @abstractmethod
    def _arrived(self, delivery: Delivery, body: bytes) -> None:
        """Handle a message of the broker."""

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
        """Cancel the consumer, after consume-ok: RabbitMQ 3.10 ends the connection (541) for an earlier cancel."""
        if self._awaits_consumer:
            self._ends_consumer = True
            return
        self._ends_consumer = False
        self._taking.request(methods.BasicCancel.KEY, methods.BasicCancel(b"%d" % self._consumer).encode())

    def _is_present(self, payload: bytes) -> bool:
        """Whether an answer of the broker is about the current consumer."""
        return methods.BasicConsumeOk.decode(payload).consumer_tag == b"%d" % self._consumer

    def _detach(self) -> None:
        """Let the channel close when it holds nothing, after a pending cancel of its consumer."""
        if not self._ends_consumer:
            self._taking.detach()

    # -- the owner of the channel

    def forward(self, buffer: bytes, start: int, end: int) -> None:
        """See :class:`ConsumeOwner`: handles the broker's answers."""
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
        """Whether the link is closed."""

    @abstractmethod
    def _answered(self, key: int, payload: bytes) -> None:
        """Handle an answer of the broker."""

    def upstream_closed(self, close: ChannelClose) -> None:
        """See :class:`ConsumeOwner`."""
        if close.reply_code == ReplyCode.NOT_FOUND:  # it existed when the link was attached
            self._deleted()
        else:
            self._fail(broker_error(close))

    def upstream_close_ok(self) -> None:  # noqa: B027 - the channel closes without an owner
        """See :class:`ConsumeOwner`."""

    def _deleted(self) -> None:
        name = self._queue.decode("utf-8", "replace")
        self._fail(AmqpError(Condition.RESOURCE_DELETED, f"{self._kind} '{name}' was deleted"))

    def _fail(self, error: AmqpError) -> None:
        self._receiver.fail(error)


_log = get_logger(part="connection")

_SMALL: Final = 16
"""Up to this credit, the prefetch is the whole credit."""
_MAX_PREFETCH: Final = 500
"""Maximum prefetch: the messages are in memory until the client's session window has room."""
_GETS: Final = 16
"""Concurrent basic.get requests while a link is drained."""
_NONE: Final = -1
"""The consumer number of messages from basic.get."""


_Act = Callable[[Sequence[Delivery]], None]


def _prefetch(credit: int) -> int:
    """The prefetch of a consumer for a link with *credit*."""
    return min(credit if credit <= _SMALL else credit // 2, _MAX_PREFETCH)


class _QueuePhase(Enum):
    """The state of the requests to the broker."""

    IDLE = auto()
    CONSUMING = auto()
    CANCELLING = auto()
    """The consumer may still deliver messages."""
    GETTING = auto()
    CLOSED = auto()


class BrokerOrigin(Reader):
    """A queue as the source of one link.

    Args:
        broker: of the connection.
        taking: the link's own channel, in tx mode.
        queue: name.
        shown: see :class:`Origin`.
        made: whether the queue is deleted with the link.
        filters: see :class:`Origin`.
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
        """Messages that the broker may still send to the consumer, as far as dtx knows."""
        self._from: dict[int, int] = {}
        """Consumer numbers of unsettled deliveries, by delivery tag."""
        self._ahead: deque[tuple[Delivery, Handed]] = deque()
        """Messages that wait until the client has credit and room."""
        self._gets = 0
        self._empty = False
        self._drain_asked = False
        self._freed = 0
        """Deliveries of the current consumer that will be settled next: each makes room for another one."""
        self._ack: _Act = taking.ack
        self._drop: _Act = partial(taking.nack, requeue=False)
        self._return: _Act = partial(taking.nack, requeue=True)
        self._failed: _Act = partial(taking.reject, requeue=True)
        self._to_do: list[tuple[_Act, list[Delivery]]] = []
        """Consecutive settlements of the same kind are joined; the channel splits long ones."""

    # -- credit

    def follow(self) -> None:
        """See :class:`Origin`."""
        self._drain_asked = self._receiver.draining
        self._touch()

    def resume(self) -> None:
        """See :class:`Origin`."""
        self._drain_asked = self._receiver.draining
        self._touch()

    @property
    def _takes(self) -> bool:
        return self._receiver.credit > 0 and not self._receiver.full

    def flush(self) -> None:
        """See :class:`Reader`."""
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
        """Request the messages that the client has credit for, unless another request is in progress."""
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
        if self._phase is _QueuePhase.CLOSED:  # the consumer is being cancelled
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
        else:  # no memory for it, nor for the rest of the prefetch
            if self._phase is _QueuePhase.CONSUMING:
                self._cancel()
            self.requeue((delivery,))
        self._touch()

    # -- the owner of the channel

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
        """See :class:`Origin`."""
        self._settle(taken, self._ack)

    def reject(self, taken: Sequence[object]) -> None:
        """See :class:`Origin`."""
        self._settle(taken, self._drop)

    def requeue(self, taken: Sequence[object]) -> None:
        """See :class:`Origin`."""
        self._settle(taken, self._return)

    def modify(self, taken: Sequence[object], outcome: Modified) -> None:
        """See :class:`Origin`: AMQP 0-9-1 cannot change a message at the broker."""
        if outcome.undeliverable_here:
            self.reject(taken)
        else:
            self._settle(taken, self._failed if outcome.delivery_failed else self._return)

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
        """See :class:`Origin`."""
        self._later(lambda _: self._taking.then(act), [])

    # -- branches

    def keep(self, taken: object, work: Working, held: HeldWork, released: Callable[[], None]) -> None:
        """See :class:`Origin`."""
        delivery = cast("Delivery", taken)
        capture.check_consume(self._broker.commit_connection, delivery)
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
        outcome: Outcome,  # noqa: ARG002 - *decided* settles the message
    ) -> None:
        """See :class:`Origin`: the broker itself makes dead letters."""
        delivery = cast("Delivery", taken)
        capture.check_settle(delivery)
        if not held.fits(0):
            raise XaError(ReplyCode.RESOURCE_ERROR, held.excess(0))
        number = self._give_up(delivery)
        self._taking.hold((delivery,), work)
        held.add_outcome(partial(self._decided, delivery, number, decided))

    def _give_up(self, delivery: Delivery) -> int:
        """Leave *delivery* to a branch; returns the number of its consumer.

        The delivery is settled when the branch is prepared or ends. That makes room for another one, so the consumer
        must be cancelled before.
        """
        number = self._from.pop(delivery.tag, _NONE)
        self._freed += number == self._consumer
        self._touch()
        return number

    def _decided(self, delivery: Delivery, number: int, decided: Decided, committed: bool) -> None:
        if self._taking.end_hold(delivery):
            self._released(delivery, number, partial(decided, committed))
        elif committed:
            _log.warning("outcome lost with its channel, the message is in its queue again", queue=self._queue)

    def _released(self, delivery: Delivery, number: int, released: Callable[[], None]) -> None:
        if number == self._consumer:
            self._freed -= 1
        self._from[delivery.tag] = number
        released()
        self._touch()

    # -- the end

    def close(self, taken: Sequence[object]) -> None:  # noqa: ARG002 - the channel gives them back
        """See :class:`Origin`."""
        if self._phase is _QueuePhase.CONSUMING:
            self._cancel()  # otherwise the consumer would get the requeued messages again
        self._phase = _QueuePhase.CLOSED
        self._do()
        self._ahead.clear()
        self._from.clear()
        self._detach()
        if self._made:
            self._broker.drop_queue(self._queue)


_NEXT: Final = (b"S", b"next")
"""The default offset of a broker."""
_PREFETCH: Final = 100
"""Messages of one link that may wait for credit, or may be on the way from the broker."""
_QUIET: Final = 0.25
"""A drain of a link ends after this number of seconds without a message."""


class _StreamPhase(Enum):
    """The state of the link."""

    OPENING = auto()
    """Either the broker has not answered basic.consume, or dtx has not answered the attach."""
    OPEN = auto()
    CLOSED = auto()


class StreamOrigin(Reader):
    """A stream as the source of one link.

    Every consumer has an offset argument. If the stream was replaced by a queue, the queue refuses such a consumer.
    Without the argument, acknowledgements would remove messages of that queue.

    Args:
        broker: of the connection.
        taking: the link's own channel, in tx mode.
        queue: name.
        filters: see :class:`Origin`.
        offset: start of reading, as in the argument of an AMQP 0-9-1 consumer; ``None`` for the next message.
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
        """There was no memory for a message: the next consumer starts at it, so later messages come again."""
        self._phase = _StreamPhase.OPENING
        self._taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the broker has accepted or refused the first consumer."""
        self._failure: AmqpError | None = None
        """An error before the link was attached."""
        self._quiet: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        """Start to read, before the attach is answered.

        Raises:
            UpstreamChannelClosed: the broker refuses the consumer.
            UpstreamLost: the connection to the broker is lost.
        """
        self._consume()
        await self._taken

    def begin(self, receiver: Receiver) -> None:
        """See :class:`Origin`."""
        super().begin(receiver)
        self._phase = _StreamPhase.OPEN
        if self._failure is not None:
            self._broker.home.flush_soon(partial(receiver.fail, self._failure))
        self._touch()

    def _consume(self) -> None:
        self._reading = True
        self._lost = False
        field = None if self._offset is None else to_field(self._offset)  # also None for a time out of range
        self._begin_consumer(_PREFETCH, tables.entry(STREAM_OFFSET, *(field or _NEXT)))

    # -- credit

    def follow(self) -> None:
        """See :class:`Origin`."""
        self._touch()

    def resume(self) -> None:
        """See :class:`Origin`."""
        self._touch()

    def flush(self) -> None:
        """See :class:`Reader`: sends the messages for which there is credit, and acknowledges them."""
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

    # -- the owner of the channel

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
        """See :class:`ConsumeOwner`."""
        if not self._taken.done():
            self._taken.set_exception(UpstreamChannelClosed(close))
        else:
            super().upstream_closed(close)

    def upstream_lost(self, reason: str) -> None:
        """End :meth:`open`, because the connection to the broker is lost."""
        if not self._taken.done():
            self._taken.set_exception(UpstreamLost(reason))

    # -- outcomes: they have no effect on a stream

    def accept(self, taken: Sequence[object]) -> None:
        """See :class:`Origin`."""

    def reject(self, taken: Sequence[object]) -> None:
        """See :class:`Origin`: a stream has no dead letters."""

    def requeue(self, taken: Sequence[object]) -> None:
        """See :class:`Origin`: the messages stay in the stream."""

    def modify(self, taken: Sequence[object], outcome: Modified) -> None:
        """See :class:`Origin`."""

    def then(self, act: Callable[[], None]) -> None:
        """See :class:`Origin`."""
        act()

    def keep(
        self,
        taken: object,
        work: Working,  # noqa: ARG002 - always refused
        held: HeldWork,  # noqa: ARG002
        released: Callable[[], None],  # noqa: ARG002
    ) -> None:
        """See :class:`Origin`."""
        capture.check_settle(cast("Delivery", taken))

    def postpone(
        self,
        taken: object,
        work: Working,  # noqa: ARG002 - always refused
        held: HeldWork,  # noqa: ARG002
        decided: Decided,  # noqa: ARG002
        outcome: Outcome,  # noqa: ARG002
    ) -> None:
        """See :class:`Origin`."""
        capture.check_settle(cast("Delivery", taken))

    # -- the end

    def close(self, taken: Sequence[object]) -> None:  # noqa: ARG002 - reading takes nothing from a stream
        """See :class:`Origin`."""
        self._phase = _StreamPhase.CLOSED
        self._stop_waiting()
        self._taking.ack([delivery for delivery, _ in self._ahead])
        self._ahead.clear()
        self._taking.detach()


def _offset(delivery: Delivery) -> Value:
    """The offset of a message in its stream; ``None`` without the header."""
    entry: Entry | None = properties.read(delivery.properties).header(STREAM_OFFSET)
    return None if entry is None else int.from_bytes(entry.value, "big")
