"""Consumers, basic.get, and what was delivered and is not settled, of one channel."""

import asyncio
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from secrets import token_bytes
from typing import TYPE_CHECKING, Final

from dtx.auth.permissions import Permission
from dtx.log.changes import StoredMessage
from dtx.server.limits import MAX_CONSUMERS, MAX_UNACKED, MAX_UNREAD_REPLIES
from dtx.server.standalone.contexts import Settlement
from dtx.server.standalone.direct import REPLY_TO
from dtx.server.standalone.tags import Unsettled
from dtx.store.postgres.arguments import first_of_each, integer, kind_name, text
from dtx.store.postgres.consumers import Consumer, Credit, Delivery, return_slowly
from dtx.store.postgres.exchanges import Queue
from dtx.store.work import HeldPublish
from dtx.telemetry import get_logger
from dtx.wire.amqp09 import content, methods
from dtx.wire.amqp09.codec import packer
from dtx.wire.amqp09.errors import HardCode, WireError
from dtx.xa.codes import ReplyCode, XaError

if TYPE_CHECKING:
    from dtx.server.standalone.channel import Channel

_log = get_logger(part="channel")

_PRIORITY: Final = b"x-priority"
_deliver: Final = packer(methods.BasicDeliver)
_get_ok: Final = packer(methods.BasicGetOk)


class Get:
    """One basic.get.

    Args:
        consuming: of the channel that asks.
        no_ack: the message is settled when it is sent.
    """

    __slots__ = ("_consuming", "no_ack")

    def __init__(self, consuming: "Consuming", no_ack: bool) -> None:
        self._consuming = consuming
        self.no_ack = no_ack

    def got(self, found: tuple[Delivery, StoredMessage] | None, remaining: int) -> None:
        """The answer."""
        self._consuming.got(self, found, remaining)


class Consuming:
    """What a channel's client consumes. It is the sink of its consumers.

    Args:
        channel: whose it is.
    """

    __slots__ = (
        "_active",
        "_asking",
        "_channel",
        "_getting",
        "_outbox",
        "_prefetch",
        "_queues",
        "_shared",
        "consumers",
        "unsettled",
    )

    def __init__(self, channel: "Channel") -> None:
        self._channel = channel
        self._outbox = channel.connection.outbox
        self.consumers: dict[bytes, Consumer] = {}
        self.unsettled: Unsettled[Delivery] = Unsettled()
        self._queues: dict[Consumer, Queue] = {}
        self._active = True
        """channel.flow"""
        self._prefetch = 0
        self._shared = Credit()
        self._getting: tuple[Get, Queue] | None = None
        self._asking: tuple[bytes, bytes] | None = None
        """The consumer of direct replies, if there is one: its tag, and the address for replies."""

    # -- the sink

    @property
    def full(self) -> bool:
        """Nothing can be delivered at present."""
        return not self._outbox.has_room or not self._active or len(self.unsettled) >= MAX_UNACKED

    def deliver(self, consumer: Consumer, delivery: Delivery, message: StoredMessage) -> None:
        """basic.deliver."""
        channel = self._channel
        unsettled = self.unsettled
        self._outbox.send(
            content.message(
                _deliver(
                    channel.number,
                    consumer.tag,
                    unsettled.next_tag() if consumer.no_ack else unsettled.add(delivery),
                    delivery.redelivered,
                    message.exchange,
                    message.routing_key,
                ),
                channel.number,
                message.properties,
                message.body,
                channel.connection.frame_max,
            )
        )

    def resume(self) -> None:
        """The sink may have room again."""
        if not self.full:
            for consumer in list(self.consumers.values()):
                consumer.resume()

    # -- consumers

    def qos(self, payload: bytes) -> None:
        """basic.qos: for consumers from now on, or (global) for all of the channel together, as RabbitMQ has it."""
        qos = methods.BasicQos.decode(payload)
        if qos.prefetch_size:
            raise WireError(HardCode.NOT_IMPLEMENTED, f"prefetch_size!=0 ({qos.prefetch_size})")
        if qos.global_qos:
            self._shared.change(qos.prefetch_count)
        else:
            self._prefetch = qos.prefetch_count
        self._channel.answer(methods.BasicQosOk())

    def consume(self, payload: bytes) -> None:
        """basic.consume."""
        asked = methods.BasicConsume.decode(payload)
        channel = self._channel
        name = channel.queue_name(asked.queue)
        if asked.consumer_tag in self.consumers or (self._asking and self._asking[0] == asked.consumer_tag):
            raise WireError(HardCode.NOT_ALLOWED, f"attempt to reuse consumer tag '{text(asked.consumer_tag)}'")
        if name == REPLY_TO:
            self._ask(asked)
            return
        if len(self.consumers) >= MAX_CONSUMERS:
            raise WireError(HardCode.NOT_ALLOWED, f"reached maximum ({MAX_CONSUMERS}) of consumers per channel")
        channel.connection.demand(Permission.READ, "queue", name)
        channel.connection.vhost.find_queue(name, channel.connection)
        priority = _priority(asked.arguments)
        channel.after_writes(lambda: self._consume(name, asked, priority), methods.BasicConsume.KEY)

    def _consume(self, name: bytes, asked: methods.BasicConsume, priority: int) -> None:
        """What was published before is for the consumers that waited for it."""
        channel = self._channel
        queue = channel.connection.vhost.find_queue(name, channel.connection)
        queue.index.serve(channel.connection.now())
        consumer = Consumer(
            asked.consumer_tag or _new_tag(),
            self,
            no_ack=asked.no_ack,
            exclusive=asked.exclusive,
            priority=priority,
            credit=Credit(self._prefetch),
            shared=self._shared,
        )
        queue.index.consume(consumer)
        self.consumers[consumer.tag] = consumer
        self._queues[consumer] = queue
        if not asked.no_wait:
            channel.answer(methods.BasicConsumeOk(consumer.tag))

    def cancel(self, payload: bytes) -> None:
        """basic.cancel; a consumer that is not there is no error."""
        asked = methods.BasicCancel.decode(payload)
        self._channel.after_writes(lambda: self._cancel(asked), methods.BasicCancel.KEY)

    def _cancel(self, asked: methods.BasicCancel) -> None:
        """The consumer still gets what was published before."""
        channel = self._channel
        consumer = self.consumers.get(asked.consumer_tag)
        if consumer is not None:
            self._queues[consumer].index.serve(channel.connection.now())
            del self.consumers[consumer.tag]
            self._leave(consumer)
        if self._asking and self._asking[0] == asked.consumer_tag:
            self._ask_no_more()
        if not asked.no_wait:
            channel.answer(methods.BasicCancelOk(asked.consumer_tag))

    def _leave(self, consumer: Consumer) -> None:
        """A consumer leaves its queue, which goes with the last one if it is to."""
        queue = self._queues.pop(consumer, None)
        connection = self._channel.connection
        if queue is not None and queue.index.cancel(consumer, connection.now()) and queue.spec.auto_delete:
            connection.remove(connection.vhost.remove_queue(queue))

    def cancelled(self, consumer: Consumer) -> None:
        """The queue of *consumer* is gone."""
        if self._queues.pop(consumer, None) is None:
            return  # the client has cancelled it before: its tag may be another one's now
        self.consumers.pop(consumer.tag, None)
        channel = self._channel
        if channel.may_go_on() and channel.connection.tells_of_cancelled_consumers:
            channel.answer(methods.BasicCancel(consumer.tag, no_wait=True))

    # -- direct replies

    def _ask(self, asked: methods.BasicConsume) -> None:
        """Consume from the pseudo-queue of direct replies: one consumer of a channel may, and acknowledges nothing."""
        if not asked.no_ack:
            raise XaError(ReplyCode.PRECONDITION_FAILED, "reply consumer cannot acknowledge")
        if self._asking is not None:
            raise XaError(ReplyCode.PRECONDITION_FAILED, "reply consumer already set")
        channel = self._channel
        tag = asked.consumer_tag or _new_tag()
        self._asking = tag, channel.connection.direct.wait(channel.connection.who.vhost, self)
        if not asked.no_wait:
            channel.answer(methods.BasicConsumeOk(tag))

    def _ask_no_more(self) -> None:
        if self._asking is not None:
            connection = self._channel.connection
            connection.direct.leave(connection.who.vhost, self._asking[1])
            self._asking = None

    @property
    def reply_address(self) -> bytes:
        """Where replies to this channel go.

        Raises:
            XaError: 406, it waits for none.
        """
        if self._asking is None:
            raise XaError(ReplyCode.PRECONDITION_FAILED, "fast reply consumer does not exist")
        return self._asking[1]

    def reply(self, message: HeldPublish) -> None:
        """A direct reply has come."""
        assert self._asking is not None, "the address is known for as long as the consumer is there"
        channel = self._channel
        if self._outbox.unsent > MAX_UNREAD_REPLIES:
            _log.warning("a direct reply is dropped", connection=channel.connection.id, channel=channel.number)
            return
        self._outbox.send(
            content.message(
                _deliver(channel.number, self._asking[0], self.unsettled.next_tag(), False, b"", message.routing_key),
                channel.number,
                message.properties,
                message.body,
                channel.connection.frame_max,
            )
        )

    # -- get

    def get(self, payload: bytes) -> None:
        """basic.get: behind what was published before it."""
        asked = methods.BasicGet.decode(payload)
        channel = self._channel
        name = channel.queue_name(asked.queue)
        channel.connection.demand(Permission.READ, "queue", name)
        channel.connection.vhost.find_queue(name, channel.connection)
        channel.after_writes(lambda: self._get(name, asked.no_ack), methods.BasicGet.KEY)

    def _get(self, name: bytes, no_ack: bool) -> None:
        channel = self._channel
        queue = channel.connection.vhost.find_queue(name, channel.connection)
        if not no_ack and len(self.unsettled) >= MAX_UNACKED:
            raise XaError(ReplyCode.PRECONDITION_FAILED, f"{MAX_UNACKED} deliveries are not acknowledged: settle some")
        channel.occupy()
        getter = Get(self, no_ack)
        self._getting = getter, queue
        queue.index.get(getter, channel.connection.now())

    def got(self, getter: Get, found: tuple[Delivery, StoredMessage] | None, remaining: int) -> None:
        """The answer to a basic.get. What waits behind it goes on later, since it may turn to the index."""
        channel = self._channel
        self._getting = None
        if found is None:
            frame = methods.BasicGetEmpty().frame(channel.number)
        else:
            delivery, message = found
            got = _get_ok(
                channel.number,
                self.unsettled.next_tag() if getter.no_ack else self.unsettled.add(delivery),
                delivery.redelivered,
                message.exchange,
                message.routing_key,
                remaining,
            )
            frame = content.message(got, channel.number, message.properties, message.body, channel.connection.frame_max)
        channel.send(frame)
        asyncio.get_running_loop().call_soon(channel.finish)

    # -- settling

    def ack(self, payload: bytes) -> None:
        """basic.ack."""
        self._settle(methods.BasicAck.decode(payload), Settlement.ACK)

    def nack(self, payload: bytes) -> None:
        """basic.nack."""
        settle = methods.BasicNack.decode(payload)
        self._settle(settle, Settlement.REQUEUE if settle.requeue else Settlement.REJECT)

    def reject(self, payload: bytes) -> None:
        """basic.reject."""
        settle = methods.BasicReject.decode(payload)
        self._settle(settle, Settlement.REQUEUE if settle.requeue else Settlement.REJECT)

    def _settle(self, settle: methods.Settle, how: Settlement) -> None:
        was_full = self.full
        deliveries = self.unsettled.take(settle)
        if deliveries:
            self._channel.context.settle(deliveries, how)
        if was_full:
            self.resume()

    def recover(self, payload: bytes, *, answered: bool) -> None:
        """basic.recover and recover-async: as RabbitMQ, messages always go back to their queues."""
        if not methods.BasicRecover.decode(payload).requeue:
            raise WireError(HardCode.NOT_IMPLEMENTED, "requeue=false")
        self._channel.occupy()
        self._channel.connection.slices.run(self._recover(answered))

    def _recover(self, answered: bool) -> Iterator[None]:
        channel = self._channel
        yield from self._return_all()
        channel.finish(methods.BasicRecoverOk().frame(channel.number) if answered else b"")
        self.resume()

    def _return_all(self) -> Iterator[None]:
        deliveries = list(self.unsettled.take_all().values())
        return return_slowly(deliveries, self._channel.connection.now)

    def flow(self, active: bool) -> None:
        """channel.flow."""
        self._active = active
        self._channel.answer(methods.ChannelFlowOk(active))
        self.resume()

    def let_go(self) -> None:
        """The channel is gone: its consumers too, and what is not settled returns to the queues."""
        if self._getting is not None:
            getter, queue = self._getting
            self._getting = None
            queue.index.cancel_get(getter)
        self._ask_no_more()
        self._active = False
        self._channel.connection.slices.run(self._let_go())

    def _let_go(self) -> Iterator[None]:
        consumers, self.consumers = self.consumers, {}
        returning = self._return_all()
        next(returning)  # what they have comes before the rest, for those who are active behind them
        # First the consumers: what is given back must not be delivered to them again.
        for consumer in consumers.values():
            self._leave(consumer)
            yield
        yield from returning


def _new_tag() -> bytes:
    return b"amq.ctag-" + urlsafe_b64encode(token_bytes(16)).rstrip(b"=")


def _priority(arguments: bytes) -> int:
    """x-priority."""
    entry = first_of_each(arguments).get(_PRIORITY) if arguments else None
    if entry is None:
        return 0
    number = integer(entry)
    if number is None:
        raise XaError(
            ReplyCode.PRECONDITION_FAILED, f"invalid arg 'x-priority': expected integer, got {kind_name(entry)}"
        )
    return number
