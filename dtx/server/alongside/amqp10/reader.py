"""What links from a queue and from a stream of a broker have in common: a channel, one consumer after the other."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final

from dtx.server.alongside.amqp10.refusals import broker_error
from dtx.server.amqp10.nodes import Receiver
from dtx.store.rabbitmq.taking import TakingChannel
from dtx.store.rabbitmq.upstream import Content
from dtx.store.work import Delivery
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.methods import ChannelClose
from dtx.wire.amqp10.errors import AmqpError, Condition
from dtx.xa.codes import ReplyCode

if TYPE_CHECKING:
    from dtx.server.alongside.amqp10.nodes import BrokerNodes

_METHOD: Final = 1
"""Type of a frame."""


class Reader(ABC):
    """The channel of one link; its consumers have numbers, so that none is taken for the one before.

    Args:
        nodes: of the connection.
        taking: a channel of its own, in tx mode.
        queue: name.
        kind: what it is called when it is gone.
    """

    def __init__(self, nodes: "BrokerNodes", taking: TakingChannel, queue: bytes, kind: str) -> None:
        self._nodes = nodes
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
        self._nodes.touch(self)

    @abstractmethod
    def flush(self) -> None:
        """What the client and the broker have said in one read, all together."""

    @abstractmethod
    def _arrived(self, delivery: Delivery, message: Content) -> None:
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
        """See :class:`~dtx.store.rabbitmq.taking.Owner`: the broker's answers."""
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
        """See :class:`~dtx.store.rabbitmq.taking.Owner`."""
        if close.reply_code == ReplyCode.NOT_FOUND:  # it was there when the link was attached
            self._deleted()
        else:
            self._fail(broker_error(close))

    def upstream_close_ok(self) -> None:  # noqa: B027 - nothing is left to do
        """See :class:`~dtx.store.rabbitmq.taking.Owner`: it is closed without an owner."""

    def _deleted(self) -> None:
        name = self._queue.decode("utf-8", "replace")
        self._fail(AmqpError(Condition.RESOURCE_DELETED, f"{self._kind} '{name}' was deleted"))

    def _fail(self, error: AmqpError) -> None:
        """End the link."""
        self._receiver.fail(error)
