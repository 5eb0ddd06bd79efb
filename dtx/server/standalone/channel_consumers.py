"""Consumers, basic.get and unsettled deliveries of one channel."""

import asyncio
from base64 import urlsafe_b64encode
from collections.abc import Iterable, Iterator
from itertools import takewhile
from secrets import token_bytes
from typing import Final, Generic, TypeVar

from dtx.auth.permissions import Permission
from dtx.log.changes import StoredMessage
from dtx.server.limits import MAX_CONSUMERS, MAX_UNACKED, MAX_UNREAD_REPLIES
from dtx.server.standalone.answer_order import ChannelOrder
from dtx.server.standalone.client import Client
from dtx.server.standalone.contexts import Context, Settlement
from dtx.server.standalone.direct_replies import REPLY_TO
from dtx.store.postgres.arguments import first_of_each, integer, kind_name, text
from dtx.store.postgres.consumers import Consumer, Credit, QueueDelivery, return_slowly
from dtx.store.postgres.exchanges import Queue
from dtx.store.work import HeldPublish
from dtx.telemetry import get_logger
from dtx.wire.amqp09.codec import packer
from dtx.wire.amqp09.errors import HardCode, WireError
from dtx.wire.amqp09.methods import (
    BasicAck,
    BasicCancel,
    BasicCancelOk,
    BasicConsume,
    BasicConsumeOk,
    BasicDeliver,
    BasicGet,
    BasicGetEmpty,
    BasicGetOk,
    BasicQos,
    BasicQosOk,
    BasicRecover,
    BasicRecoverAsync,
    BasicRecoverOk,
    BasicReject,
    ChannelFlowOk,
    Settle,
)
from dtx.xa.codes import ReplyCode, XaError

_log = get_logger(part="channel")

_PRIORITY: Final = b"x-priority"
_deliver_frame: Final = packer(BasicDeliver)
_get_ok_frame: Final = packer(BasicGetOk)


ALL: Final = 0
"""With ``multiple``: "the delivery tag is zero … acknowledgement of all outstanding messages"."""

T = TypeVar("T")


class Unsettled(Generic[T]):
    """The unsettled deliveries of a channel, in the order of their tags."""

    __slots__ = ("_deliveries", "_next")

    def __init__(self) -> None:
        self._deliveries: dict[int, T] = {}
        self._next = 1

    def __len__(self) -> int:
        return len(self._deliveries)

    def next_tag(self) -> int:
        """A tag for a delivery without acknowledgement. "The delivery tag is valid only within the channel"."""
        tag = self._next
        self._next += 1
        return tag

    def add(self, delivery: T) -> int:
        """Keep *delivery*, and return its tag."""
        tag = self._next
        self._next = tag + 1
        self._deliveries[tag] = delivery
        return tag

    def take(self, wanted: int, *, multiple: bool) -> dict[int, T]:
        """Remove and return the deliveries that a settlement names, by their tags.

        Args:
            wanted: delivery tag.
            multiple: the settlement names all deliveries up to that tag.

        Raises:
            XaError: 406, the tag is not outstanding.
        """
        known = self._deliveries
        if not multiple:
            delivery = known.pop(wanted, None)
            if delivery is None:
                raise _unknown(wanted)
            return {wanted: delivery}
        if wanted == ALL:
            return self.take_all()
        if wanted not in known:
            raise _unknown(wanted)
        return {tag: known.pop(tag) for tag in list(takewhile(wanted.__ge__, known))}

    def take_all(self) -> dict[int, T]:
        """Remove and return all deliveries."""
        found, self._deliveries = self._deliveries, {}
        return found

    def restore(self, deliveries: Iterable[tuple[int, T]]) -> None:
        """Keep *deliveries* again. tx.rollback does "not redeliver" them, so the client must settle them again."""
        self._deliveries.update(deliveries)
        self._deliveries = dict(sorted(self._deliveries.items()))


class Get:
    """One basic.get.

    Args:
        consuming: the consumers of the channel, which send the answer.
        no_ack: the message is settled when it is sent.
    """

    __slots__ = ("_consuming", "no_ack")

    def __init__(self, consuming: "ChannelConsumers", no_ack: bool) -> None:
        self._consuming = consuming
        self.no_ack = no_ack

    def got(self, found: tuple[QueueDelivery, StoredMessage] | None, remaining: int) -> None:
        """Send the answer."""
        self._consuming.got(self, found, remaining)


class ChannelConsumers:
    """The consumers of one channel. This object is their sink.

    Args:
        client: the owner of the channel.
        order: the order of the channel.
    """

    __slots__ = (
        "_active",
        "_asking",
        "_client",
        "_getting",
        "_order",
        "_outbox",
        "_prefetch",
        "_queues",
        "_shared",
        "consumers",
        "unsettled",
    )

    def __init__(self, client: Client, order: ChannelOrder) -> None:
        self._client = client
        self._order = order
        self._outbox = client.outbox
        self.consumers: dict[bytes, Consumer] = {}
        self.unsettled: Unsettled[QueueDelivery] = Unsettled()
        self._queues: dict[Consumer, Queue] = {}
        self._active = True
        """channel.flow"""
        self._prefetch = 0
        self._shared = Credit()
        self._getting: tuple[Get, Queue] | None = None
        self._asking: tuple[bytes, bytes] | None = None
        """Tag and reply address of the consumer of direct replies, if there is one."""

    @property
    def place(self) -> tuple[int, int]:
        """Numbers of the connection and the channel."""
        return self._order.place

    @property
    def prefetch(self) -> tuple[int, int]:
        """The limits of basic.qos for each later consumer, and for the channel; 0 for none."""
        return self._prefetch, self._shared.limit

    # -- the sink

    @property
    def full(self) -> bool:
        """Whether nothing can be delivered now."""
        return not self._outbox.has_room or not self._active or len(self.unsettled) >= MAX_UNACKED

    def deliver(self, consumer: Consumer, delivery: QueueDelivery, message: StoredMessage) -> None:
        """basic.deliver."""
        unsettled, order = self.unsettled, self._order
        tag = unsettled.next_tag() if consumer.no_ack else unsettled.add(delivery)
        frame = _deliver_frame(
            order.number, consumer.tag, tag, delivery.redelivered, message.exchange, message.routing_key
        )
        order.engine.send_content(frame, message.properties, message.body)
        self._outbox.announce(len(frame) + len(message.properties) + len(message.body))

    def resume(self) -> None:
        """Resume the consumers, if the sink has room again."""
        if not self.full:
            for consumer in list(self.consumers.values()):
                consumer.resume()

    # -- consumers

    def qos(self, qos: BasicQos) -> None:
        """basic.qos, as in RabbitMQ: for each later consumer, or (global) for all consumers of the channel together."""
        if qos.prefetch_size:
            raise WireError(HardCode.NOT_IMPLEMENTED, f"prefetch_size!=0 ({qos.prefetch_size})")
        if qos.global_qos:
            self._shared.change(qos.prefetch_count)
        else:
            self._prefetch = qos.prefetch_count
        self._order.send(BasicQosOk().frame(self._order.number))

    def consume(self, asked: BasicConsume, name: bytes) -> None:
        """basic.consume of the queue *name*."""
        client = self._client
        if asked.consumer_tag in self.consumers or (self._asking and self._asking[0] == asked.consumer_tag):
            raise WireError(HardCode.NOT_ALLOWED, f"attempt to reuse consumer tag '{text(asked.consumer_tag)}'")
        if name == REPLY_TO:
            self._ask(asked)
            return
        if len(self.consumers) >= MAX_CONSUMERS:
            raise WireError(HardCode.NOT_ALLOWED, f"reached maximum ({MAX_CONSUMERS}) of consumers per channel")
        client.require(Permission.READ, "queue", name)
        client.vhost.find_queue(name, client)
        priority = _priority(asked.arguments)
        self._order.after_writes(lambda: self._consume(name, asked, priority), BasicConsume.KEY)

    def _consume(self, name: bytes, asked: BasicConsume, priority: int) -> None:
        """Start the consumer. Messages published earlier go to the consumers that waited for them."""
        queue = self._client.vhost.find_queue(name, self._client)
        queue.index.serve(self._client.now())
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
            self._order.send(BasicConsumeOk(consumer.tag).frame(self._order.number))

    def cancel(self, asked: BasicCancel) -> None:
        """basic.cancel. An unknown consumer tag is not an error."""
        self._order.after_writes(lambda: self._cancel(asked), BasicCancel.KEY)

    def _cancel(self, asked: BasicCancel) -> None:
        """Stop the consumer. It still gets messages that were published before."""
        consumer = self.consumers.get(asked.consumer_tag)
        if consumer is not None:
            self._queues[consumer].index.serve(self._client.now())
            del self.consumers[consumer.tag]
            self._leave(consumer)
        if self._asking and self._asking[0] == asked.consumer_tag:
            self._stop_replies()
        if not asked.no_wait:
            self._order.send(BasicCancelOk(asked.consumer_tag).frame(self._order.number))

    def _leave(self, consumer: Consumer) -> None:
        """Remove a consumer from its queue. The last one to leave deletes an auto-delete queue."""
        queue = self._queues.pop(consumer, None)
        client = self._client
        if queue is not None and queue.index.cancel(consumer, client.now()) and queue.spec.auto_delete:
            client.remove(client.vhost.remove_queue(queue))

    def cancelled(self, consumer: Consumer) -> None:
        """The queue of *consumer* was deleted."""
        if self._queues.pop(consumer, None) is None:
            return  # the client has cancelled it: another consumer may have its tag now
        self.consumers.pop(consumer.tag, None)
        if self._client.consumer_cancel_notify:
            self._order.send(BasicCancel(consumer.tag, no_wait=True).frame(self._order.number))

    # -- direct replies

    def _ask(self, asked: BasicConsume) -> None:
        """Consume from the pseudo-queue of direct replies: one consumer per channel, without acknowledgements."""
        if not asked.no_ack:
            raise XaError(ReplyCode.PRECONDITION_FAILED, "reply consumer cannot acknowledge")
        if self._asking is not None:
            raise XaError(ReplyCode.PRECONDITION_FAILED, "reply consumer already set")
        tag = asked.consumer_tag or _new_tag()
        self._asking = tag, self._client.parts.direct.wait(self._client.who.vhost, self)
        if not asked.no_wait:
            self._order.send(BasicConsumeOk(tag).frame(self._order.number))

    def _stop_replies(self) -> None:
        if self._asking is not None:
            self._client.parts.direct.leave(self._client.who.vhost, self._asking[1])
            self._asking = None

    @property
    def reply_address(self) -> bytes:
        """The address for replies to this channel.

        Raises:
            XaError: 406, the channel has no consumer of direct replies.
        """
        if self._asking is None:
            raise XaError(ReplyCode.PRECONDITION_FAILED, "fast reply consumer does not exist")
        return self._asking[1]

    def reply(self, message: HeldPublish) -> None:
        """Deliver a direct reply."""
        assert self._asking is not None, "the reply address exists only while its consumer does"
        if self._outbox.unsent > MAX_UNREAD_REPLIES:
            _log.warning("a direct reply is dropped", connection=self._client.connection, channel=self._order.number)
            return
        tag, order = self.unsettled.next_tag(), self._order
        frame = _deliver_frame(order.number, self._asking[0], tag, False, b"", message.routing_key)
        order.send_content(frame, message.properties, message.body)

    # -- get

    def get(self, asked: BasicGet, name: bytes) -> None:
        """basic.get of the queue *name*. It waits until earlier publishes are durable."""
        client = self._client
        client.require(Permission.READ, "queue", name)
        client.vhost.find_queue(name, client)
        self._order.after_writes(lambda: self._get(name, asked.no_ack), BasicGet.KEY)

    def _get(self, name: bytes, no_ack: bool) -> None:
        queue = self._client.vhost.find_queue(name, self._client)
        if not no_ack and len(self.unsettled) >= MAX_UNACKED:
            raise XaError(ReplyCode.PRECONDITION_FAILED, f"{MAX_UNACKED} deliveries are not acknowledged: settle some")
        self._order.occupy()
        getter = Get(self, no_ack)
        self._getting = getter, queue
        queue.index.get(getter, self._client.now())

    def got(self, getter: Get, found: tuple[QueueDelivery, StoredMessage] | None, remaining: int) -> None:
        """Answer a basic.get. Later methods run in another turn, because they may call the index."""
        order = self._order
        self._getting = None
        if found is None:
            order.send(BasicGetEmpty().frame(order.number))
        else:
            delivery, message = found
            tag = self.unsettled.next_tag() if getter.no_ack else self.unsettled.add(delivery)
            frame = _get_ok_frame(
                order.number, tag, delivery.redelivered, message.exchange, message.routing_key, remaining
            )
            order.send_content(frame, message.properties, message.body)
        asyncio.get_running_loop().call_soon(order.finish)

    # -- settling

    def settle(self, method: Settle, context: Context) -> None:
        """basic.ack, basic.nack or basic.reject: *context* settles the deliveries."""
        how = Settlement.ACK
        if not isinstance(method, BasicAck):
            how = Settlement.REQUEUE if method.requeue else Settlement.REJECT
        was_full = self.full
        multiple = not isinstance(method, BasicReject) and method.multiple
        deliveries = self.unsettled.take(method.delivery_tag, multiple=multiple)
        if deliveries:
            context.settle(deliveries, how)
        if was_full:
            self.resume()

    def recover(self, method: BasicRecover | BasicRecoverAsync) -> None:
        """basic.recover and recover-async. As in RabbitMQ, messages always return to their queues."""
        if not method.requeue:
            raise WireError(HardCode.NOT_IMPLEMENTED, "requeue=false")
        self._order.occupy()
        self._client.slices.run(self._recover(isinstance(method, BasicRecover)))

    def _recover(self, answered: bool) -> Iterator[None]:
        order = self._order
        yield from self._return_all()
        order.finish(BasicRecoverOk().frame(order.number) if answered else b"")
        self.resume()

    def _return_all(self) -> Iterator[None]:
        deliveries = list(self.unsettled.take_all().values())
        return return_slowly(deliveries, self._client.now, limited=True)

    def flow(self, active: bool) -> None:
        """channel.flow."""
        self._active = active
        self._order.send(ChannelFlowOk(active).frame(self._order.number))
        self.resume()

    def shut_down(self) -> None:
        """End the channel's consumers, and return unsettled messages to their queues."""
        if self._getting is not None:
            getter, queue = self._getting
            self._getting = None
            queue.index.cancel_get(getter)
        self._stop_replies()
        self._active = False
        self._client.slices.run(self._release())

    def _release(self) -> Iterator[None]:
        consumers, self.consumers = self.consumers, {}
        returning = self._return_all()
        next(returning)  # suspends the queues: the next active consumers get these messages before the rest
        # Remove the consumers first: they must not get returned messages again.
        for consumer in consumers.values():
            self._leave(consumer)
            yield
        yield from returning


def _new_tag() -> bytes:
    return b"amq.ctag-" + urlsafe_b64encode(token_bytes(16)).rstrip(b"=")


def _priority(arguments: bytes) -> int:
    entry = first_of_each(arguments).get(_PRIORITY) if arguments else None
    if entry is None:
        return 0
    number = integer(entry)
    if number is None:
        raise XaError(
            ReplyCode.PRECONDITION_FAILED, f"invalid arg 'x-priority': expected integer, got {kind_name(entry)}"
        )
    return number


def _unknown(tag: int) -> XaError:
    return XaError(ReplyCode.PRECONDITION_FAILED, f"unknown delivery tag {tag}")
