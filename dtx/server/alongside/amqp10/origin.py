"""Links to clients: messages from a queue of a broker, as far as the client's credit goes, and never farther.

Theory of operation. AMQP 0-9-1 has a prefetch, which is how many deliveries of a consumer may be unacknowledged, and
not how many may come: an acknowledgement makes room for one more, though the client may not want one. So there is an
account of the *room*, what the consumer may still be sent, and it is never more than the credit of the link. Where
an acknowledgement would make it more, the consumer is cancelled before; where it has become little, it is
cancelled, too, and another one begins, with a prefetch that the credit allows. With a large credit that is half of it,
so that a client that settles first and grants credit afterwards needs no new consumer each time. A prefetch that can
be changed (that of a whole channel) is none that quorum queues take.

What one read of the client brings is weighed together: mostly it settles deliveries and grants as many new ones.
A link that is drained has no consumer; its messages are asked for, one by one (basic.get), until there is none.
"""

from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from dtx.server.alongside.amqp10.reader import Reader
from dtx.server.amqp10.mapping import Content
from dtx.server.amqp10.nodes import Handed, Working
from dtx.store.rabbitmq import capture
from dtx.store.rabbitmq.taking import TakingChannel
from dtx.store.rabbitmq.upstream import Content as Incoming
from dtx.store.work import Decided, Delivery, HeldWork
from dtx.telemetry import get_logger
from dtx.wire.amqp09 import methods
from dtx.wire.amqp10.performatives import Modified, Outcome
from dtx.xa.codes import ReplyCode, XaError

if TYPE_CHECKING:
    from dtx.server.alongside.amqp10.nodes import BrokerNodes

_log = get_logger(part="connection")

_SMALL: Final = 16
"""A credit up to which the prefetch is all of it."""
_MAX_PREFETCH: Final = 500
"""Messages that may be on their way to one link: they are in memory until the client's session takes them."""
_GETS: Final = 16
"""Messages that are asked for at once while a link is drained."""
_NONE: Final = -1
"""The number of no consumer: what was got."""


def _prefetch(credit: int) -> int:
    """Of a consumer for a link with so much credit."""
    return min(credit if credit <= _SMALL else credit // 2, _MAX_PREFETCH)


class Phase(Enum):
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
        nodes: of the connection.
        taking: a channel of its own, in tx mode.
        queue: name.
        shown: see :class:`~dtx.server.amqp10.nodes.Origin`.
        made: whether the queue goes with the link.
        filters: see :class:`~dtx.server.amqp10.nodes.Origin`.
    """

    transactional = True

    def __init__(
        self,
        nodes: "BrokerNodes",
        taking: TakingChannel,
        queue: bytes,
        shown: str | None,
        *,
        made: bool,
        filters: dict[str, Any],
    ) -> None:
        super().__init__(nodes, taking, queue, "queue")
        self.shown = shown
        self.filters = filters
        self._made = made
        self._phase = Phase.IDLE
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
        self._to_do: list[Callable[[], None]] = []

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
        if self._phase is Phase.CLOSED:
            return
        while self._ahead and self._takes:
            self._receiver.deliver(*self._ahead.popleft())
        wanted = self._receiver.credit - len(self._ahead)
        freed, self._freed = self._freed, 0
        if self._phase is Phase.CONSUMING:
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
        for act in to_do:
            act()

    def _next(self) -> None:
        """Ask the broker for what the client wants, where nothing else is under way."""
        receiver = self._receiver
        wanted = receiver.credit - len(self._ahead)
        if self._phase is Phase.GETTING:
            while receiver.draining and not self._empty and self._gets < min(wanted, _GETS) and not receiver.full:
                self._gets += 1
                self._taking.request(methods.BasicGet.KEY, methods.BasicGet(self._queue).encode())
            if self._gets == 0 and not (receiver.draining and wanted > 0 and not self._empty):
                self._phase = Phase.IDLE
        if self._phase is not Phase.IDLE:
            return
        if receiver.draining:
            if not self._drain_asked or self._ahead:
                return
            if wanted <= 0 or self._empty:
                self._empty = self._drain_asked = False
                receiver.drained()
            elif not receiver.full:
                self._phase = Phase.GETTING
                self._next()
        else:
            self._empty = False
            if wanted > 0 and not receiver.full:
                self._consume(_prefetch(wanted))

    def _consume(self, prefetch: int) -> None:
        self._phase = Phase.CONSUMING
        self._room = prefetch
        self._begin_consumer(prefetch)

    def _cancel(self) -> None:
        self._phase = Phase.CANCELLING
        self._end_consumer()

    # -- messages

    def _arrived(self, delivery: Delivery, message: Incoming) -> None:
        if self._phase is Phase.CLOSED:  # its consumer is about to go
            self._taking.nack((delivery,), requeue=True)
            return
        if self._phase is Phase.GETTING:
            self._gets -= 1
            self._from[delivery.tag] = _NONE
        else:
            self._room -= 1
            self._from[delivery.tag] = self._consumer
        body = delivery.body if delivery.body is not None else bytes(message.body)
        handed = Handed(
            Content(delivery.properties, body), delivery.exchange, delivery.routing_key, delivery.redelivered
        )
        if not self._ahead and self._takes:
            self._receiver.deliver(delivery, handed)
        elif delivery.body is not None:
            self._ahead.append((delivery, handed))
        else:  # there is no memory for it, and the rest of the prefetch would be no smaller
            if self._phase is Phase.CONSUMING:
                self._cancel()
            self.requeue((delivery,))
        self._touch()

    # -- the channel, as its owner

    @property
    def _is_closed(self) -> bool:
        return self._phase is Phase.CLOSED

    def _answered(self, key: int, payload: bytes) -> None:
        if key == methods.BasicGetEmpty.KEY:
            self._gets -= 1
            self._empty = True
            self._touch()
        elif key == methods.BasicCancelOk.KEY:
            if self._is_present(payload):
                self._phase = Phase.IDLE
                self._room = 0
            self._touch()

    # -- outcomes

    def accept(self, taken: Sequence[object]) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Origin`."""
        deliveries = cast("Sequence[Delivery]", taken)
        self._settle(deliveries, partial(self._taking.ack, deliveries))

    def reject(self, taken: Sequence[object]) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Origin`."""
        deliveries = cast("Sequence[Delivery]", taken)
        self._settle(deliveries, partial(self._taking.nack, deliveries, requeue=False))

    def requeue(self, taken: Sequence[object]) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Origin`."""
        deliveries = cast("Sequence[Delivery]", taken)
        self._settle(deliveries, partial(self._taking.nack, deliveries, requeue=True))

    def modify(self, taken: Sequence[object], outcome: Modified) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Origin`: AMQP 0-9-1 has no way to tell a broker of changes."""
        (self.reject if outcome.undeliverable_here else self.requeue)(taken)

    def _settle(self, deliveries: Sequence[Delivery], act: Callable[[], None]) -> None:
        for delivery in deliveries:
            self._freed += self._from.pop(delivery.tag, _NONE) == self._consumer
        self._later(act)

    def _later(self, act: Callable[[], None]) -> None:
        if self._phase is Phase.CLOSED:
            act()
        else:
            self._to_do.append(act)
            self._touch()

    def then(self, act: Callable[[], None]) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Origin`."""
        self._later(lambda: self._taking.then(act))

    # -- branches

    def keep(self, taken: object, work: Working, held: HeldWork, released: Callable[[], None]) -> None:
        """See :class:`~dtx.server.amqp10.nodes.Origin`."""
        delivery = cast("Delivery", taken)
        capture.check_consume(self._nodes.lane, delivery)
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
        if self._phase is Phase.CONSUMING:
            self._cancel()  # or what returns to the queue would come again
        self._phase = Phase.CLOSED
        self._do()
        self._ahead.clear()
        self._from.clear()
        self._detach()
        if self._made:
            self._nodes.drop_queue(self._queue)
